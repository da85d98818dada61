"""Chooses how `hotsplit run` runs a model: type, device, mode, predictors, plan.

Each decision is announced in one line with its reason. Everything that follows from sizes and
memories is decided before any stage runs; whether predictors pay off is decided after a first look
at how many neurons fire (`worth`). The user's options take precedence."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from hotsplit.artifacts.model_file import ModelFile, for_context, with_rope_scaling
from hotsplit.convert.options import Outtype
from hotsplit.costs import part_bytes
from hotsplit.costs.bytes_read import neurons_read
from hotsplit.costs.default_mode import can_silence, computes_every_neuron, mode_meant
from hotsplit.costs.type_bytes import TypeBytes, type_bytes, type_words
from hotsplit.errors import HotsplitError
from hotsplit.model.tensors import Layout
from hotsplit.model.weight_types import BY_NAME, BY_QUALITY, FLOAT_NAMES, IN_MEMORY
from hotsplit.options.engine_config import EngineConfig
from hotsplit.options.key_selection import KeySelection
from hotsplit.run.default_budgets import Room
from hotsplit.run.source import RunSource
from hotsplit.runtime.resolved_options import as_read, cache_types_of, device_of
from hotsplit.runtime.resolved_options import context_of as longest_text
from hotsplit.runtime.step.workspace import workspace_bytes
from hotsplit.system.sizes import format_bytes

# Assumed until predictors are trained: the bytes of a whole gate matrix in 4-bit blocks relative to
# those of its layer's neurons, by the neurons' type (docs/predictors.md); and a tenth more neurons
# named than fire.
PREDICTOR_SHARE = {"f32": 0.05, "f16": 0.094, "bf16": 0.094, "q8_0": 0.176}
NAMED_PER_FIRING = 1.1
NEARLY = 0.1  # of a budget that a model may exceed; by default a tenth of the free memory is left
LEAST_GAIN = 0.1  # share of a token's bytes saved that is worth minutes of training


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """The user's options; None leaves the choice to this module."""

    vram: tuple[int, ...] | None = None
    outtype: Outtype | None = None
    tokens: int | None = None  # to profile on
    corpora: tuple[Path, ...] = ()  # texts to profile on; (): the text in the package
    tokenizer: Path | None = None  # a tokenizer.json
    activation: str | None = None  # of a GGUF that does not record it
    is_verified: bool | None = None  # compare a converted model with its source
    engine: EngineConfig = EngineConfig()

    def __post_init__(self) -> None:
        if self.tokens is not None and self.tokens < 1:
            raise HotsplitError(f"tokens is {self.tokens}, wanted 1 or more")


@dataclass(frozen=True, kw_only=True)
class Choice:
    """How to run a model. `model` describes the file that will run, which may still have to be
    made; `predictors` says whether to train some, None if a first look decides. `budgets` are those
    of a plan, () without one."""

    model: ModelFile
    outtype: Outtype | None
    layout: Layout
    is_converted: bool
    device: str | None
    predictors: bool | None
    budgets: tuple[int, ...]
    context_length: int
    types: tuple[TypeBytes, ...]  # of the model's matrices
    lines: tuple[str, ...]

    def needs_look(self, wishes: Wishes) -> bool:
        """True if a few tokens must be profiled first: to decide on predictors, to choose how many
        tokens to train them on, or because a plan needs counts and there are no others."""
        if self.predictors:
            return wishes.tokens is None
        is_counted = not computes_every_neuron(self.model, wishes.engine.mode)
        return self.predictors is None or (bool(self.budgets) and is_counted)


def choose(source: RunSource, wishes: Wishes, room: Room) -> Choice:
    """Chooses how to run a model. Raises HotsplitError if it cannot be run as wished."""
    why_cpu = _only_on_the_cpu(source.any_model, wishes)
    left = room if why_cpu is None else replace(room, gpus=())
    found = _choose(source, wishes, left, why_cpu, has_gpu=bool(room.gpus))
    if found is None:  # type and layout are those for a CPU
        found = _choose(source, wishes, replace(room, gpus=()), None, has_gpu=True)
    assert found is not None, "without a GPU nothing has to hold a pass"
    return found


