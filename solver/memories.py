"""Refuses memories that are too small for any plan, and names the smallest that suffice.

The smallest memories come from the same exact sums (`fullest`) that decide whether there is a plan,
so they work, and one byte less is refused. If several modes are allowed, the smallest memory is
that of the mode that needs least."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hotsplit.errors import DoesNotFitError
from hotsplit.solver.fullest import fullest_plan, least_room
from hotsplit.solver.inputs import Inputs
from hotsplit.solver.multi_gpu import Pipeline, bytes_of_gpus
from hotsplit.solver.three_memories import missing_bytes
from hotsplit.system.sizes import format_bytes

MIB, GIB = 1 << 20, 1 << 30


@dataclass(frozen=True, kw_only=True)
class Smallest:
    """Memories that would suffice: either these budgets or this main memory (None: no size is
    enough, or none was sought), or with `together` only both."""

    budgets: tuple[int, ...] | None  # per GPU; those that need not change are as given
    host: int | None
    together: bool = False
    context: int | None = None  # the longest that fits, where keys and values are in main memory


class TooSmallError(DoesNotFitError):
    """Memories that hold no plan of one mode."""

    def __init__(self, inputs: Inputs, pipeline: Pipeline, smallest: Smallest) -> None:
        super().__init__(_line(inputs, pipeline, smallest))
        self.inputs, self.pipeline, self.smallest = inputs, pipeline, smallest


def check_budgets(inputs: Inputs, pipeline: Pipeline) -> None:
    """Raises TooSmallError if a quick check shows that the memories hold no plan: a budget that
    holds nothing, or too little room in all."""
    is_unusable = any(0 < p.budget_bytes < p.minimum_bytes for p in pipeline.problems)
    room = min(pipeline.room_bytes, pipeline.model.placeable_bytes)
    has_room = room >= pipeline.need_bytes
    if inputs.drive is not None:
        has_room = has_room or missing_bytes(inputs.with_slots(pipeline)) <= 0
    if is_unusable or not has_room:
        raise too_small(inputs, pipeline)


def too_small(inputs: Inputs, pipeline: Pipeline) -> TooSmallError:
    """The refusal of memories that hold no plan."""
    usable = tuple(
        max(p.budget_bytes, p.minimum_bytes) if p.budget_bytes > 0 else 0 for p in pipeline.problems
    )
    if inputs.drive is not None and usable == inputs.budgets:
        in_memory = pipeline.need_bytes - sum(bytes_of_gpus(pipeline, fullest_plan(pipeline)))
        host = inputs.host_budget + min(in_memory, missing_bytes(inputs.with_slots(pipeline)))
        return TooSmallError(inputs, pipeline, Smallest(budgets=None, host=host))
    raised = pipeline if usable == inputs.budgets else replace(inputs, budgets=usable).pipeline()
    missing = raised.need_bytes - sum(bytes_of_gpus(raised, fullest_plan(raised)))
    host = inputs.host_budget + missing
    if usable == inputs.budgets:
        context = _context(inputs, missing)
        smallest = Smallest(budgets=_more(inputs, raised), host=host, context=context)
    elif missing <= 0:
        smallest = Smallest(budgets=usable, host=None)
    elif (budgets := _more(inputs, raised)) is None:
        smallest = Smallest(budgets=usable, host=host, together=True)
    else:
        smallest = Smallest(budgets=budgets, host=None)
    return TooSmallError(inputs, pipeline, smallest)


def _context(inputs: Inputs, missing: int) -> int | None:
    """The longest context whose keys take at least `missing` bytes less of main memory, or None."""
    if inputs.kv_offload is None:
        return None
    limit = inputs.offloaded_bytes - missing
    low, high = 0, inputs.context_length  # `low` fits or is 0, `high` does not fit
    while high - low > 1:
        middle = (low + high) // 2
        fits = replace(inputs, context_length=middle).offloaded_bytes <= limit
        low, high = (middle, high) if fits else (low, middle)
    return low or None


def least_of(errors: Sequence[TooSmallError]) -> TooSmallError:
    """One refusal for several modes: each memory is that of the mode that needs least of it."""
    with_cache = [e for e in errors if e.inputs.swapped_rows and e.smallest.host is not None]
    if with_cache:  # plans exist, but main memory is too small for them
        return min(with_cache, key=lambda e: e.smallest.host or 0)
    alone = [e for e in errors if not e.smallest.together]
    if not alone:
        return min(errors, key=lambda e: (e.smallest.host, e.smallest.budgets))
    budgets = [e.smallest.budgets for e in alone if e.smallest.budgets is not None]
    hosts = [e.smallest.host for e in alone if e.smallest.host is not None]
    contexts = [e.smallest.context for e in alone if e.smallest.context is not None]
    smallest = Smallest(
        budgets=min(budgets, key=sum, default=None),
        host=min(hosts, default=None),
        context=max(contexts, default=None),
    )
    first = next((e for e in alone if e.smallest.budgets == smallest.budgets), alone[0])
    return TooSmallError(first.inputs, first.pipeline, smallest)


def _more(inputs: Inputs, pipeline: Pipeline) -> tuple[int, ...] | None:
    """The budgets, that of the last GPU in use (or the first) the least that suffices, or None."""
    if not inputs.machine.gpus:
        return None
    budgets = [problem.budget_bytes for problem in pipeline.problems]
    gpu = max((gpu for gpu, budget in enumerate(budgets) if budget > 0), default=0)
    room = least_room(pipeline, gpu)
    if room is None:
        return None
    budgets[gpu] = room + pipeline.problems[gpu].workspace_bytes
    return tuple(budgets)


def _line(inputs: Inputs, pipeline: Pipeline, smallest: Smallest) -> str:
    budgets, problem = smallest.budgets, pipeline.model
    if inputs.swapped_rows and budgets is None and smallest.host is not None:
        return (
            f"{inputs.host_words} do not hold the plan with a neuron cache, which keeps a copy of"
            " each hot neuron there; with this budget of GPU memory the smallest --ram"
            f" that holds one is {_size(smallest.host)}, or leave --neuron-cache out"
        )
    if pipeline.num_gpus == 1 and not pipeline.need_bytes and budgets is not None:
        if inputs.swapped_rows:
            return (
                f"a budget of {format_bytes(problem.budget_bytes)} holds nothing besides the neuron"
                f" cache: the smallest that does is {_size(budgets[0])}, of which"
                f" {format_bytes(problem.workspace_bytes)} are workspace and the cache's;"
                " most_rows=N with a smaller N takes less"
            )
        return (
            f"a budget of {format_bytes(problem.budget_bytes)} holds nothing: the smallest that"
            f" works is {_size(budgets[0])}, of which {format_bytes(problem.workspace_bytes)} are"
            " workspace; 0 gives a plan for the CPU alone"
        )
    shorter = "" if smallest.context is None else f"; a --context of {smallest.context:,} fits, too"
    if budgets is None and inputs.host_budget < inputs.always_on_host:
        assert smallest.host is not None
        what = "the embedding and the workspace"
        if inputs.kv_offload is not None:
            what = "the embedding, the workspace and the keys and values"
        return (
            f"{inputs.host_words} hold no plan: {what}, which are always there, take"
            f" {format_bytes(inputs.always_on_host)}; with these budgets of GPU memory the smallest"
            f" --ram that works is {_size(smallest.host)}{shorter}"
        )
    now = tuple(problem.budget_bytes for problem in pipeline.problems)
    sizes = [
        f"{_size(size)} as given" if size == given else _size(size)
        for size, given in zip(budgets or (), now, strict=False)
    ]
    named = [f"{' + '.join(sizes)} of GPU memory"] if sizes else []
    named += [] if smallest.host is None else [f"{_size(smallest.host)} of main memory"]
    given = " + ".join(map(format_bytes, now))
    return (
        f"{inputs.paths[0]}: does not fit into {given} of GPU memory and {inputs.host_words}; the"
        " smallest that works is"
        f" {(' and ' if smallest.together else ', or ').join(named)}{shorter}"
    )


def _size(num_bytes: int) -> str:
    name, unit = ("GiB", GIB) if num_bytes >= GIB else ("MiB", MIB)
    hundredths = -(-100 * num_bytes // unit)  # rounded up, so that it works as an option
    return f"{hundredths / 100:.2f} {name} ({num_bytes:,} bytes)"
