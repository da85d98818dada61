"""Loads an engine: places the weights of a model file as the plan and the options say, and builds a
decode step.

If a GPU fails during a load (runtime.device_check), the whole load is repeated on the CPU."""

import logging
import math
import time
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hotsplit.artifacts.model_file import ModelFile, for_context, with_rope_scaling
from hotsplit.artifacts.split_file import Split
from hotsplit.costs.context_bytes import text_words
from hotsplit.costs.part_bytes import Items, placed_units, stored_neuron_bytes
from hotsplit.costs.pass_length import PREFILL_CHUNK, SHORT_CHUNK
from hotsplit.errors import HotsplitError
from hotsplit.model.assistant import has_assistants
from hotsplit.model.modes import Mode
from hotsplit.options.engine_config import EngineConfig
from hotsplit.runtime.device_check import (
    LIMIT_S,
    DeviceFails,
    check_against_cpu,
    failures_of_device,
    logits_of,
    within_time,
)
from hotsplit.runtime.expert_slots import ExpertSlots, expert_slots
from hotsplit.runtime.gpu_setup import memories_of, pass_setup, step_takes, uploading
from hotsplit.runtime.kernels.gpu.launch import ROWS
from hotsplit.runtime.kernels.prefetch_distance import set_for_this_processor
from hotsplit.runtime.kernels.threads import use_default_threads
from hotsplit.runtime.model.expert_loader import check_routers
from hotsplit.runtime.model.loader import load_weights
from hotsplit.runtime.model.neuron_loader import runs_by_output
from hotsplit.runtime.model.placement import Placement
from hotsplit.runtime.neuron_cache.neuron_cache import NeuronCache
from hotsplit.runtime.neuron_cache.setup import first_residents, not_copied, setup_of
from hotsplit.runtime.ops.neurons.feed_forward import Traffic
from hotsplit.runtime.ops.observers import Observers
from hotsplit.runtime.ops.structs import NotNative
from hotsplit.runtime.resolved_options import (
    Notice,
    as_read,
    bytes_by_role_of,
    cache_types_of,
    context_of,
    device_of,
    gpus_of,
    mode_of,
    no_drafts_on_gpu,
    placement_of,
    placement_of_block,
    residence_of,
    sequences_of,
    without_gpu,
)
from hotsplit.runtime.step import hybrid_builder, native_step
from hotsplit.runtime.step.backend import Backend, can_overlap, can_ring, cuda_backend
from hotsplit.runtime.step.decoder import Decoder
from hotsplit.runtime.step.draft_step import DraftStep
from hotsplit.runtime.step.hybrid_step import HybridStep
from hotsplit.runtime.step.native_step import NativeStep
from hotsplit.runtime.step.workspace import step_rows
from hotsplit.runtime.weights.resident import Residence

log = logging.getLogger(__name__)


def open_plan(split: str | Path | None, model: ModelFile) -> Split | None:
    """Reads a plan from a file. Raises HotsplitError unless it is valid for the model."""
    if split is None:
        return None
    plan = Split.load(Path(split))
    plan.check_against(model, Path(split))
    return plan


def with_positions(model: ModelFile, config: EngineConfig) -> ModelFile:
    """The model with the requested scaling of rotary embeddings."""
    scaled = with_rope_scaling(model, *config.rope, config.context_length)
    if config.rope_scale == 1.0 and scaled.spec.context_length == model.spec.context_length:
        log.info("%s: a rope scale of 1 changes nothing; 2 allows texts twice as long", model.path)
    return scaled


def load(model: ModelFile, plan: Split | None, config: EngineConfig) -> "LoadedModel":
    """Loads a model for this configuration; loads it again, on the CPU, if a GPU fails.

    Raises HotsplitError if the C++ does not cover the model."""
    model.refuse_alone()
    if model.num_skipped:
        log.info(f"{model.path}: {model.skipped_note}")
    if config.draft_block and (note := model.draft_note):
        log.info(f"{model.path}: {note}")
    device = device_of(config.device)
    if device.type == "cuda":
        try:
            with failures_of_device(device):
                return LoadedModel(model, plan, config)
        except DeviceFails as failed:
            why = str(failed)
        # Outside the handler, where the exception no longer keeps the weights alive.
        log.warning(f"{model.path}: {why}: everything runs on the CPU; hotsplit doctor says more")
        config = replace(config, device="cpu")
    try:
        return LoadedModel(model, plan, config)
    except NotNative as reason:
        raise HotsplitError(f"{model.path}: {reason}") from None


