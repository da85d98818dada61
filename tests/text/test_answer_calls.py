"""Tool calls in streamed answers: the formats of known templates, text that only looks like a call,
what templates want of earlier calls, and grammars that force calls."""

import json
import random
import re
import time
from dataclasses import replace

import pytest
from call_writers import (
    AS_TEXT,
    BEGIN,
    BY_NAME,
    CALL,
    CALL_END,
    END,
    NOTHING,
    ONE,
    SEP,
    TAGS,
    TWO,
    WRITERS,
    calls_of,
    marked_codec,
    output_of,
    pieces_of,
    syntax,
)
from case_tables import rows_of
from chat_templates import TEMPLATES
from serving import TOOL
from tool_templates import CALL_TEMPLATES

from hotsplit.errors import HotsplitError
from hotsplit.runtime.answers.answer_reader import CallRules
from hotsplit.runtime.answers.call_style import CallStyle, call_style
from hotsplit.runtime.answers.calls import is_short_id, short_id
from hotsplit.runtime.answers.formats import format_of
from hotsplit.runtime.generate.call_grammar import forced_calls
from hotsplit.runtime.generate.generation import Token
from hotsplit.runtime.text.chat_template import ChatTemplate
from hotsplit.serve.answers import Voice
from hotsplit.serve.chat_requests import ChatMessage, messages_of
from hotsplit.serve.text_requests import Syntax

pytest_plugins = ("text_fixtures",)
SIZES = (1, 3, 1000)  # of the pieces in which an answer arrives


def split(name, text, size, **fields):
    """(content, calls) of an answer; every character is in one of its parts."""
    output = output_of(syntax(name, **fields), pieces_of(text, size))
    assert "".join(part.text for part in output.parts) == text
    assert output.has_calls == bool(output.calls)
    assert [call.index for call in output.calls] == list(range(len(output.calls)))
    return output.content, [(call.name, json.loads(call.arguments)) for call in output.calls]


@pytest.mark.parametrize("name", WRITERS)
def test_calls_are_separated_from_text(name):
    write = WRITERS[name]
    for size in SIZES:
        for calls in ([ONE], [ONE, TWO], [TAGS], [TWO, TAGS, ONE]):
            text, want = write(*calls), calls_of(*calls)
            assert split(name, text, size) == ("", want), text
            assert split(name, f"\n{text}\n", size)[1] == want
            if name == "gpt-oss":
                continue
            if name != "Llama 3":
                assert split(name, f"Well.\n{text}", size) == ("Well.\n", want)
            assert split(name, f"{text}\n And so.", size) == ("\n And so.", want)


