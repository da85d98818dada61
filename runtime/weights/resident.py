"""Resident weights: copied from the file into memory, in the layout that a decode step reads.

Mapped pages of a file have 4 KiB, and a neuron's gate, up and down are far apart in it. Here they
are copied once, at load time, into huge pages (if the system has them), interleaved so that one
neuron is contiguous; in mode "exact", which reads all gates but few rows of the others, gates are
contiguous and up and down interleaved; in mode "dense" each matrix is contiguous. A GPU to which
neurons are streamed reads the same memory. In rows of small blocks all scales come first, which
halves the instructions of products and sums; with AVX-512, matrices that are multiplied whole are
tiled (runtime.kernels.tiled), which halves them again, and a matrix all of whose rows are added is
grouped (runtime.kernels.grouped).

Letters: A chosen rows."""

from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from hotsplit.errors import HotsplitError
from hotsplit.files.gguf_file import TensorEntry, prefetch, release
from hotsplit.runtime.device.huge_pages import untouched
from hotsplit.runtime.device.pinned import PinnableMemory
from hotsplit.runtime.kernels.cpu import library
from hotsplit.runtime.kernels.grids import is_read_in_file
from hotsplit.runtime.weights.matrix import Matrix, matrix_of
from hotsplit.system.sizes import format_bytes
from hotsplit.system.system_memory import advice_on_memory, check_address_space

SEGMENT_BYTES = 256 << 20
_ALIGNMENT = 64
_BESIDE = 96 << 20  # bytes of address space that tokenizers, threads and temporaries need
_CPU = torch.device("cpu")


