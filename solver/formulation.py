"""The placement as an integer program: a layer's neurons in groups of similar hotness. `grouped`
solves it.

Sets     l = 0..L-1 layers, g = 0..G-1 groups of a layer (consecutive ranks; n_lg neurons),
         k = 0..K-1 GPUs
Binary   hot_l_g_k    the neurons of group g are on GPU k, all of them or none
         has_hot_l_k  any group of layer l is on GPU k
         dense_l_k    the layer's dense block is on GPU k
         split_l_k    layer l has parts on both GPU k and the CPU
         head_k       the output head is on GPU k
         uses_k       anything is on GPU k
         home_i_k     GPU k is the home of layer i (of the head for i = L); only if K > 1
Real     seconds_l    T_l >= 0
         head_seconds run_l_k      >= 0; a run of layers on the CPU whose home is GPU k, which it
         uses, begins with layer l

With t_lg the touched bytes of a group, b_l the bytes of a neuron, B_k_l the rate of GPU k and B_l
that of the CPU for the layer's neurons, and the dense block's seconds D_l = dense_cpu_s_l + sum_k
dense_l_k (dense_gpu_s_l_k - dense_cpu_s_l):

    minimise    sum_l seconds_l + head_seconds + sum_k use_s_k uses_k
                + sum_(l, k) cpu_run_s_k run_l_k
    begins_l_k         run_l_k >= off_l_k - off_(l-1)_k - (1 - uses_k)
                       (off_l_k is home_l_k - dense_l_k, home_l_k being 1 if K = 1; off_(-1)_k is 0)
    hot_uses_l_k, dense_uses_l_k, head_uses_k    has_hot_l_k, dense_l_k, head_k <= uses_k
    gpu_side_l_k       seconds_l >= D_l + sum_g hot_l_g_k t_lg / B_k_l + kernels_k has_hot_l_k
    cpu_side_l         seconds_l >= D_l + sum_g (1 - sum_k hot_l_g_k) t_lg / B_l
                                    + sum_k hand_over_k split_l_k
    hot_is_seen_l_g_k  hot_l_g_k <= has_hot_l_k
    cold_is_split_l_g_k  dense_l_k - hot_l_g_k <= split_l_k  (dense block on GPU k, group not)
    hot_is_split_l_k   has_hot_l_k - dense_l_k <= split_l_k  (a group on GPU k, dense block not)
    least_hot_l_k      sum_g n_lg hot_l_g_k >= C_l_k has_hot_l_k
    head_time          head_seconds = head_cpu_s + sum_k head_k (head_gpu_s_k - head_cpu_s)
    budget_k           sum_l (dense_bytes_l dense_l_k + sum_g n_lg b_l hot_l_g_k)
                       + head_bytes head_k <= budget_k - workspace_k
    host               the left side summed over all k >= need    (only if need > 0)
    one_home_i         sum_k home_i_k = 1            (this and the rows below only if K > 1)
    hot_at_home_l_k, dense_at_home_l_k, head_at_home_k    has_hot, dense, head <= home
    order_i_k          sum_(j <= k) home_(i+1)_j <= sum_(j <= k) home_i_j

The workspace needs no variable: a placement with nothing on the GPU, which needs no workspace,
satisfies the budget row anyway. A GPU whose budget does not hold its workspace gets no variables at
all. No rule is needed for a layer with both hot and cold neurons: if its dense block is on the GPU,
the cold ones split the layer; if it is on the CPU, the hot ones do. Nothing forces the hottest
groups to be on the GPU: where the GPU takes longer than the CPU, another choice can balance the
layer better.

HiGHS works with absolute tolerances of 1e-6, so the unit of seconds is a thousandth of a token on
the CPU alone, and the unit of bytes the largest neuron. In each layer, the boundaries between the
start's hot and cold neurons are also boundaries between groups, so that the start is a feasible
point of the program.

Measured to a gap of 0.1 % (7B shape, f16, power-law frequencies, budgets of 2 to 14 GiB, two cores
busy with other work): 0.9-7.9 s with 1,000 groups and 1.7-31 s with 2,000; 1.1-16 s and 1.8-31 s
with one summed row instead of a row per group for the two indicator rules. Integer counts per group,
or continuous groups, ended with gaps of 15 % and 3 % at 12 GiB. Hence binary groups, a row per
group, 1,000 groups; with the start's boundaries that takes 0.4-1.3 s, and 0.7-1.0 s for a 70B shape
(80 layers of 28,672 neurons).

HiGHS's bound is not a certificate: it once called a placement of a variant of this program optimal
that was 0.07 % slower than the best, in 1,200 solves of tiny random models (HiGHS 1.15.1).

Bounds for single neurons are left to `lagrangian` and `knapsack`."""

