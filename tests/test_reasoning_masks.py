"""Constraints of answers that start inside their reasoning apply after it."""

import json

import pytest
from constrained_texts import tiny_codec, token_bytes
from serving import SAID, TEMPLATE, TOKENIZER, Served, save_model
from tokenizers import AddedToken, Tokenizer

from hotsplit.errors import HotsplitError
from hotsplit.runtime.generate.constraints import gbnf_constraint, json_schema_constraint
from hotsplit.runtime.generate.reasoning import END, AfterReasoning
from hotsplit.runtime.kernels.cpu import library
from hotsplit.runtime.text.codec import TextCodec

ANSWERS = {
    "json_object": {"response_format": {"type": "json_object"}},
    "json_schema": {"response_format": {"type": "json_schema", "json_schema": {
        "name": "x", "schema": {"enum": ["yes"]}}}},
    "schema": {"json_schema": {"enum": ["yes"]}},
    "grammar": {"grammar": "root ::= [x-z]{3}"},
}  # fmt: skip


def codec_with_tag(special):
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    tokenizer.add_tokens([AddedToken(END, special=special)])
    return TextCodec(tokenizer, 0, frozenset({0}))


@pytest.mark.parametrize("special", [None, False, True])
def test_the_reasoning_is_free_and_the_answer_is_not(special):
    codec = tiny_codec() if special is None else codec_with_tag(special)
    mask = AfterReasoning.of(json_schema_constraint({"enum": [1]}, codec), codec)
    size = codec.tokenizer.get_vocab_size()
    for token_id in codec.encode_rendered('Well, {"a": 2} > <thin'):
        allowed_V = mask.mask_V(size + 8)
        assert allowed_V[token_id] and not allowed_V[0] and not allowed_V[size:].any()
        assert mask.is_ready(0.0)
        mask.accept(token_id)
    tag = codec.encode_rendered(END)
    assert (
        len(tag) == (1 if special is not None else len(tag)) and special is not None or len(tag) > 1
    )
    for token_id in tag:
        assert mask.mask_V(size)[token_id]
        mask.accept(token_id)
    (one,) = codec.encode_rendered("1")
    assert mask.mask_V(size).nonzero().flatten().tolist() == [one]
    with pytest.raises(HotsplitError, match="does not allow"):
        mask.accept(tag[-1])
    mask.accept(one)
    assert mask.mask_V(size).nonzero().flatten().tolist() == [0]


def test_no_token_closes_the_reasoning_and_goes_on():
    codec = tiny_codec()
    mask = AfterReasoning.of(gbnf_constraint('root ::= "x"', codec), codec)
    for token_id in codec.encode_rendered("</think"):
        mask.accept(token_id)
    allowed_V = mask.mask_V(4096)
    closing_ids = [i for i, found in token_bytes().items() if found.startswith(b">")]
    assert [token_bytes()[i] for i in closing_ids if allowed_V[i]] == [b">"] and len(
        closing_ids
    ) > 2


def test_a_grammar_that_writes_the_tag_covers_the_reasoning():
    constraint = gbnf_constraint('root ::= "hm</think>ok"', tiny_codec())
    assert AfterReasoning.of(constraint, tiny_codec()) is constraint


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A template that opens the reasoning; the closing tag is token 4096."""
    if not library.is_available():
        pytest.skip("no C++ kernels")
    codec = codec_with_tag(special=False)
    text = TEMPLATE.replace("'assistant: '", "'assistant: <think>\\n'")
    model = save_model(
        tmp_path_factory.mktemp("serve"), tokenizer=codec.tokenizer.to_str(), template=text,
        vocab_size=4128,
    )  # fmt: skip
    with Served(model, "--parallel", "4") as served:
        yield served


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("count", [1, 3])
def test_the_answer_after_the_reasoning_follows_the_constraint(served, name, count):
    end_id = 4096
    asked = {**ANSWERS[name], "logit_bias": {str(end_id): 100}, "max_tokens": 100, "n": count,
             "temperature": 1.0, "seed": 1}  # fmt: skip
    for choice in served.chat(**asked)["choices"]:
        content = choice["message"]["content"]
        if name == "grammar":
            assert len(content) == 3 and set(content) <= set("xyz")
        elif name == "json_object":
            assert content.startswith("{") and choice["finish_reason"] in ("stop", "length")
        else:
            assert json.loads(content) == "yes" and choice["finish_reason"] == "stop"


def test_an_answer_cannot_end_within_its_reasoning(served):
    asked = {**ANSWERS["schema"], "logit_bias": {"0": 100}, "max_tokens": 9}
    (choice,) = served.chat(**asked)["choices"]
    assert choice["finish_reason"] == "length" and not choice["message"]["content"]
    assert choice["message"]["reasoning_content"]
    (free,) = served.chat(messages=SAID, logit_bias={"0": 100}, max_tokens=9)["choices"]
    assert free["finish_reason"] == "stop"
