"""A Hugging Face checkpoint folder: its config, and its tensors one at a time.

The weights are read from safetensors files, or from torch's pickles (.bin) if there are none: one
file, or shards with an index."""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from hotsplit.artifacts.model_gguf import compute_model_id, sample_bytes
from hotsplit.convert.encode import encode
from hotsplit.convert.packed_checkpoint import logical
from hotsplit.convert.packed_matrix import Rows
from hotsplit.convert.weight_files import SourceTensor, read_safetensors, read_state_dict
from hotsplit.errors import HotsplitError
from hotsplit.files.json_file import read_object
from hotsplit.model.weight_types import FLOAT_NAMES

Reader = Callable[[Path], dict[str, SourceTensor]]
# The first one present is read, in transformers' order.
WEIGHTS: dict[str, Reader] = {
    "model.safetensors": read_safetensors,
    "model.safetensors.index.json": read_safetensors,
    "pytorch_model.bin": read_state_dict,
    "pytorch_model.bin.index.json": read_state_dict,
}
MAX_NAME = 256  # of a tensor, in characters; errors quote it
# Parts of names of tensors that are not read, whatever their type: the head of centroids of Gemma
# 4's assistants has integers, and so do the hashes of n-grams.
_UNREAD = re.compile(r"^masked_embedding\.|\.ple_embedding\.(layer_multipliers|ngram_heads_\w+)$")
DTYPES = ("F32", "F16", "BF16")


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """`tensors` are as if nothing were packed, `stored` those of the files if something is.
    `fates`: how many tensors with a packing are written in which way. `rounded`: packed tensors of
    which a number was rounded so far, with the type written."""

    folder: Path
    config: Mapping[str, object]
    tensors: Mapping[str, SourceTensor]
    stored: "Checkpoint | None" = None
    fates: Counter[tuple[str, str]] = field(default_factory=Counter, repr=False, compare=False)
    rounded: dict[str, str] = field(default_factory=dict, repr=False, compare=False)
    _mapped: WeakValueDictionary[str, Tensor] = field(
        default_factory=WeakValueDictionary, repr=False, compare=False
    )
    _lock: Lock = field(default_factory=Lock, repr=False, compare=False)
    _last: list[Tensor] = field(default_factory=list, repr=False, compare=False)

    @classmethod
    def open(cls, folder: Path) -> "Checkpoint":
        """Reads the config and every file's header, but no weights. Raises HotsplitError for a
        missing, truncated or inconsistent file, for weights of a type that is not in DTYPES and
        not packed in a known way, and for a name longer than MAX_NAME."""
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
        found = cls(folder=folder, config=config, tensors=_open_weights(folder))
        for name, tensor in found.tensors.items():
            if len(name) > MAX_NAME:
                raise HotsplitError(
                    f"{tensor.file}: the name {name[:60]!r}... is too long; wanted at most"
                    f" {MAX_NAME} characters"
                )
        own, tensors = logical(folder, config, found.tensors, found.read)
        for name, tensor in tensors.items():
            is_known = tensor.dtype in DTYPES or tensor.packed is not None
            if not is_known and not _UNREAD.search(name):
                raise HotsplitError(
                    f"{tensor.file}: tensor {name!r} is {tensor.dtype}, wanted one of"
                    f" {', '.join(DTYPES)}; convert the checkpoint that it was made from"
                )
        if own is config:
            return found
        return cls(folder=folder, config=own, tensors=tensors, stored=found)

    @property
    def max_rows(self) -> int:
        """The size of the largest dimension of any tensor."""
        return max((size for tensor in self.tensors.values() for size in tensor.shape), default=0)

    def read(self, name: str) -> Tensor:
        """The stored weights, a view of the mapped file if possible. A safetensors file is mapped
        as long as the view exists. While a caller holds the tensor, others get the same one, in any
        thread: each further mapping would count as more memory of this process. The last packed one
        is held here, since its pieces would unpack it again."""
        with self._lock:
            tensor = self._mapped.get(name)
            if tensor is None:
                tensor = self._mapped[name] = self.tensors[name].read()
            if self.tensors[name].packed is not None:
                self._last[:] = [tensor]
            return tensor

    def packed_rows(
        self,
        name: str,
        kind: str,
        rows: Rows,
        *,
        columns: np.ndarray | None = None,
        expert: int | None = None,
        importance: np.ndarray | None = None,
    ) -> np.ndarray:
        """Rows of a packed tensor in type `kind`: its own bits if that is the type that holds it,
        else its values encoded; see encode."""
        packed = self.tensors[name].packed
        assert packed is not None, name
        if kind == packed.kind_in(columns) and kind not in FLOAT_NAMES:
            encoded, is_exact = packed.blocks(kind, rows, columns, expert)
        else:
            values, is_exact = packed.values(rows, expert)
            values = values if columns is None else values[:, torch.from_numpy(columns)]
            encoded = encode(values, kind, packed.label, importance=importance)
        if kind in packed.kinds and not is_exact:
            self.rounded[name] = kind
        return encoded

    def is_bias_of_packing(self, name: str) -> bool:
        """True for zeros that AutoGPTQ saves beside every packed matrix, whether its layer has a
        bias or not."""
        weight = self.tensors.get(f"{name.removesuffix('.bias')}.weight")
        is_beside = name.endswith(".bias") and weight is not None and weight.packed is not None
        return is_beside and not bool(self.read(name).any())

    def packing_notes(self) -> list[str]:
        """What was found and what becomes of it, a line for each packing."""
        lines: dict[str, list[str]] = {}
        for (packing, fate), count in self.fates.items():
            lines.setdefault(packing, []).append(f"{count} tensors {fate}")
        return [f"packed weights, {packing}: {', '.join(x)}" for packing, x in lines.items()]

    def rounding_notes(self) -> list[str]:
        """The types whose bits were to hold what is packed but round it, once all is written."""
        lost = {
            True: "scales are no powers of two, so that values are rounded, by at most 1 in 256",
            False: "scales that are no f16 numbers are rounded, by at most 1 in 2,048 (below 6e-5:"
            " by at most 3e-8)",
        }
        names: dict[bool, list[str]] = {}
        for name, kind in self.rounded.items():
            names.setdefault(kind in FLOAT_NAMES, []).append(name)
        return [
            f"{len(each)} packed tensors, such as {each[0]}: {lost[is_float]}"
            for is_float, each in names.items()
        ]

    def model_id(self) -> str:
        """See model_gguf.compute_model_id. Kind and number of weight files do not matter."""
        stored = self.stored or self
        return compute_model_id(stored.config, stored._samples())

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
