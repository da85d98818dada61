"""The engine against a float64 decoder in every mode and type, and with plans against without."""

import dataclasses
import gc
import weakref

import numpy as np
import pytest
import torch
from models import make_model, make_sizes
from reference import logits_ref, rel_error

from hotsplit import Engine
from hotsplit.artifacts.split_file import Split
from hotsplit.costs.cache_bytes import CacheSize
from hotsplit.costs.part_bytes import ITEMS, plan_bytes
from hotsplit.errors import HotsplitError
from hotsplit.options.cache_types import CacheTypes

IDS = [3, 17, 4, 49, 0, 8, 8, 21, 33, 2]
F32_BOUND = 1e-5


def saved(tmp_path, **options):
    path = tmp_path / "model.gguf"
    model = dataclasses.replace(make_model(**options), path=path)
    model.save(path)
    return model


def make_split(
    model,
    hot,
    *,
    dense_on_gpu=True,
    head_on_gpu=True,
    context_length=32,
    home=None,
    cache=None,
    num_sequences=1,
    kv_offload=None,
    draft_on_gpu=False,
):
    """A plan with these hot neurons and the bytes that it takes. `dense_on_gpu` is one value or
    one per layer; `home` is the GPU of each layer and the head."""
    num_layers = model.spec.num_layers
    is_one = isinstance(dense_on_gpu, bool)
    dense = (dense_on_gpu,) * num_layers if is_one else tuple(map(bool, dense_on_gpu))
    is_exact = model.predictor is None
    gpus, cpu = plan_bytes(
        model,
        context_length=context_length,
        num_hot=[len(ids) for ids in hot],
        dense_on_gpu=dense,
        head_on_gpu=head_on_gpu,
        workspace=2 << 20,
        home=home or (),
        neuron_cache=cache and CacheSize(most_rows=cache.most_rows, packs_bits=is_exact),
        num_sequences=num_sequences,
        cache_types=dataclasses.replace(CacheTypes.of(model.kv_kind), selection=kv_offload),
        draft_on_gpu=draft_on_gpu,
    )
    gpu = {item: sum(items[item] for items in gpus) for item in ITEMS}
    return Split(
        model_id=model.model_id,
        mode="exact" if is_exact else "predicted",
        vram_budget_bytes=sum(gpu.values()),
        context_length=context_length,
        hot=tuple(np.asarray(ids, np.int32) for ids in hot),
        dense_on_gpu=dense,
        head_on_gpu=head_on_gpu,
        gpu_bytes=gpu,
        cpu_bytes=cpu,
        status="by hand",
        objective_s=1.0,
        bound_s=1.0,
        solve_s=0.0,
        home=tuple(home or ()),
        gpu_budget_bytes=tuple(sum(items.values()) for items in gpus) if home else (),
        cache=cache,
        num_sequences=num_sequences,
        kv_offload=kv_offload,
        draft_on_gpu=draft_on_gpu,
    )


def decoded(engine, ids):
    """Logits of the last token, computed one token at a time after the first."""
    engine.hidden(ids[:1])
    for position in range(1, len(ids)):
        logits_V = engine._step(ids[position], position)
    return logits_V


@pytest.mark.parametrize("activation", ["relu", "fatrelu", "drelu", "silu"])
@pytest.mark.parametrize("is_tied", [False, True])
def test_dense_and_exact_equal_the_reference(tmp_path, activation, is_tied):
    model = make_model(activation=activation, is_tied=is_tied)
    model = dataclasses.replace(
        model, path=tmp_path / "m.gguf", threshold_L=(0.2 if activation == "fatrelu" else 0.0,) * 2
    )
    model.save(model.path)
    want = logits_ref(model, IDS)
    for mode in ("dense", "exact"):
        with Engine.load(model.path, mode=mode) as engine:
            assert rel_error(engine.logits(IDS), want) < F32_BOUND
            assert rel_error(decoded(engine, IDS), want[-1]) < F32_BOUND


