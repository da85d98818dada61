"""Rotary embeddings, as a struct for C++ too, and the places of a prompt's tokens in a GPU's cache.

Letters: T tokens, W head width, S sequences, N blocks of a sequence."""

from collections.abc import Mapping
from ctypes import Array, Structure, c_double, c_int32, c_int64, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from hotsplit.model.rope import Rotary as RotarySpec
from hotsplit.runtime.cache.block_table import BlockTable
from hotsplit.runtime.ops.structs import Structs, members


@dataclass(frozen=True, kw_only=True)
class Rotary:
    """Rotates pairs of a head's values by position times frequency (Su et al. 2021).

    The values of a pair are adjacent or half a head apart. For adjacent pairs, which llama.cpp uses
    for llama models, `convert` permutes the rows of q and k."""

    frequency_W: Tensor  # f64 [W / 2]
    is_adjacent: bool
    magnitude: float = 1.0  # factor of cos and sin; 1 except for YaRN and longrope

    @classmethod
    def of(
        cls, rotary: RotarySpec, width: int, factors: Tensor | None, device: torch.device
    ) -> "Rotary":
        """The rotary embedding of heads of a width; `factors` divide the frequencies elementwise
        (Llama 3's long-context scaling, longrope)."""
        theta, scaling = rotary.theta, rotary.scaling
        pairs = torch.arange(0, width, 2, dtype=torch.float64, device=device)
        divisors = torch.as_tensor(scaling.divisors(theta, width), device=device)
        frequency = theta ** (-pairs / width) / divisors
        frequency = frequency if factors is None else frequency / factors
        return cls(
            frequency_W=frequency,
            is_adjacent=rotary.pairing == "adjacent",
            magnitude=scaling.magnitude,
        )


@dataclass(frozen=True)
class Places:
    """Where the tokens of a pass are in the cache of a GPU, as its kernels take it; the sequence's
    table only if the cache is in blocks."""

    position_T: Tensor
    sequence_T: Tensor | None = None
    table_SN: Tensor | None = None


class PassPlaces:
    """The places of positions start .. start + count - 1 of a sequence, made once for each GPU and table
    unless they are given."""

    def __init__(
        self,
        start: int,
        count: int,
        given: Mapping[tuple[torch.device, BlockTable], Places] | None = None,
    ) -> None:
        self._start, self._count, self._made = start, count, dict(given or {})

    def of(self, table: BlockTable, sequence: int, device: torch.device) -> Places:
        key = device, table
        if key not in self._made:
            stop = self._start + self._count
            position_T = torch.arange(self._start, stop, device=device)
            self._made[key] = Places(position_T)
            if not table.is_whole:
                sequence_T = torch.zeros(self._count, dtype=torch.int32, device=device)
                block_N = table.blocks(sequence, stop).to(torch.int32)
                self._made[key] = Places(position_T, sequence_T, block_N[None].to(device))
        return self._made[key]


class RotaryStruct(Structure):
    _fields_ = [
        ("frequency", c_void_p),
        ("magnitude", c_double),
        ("head_width", c_int64),
        *members(c_int32, "is_adjacent unused"),
    ]


class Rotaries:
    """The rotary embeddings of a step's layers, each once."""

    def __init__(self) -> None:
        self.each: list[Rotary] = []

    def index(self, rotary: Rotary | None) -> int:
        """The index of a rotary embedding; -1 for none."""
        if rotary is None:
            return -1
        if not any(each is rotary for each in self.each):
            self.each.append(rotary)
        return next(i for i, each in enumerate(self.each) if each is rotary)

    def structs(self, structs: Structs) -> Array[RotaryStruct]:
        found = [
            RotaryStruct(
                frequency=structs.pointer(rotary.frequency_W, torch.float64),
                magnitude=rotary.magnitude,
                head_width=2 * len(rotary.frequency_W),
                is_adjacent=rotary.is_adjacent,
            )
            for rotary in self.each
        ]
        return structs.array(RotaryStruct, found)
