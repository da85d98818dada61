"""Computes the seconds of a policy's steps from its hits, misses and copies and from CacheCosts.

Letters: T tokens, L layers."""

from dataclasses import dataclass

import numpy as np

from hotsplit.options.neuron_cache import CacheCosts


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A policy's hits and copies at each step."""

    hits_TL: np.ndarray  # neurons read that were in slots
    copied_TL: np.ndarray  # neurons copied while the step ran
    is_critical: bool = False  # misses are copied to the hot side before they are computed there
    num_copies_T: np.ndarray | None = None  # transfers, each with a fixed time; None: at most one

    @property
    def num_copied(self) -> int:
        return int(self.copied_TL.sum())


def seconds_T(costs: CacheCosts, read_TL: np.ndarray, outcome: Outcome) -> np.ndarray:
    """Seconds of each step.

    Copies run concurrently with a step, which waits for them at its end; gathering uses the CPU's
    idle time first. Critical copies begin when the neurons to read are known (after the gates of
    cold neurons in mode exact, after a round trip otherwise); all neurons are then computed on the
    hot side."""
    hits_TL, copied_TL = outcome.hits_TL, outcome.copied_TL
    copies_T = (copied_TL.any(axis=1)) * 1 if outcome.num_copies_T is None else outcome.num_copies_T
    link_T = copied_TL @ costs.copy_row_s_L + copies_T * costs.copy_s
    if outcome.is_critical:
        known_TL = np.maximum(costs.hot_s_L, costs.cold_s_L) + read_TL * costs.hot_row_s_L
        return costs.rest_s + known_TL.sum(axis=1) + link_T
    hot_TL = costs.hot_s_L + hits_TL * costs.hot_row_s_L
    cold_TL = costs.cold_s_L + (read_TL - hits_TL) * costs.cold_row_s_L
    step_T = costs.rest_s + np.maximum(hot_TL, cold_TL).sum(axis=1)
    spare_T = np.maximum(0.0, step_T - cold_TL.sum(axis=1))
    gather_T = copied_TL @ costs.gather_row_s_L
    return np.maximum(step_T + np.maximum(0.0, gather_T - spare_T), link_T)
