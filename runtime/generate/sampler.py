"""From logits to a token: greedy, or drawn at a temperature.

Temperature as in llama.cpp's chain: at or below zero the largest logit is taken."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from sparkinfer.errors import SparkinferError

# That torch's generator takes: signed numbers of 64 bits and unsigned ones.
_SEEDS = range(-(1 << 63), 1 << 64)


class Sampler:
    """Draws are a function of the seed and the logits seen; without a seed they differ."""

    def __init__(self, temperature: float, seed: int | None) -> None:
        if not math.isfinite(temperature):
            raise SparkinferError(f"temperature is {temperature}, wanted a number")
        if seed is not None and not _SEEDS.start <= seed < _SEEDS.stop:
            raise SparkinferError(f"seed is {seed}, wanted a number of 64 bits, say 0")
        self.temperature = temperature
        self.generator = torch.Generator()
        if seed is None:
            self.generator.seed()
        else:
            self.generator.manual_seed(seed)

    def sample(
        self, logits_V: Tensor, history: Sequence[int] = (), mask_V: Tensor | None = None
    ) -> int:
        """A token id. Raises SparkinferError where the model gave NaN."""
        if torch.isnan(logits_V).any():
            raise SparkinferError("the model gave NaN logits; convert its checkpoint again")
        if self.temperature <= 0:
            return int(logits_V.argmax())
        probability_V = torch.softmax(logits_V.double() / self.temperature, dim=0)
        return int(torch.multinomial(probability_V, 1, generator=self.generator))

    def logprobs(self, logits_V: Tensor, count: int) -> list[tuple[int, float]]:
        top = torch.topk(torch.log_softmax(logits_V.double(), 0), count)
        return list(zip(top.indices.tolist(), top.values.tolist(), strict=True))
