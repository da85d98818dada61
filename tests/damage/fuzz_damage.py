"""Damages a file for the fuzzer: its bytes, mostly in headers and metadata, or the values of its
JSON."""

import copy
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

_POWERS = (7, 8, 15, 16, 24, 31, 32, 40, 62, 63, 64)
EXTREMES = (0, 1, 2, *(n for p in _POWERS for n in ((1 << p) - 1, 1 << p) if n < 1 << 64))
_NUMBERS = b'-1 0 1 7 1e308 0.5 4294967296 null "x" [] true NaN Infinity 1000000000'
NUMBERS = (*_NUMBERS.split(), b"9" * 20, b"9" * 400)
# Replacements of a value: well-formed JSON with another meaning.
ODD = json.loads(
    """[null, true, false, 0, 1, -1, 2, 3, 7, 0.5, -0.5, 1e308, 1e-308, 1000000000,
    9007199254740992, 9223372036854775808, 1000000000000000000000000000000, "", "x", "llama", "0",
    "\\u0000", "a\\nb", [], [0], ["x"], [[]], {}, {"": 0}, {"type": "linear", "factor": 2.0},
    {"rope_type": "default"}]"""
)
ODD.append("x" * 5000)
# Architectures: some with Llama's tensor names, some with others.
_FAMILIES = "Llama Mistral Qwen2 Qwen3 SparseLlama Bamboo Phi3 OPT Falcon"
CLASSES = tuple(f"{family}ForCausalLM" for family in _FAMILIES.split())
# Optional keys; most of them change the model that a config.json describes.
ABSENT = ("sliding_window", "layer_types", "is_causal", "rope_scaling", "eos_token_id", "format")


# ------------------------------------------------------------------ bytes


def mutated(raw: bytes, spots: list[tuple[int, int]], rng: random.Random) -> bytes:
    """Tries one to three damages, each in a random one of the spots (start, stop); some find
    nothing to change there."""
    data = bytearray(raw)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        start, stop = rng.choice(spots)
        stop = min(stop, len(data))
        if start < stop:
            rng.choice(DAMAGES)(data, start, stop, rng)
    return bytes(data)


def flip_bits(data: bytearray, start: int, stop: int, rng: random.Random) -> None:
    for _ in range(rng.choice((1, 1, 2, 8))):
        data[rng.randrange(start, stop)] ^= 1 << rng.randrange(8)


def set_integer(data: bytearray, start: int, stop: int, rng: random.Random) -> None:
    place, size = rng.randrange(start, stop), rng.choice((1, 2, 4, 4, 8, 8))
    value = rng.choice((*EXTREMES, len(data), len(data) - 1, len(data) + 1))
    data[place : place + size] = (value % (1 << 8 * size)).to_bytes(size, "little")


def change_field(data: bytearray, start: int, stop: int, rng: random.Random) -> None:
    """Changes a small integer, such as a length, count or offset: a byte that three zeros
    follow."""
    found = [m.start() for m in re.finditer(rb"[\x01-\xff]\0{3}", data[start:stop])]
    if found:
        place = start + rng.choice(found)
        size = rng.choice((1, 4, 8))
        value = rng.choice((*EXTREMES, data[place] + 1, data[place] - 1))
        data[place : place + size] = (value % (1 << 8 * size)).to_bytes(size, "little")


def change_number(data: bytearray, start: int, stop: int, rng: random.Random) -> None:
    """Replaces one run of digits, as JSON's numbers have, by another value."""
    found = list(re.finditer(rb"\d+", data[start:stop]))
    if found:
        match = rng.choice(found)
        data[start + match.start() : start + match.end()] = rng.choice(NUMBERS)


def truncate(data: bytearray, start: int, stop: int, rng: random.Random) -> None:
    del data[rng.choice((start, stop, rng.randrange(start, stop), len(data) - 1)) :]


def splice(data: bytearray, start: int, stop: int, rng: random.Random) -> None:
    place, size = rng.randrange(start, stop), rng.choice((1, 2, 4, 8, 30, 64))
    source = rng.randrange(start, stop)
    piece = rng.choice(
        (
            rng.randbytes(size),
            bytes(data[source : source + size]),
            b"[" * 5000,
            b"\0" * size,
            b"\\ud800",
            b"",
        )
    )
    data[place : place + rng.choice((0, 0, size, len(piece)))] = piece


DAMAGES = (flip_bits, set_integer, change_field, change_number, truncate, splice)


def spots_of(path: Path) -> list[tuple[int, int]]:
    """Byte ranges (start, stop) to damage: a file's header and metadata, some repeated so that they
    are drawn more often, and last the whole file."""
    raw = path.read_bytes()
    whole = (0, len(raw))
    if path.suffix in (".safetensors", ".resume"):
        end = 8 + int.from_bytes(raw[:8], "little")
        return [(0, 8), (8, end), (8, end), (8, end), whole]
    if path.suffix in (".pt", ".bin"):
        pickle = raw.index(b"data.pkl")
        directory = raw.index(b"PK\1\2")
        end = raw.index(b"PK\3\4", pickle)
        return [
            (0, pickle),
            (pickle, end),
            (pickle, end),
            (directory, len(raw)),
            (directory, len(raw)),
            (len(raw) - 98, len(raw)),
            whole,
        ]
    if path.name.endswith(".split.gguf"):
        return [(0, 24), (24, raw.rindex(b"ffn_hot") + 40), whole]
    if path.suffix == ".gguf" and b"token_embd" in raw:
        end = max(raw.rindex(b"weight"), raw.rfind(b".limit")) + 40
        tensors = raw.index(b"token_embd")
        return [(0, 24), (24, tensors), (24, tensors), (tensors, end), (tensors, end), whole]
    return [whole]


# ------------------------------------------------------------------ values


def another_value(raw: bytes, rng: random.Random) -> bytes:
    """A JSON object with one or two values changed or removed at any depth, or set at its top
    level; by chance they may be what they were."""
    values = json.loads(raw)
    if "architectures" in values and rng.random() < 0.05:
        values["architectures"] = [rng.choice(CLASSES)]
    for _ in range(rng.choice((1, 1, 2))):
        if rng.random() < 0.1:
            values[rng.choice(ABSENT)] = _odd(rng)
            continue
        places = [*_places(values)]
        if not places:
            continue
        holder, key = rng.choice(places)
        if rng.random() < 0.1:
            del holder[key]
        else:
            holder[key] = _odd(rng)
    return json.dumps(values).encode()


def _odd(rng: random.Random) -> object:
    """One of ODD; a copy, because a second change may be inside the first."""
    return copy.deepcopy(rng.choice(ODD))


def _places(value: object, most: int = 40) -> Iterator[tuple]:
    """(object or list, key) of the values at any depth; of a long list or object, only the first
    and last few."""
    keys = list(value) if isinstance(value, dict) else range(len(value))
    for key in [*keys[: most // 2], *keys[most // 2 :][-most // 2 :]]:
        yield value, key
        if isinstance(value[key], dict | list):
            yield from _places(value[key], max(4, most // 4))
