"""Stock files in mode dense on the CPU: `down` is used as the file has it, a row for each
output."""

import dataclasses

import numpy as np
import pytest
import torch
from models import _random_entry, make_model, make_sizes
from reference import logits_ref, rel_error
from test_native_step import BOUNDS
from test_runtime import IDS, decoded

from hotsplit import Engine
from hotsplit.runtime.kernels.cpu import library
from hotsplit.runtime.step.batch import rows_of

KINDS = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_k", "q6_k")


def stock_of(tmp_path, kind):
    """Saves a model in llama.cpp's layout with matrices of type `kind`; widths of 256 and 512 fill
    the blocks of K-quants."""
    shape = make_sizes(width=256, num_neurons=512, num_heads=8, vocab_size=90, context_length=200)
    model = make_model(sizes=shape, kind=kind, activation="silu")
    tensors = dict(model.tensors)
    for layer in range(shape.num_layers):
        del tensors[f"blk.{layer}.ffn_down_t.weight"]
        name = f"blk.{layer}.ffn_down.weight"
        tensors[name] = _random_entry(name, (256, 512), kind, np.random.default_rng(layer))
    path = tmp_path / "stock.gguf"
    model = dataclasses.replace(model, layout="stock", tensors=tensors, path=path)
    model.save(path)
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_the_reference(tmp_path, kind):
    model = stock_of(tmp_path, kind)
    with Engine.load(model.path, mode="dense", device="cpu") as engine:
        (block,) = engine.layers[0].ffn.blocks
        assert block.is_by_output and block.down.num_rows == 256 and block.down.width == 512
        want = logits_ref(model, IDS)
        got = engine.logits(IDS)
        assert rel_error(got, want) < BOUNDS[kind]
        assert rel_error(got.flip(1), want) > 0.1


@pytest.mark.parametrize("kind", ["f32", "q4_0", "q4_k"])
def test_rows_at_once_equal_single_steps_on_any_number_of_threads(tmp_path, kind, level):
    model = stock_of(tmp_path, kind)
    ids, seen = [(7 * i + 3) % 90 for i in range(150)], []
    for threads in (1, 2, 3):
        library.set_threads(threads)
        with Engine.load(model.path, mode="dense", device="cpu") as engine:
            seen.append(engine.logits(ids))
            engine._live.run(rows_of(ids[:3], 0))
            for at in range(3, 12):
                assert torch.equal(engine._step(ids[at], at), seen[0][at])
    assert torch.equal(seen[0], seen[1]) and torch.equal(seen[0], seen[2])


@pytest.mark.parametrize("is_resident", [True, False])
def test_bytes_are_those_of_the_file(tmp_path, is_resident):
    model = stock_of(tmp_path, "q4_k")
    size = sum(e.num_bytes for n, e in model.tensors.items() if "ffn_" in n and "norm" not in n)
    with Engine.load(model.path, mode="dense", device="cpu", is_resident=is_resident) as engine:
        assert engine.bytes_by_role["cpu"]["neurons"] == size
        decoded(engine, IDS[:2])
        before = engine.traffic.total
        engine._step(5, 2)
        assert engine.traffic.total - before == size
        with engine.observe(lambda name, layer, tensor: None):
            before = engine.traffic.total
            engine.logits(IDS)
        assert engine.traffic.total - before == size


def test_other_modes_transpose(tmp_path):
    model = stock_of(tmp_path, "q8_0")
    with Engine.load(model.path, mode="exact", device="cpu") as engine:
        (block,) = engine.layers[0].ffn.blocks
        assert not block.is_by_output and block.down.num_rows == 512
        exact = engine.logits(IDS)
    with Engine.load(model.path, mode="dense", device="cpu") as engine:
        assert rel_error(engine.logits(IDS), exact) < 3 * BOUNDS["q8_0"]
