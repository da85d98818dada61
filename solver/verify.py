"""Checks a plan against the files it was made from, in plain numpy, neuron by neuron.

Independent of how plans are found: it shares `sparkinfer.budget` with the solver (the bytes must
be the runtime's) and nothing else. The times are those of `sparkinfer.solver.problem`'s docstring,
written a second time. What this module does not know: whether a better plan exists."""

import numpy as np

from sparkinfer.budget import (
    LayerBytes,
    head_bytes,
    kv_bytes_per_layer,
    layer_bytes,
    plan_bytes,
)
from sparkinfer.errors import SparkinferError
from sparkinfer.machine_file import Machine
from sparkinfer.model_file import ModelFile
from sparkinfer.profile_file import Profile
from sparkinfer.split_file import Split

# The same sum in another order: f64 with up to millions of terms of one sign.
TOLERANCE = 1e-9


def verify(split: Split, *, model: ModelFile, profile: Profile, machine: Machine) -> None:
    """Raises SparkinferError where the plan breaks its budget, its bytes or its seconds are wrong,
    a layer has too few hot neurons, or they are not listed hottest first, ties by id."""
    split.validate()
    split.check_against(model, model.path)
    if profile.model_id != split.model_id:
        raise SparkinferError("the plan is wrong: the profile is of another model")
    gpu, _ = plan_bytes(
        model,
        context_length=split.context_length,
        num_hot=[len(ids) for ids in split.hot],
        dense_on_gpu=split.dense_on_gpu,
        head_on_gpu=split.head_on_gpu,
    )
    if sum(gpu.values()) > split.vram_budget_bytes:
        raise SparkinferError(
            f"the plan is wrong: {sum(gpu.values()):,} GPU bytes for a budget of"
            f" {split.vram_budget_bytes:,}"
        )
    for layer, ids in enumerate(split.hot):
        _check_order(layer, ids, profile.active_count_LF[layer])
    seconds = plan_seconds(split, model=model, profile=profile, machine=machine)
    if not abs(seconds - split.objective_s) <= TOLERANCE * seconds:
        raise SparkinferError(
            f"the plan is wrong: it takes {seconds:.9g} s a token, it says {split.objective_s:.9g}"
        )


def plan_seconds(split: Split, *, model: ModelFile, profile: Profile, machine: Machine) -> float:
    """Expected seconds a token of a plan. Raises SparkinferError where a layer has too few hot
    neurons to be worth a launch and a round trip."""
    gpu = machine.gpus[0]
    gpu_rate = gpu.bandwidth_gb_per_s.best * 1e9
    cpu_rate = max(f.best for f in machine.cpu_bandwidth_gb_per_s.values()) * 1e9
    kv_read = kv_bytes_per_layer(model, split.context_length) / 2
    total = head_bytes(model) / (gpu_rate if split.head_on_gpu else cpu_rate)
    for layer, ids in enumerate(split.hot):
        sizes = layer_bytes(model, layer)
        touched_F = _touched(split, model, profile, layer, sizes)
        _check_minimum(
            layer, len(ids), touched_F / cpu_rate, gpu.launch_s.best + gpu.round_trip_s.best
        )
        is_hot_F = np.zeros(len(touched_F), bool)
        is_hot_F[ids] = True
        dense_read = sizes.attention + kv_read
        if split.mode == "predicted":
            dense_read += sizes.predictor
        is_dense_on_gpu = split.dense_on_gpu[layer]
        total += dense_read / (gpu_rate if is_dense_on_gpu else cpu_rate)
        places = {is_dense_on_gpu, *np.unique(is_hot_F).tolist()}
        hot_s = touched_F[is_hot_F].sum() / gpu_rate + (gpu.launch_s.best if len(ids) else 0.0)
        cold_s = touched_F[~is_hot_F].sum() / cpu_rate
        total += max(hot_s, cold_s + (gpu.round_trip_s.best if len(places) > 1 else 0.0))
    return float(total)


def _touched(
    split: Split, model: ModelFile, profile: Profile, layer: int, sizes: LayerBytes
) -> np.ndarray:
    """Expected bytes that a token touches of each neuron of a layer, by id; f64 [F]."""
    frequency_F = profile.active_count_LF[layer] / profile.num_tokens
    gate_share_F = np.ones_like(frequency_F)
    if split.mode == "predicted":
        named_per_fired = 1.0
        if model.predictor is not None and model.predictor.density_L and frequency_F.any():
            named_per_fired = model.predictor.density_L[layer] / frequency_F.mean()
        gate_share_F = np.minimum(1.0, frequency_F * named_per_fired)
    return gate_share_F * sizes.gate_row + frequency_F * (sizes.up_row + sizes.down_row)


def _check_minimum(layer: int, num_hot: int, cpu_s_F: np.ndarray, fixed_s: float) -> None:
    """C_l: the num_hot - 1 hottest may be too few, the num_hot hottest may not."""
    if num_hot in (0, len(cpu_s_F)):
        return
    saved_s = np.sort(cpu_s_F)[::-1][:num_hot].sum()
    if saved_s <= fixed_s * (1 - TOLERANCE):
        raise SparkinferError(
            f"the plan is wrong: layer {layer} has {num_hot} hot neurons, which save at most"
            f" {saved_s:.3g} s and cost a launch and a round trip of {fixed_s:.3g} s"
        )


def _check_order(layer: int, ids: np.ndarray, count_F: np.ndarray) -> None:
    if not np.array_equal(ids, ids[np.lexsort((ids, -count_F[ids]))]):
        raise SparkinferError(f"the plan is wrong: layer {layer} is not listed hottest first")
