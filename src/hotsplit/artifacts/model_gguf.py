"""The GGUF under a model file: its keys and tensors, and the id of its weights.

`model_file` says what the keys and tensors mean."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from hotsplit.artifacts.powerinfer_file import adopt
from hotsplit.errors import HotsplitError
from hotsplit.files.gguf_file import TensorEntry, Value, open_gguf

SPLIT_ARCHITECTURE = "hotsplit-split"  # in split files, which are GGUF too


def read_model_gguf(path: Path) -> tuple[dict[str, Value], dict[str, TensorEntry]]:
    """Keys and tensors of a GGUF; those of PowerInfer's files are translated.

    The keys always include `hotsplit.model_id`: `convert` writes it, and for a third-party file
    it is computed here. Raises HotsplitError for a folder, a split file and a broken file."""
    if path.is_dir():
        raise HotsplitError(
            f"{path}: is a folder; wanted a model file (GGUF), which hotsplit convert makes from a"
            " checkpoint"
        )
    file = open_gguf(path, "model file (GGUF)")
    keys, tensors = file.keys, file.tensors
    if keys.get("general.architecture") == SPLIT_ARCHITECTURE:
        raise HotsplitError(
            f"{path}: is a split file; give the model (GGUF) that it was solved for, and the split"
            " file with --split (of generate, chat and serve)"
        )
    if not isinstance(keys.get("hotsplit.model_id"), str):
        prefix = f"{keys.get('general.architecture')}."
        config = {key: value for key, value in keys.items() if key.startswith(prefix)}
        samples = ((n, e.shape, sample_bytes(e.read())) for n, e in tensors.items())
        keys = keys | {"hotsplit.model_id": compute_model_id(config, samples)}
    if file.magic == "GGUF":
        return keys, tensors
    try:
        return adopt(keys, tensors)
    except HotsplitError as error:
        raise HotsplitError(f"{path}: {error}; convert its checkpoint again") from error


def compute_model_id(
    config: Mapping[str, object], samples: Iterable[tuple[str, tuple[int, ...], bytes]]
) -> str:
    """An id of the weights: sha256 over the config and each tensor's name, shape and sampled bytes.

    `convert` computes it once, from the checkpoint, so that all types and layouts made from one
    checkpoint share it; for a third-party GGUF it is computed at load. It is cheap even for
    100 GB."""
    volatile = {"transformers_version", "_name_or_path", "torch_dtype", "dtype", "use_cache"}
    stable = {key: value for key, value in config.items() if key not in volatile}
    digest = hashlib.sha256(json.dumps(stable, sort_keys=True, default=str).encode())
    for name, shape, sample in sorted(samples, key=lambda item: item[0]):
        digest.update(f"{name}{list(shape)}".encode())
        digest.update(sample)
    return digest.hexdigest()


def sample_bytes(raw: np.ndarray) -> bytes:
    """Up to 4 KiB each from the start, the middle and the end of a tensor's bytes."""
    flat = raw.reshape(-1).view(np.uint8)
    middle = len(flat) // 2
    return b"".join(flat[a : a + 4096].tobytes() for a in (0, middle, max(0, len(flat) - 4096)))
