"""Random problems of the solver, and their best plan by trying every one."""

import math
from dataclasses import replace
from itertools import combinations_with_replacement, product

import numpy as np
from models import make_inputs, make_machine, make_model, make_profile, make_sizes

from hotsplit.artifacts.machine_file import Machine
from hotsplit.artifacts.model_file import ModelFile
from hotsplit.costs import part_bytes
from hotsplit.costs.kernel_counts import HOT_KERNELS
from hotsplit.model.modes import Mode
from hotsplit.solver.inputs import Inputs
from hotsplit.solver.problem import Problem

CLOSE = 1e-9  # relative: f64 sums in another order
HIGHS = 1e-6  # relative: HiGHS's own tolerance
CONTEXT = 8  # of random models
WORKSPACE = 500
SLOW = {"cpu_gb_per_s": 0.005, "gpu_gb_per_s": 0.5}


def random_gpu(random: np.random.Generator, cpu: float) -> dict[str, float]:
    """A kernel, a hand-over, a run on the CPU and a use of the GPU take 1 ns to 4 us, and the link
    copies at a fifth or twice the CPU's rate, so that each of these decides some plans."""
    return {
        "gpu_gb_per_s": cpu * random.choice([0.7, 1.5, 3, 20]),
        "link_gb_per_s": cpu * random.choice([0.2, 2]),
        "launch_s": random.choice([1e-9, 5e-7, 2e-6]),
        "kernel_s": random.choice([1e-9, 1e-6, 3e-6]),
        "hand_over_s": random.choice([1e-9, 1e-6, 4e-6]),
        "cpu_run_s": random.choice([1e-9, 1e-6, 4e-6]),
        "use_s": random.choice([1e-9, 2e-6]),
        "gpu_chosen_share": random.choice([1.0, 0.4]),
    }


def whole_plan(model: ModelFile, context_length: int, **options) -> dict[str, int]:
    """The GPU's bytes with everything there."""
    num_layers = model.spec.num_layers
    return part_bytes.plan_bytes(
        model,
        context_length=context_length,
        num_hot=[model.spec.most_neurons] * num_layers,
        dense_on_gpu=[True] * num_layers,
        head_on_gpu=True,
        **options,
    )[0][0]


def random_inputs(
    seed: int,
    num_gpus: int = 1,
    mode: Mode | None = None,
    machine: Machine | None = None,
    num_neurons: int | None = None,
) -> Inputs:
    """A random model of one to three layers of a few neurons, a mode (by default each in turn), a
    machine whose CPU reads a whole neuron in 0.5 to 80 us, a budget for each GPU, and for odd seeds
    a tight main memory."""
    random = np.random.default_rng(1000 * num_gpus + seed)
    num_layers = int(random.integers(1, 4))
    num_neurons = num_neurons or int(random.integers(2, 6 if num_layers < 3 else 4))
    mode = mode or ("dense", "exact", "predicted")[seed % 3]
    is_predicted = mode == "predicted"
    shape = make_sizes(
        num_layers=num_layers,
        width=32,
        num_neurons=num_neurons,
        num_heads=2,
        num_kv_heads=1,
        head_width=16 if seed % 4 == 3 else 2,  # q8_0 needs rows of 32
        vocab_size=int(random.integers(4, 30)),
        context_length=CONTEXT,
    )
    model = make_model(
        sizes=shape,
        kind=("f32", "f16", "f16", "q8_0")[seed % 4],
        predictor_rank=2 * is_predicted,
        predictor_density=0.4 if is_predicted and seed % 2 else None,
    )
    cpu = 10 ** random.uniform(-2.3, -0.7)
    gpus = [make_machine(**random_gpu(random, cpu)).gpus[0] for _ in range(num_gpus)]
    own = make_machine(
        cpu_gb_per_s=cpu,
        chosen_share=random.choice([1.0, 0.6]),
        layer_s=random.choice([1e-9, 3e-6]),
        token_s=2e-6,
        logit_s=1e-8,
    )
    profile = make_profile(model, random.beta(0.5, 1.0, (num_layers, num_neurons)))
    whole = sum(whole_plan(model, CONTEXT).values())
    shares = [random.uniform(0.05, 0.999) for _ in range(num_gpus)]
    budgets = tuple(WORKSPACE + int(share * whole) for share in shares)
    host = whole + part_bytes.embedding_bytes(model) + WORKSPACE
    if seed % 2:
        host -= int(random.uniform(0.1, 0.7) * min(whole, sum(budgets)))
    return make_inputs(
        model,
        profile,
        machine or replace(own, gpus=tuple(gpus)),
        *budgets,
        workspace=WORKSPACE,
        host_budget=host,
        mode=mode,
    )


