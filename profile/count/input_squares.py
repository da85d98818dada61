"""Adds up, while the model runs, the squares of the inputs of every matrix of its layers, for an
importance matrix.

Letters: T tokens, E matrices of a tensor (experts; else 1), M values of a row, K experts of a
token, P = T K pairs."""

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hotsplit.artifacts.importance_file import Importance, Importances
from hotsplit.artifacts.model_file import ModelFile
from hotsplit.model.latent_experts import FROM_LATENT, TO_LATENT
from hotsplit.model.spec import Attention
from hotsplit.model.tensors import in_layout, is_vector, transposed_shape
from hotsplit.profile.corpus.corpus import WINDOW, Windows
from hotsplit.profile.count.run import Tensors

# The observed tensor that a matrix is multiplied by (see runtime.ops.observers), by the matrix's
# name; recurrent blocks say which is their last.
SEEN_AS = {
    **dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_qkv"), "attn_norm"),
    "attn_output": "attn_heads",
    **{f"ffn_{part}{of}": "ffn_norm" for part in ("gate", "up") for of in ("", "_shexp", "_exps")},
    **dict.fromkeys(("ffn_down", "ffn_down_exps"), "ffn_hidden"),
    "ffn_down_shexp": "ffn_shared_hidden",
    TO_LATENT: "ffn_norm",
    FROM_LATENT: "ffn_out",
}
OF_EXPERTS = ("ffn_norm", "ffn_latent")  # what their first matrices read


@dataclass(frozen=True, kw_only=True)
class Input:
    """One input, which several matrices may have."""

    layer: int
    seen_as: str
    num_experts: int | None  # None: not of experts
    width: int  # M

    @property
    def key(self) -> str:
        return f"{self.layer}.{self.seen_as}{'' if self.num_experts is None else '.exps'}"


class InputSquares(Tensors):
    """An observer of the inputs, and of the experts of each token."""

    def __init__(self, model: ModelFile) -> None:
        self.inputs = _inputs(model)
        self._wanted: dict[tuple[str, int], list[Input]] = {}
        for each in {each.key: each for each in self.inputs.values()}.values():
            self._wanted.setdefault((each.seen_as, each.layer), []).append(each)
        self._of_experts = {x.layer for x in self.inputs.values() if x.num_experts is not None}
        tensors = {}
        for each in self.inputs.values():
            num = each.num_experts or 1
            tensors[f"squares {each.key}"] = torch.zeros(num, each.width, dtype=torch.float64)
            tensors[f"count {each.key}"] = torch.zeros(num, dtype=torch.int64)
        super().__init__(tensors, is_sum=True)
        self._norm_TD: Tensor | None = None  # the input of a layer's experts, until they are known
        self._id_TK: Tensor | None = None

    def wants(self, name: str, layer: int | None) -> bool:
        return (name, layer) in self._wanted or (
            name == "ffn_experts" and layer in self._of_experts
        )

    def observe(self, name: str, layer: int | None, tensor: Tensor) -> None:
        assert layer is not None
        if name == "ffn_experts":
            self._id_TK = tensor
            for each in [x for seen in OF_EXPERTS for x in self._wanted.get((seen, layer), ())]:
                if each.num_experts is not None:
                    assert self._norm_TD is not None
                    norm_TKD = self._norm_TD[:, None].expand(*tensor.shape, -1)
                    self._add_pairs(each, norm_TKD, tensor)
            return
        for each in self._wanted[name, layer]:
            if each.num_experts is None:
                self._add(each, tensor.double().square().sum(dim=0, keepdim=True), len(tensor))
            elif name in OF_EXPERTS:
                self._norm_TD = tensor.clone()
            else:
                assert self._id_TK is not None
                self._add_pairs(each, tensor.unflatten(1, (self._id_TK.shape[1], -1)), self._id_TK)

    def _add_pairs(self, each: Input, value_TKM: Tensor, id_TK: Tensor) -> None:
        assert each.num_experts is not None
        id_P, square_PM = id_TK.flatten(), value_TKM.flatten(0, 1).double().square()
        sum_EM = square_PM.new_zeros(each.num_experts, each.width).index_add_(0, id_P, square_PM)
        self._add(each, sum_EM, torch.bincount(id_P, minlength=each.num_experts))

    def _add(self, each: Input, squares_EM: Tensor, count: Tensor | int) -> None:
        self.tensors[f"squares {each.key}"] += squares_EM.cpu()
        self.tensors[f"count {each.key}"] += count.cpu() if isinstance(count, Tensor) else count

    def importances(self, path: Path, arrays: dict[str, Tensor], windows: Windows) -> Importances:
        """The importance matrix of the sums in `arrays`, to be saved to `path`."""
        tensors = {
            name: Importance(
                arrays[f"squares {each.key}"].numpy().astype(np.float32).reshape(-1),
                arrays[f"count {each.key}"].numpy().astype(np.float32),
            )
            for name, each in self.inputs.items()
        }
        return Importances(
            path=path,
            tensors=tensors,
            datasets=tuple(corpus.name for corpus in windows.corpora),
            num_chunks=len(windows.ids),
            chunk_tokens=WINDOW,
        )


def _inputs(model: ModelFile) -> dict[str, Input]:
    inputs = {}
    for name, entry in model.tensors.items():
        stock = in_layout(name, "stock")
        shape = entry.shape if stock == name else transposed_shape(entry.shape)
        found = re.fullmatch(r"blk\.(\d+)\.(.+)\.weight", stock)
        if found is None:
            continue
        layer = int(found[1])
        if layer == model.spec.num_layers:  # the draft block, which no text runs
            continue
        seen_as = SEEN_AS.get(found[2]) or _seen_as(model, layer, found[2])
        neurons = model.spec.layers[layer].neurons
        if neurons.latent_size is not None and found[2] in neurons.matrices:
            seen_as = "ffn_latent"
        mixers = model.spec.layers[layer].mixers
        if found[2] == "attn_output" and not isinstance(mixers[-1], Attention):
            continue  # the heads of the mixer beside it are seen
        if seen_as is None:
            continue
        inputs[stock] = Input(
            layer=layer,
            seen_as=seen_as,
            num_experts=shape[0] if len(shape) == 3 else None,
            width=shape[-1],
        )
    return inputs


def _seen_as(model: ModelFile, layer: int, matrix: str) -> str | None:
    """The observed tensor that a matrix of a recurrent block is multiplied by."""
    block, name = model.spec.layers[layer].recurrent, f"{matrix}.weight"
    shapes = {} if block is None else block.shapes(model.spec.hidden_size)
    if block is None or name not in shapes or is_vector(name, shapes[name]):
        return None
    return "attn_heads" if matrix == block.output else "attn_norm"