# The format => what the model writes => its content => its calls. \n is a line end.
NEAR = r"""
Hermes => <tool_call>{"name": "f", "parameters": {"a": 1}}</tool_call> => => ONE
Llama 3 => {"name": "f", "arguments": {"a": 1}} => => ONE
Hermes => <tool_call>{"name": "f"}</tool_call> => => NOTHING
Hermes => <tool_call>{"name": "f", "arguments": null}</tool_call> => => NOTHING
Hermes => <tool_call>{"name": "f", "arguments": ""}</tool_call> => => NOTHING
Hermes => <tool_call>{"name": "f", "arguments": "{\"a\": 1}"}</tool_call> => => ONE
Hermes => <tool_call>{"type": "function", "function":
  {"name": "f", "arguments": {"a": 1}}}</tool_call> => => ONE
Hermes => <tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call> => => ONE
Hermes => <tool_call>{"name": "f", "arguments": null, "parameters": {"a": 1}}</tool_call> => => ONE
Mistral, newer => [TOOL_CALLS] f [CALL_ID] x1 [ARGS] {"a": 1} => => ONE
Mistral, newer => [TOOL_CALLS]f[CALL_ID]abcDEF012[ARGS]{"a": 1} => => ONE
Qwen-Coder => <function=f></function> => => NOTHING
gpt-oss => <|channel|>final<|message|>It is 4.<|return|> => It is 4. =>
gpt-oss => plain => plain =>
gpt-oss => <|channel|>final to => to =>
Hermes => <tool_call>{"name": "f", "arguments": {"a": "b\nc"}}</tool_call> => => BROKEN
"""
BROKEN = {"name": "f", "arguments": {"a": "b\nc"}}  # a line end in a string, which JSON forbids
CALLS = {"": [], "ONE": [ONE], "NOTHING": [NOTHING], "BROKEN": [BROKEN]}
hermes, llama, mistral, harmony = map(WRITERS.get, ("Hermes", "Llama 3", "Mistral", "gpt-oss"))
# Tags that are missing, or have several calls between them; other forms than the template's.
TAGGED = [
    ("Hermes", hermes(ONE).removesuffix("</tool_call>"), "", [ONE]),
    ("Hermes", hermes(ONE).removesuffix("</tool_call>") + hermes(TWO), "", [ONE, TWO]),
    ("Hermes", f"<tool_call>{json.dumps(ONE)}\n{json.dumps(TWO)}</tool_call>", "", [ONE, TWO]),
    ("Hermes", f"<tool_call>{json.dumps([ONE, TWO])}</tool_call>", "", [ONE, TWO]),
    ("Hermes", hermes(ONE) + "\ntext\n" + hermes(TWO) + ".", "\ntext\n.", [ONE, TWO]),
    ("Granite", hermes(ONE), "", [ONE]),
    ("Granite", WRITERS["Granite"](ONE) + "<|/tool_call|>", "", [ONE]),
    ("Llama 3", "<|python_tag|>" + llama(ONE), "", [ONE]),
    ("Llama 3", "Say <|python_tag|>" + llama(ONE), "Say ", [ONE]),
    ("Llama 3", llama(ONE) + llama(TWO), "", [ONE, TWO]),
    ("Mistral", WRITERS["Mistral, newer"](ONE, TWO), "", [ONE, TWO]),
    ("Mistral", 'Well [TOOL_CALLS]f{"a": 1}', "Well ", [ONE]),
    ("Mistral, newer", mistral(ONE), "", [ONE]),
    ("DeepSeek", WRITERS["DeepSeek 3.1"](ONE), "", [ONE]),
    ("DeepSeek 3.1", WRITERS["DeepSeek"](ONE).removeprefix(BEGIN).removesuffix(END), "", [ONE]),
    ("Qwen-Coder", WRITERS["Qwen-Coder"](ONE).removeprefix("<tool_call>\n"), "", [ONE]),
    ("Qwen-Coder", hermes(ONE), "", [ONE]),
    (
        "Qwen-Coder",
        "<tool_call><function=g><parameter=b>5</parameter><parameter=a>[1]"
        "</parameter></function></tool_call>",
        *("", [{"name": "g", "arguments": {"b": "5", "a": [1]}}]),
    ),
    (
        "gpt-oss",
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant to=functions.f"
        '<|channel|>commentary json<|message|>{"a": 1}',
        *("", [ONE]),
    ),
    (
        "gpt-oss",
        ' to=functions.f<|channel|>commentary <|constrain|>json<|message|>{"a": 1}',
        *("", [ONE]),
    ),
    (
        "gpt-oss",
        "<|channel|>commentary<|message|>Wait.<|end|><|start|>assistant" + harmony(ONE),
        *("Wait.", [ONE]),
    ),
]


@pytest.mark.parametrize(
    "name, text, said, calls",
    [*((n, t.replace(r"\n", "\n"), s, CALLS[c]) for n, t, s, c in rows_of(NEAR)), *TAGGED],
)
def test_calls_that_are_not_as_the_template_says(name, text, said, calls):
    for size in SIZES:
        assert split(name, text, size) == (said, calls_of(*calls))


