"""Inspects a file: a path in, a summary out.

The kind is detected from the content, never from the name."""

import struct
from pathlib import Path

from hotsplit.artifacts import importance_file, machine_file, predictor_file, profile_file
from hotsplit.errors import HotsplitError
from hotsplit.files.atomic import require_file
from hotsplit.files.json_file import parse_object, read_object
from hotsplit.files.safetensors_file import MAX_HEADER_BYTES
from hotsplit.files.typed import shown
from hotsplit.inspection.artifact_summaries import (
    ImportancesSummary,
    MachineSummary,
    PredictorsSummary,
    ProfileSummary,
)
from hotsplit.inspection.file_summary import Summary
from hotsplit.inspection.gguf_summary import summarise_gguf

POWERINFER_MAGIC = b"PWRI"  # in the place of b"GGUF"
KNOWN = (
    "model or split file (GGUF), importance matrix (GGUF or .dat), profile or predictors"
    " (safetensors), machine file (JSON) or a checkpoint's folder"
)


def inspect_file(path: Path) -> Summary:
    """The summary of a file. Raises HotsplitError for a folder, and for a file that is
    incomplete, unreadable or of no known kind."""
    if path.is_dir():
        raise HotsplitError(f"{path}: is a folder without config.json; wanted a {KNOWN}")
    require_file(path, KNOWN)
    try:
        with path.open("rb") as file:
            start = file.read(importance_file.FIRST_BYTES)
    except OSError as error:
        raise HotsplitError(f"{path}: cannot be read: {error.strerror}") from error
    if start[:4] in (b"GGUF", POWERINFER_MAGIC):
        return summarise_gguf(path)
    if start[8:9] == b"{":
        return _summarise_safetensors(path)
    if start.lstrip()[:1] == b"{":
        format = read_object(path, "machine file (hotsplit calibrate)").get("format")
        if format == machine_file.FORMAT:
            return MachineSummary(path, machine_file.Machine.load(path))
        raise HotsplitError(
            f"{path}: JSON of format {shown(format)}, wanted {machine_file.FORMAT!r} (hotsplit"
            " calibrate)"
        )
    if importance_file.is_dat(start):
        return ImportancesSummary(path, importance_file.Importances.load(path))
    raise HotsplitError(f"{path}: is of an unknown kind; wanted a {KNOWN}")


def _summarise_safetensors(path: Path) -> ProfileSummary | PredictorsSummary:
    # The `__metadata__` of the header, which is JSON after eight bytes of length.
    with path.open("rb") as file:
        (num_bytes,) = struct.unpack("<Q", file.read(8))
        if num_bytes > MAX_HEADER_BYTES:
            raise HotsplitError(
                f"{path}: begins like a safetensors file with a header of {num_bytes:,} bytes,"
                f" above the bound of {MAX_HEADER_BYTES:,}; make or copy it again"
            )
        if num_bytes > path.stat().st_size - 8:
            raise HotsplitError(
                f"{path}: begins like a safetensors file with a header of {num_bytes:,} bytes, but"
                " ends before it does; make or copy it again"
            )
        text = file.read(num_bytes)
    try:
        header = parse_object(path, text.decode(), "safetensors header")
    except UnicodeDecodeError as error:
        raise HotsplitError(f"{path}: the header is not text; make or copy it again") from error
    metadata = header.get("__metadata__")
    format = (metadata if isinstance(metadata, dict) else {}).get("format")
    if format == profile_file.FORMAT:
        return ProfileSummary(path, profile_file.Profile.load(path))
    if format == predictor_file.FORMAT:
        return PredictorsSummary(path, predictor_file.Predictors.load(path))
    raise HotsplitError(
        f"{path}: a safetensors file of format {shown(format)}, wanted {profile_file.FORMAT!r} or"
        f" {predictor_file.FORMAT!r}; weights are read by hotsplit convert, from their folder"
    )
