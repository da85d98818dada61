"""The formats in which chat templates have their models write tool calls.

A template tells its model how to write a call, so the format is found by the template's text. If
none is found, the server tells the model itself (see described)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hotsplit.serve.tools.calls import json_text
from hotsplit.serve.tools.channels import BEGINS, ENDS, MESSAGE, ChannelSplitter
from hotsplit.serve.tools.parsers import (
    DEEPSEEK_BEGIN,
    DEEPSEEK_CALL,
    DEEPSEEK_CALL_END,
    DEEPSEEK_END,
    DEEPSEEK_SEP,
    Parser,
    deepseek,
    granite,
    hermes,
    llama,
    mistral,
    qwen_xml,
)
from hotsplit.serve.tools.splitter import CallRules, CallSplitter, Splitter


@dataclass(frozen=True, kw_only=True)
class Written:
    """How a model writes calls, for a grammar: `call` between `begin` and `end`, several of them
    with `between`. `before` may come first. {name} stands for the name, {string} for the name as
    JSON, {object} for the arguments as JSON, {parameters} for those as tags, and {text} for any
    text up to the token that follows it."""

    call: str
    before: str = ""
    begin: str = ""
    between: str | None = "\n"  # None: only one call
    end: str = ""

    def text_of(self, calls: Sequence[tuple[str, Mapping[str, object]]]) -> str:
        """The text of calls: names with arguments."""
        between = self.between or ""
        texts = [
            self.call.format(
                name=name, string=json_text(name), object=json_text(arguments),
                parameters="".join(map(_parameter, arguments.items())),
            )
            for name, arguments in calls
        ]  # fmt: skip
        return f"{self.begin}{between.join(texts)}{self.end}"


def _parameter(item: tuple[str, object]) -> str:
    key, value = item
    text = value if isinstance(value, str) else json_text(value)
    return f"<parameter={key}>\n{text}\n</parameter>\n"


@dataclass(frozen=True, kw_only=True)
class ToolFormat:
    """`in_template`: texts by which a template is known, and `not_in_template` others that it does
    not have. `marks`: texts that may be special tokens. The others are those of CallSplitter."""

    name: str
    in_template: tuple[str, ...]
    begins: Mapping[str, Parser]
    written: Written
    not_in_template: tuple[str, ...] = ()
    first: Mapping[str, Parser] = field(default_factory=dict)
    separators: str = ""
    marks: tuple[str, ...] = ()
    has_channels: bool = False

    def is_of(self, template: str) -> bool:
        return all(text in template for text in self.in_template) and not any(
            text in template for text in self.not_in_template
        )

    def splitter(self, rules: CallRules | None, *, splits_reasoning: bool) -> Splitter | None:
        """A splitter of an answer; None if there is nothing to split: `rules` is None, so that
        calls are not parsed, and there are no channels."""
        if self.has_channels:
            return ChannelSplitter(rules, splits_reasoning=splits_reasoning)
        if rules is None:
            return None
        return CallSplitter(self.begins, rules, first=self.first, separators=self.separators)


_OBJECT = '{{"name": {string}, "arguments": {object}}}'
_DEEPSEEK = {DEEPSEEK_BEGIN: deepseek, DEEPSEEK_CALL: deepseek}
_DEEPSEEK_MARKS = (DEEPSEEK_BEGIN, DEEPSEEK_CALL, DEEPSEEK_SEP, DEEPSEEK_CALL_END, DEEPSEEK_END)

# In the order in which a template is compared with them.
FORMATS = (
    ToolFormat(
        name="gpt-oss", in_template=("<|channel|>", "<|message|>"), begins={}, has_channels=True,
        marks=(*BEGINS, MESSAGE, *ENDS, "<|constrain|>"),
        written=Written(
            before="<|channel|>analysis<|message|>{text}<|end|><|start|>assistant",
            call="<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{object}",
            between=None,
        ),
    ),
    ToolFormat(
        name="Qwen-Coder", in_template=("<tool_call>", "<function=", "<parameter="),
        begins={"<tool_call>": qwen_xml, "<function=": qwen_xml},
        marks=("<tool_call>", "</tool_call>"),
        written=Written(
            call="<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"
        ),
    ),
    ToolFormat(
        name="DeepSeek", in_template=(DEEPSEEK_CALL, "```json"), begins=_DEEPSEEK,
        marks=_DEEPSEEK_MARKS,
        written=Written(
            begin=DEEPSEEK_BEGIN, end=DEEPSEEK_END,
            call=f"{DEEPSEEK_CALL}function{DEEPSEEK_SEP}{{name}}\n```json\n{{object}}\n```"
            + DEEPSEEK_CALL_END,
        ),
    ),
    ToolFormat(
        name="DeepSeek 3.1", in_template=(DEEPSEEK_CALL,), begins=_DEEPSEEK, marks=_DEEPSEEK_MARKS,
        written=Written(
            begin=DEEPSEEK_BEGIN, end=DEEPSEEK_END, between="",
            call=f"{DEEPSEEK_CALL}{{name}}{DEEPSEEK_SEP}{{object}}{DEEPSEEK_CALL_END}",
        ),
    ),
    ToolFormat(
        name="Mistral", in_template=("[TOOL_CALLS]",), not_in_template=("[ARGS]",),
        begins={"[TOOL_CALLS]": mistral}, marks=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
        written=Written(begin="[TOOL_CALLS] [", call=_OBJECT, between=", ", end="]"),
    ),
    ToolFormat(
        name="Mistral, newer", in_template=("[TOOL_CALLS]", "[ARGS]"),
        begins={"[TOOL_CALLS]": mistral}, marks=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
        written=Written(call="[TOOL_CALLS]{name}[ARGS]{object}", between=""),
    ),
    ToolFormat(
        name="Granite", in_template=("<|tool_call|>",),
        begins={"<|tool_call|>": granite, "<tool_call>": granite},
        marks=("<|tool_call|>", "<|/tool_call|>", "<tool_call>", "</tool_call>"),
        written=Written(begin="<|tool_call|>[", call=_OBJECT, between=", ", end="]"),
    ),
    ToolFormat(
        name="Apriel", in_template=("<tool_calls>[",),
        begins={"<tool_calls>": hermes, "<tool_call>": hermes},
        marks=("<tool_calls>", "</tool_calls>"),
        written=Written(begin="<tool_calls>[", call=_OBJECT, between=", ", end="]</tool_calls>"),
    ),
    ToolFormat(
        name="Hermes", in_template=("<tool_call>", "arguments"), not_in_template=("<arg_key>",),
        begins={"<tool_call>": hermes}, marks=("<tool_call>", "</tool_call>"),
        written=Written(call=f"<tool_call>\n{_OBJECT}\n</tool_call>"),
    ),
    ToolFormat(
        name="Llama 3", in_template=("<|start_header_id|>", "parameters"),
        not_in_template=("<function=", ">>>"),
        begins={"<|python_tag|>": llama}, first={"{": llama}, separators=";,",
        marks=("<|python_tag|>",),
        written=Written(
            call='{{"name": {string}, "parameters": {object}}}', between="; ",
        ),
    ),
)  # fmt: skip


DESCRIBED = next(known for known in FORMATS if known.name == "Hermes")


def format_of(template: str) -> ToolFormat | None:
    """The format of a template's calls; None if it has no tools, or their format is unknown. A
    template with channels has its format without tools, too."""
    found = next((known for known in FORMATS if known.is_of(template)), None)
    if found is not None and not found.has_channels and "tools" not in template:
        return None
    return found
