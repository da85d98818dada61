"""The runtime's real allocations, against a plan's itemised bytes."""

import gc
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from allocations import allocations, peak_bytes
from checkpoints import random_llama
from grid_blocks import grid_rows
from models import make_machine, make_model, make_profile, make_sizes
from test_gguf_source import with_matrices

from hotsplit.artifacts.split_file import Split
from hotsplit.convert.convert import convert
from hotsplit.convert.options import ConvertConfig
from hotsplit.errors import DoesNotFitError
from hotsplit.files.gguf_file import row_bytes
from hotsplit.files.table_blocks import grid_codes
from hotsplit.options.engine_config import EngineConfig
from hotsplit.run.choice import Wishes, choose
from hotsplit.run.default_budgets import Room
from hotsplit.run.forecast import forecast
from hotsplit.run.source import look_at
from hotsplit.runtime.engine import Engine
from hotsplit.runtime.kernels import grids
from hotsplit.runtime.kernels.cpu import library
from hotsplit.runtime.step.workspace import workspace_bytes
from hotsplit.solver.solve import SolveConfig, solve
from hotsplit.system.sizes import format_bytes

CONTEXT = 256


@pytest.fixture(scope="module", params=["f16", "q8_0"])
def planned(request, tmp_path_factory):
    """Paths of a model file and its plan. Most of the plan's bytes are weights and cache."""
    folder = tmp_path_factory.mktemp("workspace")
    shape = make_sizes(
        num_layers=8,
        width=512,
        num_neurons=1408,
        num_heads=8,
        num_kv_heads=8,
        vocab_size=4000,
        context_length=CONTEXT,
    )
    model = make_model(sizes=shape, kind=request.param, predictor_rank=32, predictor_density=0.2)
    model.save(folder / "m.gguf")
    make_profile(model).save(folder / "p")
    make_machine(cpu_gb_per_s=5, hand_over_s=1e-6, launch_s=1e-6).save(folder / "c")
    whole = sum(entry.num_bytes for entry in model.tensors.values())
    config = SolveConfig(
        model=folder / "m.gguf",
        profile=folder / "p",
        machine=folder / "c",
        output=folder / "plan",
        vram_budget_bytes=int(0.75 * whole),
    )
    solve(config, workspace_bytes)
    return config.model, config.output


def allocated(run) -> int:
    """Bytes that torch took and still holds."""
    kept: list[object] = []
    return sum(allocations(lambda: kept.append(run())))


def spanned_bytes(matrices) -> int:
    """Bytes of memory that matrices span, each counted once: interleaved matrices share a span."""
    spans = sorted(
        (m.data.data_ptr(), m.data.data_ptr() + (m.num_rows - 1) * m.stride_bytes + m.row_bytes)
        for m in matrices
    )
    total, end = 0, 0
    for start, stop in spans:
        total += max(0, stop - max(start, end))
        end = max(end, stop)
    return total


def of_layer(layer):
    attention, ffn = layer.attention, layer.ffn
    linears = [*attention.inputs, attention.output]
    linears += [ffn.predictor.down, ffn.predictor.up] if ffn.predictor else []
    return [linear.weight for linear in linears], [
        (block, [block.gate.weight, block.up.weight, block.down]) for block in ffn.blocks
    ]


def test_hot_weights_and_cache_take_the_plans_bytes(planned):
    """The loaded engine's hot weights and cache occupy exactly the bytes planned for them."""
    model, path = planned
    plan = Split.load(path)
    with Engine.load(model, path, device="cpu") as engine:
        hot, cache = [], {"gpu": [], "cpu": []}
        for index, layer in enumerate(engine.layers):
            side = "gpu" if plan.dense_on_gpu[index] else "cpu"
            cache[side] += [layer.attention.cache.key_CKW, layer.attention.cache.value_CKW]
            for block, matrices in of_layer(layer)[1]:
                is_hot = block.id_N.tolist() == plan.hot[index].tolist()
                hot += matrices if is_hot else []
        assert spanned_bytes(hot) == plan.gpu_bytes["neurons"] > 0
        for side, items in (("gpu", plan.gpu_bytes), ("cpu", plan.cpu_bytes)):
            assert sum(t.untyped_storage().nbytes() for t in cache[side]) == items["kv_cache"]
        assert plan.gpu_bytes["kv_cache"] > 0


