"""Resolves the options of an engine: mode, devices, context, placement of weights.

Each function raises a one-line HotsplitError for options that cannot be satisfied."""

import logging
from collections.abc import Callable
from dataclasses import replace

import torch

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.artifacts.split_file import Split
from hotsplit.costs.default_mode import choose_mode, loss_line
from hotsplit.costs.part_bytes import (
    DEFAULT_CONTEXT,
    ITEMS,
    Items,
    bytes_beside,
    draft_bytes,
    inexact_kinds,
    is_expert,
    packed_bytes,
    plan_bytes,
    transposed_bytes,
)
from hotsplit.errors import HotsplitError
from hotsplit.model.modes import Mode
from hotsplit.options.cache_types import CacheTypes
from hotsplit.options.engine_config import EngineConfig, check_device
from hotsplit.options.key_selection import KeySelection
from hotsplit.runtime.kernels.grids import is_read_in_file
from hotsplit.runtime.model.placement import Placement
from hotsplit.runtime.step.workspace import ANY_BUDGET, workspace_bytes
from hotsplit.runtime.weights.resident import Residence
from hotsplit.system.sizes import format_bytes
from hotsplit.system.system_memory import free_memory_bytes, own_memory_bytes

# The share of free memory that the CPU's side (weights, cache and workspace) may take. The rest is
# for the page cache, which loading uses.
FREE_SHARE = 0.9
# What a process takes beside its weights, keys and values and temporaries once it has loaded:
# tokenizers, stacks, tables of pages, pages of libraries.
BESIDE_BYTES = 96 << 20
Notice = Callable[[str], None]
log = logging.getLogger(__name__)


def room_for_weights(ram_bytes: int | None) -> int:
    """Bytes of main memory for weights, keys and values and temporaries."""
    if ram_bytes is None:
        return int(FREE_SHARE * free_memory_bytes())
    return ram_bytes - own_memory_bytes() - BESIDE_BYTES


def residence_of(
    model: ModelFile,
    is_resident: bool | None,
    bytes_by_role: dict[str, Items],
    gpu: torch.device,
    *,
    ram_bytes: int | None = None,
    has_draft: bool = False,
) -> Residence | None:
    """The memory for weights on the CPU; None if they stay in the file. Raises HotsplitError if
    memory is too small for what cannot: keys and values, workspace, packed and transposed
    tensors."""
    if is_resident is False:
        return None
    on_cpu = [items for role, items in bytes_by_role.items() if role == "cpu" or gpu.type == "cpu"]
    wanted, room = sum(sum(items.values()) for items in on_cpu), room_for_weights(ram_bytes)
    free = free_memory_bytes() if ram_bytes is None else max(0, room)
    if is_resident or wanted <= room:
        return Residence(only_cpu_reads=gpu.type == "cpu")
    beside, neurons = sum(map(bytes_beside, on_cpu)), sum(items["neurons"] for items in on_cpu)
    of_draft = f"blk.{model.spec.num_layers}."
    tensors = {n: e for n, e in model.tensors.items() if has_draft or not n.startswith(of_draft)}
    experts = {n: e for n, e in tensors.items() if is_expert(n.split(".", 2)[-1])}
    left, experts_left = packed_bytes(tensors) + transposed_bytes(model), packed_bytes(experts)
    if gpu.type != "cpu":  # has a part of them
        left, experts_left = min(left, wanted - beside), min(experts_left, neurons)
    if experts and wanted - neurons + experts_left <= room:
        log.warning(
            f"{model.path}: the experts stay in the file ({format_bytes(neurons - experts_left)}),"
            f" where reading them is slower: {format_bytes(free)} are free"
        )
        return Residence(holds_experts=False, only_cpu_reads=gpu.type == "cpu")
    if beside + left > room:
        kinds = sorted({entry.in_file.kind for entry in tensors.values() if entry.packed_from})
        packed = f"{format_bytes(left)} of tensors in {', '.join(kinds)}, packed in memory, and "
        raise HotsplitError(
            f"{model.path}: {packed * bool(kinds)}{format_bytes(beside)} of keys, values and"
            f" workspace cannot stay in the file, and {format_bytes(free)} are free; close"
            " programs, give a smaller --context"
            + ", or use a file of K-quants, which can be read from the disk"
            * bool(kinds)
        )
    log.warning(
        f"{model.path}: the CPU needs {format_bytes(wanted)}, and {format_bytes(free)} are free:"
        " the weights stay in the file, where reading them is slower"
    )
    return None


