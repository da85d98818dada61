"""Checks a plan against the files it was made from, in plain numpy, neuron by neuron.

It is independent of how plans are found: it shares with the solver only the classes of the files,
with the rates that they give, and `budget` and `kernel_counts` of `hotsplit`, since bytes and
kernels must be the runtime's. The times are those in the docstring of `hotsplit.solver.problem`,
implemented a second time."""

from collections.abc import Sequence

import numpy as np

from hotsplit.artifacts.cache_plan import CachePlan
from hotsplit.artifacts.machine_file import Gpu, Machine
from hotsplit.artifacts.model_file import ModelFile
from hotsplit.artifacts.profile_file import Profile
from hotsplit.artifacts.split_file import Split
from hotsplit.costs.kernel_counts import ALL_GATES_KERNELS, HEAD_KERNELS, HOT_KERNELS, dense_kernels
from hotsplit.costs.part_bytes import (
    down_kind,
    head_bytes,
    is_dense,
    is_predictor,
    kv_read,
    layer_bytes,
)
from hotsplit.errors import HotsplitError
from hotsplit.model.modes import computes_all, runs_predictors

# For a sum taken in another order: f64 with up to millions of terms of one sign.
TOLERANCE = 1e-9


def verify(split: Split, *, model: ModelFile, profile: Profile, machine: Machine) -> None:
    """Raises HotsplitError if the plan is of another model than the files, if it exceeds a
    budget, if its bytes or its seconds are wrong, if a layer has too few hot neurons, if they are
    not listed hottest first, ties by id, or if its neuron cache contradicts it."""
    split.validate()
    split.check_against(model, model.path)
    if profile.model_id != split.model_id:
        raise HotsplitError("the plan is wrong: the profile is of another model")
    gpus, cpu = split.items_of_gpus(model)
    for number, items in enumerate(gpus):
        used, limit = sum(items.values()), split.budgets[number]
        if used > limit:
            raise HotsplitError(
                f"the plan is wrong: {used:,} bytes on GPU {number} for a budget of {limit:,}"
            )
    if split.host_budget_bytes and sum(cpu.values()) > split.host_budget_bytes:
        raise HotsplitError(
            f"the plan is wrong: {sum(cpu.values()):,} bytes of main memory for a budget of"
            f" {split.host_budget_bytes:,}"
        )
    for layer, ids in enumerate(split.hot):
        if not np.array_equal(ids, ids[np.lexsort((ids, -_counts(model, profile, layer)[ids]))]):
            raise HotsplitError(f"the plan is wrong: layer {layer} is not listed hottest first")
    seconds = plan_seconds(split, model=model, profile=profile, machine=machine)
    if not abs(seconds - split.objective_s) <= TOLERANCE * seconds:
        raise HotsplitError(
            f"the plan is wrong: it takes {seconds:.9g} s a token, but says {split.objective_s:.9g}"
        )
    if split.cache is not None:
        _check_cache(split, split.cache, model, profile)


def _check_cache(split: Split, cache: CachePlan, model: ModelFile, profile: Profile) -> None:
    """Checks that the cache's initial frequencies are the profile's, and that by the cache's costs
    a token that reads as many neurons as the profile expects takes the plan's seconds; of a
    mixture, that the recorded tokens do on average."""
    seconds, costs = cache.costs.rest_s, cache.costs
    for layer, ids in enumerate(split.hot):
        if split.num_experts:
            seconds += _cached_experts_seconds(split, cache, model, profile, layer)
            continue
        named_F, fired_F = _shares(split, model, profile, layer)
        read_F = named_F if runs_predictors(split.mode) else fired_F
        if not np.allclose(cache.frequency[layer], read_F, rtol=1e-6, atol=0):
            raise HotsplitError(
                f"the plan is wrong: the cache's frequencies of layer {layer} are not the profile's"
            )
        hot = read_F[ids].sum()
        hot_s = costs.hot_s_L[layer] + costs.hot_row_s_L[layer] * hot
        cold_s = costs.cold_s_L[layer] + costs.cold_row_s_L[layer] * (read_F.sum() - hot)
        seconds += max(hot_s, cold_s)
    if not abs(seconds - split.objective_s) <= TOLERANCE * seconds:
        raise HotsplitError(
            f"the plan is wrong: a token takes {seconds:.9g} s by the cache's times,"
            f" {split.objective_s:.9g} by the plan"
        )


