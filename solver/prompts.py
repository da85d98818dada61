"""The rates by which a prompt's experts on the CPU are computed there or streamed to the GPU
(runtime/prefill/expert_stream.py)."""

from hotsplit.costs.part_bytes import layer_units
from hotsplit.options.prompt_rates import PromptRates
from hotsplit.solver.inputs import Inputs


def prompt_rates(inputs: Inputs) -> PromptRates | None:
    """Means over the bytes of all experts, with the first GPU's link; None for a model without
    experts, without a GPU, and if the machine file has no rate of a prompt's products."""
    found = {"cpu_s": 0.0, "token_s": 0.0}
    total = 0.0
    for index, layer in enumerate(inputs.model.spec.layers):
        if layer.route is None:
            continue
        for kind, size in layer_units(inputs.model, index, layer.neurons.num_experts).items():
            seconds = inputs.machine.pass_seconds(kind)
            if seconds is None:
                return None
            for name, value in zip(found, seconds, strict=True):
                found[name] += value * size
            total += size
    if not total or not inputs.machine.gpus:
        return None
    gpu = inputs.machine.gpus[0]
    return PromptRates(
        **{name: value / total for name, value in found.items()},
        link_s=1e-9 / gpu.host_to_device_gb_per_s.median,
        staged_s=1e-9 / gpu.host_to_device_pageable_gb_per_s.median,
    )
