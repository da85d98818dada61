"""The C++ encoder against gguf.quants: every kind, source type and level, both directions."""

import numpy as np
import pytest
import torch
from gguf.quants import quantize

from sparkinfer.convert.encode import LIMITS, encode
from sparkinfer.convert.native import library
from sparkinfer.convert.native.library import KINDS, SOURCE_KINDS, encode_rows, usable_levels
from sparkinfer.errors import SparkinferError
from sparkinfer.gguf_file import type_of

LEVELS = usable_levels()
# Round the edges of a block (32), a turned tile (64) and a chunk of a row (1024).
SHAPES = [(1, 32), (3, 31), (31, 33), (64, 64), (65, 96), (33, 160), (2, 1024), (3, 1056), (1, 1)]


def values_of(shape, dtype, kind, *, seed=0):
    """Normal values, ties of the rounding, zeros of both signs and what is nearly nothing."""
    random = np.random.default_rng(seed)
    normal = random.standard_normal(shape).astype(np.float32)
    ties = random.integers(-20, 20, shape).astype(np.float32) / 8
    tiny = normal * np.float32(1e-38)
    scale = random.choice([1.0, 1e-4, 1e-7, 100.0], (shape[0], 1)).astype(np.float32)
    which = random.integers(0, 4, (shape[0], 1))
    values = np.choose(which, [normal * scale, ties, tiny, ties * -0.0])
    tensor = torch.from_numpy(values.astype(np.float32)).to(dtype)
    assert float(tensor.float().abs().max()) < LIMITS[kind]
    return tensor


def wanted_bytes(tensor, kind):
    values = np.ascontiguousarray(tensor.float().numpy())
    with np.errstate(all="ignore"):  # an inverse scale may be infinite
        return quantize(values, type_of(kind)).tobytes()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", SOURCE_KINDS)
def test_bytes_are_those_of_gguf(level, kind, dtype):
    for seed, (rows, width) in enumerate(SHAPES):
        if kind in ("q8_0", "q4_0") and width % 32:
            continue
        stored = values_of((rows, width), dtype, kind, seed=seed)
        want = wanted_bytes(stored, kind)
        order = np.random.default_rng(seed).permutation(rows)
        turned = stored.T.contiguous().T
        assert (turned.stride(0) == 1) or rows == 1
        for tensor in (stored, turned):
            got, largest = encode_rows(tensor, kind, LIMITS[kind], level=level)
            assert got.tobytes() == want and largest == float(stored.float().abs().max())
            got, _ = encode_rows(tensor, kind, LIMITS[kind], level=level, rows=order)
            assert got.tobytes() == wanted_bytes(stored[torch.from_numpy(order)], kind)


def test_the_comparison_rejects_wrong_bytes():
    tensor = values_of((64, 64), torch.float32, "q8_0")
    for kind in KINDS:
        got, _ = encode_rows(tensor, kind, LIMITS[kind])
        for wrong in (torch.zeros_like(tensor), 0.5 * tensor, tensor.flip(0), tensor.T):
            assert got.tobytes() != wanted_bytes(wrong, kind)


@pytest.mark.parametrize("level", LEVELS)
def test_every_f16_is_read_and_every_tie_rounded(level):
    """All f16 to f32 and back; and the f32 half way between two f16, and beside it."""
    bits = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    finite = np.sort(bits[np.isfinite(bits)])
    tensor = torch.from_numpy(finite.copy()).reshape(1, -1)
    for kind in ("f32", "f16"):
        got, _ = encode_rows(tensor, kind, 1e30, level=level)
        assert got.tobytes() == wanted_bytes(tensor, kind)
    exact = finite.astype(np.float32)
    middle = (exact[1:] + exact[:-1]) / 2
    beside = [np.nextafter(middle, np.float32(end)) for end in (-np.inf, np.inf)]
    ties = torch.from_numpy(np.stack([middle, *beside]))
    got, _ = encode_rows(ties, "f16", LIMITS["f16"], level=level)
    assert got.tobytes() == wanted_bytes(ties, "f16")


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_largest_magnitude_is_found_anywhere(level, kind):
    for row, column, value in [(0, 0, -7.5), (40, 64, 9e9), (40, 95, np.inf), (69, 1, np.nan)]:
        tensor = torch.ones(70, 96)
        tensor[row, column] = value
        for view in (tensor, tensor.T.contiguous().T):
            _, largest = encode_rows(view, kind, LIMITS[kind], level=level)
            assert np.array_equal(largest, np.float32(abs(value)), equal_nan=True)


def test_other_strides_are_copied():
    tensor = values_of((64, 128), torch.float32, "f16")
    every_other = tensor[:, ::2]
    assert encode(every_other, "f16", "x").tobytes() == wanted_bytes(every_other, "f16")
    vector = tensor[:, 5]
    assert encode(vector, "f32", "x").tobytes() == wanted_bytes(vector, "f32")
    assert encode(vector, "f32", "x").shape == (64,)


def test_rows_outside_are_refused():
    with pytest.raises(AssertionError):
        encode_rows(torch.ones(4, 32), "f16", 1e4, rows=np.array([0, 4]))


def test_without_the_library_there_is_one_line(monkeypatch):
    monkeypatch.setattr(library, "find_spec", lambda name: None)
    with pytest.raises(SparkinferError, match="not built; run `make build`"):
        library._load()
