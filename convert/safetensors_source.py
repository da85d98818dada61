"""The tensors of a safetensors file."""

from functools import partial
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from hotsplit.convert.source_tensor import SourceTensor
from hotsplit.errors import HotsplitError
from hotsplit.files.safetensors_file import check_header


def read_safetensors(path: Path) -> dict[str, SourceTensor]:
    """Reads the header, but no weights.

    Raises HotsplitError for a missing, truncated or inconsistent file."""
    check_header(path, "safetensors file")
    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return {
                name: SourceTensor(
                    file=path,
                    shape=tuple(part.get_shape()),
                    dtype=part.get_dtype(),
                    read=partial(_read, path, name),
                )
                for name, part in sorted(slices.items())
            }
    except (SafetensorError, OSError) as error:
        raise _broken(path, error) from error


def _read(path: Path, name: str) -> Tensor:
    """Opens the file anew for every tensor, so that no file stays mapped longer than its
    tensors."""
    try:
        with safe_open(path, framework="pt") as file:
            return file.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise _broken(path, error) from error


def _broken(path: Path, error: Exception) -> HotsplitError:
    reason = " ".join(str(error).split())[:200]
    return HotsplitError(
        f"{path}: not a whole safetensors file ({reason}); download or save it again"
    )
