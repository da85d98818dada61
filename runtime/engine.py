"""The engine: a loaded model that produces logits and tokens.

    from sparkinfer import Engine
    with Engine.load("m.gguf", split="m.split.gguf") as engine:
        for token in engine.generate("def main():", max_tokens=64, temperature=0.0):
            print(token.text, end="")

The forward pass is left to runtime.step, the placement of weights to runtime.model.loader."""

import gc
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from sparkinfer.budget import (
    PREFILL_CHUNK,
    SHORT_CHUNK,
    Items,
)
from sparkinfer.errors import SparkinferError
from sparkinfer.limits import LayerLimits, Limits
from sparkinfer.mode_choice import mode_meant
from sparkinfer.mode_quality import MAX_LOSS
from sparkinfer.model_file import ModelFile
from sparkinfer.neuron_cache import CacheOptions, Off
from sparkinfer.runtime.check.device_check import DeviceLost, checked
from sparkinfer.runtime.device.device_memory import MemoryReport, told_out_of_memory
from sparkinfer.runtime.engine_options import (
    bytes_by_role_of,
    cache_types_of,
    context_of,
    device_of,
    gpus_of,
    mode_of,
    placement_of,
    residence_of,
    sequences_of,
)
from sparkinfer.runtime.generate.chain import SamplerChain
from sparkinfer.runtime.generate.sampling_options import SamplingOptions
from sparkinfer.runtime.generate.text_engine import TextEngine
from sparkinfer.runtime.gpu_setup import (
    Memories,
    memories_of,
    set_aside,
    step_takes,
    uploading,
    with_cold_streams,
)
from sparkinfer.runtime.kernels.cpu import library
from sparkinfer.runtime.model.feed_forward import Mode, Traffic
from sparkinfer.runtime.model.loader import Layer, Weights, limited, load_weights
from sparkinfer.runtime.model.observers import Observation, Observe, Observers, Wants
from sparkinfer.runtime.neuron_cache.cycle import NeuronCache
from sparkinfer.runtime.neuron_cache.setup import CacheSetup, setup_of, slot_bytes
from sparkinfer.runtime.step.batch import rows_of
from sparkinfer.runtime.step.decode_step import DecodeStep, decode_step
from sparkinfer.runtime.step.decoder import Decoder
from sparkinfer.split_file import Split
from sparkinfer.thresholds import replace_thresholds, with_thresholds


