"""The memory of this machine that a model may take."""

from dataclasses import dataclass

import torch

from hotsplit.system.system_memory import memory_limit_bytes

# Shares of memory given to a model: of all that the process may use, and of what is free on a GPU.
# The rest is for the process and the page cache.
MAIN_SHARE, GPU_SHARE = 0.85, 0.9
STEP_BYTES = 256 << 20  # default budgets are multiples of it, so that most runs get the same


@dataclass(frozen=True, kw_only=True)
class Room:
    """Bytes of memory available to a model."""

    main: int
    gpus: tuple[int, ...] = ()


def room_here(vram: tuple[int, ...] | None, device: str | None) -> Room:
    """This machine's memory for a model; `vram`, a budget of each GPU given by the user, is
    taken as it is."""
    main = int(MAIN_SHARE * memory_limit_bytes())
    if not torch.cuda.is_available() or (device or "cuda").startswith("cpu"):
        return Room(main=main)
    if vram is not None:
        return Room(main=main, gpus=vram if any(vram) else ())
    free = GPU_SHARE * torch.cuda.mem_get_info(torch.device(device or "cuda"))[0]
    return Room(main=main, gpus=(int(free) // STEP_BYTES * STEP_BYTES,))