# Arguments that are no JSON object, or one that a client's parser refuses.
NO_ARGUMENTS = """
{"a": 1e400} | {"a": NaN} | {"a": -Infinity} | {"a": "\\ud800"} | [1] | 3 | true | "text" | "[1]" |
{'a': 1} | {"a": 01} | {"a": 1,} | {a: 1}
"""
NO_CALLS = r"""
Hermes => a <tool b < <tool_cal> c
Hermes => <tool_call>{broken
Hermes => <tool_call>[1]</tool_call>
Hermes => <tool_call>[]</tool_call>
Hermes => <tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>
Hermes => <tool_call>{"name": "f", "arguments": {"a": "1
Hermes => <tool_call>{"name": "f" "arguments": {}}</tool_call>
Hermes => ends with <tool_
Hermes => <tool_call>{"name": 5, "arguments": {}}</tool_call>
Hermes => <tool_call>{"name": "", "arguments": {}}</tool_call>
Mistral => [TOOL_CALLS] none
Mistral => [TOOL_CALLS]f[ARGS] none
Llama 3 => Say {"name": "f", "parameters": {"a": 1}}
Llama 3 => {"a": 1}
Llama 3 => {"name": "Bob", "parameters": {}}
Llama 3 => <|pyth
Llama 3 => <|python_tag|>print(1)
Qwen-Coder => <tool_call><function=f><parameter=a
Qwen-Coder => <function=f
gpt-oss => <|channel|>commentary to=functions.f<|message|>{"a": NaN}
gpt-oss => <|channel|>commentary to=functions.f<|message|>print(1)
gpt-oss => <|channel|>commentary to=functions.f<|message|>{"a": 1
"""
WRONG = [each.strip() for each in NO_ARGUMENTS.replace("\n", " ").split(" | ")]
WRONG += ["[" * 3000 + "]" * 3000, '{"a": ' + "9" * 5000 + "}"]


@pytest.mark.parametrize(
    "name, text",
    [
        *rows_of(NO_CALLS),
        ("DeepSeek", f"{BEGIN}{CALL}function{SEP}f\n```json\nnone"),
        ("DeepSeek 3.1", f"{CALL}f{SEP}"),
        *(
            ("Hermes", f'<tool_call>{{"name": "f", "arguments": {wrong}}}</tool_call>')
            for wrong in WRONG
        ),
    ],
)
def test_what_is_no_call_is_text(name, text):
    for size in SIZES:
        assert split(name, text, size) == (text, [])


def test_the_channels_of_gpt_oss():
    text = (
        "<|channel|>analysis<|message|>Two <|x and <|end|><|start|>assistant<|channel|>analysis"
        "<|message|>two.<|end|><|start|>assistant<|channel|>final<|message|>Four<|"
    )
    for size in SIZES:
        output = output_of(syntax("gpt-oss"), pieces_of(text, size))
        assert (output.reasoning, output.content) == ("Two <|x and two.", "Four<|")
        known = Syntax(format=BY_NAME["gpt-oss"])  # neither calls nor reasoning are wanted
        thought, _, answer = text.rpartition("<|start|>assistant<|channel|>final<|message|>")
        assert output_of(known, pieces_of(text, size)).content == thought + answer
        assert output_of(known, pieces_of(harmony(ONE), size)).content == harmony(ONE)


@pytest.mark.parametrize("name", WRITERS)
def test_a_call_is_returned_as_soon_as_it_is_complete(name):
    write, voice = WRITERS[name], Voice(syntax(name))
    pieces = [voice.say([Token(5, character)]) for character in write(ONE) + " And"]
    ends = [n for n, piece in enumerate(pieces) if piece.calls]
    assert ends and ends[0] <= len(write(ONE)) + 1


def test_at_most_one_call_is_returned():
    for text in (hermes(ONE, TWO), f"<tool_call>{json.dumps([ONE, TWO])}</tool_call>"):
        assert split("Hermes", text, 5, most=1) == ("", calls_of(ONE))