def _choose(
    source: RunSource, wishes: Wishes, room: Room, why_cpu: str | None, *, has_gpu: bool
) -> Choice | None:
    """None if the smallest budget of a GPU is not above the temporaries of a pass."""
    outtype, type_line = choose_type(source, wishes, room)
    layout = choose_layout(source, outtype, wishes, room)
    own = source.as_it_is(outtype, layout)
    model = own or source.draft(outtype, layout)
    asked, texts = wishes.engine, wishes.engine.num_sequences
    if asked.mode == "predicted":
        model.refuse_predictors("leave --mode out")
    context = context_of(model, wishes)
    if room.gpus:
        smallest = min(room.gpus)
        if smallest <= workspace_bytes(model, context, "dense", gpu_budget_bytes=smallest):
            return None
    first = sum(room.gpus[:1])
    read = as_read_here(model, wishes, room)
    size = run_bytes(read, context, first, texts)
    # A mixture is on a GPU by a plan alone.
    fits = asked.kv_offload is None and size <= first and not model.spec.has_experts
    budgets = () if fits or not room.gpus else room.gpus
    predictors, mode_line = choose_predictors(
        model, wishes, is_on_gpu=fits and bool(room.gpus), has_plan=bool(budgets)
    )
    device = asked.device if room.gpus else "cpu"
    if any(each is not None for each in (asked.cache_type_k, asked.cache_type_v, asked.kv_offload)):
        planned = KeySelection.parse(asked.kv_offload) if budgets and asked.kv_offload else None
        # Refuses what the engine would refuse after all stages.
        types_device = device_of(device)
        cache_types_of(model, asked, has_plan=bool(budgets), device=types_device, planned=planned)
    where = (has_gpu and why_cpu) or _where_line(wishes, room, budgets, context, has_gpu=has_gpu)
    notes = source.stock_notes if own is not None and layout == "stock" else ()
    scaled = with_rope_scaling(model, *asked.rope, asked.context_length)
    scaling = for_context(scaled, context).spec.rope_scaling
    rotary = [] if scaling.kind == "none" else [f"rotary embeddings: {scaling.words}"]
    advice = _fits_lines(model, wishes, size, first)
    types = type_bytes(read.tensors, is_known=room.is_here)
    words = type_words(types, source.types if own is None else ()) if source.types else None
    type_lines = [type_line, *([f"types: {words}"] if words else [])]
    lines = (*type_lines, *notes, mode_line, *room.lines, where, *advice, *rotary)
    return Choice(
        model=model,
        outtype=outtype,
        layout=layout,
        is_converted=own is None,
        device=device,
        predictors=predictors,
        budgets=budgets,
        context_length=context,
        types=types,
        lines=lines,
    )


def context_of(model: ModelFile, wishes: Wishes) -> int:
    """The context length to use. Raises HotsplitError for more than the model supports with the
    scaling of rotary embeddings that is asked for, or if it cannot be scaled."""
    asked = wishes.engine
    model = with_rope_scaling(model, *asked.rope, asked.context_length)
    return longest_text(model, None, asked.context_length)


def run_bytes(
    model: ModelFile, context_length: int, gpu_budget_bytes: int = 0, num_sequences: int = 1
) -> int:
    """Bytes on one device (a GPU if it has a budget): weights, keys and values, temporaries; on the
    CPU with the draft block."""
    return sum(_items(model, context_length, gpu_budget_bytes, num_sequences).values())


def left_bytes(model: ModelFile, context_length: int, num_sequences: int = 1) -> int:
    """Those on the CPU, run as it is, while weights stay in the mapped file."""
    beside = part_bytes.bytes_beside(_items(model, context_length, 0, num_sequences))
    return part_bytes.packed_bytes(model.tensors) + beside


def _items(
    model: ModelFile, context_length: int, gpu_budget_bytes: int, num_sequences: int
) -> part_bytes.Items:
    workspace = workspace_bytes(model, context_length, "dense", num_sequences, gpu_budget_bytes)
    items = part_bytes.bytes_on_one_side(model, context_length, workspace, num_sequences)
    if model.layout == "stock":  # run as it is
        layers = range(model.spec.num_layers)
        items["neurons"] = sum(part_bytes.stored_neuron_bytes(model, layer) for layer in layers)
    draft = {} if gpu_budget_bytes else part_bytes.draft_bytes(model, context_length, num_sequences)
    return {item: size + draft.get(item, 0) for item, size in items.items()}


def as_read_here(model: ModelFile, wishes: Wishes, room: Room) -> ModelFile:
    """The model with the types that memory will hold, for sizes: as measured on this machine's CPU
    if it runs there alone, else with table types (kernels.grids)."""
    if room.gpus or not room.is_here:
        return model
    mode = wishes.engine.mode or mode_meant(model)
    return as_read(model, torch.device("cpu"), mode)


# ---- the layout ---------------------------------------------------------------------------------


def choose_layout(source: RunSource, outtype: Outtype | None, wishes: Wishes, room: Room) -> Layout:
    """llama.cpp's layout if the CPU reads every neuron anyway and llama.cpp has the model's graph
    and tokenizer: nothing has to be transposed, prompts are faster, and a GGUF in that layout is
    run as it is. Otherwise our own layout."""
    if source.own is not None or not _reads_all(
        source.stock or source.draft(outtype), wishes, room
    ):
        return "sparse"
    try:
        _ = source.as_it_is(outtype, "stock") or source.draft(outtype, "stock")
    except HotsplitError:  # llama.cpp does not have this model's graph or tokenizer
        return "sparse"
    return "stock"


