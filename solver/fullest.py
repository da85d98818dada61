"""How full memories can be made: exact sums of whole blocks and whole neurons.

A plan is infeasible if main memory cannot hold what is not on the GPUs. Whether some plan fits all
memories, and which memories would suffice, depends on sums of bytes alone: a layer has either none
of its neurons on the GPU or C_l to F of them, and a dense block or the head is on a GPU or not. All
sums that a run of layers can have, up to the available room, are kept as the set bits of one
integer, in units of the sizes' greatest common divisor; items of equal size are added together, by
doubling. The searches for fast plans try only a few of these sums, so `optimise` first asks here
whether any plan fits.

Letters: K GPUs, L layers, I = L + 1 items (the head is the last), C rows of cuts."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from math import gcd

import numpy as np

from hotsplit.solver.multi_gpu import Groups, Pipeline, PipelinePlacement, joined
from hotsplit.solver.problem import Problem, SolvedPlacement, held_bytes, of_counts

Intervals = list[tuple[int, int]]  # of counts, both ends included, ascending and disjoint


@dataclass(frozen=True, kw_only=True)
class _Class:
    """Items of one size: the neurons of `layers`, or dense blocks, each of one layer or of a group
    of them, or the head."""

    size: int
    counts: Intervals
    layers: tuple[int, ...] = ()
    blocks: tuple[tuple[int, ...], ...] = ()


def fullest(run: Problem, room_bytes: int, together: Groups = ()) -> SolvedPlacement:
    """The placement with the most bytes up to `room_bytes`, workspace excluded; dense blocks of the
    groups `together` are there all or none."""
    classes = list(_classes(run, together))
    return _placement(run, classes, _counts_below(classes, max(0, room_bytes)))


def emptiest(run: Problem, need_bytes: int, together: Groups = ()) -> SolvedPlacement | None:
    """The placement with the fewest bytes that are at least `need_bytes`; None if all have less."""
    classes = list(_classes(run, together))
    spare = sum(c.size * c.counts[-1][1] for c in classes) - need_bytes
    if spare < 0:
        return None
    # What stays on the CPU is as large as possible, but at most `spare`.
    left = [
        _Class(
            size=c.size,
            counts=[(c.counts[-1][1] - b, c.counts[-1][1] - a) for a, b in reversed(c.counts)],
        )
        for c in classes
    ]
    counts = [
        c.counts[-1][1] - count
        for c, count in zip(classes, _counts_below(left, spare), strict=True)
    ]
    return _placement(run, classes, counts)


def fullest_plan(pipeline: Pipeline) -> PipelinePlacement:
    """The plan that leaves the fewest bytes to main memory."""
    best: PipelinePlacement | None = None
    best_bytes = -1
    known: dict[tuple[int, int, int], SolvedPlacement] = {}
    cut_CK, most_CK = _most(pipeline)
    for less, cut in _in_order(cut_CK, -most_CK.sum(axis=1)):
        if -less <= best_bytes:
            break
        keys = [(gpu, cut[gpu], cut[gpu + 1]) for gpu in range(pipeline.num_gpus)]
        for key in keys:
            if key not in known:
                run = pipeline.run(*key)
                known[key] = fullest(run, run.room_bytes, pipeline.together)
        held = sum(held_bytes(pipeline.run(*key), known[key]) for key in keys)
        if held > best_bytes:
            best_bytes, best = held, joined(pipeline, np.array(cut), [known[k] for k in keys])
    assert best is not None
    return best


def least_room(pipeline: Pipeline, gpu: int) -> int | None:
    """The least room of one GPU, above 0, with which some plan fits all memories if the other GPUs'
    room stays as it is; None if no room suffices."""
    best: int | None = None
    cut_CK, most_CK = _most(pipeline)
    others_C = most_CK.sum(axis=1) - most_CK[:, gpu]
    for least, cut in _in_order(cut_CK, np.maximum(1, pipeline.need_bytes - others_C)):
        if best is not None and least >= best:
            break
        others = 0
        for other in set(range(pipeline.num_gpus)) - {gpu}:
            run = pipeline.run(other, cut[other], cut[other + 1])
            others += held_bytes(run, fullest(run, run.room_bytes, pipeline.together))
        run = pipeline.run(gpu, cut[gpu], cut[gpu + 1])
        found = emptiest(run, max(1, pipeline.need_bytes - others), pipeline.together)
        if found is not None and (best is None or held_bytes(run, found) < best):
            best = held_bytes(run, found)
    return best


def _in_order(cut_CK: np.ndarray, key_C: np.ndarray) -> Iterator[tuple[int, list[int]]]:
    """Yields every row of cuts with its key, the least key first."""
    for row in np.argsort(key_C, kind="stable"):
        yield int(key_C[row]), cut_CK[row].tolist()


def _most(pipeline: Pipeline) -> tuple[np.ndarray, np.ndarray]:
    """Every row of cuts [C, K + 1], and the most bytes a GPU could hold of its run [C, K]."""
    model, cut_CK = pipeline.model, pipeline.cut_rows()
    layers = model.dense_bytes_L + model.neuron_bytes_L * model.num_neurons
    until_I = np.concatenate([[0], np.cumsum(np.append(layers, model.head_bytes))])
    room_K = np.array([max(0, problem.room_bytes) for problem in pipeline.problems])
    return cut_CK, np.minimum(np.diff(until_I[cut_CK], axis=1), room_K)


def _classes(run: Problem, together: Groups) -> Iterator[_Class]:
    if run.head_bytes:
        yield _Class(size=run.head_bytes, counts=[(0, 1)])
    alone = set(range(run.num_layers)).difference(*together)
    blocks = [*together, *((layer,) for layer in sorted(alone))]
    sizes = [int(run.dense_bytes_L[list(block)].sum()) for block in blocks]
    for size in sorted({*sizes} - {0}):
        alike = tuple(block for block, own in zip(blocks, sizes, strict=True) if own == size)
        yield _Class(size=size, counts=[(0, len(alike))], blocks=alike)
    for size in sorted(set(run.neuron_bytes_L.tolist()) - {0}):
        layers = tuple(np.flatnonzero(run.neuron_bytes_L == size).tolist())
        layers = tuple(sorted(layers, key=lambda layer: int(run.min_hot_L[layer])))
        least = np.cumsum(np.maximum(1, run.min_hot_L[list(layers)])).tolist()
        counts = [(low, (i + 1) * run.num_neurons) for i, low in enumerate(least)]
        yield _Class(size=size, counts=_union([(0, 0), *counts]), layers=layers)


def _union(intervals: Intervals) -> Intervals:
    """Merges ascending intervals that touch or overlap; drops empty ones."""
    found: Intervals = []
    for low, high in intervals:
        if low > high:
            continue
        if found and low <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(found[-1][1], high))
        else:
            found.append((low, high))
    return found


def _counts_below(classes: list[_Class], limit: int) -> list[int]:
    """Counts of each class with the most bytes up to `limit`."""
    if not classes:
        return []
    unit = reduce(gcd, (c.size for c in classes))
    mask = (1 << (limit // unit + 1)) - 1
    sums = [1]  # bit s: the classes so far can take s units
    for c in classes:
        sums.append(_with_class(sums[-1], c.size // unit, c.counts, mask))
    total, counts = sums[-1].bit_length() - 1, []
    for c, before in zip(reversed(classes), reversed(sums[:-1]), strict=True):
        count = _count_of(before, total, c.size // unit, c.counts)
        total -= count * (c.size // unit)
        counts.append(count)
    assert total == 0
    return counts[::-1]


def _with_class(sums: int, size: int, counts: Intervals, mask: int) -> int:
    found = 0
    for low, high in counts:
        part = (sums << low * size) & mask if low * size < mask.bit_length() else 0
        left = min(high - low, mask.bit_length() // size)
        step = 1
        while left > 0:  # `part` has the sums for `step` consecutive counts from `low` on
            more = min(step, left)
            part |= (part << more * size) & mask
            left, step = left - more, step + more
        found |= part
    return found


def _count_of(before: int, total: int, size: int, counts: Intervals) -> int:
    """The largest count of `size` that leaves a sum among those `before`."""
    bits = np.frombuffer(before.to_bytes(before.bit_length() // 8 + 1, "little"), np.uint8)
    for low, high in reversed(counts):
        left = total - size * np.arange(min(high, total // size), low - 1, -1, dtype=np.int64)
        inside = left < 8 * len(bits)
        at = np.where(inside, left, 0)
        is_sum = inside & ((bits[at >> 3] >> (at & 7)) & 1).astype(bool)
        if is_sum.any():
            return min(high, total // size) - int(is_sum.argmax())
    raise AssertionError((total, size, counts))


def _placement(run: Problem, classes: list[_Class], counts: list[int]) -> SolvedPlacement:
    num_hot_L, dense_L = np.zeros(run.num_layers, np.int64), np.zeros(run.num_layers, bool)
    head = False
    for c, count in zip(classes, counts, strict=True):
        if c.layers:
            num_hot_L[list(c.layers)] = _spread(run, c.layers, count)
        elif c.blocks:
            dense_L[[layer for block in c.blocks[:count] for layer in block]] = True
        else:
            head = bool(count)
    return of_counts(run, num_hot_L, dense_L, head)


def _spread(run: Problem, layers: tuple[int, ...], count: int) -> list[int]:
    """Spreads this many neurons over as many layers as possible; `layers` are sorted by C_l."""
    least = [max(1, int(run.min_hot_L[layer])) for layer in layers]
    used = int((np.cumsum(least) <= count).sum()) if count else 0
    found = least[:used] + [0] * (len(layers) - used)
    left = count - sum(found)
    for i in range(used):
        more = min(left, run.num_neurons - found[i])
        found[i] += more
        left -= more
    assert left == 0, (count, least)
    return found
