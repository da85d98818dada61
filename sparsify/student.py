"""The model in training: a transformers model whose feed-forward layers have trained matrices next to
the dense ones, and limits.

Neuron j is silent for a token if |act(gate_j x)| <= limit_j. Under the rule "threshold" the
activation stays; under the others it changes gradually to ReLU (`blend`): relu has limits of 0,
fatrelu (ProSparse, arXiv 2402.13516) one limit for all neurons, and drelu (TurboSparse, arXiv
2406.05955) applies ReLU to up as well. Attention, norms and embeddings are shared by the model in
training and its dense self, so one module serves both: `is_dense` selects between them. Limits are
set by sparsify.limits; the loss is in sparsify.distillation.

Letters: L layers, B windows, T tokens, D model width, F neurons, R rank of an update."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hotsplit.errors import HotsplitError
from hotsplit.sparsify.config import Precision, Rule

MATRICES = ("gate_proj", "up_proj", "down_proj")
Watch = Callable[[int, Tensor, Tensor, Tensor], None]


def silence(value_TF: Tensor, limit_F: Tensor) -> Tensor:
    """The values, with 0 for magnitudes at or below their neuron's limit; NaN stays."""
    return torch.where(value_TF.abs() <= limit_F.to(value_TF.dtype), 0.0, value_TF)


class Update(nn.Module):
    """A matrix and its trained low-rank update: x (W + up down)^T; the update starts at zero.

    `weight` is the dense matrix in the dtype of the products, shared with the dense model."""

    def __init__(self, linear: nn.Linear, weight: Tensor, rank: int, start: Tensor) -> None:
        super().__init__()
        num_out, num_in = weight.shape
        assert start.shape == (rank, num_in), (start.shape, rank, num_in)
        self.weight, self.bias = weight, linear.bias
        self.down_RD = nn.Parameter(start.to(weight.device) / num_in**0.5)
        self.up_FR = nn.Parameter(torch.zeros(num_out, rank, device=weight.device))

    def forward(self, x_TD: Tensor) -> Tensor:
        y_TF = F.linear(x_TD, self.weight, self.bias)
        return y_TF + F.linear(F.linear(x_TD, self.down_RD), self.up_FR)

    def change(self) -> Tensor:
        """f32: the update as a matrix."""
        return self.up_FR.detach() @ self.down_RD.detach()


class FeedForward(nn.Module):
    """Replaces a layer's `mlp`; its matrices keep their names.

    `dense` has the dense model's weights in the dtype of the products, in the order of MATRICES."""

    def __init__(self, mlp: nn.Module, layer: int, rule: Rule, dtype: torch.dtype) -> None:
        super().__init__()
        parts: Any = mlp
        self.gate_proj: nn.Linear | Update = parts.gate_proj
        self.up_proj: nn.Linear | Update = parts.up_proj
        self.down_proj: nn.Linear | Update = parts.down_proj
        self.act_fn: Callable[[Tensor], Tensor] = parts.act_fn
        self.layer, self.rule, self.is_dense = layer, rule, False
        self.blend = 0.0  # 0: the model's own activation; 1: ReLU
        self.dense = tuple(getattr(mlp, name).weight.detach().to(dtype, copy=True)
                           for name in MATRICES)  # fmt: skip
        device = self.dense[0].device
        self.limit_F = torch.zeros(self.dense[0].shape[0], device=device)
        self.watch: Watch | None = None
        self.keeps_values, self.value = False, torch.empty(0)  # act(gate), in `keeping_values`
        self.differences: list[Tensor] | None = None  # of the outputs, inside `differences`
        self.dense_output = torch.empty(0)

    def forward(self, x_TD: Tensor) -> Tensor:
        if self.is_dense:
            dense_TD = self._dense(x_TD)
            if self.differences is not None:
                self.dense_output = dense_TD
            return dense_TD
        gate_TF, up_TF = self.gate_proj(x_TD), self.up_proj(x_TD)
        value_TF = self.act_fn(gate_TF)
        if self.rule != "threshold":
            value_TF = torch.lerp(value_TF, F.relu(gate_TF), self.blend)
        if self.keeps_values:
            self.value = value_TF
        if self.watch is not None:
            self.watch(self.layer, value_TF.detach(), up_TF.detach(), x_TD.detach())
        if self.rule == "drelu":
            up_TF = torch.lerp(up_TF, F.relu(up_TF), self.blend)
        y_TD: Tensor = self.down_proj(silence(value_TF, self.limit_F) * up_TF)
        if self.differences is not None:
            want_TD = self.dense_output.float()
            error = (y_TD.float() - want_TD).square().mean() / want_TD.square().mean()
            self.differences.append(error)
        return y_TD

    def _dense(self, x_TD: Tensor) -> Tensor:
        gate_FD, up_FD, down_DF = self.dense
        gate_TF = F.linear(x_TD, gate_FD, self.gate_proj.bias)
        up_TF = F.linear(x_TD, up_FD, self.up_proj.bias)
        return F.linear(self.act_fn(gate_TF) * up_TF, down_DF, self.down_proj.bias)


