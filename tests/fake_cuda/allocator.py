"""torch's caching allocator on the fake runtime: the rules of c10/cuda/CUDACachingAllocator.cpp
that hotsplit relies on. Segments have 2 MiB for tensors up to 1 MiB, 20 MiB for those below 10 MiB,
and the tensor's own size, rounded up to 2 MiB, for larger ones. A tensor takes the smallest free
block of its pool and stream that holds it; what is left of the block becomes a block of its own,
unless it is at most 1 MiB of a large one. Reserved memory has a limit; each captured graph has
its own pool."""

from dataclasses import dataclass, field
from threading import RLock

import torch
from fake_cuda import library
from fake_cuda.library import CudaError

SMALL, SMALL_SEGMENT = 1 << 20, 2 << 20
LEAST_OWN, LARGE_SEGMENT = 10 << 20, 20 << 20
ROUNDING = 512


@dataclass(eq=False)
class Segment:
    """Memory from cudaMalloc; `blocks` are (start, bytes, whether it is taken), without gaps."""

    start: int
    num_bytes: int
    stream: int
    pool: int  # 0: the common one; else a graph's
    is_small: bool
    blocks: list[tuple[int, int, bool]]

    @property
    def is_free(self) -> bool:
        return not any(is_taken for _, _, is_taken in self.blocks)

    def smallest(self, num_bytes: int) -> tuple[int, int] | None:
        """(bytes, start) of the smallest free block of at least so many bytes; None if there is
        none."""
        fitting = [(b[1], b[0]) for b in self.blocks if not b[2] and b[1] >= num_bytes]
        return min(fitting, default=None)

    def take(self, start: int, num_bytes: int) -> int:
        """Takes the beginning of the free block at `start`; returns the bytes taken."""
        at, size = next((i, b[1]) for i, b in enumerate(self.blocks) if b[0] == start)
        left = size - num_bytes
        if left < ROUNDING if self.is_small else left <= SMALL:
            num_bytes, left = size, 0
        rest = [(start + num_bytes, left, False)] if left else []
        self.blocks[at : at + 1] = [(start, num_bytes, True), *rest]
        return num_bytes

    def give_back(self, start: int) -> int:
        """Frees a block and joins it with free neighbours; returns its size."""
        size = next(size for at, size, _ in self.blocks if at == start)
        joined: list[tuple[int, int, bool]] = []
        for at, count, is_taken in self.blocks:
            is_taken = is_taken and at != start
            if joined and not is_taken and not joined[-1][2]:
                joined[-1] = (joined[-1][0], joined[-1][1] + count, False)
            else:
                joined.append((at, count, is_taken))
        self.blocks = joined
        return size


@dataclass(eq=False)
class Allocator:
    """The allocator of one device, which must be the current one in all calls; they may come from
    several threads."""

    device: int
    total_bytes: int
    segments: list[Segment] = field(default_factory=list)
    fraction: float = 1.0
    allocated: int = 0
    peak_allocated: int = 0
    peak_reserved: int = 0
    _lock: RLock = field(default_factory=RLock)

    @property
    def reserved(self) -> int:
        return sum(segment.num_bytes for segment in self.segments)

    def allocate(self, num_bytes: int, stream: int, pool: int = 0) -> int:
        with self._lock:
            return self._taken(num_bytes, stream, pool)

    def _taken(self, num_bytes: int, stream: int, pool: int) -> int:
        size = -(-max(1, num_bytes) // ROUNDING) * ROUNDING
        is_small = size <= SMALL
        segment = self._cached(size, stream, pool, is_small)
        if segment is None:
            segment = self._segment(size, stream, pool, is_small)
            self.segments.append(segment)
        found = segment.smallest(size)
        assert found is not None
        start = found[1]
        size = segment.take(start, size)
        library.load().fakeBlock(start, size, 2 if segment.pool else 1)
        self.allocated += size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return start

    def free(self, start: int) -> None:
        """Frees in stream order: the memory may be reused at once."""
        with self._lock:
            segment = next(s for s in self.segments if s.start <= start < s.start + s.num_bytes)
            size = segment.give_back(start)
            library.load().fakeBlock(start, size, 0)
            self.allocated -= size

    def empty_cache(self) -> None:
        """Returns the free segments of the common pool to the driver."""
        with self._lock:
            for segment in [s for s in self.segments if s.is_free and not s.pool]:
                library.call("cudaFree", segment.start)
                self.segments.remove(segment)

    def _cached(self, size: int, stream: int, pool: int, is_small: bool) -> Segment | None:
        """The segment with the smallest free block that holds `size` bytes."""
        fitting = [
            (found, segment)
            for segment in self.segments
            if (segment.stream, segment.pool, segment.is_small) == (stream, pool, is_small)
            and (found := segment.smallest(size)) is not None
        ]
        return min(fitting, key=lambda pair: pair[0])[1] if fitting else None

    def _segment(self, size: int, stream: int, pool: int, is_small: bool) -> Segment:
        num_bytes = SMALL_SEGMENT if is_small else LARGE_SEGMENT
        if size >= LEAST_OWN:
            num_bytes = -(-size // SMALL_SEGMENT) * SMALL_SEGMENT
        start = self._reserved(num_bytes) or self._after_emptying(num_bytes)
        self.peak_reserved = max(self.peak_reserved, self.reserved + num_bytes)
        return Segment(start, num_bytes, stream, pool, is_small, [(start, num_bytes, False)])

    def _reserved(self, num_bytes: int) -> int | None:
        if self.reserved + num_bytes > int(self.fraction * self.total_bytes):
            return None
        try:
            return library.made("cudaMalloc", num_bytes)
        except CudaError as error:
            if error.status != library.OUT_OF_MEMORY:
                raise
            return None

    def _after_emptying(self, num_bytes: int) -> int:
        self.empty_cache()
        found = self._reserved(num_bytes)
        if found is None:
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {num_bytes / (1 << 20):.2f} MiB."
            )
        return found
