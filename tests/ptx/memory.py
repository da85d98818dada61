"""Global memory: ranges of this process's memory with the state of every byte.

A byte's state says whether it may be accessed, has a value, and may be written by a kernel; and
whether the current launch has read or written it."""

import ctypes
from bisect import bisect_right
from dataclasses import dataclass

import numpy as np

from ptx.faults import Misaligned, OutOfBounds, Uninitialised

VALID, WRITTEN, WRITABLE, READ, STORED = 1, 2, 4, 8, 16
_LOADABLE, _STORABLE = VALID | WRITTEN, VALID | WRITABLE
ALIGN = 16  # bytes of the widest access


@dataclass(kw_only=True, eq=False)
class Buffer:
    """One range, widened to multiples of 16 bytes; the widening is not VALID."""

    name: str
    start: int
    end: int
    base: int  # start, rounded down
    bytes: np.ndarray  # u8, this process's memory from `base` on
    state: np.ndarray  # u8, one for each byte
    is_touched: bool = False

    @classmethod
    def of(cls, address: int, num_bytes: int, name: str) -> "Buffer":
        base, end = address // ALIGN * ALIGN, -(-(address + num_bytes) // ALIGN) * ALIGN
        raw = (ctypes.c_uint8 * (end - base)).from_address(base)
        return cls(
            name=name,
            start=address,
            end=address + num_bytes,
            base=base,
            bytes=np.frombuffer(raw, np.uint8),
            state=np.zeros(end - base, np.uint8),
        )

    @property
    def is_read_only(self) -> bool:
        return not (self.state & WRITABLE).any()

    def ranges(self, flag: int) -> list[tuple[int, int]]:
        """The ranges (address, number of bytes) whose bytes have a flag."""
        has = np.concatenate([[False], (self.state & flag) != 0, [False]])
        edges = np.flatnonzero(has[1:] != has[:-1]) + self.base
        return [(int(a), int(b - a)) for a, b in zip(edges[::2], edges[1::2], strict=True)]


class Memory:
    def __init__(self) -> None:
        self._buffers: list[Buffer] = []  # sorted by `start`
        self._starts: list[int] = []

    def add(
        self,
        address: int,
        num_bytes: int,
        *,
        name: str = "buffer",
        is_written: bool = True,
        is_writable: bool = True,
    ) -> None:
        """Registers a range that overlaps no other."""
        buffer = self._new(address, num_bytes, name)
        flags = VALID | WRITTEN * is_written | WRITABLE * is_writable
        buffer.state[address - buffer.base : address - buffer.base + num_bytes] = flags

    def _new(self, address: int, num_bytes: int, name: str) -> Buffer:
        assert num_bytes > 0, (name, num_bytes)
        at = bisect_right(self._starts, address)
        for other in self._buffers[max(0, at - 1) : at + 1]:
            assert other.end <= address or address + num_bytes <= other.start, (name, other.name)
        buffer = Buffer.of(address, num_bytes, name)
        self._buffers.insert(at, buffer)
        self._starts.insert(at, address)
        return buffer

    def add_tensor(
        self, tensor, *, name: str = "tensor", is_written: bool = True, is_writable: bool = True
    ) -> None:
        """Registers the elements of a torch tensor on the CPU; the rest of its storage stays as it
        is."""
        if tensor.numel() == 0:
            return
        storage = tensor.untyped_storage()
        if self.find(storage.data_ptr()) is None:
            self._new(storage.data_ptr(), storage.nbytes(), name)
        states = self._states(tensor)
        states |= VALID | WRITTEN * is_written | WRITABLE * is_writable

    def _states(self, tensor) -> np.ndarray:
        """The states of a registered tensor's bytes, [..., bytes of an element]."""
        buffer = self.find(tensor.data_ptr())
        assert buffer is not None, tensor.shape
        size = tensor.element_size()
        strides = (*(size * stride for stride in tensor.stride()), 1)
        first = buffer.state[tensor.data_ptr() - buffer.base :]
        return np.lib.stride_tricks.as_strided(first, (*tensor.shape, size), strides)

    def check_written(self, tensor) -> None:
        """Raises if an element of a registered tensor has no value yet."""
        missing = (self._states(tensor) & WRITTEN == 0).any(axis=-1)
        if missing.any():
            first = np.unravel_index(missing.argmax(), missing.shape)
            raise Uninitialised(
                f"{missing.sum()} of {missing.size} elements were never written, first "
                f"{[int(number) for number in first]}"
            )

    def remove(self, address: int) -> None:
        """Unregisters the range that begins at the address."""
        at = self._starts.index(address)
        del self._buffers[at], self._starts[at]

    def find(self, address: int) -> Buffer | None:
        at = bisect_right(self._starts, address) - 1
        if at >= 0 and address < self._buffers[at].end:
            return self._buffers[at]
        return None

    # ---- accesses of kernels ---------------------------------------------------------------

    def split(self, address: np.ndarray, size: int):
        """Yields (buffer, indices of the addresses in it, or None for all) for each buffer of an
        access."""
        low, high = int(address.min()), int(address.max())
        buffer = self.find(low)
        if buffer is not None and high + size <= buffer.end:
            yield buffer, None
            return
        index = np.searchsorted(np.array(self._starts, np.uint64), address, side="right") - 1
        for number in np.unique(index):
            which = np.flatnonzero(index == number)
            if number < 0:
                raise Outside(which[0], "before every buffer")
            buffer = self._buffers[number]
            beyond = np.flatnonzero(address[which] + np.uint64(size) > np.uint64(buffer.end))
            if len(beyond):
                past = int(address[which[beyond[0]]]) - buffer.end
                raise Outside(which[beyond[0]], f"at {past:+} bytes from the end of {buffer.name}")
            yield buffer, which

    def rows(self, buffer: Buffer, address: np.ndarray, size: int, flags: int) -> np.ndarray:
        """The numbers of the accessed rows of `size` bytes in a buffer. Raises unless every byte
        has all of `flags`."""
        offset = (address - np.uint64(buffer.base)).astype(np.int64)
        row = offset // size if size > 1 else offset
        states = buffer.state.reshape(-1, size)[row]
        is_bad = ((states & flags) != flags).any(axis=1)
        if is_bad.any():
            first = int(is_bad.argmax())
            state = states[first][(states[first] & flags) != flags][0]
            place = f"byte {int(address[first]) - buffer.start} of {buffer.name}"
            if not state & VALID:
                raise Outside(first, f"{place}, which belongs to no element")
            if flags & WRITABLE and not state & WRITABLE:
                raise Outside(first, f"{place}, which is read-only")
            raise Unwritten(first, place)
        return row

    def begin_launch(self) -> None:
        for buffer in self._buffers:
            if buffer.is_touched:
                buffer.state &= VALID | WRITTEN | WRITABLE
                buffer.is_touched = False

    def touched(self, flag: int) -> list[tuple[int, int]]:
        return [r for buffer in self._buffers if buffer.is_touched for r in buffer.ranges(flag)]

    @property
    def conflicting(self) -> list[Buffer]:
        """Buffers with a byte that this launch has stored to."""
        return [b for b in self._buffers if b.is_touched and (b.state & STORED).any()]


