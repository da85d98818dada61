"""The formats in which models answer: one description a family.

A template tells its model how to answer, so the format is found by the template's text: reasoning
marks or channels, the form of tool calls, what ends an answer. Of a form of calls that is not known
here, or a template without tools, the tools are described in Hermes's words (see call_style)."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from hotsplit.runtime.answers import channels
from hotsplit.runtime.answers.calls import json_text
from hotsplit.runtime.answers.parsers import (
    DEEPSEEK_BEGIN,
    DEEPSEEK_CALL,
    DEEPSEEK_CALL_END,
    DEEPSEEK_END,
    DEEPSEEK_SEP,
    QUOTE,
    Parser,
    action,
    arg_tags,
    bare_keys,
    deepseek,
    granite,
    hermes,
    llama,
    mistral,
    python_calls,
    qwen_xml,
)
from hotsplit.runtime.text.chat_template import ChatTemplate
from hotsplit.runtime.text.codec import TextCodec

_WORD = re.compile(r"\w+")


@dataclass(frozen=True, kw_only=True)
class Reasoning:
    """The marks around reasoning. `label` may follow `begin`, and belongs to it. `cut`: what begins
    a call and ends reasoning whose own end is missing. `is_anywhere`: the marks are special tokens,
    so that reasoning may also begin behind other text; otherwise it begins an answer."""

    begin: str
    end: str
    label: str = ""
    cut: str = ""
    is_anywhere: bool = False

    def opened_by(self, prompt: str) -> "Reasoning | None":
        """These marks as an answer continues them if the prompt ends with the first one, without a
        label that is there already."""
        prompt = prompt.rstrip()
        if prompt.endswith(f"{self.begin}{self.label}"):
            return replace(self, label="")
        return self if prompt.endswith(self.begin) else None


def plain_text(value: object) -> str:
    """A string as it is, anything else as JSON."""
    return value if isinstance(value, str) else json_text(value)


def bare_key(key: str) -> str:
    """A key without quotes, or between tokens if it is no word."""
    return key if _WORD.fullmatch(key) else bare_text(key)


def bare_text(value: object) -> str:
    """A value whose strings are between tokens and whose keys have no quotes."""
    if isinstance(value, str):
        return f"{QUOTE}{value}{QUOTE}"
    if isinstance(value, Mapping):
        members = [f"{bare_key(key)}:{bare_text(part)}" for key, part in value.items()]
        return f"{{{','.join(members)}}}"
    if isinstance(value, list):
        return f"[{','.join(map(bare_text, value))}]"
    return json_text(value)


@dataclass(frozen=True, kw_only=True)
class CallForm:
    """A form of tool calls.

    How they are read: `begins`: the marks that begin calls, with their parsers; `first`: further
    ones, valid only where nothing but calls has come before. `separators`: characters between
    calls, besides white space. `marks`: texts that may be special tokens.

    How they are written, for a grammar: `call` between `begin` and `end`, several of them with
    `between`. `before` may come first. {name} stands for the name, {string} for the name as JSON,
    {object} for the arguments as JSON, {bare} for an object whose keys have no quotes, and {text}
    for any text up to the token that follows it; {keywords} for the arguments as Python's, with
    JSON as values; {parameters} for them one by one, each as `parameter` with {key} and {value}."""

    begins: Mapping[str, Parser] = field(default_factory=dict)
    first: Mapping[str, Parser] = field(default_factory=dict)
    separators: str = ""
    marks: tuple[str, ...] = ()
    call: str
    parameter: str = ""
    before: str = ""
    begin: str = ""
    between: str | None = "\n"  # None: only one call
    end: str = ""

    def text_of(self, calls: Sequence[tuple[str, Mapping[str, object]]]) -> str:
        """The text of calls: names with arguments."""
        between = self.between or ""
        texts = [
            self.call.format(
                name=name,
                string=json_text(name),
                object=json_text(arguments),
                bare=bare_text(arguments),
                keywords=", ".join(f"{key}={json_text(arguments[key])}" for key in arguments),
                parameters="".join(
                    self.parameter.format(key=key, value=plain_text(value))
                    for key, value in arguments.items()
                ),
            )
            for name, arguments in calls
        ]
        return f"{self.begin}{between.join(texts)}{self.end}"


THINK = Reasoning(begin="<think>", end="</think>")


@dataclass(frozen=True, kw_only=True)
class AnswerFormat:
    """What the models of a family write after the prompt.

    `in_template`: texts by which a template is known, and `not_in_template` others that it does not
    have. `hidden`: special tokens without a place in an answer. `wrapper`: marks that may be around
    the answer proper, behind reasoning. `ends`: tokens that end an answer,
    besides those of every model. `describes_tools`: the template does not tell the model how to
    call tools, so its tools have to be described."""

    name: str
    in_template: tuple[str, ...] = ()
    not_in_template: tuple[str, ...] = ()
    reasoning: tuple[Reasoning, ...] = (THINK,)
    hidden: tuple[str, ...] = ()
    wrapper: tuple[str, ...] = ()
    calls: CallForm
    has_channels: bool = False
    ends: tuple[str, ...] = ()
    describes_tools: bool = False

    def is_of(self, template: str) -> bool:
        return all(text in template for text in self.in_template) and not any(
            text in template for text in self.not_in_template
        )

    @property
    def marks(self) -> frozenset[str]:
        """All texts that may be special tokens and that a reader of the answer has to see."""
        if self.has_channels:
            return frozenset(channels.MARKS)
        reasoning = {mark for known in self.reasoning for mark in (known.begin, known.end)}
        return frozenset({*reasoning, *self.hidden, *self.calls.marks})

    def tokens_of(self, codec: TextCodec) -> tuple[tuple[int, str], ...]:
        """(id, text) of the marks that are special tokens of a vocabulary."""
        special = codec.special_texts.items()
        return tuple((token_id, text) for token_id, text in special if text in self.marks)

    def with_ends(
        self, codec: TextCodec, turn_end: str | None = None
    ) -> tuple[TextCodec, tuple[str, ...]]:
        """(codec whose end tokens end an answer, strings that also end it). `turn_end`: a
        template's own mark, which is a string if the vocabulary does not have it as a token."""
        ends = self.ends if turn_end is None else (*self.ends, turn_end)
        found = {end: codec.tokenizer.token_to_id(end) for end in ends}
        ids = {token_id for token_id in found.values() if token_id is not None}
        stops = (turn_end,) if turn_end is not None and found[turn_end] is None else ()
        return (replace(codec, end_ids=codec.end_ids | ids) if ids else codec), stops

    def opens_reasoning(self, prompt: str, continued: str = "") -> Reasoning | None:
        """The marks inside which the answer starts: the prompt has opened them or, where the answer
        continues a message, that message has, without closing them.

        Marks elsewhere, such as in a question, open nothing."""
        if not continued.strip():
            return next(filter(None, (marks.opened_by(prompt) for marks in self.reasoning)), None)
        for marks in self.reasoning:
            if continued.lstrip().startswith(marks.begin) and marks.end not in continued:
                return replace(marks, label="")
        return None


