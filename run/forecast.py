"""What a model will be like on a machine, from its header alone.

Prices are the solver's, of mode dense. Without a profile it is not known which neurons of a model
can be silent (then all are computed, an upper bound on the time), nor which experts a mixture's
tokens choose (then they are assumed to be chosen by Zipf's law; `solver.assumed`). Of layers that
choose neurons by all gates it is known how many: they are priced in mode exact. Prompts are priced
on the CPU alone, by measured rates, and llama.cpp's on a card of a data sheet."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from hotsplit.artifacts.data_sheets import FAST_HAND_OVER_S
from hotsplit.artifacts.machine_file import Figure, Machine
from hotsplit.artifacts.model_file import with_rope_scaling
from hotsplit.convert.hub import named_on_hub
from hotsplit.convert.hub_headers import headers_of
from hotsplit.costs.default_mode import sparse_modes
from hotsplit.costs.part_bytes import Items
from hotsplit.errors import DoesNotFitError, HotsplitError
from hotsplit.model.modes import Mode
from hotsplit.options.key_selection import KeySelection
from hotsplit.run.choice import Choice, as_read_here
from hotsplit.run.default_budgets import Room
from hotsplit.run.source import RunSource, look_at
from hotsplit.run.stages import RunJob
from hotsplit.runtime.resolved_options import no_drafts_on_gpu
from hotsplit.runtime.step.workspace import workspace_bytes
from hotsplit.solver import llamacpp_speed
from hotsplit.solver.assumed import EXPONENT, assumed_experts, by_activation, every_neuron
from hotsplit.solver.draft_prediction import DraftGain, draft_gain, on_gpus
from hotsplit.solver.drive_notes import DriveUse, drive_use, drive_words, expert_read_seconds
from hotsplit.solver.expert_notes import placed_line
from hotsplit.solver.inputs import Inputs, inputs_from
from hotsplit.solver.layer_split import cpu_moe, layer_split, moe_division
from hotsplit.solver.mode_choice import Found, find
from hotsplit.solver.multi_gpu import (
    Pipeline,
    PipelinePlacement,
    cpu_only_plan,
    plan_seconds,
    with_one_home,
)
from hotsplit.solver.optimise import Answer
from hotsplit.solver.prediction import check_whole_host, prompt_seconds
from hotsplit.solver.problem import on_one_device
from hotsplit.solver.solve import split_of
from hotsplit.system.sizes import format_bytes

PROMPT = 512  # tokens, as llama-bench's
ALIKE = 0.05  # by which weights here may exceed the file's before it is said


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """`token_s`: seconds of a token in the middle of its context, as all but `first_s`, which are
    those at its beginning. `equal_s`: if all experts were chosen equally often, None without
    experts. `layer_split`, `cpu_moe`: llama.cpp's number of layers on the GPU, or with their
    experts on the CPU, and its seconds; None without a GPU. `fast_s`: `token_s` if a hand-over to
    the CPU takes FAST_HAND_OVER_S; None if that saves nothing. `prompt_s`, `rival_prompt_s`: of
    PROMPT tokens by the plan, and by llama.cpp's faster way; None where not known. `drafts`: by the
    model's own block, of which a part is on a GPU with `draft_on_gpu`; None if it is not loaded."""

    token_s: float
    first_s: float
    fast_s: float | None
    equal_s: float | None
    cpu_only_s: float
    layer_split: tuple[int, float] | None
    cpu_moe: tuple[int, float] | None
    prompt_s: float | None
    rival_prompt_s: float | None
    drafts: DraftGain | None
    draft_on_gpu: bool
    gap: float | None  # of a plan: what a better one could save at most; None for what needs none
    gpu_bytes: Items
    cpu_bytes: Items
    budgets: tuple[int, ...]  # those of the GPUs; () if all is on the CPU
    host_bytes: int
    fits_from_bytes: int  # of one GPU, for everything
    placed: str
    assumed: tuple[str, ...]
    drive: DriveUse | None  # None: all experts are in memory

    @property
    def fits_cpu(self) -> bool:
        """True if main memory could hold everything."""
        return self.fits_from_bytes + self.cpu_bytes["embedding"] <= self.host_bytes

    @property
    def is_faster_on_cpu(self) -> bool:
        """True if the CPU alone is faster than a GPU that holds everything, and could hold it; a
        plan takes that into account itself."""
        is_whole = bool(self.budgets) and self.gap is None
        return is_whole and self.fits_cpu and self.cpu_only_s < self.token_s


