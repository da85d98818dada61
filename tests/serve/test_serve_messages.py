"""Anthropic's /v1/messages: the same texts as a chat's, as blocks and events.

Requests are as Anthropic's client and Claude Code send them; the wire format is that of
docs.anthropic.com and of the client's types (anthropic 2.14, with which it was tried)."""

import json

import pytest
from case_tables import rows_of
from serving import CALL, SAID, Served, save_model

from hotsplit.serve.messages_requests import MessagesBody, chat_fields

PATH = "/v1/messages"
TOOL = json.loads("""
{"name": "f", "description": "Runs it.", "cache_control": {"type": "ephemeral"}, "input_schema":
{"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}}
""")
CODE = json.loads("""
{"model": "any", "max_tokens": 20, "system": [
{"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=a5145;"},
{"type": "text", "text": "You edit code.", "cache_control": {"type": "ephemeral"}}],
"metadata": {"user_id": "a"}, "context_management": {"edits": []}, "temperature": 0.0,
"messages": [{"role": "user", "content": [{"type": "text", "text": "Go", "cache_control": null}]},
{"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm.", "signature": ""},
{"type": "text", "text": "Well."},
{"type": "tool_use", "id": "call_1", "name": "f", "input": {"a": 1}}]},
{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call_1",
"content": [{"type": "text", "text": "done"}]}, {"type": "text", "text": "Go on"}]}]}
""")


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    model = save_model(tmp_path_factory.mktemp("messages"), context_length=512)
    with Served(model, "--max-tokens", "60", "--chat-template", "chatml") as served:
        yield served


def asked(served, **fields):
    body = {"model": "any", "max_tokens": 20, "messages": SAID, **fields}
    status, answer = served.ask(PATH, body, headers={"anthropic-version": "2023-06-01"})
    assert status == 200, answer
    return answer


def streamed(served, **fields):
    """(the message put together from its events, their types)."""
    text = asked(served, stream=True, **fields)
    message, types = {}, []
    for part in text.split("\n\n")[:-1]:
        head, _, data = part.partition("\n")
        event = json.loads(data.removeprefix("data: "))
        types.append(event["type"])
        assert head == f"event: {event['type']}"
        blocks = message.get("content", [])
        match event["type"]:
            case "message_start":
                message = event["message"]
                assert message["content"] == [] and message["stop_reason"] is None
            case "content_block_start":
                assert event["index"] == len(blocks)
                blocks.append({**event["content_block"], "json": ""})
            case "content_block_delta":
                block, delta = blocks[event["index"]], event["delta"]
                kind = delta.pop("type")
                for name, more in delta.items():
                    block["json" if kind == "input_json_delta" else name] += more
            case "content_block_stop":
                block = blocks[event["index"]]
                if written := block.pop("json"):
                    block["input"] = json.loads(written)
            case "message_delta":
                message |= event["delta"] | {"usage": event["usage"]}
    return message, types


def without_ids(message):
    content = [{**block, "id": None} for block in message["content"]]
    return {**message, "id": None, "content": content, "usage": None, "timings": None}


def test_a_message_has_the_text_of_a_chat(served):
    chat = served.chat(max_tokens=20, temperature=0.0)
    answer = asked(served, temperature=0.0)
    assert answer["content"] == [{"type": "text", "text": chat["choices"][0]["message"]["content"]}]
    assert (answer["type"], answer["role"]) == ("message", "assistant")
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("max_tokens", None)
    usage = answer["usage"]
    num_prompt = usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert num_prompt == chat["usage"]["prompt_tokens"] and usage["output_tokens"] == 20
    counted = served.ask(f"{PATH}/count_tokens", {"model": "any", "messages": SAID})
    assert counted == (200, {"input_tokens": num_prompt})


def test_a_stop_sequence_is_named(served):
    text = asked(served, temperature=0.0)["content"][0]["text"]
    stop = text[5:9]
    answer = asked(served, temperature=0.0, stop_sequences=["@@", stop])
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", stop)
    assert answer["content"][0]["text"] == text[: text.index(stop)]


THOUGHT = 'root ::= "<think>hm</think>Well. <tool_call>{\\"name\\": \\"f\\", '
THOUGHT += '\\"arguments\\": {\\"a\\": 1}}</tool_call>"'