class LoadedModel:
    """A load and its result. Each method sets what the following ones need. Raises NotNative for a
    model that the kernels do not cover, and what a GPU's libraries raise."""

    def __init__(self, model: ModelFile, plan: Split | None, config: EngineConfig) -> None:
        began = time.perf_counter()
        self.model, self.plan, self.config = model, plan, config
        # Of reasons for a choice, and of what is slower or worse than model and machine allow.
        self.notice: Notice = lambda line: log.info(f"{model.path}: {line}")
        self.warn: Notice = lambda line: log.warning(f"{model.path}: {line}")
        self.traffic = Traffic()
        self.mode: Mode = mode_of(model, config, plan, self.notice, self.warn)
        self._choose_devices()
        self._place()
        self._size_cache()
        self._set_up_neuron_cache()
        self._choose_draft()
        self._count_bytes()
        self._take_memory()
        self._load_weights()
        self.passes = pass_setup(
            self.weights,
            self.memories,
            self.placement,
            min(self.chunk, self.context_length),
            self.warn,
            None if plan is None else plan.prompt_rates,
        )
        self._make_neuron_cache()
        if self.is_on_gpu:
            got = within_time(self._first_logits, LIMIT_S)
            check_against_cpu(got, self.model, self.mode, self.cache_types)
        else:
            self._make_decoder()
        self.load_s = time.perf_counter() - began  # from an open file

    def _choose_devices(self) -> None:
        """Mixtures without a plan run on the CPU."""
        if self.model.spec.has_experts:
            self.config = without_gpu(self.model, self.plan, self.config, self.notice)
        self.gpus = gpus_of(self.plan, device_of(self.config.device))
        self.device = self.gpus[0]
        self.is_on_gpu = self.device.type == "cuda"
        if self.is_on_gpu:
            self.model.refuse_on_gpu()
            from hotsplit.runtime.kernels.gpu.kernels import triton_kernels

            triton_kernels()  # raises if Triton is missing
        use_default_threads(beside_gpu=self.is_on_gpu)

    def _place(self) -> None:
        self.placement = placement_of(self.model, self.plan, self.gpus, self.config)
        # A plan's workspace in main memory is that of short passes.
        placement = self.placement
        is_whole = placement.head_on_gpu and all(placement.dense_on_gpu)
        is_long = self.plan is None or (self.device.type == "cuda" and is_whole)
        self.chunk = PREFILL_CHUNK if is_long else SHORT_CHUNK

    def _size_cache(self) -> None:
        model, plan, config = self.model, self.plan, self.config
        self.num_sequences = sequences_of(config.num_sequences, plan)
        self.cache_types = cache_types_of(
            model,
            config,
            has_plan=plan is not None,
            device=self.device,
            planned=None if plan is None else plan.kv_offload,
        )
        selection = self.cache_types.selection
        if selection is not None and (kept := text_words(model)) is not None:
            self.notice(
                "--kv-offload is for keys and values alone; recurrent states stay with the weights"
                f" of their layers (a text keeps {kept})"
            )
        self.context_length = context_of(model, plan, config.context_length)
        self.model = for_context(model, self.context_length)
        if selection is not None and self.context_length > max(selection.longest, selection.full):
            after = f"after {selection.full:,} positions " if selection.full else ""
            self.notice(
                f"{after}a token reads at most {selection.longest:,} positions of a text"
                " (--kv-offload), so long texts are computed approximately"
            )

    def _bytes_of(self, plan: Split | None) -> dict[str, Items]:
        return bytes_by_role_of(
            self.model,
            plan,
            self.context_length,
            self.device,
            mode=self.mode,
            cpu_ffn=self.config.cpu_ffn,
            num_sequences=self.num_sequences,
            cache_types=self.cache_types,
            has_draft=self.has_draft,
        )

    def _count_bytes(self) -> None:
        self.bytes_by_role = self._bytes_of(self.plan)
        layers = range(self.model.spec.num_layers)
        reads_all_L = [self.model.spec.computes_all(layer, self.mode) for layer in layers]
        reads_all = any(reads_all_L)
        self.is_by_output = runs_by_output(self.model, self.placement, reads_all=reads_all)
        if self.is_by_output:
            model = as_read(self.model, self.device, self.mode)
            self.bytes_by_role["cpu"]["neurons"] = sum(
                stored_neuron_bytes(model, layer)
                if reads_all_L[layer]
                else math.prod(placed_units(model, layer))
                for layer in layers
            )

    def _set_up_neuron_cache(self) -> None:
        """Chooses the units that are in slots at the start."""
        self.setup = setup_of(self.config.neuron_cache, self.plan, self.mode)
        self.resident_LN = None
        if self.setup is not None and not self.is_on_gpu:
            self.notice(
                "the neuron cache swaps what a GPU's memory holds, so it is off without one"
            )
            self.setup = None
        elif self.setup is not None:
            assert self.plan is not None
            self.resident_LN = first_residents(self.model, self.plan)

    def _choose_draft(self) -> None:
        """The draft block is loaded on the CPU, or where the plan has it, beside a GPU where drafts
        can be checked."""
        self.has_draft = self.config.draft_block and self.model.draft is not None
        self.block_placement = Placement.on_one_device(1, torch.device("cpu"))
        self.is_block_on_gpu = self.has_draft and self.is_on_gpu and self.plan is not None
        self.is_block_on_gpu &= self.plan is not None and self.plan.draft_on_gpu
        if self.is_block_on_gpu:
            self.block_placement = placement_of_block(self.model, self.placement)
        if not self.has_draft or not self.is_on_gpu:
            return
        is_alone = self.setup is not None or self.placement.is_cache_on_host
        why = no_drafts_on_gpu(self.model, has_plan=self.plan is not None, one_token=is_alone)
        if why:
            self.has_draft = self.is_block_on_gpu = False
            self.notice(f"the draft block is not loaded, since {why}")

    def _take_memory(self) -> None:
        set_for_this_processor()
        model, plan = self.model, self.plan
        self.slots: ExpertSlots | None = None
        is_divided = plan is not None and any(len(ids) for ids in plan.hot)
        planned, ram_bytes = self._on_drive(), self.config.ram_bytes
        if planned and (self.is_on_gpu or is_divided):
            raise HotsplitError(
                f"{model.path}: the plan leaves experts on the drive beside a GPU, and they are"
                " read from there on the CPU alone; run hotsplit solve with a larger --ram, or"
                " leave the plan out and give --ram and --device cpu"
            )
        if planned and plan is not None and ram_bytes is None:
            ram_bytes = plan.host_budget_bytes or None
        if not (self.is_on_gpu or is_divided) and self.config.is_resident is None:
            of_all = self._bytes_of(None) if planned else self.bytes_by_role
            self.slots = expert_slots(
                model,
                sum(map(Counter, of_all.values()), Counter()),
                ram_bytes,
                context_length=self.context_length,
                mode=self.mode,
                num_sequences=self.num_sequences,
            )
        if self.slots is None:
            self.residence = residence_of(
                replace(model, runs_as_it_is=self.is_by_output),
                self.config.is_resident,
                self.bytes_by_role,
                self.device,
                ram_bytes=ram_bytes,
                has_draft=self.has_draft,
            )
        else:
            self.residence = Residence(holds_experts=False)
            for items in self.bytes_by_role.values():
                items["neurons"] = 0
            self.bytes_by_role["cpu"] |= self.slots.items
            self._say_slots(self.slots)
        if self.setup is not None and not (self.residence and self.residence.holds_experts):
            self.warn("the neuron cache is off: it needs the plan's weights in main memory")
            self.setup = self.resident_LN = None
        self.max_rows = self._step_rows()
        self.memories = memories_of(
            model,
            plan,
            self.placement,
            self.bytes_by_role,
            self.context_length,
            self.warn,
            max_rows=self.max_rows,
            num_sequences=self.num_sequences,
        )

    def _on_drive(self) -> tuple[np.ndarray | None, ...]:
        """The experts of each layer that the plan has in main memory, None for all; () if it leaves
        none on the drive."""
        found = () if self.plan is None else self.plan.resident_experts
        return found if any(ids is not None for ids in found) else ()

    def _say_slots(self, slots: ExpertSlots) -> None:
        own = [i for i, count in enumerate(slots.num_slots_L) if count]
        num_experts = sum(self.model.spec.layers[i].neurons.num_experts for i in own)
        self.notice(
            f"{sum(slots.num_slots_L):,} of {num_experts:,} experts have slots in main memory; the"
            " others are read from the drive when a token has chosen them"
        )
        if not slots.drive.is_direct:
            self.warn(
                "the file system has no direct reads (O_DIRECT): experts are read through the page"
                " cache, which takes longer, and memory that the system counts"
            )

    def _step_rows(self) -> int:
        """Most rows of a hybrid step. It is 1 if nothing is for a GPU, with a neuron cache, which
        handles the bits of one token, and if keys are in main memory, where steps of several rows
        have not been tested."""
        if self.setup is not None or "gpu" not in self.bytes_by_role:
            return 1
        if self.placement.is_cache_on_host:
            return 1
        workspace = self.bytes_by_role["gpu"]["workspace"] // len(set(self.placement.homes))
        rows = step_rows(self.model, self.context_length, workspace, self.num_sequences)
        if rows < min(self.num_sequences, max(ROWS)) and self.device.type == "cuda":
            self.notice(
                f"the workspace has room for steps of {rows} rows: {self.num_sequences} texts need"
                " several steps per token; a longer --context gives more"
            )
        return rows

    def _load_weights(self) -> None:
        with uploading(self.memories, self.residence, self.warn) as uploaders:
            self.weights = load_weights(
                self.model,
                self.placement,
                self.mode,
                self.context_length,
                notice=self.notice,
                residence=self.residence,
                uploaders=uploaders,
                num_sequences=self.num_sequences,
                cache_types=self.cache_types,
                resident_LN=self.resident_LN,
                draft_placement=self.block_placement if self.has_draft else None,
                drive=None if self.slots is None else self.slots.drive,
                num_slots_L=() if self.slots is None else self.slots.num_slots_L,
            )
        if self.slots is not None:
            self.slots.start(self._on_drive())
        check_routers(self.model, self.weights.layers)  # once the uploads are done
        if self.model.draft is not None and self.weights.draft is not None:
            check_routers(self.model.draft, self.weights.draft.layers)

    def _make_neuron_cache(self) -> None:
        self.neuron_cache: NeuronCache | None = None
        if self.setup is None or self.resident_LN is None:
            return
        if why := not_copied(self.weights, self.resident_LN):
            self.warn(f"the neuron cache is off: {why}")
            return
        self.neuron_cache = self.setup.cache(self.model.spec, self.resident_LN)

    def _make_decoder(self) -> None:
        """Builds the decode step and the decoder."""
        backend = self._backend()
        step: NativeStep | HybridStep
        block: HybridStep | None = None
        if backend is None:
            is_read = self.has_draft or has_assistants(self.model.spec)
            step = native_step.build(self.weights, self.traffic, ("x",) * is_read)
        else:
            # Both steps take memory from one allocator of each device.
            backend = replace(backend, take=cache(backend.take))
            given = self.weights, self.placement, self.traffic, backend, self.neuron_cache
            step = hybrid_builder.build(*given, self.max_rows, self.passes)
            if self.is_block_on_gpu:
                assert self.weights.draft is not None
                own = self.weights.draft, self.block_placement, Traffic(), backend
                block = hybrid_builder.build(*own, max_rows=self.max_rows)
        draft = None
        if self.has_draft:
            of_pass = step.most_tokens if isinstance(step, HybridStep) else 0
            draft = DraftStep(self.weights, max(step.max_rows, of_pass), block)
        self.decoder = Decoder(
            weights=self.weights, observers=Observers(), native=step, draft=draft
        )

    def _first_logits(self) -> dict[str, Tensor]:
        """Builds the decoder on a GPU, and computes the logits that are checked."""
        self._make_decoder()
        return logits_of(self.decoder, self.model.spec.vocab_size, repeats=True)

    def _backend(self) -> Backend | None:
        """The backend of a decode step on GPUs; None without one."""
        if not self.is_on_gpu:
            return None
        rings = can_ring(self.device)
        if not rings:
            self.notice(
                "this driver has no stream memory operations: kernels beside the CPU's part of a"
                " layer are launched one by one, which takes longer"
            )
        # A neuron cache writes weights while kernels run.
        overlaps = self.setup is None and self.config.graph and all(map(can_overlap, self.gpus))
        takes, has_graph = step_takes(self.memories), self.config.graph
        return cuda_backend(takes, has_graph=has_graph, has_doorbells=rings, overlaps=overlaps)
