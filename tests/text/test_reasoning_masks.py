"""Constraints of answers that start inside their reasoning apply after it."""

import io
import json
import sys

import pytest
from constrained_texts import tiny_codec, token_bytes
from serving import SAID, TEMPLATE, TOKENIZER, Served, save_model, text_of_chunks
from test_chat import GPT_OSS as GPT_OSS_TEMPLATE
from tokenizers import AddedToken, Tokenizer

from hotsplit.cli import main
from hotsplit.errors import HotsplitError
from hotsplit.runtime.answers.formats import format_of
from hotsplit.runtime.generate.answer_mask import answer_mask
from hotsplit.runtime.generate.constraints import gbnf_constraint, json_schema_constraint
from hotsplit.runtime.text.codec import TextCodec

SCHEMA = {"name": "x", "schema": {"enum": ["yes"]}}
ANSWERS = {
    "json_object": {"response_format": {"type": "json_object"}},
    "json_schema": {"response_format": {"type": "json_schema", "json_schema": SCHEMA}},
    "schema": {"json_schema": SCHEMA["schema"]},
    "grammar": {"grammar": "root ::= [x-z]{3}"},
}
HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>")
GPT_OSS = format_of("<|channel|><|message|>")
TAGS = format_of("")
GEMMA4 = format_of("", ("<|channel>", "<channel|>"))


def codec_with(*marks, special, ends=()):
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    tokenizer.add_tokens([AddedToken(mark, special=special) for mark in marks])
    return TextCodec(tokenizer, 0, frozenset({0, *map(tokenizer.token_to_id, ends)}))


def ids_of(mask, size):
    return mask.mask_V(size).nonzero().flatten().tolist()


