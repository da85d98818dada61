"""src/hotsplit/files/gguf_reader.py: what it reads, and what it refuses."""

import dataclasses
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGUFValueType

from hotsplit.errors import HotsplitError
from hotsplit.files.foreign_types import foreign_words
from hotsplit.files.gguf_file import (
    GgufFile,
    array_entry,
    open_gguf,
    prefetch,
    read_gguf,
    release,
    row_bytes,
    write_gguf,
)
from hotsplit.files.gguf_reader import MAX_TENSORS
from hotsplit.files.gguf_types import KINDS

SCALARS = {
    GGUFValueType.UINT8: 255,
    GGUFValueType.INT8: -128,
    GGUFValueType.UINT16: 65535,
    GGUFValueType.INT16: -32768,
    GGUFValueType.UINT32: 2**32 - 1,
    GGUFValueType.INT32: -(2**31),
    GGUFValueType.UINT64: 2**64 - 1,
    GGUFValueType.INT64: -(2**63),
    GGUFValueType.FLOAT32: 0.1,
    GGUFValueType.FLOAT64: 0.1,
    GGUFValueType.BOOL: True,
    GGUFValueType.STRING: "größer \n",
}


def write(path: Path, *, alignment: int | None = None, order=gguf.GGUFEndian.LITTLE) -> Path:
    """Writes a file with every type of value, and a tensor of every type that gguf knows."""
    writer = gguf.GGUFWriter(path, "test", endianess=order)
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    for kind, value in SCALARS.items():
        writer.add_key_value(f"scalar.{kind.name}", value, kind)
        values = [value] * 3 if kind != GGUFValueType.BOOL else [True, False, True]
        writer.add_key_value(f"array.{kind.name}", values, GGUFValueType.ARRAY, kind)
    random = np.random.default_rng(0)
    for kind in GGML_QUANT_SIZES:
        size = 3 * 2 * row_bytes(256, kind.name.lower())
        raw = random.integers(0, 64, size, dtype=np.uint8).reshape(3, 2, -1)
        writer.add_tensor(f"tensor.{kind.name}", raw, raw_dtype=kind)
    for dtype in (np.float32, np.float16, np.float64, np.int8, np.int16, np.int32, np.int64):
        writer.add_tensor(f"vector.{dtype.__name__}", np.arange(5).astype(dtype))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def assert_equals_gguf(path: Path, file: GgufFile) -> None:
    reader = gguf.GGUFReader(path)
    fields = {n: f for n, f in reader.fields.items() if not n.startswith("GGUF.")}
    assert list(file.keys) == list(fields)
    for name, field in fields.items():
        assert file.keys[name] == field.contents()
        if field.types[0] not in (GGUFValueType.ARRAY, GGUFValueType.STRING, GGUFValueType.BOOL):
            assert type(file.keys[name]) is reader.gguf_scalar_to_np[field.types[0]]
        elif field.types[0] == GGUFValueType.ARRAY:
            assert [type(v) for v in file.keys[name]] == [type(v) for v in field.contents()]
    assert list(file.tensors) == [t.name for t in reader.tensors]
    for tensor in reader.tensors:
        entry = file.tensors[tensor.name]
        assert entry.shape == tuple(reversed(tensor.shape.tolist()))
        assert entry.kind == tensor.tensor_type.name.lower()
        data = entry.read()
        assert data.dtype == tensor.data.dtype and data.shape == tensor.data.shape
        assert data.tobytes() == tensor.data.tobytes()
        assert (entry.read_rows(1, 2) == tensor.data[1:2]).all()


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("alignment", [None, 8, 512])
def test_all_values_and_types_equal_those_of_gguf(tmp_path, version, alignment):
    path = write(tmp_path / "a.gguf", alignment=alignment)
    raw = bytearray(path.read_bytes())
    raw[4] = version
    path.write_bytes(raw)
    file = open_gguf(path, "test file")
    assert_equals_gguf(path, file)
    assert len(file.tensors) == 41
    array = file.tensors["vector.float32"].read()
    torch.from_numpy(array)[0] = 7.0  # copy on write: the file stays as it is
    assert path.read_bytes() == raw


def test_the_comparison_rejects_wrong_contents(tmp_path):
    path = write(tmp_path / "a.gguf")
    file = open_gguf(path, "test file")
    changed = {**file.keys, "scalar.UINT32": np.uint64(2**32 - 1)}
    with pytest.raises(AssertionError):
        assert_equals_gguf(path, dataclasses.replace(file, keys=changed))
    wrong = {**file.tensors, "vector.int8": file.tensors["vector.int16"]}
    with pytest.raises(AssertionError):
        assert_equals_gguf(path, dataclasses.replace(file, tensors=wrong))


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def header(
    keys: tuple[bytes, ...] = (), tensors: tuple[bytes, ...] = (), *, magic=b"GGUF", version=3
) -> bytes:
    counts = struct.pack("<IQQ", version, len(tensors), len(keys))
    return magic + counts + b"".join(keys) + b"".join(tensors)


