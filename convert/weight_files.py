"""The tensors of one weights file of a checkpoint: safetensors, or a state dict written by
torch.save (.bin, .pt), which torch maps. Its unpickler for weights runs no code of a file."""

import json
import math
import mmap
import re
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hotsplit.errors import HotsplitError
from hotsplit.files.atomic import require_file
from hotsplit.files.mapped_files import map_part
from hotsplit.files.safetensors_file import check_header

if TYPE_CHECKING:
    from hotsplit.convert.packed_matrix import PackedMatrix


@dataclass(frozen=True, kw_only=True)
class SourceTensor:
    """`read` returns the stored weights, a view of the mapped file if possible. `same_as` is set
    for tied weights in a pickle: of several names of the same values, all but the alphabetically
    last refer to the last. Otherwise it is None. `packed`: what a matrix is unpacked from, of which
    `read` returns the f32 values and `dtype` is the type of ours that holds it."""

    file: Path
    shape: tuple[int, ...]
    dtype: str  # as safetensors spells it: "F32", "BF16"
    read: Callable[[], Tensor]
    same_as: str | None = None
    packed: "PackedMatrix | None" = None


def read_safetensors(path: Path) -> dict[str, SourceTensor]:
    """Reads the header, but no weights. Raises HotsplitError for a missing, truncated or
    inconsistent file."""
    check_header(path, "safetensors file")
    try:
        with safe_open(path, framework="pt") as file:  # checks the header
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            shapes = {name: tuple(part.get_shape()) for name, part in slices.items()}
            dtypes = {name: part.get_dtype() for name, part in slices.items()}
        with path.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(length))
    except (SafetensorError, OSError, ValueError) as error:
        raise _broken(path, error) from error
    return {
        name: SourceTensor(
            file=path,
            shape=shapes[name],
            dtype=dtypes[name],
            read=partial(
                _read_mapped,
                path,
                8 + length + header[name]["data_offsets"][0],
                dtypes[name],
                shapes[name],
            ),
        )
        for name in sorted(shapes)
    }


def _read_mapped(path: Path, start: int, dtype: str, shape: tuple[int, ...]) -> Tensor:
    """A view of these bytes of the file, mapped anew, so that no more stays mapped than tensors in
    use; safetensors would parse the whole header for each, which takes 80 ms for 18,000 tensors."""
    kind = _TORCH[dtype]
    num_bytes, first = math.prod(shape) * kind.itemsize, start - start % mmap.ALLOCATIONGRANULARITY
    if num_bytes == 0:
        return torch.empty(shape, dtype=kind)
    try:
        with path.open("rb") as file:
            raw = map_part(file, first, start + num_bytes)
    except (OSError, ValueError) as error:
        raise _broken(path, error) from error
    whole = torch.frombuffer(raw, dtype=torch.uint8, count=num_bytes, offset=start - first)
    # A header may end anywhere, but values lie at multiples of their size.
    return (whole if start % kind.itemsize == 0 else whole.clone()).view(kind).reshape(shape)


def _broken(path: Path, error: Exception) -> HotsplitError:
    reason = " ".join(str(error).split())[:200]
    return HotsplitError(f"{path}: not a whole safetensors file ({reason}); get or save it again")


_DTYPES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_TORCH = {name: dtype for dtype, name in _DTYPES.items()} | {
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}
# What torch's unpickler refuses to call, in its message.
_CALLED = re.compile(r"GLOBAL ([\w.]+)")
RESAVE = "load it with torch and save it again with torch.save, or as safetensors"


def read_state_dict(path: Path) -> dict[str, SourceTensor]:
    """Maps a file; its weights are read when they are used, and stay mapped while its tensors live.
    Raises HotsplitError for a missing, truncated or foreign file, and for other values."""
    require_file(path, "state dict")
    # The bytes of each storage in the file, of which torch trusts the pickle.
    try:
        with zipfile.ZipFile(path) as archive:
            records = archive.infolist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        reason = "it is cut short, was saved before torch 1.6, or is something else"
        raise _not_a_state_dict(path, reason) from error
    if any(record.compress_type != zipfile.ZIP_STORED for record in records):
        raise HotsplitError(f"{path}: is a compressed zip, which cannot be mapped; {RESAVE}")
    sizes = Counter(record.file_size for record in records if "/data/" in record.filename)
    state = _loaded(path)
    if not isinstance(state, dict):
        raise _not_a_state_dict(path, f"holds {_kind(state)}, wanted a dict of tensors")
    for name, value in state.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise _not_a_state_dict(
                path, f"{str(name)[:64]!r} is {_kind(value)}, wanted tensors by name"
            )
        if value.dtype not in _DTYPES or value.layout != torch.strided or value.is_quantized:
            raise _not_a_state_dict(
                path, f"{name[:64]!r} has {value.dtype} in layout {value.layout}"
            )
    # Each storage must have as many bytes as one of the file's.
    storages = {
        each.untyped_storage().data_ptr(): each.untyped_storage() for each in state.values()
    }
    missing = Counter(each.nbytes() for each in storages.values() if each.nbytes()) - sizes
    if missing:
        raise _not_a_state_dict(path, f"no storage in it has {next(iter(missing)):,} bytes")
    places = {  # what names of the same values have in common
        name: (t.data_ptr(), t.dtype, tuple(t.shape), t.stride())
        for name, t in sorted(state.items())
    }
    last_name = {place: name for name, place in places.items()}
    return {
        name: SourceTensor(
            file=path,
            shape=tuple(state[name].shape),
            dtype=_DTYPES[state[name].dtype],
            read=state[name].detach,
            same_as=None if last_name[place] == name else last_name[place],
        )
        for name, place in places.items()
    }


def _loaded(path: Path) -> Any:
    try:
        with warnings.catch_warnings(action="ignore"):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # noqa: BLE001  # of any type, by what the file's bytes lead to
        reason = "its pickle is damaged, or has what no state dict has"
        if called := _CALLED.search(str(error)):
            reason = f"its pickle calls {called[1]!r}, which no state dict needs"
        raise _not_a_state_dict(path, reason) from error


def _kind(value: object) -> str:
    return "a tensor" if isinstance(value, Tensor) else f"a value of type {type(value).__name__}"


def _not_a_state_dict(path: Path, reason: str) -> HotsplitError:
    return HotsplitError(f"{path}: not a whole state dict ({reason}); get it again, or {RESAVE}")