def _reads_all(model: ModelFile, wishes: Wishes, room: Room) -> bool:
    """True if a token reads every neuron, or all of its experts', on the CPU or by a plan."""
    is_covered = not room.gpus or model.spec.has_experts
    return is_covered and wishes.engine.mode in (None, "dense") and not model.spec.silences


# ---- the type -----------------------------------------------------------------------------------


def choose_type(source: RunSource, wishes: Wishes, room: Room) -> tuple[Outtype | None, str]:
    """The type to run, and why. A source of quantised matrices keeps its own types (None), since a
    second rounding loses more. Of others it is the first with which the model fits the first GPU,
    or else all memories together: its own, if it need not be converted, then BY_QUALITY. If none
    fits, the smallest."""
    if wishes.outtype is not None:
        return wishes.outtype, f"type {wishes.outtype}: asked for"
    own, memory = source.own, room.main + sum(room.gpus)
    if source.own_type not in FLOAT_NAMES:
        if own is None and source.stock is not None and _reads_all(source.stock, wishes, room):
            own = source.stock
        return None, _own_type_line(own or source.draft(None), wishes, room)
    kinds: list[Outtype | None] = [None] if own is not None else []
    kinds += BY_QUALITY
    sizes: dict[Outtype | None, int] = {}  # kept, since reading all headers takes seconds
    limits = [(memory, "memory")]
    for limit, place in ([(room.gpus[0], "VRAM")] if room.gpus else []) + limits:
        for kind in kinds:
            if kind not in sizes:
                model = own if kind is None and own is not None else source.draft(kind)
                context, texts = context_of(model, wishes), wishes.engine.num_sequences
                read = as_read_here(model, wishes, room)
                sizes[kind] = run_bytes(read, context, num_sequences=texts)
            if sizes[kind] <= limit:
                return kind, _type_line(source, kind, _fits(sizes[kind], limit, place))
    least = min(sizes, key=lambda kind: sizes[kind])
    return least, (
        f"type {least or source.own_type}: the smallest there is, and its"
        f" {_too_large(sizes[least], room)}"
    )


def _fits(size: int, limit: int, place: str) -> str:
    return f"{format_bytes(size)} with its context, out of {format_bytes(limit)} of {place}"


def _too_large(size: int, room: Room, left: int = 0) -> str:
    """Without a GPU the rest stays in the mapped file, but for `left` bytes, without memory for
    which the model is refused."""
    line = f"{format_bytes(size)} are more than the {format_bytes(room.main + sum(room.gpus))}"
    if room.gpus:
        return f"{line} of both memories that a model should take"
    if left > room.main:
        return f"{line} of memory, and {format_bytes(left)} cannot be read from the disk"
    return f"{line} of memory: the rest is read from the disk"


def _own_type_line(model: ModelFile, wishes: Wishes, room: Room) -> str:
    context, texts = context_of(model, wishes), wishes.engine.num_sequences
    size = run_bytes(as_read_here(model, wishes, room), context, num_sequences=texts)
    memory = room.main + sum(room.gpus)
    line = f"type {model.own_type}: the file's own"
    if size <= memory:
        return f"{line} ({_fits(size, memory, 'memory')})"
    own = BY_NAME[IN_MEMORY.get(model.own_type, model.own_type)]
    smallest = BY_NAME[BY_QUALITY[-1]]
    is_smaller = smallest.bytes_per_value < own.bytes_per_value
    advice = f", or --outtype {smallest.name}, a second rounding," if is_smaller else ""
    too_large = _too_large(size, room, left_bytes(model, context, texts))
    return f"{line}; its {too_large}; a smaller file{advice} reads less"


def _type_line(source: RunSource, kind: Outtype | None, fits: str) -> str:
    if kind is None:
        return f"type {source.own_type}: the file's own ({fits})"
    if kind == BY_QUALITY[0]:
        return (
            f"type {kind}: nearly the same model as in {source.own_type}, with fewer bytes to read"
            f" per token ({fits}); --outtype q4_k is faster and loses more"
        )
    return f"type {kind}: the one that loses least among those that fit ({fits})"


# ---- the mode -----------------------------------------------------------------------------------


