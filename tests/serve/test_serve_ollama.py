"""Ollama's API: the same texts as a chat's or a completion's, as objects or lines of JSON.

Requests are as Ollama's client sends them; the format is that of its docs/api.md and of the types
of its client (ollama 0.6, with which it was tried)."""

import contextlib
import http.client
import json

import numpy as np
import pytest
from case_tables import rows_of
from serving import SAID, Served, save_model

from hotsplit.serve.api_error import ApiError
from hotsplit.serve.ollama_requests import OllamaChatBody, _messages
from hotsplit.serve.request_body import checked

CHAT, GENERATE = "/api/chat", "/api/generate"
GREEDY = {"temperature": 0.0, "num_predict": 12, "num_ctx": 4096}
FILL = {f"tokenizer.ggml.fim_{k}_token_id": np.uint32(40 + n) for n, k in enumerate(("pre", "suf"))}
FILL |= {"tokenizer.ggml.fim_mid_token_id": np.uint32(42)}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    model = save_model(tmp_path_factory.mktemp("ollama"), context_length=512, **FILL)
    with Served(model, "--max-tokens", "60", "--chat-template", "chatml") as served:
        yield served


def asked(served, path, **fields):
    """(the answer, checked against the lines of a stream; the lines)."""
    body = {"model": "any", "keep_alive": "5m", **fields}
    status, whole = served.ask(path, {**body, "stream": False})
    assert status == 200 and whole["done"] is True, whole
    _, text = served.ask(path, body)
    assert served.headers["content-type"] == "application/x-ndjson"
    lines = [json.loads(line) for line in text.splitlines()]
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    assert lines[-1]["done_reason"] == whole["done_reason"]
    assert lines[-1]["eval_count"] == whole["eval_count"]
    return whole, lines


def chatted(served, messages=SAID, **fields):
    chat = served.chat(messages=messages, temperature=0.0, max_tokens=12, **fields)
    return chat["choices"][0]["message"]["content"], chat["usage"]


def test_a_chat(served):
    wanted, usage = chatted(served)
    whole, lines = asked(served, CHAT, messages=SAID, options=GREEDY)
    assert whole["message"] == {"role": "assistant", "content": wanted}
    assert "".join(line["message"]["content"] for line in lines) == wanted and len(lines) > 3
    assert whole["done_reason"] == "length" and whole["eval_count"] == 12
    assert whole["prompt_eval_count"] == usage["prompt_tokens"] and whole["total_duration"] > 0


def test_a_question_with_a_system_message(served):
    whole, lines = asked(served, GENERATE, prompt="Hello", system="Be short.", options=GREEDY)
    wanted, _ = chatted(served, [{"role": "system", "content": "Be short."}, *SAID])
    assert whole["response"] == "".join(line["response"] for line in lines) == wanted


@pytest.mark.parametrize("fields", [{"raw": True}, {"suffix": " end"}])
def test_a_completion(served, fields):
    whole, _ = asked(served, GENERATE, prompt="Once", options=GREEDY, think=False, **fields)
    body = {"prompt": "Once", "suffix": fields.get("suffix"), "temperature": 0.0, "max_tokens": 12}
    _, completion = served.ask("/v1/completions", body)
    assert whole["response"] == completion["choices"][0]["text"]
    assert whole["prompt_eval_count"] == completion["usage"]["prompt_tokens"]


def test_a_call_and_its_result(served):
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    more = {"tools": [tool], "tool_choice": "required", "options": {"num_predict": 60, "seed": 1}}
    whole, lines = asked(served, CHAT, messages=SAID, **more)
    (call,) = whole["message"]["tool_calls"]
    assert call["function"]["name"] == "f" and call["function"]["arguments"]["a"] in (1, 2)
    assert [line["message"].get("tool_calls") for line in lines if "tool_calls" in line["message"]]
    result = {"role": "tool", "tool_name": "f", "content": "done"}
    messages = [*SAID, whole["message"], result]
    again, _ = asked(served, CHAT, messages=messages, tools=[tool], options=GREEDY)
    assert again["eval_count"] == 12


def test_results_belong_to_calls_by_the_functions_name():
    def call(name):
        return {"function": {"name": name, "arguments": {}}}

    def result(name):
        return {"role": "tool", "content": name, **({"tool_name": name} if name else {})}

    calls = {"role": "assistant", "thinking": "Hm.", "tool_calls": [*map(call, "fgf")]}
    items = [calls, *map(result, ("g", "f", None))]
    _, *results = _messages(checked(OllamaChatBody, {"messages": items}).messages)
    ids = [message["tool_call_id"] for message in results]
    assert ids == ["000000001", "000000000", "000000002"]
    assert [message["name"] for message in results] == ["g", "f", "f"]