@pytest.mark.parametrize("grammar", [CALL, THOUGHT, None])
def test_events_add_up_to_the_message(served, grammar):
    fields = {"tools": [TOOL], "grammar": grammar, "max_tokens": 60, "temperature": 0.0}
    whole = asked(served, **fields)
    found, types = streamed(served, **fields)
    assert without_ids(found) == without_ids({**whole})
    assert types[0] == "message_start" and types[-2:] == ["message_delta", "message_stop"]
    kinds = [block["type"] for block in whole["content"]]
    if grammar is None:
        assert kinds == ["text"]
        return
    assert kinds == ["thinking"] * (grammar is THOUGHT) + ["text", "tool_use"]
    call = whole["content"][-1]
    assert (call["name"], call["input"], whole["stop_reason"]) == ("f", {"a": 1}, "tool_use")


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "f"}])
def test_a_tool_that_is_chosen_is_called_once(served, choice):
    other = {**TOOL, "name": "g"}
    chosen = {"tools": [TOOL] if choice["type"] == "any" else [other, TOOL], "tool_choice": choice}
    chosen["tool_choice"]["disable_parallel_tool_use"] = choice["type"] == "any"
    answer = asked(served, max_tokens=60, seed=1, **chosen)
    calls = [block for block in answer["content"] if block["type"] == "tool_use"]
    assert [call["name"] for call in calls] == ["f"] and calls[0]["input"]["a"] in (1, 2)
    assert answer["stop_reason"] == "tool_use"


def test_an_agents_request(served):
    chat, places = chat_fields(MessagesBody(**CODE))
    assert [message["role"] for message in chat["messages"]] == [
        "system",
        "user",
        "assistant",
        "tool",
        "user",
    ]
    assert places == ["system", "messages[0]", "messages[1]", "messages[2]", "messages[2]"]
    assert chat["messages"][0]["content"] == CODE["system"][1:]
    answer = asked(served, **CODE, tools=[TOOL, {"type": "web_search_20250305", "name": "s"}])
    messages = json.loads("""
[{"role": "system", "content": "You edit code."}, {"role": "user", "content": "Go"},
{"role": "assistant", "content": "Well.", "reasoning_content": "Hm.", "tool_calls":
[{"id": "call_1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]},
{"role": "tool", "tool_call_id": "call_1", "content": "done"}, {"role": "user",
"content": "Go on"}]
""")
    function = {"name": "f", "description": "Runs it.", "parameters": TOOL["input_schema"]}
    tools = [{"type": "function", "function": function}]
    chat = served.chat(messages=messages, tools=tools, temperature=0.0, max_tokens=20)
    assert answer["content"][0]["text"] == chat["choices"][0]["message"]["content"]


def test_thinking_sets_the_templates_variable():
    for kind, is_on in {"enabled": True, "adaptive": True, "disabled": False}.items():
        chat, _ = chat_fields(MessagesBody(messages=SAID, thinking={"type": kind}))
        assert chat["chat_template_kwargs"] == {"enable_thinking": is_on}


def test_a_schema_is_followed(served):
    shape = {"type": "json_schema", "schema": {"enum": ["yes", "no"]}}
    answer = asked(served, output_config={"format": shape, "effort": "max"})
    assert json.loads(answer["content"][0]["text"]) in ("yes", "no")


WRONG = """
messages => {"messages": []}
messages[0] => {"messages": [5]}
messages[0].role => {"messages": [{"role": "x", "content": "a"}]}
messages[0].content => {"messages": [{"role": "user", "content": [{"type": "image"}]}]}
messages[0].content => {"messages": [{"role": "user", "content": [{"type": "tool_result",
  "tool_use_id": "a", "content": [{"type": "image"}]}]}]}
system is 5 => {"system": 5}
stop_sequences => {"stop_sequences": [""]}
max_tokens => {"max_tokens": 0}
tool_choice => {"tool_choice": {"type": "tool", "name": "g"}}
tool_choice.type => {"tool_choice": {"type": "some"}}
tools[0] => {"tools": [{}]}
tools[0].input_schema => {"tools": [{"name": "f", "input_schema": 5}]}
mcp_servers => {"mcp_servers": [{"url": "https://example.org"}]}
"""


@pytest.mark.parametrize("param, fields", rows_of(WRONG))
def test_errors_have_anthropics_form(served, param, fields):
    status, answer = served.ask(PATH, {"messages": SAID, **json.loads(fields)})
    assert status == 400 and answer["type"] == "error", answer
    assert answer["error"]["type"] == "invalid_request_error"
    assert answer["error"]["message"].startswith(param) or "image" in answer["error"]["message"]


def test_counting_tokens_names_places_as_a_message_does(served):
    for fields in ({"system": 5}, {"messages": [{"role": "x", "content": "a"}], "system": "b"}):
        body = {"messages": SAID, **fields}
        answers = [served.ask(path, body)[1]["error"] for path in (PATH, f"{PATH}/count_tokens")]
        assert answers[0] == answers[1] and answers[0]["message"].startswith(("sys", "messages[0]"))
