"""What the GPU kernels do for latent attention alone: products of each head, queries and a key that
are joined, and attention to keys whose last values are the values. In Triton's interpreter, or on a
device if there is one, and some compiled and executed as PTX.

Letters: T rows, H heads, W head width, C values of a latent, N values of a head's input."""

from dataclasses import dataclass

import pytest
import torch
from gpu_matrices import (
    EPS,
    NAN,
    REFERENCE,
    assert_close,
    device,
    heads_of,
    make_matrix,
    rounding,
    sizes,
    vector,
)
from ptx.kernels import PtxKernels
from test_gpu_products import bound, is_right, powers, tokens

from hotsplit.runtime.kernels.gpu import ranges
from hotsplit.runtime.kernels.stored import unpack

ADA, HOPPER = 89, 90


@dataclass(frozen=True, kw_only=True)
class Sizes:
    heads: int = 5
    latent: int = 64
    rotated: int = 32

    @property
    def width(self) -> int:
        return self.rotated + self.latent

    @property
    def spec(self):
        own = {"num_kv_projections": 1, "value_width": self.latent, "scale": 0.07}
        return heads_of(self.heads, 1, self.width, is_adjacent=True, **own)


ODD = Sizes(heads=3, latent=20, rotated=6)
WIDE = Sizes(heads=19, latent=512, rotated=64)  # DeepSeek's, in three programs
EACH = [Sizes(), ODD, WIDE]


def rows_of(num_rows: int, size: int, seed: int = 1) -> torch.Tensor:
    """[T, size], or [size]."""
    values = vector(num_rows * size, seed)
    return values if num_rows == 1 else values.view(num_rows, size)


# ---- products ------------------------------------------------------------------------------


def product_of_heads(kernels, kind: str, num_rows: int, heads: int = 3, own: int = 5):
    """Each head multiplies the first values of its part of x, and writes the first of its part of
    out, here with 7 behind them."""
    width, more = 64 if kind != "q4_k" else 256, 8
    matrix = make_matrix(kind, heads * own, width)
    x = rows_of(num_rows + 1, heads * (width + more))[:num_rows].squeeze(0)
    out = torch.full((*x.shape[:-1], heads * (own + 2)), 7.0, device=device())
    kernels.dot(matrix, None, x, out, num_heads=heads)
    weights = unpack(matrix.data, matrix.kind).double().view(heads, own, width)
    x_THD = x.double().view(num_rows, heads, -1)[..., :width]
    got = out.view(num_rows, heads, -1)
    size = torch.einsum("thd,hnd->thn", x_THD.abs(), sizes(matrix).view_as(weights))
    want = torch.einsum("thd,hnd->thn", x_THD, weights)
    assert_close(got[..., :own], want, rounding(width) * size)
    assert (got[..., own:] == 7).all()
    for row in {0, num_rows - 1} if num_rows > 1 else ():  # as if it were alone
        alone = torch.empty_like(out[0])
        kernels.dot(matrix, None, x[row].contiguous(), alone, num_heads=heads)
        assert torch.equal(alone.view(heads, -1)[:, :own], got[row, :, :own])


@pytest.mark.parametrize("num_rows", [1, 2, 8])
@pytest.mark.parametrize("kind", ["f32", "q8_0_planar", "q4_k"])
def test_products_of_heads(kernels, kind, num_rows):
    product_of_heads(kernels, kind, num_rows)