def install(model: nn.Module, rule: Rule, dtype: torch.dtype) -> list[FeedForward]:
    """Puts a FeedForward into every layer of a transformers model; nothing is trained yet.

    Raises HotsplitError for a layer that is not down(act(gate) * up)."""
    model.requires_grad_(False)
    found = []
    for index, layer in enumerate(decoder_of(model).layers):
        mlp: Any = getattr(layer, "mlp", None)
        parts = [getattr(mlp, name, None) for name in MATRICES]
        if not all(isinstance(part, nn.Linear) for part in parts) or not hasattr(mlp, "act_fn"):
            raise HotsplitError(
                f"{type(model).__name__}: layer {index} has no gate, up and down projections of its"
                " own; wanted a model with layers as Llama's"
            )
        layer.mlp = FeedForward(mlp, index, rule, dtype)
        found.append(layer.mlp)
    return found


def decoder_of(model: Any) -> Any:
    """A transformers model without its output head: embedding, layers and final norm."""
    return model.get_decoder()


def make_trainable(
    layers: Sequence[FeedForward], rank: int | None, seed: int
) -> dict[str, nn.Parameter]:
    """The trained f32 parameters by name: the three matrices of every layer, or their updates."""
    generator = torch.Generator().manual_seed(seed)
    found: dict[str, nn.Parameter] = {}
    for layer in layers:
        for name, weight in zip(MATRICES, layer.dense, strict=True):
            linear, place = getattr(layer, name), f"{layer.layer}.{name}"
            if rank is None:
                linear.weight = nn.Parameter(linear.weight.detach().float())
                found[f"{place}.weight"] = linear.weight
                continue
            start = torch.randn(rank, weight.shape[1], generator=generator)
            update = Update(linear, weight, rank, start)
            setattr(layer, name, update)
            found[f"{place}.down"], found[f"{place}.up"] = update.down_RD, update.up_FR
    return found


