"""The memory of this machine that a model may take."""

from dataclasses import dataclass

import torch

from hotsplit.system.sizes import format_bytes
from hotsplit.system.system_memory import memory_limit_bytes

# Shares of memory given to a model: of all that the process may use, and of what is free on a GPU.
# The rest is for the process and the page cache.
MAIN_SHARE, GPU_SHARE = 0.85, 0.9
STEP_BYTES = 256 << 20  # default budgets are multiples of it, so that most runs get the same


@dataclass(frozen=True, kw_only=True)
class Room:
    """Bytes of memory available to a model; `lines` say which budgets of the user's were lowered."""

    main: int
    gpus: tuple[int, ...] = ()
    lines: tuple[str, ...] = ()


def room_here(vram: tuple[int, ...] | None, device: str | None) -> Room:
    """This machine's memory for a model. `vram` is a budget of each GPU, given by the user; one above
    what is free is lowered to the default."""
    main = int(MAIN_SHARE * memory_limit_bytes())
    if not torch.cuda.is_available() or (device or "cuda").startswith("cpu"):
        return Room(main=main)
    first = torch.device(device or "cuda").index or 0
    if vram is None:
        return Room(main=main, gpus=(_default(_free(first)),))
    if not any(vram):
        return Room(main=main)
    gpus, lines = list(vram), []
    for number in range(min(len(vram), torch.cuda.device_count() - first)):
        free = _free(first + number)
        if vram[number] > free:
            gpus[number] = _default(free)
            lines.append(
                f"--vram {format_bytes(vram[number])}: only {format_bytes(free)} are free on the GPU"
                f"{f' {number}' if len(vram) > 1 else ''}, so {format_bytes(gpus[number])} are used"
            )
    return Room(main=main, gpus=tuple(gpus), lines=tuple(lines))


def _free(number: int) -> int:
    return torch.cuda.mem_get_info(torch.device("cuda", number))[0]


def _default(free: int) -> int:
    return int(GPU_SHARE * free) // STEP_BYTES * STEP_BYTES
