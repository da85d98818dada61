"""The drive that experts are read from while a model runs: the files, opened for direct reads, and
the buffers that the reads go to (kernels/cpu/drive.h).

Nothing is written to a drive. A file that is replaced under its name is read on as it was; one that
is cut short or written to ends the step with an error.

Letters: E experts of a layer, S slots."""

import errno
import mmap
import os
import weakref
from collections.abc import Mapping, Sequence
from ctypes import Structure, addressof, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from torch import Tensor

from hotsplit.errors import HotsplitError
from hotsplit.files.gguf_file import TensorEntry, place_in_file
from hotsplit.runtime.device.huge_pages import untouched
from hotsplit.runtime.kernels.cpu import library
from hotsplit.system.sizes import format_bytes

ALIGNMENT = 4096  # READ_ALIGNMENT in drive.h
NUM_BUFFERS = 16
NUM_THREADS = 4  # reads at a time: more gain nothing on the drives measured so far
# An expert is packed into a slot if that saves its read often enough: a read takes twice as long.
MARGIN = 0.01
_CHANGED = -1  # READ_CHANGED in step.h


def _members(kind: Any, names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


class DriveStruct(Structure):
    _fields_ = [
        *_members(c_void_p, "file size modified_ns buffer"),
        *_members(c_int64, "num_files buffer_bytes num_buffers num_threads"),
        *_members(c_void_p, "learn policy reader"),
        *_members(c_int64, "num_experts delay_us num_used num_hits num_kept"),
        *_members(c_int64, "bytes_read reading_ns waiting_ns"),
        *_members(c_int32, "error failed_file"),
        ("margin", c_float),
        ("unused", c_int32),
    ]


@dataclass(frozen=True, kw_only=True)
class Stack:
    """A matrix of each expert in a file: that of expert e begins at byte offset + e * stride."""

    kind: str
    num_rows: int
    width: int
    row_bytes: int
    offset: int
    stride: int
    file: int

    @property
    def num_bytes(self) -> int:
        """The bytes of one expert's matrix."""
        return self.num_rows * self.row_bytes


@dataclass(frozen=True, kw_only=True)
class Arriving:
    """The slots of a layer's experts. `place_E`: int32, the slot of each, or -1; `expert_S`: int32,
    the expert in each slot, or -1; `worth_E`: f32, of the policy, in whole words of 32. Steps
    change all three."""

    layer: int
    drive: "Drive"
    stacks: Sequence[Stack]  # gate, up (if there is one) and down
    place_E: Tensor
    expert_S: Tensor
    worth_E: Tensor


class Drive:
    """The open files of a model, and the threads that read them once `start` has been called."""

    def __init__(
        self,
        path: Path,
        entries: Mapping[int, Sequence[TensorEntry]],
        num_experts: int,
        most_rows: int,
    ) -> None:
        """`entries`: by layer, those of its experts' matrices, of at most `num_experts` each.
        `most_rows`: of a step, whose rows share what is read.
        Raises HotsplitError if a file cannot be read."""
        each = chain.from_iterable(entries.values())
        self.paths = list(dict.fromkeys(entry.part or path for entry in each))
        self._path = path
        self.is_direct, self.num_experts, self.most_rows = True, num_experts, most_rows
        descriptors = [self._open(each) for each in self.paths]
        about = [os.fstat(descriptor) for descriptor in descriptors]
        room = _buffer_bytes(entries)
        memory = untouched(room * NUM_BUFFERS)[1]
        count = len(descriptors)
        kept: tuple[Any, ...] = (
            (c_int32 * count)(*descriptors),
            (c_int64 * count)(*(each.st_size for each in about)),
            (c_int64 * count)(*(each.st_mtime_ns for each in about)),
            memory,
        )
        self.struct = DriveStruct(
            file=addressof(kept[0]),
            size=addressof(kept[1]),
            modified_ns=addressof(kept[2]),
            buffer=memory.data_ptr(),
            num_files=count,
            buffer_bytes=room,
            num_buffers=NUM_BUFFERS,
            num_threads=NUM_THREADS,
            num_experts=num_experts,
            margin=MARGIN,
        )
        self.descriptors = kept[0]
        self._kept: list[object] = [kept]
        self.close = weakref.finalize(self, _close, self.struct, descriptors, kept)

    def _open(self, path: Path) -> int:
        """A descriptor for direct reads; for reads through the page cache, as tmpfs has them
        alone, if the system refuses those."""
        try:
            descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECT", 0))
            with mmap.mmap(-1, ALIGNMENT) as page:
                os.preadv(descriptor, [page], 0)
            return descriptor
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise HotsplitError(f"{path}: cannot be read ({error.strerror})") from error
        self.is_direct = False
        return os.open(path, os.O_RDONLY)

    def stack(self, entry: TensorEntry) -> Stack:
        """Where the matrices of the experts of a tensor are."""
        place = place_in_file(entry)
        assert place is not None, entry
        offset, stride = place
        return Stack(
            kind=entry.kind,
            num_rows=entry.shape[1],
            width=entry.shape[2],
            row_bytes=entry.row_bytes,
            offset=offset,
            stride=stride,
            file=self.paths.index(entry.part or self._path),
        )

    def start(self, learn: int, policy: int, kept: object) -> None:
        """Starts the threads. `learn`, `policy`: addresses of what says which experts are worth a
        slot (HsDrive in step.h), which `kept` keeps alive."""
        self._kept.append(kept)
        self.struct.learn, self.struct.policy = learn, policy
        library.open_drive(self.struct)

    def check(self) -> None:
        """Raises HotsplitError if a read of the last step has failed; the next step tries again."""
        error = self.struct.error
        if not error:
            return
        path, self.struct.error = self.paths[self.struct.failed_file], 0
        if error == _CHANGED:
            raise HotsplitError(f"{path}: was changed while it was read; run the command again")
        raise HotsplitError(f"{path}: cannot be read ({os.strerror(error)}); check the drive")

    @property
    def facts(self) -> dict[str, float]:
        """Totals of all steps, for programs."""
        own = self.struct
        return {
            "num_used": own.num_used,
            "num_hits": own.num_hits,
            "num_kept": own.num_kept,
            "num_bytes": own.bytes_read,
            "reading_s": 1e-9 * own.reading_ns,
            "waiting_s": 1e-9 * own.waiting_ns,
        }

    @property
    def line(self) -> str:
        """The same for people."""
        own = self.struct
        if not own.num_used:
            return "drive: nothing was read"
        rate = own.bytes_read / max(1, own.reading_ns)
        return (
            f"drive: {format_bytes(own.bytes_read)} of experts read at {rate:.2f} GB/s,"
            f" {own.num_hits / own.num_used:.1%} of uses found in memory,"
            f" {1e-9 * own.waiting_ns:.2f} s waited"
        )


def why_not(entry: TensorEntry) -> str:
    """Why experts of this tensor cannot be read one by one; "" if they can."""
    if entry.packed_from is not None:
        return f"experts in {entry.in_file.kind} are packed in memory"
    return "" if place_in_file(entry) else "experts are not contiguous in the file"


def transit_bytes(entries: Mapping[int, Sequence[TensorEntry]]) -> int:
    """Bytes of the buffers of these experts' reads."""
    return NUM_BUFFERS * _buffer_bytes(entries)


def _buffer_bytes(entries: Mapping[int, Sequence[TensorEntry]]) -> int:
    return max(sum(map(_room, own)) for own in entries.values())


def _room(entry: TensorEntry) -> int:
    """read_room() in drive.h."""
    return (entry.shape[1] * entry.row_bytes // ALIGNMENT + 2) * ALIGNMENT


def _close(struct: DriveStruct, descriptors: Sequence[int], kept: object) -> None:
    library.close_drive(struct)
    del kept  # once the reads under way have ended
    for descriptor in descriptors:
        os.close(descriptor)
