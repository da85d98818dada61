"""The GPU kernels for norms and attention, compared with a float64 reference on a CUDA device, or
in Triton's interpreter if there is none."""

import math
from dataclasses import replace

import pytest
import torch
from gpu_matrices import EPS, NAN, REFERENCE, assert_close, device, heads_of, rounding, vector

from hotsplit.model.attention import HeadVector
from hotsplit.model.blocks import PLAIN_SUM, SumFactors
from hotsplit.runtime.kernels.gpu import ranges

# ---- sums and norms ------------------------------------------------------------------------


def norm_bound(want_D, total_D, bias_D):
    """The bound on each output's error. The mean of n squares is rounded; so, in a layer norm (one
    with a bias), are the values less their mean, whose error grows with the largest value."""
    size = want_D.double().abs() + want_D.double().std(correction=0) + 1
    size = size if bias_D is None else size + bias_D.double().abs() + total_D.double().abs().max()
    return 4 * rounding(len(want_D)) * size


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("width", [32, 96, 2304])
def test_add_norm(kernels, width, has_bias):
    x, parts, weight = vector(width), vector(3 * width, 2).view(3, -1), vector(width, 3)
    bias = vector(width, 4) if has_bias else None
    factors = SumFactors(factor=0.5, times=0.75) if has_bias else PLAIN_SUM
    found = []
    for which in (kernels, REFERENCE):
        out, x_out = torch.empty_like(x), torch.empty_like(x)
        which.add_norm(x, parts, weight, bias, 1e-5, out, x_out, factors=factors)
        found.append((out, x_out))
    (got, got_x), (want, want_x) = found
    assert_close(got_x, want_x, 4 * EPS * (x.abs() + parts.abs().sum(dim=0)))
    assert_close(got, want, norm_bound(want, want_x, bias))


@pytest.mark.parametrize("has_parts", [False, True])
@pytest.mark.parametrize("shape", [(96,), (2, 96)])
def test_add_norm_with_a_term_and_a_copy_of_the_result(kernels, shape, has_parts):
    """Both are in main memory when the CPU has a part of the layer."""
    size = math.prod(shape)
    x, term, weight = (vector(size, seed).view(shape) for seed in (1, 2, 4))
    weight = weight.flatten()[:96].contiguous()
    parts = vector(3 * size, 3).view(3, *shape) if has_parts else None
    out, x_out, copy = (torch.empty_like(x) for _ in range(3))
    kernels.add_norm(x, parts, weight, None, 1e-5, out, x_out, term, copy)
    want, want_x = torch.empty_like(x), torch.empty_like(x)
    REFERENCE.add_norm(x + term, parts, weight, None, 1e-5, want, want_x)
    sizes = x.abs() + term.abs() + (parts.abs().sum(dim=0) if has_parts else 0)
    assert_close(x_out, want_x, 5 * EPS * sizes)
    assert_close(out, want, norm_bound(want, want_x, None))
    assert torch.equal(copy, out)


@pytest.mark.parametrize("name", ["add_norm", "round_tokens"])
def test_a_norm_in_place_of_rows_that_other_values_lie_between(kernels, name):
    """Such as all queries, or all keys, in the input projections of several rows."""
    before, weight = vector(2 * 100).view(2, 100), vector(40, 2)
    found = []
    for which in (kernels, REFERENCE):
        qkv = before.clone()
        own = qkv[:, 30:70]
        rest = (None,) if name == "add_norm" else (None, None)
        getattr(which, name)(own, None, weight, None, 1e-3, own, *rest)
        found.append(own.clone())
        own.copy_(before[:, 30:70])
        assert torch.equal(qkv, before)
    got, want = found
    assert_close(got, want, 4 * rounding(40) * (want.abs() + weight.abs()))
    assert (want - before[:, 30:70]).abs().max() > 0.1


