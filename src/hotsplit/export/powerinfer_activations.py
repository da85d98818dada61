"""Writes a profile as activation files, the input of PowerInfer's solver.

A folder of activation_0.pt, activation_1.pt, ..., one per layer, each a 1-D int64 tensor of the
counts of the layer's F neurons. Source: PowerInfer, powerinfer-py/powerinfer/solver.py and
export_split.py (both `torch.load` them by that name, so that the numbers cannot be padded with
zeros)."""

import re
from io import BytesIO
from pathlib import Path

import torch

from hotsplit.artifacts.profile_file import Profile
from hotsplit.files.atomic import partial_folder

FOLDER_NAME = "activation"  # the folder that PowerInfer reads, next to the model file
SOLVER_BATCH = 256  # solver.py reshapes F counts to rows of this many
TEXT_SORT_IS_RIGHT_UP_TO = 10  # layers: activation_10 comes before activation_2 in a text sort


def is_activation_file(name: str) -> bool:
    return re.fullmatch(r"activation_\d+\.pt", name) is not None


def write_activations(profile: Profile, folder: Path) -> int:
    """Writes `folder`, whole or not at all, replacing an existing one; returns its size in bytes."""
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
