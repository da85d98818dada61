"""Stores of the hidden states of many tokens between two layers: memory, or an unnamed file.

The file is read and written, not mapped, so that the system's page cache may hold it without
counting as this process's memory.

Letters: N tokens of all windows, T tokens at a time, D model width."""

import io
import os
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hotsplit.errors import HotsplitError
from hotsplit.system.sizes import format_bytes


class MemoryStates:
    def __init__(self, num_tokens: int, width: int, device: torch.device) -> None:
        self.x_ND = torch.empty(num_tokens, width, device=device)

    def read(self, start: int, stop: int) -> Tensor:
        """f32 [T, D], a copy."""
        return self.x_ND[start:stop].clone()

    def write(self, start: int, x_TD: Tensor) -> None:
        self.x_ND[start : start + len(x_TD)] = x_TD

    def close(self) -> None:
        del self.x_ND


class FileStates:
    """States in an unnamed file of `folder`, gone once it is closed or the process ends."""

    def __init__(self, num_tokens: int, width: int, folder: Path) -> None:
        """Raises HotsplitError if the folder cannot be written or has too little space."""
        self.width = width
        num_bytes = 4 * num_tokens * width
        try:
            self.file: io.FileIO = tempfile.TemporaryFile(dir=folder, buffering=0)  # type: ignore[assignment]  # noqa: SIM115  # until close()
        except OSError as error:
            raise HotsplitError(f"{folder}: cannot be written: {error.strerror}") from error
        try:
            os.posix_fallocate(self.file.fileno(), 0, num_bytes)
        except OSError as error:
            self.file.close()
            raise HotsplitError(
                f"{folder}: no space for {format_bytes(num_bytes)} of hidden states"
                f" ({error.strerror}); write the profile to another disk, or take fewer --tokens"
            ) from error

    def read(self, start: int, stop: int) -> Tensor:
        """f32 [T, D]."""
        self.file.seek(4 * start * self.width)
        values = np.fromfile(self.file, np.float32, (stop - start) * self.width)
        return torch.from_numpy(values.reshape(stop - start, self.width))

    def write(self, start: int, x_TD: Tensor) -> None:
        self.file.seek(4 * start * self.width)
        x_TD.cpu().numpy().tofile(self.file)

    def close(self) -> None:
        self.file.close()


States = MemoryStates | FileStates
