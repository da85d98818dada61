"""Measures a predictor with its threshold on held-out text.

The lost norm is exact here (in profile.predictors.selection it is estimated): the down projection runs twice,
for all neurons that fire and for those that the predictor misses.

Letters: T tokens, D model width, F neurons."""

from dataclasses import replace

import torch
from torch import Tensor

from hotsplit.costs.budget import LayerBytes
from hotsplit.profile.predictors.selection import Quality, bytes_per_token
from hotsplit.runtime.ops.predict import Predictor
from hotsplit.runtime.weights.matrix import Matrix


class Examiner:
    """Sums over tokens; `promised` is the quality on the text that the threshold was chosen on."""

    def __init__(
        self, predictor: Predictor, promised: Quality, down: Matrix, sizes: LayerBytes
    ) -> None:
        self.predictor = replace(predictor, threshold=promised.threshold)
        self.promised, self.down, self.sizes = promised, down, sizes
        device = down.data.device
        self.fired_F = torch.zeros(down.num_rows, dtype=torch.int64, device=device)
        self.num = torch.zeros(3, dtype=torch.int64, device=device)  # all pairs, predicted, caught
        # contribution of the neurons that fire and of those caught; squared norms of the lost and
        # of the whole output
        self.amount = torch.zeros(4, dtype=torch.float64, device=device)

    def sums(self) -> dict[str, Tensor]:
        """The tensors themselves, which are updated in place."""
        return {"fired_F": self.fired_F, "num": self.num, "amount": self.amount}

    @torch.no_grad()
    def add(self, x_TD: Tensor, fires_TF: Tensor, hidden_TF: Tensor, norm_F: Tensor) -> None:
        """`hidden_TF` has all neurons, `norm_F` the lengths of the rows of `down`."""
        named_TF = self.predictor.scores(x_TD) > self.predictor.threshold
        hidden_TF = hidden_TF * fires_TF
        given_TF = hidden_TF.abs() * norm_F
        self.fired_F += fires_TF.sum(dim=0)
        counts = (fires_TF.new_ones(()).long() * fires_TF.numel(), named_TF.sum(),
                  (named_TF & fires_TF).sum())  # fmt: skip
        self.num += torch.stack(counts)
        lost_TD = self.down.combine_many(hidden_TF * ~named_TF)
        y_TD = self.down.combine_many(hidden_TF)
        amounts = (given_TF, given_TF * named_TF, lost_TD.square(), y_TD.square())
        self.amount += torch.stack([amount.double().sum() for amount in amounts])

    @property
    def hottest_fifth(self) -> float:
        """Share of the firings that come from the hottest 20 % of the neurons."""
        sorted_F = self.fired_F.sort(descending=True).values
        first = -(-len(sorted_F) // 5)
        return (sorted_F[:first].sum() / sorted_F.sum().clamp(min=1)).item()

    def quality(self) -> Quality:
        fired = int(self.fired_F.sum())
        pairs, num_named, num_caught = self.num.tolist()
        given, kept, lost_square, output_square = self.amount.tolist()
        named, caught = num_named / pairs, num_caught / pairs
        return replace(
            self.promised,
            density=fired / pairs,
            predicted_density=named,
            recall=num_caught / max(1, fired),
            precision=num_caught / max(1, num_named),
            contribution=kept / max(given, 1e-30),
            lost_norm=(lost_square / max(output_square, 1e-30)) ** 0.5,
            bytes_per_token=bytes_per_token(
                self.promised.num_bytes, named, caught, self.down.num_rows, self.sizes
            ),
        )
