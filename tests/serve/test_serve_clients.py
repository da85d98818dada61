"""Requests as agents, editors and chat pages send them, over several turns, and answers checked
with OpenAI's own types. The template has no tools, so that the server describes them."""

import json

import pytest
from case_tables import rows_of
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from serving import CALL, SAID, TOOL, Served, save_model

from hotsplit.serve.api_error import ApiError
from hotsplit.serve.request_body import checked
from hotsplit.serve.responses_requests import ResponsesBody, chat_fields

PATH = "/v1/responses"
EVENT = TypeAdapter(ResponseStreamEvent)  # takes 0.2 s
FUNCTION = json.loads("""
{"type": "function", "name": "f", "description": "Runs it.", "strict": false,
"parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}}
""")
OTHER_TOOLS = json.loads(r"""
[{"type": "web_search", "external_web_access": true}, {"type": "custom", "name": "patch",
"description": "Edits files.", "format": {"type": "grammar", "syntax": "lark",
"definition": "start: \"a\""}}, {"type": "namespace", "name": "notes", "description": "Notes.",
"tools": [{"type": "function", "name": "f", "description": "Runs it.", "strict": false,
"parameters": {"type": "object", "properties": {"a": {"type": "integer"}},
"required": ["a"]}}]}, {"type": "local_shell"}, {"type": "image_generation",
"output_format": "png"}, {"type": "mcp", "server_label": "a",
"server_url": "https://example.org"}, {"type": "made_up_next_year"}]
""")


def said(role, *texts):
    content = [{"type": "input_text", "text": text} for text in texts]
    return {"type": "message", "role": role, "content": content}


ASKED = [said("developer", "Ask before writing."), said("user", "In /tmp."), said("user", "Go on")]
AGENT = {
    "input": ASKED,
    "tools": [FUNCTION, *OTHER_TOOLS],
    **json.loads("""
{"model": "any", "instructions": "You edit code.", "tool_choice": "auto",
"parallel_tool_calls": false, "reasoning": {"effort": "medium", "summary": "auto"},
"store": false, "stream": true, "include": ["reasoning.encrypted_content"],
"prompt_cache_key": "0199-a", "service_tier": "auto", "text": {"verbosity": "low"},
"client_metadata": {"installation": "a"}, "previous_response_id": null}
"""),
}
# As a gateway forwards a chat: every field that it knows, most of them without effect.
GATEWAY = json.loads("""
{"model": "openai/any", "input": [{"role": "user", "content": "Hello"}], "instructions": null,
"max_output_tokens": 20, "temperature": 0.0, "top_p": 1.0, "tools": [{"type": "web_search",
"external_web_access": true}], "tool_choice": "auto", "truncation": "auto", "background": false,
"metadata": {"team": "a"}, "include": [], "parallel_tool_calls": true,
"previous_response_id": null, "prompt": null, "reasoning": {"effort": null},
"safety_identifier": "b", "service_tier": "default", "store": true, "stream": false,
"stream_options": null, "text": {"format": {"type": "text"}}, "top_logprobs": 0,
"max_tool_calls": null, "user": "c", "prompt_cache_retention": "24h"}
""")


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    model = save_model(tmp_path_factory.mktemp("clients"), context_length=1024)
    options = ("--parallel", "2", "--max-tokens", "60", "--chat-template", "chatml")
    with Served(model, *options) as served:
        yield served


def streamed(served, body):
    """The last event's response; checks every event."""
    status, text = served.ask(PATH, body)
    assert status == 200, text
    events = [json.loads(part.partition("data: ")[2]) for part in text.split("\n\n") if part]
    for event in events:
        EVENT.validate_python(event)
    return events[-1]["response"]


# Items of a client's own kinds, which are left out.
ITEMS = json.loads("""
[{"type": "reasoning", "id": "rs_1", "summary": [], "content": null},
{"type": "custom_tool_call", "id": "ctc_1", "status": "completed", "call_id": "c2",
"name": "patch", "input": "*** Begin"},
{"type": "custom_tool_call_output", "call_id": "c2", "output": "ok"},
{"type": "web_search_call", "status": "completed", "action": {"type": "search", "query": "a"}}]
""")


