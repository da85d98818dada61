"""Documents of benchmarks/kv_tasks.py: where special tokens are, and which scores it reuses."""

import json
import sys
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
from models import byte_level_keys, make_model, make_sizes
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from hotsplit.runtime.kernels.cpu import library

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import kv_tasks

del sys.path[0]
TOKENS, CONTEXT = 160, 512
WAYS = {"full attention": kv_tasks.WAYS["full attention"]}

pytestmark = pytest.mark.skipif(not library.is_available(), reason="the C++ kernels are not built")


def keys_with(*, begins: bool):
    """(keys of a tokenizer of single bytes, the number of its tokens); if `begins`, the last token
    is put before every text."""
    keys, count = byte_level_keys()
    if not begins:
        return keys, count
    tokenizer = Tokenizer.from_str(keys["tokenizer.huggingface.json"])
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", count)])
    begin = {"tokenizer.ggml.bos_token_id": np.uint32(count)}
    return keys | begin | {"tokenizer.huggingface.json": tokenizer.to_str()}, count + 1


def arguments_for(folder, *, begins=True, seed=0):
    keys, vocab_size = keys_with(begins=begins)
    shape = make_sizes(vocab_size=vocab_size, context_length=CONTEXT)
    model, text = folder / f"m{seed}.gguf", folder / "text"
    make_model(sizes=shape, kind="f32", seed=seed, extra_keys=keys).save(model)
    text.write_text("apple bread crane delta eagle flame")
    kept = folder / "kept"
    kept.mkdir(exist_ok=True)
    return Namespace(
        model=model, text=text, tokens=TOKENS, facts=2, documents=2, ways=WAYS, kept=kept
    )


@pytest.mark.parametrize("begins", [True, False])
def test_only_the_beginning_of_a_document_has_special_tokens(tmp_path, begins):
    arguments = arguments_for(tmp_path, begins=begins)
    start = [keys_with(begins=True)[1] - 1] if begins else []
    decode = Tokenizer.from_str(keys_with(begins=begins)[0]["tokenizer.huggingface.json"]).decode
    for pair in kv_tasks.documents(arguments):
        for document in pair:
            ids, begun = document.ids[len(start) :], "\nThe code of "
            assert document.ids[: len(start)] == start and not set(start) & set(ids)
            assert TOKENS - 40 < len(document.ids) <= TOKENS
            lines = decode(ids).split("\n")[1:]
            assert len(lines) == decode(ids).count(begun)
            for first, rest in document.asked:
                assert decode(first).startswith(begun) and decode(first + rest)[1:] in lines


def scores(arguments) -> list[float]:
    return kv_tasks.gather(arguments)[0]["after_full"]["full attention"]


def test_kept_scores_are_those_of_the_model(tmp_path):
    one, other = (arguments_for(tmp_path, seed=seed) for seed in (0, 1))
    found = scores(one)
    assert scores(other) != found
    files = sorted(one.kept.iterdir())
    assert len(files) == 2 * one.documents
    assert scores(one) == found and sorted(one.kept.iterdir()) == files
    for path in files:  # they are read again
        path.write_text(
            json.dumps({"after_full": {"full attention": [-1.0, -2.0]}, "under_rule": {}})
        )
    assert scores(one) == [-1.0, -2.0] * one.documents


def test_a_conversion_to_another_type_is_another_model(tmp_path):
    """Files made from one checkpoint have the same model_id."""
    one = arguments_for(tmp_path)
    (first, _), *_ = kv_tasks.documents(one)
    keys, vocab_size = keys_with(begins=True)
    shape = make_sizes(vocab_size=vocab_size, context_length=CONTEXT)
    make_model(sizes=shape, kind="q8_0", extra_keys=keys).save(one.model)
    (second, _), *_ = kv_tasks.documents(one)
    assert first.model.model_id == second.model.model_id
    assert (first.ids, first.asked) == (second.ids, second.asked) and first.name != second.name
