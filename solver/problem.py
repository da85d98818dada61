"""What the solver works on: the numbers of one placement problem, and what a placement costs.

Attention comes before the feed-forward part of a layer and does not overlap with it; inside the
feed-forward part the hot neurons (GPU) and the cold ones (CPU) do. With B_g and B_c the bytes a
second of the two devices, for layer l:

    T_l = A_l + P_l + M_l
    A_l = (attention bytes + KV bytes of half the context) / B of the device of the dense block
    P_l = predictor bytes / B of the same device           (0 in exact mode: it is not run)
    M_l = max(hot_l / B_g + launch * [l has hot neurons],  cold_l / B_c + round_trip * [l is split])

and T = sum_l T_l + head bytes / B of the head's device. hot_l and cold_l are the bytes that a
token is expected to touch of the neurons on either side; a neuron that fires with frequency a
touches, in mode

    exact:      gate_row + a * (up_row + down_row)
    predicted:  min(1, a * overfetch_l) * gate_row + a * (up_row + down_row)

where overfetch_l is how many neurons the predictor names for each one that fires. A layer is
split when its parts are not all on one device: hot and cold neurons both exist, or hot neurons
exist and the dense block is on the CPU, or the dense block is on the GPU and cold neurons exist.

A layer has no hot neurons or at least C_l. A layer that leaves the CPU saves there at most the
touched bytes of its hot neurons over B_c, and pays a launch and a round trip for it; so C_l is
the smallest n whose n hottest neurons satisfy

    sum of their touched bytes / B_c  >  launch + round_trip

(what they cost on the GPU does not enter, as it overlaps), and F where no n does: all or none.

Ignored: the one row a token of the embedding matrix, and the launches of the dense blocks.
What this module does not know: how to find a good placement.

Letters: L layers, F neurons of a layer. Neurons are addressed by rank: 0 is the hottest."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from sparkinfer.budget import head_bytes, kv_bytes_per_layer, layer_bytes, workspace_bytes
from sparkinfer.machine_file import Machine
from sparkinfer.model_file import ModelFile
from sparkinfer.profile_file import Profile
from sparkinfer.split_file import PlanMode


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One placement problem: bytes as they are held, bytes as they are touched, and rates."""

    order_LF: np.ndarray  # int32, neuron ids hottest first, ties by id
    touched_LF: np.ndarray  # f64, expected bytes a token touches, by rank: never increasing
    neuron_bytes_L: np.ndarray  # int64
    min_hot_L: np.ndarray  # int64, C_l
    dense_bytes_L: np.ndarray  # int64: attention, norms, predictor and KV cache
    dense_gpu_s_L: np.ndarray  # A_l + P_l where the dense block is on the GPU
    dense_cpu_s_L: np.ndarray
    head_bytes: int
    head_gpu_s: float
    head_cpu_s: float
    workspace_bytes: int  # taken as soon as anything is on the GPU
    budget_bytes: int
    gpu_s_per_byte: float
    cpu_s_per_byte: float
    launch_s: float
    round_trip_s: float

    @property
    def num_layers(self) -> int:
        return self.touched_LF.shape[0]

    @property
    def num_neurons(self) -> int:
        return self.touched_LF.shape[1]

    @property
    def room_bytes(self) -> int:
        """What the budget leaves for weights and KV cache; negative where it leaves nothing."""
        return self.budget_bytes - self.workspace_bytes

    @cached_property
    def prefix_LN(self) -> np.ndarray:
        """Touched bytes of the n hottest neurons of each layer, n = 0..F; f64 [L, F + 1]."""
        zeros = np.zeros((self.num_layers, 1))
        return np.concatenate([zeros, np.cumsum(self.touched_LF, axis=1)], axis=1)

    @property
    def touched_L(self) -> np.ndarray:
        return self.prefix_LN[:, -1]

    @property
    def minimum_bytes(self) -> int:
        """The smallest budget that puts anything on the GPU."""
        neurons = self.neuron_bytes_L * self.min_hot_L
        blocks = (int(self.dense_bytes_L.min()), int(neurons.min()), self.head_bytes)
        return self.workspace_bytes + min(blocks)


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Which neurons (by rank), dense blocks and head are on the GPU."""

    hot_LF: np.ndarray  # bool
    dense_L: np.ndarray  # bool
    head: bool

    @property
    def num_hot_L(self) -> np.ndarray:
        return self.hot_LF.sum(axis=1)

    @property
    def uses_gpu(self) -> bool:
        return bool(self.hot_LF.any() or self.dense_L.any() or self.head)


def of_counts(
    problem: Problem, num_hot_L: np.ndarray, dense_L: np.ndarray, head: bool
) -> Placement:
    """The placement with the `num_hot_L` hottest neurons of each layer on the GPU."""
    ranks_F = np.arange(problem.num_neurons)
    return Placement(hot_LF=ranks_F < np.asarray(num_hot_L)[:, None], dense_L=dense_L, head=head)


def on_one_device(problem: Problem, *, gpu: bool) -> Placement:
    """Everything on the GPU, or everything on the CPU."""
    count = problem.num_neurons if gpu else 0
    layers = np.full(problem.num_layers, gpu)
    return of_counts(problem, np.full(problem.num_layers, count), layers, gpu)


def build_problem(
    *,
    model: ModelFile,
    profile: Profile,
    machine: Machine,
    vram_budget_bytes: int,
    context_length: int,
    mode: PlanMode,
) -> Problem:
    """The numbers of a problem, every byte count of them from `sparkinfer.budget`.

    The profile must be of this model and `machine.gpus[0]` must exist."""
    gpu, shape = machine.gpus[0], model.shape
    gpu_s = 1e-9 / gpu.bandwidth_gb_per_s.best
    cpu_s = 1e-9 / machine.best_cpu_bandwidth_gb_per_s
    sizes = [layer_bytes(model, layer) for layer in range(shape.num_layers)]
    kv = kv_bytes_per_layer(model, context_length)
    order_LF = np.argsort(-profile.active_count_LF, axis=1, kind="stable").astype(np.int32)
    frequency_LF = np.take_along_axis(profile.frequency_LF, order_LF, axis=1)
    read_L = np.array([s.attention + kv / 2 for s in sizes])
    named_LF = np.ones_like(frequency_LF)
    if mode == "predicted":
        read_L += np.array([s.predictor for s in sizes])
        named_LF = np.minimum(1.0, frequency_LF * overfetch(model, profile)[:, None])
    gate_L = np.array([s.gate_row for s in sizes])
    rest_L = np.array([s.up_row + s.down_row for s in sizes])
    touched_LF = named_LF * gate_L[:, None] + frequency_LF * rest_L[:, None]
    saved_LF = np.cumsum(touched_LF, axis=1) * cpu_s
    num_too_few_L = (saved_LF <= gpu.launch_s.best + gpu.round_trip_s.best).sum(axis=1)
    return Problem(
        order_LF=order_LF,
        touched_LF=touched_LF,
        neuron_bytes_L=np.array([s.neuron for s in sizes]),
        min_hot_L=np.minimum(num_too_few_L + 1, shape.num_neurons),
        dense_bytes_L=np.array([s.attention + s.predictor + kv for s in sizes]),
        dense_gpu_s_L=read_L * gpu_s,
        dense_cpu_s_L=read_L * cpu_s,
        head_bytes=head_bytes(model),
        head_gpu_s=head_bytes(model) * gpu_s,
        head_cpu_s=head_bytes(model) * cpu_s,
        workspace_bytes=workspace_bytes(model, context_length),
        budget_bytes=vram_budget_bytes,
        gpu_s_per_byte=gpu_s,
        cpu_s_per_byte=cpu_s,
        launch_s=gpu.launch_s.best,
        round_trip_s=gpu.round_trip_s.best,
    )


def overfetch(model: ModelFile, profile: Profile) -> np.ndarray:
    """Neurons that the predictor names for each one that fires, f64 [L]; 1 where unknown."""
    named = model.predictor.density_L if model.predictor is not None else ()
    if not named:
        return np.ones(model.shape.num_layers)
    density_L = profile.density_L
    return np.divide(named, density_L, out=np.ones_like(density_L), where=density_L > 0)


def ffn_seconds(
    problem: Problem, *, hot_touched_L: np.ndarray, num_hot_L: np.ndarray, dense_L: np.ndarray
) -> np.ndarray:
    """M_l of every layer, f64 [L]."""
    has_hot_L, has_cold_L = num_hot_L > 0, num_hot_L < problem.num_neurons
    is_split_L = np.where(dense_L, has_cold_L, has_hot_L)
    cold_touched_L = np.where(has_cold_L, problem.touched_L - hot_touched_L, 0.0)
    gpu_L = hot_touched_L * problem.gpu_s_per_byte + problem.launch_s * has_hot_L
    cpu_L = cold_touched_L * problem.cpu_s_per_byte + problem.round_trip_s * is_split_L
    return np.maximum(gpu_L, cpu_L)


def placement_seconds(problem: Problem, placement: Placement) -> float:
    """T, the expected seconds of one token."""
    ffn_L = ffn_seconds(
        problem,
        hot_touched_L=(problem.touched_LF * placement.hot_LF).sum(axis=1),
        num_hot_L=placement.num_hot_L,
        dense_L=placement.dense_L,
    )
    dense_L = np.where(placement.dense_L, problem.dense_gpu_s_L, problem.dense_cpu_s_L)
    head = problem.head_gpu_s if placement.head else problem.head_cpu_s
    return float(ffn_L.sum() + dense_L.sum() + head)


def placement_bytes(problem: Problem, placement: Placement) -> int:
    """GPU bytes of a placement, workspace included."""
    neurons = int((placement.num_hot_L * problem.neuron_bytes_L).sum())
    dense = int(problem.dense_bytes_L[placement.dense_L].sum())
    head = problem.head_bytes if placement.head else 0
    return neurons + dense + head + problem.workspace_bytes * placement.uses_gpu


def is_feasible(problem: Problem, placement: Placement) -> bool:
    """Whether it is within the budget and every layer has no hot neurons or at least C_l."""
    num_hot_L = placement.num_hot_L
    has_enough = ((num_hot_L == 0) | (num_hot_L >= problem.min_hot_L)).all()
    return bool(has_enough) and placement_bytes(problem, placement) <= problem.budget_bytes
