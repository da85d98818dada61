"""The placement problem: its numbers, and the cost of a placement. `problem_builder` computes the
numbers from the model, the profile and the machine.

Attention comes before the feed-forward part of a layer and does not overlap with it; inside the
feed-forward part the hot neurons (GPU) and the cold ones (CPU) do. With B_g the bandwidth of the
GPU in bytes per second, for layer l:

    T_l = D_l + M_l
    D_l = seconds of the dense block on its device: attention, the keys and values of half the
          context, and the predictor (only in mode predicted: in others it is not even in memory)
    M_l = max(hot_l / B_g_l + kernels * [l has hot neurons],
              cold_l / B_c_l + hand_over * [l is split])

and T = sum_l T_l + head seconds on its device + token_s + [anything is on the GPU] * (use_s +
cpu_run * CPU runs). token_s includes that of the logits. On the GPU, the n kernels of a dense block
or of the head (`kernel_counts`) that read some bytes take the larger of n * kernel_s and n *
launch_s + bytes / B_g, and for the head the copy of the logits; `kernels` is kernel_s of all
kernels of a layer's hot neurons. B_g_l is the rate for the share of a layer's neurons that a token
reads. A CPU run is a run of consecutive layers whose dense block is on the CPU: one host function,
for which the GPU waits. The embedding before it and a head on the CPU are outside of the GPU's
graph, which use_s includes.

On the CPU every matrix is read at the rate that the runtime reaches for its type and for the share
of its rows that a token needs (on average over the layer's neurons, wherever they are placed), the
KV cache at the rate of attention. A dense block there adds layer_s, the runtime's fixed cost of a
layer; token_s is the fixed cost of a token. In mode dense, layer_s is assumed to be that of mode
exact, since no lower cost was measured. B_c_l is the mean of these rates over all touched bytes of
a layer's neurons.

hot_l and cold_l are the bytes that a token is expected to touch of the neurons on each side. A
neuron that fires with frequency a touches, by mode,

    dense:      gate_row + up_row + down_row
    exact:      gate_row + a * (up_row + down_row)
    predicted:  min(1, a * overfetch_l) * gate_row + a * (up_row + down_row)

where overfetch_l is the number of predicted neurons for each one that fires. A layer is split when
its parts are not all on one device: hot and cold neurons both exist, or hot neurons exist and the
dense block is on the CPU, or the dense block is on the GPU and cold neurons exist.

A layer has no hot neurons or at least C_l. Moving neurons to the GPU saves at most their touched
bytes / B_c_l on the CPU, and costs kernels and a hand-over; so C_l is the smallest n whose n
hottest neurons satisfy

    sum of their touched bytes / B_c_l  >  kernels + hand_over

(their cost on the GPU does not enter, as it overlaps), or F if no n does: all or none.

With key selection (`kv_offload`), the keys and values of every layer are in main memory, and the
CPU attends. A dense block on the GPU then takes, in place of the kernels of attention and of the
keys' bytes, a hand-over, the copies of queries, keys, values and the heads' outputs, and the bytes
of keys, values and tables that the CPU reads, over its rate for the cache. These are counted for a
token in the middle of the context.

Of a mixture of experts, an expert is what a neuron is above: it is touched whole, with the
frequency with which the router chooses it. With 8 of 128 chosen, how many of a token's experts are
on the GPU varies, and the slower side counts, so M_l is not the larger of two means but the mean of
the larger side over recorded choices (`replay`).

The GPU holds at most its budget, including a workspace if it holds anything. The host stays within
its budget if at least `need_bytes` are on the GPU.

Experts may also be on the drive (`drive_s_L`, searched in `three_memories`): those that a token
chooses are read while its others are computed, and computed as they come, so M_l has a third side,

    missing_l * drive_l + hand_over * [l is split]

with drive_l the seconds of reading an expert and of computing it. A read takes the bytes of its
matrices over the rate of direct reads of that size, and of the cores what was measured.
Main memory then holds what is on no GPU but the missing experts, and the slots that they are read
into.

Ignored: the one row of the embedding matrix per token, and the bytes (not the fixed cost) that a
hand-over copies. `costs.part_bytes.outside_read`, of operations outside the layers, is in token_s.
Several GPUs are modelled in `multi_gpu`; the search is in `optimise`.

Letters: L layers, F neurons of a layer, N = F + 1 counts of hot neurons. Neurons are addressed by
rank: 0 is the hottest."""

