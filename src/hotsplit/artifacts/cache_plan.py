"""The section of a plan for the online neuron cache: the most neurons that it swaps in a step, the
times on which it bases decisions, and the frequencies that its scores start from.

Specified in docs/formats.md (model.split.gguf). The options of the cache are in
hotsplit.options.neuron_cache_options, its memory is counted by hotsplit.costs.cache_bytes, and the
times are computed by solver/cache_costs.py.

Letters: L layers, F neurons of a layer."""

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from annotated_types import Ge, Le

from hotsplit.errors import HotsplitError
from hotsplit.files.declared import read_declared
from hotsplit.files.gguf_file import TensorEntry, Value, array_entry
from hotsplit.options.neuron_cache_options import CacheCosts

MOST_ROWS = 1 << 16
MOST_S = 1e30  # upper limit of any time, so that computations stay finite
_TIMES = ("hot_s", "hot_row_s", "cold_s", "cold_row_s", "copy_row_s", "gather_row_s")


@dataclass(frozen=True, kw_only=True)
class _Keys:
    """The section's keys, after "cache."."""

    most_rows: Annotated[int, Ge(1), Le(MOST_ROWS)]
    rest_s: float
    copy_s: float


@dataclass(frozen=True, kw_only=True)
class CachePlan:
    """The section. Raises HotsplitError for values that no cache can have. most_rows: most neurons
    swapped in a step. frequency: the share of tokens that read each neuron according to the
    profile, f32 [F] for each layer, by neuron id."""

    most_rows: int
    costs: CacheCosts
    frequency: tuple[np.ndarray, ...]

    def __post_init__(self) -> None:
        if not 1 <= self.most_rows <= MOST_ROWS:
            raise HotsplitError(
                f"cache.most_rows is {self.most_rows}, wanted a whole number from 1 to {MOST_ROWS}"
            )
        for name, value in vars(self.costs).items():
            if np.max(value, initial=0.0) > MOST_S:
                raise HotsplitError(f"{name} of the cache is a time above {MOST_S:g} s")
        if len(self.frequency) != self.costs.num_layers:
            raise HotsplitError(
                f"the cache has frequencies for {len(self.frequency)} layers and times for"
                f" {self.costs.num_layers}"
            )
        for layer, frequency_F in enumerate(self.frequency):
            is_row = frequency_F.dtype == np.float32 and frequency_F.ndim == 1
            if not is_row or len(frequency_F) != len(self.frequency[0]):
                raise HotsplitError(
                    f"layer {layer}: the cache's frequencies are {frequency_F.dtype}"
                    f" {list(frequency_F.shape)}, wanted f32 [{self.frequency[0].size}]"
                )
            if not ((frequency_F >= 0) & (frequency_F <= 1)).all():  # false for NaN
                raise HotsplitError(f"layer {layer}: frequencies of the cache are not within 0..1")

    @property
    def num_layers(self) -> int:
        return len(self.frequency)

    @property
    def frequency_LF(self) -> np.ndarray:
        """f32 [L, F]."""
        return np.stack(self.frequency)

    def keys(self) -> dict[str, Value]:
        """The section's keys, without the prefix that all keys of a plan's file have."""
        return {
            "cache.most_rows": np.uint32(self.most_rows),
            "cache.rest_s": np.float64(self.costs.rest_s),
            "cache.copy_s": np.float64(self.costs.copy_s),
        }

    def tensors(self) -> dict[str, TensorEntry]:
        times = {
            f"cache.{name}": array_entry(getattr(self.costs, f"{name}_L"), "f64") for name in _TIMES
        }
        frequencies = {
            f"blk.{layer}.ffn_frequency": array_entry(frequency_F, "f32")
            for layer, frequency_F in enumerate(self.frequency)
        }
        return times | frequencies

    @classmethod
    def take(cls, keys: object, tensors: dict[str, TensorEntry], num_layers: int) -> "CachePlan":
        """Reads the section from its keys and takes its tensors out of `tensors`. Raises
        HotsplitError for invalid values and for a missing tensor."""
        read = read_declared(_Keys, keys, "cache")
        times = {f"{name}_L": _f64(_taken(tensors, f"cache.{name}"), name) for name in _TIMES}
        costs = CacheCosts(**times, rest_s=read.rest_s, copy_s=read.copy_s)
        if costs.num_layers != num_layers:
            raise HotsplitError(
                f"the cache has times for {costs.num_layers} layers, wanted {num_layers}"
            )
        return cls(
            most_rows=read.most_rows,
            costs=costs,
            frequency=tuple(
                np.array(_taken(tensors, f"blk.{layer}.ffn_frequency").read())
                for layer in range(num_layers)
            ),
        )


def _taken(tensors: dict[str, TensorEntry], name: str) -> TensorEntry:
    if name not in tensors:
        raise HotsplitError(f"tensor {name!r} of the neuron cache is missing")
    return tensors.pop(name)


def _f64(entry: TensorEntry, name: str) -> np.ndarray:
    if entry.kind != "f64" or len(entry.shape) != 1:
        raise HotsplitError(
            f"cache.{name} is {entry.kind} {list(entry.shape)}, wanted f64, one number per layer"
        )
    return np.array(entry.read())
