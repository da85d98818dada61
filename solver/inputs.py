"""The inputs of a solve: the files, checked to belong together, and the pipeline made from them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from hotsplit.artifacts.data_sheets import has_assumed_memory, load_machine
from hotsplit.artifacts.machine_file import Drive, Figure, Gpu, Machine
from hotsplit.artifacts.model_file import ModelFile, with_rope_scaling
from hotsplit.artifacts.profile_file import Profile
from hotsplit.costs.cache_bytes import CacheSize
from hotsplit.costs.default_mode import mode_meant, sparse_modes
from hotsplit.costs.part_bytes import (
    DEFAULT_CONTEXT,
    cache_bytes,
    embedding_bytes,
    expert_slots_bytes,
    inexact_kinds,
    layer_bytes,
)
from hotsplit.costs.state_bytes import kept_bytes, slots_bytes
from hotsplit.errors import HotsplitError
from hotsplit.model.modes import Mode, runs_predictors
from hotsplit.options.cache_types import CacheTypes
from hotsplit.options.key_selection import KeySelection
from hotsplit.options.neuron_cache_options import CacheOptions
from hotsplit.solver.assumed import profile_for
from hotsplit.solver.multi_gpu import Pipeline
from hotsplit.solver.problem_builder import build_problem
from hotsplit.solver.solver_config import SolveConfig
from hotsplit.solver.units import ExpertUnits, NeuronUnits
from hotsplit.system.sizes import format_bytes

# Computes the bytes that a device needs besides weights and KV cache, for a model, a context, a
# mode, a number of texts and the budget of a GPU (0: there is none).
Workspace = Callable[[ModelFile, int, Mode, int, int], int]
# Stands in for the GPU of a machine without one; with a budget of 0 its figures do not matter.
NO_GPU = Gpu(
    name="no GPU",
    source="none",
    memory_bytes=0,
    free_bytes=0,
    **{name: Figure(best=1.0) for name in Gpu.__annotations__ if name.endswith("_s")},
)


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Checked inputs. `paths` are those of model, profile (None: none is needed) and machine file,
    for messages. With a neuron cache, main memory is only checked once a plan is found
    (`with_cache`)."""

    model: ModelFile
    profile: Profile
    machine: Machine
    paths: tuple[Path, Path | None, Path]
    context_length: int
    mode: Mode
    workspace: int
    budgets: tuple[int, ...]  # of each GPU used
    host_budget: int
    swapped_rows: int = 0  # most neurons that a neuron cache swaps in a step; 0: no neuron cache
    num_sequences: int = 1  # texts at a time
    kv_offload: KeySelection | None = None  # if set, keys are in main memory: which a token reads
    has_draft: bool = True  # a draft block in the file is wanted

    @property
    def places_draft(self) -> bool:
        """True if the draft block is placed beside the attention of the last layer that attends: if
        there is one, and steps check drafts."""
        is_one_token = self.kv_offload is not None or self.swapped_rows > 0
        can_draft = self.has_draft and self.model.draft is not None and not is_one_token
        return can_draft and not inexact_kinds(self.model)

    @cached_property
    def drive(self) -> Drive | None:
        """The drive on which experts may be; None for models without, and plans that keep all in
        memory: of several GPUs, or with a neuron cache."""
        if not self.model.spec.has_experts or len(self.budgets) > 1 or self.swapped_rows:
            return None
        return None if self.kv_offload is not None else self.machine.drive_at(self.paths[0])

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        return (self.machine.gpus or (NO_GPU,))[: len(self.budgets)]

    def with_workspace(self, workspace: Workspace) -> "Inputs":
        """The inputs with the workspace of their mode and largest budget, or the GPU's memory."""
        budget = max(self.budgets) or self.gpus[0].memory_bytes
        size = workspace(self.model, self.pass_context, self.mode, self.num_sequences, budget)
        return replace(self, workspace=size)

    @cached_property
    def units(self) -> ExpertUnits | NeuronUnits:
        """What is placed in each layer."""
        kind = ExpertUnits if self.model.spec.has_experts else NeuronUnits
        return kind(model=self.model, profile=self.profile)

    def pipeline(self) -> Pipeline:
        """The placement problem of each GPU. Raises HotsplitError for several GPUs and groups of
        layers that must be together."""
        groups = self.model.spec.together(keys_on_host=self.kv_offload is not None)
        if groups and len(self.budgets) > 1:
            raise HotsplitError(
                f"{self.paths[0]}: {len(self.budgets)} GPUs, but layers that {groups[0].reason} are"
                " planned for one; give --vram-budget once"
            )
        pairs = zip(self.gpus, self.budgets, strict=True)
        problems = tuple(build_problem(self, gpu, budget) for gpu, budget in pairs)
        for_host = self.host_budget - self.always_on_host
        need_bytes = max(0, problems[0].placeable_bytes - for_host)
        return Pipeline(
            problems=problems,
            need_bytes=0 if self.swapped_rows else need_bytes,
            together=tuple(group.layers for group in groups),
        )

    def with_slots(self, pipeline: Pipeline) -> Pipeline:
        """The problem with experts on the drive, whose slots main memory holds as well."""
        need_bytes = pipeline.need_bytes + expert_slots_bytes(self.model)
        return replace(pipeline, need_bytes=need_bytes)

    @property
    def gpu_workspace(self) -> int:
        """The workspace, and the most bytes that a neuron cache takes beside the hot neurons."""
        size = self.cache_size
        return self.workspace + (0 if size is None else size.most_gpu_bytes(self.model))

    @property
    def cache_types(self) -> CacheTypes:
        return replace(CacheTypes.of(self.model.kv_kind), selection=self.kv_offload)

    @property
    def pass_context(self) -> int:
        """The most positions whose keys a pass unpacks; its workspace holds them."""
        rule = self.kv_offload
        return self.context_length if rule is None else min(self.context_length, rule.longest)

    def kv_bytes(self, layer: int) -> int:
        """Bytes of a layer's keys and values, of all texts, without key selection."""
        return cache_bytes(self.model, layer, self.context_length, self.num_sequences)

    def state_bytes(self, layer: int) -> int:
        """Bytes of the slots of a layer's recurrent states, of all texts, wherever keys are."""
        return slots_bytes(self.model, layer, self.num_sequences)

    @property
    def cache_size(self) -> CacheSize | None:
        if not self.swapped_rows:
            return None
        return CacheSize(most_rows=self.swapped_rows, packs_bits=not runs_predictors(self.mode))

    @property
    def host_words(self) -> str:
        """The budget of main memory in words, and how to give another where it is a guess."""
        words = f"{format_bytes(self.host_budget)} of main memory"
        is_guess = (
            has_assumed_memory(self.machine) and self.host_budget == self.machine.memory_bytes
        )
        return f"{words} (assumed; --ram gives another size)" if is_guess else words

    @property
    def always_on_host(self) -> int:
        """Bytes of main memory that any plan takes: the embedding, the workspace and, with key
        selection, all keys, values and tables, and the norms of heads; and the most that layers
        keep of checked drafts."""
        layers = range(self.model.spec.num_layers)
        kept = sum(kept_bytes(self.model, layer, self.num_sequences) for layer in layers)
        return embedding_bytes(self.model) + self.workspace + self.offloaded_bytes + kept

    @property
    def offloaded_bytes(self) -> int:
        if self.kv_offload is None:
            return 0
        layers = range(self.model.spec.num_layers)
        norms = sum(layer_bytes(self.model, layer).head_norms for layer in layers)
        return self.all_kv_bytes + norms

    @property
    def all_kv_bytes(self) -> int:
        """Bytes of the keys and values of all layers and texts, with the tables of a selection."""
        layers, types = range(self.model.spec.num_layers), self.cache_types
        return sum(
            cache_bytes(self.model, layer, self.context_length, self.num_sequences, types)
            for layer in layers
        )


