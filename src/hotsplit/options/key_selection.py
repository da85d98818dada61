"""Selects which keys of a long text a token reads: the sizes of the selection and its tables.

The first `sinks` positions and a window of the last ones are always read. Between them a token
reads `top` positions: blocks of keys are ranked by a summary, then the keys of the best blocks,
`candidates` times as many as needed, by codes of two bits per value. With `candidates` 0 the best
blocks are read whole. A text of up to sinks + top + window positions is read entirely; the results
then equal those without a selection to the bit.

Tokens at the first `full` positions of a text read all keys before them, so that a prompt can be
read in full and continued with few keys. This depends on a token's position alone, so a row's
logits are the same in a prompt, a draft or a single step.

The search itself is in runtime/kernels/cpu/key_selection.h, and in torch in
runtime/cache/key_tables.py."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Literal, Self, get_args

from annotated_types import Interval

from hotsplit.errors import HotsplitError
from hotsplit.model.spec import ModelSpec
from hotsplit.options.kinds import check_fields, parse_settings

Summary = Literal["mean", "bounds"]
SUMMARIES = get_args(Summary)  # by their numbers in C++
WIDTH = 64  # table rows are padded to multiples of this many values
MOST = 1 << 24
DEFAULT = "on"


@dataclass(frozen=True, kw_only=True)
class KeySelection:
    """The sizes of a selection, in positions. Raises HotsplitError for invalid ones."""

    block: Literal[16, 32, 64] = 32  # each divides budget.BLOCK_LENGTH
    sinks: int = 64
    window: int = 1024
    top: int = 1024
    candidates: Annotated[int, Interval(ge=0, le=64)] = 8
    summary: Summary = "bounds"
    full: Annotated[int, Interval(ge=0, le=MOST)] = 0

    def __post_init__(self) -> None:
        check_fields(self)
        for name, least in (("sinks", 0), ("window", self.block), ("top", self.block)):
            length = getattr(self, name)
            if length % self.block or not least <= length <= MOST:
                raise HotsplitError(
                    f"{name}={length}; wanted a multiple of the block of {self.block} positions,"
                    f" from {least} to {MOST}"
                )

    def check_windows(self, path: Path, spec: ModelSpec) -> None:
        """Raises HotsplitError if a layer's own window already limits which keys it reads."""
        windows = [a.window for a in spec.attentions if a.window is not None]
        if windows:
            raise HotsplitError(
                f"{path}: --kv-offload {self} asked for, but {len(windows)} of {spec.num_layers}"
                f" layers have windows of at most {max(windows)} tokens; leave --kv-offload out"
            )

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parses "on", the defaults, or e.g. "window=2048,top=512", which changes some."""
        return cls(**parse_settings(cls, text, DEFAULT))

    def __str__(self) -> str:
        return ",".join(f"{field.name}={getattr(self, field.name)}" for field in fields(self))

    @property
    def is_coded(self) -> bool:
        return self.candidates > 0

    @property
    def longest(self) -> int:
        """Maximum positions that a token reads unless it is among the first `full`."""
        return self.sinks + self.top + self.window + self.block

    def summary_width(self, width: int) -> int:
        """Bytes of a block's summary for heads of `width` values."""
        return padded(width) * (2 if self.summary == "bounds" else 1)

    def code_width(self, width: int) -> int:
        """Bytes of a key's code."""
        return padded(width) // 4

    def table_bytes(self, num_positions: int, width: int) -> int:
        """Bytes of one key-value head's tables for `num_positions` keys."""
        blocks = -(-num_positions // self.block)
        summaries = blocks * (self.summary_width(width) + 4)
        codes = blocks * self.block * (self.code_width(width) + 4) if self.is_coded else 0
        return summaries + codes

    def searched_bytes(self, num_positions: float, width: int) -> float:
        """Bytes of one head's tables that are read to find `top` of `num_positions` keys."""
        far = max(0.0, num_positions - self.sinks - self.window)
        codes = min(far, self.candidates * self.top) * (self.code_width(width) + 4)
        return far / self.block * (self.summary_width(width) + 4) + codes


def padded(width: int) -> int:
    return -(-width // WIDTH) * WIDTH
