"""The C++ encoder against gguf.quants, and where that cannot pack, against bytes that ggml wrote:
every kind, source type and level, rows that are contiguous and rows that are columns in memory."""

import hashlib
import re
from functools import cache

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize, quantize
from paths import ROOT

from hotsplit.convert.encode import encode
from hotsplit.convert.native.encoder_library import SOURCE_KINDS, encode_rows, usable_levels
from hotsplit.errors import HotsplitError
from hotsplit.files.gguf_file import type_of
from hotsplit.model.weight_types import BY_NAME, ENCODED_NAMES

LEVELS = usable_levels()
HEADER = (ROOT / "convert/native/encode.h").read_text(encoding="utf-8")
NUMBERS = {
    kind.lower(): int(n) for kind, n in re.findall(r"^    KIND_(\w+) = (\d+),", HEADER, re.M)
}
KINDS = tuple(NUMBERS)
BLOCK = {kind: GGML_QUANT_SIZES[type_of(kind)][0] for kind in KINDS}
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
    assert kind not in BY_NAME or float(tensor.float().abs().max()) < BY_NAME[kind].overflows_at
    return tensor


# Those that gguf can pack.
GGUF_KINDS = [kind for kind in KINDS if not kind.endswith("_k") and not kind.startswith("iq")]


def test_numbers_are_ggmls():
    assert {kind: GGMLQuantizationType[kind.upper()] for kind in KINDS} == NUMBERS
    assert {*ENCODED_NAMES} <= {*KINDS}


def wanted_bytes(tensor, kind):
    values = np.ascontiguousarray(tensor.float().numpy())
    with np.errstate(all="ignore"):  # an inverse scale may be infinite
        return quantize(values, type_of(kind)).tobytes()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", GGUF_KINDS)
@pytest.mark.parametrize("dtype", SOURCE_KINDS)
def test_bytes_equal_those_of_gguf(level, kind, dtype):
    for seed, (rows, width) in enumerate(SHAPES):
        if width % BLOCK[kind]:
            continue
        stored = values_of((rows, width), dtype, kind, seed=seed)
        if kind == "mxfp4":  # gguf's exponent wraps around
            stored[stored.float().abs().amax(dim=1) < 2.0**-120] = 0
        if kind in ("q4_1", "q5_1"):  # of zeros of both signs, numpy has another as the least
            stored = stored + 0
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
        tensor = torch.ones(70, 256 if BLOCK[kind] == 256 else 96)
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


# ---- types that gguf cannot pack, and importances: ggml's own bytes are the oracle ---------------


@cache
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
    out.flags.writeable = False
    return out


def k_quant_values() -> np.ndarray:
    """[24, 768]: bell-shaped values of all magnitudes, parts of different magnitudes, one sign
    only, few distinct values, constants."""
    values = numbers(24 * 768).reshape(24, 24, 32).copy()
    values[4:8] *= np.float32(2.0) ** -np.arange(24, dtype=np.float32)[None, :, None]
    values[8], values[9] = abs(values[8]), -abs(values[9])
    values[10] *= numbers(768).reshape(24, 32) > 0.6
    values[11], values[12], values[13], values[14] = 0, 1, -1, -0.0
    values[15] = np.round(8 * values[15]) / 8
    values[16:20] *= (np.float32(2.0) ** np.array([-14, -20, -60, -126], np.float32))[:, None, None]
    values[20:22] *= np.float32(1e5)
    values[22, :, 5] *= 40
    return values.reshape(24, 768)


def importances() -> np.ndarray:
    """[768], of which 40 within a row and the last 256 are zero."""
    values = numbers(768) ** 2
    values[100:140] = values[512:] = 0
    return values


# sha256 of what ggml_quantize_chunk of libggml-base (llama-cpp-python 0.3.36) writes for
# k_quant_values(); tests/llamacpp/test_files.py compares whole files.
GGML_SHA256 = {
    "q2_k": "fe45c757ba717be79ea0ca64a03cfeac70a4d93d77dc50edcbecde9802348165",
    "q3_k": "cd84f2cbc04c88ef7b375ed009fd4a4400b4c350c595900f8bf1068af4749d1e",
    "q4_k": "f93f677997d7169f77d649ca945b6e21baaa34859ecb93d0b29bbffd34a998a1",
    "q5_k": "883835e231d1cff237f99b3190deb82f1fd907c7e71aa376c58616836c0fde55",
    "q6_k": "d20a7bc72b7b4de7429d5e33eae3b2a9e06233c65a20b74d15b25f8764b1fc48",
    "iq4_nl": "239827212c306b1979dc36cc6af88b49da3784555b86108e37f9f82196d29b86",
    "iq4_xs": "2f926a957d366ffc388a981564011d3c25445d0f34de0a6958336b5b4cc6ab89",
}
# The same for the first 20 rows, which fit f16, with importances().
GGML_WEIGHTED_SHA256 = {
    "q4_0": "f25b0c0c0530544478d2980b9f7447591048880b4cf604664394ddd9aad14d63",
    "q4_1": "092c243c0ff6347f1ca229acc76c3a32010ecb14227b6e0f8445490721a2ce16",
    "q5_0": "eca2d925c4fa2e6dfb1b10f26f1fdde55e9da4c12f6356f746b8654473b97fb9",
    "q5_1": "d38afb705b3cdebb4fe266da77e5197135262f0b65a763fe56a2212c61aeb030",
    "q2_k": "8574e528281f4f26eab0aae5438cc34cd957b2be9b294851df15d909b2482130",
    "q3_k": "d4c1aa863d0fe084aaad8411b546973443fe7f26bc166e8885767331bc7b2146",
    "q4_k": "65cb06f616ad00b2a74cb211695c28b4743aecfdc665e9e7c723b5453bf58603",
    "q5_k": "a50f8056a6ab490848159d9f954c3a1aa24d7291143f76f8da73d45481cfa3cc",
    "q6_k": "77bc8635fea123908b3ef589e1fbbd7822dd4b44c63c617a20bfaa2ef6941d75",
    "iq4_nl": "a6b575fa422b9a9c2643bd6639713252a28ba1e9aaf2e2f1361d84d90aa3de5c",
    "iq4_xs": "24e45b748eb69f9a7ce23b6b8b8583ae4a3197600b91d2cffd85ef79bbac637c",
}


