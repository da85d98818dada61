"""Answers of many families, read letter by letter and as a model's tokens: reasoning, calls and
both, by templates in the style of the published ones; and answers that are not as a model should
write them."""

import json
from dataclasses import replace

import pytest
from answer_templates import PUBLISHED
from serving import TOKENIZER
from test_serve_tools import BY_NAME, ONE, TOOLS, TWO, WRITERS
from tokenizers import Tokenizer
from tool_templates import CALL_TEMPLATES

from hotsplit.errors import HotsplitError
from hotsplit.runtime.answers.answer_reader import AnswerReader, CallRules
from hotsplit.runtime.answers.call_style import (
    CallStyle,
    call_style,
    with_descriptions,
    with_responses,
)
from hotsplit.runtime.answers.formats import FORMATS, format_of
from hotsplit.runtime.generate.generation import Token
from hotsplit.runtime.text.chat_template import ChatTemplate
from hotsplit.runtime.text.codec import TextCodec
from hotsplit.runtime.text.template_process import TemplateProcess
from hotsplit.serve.answers import Voice, finish_reason
from hotsplit.serve.responses_requests import ResponsesBody, chat_fields
from hotsplit.serve.text_requests import Syntax
from hotsplit.serve.texts import Report

THOUGHT = 'Is 2 < 3?\n\nYes: {"a": [1]} </thin <|ch [/T'
ANSWER = "It is.\n\n- <b>2</b> < 3\n- `f(x)` \u4f60\u597d"
RULES = CallRules(tools=TOOLS)
KINDS = ("tools", "reasoning", "both", "off")


@pytest.fixture(scope="module")
def process():
    process = TemplateProcess()
    yield process
    process.close()


@pytest.fixture(scope="module")
def codec():
    """A codec that has all marks as special tokens."""
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    tokenizer.add_special_tokens(sorted({mark for known in FORMATS for mark in known.marks}))
    return TextCodec(tokenizer, None, frozenset({0}))


def read(reader, pieces, is_cut=False):
    """(content, reasoning, calls, all text of the parts)."""
    parts = [part for piece in pieces for part in reader.push(piece)]
    parts += reader.flush(is_cut=is_cut)
    content, reasoning = (
        "".join(part.text for part in parts if part.kind == kind)
        for kind in ("content", "reasoning")
    )
    calls = [(call.name, json.loads(call.arguments)) for part in parts for call in part.calls]
    return content, reasoning, calls, "".join(part.text for part in parts)


def case_of(name, kind, process):
    """(format, marks that the prompt has opened, text of the answer, what it says)."""
    published = PUBLISHED[name]
    template = ChatTemplate(name="it", text=published.template, process=process)
    prompt = template.render(
        [{"role": "user", "content": "Is <think> a tag? [THINK] <|channel>thought"}],
        tools=[{"type": "function", "function": {"name": "f"}}],
        variables={"enable_thinking": kind in ("reasoning", "both")},
    )
    known = format_of(published.template)
    opened = known.opens_reasoning(prompt)
    thinks = kind in ("reasoning", "both") and published.think is not None
    begin, end = published.think or ("", "")
    thought = f"{'' if opened else begin}{THOUGHT}{end}" if thinks else ""
    calls = [ONE] if published.form == "gpt-oss" else [ONE, TWO]
    if kind in ("tools", "both"):
        write = WRITERS.get(published.calls or published.form, WRITERS["Hermes"])
        said = write(*calls)
        wanted = "", [(call["name"], call["arguments"]) for call in calls]
    else:
        before, behind = published.answer
        is_wrapped = thinks or before.startswith("<|")
        said, wanted = (f"{before}{ANSWER}{behind}" if is_wrapped else ANSWER), (ANSWER, [])
    if kind in ("tools", "off") and published.think is not None and opened is not None:
        pytest.skip("the model always thinks")
    return known, opened, thought + said, (wanted[0], THOUGHT if thinks else "", wanted[1])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", PUBLISHED)