def source_of(
    given: Path, activation: str | None, tokenizer: Path | None, scratch: Path
) -> tuple[RunSource, int]:
    """A source, and the bytes that must be downloaded to run it; on the hub only headers are read,
    into the folder `scratch`. Raises HotsplitError like `look_at` and `headers_of`."""
    planned, named = scratch / "planned.gguf", named_on_hub(given)
    if named is None:
        return look_at(given, activation, planned, tokenizer), 0
    folder = scratch / "headers"
    folder.mkdir()
    with named_in_errors(folder, given):
        headers = headers_of(named, folder)
        found = look_at(headers.path, activation, planned, tokenizer)
    return replace(found, name=str(given)), headers.num_bytes


@contextmanager
def named_in_errors(path: Path, given: Path) -> Iterator[None]:
    """Errors about files in a folder name the source that the user gave."""
    try:
        yield
    except HotsplitError as error:
        raise HotsplitError(
            str(error).replace(f"{path}/", f"{given}: ").replace(str(path), str(given))
        ) from error


def forecast(
    job: RunJob, machine: Machine, where: Path, room: Room, host_budget: int | None
) -> Forecast:
    """Prices what was chosen on a machine with this room, whose file or name is `where`. Raises
    DoesNotFitError if the memories do not hold the model."""
    choice = job.choice
    uses_gpu = bool(room.gpus) and choice.device != "cpu"
    budgets = choice.budgets or (room.gpus[:1] if uses_gpu else (0,))
    inputs = _inputs(job, machine, where, budgets, host_budget)
    if not any(budgets):
        read = as_read_here(inputs.model, job.wishes, replace(room, gpus=()))
        given = inputs.pass_context, inputs.mode, inputs.num_sequences
        size = workspace_bytes(replace(read, runs_as_it_is=False), *given)
        inputs = replace(inputs, model=read, workspace=size)
    found = _placed(job.source, inputs, choice, uses_gpu=uses_gpu)
    plan, pipeline = found.answer.plan, found.pipeline
    split, problem = split_of(found, solve_s=0.0), pipeline.model
    drive = drive_use(inputs, pipeline, plan)
    others, equal_s = layer_split(inputs) if uses_gpu else None, None
    if inputs.model.spec.has_experts:
        alike = replace(inputs, profile=assumed_experts(inputs.model, 0.0))
        equal_s = plan_seconds(alike.pipeline(), plan)
    return Forecast(
        token_s=found.answer.objective_s,
        first_s=plan_seconds(replace(inputs, context_length=1).pipeline(), plan),
        fast_s=_fast_seconds(inputs, plan) if uses_gpu else None,
        equal_s=equal_s,
        cpu_only_s=plan_seconds(pipeline, cpu_only_plan(pipeline)),
        layer_split=None if others is None else (others.num_layers, others.seconds),
        cpu_moe=cpu_moe(inputs) if uses_gpu else None,
        prompt_s=None if uses_gpu else _prompt_seconds(inputs, pipeline, plan),
        rival_prompt_s=_rival_prompt(inputs) if uses_gpu else None,
        drafts=None
        if why_no_drafts(job, uses_gpu=uses_gpu) or drive is not None
        else draft_gain(inputs, found.answer.objective_s, on_gpus=on_gpus(inputs, pipeline, plan)),
        draft_on_gpu=split.draft_on_gpu,
        gap=found.answer.gap if choice.budgets else None,
        gpu_bytes=split.gpu_bytes,
        cpu_bytes=split.cpu_bytes,
        budgets=budgets if uses_gpu else (),
        host_bytes=inputs.host_budget,
        fits_from_bytes=problem.placeable_bytes + problem.workspace_bytes,
        placed=_placed_words(inputs, found),
        assumed=(
            *_assumed_words(inputs),
            *(_rival_words(job) if uses_gpu else ()),
            *((words,) if drive is not None and (words := drive_words(inputs)) else ()),
        ),
        drive=drive,
    )


