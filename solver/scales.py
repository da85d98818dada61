"""A machine whose parts take other times: what its figures must be scaled by to explain what was
measured, and what a plan would gain by faster ones."""

from dataclasses import dataclass, replace
from typing import Any

from hotsplit.artifacts.machine_file import Figure, Machine


@dataclass(frozen=True, kw_only=True)
class Scales:
    """Factors of the seconds of what the CPU computes, of hand-overs, and of the GPU."""

    cpu: float = 1.0
    hand_over: float = 1.0
    gpu: float = 1.0


def scaled(machine: Machine, scales: Scales) -> Machine:
    """The machine with these seconds; no figure of it is then one that was measured."""

    def times(figure: Figure, factor: float) -> Figure:
        return figure if factor == 1 else Figure(best=figure.median * factor)

    gpu_factors = {
        "bandwidth_gb_per_s": 1 / scales.gpu,
        "chosen_rows_gb_per_s": 1 / scales.gpu,
        **dict.fromkeys(("launch_s", "kernel_s", "token_s"), scales.gpu),
        **dict.fromkeys(("hand_over_s", "cpu_run_s"), scales.hand_over),
    }
    gpus = []
    for gpu in machine.gpus:
        changed: dict[str, Any] = {
            name: times(gpu.figures[name], own) for name, own in gpu_factors.items()
        }
        gpus.append(replace(gpu, **changed))
    costs = machine.cpu_costs
    if costs is not None:
        by_type = {
            name: {kind: times(figure, own) for kind, figure in getattr(costs, name).items()}
            for name, own in {
                "all_rows_gb_per_s": 1 / scales.cpu,
                "chosen_rows_gb_per_s": 1 / scales.cpu,
                "layer_s": scales.cpu,
            }.items()
        }
        costs = replace(
            costs,
            kv_gb_per_s=times(costs.kv_gb_per_s, 1 / scales.cpu),
            token_s=times(costs.token_s, scales.cpu),
            logit_s=times(costs.logit_s, scales.cpu),
            **by_type,
        )
    return replace(machine, cpu_costs=costs, gpus=tuple(gpus))
