"""The model in training: a transformers model with FeedForward in place of its feed-forward
layers."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from hotsplit.errors import HotsplitError
from hotsplit.sparsify.config import Precision, Rule
from hotsplit.sparsify.feed_forward import FeedForward, decoder_of, install


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
    _check_finite(folder, model)
    model = model.to(device).eval()
    layers = install(model, rule, dtype)
    _freeze(model, layers, dtype)
    head = model.get_output_embeddings().weight
    return Student(model=model, layers=layers, head_VD=head.detach(), dtype=dtype)


def _check_finite(folder: Path, model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if not parameter.isfinite().all():
            raise HotsplitError(
                f"{folder}: {name} has values that are NaN or infinite; get the model again"
            )


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