def tensor(name=b"t", dims=(32,), kind=0, offset=0) -> bytes:
    size = len(dims)
    return text(name) + struct.pack(f"<I{size}QIQ", size, *dims, kind, offset)


def key(kind: int, value: bytes, name=b"k") -> bytes:
    return text(name) + struct.pack("<I", kind) + value


ARRAY = struct.Struct("<IQ")
ALIGNMENT = b"general.alignment"
BROKEN = {
    "starts with 'GGML'": header(magic=b"GGML"),
    "version 0": header(version=0),
    "version 70000": header(version=70000),
    "the version at byte 4": b"GGUF",
    "claims 1000 keys": b"GGUF" + struct.pack("<IQQ", 3, 0, 1000),
    f"claims {2**64 - 1} tensors": b"GGUF" + struct.pack("<IQQ", 3, 2**64 - 1, 0),
    "key 'k' appears twice": header((key(7, b"\1"),) * 2),
    "a key's name": header((struct.pack("<Q", 2**63) + bytes(20),)),
    "name before byte 33 is not UTF-8": header((key(7, b"\1" * 9, b"\xff"),)),
    "the file ends": header((key(8, struct.pack("<Q", 2**20)),)),
    "unknown type 13": header((key(13, b"\1"),)),
    "neither 0 nor 1": header((key(7, b"\2"),)),
    "array of arrays": header((key(9, ARRAY.pack(9, 1) + ARRAY.pack(0, 1) + b"\1"),)),
    f"claims {2**60} values": header((key(9, ARRAY.pack(8, 2**60)),)),
    "has 9 strings": header((key(9, ARRAY.pack(8, 9) + text(b"a")),)),
    "takes 4,000,000 bytes": header((key(9, ARRAY.pack(4, 10**6)),)),
    "is 24, wanted a power of two": header((key(4, struct.pack("<I", 24), ALIGNMENT),)),
    "is 4, wanted a power of two": header((key(4, struct.pack("<I", 4), ALIGNMENT),)),
    "is a str, wanted a power": header((key(8, text(b"32"), ALIGNMENT),)),
    "tensor 't' appears twice": header((), (tensor(), tensor(offset=128))) + bytes(320),
    "has 5 dimensions": header((), (tensor(dims=(1,) * 5),)) + bytes(320),
    "has 0 dimensions": header((), (tensor(dims=()),)) + bytes(320),
    "impossible shape": header((), (tensor(dims=(2**32, 2**32, 0)),)),
    "not whole blocks of 32": header((), (tensor(dims=(48, 2), kind=8),)) + bytes(320),
    "unknown type 4": header((), (tensor(kind=4),)) + bytes(320),
    "unknown type 70000": header((), (tensor(kind=70000),)) + bytes(320),
    "not a multiple of 32": header((), (tensor(offset=16),)) + bytes(320),
    "overlaps another": header((), (tensor(), tensor(b"u", offset=64))) + bytes(320),
    "73 bytes of its tensors are missing": header((), (tensor(),)) + bytes(7 + 128 - 73),
}


@pytest.mark.parametrize("words", BROKEN)
def test_damaged_headers_are_refused_in_one_line(tmp_path, words):
    path = tmp_path / "a.gguf"
    path.write_bytes(BROKEN[words])
    with pytest.raises(HotsplitError, match="wanted a model") as caught:
        read_gguf(path, "model")
    assert words in str(caught.value), caught.value


def test_a_whole_file_of_too_many_tensors_is_not_called_damaged(tmp_path):
    count = MAX_TENSORS + 1
    tensors = tuple(tensor(b"%d" % n, offset=128 * n) for n in range(count))
    path = tmp_path / "a.gguf"
    raw = header((), tensors)
    path.write_bytes(raw + bytes(-len(raw) % 32 + 128 * count))
    with pytest.raises(HotsplitError) as refused:
        read_gguf(path, "model")
    assert str(refused.value) == (
        f"{path}: has {count} tensors; this program reads up to {MAX_TENSORS}; get another file"
        " (wanted a model)"
    )


@pytest.mark.parametrize(
    "content, words",
    [
        (header(version=4), "is GGUF version 4, newer than 3, .*; install a newer hotsplit, or"),
        (header(version=17), "is GGUF version 17, newer than 3"),
        (header(version=1), "is GGUF version 1, of 2023; get or make one of version 2 or 3"),
        (header(version=3 << 24), "is big-endian; get or make a little-endian file"),
        (
            header((), (tensor(kind=max(KINDS) + 1),)) + bytes(320),
            f"tensor 't' has type {max(KINDS) + 1}, newer than {max(KINDS)}, .*; install a newer",
        ),
    ],
)
def test_a_file_for_another_program_is_not_called_damaged(tmp_path, content, words):
    path = tmp_path / "a.gguf"
    path.write_bytes(content)
    with pytest.raises(HotsplitError, match=words) as refused:
        read_gguf(path, "model")
    assert "whole" not in str(refused.value)


