"""The decode step in one native call, compared with the float64 decoder; its bits do not depend on
the number of threads. It refuses what it does not support."""

import dataclasses
import os
import resource
from itertools import product
from operator import le
from pathlib import Path

import numpy as np
import pytest
import torch
from models import make_model, make_sizes, sparse_model
from reference import Bounds, attend_ref, logits_ref, rel_error, rotated
from test_runtime import IDS, PATTERNS, decoded, make_split, saved

from hotsplit import Engine
from hotsplit.errors import HotsplitError
from hotsplit.files.gguf_file import array_entry
from hotsplit.model.neurons import SMOOTH
from hotsplit.runtime.kernels.cpu import library
from hotsplit.runtime.ops.structs import NotNative
from hotsplit.runtime.step import native_step

# Sums in another order change some f16 values of the KV cache, and some 16-bit values, by one unit
# in the last place. Errors of 3e-6 were seen for f32, of 3e-4 for the others.
BOUNDS = Bounds(
    f32=1e-5, f16=1e-3, bf16=1e-3, q8_0=1e-3, q4_0=1e-3, q4_k=1e-3, q5_k=1e-3, q6_k=1e-3
)


ACTIVATIONS = ("relu", "relu2", "fatrelu", "drelu", "silu", "gelu", "gelu_tanh")
PAIRS = [*((a, "f32") for a in ACTIVATIONS), *(("relu", kind) for kind in BOUNDS if kind != "f32")]
MODES = ("dense", "exact", "predicted")
CASES = [  # every neuron of SiLU and GELU fires, so that there is nothing to predict
    (activation, kind, mode)
    for (activation, kind), mode in product(PAIRS, MODES)
    if mode != "predicted" or activation not in SMOOTH
]


@pytest.mark.parametrize("activation, kind, mode", CASES)
def test_it_agrees_with_the_reference(tmp_path, mode, kind, activation):
    shape = make_sizes(width=256 if kind.endswith("_k") else 64)
    model = sparse_model(sizes=shape, kind=kind, activation=activation)
    model = dataclasses.replace(model, path=tmp_path / "m.gguf")
    model.save(model.path)
    want = logits_ref(model, IDS, mode=mode)[-1]
    with Engine.load(model.path, mode=mode) as engine:
        assert rel_error(decoded(engine, IDS), want) < 2 * BOUNDS[kind]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_divided_layers_agree_with_the_reference(tmp_path, mode, pattern):
    """Passes that observers see count the same bytes, where all rows have logits; rows without end
    at the last layer's keys unless they are observed."""
    model = saved(tmp_path, kind="q8_0", predictor_rank=8)
    make_split(model, PATTERNS[pattern]).save(tmp_path / "s.gguf")
    want = logits_ref(model, IDS, mode=mode)[-1]
    with Engine.load(model.path, split=tmp_path / "s.gguf", mode=mode) as engine:

        def counted(logits) -> tuple[torch.Tensor, list[int]]:
            before = dataclasses.replace(engine.traffic)
            found = logits(engine, IDS)
            names = ("gate", "up", "down", "predictor")
            return found, [getattr(engine.traffic, n) - getattr(before, n) for n in names]

        got, num_bytes = counted(decoded)
        got_TV, all_bytes = counted(Engine.logits)
        with engine.observe(lambda n, i, t: None, lambda n, i: False):
            seen, seen_bytes = counted(decoded)
            seen_TV, all_seen_bytes = counted(Engine.logits)
        assert torch.equal(seen, got) and torch.equal(seen_TV, got_TV)
        assert rel_error(got, want) < BOUNDS["q8_0"]
        assert all_seen_bytes == all_bytes
        assert all(map(le, num_bytes, seen_bytes)) and num_bytes != seen_bytes


@pytest.mark.parametrize("kind", ["f32", "q8_0", "q4_0", "q4_k", "q6_k"])
def test_any_number_of_threads_gives_the_same_bits(tmp_path, level, kind):
    """The model is large enough that products and blocks of neurons are divided among threads."""
    shape = make_sizes(width=256, num_neurons=1056, num_heads=8, vocab_size=500)
    model = saved(tmp_path, sizes=shape, kind=kind, predictor_rank=64)
    for mode in ("dense", "exact", "predicted"):
        with Engine.load(model.path, mode=mode) as engine:
            seen = []
            for count in (1, 2, 3):
                library.set_threads(count)
                seen.append(decoded(engine, IDS))
            assert torch.equal(seen[0], seen[1]) and torch.equal(seen[0], seen[2])
            if mode == "exact":
                assert rel_error(seen[0], logits_ref(model, IDS)[-1]) < BOUNDS[kind]