def mode_of(
    model: ModelFile,
    config: EngineConfig,
    plan: Split | None = None,
    notice: Notice = lambda line: None,
    warn: Notice = lambda line: None,
) -> Mode:
    """The requested mode, else the plan's, else that of mode_choice for max_loss. `notice` gets
    the reason for the choice, `warn` a warning about a larger loss.

    Raises HotsplitError for a mode that the model or the plan does not support."""
    mode = config.mode
    choice = choose_mode(model, config.max_loss) if mode is None else None
    asked = mode if plan is None else mode or plan.mode
    if choice is not None and asked in (None, choice.mode):
        _check_mode(model, choice.mode, plan)
        if choice.line is not None:
            notice(choice.line + _of_plan(plan))
        return choice.mode
    assert asked is not None
    _check_mode(model, asked, plan)
    line = loss_line(model, asked, config.max_loss)
    if line is not None:
        warn(line)
    return asked


def _of_plan(plan: Split | None) -> str:
    if plan is None:
        return ""
    return (
        f"; the plan is for mode {plan.mode}: for another mode, run hotsplit solve again with"
        " --mode or --max-loss"
    )


def _check_mode(model: ModelFile, mode: Mode, plan: Split | None) -> None:
    """Raises HotsplitError for a mode whose prerequisites are missing."""
    if mode == "predicted" and model.predictor is None:
        raise HotsplitError(
            f"{model.path}: has no predictors; train them with hotsplit profile"
            " --train-predictors and add them with hotsplit convert --predictors"
        )
    if mode == "predicted" and plan is not None and plan.mode != "predicted":
        raise HotsplitError(
            f"the plan is for mode {plan.mode} and has no room for predictors; leave --mode out, or"
            " run hotsplit solve with --mode predicted"
        )
    if mode == "exact" and model.spec.has_experts and model.layout == "stock":
        raise HotsplitError(
            f"{model.path}: mode exact skips rows of down projections, which a mixture of experts"
            " in the stock layout does not have; use mode dense, or hotsplit convert FILE -o"
            " model.gguf"
        )


def without_gpu(
    model: ModelFile, plan: Split | None, config: EngineConfig, notice: Notice
) -> EngineConfig:
    """The options of a mixture of experts without a plan, which runs on the CPU. Raises
    HotsplitError if a GPU is asked for."""
    if device_of(config.device).type == "cpu" or plan is not None:
        return config
    if config.device is not None:
        model.refuse_chosen("GPUs without a plan are", "use device cpu")
    notice("a mixture of experts runs on the CPU; --device cpu says so")
    return replace(config, device="cpu")


def placement_of(
    model: ModelFile, plan: Split | None, gpus: tuple[torch.device, ...], config: EngineConfig
) -> Placement:
    """The device of each part of the model. With cpu_ffn, kv_offload puts keys and values on the
    CPU, too; a plan states this itself."""
    num_layers = model.spec.num_layers
    if plan is not None and config.cpu_ffn:
        raise HotsplitError(
            "a plan says where the neurons go, and so does --cpu-ffn (cpu_ffn): leave one out"
        )
    if plan is not None:
        return Placement.of_split(plan, gpus)
    if config.cpu_ffn:
        placement = Placement.without_neurons(num_layers, gpus[0])
        return replace(placement, is_cache_on_host=config.kv_offload is not None)
    return Placement.on_one_device(num_layers, gpus[0])


def placement_of_block(model: ModelFile, placement: Placement) -> Placement:
    """The devices of a draft block that a plan has where the last layer's attention is."""
    block = model.draft
    assert block is not None
    is_shared = block.tensors[block.head_name] is model.tensors[model.head_name]
    return placement.of_block(model.spec.last_attending, has_own_head=not is_shared)