def sha256(packed: np.ndarray) -> str:
    return hashlib.sha256(packed.tobytes()).hexdigest()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", GGML_SHA256)
def test_bytes_equal_those_of_ggml(level, kind):
    values = k_quant_values()
    stored = torch.from_numpy(values)
    order = np.random.default_rng(0).permutation(len(values))
    for tensor in (stored, stored.T.contiguous().T):
        got, largest = encode_rows(tensor, kind, level=level)
        assert sha256(got) == GGML_SHA256[kind]
        assert largest == abs(values).max()
        turned, _ = encode_rows(tensor, kind, level=level, rows=order)
        assert np.array_equal(turned, got[order])
    wrong, _ = encode_rows(stored.flip(0), kind, level=level)
    assert sha256(wrong) != GGML_SHA256[kind]
    for dtype in (torch.float16, torch.bfloat16):
        half = stored[:4].to(dtype)
        assert torch.equal(
            torch.from_numpy(encode_rows(half, kind, level=level)[0]),
            torch.from_numpy(encode_rows(half.float(), kind, level=level)[0]),
        )


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", KINDS)
def test_bytes_with_importances_equal_those_of_ggml(level, kind):
    """Kinds without a search have the same bytes with and without. Rows may be of a quarter of a
    chunk of eight blocks, and are encoded alike in any order and from columns in memory."""
    stored, importance_M = torch.from_numpy(k_quant_values()[:20]), importances()
    got, _ = encode_rows(stored, kind, importance_M=importance_M, level=level)
    plain, _ = encode_rows(stored, kind, level=level)
    if kind not in GGML_WEIGHTED_SHA256:
        assert np.array_equal(got, plain)
        return
    assert sha256(got) == GGML_WEIGHTED_SHA256[kind] and not np.array_equal(got, plain)
    turned = stored.T.contiguous().T
    order = np.random.default_rng(0).permutation(len(stored))
    again, _ = encode_rows(turned, kind, importance_M=importance_M, rows=order, level=level)
    assert np.array_equal(again, got[order])
    if BLOCK[kind] == 32 and kind.startswith("iq"):  # its weights do not depend on the whole row
        part, _ = encode_rows(stored[:, :96], kind, importance_M=importance_M[:96], level=level)
        assert np.array_equal(part, got[:, : part.shape[1]])


@pytest.mark.parametrize("kind", GGML_WEIGHTED_SHA256)
def test_importances_lessen_the_error_that_they_weigh(kind):
    random = np.random.default_rng(0)
    values = random.standard_normal((64, 512)).astype(np.float32)
    importance_M = np.exp(2 * random.standard_normal(512)).astype(np.float32)
    errors = []
    for weights in (importance_M, None, importance_M[::-1]):
        packed, _ = encode_rows(torch.from_numpy(values), kind, importance_M=weights)
        off = dequantize(packed, type_of(kind)).astype(np.float64) - values
        errors.append(float((off**2 * importance_M).sum()))
    assert errors[0] < 0.97 * min(errors[1:]), errors


@pytest.mark.parametrize("level", LEVELS)
def test_an_exponent_below_those_of_mxfp4_stays_zero(level):
    tiny = torch.full((1, 32), 2.0**-130)
    packed, _ = encode_rows(tiny, "mxfp4", level=level)
    assert packed[0, 0] == 0 and (abs(dequantize(packed, type_of("mxfp4"))) <= 2.0**-125).all()


@pytest.mark.parametrize("kind", [k for k in GGML_WEIGHTED_SHA256 if k in BY_NAME])
def test_blocks_are_finite_below_their_limit_and_refused_above(kind):
    """Just below the limit every f16 scale is finite, whatever else the block holds."""
    ones, bell = np.ones(256), numbers(256)
    for importance, share in ((None, 1), (importances()[:256], 2)):
        limit = np.float32(BY_NAME[kind].overflows_at / share)
        values = np.stack([-ones, ones, bell, np.sign(bell)]).astype(np.float32) * limit
        packed = encode(values * np.float32(0.999), kind, "x", importance=importance)
        assert np.isfinite(dequantize(packed, type_of(kind))).all()
        with pytest.raises(HotsplitError, match=f"overflows {kind}; use outtype bf16"):
            encode(values[:1], kind, "x", importance=importance)
