"""The memory of this machine that a model may take."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from hotsplit.artifacts.machine_file import Machine
from hotsplit.errors import HotsplitError
from hotsplit.system.sizes import format_bytes
from hotsplit.system.system_memory import memory_limit_bytes

# Shares of memory given to a model: of all that the process may use, and of what is free on a GPU.
# The rest is for the process and the page cache.
MAIN_SHARE, GPU_SHARE = 0.85, 0.9
STEP_BYTES = 256 << 20  # default budgets are multiples of it, so that most runs get the same


@dataclass(frozen=True, kw_only=True)
class Room:
    """Bytes of memory available to a model; `lines` say which budgets were lowered. `is_here`: of
    this machine."""

    main: int
    gpus: tuple[int, ...] = ()
    lines: tuple[str, ...] = ()
    is_here: bool = True


def room_here(vram: tuple[int, ...] | None, device: str | None) -> Room:
    """This machine's memory for a model. `vram` is a budget of each GPU, given by the user; one
    above what is free is lowered to the default."""
    main = int(MAIN_SHARE * memory_limit_bytes())
    if not torch.cuda.is_available() or (device or "cuda").startswith("cpu"):
        return Room(main=main)
    first = torch.device(device or "cuda").index or 0
    count = 1 if vram is None else min(len(vram), torch.cuda.device_count() - first)
    free = [torch.cuda.mem_get_info(torch.device("cuda", first + n))[0] for n in range(count)]
    return _room(main, vram, free)


def room_of(machine: Machine, vram: tuple[int, ...] | None, device: str | None) -> Room:
    """The same on a machine that was measured or is described elsewhere."""
    main = int(MAIN_SHARE * machine.memory_bytes)
    if (device or "cuda").startswith("cpu") or not machine.gpus:
        return Room(main=main, is_here=False)
    found = _room(main, vram, [gpu.free_bytes for gpu in machine.gpus])
    return replace(found, is_here=False)


def _room(main: int, vram: tuple[int, ...] | None, free: Sequence[int]) -> Room:
    if vram is None:
        return Room(main=main, gpus=(_most_of(free[0]),))
    if not any(vram):
        return Room(main=main)
    if not all(vram):
        sizes = ", ".join(map(format_bytes, vram))
        raise HotsplitError(
            f"--vram: {sizes}; 0 is for the CPU alone and stands alone; give one size a GPU"
        )
    gpus, lines = list(vram), []
    for number, (budget, available) in enumerate(zip(vram, free, strict=False)):
        if budget > available:
            gpus[number] = _most_of(available)
            lines.append(
                f"--vram {format_bytes(budget)}: only {format_bytes(available)} are free on the GPU"
                f"{f' {number}' if len(vram) > 1 else ''}, so {format_bytes(gpus[number])} are used"
            )
    return Room(main=main, gpus=tuple(gpus), lines=tuple(lines))


def _most_of(free: int) -> int:
    return int(GPU_SHARE * free) // STEP_BYTES * STEP_BYTES