def _cached_experts_seconds(
    split: Split, cache: CachePlan, model: ModelFile, profile: Profile, layer: int
) -> float:
    """Seconds of a layer's experts by the cache's costs, which are 0 where nothing is swapped."""
    assert profile.routing_LTK is not None
    costs, id_TK = cache.costs, profile.routing_LTK[layer]
    has_experts = model.spec.layers[layer].route is not None
    share_E = np.zeros(len(cache.frequency[layer]))
    if has_experts:
        share_E += _counts(model, profile, layer) / len(id_TK)
    if not np.allclose(cache.frequency[layer], share_E, rtol=1e-6, atol=0):
        raise HotsplitError(
            f"the plan is wrong: the cache's frequencies of layer {layer} are not the profile's"
        )
    hot_T = np.isin(id_TK, split.hot[layer]).sum(axis=1) * has_experts
    hot_s_T = costs.hot_s_L[layer] + costs.hot_row_s_L[layer] * hot_T
    cold_T = (id_TK.shape[1] - hot_T) * has_experts
    cold_s_T = costs.cold_s_L[layer] + costs.cold_row_s_L[layer] * cold_T
    return float(np.maximum(hot_s_T, cold_s_T).mean())


def plan_seconds(split: Split, *, model: ModelFile, profile: Profile, machine: Machine) -> float:
    """Expected seconds per token of a plan. Raises HotsplitError if a layer has too few hot
    neurons to be worth their kernels and a hand-over."""
    home = split.home or (0,) * (len(split.hot) + 1)
    vocab = model.spec.vocab_size
    total = machine.costs.token_s.median + vocab * machine.costs.logit_s.median
    total += _outside_seconds(model, machine) + _use_seconds(split, machine, home)
    if split.head_on_gpu:
        gpu = machine.gpus[home[-1]]
        total += _kernels_seconds(gpu, HEAD_KERNELS, head_bytes(model))
        total += 4 * vocab / _copy_rate(gpu)
    else:
        kind = model.tensors[model.head_name].kind
        total += head_bytes(model) / machine.cpu_rate(kind)
    for layer, ids in enumerate(split.hot):
        if model.spec.layers[layer].route is not None:
            total += _dense_seconds(split, model, machine, layer, home[layer])
            total += _experts_seconds(split, model, profile, machine, layer, home[layer])
            continue
        if not model.spec.layers[layer].neurons.number:
            total += _dense_seconds(split, model, machine, layer, home[layer])
            continue
        touched_F, cpu_s_F = _neurons(split, model, profile, machine, layer)
        is_hot_F = np.zeros(len(touched_F), bool)
        is_hot_F[ids] = True
        places = {split.dense_on_gpu[layer], *np.unique(is_hot_F).tolist()}
        total += _dense_seconds(split, model, machine, layer, home[layer])
        hot_s, cold_s = 0.0, cpu_s_F[~is_hot_F].sum()
        if len(places) > 1 or len(ids):
            gpu = machine.gpus[home[layer]]
            kernels_s = HOT_KERNELS * gpu.kernel_s.median
            _check_minimum(layer, len(ids), cpu_s_F, kernels_s + gpu.hand_over_s.median)
            sizes = layer_bytes(model, layer)
            read = touched_F[is_hot_F].sum()
            share = touched_F.sum() / len(touched_F) / sizes.neuron
            if model.spec.layers[layer].neurons.needs_all_gates:  # whole; every up is read
                silent = len(touched_F) - _shares(split, model, profile, layer)[1].sum()
                share += silent * sizes.up_row / len(touched_F) / sizes.neuron
                read += silent * sizes.up_row if len(ids) else 0.0
                kernels_s += ALL_GATES_KERNELS * gpu.kernel_s.median
            hot_s = read / gpu.neurons_rate(share)
            hot_s += kernels_s if len(ids) else 0.0
            cold_s += gpu.hand_over_s.median if len(places) > 1 else 0.0
        total += max(hot_s, cold_s)
    return float(total)


def _experts_seconds(
    split: Split, model: ModelFile, profile: Profile, machine: Machine, layer: int, home: int
) -> float:
    """Seconds of a layer's experts: the mean over recorded tokens of the slower side."""
    tensors = [e for n, e in model.layer_tensors[layer].items() if "_exps" in n and not is_dense(n)]
    num_experts = model.spec.layers[layer].neurons.num_experts
    cold_s = _expert_cpu_seconds(split, model, profile, machine, layer)
    id_TK, ids = profile.routing_LTK[layer], split.hot[layer]  # type: ignore[index]
    hot_T = np.isin(id_TK, ids).sum(axis=1)
    count_E = _counts(model, profile, layer)
    is_divided = len(ids) < num_experts if split.dense_on_gpu[layer] else len(ids) > 0
    drive_s_T = _drive_seconds(split, model, machine, layer, id_TK, cold_s)
    if not is_divided and not len(ids):
        return float(np.maximum(id_TK.shape[1] * cold_s, drive_s_T).mean())
    gpu = machine.gpus[home]
    kernels_s, hand_over_s = HOT_KERNELS * gpu.kernel_s.median, gpu.hand_over_s.median
    _check_minimum(layer, len(ids), count_E / len(id_TK) * cold_s, kernels_s + hand_over_s)
    num_bytes = sum(e.num_bytes for e in tensors) / num_experts
    hot_s_T = hot_T * num_bytes / gpu.neurons_rate(1.0) + (kernels_s if len(ids) else 0.0)
    cold_s_T = (id_TK.shape[1] - hot_T) * cold_s + (hand_over_s if is_divided else 0.0)
    drive_s_T += (drive_s_T > 0) * (hand_over_s if is_divided else 0.0)
    return float(np.maximum(np.maximum(hot_s_T, cold_s_T), drive_s_T).mean())