from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np

from hotsplit.solver import replay

ALL = slice(None)
# A bound's sums have up to a few thousand terms in f64: relative, what rounding may change.
ROUNDING = 1e-12


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One placement problem: bytes held, bytes touched, and rates."""

    order_LF: np.ndarray  # int32, neuron ids hottest first, ties by id
    touched_LF: np.ndarray  # f64, expected bytes a token touches, by rank: non-increasing
    neuron_bytes_L: np.ndarray  # int64
    min_hot_L: np.ndarray  # int64, C_l
    dense_bytes_L: np.ndarray  # int64: attention, norms, predictor if run, KV unless offloaded
    dense_gpu_s_L: np.ndarray  # D_l with the dense block on the GPU
    dense_cpu_s_L: np.ndarray
    head_bytes: int
    head_gpu_s: float  # includes token_s, as does the next
    head_cpu_s: float
    workspace_bytes: int  # taken if anything is on the GPU
    budget_bytes: int
    need_bytes: int = 0  # that must be on the GPU, workspace excluded: the host cannot hold them
    gpu_s_per_byte: float  # of everything but neurons
    hot_s_per_byte_L: np.ndarray  # of neurons on the GPU
    cpu_s_per_byte_L: np.ndarray
    kernels_s: float  # of all kernels of a layer's hot neurons
    hand_over_s: float
    cpu_run_s: float
    use_s: float  # of a token, if anything is on the GPU
    # Of a mixture: the experts chosen for recorded tokens, by rank, int16 [L, T, K]; -1 in layers
    # without experts, whose neurons are addressed in as many equal parts.
    rank_LTK: np.ndarray | None = None
    # Of a mixture whose experts may be on the drive: seconds to read one and compute it; 0 in
    # layers without experts. None: main memory holds what is on no GPU.
    drive_s_L: np.ndarray | None = None

    @property
    def num_layers(self) -> int:
        return self.touched_LF.shape[0]

    @property
    def num_neurons(self) -> int:
        return self.touched_LF.shape[1]

    @property
    def has_neurons_L(self) -> np.ndarray:
        """Whether there is anything to place in a layer, which may be attention alone."""
        return self.neuron_bytes_L > 0

    @cached_property
    def kernels_s_L(self) -> np.ndarray:
        """Seconds of the kernels of a layer's hot neurons; 0 in layers without neurons."""
        return self.kernels_s * self.has_neurons_L

    @cached_property
    def hand_over_s_L(self) -> np.ndarray:
        return self.hand_over_s * self.has_neurons_L

    @property
    def room_bytes(self) -> int:
        """Bytes left for weights and KV cache; negative if the workspace exceeds the budget."""
        return self.budget_bytes - self.workspace_bytes

    @cached_property
    def prefix_LN(self) -> np.ndarray:
        """Touched bytes of the n hottest neurons of each layer, n = 0..F; f64 [L, F + 1]."""
        zeros = np.zeros((self.num_layers, 1))
        return np.concatenate([zeros, np.cumsum(self.touched_LF, axis=1)], axis=1)

    @property
    def touched_L(self) -> np.ndarray:
        return self.prefix_LN[:, -1]

    @cached_property
    def least_split_s_LN(self) -> np.ndarray:
        """Lower bound on M_l with any set of n hot neurons for C_l <= n < F, where it is convex in
        n, as derived in `lagrangian`; infinite for all other n. f64 [L, F + 1]."""
        prefix_LN, gpu_s_L1 = self.prefix_LN, self.hot_s_per_byte_L[:, None]
        total_L1, cpu_s_L1 = self.touched_L[:, None], self.cpu_s_per_byte_L[:, None]
        kernels_s_L1, hand_over_s_L1 = self.kernels_s_L[:, None], self.hand_over_s_L[:, None]
        all_cold_L1 = total_L1 * cpu_s_L1 + hand_over_s_L1
        balanced_L1 = (all_cold_L1 - kernels_s_L1) / (gpu_s_L1 + cpu_s_L1)
        touched_LN = np.clip(balanced_L1, total_L1 - prefix_LN[:, ::-1], prefix_LN)
        hot_LN = touched_LN * gpu_s_L1 + kernels_s_L1
        cold_LN = (total_L1 - touched_LN) * cpu_s_L1 + hand_over_s_L1
        seconds_LN = np.maximum(hot_LN, cold_LN)
        seconds_LN[np.arange(self.num_neurons + 1) < self.min_hot_L[:, None]] = np.inf
        seconds_LN[:, [0, -1]] = np.inf
        for layer, twin in self.twins.items():
            counts = range(int(self.min_hot_L[layer]), self.num_neurons)
            if twin != layer:
                seconds_LN[layer] = seconds_LN[twin]
            elif counts:
                least_N = seconds_LN[layer, counts.start : -1]
                least_N[:] = replay.least_seconds(self.sides(layer), counts, least_N)
        return seconds_LN

    @cached_property
    def hottest_s_2LN(self) -> np.ndarray:
        """M_l with the n hottest neurons on the GPU, n = 0..F; the first index is 1 for a dense
        block on the GPU. f64 [2, L, F + 1]."""
        sides = [
            ffn_seconds(
                self,
                hot_touched_L=self.prefix_LN.T,
                num_hot_L=np.arange(self.num_neurons + 1)[:, None],
                dense_L=np.array(dense),
            ).T
            for dense in (False, True)
        ]
        for dense, seconds_LN in enumerate(sides):
            for layer, twin in self.twins.items():
                if twin != layer:
                    seconds_LN[layer] = seconds_LN[twin]
                else:
                    seconds_LN[layer] = replay.prefix_seconds(self.sides(layer), bool(dense))
        return np.stack(sides)

    def with_budget(self, budget_bytes: int) -> "Problem":
        """The same problem with another budget; what was computed of its layers is kept."""
        other, own = replace(self, budget_bytes=budget_bytes), vars(self)
        names = ("prefix_LN", "least_split_s_LN", "hottest_s_2LN", "replayed", "twins")
        vars(other).update({name: own[name] for name in names if name in own})
        return other

    @cached_property
    def replayed(self) -> list[int]:
        """The layers with experts, which are priced by replay."""
        if self.rank_LTK is None:
            return []
        return np.flatnonzero((self.rank_LTK >= 0).any(axis=(1, 2))).tolist()

    @cached_property
    def twins(self) -> dict[int, int]:
        """For each layer that is priced by replay, the first one with the same choices, sizes and
        rates: assumed choices are those of all layers."""
        first: dict[object, int] = {}
        found = {}
        for layer in self.replayed:
            assert self.rank_LTK is not None
            rates = (self.hot_s_per_byte_L[layer], self.cpu_s_per_byte_L[layer])
            sizes = (self.neuron_bytes_L[layer], self.min_hot_L[layer])
            key = (self.rank_LTK[layer].tobytes(), *rates, *sizes)
            found[layer] = first.setdefault(key, layer)
        return found

    def sides(self, layer: int) -> replay.Sides:
        """What the experts of a layer cost on either side."""
        assert self.rank_LTK is not None
        num_bytes = float(self.neuron_bytes_L[layer])
        return replay.Sides(
            rank_TK=self.rank_LTK[layer],
            num_experts=self.num_neurons,
            hot_s=num_bytes * float(self.hot_s_per_byte_L[layer]),
            cold_s=num_bytes * float(self.cpu_s_per_byte_L[layer]),
            kernels_s=self.kernels_s,
            hand_over_s=self.hand_over_s,
            drive_s=0.0 if self.drive_s_L is None else float(self.drive_s_L[layer]),
        )

    @property
    def placeable_bytes(self) -> int:
        """Bytes of everything that can be on the GPU, workspace excluded."""
        neurons = int(self.neuron_bytes_L.sum()) * self.num_neurons
        return neurons + int(self.dense_bytes_L.sum()) + self.head_bytes

    @property
    def fits(self) -> bool:
        """True if the GPU holds everything."""
        return self.placeable_bytes <= self.room_bytes

    @property
    def minimum_bytes(self) -> int:
        """The smallest budget that puts anything on the GPU."""
        neurons = (self.neuron_bytes_L * self.min_hot_L)[self.has_neurons_L]
        blocks = [int(self.dense_bytes_L.min()), int(neurons.min())] if self.num_layers else []
        return self.workspace_bytes + min(blocks + [self.head_bytes] * (self.head_bytes > 0))


