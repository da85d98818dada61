"""The importances of each matrix of a model, from an importance matrix.

Letters: E matrices of a tensor, M values of a row."""

import re
from collections.abc import Mapping

import numpy as np

from hotsplit.artifacts.importance_file import Importances
from hotsplit.errors import HotsplitError
from hotsplit.files.gguf_file import TensorEntry
from hotsplit.files.typed import shown
from hotsplit.model.tensors import is_router

# A matrix that others hold together with its neighbours, which have the same inputs.
TOGETHER = (
    (re.compile(r"attn_[qkv]\.weight$"), "attn_qkv.weight"),
    (re.compile(r"ffn_(gate|up)_exps\.weight$"), "ffn_gate_up_exps.weight"),
)


def mean_squares(
    importances: Importances | None, name: str, shape: tuple[int, ...]
) -> np.ndarray | None:
    """f32 [E, M] of a matrix by its name in the stock layout, times the power of two by which none
    is over 1, so that no sum overflows; None if the file has none of it. Those of a down projection
    of the sparse layout, whose rows are neurons, would be the same for all of a row: there are
    none, as for vectors. Raises HotsplitError if the model's matrix has other sizes."""
    if importances is None or len(shape) < 2:
        return None
    found = next((n for n in _names(name) if n in importances.tensors), None)
    if found is None:
        return None
    mean = importances.tensors[found].mean(shape)
    if mean is None:
        raise HotsplitError(
            f"{importances.path}: {importances.tensors[found].squares.size} importances of"
            f" {shown(found)}, of which the model has {list(shape)}; it is of another model"
        )
    _, exponent = np.frexp(mean.max())
    return np.ldexp(mean, -exponent)


def _names(name: str) -> list[str]:
    return [name, *(each.sub(other, name) for each, other in TOGETHER if each.search(name))]


def check_and_note(
    importances: Importances | None, tensors: Mapping[str, TensorEntry]
) -> tuple[str, ...]:
    """A note, if there are any, on matrices of layers without importances. Raises HotsplitError for
    a layer or a matrix that the model lacks."""
    if importances is None:
        return ()
    layers = {_layer(name) for name in tensors}
    foreign = [name for name in importances.tensors if _layer(name) not in layers]
    matrices = {
        name
        for name, entry in tensors.items()
        if name.startswith("blk.")
        and len(entry.shape) > 1
        and name.endswith(".weight")
        and not is_router(name)
    }
    bare = [n for n in sorted(matrices) if not any(m in importances.tensors for m in _names(n))]
    if foreign or len(bare) == len(matrices):
        what = (
            f"has {shown(foreign[0])}, which the model lacks"
            if foreign
            else "has none of its matrices"
        )
        raise HotsplitError(f"{importances.path}: {what}: it is of another model")
    if not bare:
        return ()
    note = (
        f"{len(bare)} of {len(matrices)} matrices of the layers have no importances:"
        f" {', '.join(bare[:3])}{', ...' if bare[3:] else ''}"
    )
    return (note,)


def _layer(name: str) -> str:
    """blk.N of a tensor in a layer; of others nothing, since every model may have them."""
    found = re.match(r"blk\.\d+\.", name)
    return found[0] if found else ""
