"""Models of code fill in the middle of a text: the field `suffix` and llama-server's /infill."""

import json

import numpy as np
import openai
import pytest
from models import make_model, make_sizes
from serving import Served, save_model
from texts import byte_level_tokenizer

from hotsplit import Engine
from hotsplit.options.generation_options import GenerationOptions, SamplingOptions
from hotsplit.runtime.text.codec import TextCodec
from hotsplit.serve.infill_tokens import infill_tokens
from hotsplit.tokens.tokenizer_kinds import INFILL_TEXTS

PREFIX, SUFFIX, MIDDLE, REPOSITORY, FILE = range(40, 45)
KEYS = ("fim_pre", "fim_suf", "fim_mid", "fim_rep", "fim_sep")
BEFORE, AFTER = "def add(a, b):\n    ", "\n    return c\n"


def keys_of(*kinds):
    numbers = dict(zip(KEYS, (PREFIX, SUFFIX, MIDDLE, REPOSITORY, FILE), strict=True))
    numbers |= {"prefix": 50, "suffix": 51, "middle": 52}
    return {f"tokenizer.ggml.{kind}_token_id": np.uint32(numbers[kind]) for kind in kinds}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("infill"), **keys_of(*KEYS))


@pytest.fixture(scope="module")
def served(model):
    with Served(model) as served:
        yield served


@pytest.fixture(scope="module")
def filled(model):
    """The engine's greedy text for what goes between two texts, behind files."""
    with Engine.load(model, context_length=256) as engine:
        literal = engine.codec.literal.encode_rendered

        def alone(before, after, files=(), prompt=""):
            ids = [PREFIX, *literal(before), *literal(prompt), SUFFIX, *literal(after), MIDDLE]
            if files:
                own = [FILE, *literal("filename\n")]
                parts = ([FILE, *literal(f"{name}\n"), *literal(text)] for name, text in files)
                ids = [REPOSITORY, *literal("myproject\n"), *sum(parts, []), *own, *ids]
            if engine.codec.adds_begin:
                ids.insert(0, engine.codec.begin_id)
            options = GenerationOptions(max_tokens=12)
            tokens = engine.generate(
                ids, sampling=SamplingOptions(temperature=0.0), options=options
            )
            return "".join(token.text for token in tokens), len(ids)

        yield alone


def asked(**more):
    return {"input_prefix": BEFORE, "input_suffix": AFTER, "temperature": 0.0, **more}


def test_a_completion_with_a_suffix(served, filled):
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)
    fields = {"model": "any", "suffix": AFTER, "temperature": 0.0, "max_tokens": 12}
    answer = client.completions.create(prompt=BEFORE, **fields)
    wanted, num_prompt = filled(BEFORE, AFTER)
    assert answer.choices[0].text == wanted and answer.usage.prompt_tokens == num_prompt
    chunks = client.completions.create(prompt=BEFORE, stream=True, **fields)
    assert "".join(chunk.choices[0].text for chunk in chunks) == wanted
    several = client.completions.create(prompt=["", BEFORE], **fields)
    assert [choice.text for choice in several.choices] == [filled("", AFTER)[0], wanted]