def whole_matrices(
    layers: Sequence[FeedForward], source: Callable[[str], Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yields (name in the checkpoint, f32 matrix on the CPU) of everything trained; `source`
    returns the dense matrix of a name, to which updates are added."""
    for layer in layers:
        for part_name in MATRICES:
            part, name = getattr(layer, part_name), checkpoint_name(layer.layer, part_name)
            if isinstance(part, Update):
                yield name, source(name).float() + part.change().cpu()
            else:
                yield name, part.weight.detach().float().cpu()


def matrix_names(layers: Sequence[FeedForward]) -> list[str]:
    """The names of all trained matrices in the checkpoint."""
    return [checkpoint_name(layer.layer, name) for layer in layers for name in MATRICES]


@torch.no_grad()
def put_matrices(layers: Sequence[FeedForward], matrices: Mapping[str, Tensor]) -> None:
    """Overwrites the trained matrices; the dense ones stay."""
    for layer in layers:
        for name in MATRICES:
            getattr(layer, name).weight.copy_(matrices[checkpoint_name(layer.layer, name)])


def checkpoint_name(layer: int, matrix: str) -> str:
    return f"model.layers.{layer}.mlp.{matrix}.weight"


@contextmanager
def _having(layers: Sequence[FeedForward], **values: object) -> Iterator[None]:
    """Inside the block, the layers have these attributes; after it, those that they had before."""
    before = [{name: getattr(layer, name) for name in values} for layer in layers]

    def put(values_of_layers: Sequence[Mapping[str, object]]) -> None:
        for layer, given in zip(layers, values_of_layers, strict=True):
            for name, value in given.items():
                setattr(layer, name, value)

    put([values] * len(layers))
    try:
        yield
    finally:
        put(before)


def dense(layers: Sequence[FeedForward]) -> AbstractContextManager[None]:
    """Inside the block, the model is its dense self."""
    return _having(layers, is_dense=True)


def watched(layers: Sequence[FeedForward], watch: Watch | None) -> AbstractContextManager[None]:
    """Inside the block, `watch`, if there is one, gets (layer, act(gate), up, the layer's input) of
    every token."""
    return _having(layers, watch=watch)


def keeping_values(layers: Sequence[FeedForward]) -> AbstractContextManager[None]:
    """Inside the block, each layer keeps the activated gates of its last pass in `value`, with
    their graph for autograd."""
    return _having(layers, keeps_values=True, value=torch.empty(0))


def differences(
    layers: Sequence[FeedForward], errors: list[Tensor]
) -> AbstractContextManager[None]:
    """Inside the block, each layer appends the relative squared error of its output, with its graph
    for autograd, to `errors`; the dense model has to run over the same tokens first."""
    return _having(layers, differences=errors, dense_output=torch.empty(0))


@dataclass(frozen=True, kw_only=True)
class Student:
    """`dtype` is that of matrix products; trained matrices and the residual stream are f32."""

    model: nn.Module
    layers: list[FeedForward]
    head_VD: Tensor
    dtype: torch.dtype

    @property
    def device(self) -> torch.device:
        return self.head_VD.device

    def hidden_states(self, ids_BT: Tensor) -> Tensor:
        """[B, T, D]: the input of the output head."""
        is_bf16 = self.dtype == torch.bfloat16
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=is_bf16):
            outputs = decoder_of(self.model)(input_ids=ids_BT.to(self.device), use_cache=False)
        found: Tensor = outputs.last_hidden_state
        return found


def load_student(folder: Path, rule: Rule, dtype: torch.dtype, device: str) -> Student:
    """Loads a checkpoint folder. Frozen matrices, and biases outside the feed-forward layers, are
    in `dtype`; everything else is f32.

    Raises HotsplitError for weights that are not finite, and for a model that `install`
    refuses."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa", local_files_only=True
    )
    for name, parameter in model.named_parameters():
        if not parameter.isfinite().all():
            raise HotsplitError(
                f"{folder}: {name} has values that are NaN or infinite; get the model again"
            )
    model = model.to(device).eval()
    layers = install(model, rule, dtype)
    _freeze(model, layers, dtype)
    head = model.get_output_embeddings().weight
    return Student(model=model, layers=layers, head_VD=head.detach(), dtype=dtype)


def _freeze(model: nn.Module, layers: Sequence[FeedForward], dtype: torch.dtype) -> None:
    """Converts the embedding, and matrices and biases outside the feed-forward layers, to `dtype`;
    the residual stream stays f32."""
    if dtype == torch.float32:
        return
    ours = {id(part) for layer in layers for part in layer.modules()}
    for module in model.modules():
        if isinstance(module, nn.Linear) and id(module) not in ours:
            module.to(dtype)
    embedding = decoder_of(model).get_input_embeddings()
    embedding.to(dtype)
    embedding.register_forward_hook(lambda module, ids, found: found.float())


def dtype_of(precision: Precision, device: str) -> torch.dtype:
    """The type of matrix products; "auto" is bf16 if the device supports it (a CPU does if it has
    AVX512-BF16), else f32."""
    if precision != "auto":
        return torch.bfloat16 if precision == "bf16" else torch.float32
    if device.startswith("cuda"):
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    return torch.bfloat16 if torch.cpu._is_avx512_bf16_supported() else torch.float32
