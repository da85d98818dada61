"""The GGUF under a model file: its keys and tensors, and the id of its weights. Those of
PowerInfer's files are translated.

`model_file` says what the keys and tensors mean."""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from hotsplit.errors import HotsplitError, about
from hotsplit.files.gguf_file import TensorEntry, Value, can_unpack, open_gguf, stacked, unpacked
from hotsplit.files.typed import shown
from hotsplit.model.tensors import OUTPUT_GATE, is_vector

SPLIT_ARCHITECTURE = "hotsplit-split"  # in split files, which are GGUF too
# By architecture of PowerInfer's files, which do not state it: that of PowerInfer's graphs.
ACTIVATIONS = {"llama": "relu", "bamboo": "drelu", "falcon": "relu", "opt": "relu"}
RENAMED = {
    "fc1.weight": "ffn_pred_down.weight",
    "fc2.weight": "ffn_pred_up.weight",
    "ffn_down_t.bias": "ffn_down.bias",
}
FIRST_POSITION = 2  # rows of OPT's learned positions that no token uses
OPT_NORM_EPSILON = 1e-5  # torch.nn.LayerNorm's; the file does not state it


def read_model_gguf(path: Path) -> tuple[dict[str, Value], dict[str, TensorEntry]]:
    """Keys and tensors of a GGUF; those of PowerInfer's files are translated. The keys always
    include `hotsplit.model_id`: `convert` writes it, and for a third-party file it is computed
    here. Raises HotsplitError for a folder, a split file and a broken file."""
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
    tensors = _with_vectors(tensors)
    if file.magic == "GGUF":
        with about(path, "; get the file again"):
            return keys, _with_experts_apart(_with_experts_together(tensors))
    with about(path, "; convert its checkpoint again"):
        return _adopted(keys, tensors)


def _with_vectors(tensors: dict[str, TensorEntry]) -> dict[str, TensorEntry]:
    """The tensors, with vectors in f32, whatever type the file has them in, unless it has no values
    that `gguf` knows. Gates of shared experts are vectors, too: llama.cpp's converter writes them
    as matrices of one row, and its quantize as vectors."""
    found: dict[str, TensorEntry] = {}
    for name, entry in tensors.items():
        is_row = name.endswith(f".{OUTPUT_GATE}") and entry.shape[:-1] == (1,)
        if (is_row or is_vector(name, entry.shape)) and can_unpack(entry.kind):
            entry = unpacked(entry)
            if is_row:
                entry = replace(
                    entry, shape=entry.shape[1:], read_rows=partial(_values_of_row, entry)
                )
        found[name] = entry
    return found


def _values_of_row(matrix: TensorEntry, start: int, stop: int) -> np.ndarray:
    return matrix.read()[0, start:stop]


_EXPERT = re.compile(r"(blk\.\d+\.ffn_(?:gate|up|down))\.(\d+)(\.weight)")


def _with_experts_together(tensors: dict[str, TensorEntry]) -> dict[str, TensorEntry]:
    """The tensors, with the experts of files from before April 2024, which have one tensor for
    each, as one of all. Raises HotsplitError for experts that are missing, or of several types or
    shapes."""
    found: dict[str, TensorEntry] = {}
    experts: dict[str, dict[int, TensorEntry]] = {}
    for name, entry in tensors.items():
        if match := _EXPERT.fullmatch(name):
            experts.setdefault(f"{match[1]}_exps{match[3]}", {})[int(match[2])] = entry
        else:
            found[name] = entry
    for name, by_number in experts.items():
        each = [by_number[number] for number in sorted(by_number)]
        if name in found or [*sorted(by_number)] != [*range(len(each))]:
            raise HotsplitError(f"has experts {sorted(by_number)} of {name}, wanted all, once")
        kinds = sorted({f"{entry.kind} {list(entry.shape)}" for entry in each})
        if kinds[1:]:
            raise HotsplitError(
                f"has experts of {name} in {' and '.join(kinds)}, which cannot be one tensor: it"
                " was made"
                " by a llama.cpp of before April 2024; later files of this model have one type"
            )
        found[name] = stacked(each)
    return found


_JOINED = ".ffn_gate_up_exps.weight"