def no_drafts_on_gpu(model: ModelFile, *, has_plan: bool, one_token: bool) -> str:
    """Why no draft of the model's block, which the CPU computes, can be checked beside a GPU; "" if
    some can. `one_token`: with a neuron cache, or keys in main memory."""
    if not has_plan:
        return "without a plan, a GPU has the whole model, and main memory none of it"
    if one_token:
        return "a step takes one token with a neuron cache, or with keys in main memory"
    if kinds := inexact_kinds(model):
        return f"a GPU rounds rows of {', '.join(kinds)} differently when it computes several"
    return ""


def bytes_by_role_of(
    model: ModelFile,
    plan: Split | None,
    context_length: int,
    device: torch.device,
    *,
    mode: Mode = "dense",
    cpu_ffn: bool = False,
    num_sequences: int = 1,
    cache_types: CacheTypes | None = None,
    has_draft: bool = False,
) -> dict[str, Items]:
    """Itemised bytes by role, with the draft block if it is loaded (`has_draft`); without a plan,
    temporaries are those of `mode`. With neither a plan
    nor `cpu_ffn`, everything has the device's role. With `cpu_ffn`, neurons are on the CPU, with
    everything else that a plan leaves there too (part_bytes.plan_bytes), and the rest is on the
    GPU."""
    if plan is not None:
        gpus, cpu_bytes = plan.items_of_gpus(model)
        if has_draft:
            sizes = draft_bytes(
                model,
                context_length,
                num_sequences,
                cache_types,
                has_head=not plan.head_on_gpu,
                is_on_gpu=plan.draft_on_gpu,
            )
            for item, size in sizes.items():
                cpu_bytes[item] += size
        return {"gpu": {item: sum(gpu[item] for gpu in gpus) for item in ITEMS}, "cpu": cpu_bytes}
    num_layers, read = model.spec.num_layers, as_read(model, device, mode)
    (gpu_bytes,), cpu_bytes = plan_bytes(
        read,
        context_length=context_length,
        num_hot=[0] * num_layers,
        dense_on_gpu=[cpu_ffn] * num_layers,
        head_on_gpu=cpu_ffn,
        workspace=workspace_bytes(
            as_read(model, device, "dense"),
            context_length,
            mode,
            num_sequences,
            ANY_BUDGET if device.type == "cuda" else 0,
        ),
        num_sequences=num_sequences,
        cache_types=cache_types,
    )
    if has_draft:
        for item, size in draft_bytes(read, context_length, num_sequences, cache_types).items():
            cpu_bytes[item] += size
    if cpu_ffn:
        return {"gpu": gpu_bytes, "cpu": cpu_bytes}
    return {"gpu" if device.type == "cuda" else "cpu": cpu_bytes}


def as_read(model: ModelFile, device: torch.device, mode: Mode) -> ModelFile:
    """The model with the types that the CPU reads, for sizes: types with grids where those are
    faster than table types, if it multiplies all matrices whole; of an embedding that is not the
    head, too, it reads rows."""
    if device.type != "cpu" or mode != "dense":
        return model
    whole = model.tensors.keys() - (set() if model.is_tied else {"token_embd.weight"})
    tensors = {
        name: entry.in_file if name in whole and is_read_in_file(entry) else entry
        for name, entry in model.tensors.items()
    }
    return replace(model, tensors=tensors)


def gpus_of(plan: Split | None, first: torch.device) -> tuple[torch.device, ...]:
    """The devices for the plan's GPUs (one GPU without a plan): consecutive ones from `first`, or
    the CPU for all if `first` is the CPU."""
    wanted = 1 if plan is None else len(plan.budgets)
    if first.type == "cpu":
        return (first,) * wanted
    start = first.index or 0
    if start + wanted > torch.cuda.device_count():
        raise HotsplitError(
            f"the plan is for {wanted} GPUs, but the number of GPUs from {first} on is"
            f" {torch.cuda.device_count() - start}; run hotsplit solve with one budget per GPU"
        )
    return tuple(torch.device("cuda", start + number) for number in range(wanted))


