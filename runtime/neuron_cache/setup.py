"""Sets up a neuron cache: its policy, its first neurons, and the checks of model and plan."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.artifacts.split_file import Split
from hotsplit.costs.cache_bytes import cached_layers
from hotsplit.costs.part_bytes import most_units
from hotsplit.errors import HotsplitError
from hotsplit.model.modes import Mode
from hotsplit.model.spec import ModelSpec
from hotsplit.options.neuron_cache_options import OFF, CacheOptions, Off
from hotsplit.runtime.model.layers import Weights
from hotsplit.runtime.neuron_cache.cache_slots import Residency
from hotsplit.runtime.neuron_cache.expert_parts import ExpertLayer
from hotsplit.runtime.neuron_cache.neuron_cache import NeuronCache
from hotsplit.runtime.neuron_cache.policy import CachePolicy
from hotsplit.runtime.weights.expert_block import ExpertBlock
from hotsplit.runtime.weights.neuron_block import by_role


@dataclass(frozen=True, kw_only=True)
class CacheSetup:
    """`policy_of` creates the policy from the units in each layer's slots, in order (none if a
    layer has no slots), and the number of units of a layer. The policy decides on at most
    `most_rows` swaps per step."""

    policy_of: Callable[[Sequence[np.ndarray], int], CachePolicy]
    most_rows: int

    @classmethod
    def of(cls, options: CacheOptions, plan: Split | None) -> "CacheSetup":
        """The setup for a plan with a neuron cache. The default most_rows is reduced to the plan's
        if that is less. Raises HotsplitError without such a plan, and if a most_rows other than
        the default exceeds the plan's."""
        planned = None if plan is None else plan.cache
        if plan is None or planned is None:
            raise HotsplitError(
                "the neuron cache needs a plan that has room for it: make one with hotsplit solve"
                " --neuron-cache on and give it with --split"
            )
        most_rows = options.of(plan.units).most_rows
        assert most_rows is not None
        if options.most_rows is not None and most_rows > planned.most_rows:
            raise HotsplitError(
                f"most_rows={most_rows}, but the plan has room for {planned.most_rows} rows a"
                f" step; run hotsplit solve with --neuron-cache most_rows={most_rows}"
            )
        most_rows, units = min(most_rows, planned.most_rows), plan.units

        def policy_of(resident_LN: Sequence[np.ndarray], num_units: int) -> CachePolicy:
            assert planned.frequency_LF.shape == (len(resident_LN), num_units)
            limited = replace(options, most_rows=most_rows)
            frequency_LF, costs = planned.frequency_LF, planned.costs
            return CachePolicy(resident_LN, frequency_LF, costs, limited, units)

        return cls(policy_of=policy_of, most_rows=most_rows)

    def cache(self, spec: ModelSpec, resident_LN: Sequence[np.ndarray]) -> NeuronCache:
        """The cache, to which the decode step attaches slots."""
        num_units = most_units(spec)
        residency = Residency(resident_LN, num_units)
        return NeuronCache(self.policy_of(resident_LN, num_units), residency, self.most_rows)


def setup_of(asked: CacheOptions | Off | None, plan: Split | None, mode: Mode) -> CacheSetup | None:
    """The requested setup; None: no cache. By default, a plan's cache is used if the mode is the
    plan's. Raises HotsplitError as `CacheSetup.of` does, and for another mode than the plan's."""
    if asked is None and plan is not None and plan.cache is not None and mode == plan.mode:
        asked = CacheOptions()
    if asked is None or asked == OFF:
        return None
    assert isinstance(asked, CacheOptions)
    found = CacheSetup.of(asked, plan)
    if plan is not None and mode != plan.mode:
        raise HotsplitError(
            f"the plan and its neuron cache are for mode {plan.mode}, and the mode is {mode}; leave"
            f" --mode out, or run hotsplit solve with --mode {mode}"
        )
    return found


def first_residents(model: ModelFile, plan: Split) -> tuple[np.ndarray, ...]:
    """The units in each layer's slots at the start: the plan's hot ones; none in layers that a
    cache does not serve. Raises HotsplitError if it serves none."""
    is_cached_L = cached_layers(model, [len(ids) for ids in plan.hot], plan.dense_on_gpu)
    if not any(is_cached_L):
        raise HotsplitError(
            f"the plan divides no layer's {plan.units}, so there is nothing to cache: leave"
            " --neuron-cache out, or run hotsplit solve with another budget"
        )
    return tuple(
        ids.astype(np.int32) if is_cached else np.zeros(0, np.int32)
        for ids, is_cached in zip(plan.hot, is_cached_L, strict=True)
    )


def not_copied(weights: Weights, resident_LN: Sequence[np.ndarray]) -> str:
    """Why experts cannot be copied to slots beside a step; "" if they can."""
    for layer, ids in enumerate(resident_LN):
        hot, cold = by_role(weights.layers[layer].ffn.blocks) if len(ids) else (None, None)
        if not isinstance(hot, ExpertBlock) or not isinstance(cold, ExpertBlock):
            continue
        if not ExpertLayer(hot=hot, cold=cold).can_be_copied:
            return "experts in main memory are not pinned, so copies would stop the steps"
    return ""