def test_ids_are_the_models_own_if_they_are_usable():
    own = [{**ONE, "id": name} for name in ("abcDEF012", "abcDEF012", "call_1", "", 5)]
    for is_short in (False, True):
        rules = syntax("Mistral", has_short_ids=is_short)
        first, again, long, *made = (
            c.id for c in output_of(rules, pieces_of(mistral(*own), 7)).calls
        )
        assert first == "abcDEF012" and (long == "call_1") is not is_short
        assert len({first, again, long, *made}) == 5
        assert all(map(is_short_id, (again, *made))) and is_short_id(long) is is_short
    text = "[TOOL_CALLS]f[CALL_ID]abcDEF012[ARGS]{}"
    (call,) = output_of(syntax("Mistral, newer"), pieces_of(text, 3)).calls
    assert call.id == "abcDEF012"


def test_other_ids_become_short_ones_in_one_way():
    assert short_id("abcDEF012") == "abcDEF012"
    made = {short_id(f"call_{n}") for n in range(1000)}
    assert len(made) == 1000 and all(map(is_short_id, made))
    assert short_id("call_1") == short_id("call_1")
    assert not is_short_id("abcDEF01\u00e9") and not is_short_id("abcDEF0123")


# The schema => what is between the tags => its value. \n is a line end.
VALUES = r"""
{"type": "string"} => \n5\n => "5"
{"type": "string"} => \n\n a\n\n => "\n a\n"
{"type": "integer"} => \n5\n => 5
{"type": "integer"} => x => "x"
{"type": "integer"} => true => "true"
{"type": "number"} => 1e400 => "1e400"
{"type": "boolean"} => True => true
{"type": "boolean"} => false => false
{"type": ["string", "null"]} => null => null
{"type": ["string", "null"]} => 5 => "5"
{"type": "array"} => [1, {}] => [1, {}]
{"anyOf": [{"type": "object"}, {"type": "string"}]} => {"a": 1} => {"a": 1}
{"anyOf": [{"type": "object"}, {"type": "string"}]} => [1] => "[1]"
{"enum": ["1", "2"]} => 1 => "1"
{"enum": [1, 2]} => 1 => 1
{"const": "x"} => x => "x"
{"$ref": "#/x"} => 1 => 1
{} => None => null
"wrong" => 1 => 1
"""


@pytest.mark.parametrize("schema, text, value", rows_of(VALUES))
def test_values_between_tags_have_the_types_of_the_schema(schema, text, value):
    tools, value = {"f": {"properties": {"a": json.loads(schema)}}}, json.loads(value)
    text = text.replace(r"\n", "\n")
    written = f"<tool_call><function=f><parameter=a>{text}</parameter></function></tool_call>"
    known = Syntax(format=BY_NAME["Qwen-Coder"], rules=CallRules(tools=tools))
    (call,) = output_of(known, pieces_of(written, 4)).calls
    found = json.loads(call.arguments)["a"]
    assert found == value and type(found) is type(value)


# ---- random answers ------------------------------------------------------------------------------

_MARKS = """
<tool_call> </tool_call> <function=f> <parameter=a> </parameter> </function> [TOOL_CALLS]
[ARGS] f [ ] { } , : 1 1e999 NaN null ; <|tool_call|> <|python_tag|> ``` <|channel|>
<|message|> <|end|> <|start|>assistant analysis commentary <think> </think> <|tool_call>
<tool_call|> call:f{ <|channel> <channel|> <arg_key> </arg_key> <|START_ACTION|>
<|END_ACTION|> [THINK] <|START_RESPONSE|> <|END_RESPONSE|> " \\ \ufffd \u00e9
"""
PIECES = [*_MARKS.split(), '{"name": "f", ', "\n", '"arguments": {"a": "', '"parameters": ', " "]
PIECES += [BEGIN, END, CALL, CALL_END, SEP, "```json\n", " to=functions.f", "thought\n"]


