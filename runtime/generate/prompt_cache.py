"""Saves the state of a text to a file: its tokens, the keys and values of every layer that attends,
the recurrent states of every other layer, after the last token and at positions that were saved,
and what a draft block keeps that has seen the text.

A text with the same prefix then need not compute it again. The state depends on the model, the
mode, the arithmetic of the processor and the plan; a file made under other conditions is refused,
because its numbers may differ from those computed here."""

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.errors import HotsplitError, about
from hotsplit.files.declared import read_declared
from hotsplit.files.safetensors_file import load_arrays, save_arrays
from hotsplit.runtime.step.draft_step import DraftState
from hotsplit.runtime.step.sequences import Sequence, TextState

FORMAT, VERSION = "hotsplit.prompt", 1
MAX_HEADER_BYTES = 1 << 20  # of a file, searched for the format's name
# Names of the tensors of a layer, with the number of the layer among those of its kind; a state may
# have fewer.
_ATTENDS, _RECURS = ("key", "value"), ("state", "conv")
_DRAFT = {"draft_key": "key_TKX", "draft_value": "value_TKX", "draft_hidden": "hidden_WD"}
_POSITIONS = "positions"  # numbers of tokens after which the recurrent states are
SHOWN_DIGITS, MAX_SHOWN = 12, 120  # characters of digests and of other values in errors


@dataclass(frozen=True, kw_only=True)
class PromptKey:
    """The conditions under which a state was computed; a restored state must have the same ones.
    `arithmetic`: the kernels' level, or "torch".

    The key leaves out what changes with every token (the swaps of a neuron cache) and, on a GPU,
    how much memory a pass has; both affect the rounding there."""

    model_id: str
    weights: str  # weights_digest of the model
    mode: str
    arithmetic: str
    vocab_size: int
    cache: str  # storage types of keys and values
    thresholds: tuple[float, ...] = ()
    rope_scaling: str = ""  # in words: the user's, or else the model's own
    activation: str
    predictors: str  # predictor_words of the model; "" unless the mode is predicted
    placement: str  # Placement.words


@dataclass(frozen=True, kw_only=True)
class _PromptHeader(PromptKey):
    """The metadata of the file."""

    sha256: str


def weights_digest(model: ModelFile) -> str:
    """Digest of all tensors' names, types and shapes, and of their first rows.
    (Files made from one checkpoint share their model_id even if types differ.)"""
    digest = hashlib.sha256()
    for name in sorted(model.tensors):
        entry = model.tensors[name]
        digest.update(f"{name} {entry.kind} {entry.shape};".encode())
        digest.update(np.ascontiguousarray(entry.read()[:1]).tobytes())
    return digest.hexdigest()


def predictor_words(model: ModelFile) -> str:
    """The predictors' arithmetic besides their weights: form, input layer and thresholds."""
    info = model.predictor
    assert info is not None
    thresholds = ", ".join(f"{threshold:.9g}" for threshold in info.threshold_L)
    return f"{info.kind}, offset {info.input_layer_offset}, thresholds {thresholds}"


def save_prompt(sequence: Sequence, path: Path, key: PromptKey) -> None:
    """Writes the state of a sequence atomically."""
    if not sequence.length:
        raise HotsplitError(f"{path}: not written: the text has no tokens yet")
    arrays = {"ids": np.asarray(sequence.ids, dtype=np.int64)}
    state = sequence.read_state()
    for names, layers in ((_ATTENDS, state.keys_values), (_RECURS, state.recurrent)):
        for number, layer in enumerate(layers):
            for name, tensor in zip(names, layer, strict=False):
                arrays[f"{name}.{number}"] = tensor.cpu().numpy()
    if state.draft is not None:
        arrays |= {name: getattr(state.draft, field).numpy() for name, field in _DRAFT.items()}
    if state.recurrent:
        arrays[_POSITIONS] = np.asarray(state.positions, dtype=np.int64)
    metadata = {**asdict(key), "sha256": _digest(arrays)}
    save_arrays(path, FORMAT, VERSION, metadata, arrays)


