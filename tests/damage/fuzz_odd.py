"""Whole files with odd content: any key, any value, any array, changed to anything that the
container can hold. Such a file must be refused, or read as a valid one. Values that must be refused
are in fuzz_wrong."""

import json
import random
from pathlib import Path

import numpy as np
from fuzz_damage import ODD, another_value
from fuzz_meaning import FuzzContent, load, read_content
from fuzz_readers import KINDS

# For each kind, the kind of fuzz_readers that has its file and its reader.
_ODDS = """
    profile ours merge plan run gguf stock theirs prompt resume safetensors falcon-weights
    phi-weights falcon-gguf opt-gguf qwen-gguf yarn-gguf scores templates shown export
"""
ODDS = {f"odd-{kind}": kind for kind in _ODDS.split()}
# Possible values of a GGUF key.
VALUES = (
    *(kind(n) for kind in (np.uint32, np.int32, np.uint64, np.int64) for n in (0, 1, 2, 7)),
    *(np.int32(-1), np.uint32(2**32 - 1), np.int64(-(2**63)), np.uint64(2**64 - 1), np.int8(-1)),
    *(np.float32(number) for number in (0, -1, 0.5, np.nan, np.inf, 1e-38, 3e38)),
    *(np.float64(1e308), np.float64(-0.5), True, False),
    *("x", "x" * 5000, "a\nb", "\0", "none"),
    *([1], [-1, 2], [0] * 300, [0.5], [float("nan")], ["x"], ["", "a"], ["\udcff"], [True, False]),
)
NUMBERS = (0, 1, -1, 2, 1 << 31, -(1 << 62), 0.5, np.nan, np.inf, -np.inf, 1e38, 1e-38)


def odd(inputs: Path, kind: str, number: int) -> FuzzContent:
    """The content of a case: one to three changes."""
    path = inputs / ODDS[kind] / KINDS[ODDS[kind]].target
    content = load(path)
    rng, is_gguf = random.Random(f"{kind} {number}"), path.suffix == ".gguf"
    for _ in range(rng.choice((1, 1, 2, 3))):
        if content.arrays and rng.random() < 0.4:
            _another_array(content.arrays, rng, is_gguf=is_gguf)
        elif is_gguf:
            _another_key(content.values, rng)
        else:
            _another_metadatum(content.values, rng)
    return content


def _another_key(keys: dict, rng: random.Random) -> None:
    key = rng.choice([name for name in keys if not name.startswith("GGUF.")])
    old = keys[key]
    if rng.random() < 0.1 and key != "general.architecture":
        del keys[key]
    elif isinstance(old, list) and rng.random() < 0.6:
        keys[key] = _another_list(old, rng)
    elif key != "general.architecture" or rng.random() < 0.1:
        keys[key] = rng.choice(VALUES if key != "general.architecture" else ("falcon", "opt", "x"))


def _another_list(old: list, rng: random.Random) -> list:
    """The list with another item, one item less, one twice, or in another order."""
    new = list(old)
    place = rng.randrange(len(new))
    choice = rng.randrange(4)
    if choice == 0 and len(new) > 1:
        del new[place]
    elif choice == 1:
        new.insert(place, rng.choice(new))
    elif choice == 2:
        rng.shuffle(new)
    elif isinstance(new[0], str):
        new[place] = rng.choice(("", "x", "a b", "\udcff", "\0", "\u2581", "<0x41>"))
    elif not isinstance(new[0], bool):
        new[place] = type(new[0])(rng.choice((0, 1, -1, 5, 299, 300, 99_999)))
    return new


def _another_metadatum(values: dict, rng: random.Random) -> None:
    """Changes metadata of safetensors: format and version are text, everything else is JSON."""
    key = rng.choice(sorted(values) or ["format"])
    if key in ("format", "version"):
        values[key] = rng.choice(("", "x", "0", "1", "2", "3", "4", "99", "hotsplit.limits"))
    elif isinstance(values[key], dict | list) and values[key] and rng.random() < 0.7:
        values[key] = json.loads(another_value(json.dumps({"v": values[key]}).encode(), rng)).get(
            "v"
        )
    elif rng.random() < 0.1:
        del values[key]
    else:
        values[key] = rng.choice(ODD)


def _another_array(arrays: dict, rng: random.Random, *, is_gguf: bool) -> None:
    name = rng.choice(sorted(arrays))
    array = np.array(arrays[name])
    choice = rng.randrange(7)
    if choice == 0 and len(arrays) > 1:
        del arrays[name]
        return
    if choice == 1:
        arrays[rng.choice((name + "x", "x", "blk.0.x", name.replace("0", "1")))] = array
    elif choice == 2:
        array = array[: rng.randrange(1, len(array) + 1)] if array.ndim and len(array) else array
    elif choice == 3 and array.ndim:
        array = np.concatenate([array, array[:1]])
    elif choice == 4:
        array = array.reshape(-1) if array.ndim > 1 else array.reshape(1, -1)
    elif choice == 5:
        types = (np.float32, np.float16, np.int32)
        more = (np.float64, np.int64, np.int8, np.uint8, np.bool_)
        with np.errstate(all="ignore"):
            array = array.astype(rng.choice(types if is_gguf else (*types, *more)))
    elif array.size:
        with np.errstate(all="ignore"):
            number = np.float64(rng.choice(NUMBERS)).astype(array.dtype)
        array.reshape(-1)[rng.randrange(array.size)] = number
    arrays[name] = np.ascontiguousarray(array)


def read_odd(inputs: Path, kind: str, number: int, work: Path) -> str:
    read_content(inputs, kind, ODDS[kind], odd(inputs, kind, number), work, number)
    return "done"
