"""Compiles every GPU kernel to machine code with Triton and ptxas; the slow tests do so for every
kind of matrix. The interpreter does not check types, layouts and registers; the compiler does, and
needs no device.
gpu_compilation.py does the work in a separate process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from paths import SEARCH_PATH

from hotsplit.runtime.kernels.gpu.kernels import KERNELS

SCRIPT = Path(__file__).with_name("gpu_compilation.py")
# Kernels that take a matrix; all others are compiled once, for "none".
FOR_MATRICES = {
    *("_unpack", "_dot", "_predict", "_gate_up", "_down", "_multiply", "_multiply_down"),
    *("_expert_gate_up", "_expert_down", "_expert_sum"),
}
# `embed` is a launch of `_unpack`, and `attend` one of its two halves.
EVERY = {f"_{name}" for name in KERNELS} - {"_embed", "_attend"} | {
    *("_expert_sum", "_attend_part", "_attend_join", "_unpack_tiles")
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
    others = ("_unpack", "_multiply", "_multiply_down")
    hot = [r for r in records if r["kernel"] in FOR_MATRICES and r["kernel"] not in others]
    # The factor of 4 bytes in each row of nvfp4 leaves loads of 4.
    hot = [r for r in hot if r["kind"] != "nvfp4_scaled_planar"]
    assert hot
    for record in hot:
        wide = record["loads_of_16"] + (record["loads_of_8"] if _is_narrow(record) else 0)
        assert wide > 0 and record["loads_of_16"] >= (0 if _is_narrow(record) else 1), record


def _is_narrow(record: dict) -> bool:
    """True for a predictor in q6_k: a row of 1024 values has 840 bytes, not a multiple of 16."""
    return record["kind"] == "q6_k_planar" and record["kernel"] == "_predict"


def by_kind(records: list[dict]) -> dict[str, set[str]]:
    """The kernels that are compiled for each kind of matrix."""
    found: dict[str, set[str]] = {}
    for record in records:
        found.setdefault(record["kind"], set()).add(record["kernel"])
    return found


def test_kernels_compile_for_a_kind_with_blocks_and_one_without():
    records = compiled(HOPPER, "none", "f16", "q4_k", "q6_k_tiled")
    found = by_kind(records)
    assert found["f16"] == found["q4_k"] == FOR_MATRICES
    assert found["q6_k_tiled"] == {"_unpack_tiles", "_multiply"}
    assert set().union(*found.values()) == EVERY
    assert_good(records)
    assert_wide_loads([r for r in records if r["kind"] in ("f16", "q4_k")])


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
