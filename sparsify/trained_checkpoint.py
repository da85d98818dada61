"""Writes and reads a trained checkpoint, a Hugging Face folder. The trained matrices are f32, all
others unchanged.

Under the rule "threshold" it also has the neurons' limits, in limits.FILE_NAME, which convert
reads; transformers can load the folder, but ignores the limits and runs the trained weights
densely. Under the other rules there are no limits: the config names the activation instead."""

import json
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from hotsplit.artifacts.limits_file import FILE_NAME, LayerLimits, Limits
from hotsplit.convert.checkpoint import Checkpoint
from hotsplit.errors import HotsplitError
from hotsplit.files.atomic import no_room, partial_folder
from hotsplit.files.typed import shown

SHARD_BYTES = 4 << 30
TEXTS = ("*.json", "*.model", "*.jinja", "*.txt", "LICENSE*", "README*")
INDEX = "model.safetensors.index.json"
WEIGHTS = re.compile(r"model(-\d{5,}-of-\d{5,})?\.safetensors")


def write_trained(
    source: Path, folder: Path, matrices: Mapping[str, Tensor], limit_LF: np.ndarray, rule: str
) -> None:
    """Writes `folder`: the checkpoint `source`, with the tensors named in `matrices` replaced."""
    checkpoint = Checkpoint.open(source)
    unknown = matrices.keys() - checkpoint.tensors.keys()
    assert not unknown, sorted(unknown)[:3]
    with partial_folder(folder) as unfinished:
        for file in _texts(source):
            shutil.copyfile(file, unfinished / file.name)
        if rule != "threshold":
            _rename_activation(unfinished / "config.json", rule, float(limit_LF.max()))
        _write_weights(checkpoint, unfinished, matrices)
        if rule == "threshold":
            layers = tuple(LayerLimits(gate_F=limit_F) for limit_F in limit_LF)
            Limits(model_id=None, layers=layers, is_trained=True).save(unfinished / FILE_NAME)
        _copy_others(folder, unfinished, source)


def _copy_others(folder: Path, to: Path, source: Path) -> None:
    """Copies to `to` the files in `folder` that sparsify has not written, since `folder` is replaced
    as a whole. They were put there after the outputs were checked."""
    others = folder.iterdir() if folder.is_dir() else ()
    for other in [each for each in others if not is_written(each.name, source)]:
        try:
            if other.is_dir() and not other.is_symlink():
                shutil.copytree(other, to / other.name, symlinks=True)
            else:
                shutil.copy2(other, to / other.name, follow_symlinks=False)
        except (OSError, shutil.Error) as error:
            raise HotsplitError(
                f"{other}: cannot be kept in the new {folder} ({error}); move it to another place"
                " and run the same command again"
            ) from error


def read_trained(folder: Path, names: Iterable[str]) -> tuple[dict[str, Tensor], Tensor]:
    """(matrices by name, limits f32 [L, F]) of a folder that `write_trained` wrote.

    Raises HotsplitError if it has no limits, or lacks one of the matrices `names`."""
    if not (folder / FILE_NAME).is_file():
        raise HotsplitError(f"{folder}: no {FILE_NAME}; wanted a checkpoint that sparsify wrote")
    checkpoint = Checkpoint.open(folder)
    missing = [name for name in names if name not in checkpoint.tensors]
    if missing:
        raise HotsplitError(
            f"{folder}: no tensor {shown(missing[0])}; it was trained from another model"
        )
    gates = [layer.gate_F for layer in Limits.load(folder / FILE_NAME).layers]
    if any(gate is None for gate in gates):
        raise HotsplitError(f"{folder / FILE_NAME}: a layer has no limits for its gates")
    limit_LF = torch.from_numpy(np.stack([gate for gate in gates if gate is not None]))
    return {name: checkpoint.read(name).clone() for name in names}, limit_LF


def is_written(name: str, source: Path) -> bool:
    """True if `write_trained` may write a file of that name for the checkpoint `source`."""
    others = (INDEX, FILE_NAME, *(file.name for file in _texts(source)))
    return name in others or WEIGHTS.fullmatch(name) is not None


def _texts(source: Path) -> list[Path]:
    """The files of a checkpoint that are copied."""
    found = (file for pattern in TEXTS for file in source.glob(pattern))
    return [file for file in found if not file.name.endswith(".index.json")]


def _rename_activation(path: Path, rule: str, threshold: float) -> None:
    """Sets the activation in the config; FATReLU has one threshold, the others none."""
    config = json.loads(path.read_text())
    config["hidden_act"] = rule
    if rule == "fatrelu":
        config["hidden_act_param"] = threshold
    path.write_text(json.dumps(config, indent=1) + "\n")


def _write_weights(checkpoint: Checkpoint, folder: Path, matrices: Mapping[str, Tensor]) -> None:
    """Writes files with at most SHARD_BYTES of tensors, or with one larger tensor, and an index if
    there are several files."""
    groups: list[list[str]] = [[]]
    size = 0
    for name, tensor in checkpoint.tensors.items():
        if tensor.same_as is not None:
            continue
        count = int(np.prod(tensor.shape)) * 4
        if size and size + count > SHARD_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += count
    names = ["model.safetensors"] if len(groups) == 1 else [
        f"model-{i + 1:05}-of-{len(groups):05}.safetensors" for i in range(len(groups))
    ]  # fmt: skip
    for file, group in zip(names, groups, strict=True):
        tensors = {n: _tensor(checkpoint, n, matrices) for n in group}
        save_tensors(tensors, folder / file)
    if len(groups) > 1:
        weight_map = {n: file for file, group in zip(names, groups, strict=True) for n in group}
        index = {"metadata": {}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n")


def save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Writes a checkpoint's safetensors file, with the rights that any new file gets: the library
    would leave it to its owner alone. Raises HotsplitError if there is no room."""
    path.touch()
    rights = path.stat().st_mode & 0o777
    try:
        save_file(tensors, path, {"format": "pt"})
    except SafetensorError as error:
        raise no_room(path, " ".join(str(error).split())[:120]) from error
    path.chmod(rights)


def _tensor(checkpoint: Checkpoint, name: str, matrices: Mapping[str, Tensor]) -> Tensor:
    found = matrices.get(name)
    if found is None:
        return checkpoint.read(name).clone()
    assert tuple(found.shape) == tuple(checkpoint.tensors[name].shape), name
    return found.to(torch.float32).contiguous()