def _with_experts_apart(tensors: dict[str, TensorEntry]) -> dict[str, TensorEntry]:
    """The tensors, with experts' gates and ups, which llama.cpp may join in one tensor [E, 2F, D],
    as two views of it. Raises HotsplitError for a layer with both kinds or no half."""
    if not any(name.endswith(_JOINED) for name in tensors):
        return tensors
    found: dict[str, TensorEntry] = {}
    for name, entry in tensors.items():
        if not name.endswith(_JOINED):
            found[name] = entry
            continue
        if len(entry.shape) != 3 or entry.shape[1] % 2:
            raise HotsplitError(
                f"{name} is {list(entry.shape)}, wanted two matrices of each expert"
            )
        half = entry.shape[1] // 2
        for part, stem in enumerate(("ffn_gate", "ffn_up")):
            own = name.replace("ffn_gate_up", stem)
            if own in tensors:
                raise HotsplitError(f"has {name} and {own}, one matrix twice")
            found[own] = replace(
                entry,
                shape=(entry.shape[0], half, entry.shape[2]),
                part_of=name,
                read_rows=partial(_some_rows, entry, part * half, (part + 1) * half),
            )
    return found


def _some_rows(entry: TensorEntry, begin: int, end: int, start: int, stop: int) -> np.ndarray:
    """Rows begin .. end-1 of the matrices of experts start .. stop-1, a view."""
    return entry.read_rows(start, stop)[:, begin:end]


def compute_model_id(
    config: Mapping[str, object], samples: Iterable[tuple[str, tuple[int, ...], bytes]]
) -> str:
    """An id of the weights: sha256 over the config and each tensor's name, shape and sampled bytes.
    `convert` computes it once, from the checkpoint, so that all types and layouts made from one
    checkpoint share it; for a third-party GGUF it is computed at load, cheaply even for 100 GB."""
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


# ---- PowerInfer's files: GGUF except for the first four bytes and three type numbers ------------


def _adopted(
    keys: dict[str, Value], tensors: dict[str, TensorEntry]
) -> tuple[dict[str, Value], dict[str, TensorEntry]]:
    """Keys and tensors of PowerInfer's file as in a model file of the sparse layout. Names and
    meanings are those of PowerInfer's convert.py, convert-hf-to-powerinfer-gguf.py and llama.cpp.
    Raises HotsplitError, without the file's name, for an unknown architecture, predictors whose
    threshold is not a number, and an OPT without learned positions."""
    found = str(keys.get("general.architecture", "none"))
    if found not in ACTIVATIONS:
        raise HotsplitError(
            f"PowerInfer's architecture {shown(found)} is unknown; known: {', '.join(ACTIVATIONS)}"
        )
    name = "llama" if found == "bamboo" else found
    own = {
        k.replace("bamboo.", "llama.", 1) if found == "bamboo" else k: v for k, v in keys.items()
    }
    threshold = own.pop("powerinfer.sparse_threshold", np.float32(0.0))
    own |= {"general.architecture": name, "hotsplit.ffn.activation": ACTIVATIONS[found]}
    renamed = {}
    for source, entry in tensors.items():
        old = next((old for old in RENAMED if source.endswith("." + old)), "")
        renamed[source.removesuffix(old) + RENAMED.get(old, "")] = entry
    if name == "opt":
        renamed = _without_first_positions(renamed)
        own["opt.attention.layer_norm_epsilon"] = np.float32(OPT_NORM_EPSILON)
        own["opt.context_length"] = np.uint32(renamed["position_embd.weight"].shape[0])
    return own | _predictor_keys(renamed, threshold), renamed


def _without_first_positions(tensors: dict[str, TensorEntry]) -> dict[str, TensorEntry]:
    entry = tensors.get("position_embd.weight")
    if entry is None or entry.shape[0] <= FIRST_POSITION:
        raise HotsplitError("no learned positions (position_embd.weight) in an OPT")

    def read_rows(start: int, stop: int) -> np.ndarray:
        return entry.read_rows(start + FIRST_POSITION, stop + FIRST_POSITION)

    shape = (entry.shape[0] - FIRST_POSITION, *entry.shape[1:])
    return tensors | {
        "position_embd.weight": TensorEntry(shape=shape, kind=entry.kind, read_rows=read_rows)
    }


def _predictor_keys(tensors: dict[str, TensorEntry], threshold: Value) -> dict[str, Value]:
    ranks: list[int] = []
    while (entry := tensors.get(f"blk.{len(ranks)}.ffn_pred_down.weight")) is not None:
        ranks.append(entry.shape[0])
    if not ranks:
        return {}
    if not isinstance(threshold, np.number):
        raise HotsplitError(f"powerinfer.sparse_threshold is {shown(threshold)}, wanted a number")
    return {
        "hotsplit.predictor.kind": "relu",
        "hotsplit.predictor.rank": ranks,
        "hotsplit.predictor.threshold": [float(threshold)] * len(ranks),
        "hotsplit.predictor.input_layer_offset": np.uint32(0),
    }
