"""Shares work among the processes that torchrun starts; with a single process nothing is sent.

Tensors on the CPU go through gloo, those on a GPU through NCCL. Nothing is pickled."""

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from hotsplit.errors import HotsplitError

Result = TypeVar("Result")
# Timeout of a collective call: the others wait while the first process reads the corpus.
PATIENCE = timedelta(days=1)
VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def rank_here() -> int:
    """This process's rank; 0 for the first or only one."""
    return _number("RANK", 0) if size_here() > 1 else 0


def size_here() -> int:
    return _number("WORLD_SIZE", 1)


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    if not (text.isascii() and text.isdecimal()):
        raise HotsplitError(f"environment variable {name} is {text!r}, wanted a number")
    return int(text)


class Ranks:
    """Joins and leaves the process group that torchrun's environment variables describe."""

    def __init__(self) -> None:
        self.rank, self.size = rank_here(), size_here()
        self._is_own = False

    def device(self, asked: str | None) -> str | None:
        """The device for this process: each of several processes gets a GPU of its own if torch
        sees any and `asked` is "cuda" or None; otherwise it is `asked`. Raises HotsplitError if
        torch sees GPUs, but none that is left for this process."""
        local, count = _number("LOCAL_RANK", 0), torch.cuda.device_count()
        if self.size == 1 or asked not in (None, "cuda") or not count:
            return asked
        if local >= count:
            raise HotsplitError(
                f"process {local} of this machine has no GPU of its own: torch sees {count};"
                f" give --nproc-per-node {count} or --device cpu"
            )
        torch.cuda.set_device(local)
        return f"cuda:{local}"

    def __enter__(self) -> Self:
        if self.size > 1 and not dist.is_initialized():
            missing = [name for name in VARIABLES if name not in os.environ]
            if missing:
                raise HotsplitError(
                    f"WORLD_SIZE is {self.size}, but {missing[0]} is not set; start with torchrun,"
                    " or unset WORLD_SIZE"
                )
            backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
            dist.init_process_group(backend, timeout=PATIENCE)
            self._is_own = True
        return self

    def __exit__(self, *error: object) -> None:
        if self._is_own:
            dist.destroy_process_group()

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def together(self, work: Callable[[], Result]) -> Result:
        """Runs `work` in every process; if it raises HotsplitError in any of them, all end. The
        failed process of the lowest rank raises its error, all others exit silently."""
        result: list[Result] = []
        failure: HotsplitError | None = None
        try:
            result.append(work())
        except HotsplitError as error:
            failure = error
        first = self.size - self.largest(self.size - self.rank if failure else 0)
        if failure is not None and first == self.rank:
            raise failure
        if first < self.size:
            raise SystemExit(1)
        return result[0]

    def first_only(self, work: Callable[[], Result]) -> Result | None:
        """Runs `work` in the first process; see `together`."""
        return self.together(lambda: work() if self.is_first else None)

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all processes, in every one of them; the argument keeps its values."""
        total = tensor.clone()
        if self.size > 1:
            dist.all_reduce(total)
        return total

    def largest(self, number: int) -> int:
        if self.size == 1:
            return number
        tensor = torch.tensor(number)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return int(tensor)

    def spread(self, tensor: Tensor) -> None:
        """Gives every process the first one's values, in place."""
        if self.size > 1:
            dist.broadcast(tensor, 0)

    def spread_bytes(self, data: bytes | None) -> bytes:
        """The first process's `data`, in every process; the others pass None."""
        if self.size == 1:
            assert data is not None
            return data
        length = torch.tensor(len(data or b""))
        dist.broadcast(length, 0)
        tensor = torch.zeros(int(length), dtype=torch.uint8)
        if data:
            tensor[:] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        if length:
            dist.broadcast(tensor, 0)
        return tensor.numpy().tobytes()
