"""Adaptive-p: prefers tokens whose probability is near a target, and adjusts the target to the
tokens drawn.

llama.cpp pull request 17927, llama_sampler_init_adaptive_p. The state, which belongs to the chain,
is an exponentially decaying mean of the drawn tokens' probabilities before this sampler."""

from dataclasses import dataclass, replace

import numpy as np

from hotsplit.runtime.generate.candidates import Candidates

# llama.cpp's constants: quadratic near the target, linear far from it.
_PEAK_LOGIT, _SHARPNESS, _WIDTH = 5.0, 10.0, 0.3


@dataclass(frozen=True, kw_only=True)
class DrawnMean:
    """Sums of decay ** age * probability and of decay ** age over the drawn tokens."""

    weighted_sum: float
    weight: float
    decay: float

    @classmethod
    def start(cls, target: float, decay: float) -> "DrawnMean":
        """The state in which all earlier tokens had probability `target`."""
        return cls(weighted_sum=target / (1 - decay), weight=1 / (1 - decay), decay=decay)

    def after(self, probability: float) -> "DrawnMean":
        return replace(
            self,
            weighted_sum=probability + self.decay * self.weighted_sum,
            weight=1 + self.decay * self.weight,
        )


def adaptive_p(candidates: Candidates, target: float, drawn: DrawnMean) -> Candidates:
    """logit_i = 5 - 10 d ** 2 / (1 + d), d = abs(p_i - t) / 0.3, t = 2 target - mean, clipped
    to [0, 1].

    The result's `origin` is `candidates`, whose probabilities enter the mean."""
    aim = min(max(2 * target - drawn.weighted_sum / drawn.weight, 0.0), 1.0)
    distance_A = np.abs(candidates.probability_A - aim) / _WIDTH
    logits_A = _PEAK_LOGIT - _SHARPNESS * distance_A**2 / (1 + distance_A)
    by_id = np.argsort(candidates.ids_A) if candidates.is_sorted else slice(None)
    return Candidates(candidates.ids_A[by_id], logits_A[by_id], False, origin=candidates)
