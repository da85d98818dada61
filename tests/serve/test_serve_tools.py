"""Tool calls and reasoning in streamed answers: the formats of known templates, and text that only
looks like a call."""

import json
import random
import re
import time
from dataclasses import replace

import pytest
from chat_templates import TEMPLATES
from serving import TOKENIZER, TOOL
from tokenizers import Tokenizer
from tool_templates import CALL_TEMPLATES

from hotsplit.errors import HotsplitError
from hotsplit.runtime.answers.answer_reader import CallRules
from hotsplit.runtime.answers.call_style import CallStyle, call_style
from hotsplit.runtime.answers.calls import is_short_id, short_id
from hotsplit.runtime.answers.formats import FORMATS, format_of
from hotsplit.runtime.generate.call_grammar import forced_calls
from hotsplit.runtime.generate.generation import Token
from hotsplit.runtime.text.chat_template import ChatTemplate
from hotsplit.runtime.text.codec import TextCodec
from hotsplit.runtime.text.template_process import TemplateProcess
from hotsplit.serve.answers import Output, Voice
from hotsplit.serve.chat_requests import ChatMessage, messages_of
from hotsplit.serve.text_requests import Syntax

BY_NAME = {known.name: known for known in FORMATS}
ONE = {"name": "f", "arguments": {"a": 1}}
TWO = {"name": "g", "arguments": {"b": "</x>"}}
TAGS = {"name": "f", "arguments": {"a": 'x</tool_call>"}} [TOOL_CALLS]<|end|></parameter> \\'}}
STRINGS = {"type": "object", "properties": {"b": {"type": "string"}, "a": {}}}
TOOLS = {"f": {}, "g": STRINGS}
BEGIN, END = "<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>"
CALL, CALL_END = "<\uff5ctool\u2581call\u2581begin\uff5c>", "<\uff5ctool\u2581call\u2581end\uff5c>"
SEP = "<\uff5ctool\u2581sep\uff5c>"


def hermes(*calls):
    return "\n".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls)


def llama(*calls):
    renamed = [{"name": call["name"], "parameters": call["arguments"]} for call in calls]
    return "; ".join(map(json.dumps, renamed))


def qwen(*calls):
    def value(found):
        return found if isinstance(found, str) else json.dumps(found)

    return "\n".join(
        f"<tool_call>\n<function={call['name']}>\n"
        + "".join(
            f"<parameter={key}>\n{value(found)}\n</parameter>\n"
            for key, found in call["arguments"].items()
        )
        + "</function>\n</tool_call>"
        for call in calls
    )


def deepseek(*calls):
    return (
        BEGIN
        + "\n".join(
            f"{CALL}function{SEP}{call['name']}\n```json\n{json.dumps(call['arguments'])}\n```{CALL_END}"
            for call in calls
        )
        + END
    )


def deepseek_31(*calls):
    each = [f"{CALL}{c['name']}{SEP}{json.dumps(c['arguments'])}{CALL_END}" for c in calls]
    return BEGIN + "".join(each) + END


def mistral(*calls):
    return "[TOOL_CALLS] " + json.dumps(calls)


def mistral_newer(*calls):
    return "".join(f"[TOOL_CALLS]{c['name']}[ARGS]{json.dumps(c['arguments'])}" for c in calls)


def granite(*calls):
    return "<|tool_call|>" + json.dumps(calls)


def apriel(*calls):
    return f"<tool_calls>{json.dumps(calls)}</tool_calls>"


def harmony(*calls):
    return "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{call['name']} <|constrain|>json<|message|>"
        f"{json.dumps(call['arguments'])}<|call|>"
        for call in calls
    )


def bare(value):
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        keys = [key if re.fullmatch(r"\w+", key) else bare(key) for key in value]
        parts = zip(keys, map(bare, value.values()), strict=True)
        return "{" + ",".join(f"{key}:{part}" for key, part in parts) + "}"
    return f"[{','.join(map(bare, value))}]" if isinstance(value, list) else json.dumps(value)


def gemma(*calls):
    each = [f"<|tool_call>call:{c['name']}{bare(c['arguments'])}<tool_call|>" for c in calls]
    return "".join(each)