NEURONS = 96
PATTERNS = {
    "none": [[], []],
    "all": [range(NEURONS), range(NEURONS)],
    "one": [[5], [90]],
    "mixed": [[], range(NEURONS)],
    "half": [range(0, NEURONS, 2), range(1, NEURONS, 2)],
    "random": [np.random.default_rng(i).permutation(NEURONS)[: 30 + 20 * i] for i in range(2)],
}


def with_thresholds(model, threshold):
    info = dataclasses.replace(model.predictor, threshold_L=(threshold,) * model.spec.num_layers)
    return dataclasses.replace(model, predictor=info)


def test_predicted_with_minus_infinity_is_dense(tmp_path):
    model = saved(tmp_path, predictor_rank=8)
    with_thresholds(model, float("-inf")).save(model.path)
    with Engine.load(model.path, mode="dense") as engine:
        want, want_last = engine.logits(IDS), decoded(engine, IDS)
    with Engine.load(model.path, mode="predicted") as engine:
        assert rel_error(engine.logits(IDS), want) < F32_BOUND
        assert rel_error(decoded(engine, IDS), want_last) < F32_BOUND
    with_thresholds(model, float("inf")).save(model.path)
    with Engine.load(model.path, mode="predicted") as engine:
        assert rel_error(engine.logits(IDS), want) > 0.01  # no neuron at all


@pytest.mark.parametrize("mode", ["exact", "predicted"])
@pytest.mark.parametrize("hot", [None, PATTERNS["random"]])
def test_a_step_reads_the_bytes_that_it_counts_and_no_others(tmp_path, mode, hot):
    """NaN in the rows that a decode step does not count changes nothing."""
    model = saved(tmp_path, predictor_rank=8)
    split = None
    if hot is not None:
        split = tmp_path / "m.split.gguf"
        make_split(model, hot).save(split)
    seen = {}
    with Engine.load(model.path, split=split, mode=mode, context_length=32) as engine:
        engine.hidden(IDS[:1])
        start = dataclasses.replace(engine.traffic)
        want = engine._step(IDS[1], 1)
        with engine.observe(lambda n, i, t: seen.update({(n, i): t.clone()})):
            before = dataclasses.replace(engine.traffic)
            watched = engine._step(IDS[1], 1)
            after = engine.traffic
        assert rel_error(watched, want) < F32_BOUND
        for name in ("gate", "up", "down", "predictor"):  # the same with an observer and without
            first, second, third = (getattr(t, name) for t in (start, before, after))
            assert third - second == second - first
        row = 4 * model.spec.hidden_size
        gates = {layer: ~seen["ffn_gate", layer][0].isnan() for layer in range(2)}
        opened = {layer: gates[layer] & (seen["ffn_gate", layer][0] > 0) for layer in range(2)}
        num_open = sum(int(m.sum()) for m in opened.values())
        assert after.gate - before.gate == row * sum(int(m.sum()) for m in gates.values())
        assert after.up - before.up == after.down - before.down == row * num_open
        assert 0 < num_open < 2 * NEURONS
        predictor = 4 * 8 * (model.spec.hidden_size + NEURONS) * 2
        assert after.predictor - before.predictor == (predictor if mode == "predicted" else 0)
        for layer in engine.layers:
            for block in layer.ffn.blocks:
                ids = block.id_N
                rows = torch.arange(len(ids)) if block.row_N is None else block.row_N
                block.gate.weight.data[rows[~gates[layer.ffn.layer][ids]]] = torch.nan
                for matrix in (block.up.weight, block.down):
                    matrix.data[rows[~opened[layer.ffn.layer][ids]]] = torch.nan
        assert torch.equal(engine._step(IDS[1], 1), want)
        block.up.weight.data.fill_(torch.nan)  # NaN in a row that is read does show
        assert engine._step(IDS[1], 1).isnan().any()