_OBJECT = '{{"name": {string}, "arguments": {object}}}'
_DEEPSEEK = {DEEPSEEK_BEGIN: deepseek, DEEPSEEK_CALL: deepseek}
_DEEPSEEK_MARKS = (DEEPSEEK_BEGIN, DEEPSEEK_CALL, DEEPSEEK_SEP, DEEPSEEK_CALL_END, DEEPSEEK_END)
_MISTRAL = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
_ARG_TAGS = tuple(
    f"<{end}{tag}>" for tag in ("tool_call", "arg_key", "arg_value") for end in ("", "/")
)

_CHANNEL = Reasoning(begin="<|channel>", label="thought", end="<channel|>", is_anywhere=True)
_BRACKETS = Reasoning(begin="[THINK]", end="[/THINK]", is_anywhere=True)
_START_END = Reasoning(begin="<|START_THINKING|>", end="<|END_THINKING|>", is_anywhere=True)

_STEPS = Reasoning(begin="Here are my reasoning steps:", end="[BEGIN FINAL RESPONSE]")
_SENTENCES = Reasoning(begin="Here is my thought process:", end="Here is my response:")

HERMES = CallForm(
    begins={"<tool_call>": hermes},
    marks=("<tool_call>", "</tool_call>"),
    call=f"<tool_call>\n{_OBJECT}\n</tool_call>",
)