def products_of_tokens(kernels, kind: str, num_tokens: int, heads: int = 3, own: int = 65):
    """As tiles, whose inputs and outputs are strided."""
    width, total = 64, num_tokens + 1
    matrix = make_matrix(kind, heads * own, width)
    x = tokens(num_tokens, heads * (width + 16), kind=kind)
    out = torch.full((total, 4 + heads * (own + 3)), NAN, device=device())
    power = powers(num_tokens)
    kernels.multiply(matrix, None, x, power, out[:-1, 4:], num_heads=heads)
    got = out[:-1, 4:].unflatten(-1, (heads, -1))
    assert out[-1].isnan().all() and out[:, :4].isnan().all() and got[..., own:].isnan().all()
    for head in range(heads):
        rows = slice(head * own, (head + 1) * own)
        x_TD = x.unflatten(-1, (heads, -1))[:, head, :width]
        weight_ND = unpack(matrix.data, matrix.kind).double()[rows]
        want = x_TD.double() @ weight_ND.T * power[:, None]
        allowed = bound(x_TD, sizes(matrix)[rows].T, power) + EPS
        assert is_right(got[:, head, :own], want, allowed)
        assert not is_right(got[:, (head + 1) % heads, :own], want, allowed)


@pytest.mark.parametrize("num_tokens", [3, 33])
@pytest.mark.parametrize("kind", ["f32", "bf16", "q8_0_planar"])
def test_products_of_heads_and_tokens(kernels, kind, num_tokens):
    products_of_tokens(kernels, kind, num_tokens)


@pytest.mark.parametrize("name", ["dot", "multiply"])
def test_the_references_of_products_of_heads(name):
    """Against float64 of each head by itself."""
    (product_of_heads if name == "dot" else products_of_tokens)(REFERENCE, "f32", 4)


# ---- queries and keys ----------------------------------------------------------------------


def joined(kernels, own: Sizes, num_rows: int, plain: int = 5) -> None:
    of_query = plain + own.rotated
    low = rows_of(num_rows, own.heads * of_query + own.width)
    weight = vector(own.latent, 2)
    queries, latent = low.split([own.heads * of_query, own.width], dim=-1)
    qkv = rows_of(num_rows, (own.heads + 1) * own.width, 3)
    want = qkv.clone().view(num_rows, -1, own.width)
    kernels.join_latents(queries, latent, weight, 1e-3, qkv)
    of_heads = queries.reshape(num_rows, own.heads, of_query)
    want[:, :-1, : own.rotated] = of_heads[..., plain:]
    values = latent.view(num_rows, -1)
    normed = values[:, : own.latent].double()
    normed *= (normed.square().mean(-1, keepdim=True) + 1e-3).rsqrt() * weight
    want[:, -1] = torch.cat([values[:, own.latent :], normed], dim=-1)
    got = qkv.view_as(want)
    assert torch.equal(got[:, :-1], want[:, :-1])
    assert torch.equal(got[:, -1, : own.rotated], want[:, -1, : own.rotated])
    assert_close(got[:, -1], want[:, -1], 4 * rounding(own.latent) * want[:, -1].abs().max())


@pytest.mark.parametrize("num_rows", [1, 4, 64])
@pytest.mark.parametrize("own", [Sizes(), ODD])
def test_latents_are_joined_with_what_rotates(kernels, own, num_rows):
    joined(kernels, own, num_rows)
    joined(REFERENCE, own, num_rows)


@pytest.mark.parametrize("own", EACH)
def test_a_key_is_stored_once(kernels, own):
    """Values are read where keys are, so they are not written; what is rotated is as in heads that
    store both."""
    qkv = vector((own.heads + 1) * own.width)
    frequency = 100.0 ** -(torch.arange(0, own.rotated, 2, dtype=torch.float64) / own.rotated)
    at, found = torch.tensor([4], device=device()), []
    for which, spec in ((kernels, own.spec), (REFERENCE, own.spec), (REFERENCE, None)):
        ours, keys = qkv.clone(), torch.zeros(9, 1, own.width, device=device())
        values = keys[..., own.rotated :]
        if spec is None:  # with values apart
            values = torch.zeros_like(keys)
            spec = heads_of(own.heads, 1, own.width, is_adjacent=True, num_kv_projections=1)
        which.rotate_append(ours, frequency.to(device()), None, None, at, keys, values, spec)
        found.append((ours, keys))
    (got, got_keys), (want, want_keys), (apart, keys_apart) = found
    assert torch.equal(want_keys, keys_apart) and torch.equal(want, apart)
    assert_close(got, want, 64 * EPS)
    assert_close(got_keys, want_keys, 64 * EPS)
    assert torch.equal(got_keys[4, 0, own.rotated :], qkv[-own.latent :])