@dataclass(frozen=True, kw_only=True)
class SolvedPlacement:
    """Which neurons (by rank), dense blocks and head are on the GPU. `resident_LF`: those in main
    memory, where some are on the drive; None: all others."""

    hot_LF: np.ndarray  # bool
    dense_L: np.ndarray  # bool
    head: bool
    resident_LF: np.ndarray | None = None  # bool

    @property
    def num_hot_L(self) -> np.ndarray:
        return self.hot_LF.sum(axis=1)

    @property
    def uses_gpu(self) -> bool:
        return bool(self.hot_LF.any() or self.dense_L.any() or self.head)


def of_counts(
    problem: Problem, num_hot_L: np.ndarray, dense_L: np.ndarray, head: bool
) -> SolvedPlacement:
    """The placement with the `num_hot_L` hottest neurons of each layer on the GPU."""
    ranks_F = np.arange(problem.num_neurons)
    return SolvedPlacement(
        hot_LF=ranks_F < np.asarray(num_hot_L)[:, None], dense_L=dense_L, head=head
    )


def on_one_device(problem: Problem, *, gpu: bool) -> SolvedPlacement:
    """Everything on the GPU, or everything on the CPU."""
    count = problem.num_neurons if gpu else 0
    layers = np.full(problem.num_layers, gpu)
    return of_counts(problem, np.full(problem.num_layers, count), layers, gpu)


