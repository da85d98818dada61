"""The server as its clients see it: a process with a small random model, queried over HTTP."""

import json
import random
import threading

import jsonschema
import openai
import pytest
import torch
from serving import CALL, CONTEXT, SAID, TEMPLATE, TOOL, Served, leave, save_model, text_of_chunks

from hotsplit import Engine
from hotsplit.options.generation_options import GenerationOptions, SamplingOptions

pytest_plugins = ("serve_fixtures",)
CHAT, PROMPT = "/v1/chat/completions", "user: Hello\nassistant: "


@pytest.fixture(scope="module")
def served(model):
    with Served(model, "--parallel", "4", "--kept", "3", "--queue", "40") as served:
        yield served


@pytest.fixture(scope="module")
def engine(model):
    with Engine.load(model, context_length=CONTEXT) as engine:
        yield engine


@pytest.fixture(scope="module")
def client(served):
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)


def alone(engine, prompt, max_tokens=20, stops=(), **sampling):
    """The engine's output for a text that runs alone."""
    ids = prompt if isinstance(prompt, list) else engine.codec.encode_rendered(prompt)
    options = GenerationOptions(max_tokens=max_tokens, stops=stops)
    tokens = engine.generate(ids, sampling=SamplingOptions(**sampling), options=options)
    return "".join(token.text for token in tokens)


def text_of(answer, index=0):
    return answer["choices"][index]["message"]["content"]


def test_an_unknown_field_is_ignored_and_said_once(served):
    body = {"prompt": "a", "max_tokens": 4, "temperature": 0}
    plain = served.ask("/v1/completions", body)[1]["choices"]
    for _ in range(2):
        status, answer = served.ask("/v1/completions", {**body, "num_ctx": 5})
        assert status == 200 and answer["choices"] == plain
    assert len([line for line in served.log if "ignored 'num_ctx'" in line]) == 1


def test_the_penalty_has_the_name_that_other_servers_give_it(served):
    body = {"prompt": "a", "max_tokens": 24, "temperature": 0}
    found = [
        served.ask("/v1/completions", {**body, name: 1.9})[1]["choices"][0]["text"]
        for name in ("repeat_penalty", "repetition_penalty")
    ]
    assert found[0] == found[1] != served.ask("/v1/completions", body)[1]["choices"][0]["text"]


def test_a_chat_equals_the_engines_text(served, engine):
    answer = served.chat(max_tokens=20, temperature=0)
    assert text_of(answer) == alone(engine, PROMPT, temperature=0.0)
    (choice,) = answer["choices"]
    assert choice["index"] == 0 and choice["finish_reason"] == "length"
    assert choice["message"]["role"] == "assistant" and choice["logprobs"] is None
    assert answer["object"] == "chat.completion" and answer["id"].startswith("chatcmpl-")
    usage, timings = answer["usage"], answer["timings"]
    assert usage["completion_tokens"] == timings["predicted_n"] == 20
    assert usage["total_tokens"] == usage["prompt_tokens"] + 20
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert timings["cache_n"] == cached and timings["prompt_n"] + cached == usage["prompt_tokens"]
    assert timings["predicted_per_second"] > 0


def test_paths_without_v1_do_the_same(served):
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, "temperature": 0}
    answers = [served.ask(f"{base}/chat/completions", body)[1] for base in ("/v1", "")]
    assert text_of(answers[0]) == text_of(answers[1])
    assert served.ask("/models")[1]["data"] == served.ask("/v1/models")[1]["data"]


