"""Room on the disk that a run needs, checked before it starts."""

import shutil
from collections import defaultdict
from pathlib import Path

from hotsplit.convert.checkpoint import Checkpoint
from hotsplit.errors import HotsplitError
from hotsplit.sparsify.config import SparsifyConfig
from hotsplit.sparsify.feed_forward import MATRICES, checkpoint_name
from hotsplit.system.sizes import format_bytes

STATE = "state.safetensors"  # in the work folder
STORED_BYTES = {"F32": 4, "F16": 2, "BF16": 2}  # per value, by safetensors' types
# Saved in f32: the values that are trained, AdamW's two moments, and the best values.
SAVED_BYTES = 4 * 4
SAVED_TWICE = 2  # a new state is written beside the old one


def checkpoint_bytes(dense: Checkpoint, num_layers: int) -> int:
    """Size of a trained checkpoint: trained matrices in f32, all others as they are."""
    trained = {checkpoint_name(i, name) for i in range(num_layers) for name in MATRICES}
    total = 0
    for name, tensor in dense.tensors.items():
        count = 4 if name in trained else STORED_BYTES[tensor.dtype]
        for size in tensor.shape:
            count *= size
        total += 0 if tensor.same_as is not None else count
    return total


def check_disk(
    config: SparsifyConfig, *, num_trained: int, checkpoint_bytes: int, output_bytes: int
) -> None:
    """Raises HotsplitError if a disk has too little room for the state, the checkpoints and the
    model files of a run. The room that an interrupted run's state and checkpoints already take is
    not counted again."""
    state = config.work_folder / STATE
    goes_on = state.exists() and not config.force
    needed = [(state, SAVED_TWICE * num_trained * SAVED_BYTES - _size_of(state))]
    for share in config.targets:
        folder = config.checkpoint_of(share)
        needed.append((folder, checkpoint_bytes - (_size_of(folder) if goes_on else 0)))
        needed.append((config.output_of(share), output_bytes))
    places, total = dict[int, Path](), defaultdict[int, int](int)
    for path, count in needed:
        there = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
        disk = there.stat().st_dev
        places.setdefault(disk, there)
        total[disk] += max(0, count)
    for disk, place in places.items():
        free = shutil.disk_usage(place).free
        if total[disk] > free:
            raise HotsplitError(
                f"{place}: {format_bytes(free)} free, about {format_bytes(total[disk])} needed for"
                " the training's state, checkpoints and model files; free space, name an output on"
                " another disk, or give --rank 16 or fewer --share"
            )


def _size_of(path: Path) -> int:
    """Bytes of a file or of the files in a folder; 0 if there is none."""
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())