def layer_options(inputs: Inputs, layer: int, gpu_number: int):
    """(GPU bytes, seconds, whether the dense block is on the GPU, whether anything is) of every
    allowed placement of one layer, by the definition, in plain loops."""
    model, profile, machine, mode = inputs.model, inputs.profile, inputs.machine, inputs.mode
    sizes, gpu = part_bytes.layer_bytes(model, layer), machine.gpus[gpu_number]
    gpu_rate, cpu_rate = (
        gpu.bandwidth_gb_per_s.best * 1e9,
        max(f.best for f in machine.cpu_bandwidth_gb_per_s.values()) * 1e9,
    )
    kv = part_bytes.kv_bytes(model, 0, CONTEXT)
    fired = [count / profile.num_tokens for count in profile.active_count_LF[layer]]
    fired = [1.0] * len(fired) if mode == "dense" else fired
    gate, costs = [1.0] * len(fired), machine.cpu_costs
    if mode == "predicted":
        known = model.predictor.density_L
        factor = known[layer] / (sum(fired) / len(fired)) if known else 1.0
        gate = [min(1.0, a * factor) for a in fired]
    touched = [
        g * sizes.gate_row + a * (sizes.up_row + sizes.down_row)
        for g, a in zip(gate, fired, strict=True)
    ]
    all_s = 1e-9 / costs.all_rows_gb_per_s["f32"].best
    tenth_s = 1e-9 / costs.chosen_rows_gb_per_s["f32"].best

    def byte_s(density):  # all rows to a tenth of them: linear in the log of the share
        return all_s + (tenth_s - all_s) * min(1.0, max(0.0, -math.log10(density or 0.1)))

    gate_s, rest_s = byte_s(sum(gate) / len(gate)), byte_s(sum(fired) / len(fired))
    all_cold_s = sum(
        g * sizes.gate_row * gate_s + a * (sizes.up_row + sizes.down_row) * rest_s
        for g, a in zip(gate, fired, strict=True)
    )
    cold_rate = sum(touched) / all_cold_s if sum(touched) else cpu_rate
    row_bytes = sizes.gate_row + sizes.up_row + sizes.down_row
    way = min(1.0, -math.log10(max(0.1, sum(touched) / len(touched) / row_bytes)))
    hot_byte_s = 1 / gpu_rate + way * (1e-9 / gpu.chosen_rows_gb_per_s.best - 1 / gpu_rate)
    least, saved = len(fired), 0.0
    kernels_s = HOT_KERNELS * gpu.kernel_s.best
    for number, neuron in enumerate(sorted(touched, reverse=True), 1):
        saved += neuron / cold_rate
        if saved > kernels_s + gpu.hand_over_s.best:
            least = number
            break
    read = sizes.attention + kv / 2 + (sizes.predictor if mode == "predicted" else 0)
    # Llama: four products, two norms, three kernels around the attention, two of a predictor.
    kernels = 4 + 2 + 3 + (2 if mode == "predicted" else 0)
    options = []
    for on_gpu, *is_hot in product((False, True), repeat=1 + len(fired)):
        hot = [neuron for neuron, is_in in enumerate(is_hot) if is_in]
        if 0 < len(hot) < least:
            continue
        cold = set(range(len(fired))) - set(hot)
        devices = {on_gpu} | ({True} if hot else set()) | ({False} if cold else set())
        hot_s = sum(touched[j] for j in hot) * hot_byte_s + (kernels_s if hot else 0)
        cold_s = sum(touched[j] for j in cold) / cold_rate
        cold_s += gpu.hand_over_s.best if len(devices) == 2 else 0
        dense = sizes.attention + sizes.predictor + kv
        options.append(
            (
                dense * on_gpu + len(hot) * sizes.neuron,
                (
                    kernel_seconds(gpu, kernels, read)
                    if on_gpu
                    else read / cpu_rate + costs.layer_s["exact" if mode == "dense" else mode].best
                )
                + max(hot_s, cold_s),
                on_gpu,
                on_gpu or bool(hot),
            )
        )
    return np.array(options)


def head_options(model, machine, gpu_number):
    """The same for the head: a norm, a product, and the copy of the logits to the CPU."""
    head, gpu = part_bytes.head_bytes(model), machine.gpus[gpu_number]
    gpu_s = kernel_seconds(gpu, 2, head)
    gpu_s += 4 * model.spec.vocab_size / (gpu.host_to_device_gb_per_s.best * 1e9)
    cpu_s = head / (machine.cpu_costs.all_rows_gb_per_s["f32"].best * 1e9)
    return np.array([(0, cpu_s, True, False), (head, gpu_s, True, True)])  # begins no run


