"""A Hugging Face checkpoint folder: its config, and its tensors one at a time.

What this module does not know: what any key or tensor means."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from weakref import WeakValueDictionary

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sparkinfer.convert.json_file import read_object
from sparkinfer.errors import SparkinferError
from sparkinfer.model_file import compute_model_id, sample_bytes

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES = ("F32", "F16", "BF16")


@dataclass(frozen=True, kw_only=True)
class SourceTensor:
    file: Path
    shape: tuple[int, ...]
    dtype: str  # as safetensors spells it: "F32", "BF16"


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    folder: Path
    config: dict[str, object]
    tensors: dict[str, SourceTensor]
    _mapped: WeakValueDictionary[str, Tensor] = field(
        default_factory=WeakValueDictionary, repr=False, compare=False
    )
    _lock: Lock = field(default_factory=Lock, repr=False, compare=False)

    @classmethod
    def open(cls, folder: Path) -> "Checkpoint":
        """Reads the config and every file's header, no weights.

        Raises SparkinferError for a missing, truncated or inconsistent file, and for weights of
        an unknown type."""
        if not folder.is_dir():
            raise SparkinferError(
                f"{folder}: no such folder; wanted a checkpoint folder or a model file (.gguf)"
            )
        config = read_object(folder / "config.json", "checkpoint's config.json")
        tensors = _header(folder / SINGLE) if (folder / SINGLE).exists() else _sharded(folder)
        for name, tensor in tensors.items():
            if tensor.dtype not in DTYPES:
                raise SparkinferError(
                    f"{tensor.file}: tensor {name!r} is {tensor.dtype}, wanted one of"
                    f" {', '.join(DTYPES)}; convert the checkpoint that it was made from"
                )
        return cls(folder=folder, config=config, tensors=tensors)

    def read(self, name: str) -> Tensor:
        """The weights as they are stored: a view of the file, mapped while anybody holds it.

        Who holds it at the same time, in any thread, shares one mapping: columns of a large
        matrix touch all its pages."""
        path = self.tensors[name].file
        with self._lock:
            tensor = self._mapped.get(name)
            if tensor is None:
                try:
                    with safe_open(path, framework="pt") as file:
                        tensor = file.get_tensor(name)
                except (SafetensorError, OSError) as error:
                    raise _broken(path, error) from error
                self._mapped[name] = tensor
            return tensor

    def model_id(self) -> str:
        """See model_file.compute_model_id; does not depend on how the files are sharded."""
        return compute_model_id(self.config, self._samples())

    def _samples(self) -> Iterator[tuple[str, tuple[int, ...], bytes]]:
        for name, tensor in self.tensors.items():
            raw = self.read(name).reshape(-1).view(torch.uint8).numpy()
            yield name, tensor.shape, sample_bytes(raw)


def _sharded(folder: Path) -> dict[str, SourceTensor]:
    """All tensors of all shards; they must be exactly those that the index lists."""
    path = folder / INDEX
    if not path.is_file():
        pickled = any(folder.glob("pytorch_model*.bin"))
        raise SparkinferError(
            f"{folder}: no {SINGLE} and no {INDEX}"
            + ("; pickled weights (.bin) are not read" if pickled else "")
            + "; save the checkpoint as safetensors (save_pretrained of transformers does)"
        )
    index = read_object(path, "list of shards").get("weight_map")
    if not isinstance(index, dict) or not all(isinstance(v, str) for v in index.values()):
        raise SparkinferError(f"{path}: no 'weight_map' of names to files; download it again")
    shards = {name: folder / name for name in sorted(set(index.values()))}
    for name, shard in shards.items():
        if Path(name).name != name or not shard.is_file():
            raise SparkinferError(f"{shard}: no such file, but {INDEX} names it; download it again")
    headers = {name: _header(shard) for name, shard in shards.items()}
    _compare(path, index, headers)
    return {name: tensor for header in headers.values() for name, tensor in header.items()}


def _compare(path: Path, index: dict, headers: dict[str, dict[str, SourceTensor]]) -> None:
    """Raises SparkinferError where the index and the shards list different tensors."""
    listed = set(index.items())
    found = {(name, shard) for shard, header in headers.items() for name in header}
    if listed != found:
        name, shard = min(listed ^ found)
        where = ("index", "shard") if (name, shard) in listed else ("shard", "index")
        raise SparkinferError(
            f"{path}: tensor {name!r} is in the {where[0]} but not in the {where[1]} ({shard});"
            " download both again"
        )


def _header(path: Path) -> dict[str, SourceTensor]:
    """Names, shapes and types of the tensors of one file."""
    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return {
                name: SourceTensor(file=path, shape=tuple(s.get_shape()), dtype=s.get_dtype())
                for name, s in sorted(slices.items())
            }
    except (SafetensorError, OSError) as error:
        raise _broken(path, error) from error


def _broken(path: Path, error: Exception) -> SparkinferError:
    return SparkinferError(
        f"{path}: not a whole safetensors file ({error}); download or save it again"
    )