def choose_predictors(
    model: ModelFile, wishes: Wishes, *, is_on_gpu: bool, has_plan: bool = False
) -> tuple[bool | None, str]:
    """(whether to train predictors, why); None if a look decides."""
    if wishes.engine.mode in ("dense", "exact"):
        return False, f"mode {wishes.engine.mode}: asked for"
    if model.spec.has_experts:
        what = f"all neurons of the experts that its router chooses ({model.activation})"
        if can_silence(model) and not has_plan:
            what = f"neurons that fire ({model.activation}), of the experts that a router chooses"
        mode = "dense" if has_plan else mode_meant(model)
        return False, f"mode {mode}: a token computes {what}"
    if model.spec.needs_all_gates:
        return False, "mode exact: some layers choose neurons by all gates, and skip the others"
    if model.predictor is not None:
        return False, "the file has predictors: the fastest mode by its own record"
    if wishes.engine.mode == "predicted":
        return True, "mode predicted: asked for"
    if not can_silence(model):
        return False, (
            f"mode dense: every neuron of a {model.activation} model fires, so a profile would be"
            " useless"
        )
    if is_on_gpu:
        return False, (
            f"mode exact: {model.activation}, and all of it fits into VRAM, where it is fast"
            " without predictors; --mode predicted trains them"
        )
    return None, f"{model.activation}: a first look shows whether predictors pay off"


def worth(model: ModelFile, density: float, *, has_plan: bool) -> tuple[bool, str]:
    """(whether predictors save enough of a token's bytes if a share `density` of the neurons fires,
    why). With a plan only the neurons' bytes count, since it is neurons that stay on the CPU."""
    layers = range(model.spec.num_layers)
    always = 0
    if not has_plan:  # attention, norms and head, which every token reads
        always = part_bytes.head_bytes(model) + sum(
            part_bytes.layer_bytes(model, layer).attention for layer in layers
        )
    # All gate rows, and the other rows of neurons that fire.
    exact = sum(neurons_read(model, layer, fired=density) for layer in layers)
    named = min(1.0, NAMED_PER_FIRING * density)
    predicted = (predictor_share(model) + named) * part_bytes.all_neuron_bytes(model)
    saved = 1 - (always + predicted) / (always + exact)
    is_worth = saved >= LEAST_GAIN
    word = "predictors save" if is_worth else "no predictors, which would save"
    what = "the neurons' bytes" if has_plan else "the bytes that a token reads"
    return (
        is_worth,
        f"{density:.0%} of the neurons fire: {word} about {max(0.0, saved):.0%} of {what}",
    )


def predictor_share(model: ModelFile) -> float:
    """The assumed bytes of predictors, relative to the neurons'."""
    return PREDICTOR_SHARE.get(model.own_type, 0.3)


# ---- the place ----------------------------------------------------------------------------------


def _fits_lines(model: ModelFile, wishes: Wishes, size: int, budget: int) -> list[str]:
    """Names the better program for a model that (nearly) fits a GPU and has nothing to skip."""
    reads_all = model.spec.has_experts or computes_every_neuron(model, wishes.engine.mode)
    if not budget or size > (1 + NEARLY) * budget or not reads_all:
        return []
    of = f"{format_bytes(size)} with its context, for {format_bytes(budget)} of VRAM"
    if size <= budget:
        return [f"it fits: use llama.cpp, which is at least as fast where all is on the GPU ({of})"]
    more = max(1, round(100 * (size / budget - 1)))
    return [f"it fits but for {more}%: use llama.cpp, with a shorter context if need be ({of})"]


def _only_on_the_cpu(model: ModelFile, wishes: Wishes) -> str | None:
    """Why no GPU can run this model as wished; None if one can."""
    if what := model.spec.only_on_cpu:
        return f"on the CPU: {what} have no kernels for a GPU so far"
    if not model.spec.has_experts:
        return None
    if wishes.engine.mode == "exact":
        return "on the CPU: plans of mixtures of experts are for mode dense so far"
    if wishes.engine.kv_offload is not None:
        return "on the CPU: plans of mixtures of experts have no --kv-offload so far"
    return None


def _where_line(
    wishes: Wishes, room: Room, budgets: tuple[int, ...], context: int, *, has_gpu: bool
) -> str:
    """Where it runs, and why; `has_gpu`: there is one, even if `room` has none left."""
    if budgets:
        given = " and ".join(map(format_bytes, budgets)) + " of VRAM"
        if wishes.vram is None:
            given += (
                " (the desktop and CUDA take the rest of the card; --vram asks for another size)"
            )
        return f"by a plan for {given}, a context of {context:,} tokens; -c asks for another"
    if room.gpus:
        return f"entirely on the GPU, with a context of {context:,} tokens"
    if (wishes.engine.device or "cuda").startswith("cpu"):
        return "on the CPU, without a plan: --device cpu"
    if wishes.vram is not None and not any(wishes.vram):
        return "on the CPU, without a plan: --vram 0"
    if not has_gpu and not torch.cuda.is_available():
        no_effect = "" if wishes.vram is None else ", so --vram has no effect"
        return f"on the CPU, without a plan: torch sees no GPU here{no_effect}"
    what = "the GPU's free memory" if wishes.vram is None else "--vram"
    return (
        f"on the CPU, without a plan: {what} is too little even for the temporaries of this model"
        f" at a context of {context:,} tokens"
    )