# ---- attention -----------------------------------------------------------------------------


def attended(kernels, own: Sizes, num_rows: int, dtype=torch.float16, context: int = 200):
    """Rows of two sequences, whose blocks hold NaN behind their positions; in `context` positions
    of one, if there is one row. The definition has values apart, as wide as keys."""
    at = torch.tensor([150, 63, 64, 0][:num_rows], device=device())
    qkv = rows_of(num_rows, (own.heads + 1) * own.width)
    paging, shape = (None, None), (context, 1, own.width)
    if num_rows > 1:
        sequence = torch.tensor([1, 0, 0, 1][:num_rows], device=device()).int()
        paging = sequence, torch.tensor([[2, 0, 5, 1], [4, 6, 3, 7]], device=device()).int()
        shape = 8, 64, 1, own.width
    keys = vector(torch.Size(shape).numel(), 2).view(shape).to(dtype)
    if num_rows == 1:
        keys[151:] = NAN
    of_row = ranges.attend_scratch(context if num_rows == 1 else 256, own.heads, own.latent)
    out = torch.full((*qkv.shape[:-1], own.heads * own.latent), NAN, device=device())
    scratch = torch.full((num_rows * of_row,), NAN, device=device())
    kernels.attend(qkv, keys, keys[..., own.rotated :], at, own.spec, scratch, out, *paging)
    wide = torch.empty(*qkv.shape[:-1], own.heads * own.width, device=device())
    plain = heads_of(own.heads, 1, own.width, scale=own.spec.scale, num_kv_projections=1)
    REFERENCE.attend(qkv, keys, keys, at, plain, scratch, wide, *paging)
    want = wide.unflatten(-1, (own.heads, -1))[..., own.rotated :].flatten(-2)
    score = rounding(own.width) * own.width * own.spec.scale
    assert_close(out, want, 8 * (score + rounding(151)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("num_rows", [1, 4])
@pytest.mark.parametrize("own", EACH)
def test_attention_to_latents(kernels, own, num_rows, dtype):
    attended(kernels, own, num_rows, dtype)


def test_the_references_attention_to_latents():
    attended(REFERENCE, WIDE, 4)


@pytest.mark.parametrize("heads", [64, 65, 130])
def test_heads_that_share_keys_in_several_programs(kernels, heads):
    """Heads without latents are divided among programs, too."""
    qkv, cache = vector((heads + 2) * 64), vector(70 * 128, 2).view(70, 2, 1, 64)
    spec, at, found = heads_of(heads, 1, 64), torch.tensor([69], device=device()), []
    for which in (kernels, REFERENCE):
        out = torch.full((heads, 64), NAN, device=device())
        scratch = torch.empty(ranges.attend_scratch(70, heads, 64), device=device())
        which.attend(qkv, cache[:, 0], cache[:, 1], at, spec, scratch, out)
        found.append(out)
    assert_close(*found, 1e-4)


# ---- as PTX --------------------------------------------------------------------------------

AS_PTX = {
    "dot": (ADA, lambda k: product_of_heads(k, "q8_0_planar", 2)),
    "multiply": (ADA, lambda k: products_of_tokens(k, "q8_0_planar", 5, heads=2, own=33)),
    "join": (HOPPER, lambda k: joined(k, ODD, 2)),
    "append": (ADA, lambda k: test_a_key_is_stored_once(k, ODD)),
    "attend": (HOPPER, lambda k: attended(k, Sizes(heads=3), 4)),
    "attend, wide": (
        ADA,
        lambda k: attended(k, Sizes(heads=9, latent=512, rotated=64), 1, context=160),
    ),
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="they run on the device instead")
@pytest.mark.parametrize("name", AS_PTX)
def test_ptx(name):
    arch, test = AS_PTX[name]
    test(PtxKernels(arch).kernels)
