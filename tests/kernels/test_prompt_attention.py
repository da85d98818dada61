"""Attention of a prompt's tokens, against float64: in Triton's interpreter, or on a device if there
is one, and compiled and executed as PTX.

Letters: T tokens, H heads, K key-value heads, W head width, C positions, S sequences, N blocks."""

import dataclasses
from collections.abc import Mapping

import pytest
import torch
from gpu_matrices import NAN, REFERENCE, device, heads_of, rounding
from ptx import Fault
from ptx.kernels import PtxKernels

from hotsplit.model.attention import HeadVector

pytest.importorskip("triton")

from hotsplit.runtime.kernels.gpu import prompt_attention  # noqa: E402
from hotsplit.runtime.kernels.gpu.kernels import triton_kernels  # noqa: E402

ADA, BLACKWELL = 89, 120
EPS16 = 2.0**-11


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """The last `tokens` of a text, whose cache has garbage behind them."""

    tokens: int = 5
    start: int = 60
    heads: tuple[int, int] = (4, 2)
    width: int = 32
    value_width: int | None = None  # of values that are the last ones of keys
    dtype: torch.dtype = torch.float16
    window: int | None = None
    cap: float | None = None
    has_sinks: bool = False
    gates: Mapping[str, int] = dataclasses.field(default_factory=dict)
    is_paged: bool = False
    by: float = 1.0
    garbage: float = NAN

    def values(self, *shape: int, seed: int) -> torch.Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device())

    def cache(self, seed: int) -> torch.Tensor:
        """[C, K, W], or [B, P, K, W] whose blocks are in another order; heads are major."""
        stop, num_kv = self.start + self.tokens, self.heads[1]
        rows = self.values(num_kv, 256, self.width, seed=seed).to(self.dtype)
        rows[:, stop:] = self.garbage
        if self.window is not None:
            rows[:, : max(0, self.start + 1 - self.window) // 32 * 32] = self.garbage
        if not self.is_paged:
            return rows.transpose(0, 1)
        blocks = rows.unflatten(1, (4, 64)).transpose(0, 1)[[2, 0, 3, 1]]  # [B, K, P, W]
        return torch.cat([torch.full_like(blocks[:1], self.garbage), blocks]).transpose(1, 2)

    def run(self, kernels, rows: slice = slice(None), padding: int = 0) -> torch.Tensor:
        """The output of some of the tokens; the last one is repeated `padding` times."""
        position_T = torch.arange(self.start, self.start + self.tokens)[rows]
        query = self.values(self.tokens, self.heads[0], self.width, seed=1)[rows]
        query = (query * self.by / self.width**0.5).to(self.dtype)
        number_T = torch.arange(len(query) + padding).clamp(max=len(query) - 1)
        query_THW, position_T = query[number_T], position_T[number_T].to(device())
        keys, values, latents = self.cache(2), self.cache(3), {}
        if self.value_width is not None:
            values = keys[..., -self.value_width :]
            latents = {"value_width": self.value_width, "num_kv_projections": 1}
        out = torch.full_like(query_THW[..., : self.value_width], NAN)
        table = sequence = None
        if self.is_paged:  # block n of the text is row table[1, n] of the cache
            table = torch.tensor([[0, 0, 0, 0], [2, 4, 1, 3]], dtype=torch.int32, device=device())
            sequence = torch.ones(len(query_THW), dtype=torch.int32, device=device())
        vectors = {"head_sinks": self.values(self.heads[0], seed=4) * 2} if self.has_sinks else {}
        spec = heads_of(
            *self.heads,
            self.width,
            window=self.window,
            score_cap=self.cap,
            head_sinks=HeadVector("sinks") if vectors else None,
            **self.gates,
            **latents,
        )
        size, gated = spec.qkv_size + spec.gate_size, None
        if self.gates:
            gated = self.values(self.tokens, size, seed=5)[rows][number_T]
        kernels.attend_tokens(
            query_THW,
            keys,
            values,
            position_T,
            spec,
            out,
            sequence,
            table,
            vectors=vectors,
            gated_TQ=gated,
        )
        return out[: len(query)]

    @property
    def bound(self) -> float:
        """A mean of values up to 4.5, weighted by shares that are rounded to the type of the cache
        and come from scores with the error of a sum of `width` terms; the result is rounded,
        too."""
        score = rounding(self.width) * self.by * self.width**0.5
        found = 9 * (score + 2 * rounding(self.start + self.tokens))
        return found + (9 * EPS16 if self.dtype == torch.float16 else 0.0)


def is_right(got, case: Case) -> bool:
    want = case.run(REFERENCE).double()
    assert want.isfinite().all() and case.bound < 0.02
    return bool(((got.double() - want).abs() <= case.bound).all())


CASES = [
    *(Case(tokens=tokens, start=start) for tokens, start in ((1, 0), (33, 0), (63, 1), (70, 31))),
    Case(heads=(3, 1), width=40, by=8.0),
    Case(heads=(2, 2), width=64, is_paged=True, tokens=70),
    *(
        Case(start=start, window=window, tokens=40)
        for start, window in ((0, 1), (0, 33), (90, 32), (90, 97), (30, 200))
    ),
    Case(has_sinks=True, window=20, start=70, is_paged=True),
    Case(dtype=torch.float32, tokens=20, start=29),
    Case(dtype=torch.float32, has_sinks=True, width=80),
    Case(width=136, is_paged=True, cap=2.0),
    Case(width=320, heads=(1, 1)),
    Case(gates={"is_gated": True}, heads=(6, 2), tokens=33, is_paged=True),
    Case(gates={"gate_width": 32}, heads=(6, 2), tokens=33),
    Case(gates={"gate_width": 1}, heads=(3, 1), width=40, tokens=33),
    Case(width=96, value_width=64, heads=(5, 1), tokens=33, is_paged=True),
    Case(width=26, value_width=20, heads=(3, 1), dtype=torch.float32),
    Case(width=576, value_width=512, heads=(2, 1), tokens=33),
]


@pytest.mark.parametrize("case", CASES)
def test_every_edge(case):
    assert is_right(case.run(triton_kernels()), case)


def test_a_card_without_tensor_cores(monkeypatch):
    monkeypatch.setattr(prompt_attention, "has_tensor_cores", lambda device: False)
    assert is_right(CASES[8].run(triton_kernels()), CASES[8])


@pytest.mark.parametrize("wrong", [torch.zeros_like, lambda t: 0.5 * t, lambda t: t.flip(0)])
def test_the_bound_rejects_wrong_results(wrong):
    for case in (CASES[1], CASES[7]):
        assert not is_right(wrong(case.run(REFERENCE)), case)


def test_the_bound_rejects_other_windows_and_no_sinks():
    case = Case(start=90, window=32, has_sinks=True, garbage=0.0)
    for other in (
        {"window": 31},
        {"window": 33},
        {"window": None},
        {"has_sinks": False},
        {"gates": {"is_gated": True}},
        {"gates": {"gate_width": 32}},
        {"cap": 5.0},
        {"value_width": 32, "heads": (4, 1)},
    ):
        assert not is_right(dataclasses.replace(case, **other).run(REFERENCE), case)


def assert_same_bits(kernels, case: Case) -> None:
    """A token alone, among the last ones, and before padding."""
    whole = case.run(kernels)
    for rows, padding in ((slice(3, 4), 0), (slice(20, None), 0), (slice(None), 28)):
        assert torch.equal(case.run(kernels, rows, padding), whole[rows])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("window", [None, 40])
def test_a_token_has_the_same_bits_in_every_pass_and_before_padding(dtype, window):
    case = Case(tokens=36, start=50, dtype=dtype, window=window, heads=(2, 1), garbage=0.0)
    assert_same_bits(triton_kernels(), case)


# ---- as PTX ---------------------------------------------------------------------------------

on_ptx = pytest.mark.skipif(torch.cuda.is_available(), reason="they run on the device instead")


@on_ptx
@pytest.mark.parametrize(
    "number, arch",
    [(5, ADA), (8, BLACKWELL), (11, ADA), (13, BLACKWELL), (-4, ADA), (-3, BLACKWELL), (-1, ADA)],
)
def test_ptx(number, arch):
    assert is_right(CASES[number].run(PtxKernels(arch).kernels), CASES[number])


@on_ptx
def test_a_token_has_the_same_bits_as_ptx():
    assert_same_bits(PtxKernels(ADA).kernels, Case(tokens=36, start=50, heads=(1, 1), window=40))


@on_ptx
@pytest.mark.parametrize(
    "old, new",
    [
        ("ex2.approx", "abs"),
        ("cp.async.wait_group \t0", "cp.async.wait_group \t9"),
        ("setp.gt.s32", "setp.ge.s32"),
        ("bar.sync", "//"),
    ],
)
def test_planted_faults_are_found(old, new):
    case = CASES[8]

    def edit(name: str, text: str) -> str:
        assert old in text, sorted(set(text.split()))
        return text.replace(old, new)

    try:
        is_found = not is_right(case.run(PtxKernels(ADA, edit=edit).kernels), case)
    except Fault:
        is_found = True
    assert is_found