def random_value(chance, depth=0):
    if depth < 3 and chance.random() < 0.4:
        count = chance.randrange(3)
        if chance.random() < 0.5:
            return [random_value(chance, depth + 1) for _ in range(count)]
        return {random_text(chance): random_value(chance, depth + 1) for _ in range(count)}
    return chance.choice([None, True, 0, -1.5, 1 << 70, random_text(chance)])


def random_text(chance):
    return "".join(
        chance.choice([*PIECES, "a b", "\u2028", "\x00"]) for _ in range(chance.randrange(4))
    )


def random_calls(chance, name):
    are_plain = name in (*AS_TEXT, "Gemma 4", "OLMo 3")
    keys = ("a", "b", "c") if are_plain else ("", "a", 'b"', "</x>")
    calls = []
    for _ in range(chance.randint(1, 3)):
        given = {key: random_value(chance) for key in chance.sample(keys, chance.randrange(3))}
        calls.append({"name": chance.choice("fg"), "arguments": given})
    return calls


def random_cuts(chance, text):
    while text:
        cut = chance.choice((1, 1, 2, 5, 40))
        yield text[:cut]
        text = text[cut:]


def content_of(output):
    calls = [(call.name, call.arguments) for call in output.calls]
    return output.content, output.reasoning, calls


@pytest.mark.parametrize("name", WRITERS)
def test_random_answers_are_split_in_one_way(name):
    """However the text is cut, each character is in one part, and arguments are JSON objects."""
    chance, num_calls = random.Random(name), 0
    for number in range(400):
        parts = [random_text(chance) for _ in range(chance.randrange(4))]
        if number % 2:
            parts.insert(
                chance.randrange(len(parts) + 1), WRITERS[name](*random_calls(chance, name))
            )
        text = "".join(parts)
        whole = output_of(syntax(name), [text])
        for _ in range(3):
            streamed = output_of(syntax(name), random_cuts(chance, text))
            assert content_of(streamed) == content_of(whole), text
            assert "".join(part.text for part in streamed.parts) == text
        for call in whole.calls:
            assert isinstance(json.loads(call.arguments, parse_constant=pytest.fail), dict)
            num_calls += 1
    assert num_calls > 50


@pytest.mark.parametrize("name", WRITERS)
def test_random_calls_are_read_back(name):
    chance = random.Random(f"calls {name}")
    for _ in range(200):
        calls = random_calls(chance, name)
        text = WRITERS[name](*calls)
        voice = output_of(syntax(name), random_cuts(chance, text))
        read = [(call.name, json.loads(call.arguments)) for call in voice.calls]
        if name not in AS_TEXT:
            assert (voice.content, read) == ("", calls_of(*calls)), text
        elif not re.search(
            "</parameter>|<parameter=", json.dumps(calls)
        ):  # without schemas, only names are certain
            assert [call[0] for call in read] == [call["name"] for call in calls], text


@pytest.mark.parametrize("name", WRITERS)
def test_the_time_of_an_answer_full_of_marks_is_linear(name):
    """Marks that begin no call, one after the other."""
    for begun in (
        *BY_NAME[name].calls.begins,
        '<tool_call>{"a": "',
        "<function=f><parameter=a>",
        "<|channel|>commentary to=functions.f<|message|>",
    ):
        text = begun * (200_000 // len(begun))
        began = time.process_time()
        assert len(split(name, text, 4000)[1]) <= 1
        assert time.process_time() - began < 5


# ---- templates -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "template",
    [
        "<|start_header_id|>{{ tools }}parameters<function=x>{}",
        "{{ messages }}",
        "{{ tools }}",
        "<tool_call> without",
        "{% if tools %}<call>",
        "{{ tools }}<tool>f\n<arg_key>a</arg_key>arguments",
    ],
)
def test_a_template_with_an_unknown_format_of_calls(template):
    assert format_of(template).describes_tools