def _drive_seconds(
    split: Split, model: ModelFile, machine: Machine, layer: int, id_TK: np.ndarray, cold_s: float
) -> np.ndarray:
    """Seconds that each recorded token reads experts of a layer from the drive, f64 [T]."""
    there = split.resident_experts[layer] if split.resident_experts else None
    if there is None:
        return np.zeros(len(id_TK))
    drive = machine.drive_at(model.path)
    if drive is None:
        raise HotsplitError("the plan is wrong: experts on a drive that was not measured")
    read_s = cold_s
    for name, entry in model.layer_tensors[layer].items():
        if "_exps" in name and not is_dense(name):
            num_bytes = entry.num_bytes / model.spec.layers[layer].neurons.num_experts
            reads = drive.best_reads(num_bytes)
            read_s += num_bytes / (1e9 * reads.gb_per_s.median)
            read_s += num_bytes * reads.cpu_s_per_gb / (1e9 * machine.num_threads)
    missing_T = (~np.isin(id_TK, [*split.hot[layer], *there])).sum(axis=1)
    return missing_T * read_s


def _expert_cpu_seconds(
    split: Split, model: ModelFile, profile: Profile, machine: Machine, layer: int
) -> float:
    """Seconds of one expert on the CPU; in mode exact only neurons that fire are read after the
    matrix that decides."""
    neurons, share = model.spec.layers[layer].neurons, 1.0
    counts_LE = profile.expert_count_LE
    if not computes_all(split.mode) and counts_LE is not None and counts_LE[layer].sum():
        fired = profile.active_count_LF[layer].sum() / neurons.of_expert
        share = min(1.0, float(fired / counts_LE[layer].sum()))
    seconds = 0.0
    for name, entry in model.layer_tensors[layer].items():
        if "_exps" in name and not is_dense(name):
            read = 1.0 if neurons.gate_name in name else share
            seconds += read * entry.num_bytes / machine.cpu_rate(entry.kind, density=read)
    return seconds / neurons.num_experts


def _use_seconds(split: Split, machine: Machine, home: Sequence[int]) -> float:
    """For each GPU in use: its fixed seconds, and those of the runs on the CPU at home there."""
    total = 0.0
    for number in sorted(set(home)):
        layers = [layer for layer in range(len(split.hot)) if home[layer] == number]
        is_used = any(split.dense_on_gpu[n] or len(split.hot[n]) for n in layers)
        if not (is_used or (split.head_on_gpu and home[-1] == number)):
            continue
        total += machine.gpus[number].token_s.median
        is_after_cpu = False
        for layer in layers:
            if not split.dense_on_gpu[layer] and not is_after_cpu:
                total += machine.gpus[number].cpu_run_s.median
            is_after_cpu = not split.dense_on_gpu[layer]
    return total


def _kernels_seconds(gpu: Gpu, count: int, num_bytes: float) -> float:
    read_s = num_bytes / (1e9 * gpu.bandwidth_gb_per_s.median)
    return max(count * gpu.kernel_s.median, count * gpu.launch_s.median + read_s)


def _copy_rate(gpu: Gpu) -> float:
    return gpu.host_to_device_gb_per_s.median * 1e9