def test_an_agents_turns(served):
    first = streamed(served, {**AGENT, "grammar": CALL})
    assert first["status"] == "completed"
    text, call = first["output"]
    assert (text["type"], call["type"], call["name"]) == ("message", "function_call", "f")
    wanted = 'tools of types ["custom", "image_generation", "local_shell", "made_up_next_year",'
    assert sum(wanted in line for line in served.log) == 1
    output = [{"type": "input_text", "text": "done"}]
    later = [
        {**ITEMS[0], "encrypted_content": "gA"},
        text,
        {**call, "id": "fc_1"},
        {"type": "function_call_output", "call_id": call["call_id"], "output": output},
        *ITEMS[1:],
        said("developer", "Now read only."),
        said("user", "Thanks"),
    ]
    second = streamed(served, {**AGENT, "input": [*AGENT["input"], *later]})
    assert second["status"] in ("completed", "incomplete") and second["output"]


def test_a_gateways_request(served):
    status, answer = served.ask(PATH, GATEWAY)
    assert status == 200, answer
    Response.model_validate(answer)
    assert answer["truncation"] == "disabled"
    sent = ("max_output_tokens", "temperature", "top_p", "tool_choice", "metadata", "user")
    assert all(answer[name] == GATEWAY[name] for name in sent) and answer["tools"] == []
    plain = {"input": "Hello", "max_output_tokens": 20, "temperature": 0.0, "top_p": 1.0}
    _, alone = served.ask(PATH, plain)
    assert [i["content"] for i in answer["output"]] == [i["content"] for i in alone["output"]]


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
    messages = chat_fields(ResponsesBody(**{"instructions": "A", "input": items}))[0]["messages"]
    status, answer = served.ask("/apply-template", {"messages": messages})
    system = "<|im_start|>system\nA\nB\nC<|im_end|>\n"
    assert status == 200 and answer["prompt"].startswith(f"{system}<|im_start|>user\nu<|im_end|>")
    without = chat_fields(ResponsesBody(**{"input": [said("user", "u")]}))[0]["messages"]
    assert [message["role"] for message in without] == ["user"]


MISSED = """
tools[0] => {"tools": [5]}
tools[0] => {"tools": [{}]}
tools[0] => {"tools": [{"type": "function"}]}
truncation => {"truncation": "always"}
include => {"include": ["message.output_text.logprobs"]}
include => {"include": [5]}
include => {"include": ["reasoning.encrypted"]}
include => {"include": "reasoning"}
input[0].content => {"input": [{"role": "developer", "content": 5}]}
input[0].content => {"input": [{"role": "developer"}]}
"""


@pytest.mark.parametrize("param, more", rows_of(MISSED))
def test_what_would_be_missed_is_refused(more, param):
    with pytest.raises(ApiError) as caught:
        chat_fields(checked(ResponsesBody, {"input": "a", **json.loads(more)}))
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
        reasoning, message = found["output"]
        assert reasoning["content"][0]["text"].strip() == "hm, well"
        assert message["content"][0]["text"] == "ok then"
    cut = {**body, "max_output_tokens": num_reasoning - 1}
    assert reasoning_tokens(served.ask(PATH, cut)[1]) == num_reasoning - 1
    plain = {"input": "Hello", "grammar": 'root ::= "no <think>hm</think>"'}
    assert reasoning_tokens(served.ask(PATH, plain)[1]) == 0


# ---- chats and completions of editors and pages --------------------------------------------------