class Engine(TextEngine):
    """A loaded model, made by `Engine.load`. Not thread-safe."""

    def __init__(
        self,
        model: ModelFile,
        decoder: Decoder,
        *,
        mode: Mode,
        bytes_by_role: dict[str, Items],
        device: torch.device,
        traffic: Traffic,
        step_of: Callable[[Weights], DecodeStep | str],
        load_s: float,
        memories: Memories,
        neuron_cache: NeuronCache | None = None,
    ) -> None:
        super().__init__(model, decoder, mode, traffic)
        self.bytes_by_role, self.device = bytes_by_role, device
        self._step_of = step_of
        self.load_s = load_s  # seconds from an open file to weights in place
        self.memories = memories  # per GPU, for memory reports
        self.neuron_cache = neuron_cache

    @classmethod
    def load(
        cls,
        model: str | Path,
        split: str | Path | None = None,
        mode: Mode | None = None,
        device: str | None = None,
        context_length: int | None = None,
        thresholds: str | Path | None = None,
        is_resident: bool | None = None,
        graph: bool = True,
        cpu_ffn: bool = False,
        num_sequences: int = 1,
        max_loss: float = MAX_LOSS,
        limits: str | Path | None = None,
        cache_type_k: str | None = None,
        cache_type_v: str | None = None,
        kv_offload: str | None = None,
        neuron_cache: CacheOptions | CacheSetup | Off | None = None,
    ) -> "Engine":
        """Loads a model file, with or without a plan.

        mode: "dense", "exact" or "predicted"; None takes the plan's. Without a plan it takes the
        mode that reads the fewest bytes among those that cost at most `max_loss` of the perplexity
        by the file's record (mode_choice); with `thresholds`, the mode that these and the predictors are
        made for. device: "cpu" or "cuda[:n]" for everything the plan does not put on the CPU; None takes
        CUDA if there is a device. context_length: tokens the cache holds per text; None takes the
        plan's, or the model's up to 4,096. thresholds: a profile whose thresholds replace those of
        a SiLU or GELU model; mode "dense" uses none. is_resident: whether weights on the CPU are
        copied into memory in the layout for decoding, or stay in the mapped file, which loads at
        once and decodes slower; None copies them if they fit into free memory. graph: whether a
        step on CUDA is captured into a graph; without a graph, results are the same and decoding is
        slower, but it can be debugged. cpu_ffn: in place of a plan, puts all feed-forward neurons on the CPU and
        everything else on the device. num_sequences: texts kept at a time, each of up to
        context_length tokens; more than one on the CPU only. limits: a limits file
        (sparkinfer.limits) that replaces the limits of a SiLU or GELU model; mode "dense" uses
        none. cache_type_k, cache_type_v: storage types of keys and values (sparkinfer.cache_types),
        on the CPU only; None takes f32 for a model in f32 and f16 for others, and for values the
        type of the keys. kv_offload: "on", or sizes such as "window=2048,top=512": a token of a long
        text reads only the keys with the largest estimated weights (sparkinfer.key_selection), on
        the CPU only.

        neuron_cache: lets the neurons in the slots of the fast memory follow the text, as its
        settings say; at first they are the hot neurons of the plan, which must have room for it. None
        lets them follow if the plan has room and the mode is the plan's, "off" never.

        A GPU is checked at its first load (runtime.check); what fails is replaced by something
        slower, and a line on stderr says so.

        Raises SparkinferError for a wrong file, plan, mode, device, profile, limits or types."""
        file = ModelFile.load(Path(model))
        if thresholds is not None:
            if mode == "dense":
                raise SparkinferError(
                    f"{thresholds}: mode dense uses no thresholds; leave one of the two out"
                )
            file = with_thresholds(file, Path(thresholds))
            if mode is None and split is None:
                mode = mode_meant(file)
        if limits is not None:
            if mode == "dense":
                raise SparkinferError(
                    f"{limits}: mode dense uses no limits; leave one of the two out"
                )
            file = file.with_limits(Limits.load(Path(limits)), str(limits))
            if mode is None and split is None:
                mode = "exact" if file.predictor is None else "predicted"
        plan = None
        if split is not None:
            plan = Split.load(Path(split))
            plan.check_against(file.row_major, Path(split))
        return cls.of(
            file, plan, mode, device, context_length, is_resident, graph, cpu_ffn, num_sequences,
            max_loss, cache_type_k, cache_type_v, kv_offload, neuron_cache,
        )  # fmt: skip

    @classmethod
    @told_out_of_memory()
    def of(
        cls,
        file: ModelFile,
        plan: Split | None = None,
        mode: Mode | None = None,
        device: str | None = None,
        context_length: int | None = None,
        is_resident: bool | None = None,
        graph: bool = True,
        cpu_ffn: bool = False,
        num_sequences: int = 1,
        max_loss: float = MAX_LOSS,
        cache_type_k: str | None = None,
        cache_type_v: str | None = None,
        kv_offload: str | None = None,
        neuron_cache: CacheOptions | CacheSetup | Off | None = None,
    ) -> "Engine":
        """Does what `load` does, for a model that is already open or not in a file at all."""
        rest = (
            context_length, is_resident, graph, cpu_ffn, num_sequences, max_loss, cache_type_k,
            cache_type_v, kv_offload, neuron_cache,
        )  # fmt: skip
        try:
            return cls._of(file, plan, mode, device, *rest)
        except DeviceLost as lost:
            why = str(lost)
        _notice(file, why)  # past the handler, which would keep the lost weights
        return cls._of(file, plan, mode, "cpu", *rest)

    @classmethod
    def _of(
        cls,
        file: ModelFile,
        plan: Split | None,
        mode: Mode | None,
        device: str | None,
        context_length: int | None,
        is_resident: bool | None,
        graph: bool,
        cpu_ffn: bool,
        num_sequences: int,
        max_loss: float,
        cache_type_k: str | None,
        cache_type_v: str | None,
        kv_offload: str | None,
        neuron_cache: CacheOptions | CacheSetup | Off | None,
    ) -> "Engine":
        """Raises DeviceLost if a GPU fails its check and does not answer any more."""
        began = time.perf_counter()
        notice = partial(_notice, file)
        mode = mode_of(file.row_major, mode, plan, max_loss, notice)
        gpu = device_of(device)
        gpus = (gpu,) if plan is None else gpus_of(plan, gpu)
        check = checked(gpus, notice, has_budget=plan is not None)
        gpu = torch.device("cpu") if check is None else gpu
        _check_limits(file, plan, gpu)
        placement = placement_of(file, plan, gpu, cpu_ffn=cpu_ffn)
        num_sequences = sequences_of(num_sequences, plan, gpu)
        cache_types = cache_types_of(
            file.row_major, cache_type_k, cache_type_v, kv_offload, has_plan=plan is not None,
            device=gpu,
        )  # fmt: skip
        context_length = context_of(file, plan, context_length, cache_types.selection)
        if cache_types.selection is not None and context_length > cache_types.selection.longest:
            notice(f"a token reads at most {cache_types.selection.longest:,} positions of a text"
                   " (--kv-offload), so long texts are computed approximately")  # fmt: skip
        bytes_by_role = bytes_by_role_of(
            file.row_major, plan, context_length, gpu, cpu_ffn=cpu_ffn, num_sequences=num_sequences,
            cache_types=cache_types,
        )  # fmt: skip
        resident_LN, setup = None, setup_of(neuron_cache, plan, mode)
        if setup is not None:
            resident_LN = setup.resident(file.row_major, plan, gpu)
            if plan is None or plan.cache is None:
                bytes_by_role["cpu"]["neuron_cache"] = slot_bytes(file.row_major, resident_LN)
        residence = residence_of(file, is_resident, bytes_by_role, gpu)
        if setup is not None:
            setup.check(file.row_major, plan, mode, is_resident=residence is not None)
        observers, traffic = Observers(), Traffic()
        memories = memories_of(
            file, plan, placement, bytes_by_role, context_length, notice,
            keeps_budget=check is None or check.keeps_budget,
        )  # fmt: skip
        with uploading(memories, residence, notice) as uploaders:
            weights = load_weights(
                file, placement, mode, context_length, observers, traffic, notice, residence,
                uploaders, num_sequences, cache_types, resident_LN, gpu.type == "cpu",
            )  # fmt: skip
        if not library.is_available():
            print(f"{file.path}: the C++ kernels are not built; torch computes in their place, many"
                  " times slower; run make build", file=sys.stderr)  # fmt: skip
        offset = file.predictor.input_layer_offset if file.predictor else 0
        chunk = PREFILL_CHUNK if plan is None else SHORT_CHUNK
        if check is not None:
            check.check_kernels(weights, placement, offset, step_takes(memories))
        weights, chunk = with_cold_streams(
            file, weights, memories, placement, mode, context_length, bytes_by_role, chunk, notice
        )
        step_by = partial(decode_step, placement=placement, input_layer_offset=offset,
                          traffic=traffic)  # fmt: skip
        cache = None
        if setup is not None and resident_LN is not None:
            cache = setup.cache(weights, resident_LN, is_joined=gpu.type == "cpu")
        backend = None
        if check is not None:
            plain = Decoder(weights=weights, input_layer_offset=offset, observers=Observers(),
                            native="this is layer by layer")  # fmt: skip
            backend = check.backend(
                lambda backend: step_by(weights, backend=backend), plain.step,
                step_takes(memories), has_graph=graph,
            )  # fmt: skip
        step_of = partial(step_by, backend=backend, neuron_cache=cache)
        step = step_of(weights)
        set_aside(memories)
        if isinstance(step, str) and check is not None:
            print(f"{file.path}: {step}: tokens go through torch layer by layer, several times"
                  " slower", file=sys.stderr)  # fmt: skip
        decoder = Decoder(
            weights=weights,
            input_layer_offset=offset,
            observers=observers,
            native=step,
            chunk=chunk,
        )
        return cls(
            file,
            decoder,
            mode=mode,
            bytes_by_role=bytes_by_role,
            device=gpu,
            traffic=traffic,
            step_of=step_of,
            load_s=time.perf_counter() - began,
            memories=memories,
            neuron_cache=cache,
        )

    @told_out_of_memory()
    def set_thresholds(self, threshold_L: Sequence[float]) -> None:
        """Replaces the thresholds of a SiLU or GELU model from here on.

        They take the place of gate limits. Raises SparkinferError for other models, and unless
        there is one finite threshold per layer."""
        source, own = str(self.model.path), self.model.limits
        other = tuple(replace(layer, gate_F=None) for layer in own.layers)
        model = self.model.with_limits(replace(own, layers=other), source)
        self._run_as(replace_thresholds(model, threshold_L, source))

    @told_out_of_memory()
    def set_limits(self, limits: Limits | None) -> None:
        """Replaces the limits of a SiLU or GELU model from here on; None removes them.

        Gate limits take the place of thresholds. The layout of matrices does not change: input
        limits save bytes only where matrices are transposed. Raises SparkinferError for other
        models and for limits of another model or shape."""
        none = (LayerLimits(),) * self.model.shape.num_layers
        limits = limits or Limits(model_id=None, layers=none)
        model = self.model.with_limits(limits, "limits")
        _check_limits(model, None, self.device)
        self._run_as(model)

    def _run_as(self, model: ModelFile) -> None:
        """Applies the thresholds and limits of `model` to the same weights."""
        layers = tuple(
            limited(layer.with_threshold(threshold), limits)
            for layer, threshold, limits in zip(
                self.layers, model.threshold_L, model.limits.layers, strict=True
            )
        )
        self.model = model
        weights = replace(self._live.weights, layers=layers)
        self._sequences.decoder = replace(
            self._live, weights=weights, native=self._step_of(weights)
        )
        set_aside(self.memories)

    @told_out_of_memory()
    @torch.inference_mode()
    def _prefill(self, ids_T: Tensor) -> Tensor:
        """f32 [V], the logits after the last of these tokens, in the first sequence regardless of
        its owner."""
        size = self._live.most_tokens
        for number, chunk in enumerate(ids_T.split(size)):
            logits_RV = self._live.run(rows_of(chunk.tolist(), number * size))
        return logits_RV[0]

    @told_out_of_memory()
    @torch.inference_mode()
    def _step(self, token_id: int, position: int) -> Tensor:
        return self._live.step(token_id, position)

    @told_out_of_memory()
    @torch.inference_mode()
    def decode_seconds(self, *, steps: int, start: int = 0) -> float:
        """Seconds per decode step at the positions from `start`, sampling included: for benchmarks.

        The time does not depend on the tokens, so no text is needed; whatever the cache holds
        before `start` is used as it is."""
        assert steps >= 1 and start + steps <= self.context_length, (steps, start)
        chain = SamplerChain(SamplingOptions(temperature=0.0), self.model.shape.vocab_size)
        token_id = 0
        with self._sequences.open(yields=True) as text:
            self._live.weights.cache.reserve(text.number, 0, start + steps)
            began = time.perf_counter()
            for position in range(start, start + steps):
                rows = rows_of([token_id], position, sequence=text.number)
                token_id = chain.sample(self._live.run(rows)[0], ())
            return time.perf_counter() - began

    def observe(self, observe: Observe, wants: Wants | None = None) -> Observation:
        """Calls observe(name, layer, tensor) after each named tensor is computed.

        Names and shapes are listed in runtime.model.observers.NAMES; layer is None outside the
        layers. wants(name, layer) is called first and may decline. Ends with `.remove()` or, as a
        context manager, with its block. A tensor must not be changed or kept without a copy."""
        return self._live.observers.add(observe, wants)

    def memory_report(self) -> list[MemoryReport]:
        """Bytes budgeted, reserved and reserved at the peak, for each GPU that holds a part of the
        model."""
        return [memory.report() for memory in self.memories.values()]

    @property
    def layers(self) -> tuple[Layer, ...]:
        """The loaded layers: their placement and matrices."""
        return self._live.weights.layers

    def close(self) -> None:
        """Frees the weights and the cache; the engine cannot be used afterwards."""
        for device in self.memories:  # including uploads that were interrupted
            torch.cuda.synchronize(device)
        self._sequences.decoder = None
        if self.neuron_cache is not None:
            self.neuron_cache.slots = None  # they are weights, too
        if self.device.type == "cuda":
            gc.collect()  # a captured step and its inputs refer to each other
            for memory in self.memories.values():
                memory.close()
            torch.cuda.empty_cache()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _check_limits(file: ModelFile, plan: Split | None, gpu: torch.device) -> None:
    """Raises SparkinferError for sparsity rules that the devices cannot run."""
    if gpu.type == "cuda" and file.has_limits:
        raise SparkinferError(
            f"{file.path}: limits of neurons and inputs run only on the CPU so far; use device cpu,"
            " or convert the model without them"
        )
    gate = file.gate_name
    if plan is not None and any(file.is_transposed(i, gate) for i in range(file.shape.num_layers)):
        raise SparkinferError(
            f"{file.path}: gates are stored by inputs (limits of the feed-forward's inputs), so no"
            " plan can divide the neurons; leave the plan out, or convert without these limits"
        )


def _notice(file: ModelFile, line: str) -> None:
    """Prints a notice for the user."""
    print(f"{file.path}: {line}", file=sys.stderr)