@pytest.mark.parametrize("name", CALL_TEMPLATES)
def test_what_a_template_wants_of_calls(name, process):
    text, known, style = CALL_TEMPLATES[name]
    template = ChatTemplate(
        name="it", text=text, special={"bos_token": "<s>", "eos_token": "</s>"}, process=process
    )
    found = format_of(text)
    assert found.name == known and not found.describes_tools
    assert call_style(template) == style
    called = {"name": "f", "arguments": '{"city": "K\u00f6ln", "n": 2}'}
    call = {"id": "call_1", "type": "function", "function": called}
    conversation = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "grey"},
    ]
    rendered = template.render(
        messages_of([ChatMessage(**message) for message in conversation], style, found),
        tools=[TOOL],
        keeps_none=style.has_null_content,
    )
    assert "K\u00f6ln" in rendered and "'city'" not in rendered and '\\"' not in rendered
    assert ("call_1" in rendered) is (name == "mistral")


def test_calls_that_a_template_does_not_read_are_content(process):
    style = call_style(ChatTemplate(name="it", text=TEMPLATES["chatml"], process=process))
    assert style == CallStyle(has_calls_as_content=True, describes_tools=True)
    for text in ("{{ broken tool_calls", "{{ raise_exception('tool_calls') }}"):
        broken = replace(style, has_system=False)
        assert call_style(ChatTemplate(name="it", text=text, process=process)) == broken


@pytest.mark.parametrize("name", WRITERS)
def test_calls_as_content_are_written_as_the_model_writes_them(name):
    calls = [ONE] if name == "gpt-oss" else [ONE, TWO, TAGS]
    assert BY_NAME[name].calls.text_of(calls_of(*calls)) == WRITERS[name](*calls).removesuffix(
        "<|call|>"
    )


# ---- grammars ------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[False, True])
def codec(request):
    return marked_codec(request.param)


def is_allowed(constraint, codec, text):
    """Whether the constraint allows the text, whole."""
    try:
        for token_id in codec.encode_rendered(text):
            constraint.accept(token_id)
    except HotsplitError:
        return False
    return constraint.can_end


FORCED = json.loads("""
[{"type": "function", "function": {"name": "f", "parameters": {"type": "object",
 "properties": {"a": {"type": "integer"}}, "additionalProperties": false}}},
 {"type": "function", "function": {"name": "g", "parameters": {"type": "object",
 "properties": {"b": {"type": "string"}}, "required": ["b"]}}}]
""")


@pytest.mark.parametrize("name", WRITERS)
def test_a_grammar_allows_calls_as_the_format_has_them(name, codec):
    def allows(text, is_parallel=True):
        forced = forced_calls(BY_NAME[name].calls, FORCED, codec, is_parallel=is_parallel)
        return is_allowed(forced, codec, text)

    def write(*calls):
        return WRITERS[name](*calls).removesuffix("<|call|>")  # which ends the text

    for calls in ([ONE], [TWO], [{"name": "f", "arguments": {}}]):
        assert allows(write(*calls)) and allows(write(*calls), is_parallel=False), write(*calls)
    if name != "gpt-oss":
        assert allows(write(ONE, TWO)) and not allows(write(ONE, TWO), is_parallel=False)
    if name == "gpt-oss" and codec.tokenizer.token_to_id("<|end|>"):
        thought = "<|channel|>analysis<|message|>hm\n<|end|><|start|>assistant"
        assert allows(thought + write(ONE))
    wrong = [
        {"name": "h", "arguments": {}},
        {"name": "f", "arguments": {"a": "x"}},
        {"name": "f", "arguments": {"c": 1}},
        {"name": "g", "arguments": {}},
    ]
    for call in wrong:
        assert not allows(write(call)), call
    assert not allows("") and not allows("Well.")