def test_an_answer_of_a_family(name, kind, process, codec):
    known, opened, text, wanted = case_of(name, kind, process)
    assert known.name == PUBLISHED[name].form
    assert known.describes_tools is not bool(PUBLISHED[name].says)
    ids = codec.encode_rendered(text)
    stream = codec.stream((), dict(known.tokens_of(codec)))
    tokens = [*(stream.text(token_id) for token_id in ids), stream.flush()]
    for pieces in ([text], list(text), tokens):
        reader = AnswerReader(known, rules=RULES, opened=opened)
        *found, whole = read(reader, pieces)
        assert whole == text and tuple(found) == wanted
        reader = AnswerReader(known, rules=RULES, opened=opened, splits_reasoning=False)
        content, reasoning, _, whole = read(reader, pieces)
        assert whole == text and not reasoning and (wanted[1] in content)


FAULTS = {
    "the wrong end of reasoning": lambda known: replace(
        known, reasoning=tuple(replace(marks, end="</thought>") for marks in known.reasoning)
    ),
    "calls in another form": lambda known: replace(known, calls=BY_NAME["Llama 3"].calls),
    "a mark that is not known": lambda known: replace(known, hidden=known.hidden[1:]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_description_is_noticed(fault, process):
    known, opened, text, wanted = case_of("Command R7B", "both", process)
    if fault == "a mark that is not known":
        known, opened, text, wanted = case_of("Command R7B", "reasoning", process)
    reader = AnswerReader(FAULTS[fault](known), rules=RULES, opened=opened)
    *found, whole = read(reader, list(text))
    assert whole == text and tuple(found) != wanted


# ---- reasoning -----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize(
    "name, prompt, text, content, reasoning",
    [
        ("Gemma 4", "", "<|channel>thought\nIt is easy.<channel|>Paris", "Paris", "It is easy."),
        ("Gemma 4", "", "<|channel>thought\n<channel|>Paris", "Paris", ""),
        ("Gemma 4", "", "<|channel>thought<channel|>Paris", "Paris", ""),
        ("Gemma 4", "", "<|channel><|channel>thought\n<channel|>Paris", "Paris", ""),
        ("Gemma 4", "<tool_response|><|channel>thought\n", "So.<channel|>Paris", "Paris", "So."),
        ("Gemma 4", "<tool_response|><|channel>", "thought\nSo.\n<channel|>\nA", "A", "So."),
        ("Gemma 4", "", "<channel|>Paris", "Paris", ""),
        ("Gemma 4", "", "Well. <|channel>thought\nhm<channel|>Paris", "Well. Paris", "hm"),
        ("Gemma 4", "", "<|channel>thought\nnever ends", "", "never ends"),
        ("Mistral, newer", "", "[THINK]hm[/THINK]Paris", "Paris", "hm"),
        (
            "Mistral, newer",
            "",
            "[THINK]a [TOOL_CALLS]f[ARGS]{}[/THINK]b",
            "b",
            "a [TOOL_CALLS]f[ARGS]{}",
        ),
        ("Mistral", "", "<think>hm</think>Paris", "Paris", "hm"),
        ("Mistral", "[/INST][THINK]", "hm[/THINK]\n\nParis", "Paris", "hm"),
        (
            "Cohere 2",
            "",
            "<|START_THINKING|>hm<|END_THINKING|><|START_RESPONSE|>Paris<|END_RESPONSE|>",
            "Paris",
            "hm",
        ),
        ("Cohere 2", "", "<|START_RESPONSE|>Paris<|END_RESPONSE|>", "Paris", ""),
        ("Cohere 2", "<|START_THINKING|>", "hm<|END_THINKING|><|START_TEXT|>Paris", "Paris", "hm"),
        ("Cohere 2", "<|START_RESPONSE|>Par", "is<|END_RESPONSE|>", "is", ""),
        ("Granite", "", "<think>hm</think>\n<response>Paris</response>", "Paris", "hm"),
        ("Granite", "", "A <response>tag</response>", "A <response>tag</response>", ""),
        ("Hermes", "", "<think>a</think><response>b</response>", "<response>b</response>", "a"),
        ("Hermes", "<think>\n\n</think>\n\n", "</think>\n\nParis", "Paris", ""),
        ("Hermes", "", "<think>\nhm\n\n</think>\n\n  Paris", "Paris", "hm\n"),
        ("Granite 3.2", "", "Here is my thought process: hm Here is my response: b", "b", " hm "),
        ("described", "A: ", "<think>\na\n\n</think>\n", "", "a\n"),
        ("described", "A: <think>", "a</think>b", "b", "a"),
        ("described", "A: ", "\n<think>never ends", "", "never ends"),
        ("described", "A: ", "<thin", "<thin", ""),
        ("described", "A: ", "no <think>tag</think>", "no <think>tag</think>", ""),
        ("described", "A: ", "<think></think>", "", ""),
        (
            "described",
            "",
            "<|channel>thought\nhm<channel|>Paris",
            "<|channel>thought\nhm<channel|>Paris",
            "",
        ),
    ],
)
def test_reasoning_between_a_familys_marks(name, prompt, text, content, reasoning, size):
    known = BY_NAME[name]
    reader = AnswerReader(known, rules=RULES, opened=known.opens_reasoning(prompt))
    pieces = [text[n : n + size] for n in range(0, len(text), size)]
    assert read(reader, pieces) == (content, reasoning, [], text)


def test_marks_that_only_the_vocabulary_has():
    """A template that says nothing of reasoning, for a model that has its marks as tokens."""
    known = format_of("{{ messages }}", ["<|channel>", "<channel|>", "[THINK]"])
    reader = AnswerReader(known)
    assert read(reader, "<|channel>thought\nhm<channel|>Paris")[:2] == ("Paris", "hm")
    assert [marks.begin for marks in known.reasoning] == ["<think>", "<|channel>"]


def test_a_continued_message_opens_reasoning_only_by_its_own_mark():
    known = BY_NAME["Gemma 4"]
    assert known.opens_reasoning("<|channel>thought\nWe", "<|channel>thought\nWe") is not None
    for closed in ("Paris", "<|channel>thought\n<channel|>Par", "The mark <|channel>"):
        assert known.opens_reasoning(f"<|turn>model\n{closed}", closed) is None


@pytest.mark.parametrize(
    "name, tokens, num_reasoning",
    [
        (
            "gpt-oss",
            "<|channel|> analysis <|message|> h m <|end|> <|start|> assistant <|channel|> final"
            " <|message|> Paris",
            6,
        ),
        ("gpt-oss", "<|channel|> final <|message|> Paris", 0),
        ("Gemma 4", "<|channel> thought \n hm <channel|> Pa ris", 5),
        ("Hermes", "< think > hm </ think > \n Paris", 7),
        ("Hermes", "< b > Paris", 0),
    ],
)
def test_tokens_of_reasoning_are_counted_with_their_marks(name, tokens, num_reasoning):
    voice = Voice(Syntax(format=BY_NAME[name], rules=RULES, splits_reasoning=True))
    voice.say([Token(5, text) for text in tokens.split(" ")])
    voice.finish()
    assert voice.num_reasoning == num_reasoning


def test_what_ends_an_answer(codec):
    tokenizer = Tokenizer.from_str(codec.tokenizer.to_str())
    tokenizer.add_special_tokens(["<|user|>", "<end>"])
    plain = TextCodec(tokenizer, None, frozenset({0}))
    found, stops = BY_NAME["GLM-4.5"].with_ends(plain, "<end>")
    ids = {tokenizer.token_to_id("<|user|>"), tokenizer.token_to_id("<end>")}
    assert found.end_ids == {0} | ids and stops == ()
    found, stops = BY_NAME["Hermes"].with_ends(plain, "<none>")
    assert found is plain and stops == ("<none>",)


# ---- headers of channels -------------------------------------------------------------------------

ANALYSIS = "<|channel|>analysis<|message|>hm<|end|>"
START = "<|start|>assistant"
FINAL = "<|channel|>final<|message|>Paris"


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize(
    "text, content, reasoning, calls",
    [
        # Headers that end at a mark which no header has.
        (f"<|channel|>??<|end|>{START}{ANALYSIS}{START}{FINAL}", "Paris", "hm", []),
        (f"<|channel|>{START}{ANALYSIS}{START}{FINAL}", "Paris", "hm", []),
        (f"<|channel|>commentary<|end|>{START}{FINAL}<|return|>", "Paris", "", []),
        (f"{START}<|end|>{START}{FINAL}", "Paris", "", []),
        # The last channel counts.
        (
            "<|channel|>final<|channel|>analysis<|message|>hm<|end|>" + START + FINAL,
            "Paris",
            "hm",
            [],
        ),
        (f"<|channel|>analysis{FINAL}", "Paris", "", []),
        (
            f"<|channel|>analysis <|constrain|>json<|message|>hm<|end|>{START}{FINAL}",
            "Paris",
            "hm",
            [],
        ),
        # Recipients that are no functions.
        (f" to=user{FINAL}", "Paris", "", []),
        ("<|channel|>commentary to=assistant<|message|>Paris", "Paris", "", []),
        (f"<|channel|>analysis to=assistant<|message|>hm<|end|>{START}{FINAL}", "Paris", "hm", []),
        (
            f"<|channel|>commentary to=user<|message|>Wait.<|end|>{START}{FINAL}",
            "Wait.Paris",
            "",
            [],
        ),
        # Those that are.
        ('<|channel|>commentary to=f<|message|>{"a": 1}', "", "", [("f", {"a": 1})]),
        (
            '<|channel|>analysis to=functions.h code<|message|>{"a": 1}<|call|>',
            "",
            "",
            [("h", {"a": 1})],
        ),
        # No <|message|>.
        ("<|channel|>final Paris", "Paris", "", []),
        (f"<|channel|>final Paris is it.<|end|>{START}{FINAL}", "Paris is it.Paris", "", []),
        (f"<|channel|>final{' ' * 600}Paris", "Paris", "", []),
        ("<|channel|>anal", "", "", []),
        # Nothing or a type before it.
        ("<|message|>Paris", "Paris", "", []),
        ("<|constrain|>json<|message|>Paris", "Paris", "", []),
        (f"{ANALYSIS}{START}<|message|>Paris", "Paris", "hm", []),
        # A function in the final channel, which is the user's.
        (f"<|channel|>commentary to=h{FINAL}", "Paris", "", []),
        (f"{ANALYSIS}{START}", "", "hm", []),
    ],
)
def test_headers_that_are_malformed(text, content, reasoning, calls, size):
    known = BY_NAME["gpt-oss"]
    pieces = [text[n : n + size] for n in range(0, len(text), size)]
    *found, whole = read(AnswerReader(known, rules=RULES), pieces)
    assert whole == text and "<|" not in found[0]
    assert (found[0].strip(), *found[1:]) == (content, reasoning, calls)


def test_where_the_answer_proper_begins():
    """The place from which a grammar of the answer holds."""
    reader = AnswerReader(BY_NAME["gpt-oss"])
    for piece, is_there in (
        (ANALYSIS, False),
        (START, False),
        ("<|channel|>commentary<|message|>Wait.", False),
        (f"<|end|>{START}<|channel|>final", False),
        (" <|constrain|>json<|message|>", True),
        ("{", True),
        ("<|return|>", False),
    ):
        reader.push(piece)
        assert reader.is_answering is is_there, piece
    known = BY_NAME["Gemma 4"]
    reader = AnswerReader(known, opened=known.opens_reasoning("<|channel>thought\n"))
    assert not reader.is_answering
    reader.push("hm<channel|>")
    assert reader.is_answering


# ---- calls ---------------------------------------------------------------------------------------

SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "string"},
        "b": {"type": "integer"},
        "c": {"type": "array"},
        "d": {"type": ["object", "null"]},
        "e": {"type": "boolean"},
        "input": {"type": "string"},
    },
}
TYPED = CallRules(tools={"f": SCHEMA, "now": {}})


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize(
    "body, arguments",
    [
        # No closing tag before the next parameter, at the end, and none of the function.
        (
            "<parameter=a>\nx\n<parameter=b>\n2\n</parameter>\n</function>\n</tool_call>",
            {"a": "x", "b": 2},
        ),
        (
            "<parameter=a>\nx\n</parameter>\n<parameter=b>\n2\n</function>\n</tool_call>",
            {"a": "x", "b": 2},
        ),
        ("<parameter=a>\nx\n<parameter=b>\n2", {"a": "x", "b": 2}),
        ("<parameter=a>\nx\n</parameter>\n</tool_call>", {"a": "x"}),
        ("<parameter=a>\nx\n</parameter>", {"a": "x"}),
        ("<parameter=a>\nx\n</tool_call>", {"a": "x"}),
        ("<parameter=a>x<parameter=b>2<parameter=e>true</function>", {"a": "x", "b": 2, "e": True}),
        # Tags inside a value.
        (
            "<parameter=a>\n<parameter=zz>\n</function> and </tool_call>"
            " </parameter>!\n</parameter>\n</function>\n</tool_call>",
            {"a": "<parameter=zz>\n</function> and </tool_call> </parameter>!"},
        ),
        ("<parameter=a>\nx <parameter=a>\n</parameter></function>", {"a": "x <parameter=a>"}),
        # Null and nothing.
        (
            "<parameter=b>\nnull\n</parameter>\n<parameter=c>\n\n</parameter>\n<parameter=d>\nNone\n"
            "</parameter>\n<parameter=e></parameter></function>",
            {"b": None, "c": None, "d": None, "e": None},
        ),
        ("<parameter=a>\nnull\n</parameter></function>", {"a": "null"}),
        ("<parameter=a></parameter></function>", {"a": ""}),
        ("</tool_call>", {}),
    ],
)
def test_parameters_end_as_in_qwens_parser(body, arguments, size):
    text = f"<tool_call>\n<function=f>\n{body}"
    pieces = [text[n : n + size] for n in range(0, len(text), size)]
    found = read(AnswerReader(BY_NAME["Qwen-Coder"], rules=TYPED), pieces)
    assert found == ("", "", [("f", arguments)], text)