@pytest.mark.parametrize("num_parts", [1, 2, 15, 16, 17, 33])
def test_add_of_any_number_of_parts_in_place(kernels, num_parts):
    x, parts = vector(40), vector(64 * num_parts, 2).view(num_parts, -1)[:, :40]  # with gaps
    want = x.double() + parts.double().sum(dim=0)
    bound = rounding(num_parts) * (x.abs() + parts.abs().sum(dim=0))
    kernels.add_norm(x, parts, None, None, 0.0, None, x)
    assert_close(x, want, bound)


def test_norm_alone(kernels):
    x, weight = vector(96), vector(96, 3)
    got, want, before = torch.empty_like(x), torch.empty_like(x), x.clone()
    for which, out in ((kernels, got), (REFERENCE, want)):
        which.add_norm(x, None, weight, None, 0.5, out, None)
    assert_close(got, want, norm_bound(want, x, None))
    assert torch.equal(x, before)


# ---- rotation and cache --------------------------------------------------------------------


def frequencies(width):
    return (10000.0 ** -(torch.arange(0, width, 2, dtype=torch.float64) / width)).to(device())


def rotated(kernels, qkv, cache, at, spec, *, norms=(None, None), width=None):
    """[(queries, keys and values; cache)] of the kernel and of the reference, on copies; the first
    `width` values of each head rotate."""
    found, position = [], torch.tensor(at, device=device())
    for which in (kernels, REFERENCE):
        own, caches = qkv.clone(), cache.clone()
        frequency = frequencies(width or spec.head_dim)
        which.rotate_append(own, frequency, *norms, position, caches[0], caches[1], spec)
        found.append((own, caches))
    return found


@pytest.mark.parametrize("is_adjacent", [False, True])
@pytest.mark.parametrize("norms", ["none", "both", "key"])
@pytest.mark.parametrize(
    ("dtype", "width", "position"),
    [(torch.float16, 32, 0), (torch.float32, 80, 1), (torch.float16, 128, 99)],
)
def test_rotate_append(kernels, dtype, is_adjacent, norms, width, position):
    qkv = vector(8 * width)  # 4 queries, 2 keys, 2 values
    cache = torch.full((2, 100, 2, width), 7.0, dtype=dtype, device=device())
    if width == 32:  # head-major in memory, as in the runtime
        cache = cache.transpose(1, 2).contiguous().transpose(1, 2)
    weights = (
        vector(width, 2) if norms == "both" else None,
        vector(width, 3) if norms != "none" else None,
    )
    spec = heads_of(width=width, is_adjacent=is_adjacent)
    found = rotated(kernels, qkv, cache, [position], spec, norms=weights)
    (got, got_cache), (want, want_cache) = found
    size = (want.abs().max() + want_cache.abs().max()).double()
    assert_close(got, want, (16 * EPS + 4 * rounding(width)) * size)
    eps = torch.finfo(dtype).eps + 16 * EPS + 4 * rounding(width)
    assert_close(got_cache, want_cache, eps * size)
    others = torch.arange(100) != position
    assert (got_cache[:, others] == 7).all() and not (got_cache[:, position] == 7).any()
    assert torch.equal(got[4 * width :], qkv[4 * width :])
    assert torch.equal(got_cache[1, position].flatten(), got[6 * width :].to(dtype))