from dataclasses import dataclass

import numpy as np
import pulp

from hotsplit.solver.multi_gpu import Pipeline, PipelinePlacement, cpu_only_plan, plan_seconds

# Over all layers and GPUs, but at least one per layer; the start's boundaries add more.
MAX_GROUPS = 1000
THOUSANDTHS = 1000.0


@dataclass(frozen=True, kw_only=True)
class _Side:
    """The variables of one layer on one GPU."""

    gpu: int
    hot_G: list[pulp.LpVariable]
    has_hot: pulp.LpVariable
    dense: pulp.LpVariable
    split: pulp.LpVariable


@dataclass(frozen=True, kw_only=True)
class _Layer:
    """The variables of one layer, and its groups: first rank, size, touched bytes."""

    starts_G: np.ndarray
    sizes_G: np.ndarray
    touched_G: np.ndarray
    sides: list[_Side]
    seconds: pulp.LpVariable


@dataclass(frozen=True, kw_only=True)
class Program:
    lp: pulp.LpProblem
    gpus: list[int]  # those whose budget holds their workspace
    layers: list[_Layer]
    heads: list[pulp.LpVariable]
    head_seconds: pulp.LpVariable
    uses: list[pulp.LpVariable]  # [K]
    runs: list[list[pulp.LpVariable]]  # [L][K]
    homes: list[list[pulp.LpVariable]]  # [I][K], empty with one GPU
    second: float  # units of the objective per second


def build_program(
    pipeline: Pipeline, *, start: PipelinePlacement | None, max_groups: int
) -> Program:
    """The program of the module's docstring."""
    lp = pulp.LpProblem("placement", pulp.LpMinimize)
    second = THOUSANDTHS / plan_seconds(pipeline, cpu_only_plan(pipeline))
    gpus = [k for k, problem in enumerate(pipeline.problems) if problem.room_bytes >= 0]
    edges = _group_edges(pipeline, start=start, max_groups=max_groups)
    layers = [
        _add_layer(lp, pipeline, gpus, layer, starts_G, second)
        for layer, starts_G in enumerate(edges)
    ]
    heads = [_binary(lp, f"head_{gpu}") for gpu in gpus]
    head_seconds = lp.add_variable("head_seconds", lowBound=0)
    head_cpu = pipeline.model.head_cpu_s * second
    gains = [
        (pipeline.problems[gpu].head_gpu_s * second - head_cpu) * head
        for gpu, head in zip(gpus, heads, strict=True)
    ]
    lp += head_seconds - pulp.lpSum(gains) == head_cpu, "head_time"
    _add_budgets(lp, pipeline, gpus, layers, heads)
    homes = _add_homes(lp, gpus, layers, heads) if len(gpus) > 1 else []
    uses = _add_uses(lp, gpus, layers, heads)
    runs = _add_runs(lp, gpus, layers, homes, uses)
    use_s = [pipeline.problems[gpu].use_s * second for gpu in gpus]
    run_s = [pipeline.problems[gpu].cpu_run_s * second for gpu in gpus] * len(runs)
    lp.setObjective(
        pulp.lpSum([layer.seconds for layer in layers] + [head_seconds])
        + _weighted(np.array(use_s), uses)
        + _weighted(np.array(run_s), [run for run_K in runs for run in run_K])
    )
    return Program(
        lp=lp,
        gpus=gpus,
        layers=layers,
        heads=heads,
        head_seconds=head_seconds,
        uses=uses,
        runs=runs,
        homes=homes,
        second=second,
    )


