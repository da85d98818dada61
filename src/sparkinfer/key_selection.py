"""Which keys of a long text a token reads: sizes, as people give them, and the bytes of the tables.

The first `sinks` positions and a window of the last ones are always read. Between them a token reads
`top` positions: blocks of keys are ranked by a summary, and the keys of the best blocks, `candidates`
times as many as are wanted, by codes of two bits a value; with `candidates` 0 the best blocks are read
whole. A text of up to sinks + top + window positions is read entirely, with the same bits as without a
selection.

Positions are the tokens' own, or capped: a window's are counted from its beginning, and all keys
before it are as far away as the window is long (InfLLM, Xiao et al. 2024, arXiv 2402.04617). No
distance is then longer than sinks + top + window + block, so a model can go on behind the context
that it was trained with.

The search itself is in runtime/kernels/cpu/select.h, and in torch in runtime/cache/key_tables.py."""

from dataclasses import dataclass, fields, replace
from typing import Self

from sparkinfer.errors import SparkinferError

SUMMARIES = ("mean", "bounds")
POSITIONS = ("original", "capped")
WIDTH = 64  # rows of the tables are padded to multiples of so many values
BLOCKS = (16, 32, 64)  # each divides a block of a cache for several texts (budget.BLOCK_LENGTH)
MOST = 1 << 24
DEFAULT = "on"


@dataclass(frozen=True, kw_only=True)
class KeySelection:
    """Lengths in positions. Raises SparkinferError for what cannot be."""

    block: int = 32
    sinks: int = 64
    window: int = 1024
    top: int = 1024
    candidates: int = 4
    summary: str = "bounds"
    positions: str = "original"

    def __post_init__(self) -> None:
        if self.block not in BLOCKS:
            raise SparkinferError(f"a key block of {self.block}; wanted 16, 32 or 64")
        if self.summary not in SUMMARIES:
            raise SparkinferError(f"a summary by {self.summary!r}; known: {', '.join(SUMMARIES)}")
        if self.positions not in POSITIONS:
            raise SparkinferError(f"positions={self.positions!r}; known: {', '.join(POSITIONS)}")
        if not 0 <= self.candidates <= 64:
            raise SparkinferError(f"candidates={self.candidates}; wanted 0 to 64")
        for name, least in (("sinks", 0), ("window", self.block), ("top", self.block)):
            length = getattr(self, name)
            if length % self.block or not least <= length <= MOST:
                raise SparkinferError(
                    f"{name}={length}; wanted a multiple of the block of {self.block} positions,"
                    f" from {least} on"
                )

    @classmethod
    def parse(cls, text: str) -> Self:
        """From "on", for the defaults, or "window=2048,top=512": those named, the others as they are."""
        if text == DEFAULT:
            return cls()
        found: dict[str, int | str] = {}
        names = [field.name for field in fields(cls)]
        for part in text.split(","):
            name, _, value = part.partition("=")
            if name not in names or name in found or not value:
                raise SparkinferError(
                    f"{part!r} in {text!r}; wanted {DEFAULT} or NAME=VALUE,... with"
                    f" {', '.join(names)}"
                )
            is_word = name in ("summary", "positions")
            found[name] = value if is_word else _whole(name, value)
        return replace(cls(), **found)  # type: ignore[arg-type]

    def __str__(self) -> str:
        return ",".join(f"{field.name}={getattr(self, field.name)}" for field in fields(self))

    @property
    def is_coded(self) -> bool:
        return self.candidates > 0

    @property
    def is_capped(self) -> bool:
        return self.positions == "capped"

    @property
    def longest(self) -> int:
        """Positions that a token reads at most."""
        return self.sinks + self.top + self.window + self.block

    def summary_width(self, width: int) -> int:
        """Bytes of a block's summary, of heads of `width` values."""
        return padded(width) * (2 if self.summary == "bounds" else 1)

    def code_width(self, width: int) -> int:
        """Bytes of a key's code."""
        return padded(width) // 4

    def table_bytes(self, num_positions: int, width: int) -> int:
        """Bytes of the tables of one key-value head, beside `num_positions` keys."""
        blocks = -(-num_positions // self.block)
        summaries = blocks * (self.summary_width(width) + 4)
        codes = blocks * self.block * (self.code_width(width) + 4) if self.is_coded else 0
        return summaries + codes


def padded(width: int) -> int:
    return -(-width // WIDTH) * WIDTH


def _whole(name: str, value: str) -> int:
    try:
        return int(value)
    except ValueError as error:
        raise SparkinferError(f"{name}={value!r}; wanted a whole number") from error
