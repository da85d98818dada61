"""The tensors of one weights file of a checkpoint: safetensors, or a state dict written by torch.save
(.bin, .pt). No pickle is executed."""

import mmap
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hotsplit.convert.torch_file import RESAVE, Broken, TorchZip, View, open_torch_zip, read_views
from hotsplit.errors import HotsplitError
from hotsplit.files.safetensors_file import check_header


@dataclass(frozen=True, kw_only=True)
class SourceTensor:
    """`read` returns the stored weights, a view of the mapped file if possible.

    `same_as` is set for tied weights in a pickle: of several names of the same values, all but the
    alphabetically last refer to the last. Otherwise it is None."""

    file: Path
    shape: tuple[int, ...]
    dtype: str  # as safetensors spells it: "F32", "BF16"
    read: Callable[[], Tensor]
    same_as: str | None = None


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
                    read=partial(_read_safetensors, path, name),
                )
                for name, part in sorted(slices.items())
            }
    except (SafetensorError, OSError) as error:
        raise _broken(path, error) from error


def _read_safetensors(path: Path, name: str) -> Tensor:
    """Opens the file for every tensor anew, so that none stays mapped longer than its tensors."""
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


TORCH_TYPES = {
    "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


def read_state_dict(path: Path) -> dict[str, SourceTensor]:
    """Reads names, shapes and types, but no weights; the file stays mapped while its tensors live.

    Raises HotsplitError for a missing, truncated or foreign file, and if it holds anything but
    tensors that lie within their storages."""
    archive = open_torch_zip(path, "state dict")
    try:
        views = read_views(archive.pickle)
        for view in views.values():
            _check_storage(archive, view)
    except Broken as error:
        raise HotsplitError(
            f"{path}: not a whole state dict ({error}); download it again, or {RESAVE}"
        ) from error
    last_name = {view: name for name, view in sorted(views.items())}
    return {
        name: SourceTensor(
            file=path,
            shape=view.shape,
            dtype=view.storage.dtype,
            read=partial(_read_view, archive.mapping, archive.storages[view.storage.key][0], view),
            same_as=None if last_name[view] == name else last_name[view],
        )
        for name, view in sorted(views.items())
    }


def _check_storage(archive: TorchZip, view: View) -> None:
    storage = view.storage
    _, size = archive.storages.get(storage.key, (0, -1))
    if size != storage.num_values * storage.value_bytes:
        found = "is missing" if size < 0 else f"has {size:,} bytes"
        raise Broken(
            f"storage {storage.key[:64]!r} {found}, wanted"
            f" {storage.num_values:,} values of {storage.value_bytes} bytes"
        )


def _read_view(mapping: mmap.mmap, start: int, view: View) -> Tensor:
    """A view of the mapping; a copy if another tool's zip misaligns the values."""
    dtype, size = TORCH_TYPES[view.storage.dtype], view.storage.value_bytes
    if not prod(view.shape):
        return torch.empty(view.shape, dtype=dtype)
    first = start + view.offset * size
    count = 1 + sum((n - 1) * step for n, step in zip(view.shape, view.stride, strict=True))
    if first % size:
        values = torch.frombuffer(bytearray(mapping[first : first + count * size]), dtype=dtype)
    else:
        values = torch.frombuffer(mapping, dtype=dtype, count=count, offset=first)
    return values.as_strided(view.shape, view.stride)
