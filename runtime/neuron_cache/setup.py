"""Sets up a neuron cache: its policy, its first neurons, and the checks of model and plan."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.artifacts.split_file import Split
from hotsplit.costs.part_bytes import layer_bytes
from hotsplit.errors import HotsplitError
from hotsplit.model.modes import Mode, computes_all
from hotsplit.options.engine_config import OwnPolicy
from hotsplit.options.neuron_cache import OFF, CacheOptions, Off
from hotsplit.runtime.kernels.cpu import library
from hotsplit.runtime.model.layers import Weights
from hotsplit.runtime.neuron_cache.neuron_cache import NeuronCache, Policy
from hotsplit.runtime.neuron_cache.policy import CachePolicy
from hotsplit.runtime.neuron_cache.residency import Residency
from hotsplit.runtime.neuron_cache.slots import JoinedSlots


@dataclass(frozen=True, kw_only=True)
class CacheSetup:
    """`policy_of` creates the policy from the neurons in each layer's slots, in order (none if a
    layer has no slots), and the number of neurons of a layer. The policy decides on at most
    `most_rows` swaps per step. copy_bytes_per_s: the rate to which copies are slowed down, to
    imitate a link where slots are in main memory too."""

    policy_of: Callable[[Sequence[np.ndarray], int], Policy]
    most_rows: int
    copy_bytes_per_s: float | None = None

    @classmethod
    def of(cls, options: CacheOptions, plan: Split | None) -> "CacheSetup":
        """The setup for a plan with a neuron cache. The default most_rows is reduced to the plan's
        if that is less. Raises HotsplitError without such a plan, and if a most_rows other than
        the default exceeds the plan's."""
        planned = None if plan is None else plan.cache
        if planned is None:
            raise HotsplitError(
                "the neuron cache needs a plan that has room for it: make one with hotsplit solve"
                " --neuron-cache on and give it with --split"
            )
        is_asked = options.most_rows != CacheOptions().most_rows
        if is_asked and options.most_rows > planned.most_rows:
            raise HotsplitError(
                f"most_rows={options.most_rows}, but the plan has room for {planned.most_rows} rows a"
                f" step; run hotsplit solve with --neuron-cache most_rows={options.most_rows}"
            )
        most_rows = min(options.most_rows, planned.most_rows)

        def policy_of(resident_LN: Sequence[np.ndarray], num_neurons: int) -> Policy:
            assert planned.frequency_LF.shape == (len(resident_LN), num_neurons)
            limited = replace(options, most_rows=most_rows)
            return CachePolicy(resident_LN, planned.frequency_LF, planned.costs, limited)

        return cls(policy_of=policy_of, most_rows=most_rows)

    def cache(
        self, weights: Weights, resident_LN: Sequence[np.ndarray], *, is_joined: bool
    ) -> NeuronCache:
        """The cache for loaded weights. If `is_joined`, its slots are rows of the weights;
        otherwise the decode step attaches them."""
        num_neurons = weights.spec.most_neurons
        residency = Residency(resident_LN, num_neurons)
        policy = self.policy_of(resident_LN, num_neurons)
        cache = NeuronCache(policy, residency, self.most_rows)
        if is_joined:
            blocks = {
                layer: weights.layers[layer].ffn.blocks[0]
                for layer, ids in enumerate(resident_LN)
                if len(ids)
            }
            cache.use(JoinedSlots(blocks, residency, self.copy_bytes_per_s))
        return cache

    def check(self, model: ModelFile, plan: Split | None, mode: Mode, *, is_resident: bool) -> None:
        """Raises HotsplitError for a model, mode or memory that the cache does not support."""
        if computes_all(mode):
            raise HotsplitError(
                f"{model.path}: mode dense reads every neuron for every token, so a neuron cache has"
                " nothing to follow; use mode exact or predicted, or leave --neuron-cache out"
            )
        if plan is not None and plan.cache is not None and mode != plan.mode:
            raise HotsplitError(
                f"{model.path}: the plan and its neuron cache are for mode {plan.mode}, and the mode is"
                f" {mode}; leave --mode out, or run hotsplit solve with --mode {mode}"
            )
        if not is_resident:
            why = (
                "the weights stay in the file; leave is_resident out, or free some memory, or turn the"
                " cache off (--neuron-cache off)"
                if library.is_available()
                else "the C++ kernels are not built; run make build"
            )
            raise HotsplitError(
                f"{model.path}: the neuron cache keeps weights in memory, and {why}"
            )


def setup_of(
    asked: CacheOptions | OwnPolicy | Off | None, plan: Split | None, mode: Mode
) -> CacheSetup | None:
    """The requested setup; None: no cache. By default, a plan's cache is used if the mode is the
    plan's."""
    if asked is None and plan is not None and plan.cache is not None and mode == plan.mode:
        return CacheSetup.of(CacheOptions(), plan)
    if asked is None or asked == OFF:
        return None
    if isinstance(asked, CacheOptions):
        return CacheSetup.of(asked, plan)
    assert isinstance(asked, CacheSetup), asked
    return asked


def first_residents(model: ModelFile, plan: Split | None) -> tuple[np.ndarray, ...]:
    """The neurons in each layer's slots at the start: the plan's hot ones; none in layers that are
    not divided. Raises HotsplitError without a plan, and if no layer is divided."""
    if plan is None:
        raise HotsplitError(
            "the neuron cache needs a plan, whose hot neurons it starts from: make one with"
            " hotsplit solve and give it with --split"
        )
    numbers = [layer.neurons.number for layer in model.spec.layers]
    is_divided = [0 < len(ids) < n for ids, n in zip(plan.hot, numbers, strict=True)]
    if not any(is_divided):
        raise HotsplitError(
            "the plan divides no layer's neurons, so there is nothing to cache: leave"
            " --neuron-cache out, or run hotsplit solve with another budget"
        )
    return tuple(
        ids.astype(np.int32) if divided else np.zeros(0, np.int32)
        for ids, divided in zip(plan.hot, is_divided, strict=True)
    )


def slot_bytes(model: ModelFile, resident_LN: Sequence[np.ndarray]) -> int:
    """Bytes of the slots if they are in main memory, in addition to all neurons."""
    return sum(len(ids) * layer_bytes(model, i).neuron for i, ids in enumerate(resident_LN))