def test_a_call_behind_reasoning_without_an_end():
    known = BY_NAME["Qwen-Coder"]
    text = (
        "hm\n<tool_call>\n<function=f>\n<parameter=a>\nx\n</parameter>\n</function>\n</tool_call>"
    )
    reader = AnswerReader(known, rules=TYPED, opened=known.opens_reasoning("<think>\n"))
    assert read(reader, list(text))[:3] == ("", "hm\n", [("f", {"a": "x"})])
    reader = AnswerReader(known, rules=TYPED, opened=known.opens_reasoning("<think>\n"))
    assert read(reader, ["I write <tool_call> then.</think>So."])[:3] == (
        "So.",
        "I write <tool_call> then.",
        [],
    )


@pytest.mark.parametrize("name", ["Hermes", "Llama 3", "Mistral", "Granite", "Cohere 2"])
@pytest.mark.parametrize(
    "call, arguments",
    [
        ({"name": "f", "args": {"a": "x"}}, {"a": "x"}),
        ({"name": "f", "input": {"a": "x"}}, {"a": "x"}),
        ({"name": "f", "Arguments": {"a": "x"}}, {"a": "x"}),
        ({"name": "f", "a": "x", "b": 2}, {"a": "x", "b": 2}),
        ({"name": "f", "arguments": {}, "parameters": {"a": "x"}}, {"a": "x"}),
        ({"name": "f", "arguments": "", "parameters": {"a": "x"}}, {"a": "x"}),
        ({"name": "f", "arguments": {}, "a": "x"}, {"a": "x"}),
        ({"name": "f", "params": '{"a": "x"}'}, {"a": "x"}),
        ({"name": "f", "input": "x"}, {"input": "x"}),  # a parameter of this name
        ({"name": "f", "arguments": {"a": "x"}, "id": "1", "type": "function"}, {"a": "x"}),
        ({"tool_name": "f", "parameters": {"a": "x"}}, {"a": "x"}),
        ({"name": "f", "arguments": {"a": "x"}, "b": 2}, {"a": "x", "b": 2}),
        ({"name": "f", "arguments": {"a": "x"}, "why": "?"}, {"a": "x"}),
        ({"name": "now"}, {}),
        # What would be lost makes it a text.
        ({"name": "f", "z": 1}, None),
        ({"name": "f", "arguments": {"a": "x"}, "parameters": {"a": "y"}}, None),
        ({"name": "f", "arguments": {"a": "x"}, "a": "y"}, None),
        ({"name": "f", "arguments": ["x"]}, None),
        ({"name": "now", "city": "Paris"}, None),
    ],
)
def test_arguments_under_other_names(name, call, arguments):
    before, behind = {
        "Hermes": ("<tool_call>", "</tool_call>"),
        "Llama 3": ("", ""),
        "Mistral": ("[TOOL_CALLS] [", "]"),
        "Granite": ("<|tool_call|>[", "]"),
        "Cohere 2": ("<|START_ACTION|>[", "]<|END_ACTION|>"),
    }[name]
    text = f"{before}{json.dumps(call)}{behind}"
    *found, whole = read(AnswerReader(BY_NAME[name], rules=TYPED), list(text))
    assert whole == text
    if arguments is None:
        assert found == [text, "", []]
    else:
        assert found == ["", "", [(call.get("name", "f"), arguments)]]


