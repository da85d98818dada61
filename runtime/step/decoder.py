"""The forward pass of rows: by the native step on the CPU, or by the layers of that if observers
see them; on GPUs by the hybrid step.

Letters: R rows with logits, V vocabulary."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, groupby

import torch
from torch import Tensor

from hotsplit.errors import HotsplitError
from hotsplit.runtime.device.device_memory import out_of_memory_as_error
from hotsplit.runtime.model.layers import Weights
from hotsplit.runtime.ops.observers import Observers
from hotsplit.runtime.step.batch import Row, is_decoded, prepared, runs_of
from hotsplit.runtime.step.hybrid_step import HybridStep
from hotsplit.runtime.step.native_layers import NativeLayers
from hotsplit.runtime.step.native_step import NativeStep


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """A model's forward pass."""

    weights: Weights
    observers: Observers
    native: NativeStep | HybridStep

    def step(self, token: int, position: int, sequence: int = 0) -> Tensor:
        """Logits f32 [V] after one token."""
        row = Row(token=token, position=position, sequence=sequence, has_logits=True)
        return self.run([row])[0]

    @property
    def vocab_size(self) -> int:
        return self.weights.head.weight.num_rows

    @property
    def has_hybrid_steps(self) -> bool:
        """True if decode steps are hybrid, and prompts are passes of their own."""
        return isinstance(self.native, HybridStep)

    @property
    def most_tokens(self) -> int:
        """Maximum tokens per pass."""
        if isinstance(self.native, NativeStep):
            return self.native.max_rows
        return self.native.most_tokens

    @cached_property
    def _native_layers(self) -> NativeLayers:
        if not isinstance(self.native, NativeStep):
            raise HotsplitError(
                "observers see the values of the CPU; load the model with device='cpu' (--device"
                " cpu)"
            )
        return NativeLayers.of(self.native, self.weights)

    def run(self, rows: Sequence[Row]) -> Tensor:
        """Logits f32 [R, V] of the rows that have them, on the CPU; appends keys and values to the
        cache. Rows of the native step are bit-identical to single steps.

        Computed rows beyond `most_tokens` are divided among passes, unless the native step has
        them. Raises HotsplitError for observers of a model on a GPU."""
        if isinstance(self.native, NativeStep) and not self.observers.active:
            with prepared(self.weights.cache, self.weights.states, rows) as slotted:
                return self.native.run_rows(slotted)
        return self._run_in_passes(rows)

    @out_of_memory_as_error()
    @torch.inference_mode()
    def _run_in_passes(self, rows: Sequence[Row]) -> Tensor:
        """`run` by the hybrid step for consecutive runs of decoded rows together, and by one or
        more passes for each other run."""
        steps = None if self.observers.active else self.native
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
        most = self.most_tokens
        pieces = (computed[start : start + most] for start in range(0, len(computed), most))
        return self._joined([self._computed(piece) for piece in pieces])

    def _computed(self, rows: Sequence[Row]) -> Tensor:
        if isinstance(self.native, HybridStep) and not self.observers.active:
            return self.native.run_pass(rows)
        with prepared(self.weights.cache, self.weights.states, rows) as slotted:
            return self._native_layers.logits(slotted, self.observers)

    def _copy(self, source: Row, target: Row) -> None:
        """Copies a row's keys and values to the same position of another sequence."""
        start = source.position
        for layer in self.weights.cache.layers:
            layer.write(target.sequence, start, *layer.read(source.sequence, start, start + 1))
