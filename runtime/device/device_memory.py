"""The memory of one GPU: a slab for what is permanent, an arena for passes over prompts, and a
limit on torch's allocator.

With a plan, a GPU holds at most its budget (or LEAST_BUDGET_BYTES, if that is more). Everything
that lives as long as the engine (weights, cache, the buffers of a decode step) is allocated from
one slab, and the buffers of passes from one arena, whose size follows from the form of the model
and its plan; a pass allocates nothing. torch refuses to reserve more than the fraction set by
`limit`. Before it asks the driver, it checks the sum of its reservations, including its own
rounding. This holds for its native allocator without expandable segments; `limit` refuses any
other.

torch takes a tensor up to 1 MiB from a segment of SEGMENT_BYTES, and from LEAST_OWN_BYTES on from
one of its own size, rounded up (c10/cuda/CUDACachingAllocator.cpp). Beside slab and arena, a
process holds BESIDE_BYTES: small tensors, and the numbers that torch's generator holds on the
stream of a captured graph (before torch 2.13).

Outside the budget, and reported separately: the CUDA context, kernel code, and memory that
libraries allocate from the driver directly."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from weakref import WeakSet

import torch
from torch import Tensor

from hotsplit.errors import HotsplitError
from hotsplit.system.sizes import format_bytes

ALIGNMENT = 256
SEGMENT_BYTES = 2 << 20
LEAST_OWN_BYTES = 10 << 20
# Segments for small tensors that last, and for those of another stream.
SMALL_BYTES = 2 * SEGMENT_BYTES
BESIDE_BYTES = SMALL_BYTES + SEGMENT_BYTES  # and the slab's rounding
# A smaller budget cannot be enforced on an allocator with segments of 2 and 20 MiB.
LEAST_BUDGET_BYTES = 128 << 20
_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")

_OUT_OF_MEMORY = ("out of memory",)

_living: "WeakSet[DeviceMemory]" = WeakSet()


@dataclass(frozen=True, kw_only=True)
class MemoryReport:
    """Bytes on one device. `outside`: the card's memory in use outside torch's allocator, by this
    process's context and kernels and by other programs."""

    device: str
    budget: int | None
    slab: int
    reserved: int
    peak_reserved: int
    peak_allocated: int
    outside: int