def glm(*calls, line="\n"):
    return line.join(
        f"<tool_call>{call['name']}{line}"
        + "".join(
            f"<arg_key>{key}</arg_key>{line}<arg_value>"
            f"{found if isinstance(found, str) else json.dumps(found)}</arg_value>{line}"
            for key, found in call["arguments"].items()
        )
        + "</tool_call>"
        for call in calls
    )


def glm_47(*calls):
    return glm(*calls, line="")


def cohere(*calls):
    each = [
        {"tool_call_id": "0", "tool_name": c["name"], "parameters": c["arguments"]} for c in calls
    ]
    return "<|START_ACTION|>[\n    " + ",\n    ".join(map(json.dumps, each)) + "\n]<|END_ACTION|>"


def olmo(*calls):
    def value(found):
        return json.dumps(found, ensure_ascii=False)

    return (
        "<function_calls>"
        + "\n".join(
            f"{c['name']}({', '.join(f'{k}={value(v)}' for k, v in c['arguments'].items())})"
            for c in calls
        )
        + "</function_calls>"
    )


WRITERS = {
    "Hermes": hermes,
    "Llama 3": llama,
    "Qwen-Coder": qwen,
    "DeepSeek": deepseek,
    "DeepSeek 3.1": deepseek_31,
    "Mistral": mistral,
    "Mistral, newer": mistral_newer,
    "Granite": granite,
    "gpt-oss": harmony,
    "Apriel": apriel,
    "Gemma 4": gemma,
    "GLM-4.5": glm,
    "GLM-4.7": glm_47,
    "Cohere 2": cohere,
    "OLMo 3": olmo,
}
AS_TEXT = ("Qwen-Coder", "GLM-4.5", "GLM-4.7")  # values are text, whose types a schema tells


def syntax(name, **fields):
    rules = CallRules(tools=TOOLS, **fields)
    return Syntax(format=BY_NAME[name], rules=rules, splits_reasoning=True)


def output_of(syntax, text, size):
    voice, output = Voice(syntax), Output()
    for n in range(0, len(text), size):
        output.add(voice.say([Token(5, text[n : n + size])]))
    output.add(voice.finish())
    return output


def split(name, text, size, **fields):
    output = output_of(syntax(name, **fields), text, size)
    assert "".join(part.text for part in output.parts) == text
    assert output.has_calls == bool(output.calls)
    assert [call.index for call in output.calls] == list(range(len(output.calls)))
    return output.content, [(call.name, json.loads(call.arguments)) for call in output.calls]


def calls_of(*calls):
    return [(call["name"], call["arguments"]) for call in calls]


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("name", WRITERS)
def test_calls_are_separated_from_text(name, size):
    write = WRITERS[name]
    for calls in ([ONE], [ONE, TWO], [TAGS], [TWO, TAGS, ONE]):
        text = write(*calls)
        assert split(name, text, size) == ("", calls_of(*calls)), text
        assert split(name, f"\n{text}\n", size)[1] == calls_of(*calls)
        if name == "gpt-oss":
            continue
        if name != "Llama 3":
            assert split(name, f"Well.\n{text}", size) == ("Well.\n", calls_of(*calls))
        found = split(name, f"{text}\n And so.", size)
        assert found == ("\n And so.", calls_of(*calls))


def edge(name, text, said, *calls):
    return name, text, said, calls_of(*calls)


