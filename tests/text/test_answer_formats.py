"""Answers of many families, read letter by letter and as a model's tokens: reasoning, calls and
both, by templates in the style of the published ones; and answers that are not as a model should
write them."""

import json
from dataclasses import replace

import pytest
from answer_templates import PUBLISHED
from call_writers import BY_NAME, ONE, RULES, TWO, WRITERS, calls_of, marked_codec, read
from case_tables import rows_of
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
from hotsplit.runtime.answers.formats import format_of
from hotsplit.runtime.generate.generation import Token
from hotsplit.runtime.text.chat_template import ChatTemplate
from hotsplit.runtime.text.codec import TextCodec
from hotsplit.serve.answers import Voice, finish_reason
from hotsplit.serve.responses_requests import ResponsesBody, chat_fields
from hotsplit.serve.text_requests import Syntax
from hotsplit.serve.texts import Report

THOUGHT = 'Is 2 < 3?\n\nYes: {"a": [1]} </thin <|ch [/T'
ANSWER = "It is.\n\n- <b>2</b> < 3\n- `f(x)` \u4f60\u597d"
pytest_plugins = ("text_fixtures",)
KINDS = ("tools", "reasoning", "both", "off")


@pytest.fixture(scope="module")
def codec():
    return marked_codec()


def read_in(known, text, opened=None, rules=RULES):
    """(content, reasoning, calls) of an answer, letter by letter or at once; every character is in
    one of its parts."""
    found = [
        read(AnswerReader(known, rules=rules, opened=opened), pieces) for pieces in (text, [text])
    ]
    assert found[0] == found[1] and found[0][3] == text
    return found[0][:3]


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
        wanted = "", calls_of(*calls)
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


# The format => the end of the prompt => the answer => its content => its reasoning. \n: a line end.
REASONING = r"""
Gemma 4 => => <|channel>thought\nIt is easy.<channel|>Paris => Paris => It is easy.
Gemma 4 => => <|channel>thought\n<channel|>Paris => Paris =>
Gemma 4 => => <|channel>thought<channel|>Paris => Paris =>
Gemma 4 => => <|channel><|channel>thought\n<channel|>Paris => Paris =>
Gemma 4 => <tool_response|><|channel>thought\n => So.<channel|>Paris => Paris => So.
Gemma 4 => <tool_response|><|channel> => thought\nSo.\n<channel|>\nA => A => So.
Gemma 4 => => <channel|>Paris => Paris =>
Gemma 4 => => Well. <|channel>thought\nhm<channel|>Paris => Well. Paris => hm
Gemma 4 => => <|channel>thought\nnever ends => => never ends
Mistral, newer => => [THINK]hm[/THINK]Paris => Paris => hm
Mistral, newer => => [THINK]a [TOOL_CALLS]f[ARGS]{}[/THINK]b => b => a [TOOL_CALLS]f[ARGS]{}
Mistral => => <think>hm</think>Paris => Paris => hm
Mistral => [/INST][THINK] => hm[/THINK]\n\nParis => Paris => hm
Cohere 2 => => <|START_RESPONSE|>Paris<|END_RESPONSE|> => Paris =>
Cohere 2 => <|START_THINKING|> => hm<|END_THINKING|><|START_TEXT|>Paris => Paris => hm
Cohere 2 => <|START_RESPONSE|>Par => is<|END_RESPONSE|> => is =>
Granite => => <think>hm</think>\n<response>Paris</response> => Paris => hm
Granite => => A <response>tag</response> => A <response>tag</response> =>
Hermes => => <think>a</think><response>b</response> => <response>b</response> => a
Hermes => <think>\n\n</think>\n\n => </think>\n\nParis => Paris =>
Hermes => => <think>\nhm\n\n</think>\n\n  Paris => Paris => hm\n
described => A: => <think>\na\n\n</think>\n => => a\n
described => A: <think> => a</think>b => b => a
described => A: => \n<think>never ends => => never ends
described => A: => <thin => <thin =>
described => A: => no <think>tag</think> => no <think>tag</think> =>
described => A: => <think></think> => =>
described => => <|channel>a<channel|>Paris => <|channel>a<channel|>Paris =>
"""


@pytest.mark.parametrize("name, prompt, text, content, reasoning", rows_of(REASONING))
def test_reasoning_between_a_familys_marks(name, prompt, text, content, reasoning):
    known = BY_NAME[name]
    prompt, text, reasoning = (x.replace(r"\n", "\n") for x in (prompt, text, reasoning))
    found = read_in(known, text, opened=known.opens_reasoning(prompt))
    assert found == (content, reasoning, [])


def test_spaces_around_the_words_that_granite_thinks_between():
    text = "Here is my thought process: hm Here is my response: b"
    assert read_in(BY_NAME["Granite 3.2"], text) == ("b", " hm ", [])


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


HARMONY = "<|channel|> analysis <|message|> h m <|end|> <|start|> assistant "


