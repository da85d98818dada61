"""The GPU kernels of gated delta nets, compared with a float64 reference on a CUDA device, or in
Triton's interpreter if there is none, and compiled and executed as PTX. A token has the same bits
in every pass.

Letters: T rows, R runs, S slots, C channels, J taps, G key heads, V value heads, N and M widths."""

import dataclasses
from collections.abc import Sequence
from functools import cache

import pytest
import torch
from gpu_matrices import EPS, NAN, REFERENCE, device
from ptx import Fault
from ptx.kernels import PtxKernels

pytest.importorskip("triton")
from hotsplit.runtime.kernels.gpu.kernels import Kernels, triton_kernels  # noqa: E402

ADA, HOPPER = 89, 90
SLOTS, ROWS = 6, 9


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Passes, each with runs (first row, rows, slot read, slot written), and slots that take the
    state after other rows of a run."""

    passes: Sequence[Sequence[tuple[int, int, int, int]]]
    inner: Sequence[tuple[int, int]] = ()
    heads: tuple[int, int] = (1, 2)
    widths: tuple[int, int] = (8, 12)
    taps: int = 4
    is_grouped: bool = False
    is_by_row: bool = False

    @property
    def num_rows(self) -> int:
        return max(first + count for runs in self.passes for first, count, *_ in runs)

    def values(self, *shape: int, seed: int) -> torch.Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device())

    def run(self, kernels: Kernels) -> dict[str, torch.Tensor]:
        """What the kernels write, one pass after the other. Rows of no run stay NaN."""
        (key_heads, value_heads), (key_width, value_width) = self.heads, self.widths
        channels = 2 * key_heads * key_width + value_heads * value_width
        decays, rows = value_heads * (key_width if self.is_by_row else 1), self.num_rows
        width = channels + value_heads * (value_width + 1) + decays
        projected = self.values(ROWS, width, seed=1)[:rows]
        taps, weight = self.values(channels, self.taps, seed=2), self.values(value_width, seed=3)
        step_bias = 4 * self.values(decays, seed=4)
        rate = -self.values(value_heads, seed=5).exp()
        conv = self.values(SLOTS, self.taps - 1, channels, seed=6)
        state = self.values(SLOTS, value_heads, key_width, value_width, seed=7)
        mixed = torch.full((rows, channels + value_heads + decays), NAN, device=device())
        out = torch.full((rows, value_heads, value_width), NAN, device=device())
        for runs in self.passes:
            run = torch.tensor([each[:3] for each in runs], dtype=torch.int32, device=device())
            writes = torch.full((rows,), -1, dtype=torch.int32)
            for first, count, _, target in runs:
                if count:
                    writes[first + count - 1] = target
            for row, target in self.inner:
                writes[row] = target
            slots = run, writes.to(device())
            kernels.convolve(projected, taps, step_bias, rate, conv, *slots, mixed, key_heads)
            flags = {"is_grouped": self.is_grouped, "is_by_row": self.is_by_row}
            kernels.delta_rule(mixed, state, *slots, out, key_heads, **flags)
        raw = out.clone()
        kernels.gate_norm(out, projected, weight, 1e-6, is_sigmoid=self.is_by_row)
        return {"mixed": mixed, "conv": conv, "state": state, "raw": raw, "out": out}


def is_right(got: dict[str, torch.Tensor], case: Case) -> bool:
    """Inputs of the recurrence are of size 1; each row of a run adds the rounding of a few sums to
    the state."""
    want, bound = _wanted(case), 32 * EPS * (case.num_rows + case.widths[0] ** 0.5)
    for name, mine in got.items():
        right = want[name]
        if not torch.equal(mine.isnan(), right.isnan()):
            return False
        error = (mine.double() - right.double()).abs() / (1 + right.double().abs())
        if error.nan_to_num().max() > bound * (8 if name == "out" else 1):
            return False
    return True


@cache
def _wanted(case: Case) -> dict[str, torch.Tensor]:
    return case.run(REFERENCE)


ONE = Case(passes=(((0, 1, -1, 2),),))
CASES = {
    "one row": ONE,
    "a second row": Case(passes=(((0, 1, 3, 2),),)),
    "a prompt": Case(passes=(((0, 9, -1, 1),),), inner=((3, 2), (7, 0))),
    "after other rows": Case(passes=(((0, 5, 4, 0),),), heads=(1, 3), widths=(20, 7)),
    "two taps, wide keys": Case(passes=(((0, 3, 1, 5),),), taps=2, widths=(40, 33), heads=(1, 1)),
    "several texts": Case(
        passes=(((0, 1, 0, 1), (1, 3, -1, 2), (4, 2, 3, 4), (0, 0, 0, 0)),),
        inner=((1, 5),),
        heads=(2, 4),
        is_grouped=True,
    ),
    "decays by row": Case(
        passes=(((0, 4, 3, 1), (4, 1, -1, 2)),), heads=(3, 3), widths=(12, 20), is_by_row=True
    ),
    "two passes": Case(
        passes=(((0, 2, 0, 1), (2, 1, 2, 3)), ((3, 2, 1, 4), (0, 0, 0, 5))), heads=(2, 4)
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_every_kind_of_pass(name):
    assert is_right(CASES[name].run(triton_kernels()), CASES[name])


def test_rows_without_a_run_are_left_alone():
    case = Case(passes=(((0, 1, 0, 1), (0, 0, 2, 3)), ((6, 1, 4, 5), (0, 0, 0, 0))))
    found = case.run(triton_kernels())
    assert is_right(found, case)
    assert found["mixed"][1:6].isnan().all() and found["raw"][1:6].isnan().all()
    assert torch.equal(found["state"][3], case.values(SLOTS, 2, 8, 12, seed=7)[3])


def assert_same_bits(kernels: Kernels) -> None:
    """Five tokens of a text in one pass, in passes of one, of three and two, and beside others."""
    case = Case(passes=(((0, 5, 0, 1),),), heads=(1, 1), widths=(8, 5))
    whole = case.run(kernels)
    chains = [
        [((row, 1, 0 if row == 0 else 1 + row % 2, 2 - row % 2),) for row in range(5)],
        [((0, 3, 0, 2),), ((3, 2, 2, 1),)],
        [((0, 5, 0, 1), (5, 3, -1, 3), (0, 0, 0, 0), (0, 0, 0, 0))],
    ]
    for passes in chains:
        found = dataclasses.replace(case, passes=tuple(passes)).run(kernels)
        last = passes[-1][0][3]
        for name in ("mixed", "raw"):
            assert torch.equal(found[name][:5], whole[name][:5]), passes
        for name in ("conv", "state"):
            assert torch.equal(found[name][last], whole[name][1]), passes


def test_a_token_has_the_same_bits_in_every_pass():
    """Executed as PTX, unless there is a device."""
    is_there = torch.cuda.is_available()
    assert_same_bits(triton_kernels() if is_there else PtxKernels(ADA).kernels)


def test_key_heads_are_read_in_turn_or_by_groups():
    for name in ("several texts", "two passes"):
        case = CASES[name]
        other = dataclasses.replace(case, is_grouped=not case.is_grouped)
        assert not is_right(other.run(REFERENCE), case)


@pytest.mark.parametrize("wrong", ["mixed", "conv", "state", "raw", "out"])
def test_the_bound_rejects_wrong_results(wrong):
    case = CASES["several texts"]
    for change in (torch.zeros_like, lambda t: t * (1 + 1e-3), lambda t: t.flip(-1)):
        found = dict(case.run(REFERENCE))
        found[wrong] = change(found[wrong])
        assert not is_right(found, case)


# ---- as PTX ---------------------------------------------------------------------------------

on_ptx = pytest.mark.skipif(torch.cuda.is_available(), reason="they run on the device instead")


@on_ptx
@pytest.mark.parametrize(
    ("name", "arch"), [("several texts", ADA), ("after other rows", HOPPER), ("decays by row", ADA)]
)
def test_ptx(name, arch):
    case = CASES[name]
    assert is_right(case.run(PtxKernels(arch, overlaps=arch == HOPPER).kernels), case)


@on_ptx
@pytest.mark.parametrize(
    ("kernel", "old", "new"),
    [
        ("_convolve", "rsqrt.approx.ftz.f32", "sqrt.approx.f32"),
        ("_convolve", "ex2.approx.f32", "abs.f32"),
        ("_convolve", "setp.gt.s64", "setp.ge.s64"),
        ("_delta_rule", "shfl.sync.bfly.b32", "shfl.sync.up.b32"),
        ("_delta_rule", "sub.f32", "add.f32"),
        ("_delta_rule", "bar.sync", "//"),
        ("_gate_norm", "bar.sync", "//"),
    ],
)
def test_planted_faults_are_found(kernel, old, new):
    def edit(name: str, text: str) -> str:
        if name != kernel:
            return text
        assert old in text, sorted(set(text.split()))
        return text.replace(old, new)

    case = CASES["after other rows"]
    try:
        is_found = not is_right(case.run(PtxKernels(ADA, edit=edit).kernels), case)
    except Fault:
        is_found = True
    assert is_found