NOTHING = {"name": "f", "arguments": {}}
HARMONY = "<|channel|>commentary to=functions.f<|message|>"


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    "name, text, said, calls",
    [
        # The other name of the arguments, none at all, and arguments in a string.
        edge("Hermes", '<tool_call>{"name": "f", "parameters": {"a": 1}}</tool_call>', "", ONE),
        edge("Llama 3", '{"name": "f", "arguments": {"a": 1}}', "", ONE),
        edge("Hermes", '<tool_call>{"name": "f"}</tool_call>', "", NOTHING),
        edge("Hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', "", NOTHING),
        edge("Hermes", '<tool_call>{"name": "f", "arguments": ""}</tool_call>', "", NOTHING),
        edge("Hermes", r'<tool_call>{"name": "f", "arguments": "{\"a\": 1}"}</tool_call>', "", ONE),
        edge(
            "Hermes",
            '<tool_call>{"type": "function", "function":'
            ' {"name": "f", "arguments": {"a": 1}}}</tool_call>',
            "",
            ONE,
        ),
        edge("Hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', "", ONE),
        # Tags that are missing, or have several calls between them.
        edge("Hermes", hermes(ONE).removesuffix("</tool_call>"), "", ONE),
        edge("Hermes", hermes(ONE).removesuffix("</tool_call>") + hermes(TWO), "", ONE, TWO),
        edge(
            "Hermes", f"<tool_call>{json.dumps(ONE)}\n{json.dumps(TWO)}</tool_call>", "", ONE, TWO
        ),
        edge("Hermes", f"<tool_call>{json.dumps([ONE, TWO])}</tool_call>", "", ONE, TWO),
        edge("Hermes", hermes(ONE) + "\ntext\n" + hermes(TWO) + ".", "\ntext\n.", ONE, TWO),
        edge("Granite", hermes(ONE), "", ONE),
        edge("Granite", granite(ONE) + "<|/tool_call|>", "", ONE),
        edge("Llama 3", "<|python_tag|>" + llama(ONE), "", ONE),
        edge("Llama 3", "Say <|python_tag|>" + llama(ONE), "Say ", ONE),
        edge("Llama 3", llama(ONE) + llama(TWO), "", ONE, TWO),
        edge("Mistral", mistral_newer(ONE, TWO), "", ONE, TWO),
        edge("Mistral", 'Well [TOOL_CALLS]f{"a": 1}', "Well ", ONE),
        edge("Mistral, newer", '[TOOL_CALLS] f [CALL_ID] x1 [ARGS] {"a": 1}', "", ONE),
        edge("Mistral, newer", mistral(ONE), "", ONE),
        edge(
            "Hermes",
            '<tool_call>{"name": "f", "arguments": null, "parameters": {"a": 1}}</tool_call>',
            "",
            ONE,
        ),
        edge("Mistral, newer", '[TOOL_CALLS]f[CALL_ID]abcDEF012[ARGS]{"a": 1}', "", ONE),
        edge("DeepSeek", deepseek_31(ONE), "", ONE),
        edge("DeepSeek 3.1", deepseek(ONE).removeprefix(BEGIN).removesuffix(END), "", ONE),
        edge("Qwen-Coder", qwen(ONE).removeprefix("<tool_call>\n"), "", ONE),
        edge("Qwen-Coder", hermes(ONE), "", ONE),
        edge(
            "Qwen-Coder",
            "<tool_call><function=g><parameter=b>5</parameter><parameter=a>[1]"
            "</parameter></function></tool_call>",
            "",
            {"name": "g", "arguments": {"b": "5", "a": [1]}},
        ),
        edge("Qwen-Coder", "<function=f></function>", "", NOTHING),
        edge(
            "gpt-oss",
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant to=functions.f"
            '<|channel|>commentary json<|message|>{"a": 1}',
            "",
            ONE,
        ),
        edge(
            "gpt-oss",
            ' to=functions.f<|channel|>commentary <|constrain|>json<|message|>{"a": 1}',
            "",
            ONE,
        ),
        edge(
            "gpt-oss",
            "<|channel|>commentary<|message|>Wait.<|end|><|start|>assistant" + harmony(ONE),
            "Wait.",
            ONE,
        ),
        edge("gpt-oss", "<|channel|>final<|message|>It is 4.<|return|>", "It is 4."),
        edge("gpt-oss", "plain", "plain"),
        edge("gpt-oss", "<|channel|>final to", "to"),  # cut off, or without <|message|>
        # A line end inside a string, which a client's parser would refuse.
        edge(
            "Hermes",
            '<tool_call>{"name": "f", "arguments": {"a": "b\nc"}}</tool_call>',
            "",
            {"name": "f", "arguments": {"a": "b\nc"}},
        ),
    ],
)
def test_calls_that_are_not_as_the_template_says(name, text, said, calls, size):
    assert split(name, text, size) == (said, calls)


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    "name, text",
    [
        ("Hermes", "a <tool b < <tool_cal> c"),
        ("Hermes", "<tool_call>{broken"),
        ("Hermes", "<tool_call>[1]</tool_call>"),
        ("Hermes", "<tool_call>[]</tool_call>"),
        ("Hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>'),
        ("Hermes", '<tool_call>{"name": "f", "arguments": {"a": "1'),
        ("Hermes", '<tool_call>{"name": "f" "arguments": {}}</tool_call>'),
        ("Hermes", "ends with <tool_"),
        *(
            ("Hermes", f'<tool_call>{{"name": "f", "arguments": {wrong}}}</tool_call>')
            for wrong in (
                '{"a": 1e400}',
                '{"a": NaN}',
                '{"a": -Infinity}',
                '{"a": "\\ud800"}',
                "[1]",
                "3",
                "true",
                '"text"',
                '"[1]"',
                "{'a': 1}",
                '{"a": 01}',
                '{"a": 1,}',
                "{a: 1}",
                "[" * 3000 + "]" * 3000,
                '{"a": ' + "9" * 5000 + "}",
            )
        ),
        ("Hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
        ("Hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
        ("Mistral", "[TOOL_CALLS] none"),
        ("Mistral", "[TOOL_CALLS]f[ARGS] none"),
        ("Llama 3", "Say " + llama(ONE)),
        ("Llama 3", '{"a": 1}'),
        ("Llama 3", '{"name": "Bob", "parameters": {}}'),
        ("Llama 3", "<|pyth"),
        ("Llama 3", "<|python_tag|>print(1)"),
        ("Qwen-Coder", "<tool_call><function=f><parameter=a"),
        ("Qwen-Coder", "<function=f"),
        ("DeepSeek", f"{BEGIN}{CALL}function{SEP}f\n```json\nnone"),
        ("DeepSeek 3.1", f"{CALL}f{SEP}"),
        ("gpt-oss", HARMONY + '{"a": NaN}'),
        ("gpt-oss", HARMONY + "print(1)"),
        ("gpt-oss", HARMONY + '{"a": 1'),
    ],
)
def test_what_is_no_call_is_text(name, text, size):
    assert split(name, text, size) == (text, [])


@pytest.mark.parametrize("size", [1, 4, 1000])
def test_the_channels_of_gpt_oss(size):
    text = (
        "<|channel|>analysis<|message|>Two <|x and <|end|><|start|>assistant<|channel|>analysis"
        "<|message|>two.<|end|><|start|>assistant<|channel|>final<|message|>Four<|"
    )
    output = output_of(syntax("gpt-oss"), text, size)
    assert (output.reasoning, output.content) == ("Two <|x and two.", "Four<|")
    known = Syntax(format=BY_NAME["gpt-oss"])  # neither calls nor reasoning are wanted
    thought, _, answer = text.rpartition("<|start|>assistant<|channel|>final<|message|>")
    assert output_of(known, text, size).content == thought + answer
    assert output_of(known, harmony(ONE), size).content == harmony(ONE)


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
        first, again, long, *made = (c.id for c in output_of(rules, mistral(*own), 7).calls)
        assert first == "abcDEF012" and (long == "call_1") is not is_short
        assert len({first, again, long, *made}) == 5
        assert all(map(is_short_id, (again, *made))) and is_short_id(long) is is_short
    newer = "[TOOL_CALLS]f[CALL_ID]abcDEF012[ARGS]{}"
    (call,) = output_of(syntax("Mistral, newer"), newer, 3).calls
    assert call.id == "abcDEF012"


def test_other_ids_become_short_ones_in_one_way():
    assert short_id("abcDEF012") == "abcDEF012"
    made = {short_id(f"call_{n}") for n in range(1000)}
    assert len(made) == 1000 and all(map(is_short_id, made))
    assert short_id("call_1") == short_id("call_1")
    assert not is_short_id("abcDEF01\u00e9") and not is_short_id("abcDEF0123")


@pytest.mark.parametrize(
    "schema, text, value",
    [
        ({"type": "string"}, "\n5\n", "5"),
        ({"type": "string"}, "\n\n a\n\n", "\n a\n"),
        ({"type": "integer"}, "\n5\n", 5),
        ({"type": "integer"}, "x", "x"),
        ({"type": "integer"}, "true", "true"),
        ({"type": "number"}, "1e400", "1e400"),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "false", False),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "5", "5"),
        ({"type": "array"}, "[1, {}]", [1, {}]),
        ({"anyOf": [{"type": "object"}, {"type": "string"}]}, '{"a": 1}', {"a": 1}),
        ({"anyOf": [{"type": "object"}, {"type": "string"}]}, "[1]", "[1]"),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": [1, 2]}, "1", 1),
        ({"const": "x"}, "x", "x"),
        ({"$ref": "#/x"}, "1", 1),
        ({}, "None", None),
        ("wrong", "1", 1),
    ],
)
def test_values_between_tags_have_the_types_of_the_schema(schema, text, value):
    tools = {"f": {"properties": {"a": schema}}}
    written = f"<tool_call><function=f><parameter=a>{text}</parameter></function></tool_call>"
    known = Syntax(format=BY_NAME["Qwen-Coder"], rules=CallRules(tools=tools))
    (call,) = output_of(known, written, 4).calls
    found = json.loads(call.arguments)["a"]
    assert found == value and type(found) is type(value)


# ---- random answers ------------------------------------------------------------------------------

_MARKS = """
<tool_call> </tool_call> <function=f> <parameter=a> </parameter> </function> [TOOL_CALLS]
[ARGS] f [ ] { } , : 1 1e999 NaN null ; <|tool_call|> <|python_tag|> ``` <|channel|>
<|message|> <|end|> <|start|>assistant analysis commentary <think> </think> <|tool_call>
<tool_call|> call:f{ <|channel> <channel|> <arg_key> </arg_key> <|START_ACTION|>
<|END_ACTION|> [THINK] <|START_RESPONSE|> <|END_RESPONSE|>
"""
PIECES = [
    *_MARKS.split(),
    '"',
    "\\",
    '{"name": "f", ',
    "\n",
    '"arguments": {"a": "',
    '"parameters": ',
    " ",
    BEGIN,
    END,
    CALL,
    CALL_END,
    SEP,
    "```json\n",
    "\ufffd",
    " to=functions.f",
    "é",
    "thought\n",
]


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


def cut_output(known, chance, text):
    voice, output = Voice(known), Output()
    for piece in random_cuts(chance, text):
        output.add(voice.say([Token(5, piece)]))
    output.add(voice.finish())
    return output


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
        whole = output_of(syntax(name), text, len(text) or 1)
        for _ in range(3):
            streamed = cut_output(syntax(name), chance, text)
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
        voice = cut_output(syntax(name), chance, text)
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
        HARMONY,
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


@pytest.fixture(scope="module")
def process():
    process = TemplateProcess()
    yield process
    process.close()


@pytest.mark.parametrize("name", CALL_TEMPLATES)
def test_what_a_template_wants_of_calls(name, process):
    text, known, style = CALL_TEMPLATES[name]
    template = ChatTemplate(
        name="it", text=text, special={"bos_token": "<s>", "eos_token": "</s>"}, process=process
    )
    found = format_of(text)
    assert found.name == known and not found.describes_tools
    assert call_style(template) == style
    conversation = [
        {"role": "user", "content": "Hello"},
        {
            "role": "assistant",
            "tool_calls": [
                {
                    "id": "call_1",
                    "type": "function",
                    "function": {"name": "f", "arguments": '{"city": "K\u00f6ln", "n": 2}'},
                }
            ],
        },
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
    """A codec that has the formats' marks as special tokens, or as text."""
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    if request.param:
        tokenizer.add_special_tokens(sorted({mark for known in FORMATS for mark in known.marks}))
    return TextCodec(tokenizer, None, frozenset({0}))


def is_allowed(constraint, codec, text):
    """Whether the constraint allows the text, whole."""
    try:
        for token_id in codec.encode_rendered(text):
            constraint.accept(token_id)
    except HotsplitError:
        return False
    return constraint.can_end


OBJECTS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "additionalProperties": False,
}
FORCED = [
    {"type": "function", "function": {"name": "f", "parameters": OBJECTS}},
    {
        "type": "function",
        "function": {
            "name": "g",
            "parameters": {
                "type": "object",
                "properties": {"b": {"type": "string"}},
                "required": ["b"],
            },
        },
    },
]


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


# ---- reasoning -----------------------------------------------------------------------------------
