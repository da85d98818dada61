"""The server through other people's client libraries: openai's, anthropic's and Ollama's own, and
requests of programs that are not installed here, as their releases send them."""

import json

import anthropic
import numpy as np
import ollama
import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from serving import Served, save_model

KEY = "a-key"
SAID = [{"role": "user", "content": "Hello"}]
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA}}
FILL = {f"tokenizer.ggml.fim_{k}_token_id": np.uint32(40 + n) for n, k in enumerate(("pre", "suf"))}
FILL |= {"tokenizer.ggml.fim_mid_token_id": np.uint32(42)}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    model = save_model(tmp_path_factory.mktemp("libraries"), context_length=1024, **FILL)
    options = ("--parallel", "2", "--max-tokens", "60", "--chat-template", "chatml")
    with Served(model, *options, "--api-key", KEY, key=KEY) as served:
        yield served


@pytest.fixture(scope="module")
def wanted(served):
    """The text that all of them should get."""
    answer = served.chat(messages=SAID, temperature=0.0, max_tokens=8)
    return answer["choices"][0]["message"]["content"]


def test_openais(served, wanted):
    with openai.OpenAI(base_url=f"http://127.0.0.1:{served.port}/v1", api_key=KEY) as client:
        (name,) = [model.id for model in client.models.list()]
        asked = {"model": name, "messages": SAID, "temperature": 0, "max_tokens": 8}
        assert client.chat.completions.create(**asked).choices[0].message.content == wanted
        chunks = list(client.chat.completions.create(**asked, stream=True))
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == wanted
        answer = client.chat.completions.create(
            model=name, messages=SAID, tools=[TOOL], tool_choice="required", seed=1
        )
        (call, *_) = answer.choices[0].message.tool_calls
        assert json.loads(call.function.arguments)["a"] in (1, 2)
        answer = client.responses.create(
            model=name, input="Hello", temperature=0, max_output_tokens=8
        )
        assert answer.output_text == wanted
        with pytest.raises(openai.BadRequestError, match="messages is an empty list|at least 1"):
            client.chat.completions.create(model=name, messages=[])


def test_anthropics(served, wanted):
    url = f"http://127.0.0.1:{served.port}"
    with anthropic.Anthropic(base_url=url, api_key=KEY) as client:
        asked = {"model": "any", "messages": SAID, "max_tokens": 8}
        asked["extra_body"] = {"temperature": 0.0}
        message = client.messages.create(**asked)
        assert message.content[0].text == wanted and message.stop_reason == "max_tokens"
        with client.messages.stream(**asked) as stream:
            assert "".join(stream.text_stream) == wanted
            assert stream.get_final_message().usage.output_tokens == message.usage.output_tokens
        counted = client.messages.count_tokens(model="any", messages=SAID)
        usage = message.usage
        assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens
        tool = {"name": "f", "input_schema": SCHEMA}
        choice = {"type": "tool", "name": "f"}
        asked |= {"tools": [tool], "tool_choice": choice, "max_tokens": 60}
        message = client.messages.create(**asked)
        assert message.content[-1].type == "tool_use" and message.content[-1].input["a"] in (1, 2)
        with pytest.raises(anthropic.BadRequestError, match="max_tokens is 0"):
            client.messages.create(**{**asked, "max_tokens": 0})


def test_ollamas(served, wanted):
    url = f"http://127.0.0.1:{served.port}"
    client = ollama.Client(host=url, headers={"Authorization": f"Bearer {KEY}"})
    (model,) = client.list().models
    shown = client.show(model.model)
    assert {"completion", "tools", "insert"} == set(shown.capabilities)
    asked = {"model": model.model, "options": {"temperature": 0, "num_predict": 8}}
    assert client.chat(messages=SAID, **asked).message.content == wanted
    parts = list(client.chat(messages=SAID, **asked, stream=True))
    assert "".join(part.message.content for part in parts) == wanted and parts[-1].done
    assert client.generate(prompt="Hello", **asked).response == wanted
    filled = client.generate(prompt="def f(", suffix="return a", **asked)
    assert filled.eval_count == 8 and filled.done_reason == "length"
    answer = client.chat(model=model.model, messages=SAID, format=SCHEMA, options={"seed": 1})
    assert json.loads(answer.message.content)["a"] in (1, 2)
    with pytest.raises(ollama.ResponseError, match="send the conversation to /api/chat"):
        client.generate(prompt="Hello", context=[1], model=model.model)


# As litellm 1.110.2 sends them, with its provider for any server of OpenAI's API.
FORWARDED = (
    b'{"model":"any","messages":[{"role":"user","content":"Hello"}],"temperature":0,"max_tokens":8,'
    b'"tools":[{"type":"function","function":{"name":"f","description":"d","parameters":{"type":'
    b'"object","properties":{"a":{"type":"integer"}}}}}],"tool_choice":"auto"}',
    b'{"model":"any","messages":[{"role":"system","content":"S"},{"role":"user","content":"Hello"}],'
    b'"stop":["X"],"max_completion_tokens":8,"response_format":{"type":"json_object"},"stream":true,'
    b'"stream_options":{"include_usage":true}}',
)


def test_litellms_requests(served):
    whole, streamed = map(json.loads, FORWARDED)
    answer = ChatCompletion.model_validate(served.chat(**whole))
    assert answer.usage.completion_tokens == 8
    chunks = list(served.stream("/v1/chat/completions", streamed))
    *pieces, last = map(ChatCompletionChunk.model_validate, chunks)
    assert last.usage.completion_tokens <= 8 and not last.choices
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces)
    assert text.lstrip().startswith("{")


# What Continue's provider for Ollama (core/llm/llms/Ollama.ts) sends for a completion in a line:
# first the question whether the model fills in the middle, then both sides of the place.
FILLED = json.loads(r"""
{"model": "tiny", "prompt": "def add(a, b):\n    ", "suffix": "\n\nprint(add(1, 2))",
"options": {"temperature": 0.01, "num_predict": 8, "stop": ["\n\n", "/src/"], "num_ctx": 8192},
"keep_alive": 1800, "stream": true}
""")


def test_an_editors_fill_in_the_middle(served):
    status, shown = served.ask("/api/show", {"name": "tiny"})
    assert status == 200 and ".Suffix" in shown["template"]
    assert shown["parameters"] == "num_ctx 1024"
    status, text = served.ask("/api/generate", FILLED)
    lines = [json.loads(line) for line in text.splitlines()]
    assert status == 200 and lines[-1]["done"] and all("response" in line for line in lines)
    body = {**FILLED["options"], "prompt": FILLED["prompt"], "suffix": FILLED["suffix"]}
    del body["num_ctx"]
    _, answer = served.ask("/v1/completions", {**body, "max_tokens": body.pop("num_predict")})
    assert lines[-1]["prompt_eval_count"] == answer["usage"]["prompt_tokens"]
