"""Rotary embeddings, in torch and as a struct for C++.

Letters: T tokens, H heads, W head width."""

from collections.abc import Mapping
from ctypes import Array, Structure, c_double, c_int32, c_int64, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from hotsplit.model.rope import Rotary as RotarySpec
from hotsplit.runtime.cache.block_table import BlockTable
from hotsplit.runtime.ops.structs import Structs


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

    def turn(self, start: int, count: int) -> "Turn":
        """The rotation for positions start .. start + count - 1."""
        positions = torch.arange(start, start + count, device=self.frequency_W.device)
        angle = positions[:, None, None] * self.frequency_W
        cos, sin = angle.cos() * self.magnitude, angle.sin() * self.magnitude
        return Turn(cos=cos.float(), sin=sin.float(), rotary=self)


@dataclass(frozen=True, kw_only=True)
class Turn:
    """The rotation of T positions; `cos` and `sin` are f32 [T, 1, W / 2]."""

    cos: Tensor
    sin: Tensor
    rotary: Rotary

    @property
    def num_values(self) -> int:
        """The values of a head that rotate: its first."""
        return 2 * self.cos.shape[-1]

    def apply(self, x_THW: Tensor) -> Tensor:
        if self.num_values < x_THW.shape[-1]:
            rest_THW = x_THW[..., self.num_values :]
            return torch.cat([self.apply(x_THW[..., : self.num_values]), rest_THW], dim=-1)
        if self.rotary.is_adjacent:
            first, second = x_THW[..., 0::2], x_THW[..., 1::2]
        else:
            first, second = x_THW.chunk(2, dim=-1)
        turned = (first * self.cos - second * self.sin, first * self.sin + second * self.cos)
        if self.rotary.is_adjacent:
            return torch.stack(turned, dim=-1).flatten(-2)
        return torch.cat(turned, dim=-1)


@dataclass(frozen=True)
class Places:
    """Where the tokens of a pass are in the cache of a GPU, as its kernels take it; the sequence's
    table only if the cache is in blocks."""

    position_T: Tensor
    sequence_T: Tensor | None = None
    table_SN: Tensor | None = None


class Turns:
    """The rotations of positions start .. start + count - 1, made once for each rotary embedding,
    and their places in the cache, made once for each GPU and table unless `places` has them."""

    def __init__(
        self,
        start: int,
        count: int,
        places: Mapping[tuple[torch.device, BlockTable], Places] | None = None,
    ) -> None:
        self._start, self._count = start, count
        self._made: dict[int, Turn] = {}  # by the id of the rotary embedding
        self._places = dict(places or {})

    def of(self, rotary: Rotary | None) -> Turn | None:
        if rotary is None:
            return None
        if id(rotary) not in self._made:  # the turn keeps its rotary embedding, so ids stay unique
            self._made[id(rotary)] = rotary.turn(self._start, self._count)
        return self._made[id(rotary)]

    def places(self, table: BlockTable, sequence: int, device: torch.device) -> Places:
        """The places of the positions of a sequence by this table."""
        key = device, table
        if key not in self._places:
            self._places[key] = self._placed(table, sequence, device)
        return self._places[key]

    def _placed(self, table: BlockTable, sequence: int, device: torch.device) -> Places:
        stop = self._start + self._count
        position_T = torch.arange(self._start, stop, device=device)
        if table.is_whole:
            return Places(position_T)
        sequence_T = torch.zeros(self._count, dtype=torch.int32, device=device)
        block_N = table.blocks(sequence, stop).to(torch.int32)
        return Places(position_T, sequence_T, block_N[None].to(device))


class RotaryStruct(Structure):
    _fields_ = [
        ("frequency", c_void_p),
        ("magnitude", c_double),
        ("head_width", c_int64),
        ("is_adjacent", c_int32),
        ("unused", c_int32),
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
