"""The fastest of all plans of a small problem, by trying every choice.

A layer's neurons take the same bytes each, so of all sets of n hot neurons only one that is fastest
can be in a fastest plan; the sets of all sizes are compared one by one. The options of an item (a
layer, or the head) on one GPU are then (dense block there or not, n hot neurons), and the items are
added in order. Of partial plans that agree in

    the home of the last item, whether its block is there, and the bytes on every GPU

only the fastest is kept: whatever follows costs them the same. Nothing is rounded, so the result is
the minimum of T over all plans that keep to all memories (`multi_gpu`), and proves itself.

Letters: L layers, F neurons, H = 2^F sets of hot neurons, K GPUs, O options, S partial plans."""

from dataclasses import dataclass

import numpy as np

from hotsplit.solver.multi_gpu import Pipeline, PipelinePlacement
from hotsplit.solver.problem import Placement, Problem, sets_seconds

MAX_NEURONS = 12  # of a layer: 4,096 sets
MAX_CHOICES = 1_000_000  # partial plans times options, for each item


@dataclass(frozen=True, kw_only=True)
class _Options:
    """What an item may have on one GPU."""

    gpu: int
    bytes_O: np.ndarray
    seconds_O: np.ndarray
    has_block_O: np.ndarray  # bool
    set_O: np.ndarray  # number of the set of hot neurons: bit j is the neuron of rank j
    is_head: bool = False


@dataclass(frozen=True, kw_only=True)
class _Plans:
    """Partial plans, and how each came from the plans before its last item."""

    gpu_S: np.ndarray  # the home of the last item, at first 0
    has_block_S: np.ndarray  # of the last item; before the first, as if there had been one
    held_SK: np.ndarray  # int64 bytes
    seconds_S: np.ndarray
    before_S: np.ndarray
    set_S: np.ndarray

    def only(self, chosen: np.ndarray) -> "_Plans":
        return _Plans(**{name: values[chosen] for name, values in vars(self).items()})


def best_of_all(pipeline: Pipeline) -> PipelinePlacement | None:
    """The fastest plan; None if there are too many choices to try, or no plan fits."""
    model = pipeline.model
    if model.num_neurons > MAX_NEURONS:
        return None
    items = [_layer_options(pipeline, layer) for layer in range(model.num_layers)]
    items.append(_head_options(pipeline))
    zero = np.zeros(1, np.int64)
    plans = _Plans(
        gpu_S=zero, has_block_S=zero == 0, held_SK=np.zeros((1, pipeline.num_gpus), np.int64),
        seconds_S=np.zeros(1), before_S=zero, set_S=zero,
    )  # fmt: skip
    steps = []
    for item in items:
        num_options = sum(len(options.bytes_O) for options in item)
        if len(plans.seconds_S) * num_options > MAX_CHOICES:
            return None
        plans = _merged([_with(pipeline, plans, options) for options in item])
        steps.append(plans)
    fits_S = plans.held_SK.sum(axis=1) >= pipeline.need_bytes
    if not fits_S.any():
        return None
    return _read(model, steps, int(np.where(fits_S, plans.seconds_S, np.inf).argmin()))


def _usable(pipeline: Pipeline) -> list[int]:
    return [gpu for gpu, problem in enumerate(pipeline.problems) if problem.room_bytes >= 0]


def _layer_options(pipeline: Pipeline, layer: int) -> list[_Options]:
    """The options of a layer whose home is each GPU."""
    model, found = pipeline.model, []
    for gpu in _usable(pipeline) or [0]:
        problem = pipeline.problems[gpu]
        for dense in (False, True):
            set_N, seconds_N = _fastest_sets(problem, layer, dense)
            dense_s = (problem.dense_gpu_s_L if dense else problem.dense_cpu_s_L)[layer]
            count_N = np.arange(model.num_neurons + 1)
            least = int(problem.min_hot_L[layer])
            is_allowed_N = (count_N == 0) | (count_N >= least)
            num_bytes_N = count_N * int(model.neuron_bytes_L[layer])
            num_bytes_N += int(model.dense_bytes_L[layer]) * dense
            found.append(
                _Options(
                    gpu=gpu,
                    bytes_O=num_bytes_N[is_allowed_N],
                    seconds_O=(seconds_N + dense_s)[is_allowed_N],
                    has_block_O=np.full(is_allowed_N.sum(), dense),
                    set_O=set_N[is_allowed_N],
                )
            )
    return found


