"""Measures the quality of the model in training against its dense self, on held-out windows.

Letters: L layers, W windows, B windows of a pass, T tokens, D model width, F neurons,
V vocabulary."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hotsplit.profile.corpus.processes import Ranks
from hotsplit.sparsify.distillation import chunks, log_words
from hotsplit.sparsify.student import FeedForward, Student, dense, watched

SURE = 1.96  # half-width of a 95 % interval, in standard errors


@dataclass(frozen=True, kw_only=True)
class Quality:
    """How close the model is to its dense self on a text. `kl` is in nats per token; `kl_95` is the
    half-width of its 95 % interval, with windows, not tokens, as independent samples. `same_top` is
    the share of tokens with the same likeliest next token."""

    num_tokens: int
    kl: float
    kl_95: float
    perplexity: float
    dense_perplexity: float
    same_top: float
    silent_share_L: tuple[float, ...] = field(repr=False)

    @property
    def silent_share(self) -> float:
        return sum(self.silent_share_L) / len(self.silent_share_L)

    @property
    def line(self) -> str:
        return (
            f"silent {self.silent_share:.1%}, KL {self.kl:.4f} +- {self.kl_95:.4f}, perplexity"
            f" {self.perplexity:.2f} (dense {self.dense_perplexity:.2f}), same top token"
            f" {self.same_top:.1%}, {self.num_tokens:,} held-out tokens"
        )


class SilentCounter:
    """A watcher: counts how many neurons are silent in each layer."""

    def __init__(self, layers: Sequence[FeedForward]) -> None:
        self.layers = layers
        self.silent_L = torch.zeros(len(layers), dtype=torch.float64)
        self.all_L = torch.zeros(len(layers), dtype=torch.float64)

    def __call__(self, layer: int, value_TF: Tensor, up_TF: Tensor, x_TD: Tensor) -> None:
        block = self.layers[layer]
        fires_TF = value_TF.abs() > block.limit_F.to(value_TF.dtype)
        if block.rule == "drelu":
            fires_TF &= up_TF > 0
        self.silent_L[layer] += (~fires_TF).sum().double().cpu()
        self.all_L[layer] += fires_TF.numel()


@torch.no_grad()
def evaluate(student: Student, windows: Sequence[Tensor], ranks: Ranks) -> Quality:
    """Evaluates the current model; every process takes its share of the windows."""
    counter = SilentCounter(student.layers)
    rows_W = torch.zeros(len(windows), 5, dtype=torch.float64)
    for number in range(ranks.rank, len(windows), ranks.size):
        ids_T = windows[number].to(student.device)
        with watched(student.layers, counter):
            sparse_TD = student.hidden_states(ids_T[None])[0]
        with dense(student.layers):
            dense_TD = student.hidden_states(ids_T[None])[0]
        rows_W[number] = _sums(sparse_TD, dense_TD, student.head_VD, ids_T)
    rows_W = ranks.sum(rows_W)
    silent_L = ranks.sum(counter.silent_L) / ranks.sum(counter.all_L)
    tokens_W, kl_W = rows_W[:, 0], rows_W[:, 1]
    tokens, predicted = float(tokens_W.sum()), float(tokens_W.sum()) - len(windows)
    kl = float(kl_W.sum()) / tokens
    # The variance of the summed residuals; its root divided by `tokens` is the standard error of
    # the ratio `kl`.
    variance = (kl_W - kl * tokens_W).square().sum() * len(windows) / max(1, len(windows) - 1)
    return Quality(
        num_tokens=int(tokens),
        kl=kl,
        kl_95=SURE * float(variance.sqrt()) / tokens,
        perplexity=math.exp(min(700.0, float(rows_W[:, 2].sum()) / predicted)),
        dense_perplexity=math.exp(min(700.0, float(rows_W[:, 3].sum()) / predicted)),
        same_top=float(rows_W[:, 4].sum()) / tokens,
        silent_share_L=tuple(silent_L.tolist()),
    )


def _sums(sparse_TD: Tensor, dense_TD: Tensor, head_VD: Tensor, ids_T: Tensor) -> Tensor:
    """f64 [5], sums over a window: tokens, KL, sparse loss, dense loss, tokens with the same top."""
    sums = torch.zeros(5, dtype=torch.float64)
    sums[0] = len(ids_T)
    for start, stop in chunks(len(ids_T), len(head_VD)):
        sparse_TV = log_words(sparse_TD[start:stop], head_VD)
        dense_TV = log_words(dense_TD[start:stop], head_VD)
        sums[4] += (sparse_TV.argmax(dim=1) == dense_TV.argmax(dim=1)).sum().cpu()
        next_T = ids_T[start + 1 : stop + 1][:, None]
        sums[2] -= sparse_TV[: len(next_T)].gather(1, next_T).double().sum().cpu()
        sums[3] -= dense_TV[: len(next_T)].gather(1, next_T).double().sum().cpu()
        sums[1] += (dense_TV.exp() * (dense_TV - sparse_TV)).double().sum().cpu()
    return sums
