"""Small safetensors artifacts: a format name, a version, string metadata and numpy arrays."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from sparkinfer.errors import SparkinferError
from sparkinfer.files import partial_file, require_file


def save_arrays(
    path: Path, format: str, version: int, metadata: Mapping[str, object], arrays: dict
) -> None:
    """Writes a file whole or not at all; metadata values are stored as JSON."""
    header = {key: json.dumps(value) for key, value in metadata.items()}
    with partial_file(path) as partial:
        save_file(arrays, partial, {"format": format, "version": str(version), **header})


def load_arrays(
    path: Path, format: str, version: int, keys: set[str]
) -> tuple[dict, dict[str, np.ndarray]]:
    """Metadata (parsed) and arrays of a file that `save_arrays` wrote.

    Raises SparkinferError for a missing, truncated or foreign file, an unknown version, and
    where the metadata are not exactly `keys`."""
    what = f"{format} file"
    require_file(path, what)
    try:
        with safe_open(path, framework="numpy") as file:
            header = file.metadata() or {}
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise SparkinferError(
            f"{path}: not a whole safetensors file ({error}); wanted a {what}"
        ) from error
    if header.pop("format", None) != format:
        raise SparkinferError(f"{path}: not a {what}")
    found = header.pop("version", None)
    if found != str(version):
        raise SparkinferError(
            f"{path}: version {found}, this program reads {version}; make it again"
        )
    if header.keys() != keys:
        wrong = min(header.keys() ^ keys)
        raise SparkinferError(
            f"{path}: metadata key {wrong!r} is unknown or missing; make it again"
        )
    try:
        return {key: json.loads(value) for key, value in header.items()}, arrays
    except json.JSONDecodeError as error:
        raise SparkinferError(f"{path}: metadata are not JSON ({error}); make it again") from error