def device_of(device: str | None) -> torch.device:
    """The requested device; by default a CUDA device if there is one. Raises HotsplitError for an
    unknown or missing device."""
    check_device(device)
    found = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise HotsplitError(
            f"device {device!r}: torch sees {torch.cuda.device_count()} CUDA devices here"
        )
    if found.type == "cuda" and found.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return found


def context_of(model: ModelFile, plan: Split | None, asked: int | None) -> int:
    """The most tokens of a text: at most the model's context; 0 asks for all of it, and for the
    plan's where there is a plan."""
    if plan is not None:
        if asked not in (None, 0, plan.context_length):
            raise HotsplitError(
                f"context of {asked} asked for, but the plan budgets {plan.context_length};"
                " run hotsplit solve with --context"
            )
        return plan.context_length
    longest = model.spec.context_length
    if asked is None:
        return min(longest, DEFAULT_CONTEXT)
    if asked == 0:  # as in llama.cpp
        return longest
    if asked > longest:
        rotary = model.spec.rotary
        hint = "; --rope-scaling yarn stretches it" if rotary and not rotary.factors else ""
        limit = model.spec.context_limit
        hint = f": {limit}" if limit else hint
        raise HotsplitError(
            f"context of {asked} asked for, but the model has up to {longest}{hint}"
        )
    return asked


def sequences_of(asked: int, plan: Split | None) -> int:
    """The number of texts in the cache: the plan's, if there is one."""
    if plan is None:
        return asked
    if asked > plan.num_sequences:
        raise HotsplitError(
            f"{asked} sequences asked for, but the plan's cache is for {plan.num_sequences};"
            f" run hotsplit solve with --sequences {asked}"
        )
    return plan.num_sequences


def cache_types_of(
    model: ModelFile,
    config: EngineConfig,
    *,
    has_plan: bool,
    device: torch.device,
    planned: KeySelection | None = None,
) -> CacheTypes:
    """How keys and values are stored and which of them are read. Defaults: the model's own type for
    keys, the keys' type for values, and the plan's selection `planned` (None: all are read)."""
    own = model.kv_kind
    key = own if config.cache_type_k is None else config.cache_type_k
    offload = config.kv_offload
    selection = planned if offload is None else KeySelection.parse(offload)
    types = replace(CacheTypes.of(key, config.cache_type_v), selection=selection)
    if has_plan and selection != planned:
        raise HotsplitError(_other_offload(selection, planned))
    stored = replace(types, selection=None)
    if has_plan and stored != CacheTypes.of(own):
        raise HotsplitError(
            f"a cache in {stored} asked for, but a plan budgets it in {own}; leave one of the two"
            " out"
        )
    is_on_cpu = device.type == "cpu" or (selection is not None and (has_plan or config.cpu_ffn))
    if types != CacheTypes.of(own) and not is_on_cpu:
        raise HotsplitError(
            f"a cache in {types} asked for on {device}, where it needs a plan: run hotsplit solve"
            " with --kv-offload, or use --cpu-ffn"
            if selection is not None
            else f"a cache in {types} asked for, which runs only on the CPU so far; use device cpu"
        )
    for attention in model.spec.attentions:
        for kind in (types.key, types.value):
            kind.check(attention.head_dim)
        if attention.value_width is not None:
            types.key.check(attention.value_width)
            if types.key != types.value:
                raise HotsplitError(
                    f"keys in {types.key.name} and values in {types.value.name} asked for, but this"
                    " model's values are a part of its keys (latent attention); give one type"
                )
    if selection is not None:
        selection.check_windows(model.path, model.spec)
    return types


def _other_offload(asked: KeySelection | None, planned: KeySelection | None) -> str:
    if planned is None:
        return (
            f"--kv-offload {asked} asked for, but the plan budgets keys and values where the"
            " attention is; run hotsplit solve with --kv-offload"
        )
    return (
        f"--kv-offload {asked} asked for, but the plan is for {planned}; leave it out, or run"
        " hotsplit solve with it"
    )
