"""Small safetensors artifacts: a format name, a version, JSON metadata and numpy arrays."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from hotsplit.errors import HotsplitError
from hotsplit.files.atomic import known_as, partial_file, require_file
from hotsplit.files.typed import other_version

# A tensor's entry takes about 100 bytes. The safetensors package reads headers of up to 100 MB and
# holds several copies.
MAX_HEADER_BYTES = 32 << 20


def check_header(path: Path, what: str) -> None:
    """Raises HotsplitError for a file or a header that is missing, truncated or too large."""
    require_file(path, what)
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            whole = path.stat().st_size - 8
    except OSError as error:
        raise HotsplitError(f"{path}: cannot be read ({error}); wanted a {what}") from error
    if not 0 < size <= min(MAX_HEADER_BYTES, whole):
        other = known_as(path)
        if other and "safetensors" not in other:
            raise HotsplitError(f"{path}: {other}; wanted a {what}")
        claim = f"its header claims {size:,} bytes of {whole:,}"
        found = claim if whole >= 0 else f"it has {whole + 8:,} bytes"
        raise HotsplitError(
            f"{path}: not a whole safetensors file ({found}); wanted a {what}; download or make it"
            " again"
        )


def save_arrays(
    path: Path, format: str, version: int, metadata: Mapping[str, object], arrays: dict
) -> None:
    """Writes a file whole or not at all; metadata values are stored as JSON. The same arrays and
    metadata give the same bytes. The safetensors package would write metadata in arbitrary order,
    and into a new file that replaces the locked one."""
    texts = {key: json.dumps(value) for key, value in metadata.items()}
    names = sorted(arrays, key=lambda name: (-arrays[name].dtype.itemsize, name))
    header: dict[str, object] = {
        "__metadata__": {"format": format, "version": str(version), **texts}
    }
    end = 0
    for name in names:
        array = arrays[name]
        start, end = end, end + array.nbytes
        kind, bits = array.dtype.kind, 8 * array.dtype.itemsize
        header[name] = {
            "dtype": "BOOL" if kind == "b" else f"{kind.upper()}{bits}",
            "shape": list(array.shape),
            "data_offsets": [start, end],
        }
    head = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    with partial_file(path) as partial, partial.open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for name in names:
            array = np.ascontiguousarray(arrays[name])
            file.write(array.astype(array.dtype.newbyteorder("<"), copy=False).data)


def load_arrays(
    path: Path, format: str, version: int
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Metadata (parsed, not checked further) and arrays of a file written by `save_arrays`. Raises
    HotsplitError for a missing, truncated or foreign file, and for another version."""
    what = f"{format} file"
    check_header(path, what)
    try:
        with safe_open(path, framework="numpy") as file:
            header = file.metadata() or {}
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, TypeError, AttributeError) as error:
        # TypeError, AttributeError: numpy has no such type (bf16, f8)
        reason = " ".join(str(error).split())[:200]
        raise HotsplitError(
            f"{path}: not a whole safetensors file ({reason}); wanted a {what}"
        ) from error
    own = header.pop("format", None)
    if own != format:
        raise HotsplitError(f"{path}: not a {what}")
    found = header.pop("version", None)
    if found != str(version):
        raise HotsplitError(f"{path}: {other_version(found, version, 'make it again')}")
    try:
        return {key: json.loads(value) for key, value in header.items()}, arrays
    except (ValueError, RecursionError) as error:  # JSON's error, too many digits
        raise HotsplitError(
            f"{path}: metadata is not JSON ({str(error)[:200]}); make it again"
        ) from error