@pytest.mark.parametrize("more", ["}", "}}", "]", "} }", "}]\n}"])
def test_brackets_too_many_are_no_content(more):
    text = f'<tool_call>\n{{"name": "now", "arguments": {{}}}}{more}\n</tool_call>ok'
    assert read(AnswerReader(BY_NAME["Hermes"], rules=TYPED), list(text))[0] == "ok"
    text = '<tool_call>{"name": "now", "arguments": {}} } and so'
    assert read(AnswerReader(BY_NAME["Hermes"], rules=TYPED), list(text))[0] == " } and so"


# ---- answers that a limit ends -------------------------------------------------------------------


@pytest.mark.parametrize("name", WRITERS)
def test_a_limit_ends_an_answer_anywhere(name):
    """Calls that were complete remain, nothing else becomes one, and no half of a closing mark is
    content."""
    text = WRITERS[name](ONE) if name == "gpt-oss" else WRITERS[name](ONE, TWO)
    wanted = [(call["name"], call["arguments"]) for call in (ONE, TWO)]
    for end in range(1, len(text)):
        voice = Voice(Syntax(format=BY_NAME[name], rules=RULES, splits_reasoning=True))
        output = voice.say([Token(5, text[:end])])
        output.add(voice.finish(report("max tokens")))
        assert finish_reason(output) == "length"
        calls = [(call.name, json.loads(call.arguments)) for call in output.calls]
        assert calls == wanted[: len(calls)], text[:end]
        content = output.content.strip()
        if calls and content:  # the beginning of another call, with its whole mark
            assert content.startswith((*BY_NAME[name].calls.begins, "{", "<|start|>", ";")), content


