"""The sampler chain, from logits to a token: the samplers in order, and the draw.

It follows llama.cpp's chain (common/sampling.cpp): mask, logit bias, the samplers in the order of
the options, adaptive-p last (with Mirostat: temperature and Mirostat instead), and a draw from the
remaining candidates. Drawing and accepting a token change state, `distribution` does not: accepting
updates Mirostat's mu and adaptive-p's mean, and draws the random number that decides whether XTC
applies to the next token."""

import math
import random
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from hotsplit.errors import HotsplitError
from hotsplit.options.generation_options import SamplingOptions
from hotsplit.runtime.generate import samplers
from hotsplit.runtime.generate.candidates import (
    Candidates,
    all_ids,
    allowed_ids,
    largest,
    nan_error,
    nothing_error,
    possible,
)
from hotsplit.runtime.generate.dry import Breakers, BreakersOf, dry

# These always keep the token with the largest logit (the lowest id among equal logits).
_KEEP_LARGEST = ("top_n_sigma", "top_k", "top_p", "min_p")


class SamplerChain:
    """A chain of samplers. Its draws depend only on the options, the seed, and the logits,
    histories and masks seen so far.

    `dry_breakers` is the result of dry.dry_breakers for the options' breakers. `history` is all
    tokens before the one to draw, including the prompt."""

    def __init__(
        self, options: SamplingOptions, vocab_size: int, dry_breakers: Breakers | None = None
    ) -> None:
        for token_id, _ in options.logit_bias:
            if token_id >= vocab_size:
                raise HotsplitError(
                    f"logit_bias has token {token_id}; the model's tokens are 0 to {vocab_size - 1}"
                )
        self.options, self.vocab_size = options, vocab_size
        self.steps = active_samplers(options, vocab_size)
        if "dry" in self.steps and options.dry_sequence_breakers and dry_breakers is None:
            raise HotsplitError(
                "DRY is on and its sequence breakers have no tokens: pass dry_breakers (from"
                " dry.dry_breakers), or leave dry_sequence_breakers empty"
            )
        self._breakers = dry_breakers or {}
        self._ids_V = all_ids(vocab_size)
        self._is_argmax = (
            is_greedy(options) and self.steps == ("temperature",) and not options.logit_bias
        )
        # Python's generator takes abs(seed), which would make -1 and 1 the same.
        self._random = random.Random(None if options.seed is None else options.seed % (1 << 64))
        self._coin = self._random.random()
        self._mu = 2 * options.mirostat_ent
        self._drawn = samplers.DrawnMean.start(options.adaptive_target, options.adaptive_decay)

    def sample(self, logits_V: Tensor, history: Sequence[int], mask_V: Tensor | None = None) -> int:
        """Draws and accepts a token; returns its id. Raises HotsplitError as `distribution`
        does."""
        if self._is_argmax:
            return self._argmax(logits_V, mask_V)
        candidates = self.distribution(logits_V, history, mask_V)
        sums_A = np.cumsum(candidates.probability_A)
        index = int(np.searchsorted(sums_A, self._random.random() * sums_A[-1], side="right"))
        token_id = int(candidates.ids_A[index])
        self.accept(token_id, candidates)
        return token_id

    def distribution(
        self, logits_V: Tensor, history: Sequence[int], mask_V: Tensor | None = None
    ) -> Candidates:
        """The candidates from which the next token is drawn, after all samplers.

        Changes no state. Raises HotsplitError for NaN, and if no token can be drawn: all logits
        are -inf, or all of those that the mask, bool [V], allows."""
        if self._is_argmax:
            return Candidates(np.array([self._argmax(logits_V, mask_V)]), np.zeros(1), True)
        candidates = self._candidates(logits_V, mask_V)
        for name in self.steps:
            candidates = self._step(name, candidates, history)
        return candidates

    def accept(self, token_id: int, candidates: Candidates) -> None:
        """Advances by a token drawn from `candidates`, the current distribution.

        `sample` calls it; callers that draw from the distribution themselves must call it too."""
        if "xtc" in self.steps:
            self._coin = self._random.random()
        if self.options.mirostat:
            surprise = -math.log2(candidates.probability_of(token_id))
            self._mu -= self.options.mirostat_lr * (surprise - self.options.mirostat_ent)
        if candidates.origin is not None:
            self._drawn = self._drawn.after(candidates.origin.probability_of(token_id))

    def logprobs(
        self, logits_V: Tensor, count: int, chosen: int | None = None
    ) -> list[tuple[int, float]]:
        """(token, its natural log probability) of the model's `count` most probable tokens, before
        mask, bias and samplers, most probable first; then of `chosen`, unless it is among them,
        -inf if it cannot be drawn. Raises as `distribution` does."""
        candidates = possible(self._ids_V, self._array(logits_V))
        logits_A, ids_A = candidates.logits_A, candidates.ids_A
        highest = logits_A.max()
        log_sum = float(highest) + float(np.log(np.exp(logits_A - highest).sum(dtype=np.float64)))
        index = largest(logits_A, count) if count > 0 else np.zeros(0, np.int64)
        if chosen is not None and chosen not in ids_A[index]:
            index = np.append(index, np.flatnonzero(ids_A == chosen))
        found = [(int(ids_A[i]), float(logits_A[i]) - log_sum) for i in index]
        if chosen is not None and chosen not in ids_A:
            found.append((chosen, -np.inf))
        return found

    def _step(self, name: str, c: Candidates, history: Sequence[int]) -> Candidates:
        o = self.options
        match name:
            case "penalties":
                return samplers.penalties(
                    c,
                    history,
                    last_n=o.repeat_last_n,
                    repeat=o.repeat_penalty,
                    frequency=o.frequency_penalty,
                    presence=o.presence_penalty,
                )
            case "dry":
                return dry(
                    c,
                    history,
                    multiplier=o.dry_multiplier,
                    base=o.dry_base,
                    allowed_length=o.dry_allowed_length,
                    last_n=o.dry_penalty_last_n,
                    breakers=self._breakers,
                )
            case "top_n_sigma":
                return samplers.top_n_sigma(c, o.top_n_sigma)
            case "top_k":
                return samplers.top_k(c, o.top_k)
            case "typ_p":
                return samplers.typical_p(c, o.typ_p, o.min_keep)
            case "top_p":
                return samplers.top_p(c, o.top_p, o.min_keep)
            case "min_p":
                return samplers.min_p(c, o.min_p, o.min_keep)
            case "xtc":
                is_applied = self._coin < o.xtc_probability
                return samplers.xtc(c, o.xtc_threshold, o.min_keep) if is_applied else c
            case "temperature":
                spread = 0.0 if o.mirostat else o.dynatemp_range
                return samplers.dynamic_temperature(c, o.temperature, spread, o.dynatemp_exponent)
            case "adaptive_p":
                return samplers.adaptive_p(c, o.adaptive_target, self._drawn)
            case "mirostat_1":
                return samplers.mirostat_1(c, self._mu, self.vocab_size)
            case "mirostat_2":
                return samplers.mirostat_2(c, self._mu)
        raise AssertionError(name)

    def _array(self, logits_V: Tensor) -> np.ndarray:
        """The logits as float32 on the CPU, without a copy if they already are."""
        assert logits_V.shape == (self.vocab_size,), (logits_V.shape, self.vocab_size)
        return np.ascontiguousarray(logits_V.float().numpy(force=True))

    def _candidates(self, logits_V: Tensor, mask_V: Tensor | None) -> Candidates:
        """Applies mask and logit bias. No bias brings back a token that the mask excludes."""
        array_V, ids_A = self._array(logits_V), self._ids_V
        if mask_V is None and not self.options.logit_bias:
            return possible(ids_A, array_V)
        if np.isnan(array_V.max()):
            raise nan_error()
        if mask_V is not None:
            ids_A = allowed_ids(mask_V, self.vocab_size)
            array_V = array_V[ids_A]
        if not len(ids_A):
            raise nothing_error()
        return samplers.logit_bias(Candidates(ids_A, array_V, False), self.options.logit_bias)

    def _argmax(self, logits_V: Tensor, mask_V: Tensor | None) -> int:
        """The id of the largest logit. numpy's argmax returns the first NaN if there is one, so
        checking for NaN needs no pass of its own."""
        array_V = self._array(logits_V)
        found = int(array_V.argmax())
        if np.isnan(array_V[found]):
            raise nan_error()
        if mask_V is not None:
            ids_A = allowed_ids(mask_V, self.vocab_size)
            if not len(ids_A):
                raise nothing_error()
            found = int(ids_A[array_V[ids_A].argmax()])
        if array_V[found] == -np.inf:
            raise nothing_error()
        return found