def load_inputs(config: SolveConfig, workspace: Workspace) -> Inputs:
    """Reads the files, then as `inputs_from`. Raises HotsplitError for files that do not belong
    together or lack something required."""
    mode, selection = config.mode, config.selection
    model = with_rope_scaling(
        ModelFile.load(config.model), config.rope_scaling, config.rope_scale, config.context_length
    )
    model.refuse_alone()
    model.refuse_on_gpu()
    if selection is not None:
        selection.check_windows(config.model, model.spec)
    if model.spec.has_experts:
        runs = (None, "dense", *sparse_modes(model))
        asked = {f"--mode {mode}": mode not in runs, "--kv-offload": bool(selection)}
        for option, is_asked in asked.items():
            if is_asked:
                model.refuse_chosen(f"plans with {option} are", "leave it out")
    elif config.neuron_cache is not None and mode == "dense":
        raise HotsplitError(
            "--neuron-cache with --mode dense, which reads every neuron; wanted exact or predicted"
        )
    elif config.neuron_cache is not None:
        model.refuse_chosen("neuron caches are", "leave --neuron-cache out")
    cache = config.neuron_cache
    return inputs_from(
        model,
        profile_for(model, config.profile, mode),
        load_machine(config.machine),
        paths=(config.model, config.profile, config.machine),
        budgets=config.budgets,
        host_budget=config.host_budget_bytes,
        context_length=config.context_length,
        mode=mode,
        workspace=workspace,
        swapped_rows=0 if cache is None else swapped_rows(cache, model),
        num_sequences=config.num_sequences,
        kv_offload=selection,
    )