def kernel_seconds(gpu, count, num_bytes) -> float:
    read_s = num_bytes / (gpu.bandwidth_gb_per_s.best * 1e9)
    return max(count * gpu.kernel_s.best, count * gpu.launch_s.best + read_s)


def brute_force(inputs: Inputs, *, sides=None) -> float:
    """Fewest seconds per token over all homes and placements; infinite if none fits. `sides`:
    layers whose dense blocks are on the GPU or not, by number."""
    model, machine, num_gpus = inputs.model, inputs.machine, len(inputs.budgets)
    num_layers, num_neurons = model.spec.num_layers, model.spec.most_neurons
    options = {
        (layer, gpu): layer_options(inputs, layer, gpu)
        for layer in range(num_layers)
        for gpu in range(num_gpus)
    }
    for key, item in options.items():
        if sides and key[0] in sides:
            options[key] = item[item[:, 2] == sides[key[0]]]
    head, costs = part_bytes.head_bytes(model), machine.cpu_costs
    everything = sum(
        part_bytes.layer_bytes(model, layer).attention
        + part_bytes.layer_bytes(model, layer).predictor
        + part_bytes.kv_bytes(model, 0, CONTEXT)
        + num_neurons * part_bytes.layer_bytes(model, layer).neuron
        for layer in range(num_layers)
    )
    everything += head + part_bytes.embedding_bytes(model) + inputs.workspace
    best = np.inf
    for home in combinations_with_replacement(range(num_gpus), num_layers + 1):
        seconds = np.array([costs.token_s.best + model.spec.vocab_size * costs.logit_s.best])
        is_there, before = np.ones(1), home[0]
        runs_KN = [np.array([0]) for _ in range(num_gpus)]  # on the CPU, by home
        uses_KN = [np.array([0]) for _ in range(num_gpus)]
        held_KN = [np.array([0]) for _ in range(num_gpus)]
        items = [options[layer, home[layer]] for layer in range(num_layers)]
        items.append(head_options(model, machine, home[-1]))
        for gpu, item in zip(home, items, strict=True):
            # A run on the CPU begins unless the layer before is on the CPU too, with this home.
            begins = np.logical_and.outer((is_there == 1) | (gpu != before), item[:, 2] == 0)
            seconds = np.add.outer(seconds, item[:, 1]).ravel()
            is_there, before = np.add.outer(0 * is_there, item[:, 2]).ravel(), gpu
            for k in range(num_gpus):
                held_KN[k] = np.add.outer(held_KN[k], (k == gpu) * item[:, 0]).ravel()
                uses_KN[k] = np.logical_or.outer(uses_KN[k], (k == gpu) * item[:, 3]).ravel()
                runs_KN[k] = (runs_KN[k][:, None] + (k == gpu) * begins).ravel()
        for gpu, uses, runs in zip(machine.gpus, uses_KN, runs_KN, strict=False):
            seconds = seconds + uses * (gpu.token_s.best + runs * gpu.cpu_run_s.best)
        fits = everything - sum(held_KN) <= inputs.host_budget
        for held, limit in zip(held_KN, inputs.budgets, strict=True):
            fits &= (held == 0) | (held + inputs.workspace <= limit)
        best = min(best, seconds[fits].min(initial=np.inf))
    return float(best)


def by_hand(touched, **changes) -> Problem:
    """One layer. A touched byte takes 1 s on the CPU, 1/4 s on the GPU; a neuron holds 10 bytes.

    By default the kernels take 1/2 s, a hand-over 1/4 s, a run on the CPU and a use of the GPU 0 s.
    The dense block: 100 bytes, 20 s on the CPU, 5 s on the GPU. The head: 100 bytes, 10 s and 2 s.
    No workspace."""
    touched_LF = np.array([touched], np.float64)
    fields = {
        "order_LF": np.arange(len(touched), dtype=np.int32)[None],
        "touched_LF": touched_LF,
        "neuron_bytes_L": np.array([10]),
        "min_hot_L": np.array([1]),
        "dense_bytes_L": np.array([100]),
        "dense_gpu_s_L": np.array([5.0]),
        "dense_cpu_s_L": np.array([20.0]),
        "head_bytes": 100,
        "head_gpu_s": 2.0,
        "head_cpu_s": 10.0,
        "workspace_bytes": 0,
        "budget_bytes": 0,
        "gpu_s_per_byte": 0.25,
        "hot_s_per_byte_L": np.array([0.25]),
        "cpu_s_per_byte_L": np.array([1.0]),
        "kernels_s": 0.5,
        "hand_over_s": 0.25,
        "cpu_run_s": 0.0,
        "use_s": 0.0,
    }
    return Problem(**(fields | changes))