def written(mask, codec, text, free=False):
    """Accepts the tokens of a text, each of which has to be allowed; `free`: among most others."""
    size = codec.tokenizer.get_vocab_size()
    for token_id in codec.encode_rendered(text):
        allowed_V = mask.mask_V(size + 8)
        assert allowed_V[token_id] and not allowed_V[0] and not allowed_V[size:].any(), text
        assert (allowed_V.sum() > size // 2) == free, text
        assert not free or mask.is_ready(0.0)
        mask.accept(token_id)


def has_ended(mask, codec):
    return set(ids_of(mask, codec.tokenizer.get_vocab_size())) == set(codec.end_ids)


@pytest.mark.parametrize("special", [None, False, True])
@pytest.mark.parametrize(
    ("known", "prompt", "begin", "end"),
    [
        (TAGS, "A: <think>\n", "<think>", "</think>"),
        (GEMMA4, "<|turn>model\n<|channel>thought\n", "<|channel>", "<channel|>"),
    ],
)
def test_the_reasoning_is_free_and_the_answer_is_not(known, prompt, begin, end, special):
    codec = tiny_codec() if special is None else codec_with(begin, end, special=special)
    mask = answer_mask(json_schema_constraint({"enum": [1]}, codec), known, codec, prompt)
    written(mask, codec, 'Well, {"a": 2} > <thin', free=True)
    tag = codec.encode_rendered(end)
    assert (len(tag) == 1) == (special is not None)
    written(mask, codec, end, free=True)
    (one,) = codec.encode_rendered("1")
    size = codec.tokenizer.get_vocab_size()
    assert ids_of(mask, size) == [one]
    with pytest.raises(HotsplitError, match="does not allow"):
        mask.accept(tag[-1])
    mask.accept(one)
    assert ids_of(mask, size) == [0]


@pytest.mark.parametrize("known", [TAGS, GEMMA4])
def test_an_answer_may_begin_to_think_or_not(known):
    begin, end = known.reasoning[-1].begin, known.reasoning[-1].end
    codec = codec_with(begin, end, special=True)
    size = codec.tokenizer.get_vocab_size()
    (one,) = codec.encode_rendered("1")
    for thought in ("", f"{begin}Hm. 1 >{end}"):
        mask = answer_mask(json_schema_constraint({"enum": [1]}, codec), known, codec, "A: ")
        assert ids_of(mask, size) == [one, codec.tokenizer.token_to_id(begin)]
        for token_id in codec.encode_rendered(thought):
            assert mask.mask_V(size)[token_id] and not mask.mask_V(size)[0]
            mask.accept(token_id)
        if thought:  # once
            assert ids_of(mask, size) == [one]
        mask.accept(one)
        assert has_ended(mask, codec)


@pytest.mark.parametrize("thoughts", [0, 1, 2])
@pytest.mark.parametrize("special", [True, False])
def test_the_final_channel_of_gpt_oss(thoughts, special):
    """Headers are those of the channels analysis and final, and nothing holds before but them."""
    codec = codec_with(*HARMONY, special=special, ends=("<|return|>", "<|call|>"))
    constraint = json_schema_constraint({"enum": [1]}, codec)
    mask = answer_mask(
        constraint, GPT_OSS, codec, "<|start|>user<|message|>?<|end|><|start|>assistant"
    )
    for _ in range(thoughts):
        written(mask, codec, "<|channel|>analysis<|message|>")
        written(mask, codec, 'They want {"a": 1}. final', free=True)
        size = codec.tokenizer.get_vocab_size()
        ends = [codec.tokenizer.token_to_id(mark) for mark in HARMONY if mark != "<|end|>"]
        assert not set(ends) & set(ids_of(mask, size))
        written(mask, codec, "<|end|>", free=True)
        written(mask, codec, "<|start|>assistant")
    written(mask, codec, "<|channel|>final<|message|>1")
    assert has_ended(mask, codec)


def test_the_prompt_has_opened_a_channel_or_the_answer_goes_on():
    codec = codec_with(*HARMONY, special=True, ends=("<|return|>",))
    constraint = json_schema_constraint({"enum": [1]}, codec)
    opened = "<|start|>assistant<|channel|>analysis<|message|>"
    mask = answer_mask(constraint.fork(), GPT_OSS, codec, opened)
    written(mask, codec, "Hm.<|end|>", free=True)
    written(mask, codec, "<|start|>assistant<|channel|>final<|message|>1")
    assert has_ended(mask, codec)
    said = "<|start|>assistant<|channel|>final<|message|>It is "
    assert answer_mask(constraint, GPT_OSS, codec, said, continued="It is ") is constraint


def test_where_a_constraint_is_of_the_whole_answer():
    codec = codec_with("<think>", "</think>", special=True)
    schema = json_schema_constraint({"enum": [1]}, codec)
    writes = gbnf_constraint('root ::= "hm</think>ok"', codec)
    assert answer_mask(writes, TAGS, codec, "A: <think>") is writes
    assert answer_mask(schema, TAGS, codec, "A: <think>\n\n</think>\n\n") is schema
    assert answer_mask(schema, TAGS, codec, "A: 1", continued="1") is schema
    harmony = codec_with(*HARMONY, special=True)
    schema = json_schema_constraint({"enum": [1]}, harmony)
    assert answer_mask(schema, GPT_OSS, harmony, "<|start|>assistant", is_of_calls=True) is schema
    plain = json_schema_constraint({"enum": [1]}, tiny_codec())  # the mark is not one token
    assert answer_mask(plain, TAGS, tiny_codec(), "A: ") is plain


def test_no_token_closes_the_reasoning_and_goes_on():
    codec = tiny_codec()
    mask = answer_mask(gbnf_constraint('root ::= "x"', codec), TAGS, codec, "<think>")
    for token_id in codec.encode_rendered("</think"):
        mask.accept(token_id)
    allowed_V = mask.mask_V(4096)
    closing_ids = [i for i, found in token_bytes().items() if found.startswith(b">")]
    assert [token_bytes()[i] for i in closing_ids if allowed_V[i]] == [b">"] and len(
        closing_ids
    ) > 2


# What the prompt ends with, tokens, whether they are special, and the one that ends a thought.
FAMILIES = {
    "tags": (("'assistant: <think>\\n'",), ["</think>"], False, "</think>"),
    "Gemma 4": (
        ("'<|turn>model\\n<|channel>thought\\n'",),
        *(["<|channel>", "<channel|>"], True, "<channel|>"),
    ),
    "gpt-oss": ((), HARMONY, True, "<|end|>"),
}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    """(name, model file, id of the token that ends a thought)."""
    begin, marks, is_special, end = FAMILIES[request.param]
    template = TEMPLATE.replace("'assistant: '", *begin) if begin else GPT_OSS_TEMPLATE
    codec = codec_with(*marks, special=is_special)
    model = save_model(
        tmp_path_factory.mktemp("serve"),
        tokenizer=codec.tokenizer.to_str(),
        template=template,
        vocab_size=4128,
    )
    return request.param, model, codec.tokenizer.token_to_id(end)


@pytest.fixture(scope="module")
def served(family):
    name, model, end_id = family
    with Served(model, "--parallel", "4") as served:
        served.family, served.end_id = name, end_id
        yield served


@pytest.mark.parametrize("name", ANSWERS)
def test_the_answer_after_the_reasoning_follows_the_constraint(served, name):
    asked = {"logit_bias": {str(served.end_id): 100}, "max_tokens": 180, "n": 3, "logprobs": True}
    mark = "<|channel|>" if served.family == "gpt-oss" else FAMILIES[served.family][3]
    for choice in served.chat(**ANSWERS[name], **asked, temperature=1.0, seed=1)["choices"]:
        assert mark in [token["token"] for token in choice["logprobs"]["content"]]
        content = choice["message"]["content"]
        if name == "grammar":
            assert len(content) == 3 and set(content) <= set("xyz")
        elif name == "json_object":
            assert content.startswith("{") and choice["finish_reason"] in ("stop", "length")
        else:
            assert json.loads(content) == "yes" and choice["finish_reason"] == "stop"


def test_an_answer_cannot_end_within_its_reasoning(served):
    if served.family == "gpt-oss":
        pytest.skip("the answer may begin in the final channel")
    asked = {**ANSWERS["schema"], "logit_bias": {"0": 100}, "max_tokens": 9}
    (choice,) = served.chat(**asked)["choices"]
    assert choice["finish_reason"] == "length" and not choice["message"]["content"]
    assert choice["message"]["reasoning_content"]
    (free,) = served.chat(messages=SAID, logit_bias={"0": 100}, max_tokens=9)["choices"]
    assert free["finish_reason"] == "stop"


def test_streams_and_items_of_responses_follow_it_too(served):
    bias = {"logit_bias": {str(served.end_id): 100}, "temperature": 1.0, "seed": 2}
    body = {"messages": SAID, **ANSWERS["json_schema"], **bias, "max_tokens": 180}
    assert json.loads(text_of_chunks(served.stream("/v1/chat/completions", body))) == "yes"
    schema = {"type": "json_schema", "name": "x", "schema": {"enum": ["yes"]}}
    body = {"input": "Hello", "text": {"format": schema}, **bias, "max_output_tokens": 180}
    status, answer = served.ask("/v1/responses", body)
    assert status == 200, answer
    (text,) = [item["content"][0]["text"] for item in answer["output"] if item["type"] == "message"]
    assert json.loads(text) == "yes"


@pytest.mark.parametrize("command", [["generate", "--chat"], ["chat"]], ids=" ".join)
def test_the_commands_follow_it(family, command, capsys, monkeypatch, tmp_path):
    _, model, end_id = family
    monkeypatch.setenv("HOTSPLIT_CACHE", str(tmp_path))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Hello\n")))
    name, *more = command
    options = [*more, "-p", "Hello"] if more else []
    more = f"-l {end_id}+100 -n 180 --temp 1 -s 2 -t 1".split()
    code = main([name, str(model), *options, "-j", '{"enum": ["yes"]}', *more])
    found = capsys.readouterr()
    assert code == 0 and found.out == '"yes"\n', found