def _dense_seconds(
    split: Split, model: ModelFile, machine: Machine, layer: int, home: int
) -> float:
    """Seconds of a dense block: attention, the keys and values of half the context or a selection
    of them, and the predictor if it is run."""
    types, attention = split.cache_types(model), model.spec.layers[layer].attention
    read_kv = kv_read(model, layer, split.context_length, types)
    read = {
        name: entry
        for name, entry in model.layer_tensors[layer].items()
        if is_dense(name) or (is_predictor(name) and runs_predictors(split.mode))
    }
    is_predicted = runs_predictors(split.mode)
    if attention and split.dense_on_gpu[layer] and types.selection is not None:
        gpu, heads = machine.gpus[home], attention.num_heads + attention.num_kv_heads
        there = {n: e for n, e in read.items() if not n.startswith(("attn_q_norm", "attn_k_norm"))}
        kernels = dense_kernels(model, layer, has_predictor=is_predicted, has_cache=False)
        total = _kernels_seconds(gpu, kernels, sum(e.num_bytes for e in there.values()))
        total += gpu.hand_over_s.median
        total += 2 * 4 * heads * attention.head_dim / _copy_rate(gpu)
        return total + read_kv / (1e9 * machine.costs.kv_gb_per_s.median)
    if split.dense_on_gpu[layer]:
        kernels = dense_kernels(model, layer, has_predictor=is_predicted)
        num_bytes = read_kv + sum(e.num_bytes for e in read.values())
        return _kernels_seconds(machine.gpus[home], kernels, num_bytes)
    total = machine.costs.layer_s["exact" if split.mode == "dense" else split.mode].median
    total += read_kv / (1e9 * machine.costs.kv_gb_per_s.median)
    for entry in read.values():
        total += entry.num_bytes / machine.cpu_rate(entry.kind)
    return total


def _neurons(
    split: Split, model: ModelFile, profile: Profile, machine: Machine, layer: int
) -> tuple[np.ndarray, np.ndarray]:
    """Expected bytes that a token touches of each neuron of a layer, and their seconds on the CPU:
    the seconds of all of them, divided in proportion to bytes; by id, f64 [F]."""
    sizes, tensors = layer_bytes(model, layer), model.layer_tensors[layer]
    gate_F, fired_F = _shares(split, model, profile, layer)
    touched_F = gate_F * sizes.gate_row + fired_F * (sizes.up_row + sizes.down_row)
    gate_kind = tensors[f"{model.spec.layers[layer].neurons.gate_name}.weight"].kind
    seconds = gate_F.sum() * sizes.gate_row
    seconds /= machine.cpu_rate(gate_kind, density=gate_F.mean())
    up_kind = tensors["ffn_up.weight"].kind
    fired = fired_F.mean()
    seconds += fired_F.sum() * sizes.up_row / machine.cpu_rate(up_kind, density=fired)
    seconds += (
        fired_F.sum() * sizes.down_row / machine.cpu_rate(down_kind(model, layer), density=fired)
    )
    total = touched_F.sum()
    return touched_F, touched_F * (seconds / total if total > 0 else 0.0)


def _shares(
    split: Split, model: ModelFile, profile: Profile, layer: int
) -> tuple[np.ndarray, np.ndarray]:
    """How often each neuron's gate row is read, and its other rows; by id, f64 [F]."""
    number = model.spec.layers[layer].neurons.number
    fired_F = profile.active_count_LF[layer, :number] / profile.num_tokens
    if computes_all(split.mode):
        return np.ones_like(fired_F), np.ones_like(fired_F)
    if not runs_predictors(split.mode):
        return np.ones_like(fired_F), fired_F
    named_per_fired = 1.0
    if model.predictor is not None and model.predictor.density_L and fired_F.any():
        named_per_fired = model.predictor.density_L[layer] / fired_F.mean()
    return np.minimum(1.0, fired_F * named_per_fired), fired_F


def _outside_seconds(model: ModelFile, machine: Machine) -> float:
    """Seconds of operations outside the layers, on the CPU; of a table, a token reads a row."""
    spec, num_bytes, kinds = model.spec, 0.0, list[str]()
    for block in (*spec.first, *spec.last):
        for name, shape in block.shapes(spec.hidden_size).items():
            entry, is_table = model.tensors[name], name in spec.tables
            num_bytes += entry.num_bytes / (shape[0] if is_table else 1)
            kinds += [entry.kind] if len(shape) > 1 and not is_table else []
    return num_bytes / machine.cpu_rate((*kinds, "f32")[0]) if num_bytes else 0.0


def _check_minimum(layer: int, num_hot: int, cpu_s_F: np.ndarray, fixed_s: float) -> None:
    """Checks that a layer has no hot neurons, all, or at least C_l."""
    if num_hot in (0, len(cpu_s_F)):
        return
    saved_s = np.sort(cpu_s_F)[::-1][:num_hot].sum()
    if saved_s <= fixed_s * (1 - TOLERANCE):
        raise HotsplitError(
            f"the plan is wrong: layer {layer} has {num_hot} hot neurons, which save at most"
            f" {saved_s:.3g} s and cost kernels and a hand-over of {fixed_s:.3g} s"
        )


def _counts(model: ModelFile, profile: Profile, layer: int) -> np.ndarray:
    """What the order of a layer's hot neurons, or experts, follows."""
    if model.spec.layers[layer].route is None:
        return profile.active_count_LF[layer]
    assert profile.routing_LTK is not None
    count_E = np.zeros(model.spec.layers[layer].neurons.num_experts, np.int64)
    np.add.at(count_E, profile.routing_LTK[layer], 1)
    return count_E