def is_prompt(path: Path) -> bool:
    """True if the file's header names our format, even if the rest is damaged; callers overwrite no
    other file."""
    try:
        with path.open("rb") as file:
            return f'"format":"{FORMAT}"'.encode() in file.read(MAX_HEADER_BYTES)[8:]
    except OSError:
        return False


def restore_prompt(sequence: Sequence, path: Path, key: PromptKey) -> int:
    """Loads a state into an empty sequence; returns its number of tokens.

    Raises HotsplitError for a damaged file, for one made with another key, and for a state that
    does not fit into the context."""
    metadata, arrays = load_arrays(path, FORMAT, VERSION)
    with about(path, "; make it again"):
        header = read_declared(_PromptHeader, metadata)
    _check_key(path, header, key)
    if header.sha256 != _digest(arrays):
        raise HotsplitError(
            f"{path}: damaged, its content does not match its checksum; make it again"
        )
    stored, recurrent = _tensors(arrays, _ATTENDS), _tensors(arrays, _RECURS)
    lists = ["ids", *([_POSITIONS] if recurrent else [])]
    keys_values = [(layer[0], layer[1]) for layer in stored if len(layer) == 2]
    own = {
        field: torch.from_numpy(arrays[name]) for name, field in _DRAFT.items() if name in arrays
    }
    draft = DraftState(**own) if len(own) == len(_DRAFT) else None
    num_tensors = 2 * len(keys_values) + sum(map(len, recurrent)) + len(_DRAFT) * bool(draft)
    if len(arrays) != len(lists) + num_tensors or not all(
        name in arrays and arrays[name].dtype == np.int64 and arrays[name].ndim == 1
        for name in lists
    ):
        raise HotsplitError(f"{path}: its tensors are not those of a prompt's state; make it again")
    ids = arrays["ids"].tolist()
    if not all(0 <= token < key.vocab_size for token in ids):
        raise HotsplitError(f"{path}: has tokens that the model does not have; make it again")
    positions = arrays[_POSITIONS].tolist() if recurrent else []
    state = TextState(
        keys_values=keys_values, positions=positions, recurrent=recurrent, draft=draft
    )
    try:
        sequence.write_state(ids, state)
    except HotsplitError as error:
        raise HotsplitError(f"{path}: {error}") from error
    return len(ids)


def _tensors(
    arrays: Mapping[str, np.ndarray], names: tuple[str, str]
) -> list[tuple[torch.Tensor, ...]]:
    """The tensors of these names of the first, second, ... layer, as many as there are."""
    layers: list[tuple[torch.Tensor, ...]] = []
    while f"{names[0]}.{len(layers)}" in arrays:
        keys = (f"{name}.{len(layers)}" for name in names)
        layers.append(tuple(torch.from_numpy(arrays[key]) for key in keys if key in arrays))
    return layers


_OTHER = {
    "model_id": "another model",
    "weights": "other weights",
    "mode": "another mode",
    "arithmetic": "other arithmetic",
    "vocab_size": "another vocabulary",
    "cache": "another cache type",
    "thresholds": "other thresholds",
    "rope_scaling": "another rope scaling",
    "activation": "another activation",
    "predictors": "other predictors",
    "placement": "another plan or on another device",
}


def _check_key(path: Path, found: PromptKey, key: PromptKey) -> None:
    for name, wanted in vars(key).items():
        value = getattr(found, name)
        if value != wanted:
            most = SHOWN_DIGITS if name in ("model_id", "weights") else MAX_SHOWN
            shown = f"{str(value)[:most]!r}, this is {str(wanted)[:most]!r}"
            raise HotsplitError(f"{path}: made with {_OTHER[name]}: {shown}; make it again")


def _digest(arrays: Mapping[str, np.ndarray]) -> str:
    digest = hashlib.sha256()
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        digest.update(f"{name} {array.dtype} {array.shape};".encode())
        digest.update(array.data)
    return digest.hexdigest()
