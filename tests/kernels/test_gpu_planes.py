"""Kernels for planes of the hidden state, and for gates cut off by their mean and deviation:
Triton's in its interpreter (on a device if there is one) against float64."""

import pytest
import torch
from gpu_matrices import EPS, REFERENCE
from reference import rel_error
from test_gpu_tokens import ERRORS, is_right, rounded, values

from hotsplit.model.planes import MOST_PLANES
from hotsplit.runtime.kernels.gate import Gate

triton = pytest.importorskip("triton")
from hotsplit.runtime.kernels.gpu.kernels import triton_kernels  # noqa: E402

KERNELS = ("predict_planes", "correct_planes", "add_to_planes")


def given(name: str, num_planes: int, width: int, num_rows: int) -> list[torch.Tensor]:
    """The kernel's arguments, in order, of which some are written."""
    row = () if num_rows == 1 else (num_rows,)
    x, active = values(*row, num_planes * width), values(*row, width, seed=1)
    choice, mix = values(*row, num_planes, seed=2), values(num_planes**2, num_planes, seed=3)
    if name == "predict_planes":
        return [choice, mix, x, active]
    if name == "correct_planes":
        return [choice, mix[:num_planes], values(width, seed=4), x, active]
    return [x, active]


def run(kernels, name: str, arguments: list[torch.Tensor]) -> torch.Tensor:
    """The planes and the active one afterwards."""
    arguments = [each.clone() for each in arguments]
    getattr(kernels, name)(*arguments)
    return torch.cat([each.flatten() for each in arguments[-2:]])


def assert_mixed(kernels, name: str, num_planes: int, width: int, num_rows: int) -> None:
    arguments = given(name, num_planes, width, num_rows)
    got, want = (run(each, name, arguments) for each in (kernels, REFERENCE))
    before = torch.cat([each.flatten() for each in arguments[-2:]])
    assert rel_error(got, want) < 8 * num_planes * EPS
    for wrong in (before, torch.zeros_like(want), want.flip(0)):
        assert rel_error(wrong, want) > 1e-2


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("num_planes, width", [(2, 5), (3, 128), (4, 129), (MOST_PLANES, 130)])
def test_planes_are_mixed_as_in_float64(name, num_planes, width):
    for num_rows in (1, 2):
        assert_mixed(triton_kernels(), name, num_planes, width, num_rows)


@pytest.mark.parametrize("dtype", ERRORS)
@pytest.mark.parametrize("cutoff", [-0.5, 1.6])
def test_gates_are_cut_off_by_their_mean_and_deviation(dtype, cutoff):
    """A row shorter than a chunk, and rows that are longer."""
    for count, number, is_gated in ((1, 70, False), (3, 2050, True)):
        gate_TN, up_TN = 2.0 * values(count, number) - 0.7, values(count, number, seed=1)
        up_TN = up_TN if is_gated else None
        rule = Gate(activation="gelu_tanh", cutoff=cutoff)
        got, want = rounded("hidden_tokens", gate_TN, up_TN, None, rule, dtype=dtype)
        largest_T = want[0].abs().amax(dim=1)
        assert is_right(got[0], want[0], 4 * ERRORS[dtype], largest_T)
        hidden_TN = rule.hidden(rule.act(rule.prepare(gate_TN))[0], up_TN)
        if dtype == torch.float32:
            assert is_right(got[0], hidden_TN, 16 * EPS, largest_T)
            assert 0 < (hidden_TN != 0).double().mean() < (0.9 if cutoff < 0 else 0.2)
        whole = rule.hidden(rule.act(gate_TN)[0], up_TN)
        assert not is_right(whole.to(dtype), want[0], 4 * ERRORS[dtype], largest_T)