@pytest.mark.parametrize(
    "number, words",
    [
        (137, "tensor 't' is in iq2_k, a type of ik_llama.cpp, which alone runs it; get another"),
        (339, "tensor 't' is in iq4_k_r4, a type of ik_llama.cpp"),
        (31, "tensor 't' is in q4_0_4_4, a type that llama.cpp removed; .* in q4_0 "),
        (38, "tensor 't' is in iq4_nl_8_8, .* in iq4_nl "),
    ],
)
def test_types_of_ik_llama_cpp_and_removed_ones_are_refused_by_name(tmp_path, number, words):
    path = tmp_path / "a.gguf"
    path.write_bytes(header((), (tensor(kind=number),)) + bytes(320))
    with pytest.raises(HotsplitError, match=words) as refused:
        read_gguf(path, "model")
    assert "whole" not in str(refused.value)


def test_foreign_types_have_numbers_of_their_own():
    assert all(foreign_words(number) is None for number in GGML_QUANT_SIZES)


def test_an_empty_file_and_a_big_endian_one_are_refused(tmp_path):
    (tmp_path / "a.gguf").touch()
    with pytest.raises(HotsplitError, match="is empty; wanted a"):
        read_gguf(tmp_path / "a.gguf", "model")
    write(tmp_path / "b.gguf", order=gguf.GGUFEndian.BIG)
    with pytest.raises(HotsplitError, match="big-endian"):
        read_gguf(tmp_path / "b.gguf", "model")


def test_tensors_without_values_and_files_without_tensors(tmp_path):
    path = tmp_path / "a.gguf"
    path.write_bytes(header((), (tensor(dims=(32, 0)), tensor(b"u", (0,), offset=2**40))))
    _, tensors = read_gguf(path, "model")
    assert [(e.shape, e.read().shape) for e in tensors.values()] == [((0, 32),) * 2, ((0,),) * 2]
    path.write_bytes(header((key(7, b"\0"), key(9, ARRAY.pack(8, 0), b"none"))))
    assert read_gguf(path, "model") == ({"k": False, "none": []}, {})


def test_powerinfer_files_are_detected_and_have_their_own_types(tmp_path):
    """Type 18 is I32 in their ggml.h, but IQ3_XXS in ggml's."""
    path = tmp_path / "a.gguf"
    tensors = tuple(tensor(b"t%d" % n, (256,), n, (n - 16) * 1024) for n in (16, 17, 18))
    path.write_bytes(header((), tensors, magic=b"PWRI") + bytes(range(256)) * 14)
    file = open_gguf(path, "model")
    assert file.magic == "PWRI"
    assert [e.kind for e in file.tensors.values()] == ["i8", "i16", "i32"]
    with pytest.raises(HotsplitError, match="PowerInfer"):
        read_gguf(path, "model")
    path.write_bytes(header((), (tensor(kind=26),), magic=b"PWRI") + bytes(1024))
    with pytest.raises(HotsplitError, match="unknown type 26"):
        open_gguf(path, "model")


def test_arrays_are_written_as_they_were_read(tmp_path):
    """Tokens that are not UTF-8, and numbers beyond 32 bits, survive a second writing."""
    path = tmp_path / "a.gguf"
    tokens = ARRAY.pack(8, 3) + text(b"\xff\xfe") + text("é".encode()) + text(b"")
    wide = ARRAY.pack(10, 2) + struct.pack("<QQ", 2**64 - 1, 0)
    path.write_bytes(header((key(9, tokens, b"tokens"), key(9, wide, b"wide"))))
    keys, _ = read_gguf(path, "model")
    assert keys["tokens"][0].encode("utf-8", "surrogateescape") == b"\xff\xfe"
    write_gguf(tmp_path / "b.gguf", "test", {**keys, "floats": [1e300], "big": [2**31]}, {})
    again, _ = read_gguf(tmp_path / "b.gguf", "model")
    assert {n: again[n] for n in keys} == keys
    assert (again["floats"], again["big"]) == ([1e300], [2**31])


def test_released_pages_are_read_again(tmp_path):
    """Pages of a mapped file are read again; values that are only in memory are not released."""
    values = np.random.default_rng(0).standard_normal((300, 300)).astype(np.float32)
    write_gguf(tmp_path / "m.gguf", "test", {}, {"a": array_entry(values, "f32")})
    entry = read_gguf(tmp_path / "m.gguf", "model")[1]["a"]
    prefetch(entry)
    release(entry)
    assert (entry.read() == values).all()
    own = array_entry(np.ones((300, 300)), "f32")
    release(own)
    assert own.read().all()
