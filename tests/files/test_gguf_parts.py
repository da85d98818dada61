"""A model in several files, divided by gguf's writer: read from part 1 as if it were one file;
parts that are missing, swapped or of another model are refused by name."""

import json
import os
import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
from checkpoints import random_llama
from gguf import GGUFReader, Keys
from gguf.gguf_writer import SHARD_NAME_FORMAT

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.cli import main
from hotsplit.convert.convert import convert
from hotsplit.convert.options import ConvertConfig
from hotsplit.errors import HotsplitError
from hotsplit.files import gguf_parts
from hotsplit.files.gguf_parts import GgufPart, num_bytes_of, part_paths
from hotsplit.files.steady import reading
from hotsplit.run.keys import identity_of_source


def split_gguf(
    source: Path, stem: Path, num_parts: int, *, small_first: bool = False
) -> list[Path]:
    """Writes STEM-00001-of-0000N.gguf and so on; with `small_first`, part 1 has keys alone."""
    reader = gguf.GGUFReader(source)
    with_tensors = num_parts - small_first
    writer = gguf.GGUFWriter(
        stem.with_name(f"{stem.name}.gguf"),
        reader.fields["general.architecture"].contents(),
        split_max_tensors=-(-len(reader.tensors) // with_tensors),
        small_first_shard=small_first,
    )
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        kind, *inner = field.types
        values = field.contents()
        if kind == gguf.GGUFValueType.ARRAY and inner[0] == gguf.GGUFValueType.STRING:
            values = [bytes(field.parts[place]) for place in field.data]
        writer.add_key_value(name, values, kind, inner[0] if inner else None)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    parts = sorted(stem.parent.glob(f"{stem.name}-*.gguf"))
    assert len(parts) == num_parts
    return parts


NUMBER, COUNT = Keys.Split.LLM_KV_SPLIT_NO, Keys.Split.LLM_KV_SPLIT_COUNT
TOTAL = Keys.Split.LLM_KV_SPLIT_TENSORS_COUNT


def save_model(folder: Path, **config: int) -> Path:
    """A model of random weights that llama.cpp loads too."""
    checkpoint = random_llama(folder / "hf", hidden_act="silu", **config)
    convert(ConvertConfig(source=checkpoint, output=folder / "m.gguf", layout="stock"))
    return folder / "m.gguf"


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    return save_model(tmp_path_factory.mktemp("whole"))


@pytest.fixture
def parts(whole, tmp_path) -> list[Path]:
    return split_gguf(whole, tmp_path / "m", 3)


def test_the_keys_are_those_of_gguf():
    assert gguf_parts.SPLIT_KEYS == (NUMBER, COUNT, TOTAL)
    assert gguf_parts.NAME_FORMAT == SHARD_NAME_FORMAT


def set_key(path: Path, name: str, value: int) -> None:
    field = GGUFReader(path, "r+").fields[name]
    field.parts[field.data[0]][0] = value


@pytest.mark.parametrize("num_parts, small_first", [(2, False), (3, False), (3, True)])
def test_the_whole_model_is_read_from_part_1(whole, tmp_path, num_parts, small_first):
    first, *others = split_gguf(whole, tmp_path / "m", num_parts, small_first=small_first)
    got, want = ModelFile.load(first), ModelFile.load(whole)
    assert got.model_id == want.model_id and got.bare_spec == want.bare_spec
    assert got.extra_keys == want.extra_keys  # without those of the division
    assert got.tensors.keys() == want.tensors.keys()
    for name, entry in want.tensors.items():
        assert got.tensors[name].read().tobytes() == entry.read().tobytes()
    holders = {*others} if small_first else {first, *others}
    assert {entry.part for entry in got.tensors.values()} == holders
    assert num_bytes_of(first) == sum(part.stat().st_size for part in (first, *others))


@pytest.mark.parametrize("count", [0, 1])
def test_a_file_that_was_merged_is_whole(whole, tmp_path, count):
    """llama-gguf-split --merge leaves split.count 0."""
    (path, other) = split_gguf(whole, tmp_path / "m", 2)
    set_key(path, COUNT, count)
    with pytest.raises(HotsplitError, match="no tensor"):
        ModelFile.load(path)
    other.unlink()
    with pytest.raises(HotsplitError, match="no tensor"):
        ModelFile.load(path)


def test_commands_take_part_1(whole, parts, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HOTSPLIT_CACHE", str(tmp_path / "cache"))
    texts = []
    for path in (whole, parts[0]):
        words = ["-p", "the", "-n", "4", "--temperature", "0"]
        assert main(["generate", str(path), *words, "--mode", "dense"]) == 0
        texts.append(capsys.readouterr().out)
        output = tmp_path / f"{path.stem}.out.gguf"
        assert main(["convert", str(path), "-o", str(output)]) == 0, capsys.readouterr().err
        capsys.readouterr()
        assert main(["run", str(path), *words, "--no-verify"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[:2] == texts[2:] and texts[0].strip()
    converted = [(tmp_path / f"{path.stem}.out.gguf").read_bytes() for path in (whole, parts[0])]
    assert converted[0] == converted[1]
    assert main(["inspect", str(parts[0]), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["kind"] == "model file" and found["file_bytes"] == num_bytes_of(parts[0])
    assert len(found["tensors"]) == len(GGUFReader(whole).tensors)
    assert not any(key.startswith("split.") for key in found["keys"])


@pytest.mark.parametrize("command", ["generate", "inspect", "convert", "run"])
def test_a_later_part_is_refused_with_the_name_of_part_1(parts, tmp_path, capsys, command):
    more = {"convert": ["-o", str(tmp_path / "out.gguf")], "inspect": []}
    assert main([command, str(parts[1]), *more.get(command, ["-p", "the"])]) == 1
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert f"{parts[1]}: is part 2 of 3 of a model; give part 1, {parts[0]}" in line
    assert not (tmp_path / "out.gguf").exists()


def refusal(path: Path) -> str:
    with pytest.raises(HotsplitError) as refused:
        ModelFile.load(path)
    return str(refused.value)


def test_missing_parts_are_named(parts):
    parts[1].unlink()
    assert f"1 of its 3 parts are missing: {parts[1].name}; download" in refusal(parts[0])
    parts[2].unlink()
    assert f"2 of its 3 parts are missing: {parts[1].name}, {parts[2].name};" in refusal(parts[0])
    for part in parts[:1]:
        set_key(part, COUNT, 40)
        part.rename(many := part.with_name("m-00001-of-00040.gguf"))
    assert "39 of its 40 parts are missing" in refusal(many) and "and 34 more" in refusal(many)


def swap(parts, one, other):
    spare = parts[0].with_name("spare")
    parts[one].rename(spare)
    parts[other].rename(parts[one])
    spare.rename(parts[other])


def repeat(parts):
    shutil.copy(parts[1], parts[2])
    set_key(parts[2], NUMBER, 2)


@pytest.mark.parametrize(
    "change, named, line",
    [
        (lambda parts: swap(parts, 0, 1), 0, "named as part 1 of 3, but says that it is part 2"),
        (lambda parts: swap(parts, 1, 2), 1, "named as part 2 of 3, but says that it is part 3"),
        (lambda parts: set_key(parts[0], NUMBER, 3), 0, "says that it is part 4 of 3"),
        (lambda parts: set_key(parts[0], NUMBER, 65535), 0, "says that it is part 65536 of 3"),
        (lambda parts: os.truncate(parts[2], 4096), 2, "not a whole GGUF file"),
        (
            lambda parts: [set_key(part, TOTAL, 31) for part in parts],
            0,
            "its 3 parts have 30 tensors together, wanted 31",
        ),
        (repeat, 2, "which {parts[1]} holds too"),
    ],
)
def test_parts_that_are_no_model_are_named(parts, change, named, line):
    change(parts)
    said = refusal(parts[0])
    assert said.startswith(f"{parts[named]}: ") and line.format(parts=parts) in said


@pytest.mark.parametrize(
    "sizes, why",
    [
        (
            {"num_hidden_layers": 2},
            "is a part of another model than .*: of 21 tensors instead of 30",
        ),
        ({"hidden_size": 128}, r"wanted \[.*; download this part of the model again"),
    ],
)
def test_a_part_of_another_model_is_named(parts, tmp_path, sizes, why):
    other = save_model(tmp_path, **sizes)
    foreign = split_gguf(other, tmp_path / "o", 3)
    foreign[2].replace(parts[2])
    with pytest.raises(HotsplitError, match=why) as refused:
        ModelFile.load(parts[0])
    assert str(refused.value).startswith(f"{parts[2]}: ")


def test_a_whole_file_and_a_part_of_another_division_are_named(whole, parts, tmp_path):
    shutil.copy(whole, parts[2])
    assert refusal(parts[0]) == f"{parts[2]}: is a whole file, wanted part 3 of {parts[0]}"
    two = split_gguf(whole, tmp_path / "two", 2)
    two[1].replace(parts[1])
    assert f"{parts[1]}: is a part of another model than {parts[0]}: of 2 parts" in refusal(
        parts[0]
    )


def test_a_part_under_another_name_is_refused(parts):
    parts[0].rename(odd := parts[0].with_name("model.gguf"))
    assert "must end in -00001-of-00003.gguf; give the files their names again" in refusal(odd)


def test_links_find_their_neighbours(parts, tmp_path):
    """The hub's cache has links to files that are named by their hashes."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    snapshot.mkdir()
    for number, part in enumerate(parts):
        part.rename(blobs / str(number))
        (snapshot / part.name).symlink_to(blobs / str(number))
    assert ModelFile.load(snapshot / parts[0].name).tensors
    assert main(["plan", str(snapshot / parts[0].name), "--machine", "rtx-4060-8gb"]) == 0


def test_every_part_is_an_input(parts, tmp_path, capsys):
    assert part_paths(parts[0]) == parts and part_paths(parts[1]) == [parts[1]]
    before = parts[2].read_bytes()
    assert main(["convert", str(parts[0]), "-o", str(parts[2]), "--force"]) == 1
    assert "is read by this command" in capsys.readouterr().err
    assert parts[2].read_bytes() == before
    with (
        pytest.raises(HotsplitError, match=f"{parts[1].name}: was changed while it was read"),
        reading(parts[0]),
    ):
        os.utime(parts[1], ns=(1, 1))
        ModelFile.load(parts[0]).save(tmp_path / "out.gguf")


def test_run_makes_a_part_that_was_replaced_anew(whole, parts, tmp_path):
    before = identity_of_source(parts[0])
    changed = bytearray(parts[2].read_bytes())
    changed[-1] ^= 1
    parts[2].write_bytes(changed)
    assert identity_of_source(parts[0]) != before


def test_numbers_of_any_integer_type_are_read(whole, parts):
    keys = {NUMBER: np.uint64(0), COUNT: np.int32(3), TOTAL: np.int64(21)}
    assert GgufPart.of(whole, keys) == GgufPart(number=1, count=3, num_tensors=21)
    for wrong in ("3", True, np.float32(3), np.int32(-3), [3]):
        with pytest.raises(HotsplitError, match=r"split\.count is .* wanted a number of parts"):
            GgufPart.of(whole, {COUNT: wrong})
