"""Tool calls and reasoning in streamed answers: the forms of known templates, and text that only
looks like a call."""

import json
from pathlib import Path

import pytest

from hotsplit.runtime.generate.generation import Token
from hotsplit.serve.answers import Output, Voice
from hotsplit.serve.text_requests import Syntax
from hotsplit.serve.tool_calls import ToolSplitter, form_of

HERMES = '{% for tool in tools %}...{% endfor %}<tool_call>\n{"name": <n>, "arguments": <a>}'
MISTRAL = "{% if tools %}[AVAILABLE_TOOLS]{% endif %} [TOOL_CALLS]"
LLAMA = '<|start_header_id|>{% if tools %}{"name": n, "parameters": p}{% endif %}'
ONE = {"name": "f", "arguments": {"a": 1}}
TWO = {"name": "g", "arguments": {"b": "</x>"}}


def split(template, text, size, most=128):
    splitter = ToolSplitter(form_of(template), most=most)
    said = "".join(splitter.push(text[n : n + size]) for n in range(0, len(text), size))
    rest, calls = splitter.finish()
    return said + rest, [(call.name, json.loads(call.arguments)) for call in calls]


def calls_of(*calls):
    return [(call["name"], call["arguments"]) for call in calls]


def hermes(*calls):
    return "\n".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls)


def llama(call):
    return json.dumps({"name": call["name"], "parameters": call["arguments"]})


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    "template, text, said, calls",
    [
        (HERMES, "Well.\n" + hermes(ONE), "Well.\n", [ONE]),
        (HERMES, hermes(ONE, TWO), "", [ONE, TWO]),
        (HERMES, hermes(ONE).removesuffix("</tool_call>"), "", [ONE]),
        (HERMES, "a <tool b < <tool_cal> c", "a <tool b < <tool_cal> c", []),
        (HERMES, "<tool_call>{broken", "<tool_call>{broken", []),
        (HERMES, "<tool_call>[1]</tool_call>", "<tool_call>[1]</tool_call>", []),
        (HERMES, "ends with <tool_", "ends with <tool_", []),
        (MISTRAL, "[TOOL_CALLS] " + json.dumps([ONE, TWO]), "", [ONE, TWO]),
        (MISTRAL, "[TOOL_CALLS] none", "[TOOL_CALLS] none", []),
        (LLAMA, llama(ONE), "", [ONE]),
        (LLAMA, "\n" + llama(ONE) + "; " + llama(TWO), "", [ONE, TWO]),
        (LLAMA, "<|python_tag|>" + llama(ONE), "", [ONE]),
        (LLAMA, "Say " + llama(ONE), "Say " + llama(ONE), []),
        (LLAMA, '{"a": 1}', '{"a": 1}', []),
        (LLAMA, "<|pyth", "<|pyth", []),
    ],
)
def test_calls_are_separated_from_text(template, text, said, calls, size):
    assert split(template, text, size) == (said, calls_of(*calls))


def test_at_most_one_call_is_returned():
    assert split(HERMES, hermes(ONE, TWO), 5, most=1)[1] == calls_of(ONE)


@pytest.mark.parametrize(
    "template", ["{{ messages }}", "{{ tools }}", "<tool_call> without", "{% if tools %}<call>"]
)
def test_a_template_with_an_unknown_form_of_calls(template):
    assert form_of(template) is None


def test_the_smollm2_template_has_no_tools():
    path = Path(__file__).parent.parent / "build" / "smollm2" / "q8_0.gguf"
    if not path.exists():
        pytest.skip("no SmolLM2: make smollm2")
    from hotsplit.artifacts.model_file import TEMPLATE_KEY, ModelFile

    assert form_of(ModelFile.load(path).text(TEMPLATE_KEY)) is None


def voice(**fields):
    return Voice(Syntax(**{"splits_reasoning": True, **fields}))


def said_by(voice, tokens):
    said = Output()
    for token in tokens:
        said.add(voice.say([token]))
    said.add(voice.finish())
    return said


def tokens_of(text, size):
    return [Token(5, text[n : n + size]) for n in range(0, len(text), size)]


@pytest.mark.parametrize("size", [1, 4, 1000])
@pytest.mark.parametrize(
    "text, is_open, reasoning, content",
    [
        ("<think>a\nb</think>\n\nc", False, "a\nb", "\n\nc"),
        ("a</think>b", True, "a", "b"),
        ("\n<think>never ends", False, "never ends", ""),
        ("<thin", False, "", "<thin"),
        ("no <think>tag</think>", False, "", "no <think>tag</think>"),
    ],
)
def test_reasoning_is_separated_from_content(text, is_open, reasoning, content, size):
    said = said_by(voice(begins_reasoning=is_open), tokens_of(text, size))
    assert (said.reasoning, said.content) == (reasoning, content)
    plain = said_by(voice(splits_reasoning=False), tokens_of(text, size))
    assert (plain.reasoning, plain.content) == ("", text)


@pytest.mark.parametrize("size", [1, 1000])
def test_reasoning_before_calls(size):
    text = "<think>hm</think>So: " + hermes(ONE)
    found = said_by(voice(form=form_of(HERMES)), tokens_of(text, size))
    assert (found.reasoning, found.content) == ("hm", "So: ")
    assert [call.name for call in found.calls] == ["f"]


def test_special_tokens_that_mark_calls_are_seen():
    """A special token may mark a call, although it has no text in an answer."""
    tokens = [Token(7, ""), *tokens_of(json.dumps([ONE]), 4), Token(None, "")]
    form = form_of(MISTRAL)
    found = said_by(voice(form=form, marks={7: "[TOOL_CALLS]"}), tokens)
    assert found.content == "" and [call.name for call in found.calls] == ["f"]
    assert said_by(voice(form=form), tokens).calls == []