def ffn_seconds(
    problem: Problem, *, hot_touched_L: np.ndarray, num_hot_L: np.ndarray, dense_L: np.ndarray
) -> np.ndarray:
    """M_l of every layer by mean touched bytes, f64 [L], or [N, L] for several counts."""
    has_hot_L, has_cold_L = num_hot_L > 0, num_hot_L < problem.num_neurons
    is_split_L = np.where(dense_L, has_cold_L, has_hot_L)
    cold_touched_L = np.where(has_cold_L, problem.touched_L - hot_touched_L, 0.0)
    gpu_L = hot_touched_L * problem.hot_s_per_byte_L + problem.kernels_s_L * has_hot_L
    cpu_L = cold_touched_L * problem.cpu_s_per_byte_L + problem.hand_over_s_L * is_split_L
    return np.maximum(gpu_L, cpu_L)


def placement_ffn_seconds(problem: Problem, placement: SolvedPlacement) -> np.ndarray:
    """M_l of every layer of a placement, f64 [L]."""
    seconds_L = ffn_seconds(
        problem,
        hot_touched_L=(problem.touched_LF * placement.hot_LF).sum(axis=1),
        num_hot_L=placement.num_hot_L,
        dense_L=placement.dense_L,
    )
    for layer in problem.replayed:
        sides, is_hot_1F = problem.sides(layer), placement.hot_LF[layer][None]
        is_there_LF, is_dense = placement.resident_LF, bool(placement.dense_L[layer])
        is_there_1F = None if is_there_LF is None else is_there_LF[layer][None]
        seconds_L[layer] = replay.sets_seconds(sides, is_hot_1F, is_dense, is_there_1F)[0]
    return seconds_L


def sets_seconds(problem: Problem, layer: int, hot_HF: np.ndarray, dense: bool) -> np.ndarray:
    """M_l of one layer with each of these sets of hot neurons, f64 [H]."""
    if layer in problem.replayed:
        return replay.sets_seconds(problem.sides(layer), hot_HF, dense)
    return ffn_seconds(
        problem,
        hot_touched_L=hot_HF @ problem.touched_LF.T,
        num_hot_L=hot_HF.sum(axis=1)[:, None],
        dense_L=np.full(problem.num_layers, dense),
    )[:, layer]


