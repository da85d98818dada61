"""Parses and formats byte counts for people."""

import re

from hotsplit.errors import HotsplitError

UNITS = {"": 1 << 30, "B": 1}
for _power, _letter in enumerate("KMGT", start=1):
    UNITS |= {
        _letter: 1 << 10 * _power,
        f"{_letter}IB": 1 << 10 * _power,
        f"{_letter}B": 10 ** (3 * _power),
    }

MOST = 1 << 60  # 2^30 GiB; files store sizes in 64 bits


def parse_bytes(text: str) -> int:
    """Parses "8GiB", "512 MiB" or "1.5GB"; 8G means 8 GiB, and so does 8, as in SparkInfer."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text, re.ASCII)
    if match is None or match[2].upper() not in UNITS:
        raise HotsplitError(f"{text!r} is not a size; wanted e.g. 8GiB, 512MiB or 1.5GB")
    size = float(match[1]) * UNITS[match[2].upper()]
    if size >= MOST:
        raise HotsplitError(f"{text!r} is more than any machine has; wanted e.g. 8GiB or 512MiB")
    return int(size)


def whole_number(text: str) -> int:
    """Python's int, for ASCII text only. Raises ValueError."""
    if not text.isascii():
        raise ValueError(f"{text!r} has other characters than plain digits")
    return int(text)


def format_bytes(count: int) -> str:
    """Formats bytes in the largest of GiB, MiB and KiB that gives at least one, else in B."""
    for unit in ("GiB", "MiB", "KiB"):
        if count >= UNITS[unit.upper()]:
            return f"{count / UNITS[unit.upper()]:.2f} {unit}"
    return f"{count} B"


def unit_of(most: int) -> tuple[str, int]:
    """(name, bytes) of the unit for an axis up to this many bytes."""
    name = next((unit for unit in ("GiB", "MiB", "KiB") if most >= 2 * UNITS[unit.upper()]), "B")
    return name, UNITS[name.upper()]


def size_words(count: int) -> str:
    """The shortest text of exactly these bytes, as an option takes it."""
    units = ("GiB", "GB", "MiB", "MB", "KiB", "KB", "B")
    texts = [f"{count / UNITS[u.upper()]:.{n}f}{u}" for u in units for n in range(4)]
    return min((text for text in texts if parse_bytes(text) == count), key=len) if count else "0"
