"""Layers with their own windows, rotary embeddings, scales, heads and neurons, against float64: in
the native step at every level, in hybrid steps with the float64 kernels."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from models import changed, differing_spec, family_spec, make_model, make_sizes
from reference import logits_ref, rel_error

from hotsplit import Engine
from hotsplit.errors import HotsplitError
from hotsplit.model.spec import Attention
from hotsplit.runtime.kernels.cpu import library
from hotsplit.runtime.step.batch import Row, rows_of

BOUND = 1e-5  # against float64, with all weights and the cache in f32; the largest seen was 1e-6
SIZES = make_sizes(num_layers=6, num_neurons=96, context_length=300)
LONG = np.random.default_rng(1).integers(0, 50, 600).tolist()
IDS = np.random.default_rng(3).integers(0, SIZES.vocab_size, 300).tolist()


@pytest.fixture(scope="module")
def model():
    return make_model(spec=differing_spec(SIZES, window=9))


@pytest.fixture(scope="module")
def want(model):
    return logits_ref(model, IDS[:100])


def windowed(window, context=600, heads=(4, 2), head_width=None):
    """A layer of this window, between two layers without one."""
    sizes = make_sizes(
        num_layers=3,
        width=32,
        num_neurons=32,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_width=head_width,
        context_length=context,
    )
    spec = family_spec("llama", sizes)
    first, middle, last = spec.layers
    of_window = changed(spec.with_layers([middle]), Attention, window=window).layers
    return make_model(spec=spec.with_layers([first, *of_window, last]))


@cache
def right_logits(window, heads=(4, 2), head_width=None):
    """Logits of `windowed` after 600 tokens, in float64; tests of an equal window share them."""
    return logits_ref(windowed(window, heads=heads, head_width=head_width), LONG)


# ---- the native step -------------------------------------------------------------------------


def stepped(engine, ids):
    return torch.stack([engine._step(token, position) for position, token in enumerate(ids)])


def test_layers_that_differ_in_the_native_step(level, model, want):
    """Token by token, in one prompt, in several, and with any number of threads."""
    with Engine.of(model, mode="dense", cache_type_k="f32") as engine:
        library.set_threads(1)
        alone = stepped(engine, IDS[:100])
        assert rel_error(alone, want) < BOUND
        for count, num_rows in ((1, 100), (2, 100), (3, 33)):
            library.set_threads(count)
            assert torch.equal(engine.logits(IDS[:num_rows]), alone[:num_rows])
            assert torch.equal(stepped(engine, IDS[:20]), alone[:20])


def test_layers_that_differ_as_observers_see_them(model):
    """Each observer gets the neurons of the layer, as many as it has."""
    seen, want = {}, {}
    logits_ref(model, IDS[:60], seen=want)
    with (
        Engine.of(model, mode="dense", cache_type_k="f32") as engine,
        engine.observe(lambda name, layer, x: seen.update({(name, layer): x.clone()})),
    ):
        engine.hidden(IDS[:60])
    for layer in range(SIZES.num_layers):
        for name in ("ffn_gate", "layer_out"):
            assert rel_error(seen[name, layer], want[name, layer]) < BOUND


@pytest.mark.parametrize("mode", ["exact", "predicted"])
def test_layers_that_differ_in_sparse_modes(mode):
    spec = differing_spec(SIZES, window=9)
    model = make_model(spec=spec, predictor_rank=8)
    model = replace(model, threshold_L=(0.02,) * SIZES.num_layers)
    want = logits_ref(model, IDS[:40], mode=mode)
    with Engine.of(model, mode=mode, cache_type_k="f32") as engine:
        assert rel_error(stepped(engine, IDS[:40]), want) < BOUND


EDGES = (1, 2, 15, 16, 17, 63, 64, 65, 256, 257, 600, 1000)
POSITIONS = (0, 1, 15, 16, 63, 64, 255, 256, 257, 511, 512, 599)


@pytest.mark.parametrize(
    "window, heads, head_width",
    [*((n, (4, 2), None) for n in EDGES), *((n, (5, 1), 24) for n in (1, 17, 65, 257))],
)
def test_windows_at_every_edge(window, heads, head_width):
    """Edges of tiles, blocks and parts of the cache, for rows alone and together."""
    ids, want = LONG, right_logits(window, heads, head_width)
    model = windowed(window, heads=heads, head_width=head_width)
    with Engine.of(model, mode="dense", cache_type_k="f32", context_length=600) as engine:
        got = engine.logits(ids)
        assert rel_error(got, want) < BOUND
        assert max(rel_error(a, b) for a, b in zip(got, want, strict=True)) < 1e-4
        for position in POSITIONS:
            assert torch.equal(engine._step(ids[position], position), got[position]), position


@pytest.mark.parametrize("wrong", [-1, 1])
@pytest.mark.parametrize("window", [2, 65])
def test_the_bound_rejects_a_step_with_another_window(window, wrong):
    ids, want = LONG, right_logits(window, (4, 2), None)
    with Engine.of(windowed(window + wrong), mode="dense", cache_type_k="f32") as engine:
        error = rel_error(engine.logits(ids), want)
    assert error > 10 * BOUND


@pytest.mark.parametrize("window", [1, 16, 40, 300])
def test_keys_before_the_window_are_not_read(window):
    """Those of whole tiles before it: NaN there changes nothing."""
    ids = np.random.default_rng(1).integers(0, 50, 600).tolist()
    with Engine.of(windowed(window), mode="dense", cache_type_k="f32") as engine:
        want = engine.logits(ids)[599]
        cache = engine.layers[1].attention.cache
        last = (600 - window) // 16 * 16
        cache.key_CKW[:last] = cache.value_CKW[:last] = torch.nan
        assert torch.equal(engine._step(ids[599], 599), want)
        if last + 16 <= 599:  # the first tile of the window is read
            cache.value_CKW[last : last + 16] = torch.nan
            assert engine._step(ids[599], 599).isnan().all()


def test_sequences_and_drafts_in_blocks(model, want):
    """Three sequences in blocks of 64 positions, each with several rows in a step: each row has the
    bits that it has alone."""
    with Engine.of(model, mode="dense", cache_type_k="f32") as single:
        alone = single.logits(IDS[:100])
    with Engine.of(model, mode="dense", cache_type_k="f32", num_sequences=3) as engine:
        decoder, cache = engine._live, engine._live.weights.cache
        for sequence in range(3):
            cache.reserve(sequence, 0, 100)
        starts, texts = (0, 0, 0), {0: 70, 1: 63, 2: 96}
        for sequence, length in texts.items():
            decoder.run(rows_of(IDS[:length], starts[sequence], "none", sequence))
        rows: list[Row] = []
        for sequence, length in texts.items():
            rows += rows_of(IDS[length : length + 4], length, "all", sequence)
        got = decoder.run(rows)
    right = torch.cat([alone[length : length + 4] for length in texts.values()])
    assert torch.equal(got, right) and rel_error(alone, want) < BOUND


# ---- hybrid steps ----------------------------------------------------------------------------


# ---- what is refused -------------------------------------------------------------------------


def test_a_selection_of_keys_is_refused_for_windows():
    with pytest.raises(HotsplitError) as refused:
        Engine.of(windowed(7), kv_offload="on", device="cpu")
    line = str(refused.value)
    assert "1 of 3 layers have windows of at most 7 tokens" in line
    assert "leave --kv-offload out" in line
