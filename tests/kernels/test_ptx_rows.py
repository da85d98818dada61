"""The GPU kernels for several rows of a step, compiled and executed as PTX: each row has the bits
that the kernel for one row gives it; with K-quants the last bits may differ. What ptxas does with
the PTX is not checked, but the fused multiply-adds, on which the bits depend, are already in the
PTX.

A few comparisons run by default, the others are marked slow; all are skipped if there is a GPU."""

import ptx_plans
import pytest
import test_gpu_rows as rows
import torch
from gpu_matrices import KINDS
from kernel_check import check_launch
from models import make_model, make_sizes
from ptx.kernels import PtxKernels

from hotsplit.runtime.kernels.gpu.kernels import reference_kernels

ARCHITECTURES = (89, 90, 120)
pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="they run on the device instead"),
    pytest.mark.usefixtures("several_rows"),
]
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
    **{
        f"down {kind}, zeros {what}": lambda k, kind=kind, what=what: rows.test_down(
            k, kind, 2, what == "skipped"
        )
        for kind in KINDS
        for what in ("skipped", "read")
    },
    **{
        f"dot of {n} rows": lambda k, n=n: rows.test_dot_of_every_number_of_rows(
            k, "q4_0_planar", n
        )
        for n in rows.ROWS[1:]
    },
    **{
        f"gate_up {activation}, dense {is_dense}": lambda k, a=activation, d=is_dense: (
            rows.test_gate_up_with_ids_biases_and_types(k, a, d)
        )
        for activation in ("relu", "drelu", "silu")
        for is_dense in (False, True)
    },
    "embed": lambda k: rows.test_embed(k, True),
    "embed scaled": lambda k: rows.test_embed_times_a_scale(k),
    "norm": lambda k: rows.test_add_norm(k, True, 2),
    "attend to blocks": lambda k: rows.test_attend_to_blocks(k, 8, torch.float16, None),
    "attend of one row": lambda k: rows.test_attend_to_blocks(k, 1, torch.float32, None),
    "attend in windows": lambda k: rows.test_attend_to_blocks(k, 8, torch.float16, 65),
    "attend of drafts": lambda k: rows.test_attend_of_rows_of_one_sequence(k, None),
    "append of one row": lambda k: rows.test_append_to_blocks(k, 1, torch.float32),
    "append of repeated rows": rows.test_a_repeated_row_appends_once_and_attends,
    "NaN": rows.test_a_row_does_not_see_another_ones_nan,
}


@pytest.mark.parametrize("case", QUICK)
def test_rows(case):
    QUICK[case](PtxKernels(89).kernels)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("case", [*QUICK, *REST])
def test_all(case, arch):
    (QUICK | REST)[case](PtxKernels(arch).kernels)


def check_plan(kind: str, num_rows: int, num_sequences: int, arch: int) -> None:
    """Runs the check that a GPU gets before its first step of this many rows, with the kernels
    executed as PTX."""
    shape = make_sizes(num_layers=3, width=256, num_neurons=96, num_heads=4, context_length=128)
    model = make_model(sizes=shape, kind=kind, predictor_rank=32 if kind == "f16" else 256)
    found = ptx_plans.launches(
        model, mode="predicted", context=100, num_rows=num_rows, num_sequences=num_sequences
    )
    wanted = {"dot", "add_norm", "rotate_append", "attend", "predict", "gate_up", "down"}
    assert {each.kernel for each in found} == wanted
    kernels = PtxKernels(arch).kernels
    for each in found:
        assert each.num_rows == num_rows and each.variant.endswith(f" {num_rows} rows")
        check_launch(each, kernels, reference_kernels(), lambda: None)


def test_the_check_of_a_step_of_several_rows():
    check_plan("q4_0", 2, 3, 89)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("num_sequences", [1, 8])
@pytest.mark.parametrize("num_rows", rows.ROWS[1:])
@pytest.mark.parametrize("kind", ["f16", "q8_0", "q4_0", "q4_k", "q6_k"])
def test_the_check_of_every_number_of_rows(kind, num_rows, num_sequences, arch):
    check_plan(kind, num_rows, num_sequences, arch)
