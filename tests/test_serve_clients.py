"""/v1/responses as agents use it: requests with the fields and items that such clients send, over
several turns, and answers checked with OpenAI's own types."""

import json
import logging

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from serving import CALL, SAID, Served

from hotsplit.runtime.kernels.cpu import library
from hotsplit.serve.api_error import ApiError
from hotsplit.serve.fields import Fields
from hotsplit.serve.responses_requests import _chat_fields

pytest_plugins = ("serve_fixtures",)
pytestmark = pytest.mark.skipif(not library.is_available(), reason="no C++ kernels")
PATH = "/v1/responses"
FUNCTION = {
    "type": "function", "name": "f", "description": "Runs it.", "strict": False,
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
}  # fmt: skip
OTHER_TOOLS = [
    {"type": "web_search", "external_web_access": True},
    {"type": "custom", "name": "patch", "description": "Edits files.",
     "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "a"'}},
    {"type": "namespace", "name": "notes", "description": "Notes.", "tools": [FUNCTION]},
    {"type": "local_shell"}, {"type": "image_generation", "output_format": "png"},
    {"type": "mcp", "server_label": "a", "server_url": "https://example.org"},
    {"type": "made_up_next_year"},
]  # fmt: skip


def said(role, *texts):
    content = [{"type": "input_text", "text": text} for text in texts]
    return {"type": "message", "role": role, "content": content}


AGENT = {
    "model": "any", "instructions": "You edit code.",
    "input": [said("developer", "Ask before writing."), said("user", "In /tmp."), said("user", "Go on")],
    "tools": [FUNCTION, *OTHER_TOOLS], "tool_choice": "auto", "parallel_tool_calls": False,
    "reasoning": {"effort": "medium", "summary": "auto"}, "store": False, "stream": True,
    "include": ["reasoning.encrypted_content"], "prompt_cache_key": "0199-a", "service_tier": "auto",
    "text": {"verbosity": "low"}, "client_metadata": {"installation": "a"}, "previous_response_id": None,
}  # fmt: skip
# As a gateway forwards a chat: every field that it knows, most of them without effect.
GATEWAY = {
    "model": "openai/any", "input": [{"role": "user", "content": "Hello"}], "instructions": None,
    "max_output_tokens": 20, "temperature": 0.0, "top_p": 1.0, "tools": [OTHER_TOOLS[0]],
    "tool_choice": "auto", "truncation": "auto", "background": False, "metadata": {"team": "a"},
    "include": [], "parallel_tool_calls": True, "previous_response_id": None, "prompt": None,
    "reasoning": {"effort": None}, "safety_identifier": "b", "service_tier": "default", "store": True,
    "stream": False, "stream_options": None, "text": {"format": {"type": "text"}}, "top_logprobs": 0,
    "max_tool_calls": None, "user": "c", "prompt_cache_retention": "24h",
}  # fmt: skip


@pytest.fixture(scope="module")
def served(model):
    with Served(model, "--parallel", "2", "--max-tokens", "60") as served:
        yield served


def streamed(served, body):
    """The last event's response; checks every event."""
    status, text = served.ask(PATH, body)
    assert status == 200, text
    events = [json.loads(part.partition("data: ")[2]) for part in text.split("\n\n") if part]
    for event in events:
        TypeAdapter(ResponseStreamEvent).validate_python(event)
    return events[-1]["response"]


def test_an_agents_turns(served):
    first = streamed(served, {**AGENT, "grammar": CALL})
    assert first["status"] == "completed"
    text, call = first["output"]
    assert (text["type"], call["type"], call["name"]) == ("message", "function_call", "f")
    wanted = 'tools of types ["custom", "image_generation", "local_shell", "made_up_next_year",'
    assert sum(wanted in line for line in served.log) == 1
    output = [{"type": "input_text", "text": "done"}]
    later = [
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": None, "encrypted_content": "gA"},
        text, {**call, "id": "fc_1"},
        {"type": "function_call_output", "call_id": call["call_id"], "output": output},
        {"type": "custom_tool_call", "id": "ctc_1", "status": "completed", "call_id": "c2", "name": "patch",
         "input": "*** Begin"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": "ok"},
        {"type": "web_search_call", "status": "completed", "action": {"type": "search", "query": "a"}},
        said("developer", "Now read only."), said("user", "Thanks"),
    ]  # fmt: skip
    second = streamed(served, {**AGENT, "input": [*AGENT["input"], *later]})
    assert second["status"] in ("completed", "incomplete") and second["output"]


def test_a_gateways_request(served):
    status, answer = served.ask(PATH, GATEWAY)
    assert status == 200, answer
    Response.model_validate(answer)
    assert answer["truncation"] == "disabled"
    plain = {"input": "Hello", "max_output_tokens": 20, "temperature": 0.0, "top_p": 1.0}
    _, alone = served.ask(PATH, plain)
    assert [i["content"] for i in answer["output"]] == [i["content"] for i in alone["output"]]


def test_what_is_too_long_is_refused_whatever_truncation_says(served):
    for truncation in ("auto", "disabled"):
        body = {"input": "word " * 400, "truncation": truncation}
        status, answer = served.ask(PATH, body)
        assert status == 400 and answer["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    "items",
    [
        [said("developer", "B", "C"), said("user", "u")],
        [said("developer", "B"), {"role": "system", "content": "C"}, said("user", "u")],
        [said("system", "B"), said("user", "u"), said("developer", "C")],
        [said("user", "u"), {"role": "developer", "content": "B"}, said("developer", "C")],
    ],
)
def test_there_is_one_system_message_at_the_beginning(served, items):
    messages = _chat_fields(Fields({"instructions": "A", "input": items}))["messages"]
    status, answer = served.ask("/apply-template", {"messages": messages})
    assert (status, answer["prompt"]) == (200, "system: A\nB\nC\nuser: u\nassistant: ")
    without = _chat_fields(Fields({"input": [said("user", "u")]}))["messages"]
    assert [message["role"] for message in without] == ["user"]


def test_tools_of_other_kinds_are_left_out(caplog):
    with caplog.at_level(logging.INFO, "hotsplit.serve"):
        chat = _chat_fields(Fields({"input": "a", "tools": [*OTHER_TOOLS, FUNCTION]}))
    assert [tool["function"]["name"] for tool in chat["tools"]] == ["f"]
    assert "namespace" in caplog.text and "web_search" in caplog.text
    assert "tools" not in _chat_fields(Fields({"input": "a", "tools": OTHER_TOOLS}))


@pytest.mark.parametrize(
    "more, param",
    [
        ({"tools": [5]}, "tools[0]"), ({"tools": [{}]}, "tools[0]"),
        ({"tools": [{"type": "function"}]}, "tools[0]"), ({"truncation": "always"}, "truncation"),
        ({"include": ["message.output_text.logprobs"]}, "include"), ({"include": [5]}, "include"),
        ({"include": ["reasoning.encrypted"]}, "include"), ({"include": "reasoning"}, "include"),
        ({"input": [{"role": "developer", "content": 5}]}, "input[0].content"),
        ({"input": [{"role": "developer"}]}, "input[0].content"),
    ],
)  # fmt: skip
def test_what_would_be_missed_is_refused(more, param):
    with pytest.raises(ApiError) as caught:
        _chat_fields(Fields({"input": "a", **more}))
    assert caught.value.status == 400 and caught.value.param == param


def reasoning_tokens(answer):
    return answer["usage"]["output_tokens_details"]["reasoning_tokens"]


def test_reasoning_tokens_are_counted(served):
    given = {"grammar": 'root ::= " <think>hm, well</think>ok then"', "temperature": 0.0}
    answer = served.chat(**given, messages=SAID, logprobs=True)
    text, num_reasoning = "", 0
    for token in answer["choices"][0]["logprobs"]["content"]:
        num_reasoning += "</think>" not in text
        text += token["token"]
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == num_reasoning
    body = {"input": "Hello", **given}
    for found in (served.ask(PATH, body)[1], streamed(served, {**body, "stream": True})):
        assert 1 < reasoning_tokens(found) == num_reasoning < found["usage"]["output_tokens"] - 1
    cut = {**body, "max_output_tokens": num_reasoning - 1}
    assert reasoning_tokens(served.ask(PATH, cut)[1]) == num_reasoning - 1
    plain = {"input": "Hello", "grammar": 'root ::= "no <think>hm</think>"'}
    assert reasoning_tokens(served.ask(PATH, plain)[1]) == 0
