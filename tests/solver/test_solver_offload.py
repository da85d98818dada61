"""Plans with keys and values in main memory: bytes, seconds, refusals, commands."""

import json
from dataclasses import replace

import pytest
from models import (
    load_solver_files,
    make_machine,
    make_model,
    make_sizes,
    save_solver_files,
    solver_files,
)

from hotsplit import Engine
from hotsplit.artifacts.split_file import Split
from hotsplit.cli import main
from hotsplit.costs.part_bytes import kv_bytes, kv_read
from hotsplit.errors import HotsplitError
from hotsplit.options.cache_types import CacheTypes
from hotsplit.options.key_selection import KeySelection
from hotsplit.solver.solve import SolveConfig, solve
from hotsplit.solver.verify import verify

WORKSPACE = 100 << 10
RULE = "block=16,sinks=16,window=32,top=32,candidates=2"
CONTEXT = 512


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    shape = make_sizes(num_layers=3, context_length=4096)
    model = make_model(sizes=shape, kind="f16", predictor_rank=8)
    return save_solver_files(tmp_path_factory.mktemp("offload"), model)


def solved(files, output, **changes):
    """Solves; returns the report and the context lengths for which the workspace was measured."""
    asked = []

    def workspace(model, context_length, mode, num_sequences, budget):
        asked.append(context_length)
        return WORKSPACE

    values = solver_files(files) | {
        "force": True,
        "vram_budget_bytes": WORKSPACE + (110 << 10),
        "mode": "exact",
        "output": output,
        "context_length": CONTEXT,
        "kv_offload": RULE,
    }
    return solve(SolveConfig(**values | changes), workspace), asked


@pytest.mark.parametrize("mode", ["dense", "exact", "predicted"])
@pytest.mark.parametrize("num_sequences", [1, 3])
def test_keys_are_in_main_memory_and_their_room_goes_to_neurons(
    files, tmp_path, mode, num_sequences
):
    options = {"mode": mode, "num_sequences": num_sequences}
    report, asked = solved(files, tmp_path / "o", **options)
    split, known = Split.load(tmp_path / "o"), load_solver_files(files)
    plain, _ = solved(files, tmp_path / "p", kv_offload=None, **options)
    types = replace(CacheTypes.of("f16"), selection=KeySelection.parse(RULE))
    positions = num_sequences * CONTEXT
    assert split.gpu_bytes["kv_cache"] == 0
    assert split.cpu_bytes["kv_cache"] == 3 * kv_bytes(known["model"], 0, positions, types)
    assert split.kv_offload == types.selection and report.kv_offload == str(types.selection)
    longer, again = solved(files, tmp_path / "l", context_length=4096, **options)
    assert longer.gpu_bytes == report.gpu_bytes  # the same for any context
    assert set(asked) == set(again) == {types.selection.longest}
    assert sum(report.gpu_bytes.values()) <= WORKSPACE + (110 << 10)
    freed = 3 * kv_bytes(known["model"], 0, positions)
    enough = report.advice.fits_from_bytes
    assert enough == plain.advice.fits_from_bytes - freed
    room, _ = solved(files, tmp_path / "r", vram_budget_bytes=enough, **options)
    plain, _ = solved(files, tmp_path / "p", vram_budget_bytes=enough, kv_offload=None, **options)
    assert room.fits_entirely and not plain.fits_entirely
    assert (room.num_hot, room.num_dense_on_gpu) > (plain.num_hot, plain.num_dense_on_gpu)
    assert any("none of the GPU's" in note for note in report.notes)
    verify(split, **known)


def test_a_second_computation_of_the_seconds_agrees_and_rejects_others(files, tmp_path):
    known = load_solver_files(files)
    for budget in (0, WORKSPACE + (40 << 10), WORKSPACE + (110 << 10), 64 << 20):
        for mode in ("dense", "exact", "predicted"):
            solved(files, tmp_path / "o", vram_budget_bytes=budget, mode=mode)
            split = Split.load(tmp_path / "o")
            verify(split, **known)
    assert any(split.dense_on_gpu)
    slow = make_machine(cpu_gb_per_s=0.005, gpu_gb_per_s=0.5, launch_s=1e-7, hand_over_s=1e-3)
    other = replace(split, kv_offload=KeySelection.parse(RULE.replace("top=32", "top=256")))
    for wrong, files_of in (
        (replace(split, objective_s=split.objective_s * 1.001), known),
        (other, known),
        (split, known | {"machine": slow}),
    ):
        with pytest.raises(HotsplitError, match="the plan is wrong"):
            verify(wrong, **files_of)


def test_the_bytes_that_a_token_reads_by_hand(files):
    """A layer has two key-value heads of 16 values in f16; summaries and codes pad them to 64."""
    model = load_solver_files(files)["model"]
    types = replace(CacheTypes.of("f16"), selection=KeySelection.parse(RULE))
    row, summary, code = 2 * 2 * 16, 2 * 64 + 4, 64 // 4 + 4
    for half, want in (
        (80, 80 * row),
        (256, 80 * row + (256 - 48) / 16 * summary + 64 * code),
        (100, 80 * row + (100 - 48) / 16 * summary + 52 * code),
    ):
        assert kv_read(model, 0, 2 * half, types) == 2 * want
    assert kv_read(model, 0, 512) == kv_bytes(model, 0, 512) / 2


def test_the_command_plans_and_the_program_shows_where_attention_runs(files, tmp_path, capsys):
    plan = str(tmp_path / "s.gguf")
    words = (
        f"solve {files}/m.gguf --profile {files}/p --machine {files}/c -o {plan} -vb 4MiB"
        f" -c {CONTEXT} --mode exact --kv-offload {RULE} --json"
    )
    assert main(words.split()) == 0
    found = json.loads(capsys.readouterr().out)
    assert (
        found["kv_offload"].startswith("block=16,sinks=16") and not found["gpu_bytes"]["kv_cache"]
    )
    assert main(["inspect", str(files / "m.gguf"), "--graph", "--split", plan]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    (attend,) = [line for line in lines if " attend " in f" {line} "]
    assert attend.startswith("host attend qkv, position, cache heads, cache")
    assert any(line.startswith("gpu0 project qkv attn_in") for line in lines)
    assert main(["inspect", plan]) == 0
    assert "window=32" in capsys.readouterr().out
    with Engine.load(files / "m.gguf", split=plan, device="cpu") as engine:
        assert engine.logits([1, 2, 3]).isfinite().all()