def chain_of(sampling: SamplingOptions, breakers_of: BreakersOf, vocab_size: int) -> SamplerChain:
    """Builds the chain. Raises HotsplitError for a bias on a token that the model lacks."""
    breakers = None
    if sampling.dry_multiplier and sampling.dry_sequence_breakers:
        breakers = breakers_of(sampling.dry_sequence_breakers)
    return SamplerChain(sampling, vocab_size, breakers)


def active_samplers(options: SamplingOptions, vocab_size: int) -> tuple[str, ...]:
    """Names of the samplers; with Mirostat, only temperature and Mirostat, as in llama.cpp.

    If the temperature leaves one token, the samplers after it are dropped, and so are those
    directly before it that always keep that token."""
    if options.mirostat:
        names = ["temperature", f"mirostat_{options.mirostat}"]
    else:
        names = [name for name in options.samplers if name != "adaptive_p"]
        names += ["adaptive_p"] * ("adaptive_p" in options.samplers)
    names = [name for name in names if not is_off(name, options, vocab_size)]
    if is_greedy(options) and "temperature" in names:
        names = names[: names.index("temperature")]
        while names and names[-1] in _KEEP_LARGEST:
            names.pop()
        names.append("temperature")
    return tuple(names)


def is_greedy(options: SamplingOptions) -> bool:
    """True if the temperature, when it is among the samplers, leaves only the largest logit."""
    return options.temperature <= 0 and (options.dynatemp_range == 0 or options.mirostat != 0)


def is_off(name: str, options: SamplingOptions, vocab_size: int) -> bool:
    """True if this sampler returns its input unchanged with these options."""
    o = options
    return {
        "penalties": o.repeat_last_n == 0
        or (o.repeat_penalty, o.presence_penalty, o.frequency_penalty) == (1, 0, 0),
        "dry": o.dry_multiplier == 0 or o.dry_penalty_last_n == 0,
        "top_n_sigma": o.top_n_sigma <= 0,
        "top_k": not 0 < o.top_k < vocab_size,
        "typ_p": o.typ_p == 1,
        "top_p": o.top_p == 1,
        "min_p": o.min_p == 0,
        "xtc": o.xtc_probability == 0 or o.xtc_threshold > 0.5,
        "temperature": o.temperature == 1 and (o.dynatemp_range == 0 or o.mirostat != 0),
        "adaptive_p": o.adaptive_target < 0,
        "mirostat_1": False,
        "mirostat_2": False,
    }[name]
