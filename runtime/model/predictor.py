"""Predicts which neurons of a layer fire, from the input of a feed-forward layer.

Letters: T tokens, D model width, F neurons of the layer, R rank."""

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

from hotsplit.model.spec import PredictorKind
from hotsplit.runtime.weights.matrix import Linear, side_by_side
from hotsplit.runtime.weights.neuron_block import Gate


@dataclass(frozen=True, kw_only=True)
class Predictor:
    """A layer's predictor; model_file.PredictorInfo has the arithmetic."""

    kind: PredictorKind
    down: Linear | None  # [R, D]; None: `up` is the only matrix
    up: Linear  # [F, R], or [F, D]
    threshold: float
    gate: Gate

    def scores(self, x_TD: Tensor, *, is_small: bool = False) -> Tensor:
        """[T, F]; a neuron is predicted if its score is above the threshold or NaN. `is_small`: see
        gpu_products.Factor."""
        first = self.up if self.down is None else self.down
        inner_TR = side_by_side((first,), x_TD, is_small=is_small)
        if self.down is None:
            logits_TF = inner_TR
        else:
            logits_TF = self.up.apply(F.relu(inner_TR) if self.kind == "relu" else inner_TR)
        return self.gate.smooth(logits_TF).abs() if self.kind == "gate" else logits_TF

    @property
    def num_bytes(self) -> int:
        return self.up.num_bytes + (0 if self.down is None else self.down.num_bytes)
