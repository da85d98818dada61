"""Translates PowerInfer's model files to our keys and names.

The container is GGUF except for its first four bytes and three type numbers (gguf_reader). Names
and meanings are those of PowerInfer's convert.py, convert-hf-to-powerinfer-gguf.py and llama.cpp;
the activation, which the file does not state, is that of PowerInfer's graphs."""

import numpy as np

from hotsplit.errors import HotsplitError
from hotsplit.files.gguf_file import TensorEntry, Value
from hotsplit.files.typed import shown

ACTIVATIONS = {"llama": "relu", "bamboo": "drelu", "falcon": "relu", "opt": "relu"}
RENAMED = {
    "fc1.weight": "ffn_pred_down.weight",
    "fc2.weight": "ffn_pred_up.weight",
    "ffn_down_t.bias": "ffn_down.bias",
}
FIRST_POSITION = 2  # rows of OPT's learned positions that no token uses
OPT_NORM_EPSILON = 1e-5  # torch.nn.LayerNorm's; the file does not state it


def adopt(
    keys: dict[str, Value], tensors: dict[str, TensorEntry]
) -> tuple[dict[str, Value], dict[str, TensorEntry]]:
    """Keys and tensors as in a model file of the sparse layout.

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
    renamed = {_rename(name): entry for name, entry in tensors.items()}
    if name == "opt":
        renamed = _without_first_positions(renamed)
        own["opt.attention.layer_norm_epsilon"] = np.float32(OPT_NORM_EPSILON)
        own["opt.context_length"] = np.uint32(renamed["position_embd.weight"].shape[0])
    return own | _predictor_keys(renamed, threshold), renamed


def _rename(name: str) -> str:
    for old, new in RENAMED.items():
        if name.endswith("." + old):
            return name.removesuffix(old) + new
    return name


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
    """Keys for predictors in DejaVu's form: ReLU between two matrices, one threshold for logits."""
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