class Outside(Exception):
    """Its arguments: (index of the lane, place); the machine adds the rest of the message."""

    kind = OutOfBounds


class Unwritten(Outside):
    kind = Uninitialised


class Crooked(Outside):
    kind = Misaligned


def load(memory: Memory, address: np.ndarray, size: int, note) -> np.ndarray:
    """The bytes at the addresses, u8 [lanes, size]. `note`, if there is one, is called with
    (buffer, addresses, indices of the lanes or None for all)."""
    found = np.empty((len(address), size), np.uint8)
    for buffer, mine, which, row in _accessed(memory, address, size, _LOADABLE):
        buffer.state.reshape(-1, size)[row] |= READ
        if note is not None:
            note(buffer, mine, which)
        values = buffer.bytes.reshape(-1, size)[row]
        if which is None:
            return values
        found[which] = values
    return found


def store(memory: Memory, address: np.ndarray, value: np.ndarray, note) -> None:
    """Writes u8 [lanes, size]; if several lanes write to one place, the last one wins."""
    size = value.shape[1]
    for buffer, mine, which, row in _accessed(memory, address, size, _STORABLE):
        buffer.state.reshape(-1, size)[row] |= STORED | WRITTEN
        note(buffer, mine, which)
        buffer.bytes.reshape(-1, size)[row] = value if which is None else value[which]


def _accessed(memory: Memory, address: np.ndarray, size: int, flags: int):
    """Yields (buffer, addresses in it, indices of their lanes or None for all, row numbers)."""
    check_alignment(address, size)
    for buffer, which in memory.split(address, size):
        mine = address if which is None else address[which]
        try:
            row = memory.rows(buffer, mine, size, flags)
        except Outside as error:
            lane, place = error.args
            raise type(error)(lane if which is None else which[lane], place) from None
        buffer.is_touched = True
        yield buffer, mine, which, row


def check_alignment(address: np.ndarray, size: int) -> None:
    if size > 1:
        is_crooked = (address & address.dtype.type(size - 1)) != 0
        if is_crooked.any():
            raise Crooked(int(is_crooked.argmax()), f"not a multiple of {size} bytes")