def report(stopped_by):
    return Report(
        stopped_by=stopped_by,
        prompt_tokens=1,
        cached_tokens=0,
        generated_tokens=1,
        queued_s=0,
        prompt_s=0,
        generated_s=0,
    )


def test_an_answer_that_the_model_ends_has_calls_as_its_reason():
    voice = Voice(Syntax(format=BY_NAME["Hermes"], rules=RULES))
    output = voice.say([Token(5, WRITERS["Hermes"](ONE))])
    output.add(voice.finish(report("end of text")))
    assert finish_reason(output) == "tool_calls"


# ---- earlier messages ----------------------------------------------------------------------------


def test_results_in_the_message_with_the_calls():
    """The first template of Gemma 4 reads them there."""
    calls = [{"id": "1", "function": {"name": "f"}}, {"id": "2", "function": {"name": "g"}}]
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "2", "content": "two"},
        {"role": "tool", "tool_call_id": "1", "content": "one"},
        {"role": "assistant", "content": "Three."},
    ]
    user, assistant = with_responses(messages)
    assert user == messages[0]
    assert assistant["content"] == "Three." and assistant["tool_calls"] == calls
    assert assistant["tool_responses"] == [
        {"name": "g", "response": "two"},
        {"name": "f", "response": "one"},
    ]
    assert messages[1] == {"role": "assistant", "content": "", "tool_calls": calls}


