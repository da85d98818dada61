"""What a plan could reach at best: the bytes of each side over what its memory can be read with.

As `sparkinfer.solver` prices a plan, but at the measured bandwidths and without anything that costs
time whatever its size: starts of kernels, copies, round trips, the runtime's own work. A layer takes
as long as the slower of its sides. What this module does not know: how the plan was made."""

from dataclasses import replace

from sparkinfer.budget import head_bytes, kv_bytes_per_layer, layer_bytes
from sparkinfer.machine_file import CpuCosts, Figure, Gpu, Machine
from sparkinfer.model_file import KINDS, ModelFile
from sparkinfer.profile_file import Profile
from sparkinfer.solver.verify import plan_seconds
from sparkinfer.split_file import Split

NO_TIME = Figure(best=1e-15)
AT_ONCE = Figure(best=1e15)


def limit_seconds(split: Split, *, model: ModelFile, profile: Profile, machine: Machine) -> float:
    """Seconds a token of a plan on a machine that does nothing but read."""
    return plan_seconds(split, model=model, profile=profile, machine=ideal(machine))


def dense_limit_seconds(model: ModelFile, machine: Machine, context_length: int) -> float:
    """The same of a model that is whole on the first GPU and reads all its neurons."""
    total = head_bytes(model)
    for layer in range(model.shape.num_layers):
        sizes = layer_bytes(model, layer)
        total += sizes.attention + model.shape.num_neurons * sizes.neuron
        total += kv_bytes_per_layer(model, context_length) // 2
    return total / (machine.gpus[0].bandwidth_gb_per_s.best * 1e9)


def ideal(machine: Machine) -> Machine:
    """The same bandwidths, of which all programs reach everything, and no time for anything else."""
    rate = Figure(best=machine.best_cpu_bandwidth_gb_per_s)
    costs = CpuCosts(
        all_rows_gb_per_s=dict.fromkeys(KINDS, rate),
        chosen_rows_gb_per_s=dict.fromkeys(KINDS, rate),
        kv_gb_per_s=rate,
        layer_s=dict.fromkeys(machine.costs.layer_s, NO_TIME),
        token_s=NO_TIME,
    )
    return replace(machine, cpu_costs=costs, gpus=tuple(map(_ideal_gpu, machine.gpus)))


def _ideal_gpu(gpu: Gpu) -> Gpu:
    return replace(
        gpu, copy_latency_s=NO_TIME, launch_s=NO_TIME, round_trip_s=NO_TIME,
        host_to_device_gb_per_s=AT_ONCE,
    )  # fmt: skip
