"""Well-formed files, each with one error from the tables of fuzz_wrong or fuzz_wrong_families. Its
reader must refuse it.

A case's number selects a change from a table, and seeds its places and values. fuzz_damage has
damaged bytes."""

import hashlib
import json
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import fuzz_wrong as wrong
import fuzz_wrong_families as families
import numpy as np
from fuzz_readers import KINDS, QUALITY, FuzzCase
from fuzz_wrong import Change
from safetensors.numpy import load_file
from safetensors.numpy import save as packed

from hotsplit.files.gguf_file import TensorEntry, read_gguf, write_gguf
from hotsplit.model.mode_quality import quality_values


@dataclass(kw_only=True)
class FuzzContent:
    """The content of a file, to be changed in place: metadata or keys, and arrays or tensors."""

    values: dict
    arrays: dict


# ------------------------------------------------------------------ files of that content


@dataclass(frozen=True, kw_only=True)
class Meaning:
    """`kind` names one of fuzz_readers.KINDS: the file that is changed, and its reader. `seal`
    corrects the checksum in the content after the change."""

    kind: str
    changes: dict[str, Change]
    seal: Callable[[FuzzContent], None] = lambda content: None
    is_header: bool = False  # the values are a safetensors header, and the data stay raw bytes


def load(path: Path, *, is_header: bool = False) -> FuzzContent:
    """Loads JSON and safetensors without any check of ours, GGUF with those of the container."""
    if is_header:
        raw = path.read_bytes()
        end = 8 + int.from_bytes(raw[:8], "little")
        return FuzzContent(
            values=json.loads(raw[8:end]), arrays={"": np.frombuffer(raw[end:], "u1")}
        )
    if path.suffix == ".json":
        return FuzzContent(values=json.loads(path.read_text()), arrays={})
    if path.suffix == ".gguf":
        keys, tensors = read_gguf(path, "file")
        return FuzzContent(
            values=dict(keys), arrays={n: np.array(e.read()) for n, e in tensors.items()}
        )
    raw = path.read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])["__metadata__"]
    plain = ("format", "version")
    values = {k: v if k in plain else json.loads(v) for k, v in header.items()}
    return FuzzContent(values=values, arrays={n: a.copy() for n, a in load_file(path).items()})


def save(path: Path, content: FuzzContent, *, is_header: bool = False) -> None:
    if is_header:
        header = json.dumps(content.values).encode()
        data = content.arrays[""].tobytes()
        path.write_bytes(len(header).to_bytes(8, "little") + header + data)
    elif path.suffix == ".json":
        path.write_text(json.dumps(content.values))
    elif path.suffix == ".gguf":
        _save_gguf(path, content)
    else:
        plain = ("format", "version")
        header = {k: v if k in plain else json.dumps(v) for k, v in content.values.items()}
        path.write_bytes(packed(content.arrays, header))


def _save_gguf(path: Path, content: FuzzContent) -> None:
    kinds = {
        np.dtype(np.float64): "f64",
        np.dtype(np.float32): "f32",
        np.dtype(np.float16): "f16",
        np.dtype(np.int32): "i32",
    }
    tensors = {
        name: TensorEntry(shape=a.shape, kind=kinds[a.dtype], read_rows=lambda i, j, a=a: a[i:j])
        for name, a in content.arrays.items()
    }
    keys = dict(content.values)
    architecture = keys.pop("general.architecture")
    write_gguf(path, architecture, {k: v for k, v in keys.items() if k[:5] != "GGUF."}, tensors)


def _seal_prompt(content: FuzzContent) -> None:
    digest = hashlib.sha256()
    for name in sorted(content.arrays):
        array = np.ascontiguousarray(content.arrays[name])
        digest.update(f"{name} {array.dtype} {array.shape};".encode())
        digest.update(array.data)
    if "sha256" in content.values:
        content.values["sha256"] = digest.hexdigest()


MEANINGS = {
    f"wrong-{name}": meaning
    for name, meaning in {
        "profile": Meaning(kind="profile", changes=wrong.PROFILE),
        "predictors": Meaning(kind="ours", changes=wrong.PREDICTORS),
        "machine": Meaning(kind="machine", changes=wrong.MACHINE),
        "plan": Meaning(kind="plan", changes=wrong.PLAN),
        "model": Meaning(kind="run", changes=wrong.MODEL),
        "theirs": Meaning(kind="theirs", changes=wrong.THEIRS),
        "config": Meaning(kind="values", changes=wrong.CONFIG),
        "tokenizer": Meaning(kind="tokenizer", changes=wrong.TOKENIZER),
        "special": Meaning(kind="special", changes=wrong.SPECIAL),
        "weights": Meaning(kind="safetensors", changes=wrong.WEIGHTS, is_header=True),
        "index": Meaning(kind="index", changes=wrong.INDEX),
        "prompt": Meaning(kind="prompt", changes=wrong.PROMPT, seal=_seal_prompt),
        "resume": Meaning(kind="resume", changes=wrong.RESUME),
        "yarn": Meaning(kind="yarn", changes=families.YARN),
        "llama3": Meaning(kind="llama3", changes=families.LLAMA3),
        "falcon": Meaning(kind="falcon", changes=families.FALCON),
        "opt": Meaning(kind="opt", changes=families.OPT),
        "phi": Meaning(kind="phi", changes=families.PHI),
        "qwen": Meaning(kind="qwen", changes=families.QWEN),
        "scores": Meaning(kind="scores", changes=families.SCORES),
    }.items()
}


def changed(inputs: Path, kind: str, number: int) -> tuple[str, FuzzContent]:
    """The name of a case's change, and the changed content."""
    meaning = MEANINGS[kind]
    names = list(meaning.changes)
    name, rng = names[number % len(names)], random.Random(f"{kind} {number}")
    content = load(inputs / meaning.kind / KINDS[meaning.kind].target, is_header=meaning.is_header)
    if kind == "wrong-profile":
        content.values["quality"] = quality_values({"exact": QUALITY, "predicted": QUALITY})
    meaning.changes[name](rng, content.values, content.arrays)
    meaning.seal(content)
    return name, content


def misread(inputs: Path, kind: str, number: int, work: Path) -> str:
    """Reads a file with wrong content; the reader must raise."""
    name, content = changed(inputs, kind, number)
    meaning = MEANINGS[kind]
    read_content(inputs, kind, meaning.kind, content, work, 2, is_header=meaning.is_header)
    return f"done where it must be refused: {name}"


def read_content(
    inputs: Path,
    kind: str,
    of: str,
    content: FuzzContent,
    work: Path,
    number: int,
    *,
    is_header: bool = False,
) -> None:
    """Makes the reader of kind `of` read its folder with that content, in a copy for `kind`."""
    folder, output = work / kind, work / "output"
    if not folder.exists():
        shutil.copytree(inputs / of, folder)
    output.mkdir(exist_ok=True)
    path = folder / KINDS[of].target
    save(path, content, is_header=is_header)
    suffix = ".out" if of in ("profile", "merge") else ".gguf"
    case = FuzzCase(number=number, path=path, inputs=inputs, output=output / f"out{suffix}")
    KINDS[of].read(case)
    shutil.rmtree(output)
