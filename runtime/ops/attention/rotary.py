"""Rotary embeddings, as a struct for C++ too, and the places of a prompt's tokens in a GPU's cache.

Letters: T tokens, W head width, S sequences, N blocks of a sequence."""

from ctypes import Array, Structure, c_double, c_int32, c_int64, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from hotsplit.model.rope import Rotary as RotarySpec
from hotsplit.runtime.ops.structs import Structs, members


@dataclass(frozen=True, kw_only=True)
class Rotary:
    """Rotates pairs of a head's values by position times frequency (Su et al. 2021).

    The values of a pair are adjacent or half a head apart. For adjacent pairs, which llama.cpp uses
    for llama models, `convert` permutes the rows of q and k."""

    frequency_W: Tensor  # f64 [W / 2]
    is_adjacent: bool
    magnitude: float = 1.0  # factor of cos and sin; 1 except for YaRN and longrope
    ahead: int = 0  # positions that are added to a row's

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


class RotaryStruct(Structure):
    _fields_ = [
        ("frequency", c_void_p),
        ("magnitude", c_double),
        ("head_width", c_int64),
        *members(c_int32, "is_adjacent ahead"),
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
                ahead=rotary.ahead,
            )
            for rotary in self.each
        ]
        return structs.array(RotaryStruct, found)
