"""The C++ encoder against gguf.quants, and for K-quants against bytes that ggml wrote: every kind,
source type and level, rows that are contiguous and rows that are columns in memory."""

import hashlib

import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize

from hotsplit.convert.encode import encode
from hotsplit.convert.native import library
from hotsplit.convert.native.library import KINDS, SOURCE_KINDS, encode_rows, usable_levels
from hotsplit.errors import HotsplitError
from hotsplit.files.gguf_file import type_of
from hotsplit.model.weight_types import BY_NAME

LEVELS = usable_levels()
# Around the edges of a block (32), a transposed tile (64) and a chunk of a row (1024).
SHAPES = [(1, 32), (3, 31), (31, 33), (64, 64), (65, 96), (33, 160), (2, 1024), (3, 1056), (1, 1)]


def values_of(shape, dtype, kind, *, seed=0):
    """Normally distributed values, rounding ties, zeros of both signs and values near zero."""
    random = np.random.default_rng(seed)
    normal = random.standard_normal(shape).astype(np.float32)
    ties = random.integers(-20, 20, shape).astype(np.float32) / 8
    tiny = normal * np.float32(1e-38)
    scale = random.choice([1.0, 1e-4, 1e-7, 100.0], (shape[0], 1)).astype(np.float32)
    which = random.integers(0, 4, (shape[0], 1))
    values = np.choose(which, [normal * scale, ties, tiny, ties * -0.0])
    tensor = torch.from_numpy(values.astype(np.float32)).to(dtype)
    assert float(tensor.float().abs().max()) < BY_NAME[kind].overflows_at
    return tensor


GGUF_KINDS = [kind for kind in KINDS if not kind.endswith("_k")]  # those that gguf can pack


def wanted_bytes(tensor, kind):
    values = np.ascontiguousarray(tensor.float().numpy())
    with np.errstate(all="ignore"):  # an inverse scale may be infinite
        return quantize(values, type_of(kind)).tobytes()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", GGUF_KINDS)
@pytest.mark.parametrize("dtype", SOURCE_KINDS)
def test_bytes_equal_those_of_gguf(level, kind, dtype):
    for seed, (rows, width) in enumerate(SHAPES):
        if kind in ("q8_0", "q4_0") and width % 32:
            continue
        stored = values_of((rows, width), dtype, kind, seed=seed)
        want = wanted_bytes(stored, kind)
        order = np.random.default_rng(seed).permutation(rows)
        turned = stored.T.contiguous().T
        assert (turned.stride(0) == 1) or rows == 1
        for tensor in (stored, turned):
            got, largest = encode_rows(tensor, kind, level=level)
            assert got.tobytes() == want and largest == float(stored.float().abs().max())
            got, _ = encode_rows(tensor, kind, level=level, rows=order)
            assert got.tobytes() == wanted_bytes(stored[torch.from_numpy(order)], kind)


def test_the_comparison_rejects_wrong_bytes():
    tensor = values_of((64, 64), torch.float32, "q8_0")
    for kind in GGUF_KINDS:
        got, _ = encode_rows(tensor, kind)
        for wrong in (torch.zeros_like(tensor), 0.5 * tensor, tensor.flip(0), tensor.T):
            assert got.tobytes() != wanted_bytes(wrong, kind)


@pytest.mark.parametrize("level", LEVELS)
def test_every_f16_is_read_and_every_tie_rounded(level):
    """Converts all finite f16 to f32 and f16, and to f16 also each f32 halfway between two adjacent
    f16 with its two neighbours."""
    bits = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    finite = np.sort(bits[np.isfinite(bits)])
    tensor = torch.from_numpy(finite.copy()).reshape(1, -1)
    for kind in ("f32", "f16"):
        got, _ = encode_rows(tensor, kind, level=level)
        assert got.tobytes() == wanted_bytes(tensor, kind)
    exact = finite.astype(np.float32)
    middle = (exact[1:] + exact[:-1]) / 2
    beside = [np.nextafter(middle, np.float32(end)) for end in (-np.inf, np.inf)]
    ties = torch.from_numpy(np.stack([middle, *beside]))
    got, _ = encode_rows(ties, "f16", level=level)
    assert got.tobytes() == wanted_bytes(ties, "f16")


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_largest_magnitude_is_found_anywhere(level, kind):
    for row, column, value in [(0, 0, -7.5), (40, 64, 9e9), (40, 95, np.inf), (69, 1, np.nan)]:
        tensor = torch.ones(70, 256 if kind.endswith("_k") else 96)
        tensor[row, column] = value
        for view in (tensor, tensor.T.contiguous().T):
            _, largest = encode_rows(view, kind, level=level)
            assert np.array_equal(largest, np.float32(abs(value)), equal_nan=True)


