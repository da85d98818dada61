"""The seconds of a policy's hits, misses and copies, computed with the times of CacheCosts.

Letters: T tokens, L layers."""

from dataclasses import dataclass

import numpy as np

from sparkinfer.neuron_cache import CacheCosts


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a policy did at each step."""

    hits_TL: np.ndarray  # neurons read that were in slots
    copied_TL: np.ndarray  # neurons copied while the step ran
    is_critical: bool = False  # misses are copied before they are computed, on the fast side
    num_copies_T: np.ndarray | None = None  # with a fixed time each; None: one if any

    @property
    def num_copied(self) -> int:
        return int(self.copied_TL.sum())


def seconds_T(costs: CacheCosts, read_TL: np.ndarray, outcome: Outcome) -> np.ndarray:
    """Seconds of each step.

    Copies run beside a step, which waits for them at its end; gathering takes the CPU's spare time
    first. Critical copies begin when it is known what is read (after the gates of cold neurons in mode
    exact, after a round trip otherwise), and all neurons are then computed on the fast side."""
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
