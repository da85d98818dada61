"""Penalties for recent tokens: repeat, frequency and presence. dry.py penalises repeated
sequences."""

from collections.abc import Sequence

import numpy as np

from hotsplit.runtime.generate.candidates import Candidates


def last_tokens(history: Sequence[int], last_n: int) -> np.ndarray:
    """The last n token ids, or all if n is -1."""
    kept = history if last_n < 0 else history[max(0, len(history) - last_n) :]
    return np.asarray(kept, np.int64)


def penalties(
    candidates: Candidates,
    history: Sequence[int],
    *,
    last_n: int,
    repeat: float,
    frequency: float,
    presence: float,
) -> Candidates:
    """Penalises a token that occurs c > 0 times among the last n: multiplies its logit by `repeat`
    if it is not positive, else divides it, then subtracts c * frequency + presence.

    Keskar et al. 2019 (arXiv:1909.05858) always divide, which would favour negative logits; the
    other two penalties are OpenAI's. llama_sampler_init_penalties."""
    ids, counts = np.unique(last_tokens(history, last_n), return_counts=True)
    positions, there = candidates.positions_of(ids)
    logits = candidates.logits_A[positions].astype(np.float64)
    logits = np.where(logits <= 0, logits * repeat, logits / repeat)
    return candidates.with_logits_at(positions, logits - counts[there] * frequency - presence)