# What Continue stops a completion of code at: 19 texts and more, with the template's own.
STOPS = json.loads(r"""
["<|endoftext|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>",
"<|repo_name|>", "<|file_sep|>", "<|im_start|>", "<|im_end|>", "\n\n", "\r\n\r\n", "/src/",
"#- coding: utf-8", "```", "\nfunction", "\nclass", "\nmodule", "\nexport", "\nimport"]
""")
REPLAYED = {
    # cline, src/core/api/providers/openai.ts: content in parts, temperature, usage, tools
    "Cline": json.loads(r"""
{"model": "any", "temperature": 0, "stream": true, "stream_options": {"include_usage": true},
"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
"messages": [{"role": "system", "content": "You are Cline."}, {"role": "user",
"content": [{"type": "text", "text": "<task>Go</task>"}]}, {"role": "assistant",
"tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "f",
"arguments": "{\"a\": 1}"}}]}, {"role": "tool", "tool_call_id": "call_1", "content": "done"},
{"role": "user", "content": [{"type": "text", "text": "# Context"}]}]}
"""),
    # continue, core/llm/openaiTypeConverters.ts: an assistant's empty content is a space
    "Continue": {
        "stop": STOPS,
        **json.loads(r"""
{"model": "any", "max_tokens": 8, "stream": true, "stream_options": {"include_usage": true},
"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"},
"description": "d"}}], "messages": [{"role": "user", "content": "Hello"}, {"role": "assistant",
"content": " ", "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "f",
"arguments": "{\"a\": 1}"}}]}, {"role": "tool", "content": "done", "tool_call_id": "call_1"}]}
"""),
    },
    # open-webui, backend/open_webui: a chat with its page's parameters, and the request for a title
    "Open WebUI": json.loads(r"""
{"model": "any", "stream": true, "stream_options": {"include_usage": true}, "temperature": 0.8,
"top_p": 0.9, "max_tokens": 8, "top_k": 40, "frequency_penalty": 0.0, "seed": 42,
"stop": ["###"], "num_ctx": 2048, "num_keep": 24, "logit_bias": {"5": 1},
"reasoning_effort": "medium", "keep_alive": "5m", "messages": [{"role": "user",
"content": "Hello"}], "tools": [{"type": "function", "function": {"name": "f",
"parameters": {"type": "object"}}}], "function_calling": "native"}
"""),
    "Open WebUI's title": json.loads(r"""
{"model": "any", "stream": false, "max_completion_tokens": 20, "messages": [{"role": "user",
"content": "Hello"}]}
"""),
    # litellm and llm: what they know of OpenAI's newer fields
    "gateway": json.loads(r"""
{"model": "any", "stream": false, "messages": [{"role": "user", "content": "Hello"}],
"verbosity": "low", "max_tokens": 4, "n": 2, "parallel_tool_calls": true,
"service_tier": "auto", "logprobs": true, "top_logprobs": 2,
"response_format": {"type": "text"}, "modalities": ["text"]}
"""),
    "Continue's code": {
        "stop": STOPS,
        **json.loads(r"""
{"model": "any", "prompt": "def f(", "max_tokens": 8, "temperature": 0.01, "stream": true}
"""),
    },
}


@pytest.mark.parametrize("name", REPLAYED)
def test_a_chat_of_other_programs(served, name):
    body = {"max_tokens": 8, **REPLAYED[name]}
    if "prompt" in body:
        # A reason is null until the last piece, as OpenAI sends it and its type does not say.
        chunks = [Completion.construct(**chunk) for chunk in served.stream("/v1/completions", body)]
        Completion.model_validate(chunks[-1].model_dump())
        assert all(chunk.object == "text_completion" for chunk in chunks)
    elif not body["stream"]:
        answer = ChatCompletion.model_validate(served.chat(**body))
        assert len(answer.choices) == body.get("n", 1) and answer.usage.total_tokens
        assert all(choice.message.role == "assistant" for choice in answer.choices)
        return
    else:
        found = served.stream("/v1/chat/completions", body)
        chunks = list(map(ChatCompletionChunk.model_validate, found))
        assert chunks[0].choices[0].delta.role == "assistant" and chunks[-1].choices == []
        assert chunks.pop().usage.completion_tokens
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert reasons[-1] in ("stop", "length") and not any(reasons[:-1])


def test_tools_are_described_to_a_template_without_them(served):
    messages = REPLAYED["Cline"]["messages"]
    _, answer = served.ask("/apply-template", {"messages": messages, "tools": [TOOL]})
    system, *turns = answer["prompt"].split("<|im_start|>")[1:]
    assert system.startswith("system\nYou are Cline.\n\n# Tools") and json.dumps(TOOL) in system
    assert "<tool_call>" in turns[1] and turns[2].startswith("user\n<tool_response>\ndone\n")
    _, plain = served.ask("/apply-template", {"messages": SAID})
    assert "tool" not in plain["prompt"]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_a_described_tool_is_called(served, choice):
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    answer = served.chat(tools=[tool], tool_choice=choice, parallel_tool_calls=False, seed=1)
    (choice,) = ChatCompletion.model_validate(answer).choices
    assert choice.finish_reason == "tool_calls"
    assert [call.function.name for call in choice.message.tool_calls] == ["f"]


def test_gateways_know_that_the_context_is_exceeded(served):
    """LiteLLM finds it by these words (exception_mapping_utils.py)."""
    for words in ("word " * 1200, "word " * 40_000):
        status, answer = served.ask("/v1/completions", {"prompt": words})
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
        assert "this model's maximum context length is" in answer["error"]["message"].lower()
