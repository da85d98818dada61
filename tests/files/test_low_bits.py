"""Types of one, two and four bits as files have them: their groups and scales, and their values."""

import struct
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from small_blocks import edge_rows, exact_values, random_rows

from hotsplit.errors import HotsplitError
from hotsplit.files.gguf_file import (
    TensorEntry,
    array_entry,
    in_memory,
    open_gguf,
    row_bytes,
    unpacked,
    values_of,
    write_gguf,
)
from hotsplit.files.gguf_types import KINDS, block_sizes

EDGES = np.array([0.0, -0.0, 2.0**-24, -(2.0**-15), 1e-3, -1.0, 65504.0], np.float16)


def entry_of(kind: str, rows: np.ndarray, **more: object) -> TensorEntry:
    block, size = block_sizes(kind)
    shape = (*rows.shape[:-1], rows.shape[-1] // size * block)
    return TensorEntry(shape=shape, kind=kind, read_rows=lambda a, b: rows[a:b], **more)


def random_blocks(kind: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """uint8 [*shape, block_bytes]: every bit random, f16 scales of EDGES."""
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 256, (*shape, block_sizes(kind)[1]), np.uint8)
    if kind != "nvfp4":
        scales = random.choice(EDGES, (*shape, 1)).view(np.uint8)
        at = slice(-2, None) if kind.startswith("tq") else slice(0, 2)
        blocks[..., at] = scales
    return blocks


def bits_of(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values, np.float32).view(np.uint32)


@pytest.mark.parametrize("kind", ["q1_0", "q2_0"])
def test_values_are_those_of_the_description(kind):
    rows = np.vstack([random_rows(kind, 5, 640, 1.0).reshape(-1, block_sizes(kind)[1])])
    for blocks in (rows, edge_rows(kind)):
        want = exact_values(kind, blocks)
        assert np.array_equal(bits_of(values_of(blocks, kind)), bits_of(want))
        assert not np.array_equal(values_of(blocks, kind), want[:, ::-1])


def test_trits_become_twos_with_gguf_s_values():
    blocks = random_blocks("tq1_0", (500,))
    made = in_memory(entry_of("tq1_0", blocks))
    assert made.kind == "tq2_0" and made.shape == (500, 256)
    want = dequantize(blocks, GGMLQuantizationType.TQ1_0)
    assert np.array_equal(dequantize(made.read(), GGMLQuantizationType.TQ2_0), want)
    assert {*np.unique(want / np.where(want == 0, 1, np.abs(want)))} == {-1, 0, 1}
    assert np.array_equal(values_of(made.read_rows(3, 9), made.kind), want[3:9])


def test_groups_of_128_become_groups_of_64_with_the_same_values():
    rows = random_blocks("q2_0_128", (9, 5)).reshape(9, -1)
    made = in_memory(entry_of("q2_0_128", rows))
    assert made.kind == "q2_0" and made.shape == (9, 640)
    want = values_of(rows, "q2_0_128")
    assert np.array_equal(bits_of(values_of(made.read(), "q2_0")), bits_of(want))
    first = rows[:, :34]  # by hand: 32 values of a byte's four pairs of bits, less 1
    scale = first[:, :2].copy().view(np.float16).astype(np.float32)
    assert np.array_equal(want[:, 5:6], ((first[:, 3:4] >> 2 & 3).astype(np.float32) - 1) * scale)


@pytest.mark.parametrize("scale", [None, 0.3, "experts"])
def test_rows_of_nvfp4_begin_with_their_scale(scale):
    blocks = random_blocks("nvfp4", (3, 4, 10)).reshape(3, 4, -1)  # experts, rows
    own = {None: None, 0.3: np.array([0.3], np.float32)}.get(
        scale, np.array([0.25, -3.1e-5, 7.0], np.float32)
    )
    made = in_memory(entry_of("nvfp4", blocks, scale=own))
    assert made.kind == "nvfp4_scaled" and made.row_bytes == made.read().shape[-1] == 4 + 360
    factor = np.ones(3, np.float32) if own is None else np.resize(own, 3)
    want = dequantize(blocks, GGMLQuantizationType.NVFP4) * factor[:, None, None]
    assert np.array_equal(bits_of(values_of(made.read(), made.kind)), bits_of(want))
    assert np.array_equal(values_of(made.read_rows(1, 3), made.kind), want[1:])
    assert np.array_equal(unpacked(entry_of("nvfp4", blocks, scale=own)).read(), want)
    with pytest.raises(AssertionError, match="need the tensor's scale"):
        values_of(blocks, "nvfp4")


def file_of(path: Path, tensors: dict[str, TensorEntry]) -> Path:
    write_gguf(path, "test", {}, tensors)
    return path


@pytest.mark.parametrize("kind", ["q2_0", "q2_0_128"])
@pytest.mark.parametrize("count", [1, 3])
def test_sizes_tell_the_groups_of_twos(tmp_path, kind, count):
    tensors = {
        f"{n}.weight": entry_of(kind, random_blocks(kind, (16 * n + 1, 5)).reshape(16 * n + 1, -1))
        for n in range(1, count + 1)
    }
    tensors["norm"] = array_entry(np.ones(5), "f32")
    path = file_of(tmp_path / "a.gguf", tensors)
    raw = path.read_bytes()
    assert raw.count(struct.pack("<I", 42)) >= count  # the number of both
    found = open_gguf(path, "model").tensors
    for name, entry in tensors.items():
        assert (found[name].kind, found[name].shape) == (entry.kind, entry.shape)
        assert np.array_equal(found[name].read(), entry.read())


def test_twos_of_another_size_are_refused(tmp_path):
    rows = random_blocks("q2_0", (16, 10)).reshape(16, -1)
    cut = entry_of("q8_0", np.zeros((16, 68), np.uint8))  # as long as no groups of 640 values
    path = file_of(tmp_path / "a.gguf", {"a.weight": cut, "b": array_entry(np.ones(8), "f32")})
    old = struct.pack("<QQI", 64, 16, 8)
    raw = path.read_bytes()
    assert raw.count(old) == 1
    path.write_bytes(raw.replace(old, struct.pack("<QQI", 640, 16, 42)))
    words = "a.weight' is q2_0 in 1,088 bytes, wanted 2,880 in groups of 64 values, or 2,720 in"
    with pytest.raises(HotsplitError, match=words):
        open_gguf(path, "model")
    assert rows.shape[1] == row_bytes(640, "q2_0")


@pytest.mark.parametrize("kind", ["q2_0", "q2_0_128"])
def test_a_cut_file_of_twos_misses_bytes_and_a_longer_one_is_whole(tmp_path, kind):
    """The one tensor that is cut, or that has more behind it, does not count for all others."""
    tensors = {
        f"{n}.weight": entry_of(kind, random_blocks(kind, (40, 5)).reshape(40, -1)) for n in "abc"
    }
    path = file_of(tmp_path / "a.gguf", tensors)
    raw = path.read_bytes()
    path.write_bytes(raw + bytes(100))
    assert {entry.kind for entry in open_gguf(path, "model").tensors.values()} == {kind}
    size = tensors["a.weight"].num_bytes
    for missing in (1, size + 40, 2 * size):
        path.write_bytes(raw[: len(raw) - -size % 32 - missing])
        with pytest.raises(HotsplitError, match=f"{missing:,} bytes of its tensors are missing"):
            open_gguf(path, "model")


def test_groups_of_64_and_of_128_in_one_file_are_refused(tmp_path):
    tensors = {
        f"{kind}.weight": entry_of(kind, random_blocks(kind, (40, 5)).reshape(40, -1))
        for kind in ("q2_0", "q2_0_128")
    }
    tensors["c"] = array_entry(np.ones(8), "f32")
    path = file_of(tmp_path / "a.gguf", tensors)
    with pytest.raises(
        HotsplitError, match="q2_0_128.weight' is q2_0 in 6,816 bytes, wanted 7,200"
    ):
        open_gguf(path, "model")


@pytest.mark.parametrize("scale", [None, 0.3])
def test_a_vector_of_nvfp4_is_unpacked(scale):
    blocks = random_blocks("nvfp4", (4,)).reshape(-1)
    own = None if scale is None else np.array([scale], np.float32)
    entry = TensorEntry(shape=(256,), kind="nvfp4", read_rows=lambda a, b: blocks, scale=own)
    want = dequantize(blocks, GGMLQuantizationType.NVFP4) * np.float32(scale or 1)
    assert np.array_equal(bits_of(unpacked(entry).read()), bits_of(want))


def nvfp4(scale: float | None = None, num_experts: int | None = None) -> TensorEntry:
    shape = (4, 2) if num_experts is None else (num_experts, 4, 2)
    blocks = random_blocks("nvfp4", shape).reshape(*shape[:-1], -1)
    own = None if scale is None else np.full(num_experts or 1, scale, np.float32)
    return entry_of("nvfp4", blocks, scale=own)


def test_a_scale_is_written_beside_its_tensor_and_read_with_it(tmp_path):
    tensors = {
        "blk.0.ffn_up.weight": nvfp4(0.5),
        "blk.0.ffn_up_exps.weight": nvfp4(2.0, num_experts=3),
        "output.weight": array_entry(np.ones((4, 4)), "f32"),
    }
    path = file_of(tmp_path / "a.gguf", tensors)
    assert b"blk.0.ffn_up.scale" in path.read_bytes()
    found = open_gguf(path, "model").tensors
    assert found.keys() == tensors.keys()
    for name, entry in tensors.items():
        assert np.array_equal(found[name].read(), entry.read())
        assert np.array_equal(found[name].scale, entry.scale)


@pytest.mark.parametrize("spelling", ["scale", "weight.scale"])
def test_both_spellings_of_a_scale_are_read_and_those_of_inputs_are_not(tmp_path, spelling):
    tensors = {
        "blk.0.ffn_up.weight": nvfp4(),
        f"blk.0.ffn_up.{spelling}": array_entry(np.array([0.125]), "f32"),
        f"blk.0.ffn_up.{spelling.replace('scale', 'input_scale')}": array_entry(np.ones(1), "f32"),
    }
    found = open_gguf(file_of(tmp_path / "a.gguf", tensors), "model").tensors
    assert [*found] == ["blk.0.ffn_up.weight"]
    assert found["blk.0.ffn_up.weight"].scale == [0.125]


@pytest.mark.parametrize(
    "scale, words",
    [
        (None, "ffn_up.weight is nvfp4 without a scale .blk.0.ffn_up.scale., which others in"),
        (array_entry(np.ones(2), "f32"), r"scale of blk.0.ffn_up.weight is f32 \[2\], wanted f32 "),
        (array_entry(np.ones(1), "f16"), r"scale of blk.0.ffn_up.weight is f16 \[1\], wanted f32 "),
        (array_entry(np.array([np.nan]), "f32"), "scale of blk.0.ffn_up.weight is not all finite"),
    ],
)
def test_a_scale_that_is_missing_or_wrong_is_refused(tmp_path, scale, words):
    tensors = {"blk.0.ffn_gate.weight": nvfp4(1.0), "blk.0.ffn_up.weight": nvfp4()}
    if scale is not None:
        tensors["blk.0.ffn_up.scale"] = scale
    path = file_of(tmp_path / "a.gguf", tensors)
    with pytest.raises(HotsplitError, match=words):
        open_gguf(path, "model")


def test_no_scale_anywhere_is_a_scale_of_one(tmp_path):
    path = file_of(tmp_path / "a.gguf", {"blk.0.ffn_up.weight": nvfp4()})
    (entry,) = open_gguf(path, "model").tensors.values()
    assert entry.scale is None
    assert (in_memory(entry).read()[:, :4].copy().view("<f4") == 1).all()


def test_numbers_are_unique():
    assert len({*KINDS.values()}) == len(KINDS) and KINDS[42] == "q2_0"
