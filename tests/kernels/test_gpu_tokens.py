"""What a prompt's pass computes for each token between its products, against float64: Triton's
kernels in its interpreter (on a device if there is one).

Letters: T tokens, D width, N neurons."""

import pytest
import torch
from gpu_matrices import EPS, REFERENCE, device, heads_of

triton = pytest.importorskip("triton")
from hotsplit.runtime.device.bits import pack_bits  # noqa: E402
from hotsplit.runtime.kernels.gate import Gate  # noqa: E402
from hotsplit.runtime.kernels.gpu.kernels import triton_kernels  # noqa: E402

# Experts, which have another, are computed on the CPU.
ACTIVATIONS = ("relu", "relu2", "fatrelu", "drelu", "silu", "gelu", "gelu_tanh")
ERRORS = {torch.float32: 8 * EPS, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device())


def is_right(got, want, eps: float, largest_T) -> bool:
    """Compares with an error relative to each token's largest value: others may be subnormal."""
    assert want.isfinite().all() and want.abs().max() > 0
    error_T = (got.double() - want.double()).abs().amax(dim=1)
    return bool((error_T <= eps * largest_T.double()).all())


def rounded(name: str, *arguments, dtype, **outputs):
    """(out, powers or None) of Triton's kernel and of the reference; f16 has powers."""
    found, shape = [], arguments[0].shape
    for kernels in (triton_kernels(), REFERENCE):
        out_TK = torch.full(shape, torch.nan, dtype=dtype, device=device())
        power_T = torch.full(shape[:1], torch.nan, device=device())
        power_T = power_T if dtype == torch.float16 else None
        sums = [
            each.clone() if isinstance(each, torch.Tensor) else each for each in outputs.values()
        ]
        getattr(kernels, name)(*arguments, out_TK, power_T, *sums)
        found.append((out_TK, power_T, *sums))
    assert power_T is None or torch.equal(found[0][1], found[1][1])
    return found


@pytest.mark.parametrize("dtype", ERRORS)
@pytest.mark.parametrize("width", [5, 64, 300])
@pytest.mark.parametrize("form", ["plain", "rms", "layer"])
def test_sums_norms_and_rounding(dtype, width, form):
    weight_D = None if form == "plain" else values(width, seed=3)
    bias_D = values(width, seed=4) if form == "layer" else None
    for count, is_summed in ((1, False), (3, True)):
        x_TD = values(count, 3 * width)[:, width : 2 * width]  # rows apart
        added_TD = values(count, width, seed=5) if is_summed else None
        given, x_out = (x_TD, added_TD, weight_D, bias_D, 1e-5), torch.full_like(x_TD, torch.nan)
        got, want = rounded("round_tokens", *given, dtype=dtype, x_out=x_out)
        assert is_right(got[0], want[0], ERRORS[dtype] * 4, want[0].abs().amax(dim=1))
        assert is_right(got[2], want[2], 2 * EPS, want[2].abs().amax(dim=1))


def test_a_sum_may_replace_a_term():
    x_TD, added_TD, weight_D = values(3, 300), values(3, 300, seed=5), values(300, seed=3)
    outputs = [
        torch.empty(3, 300, dtype=torch.float16, device=device()),
        torch.empty(3, device=device()),
    ]
    found = []
    for sum_TD in (torch.empty_like(x_TD), x_TD):
        triton_kernels().round_tokens(x_TD, added_TD, weight_D, None, 1e-5, *outputs, sum_TD)
        found.append([each.clone() for each in (*outputs, sum_TD)])
    assert all(map(torch.equal, *found))


def test_powers_of_tiny_huge_and_infinite_values():
    x_TD = values(6, 64)
    x_TD[0], x_TD[1], x_TD[2], x_TD[3] = 0.0, x_TD[1] * 1e-41, x_TD[2] * 1e36, x_TD[3] * 1e6
    x_TD[4, 7], x_TD[5, 3] = torch.inf, -torch.inf
    given = (x_TD, None, None, None, 0.0)
    got, want = rounded("round_tokens", *given, dtype=torch.float16, x_out=None)
    assert torch.equal(got[0], want[0])
    assert (got[0][:4].abs() < 2).all() and got[0][4, 7] == torch.inf
    x_TD[5, 9] = torch.nan
    triton_kernels().round_tokens(x_TD, None, None, None, 0.0, got[0], got[1], None)
    assert got[0][5].isnan().any() and not got[0][:4].isnan().any()


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", ERRORS)
def test_hidden_values(activation, dtype):
    for count, number, is_named, is_dense in ((1, 7, False, True), (2, 2050, True, False)):
        gate_TN, up_TN = values(count, number), values(count, number, seed=1)
        up_TN = None if is_dense else up_TN
        is_named_TN = values(count, number, seed=2) > 0
        named_TW = pack_bits(is_named_TN) if is_named else None
        rule = Gate(activation=activation, threshold=0.05, computes_all=is_dense)
        got, want = rounded("hidden_tokens", gate_TN, up_TN, named_TW, rule, dtype=dtype)
        assert is_right(got[0], want[0], ERRORS[dtype], want[0].abs().amax(dim=1))
        assert torch.equal(got[0] == 0, want[0] == 0)
        if is_named:
            assert not got[0][~is_named_TN].any()


@pytest.mark.parametrize("wrong", [torch.zeros_like, lambda t: 0.9 * t, lambda t: t.flip(1)])
def test_the_bound_rejects_wrong_values(wrong):
    x_TD = values(4, 64)
    assert is_right(x_TD, x_TD, ERRORS[torch.bfloat16], x_TD.abs().amax(dim=1))
    assert not is_right(wrong(x_TD), x_TD, ERRORS[torch.bfloat16], x_TD.abs().amax(dim=1))


@pytest.mark.parametrize("is_paged", [False, True])
def test_queries_are_rotated_scaled_and_rounded_apart(is_paged):
    """Three tokens of a pass, in the second and third block of a sequence."""
    heads, kv_heads, width, count = 4, 2, 16, 3
    qkv = values(count, (heads + 2 * kv_heads) * width)
    frequency = torch.logspace(0, -2, width // 2, dtype=torch.float64).to(device())
    position = torch.tensor([126, 127, 128], device=device())
    shape = (4, 64, kv_heads, width) if is_paged else (200, kv_heads, width)
    sequence = torch.zeros(count, dtype=torch.int32, device=device()) if is_paged else None
    table = torch.tensor([[3, 0, 2]], dtype=torch.int32, device=device()) if is_paged else None
    found = []
    for kernels in (triton_kernels(), REFERENCE):
        given, keys, cached = qkv.clone(), *torch.zeros(2, *shape).half().to(device())
        query = torch.empty(count, heads, width, dtype=torch.float16, device=device())
        kernels.rotate_append(
            given,
            frequency,
            None,
            None,
            position,
            keys,
            cached,
            heads_of(heads, kv_heads, width, is_adjacent=True, scale=0.25),
            sequence,
            table,
            query,
        )
        assert torch.equal(given, qkv)
        found.append((query, keys, cached))
    for got, want in zip(*found, strict=True):
        assert want.abs().max() > 0
        assert ((got.double() - want.double()).abs() <= 2.0**-10 * want.double().abs().max()).all()
