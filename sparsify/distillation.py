"""The training loss: KL(dense || sparse), between the predictions of the dense model and those of
the model in training.

The vocabulary is large (49,152 tokens for a width of 576 in SmolLM2-135M: a token's logits are 85
times as large as its hidden state), so logits exist only for a few tokens at a time: the forward
pass also computes the gradient with respect to the hidden state, as in Liger-Kernel's fused linear
losses.

Letters: T tokens, D model width, V vocabulary."""

from typing import Any

import torch
from torch import Tensor

CHUNK_VALUES = 1 << 21  # logits at a time: 8 MiB in f32, so that the passes stay in the cache


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sparse_TD: Tensor, dense_TD: Tensor, head_VD: Tensor) -> Tensor:
        kl_T = sparse_TD.new_empty(len(sparse_TD), dtype=torch.float32)
        gradient_TD = torch.empty_like(sparse_TD)
        for start, stop in chunks(len(sparse_TD), len(head_VD)):
            sparse_TV = log_words(sparse_TD[start:stop], head_VD)
            dense_TV = log_words(dense_TD[start:stop], head_VD)
            kl_T[start:stop], dense_TV = _kl(sparse_TV, dense_TV)
            error_TV = sparse_TV.exp_().sub_(dense_TV)
            gradient_TD[start:stop] = error_TV.to(head_VD.dtype) @ head_VD
        ctx.save_for_backward(gradient_TD)
        return kl_T

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient_TD,) = ctx.saved_tensors
        return gradient_TD * gradients[0][:, None].to(gradient_TD.dtype), None, None


def divergence(sparse_TD: Tensor, dense_TD: Tensor, head_VD: Tensor) -> Tensor:
    """f32 [T]: sum over the vocabulary of p_dense (log p_dense - log p_sparse), in nats, from the
    final hidden states. Products are computed in the type of `head_VD`; only `sparse_TD` gets a
    gradient."""
    with torch.autocast(sparse_TD.device.type, enabled=False):
        return _Divergence.apply(sparse_TD, dense_TD, head_VD)


def divergence_ref(sparse_TV: Tensor, dense_TV: Tensor) -> Tensor:
    """The definition, in float64 from whole logits."""
    dense_TV = dense_TV.double().log_softmax(dim=-1)
    return (dense_TV.exp() * (dense_TV - sparse_TV.double().log_softmax(dim=-1))).sum(dim=-1)


def chunks(num_tokens: int, num_words: int) -> list[tuple[int, int]]:
    size = max(1, CHUNK_VALUES // num_words)
    return [(a, min(num_tokens, a + size)) for a in range(0, num_tokens, size)]


def log_words(hidden_TD: Tensor, head_VD: Tensor) -> Tensor:
    """f32 [T, V]: log probabilities."""
    return (hidden_TD.to(head_VD.dtype) @ head_VD.T).float().log_softmax(dim=-1)


def _kl(sparse_TV: Tensor, dense_TV: Tensor) -> tuple[Tensor, Tensor]:
    """KL of each token, and p_dense; works in place, on log probabilities."""
    difference_TV = dense_TV - sparse_TV
    words_TV = dense_TV.exp_()
    return difference_TV.mul_(words_TV).sum(dim=-1), words_TV
