"""Qwen3.8-Flash-Next: hashes of n-grams, pieces of its table, GGUFs of llama.cpp's converter, and
what is refused. That its logits are transformers' is in test_families."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import edit_config, random_model, save_tokenizer
from delta_models import flash_model, without_weights
from models import make_sizes
from reference import rel_error
from safetensors.torch import load_file, save_file
from test_families import CASES, IDS, converted, transformers_logits

from hotsplit import Engine
from hotsplit.artifacts.model_file import ModelFile
from hotsplit.artifacts.model_gguf import read_model_gguf
from hotsplit.convert.checkpoint_summary import summarise_checkpoint
from hotsplit.errors import HotsplitError
from hotsplit.families.config_reader import ConfigReader
from hotsplit.families.flash_next import hashes
from hotsplit.files.gguf_file import array_entry, write_gguf
from hotsplit.model.tensors import in_layout, is_neuron_major
from hotsplit.runtime.step.workspace import workspace_bytes

TABLE = "model.layers.1.ple.ple_embedding.ngram_embedding"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = random_model(tmp_path_factory.mktemp("flash") / "hf", CASES["flashnextmoe"])
    save_tokenizer(folder, 320)
    return folder


def test_hashes_are_those_of_the_published_model():
    """The multipliers that its files have, and the rows of its table, padded to 128."""
    values = {"seed": 1234, "ngram_vocab_size_base": 20_000_000}
    read = ConfigReader(Path("config.json"), values)
    multipliers, sizes = hashes(read, 3, 16, 248320)
    assert multipliers == [23703573157769, 20109073645365, 8052911324071]
    assert sizes[:2] == [20000003, 20000023] and -(-sum(sizes) // 128) * 128 == 320_001_536


def test_hashes_are_those_that_a_checkpoint_has(folder, tmp_path):
    keys, _ = read_model_gguf(converted(folder, tmp_path / "m.gguf", outtype="f32"))
    stored = load_file(folder / "model.safetensors")
    for name, key in (
        ("layer_multipliers", "layer_multipliers"),
        ("ngram_heads_offsets", "head_offsets"),
        ("ngram_heads_vocab_sizes", "head_vocab_sizes"),
    ):
        own = stored[f"model.layers.1.ple.ple_embedding.{name}"]
        assert keys[f"qwen4exp.ple.{key}"] == own.tolist()


@pytest.mark.parametrize("is_joined", [True, False])
def test_pieces_of_the_table_are_joined(folder, tmp_path, is_joined):
    """In the order of their numbers, which is not that of their names, or one with all rows."""
    own = shutil.copytree(folder, tmp_path / "hf")
    tensors = load_file(own / "model.safetensors")
    pieces = [tensors.pop(f"{TABLE}.shard_{n}.weight") for n in range(4)]
    whole = torch.cat(pieces)
    parts = {f"{TABLE}.shard_{n}.weight": part for n, part in enumerate(whole.chunk(12))}
    tensors |= {f"{TABLE}.weight": whole} if is_joined else parts
    save_file(tensors, own / "model.safetensors", {"format": "pt"})
    _, found = read_model_gguf(converted(own, tmp_path / "m.gguf", outtype="f32"))
    assert np.array_equal(found["per_layer_token_embd.weight"].read(), whole.numpy())


@pytest.mark.parametrize("change, words", [("lost", "not numbered from 0"), ("short", "rows")])
def test_pieces_that_do_not_fit_are_refused(folder, tmp_path, change, words):
    own = shutil.copytree(folder, tmp_path / "hf")
    tensors = load_file(own / "model.safetensors")
    name = f"{TABLE}.shard_1.weight"
    last = tensors.pop(name)
    if change == "short":
        tensors[name] = last[1:].clone()
    save_file(tensors, own / "model.safetensors", {"format": "pt"})
    with pytest.raises(HotsplitError, match=words):
        converted(own, tmp_path / "m.gguf", outtype="f32")


def as_llamacpp_writes(path: Path, target: Path) -> None:
    """The file without keys of ours, and with down projections as llama.cpp has them."""
    keys, tensors = read_model_gguf(path)
    values = {
        in_layout(name, "stock"): each.read().swapaxes(-1, -2)
        if is_neuron_major(name)
        else each.read()
        for name, each in tensors.items()
    }
    own = {key: value for key, value in keys.items() if not key.startswith("hotsplit.")}
    write_gguf(target, "qwen4exp", own, {n: array_entry(v, "f32") for n, v in values.items()})


def test_a_file_of_llama_cpp_gives_the_same_logits(folder, tmp_path):
    path = converted(folder, tmp_path / "m.gguf", outtype="f32")
    as_llamacpp_writes(path, tmp_path / "theirs.gguf")
    with Engine.load(tmp_path / "theirs.gguf", mode="dense") as engine:
        assert rel_error(engine.logits(IDS), transformers_logits(folder)) < 1e-5


@pytest.mark.parametrize(
    "ratios, length, words",
    [
        ([0] * 5, 60, ""),
        (None, 60, ""),
        ([0, 0, 0, 5, 0], 64, ""),
        ([2, 0, 0, 4, 0], 0, "one number"),
    ],
)
def test_without_the_size_of_blocks_texts_are_as_long_as_the_budget(
    folder, tmp_path, ratios, length, words
):
    """As llama.cpp's converter writes it beside a transformers of 2026."""
    keys, tensors = read_model_gguf(converted(folder, tmp_path / "m.gguf", outtype="f32"))
    name = "qwen4exp.attention.compress_ratios"
    keys = {key: value for key, value in keys.items() if key != name}
    write_gguf(
        tmp_path / "own.gguf",
        "qwen4exp",
        keys | ({} if ratios is None else {name: ratios}),
        tensors,
    )
    if words:
        with pytest.raises(HotsplitError, match=words):
            ModelFile.load(tmp_path / "own.gguf")
        return
    assert ModelFile.load(tmp_path / "own.gguf").spec.context_length == length


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"output_gate_type": None}, "output_gate_type is 'silu', wanted 'sigmoid'"),
        ({"ple_layer_ids": [1, 2]}, "n-grams in several layers are not supported"),
        ({"ple_layer_ids": [4]}, "wanted one with a delta net"),
        ({"hc_count": 9}, "9 streams"),
        ({"ngram_size": 9}, "n-grams of 9 tokens, wanted 2 to 8"),
        ({"ple_embed_dim": 25}, "does not divide among 4 rows"),
        ({"eos_token_id": None}, "no n-gram goes beyond it"),
        ({"indexer_kv_heads": 2}, "indexer_kv_heads is 2"),
    ],
)
def test_configs_that_would_be_computed_wrongly_are_refused(folder, tmp_path, changes, words):
    own = shutil.copytree(folder, tmp_path / "hf")
    edit_config(own, lambda values: values.update(changes))
    assert words in str(summarise_checkpoint(own).refusal)


def test_texts_longer_than_dense_attention_are_refused(folder, tmp_path):
    """Blocks of 60 tokens, and three in the last one, of a model for 64."""
    path = converted(folder, tmp_path / "m.gguf", outtype="f32")
    with pytest.raises(HotsplitError, match="beyond 63 tokens an indexer chooses"):
        Engine.load(path, context_length=64)
    with Engine.load(path, context_length=63) as engine:
        assert engine.logits(IDS * 5).shape[0] == 60


def test_a_table_larger_than_main_memory_takes_no_memory_of_steps():
    """A table of 128 GiB is not allocated: a token reads a few rows of it from the file."""
    spec = flash_model(make_sizes(num_layers=4)).bare_spec
    rows, *others = spec.first
    large = replace(spec, first=(replace(rows, num_rows=1 << 30), *others))
    found = [workspace_bytes(without_weights(each), 32, "dense") for each in (spec, large)]
    assert 0 < found[0] == found[1]


def test_a_gpu_is_refused(tmp_path):
    model = flash_model(make_sizes(num_layers=4))
    with pytest.raises(HotsplitError, match="n-grams have no kernels for a GPU so far"):
        replace(model, path=tmp_path / "m.gguf").refuse_on_gpu()
