"""The two pools of torch's caching allocator, as bytes that are needed and segments that hold them.

A tensor up to SMALL_TENSOR_BYTES is taken from a segment of SEGMENT_BYTES, a larger one from a
segment of 20 MiB, or from LEAST_OWN_BYTES on of its own size; neither pool can use the other's
segments, and a stream cannot use another's (c10/cuda/CUDACachingAllocator.cpp)."""

from dataclasses import dataclass

SMALL_TENSOR_BYTES = 1 << 20
SEGMENT_BYTES = 2 << 20  # of small tensors; larger segments are rounded up to a multiple of it
LEAST_OWN_BYTES = 10 << 20
# The bytes of a small segment that are in use when no tensor fits into the rest at worst: two tensors of
# a little more than a third.
_SMALL_USE_BYTES = SEGMENT_BYTES * 2 // 3
GAPS = 0.1  # the share of the large pool that may be lost to gaps between tensors
_ROUNDED_TO = 512  # bytes of a tensor


@dataclass(frozen=True)
class PoolBytes:
    """Upper bounds on the bytes alive at once in the pools of small and of large tensors."""

    small: int = 0
    large: int = 0

    @classmethod
    def of(cls, num_bytes: int) -> "PoolBytes":
        """One tensor of at most so many bytes: a large one may be small in a shorter pass."""
        rounded = -(-num_bytes // _ROUNDED_TO) * _ROUNDED_TO
        is_large = rounded > SMALL_TENSOR_BYTES
        return cls(min(rounded, SMALL_TENSOR_BYTES), rounded if is_large else 0)

    @classmethod
    def exactly(cls, num_bytes: int) -> "PoolBytes":
        """One tensor of so many bytes."""
        is_large = num_bytes > SMALL_TENSOR_BYTES
        return cls(0 if is_large else num_bytes, num_bytes if is_large else 0)

    def __add__(self, other: "PoolBytes") -> "PoolBytes":
        return PoolBytes(self.small + other.small, self.large + other.large)

    def __or__(self, other: "PoolBytes") -> "PoolBytes":
        """What holds either of the two."""
        return PoolBytes(max(self.small, other.small), max(self.large, other.large))

    def __mul__(self, count: int) -> "PoolBytes":
        return PoolBytes(self.small * count, self.large * count)

    @property
    def total(self) -> int:
        return self.small + self.large

    @property
    def tensors_of_segments(self) -> list[int]:
        """Bytes of tensors that take exactly these segments, if they are allocated together."""
        wanted = self.segments
        small = [SMALL_TENSOR_BYTES] * (wanted.small // SMALL_TENSOR_BYTES)
        return small + [wanted.large] * (wanted.large > 0)

    @property
    def segments(self) -> "PoolBytes":
        """Bytes of the segments that hold them."""
        small = -(-self.small // _SMALL_USE_BYTES) * SEGMENT_BYTES
        large = -(-int(self.large / (1 - GAPS)) // SEGMENT_BYTES) * SEGMENT_BYTES
        return PoolBytes(small, max(LEAST_OWN_BYTES, large) if large else 0)