def gpu_use_seconds(problem: Problem, placement: SolvedPlacement) -> float:
    """Seconds of using the GPU and of runs on the CPU; 0 if nothing is on the GPU."""
    if not placement.uses_gpu:
        return 0.0
    return problem.use_s + problem.cpu_run_s * num_cpu_runs(placement.dense_L)


def num_cpu_runs(dense_L: np.ndarray) -> int:
    """Runs of consecutive layers whose dense blocks are on the CPU."""
    return int((np.diff(dense_L.astype(np.int8), prepend=1) == -1).sum())


def placement_seconds(
    problem: Problem, placement: SolvedPlacement, *, counts_L: np.ndarray | slice = ALL
) -> float:
    """T, the expected seconds of one token; of the neurons, only those of the layers `counts_L`."""
    ffn_L = placement_ffn_seconds(problem, placement)[counts_L]
    dense_L, head_s = dense_seconds(problem, placement), head_seconds(problem, placement)
    return float(ffn_L.sum() + dense_L.sum() + head_s + gpu_use_seconds(problem, placement))


def dense_seconds(problem: Problem, placement: SolvedPlacement) -> np.ndarray:
    """D_l of every layer, f64 [L]."""
    return np.where(placement.dense_L, problem.dense_gpu_s_L, problem.dense_cpu_s_L)


def layer_seconds(problem: Problem, placement: SolvedPlacement) -> np.ndarray:
    """T_l of every layer, f64 [L]."""
    return placement_ffn_seconds(problem, placement) + dense_seconds(problem, placement)


def head_seconds(problem: Problem, placement: SolvedPlacement) -> float:
    return problem.head_gpu_s if placement.head else problem.head_cpu_s


def held_bytes(problem: Problem, placement: SolvedPlacement) -> int:
    """GPU bytes of a placement, workspace excluded."""
    neurons = int(placement.num_hot_L @ problem.neuron_bytes_L)
    dense = int(problem.dense_bytes_L[placement.dense_L].sum())
    return neurons + dense + problem.head_bytes * placement.head


def drive_bytes(problem: Problem, placement: SolvedPlacement) -> int:
    """Bytes of a placement that are in no memory."""
    if placement.resident_LF is None:
        return 0
    num_missing_L = (~placement.hot_LF & ~placement.resident_LF).sum(axis=1)
    return int(num_missing_L @ problem.neuron_bytes_L)


def placement_bytes(problem: Problem, placement: SolvedPlacement) -> int:
    """GPU bytes of a placement, workspace included."""
    return held_bytes(problem, placement) + problem.workspace_bytes * placement.uses_gpu


def is_feasible(problem: Problem, placement: SolvedPlacement) -> bool:
    """True if both memories hold it and every layer has no hot neurons or at least C_l."""
    num_hot_L = placement.num_hot_L
    has_enough = ((num_hot_L == 0) | (num_hot_L >= problem.min_hot_L)).all()
    fits = placement_bytes(problem, placement) <= problem.budget_bytes
    elsewhere = held_bytes(problem, placement) + drive_bytes(problem, placement)
    return bool(has_enough) and fits and elsewhere >= problem.need_bytes


def segment(problem: Problem, start: int, stop: int, *, has_head: bool, need_bytes: int) -> Problem:
    """The problem of the layers start..stop-1 alone; without `has_head` the head costs nothing."""
    suffixes = ("_L", "_LF", "_LTK")
    names = [field.name for field in fields(problem) if field.name.endswith(suffixes)]
    changes = {
        name: getattr(problem, name)[start:stop]
        for name in names
        if getattr(problem, name) is not None
    }
    if not has_head:
        changes |= {"head_bytes": 0, "head_gpu_s": 0.0, "head_cpu_s": 0.0}
    return replace(problem, need_bytes=need_bytes, **changes)
