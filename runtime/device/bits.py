"""Packs one bit per neuron, in the layout of predictors: neuron j is bit j % 32 of word j // 32.

Letters: F neurons, B words of 32 bits."""

import torch
from torch import Tensor
from torch.nn import functional


def pack_bits(is_set_F: Tensor) -> Tensor:
    """Packs bool [..., F] into int32 [..., ceil(F / 32)]; bits past F are 0."""
    padded = functional.pad(is_set_F.int(), (0, -is_set_F.shape[-1] % 32)).unflatten(-1, (-1, 32))
    place = torch.arange(32, device=is_set_F.device, dtype=torch.int32)
    return (padded << place).sum(dim=-1).to(torch.int32)


def unpack_bits(named_B: Tensor) -> Tensor:
    """Unpacks int32 [B] to bool [32 B]."""
    return (named_B[:, None] >> torch.arange(32, device=named_B.device) & 1).bool().flatten()