@dataclass(eq=False)
class DeviceMemory:
    """One GPU's memory, created by `of`. `taken` counts bytes by item, without alignment gaps."""

    device: torch.device
    slab: Tensor  # uint8
    budget_bytes: int | None
    taken: dict[str, int] = field(default_factory=dict)
    used_bytes: int = 0  # of the slab, gaps included
    held_bytes: int = 0  # by the process before this engine, if it has no other
    step_start: int | None = None  # where the buffers of a decode step begin
    arena: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))  # of passes

    @classmethod
    def of(
        cls, device: torch.device, num_bytes: int, budget_bytes: int | None = None
    ) -> "DeviceMemory":
        """Allocates a slab of `num_bytes`; a budget limits the process from now on.

        Raises HotsplitError if the device has no room for it, and like `limit`."""
        made = cls(device, torch.empty(0, dtype=torch.uint8), budget_bytes)
        others = [memory for memory in _living if memory.device == device]
        _living.add(made)
        try:
            with out_of_memory_as_error(device, num_bytes):
                if device.type == "cuda":
                    _limit_all(device)
                    made.held_bytes = 0 if others else torch.cuda.memory_reserved(device)
                made.slab = segment(device, num_bytes)
        except HotsplitError:
            made.close()
            raise
        return made

    def take(self, shape: tuple[int, ...], dtype: torch.dtype, item: str) -> Tensor:
        """An exclusive part of the slab, aligned to ALIGNMENT and uninitialised."""
        num_bytes = prod(shape) * dtype.itemsize
        start = -(-self.used_bytes // ALIGNMENT) * ALIGNMENT
        if start + num_bytes > len(self.slab):
            raise HotsplitError(
                f"{self.device}: {item} needs {num_bytes:,} more bytes, but {self.used_bytes:,} of"
                f" the {len(self.slab):,} set aside are used: the plan does not match the file; run"
                " hotsplit solve again"
            )
        self.used_bytes = start + num_bytes
        self.taken[item] = self.taken.get(item, 0) + num_bytes
        return self.slab[start : start + num_bytes].view(dtype).view(shape)

    @property
    def room_bytes(self) -> int:
        """Bytes available beside what is allocated and SMALL_BYTES; without a budget, the
        GPU's free memory, or 1 TiB on the CPU."""
        if self.device.type != "cuda":
            return (self.budget_bytes or 0) - len(self.slab) if self.budget_bytes else 1 << 40
        allowed = allowed_bytes(self.device)
        if allowed is None:
            return torch.cuda.mem_get_info(self.device)[0]
        return max(0, allowed - torch.cuda.memory_allocated(self.device) - SMALL_BYTES)

    def take_for_step(self) -> Callable[[tuple[int, ...], torch.dtype], Tensor]:
        """Returns an allocator of zeroed buffers for a decode step, which invalidates the previous
        step's buffers."""
        self.step_start = self.used_bytes if self.step_start is None else self.step_start
        self.used_bytes = self.step_start
        self.taken.pop("step", None)
        return lambda shape, dtype: self.take(shape, dtype, "step").zero_()

    def take_arena(self, num_bytes: int) -> None:
        """Allocates the memory of passes. Raises HotsplitError if the device has no room for it."""
        with out_of_memory_as_error(self.device, num_bytes):
            self.arena = segment(self.device, num_bytes)

    def take_for_pass(self) -> Callable[[tuple[int, ...], torch.dtype], Tensor]:
        """Returns an allocator of the arena, from its beginning."""
        used = 0

        def take(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            nonlocal used
            start, used = used, used + -(-prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
            assert used <= len(self.arena), (used, len(self.arena))
            part = self.arena[start : start + prod(shape) * dtype.itemsize]
            return part.view(dtype).view(shape).zero_()

        return take

    def report(self) -> MemoryReport:
        reserved = most_reserved = most_allocated = len(self.slab)
        outside = 0
        if self.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.device)
            reserved = torch.cuda.memory_reserved(self.device)
            most_reserved = torch.cuda.max_memory_reserved(self.device)
            most_allocated = torch.cuda.max_memory_allocated(self.device)
            outside = total - free - reserved
        return MemoryReport(
            device=str(self.device),
            budget=self.budget_bytes,
            slab=len(self.slab),
            reserved=reserved,
            peak_reserved=most_reserved,
            peak_allocated=most_allocated,
            outside=outside,
        )

    def close(self) -> None:
        """Frees the slab and sets the process's limit to the budgets of the remaining engines."""
        _living.discard(self)
        self.slab = self.arena = torch.empty(0, dtype=torch.uint8)
        if self.device.type == "cuda":
            _limit_all(self.device)


def allowed_bytes(device: torch.device) -> int | None:
    """Bytes that this process may reserve: the sum of all engines' budgets on the device; None (no
    limit) if an engine has no budget, or there is none."""
    budgets = [memory.budget_bytes for memory in _living if memory.device == device]
    if not budgets or None in budgets:
        return None
    return sum(kept_budget(budget) for budget in budgets if budget is not None)


def kept_budget(budget_bytes: int) -> int:
    """The budget that can be enforced: see LEAST_BUDGET_BYTES."""
    return max(budget_bytes, LEAST_BUDGET_BYTES)


def _limit_all(device: torch.device) -> None:
    """Sets the limit to `allowed_bytes`, or removes it."""
    allowed = allowed_bytes(device)
    if allowed is None:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
    else:
        limit(device, allowed)


def limit(device: torch.device, budget_bytes: int) -> None:
    """Lets torch's allocator reserve at most `budget_bytes` on a CUDA device from now on.

    Raises HotsplitError for an allocator that would not enforce it to the byte."""
    settings = next((os.environ[name] for name in _ALLOCATOR_VARIABLES if name in os.environ), "")
    backend = torch.cuda.get_allocator_backend()
    if backend != "native" or "expandable_segments:True" in settings.replace(" ", ""):
        raise HotsplitError(
            f"{device}: torch's allocator is {backend} with {settings!r}, which does not keep a"
            f" budget to the byte; unset {' and '.join(_ALLOCATOR_VARIABLES)}"
        )
    torch.cuda.empty_cache()
    # Which of the two totals torch multiplies by the fraction depends on its version.
    properties = torch.cuda.get_device_properties(device)
    total = max(torch.cuda.mem_get_info(device)[1], properties.total_memory)
    torch.cuda.set_per_process_memory_fraction(min(1.0, budget_bytes / total), device)


def arena_bytes(num_bytes: int) -> int:
    """What torch reserves for a tensor of so many bytes."""
    return max(LEAST_OWN_BYTES, -(-num_bytes // SEGMENT_BYTES) * SEGMENT_BYTES)


def segment(device: torch.device, num_bytes: int) -> Tensor:
    """Aligned memory of so many bytes, in a segment of torch's that holds nothing else."""
    slack = 0 if device.type == "cuda" else ALIGNMENT  # CUDA's addresses are already aligned
    size = arena_bytes(num_bytes) + slack
    memory = torch.empty(size, dtype=torch.uint8, device=device)
    return memory[-memory.data_ptr() % ALIGNMENT :][:num_bytes]


def is_out_of_memory(error: RuntimeError) -> bool:
    """True for errors of torch and the driver that say that memory is short."""
    is_torchs = isinstance(error, torch.OutOfMemoryError)
    return is_torchs or any(words in str(error) for words in _OUT_OF_MEMORY)


@contextmanager
def out_of_memory_as_error(
    device: torch.device | None = None, num_bytes: int | None = None
) -> Iterator[None]:
    """Turns out-of-memory errors of torch and the driver (kernel code, graphs) into a
    one-line HotsplitError. Without `device`, it names the GPU with the least free memory among
    those of engines."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        wanted = "more memory" if num_bytes is None else format_bytes(num_bytes)
        device = device or _fullest()
        raise HotsplitError(f"{device}: {wanted} wanted, {_state(device)}") from error


def _fullest() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    devices = {memory.device for memory in _living if memory.device.type == "cuda"}
    found = devices or {torch.device("cuda", torch.cuda.current_device())}
    return min(found, key=lambda device: torch.cuda.mem_get_info(device)[0])


def _state(device: torch.device) -> str:
    if device.type != "cuda":
        return "which is not free; end other programs or choose a smaller model"
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    allowed = allowed_bytes(device)
    held = "" if allowed is None else f" of a budget of {format_bytes(allowed)}"
    before = max((m.held_bytes for m in _living if m.device == device), default=0)
    if before:
        held += f" ({format_bytes(before)} are held by this process's earlier work)"
    return (
        f"{format_bytes(free)} of {format_bytes(total)} free; this process holds"
        f" {format_bytes(reserved)}{held}, and {format_bytes(max(0, total - free - reserved))} are"
        " its context's or other programs' (nvidia-smi lists them); end those, or run hotsplit"
        " solve with a smaller --vram-budget or --context"
    )
