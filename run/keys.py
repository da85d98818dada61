"""The parts of the keys of `hotsplit run`'s artifacts: identities of sources and files, and
versions of stages.

A file is identified, wherever it is, by its size, its modification time and samples of its bytes; a
small one by its size and all of its bytes. That is cheap even for 100 GB, and writing to a file
changes its modification time."""

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from hotsplit.artifacts import machine_file, predictor_file, profile_file, split_file, trial_file
from hotsplit.artifacts.machine_file import Machine
from hotsplit.artifacts.model_file import ModelFile
from hotsplit.artifacts.profile_file import Profile
from hotsplit.artifacts.split_file import Split
from hotsplit.convert.hub import DESCRIPTIONS, PICKLED, SAFETENSORS
from hotsplit.convert.options import Outtype
from hotsplit.errors import HotsplitError
from hotsplit.families import key_reader
from hotsplit.files.atomic import require_file
from hotsplit.files.gguf_parts import part_paths
from hotsplit.model.tensors import Layout
from hotsplit.model.weight_types import NAMES

SMALL_BYTES = 4 << 20
SAMPLE_BYTES, NUM_SAMPLES = 4096, 64


@dataclass(frozen=True)
class Stage:
    """A kind of artifact. `version` has the stage's own number, which is raised whenever the same
    input gives another output, and the versions of the formats that it writes."""

    what: str  # for messages
    version: tuple[int, ...]
    file: str  # the one that other commands take
    load: Callable[[Path], object] | None = None  # reads it, HotsplitError if it is damaged
    more_files: tuple[str, ...] = ()  # patterns of further file names that it may write
    facts: tuple[tuple[str, float], ...] = ()  # numbers that later stages read, and their minimum


_KEYS, _PROFILE, _PREDICTORS = key_reader.VERSION, profile_file.VERSION, predictor_file.VERSION
_SPLIT, _TRIAL, _MODEL = split_file.VERSION, trial_file.VERSION, "model.gguf"
STAGES = {
    "corpus": Stage("the default text", (1,), "default.txt", more_files=("*.txt",)),
    "model": Stage("the converted model", (2, _KEYS), _MODEL, ModelFile.load),
    "look": Stage(
        "a first look at the model",
        (1, _PROFILE),
        "look.safetensors",
        Profile.load,
        ("look.*",),
        (("density", 0.0), ("tokens_per_s", 1e-9)),
    ),
    "profile": Stage(
        "the profile and the predictors",
        (1, _PROFILE, _PREDICTORS),
        "model.profile.safetensors",
        Profile.load,
        ("model.profile.*", "predictors", "predictors/*"),
    ),
    "full": Stage("the model with its predictors", (1, _KEYS, _PREDICTORS), _MODEL, ModelFile.load),
    "machine": Stage(  # with rates of every type
        "the figures of this machine",
        (2, machine_file.VERSION, len(NAMES)),
        "machine.json",
        Machine.load,
    ),
    "plan": Stage("the plan", (1, _SPLIT), "model.split.gguf", Split.load),
    "trial": Stage(
        "the trial of a plan",
        (1, _TRIAL, _SPLIT),
        "trial.json",
        trial_file.Trial.load,
        ("machine.json", *trial_file.FILES.values()),
    ),
}


def digest(values: Any) -> str:
    """A hash of JSON values in 24 hex digits."""
    text = json.dumps(values, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def identity_of_source(path: Path, tokenizer: Path | None = None) -> str:
    """The identity of a GGUF, or of a checkpoint folder by the files that `convert` reads, with
    that of a tokenizer.json in place of its own. `path` must exist. Raises HotsplitError for a file
    that cannot be read."""
    if tokenizer is not None:
        require_file(tokenizer, "tokenizer.json")
        return digest([identity_of_source(path), *_identity(tokenizer)])
    if path.is_file():
        first, *others = map(_identity, part_paths(path))
        return digest([first, *others] if others else first)
    patterns = (*DESCRIPTIONS, *SAFETENSORS, *PICKLED)
    files = [
        file
        for file in sorted(path.iterdir())
        if file.is_file() and any(fnmatch(file.name, pattern) for pattern in patterns)
    ]
    return digest([(file.name, *_identity(file)) for file in files])


def identity_of_texts(paths: Iterable[Path]) -> str:
    """The identity of corpora: files, and folders with everything in them."""
    found: list[object] = []
    for path in paths:
        if path.is_dir():
            inside = [file for file in sorted(path.rglob("*")) if file.is_file()]
            found += [(file.relative_to(path).as_posix(), *_identity(file)) for file in inside]
        elif path.is_file():
            found.append((path.name, *_identity(path)))
        else:
            raise HotsplitError(
                f"{path}: no such file; wanted text, .jsonl or .parquet, or a folder of them"
            )
    return digest(found)


def _identity(path: Path) -> tuple[object, ...]:
    try:
        stat = path.stat()
        with path.open("rb") as file:
            if stat.st_size <= SMALL_BYTES:
                return stat.st_size, hashlib.sha256(file.read()).hexdigest()
            found = hashlib.sha256()
            step = (stat.st_size - SAMPLE_BYTES) // (NUM_SAMPLES - 1)
            for number in range(NUM_SAMPLES):
                file.seek(number * step)
                found.update(file.read(SAMPLE_BYTES))
    except OSError as error:
        raise HotsplitError(f"{path}: cannot be read: {error.strerror}") from error
    return stat.st_size, stat.st_mtime_ns, found.hexdigest()


def conversion_key(
    identity: str, outtype: Outtype | None, layout: Layout, activation: str | None
) -> dict[str, Any]:
    """The key of a converted model."""
    key: dict[str, Any] = {"source": identity, "outtype": outtype, "activation": activation}
    return key | ({"layout": layout} if layout != "sparse" else {})
