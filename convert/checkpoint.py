"""A Hugging Face checkpoint folder: its config, and its tensors one at a time.

The weights are read from safetensors files, or from torch's pickles (.bin) if there are none: one
file, or shards with an index."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from hotsplit.artifacts.model_gguf import compute_model_id, sample_bytes
from hotsplit.convert.weight_files import SourceTensor, read_safetensors, read_state_dict
from hotsplit.errors import HotsplitError
from hotsplit.files.json_file import read_object

Reader = Callable[[Path], dict[str, SourceTensor]]
# The first one present is read, in transformers' order.
WEIGHTS: dict[str, Reader] = {
    "model.safetensors": read_safetensors,
    "model.safetensors.index.json": read_safetensors,
    "pytorch_model.bin": read_state_dict,
    "pytorch_model.bin.index.json": read_state_dict,
}
MAX_NAME = 256  # of a tensor, in characters; errors quote it
DTYPES = ("F32", "F16", "BF16")
PACKED = ("_proj_blocks", "_proj_scales")  # experts in MXFP4


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
        """Reads the config and every file's header, but no weights. Raises HotsplitError for a
        missing, truncated or inconsistent file, for weights of a type that is not in DTYPES, and
        for a name longer than MAX_NAME."""
        if not folder.is_dir():
            raise HotsplitError(
                f"{folder}: no such folder; wanted a checkpoint folder, a model file (.gguf) or"
                " the name of a model on the Hugging Face hub (org/name)"
            )
        models = sorted(file.name for file in folder.glob("*.gguf"))
        if models and not (folder / "config.json").exists():
            raise HotsplitError(
                f"{folder}: no checkpoint (config.json), but GGUF files; name one of them, e.g."
                f" {folder / models[0]}"
            )
        if not (folder / "config.json").exists():
            raise HotsplitError(
                f"{folder}: is a folder without config.json; wanted a checkpoint folder or a model"
                " file (.gguf)"
            )
        config = read_object(folder / "config.json", "checkpoint's config.json")
        tensors = _open_weights(folder)
        for name, tensor in tensors.items():
            if len(name) > MAX_NAME:
                raise HotsplitError(
                    f"{tensor.file}: the name {name[:60]!r}... is too long; wanted at most"
                    f" {MAX_NAME} characters"
                )
            is_packed = tensor.dtype == "U8" and name.endswith(PACKED)
            if tensor.dtype not in DTYPES and not is_packed:
                raise HotsplitError(
                    f"{tensor.file}: tensor {name!r} is {tensor.dtype}, wanted one of"
                    f" {', '.join(DTYPES)}; convert the checkpoint that it was made from"
                )
        return cls(folder=folder, config=config, tensors=tensors)

    @property
    def max_rows(self) -> int:
        """The size of the largest dimension of any tensor."""
        return max((size for tensor in self.tensors.values() for size in tensor.shape), default=0)

    def read(self, name: str) -> Tensor:
        """The stored weights, a view of the mapped file if possible. A safetensors file is mapped
        as long as the view exists. While a caller holds the tensor, others get the same one, in any
        thread: each further mapping would count as more memory of this process."""
        with self._lock:
            tensor = self._mapped.get(name)
            if tensor is None:
                tensor = self._mapped[name] = self.tensors[name].read()
            return tensor

    def model_id(self) -> str:
        """See model_gguf.compute_model_id. Kind and number of weight files do not matter."""
        return compute_model_id(self.config, self._samples())

    def _samples(self) -> Iterator[tuple[str, tuple[int, ...], bytes]]:
        """(name, shape, sampled bytes) of each tensor. Tied weights, which only a pickle stores
        under two names, are sampled under the last one: the embedding's, because save_pretrained
        leaves `lm_head` out of safetensors."""
        for name, tensor in self.tensors.items():
            if tensor.same_as is None:
                raw = self.read(name).reshape(-1).view(torch.uint8).numpy()
                yield name, tensor.shape, sample_bytes(raw)


def _open_weights(folder: Path) -> dict[str, SourceTensor]:
    for name, read in WEIGHTS.items():
        if (folder / name).is_file():
            is_index = name.endswith(".index.json")
            return _sharded(folder / name, read) if is_index else read(folder / name)
    raise HotsplitError(
        f"{folder}: none of {', '.join(WEIGHTS)}; download the checkpoint again"
        " or save it with save_pretrained of transformers"
    )


def _sharded(path: Path, read: Reader) -> dict[str, SourceTensor]:
    """All tensors of all shards; they must be exactly those listed in the index."""
    index = read_object(path, "list of shards").get("weight_map")
    if not isinstance(index, dict) or not all(isinstance(v, str) for v in index.values()):
        raise HotsplitError(f"{path}: no 'weight_map' of names to files; download it again")
    shards = {name: path.parent / name for name in sorted(set(index.values()))}
    for name, shard in shards.items():
        # With a \0 or more than 255 bytes, the operating system's calls fail.
        is_name = Path(name).name == name and "\0" not in name and len(name.encode()) < 256
        if not is_name or not shard.is_file():
            raise HotsplitError(
                f"{path}: names the file {name[:100]!r}, but there is no such file; download it"
                " again"
            )
    headers = {name: read(shard) for name, shard in shards.items()}
    listed = set(index.items())
    found = {(name, shard) for shard, header in headers.items() for name in header}
    if listed != found:
        name, shard = min(listed ^ found)
        where = ("index", "shard") if (name, shard) in listed else ("shard", "index")
        raise HotsplitError(
            f"{path}: tensor {name[:MAX_NAME]!r} is in the {where[0]} but not in the {where[1]}"
            f" ({shard[:MAX_NAME]}); download both again"
        )
    return {name: tensor for header in headers.values() for name, tensor in header.items()}