_LISTED = CallForm(
    begins={"<|tool_call|>": granite, "<tool_call>": granite},
    marks=("<|tool_call|>", "<|/tool_call|>", "<tool_call>", "</tool_call>"),
    begin="<|tool_call|>[",
    call=_OBJECT,
    between=", ",
    end="]",
)

# In the order in which a template is compared with them; the last one is of any template.
FORMATS = (
    AnswerFormat(
        name="gpt-oss",
        in_template=("<|channel|>", "<|message|>"),
        has_channels=True,
        reasoning=(Reasoning(begin=channels.ANALYSIS, end="<|end|>", is_anywhere=True),),
        calls=CallForm(
            marks=channels.MARKS,
            before=f"{channels.ANALYSIS}{{text}}<|end|><|start|>assistant",
            call="<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{object}",
            between=None,
        ),
    ),
    AnswerFormat(
        name="Gemma 4",
        in_template=("<|tool_call>", "<tool_call|>"),
        reasoning=(_CHANNEL,),
        calls=CallForm(
            begins={"<|tool_call>": bare_keys},
            marks=("<|tool_call>", "<tool_call|>", QUOTE),
            call="<|tool_call>call:{name}{bare}<tool_call|>",
            between="",
        ),
    ),
    AnswerFormat(
        name="Cohere 2",
        in_template=("<|CHATBOT_TOKEN|>", "<|START_ACTION|>"),
        reasoning=(_START_END,),
        ends=("<|END_OF_TURN_TOKEN|>",),
        hidden=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
        calls=CallForm(
            begins={"<|START_ACTION|>": action},
            marks=("<|START_ACTION|>", "<|END_ACTION|>"),
            begin="<|START_ACTION|>[\n    ",
            between=",\n    ",
            end="\n]<|END_ACTION|>",
            call='{{"tool_call_id": "0", "tool_name": {string}, "parameters": {object}}}',
        ),
    ),
    AnswerFormat(
        name="GLM-4.5",
        in_template=("<tool_call>", "<arg_key>"),
        not_in_template=("><arg_value>",),
        ends=("<|user|>", "<|observation|>"),
        calls=CallForm(
            begins={"<tool_call>": arg_tags},
            marks=_ARG_TAGS,
            call="<tool_call>{name}\n{parameters}</tool_call>",
            parameter="<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n",
        ),
    ),
    AnswerFormat(
        name="GLM-4.7",
        in_template=("<tool_call>", "<arg_key>"),
        ends=("<|user|>", "<|observation|>"),
        calls=CallForm(
            begins={"<tool_call>": arg_tags},
            marks=_ARG_TAGS,
            call="<tool_call>{name}{parameters}</tool_call>",
            between="",
            parameter="<arg_key>{key}</arg_key><arg_value>{value}</arg_value>",
        ),
    ),
    AnswerFormat(
        name="Qwen-Coder",
        in_template=("<tool_call>", "<function=", "<parameter="),
        reasoning=(replace(THINK, cut="<tool_call>\n<function="),),
        calls=CallForm(
            begins={"<tool_call>": qwen_xml, "<function=": qwen_xml},
            marks=("<tool_call>", "</tool_call>"),
            call="<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>",
            parameter="<parameter={key}>\n{value}\n</parameter>\n",
        ),
    ),
    AnswerFormat(
        name="DeepSeek",
        in_template=(DEEPSEEK_CALL, "```json"),
        calls=CallForm(
            begins=_DEEPSEEK,
            marks=_DEEPSEEK_MARKS,
            begin=DEEPSEEK_BEGIN,
            end=DEEPSEEK_END,
            call=f"{DEEPSEEK_CALL}function{DEEPSEEK_SEP}{{name}}\n```json\n{{object}}\n```"
            + DEEPSEEK_CALL_END,
        ),
    ),
    AnswerFormat(
        name="DeepSeek 3.1",
        in_template=(DEEPSEEK_CALL,),
        calls=CallForm(
            begins=_DEEPSEEK,
            marks=_DEEPSEEK_MARKS,
            begin=DEEPSEEK_BEGIN,
            end=DEEPSEEK_END,
            between="",
            call=f"{DEEPSEEK_CALL}{{name}}{DEEPSEEK_SEP}{{object}}{DEEPSEEK_CALL_END}",
        ),
    ),
    AnswerFormat(
        name="Mistral",
        in_template=("[TOOL_CALLS]",),
        not_in_template=("[ARGS]",),
        reasoning=(_BRACKETS, THINK),
        calls=CallForm(
            begins={"[TOOL_CALLS]": mistral},
            marks=_MISTRAL,
            begin="[TOOL_CALLS] [",
            call=_OBJECT,
            between=", ",
            end="]",
        ),
    ),
    AnswerFormat(
        name="Mistral, newer",
        in_template=("[TOOL_CALLS]", "[ARGS]"),
        reasoning=(_BRACKETS, THINK),
        calls=CallForm(
            begins={"[TOOL_CALLS]": mistral},
            marks=_MISTRAL,
            call="[TOOL_CALLS]{name}[ARGS]{object}",
            between="",
        ),
    ),
    AnswerFormat(
        name="Granite 3.2",
        in_template=("<|tool_call|>", _SENTENCES.begin, _SENTENCES.end),
        reasoning=(_SENTENCES,),
        calls=_LISTED,
    ),
    AnswerFormat(
        name="Granite",
        in_template=("<|tool_call|>",),
        wrapper=("<response>", "</response>"),
        calls=_LISTED,
    ),
    AnswerFormat(
        name="OLMo 3",
        in_template=("<function_calls>",),
        calls=CallForm(
            begins={"<function_calls>": python_calls},
            marks=("<function_calls>", "</function_calls>"),
            begin="<function_calls>",
            call="{name}({keywords})",
            end="</function_calls>",
        ),
    ),
    AnswerFormat(
        name="Apriel",
        in_template=("<tool_calls>[",),
        reasoning=(_STEPS, THINK),
        hidden=("[END FINAL RESPONSE]",),
        calls=CallForm(
            begins={"<tool_calls>": hermes, "<tool_call>": hermes},
            marks=("<tool_calls>", "</tool_calls>"),
            begin="<tool_calls>[",
            call=_OBJECT,
            between=", ",
            end="]</tool_calls>",
        ),
    ),
    AnswerFormat(
        name="ERNIE 4.5",
        in_template=("<tool_call>", "<response>"),
        wrapper=("<response>", "</response>"),
        calls=HERMES,
    ),
    AnswerFormat(name="Hermes", in_template=("<tool_call>", "arguments"), calls=HERMES),
    AnswerFormat(
        name="Llama 3",
        in_template=("<|start_header_id|>", "parameters"),
        not_in_template=("<function=", ">>>"),
        calls=CallForm(
            begins={"<|python_tag|>": llama},
            first={"{": llama},
            separators=";,",
            marks=("<|python_tag|>",),
            call='{{"name": {string}, "parameters": {object}}}',
            between="; ",
        ),
    ),
    AnswerFormat(name="described", calls=HERMES, describes_tools=True),
)
DESCRIBED = FORMATS[-1]
# Marks that are reasoning's wherever a vocabulary has them as tokens, whatever the template says.
_AS_TOKENS = (_CHANNEL, _BRACKETS, _START_END)


def format_for(template: ChatTemplate, codec: TextCodec) -> AnswerFormat:
    """The format of a model's answers, by its template and its vocabulary."""
    added = codec.tokenizer.get_added_tokens_decoder().values()
    return format_of(template.tool_text or template.text, {token.content for token in added})


def format_of(template: str, tokens: Collection[str] = ()) -> AnswerFormat:
    """The format of a template's answers. `tokens`: texts of the vocabulary's added tokens, among
    which may be marks of reasoning that the template leaves out."""
    known = next(known for known in FORMATS if known.is_of(template))
    more = tuple(
        marks
        for marks in _AS_TOKENS
        if marks not in known.reasoning and {marks.begin, marks.end} <= {*tokens}
    )
    known = replace(known, reasoning=(*known.reasoning, *more))
    if "tools" in template or known.has_channels:
        return known
    # Hermes's form is described, but the model may write the one of its training.
    calls = replace(
        HERMES,
        begins={**known.calls.begins, **HERMES.begins},
        marks=(*known.calls.marks, *HERMES.marks),
        first=known.calls.first,
        separators=known.calls.separators,
    )
    return replace(known, calls=calls, describes_tools=True)
