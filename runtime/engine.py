"""The engine: a loaded model that produces logits and tokens.

    from hotsplit import Engine
    with Engine.load("m.gguf", split="m.split.gguf") as engine:
        for token in engine.generate("def main():", max_tokens=64, temperature=0.0):
            print(token.text, end="")

runtime.loading loads it, runtime.step computes the forward pass."""

import gc
import time
from pathlib import Path
from typing import Self, Unpack

import torch
from torch import Tensor

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.artifacts.split_file import Split
from hotsplit.errors import HotsplitError
from hotsplit.options.cache_types import CacheTypes
from hotsplit.options.engine_config import EngineConfig, EngineOptions
from hotsplit.options.generation import SamplingOptions
from hotsplit.options.kinds import kinds_checked
from hotsplit.runtime.device.device_memory import (
    MemoryReport,
    free_workspaces,
    out_of_memory_as_error,
)
from hotsplit.runtime.generate.sampler_chain import SamplerChain
from hotsplit.runtime.generate.text_engine import TextEngine
from hotsplit.runtime.kernels.cpu import library
from hotsplit.runtime.loading import Loaded, load, open_plan, with_positions
from hotsplit.runtime.model.layers import Layer
from hotsplit.runtime.ops.observers import Observation, Observe, Wants
from hotsplit.runtime.step.batch import rows_of


class Engine(TextEngine):
    """A loaded model, created by `Engine.load`. Not thread-safe."""

    def __init__(self, loaded: Loaded) -> None:
        super().__init__(
            loaded.model, loaded.decoder, loaded.mode, loaded.traffic, loaded.placement
        )
        self.bytes_by_role, self.device = loaded.bytes_by_role, loaded.device
        self.load_s = loaded.load_s  # seconds of loading, after the file was opened
        self.memories = loaded.memories  # by GPU
        self.neuron_cache = loaded.neuron_cache

    @classmethod
    @kinds_checked
    def load(
        cls, model: str | Path, split: str | Path | None = None, **options: Unpack[EngineOptions]
    ) -> "Engine":
        """Loads a model file, with or without a plan. `options` are the fields of
        hotsplit.options.engine_config.EngineConfig, which documents them.

        Raises HotsplitError for a wrong file, plan, mode, device or types."""
        return load_engine(model, split, EngineConfig(**options))

    @classmethod
    @kinds_checked
    def of(
        cls, file: ModelFile, plan: Split | None = None, **options: Unpack[EngineOptions]
    ) -> "Engine":
        """Same as `load`, for a model that is already open, or that is not in a file."""
        config = EngineConfig(**options)
        return cls._of(with_positions(file, config), plan, config)

    @classmethod
    @out_of_memory_as_error()
    def _of(cls, file: ModelFile, plan: Split | None, config: EngineConfig) -> "Engine":
        with torch.inference_mode(mode=False):  # a caller may leave that mode
            return cls(load(file, plan, config))

    def _prefill(self, ids_T: Tensor) -> Tensor:
        """The logits f32 [V] after the last token. Overwrites the first sequence, even
        if it is in use."""
        size = self._live.most_tokens
        for number, chunk in enumerate(ids_T.split(size)):
            logits_RV = self._live.run(rows_of(chunk.tolist(), number * size))
        return logits_RV[0]

    def _step(self, token_id: int, position: int) -> Tensor:
        return self._live.step(token_id, position)

    @kinds_checked
    @out_of_memory_as_error()
    @torch.inference_mode()
    def decode_seconds(self, *, steps: int, start: int = 0) -> float:
        """Seconds that `steps` decode steps take at the positions from `start` on, including
        sampling; for benchmarks.

        Needs no text: the first token is 0, the others are the most probable ones, and the cache's
        content before `start`, or that of a recurrent state, is used as it is."""
        if not (steps >= 1 and start >= 0 and start + steps <= self.context_length):
            raise HotsplitError(
                f"{steps} steps from position {start} of a context of {self.context_length}, wanted 1"
                " or more that end within it"
            )
        chain = SamplerChain(SamplingOptions(temperature=0.0), self.model.spec.vocab_size)
        token_id = 0
        with self._sequences.open(yields=True) as text:
            weights = self._live.weights
            weights.cache.reserve(text.number, 0, start)
            if weights.states is not None and start:
                weights.states.take(text.number, [start])
            began = time.perf_counter()
            for position in range(start, start + steps):
                rows = rows_of([token_id], position, sequence=text.number)
                token_id = chain.sample(self._live.run(rows)[0], ())
            return time.perf_counter() - began

    @kinds_checked
    def observe(
        self, observe: Observe, wants: Wants | None = None, *, in_torch: bool = False
    ) -> Observation:
        """Calls observe(name, layer, tensor) after each named tensor is computed.

        runtime.ops.observers.NAMES lists names and shapes; layer is None outside the layers.
        wants(name, layer) is called first; if it returns false, the tensor is skipped. Observation
        ends with `.remove()` or with the `with` block. A tensor must not be changed, or kept
        without a copy.

        Passes that are observed go layer by layer: in native operations, with the bits of a decode
        step, if these support the model and show all that is wanted (native_layers.SHOWN); with
        `in_torch` in torch, which differs in the order of summation. An observer that is added during
        a pass takes part from the next one on."""
        return self._live.observers.add(observe, wants, in_torch=in_torch)

    @property
    def cache_types(self) -> CacheTypes:
        """Storage types of keys and values."""
        return self._live.weights.cache.types

    @property
    def has_native_layers(self) -> bool:
        """True if passes that are observed can be native."""
        return self._live.has_native_layers

    def memory_report(self) -> list[MemoryReport]:
        """Budgeted, reserved and peak bytes of each GPU that holds a part of the model."""
        return [memory.report() for memory in self.memories.values()]

    @property
    def layers(self) -> tuple[Layer, ...]:
        """The loaded layers: their placement and matrices."""
        return self._live.weights.layers

    def close(self) -> None:
        """Frees the weights and the cache; the engine cannot be used afterwards."""
        library.set_spin_time()
        for device in self.memories:  # waits for interrupted uploads too
            torch.cuda.synchronize(device)
        self._sequences.decoder = None
        if self.neuron_cache is not None:
            self.neuron_cache.slots = None  # they hold weights too
        if self.device.type == "cuda":
            gc.collect()  # a captured step and its inputs refer to each other
            for memory in self.memories.values():
                memory.close()
            free_workspaces()
            torch.cuda.empty_cache()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def load_engine(model: str | Path, split: str | Path | None, config: EngineConfig) -> Engine:
    """Same as `Engine.load`, with its options as one configuration."""
    file = with_positions(ModelFile.load(Path(model)), config)
    return Engine._of(file, open_plan(split, file), config)
