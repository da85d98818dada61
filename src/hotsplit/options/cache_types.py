"""Storage types of keys and values in the cache: their names and sizes.

    f32 f16 bf16           values of that type
    types of small blocks  as in a model file; rows are multiplied by a Hadamard matrix first
                           (runtime/kernels/cpu/cache_rows.h)
    with "-plain"          the same blocks without the rotation, for comparison

The cache itself is in runtime.cache."""

from dataclasses import dataclass

from hotsplit.errors import HotsplitError
from hotsplit.files.gguf_file import row_bytes
from hotsplit.model.weight_types import BY_NAME, CACHE_NAMES, SMALL_BLOCK_NAMES
from hotsplit.options.key_selection import KeySelection

PLAIN = "-plain"
NAMES = (*CACHE_NAMES, *(f"{name}{PLAIN}" for name in SMALL_BLOCK_NAMES))


@dataclass(frozen=True)
class CacheType:
    """A storage type of cached keys or values."""

    name: str  # one of NAMES

    def __post_init__(self) -> None:
        if self.name not in NAMES:
            raise HotsplitError(f"cache type {self.name!r} is unknown; known: {', '.join(NAMES)}")

    @property
    def kind(self) -> str:
        """The tensor type with the same encoding in a model file."""
        return self.name.removesuffix(PLAIN)

    @property
    def is_blocks(self) -> bool:
        return self.kind in SMALL_BLOCK_NAMES

    @property
    def is_rotated(self) -> bool:
        return self.is_blocks and not self.name.endswith(PLAIN)

    def row_bytes(self, width: int) -> int:
        """Bytes of one head at one position."""
        return row_bytes(width, self.kind)

    def check(self, width: int) -> None:
        """Raises HotsplitError unless a head is a whole number of blocks."""
        block = BY_NAME[self.kind].block_values
        if width % block:
            raise HotsplitError(
                f"a cache in {self.name} needs heads whose width is a multiple of {block}, this"
                f" model's have {width}; use f16 or bf16"
            )


@dataclass(frozen=True, kw_only=True)
class CacheTypes:
    """How a cache stores keys and values, and which of them a token reads."""

    key: CacheType
    value: CacheType
    selection: KeySelection | None = None  # None: a token reads all keys

    @classmethod
    def of(cls, key: str, value: str | None = None) -> "CacheTypes":
        """The types by name. Raises HotsplitError for an unknown one."""
        return cls(key=CacheType(key), value=CacheType(key if value is None else value))

    def row_bytes(self, width: int, *, stores_values: bool = True) -> int:
        """Bytes of one head at one position, of its key and of a value of its own."""
        return self.key.row_bytes(width) + (self.value.row_bytes(width) if stores_values else 0)

    def head_bytes(self, num_positions: int, width: int, *, stores_values: bool = True) -> int:
        """Bytes of one head of a layer, tables included."""
        tables = self.selection.table_bytes(num_positions, width) if self.selection else 0
        return num_positions * self.row_bytes(width, stores_values=stores_values) + tables

    def read_bytes(self, num_positions: float, width: int, *, stores_values: bool = True) -> float:
        """Bytes of one head that a token reads after `num_positions` others."""
        rule, row = self.selection, self.row_bytes(width, stores_values=stores_values)
        selected = 0 if rule is None else rule.sinks + rule.top + rule.window
        if rule is None or num_positions < rule.full or num_positions <= selected:
            return num_positions * row
        return selected * row + rule.searched_bytes(num_positions, width)

    def __str__(self) -> str:
        types = self.key.name if self.key == self.value else f"{self.key.name}, {self.value.name}"
        return f"{types}; {self.selection}" if self.selection else types
