"""The forward pass of rows: by the native step on the CPU, or by the layers of that if observers see them;
on GPUs by the hybrid step, and for prompts and observers by passes in torch (gpu_pass).

Letters: R rows with logits, V vocabulary."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, groupby

import torch
from torch import Tensor

from hotsplit.costs.pass_length import PREFILL_CHUNK, SHORT_CHUNK
from hotsplit.runtime.device.device_memory import is_out_of_memory, out_of_memory_as_error
from hotsplit.runtime.model.layers import Weights
from hotsplit.runtime.ops.observers import Observers
from hotsplit.runtime.step.batch import Row, is_decoded, prepared, runs_of
from hotsplit.runtime.step.captured_passes import CapturedPasses
from hotsplit.runtime.step.gpu_pass import GpuPass
from hotsplit.runtime.step.hybrid_step import HybridStep
from hotsplit.runtime.step.native_layers import NativeLayers
from hotsplit.runtime.step.native_step import NativeStep

log = logging.getLogger(__name__)


@dataclass
class PassLength:
    """The most tokens of a pass, halved for good when a pass does not fit into a GPU's memory."""

    most: int = PREFILL_CHUNK

    def shorten(self, num_tokens: int) -> None:
        """Notes that a pass of so many tokens does not fit, and frees what it has taken."""
        self.most = min(self.most, num_tokens // 2)
        log.warning(
            "a GPU's memory is short for a pass of %d tokens: passes have at most %d from now on, which"
            " makes prompts slower",
            num_tokens,
            self.most,
        )
        torch.cuda.empty_cache()


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """A model's forward pass."""

    weights: Weights
    observers: Observers
    native: NativeStep | HybridStep | None  # the decode step; None: passes in torch alone
    chunk: int = SHORT_CHUNK  # tokens per pass in torch without observers, at most
    length: PassLength = field(default_factory=PassLength)
    captured: CapturedPasses | None = None

    def step(self, token: int, position: int, sequence: int = 0) -> Tensor:
        """Logits f32 [V] after one token."""
        row = Row(token=token, position=position, sequence=sequence, has_logits=True)
        return self.run([row])[0]

    @property
    def vocab_size(self) -> int:
        return self.weights.head.weight.num_rows

    @property
    def has_hybrid_steps(self) -> bool:
        """True if decode steps are hybrid, and prompts are computed otherwise."""
        return isinstance(self.native, HybridStep) and not self.observers.active

    @property
    def most_tokens(self) -> int:
        """Maximum tokens per pass."""
        if isinstance(self.native, NativeStep):
            return self.native.max_rows
        chunk = SHORT_CHUNK if self.observers.active else self.chunk
        return min(chunk, self.length.most)

    @cached_property
    def gpu_pass(self) -> GpuPass:
        return GpuPass(weights=self.weights, observers=self.observers, captured=self.captured)

    @cached_property
    def _native_layers(self) -> NativeLayers:
        assert isinstance(self.native, NativeStep)
        return NativeLayers.of(self.native, self.weights)

    def run(self, rows: Sequence[Row]) -> Tensor:
        """Logits f32 [R, V] of the rows that have them, on the CPU; appends keys and values to the
        cache. Rows of the native step are bit-identical to single steps.

        Computed rows beyond `most_tokens` are divided among passes, unless the native step has them."""
        if isinstance(self.native, NativeStep) and not self.observers.active:
            with prepared(self.weights.cache, self.weights.states, rows) as slotted:
                return self.native.run_rows(slotted)
        return self._run_in_passes(rows)

    @out_of_memory_as_error()
    @torch.inference_mode()
    def _run_in_passes(self, rows: Sequence[Row]) -> Tensor:
        """`run` by the hybrid step for consecutive runs of decoded rows together, if there is one, and by
        one or more passes for each other run."""
        steps = self.native if self.has_hybrid_steps else None
        pieces: list[Tensor] = []
        for is_step, runs in groupby(runs_of(rows), key=is_decoded):
            if is_step and isinstance(steps, HybridStep):
                pieces.append(steps.run_rows(list(chain.from_iterable(runs))))
            else:
                pieces += [self._pass(rows, run) for run in runs]
        return self._joined(pieces)

    def _joined(self, pieces: Sequence[Tensor]) -> Tensor:
        """The logits of all pieces, [R, V]."""
        if len(pieces) == 1:
            return pieces[0]
        return torch.cat([torch.empty(0, self.vocab_size), *pieces])

    def _pass(self, rows: Sequence[Row], run: Sequence[Row]) -> Tensor:
        """Computes consecutive rows of one sequence; see `run`."""
        for row in run:
            if row.source is not None:
                self.weights.cache.reserve(row.sequence, row.position, row.position + 1)
                self._copy(rows[row.source], row)
        computed = [row for row in run if row.source is None]
        pieces: list[Tensor] = []
        done = 0
        while done < len(computed):
            piece = computed[done : done + self.most_tokens]
            logits_RV = self._tried(piece)
            if logits_RV is None:
                self.length.shorten(len(piece))
                continue
            pieces.append(logits_RV)
            done += len(piece)
        return self._joined(pieces)

    def _tried(self, rows: Sequence[Row]) -> Tensor | None:
        """Logits of consecutive rows of one sequence, computed in one pass; None if it does not fit
        into a GPU's memory. Then it may be repeated: it rewrites the same positions."""
        try:
            with prepared(self.weights.cache, self.weights.states, rows) as slotted:
                if isinstance(self.native, NativeStep):
                    return self._native_layers.logits(slotted, self.observers)
                return self.gpu_pass.logits(slotted)
        except RuntimeError as error:
            if len(rows) == 1 or not is_out_of_memory(error):
                raise
        for layer in self.weights.layers:
            for stream in (layer.ffn.cold, layer.ffn.cold_experts):
                if stream is not None:
                    stream.abandon()
        return None

    def _copy(self, source: Row, target: Row) -> None:
        """Copies a row's keys and values to the same position of another sequence."""
        start = source.position
        for layer in self.weights.cache.layers:
            layer.write(target.sequence, start, *layer.read(source.sequence, start, start + 1))
