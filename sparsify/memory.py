"""Memory that training takes in one process, checked and reported before it starts."""

from dataclasses import dataclass

import torch

from hotsplit.errors import HotsplitError
from hotsplit.model.spec import ModelSpec
from hotsplit.sparsify.config import SparsifyConfig
from hotsplit.sparsify.distillation import CHUNK_VALUES
from hotsplit.system.sizes import format_bytes
from hotsplit.system.system_memory import free_memory_bytes

FREE_SHARE = 0.95
# Activations that autograd keeps per token and layer: bytes per unit of width, and values per
# neuron. For SmolLM2-135M in bf16 with 512 tokens per pass this predicts 3.44 GiB; at most 3.16 GiB
# were resident.
KEPT_WIDTHS, KEPT_NEURONS = 40, 14
PROGRAM_BYTES = 600 << 20  # Python, torch, transformers, products' own copies


@dataclass(frozen=True, kw_only=True)
class Needs:
    """Bytes by purpose."""

    frozen: int  # the matrices of attention, the embedding and the head
    dense: int  # the dense feed-forward matrices
    trained: int  # f32, with gradients, AdamW's moments, and a copy for products in bf16
    best: int  # a copy of the best state
    kept: int  # of the forward pass, for the backward pass
    logits: int

    @property
    def total(self) -> int:
        return (self.frozen + self.dense + self.trained + self.best + self.kept + self.logits
                + PROGRAM_BYTES)  # fmt: skip

    @property
    def line(self) -> str:
        return (
            f"{format_bytes(self.total)}: frozen {format_bytes(self.frozen)}, dense feed-forward"
            f" {format_bytes(self.dense)}, trained with optimizer {format_bytes(self.trained)}, best"
            f" state {format_bytes(self.best)}, a pass {format_bytes(self.kept + self.logits)},"
            f" program {format_bytes(PROGRAM_BYTES)}"
        )


def num_trained(spec: ModelSpec, config: SparsifyConfig) -> int:
    """Values that are trained: whole feed-forward matrices, or low-rank updates of them."""
    if config.rank is None:
        return 3 * spec.num_neurons * spec.hidden_size
    return 3 * config.rank * (spec.num_neurons + spec.num_layers * spec.hidden_size)


def needs_of(spec: ModelSpec, config: SparsifyConfig, dtype: torch.dtype, tied: bool) -> Needs:
    size = dtype.itemsize
    feed_forward = 3 * spec.num_neurons * spec.hidden_size
    attentions = [layer.attention for layer in spec.layers]
    heads = sum(a.query_size + a.qkv_size for a in attentions) * spec.hidden_size
    outer = (1 if tied else 2) * spec.vocab_size * spec.hidden_size
    trained = num_trained(spec, config)
    kept = spec.num_layers * KEPT_WIDTHS * spec.hidden_size
    kept += KEPT_NEURONS * size * spec.num_neurons
    return Needs(
        frozen=(heads + outer) * size,
        dense=feed_forward * size,
        # the values, gradients, two moments, and a copy in the type of the products
        trained=trained * (16 + (size if size < 4 else 0)),
        best=trained * 4,
        kept=kept * config.micro_tokens,
        logits=4 * max(CHUNK_VALUES, spec.vocab_size) * 4,
    )


def check_memory(needs: Needs, device: torch.device, processes: int) -> str:
    """A line on the memory that is needed (on the CPU by all processes of this machine, on a GPU by
    one) and free.

    Raises HotsplitError if it does not fit."""
    if device.type == "cuda":
        free, wanted, where = torch.cuda.mem_get_info(device)[0], needs.total, "of the GPU"
    else:
        free, wanted, where = free_memory_bytes(), needs.total * processes, "of memory"
    times = f"{processes} x " if wanted != needs.total else ""
    line = f"takes {times}{needs.line}; {format_bytes(free)} {where} are free"
    if wanted > FREE_SHARE * free:
        raise HotsplitError(
            f"training {line}: it does not fit; give --rank 16, a smaller --micro-tokens, or"
            " fewer processes"
        )
    return line
