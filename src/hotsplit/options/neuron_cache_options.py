"""Options of the online neuron cache, and the times on which it bases decisions.

Hot neurons, or experts of a mixture, are in slots of the GPU's memory; all neurons or experts of
their layers are in main memory too. Below, a neuron may be an expert. After each step the cache may
replace neurons in slots with cold ones. It decides by the neurons
that the steps read and by times measured beforehand, never by a clock, so that the same steps give
the same swaps every time.

The policy is in runtime/neuron_cache/native/policy.cpp; its slow reference implementation is
tests/cache/test_cache_policy.py.

Letters: L layers."""

from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, Literal, Self

import numpy as np
from annotated_types import Interval

from hotsplit.errors import HotsplitError
from hotsplit.options.kinds import Share, check_fields, parse_settings

DEFAULT = "on"
Off = Literal["off"]
Units = Literal["neurons", "experts"]  # what a slot holds
OFF: Off = "off"


# Of options that depend on the units.
_DEFAULTS: dict[Units, dict[str, Any]] = {
    "neurons": {"margin": 0.03, "stay": 100.0, "most_rows": 64, "visited": 0.0625},
    "experts": {"margin": 0.06, "stay": 50.0, "most_rows": 8, "visited": 1.0},
}


@dataclass(frozen=True, kw_only=True)
class CacheOptions:
    """How the cache estimates and when it swaps. Raises HotsplitError for values out of range.

    A neuron's score S is the frequency at which tokens read it, as a moving average:
    S <- S + r (A - S), where A is 1 if the token reads it, else 0, and r is 1 - decay, or larger
    during the first tokens: 1 / (prior_tokens + tokens so far), so that the scores start as the
    plan's frequencies and move to the text's own. A second average, with `burst_decay`, reacts
    faster; neurons are compared by S plus `burst_weight` times its difference from S. A swap needs
    an advantage of `margin` (a frequency) on top of the cost of the copy, which is spread over the
    next `stay` tokens."""

    decay: Annotated[float, Interval(ge=0, le=0.999999)] = 0.99
    burst_decay: Annotated[float, Interval(ge=0, le=0.999999)] = 0.9
    burst_weight: Share = 0.2
    prior_tokens: Annotated[float, Interval(ge=1, le=1e9)] = 32.0
    margin: Share | None = None  # None: 0.03, and 0.06 of experts
    stay: Annotated[float, Interval(ge=1, le=1e9)] | None = None  # None: 100, and 50 of experts
    # Most neurons swapped in a step, which determines the size of staging. None: 64, 8 experts.
    most_rows: Annotated[int, Interval(ge=1, le=1 << 16)] | None = None
    # Share of the layers that a step considers, in turn; see `of`.
    visited: Annotated[float, Interval(ge=1e-6, le=1)] | None = None
    start_gain: Share = 0.005  # swapping begins when it would save this share of a step
    is_always_on: bool = False  # for tests: never stops swapping

    def __post_init__(self) -> None:
        check_fields(self)

    def of(self, units: Units) -> Self:
        """The options with defaults for these units. A layer has few experts, each of which takes
        long to copy: all layers are considered in each step, and a swap needs a larger advantage.
        Chosen on routings apart from those that it is judged by (benchmarks/expert_cache.py)."""
        defaults = _DEFAULTS[units]
        own = {name: getattr(self, name) for name in defaults if getattr(self, name) is not None}
        return replace(self, **defaults | own)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parses "on", which means the defaults, or e.g. "decay=0.995,margin=0.05"."""
        return cls(**parse_settings(cls, text, DEFAULT))

    def __str__(self) -> str:
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        return ",".join(f"{name}={value:g}" for name, value in given.items() if value is not None)


@dataclass(frozen=True, kw_only=True)
class CacheCosts:
    """The times in seconds on which the cache bases decisions: of a step's layers (f64 [L]) and of
    swaps. A "row" is one neuron: if hot or cold, the part of it that a step reads (in mode exact up
    and down, since all gates are read anyway); in a swap, all of its rows.

    A layer's neurons take max(hot_s + hot_row_s * hot rows read, cold_s + cold_row_s * cold rows
    read), and a step takes the sum over its layers plus `rest_s`. A swap takes gather_row_s of the
    CPU's time, which is free while the CPU waits for the GPU (of experts, which are not gathered,
    of the time between steps), and copy_row_s of the link's, which is free while the step runs;
    `copy_s` is the link's fixed cost of a step's swaps. Swaps are made only as long as they fit
    into 0.9 of both of these free times (ROOM in policy.cpp)."""

    hot_s_L: np.ndarray
    hot_row_s_L: np.ndarray
    cold_s_L: np.ndarray
    cold_row_s_L: np.ndarray
    copy_row_s_L: np.ndarray
    gather_row_s_L: np.ndarray
    rest_s: float
    copy_s: float

    def __post_init__(self) -> None:
        arrays = {name: value for name, value in vars(self).items() if name.endswith("_L")}
        if len({array.shape for array in arrays.values()}) != 1 or self.hot_s_L.ndim != 1:
            raise HotsplitError("the cache's times do not cover the same number of layers")
        for name, value in vars(self).items():
            if not np.isfinite(value).all() or np.any(np.asarray(value) < 0):
                raise HotsplitError(
                    f"{name} of the cache contains a time that is negative or not finite"
                )

    @property
    def num_layers(self) -> int:
        return len(self.hot_s_L)
