"""A predictor with its threshold, on text that nothing was fitted to.

The lost norm is here what it says: the output is computed with and without what is not named.

Letters: T tokens, D model width, F neurons."""

from dataclasses import replace

import torch
from torch import Tensor

from sparkinfer.budget import LayerBytes
from sparkinfer.profile.selection import Quality, bytes_per_token
from sparkinfer.runtime.feed_forward import Predictor
from sparkinfer.runtime.matrix import Matrix


class Examiner:
    """Counts over tokens; `promised` is the quality on the text that the threshold is from."""

    def __init__(
        self, predictor: Predictor, promised: Quality, down: Matrix, sizes: LayerBytes
    ) -> None:
        self.predictor = replace(predictor, threshold=promised.threshold)
        self.promised, self.down, self.sizes = promised, down, sizes
        self.fired_F = torch.zeros(down.num_rows, dtype=torch.int64, device=down.data.device)
        self.pairs = self.named = self.caught = 0
        self.given = self.kept = self.lost_square = self.output_square = 0.0

    @torch.no_grad()
    def add(self, x_TD: Tensor, fires_TF: Tensor, hidden_TF: Tensor, norm_F: Tensor) -> None:
        """`hidden_TF` is that of all neurons, `norm_F` the lengths of the rows of `down`."""
        named_TF = self.predictor.scores(x_TD) > self.predictor.threshold
        hidden_TF = hidden_TF * fires_TF
        given_TF = hidden_TF.abs() * norm_F
        self.fired_F += fires_TF.sum(dim=0)
        self.pairs += fires_TF.numel()
        self.named += int(named_TF.sum())
        self.caught += int((named_TF & fires_TF).sum())
        self.given += given_TF.double().sum().item()
        self.kept += (given_TF * named_TF).double().sum().item()
        lost_TD = self.down.combine_many(hidden_TF * ~named_TF)
        self.lost_square += lost_TD.double().square().sum().item()
        self.output_square += self.down.combine_many(hidden_TF).double().square().sum().item()

    @property
    def hottest_fifth(self) -> float:
        """Share of the firings that the hottest 20 % of the neurons take."""
        sorted_F = self.fired_F.sort(descending=True).values
        first = -(-len(sorted_F) // 5)
        return (sorted_F[:first].sum() / sorted_F.sum().clamp(min=1)).item()

    def quality(self) -> Quality:
        fired = int(self.fired_F.sum())
        named, caught = self.named / self.pairs, self.caught / self.pairs
        return replace(
            self.promised,
            density=fired / self.pairs,
            predicted_density=named,
            recall=self.caught / max(1, fired),
            precision=self.caught / max(1, self.named),
            contribution=self.kept / max(self.given, 1e-30),
            lost_norm=(self.lost_square / max(self.output_square, 1e-30)) ** 0.5,
            bytes_per_token=bytes_per_token(
                self.promised.num_bytes, named, caught, self.down.num_rows, self.sizes
            ),
        )