def _group_edges(
    pipeline: Pipeline, *, start: PipelinePlacement | None, max_groups: int
) -> list[np.ndarray]:
    """First ranks of each layer's groups: even sizes, cut again where the start's hot neurons begin
    and end."""
    model = pipeline.model
    per_layer = max(1, max_groups // (model.num_layers * pipeline.num_gpus))
    size = -(-model.num_neurons // per_layer)
    even = np.arange(0, model.num_neurons, size)
    if start is None:
        return [even] * model.num_layers
    is_other_LF = np.diff(start.placement.hot_LF, axis=1, prepend=False)
    return [np.union1d(even, np.flatnonzero(is_other_F)) for is_other_F in is_other_LF]


def _binary(lp: pulp.LpProblem, name: str) -> pulp.LpVariable:
    return lp.add_variable(name, cat=pulp.LpBinary)


def _weighted(weights_G: np.ndarray, variables: list[pulp.LpVariable]) -> pulp.LpAffineExpression:
    return pulp.LpAffineExpression(list(zip(variables, weights_G.tolist(), strict=True)))


def _add_layer(
    lp: pulp.LpProblem,
    pipeline: Pipeline,
    gpus: list[int],
    index: int,
    starts_G: np.ndarray,
    second: float,
) -> _Layer:
    """Adds one layer's variables and its own constraints."""
    model = pipeline.model
    layer = _Layer(
        starts_G=starts_G,
        sizes_G=np.diff(np.append(starts_G, model.num_neurons)),
        touched_G=np.add.reduceat(model.touched_LF[index], starts_G),
        sides=[_side(lp, index, gpu, len(starts_G)) for gpu in gpus],
        seconds=lp.add_variable(f"seconds_{index}", lowBound=0),
    )
    cpu_unit = float(model.cpu_s_per_byte_L[index]) * second
    dense_cpu = float(model.dense_cpu_s_L[index]) * second
    dense_seconds, cpu_side = dense_cpu, float(layer.touched_G.sum()) * cpu_unit
    for side in layer.sides:
        problem = pipeline.problems[side.gpu]
        dense_gpu = float(problem.dense_gpu_s_L[index]) * second
        dense_seconds = dense_seconds + (dense_gpu - dense_cpu) * side.dense
        cpu_side = cpu_side - _weighted(layer.touched_G * cpu_unit, side.hot_G)
        cpu_side = cpu_side + problem.hand_over_s * second * side.split
    lp += layer.seconds >= dense_seconds + cpu_side, f"cpu_side_{index}"
    for side in layer.sides:
        problem, name = pipeline.problems[side.gpu], f"{index}_{side.gpu}"
        hot_unit = float(problem.hot_s_per_byte_L[index]) * second
        gpu_side = _weighted(layer.touched_G * hot_unit, side.hot_G)
        gpu_side = gpu_side + problem.kernels_s * second * side.has_hot
        lp += layer.seconds >= dense_seconds + gpu_side, f"gpu_side_{name}"
        for group, hot in enumerate(side.hot_G):
            lp += hot <= side.has_hot, f"hot_is_seen_{index}_{group}_{side.gpu}"
            lp += side.dense - hot <= side.split, f"cold_is_split_{index}_{group}_{side.gpu}"
        lp += side.has_hot - side.dense <= side.split, f"hot_is_split_{name}"
        num_hot, least = _weighted(layer.sizes_G, side.hot_G), int(problem.min_hot_L[index])
        lp += num_hot >= least * side.has_hot, f"least_hot_{name}"
    return layer


def _side(lp: pulp.LpProblem, index: int, gpu: int, num_groups: int) -> _Side:
    return _Side(
        gpu=gpu,
        hot_G=[_binary(lp, f"hot_{index}_{group}_{gpu}") for group in range(num_groups)],
        has_hot=_binary(lp, f"has_hot_{index}_{gpu}"),
        dense=_binary(lp, f"dense_{index}_{gpu}"),
        split=_binary(lp, f"split_{index}_{gpu}"),
    )


def _add_budgets(
    lp: pulp.LpProblem,
    pipeline: Pipeline,
    gpus: list[int],
    layers: list[_Layer],
    heads: list[pulp.LpVariable],
) -> None:
    """The budgets of the GPUs and of the host, in units of the largest neuron."""
    model = pipeline.model
    unit = float(model.neuron_bytes_L.max())
    everything: list[tuple[pulp.LpVariable, float]] = []
    for position, (gpu, head) in enumerate(zip(gpus, heads, strict=True)):
        terms = [(head, model.head_bytes / unit)]
        for index, layer in enumerate(layers):
            side = layer.sides[position]
            terms.append((side.dense, int(model.dense_bytes_L[index]) / unit))
            sizes = (layer.sizes_G * int(model.neuron_bytes_L[index]) / unit).tolist()
            terms.extend(zip(side.hot_G, sizes, strict=True))
        everything += terms
        room = pipeline.problems[gpu].room_bytes / unit
        lp += pulp.LpAffineExpression(terms) <= room, f"budget_{gpu}"
    if pipeline.need_bytes > 0:
        lp += pulp.LpAffineExpression(everything) >= pipeline.need_bytes / unit, "host"


def _add_homes(
    lp: pulp.LpProblem, gpus: list[int], layers: list[_Layer], heads: list[pulp.LpVariable]
) -> list[list[pulp.LpVariable]]:
    """The homes of the layers and the head, which never decrease."""
    homes = [[_binary(lp, f"home_{i}_{k}") for k in gpus] for i in range(len(layers) + 1)]
    for item, home_K in enumerate(homes):
        lp += pulp.lpSum(home_K) == 1, f"one_home_{item}"
    for index, layer in enumerate(layers):
        for side, home in zip(layer.sides, homes[index], strict=True):
            lp += side.has_hot <= home, f"hot_at_home_{index}_{side.gpu}"
            lp += side.dense <= home, f"dense_at_home_{index}_{side.gpu}"
        for count in range(1, len(gpus)):
            before, after = pulp.lpSum(homes[index][:count]), pulp.lpSum(homes[index + 1][:count])
            lp += after <= before, f"order_{index}_{gpus[count - 1]}"
    for gpu, head, home in zip(gpus, heads, homes[-1], strict=True):
        lp += head <= home, f"head_at_home_{gpu}"
    return homes


def _add_uses(
    lp: pulp.LpProblem, gpus: list[int], layers: list[_Layer], heads: list[pulp.LpVariable]
) -> list[pulp.LpVariable]:
    """Whether each GPU is used."""
    uses = [_binary(lp, f"uses_{gpu}") for gpu in gpus]
    for position, (gpu, head, is_used) in enumerate(zip(gpus, heads, uses, strict=True)):
        for index, layer in enumerate(layers):
            side = layer.sides[position]
            lp += side.has_hot <= is_used, f"hot_uses_{index}_{gpu}"
            lp += side.dense <= is_used, f"dense_uses_{index}_{gpu}"
        lp += head <= is_used, f"head_uses_{gpu}"
    return uses


def _add_runs(
    lp: pulp.LpProblem,
    gpus: list[int],
    layers: list[_Layer],
    homes: list[list[pulp.LpVariable]],
    uses: list[pulp.LpVariable],
) -> list[list[pulp.LpVariable]]:
    """The starts of runs on the CPU. Continuous: at the optimum they are 0 or 1 by themselves."""
    runs, before_K = [], [pulp.lpSum([]) for _ in gpus]
    for index, layer in enumerate(layers):
        home_K = homes[index] if homes else [1] * len(gpus)
        off_K = [home - side.dense for home, side in zip(home_K, layer.sides, strict=True)]
        run_K = [lp.add_variable(f"run_{index}_{gpu}", lowBound=0) for gpu in gpus]
        for gpu, run, off, before, is_used in zip(gpus, run_K, off_K, before_K, uses, strict=True):
            lp += run >= off - before - 1 + is_used, f"begins_{index}_{gpu}"
        runs.append(run_K)
        before_K = off_K
    return runs