@pytest.mark.parametrize("num_neurons", [15, 48, 77])
def test_neurons_with_nan_scores_are_named(tmp_path, level, num_neurons):
    """The scores fill whole vectors, a remainder, or both."""
    shape = make_sizes(num_neurons=num_neurons)
    model = saved(tmp_path, sizes=shape, predictor_rank=8)
    with Engine.load(model.path, mode="exact") as engine:
        want = decoded(engine, IDS)
    with Engine.load(model.path, mode="predicted") as engine:
        assert rel_error(decoded(engine, IDS), want) > 0.01
        for layer in engine.layers:
            layer.ffn.predictor.up.weight.data.fill_(torch.nan)
        assert rel_error(decoded(engine, IDS), want) < BOUNDS["f32"]


@pytest.mark.parametrize("wrong", [torch.zeros_like, lambda t: 0.5 * t, lambda t: t.flip(0)])
def test_the_measure_rejects_wrong_logits(tmp_path, wrong):
    model = saved(tmp_path)
    with Engine.load(model.path) as engine:
        assert rel_error(wrong(decoded(engine, IDS)), logits_ref(model, IDS)[-1]) > 0.1


@pytest.mark.parametrize(
    "num_heads, num_kv_heads, head_width, kind",
    [
        (1, 1, 32, "f32"),
        (4, 4, 40, "f16"),
        (6, 2, 80, "f32"),
        (5, 1, 128, "f16"),
        (8, 2, 96, "f16"),
        (9, 1, 16, "f32"),
        (2, 1, 512, "f16"),
    ],
)
def test_attention_over_parts_of_the_cache(tmp_path, num_heads, num_kv_heads, head_width, kind):
    """Heads have many widths and numbers; positions are around the edges of tiles and parts. Any
    number of threads gives the same bits."""
    shape = make_sizes(
        num_layers=1,
        width=64,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_width=head_width,
        context_length=600,
    )
    model = saved(tmp_path, sizes=shape, kind=kind)
    ids = np.random.default_rng(1).integers(0, shape.vocab_size, 600).tolist()
    want = logits_ref(model, ids)
    for level in library.usable_levels():
        library.set_level(level)
        with Engine.load(model.path, mode="exact", context_length=600) as engine:
            engine.hidden(ids)
            for position in (0, 1, 15, 16, 17, 255, 256, 257, 511, 599):
                seen = []
                for count in (1, 2, 3):
                    library.set_threads(count)
                    seen.append(engine._step(ids[position], position))
                assert torch.equal(seen[0], seen[1]) and torch.equal(seen[0], seen[2])
                assert rel_error(seen[0], want[position]) < BOUNDS[kind]


def heads_seen(engine, token, position):
    """The output of the only head for a token, and the same in float64, from the keys and values of
    the cache."""
    seen = {}
    with engine.observe(lambda name, layer, x: seen.update({name: x[0].double().numpy()})):
        engine._step(token, position)
    (layer,), (linear, *_) = engine.layers, engine.layers[0].attention.inputs
    spec, cache = layer.attention.spec, layer.attention.cache
    query_D = linear.weight.data.double().numpy() @ seen["attn_norm"]
    query_1HW = np.tile(query_D, (position + 1, 1, 1))
    query_1HW = rotated(query_1HW, spec.rotary, spec.num_rotated)[-1:]
    keys, values = (
        each[: position + 1].double().numpy() for each in (cache.key_CKW, cache.value_CKW)
    )
    with np.errstate(invalid="ignore"):
        return seen["attn_heads"], attend_ref(query_1HW, keys, values, spec).ravel()


@pytest.mark.parametrize("factor", [300.0, -300.0])
def test_parts_of_the_cache_with_scores_far_apart(tmp_path, level, factor):
    """The parts' maxima differ by hundreds."""
    shape = make_sizes(num_layers=1, width=32, num_heads=1, num_kv_heads=1, context_length=300)
    model = saved(tmp_path, sizes=shape, kind="f32")
    with Engine.load(model.path, mode="exact", context_length=300) as engine:
        engine.hidden([i % 50 for i in range(260)])
        engine.layers[0].attention.cache.key_CKW[:256, 0, 3] *= factor
        got, want = heads_seen(engine, 7, 260)
    assert np.isfinite(got).all() and rel_error(got, want) < BOUNDS["f32"]


