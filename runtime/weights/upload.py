"""Uploads matrices of a model file into a device's slab, in pieces and in the device's layout.

Besides the slab, an upload needs two pinned buffers on the host and, for types that are rearranged
(runtime.kernels.planar), a piece on the device, which takes no more than the least arena of passes
does later. Mapped pages are dropped after each matrix."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from hotsplit.files.gguf_file import TensorEntry, chosen_rows, prefetch, release
from hotsplit.runtime.device.device_memory import DeviceMemory, segment
from hotsplit.runtime.device.staging import Staging, copy_stream
from hotsplit.runtime.kernels.planar import PLANAR_KIND, write_planar
from hotsplit.runtime.kernels.stored import FLOATS
from hotsplit.runtime.weights.matrix import Matrix

PIECE_BYTES = 8 << 20


@dataclass
class Uploader:
    """The store of a GPU's weights (store.WeightStore), which fills its slab. `on_bytes` is called
    with the bytes of each piece and vector."""

    memory: DeviceMemory
    on_bytes: Callable[[int], None] = lambda num_bytes: None
    piece_bytes: int = PIECE_BYTES
    _staging: Staging | None = field(default=None, repr=False)
    _piece: Tensor | None = field(default=None, repr=False)  # on the device
    _ranges: dict[int, Tensor] = field(default_factory=dict, repr=False)

    @property
    def is_mapped(self) -> bool:
        return False

    def matrix(self, entry: TensorEntry, item: str, rows: np.ndarray | None = None) -> Matrix:
        """A matrix of a model file, or some of its rows; takes as many bytes as in the file."""
        count = entry.shape[0] if rows is None else len(rows)
        target = self.memory.take((count, entry.row_bytes), torch.uint8, item)
        self._fill(target, entry, rows)
        return _matrix(target, entry)

    def stacked(self, entries: Sequence[TensorEntry], item: str) -> Matrix:
        """Matrices of one type and width as one, whose first rows are those of the first."""
        num_rows = sum(entry.shape[0] for entry in entries)
        target = self.memory.take((num_rows, entries[0].row_bytes), torch.uint8, item)
        start = 0
        for entry in entries:
            self._fill(target[start : start + entry.shape[0]], entry, None)
            start += entry.shape[0]
        return _matrix(target, entries[0])

    def vector(self, values: Tensor, item: str) -> Tensor:
        """A copy of any small tensor."""
        target = self.memory.take(tuple(values.shape), values.dtype, item)
        self.on_bytes(target.nbytes)
        return target.copy_(values)

    def neurons(
        self,
        groups: Sequence[Sequence[TensorEntry]],
        rows: np.ndarray | None,
        num_whole: int = 0,
        adds_all: bool = False,
    ) -> list[Matrix]:
        return [self.matrix(entry, "neurons", rows) for entry in chain.from_iterable(groups)]

    def neuron_bias(self, bias_N: Tensor) -> Tensor:
        return self.vector(bias_N, "neurons")

    def neuron_ids(self, ids: np.ndarray, *, is_all: bool) -> Tensor:
        """The ids as int32, counted as workspace; those of all neurons are in memory that layers
        share."""
        if is_all and len(ids) in self._ranges:
            return self._ranges[len(ids)]
        values = torch.from_numpy(ids.astype(np.int32))
        id_N = self.memory.take(tuple(values.shape), torch.int32, "workspace").copy_(values)
        if is_all:
            self._ranges[len(ids)] = id_N
        return id_N

    def cache(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return self.memory.take(shape, dtype, "kv_cache").zero_()

    def finish(self) -> None:
        """Waits until all copies are done, and frees the buffers."""
        if self._staging is not None:
            self._staging.finish()
        self._staging = self._piece = None

    def _fill(self, target: Tensor, entry: TensorEntry, rows: np.ndarray | None) -> None:
        prefetch(entry)
        source, row_bytes = entry, target.shape[1]
        if rows is not None and entry.packed_from is not None:  # only these are packed
            source, rows = chosen_rows(entry, rows), None
        whole = None if rows is None else _as_bytes(source.read())
        staging = self._buffers(row_bytes)
        step = max(1, staging.num_bytes // row_bytes)
        for start in range(0, len(target), step):
            stop = min(start + step, len(target))
            piece, index_A = whole, None if rows is None else rows[start:stop]
            if piece is None:
                piece = _as_bytes(source.read_rows(start, stop))
            self._send(staging, target[start:stop], piece, index_A, entry.kind)
            self.on_bytes((stop - start) * row_bytes)
        release(entry)

    def _send(
        self,
        staging: Staging,
        target: Tensor,
        source: np.ndarray,
        index_A: np.ndarray | None,
        kind: str,
    ) -> None:
        """Uploads rows, uint8 [A, row bytes], of `source`, at `index_A` if it has others, too."""

        def fill(buffer: Tensor) -> None:
            out = buffer.numpy().reshape(-1, source.shape[1])
            if index_A is None:
                np.copyto(out, source)
            else:
                np.take(source, index_A, axis=0, out=out, mode="clip")  # "raise" makes a copy

        if kind not in PLANAR_KIND:
            staging.send(target.view(-1), fill)
            return
        if self._piece is None:
            self._piece = segment(target.device, staging.num_bytes)
        piece = self._piece[: target.numel()].view(target.shape)
        # Earlier work on this memory may still be running, and the copy is in another stream.
        staging.stream.wait(_recorded(target.device))
        event = staging.send(piece.view(-1), fill)
        if event is not None:
            torch.cuda.current_stream(target.device).wait_event(event)
        write_planar(piece, kind, target)

    def _buffers(self, row_bytes: int) -> Staging:
        if self._staging is None or self._staging.num_bytes < row_bytes:
            self.finish()
            device = self.memory.device
            size = max(self.piece_bytes, row_bytes)
            self._staging = Staging(size, copy_stream(device), is_pinned=device.type == "cuda")
        return self._staging


def _as_bytes(rows: np.ndarray) -> np.ndarray:
    return rows.reshape(len(rows), -1).view(np.uint8)


def _matrix(target: Tensor, entry: TensorEntry) -> Matrix:
    """Uploaded rows in the layout for a GPU."""
    kind = PLANAR_KIND.get(entry.kind, entry.kind)
    dtype = FLOATS.get(kind, torch.uint8)
    return Matrix(data=target.view(dtype), kind=kind, width=entry.shape[-1])


def _recorded(device: torch.device) -> torch.cuda.Event | None:
    """An event after everything launched so far on torch's current stream; None on the CPU, where
    everything has run."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event