def _prompt_seconds(inputs: Inputs, pipeline: Pipeline, plan: PipelinePlacement) -> float | None:
    """Seconds of PROMPT tokens on the CPU; experts on the drive that any of them chooses are read
    once, while others are computed."""
    seconds, placement, drive = prompt_seconds(inputs, PROMPT), plan.placement, inputs.drive
    if seconds is None or placement.resident_LF is None or drive is None:
        return seconds
    read_s = 0.0
    for layer in pipeline.model.replayed:
        rank_TK = pipeline.model.sides(layer).rank_TK
        share_F = np.bincount(rank_TK.ravel(), minlength=pipeline.model.num_neurons) / len(rank_TK)
        away_F = ~placement.hot_LF[layer] & ~placement.resident_LF[layer]
        num_read = (1 - (1 - share_F[away_F]) ** PROMPT).sum()
        read_s += num_read * expert_read_seconds(inputs, drive, layer)
    return max(seconds, float(read_s))


def _fast_seconds(inputs: Inputs, plan: PipelinePlacement) -> float | None:
    """The plan's seconds with hand-overs of FAST_HAND_OVER_S, if that is less."""
    fast = Figure(best=FAST_HAND_OVER_S)
    gpus = tuple(
        replace(gpu, hand_over_s=fast, cpu_run_s=fast)
        if gpu.hand_over_s.median > FAST_HAND_OVER_S
        else gpu
        for gpu in inputs.machine.gpus
    )
    seconds = plan_seconds(inputs.pipeline(), plan)
    machine = replace(inputs.machine, gpus=gpus)
    fast_s = plan_seconds(replace(inputs, machine=machine).pipeline(), plan)
    return fast_s if fast_s < seconds else None


def _rival_prompt(inputs: Inputs) -> float | None:
    split, moe = layer_split(inputs), cpu_moe(inputs)
    division = split.division(inputs.model.spec.num_layers)
    if moe is not None and moe[1] < split.seconds:
        division = moe_division(inputs, moe[0])
    return llamacpp_speed.prompt_seconds(inputs, division, PROMPT)


def why_no_drafts(job: RunJob, *, uses_gpu: bool) -> str:
    """Why the model's draft block is not loaded beside a GPU; "" if it is, or there is no GPU."""
    if not uses_gpu:
        return ""
    choice, options = job.choice, job.wishes.engine
    return no_drafts_on_gpu(
        choice.model,
        has_plan=bool(choice.budgets),
        one_token=options.kv_offload is not None or options.neuron_cache is not None,
    )


def _inputs(
    job: RunJob, machine: Machine, where: Path, budgets: tuple[int, ...], host_budget: int | None
) -> Inputs:
    own = job.wishes.engine
    model = with_rope_scaling(job.choice.model, *own.rope, own.context_length)
    mode: Mode = "exact" if model.spec.needs_all_gates and own.mode != "dense" else "dense"
    profile = every_neuron(model) if mode == "dense" else by_activation(model)
    if model.spec.has_experts:
        profile = assumed_experts(model, EXPONENT)
    selection = None if own.kv_offload is None else KeySelection.parse(own.kv_offload)
    if selection is not None:
        selection.check_windows(Path(job.source.name), model.spec)
    inputs = inputs_from(
        model,
        profile,
        machine,
        paths=(Path(job.source.name), None, where),
        budgets=budgets,
        host_budget=host_budget,
        context_length=job.choice.context_length,
        mode=mode,
        workspace=workspace_bytes,
        num_sequences=own.num_sequences,
        kv_offload=selection,
        has_draft=own.draft_block and bool(job.choice.budgets),
    )
    is_as_it_is = model.layout == "stock" and not any(budgets)
    return replace(inputs, model=replace(model, runs_as_it_is=is_as_it_is))