def test_ids_of_calls_are_kept():
    """Newer servers of Ollama send ids with calls, and clients send them back."""
    calls = [{"id": i, "function": {"name": "f", "arguments": {}}} for i in ("call_a", "call_b")]
    results = [{"role": "tool", "content": "", "tool_call_id": "call_b"}]
    results += [{"role": "tool", "content": "", "tool_name": "f"}]
    items = [{"role": "assistant", "tool_calls": calls}, *results]
    message, *results = _messages(checked(OllamaChatBody, {"messages": items}).messages)
    assert [call["id"] for call in message["tool_calls"]] == ["call_a", "call_b"]
    assert [result["tool_call_id"] for result in results] == ["call_b", "call_a"]
    assert [result["name"] for result in results] == ["f", "f"]


def test_a_wrong_number_of_tokens_is_refused_by_the_options_name():
    for value in (-3, "4"):
        with pytest.raises(
            ApiError, match=rf"^options\.num_predict is {json.dumps(value)}, wanted"
        ):
            checked(OllamaChatBody, {"options": {"num_predict": value}})
    for endless in (-2, -1, 0):
        body = checked(OllamaChatBody, {"options": {"num_predict": endless}})
        assert body.chat() == {"stream": True, "stop": []}


def test_a_value_that_looks_like_a_place_is_refused(served):
    """Places in an error are renamed: there is no message 7."""
    messages = [{"role": "messages[7]", "content": "Hello"}]
    for path in (CHAT, "/v1/messages"):
        status, answer = served.ask(path, {"messages": messages})
        error = answer["error"]
        line = error if isinstance(error, str) else error["message"]
        assert status == 400 and line.startswith('messages[0].role is "messages[7]"')


@pytest.mark.parametrize("shape", ["json", {"type": "object", "required": ["a"]}])
def test_a_format_is_followed(served, shape):
    fields = {"messages": SAID, "format": shape, "options": {"seed": 3, "num_predict": -1}}
    whole, lines = asked(served, CHAT, **fields)
    if whole["done_reason"] == "stop":
        assert isinstance(json.loads(whole["message"]["content"]), dict)
    assert whole["message"]["content"].startswith("{")


def test_a_stop_string(served):
    text = chatted(served)[0]
    options = {**GREEDY, "stop": [text[4:8]]}
    whole, _ = asked(served, CHAT, messages=SAID, options=options)
    assert whole["message"]["content"] == text[: text.index(text[4:8])]
    assert whole["done_reason"] == "stop"


def test_a_request_without_a_text_loads_the_model(served):
    for path, more in ((CHAT, {"messages": []}), (GENERATE, {})):
        status, answer = served.ask(path, {"model": "any", **more})
        assert (status, answer["done"], answer["done_reason"]) == (200, True, "load")


@pytest.mark.parametrize("kind", [None, "application/x-www-form-urlencoded", "text/plain"])
def test_a_body_without_a_type_is_read_unless_a_browser_sends_it(served, kind):
    """LiteLLM's provider sends no type, and curl -d that of a form."""
    raw, connection = json.dumps({"model": "any"}), http.client.HTTPConnection
    for more in ({}, {"Origin": "https://example.org"}, {"Sec-Fetch-Site": "cross-site"}):
        headers = {**({} if kind is None else {"Content-Type": kind}), **more}
        with contextlib.closing(connection("127.0.0.1", served.port, timeout=60)) as client:
            client.request("POST", GENERATE, raw, headers)
            status = client.getresponse().status
        assert status == (415 if more or kind == "text/plain" else 200)


def test_the_model_is_listed(served):
    _, answer = served.ask("/api/tags")
    (model,) = answer["models"]
    assert model["name"] == model["model"] == "tiny" and model["size"] > 1000
    assert served.ask("/api/version")[1].keys() == {"version"}


WRONG = """
/api/chat => messages[0].role => {"messages": [{"role": "x", "content": "a"}]}
/api/chat => messages[1].content => {"messages": [{"role": "user", "content": "a"}, {"role": "user",
  "content": 5}]}
/api/chat => messages[0].images => {"messages": [{"role": "user", "content": "a",
  "images": ["aGk="]}]}
/api/chat => options.temperature => {"messages": [{"role": "user", "content": "a"}],
  "options": {"temperature": "hot"}}
/api/chat => format => {"messages": [{"role": "user", "content": "a"}], "format": "yaml"}
/api/chat => format is 5, wanted "json" => {"prompt": "a", "format": 5}
/api/chat => think is "x", wanted true, false, low => {"prompt": "a", "think": "x"}
/api/generate => prompt is 5 => {"prompt": 5}
/api/generate => context => {"prompt": "a", "context": [1, 2]}
/api/generate => template => {"prompt": "a", "template": "{{ .Prompt }}"}
"""


@pytest.mark.parametrize("path, param, fields", rows_of(WRONG))
def test_errors_have_ollamas_form(served, path, param, fields):
    status, answer = served.ask(path, json.loads(fields))
    assert status == 400 and answer["error"].startswith(param), answer
