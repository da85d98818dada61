"""What drafts by a model's own block are predicted to gain. The CPU computes the block, but for
what a plan has of it on a GPU.

A round drafts n tokens with the block, checks them in a step of n + 1 rows and keeps the accepted
ones. With the chances a(i) of the i-th guess, if those before it are right, it yields

    E(n) = 1 + a(1) + a(1) a(2) + ... + a(1) ... a(n)   tokens in
    C(n) = step(n + 1) + n block(1)   seconds:

of accepted tokens the block computes keys and values alone, which are a few of its matrices. The
best n is taken; 0 is none.

A step of r rows reads each matrix once, and of experts those that any of its rows chooses: as many
as r successive recorded tokens did, and of assumed ones, with an expert's share p of the tokens,
1 - (1 - p)^r, as if they chose independently; those of a text have more in common. Each further row
adds its products, at the rate of a prompt's, and STATE_ROW of what a recurrent state takes for one;
its keys and values are in a cache by then.

Of what a plan has on a GPU, dense blocks, neurons and the head take no longer for a few rows, in
which reading is the limit, and experts, which are computed row by row, r times as long. In a layer
whose experts or neurons are on both sides, the slower side counts.

Letters: L layers, E experts."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import mul

import numpy as np

from hotsplit.artifacts.machine_file import Machine
from hotsplit.artifacts.model_file import ModelFile
from hotsplit.costs import part_bytes
from hotsplit.options.generation_options import FIRST_IDS
from hotsplit.solver.inputs import Inputs
from hotsplit.solver.multi_gpu import Pipeline, PipelinePlacement
from hotsplit.solver.units import ExpertUnits

# Assumed, of the guesses at each place if those before are right.
ACCEPTED = (0.8, 0.6, 0.4)
# Of a matrix's time for one row, in which memory is the limit, that of a further one on a machine
# whose figures do not say it.
MATRIX_ROW = 0.1
STATE_ROW = 0.3  # docs/log/texts.md, what a check keeps of recurrent layers


@dataclass(frozen=True, kw_only=True)
class OnGpus:
    """What GPUs have of a model. `cold_LE`: the share of each expert, or of all neurons in a layer
    without experts, that the CPU has, f64; `units_s_L`: of a row's experts, or of neurons, on a
    GPU, in layers `by_row_L` once for each row. Fixed seconds of a step: `kernels_s_L` of the GPU's
    side, `hand_over_s_L` of the CPU's. `block_s`: of a step of the draft block, the part that is on
    a GPU with the head, taken to be as long as for the last layer that attends; None: the CPU has
    the block."""

    dense_L: np.ndarray
    head: bool
    cold_LE: np.ndarray
    units_s_L: np.ndarray
    by_row_L: np.ndarray
    kernels_s_L: np.ndarray
    hand_over_s_L: np.ndarray
    block_s: float | None = None

    def units_s(self, layer: int, rows: float) -> float:
        """Seconds of a GPU's side of a layer's experts or neurons."""
        times = rows if self.by_row_L[layer] else 1.0
        return float(self.kernels_s_L[layer] + times * self.units_s_L[layer])


def nothing(num_layers: int) -> OnGpus:
    """The CPU has everything."""
    zeros_L = np.zeros(num_layers)
    return OnGpus(
        dense_L=zeros_L.astype(bool),
        head=False,
        cold_LE=np.ones((num_layers, 1)),
        units_s_L=zeros_L,
        by_row_L=zeros_L,
        kernels_s_L=zeros_L,
        hand_over_s_L=zeros_L,
    )


def on_gpus(inputs: Inputs, pipeline: Pipeline, plan: PipelinePlacement) -> OnGpus:
    """What a plan has on GPUs."""
    placement, units, spec = plan.placement, inputs.units, inputs.model.spec
    problems = [pipeline.problems[gpu] for gpu in plan.home_I[:-1]]
    has_experts_L = np.array([layer.route is not None for layer in spec.layers])
    hot_L = (pipeline.model.touched_LF * placement.hot_LF).sum(axis=1)
    rates_L = np.array([p.hot_s_per_byte_L[layer] for layer, p in enumerate(problems)])
    is_divided_L = placement.hot_LF.any(axis=1) & ~placement.hot_LF.all(axis=1)
    is_apart_L = placement.hot_LF.any(axis=1) != placement.dense_L
    cold_LE = np.ones_like(shares(inputs))
    for layer, is_hot_F in enumerate(placement.hot_LF):
        if has_experts_L[layer]:
            cold_LE[layer, units.ids(layer, is_hot_F)] = 0.0
        else:
            cold_LE[layer] = 1.0 - is_hot_F.mean()
    return OnGpus(
        dense_L=placement.dense_L,
        head=placement.head,
        cold_LE=cold_LE,
        units_s_L=hot_L * rates_L,
        by_row_L=has_experts_L,
        kernels_s_L=np.array([p.kernels_s_L[layer] for layer, p in enumerate(problems)])
        * placement.hot_LF.any(axis=1),
        hand_over_s_L=pipeline.model.hand_over_s_L * (is_divided_L | is_apart_L),
        block_s=_block_seconds(inputs, pipeline, plan),
    )


def _block_seconds(inputs: Inputs, pipeline: Pipeline, plan: PipelinePlacement) -> float | None:
    if not inputs.places_draft or not plan.placement.dense_L[inputs.model.spec.last_attending]:
        return None
    last = inputs.model.spec.last_attending
    problem = pipeline.problems[plan.home_I[last]]
    head_s = problem.head_gpu_s if plan.placement.head else problem.head_cpu_s
    return float(problem.dense_gpu_s_L[last] + head_s + problem.use_s + problem.hand_over_s)


@dataclass(frozen=True, kw_only=True)
class DraftGain:
    """Seconds of a token with the best number of drafted tokens by these shares, and with 1, 2, ...
    of them."""

    num_drafted: int
    token_s: float
    by_number_s: tuple[float, ...]
    accepted: tuple[float, ...]


def draft_gain(
    inputs: Inputs,
    token_s: float,
    accepted: Sequence[float] = ACCEPTED,
    on_gpus: OnGpus | None = None,
) -> DraftGain | None:
    """`token_s`: seconds of a token without drafts. `on_gpus`: None if the CPU has everything. None
    for a model without a block."""
    model, block, machine = inputs.model, inputs.model.draft, inputs.machine
    if block is None:
        return None
    share_LE = shares(inputs)
    number = block.spec.layers[0].neurons.num_experts
    # The block's experts are assumed to be chosen as those of the last layer are.
    own_LE = share_LE[-1:] if number > 1 else np.ones((1, 1))
    single_s = rows_seconds(model, machine, share_LE, 1, on_gpus=on_gpus)
    costs, reached = machine.costs, list(accumulate(accepted, mul))
    fixed_s = costs.layer_s["exact"].median + costs.token_s.median
    fixed_s += model.spec.vocab_size * costs.logit_s.median

    ids = model.spec.vocab_size
    head_share = FIRST_IDS / ids if ids >= 2 * FIRST_IDS else 1.0

    block_s = fixed_s + rows_seconds(block, machine, own_LE, 1, head_share)
    if on_gpus is not None and on_gpus.block_s is not None:
        on_gpu = replace(nothing(1), dense_L=np.array([True]), head=True)
        block_s = on_gpus.block_s + rows_seconds(block, machine, own_LE, 1, on_gpus=on_gpu)
    found_s = [token_s]
    for num in range(1, len(accepted) + 1):
        tokens = 1 + sum(reached[:num])
        union_LE = recorded_union(inputs, num + 1)
        rows_s = rows_seconds(model, machine, share_LE, num + 1, union_LE=union_LE, on_gpus=on_gpus)
        step_s = token_s + rows_s - single_s
        found_s.append((step_s + num * block_s) / tokens)
    best = int(np.argmin(found_s))
    return DraftGain(
        num_drafted=best,
        token_s=found_s[best],
        by_number_s=tuple(found_s[1:]),
        accepted=tuple(accepted),
    )


def shares(inputs: Inputs) -> np.ndarray:
    """The share of the tokens that choose each expert, f64 [L, E]; 1 in layers without."""
    units = inputs.units
    if not isinstance(units, ExpertUnits):
        return np.ones((inputs.model.spec.num_layers, 1))
    return units.count_LF / units.rank_LTK.shape[1]


def recorded_union(inputs: Inputs, rows: int) -> np.ndarray | None:
    """How often any of so many successive recorded tokens chooses each expert, f64 [L, E]; None if
    fewer are recorded."""
    units, routing_LTK = inputs.units, inputs.profile.routing_LTK
    is_recorded = isinstance(units, ExpertUnits) and inputs.profile.corpora
    if routing_LTK is None or not is_recorded or routing_LTK.shape[1] < rows:
        return None
    union_LE = np.ones((len(routing_LTK), units.number))
    for layer, id_TK in enumerate(routing_LTK):
        is_chosen_TE = np.zeros((len(id_TK), units.number), bool)
        if (id_TK >= 0).all():
            np.put_along_axis(is_chosen_TE, id_TK.astype(np.int64), True, axis=1)
            windows = np.lib.stride_tricks.sliding_window_view(is_chosen_TE, rows, axis=0)
            union_LE[layer] = windows.any(axis=2).mean(axis=0)
    return union_LE


def rows_seconds(
    model: ModelFile,
    machine: Machine,
    share_LE: np.ndarray,
    rows: int,
    head_share: float = 1.0,
    union_LE: np.ndarray | None = None,
    on_gpus: OnGpus | None = None,
) -> float:
    """Seconds of the matrices and states that a step of these rows reads, with this share of the
    head; without what a step takes whatever it reads. `union_LE`: the share of steps that read each
    expert; None: as if tokens chose independently. Of dense blocks and a head on a GPU, which
    take as long for one row, nothing."""
    gpus = nothing(len(share_LE)) if on_gpus is None else on_gpus
    total, kv_rate = 0.0, machine.costs.kv_gb_per_s.median * 1e9
    union_LE = 1 - (1 - share_LE) ** rows if union_LE is None else union_LE
    for layer, share_E in enumerate(share_LE):
        dense_s, units_s, cold_E = 0.0, float(gpus.hand_over_s_L[layer]), gpus.cold_LE[layer]
        for name, entry in model.layer_tensors[layer].items():
            read, used = 1.0, float(rows)
            if part_bytes.is_expert(name):
                number = model.spec.layers[layer].neurons.num_experts
                read = float((cold_E * union_LE[layer]).sum()) / number
                used = float((cold_E * share_E).sum()) * rows / (number * read) if read else 0.0
            elif not part_bytes.is_dense(name):
                read = float(cold_E.mean())
            seconds = read * _matrix_seconds(machine, entry.kind, entry.num_bytes, used)
            if part_bytes.is_dense(name):
                dense_s += seconds
            else:
                units_s += seconds
        state_s = 2 * part_bytes.state_bytes(model, layer) / kv_rate
        dense_s += state_s * (1 + STATE_ROW * (rows - 1))
        total += max(units_s, gpus.units_s(layer, rows)) + dense_s * (not gpus.dense_L[layer])
    for name, entry in model.tensors.items():
        if name == model.head_name and gpus.head:
            continue
        if name.startswith("nextn.") or name == model.head_name:
            share = head_share if name == model.head_name else 1.0
            total += share * _matrix_seconds(machine, entry.kind, entry.num_bytes, rows)
    return total


def _matrix_seconds(machine: Machine, kind: str, num_bytes: int, rows: float) -> float:
    """Seconds of a product with these rows."""
    of_pass = machine.pass_seconds(kind)
    read_s = 1 / machine.cpu_rate(kind)
    row_s = MATRIX_ROW * read_s if of_pass is None else of_pass[1]
    return num_bytes * (read_s + row_s * (rows - 1))
