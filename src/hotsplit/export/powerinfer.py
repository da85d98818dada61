"""Writes a plan as PowerInfer's GPU index, `<model>.gguf.generated.gpuidx`, and a profile as
activation files, the input of PowerInfer's solver.

The index is a GGUF container with another magic. Sources: in PowerInfer,
powerinfer-py/powerinfer/export_split.py writes it and llama.cpp (llama_gpu_split_loader) reads it:
tensors by position, two per layer.

The `gguf` package cannot write it: PowerInfer numbers types as ggml did in 2023, where I32 is 18;
today 18 is a quantised type and I32 is 26.

Activations are a folder of activation_0.pt, activation_1.pt, ..., one per layer, each a 1-D int64
tensor of the counts of the layer's F neurons. Sources: powerinfer-py/powerinfer/solver.py and
export_split.py (both `torch.load` them by that name, so that the numbers cannot be padded with
zeros).

Letters: F neurons of a layer, H hot ones."""

import re
import struct
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

import numpy as np

from hotsplit.artifacts.profile_file import Profile
from hotsplit.artifacts.split_file import Split
from hotsplit.files.atomic import partial_file, partial_folder

SUFFIX = ".generated.gpuidx"  # PowerInfer looks for its model file's name plus this suffix
ARCHITECTURE = "generic.gpu_index"
MAGIC, VERSION, ALIGNMENT = b"PWRI", 3, 32
TYPE_UINT32, TYPE_STRING, TYPE_UINT64 = 4, 8, 10  # of keys
TYPE_I32 = 18  # of tensors, in PowerInfer's ggml.h
FOLDER_NAME = "activation"  # the folder that PowerInfer reads, next to the model file
SOLVER_BATCH = 256  # solver.py reshapes F counts to rows of this many
TEXT_SORT_IS_RIGHT_UP_TO = 10  # layers: activation_10 comes before activation_2 in a text sort


def write_index(split: Split, num_neurons: int, path: Path) -> int:
    """Writes the index of a plan over `num_neurons` neurons a layer; returns its bytes."""
    tensors = index_tensors(split.hot, num_neurons)
    with partial_file(path) as partial, partial.open("wb") as file:
        file.write(_header(tensors, len(split.hot), split.gpu_bytes["neurons"]))
        for _, values in tensors:
            data = values.astype("<i4").tobytes()
            file.write(data + bytes(-len(data) % ALIGNMENT))
        return file.tell()


def index_tensors(hot: Sequence[np.ndarray], num_neurons: int) -> list[tuple[str, np.ndarray]]:
    """The tensors in PowerInfer's order: a layer's gpu_idx [F] (1 is hot), then its gpu_bucket [H],
    ascending. A layer without hot neurons has an empty bucket, as export_split.py writes it: the
    loader counts the ones in gpu_idx first, and never opens the bucket of such a layer."""
    tensors = []
    for layer, ids_H in enumerate(hot):
        is_hot_F = np.zeros(num_neurons, np.int32)
        is_hot_F[ids_H] = 1
        tensors.append((f"blk.{layer}.gpu_idx", is_hot_F))
        tensors.append((f"blk.{layer}.gpu_bucket", np.sort(ids_H).astype(np.int32)))
    return tensors


def index_notes(split: Split, on_cpu: str, path: Path) -> list[str]:
    """Notes on what the index cannot express, and on what PowerInfer does with it. `on_cpu`
    describes what dense blocks the plan keeps on the CPU, "" for none."""
    needed = split.gpu_bytes["neurons"]
    notes = [
        f"PowerInfer applies the index if at least {needed:,} bytes of its VRAM budget are left"
        " for neurons (their size in the model file that was solved for); with less it makes"
        " an index of its own and overwrites this one"
    ]
    if not path.name.endswith(SUFFIX):
        notes.append(f"PowerInfer looks for its model file's name followed by {SUFFIX!r}")
    if on_cpu:
        notes.append(
            f"the plan keeps {on_cpu} on the CPU, which the index cannot express: PowerInfer puts"
            " all dense blocks on the GPU first, and no neurons if they do not all fit"
        )
    return notes


def _header(tensors: list[tuple[str, np.ndarray]], num_layers: int, capacity_bytes: int) -> bytes:
    content = MAGIC + struct.pack("<IQQ", VERSION, len(tensors), 3)
    content += _text("general.architecture") + struct.pack("<I", TYPE_STRING) + _text(ARCHITECTURE)
    content += _text(ARCHITECTURE + ".block_count") + struct.pack("<II", TYPE_UINT32, num_layers)
    content += _text("split.vram_capacity") + struct.pack("<IQ", TYPE_UINT64, capacity_bytes)
    offset = 0
    for name, values in tensors:
        content += _text(name) + struct.pack("<IQIQ", 1, len(values), TYPE_I32, offset)
        offset += 4 * len(values) + -4 * len(values) % ALIGNMENT
    return content + bytes(-len(content) % ALIGNMENT)


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def is_activation_file(name: str) -> bool:
    return re.fullmatch(r"activation_\d+\.pt", name) is not None


def write_activations(profile: Profile, folder: Path) -> int:
    """Writes `folder` whole or not at all, replacing an existing one; returns its bytes."""
    import torch

    with partial_folder(folder) as partial:
        for layer, count_F in enumerate(profile.active_count_LF):
            data = BytesIO()  # torch itself reports a full disk verbosely, or not at all
            torch.save(torch.from_numpy(count_F.copy()), data)
            (partial / f"activation_{layer}.pt").write_bytes(data.getbuffer())
        return sum(path.stat().st_size for path in partial.iterdir())


def activation_notes(profile: Profile, folder: Path) -> list[str]:
    """Notes on what PowerInfer does unexpectedly with these files."""
    num_layers, num_neurons = profile.active_count_LF.shape
    notes = []
    if folder.name != FOLDER_NAME:
        notes.append(f"PowerInfer reads a folder named {FOLDER_NAME!r} next to its model file")
    if num_layers > TEXT_SORT_IS_RIGHT_UP_TO:
        notes.append(
            f"PowerInfer's own export_split.py reads these {num_layers} files in text order"
            " (layer 10 before layer 2) and thus mixes up the layers;"
            " solve here and export the plan with --format gpuidx instead"
        )
    if num_neurons % SOLVER_BATCH:
        notes.append(
            f"PowerInfer's solver.py fails for {num_neurons} neurons a layer:"
            f" it wants a multiple of {SOLVER_BATCH}"
        )
    return notes