def test_a_stream_gives_the_same_text(served):
    usage = {"stream_options": {"include_usage": True}}
    chunks = served.stream(CHAT, {"messages": SAID, "max_tokens": 20, "seed": 3, **usage})
    whole = served.chat(max_tokens=20, seed=3)
    *parts, end, usage = chunks
    assert parts[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert text_of_chunks(parts) == text_of(whole)
    assert end["choices"][0]["finish_reason"] == "length" and end["timings"]["predicted_n"] == 20
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 20
    assert all(part["usage"] is None for part in (*parts, end))
    assert {part["object"] for part in chunks} == {"chat.completion.chunk"}
    assert len({part["id"] for part in chunks}) == 1


def test_choices_have_consecutive_seeds(served, engine):
    answer = served.chat(max_tokens=12, seed=5, n=3, temperature=1.2)
    texts = [text_of(answer, index) for index in range(3)]
    assert texts == [alone(engine, PROMPT, 12, seed=5 + i, temperature=1.2) for i in range(3)]
    assert len(set(texts)) == 3
    assert answer["usage"]["completion_tokens"] == 36
    body = {"messages": SAID, "max_tokens": 12, "seed": 5, "n": 3, "temperature": 1.2}
    chunks = served.stream(CHAT, body)
    found = ["", "", ""]
    for chunk in chunks:
        for choice in chunk["choices"]:
            found[choice["index"]] += choice["delta"].get("content", "")
    assert found == texts


# Fields of a request, and of the engine's options where they have other names.
SAMPLERS = [
    ({"min_p": 0.2, "top_k": 0, "top_p": 1.0}, {}),
    ({"typical_p": 0.4}, {"typ_p": 0.4}),
    (
        {"mirostat": 2, "mirostat_tau": 3, "mirostat_eta": 0.2},
        {"mirostat": 2, "mirostat_ent": 3.0, "mirostat_lr": 0.2},
    ),
    ({"repeat_penalty": 1.5, "repeat_last_n": -1, "presence_penalty": 0.3}, {}),
    ({"samplers": ["temperature", "top_k"], "top_k": 5}, {}),
    ({"samplers": "kt", "top_k": 5}, {"samplers": ("top_k", "temperature"), "top_k": 5}),
    ({"logit_bias": {"17": -100, "99": 5}}, {"logit_bias": ((17, -100.0), (99, 5.0))}),
    ({"xtc_probability": 0.5, "xtc_threshold": 0.01, "top_n_sigma": 1.5}, {}),
    ({"dynatemp_range": 0.5, "dynatemp_exponent": 2}, {}),
]


@pytest.mark.parametrize("fields, sampling", SAMPLERS)
def test_samplers_by_llama_servers_names(served, engine, fields, sampling):
    answer = served.chat(max_tokens=15, seed=1, temperature=1.5, **fields)
    given = {"seed": 1, "temperature": 1.5, **(sampling or fields)}
    expected = alone(engine, PROMPT, 15, **given)
    plain = alone(engine, PROMPT, 15, seed=1, temperature=1.5)
    assert text_of(answer) == expected != plain


def test_stop_strings(served):
    whole = text_of(served.chat(max_tokens=30, temperature=0))
    stop = whole[10:14]
    answer = served.chat(max_tokens=30, temperature=0, stop=[stop, "never there"])
    assert text_of(answer) == whole[: whole.index(stop)]
    assert answer["choices"][0]["finish_reason"] == "stop"
    body = {"messages": SAID, "max_tokens": 30, "temperature": 0, "stop": stop}
    chunks = served.stream(CHAT, body)
    assert text_of_chunks(chunks) == text_of(answer)


def test_the_end_token_ends_a_text_unless_it_is_ignored(served):
    forced = {"logit_bias": {"0": 1000}, "max_tokens": 5}
    assert served.chat(**forced)["choices"][0]["finish_reason"] == "stop"
    answer = served.chat(**forced)  # the end token counts, as in llama-server
    assert answer["usage"]["completion_tokens"] == answer["timings"]["predicted_n"] == 1
    assert text_of(answer) == ""
    assert served.chat(**forced, ignore_eos=True)["usage"]["completion_tokens"] == 5


def test_logprobs(served):
    fields = {"max_tokens": 8, "temperature": 0, "logprobs": True, "top_logprobs": 3}
    answer = served.chat(**fields)
    content = answer["choices"][0]["logprobs"]["content"]
    assert len(content) == 8
    assert b"".join(bytes(token["bytes"]) for token in content).decode() == text_of(answer)
    for token in content:
        assert token["logprob"] <= 0 and len(token["top_logprobs"]) == 3
        assert token["top_logprobs"][0]["token"] == token["token"]  # greedy
    streamed = []
    for chunk in served.stream(CHAT, {"messages": SAID, **fields}):
        for choice in chunk["choices"]:
            streamed += (choice["logprobs"] or {}).get("content", [])
    assert streamed == content


SCHEMA = json.loads("""
{"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}},
"required": ["a", "b"], "additionalProperties": false}
""")
NAMED = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}