def test_a_template_that_refuses_a_tool_without_a_description(process):
    text = "{% for tool in tools or [] %}{{ '// ' + tool.function.description }}{% endfor %}"
    with_calls = CALL_TEMPLATES["gpt-oss"][0]
    template = ChatTemplate(name="it", text=text + with_calls, process=process)
    assert call_style(template) == CallStyle(has_descriptions=True)
    bare = [{"type": "function", "function": {"name": "f"}}]
    asked = [{"role": "user", "content": "?"}]
    with pytest.raises(HotsplitError, match="description"):
        template.render(asked, tools=bare)
    assert template.render(asked, tools=with_descriptions(bare)).startswith("// ")
    kept = {"name": "f", "description": "d"}
    assert with_descriptions([{"type": "function", "function": kept}])[0]["function"] == kept


BLOCKS = (
    "{% for message in messages %}{% if message.content is string %}"
    "{% if not message.content %}{{ raise_exception('empty') }}{% endif %}{{ message.content }}"
    "{% else %}{% for block in message.content %}{% if block['type'] == 'thinking' %}"
    "{{ '[THINK]' + block['thinking'] + '[/THINK]' }}{% else %}{{ block['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ '|' }}{% endfor %}"
)


@pytest.mark.parametrize(
    "message, rendered",
    [
        ({"content": "Paris", "reasoning_content": "hm"}, "[THINK]hm[/THINK]Paris|"),
        ({"content": "", "reasoning_content": "hm"}, "[THINK]hm[/THINK]|"),  # was interrupted
        ({"content": "Paris"}, "Paris|"),
        ({"content": "Paris", "reasoning_content": ""}, "Paris|"),
        ({"content": [{"type": "text", "text": "Paris"}], "reasoning_content": "hm"}, "Paris|"),
    ],
)
def test_reasoning_in_a_block_of_the_content(message, rendered, process):
    """The templates of Ministral 3 Reasoning and Magistral read it there alone."""
    template = ChatTemplate(name="it", text=BLOCKS, process=process)
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", **message}]
    assert template.render(messages) == f"?|{rendered}"
    asked = [{"role": "user", "content": "?", "reasoning_content": "hm"}]
    assert template.render(asked) == "?|"


def test_the_thoughts_of_a_response_go_to_what_follows_them():
    thought = {
        "type": "reasoning",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "hm"}],
    }
    hidden = {"type": "reasoning", "content": None, "encrypted_content": "gA"}
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "1", "output": "2"}
    user = {"role": "user", "content": "?"}
    answer = {"type": "message", "role": "assistant", "content": "Yes."}
    items = [user, thought, call, output, thought, answer, user, thought, user, hidden, answer]
    found = chat_fields(ResponsesBody(**{"input": items}))[0]["messages"]
    assert [message.get("reasoning_content") for message in found] == [
        None,
        "hm",
        None,
        "hm",
        None,
        None,
        None,
    ]
    assert found[1]["tool_calls"] and found[3]["content"] == "Yes."