def _placed(source: RunSource, inputs: Inputs, choice: Choice, *, uses_gpu: bool) -> Found:
    if choice.budgets:
        return find(inputs, time_limit_s=0.0)  # the other methods' bound is shown
    pipeline = inputs.pipeline()
    plan = cpu_only_plan(pipeline)
    if uses_gpu:
        plan = with_one_home(on_one_device(pipeline.model, gpu=True))
    elif pipeline.need_bytes > 0 and inputs.drive is not None:
        return find(inputs, time_limit_s=0.0)
    else:
        try:
            check_whole_host(inputs)
        except DoesNotFitError as error:
            raise DoesNotFitError(
                f"{source.name}: {error}; the rest would be read from the disk for every token"
            ) from error
    seconds = plan_seconds(pipeline, plan)
    answer = Answer(status="bounded", plan=plan, objective_s=seconds, bound_s=0.0)
    return Found(inputs=inputs, pipeline=pipeline, answer=answer, others=())


def _placed_words(inputs: Inputs, found: Found) -> str:
    plan, problem = found.answer.plan, found.pipeline.model
    placement = plan.placement
    if not placement.uses_gpu:
        return "everything is on the CPU"
    if inputs.model.spec.has_experts:
        return placed_line(inputs, plan, problem, "By this assumption")
    num_layers, number_L = problem.num_layers, placement.num_hot_L
    num_blocks, is_there = int(placement.dense_L.sum()), number_L >= _neurons(inputs)
    parts = [f"attention of {num_blocks} of {num_layers} layers"] * (num_blocks > 0)
    parts += [f"all neurons of {int(is_there.sum())} layers"] * bool(is_there.any())
    is_part = (number_L > 0) & ~is_there
    if is_part.any():
        share = number_L[is_part].sum() / _neurons(inputs)[is_part].sum()
        parts.append(f"{share:.0%} of the neurons of {int(is_part.sum())} layers")
    parts += ["the output head"] * placement.head
    beside = "; the CPU computes a layer's other neurons at the same time" * bool(is_part.any())
    return f"on the GPU: {', '.join(parts)}{beside}"


def _neurons(inputs: Inputs) -> np.ndarray:
    return np.array([layer.neurons.number for layer in inputs.model.spec.layers])


def _assumed_words(inputs: Inputs) -> Iterator[str]:
    model = inputs.model
    if model.spec.has_experts:
        yield (
            "which experts its tokens choose is not known before it has read text: an expert's"
            f" share is assumed to fall with its rank r as r^-{EXPONENT:g} (Zipf's law)"
        )
    elif inputs.mode == "exact":
        share = inputs.profile.active_count_LF.sum() / inputs.profile.num_tokens
        yield (
            f"which neurons of this {model.activation} model fire is not known before it has read"
            " text: as many are assumed as if gates were normally distributed,"
            f" {share / sum(model.spec.num_neurons_L):.0%} of all"
        )
    elif sparse_modes(model):
        yield (
            f"which neurons of this {model.activation} model fire is not known before it has read"
            " text: these are the times if all of them are computed (mode dense); silent ones make"
            " it faster"
        )


def _rival_words(job: RunJob) -> Iterator[str]:
    """llama.cpp is priced with the weights that run here; a smaller file is faster there."""
    here = sum(each.memory_bytes for each in job.choice.types)
    given = sum(each.file_bytes for each in job.source.types)
    if given and here > (1 + ALIKE) * given:
        yield (
            f"llama.cpp's speeds are those of the {format_bytes(here)} of weights that run here; it"
            f" reads the file as it is, {format_bytes(given)}, and is faster than these figures"
        )