def test_a_long_prompt_equals_one_token_at_a_time(tmp_path):
    """The prompt is longer than a native pass of 128 rows, and not a multiple of it."""
    shape = make_sizes(context_length=300)
    model = saved(tmp_path, sizes=shape)
    ids = np.random.default_rng(0).integers(0, 50, 281).tolist()
    with Engine.load(model.path, mode="exact") as engine:
        assert rel_error(decoded(engine, ids), engine.logits(ids)[-1]) < F32_BOUND


def test_generate_stops_where_the_context_is_full(tmp_path, codec_model):
    with Engine.load(codec_model, context_length=16) as engine:
        prompt = list(range(10))
        assert len(list(engine.generate(prompt, 100, temperature=0.0))) == 16 - 10 + 1
        assert engine.last_run.stopped_by == "context"
        with pytest.raises(HotsplitError, match="17 tokens for a context of 16"):
            list(engine.generate(list(range(17)), 1))
        longest = engine.model.spec.context_length
        advice = f"load with -c {longest} and shorten the text by more than 1$"
        with pytest.raises(HotsplitError, match=advice):
            engine.logits([1] * (longest + 1))


def test_observers_are_called_only_while_they_are_attached(tmp_path):
    model = saved(tmp_path)
    names = []
    with Engine.load(model.path) as engine:
        observation = engine.observe(lambda n, i, t: names.append((n, i)), lambda n, i: i == 1)
        engine.logits(IDS)
        observation.remove()
        seen = len(names)
        engine.logits(IDS)
    assert len(names) == seen
    assert names == [
        (n, 1)
        for n in (
            "attn_norm",
            "attn_heads",
            "attn_out",
            "ffn_norm",
            "ffn_gate",
            "ffn_hidden",
            "ffn_out",
            "layer_out",
        )
    ]


def test_close_frees_the_weights(tmp_path):
    model = saved(tmp_path)
    with Engine.load(model.path) as engine:
        engine.logits(IDS)
        layer = engine.layers[0]
        held = [
            weakref.ref(layer.attention.cache.key_BKPX),
            weakref.ref(layer.attention.output.weight.data),
        ]
        del layer
        assert all(each() is not None for each in held)
    with pytest.raises(HotsplitError, match="closed"):
        engine.logits(IDS)
    gc.collect()
    assert [each() for each in held] == [None, None]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"mode": "predicted"}, "has no predictors"),
        ({"mode": "fast"}, "wanted 'dense', 'exact' or 'predicted'"),
        ({"device": "tpu:0"}, "wanted cpu or cuda"),
        ({"device": "cuda:99"}, "CUDA devices here"),
        ({"context_length": 33}, "the model has up to 32"),
    ],
)
def test_wrong_options_of_load_are_refused(tmp_path, options, message):
    model = saved(tmp_path)
    with pytest.raises(HotsplitError, match=message):
        Engine.load(model.path, **options)


@pytest.mark.parametrize(
    "ids, message",
    [
        ([], "no tokens"),
        ([50], "0..49"),
        ([-1], "0..49"),
        ([1.5], "token ids"),
        ([True], "token ids"),
        (torch.tensor([1.0]), "token ids"),
        ([[1, 2]], "token ids"),
    ],
)
def test_wrong_tokens_are_refused(tmp_path, ids, message):
    model = saved(tmp_path)
    with Engine.load(model.path) as engine, pytest.raises(HotsplitError, match=message):
        engine.logits(ids)


def test_a_plan_of_another_model_is_refused(tmp_path):
    model = saved(tmp_path)
    split = make_split(model, PATTERNS["half"])
    other = tmp_path / "other.split.gguf"
    dataclasses.replace(split, model_id="0" * 64).save(other)
    with pytest.raises(HotsplitError, match="made for model 000000000000"):
        Engine.load(model.path, split=other)
    wrong = dict(split.gpu_bytes, neurons=split.gpu_bytes["neurons"] - 4)
    dataclasses.replace(split, gpu_bytes=wrong).save(other)
    with pytest.raises(HotsplitError, match="neurons of .* takes .* bytes on the GPU"):
        Engine.load(model.path, split=other)
    assert set(wrong) == set(ITEMS)