def test_all_allocations_are_within_two_percent_of_the_plan(planned):
    """Weights, cache and the temporaries of a pass over the whole context, as measured."""
    model, path = planned
    plan = Split.load(path)
    engines = []
    loaded = allocated(lambda: engines.append(Engine.load(model, path, device="cpu")))
    (engine,) = engines
    ids = np.arange(CONTEXT) % 4000
    peak = peak_bytes(lambda: engine.hidden(ids))
    logits = peak_bytes(lambda: engine._prefill(torch.as_tensor(ids[-128:])))
    weights = [engine._live.weights.head.weight]
    for layer in engine.layers:
        dense, blocks = of_layer(layer)
        weights += dense + [matrix for _, matrices in blocks for matrix in matrices]
    embedding = engine.model.tensors["token_embd.weight"].num_bytes  # stays in the file
    total = loaded + max(peak, logits) + spanned_bytes(weights) + embedding
    workspace = plan.cpu_bytes["workspace"]
    planned_total = sum(plan.gpu_bytes.values()) + sum(plan.cpu_bytes.values())
    planned_total -= workspace  # one device plays both roles, with one workspace
    assert total == pytest.approx(planned_total, rel=0.02)
    assert max(peak, logits) <= workspace


@pytest.fixture(scope="module")
def mixed_types(tmp_path_factory):
    """A stock file whose embedding and head are in q6_k, and whose layers in iq3_xxs."""
    folder = tmp_path_factory.mktemp("mixed_types")
    shape = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8}
    source = random_llama(folder / "hf", hidden_act="silu", **shape)
    plain, path = folder / "f32.gguf", folder / "m.gguf"
    convert(ConvertConfig(source=source, output=plain, outtype="f32", layout="stock"))

    def rows_of(name, entry):
        if name.startswith("blk."):
            return "iq3_xxs", grid_rows("iq3_xxs", *entry.shape, scale=entry.shape[1] ** -0.5)
        width = row_bytes(entry.shape[1], "q6_k")
        return "q6_k", np.zeros((entry.shape[0], width), np.uint8)

    with_matrices(plain, path, rows_of)
    return path


@pytest.mark.parametrize("is_native", [True, False])
def test_what_run_and_plan_say_is_within_one_percent(mixed_types, monkeypatch, is_native):
    """All that is allocated is counted, for a type with a grid as files have it and as its table
    type."""
    if is_native and not library.reads_grids():
        pytest.skip("the processor has no VBMI or no GFNI")
    library.set_grid("iq3_xxs", grid_codes("iq3_xxs"))
    monkeypatch.setattr(grids, "are_faster", lambda kind: is_native)
    engines: list[Engine] = []

    def load():
        engines.append(Engine.load(mixed_types, device="cpu"))
        gc.collect()

    Engine.load(mixed_types, device="cpu").close()  # what a process keeps of its first load
    gc.collect()
    loaded = allocated(load)
    (engine,) = engines
    said = sum(engine.bytes_by_role["cpu"].values())
    peak = peak_bytes(lambda: engine._prefill(torch.arange(engine.context_length) % 100))
    weights = [engine._live.weights.head.weight, engine._live.weights.embedding]
    for layer in engine.layers:
        dense, blocks = of_layer(layer)
        weights += dense + [matrix for _, matrices in blocks for matrix in matrices]
    assert {m.kind for m in weights[2:]} == {
        "iq3_xxs_tiled" if is_native else "iq3_xxs_table_tiled"
    }
    total = loaded + peak + spanned_bytes(weights)
    assert total == pytest.approx(said, rel=0.01)
    engine.close()

    source, room = (
        look_at(mixed_types, None, mixed_types.with_name("none.gguf")),
        Room(main=1 << 40),
    )
    wishes = Wishes(engine=EngineConfig(device="cpu"))
    choice = choose(source, wishes, room)
    assert f"({format_bytes(said)} with its context" in choice.lines[0]
    job = SimpleNamespace(source=source, choice=choice, wishes=wishes)
    found = forecast(job, make_machine(), Path("m"), room, None)
    assert sum(found.cpu_bytes.values()) == said
    with pytest.raises(DoesNotFitError, match=f"it takes {format_bytes(said)}"):
        forecast(job, make_machine(), Path("m"), room, said - 1)
