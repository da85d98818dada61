"""Compiles every GPU kernel to machine code with Triton and ptxas; the slow tests do so for every
kind of matrix. The interpreter does not check types, layouts and registers; the compiler does, and
needs no device.
gpu_compilation.py does the work in a separate process."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from gpu_compilation import FILE_KINDS, FLOATS, TILE_KINDS
from gpu_matrices import KINDS
from paths import SEARCH_PATH

from hotsplit.runtime.kernels.gpu.kernels import KERNELS

SCRIPT = Path(__file__).with_name("gpu_compilation.py")
FOR_MATRICES = {
    "_unpack": 4,
    "_dot": 1,
    "_predict": 1,
    "_gate_up": 3,
    "_down": 2,
    "_expert_gate_up": 1,
    "_expert_down": 1,
    "_expert_sum": 1,
}
FOR_TILES = {"_multiply": 3, "_multiply_down": 2}  # and in prompts
FOR_VECTORS = {
    "_round_tokens": 2,
    "_hidden_tokens": 3,
    "_add_norm": 3,
    "_rotate_append": 4,
    "_attend_part": 8,
    "_attend_join": 8,
    "_attend_tokens": 6,
    "_choose_experts": 2,
    "_sort_pairs": 1,
    "_convolve": 1,
    "_delta_rule": 1,
    "_gate_norm": 1,
    "_predict_planes": 1,
    "_correct_planes": 1,
    "_add_to_planes": 1,
    "_scatter": 1,
    "_pack_open": 1,
}
HOPPER, ADA = 90, 89
# The most of a block on most cards; those before 8.0 use smaller tiles.
SHARED_BYTES = {"_attend_tokens": 99 << 10}
STACK_BYTES = {"_rotate_append": 32}  # where libdevice's cosine reduces large angles


def compiled(arch: int, *kinds: str) -> list[dict]:
    """One record per compiled launch."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = SEARCH_PATH
    command = [sys.executable, SCRIPT, str(arch), *kinds]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    records = [json.loads(line) for line in done.stdout.splitlines()]
    for record in records:  # shown if the test fails, and with -rP
        print(*(f"{name} {value}" for name, value in record.items()))
    return records


def assert_good(records: list[dict]) -> None:
    """Asserts at most 255 registers, and the shared memory and stack that are allowed."""
    for record in records:
        most = SHARED_BYTES.get(record["kernel"], 48 << 10)
        assert record["registers"] <= 255 and record["shared_bytes"] <= most, record
        assert record["stack_bytes"] <= STACK_BYTES.get(record["kernel"], 16), record


def assert_wide_loads(records: list[dict]) -> None:
    """Asserts that every kernel for matrices but those that unpack has a load of 16 bytes, or at
    least one of 8 if `_is_narrow`."""
    hot = [r for r in records if r["kernel"] in FOR_MATRICES and r["kernel"] != "_unpack"]
    assert hot
    for record in hot:
        wide = record["loads_of_16"] + (record["loads_of_8"] if _is_narrow(record) else 0)
        assert wide > 0 and record["loads_of_16"] >= (0 if _is_narrow(record) else 1), record


def _is_narrow(record: dict) -> bool:
    """True for a predictor in q6_k: a row of 1024 values has 840 bytes, not a multiple of 16."""
    return record["kind"] == "q6_k_planar" and record["kernel"] == "_predict"


def test_kernels_compile_for_a_kind_with_blocks_and_one_without():
    records = compiled(HOPPER, "none", "f16", "q4_k", "q6_k_tiled")
    found = Counter(r["kernel"] for r in records)
    want = Counter(FOR_VECTORS) + Counter(FOR_MATRICES) + Counter(FOR_MATRICES)
    want += Counter(FOR_TILES) + Counter(FOR_TILES)
    assert found == want + Counter({"_unpack_tiles": 1, "_multiply": 1})
    assert_good(records)
    assert_wide_loads([r for r in records if r["kind"] in ("f16", "q4_k")])


@pytest.mark.slow
@pytest.mark.parametrize("arch", [HOPPER, ADA])
def test_every_kernel_compiles_for_every_kind(arch):
    records = compiled(arch, "none", *KINDS, *FILE_KINDS, *TILE_KINDS)
    want = Counter(FOR_VECTORS)
    want += Counter({"_unpack": len(FILE_KINDS), "_unpack_tiles": len(TILE_KINDS)})
    want += Counter("_multiply_down" if "grouped" in kind else "_multiply" for kind in TILE_KINDS)
    for _ in KINDS:
        want += Counter(FOR_MATRICES) + Counter(FOR_TILES)
    assert Counter(r["kernel"] for r in records) == want
    assert_good(records)
    assert_wide_loads([r for r in records if r["kind"] not in (*FILE_KINDS, *TILE_KINDS)])


def test_every_kernel_of_the_record_is_compiled():
    """`embed` is a launch of `_unpack`, and `attend` one of its two halves."""
    names = {f"_{name}" for name in KERNELS} - {"_embed", "_attend"}
    assert names < FOR_VECTORS.keys() | FOR_MATRICES.keys() | FOR_TILES.keys()


def test_the_kinds_match_the_other_tests():
    assert {*FLOATS} < {*KINDS} and not {*FILE_KINDS} & {*KINDS}


@pytest.mark.parametrize(
    "wrong", [{"registers": 300}, {"stack_bytes": 400}, {"shared_bytes": 1 << 18}]
)
def test_the_check_rejects_kernels_that_spill(wrong):
    good = {"kernel": "_dot", "registers": 90, "stack_bytes": 0, "shared_bytes": 512}
    assert_good([good])
    with pytest.raises(AssertionError):
        assert_good([good, good | wrong])


def test_the_check_rejects_loads_of_single_bytes():
    good = {"kind": "q4_k", "kernel": "_dot", "loads_of_16": 3, "loads_of_8": 0}
    assert_wide_loads([good])
    with pytest.raises(AssertionError):
        assert_wide_loads([good, good | {"loads_of_16": 0, "loads_of_8": 3}])