@pytest.mark.parametrize(
    "field",
    [
        {"response_format": NAMED},
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        {"json_schema": SCHEMA},
    ],
)
def test_json_schemas(served, field):
    num_whole = 0
    for seed in range(2):
        answer = served.chat(max_tokens=120, seed=seed, temperature=1.0, n=3, **field)
        for choice in answer["choices"]:
            if choice["finish_reason"] == "stop":
                jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)
                num_whole += 1
    assert num_whole > 0


def test_calls_are_text_if_no_tool_may_be_called(served):
    body = {"tools": [TOOL], "grammar": CALL, "max_tokens": 100}
    assert served.chat(**body)["choices"][0]["finish_reason"] == "tool_calls"
    assert "<tool_call>" in text_of(served.chat(**body, tool_choice="none"))


def test_an_answer_to_a_tool_call_is_rendered(served):
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 7}'}}
    messages = [
        *SAID,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "42"}]},
    ]
    status, answer = served.ask("/apply-template", {"messages": messages})
    assert (status, answer["prompt"]) == (200, "user: Hello\nassistant: \n7tool: 42\nassistant: ")


def test_reasoning_is_separated_from_the_answer(served):
    grammar = {"grammar": 'root ::= "<think>hm</think>ok"', "max_tokens": 50}
    message = served.chat(**grammar)["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("hm", "ok")
    streamed = served.stream(CHAT, {"messages": SAID, **grammar})
    deltas = [chunk["choices"][0]["delta"] for chunk in streamed]
    thoughts = "".join(delta.get("reasoning_content", "") for delta in deltas)
    assert (thoughts, text_of_chunks(streamed)) == ("hm", "ok")
    plain = served.chat(**grammar, reasoning_format="none")["choices"][0]["message"]
    assert plain["content"] == "<think>hm</think>ok" and "reasoning_content" not in plain


def test_reasoning_in_a_continued_message_goes_on_in_the_answer(served):
    messages = [*SAID, {"role": "assistant", "content": "<think>Let me see, "}]
    grammar = {"grammar": 'root ::= "hm</think>ok"', "max_tokens": 50}
    message = served.chat(messages=messages, **grammar)["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("hm", "ok")


def test_messages_that_end_with_the_assistant_are_continued(served):
    messages = [*SAID, {"role": "assistant", "content": "Well,"}]
    _, answer = served.ask("/apply-template", {"messages": messages})
    assert answer["prompt"] == "user: Hello\nassistant: Well,"
    _, answer = served.ask(
        "/apply-template", {"messages": messages, "continue_final_message": False}
    )
    assert answer["prompt"] == "user: Hello\nassistant: Well,\nassistant: "
    _, answer = served.ask(
        "/apply-template", {"messages": SAID, "chat_template_kwargs": {"enable_shouting": True}}
    )
    assert answer["prompt"] == "user: Hello\nSHOUT\nassistant: "


def test_the_servers_variables_of_templates_are_defaults(tmp_path):
    """And options of llama-server that are the same, or have no effect, do not keep it from
    starting."""
    without_effect = "--slots --cache-reuse 256 -rea auto --reasoning-format deepseek"
    kwargs = [("--chat-template-kwargs", json.dumps({"enable_shouting": x})) for x in (False, True)]
    given = (*kwargs[0], "--reasoning-effort", "low", *without_effect.split(), *kwargs[1])
    with Served(save_model(tmp_path), *given) as served:
        for more, shouted in ({}, True), ({"a": 1}, True), ({"enable_shouting": False}, False):
            asked = {"messages": SAID, "chat_template_kwargs": more}
            _, answer = served.ask("/apply-template", asked)
            assert ("SHOUT" in answer["prompt"]) == shouted, more
        assert sum("has no effect" in line for line in served.log) == 2


def test_completions(served, engine):
    ids = engine.codec.encode("Once upon")
    body = {"prompt": ["Once upon", ids], "max_tokens": 10, "temperature": 0, "n": 2}
    status, answer = served.ask("/v1/completions", body)
    assert status == 200 and answer["object"] == "text_completion"
    assert {choice["text"] for choice in answer["choices"]} == {
        alone(engine, ids, 10, temperature=0.0)
    }
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"]["prompt_tokens"] == 2 * len(ids)
    echoed = {"prompt": "Once upon", "max_tokens": 10, "temperature": 0, "echo": True}
    _, answer = served.ask("/v1/completions", echoed)
    said = "".join(
        chunk["choices"][0]["text"] for chunk in served.stream("/v1/completions", echoed)
    )
    expected = "Once upon" + alone(engine, ids, 10, temperature=0.0)
    assert answer["choices"][0]["text"] == said == expected


def scored(engine, ids):
    """(the float64 log probability of each token after the first, the most probable tokens) of a
    text."""
    logprob_TV = engine.logits(ids).double().log_softmax(-1)[:-1]
    own_T = logprob_TV.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    return own_T, logprob_TV


@pytest.mark.parametrize(
    "length, num_tokens", [(1, 0), (1, 4), (2, 1), (31, 0), (33, 1), (70, 0), (70, 4)]
)
def test_an_echo_has_the_log_probabilities_of_the_prompt(served, engine, length, num_tokens):
    """OpenAI's older form, which evaluation programs read; prompts of several steps, too."""
    ids = [(7 * n + n * n) % 200 + 20 for n in range(length)]
    body = {"prompt": [ids, ids], "max_tokens": num_tokens, "temperature": 0}
    body |= {"echo": True, "logprobs": 3}
    status, answer = served.ask("/v1/completions", body)
    assert status == 200, answer
    assert answer["choices"][0] == {**answer["choices"][1], "index": 0}
    (text, found) = (answer["choices"][0][name] for name in ("text", "logprobs"))
    assert {len(values) for values in found.values()} == {length + num_tokens}
    assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
    want_T, logprob_TV = scored(engine, ids)
    got_T = torch.tensor(found["token_logprobs"][1:length], dtype=torch.float64)
    assert torch.allclose(got_T, want_T, atol=1e-5)
    for top, logprob_V in zip(found["top_logprobs"][1:length], logprob_TV, strict=True):
        assert max(top.values()) == pytest.approx(float(logprob_V.max()), abs=1e-5)
    tops = zip(found["token_logprobs"][1:], found["top_logprobs"][1:], strict=True)
    greedy_T = (logprob_TV.argmax(-1) == torch.tensor(ids[1:])).tolist() + [True] * num_tokens
    # As lm-eval's client sees whether a token is the most probable one.
    assert [own == max(top.values()) for own, top in tops] == greedy_T
    assert found["text_offset"][0] == 0 and found["text_offset"] == sorted(found["text_offset"])
    assert text.startswith(engine.codec.tokenizer.decode(ids)[: len(text) // 2])
    assert answer["usage"]["completion_tokens"] == 2 * num_tokens
    assert answer["timings"]["prompt_ms"] > 0 and answer["timings"]["predicted_ms"] >= 0
    assert answer["choices"][0]["finish_reason"] == "length"
    if num_tokens:
        plain = {**body, "prompt": ids, "echo": False}
        _, alone_ = served.ask("/v1/completions", plain)
        own = alone_["choices"][0]["logprobs"]["token_logprobs"]
        assert found["token_logprobs"][length:] == pytest.approx(own, abs=1e-5)


def test_an_echo_is_the_prompts_text_and_is_streamed(served):
    body = {"prompt": "Once upon a time", "max_tokens": 5, "temperature": 0}
    body |= {"echo": True, "logprobs": 1}
    _, answer = served.ask("/v1/completions", body)
    choice = answer["choices"][0]
    assert choice["text"].startswith("Once upon a time")
    names, offsets = choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
    for name, begin, end in zip(names, offsets, [*offsets[1:], len(choice["text"])], strict=True):
        piece = choice["text"][begin:end]  # with what was held back before it
        assert piece.endswith(name) or not piece or not name.isascii()
    chunks = [chunk["choices"][0] for chunk in served.stream("/v1/completions", body)]
    assert "".join(chunk["text"] for chunk in chunks) == choice["text"]
    several = [chunk["logprobs"] for chunk in chunks if chunk["logprobs"]]
    assert sum((each["tokens"] for each in several), []) == names
    assert sum((each["text_offset"] for each in several), []) == offsets


def test_responses_by_openais_client(client, engine):
    answer = client.responses.create(
        model="any", input="Hello", instructions="Be brief", max_output_tokens=8, temperature=0
    )
    expected = alone(engine, "system: Be brief\nuser: Hello\nassistant: ", 8, temperature=0.0)
    assert answer.output_text == expected
    assert answer.status == "incomplete" and answer.usage.output_tokens == 8
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert [item.status for item in answer.output] == ["incomplete"]
    given = {"instructions": "Be brief", "max_output_tokens": 8, "temperature": 0, "stream": True}
    asked = [{"role": "user", "content": "Hello"}]
    events = list(client.responses.create(model="any", input=asked, **given))
    kinds = [event.type for event in events]
    begun = ["created", "in_progress", "output_item.added", "content_part.added"]
    ended = ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert kinds[:4] == [f"response.{kind}" for kind in begun]
    assert kinds[-4:] == [f"response.{kind}" for kind in ended]
    deltas = [e.delta for e in events if e.type == "response.output_text.delta"]
    assert "".join(deltas) == expected == events[-1].response.output_text
    assert events[-2].item.status == events[-1].response.output[-1].status == "incomplete"
    assert [event.sequence_number for event in events] == list(range(len(events)))


def test_openais_client(client):
    ignored = {"user": "me", "store": False, "metadata": {"a": "b"}, "service_tier": "auto"}
    given = {"messages": SAID, "max_completion_tokens": 5, "logprobs": True, "seed": 1}
    answer = client.chat.completions.create(model="gpt-4o", **given, **ignored)
    assert answer.usage.completion_tokens == 5 and len(answer.choices[0].logprobs.content) == 5
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("none")
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="x", messages=SAID, temperature="hot")
    assert caught.value.param == "temperature" and caught.value.code == "invalid_value"


def test_tokens_and_templates(served, engine):
    text = "def add(a, b): # naïve \U0001f600"
    _, found = served.ask("/tokenize", {"content": text, "with_pieces": True})
    ids = [token["id"] for token in found["tokens"]]
    assert ids == engine.codec.encode_rendered(text)
    pieces = [token["piece"] for token in found["tokens"]]
    joined = b"".join(p.encode() if isinstance(p, str) else bytes(p) for p in pieces)
    assert joined.decode() == text
    assert served.ask("/tokenize", {"content": text})[1] == {"tokens": ids}
    marked = f"{text}<|endoftext|>{text}"
    for parses, num_special in ((None, 1), (True, 1), (False, 0)):
        for adds in (False, True):
            asked = {"content": marked, "add_special": adds, "parse_special": parses}
            found = served.ask("/tokenize", asked)[1]["tokens"]
            begins = adds and engine.codec.encode(text) != ids
            assert found.count(0) == num_special + begins
            assert served.ask("/detokenize", {"tokens": found[begins:]})[1] == {"content": marked}
    assert served.ask("/tokenize", {"content": text, "parse_special": False})[1] == {"tokens": ids}
    long = "x" * 5000 + "<|endoftext|>"  # long texts are tokenised by `encode_batch`
    found = served.ask("/tokenize", {"content": long, "parse_special": False})[1]["tokens"]
    assert 0 not in found and served.ask("/tokenize", {"content": long})[1]["tokens"][-1] == 0
    assert served.ask("/detokenize", {"tokens": ids})[1] == {"content": text}


def test_properties_and_health(served):
    assert served.start["model"] == "tiny" and served.start["context"] == CONTEXT
    assert any("for 7 texts of 256 tokens (4 at a time, 3 kept)" in line for line in served.log)
    assert served.ask("/health") == (200, {"status": "ok"})
    _, props = served.ask("/props")
    assert props["total_slots"] == 4 and props["chat_template"] == TEMPLATE
    assert props["default_generation_settings"]["n_ctx"] == CONTEXT
    assert "/" not in props["model_path"]
    assert served.headers["x-request-id"].startswith("req_")


def test_the_context_bounds_prompt_and_answer(served):
    status, answer = served.ask("/v1/completions", {"prompt": [5] * CONTEXT, "max_tokens": 1})
    assert status == 400 and answer["error"]["code"] == "context_length_exceeded"
    status, answer = served.ask(
        "/v1/completions", {"prompt": [5] * (CONTEXT - 3), "ignore_eos": True}
    )
    assert status == 200 and answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] in (3, 4)


def test_concurrent_requests_get_the_same_text_as_alone(served, engine):
    """Twelve clients, four texts at a time: streams, whole answers, and clients that disconnect."""
    chance = random.Random(4)
    stem = [chance.randrange(1, 4096) for _ in range(100)]
    failures, checked = [], []

    def client(number):
        own = random.Random(number)
        for _ in range(4):
            ids = stem[: own.choice((0, 50, 100))] + [own.randrange(1, 4096) for _ in range(3)]
            seed, count = own.randrange(1000), own.choice((1, 10, 40))
            body = {"prompt": ids, "max_tokens": count, "seed": seed}
            body["cache_prompt"] = own.random() < 0.8
            if own.random() < 0.3:
                leave(served, {**body, "max_tokens": 100, "stream": True})
                continue
            if own.random() < 0.5:
                chunks = served.stream("/v1/completions", body)
                text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
            else:
                text = served.ask("/v1/completions", body)[1]["choices"][0]["text"]
            checked.append((ids, count, seed, text))

    def guarded(number):
        try:
            client(number)
        except Exception as error:  # noqa: BLE001  # for the main thread
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not failures and len(checked) > 20
    for ids, count, seed, text in checked:
        assert text == alone(engine, ids, count, seed=seed)
    served.until(lambda: served.metric("hotsplit_running") == 0)


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_client_that_disconnects_ends_its_text(served, is_stream):
    before = len(served.log)
    body = {"prompt": [7], "max_tokens": 250, "ignore_eos": True, "stream": is_stream, "n": 4}
    leave(served, body, num_read=10 if is_stream else 0)
    served.until(lambda: any(" 499 " in line for line in served.log[before:]))
    served.until(lambda: served.metric("hotsplit_running") == 0)


def test_cached_tokens_are_reported(served):
    ids = list(range(900, 1000))
    first = served.ask("/v1/completions", {"prompt": [*ids, 1], "max_tokens": 1})[1]
    second = served.ask("/v1/completions", {"prompt": [*ids, 2], "max_tokens": 1})[1]
    fresh = {"prompt": [*ids, 2], "max_tokens": 1, "cache_prompt": False}
    third = served.ask("/v1/completions", fresh)[1]
    cached = [a["usage"]["prompt_tokens_details"]["cached_tokens"] for a in (first, second, third)]
    assert cached == [0, 100, 0]


def test_metrics(served):
    before = served.metric("hotsplit_generated_tokens_total")
    served.chat(max_tokens=7, ignore_eos=True)
    assert served.metric("hotsplit_generated_tokens_total") == before + 7
    served.ask("/made/up/path")
    _, page = served.ask("/metrics")
    assert 'path="other"' in page and "made" not in page
