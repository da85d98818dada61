"""Weights in memory of our own, arranged as a decode step reads them.

Mapped pages of a file are 4 KiB each, and a neuron's gate, up and down lie far apart in it. Here
they are copied once, at load, into huge pages (where the system gives them): what a neuron needs
lies together, so that reading one neuron is one run through memory; where all gates are read but
few of the others (mode "exact"), the gates lie behind one another and up and down together; in mode
"dense" each matrix is one run. q4_0 and q8_0 rows get their scales first, which halves the
instructions of products and sums.

Measured on two cores of a Cascade Lake, a tenth of the neurons, against mapped rows: q8_0 5.4 and
10.0 GB/s a thread, q4_0 3.8 and 8.2, f16 7.8 and 10.7 (docs/log.md).

What this module does not know: models and plans. Letters: N rows, A chosen rows."""

import mmap
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from sparkinfer.errors import SparkinferError
from sparkinfer.gguf_file import TensorEntry, prefetch, release
from sparkinfer.runtime.device.pinned import PinnableMemory
from sparkinfer.runtime.kernels.cpu import library
from sparkinfer.runtime.weights.matrix import Matrix, matrix_of
from sparkinfer.sizes import format_bytes

SEGMENT_BYTES = 256 << 20
HUGE_PAGE_BYTES = 2 << 20
_ALIGNMENT = 64
_CPU = torch.device("cpu")


@dataclass
class Residence:
    """Memory that grows by segments and is given back with the last matrix in it."""

    num_bytes: int = 0  # of weights in it
    _rest: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    _segments: list[tuple[PinnableMemory, Tensor]] = field(default_factory=list, repr=False)

    def matrix(self, entry: TensorEntry, rows: np.ndarray | None = None) -> Matrix:
        """A copy of a matrix of a model file, or of some of its rows."""
        return self.side_by_side([entry], rows)[0]

    def side_by_side(self, entries: list[TensorEntry], rows: np.ndarray | None) -> list[Matrix]:
        """Copies of matrices with as many rows each: row j of each lies behind row j of the one
        before. Matrices of several types lie apart: their rows would not be aligned."""
        if len({entry.kind for entry in entries}) > 1:
            return [self.matrix(entry, rows) for entry in entries]
        index_A = None if rows is None else torch.from_numpy(rows.astype(np.int32))
        count = entries[0].shape[0] if rows is None else len(rows)
        sizes = [entry.row_bytes for entry in entries]
        whole = self._take(count * sum(sizes)).view(count, sum(sizes))
        found, start = [], 0
        for entry, size in zip(entries, sizes, strict=True):
            found.append(_copy(entry, index_A, whole, slice(start, start + size)))
            start += size
        return found

    def joined(self, entries: list[TensorEntry]) -> Matrix:
        """A copy of matrices with as many rows and the same type each as one whose rows are theirs
        one behind the other."""
        data = np.concatenate([entry.read() for entry in entries], axis=1)
        width = sum(entry.shape[-1] for entry in entries)
        whole = TensorEntry(
            shape=(len(data), width), kind=entries[0].kind, read_rows=lambda a, b: data[a:b]
        )
        found = self.matrix(whole)
        for entry in entries:
            release(entry)
        return found

    def keep(self, values: Tensor, *, is_weight: bool) -> Tensor:
        """A copy of any tensor, beside the weights that it belongs to."""
        kept = self._take(values.nbytes).view(values.dtype).view(values.shape).copy_(values)
        self.num_bytes -= 0 if is_weight else values.nbytes
        return kept

    def pin(self) -> None:
        """Lets GPUs copy from what was put in so far without a detour, until it is given back.

        Call it once, when everything is in: pages are pinned as far as they are used.
        Raises SparkinferError where the system does not allow so much."""
        self._close_segment()
        for memory, used in self._segments:
            memory.pin(used.data_ptr(), len(used))
        self._segments.clear()
        self._rest = self._rest[:0]

    def _take(self, num_bytes: int) -> Tensor:
        """uint8, 64-aligned."""
        if len(self._rest) < num_bytes:
            self._close_segment()
            memory, self._rest = _segment(max(SEGMENT_BYTES, num_bytes))
            self._segments.append((memory, self._rest))
        taken = self._rest[:num_bytes]
        self._rest = self._rest[-(-num_bytes // _ALIGNMENT) * _ALIGNMENT :]
        self.num_bytes += num_bytes
        return taken

    def _close_segment(self) -> None:
        """Notes what of the last segment is used."""
        if self._segments:
            memory, whole = self._segments[-1]
            self._segments[-1] = memory, whole[: len(whole) - len(self._rest)]


def _copy(entry: TensorEntry, index_A: Tensor | None, whole: Tensor, part: slice) -> Matrix:
    """Some columns of `whole`, filled with the rows; the mapped ones are let go of."""
    prefetch(entry)
    source = matrix_of(entry, _CPU)
    kind = library.pack_rows(source.data, source.kind, index_A, whole[:, part])
    release(entry)
    if kind != source.kind:
        return replace(source, kind=kind, data=whole[:, part])
    size = source.data.element_size()
    typed = whole.view(source.data.dtype)[:, part.start // size : part.stop // size]
    return replace(source, data=typed)


def _segment(num_bytes: int) -> tuple[PinnableMemory, Tensor]:
    """Zeros that take no memory until they are written to, from the start of a huge page on."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    try:
        mapping = PinnableMemory(-1, num_bytes + HUGE_PAGE_BYTES, flags)
    except OSError as error:  # addresses are limited, not memory: that was asked for before
        raise SparkinferError(
            f"no {format_bytes(num_bytes)} of addresses for weights ({error.strerror}): raise the"
            " limit (ulimit -v), or load with is_resident=False, which leaves them in the file"
        ) from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            mapping.madvise(mmap.MADV_HUGEPAGE)
        except OSError:  # a system without them: the same, slower
            pass
    memory = torch.frombuffer(mapping, dtype=torch.uint8)
    return mapping, memory[-memory.data_ptr() % HUGE_PAGE_BYTES :]
