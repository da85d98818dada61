"""Sets up a neuron cache: its policy, its first neurons, and the checks of model and plan."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.artifacts.split_file import Split
from hotsplit.costs.cache_bytes import cached_layers
from hotsplit.costs.part_bytes import most_units, placed_units
from hotsplit.errors import HotsplitError
from hotsplit.model.modes import Mode, computes_all
from hotsplit.options.engine_config import OwnPolicy
from hotsplit.options.neuron_cache import OFF, CacheOptions, Off, Units
from hotsplit.runtime.kernels.cpu import library
from hotsplit.runtime.model.layers import Weights
from hotsplit.runtime.neuron_cache.expert_parts import ExpertLayer
from hotsplit.runtime.neuron_cache.neuron_cache import NeuronCache, Policy
from hotsplit.runtime.neuron_cache.policy import CachePolicy
from hotsplit.runtime.neuron_cache.residency import Residency
from hotsplit.runtime.neuron_cache.slots import JoinedSlots
from hotsplit.runtime.weights.neuron_block import by_role


@dataclass(frozen=True, kw_only=True)
class CacheSetup:
    """`policy_of` creates the policy from the neurons in each layer's slots, in order (none if a
    layer has no slots), and the number of neurons of a layer. The policy decides on at most
    `most_rows` swaps per step. copy_bytes_per_s: the rate to which copies are slowed down, to
    imitate a link where slots are in main memory too."""

    policy_of: Callable[[Sequence[np.ndarray], int], Policy]
    most_rows: int
    copy_bytes_per_s: float | None = None
    units: Units = "neurons"

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
        most_rows = min(most_rows, planned.most_rows)
        units = plan.units

        def policy_of(resident_LN: Sequence[np.ndarray], num_neurons: int) -> Policy:
            assert planned.frequency_LF.shape == (len(resident_LN), num_neurons)
            limited = replace(options, most_rows=most_rows)
            frequency_LF, costs = planned.frequency_LF, planned.costs
            return CachePolicy(resident_LN, frequency_LF, costs, limited, units)

        return cls(policy_of=policy_of, most_rows=most_rows, units=units)

    def cache(
        self, weights: Weights, resident_LN: Sequence[np.ndarray], *, is_joined: bool
    ) -> NeuronCache:
        """The cache for loaded weights. If `is_joined`, its slots are rows of the weights;
        otherwise the decode step attaches them."""
        num_neurons = most_units(weights.spec)
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
        if (self.units == "experts") != model.spec.has_experts or (
            self.units == "experts" and not computes_all(mode)
        ):
            raise HotsplitError(
                f"{model.path}: a neuron cache of {self.units} in mode {mode} does not run: experts are"
                " swapped in mode dense, of mixtures, and neurons of other models"
            )
        if self.units == "neurons":
            model.refuse_chosen("neuron caches are", "leave --neuron-cache out")
        if computes_all(mode) and self.units == "neurons":
            raise HotsplitError(
                f"{model.path}: mode dense reads every neuron for every token, so a neuron cache has"
                " nothing to follow; use mode exact or predicted, or leave --neuron-cache out"
            )
        if plan is not None and plan.cache is not None and mode != plan.mode:
            raise HotsplitError(
                f"{model.path}: the plan and its neuron cache are for mode {plan.mode}, and the mode is"
                f" {mode}; leave --mode out, or run hotsplit solve with --mode {mode}"
            )
        if plan is not None and len(plan.budgets) > 1:
            raise HotsplitError(
                f"{model.path}: the neuron cache is on one GPU, and the plan has {len(plan.budgets)}; give a"
                " plan for one, or leave --neuron-cache out"
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
    """The neurons or experts in each layer's slots at the start: the plan's hot ones; none in layers
    that a cache does not serve. Raises HotsplitError without a plan, and if it serves none."""
    if plan is None:
        raise HotsplitError(
            "the neuron cache needs a plan, whose hot neurons it starts from: make one with"
            " hotsplit solve and give it with --split"
        )
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
        hot, cold = by_role(weights.layers[layer].ffn.experts) if len(ids) else (None, None)
        if hot is None or cold is None or ExpertLayer(hot=hot, cold=cold).can_be_copied:
            continue
        return "experts in main memory are not pinned, so copies would stop the steps"
    return ""


def slot_bytes(model: ModelFile, resident_LN: Sequence[np.ndarray]) -> int:
    """Bytes of the slots if they are in main memory, in addition to all neurons."""
    return sum(len(ids) * placed_units(model, i)[1] for i, ids in enumerate(resident_LN))