def _fastest_sets(problem: Problem, layer: int, dense: bool) -> tuple[np.ndarray, np.ndarray]:
    """For n = 0..F the fastest set of n hot neurons, and its M_l."""
    set_H = np.arange(2**problem.num_neurons)
    is_in_HF = (set_H[:, None] >> np.arange(problem.num_neurons)) & 1
    count_H = is_in_HF.sum(axis=1)
    seconds_H = sets_seconds(problem, layer, is_in_HF > 0, dense)
    order_H = np.lexsort((seconds_H, count_H))
    first_N = np.searchsorted(count_H[order_H], np.arange(problem.num_neurons + 1))
    return set_H[order_H[first_N]], seconds_H[order_H[first_N]]


def _head_options(pipeline: Pipeline) -> list[_Options]:
    model = pipeline.model
    return [
        _Options(
            gpu=gpu,
            bytes_O=np.array([0, model.head_bytes]),
            seconds_O=np.array([model.head_cpu_s, pipeline.problems[gpu].head_gpu_s]),
            has_block_O=np.array([False, True]),
            set_O=np.zeros(2, np.int64),
            is_head=True,
        )
        for gpu in _usable(pipeline) or [0]
    ]


def _with(pipeline: Pipeline, plans: _Plans, options: _Options) -> _Plans:
    """Every plan with every option added that fits its GPU and keeps the order of the GPUs."""
    before_S, option_S = (
        index.ravel() for index in np.indices((len(plans.seconds_S), len(options.bytes_O)))
    )
    problem, has_block_S = pipeline.problems[options.gpu], options.has_block_O[option_S]
    is_first_S = plans.gpu_S[before_S] != options.gpu  # of this home
    is_after_block_S = plans.has_block_S[before_S] | is_first_S
    held_SK = plans.held_SK[before_S]
    was_used_S = held_SK[:, options.gpu] > 0
    held_SK[:, options.gpu] += options.bytes_O[option_S]
    is_used_S = held_SK[:, options.gpu] > 0
    # A run on the CPU costs something once its GPU is used: those before then, at most one, are
    # counted with the first use.
    is_first_use_S, begins_S = is_used_S & ~was_used_S, is_after_block_S & ~has_block_S
    num_runs_S = (is_first_use_S & ~is_after_block_S).astype(int)
    if not options.is_head:
        num_runs_S += is_used_S & begins_S
    seconds_S = plans.seconds_S[before_S] + options.seconds_O[option_S]
    seconds_S += problem.use_s * is_first_use_S + problem.cpu_run_s * num_runs_S
    added = _Plans(
        gpu_S=np.full(len(option_S), options.gpu),
        has_block_S=has_block_S,
        held_SK=held_SK,
        seconds_S=seconds_S,
        before_S=before_S,
        set_S=options.set_O[option_S],
    )
    fits_S = held_SK[:, options.gpu] <= max(0, problem.room_bytes)
    return added.only(fits_S & (options.gpu >= plans.gpu_S[before_S]))


def _merged(parts: list[_Plans]) -> _Plans:
    """All of these, without those that a faster one makes useless."""
    names = vars(parts[0])
    plans = _Plans(**{name: np.concatenate([getattr(p, name) for p in parts]) for name in names})
    keys = np.column_stack([plans.gpu_S, plans.has_block_S, plans.held_SK])
    order = np.lexsort((plans.seconds_S, *keys.T))
    is_first = np.ones(len(order), bool)
    is_first[1:] = (np.diff(keys[order], axis=0) != 0).any(axis=1)
    return plans.only(order[is_first])


def _read(model: Problem, steps: list[_Plans], index: int) -> PipelinePlacement:
    """The plan that ends with this one of the last step."""
    chosen = []
    for plans in reversed(steps):
        chosen.append((plans.gpu_S[index], plans.has_block_S[index], plans.set_S[index]))
        index = int(plans.before_S[index])
    home_I, has_block_I, set_I = (np.array(values) for values in zip(*chosen[::-1], strict=True))
    hot_LF = (set_I[:-1, None] >> np.arange(model.num_neurons)) & 1 > 0
    return PipelinePlacement(
        placement=Placement(hot_LF=hot_LF, dense_L=has_block_I[:-1], head=bool(has_block_I[-1])),
        home_I=home_I,
    )
