"""Decides which neurons are in the slots of the fast memory, based on the neurons that steps read.

The policy is written in C++ (native/policy.cpp); tests/cache/test_cache_policy.py defines it.

Letters: R tokens of a step, L layers, F neurons of a layer, N slots of a layer, W words of F
bits."""

import ctypes
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from hotsplit.options.neuron_cache_options import CacheCosts, CacheOptions, Units
from hotsplit.runtime.neuron_cache.native import policy_library


@dataclass(frozen=True, kw_only=True)
class CacheReport:
    """Statistics of a cache. Seconds are computed from its costs; `planned_` values are for slots
    that keep the plan's neurons."""

    num_steps: int
    steps_on: int
    num_starts: int  # times that swapping was switched on
    num_swaps: int
    hit_rate: float  # of the neurons read, in layers with some but not all in slots
    planned_hit_rate: float
    seconds: float
    planned_seconds: float

    @property
    def line(self) -> str:
        """One line for the user."""
        if not self.num_steps:
            return "neuron cache: no step"
        hits = f"hits {self.planned_hit_rate:.1%} by plan, {self.hit_rate:.1%} with the cache"
        if not self.num_swaps:
            return f"neuron cache: nothing was swapped; {hits}"
        saved = 1 - self.seconds / self.planned_seconds
        return (
            f"neuron cache: {hits}; {self.num_swaps:,} swaps, on for {self.steps_on} of"
            f" {self.num_steps} steps, {abs(saved):.1%} {'less' if saved >= 0 else 'more'} time by"
            " the plan's rates"
        )


class CachePolicy:
    """The scores, slots and decisions of one model. `step` is called after every step."""

    def __init__(
        self,
        resident_LN: Sequence[np.ndarray],
        frequency_LF: np.ndarray,
        costs: CacheCosts,
        options: CacheOptions,
        units: Units = "neurons",
    ) -> None:
        """`resident_LN`: the neurons in each layer's slots, in order; none if it has no slots.
        `frequency_LF`: the share of steps that read each neuron, from the profile."""
        num_layers, num_neurons = frequency_LF.shape
        own = asdict(options.of(units))
        assert len(resident_LN) == num_layers == costs.num_layers
        self._kept: list[object] = []  # what the struct points to
        layers = (policy_library.CacheLayerStruct * num_layers)()
        for index, resident_N in enumerate(resident_LN):
            layers[index] = _layer(index, resident_N, frequency_LF[index], costs, self._kept)
        self._swaps = np.zeros(max(1, num_layers * own["most_rows"]), policy_library.SWAP)
        pending = np.zeros(
            policy_library.MOST_PENDING * num_layers * -(-num_neurons // 32), np.uint32
        )
        self._kept += [layers, pending, self._swaps]
        self._struct = policy_library.CacheStruct(
            layer=layers,
            pending=pending.ctypes.data,
            swap=self._swaps.ctypes.data,
            num_layers=num_layers,
            num_neurons=num_neurons,
            num_visited=max(1, round(own.pop("visited") * num_layers)),
            rest_s=costs.rest_s,
            copy_s=costs.copy_s,
            are_experts=units == "experts",
            **own,
        )

    @property
    def shape(self) -> tuple[int, int]:
        """(L, W) of the bits of a token."""
        return self._struct.num_layers, -(-self._struct.num_neurons // 32)

    def step(self, bits_RLW: np.ndarray) -> np.ndarray:
        """Ends a step of R tokens: returns the swaps to make during the next step, as a view
        (fields layer, slot, in, out) that is valid until the next call. Earlier swaps count as
        done.

        bits_RLW: (u)int32, bit j % 32 of word j // 32 for neuron j."""
        policy_library.lib.hs_cache_step(self._struct, *self._checked(bits_RLW))
        return self._swaps[: self._struct.num_swaps]

    @property
    def learning(self) -> tuple[int, int]:
        """The addresses of hs_cache_learn (policy.h) and of its first argument, which is this
        object's."""
        function = ctypes.cast(policy_library.lib.hs_cache_learn, ctypes.c_void_p).value
        assert function is not None
        return function, ctypes.addressof(self._struct)

    def resident(self, layer: int) -> np.ndarray:
        """The neuron in each slot [N], a copy."""
        struct = self._struct.layer[layer]
        return np.frombuffer(ctypes.string_at(struct.id, 4 * struct.num_slots), np.int32)

    def hits_L(self) -> np.ndarray:
        """For each layer, neurons read from slots so far; 0 where all neurons have slots."""
        struct = self._struct
        return np.array([struct.layer[index].hits for index in range(struct.num_layers)])

    def report(self) -> CacheReport:
        struct = self._struct
        layers = [struct.layer[index] for index in range(struct.num_layers)]
        read = max(1, sum(layer.read for layer in layers))
        return CacheReport(
            num_steps=struct.num_steps,
            steps_on=struct.steps_on,
            num_starts=struct.num_starts,
            num_swaps=struct.total_swaps,
            hit_rate=sum(layer.hits for layer in layers) / read,
            planned_hit_rate=sum(layer.planned_hits for layer in layers) / read,
            seconds=struct.cached_s,
            planned_seconds=struct.planned_s,
        )

    def _checked(self, bits_RLW: np.ndarray) -> tuple[int, int]:
        is_right = bits_RLW.dtype in (np.int32, np.uint32) and bits_RLW.flags.c_contiguous
        assert is_right and bits_RLW.shape[1:] == self.shape, (bits_RLW.dtype, bits_RLW.shape)
        return bits_RLW.ctypes.data, len(bits_RLW)


def _layer(
    index: int,
    resident_N: np.ndarray,
    frequency_F: np.ndarray,
    costs: CacheCosts,
    kept: list[object],
) -> policy_library.CacheLayerStruct:
    num_neurons = len(frequency_F)
    score_F = np.pad(frequency_F.astype(np.float32), (0, -num_neurons % 32))
    slot_F = np.full(num_neurons, -1, np.int32)
    id_N = np.ascontiguousarray(resident_N, np.int32).copy()
    slot_F[id_N] = np.arange(len(id_N), dtype=np.int32)
    planned_W = packed(slot_F[None] >= 0)[0]
    arrays = {
        "score": score_F,
        "burst": score_F.copy(),
        "slot": slot_F,
        "id": id_N,
        "planned": planned_W,
        "resident": planned_W.copy(),
    }
    kept.extend(arrays.values())
    of_layers = {name: times_L for name, times_L in vars(costs).items() if name.endswith("_L")}
    times = {name.removesuffix("_L"): times_L[index] for name, times_L in of_layers.items()}
    return policy_library.CacheLayerStruct(
        **{name: array.ctypes.data for name, array in arrays.items()},
        num_slots=len(id_N),
        cold_share=1.0,
        **times,
    )


def packed(is_read_XF: np.ndarray) -> np.ndarray:
    """bool [X, F] as uint32 [X, W], bit j % 32 of word j // 32 for neuron j."""
    padding = -is_read_XF.shape[-1] % 32
    padded = np.pad(is_read_XF, [(0, 0)] * (is_read_XF.ndim - 1) + [(0, padding)])
    return np.packbits(padded, axis=-1, bitorder="little").view(np.uint32)
