"""The GPU kernels for several rows of a step, compiled and executed as PTX: each row has the bits
that the kernel for one row gives it. What ptxas does with the PTX is not checked; fused
multiply-adds are already in the PTX.

A few comparisons always run, the others are marked slow."""

import pytest
import test_gpu_rows as rows
import torch
from gpu_matrices import KINDS
from ptx.kernels import PtxKernels

from sparkinfer.runtime.kernels.gpu import launch

ARCHITECTURES = (89, 90, 120)
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="they run on the device instead")
QUICK = {
    "dot q4_0, 4 rows": lambda k: rows.test_dot(k, "q4_0_planar", 4),
    "dot f16, 8 rows": lambda k: rows.test_dot(k, "f16", 8),
    "predict": lambda k: rows.test_predict(k, "f16", 2),
    "gate_up": lambda k: rows.test_gate_up(k, "q4_0_planar", 4),
    "down": lambda k: rows.test_down(k, "f16", 8, True),
    "append to blocks": lambda k: rows.test_append_to_blocks(k, 8, torch.float16),
}
REST = {
    **{f"dot {kind}": lambda k, kind=kind: rows.test_dot(k, kind, 2) for kind in KINDS},
    **{f"predict {kind}": lambda k, kind=kind: rows.test_predict(k, kind, 2) for kind in KINDS},
    **{f"gate_up {kind}": lambda k, kind=kind: rows.test_gate_up(k, kind, 2) for kind in KINDS},
    **{f"down {kind}, zeros {what}": lambda k, kind=kind, what=what:
       rows.test_down(k, kind, 2, what == "skipped")
       for kind in KINDS for what in ("skipped", "read")},
    **{f"dot of {n} rows": lambda k, n=n: rows.test_dot_of_every_number_of_rows(k, "q4_0_planar", n)
       for n in rows.ROWS[1:]},
    **{f"gate_up {activation}, dense {is_dense}": lambda k, a=activation, d=is_dense:
       rows.test_gate_up_with_ids_biases_and_types(k, a, d)
       for activation in ("relu", "drelu", "silu") for is_dense in (False, True)},
    "embed": lambda k: rows.test_embed(k, True),
    "norm": lambda k: rows.test_add_norm(k, True, 2),
    "attend to blocks": lambda k: rows.test_attend_to_blocks(k, 8, torch.float16),
    "attend of one row": lambda k: rows.test_attend_to_blocks(k, 1, torch.float32),
    "attend of drafts": rows.test_attend_of_rows_of_one_sequence,
    "append of one row": lambda k: rows.test_append_to_blocks(k, 1, torch.float32),
    "append of repeated rows": rows.test_a_repeated_row_appends_once_and_attends,
    "NaN": rows.test_a_row_does_not_see_another_ones_nan,
}  # fmt: skip


@pytest.fixture(autouse=True)
def several_rows(monkeypatch):
    monkeypatch.setattr(launch, "LEAST_PROGRAMS", 1)


@pytest.mark.parametrize("case", QUICK)
def test_rows(case):
    QUICK[case](PtxKernels(89).kernels)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("case", [*QUICK, *REST])
def test_all(case, arch):
    (QUICK | REST)[case](PtxKernels(arch).kernels)