def inputs_from(
    model: ModelFile,
    profile: Profile,
    machine: Machine,
    *,
    paths: tuple[Path, Path | None, Path],
    budgets: tuple[int, ...],
    host_budget: int | None,
    context_length: int | None,
    mode: Mode | None,
    workspace: Workspace,
    swapped_rows: int = 0,
    num_sequences: int = 1,
    kv_offload: KeySelection | None = None,
    has_draft: bool = True,
) -> Inputs:
    """Checked inputs from what the files at `paths` hold. None: all main memory, the model's
    context up to DEFAULT_CONTEXT, and the mode that the model was made for. Raises HotsplitError if
    they do not belong together or lack something required."""
    inputs = Inputs(
        model=model,
        profile=profile,
        machine=machine,
        paths=paths,
        context_length=context_length or min(model.spec.context_length, DEFAULT_CONTEXT),
        mode=mode or ("dense" if model.spec.has_experts else mode_meant(model)),
        workspace=0,
        budgets=budgets,
        host_budget=machine.memory_bytes if host_budget is None else host_budget,
        swapped_rows=swapped_rows,
        num_sequences=num_sequences,
        kv_offload=kv_offload,
        has_draft=has_draft,
    )
    _check_profile(inputs)
    num_gpus, path = len(inputs.machine.gpus), inputs.paths[2]
    if inputs.machine.cpu_costs is None:
        raise HotsplitError(
            f"{path}: describes only a GPU; hotsplit calibrate --gpu-from {path}"
            " measures this machine and takes the GPU from it"
        )
    if inputs.mode != "dense" and inputs.mode not in inputs.machine.costs.layer_s:
        raise HotsplitError(
            f"{path}: has no cost of a layer in mode {inputs.mode!r}; run hotsplit calibrate again"
        )
    if len(inputs.budgets) > max(1, num_gpus):
        raise HotsplitError(
            f"{path}: {num_gpus} GPU{'s' * (num_gpus != 1)} for {len(inputs.budgets)} budgets; give"
            " --vram-budget once for each"
        )
    if not num_gpus and any(inputs.budgets):
        raise HotsplitError(
            f"{path}: no GPU; a plan needs the figures of one: hotsplit calibrate --gpu-from FILE"
            " takes them from a file for another card, and --vram-budget 0 plans for the CPU alone"
        )
    return inputs.with_workspace(workspace)


def swapped_rows(options: CacheOptions, model: ModelFile) -> int:
    """The most neurons or experts that a neuron cache swaps in a step."""
    number = options.of("experts" if model.spec.has_experts else "neurons").most_rows
    assert number is not None
    return number


def _check_profile(inputs: Inputs) -> None:
    model, profile = inputs.model, inputs.profile
    model_path, profile_path, _ = inputs.paths
    if profile.model_id != model.model_id:
        raise HotsplitError(
            f"{profile_path}: made from model {profile.model_id[:12]}, but {model_path} is"
            f" {model.model_id[:12]}; run hotsplit profile on this model"
        )
    wanted = (model.spec.num_layers, model.spec.most_neurons)
    if profile.active_count_LF.shape != wanted:
        raise HotsplitError(
            f"{profile_path}: counts {list(profile.active_count_LF.shape)} layers and neurons,"
            f" {model_path} has {list(wanted)}; run hotsplit profile on this model"
        )
    numbers = {layer.neurons.number for layer in model.spec.layers}
    if inputs.swapped_rows and not model.spec.has_experts and len(numbers) > 1:
        raise HotsplitError(
            f"{model_path}: its layers have {' or '.join(map(str, sorted(numbers)))} neurons, and a"
            " neuron cache is planned where all have as many; leave --neuron-cache out"
        )
    if model.spec.has_experts and profile.routing_LTK is None:
        raise HotsplitError(
            f"{profile_path}: has no recorded experts, with which plans are priced; run hotsplit"
            " profile on this model"
        )
    if not profile.active_count_LF.any():
        raise HotsplitError(
            f"{profile_path}: no neuron fired in {profile.num_tokens:,} tokens, so none is hotter"
            " than another; run hotsplit profile with other text"
        )
    if 0 in wanted:
        raise HotsplitError(
            f"{model_path}: {wanted[0]} layers of {wanted[1]} neurons; there is nothing to place"
        )
    if inputs.mode == "predicted" and model.predictor is None:
        raise HotsplitError(
            f"{model_path}: no predictors, which mode 'predicted' needs; use mode 'exact', or"
            " add predictors with hotsplit convert --predictors"
        )
    if inputs.context_length > model.spec.context_length:
        hint = "; --rope-scaling yarn extends it" if model.spec.rotary else ""
        limit = model.spec.context_limit
        raise HotsplitError(
            f"a context of {inputs.context_length} tokens; {model_path} was made for"
            f" {model.spec.context_length}{f': {limit}' if limit else hint}"
        )