@pytest.mark.parametrize(
    "name, tokens, num_reasoning",
    [
        ("gpt-oss", HARMONY + "<|channel|> final <|message|> Paris", 6),
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


# Headers => the content => the reasoning => a call; START, FINAL and ANALYSIS as above.
HEADERS = r"""
<|channel|>??<|end|>START ANALYSIS START FINAL => Paris => hm =>
<|channel|>START ANALYSIS START FINAL => Paris => hm =>
<|channel|>commentary<|end|>START FINAL<|return|> => Paris => =>
START<|end|>START FINAL => Paris => =>
<|channel|>final<|channel|>analysis<|message|>hm<|end|>START FINAL => Paris => hm =>
<|channel|>analysisFINAL => Paris => =>
<|channel|>analysis <|constrain|>json<|message|>hm<|end|>START FINAL => Paris => hm =>
 to=userFINAL => Paris => =>
<|channel|>commentary to=assistant<|message|>Paris => Paris => =>
<|channel|>analysis to=assistant<|message|>hm<|end|>START FINAL => Paris => hm =>
<|channel|>commentary to=user<|message|>Wait.<|end|>START FINAL => Wait.Paris => =>
<|channel|>commentary to=f<|message|>{"a": 1} => => => f
<|channel|>analysis to=functions.h code<|message|>{"a": 1}<|call|> => => => h
<|channel|>final Paris => Paris => =>
<|channel|>final Paris is it.<|end|>START FINAL => Paris is it.Paris => =>
<|channel|>anal => => =>
<|message|>Paris => Paris => =>
<|constrain|>json<|message|>Paris => Paris => =>
ANALYSIS START<|message|>Paris => Paris => hm =>
<|channel|>commentary to=hFINAL => Paris => =>
ANALYSIS START => => hm =>
"""


@pytest.mark.parametrize("text, content, reasoning, name", rows_of(HEADERS))
def test_headers_that_are_malformed(text, content, reasoning, name):
    """Those that end at a mark which no header has; several channels, of which the last counts;
    recipients that are functions and others; no message, or nothing before it."""
    for word, marks in (("START", START), ("FINAL", FINAL), ("ANALYSIS", ANALYSIS)):
        text = text.replace(f" {word}", marks).replace(word, marks)
    calls = [(name, {"a": 1})] if name else []
    found = read_in(BY_NAME["gpt-oss"], text)
    assert "<|" not in found[0]
    assert (found[0].strip(), *found[1:]) == (content, reasoning, calls)


def test_a_header_as_long_as_a_text_is_one():
    text = f"<|channel|>final{' ' * 600}Paris"
    for pieces in (text, [text]):
        content, *_, whole = read(AnswerReader(BY_NAME["gpt-oss"]), pieces)
        assert content.strip() == "Paris" and whole == text


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

SCHEMA = json.loads("""
{"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"},
"c": {"type": "array"}, "d": {"type": ["object", "null"]}, "e": {"type": "boolean"},
"input": {"type": "string"}}}
""")
TYPED = CallRules(tools={"f": SCHEMA, "now": {}})
# What follows <function=f> => the arguments. \n is a line end, and ENDS the closing tags.
PARAMETERS = r"""
<parameter=a>\nx\n<parameter=b>\n2\n</parameter>\nENDS => {"a": "x", "b": 2}
<parameter=a>\nx\n</parameter>\n<parameter=b>\n2\nENDS => {"a": "x", "b": 2}
<parameter=a>\nx\n<parameter=b>\n2 => {"a": "x", "b": 2}
<parameter=a>\nx\n</parameter>\n</tool_call> => {"a": "x"}
<parameter=a>\nx\n</parameter> => {"a": "x"}
<parameter=a>\nx\n</tool_call> => {"a": "x"}
<parameter=a>x<parameter=b>2<parameter=e>true</function> => {"a": "x", "b": 2, "e": true}
<parameter=a>\n<parameter=z>\n</function> and </tool_call> </parameter>!\n</parameter>\nENDS =>
  {"a": "<parameter=z>\n</function> and </tool_call> </parameter>!"}
<parameter=a>\nx <parameter=a>\n</parameter></function> => {"a": "x <parameter=a>"}
<parameter=b>\nnull\n</parameter>\n<parameter=c>\n\n</parameter>\nENDS => {"b": null, "c": null}
<parameter=d>\nNone\n</parameter>\n<parameter=e></parameter></function> => {"d": null, "e": null}
<parameter=a>\nnull\n</parameter></function> => {"a": "null"}
<parameter=a></parameter></function> => {"a": ""}
</tool_call> => {}
"""


@pytest.mark.parametrize("body, arguments", rows_of(PARAMETERS))
def test_parameters_end_as_in_qwens_parser(body, arguments):
    body = body.replace("ENDS", r"</function>\n</tool_call>").replace(r"\n", "\n")
    found = read_in(BY_NAME["Qwen-Coder"], f"<tool_call>\n<function=f>\n{body}", rules=TYPED)
    assert found == ("", "", [("f", json.loads(arguments))])


def test_a_call_behind_reasoning_without_an_end():
    known = BY_NAME["Qwen-Coder"]
    opened = known.opens_reasoning("<think>\n")
    call = "<tool_call>\n<function=f>\n<parameter=a>\nx\n</parameter>\n</function>\n</tool_call>"
    found = read_in(known, f"hm\n{call}", opened, rules=TYPED)
    assert found == ("", "hm\n", [("f", {"a": "x"})])
    found = read_in(known, "I write <tool_call> then.</think>So.", opened, rules=TYPED)
    assert found == ("So.", "I write <tool_call> then.", [])


# The call => its arguments, or none where something would be lost: then it is a text.
RENAMED = r"""
{"name": "f", "args": {"a": "x"}} => {"a": "x"}
{"name": "f", "input": {"a": "x"}} => {"a": "x"}
{"name": "f", "Arguments": {"a": "x"}} => {"a": "x"}
{"name": "f", "a": "x", "b": 2} => {"a": "x", "b": 2}
{"name": "f", "arguments": {}, "parameters": {"a": "x"}} => {"a": "x"}
{"name": "f", "arguments": "", "parameters": {"a": "x"}} => {"a": "x"}
{"name": "f", "arguments": {}, "a": "x"} => {"a": "x"}
{"name": "f", "params": "{\"a\": \"x\"}"} => {"a": "x"}
{"name": "f", "input": "x"} => {"input": "x"}
{"name": "f", "arguments": {"a": "x"}, "id": "1", "type": "function"} => {"a": "x"}
{"tool_name": "f", "parameters": {"a": "x"}} => {"a": "x"}
{"name": "f", "arguments": {"a": "x"}, "b": 2} => {"a": "x", "b": 2}
{"name": "f", "arguments": {"a": "x"}, "why": "?"} => {"a": "x"}
{"name": "now"} => {}
{"name": "f", "z": 1} => null
{"name": "f", "arguments": {"a": "x"}, "parameters": {"a": "y"}} => null
{"name": "f", "arguments": {"a": "x"}, "a": "y"} => null
{"name": "f", "arguments": ["x"]} => null
{"name": "now", "city": "Paris"} => null
"""
AROUND = {
    "Hermes": ("<tool_call>", "</tool_call>"),
    "Llama 3": ("", ""),
    "Mistral": ("[TOOL_CALLS] [", "]"),
    "Granite": ("<|tool_call|>[", "]"),
    "Cohere 2": ("<|START_ACTION|>[", "]<|END_ACTION|>"),
}


@pytest.mark.parametrize("name", AROUND)
def test_arguments_under_other_names(name):
    before, behind = AROUND[name]
    for call, arguments in rows_of(RENAMED):
        text, arguments = f"{before}{call}{behind}", json.loads(arguments)
        found = read_in(BY_NAME[name], text, rules=TYPED)
        if arguments is None:
            assert found == (text, "", [])
        else:
            assert found == ("", "", [(json.loads(call).get("name", "f"), arguments)])


def test_brackets_too_many_are_no_content():
    for more in ("}", "}}", "]", "} }", "}]\n}"):
        text = f'<tool_call>\n{{"name": "now", "arguments": {{}}}}{more}\n</tool_call>ok'
        assert read_in(BY_NAME["Hermes"], text, rules=TYPED)[0] == "ok"
    text = '<tool_call>{"name": "now", "arguments": {}} } and so'
    assert read_in(BY_NAME["Hermes"], text, rules=TYPED)[0] == " } and so"


# ---- answers that a limit ends -------------------------------------------------------------------


@pytest.mark.parametrize("name", WRITERS)
def test_a_limit_ends_an_answer_anywhere(name):
    """Calls that were complete remain, nothing else becomes one, and no half of a closing mark is
    content."""
    text = WRITERS[name](ONE) if name == "gpt-oss" else WRITERS[name](ONE, TWO)
    wanted = calls_of(ONE, TWO)
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
    counts = {"prompt_tokens": 1, "cached_tokens": 0, "generated_tokens": 1}
    return Report(stopped_by=stopped_by, **counts, queued_s=0, prompt_s=0, generated_s=0)


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
    text = {"type": "reasoning_text", "text": "hm"}
    thought = {"type": "reasoning", "summary": [], "content": [text]}
    hidden = {"type": "reasoning", "content": None, "encrypted_content": "gA"}
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "1", "output": "2"}
    user = {"role": "user", "content": "?"}
    answer = {"type": "message", "role": "assistant", "content": "Yes."}
    items = [user, thought, call, output, thought, answer, user, thought, user, hidden, answer]
    found = chat_fields(ResponsesBody(**{"input": items}))[0]["messages"]
    thoughts = [message.get("reasoning_content") for message in found]
    assert thoughts == [None, "hm", None, "hm", None, None, None]
    assert found[1]["tool_calls"] and found[3]["content"] == "Yes."