@pytest.mark.parametrize(
    ("norm", "growth"),
    [("layer_without_bias", None), ("rms", (0.4, 3)), ("layer_without_bias", (0.3, 2))],
)
def test_heads_with_norms_of_their_own_and_growing_queries(kernels, norm, growth, width=40):
    """Command R+'s layer norms with weights for each head, and Ministral 3's queries, which grow
    with the position."""
    steady = heads_of(width=width, is_adjacent=True, norm=norm, norms_by_head=True)
    factor, length = growth or (None, None)
    spec = replace(steady, growth=factor, growth_length=length)
    qkv = vector(3 * 8 * width).view(3, -1) + 0.5  # not of mean 0
    cache, at = torch.zeros(2, 9, 2, width, device=device()), [4, 5, 6]
    norms = vector(4 * width, 2).view(4, width), vector(2 * width, 3).view(2, width)
    (got, got_cache), (want, want_cache) = rotated(kernels, qkv, cache, at, spec, norms=norms)
    assert_close(got, want, (32 * EPS + 4 * rounding(width)) * want.abs().max())
    assert_close(got_cache, want_cache, (32 * EPS + 4 * rounding(width)) * want_cache.abs().max())
    if growth:
        _, (plain, _) = rotated(kernels, qkv, cache, at, steady, norms=norms)
        factor_T = 1 + factor * torch.log(1 + torch.tensor(at, device=device()) // length)
        plain[:, : 4 * width] *= factor_T[:, None]
        assert_close(want, plain, 8 * EPS * want.abs().max())


@pytest.mark.parametrize("num_kv_projections", [2, 1, 0])
@pytest.mark.parametrize("num_rows", [1, 2])
def test_values_with_a_norm(kernels, num_rows, num_kv_projections, width=40):
    """Gemma 4's: the norm of values has no weights, and values may be keys before their norm. A
    layer that reads those of another appends nothing."""
    size = (2 + 2 * num_kv_projections) * width  # 2 queries, 2 keys, 2 values
    sharing = {"num_kv_projections": num_kv_projections}
    sharing |= {} if num_kv_projections else {"source": 0}
    spec = heads_of(2, 2, width, norms_values=True, **sharing)
    qkv, cache = vector(num_rows * size), torch.zeros(2, 9, 2, width, device=device())
    qkv = qkv if num_rows == 1 else qkv.view(num_rows, -1)
    norms, at = (vector(width, 2), vector(width, 3)), [5, 6][:num_rows]
    (got, got_cache), (want, want_cache) = rotated(kernels, qkv, cache, at, spec, norms=norms)
    assert_close(got, want, 64 * EPS)
    if not num_kv_projections:
        assert not got_cache.any() and not want_cache.any()
        return
    assert_close(got_cache, want_cache, 64 * EPS)
    raw = qkv.view(num_rows, -1, width)[:, -2:].double()
    scale = (raw.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    assert_close(got_cache[1, at], raw * scale, 64 * EPS)


@pytest.mark.parametrize("is_adjacent", [False, True])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_norms_after_the_rotation(kernels, num_rows, is_adjacent, width=40):
    """Hunyuan's. A rotation keeps the length of a head, so that its weights alone see the order."""
    qkv, cache = vector(num_rows * 4 * width), torch.zeros(2, 9, 1, width, device=device())
    qkv = qkv if num_rows == 1 else qkv.view(num_rows, -1)
    spec, at = heads_of(2, 1, width, is_adjacent=is_adjacent), [5, 6, 7][:num_rows]
    after = replace(spec, norms_rotated=True)
    for norms, is_same in (
        ((vector(width, 2), vector(width, 3)), False),
        (2 * (torch.ones(width, device=device()),), True),
    ):
        (got, got_cache), (want, want_cache) = rotated(kernels, qkv, cache, at, after, norms=norms)
        assert_close(got, want, 64 * EPS)
        assert_close(got_cache, want_cache, 64 * EPS)
        _, (before, _) = rotated(kernels, qkv, cache, at, spec, norms=norms)
        assert ((before - want).abs().max() < 64 * EPS) == is_same


@pytest.mark.parametrize("is_adjacent", [False, True])
def test_heads_that_rotate_in_part_before_gates(kernels, is_adjacent, width=40, part=12):
    """Qwen3-Next's: a quarter of each head rotates, and behind each query is the gate of its head,
    which stays as it is. The part by itself is a rotation of narrower heads."""
    turn = {"is_adjacent": is_adjacent, "magnitude": 1.25}
    qkv, cache = vector(6 * width), torch.zeros(2, 9, 1, width, device=device())
    spec, norms = heads_of(2, 1, width, is_gated=True, **turn), (vector(width, 2), vector(width, 3))
    found = rotated(kernels, qkv, cache, [7], spec, norms=norms, width=part)
    (got, got_cache), (want, want_cache) = found
    assert_close(got, want, 64 * EPS)
    assert_close(got_cache, want_cache, 64 * EPS)
    got, before = got.view(6, width), qkv.view(6, width)
    assert torch.equal(got[1::2][:2], before[1::2][:2]) and torch.equal(got[4:], before[4:])
    query = before[0] * (before[0].square().mean() + 1e-5).rsqrt() * norms[0]
    narrow = torch.cat([query[:part], torch.zeros(2 * part, device=device())])
    none = torch.zeros(2, 9, 1, part, device=device())
    (narrow, _), _ = rotated(kernels, narrow, none, [7], heads_of(1, 1, part, **turn))
    assert_close(got[0, :part], narrow[:part], 8 * EPS)
    assert_close(got[0, part:], query[part:], 8 * EPS)


@pytest.mark.parametrize("position", [1, 1000, 131071])
def test_angles_of_late_positions(kernels, position):
    """Only the fraction of a turn matters in angles of up to 20,861 turns; the rotated values are
    within 6e-7 of cosine and sine in float64."""
    width = 64
    rows = torch.zeros(2, 1, 1, width, device=device())
    caches = rows.expand(2, position + 1, 1, width)  # the same row at all positions
    found = []
    for turn in ("kernel", "definition"):
        qkv = torch.zeros(3 * width, device=device())
        qkv[: width // 2] = 1
        if turn == "kernel":
            arguments = (None, None, torch.tensor([position], device=device()), *caches)
            kernels.rotate_append(qkv, frequencies(width), *arguments, heads_of(1, 1, width))
            found.append(qkv[:width])
        else:
            angle = position * frequencies(width)
            found.append(torch.cat([angle.cos(), angle.sin()]))
    assert_close(*found, 6e-7)


def test_no_rotation(kernels):
    qkv, cache = vector(3 * 32), torch.zeros(5, 2, 1, 32, device=device())
    before = qkv.clone()
    position = torch.tensor([4], device=device())
    kernels.rotate_append(qkv, None, None, None, position, *cache.unbind(1), heads_of(1, 1))
    assert torch.equal(qkv, before) and torch.equal(cache[4].flatten(), before[32:])
    assert (cache[:4] == 0).all()


# ---- attention -----------------------------------------------------------------------------


def attention(
    which,
    position,
    *,
    context=200,
    heads=(4, 2),
    width=32,
    dtype=torch.float16,
    by=1.0,
    window=None,
    scale=None,
    sink=None,
    cap=None,
):
    """The output of `attend`, f32 [H, W]. Scratch, the cache after `position` and tiles wholly
    before the window hold NaN."""
    num_heads, num_kv = heads
    qkv = by * vector((num_heads + 2 * num_kv) * width)
    cache = vector(context * 2 * num_kv * width, 2).view(context, 2, num_kv, width).to(dtype)
    cache[position + 1 :] = NAN
    if window is not None and position >= window:
        cache[: (position + 1 - window) // 64 * 64] = NAN
    if width == 32:  # head-major in memory, as in the runtime
        cache = cache.transpose(0, 2).contiguous().transpose(0, 2)
    size = ranges.attend_scratch(context, num_heads, width)
    scratch = torch.full((size,), NAN, device=device())
    out = torch.full((num_heads, width), NAN, device=device())
    at = torch.tensor([position], device=device())
    which.attend(
        qkv,
        cache[:, 0],
        cache[:, 1],
        at,
        heads_of(
            *heads,
            width,
            scale=scale,
            window=window,
            score_cap=cap,
            head_sinks=None if sink is None else HeadVector("sinks"),
        ),
        scratch,
        out,
        vectors={} if sink is None else {"head_sinks": sink + vector(num_heads, 5)},
    )
    return out


def assert_attention(kernels, position, **options):
    """Compares with the reference. A score is a sum of `width` terms of size `by`, divided by the
    root of `width`; its absolute error is the relative error of its weight. A weighted mean of
    values up to 4 is off by at most 4 times twice that, and by the rounding of sums over
    positions."""
    width, by = options.get("width", 32), options.get("by", 1.0)
    bound = 4 * 2 * (rounding(width) * by * width**0.5 + rounding(position + 1))
    got, want = attention(kernels, position, **options), attention(REFERENCE, position, **options)
    assert_close(got, want, bound)
    assert bound < 1e-3  # which the tests of wrong results use


@pytest.mark.parametrize(
    ("position", "options"),
    [
        *((position, {}) for position in (0, 1, 62, 63, 64, 65, 127, 128, 199)),
        *((150, {"heads": heads, "window": 70}) for heads in ((4, 1), (6, 2))),
        *(
            (70, {"heads": heads, "width": width})
            for heads in ((2, 2), (4, 1), (8, 1))
            for width in (32, 64, 80, 128)
        ),
        *((5, {"heads": heads}) for heads in ((1, 1), (6, 2))),  # one head, groups of three
        # Scores are from -56 to 47: one position has 0.67 to 0.9999 of a head's weight, and nearly
        # all other weights are below 1e-7.
        *((130, {"dtype": dtype, "by": 16.0}) for dtype in (torch.float16, torch.float32)),
    ],
)
def test_attend(kernels, position, options):
    """At every edge, with grouped heads, in a window, and with one dominant position."""
    assert_attention(kernels, position, **options)


@pytest.mark.parametrize(
    ("position", "window"),
    [
        *((0, window) for window in (1, 65)),
        *((64, window) for window in (1, 64, 65)),
        *((128, window) for window in (65, 129)),
        *((199, window) for window in (1, 63, 64, 65, 129, 199, 1000)),
    ],
)
def test_attend_within_a_window(kernels, position, window):
    assert_attention(kernels, position, window=window)


def test_parts_of_long_contexts_have_several_tiles(kernels, monkeypatch):
    monkeypatch.setattr(ranges, "_LEAST_SPLIT", 256)
    assert ranges.attend_split(600) == 256
    for position in (64, 255, 256, 400):
        for window in (None, 64, 145):
            assert_attention(kernels, position, context=600, window=window)


@pytest.mark.parametrize(
    ("position", "sink", "options"),
    [
        (0, 0.0, {}),
        (63, 2.0, {"heads": (6, 2)}),
        (130, 100.0, {}),  # nearly all of the weight, above every score by more than e^88
        (130, -100.0, {}),
        (199, 3.0, {"window": 65, "heads": (4, 1)}),
    ],
)
def test_a_sink_takes_a_share_of_no_value(kernels, position, sink, options):
    assert_attention(kernels, position, sink=sink, **options)
    plain = attention(REFERENCE, position, **options)
    with_sink = attention(REFERENCE, position, sink=sink, **options)
    assert torch.equal(plain, with_sink) == (sink < -99)


@pytest.mark.parametrize("gate_width", [1, 32])
@pytest.mark.parametrize("shape", [(), (2,)])
def test_gates_of_a_matrix_of_their_own(kernels, shape, gate_width, heads=4, num_kv=2, context=70):
    """Behind queries, keys and values: a gate for each value of a head's output, or for all. What
    comes before attention leaves them as they are."""
    rows, width = shape[0] if shape else 1, 32
    qkv = vector(rows * (8 * width + heads * gate_width)).view(*shape, -1)
    keys, values = vector(context * 128, 2).view(2, context, num_kv, width)
    at = torch.tensor([69, 40][:rows], device=device())
    found = []
    for which, own, more in (
        (kernels, qkv, {"gate_width": gate_width}),
        (REFERENCE, qkv[..., : 8 * width].contiguous(), {}),
    ):
        spec = heads_of(heads, num_kv, width, scale=0.3, **more)
        scratch = torch.full((rows * ranges.attend_scratch(context, heads, width),), NAN)
        out = torch.full((*shape, heads, width), NAN, device=device())
        which.attend(own, keys, values, at, spec, scratch.to(device()), out)
        found.append(out.view(rows, heads, width))
    gate = qkv[..., 8 * width :].double().reshape(rows, heads, gate_width).sigmoid()
    assert_close(found[0], found[1].double() * gate, 1e-5)
    cache = torch.zeros(2, context, num_kv, width, device=device())
    spec, plain = heads_of(heads, num_kv, width, gate_width=gate_width), heads_of(heads, num_kv)
    before = qkv.view(rows, -1)[0]
    (got, got_cache), (want, want_cache) = rotated(kernels, before, cache, [7], spec)
    assert_close(got, want, 64 * EPS)
    _, (same, same_cache) = rotated(kernels, before[: 8 * width], cache, [7], plain)
    assert torch.equal(want[: 8 * width], same) and torch.equal(want_cache, same_cache)
    assert_close(got_cache, want_cache, 64 * EPS)
    assert torch.equal(got[8 * width :], before[8 * width :])


@pytest.mark.parametrize("shape", [(), (2,)])
def test_gates_of_the_heads_output(kernels, shape, heads=4, num_kv=2, width=32, context=70):
    """The outputs of attention to the queries alone, times the sigmoid of what is behind each."""
    rows = shape[0] if shape else 1
    of_head, cache = vector(rows * 12 * width).view(rows, 12, width), vector(context * 128, 2)
    keys, values = cache.view(2, context, num_kv, width)
    at = torch.tensor([69, 40][:rows], device=device())
    found = []
    for which, is_gated in ((kernels, True), (REFERENCE, False)):
        own = of_head if is_gated else torch.cat([of_head[:, :8:2], of_head[:, 8:]], dim=1)
        scratch = torch.full((rows * ranges.attend_scratch(context, heads, width),), NAN)
        out = torch.full((*shape, heads, width), NAN, device=device())
        qkv = own.flatten(1).view(*shape, -1).contiguous()
        which.attend(
            qkv,
            keys,
            values,
            at,
            heads_of(heads, num_kv, scale=0.3, is_gated=is_gated),
            scratch.to(device()),
            out,
        )
        found.append(out.view(rows, heads, width))
    assert_close(found[0], found[1].double() * of_head[:, 1:8:2].double().sigmoid(), 1e-5)


@pytest.mark.parametrize("wrong", [-1, 1])
@pytest.mark.parametrize("window", [2, 65, 128])
def test_the_bound_rejects_another_window(window, wrong):
    want = attention(REFERENCE, 199, window=window)
    with pytest.raises(AssertionError):
        assert_close(attention(REFERENCE, 199, window=window + wrong), want, 1e-3)


def test_scores_are_scaled(kernels):
    assert_attention(kernels, 70, scale=0.5, cap=1.5)
    with pytest.raises(AssertionError):
        assert_close(attention(REFERENCE, 70, scale=0.5), attention(REFERENCE, 70), 1e-3)
    with pytest.raises(AssertionError):
        assert_close(attention(REFERENCE, 70, cap=1.5), attention(REFERENCE, 70, cap=1.6), 1e-3)


@pytest.mark.parametrize("context", [1, 63, 64, 65, 4096, 4097, 131072])
def test_parts_cover_the_context(context):
    split, parts = ranges.attend_split(context), ranges.attend_parts(context)
    assert split & (split - 1) == 0 and split % 64 == 0 and parts <= 64
    assert (parts - 1) * split < context <= parts * split


@pytest.mark.parametrize("wrong", [torch.zeros_like, lambda t: 0.5 * t, lambda t: t.flip(0)])
def test_the_bounds_reject_wrong_results(wrong):
    want = attention(REFERENCE, 70)
    with pytest.raises(AssertionError):
        assert_close(wrong(want), want, 1e-3)
    x, weight, want = vector(96), vector(96, 3), vector(96)
    REFERENCE.add_norm(x, None, weight, None, 0.5, want, None)
    with pytest.raises(AssertionError):
        assert_close(wrong(want), want, norm_bound(want, x, None))


def test_the_bound_rejects_one_position_too_few():
    want = attention(REFERENCE, 199)
    with pytest.raises(AssertionError):
        assert_close(attention(REFERENCE, 198), want, 1e-3)