def test_a_part_of_the_cache_with_infinite_scores(tmp_path, level):
    """Scores of minus infinity add nothing, and those of plus infinity end as NaN."""
    shape = make_sizes(num_layers=1, width=32, num_heads=1, num_kv_heads=1, context_length=300)
    model = saved(tmp_path, sizes=shape, kind="f32")
    found = []
    with Engine.load(model.path, mode="exact", context_length=300) as engine:
        for sign in (1, -1):
            engine.hidden([i % 50 for i in range(260)])
            engine.layers[0].attention.cache.key_CKW[:256, 0, 3] = sign * torch.inf
            got, want = heads_seen(engine, 7, 260)
            assert np.array_equal(np.isfinite(got), np.isfinite(want))
            found.append(bool(np.isfinite(want).all()))
            if found[-1]:
                assert rel_error(got, want) < BOUNDS["f32"]
    assert sorted(found) == [False, True]


@pytest.mark.parametrize("position", [0, 200, 260])
def test_scores_all_of_minus_infinity_give_nan(tmp_path, level, position):
    """Softmax is then NaN for one key, for one part of the cache and for two. With one finite score
    it is not."""
    shape = make_sizes(num_layers=1, width=32, num_heads=1, num_kv_heads=1, context_length=300)
    model = make_model(sizes=shape)
    huge = model.tensors["blk.0.attn_q.weight"].read() * np.float32(1e20)
    tensors = {
        "blk.0.attn_q.weight": array_entry(huge, "f32"),
        "blk.0.attn_k.weight": array_entry(-huge, "f32"),
    }
    path = tmp_path / "model.gguf"
    dataclasses.replace(model, tensors=model.tensors | tensors).save(path)
    with Engine.load(path, mode="exact", context_length=300) as engine:
        engine.hidden([7] * (position + 1))
        key_CKW = engine.layers[0].attention.cache.key_CKW
        key_CKW[:position] = key_CKW[position]
        assert engine._step(7, position).isnan().all()
        if position:
            key_CKW[3] = 0.0  # a score of 0
            assert engine._step(7, position).isfinite().all()


def test_heads_that_are_too_wide_are_refused(tmp_path):
    shape = make_sizes(num_heads=1, num_kv_heads=1, head_width=608)
    model = saved(tmp_path, sizes=shape)
    with pytest.raises(HotsplitError, match="gguf: the C.. library rejects the model's sizes"):
        Engine.load(model.path, mode="exact")


def test_a_model_on_another_device_is_not_native(tmp_path):
    model = saved(tmp_path)
    with Engine.load(model.path) as engine:
        weights = engine._live.weights
        moved = dataclasses.replace(
            weights.embedding, data=torch.empty(weights.embedding.data.shape, device="meta")
        )
        weights = dataclasses.replace(weights, embedding=moved)
        with pytest.raises(NotNative, match="a part of the model is on meta"):
            native_step.build(weights, engine.traffic)


def test_sizes_that_do_not_fit_together_are_refused(tmp_path):
    model = saved(tmp_path)
    with Engine.load(model.path) as engine:
        weights = engine._live.weights
        head = dataclasses.replace(weights.head.weight, width=32)
        weights = dataclasses.replace(weights, head=dataclasses.replace(weights.head, weight=head))
        with pytest.raises(NotNative, match="rejects the model's sizes .* make build"):
            native_step.build(weights, engine.traffic)


@pytest.mark.parametrize("token, position", [(-1, 0), (50, 0), (0, -1), (0, 32)])
def test_tokens_and_positions_outside_the_model_are_refused(tmp_path, token, position):
    model = saved(tmp_path)
    with Engine.load(model.path) as engine, pytest.raises(IndexError, match="outside the model"):
        engine._step(token, position)


def test_nan_in_the_weights_reaches_the_logits(tmp_path):
    for kind in ("f32", "q8_0"):
        model = saved(tmp_path, kind=kind)
        with Engine.load(model.path) as engine:
            engine.layers[1].norms["attn_norm"].weight_D[3] = torch.nan
            assert engine._step(5, 0).isnan().all()


def test_ten_thousand_steps_take_no_more_memory(tmp_path):
    model = saved(tmp_path, kind="q8_0", predictor_rank=8)
    with Engine.load(model.path) as engine:
        for step in range(2_000):
            engine._step(step % 50, step % 32)
        before, peak = _resident(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for step in range(10_000):
            engine._step(step % 50, step % 32)
        assert _resident() - before < 64 << 10
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 64


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