@dataclass
class Residence:
    """Memory that grows in segments. A segment is freed when no matrix in it is left and, unless it
    is pinned, this object is gone too."""

    num_bytes: int = 0  # of the weights
    holds_experts: bool = True  # false: those of a mixture stay in the file
    only_cpu_reads: bool = True
    _rest: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    _segments: list[tuple[PinnableMemory, Tensor]] = field(default_factory=list, repr=False)

    def matrix(self, entry: TensorEntry, rows: np.ndarray | None = None) -> Matrix:
        """A copy of a matrix of a model file, or of some of its rows."""
        return self.interleaved([entry], rows)[0]

    def whole(
        self,
        entry: TensorEntry,
        form: library.Form,
        rows: np.ndarray | None = None,
        num_silent: int = 0,
    ) -> Matrix:
        """A copy of a matrix, or of some of its rows, that is always multiplied whole ("tiled") or
        whose rows are always all added ("grouped"): in this form if its kind and number of rows
        allow it and the level is not the generic one. Zeros replace the last `num_silent` rows. Of
        a type with a grid, the file's blocks, where these are faster than the table type's."""
        index_A, count = _chosen(entry, rows)
        if form == "tiled" and self.only_cpu_reads and is_read_in_file(entry, count):
            entry = entry.in_file
        whole = self._take(count * entry.row_bytes).view(count, entry.row_bytes)
        form = form if library.prefers_tiles() else "planar"
        return _copy(entry, index_A, whole, slice(0, entry.row_bytes), form, num_silent)

    def interleaved(
        self, entries: list[TensorEntry], rows: np.ndarray | None, num_silent: int = 0
    ) -> list[Matrix]:
        """Copies of matrices with equal numbers of rows, interleaved: row j of each matrix follows
        row j of the previous one. Matrices of different types are not interleaved, because their
        rows would not be aligned. Zeros replace the last `num_silent` rows of the last matrix."""
        if len({entry.kind for entry in entries}) > 1:
            *others, last = entries
            found = [self.matrix(entry, rows) for entry in others]
            return [*found, *self.interleaved([last], rows, num_silent)]
        index_A, count = _chosen(entries[0], rows)
        sizes = [entry.row_bytes for entry in entries]
        whole = self._take(count * sum(sizes)).view(count, sum(sizes))
        found, start = [], 0
        for entry, size in zip(entries, sizes, strict=True):
            silent = num_silent if entry is entries[-1] else 0
            part = slice(start, start + size)
            found.append(_copy(entry, index_A, whole, part, num_silent=silent))
            start += size
        return found

    def keep(self, values: Tensor, *, is_weight: bool) -> Tensor:
        """A copy of any tensor, next to the weights that it belongs to; `is_weight`: counted in
        `num_bytes`."""
        kept = self._take(values.nbytes).view(values.dtype).view(values.shape).copy_(values)
        self.num_bytes -= 0 if is_weight else values.nbytes
        return kept

    def room(self, num_bytes: int) -> Tensor:
        """Zeros for weights that are written later, uint8, which take no memory until then."""
        return self._take(num_bytes)

    def pin(self) -> None:
        """Pins the memory, until it is freed, so that GPUs copy from it directly.

        Call it once, when everything is copied: only used pages are pinned. Raises HotsplitError
        if the system does not allow it."""
        self._close_segment()
        for memory, used in self._segments:
            memory.pin(used.data_ptr(), len(used))
        self._segments.clear()
        self._rest = self._rest[:0]

    def _take(self, num_bytes: int) -> Tensor:
        """Takes bytes from the last segment, or from a new one if they do not fit: uint8, aligned
        to 64 bytes."""
        if len(self._rest) < num_bytes:
            self._close_segment()
            memory, self._rest = _segment(max(SEGMENT_BYTES, num_bytes))
            self._segments.append((memory, self._rest))
        taken = self._rest[:num_bytes]
        self._rest = self._rest[-(-num_bytes // _ALIGNMENT) * _ALIGNMENT :]
        self.num_bytes += num_bytes
        return taken

    def _close_segment(self) -> None:
        """Cuts the last segment to its used bytes."""
        if self._segments:
            memory, whole = self._segments[-1]
            self._segments[-1] = memory, whole[: len(whole) - len(self._rest)]


def _chosen(entry: TensorEntry, rows: np.ndarray | None) -> tuple[Tensor | None, int]:
    """(the list of rows, for the C++ kernels; their number)."""
    if rows is None:
        return None, entry.shape[0]
    return torch.from_numpy(rows.astype(np.int32)), len(rows)


def _copy(
    entry: TensorEntry,
    index_A: Tensor | None,
    whole: Tensor,
    part: slice,
    form: library.Form = "planar",
    num_silent: int = 0,
) -> Matrix:
    """Copies the rows (at `index_A`, or all) into some columns of `whole`, and zeros instead of the
    last `num_silent` of them; drops the mapped pages."""
    prefetch(entry)
    if index_A is None or entry.packed_from is None:
        source = matrix_of(entry, _CPU)
    else:  # only these rows are packed
        source = matrix_of(entry, _CPU, index_A.numpy())
        index_A = torch.arange(len(index_A), dtype=torch.int32)
    data = source.data
    if num_silent:
        assert index_A is not None
        some = data[index_A[:-num_silent]]
        data, index_A = torch.cat([some, some.new_zeros(num_silent, some.shape[1])]), None
    kind = library.pack_rows(data, source.kind, index_A, whole[:, part], form)
    release(entry)
    if kind != source.kind:
        return replace(source, kind=kind, data=whole[:, part])
    size = source.data.element_size()
    typed = whole.view(source.data.dtype)[:, part.start // size : part.stop // size]
    return replace(source, data=typed)


def _segment(num_bytes: int) -> tuple[PinnableMemory, Tensor]:
    """A new segment of zeros, aligned to a huge page, that takes no memory until written."""
    check_address_space(num_bytes + _BESIDE, "of weights and what a text needs")
    try:
        return untouched(num_bytes)
    except OSError as error:  # the address space is limited; free memory was checked earlier
        raise HotsplitError(
            f"no address space for {format_bytes(num_bytes)} of weights ({error.strerror});"
            f" {advice_on_memory()}"
        ) from error