def test_other_strides_are_copied():
    tensor = values_of((64, 128), torch.float32, "f16")
    every_other = tensor[:, ::2]
    assert encode(every_other, "f16", "x").tobytes() == wanted_bytes(every_other, "f16")
    vector = tensor[:, 5]
    assert encode(vector, "f32", "x").tobytes() == wanted_bytes(vector, "f32")
    assert encode(vector, "f32", "x").shape == (64,)


def test_rows_out_of_range_are_refused():
    with pytest.raises(AssertionError):
        encode_rows(torch.ones(4, 32), "f16", rows=np.array([0, 4]))


def test_without_the_library_there_is_one_line(monkeypatch):
    monkeypatch.setattr(library, "find_spec", lambda name: None)
    with pytest.raises(HotsplitError, match="not built; run `make build`"):
        library._load()


# ---- K-quants: gguf packs none, so ggml's own bytes are the oracle -------------------------------

K_BLOCK_BYTES = {"q4_k": 144, "q5_k": 176, "q6_k": 210}


def numbers(count: int) -> np.ndarray:
    """f32 values from -1 to 1, bell-shaped, from a linear congruential generator: the same on every
    machine."""
    state = np.uint32(1)
    out = np.empty(count, np.float32)
    with np.errstate(over="ignore"):
        for i in range(count):
            total = np.float32(0)
            for _ in range(3):
                state = state * np.uint32(1664525) + np.uint32(1013904223)
                total += np.float32(state >> np.uint32(8)) / np.float32(1 << 24)
            out[i] = total / np.float32(1.5) - 1
    return out


def k_quant_values() -> np.ndarray:
    """[24, 768]: bell-shaped values of all magnitudes, parts of different magnitudes, one sign
    only, few distinct values, constants."""
    values = numbers(24 * 768).reshape(24, 24, 32)
    values[4:8] *= np.float32(2.0) ** -np.arange(24, dtype=np.float32)[None, :, None]
    values[8], values[9] = abs(values[8]), -abs(values[9])
    values[10] *= numbers(768).reshape(24, 32) > 0.6
    values[11], values[12], values[13], values[14] = 0, 1, -1, -0.0
    values[15] = np.round(8 * values[15]) / 8
    values[16:20] *= (np.float32(2.0) ** np.array([-14, -20, -60, -126], np.float32))[:, None, None]
    values[20:22] *= np.float32(1e5)
    values[22, :, 5] *= 40
    return values.reshape(24, 768)


# sha256 of what quantize_q4_K, _q5_K and _q6_K of libggml-base (llama-cpp-python 0.3.36) write for
# k_quant_values(); tests/llamacpp/test_files.py compares whole files.
GGML_SHA256 = {
    "q4_k": "f93f677997d7169f77d649ca945b6e21baaa34859ecb93d0b29bbffd34a998a1",
    "q5_k": "883835e231d1cff237f99b3190deb82f1fd907c7e71aa376c58616836c0fde55",
    "q6_k": "d20a7bc72b7b4de7429d5e33eae3b2a9e06233c65a20b74d15b25f8764b1fc48",
}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", GGML_SHA256)
def test_bytes_of_k_quants_equal_those_of_ggml(level, kind):
    values = k_quant_values()
    stored = torch.from_numpy(values)
    order = np.random.default_rng(0).permutation(len(values))
    for tensor in (stored, stored.T.contiguous().T):
        got, largest = encode_rows(tensor, kind, level=level)
        assert hashlib.sha256(got.tobytes()).hexdigest() == GGML_SHA256[kind]
        assert largest == abs(values).max()
        turned, _ = encode_rows(tensor, kind, level=level, rows=order)
        assert np.array_equal(turned, got[order])
    wrong, _ = encode_rows(stored.flip(0), kind, level=level)
    assert hashlib.sha256(wrong.tobytes()).hexdigest() != GGML_SHA256[kind]
    for dtype in (torch.float16, torch.bfloat16):
        half = stored[:4].to(dtype)
        assert torch.equal(
            torch.from_numpy(encode_rows(half, kind, level=level)[0]),
            torch.from_numpy(encode_rows(half.float(), kind, level=level)[0]),
        )


@pytest.mark.parametrize("kind", GGML_SHA256)
def test_k_quants_are_finite_below_their_limit_and_refused_above(kind):
    """Just below the limit every f16 scale is finite, whatever else the block holds."""
    limit = np.float32(BY_NAME[kind].overflows_at)
    values = np.stack([np.full(256, -limit), np.full(256, limit), limit * numbers(256)])
    values = np.concatenate([values, np.sign(numbers(256))[None] * limit]) * np.float32(0.999)
    packed = encode(values.astype(np.float32), kind, "x")
    assert np.isfinite(dequantize(packed, type_of(kind))).all()
    with pytest.raises(HotsplitError, match=f"overflows {kind}; use outtype bf16"):
        encode(np.full((1, 256), limit, np.float32), kind, "x")