def test_infill_has_llama_servers_form(served, filled):
    wanted, num_prompt = filled(BEFORE, AFTER)
    status, answer = served.ask("/infill", asked(n_predict=12))
    assert status == 200 and answer["content"] == wanted and answer["stop"] is True
    assert answer["stop_type"] == "limit" and answer["tokens_predicted"] == 12
    assert answer["tokens_evaluated"] == num_prompt and answer["timings"]["predicted_n"] == 12
    _, text = served.ask("/infill", asked(n_predict=12, stream=True))
    chunks = [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n") if line]
    assert "".join(chunk["content"] for chunk in chunks) == wanted
    assert [chunk["stop"] for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


def test_the_last_files_that_have_room_are_before_the_prefix(served, filled):
    files = [("a.py", "x = 1\n"), ("b.py", "y = 2\n")]
    chunks = [{"filename": name, "text": text, "time": 5} for name, text in files]
    _, answer = served.ask("/infill", asked(n_predict=12, input_extra=chunks))
    assert (answer["content"], answer["tokens_evaluated"]) == filled(BEFORE, AFTER, files)
    large = {"filename": "c.py", "text": "z = 3\n" * 400}
    _, answer = served.ask("/infill", asked(n_predict=12, input_extra=[large, chunks[1]]))
    assert (answer["content"], answer["tokens_evaluated"]) == filled(BEFORE, AFTER, files[1:])
    _, answer = served.ask("/infill", asked(n_predict=12, input_extra=[large]))
    assert (answer["content"], answer["tokens_evaluated"]) == filled(BEFORE, AFTER)


def test_an_editors_request(served, filled):
    """llama.vim, autoload/llama.vim: its samplers, limits, fields, and the request for none."""
    editor = {
        "prompt": "c",
        "n_indent": 4,
        "top_k": 40,
        "top_p": 0.9,
        "samplers": ["top_k", "top_p", "infill"],
        "cache_prompt": True,
        "t_max_prompt_ms": 500,
        "t_max_predict_ms": 1000,
        "response_fields": ["content", "timings/predicted_n", "truncated", "none/such"],
        "id_slot": 0,
    }
    status, answer = served.ask("/infill", asked(n_predict=3, seed=1, **editor))
    assert status == 200 and list(answer) == editor["response_fields"], answer
    assert answer["timings/predicted_n"] == 3 and answer["none/such"] is None
    _, greedy = served.ask("/infill", asked(n_predict=12, prompt="c"))
    assert greedy["content"] == filled(BEFORE, AFTER, prompt="c")[0]
    warming = {"n_predict": 0, "samplers": [], "response_fields": [""]}
    assert served.ask("/infill", asked(**warming)) == (200, {"": None})


def test_marks_in_a_text_are_text(model, served):
    with Engine.load(model) as engine:
        mark = engine.codec.tokenizer.id_to_token(0)
    _, plain = served.ask("/v1/completions", {"prompt": mark, "max_tokens": 1})
    _, filled = served.ask("/v1/completions", {"prompt": "", "suffix": mark, "max_tokens": 1})
    assert plain["usage"]["prompt_tokens"] <= 2
    assert filled["usage"]["prompt_tokens"] > plain["usage"]["prompt_tokens"] + 3


def test_what_is_too_long_is_refused(served):
    body = asked(input_suffix="word " * 400)
    status, answer = served.ask("/infill", body)
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")


SIZE = 400


def tokens_of(names=(), **keys):
    tokenizer = byte_level_tokenizer("smollm", SIZE - 10)
    tokenizer.add_special_tokens(list(names))
    known = {"tokenizer.huggingface.json": tokenizer.to_str(), **keys}
    model = make_model(sizes=make_sizes(vocab_size=SIZE), extra_keys=known)
    found = infill_tokens(model, TextCodec.of(model).tokenizer)
    return found, tokenizer.token_to_id


@pytest.mark.parametrize("number", range(8))
def test_tokens_are_known_by_their_texts(number):
    names = [texts[number] for texts in INFILL_TEXTS.values()]
    found, id_of = tokens_of(names)
    assert [found.prefix, found.suffix, found.middle] == list(map(id_of, names))
    assert found.repository is None and found.file is None
    assert tokens_of(names[:2])[0] is None


def test_keys_come_first_and_old_ones_count():
    names = [texts[0] for texts in INFILL_TEXTS.values()]
    found, id_of = tokens_of([*names, "<|file_sep|>"], **keys_of("fim_pre", "middle", "fim_rep"))
    assert (found.prefix, found.middle, found.repository) == (PREFIX, 52, REPOSITORY)
    assert (found.suffix, found.file) == (id_of(names[1]), id_of("<|file_sep|>"))
