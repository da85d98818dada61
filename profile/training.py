"""Trains the predictors of all layers while the model runs; no activation is ever stored.

Per layer three phases, each over its own share of the text:
1. the second moment M = E[x x^T] of the predictor's input is summed up. Then the start: the
   truncated SVD of G M^(1/2), with G the gate matrix, gives the rank-R map closest to the gate
   in the mean square over the text (whitened SVD, as in ASVD and SVD-LLM, arXiv 2403.07378).
   It is a useful predictor already.
2. AdamW on a logistic loss; a neuron that fires weighs as much as it adds to the output,
   |h_j| |down_j|, so that what is lost is what matters least.
3. thresholds: the largest that keeps the wanted share of the contribution, on text unseen in 2.

Letters: T tokens, D model width, F neurons, R rank, B histogram bins."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sparkinfer.predictor_file import LayerPredictor
from sparkinfer.runtime.feed_forward import Gate
from sparkinfer.runtime.matrix import Matrix

LOGIT_RANGE = 24.0
NUM_BINS = 6144  # of 1/128 each
LEARNING_RATE = 5e-3  # of 2e-3 and 6e-3 the larger named 1-2 % fewer neurons: docs/log.md
MAX_WEIGHT = 20.0  # of a firing neuron in the loss, in mean contributions


@dataclass(frozen=True, kw_only=True)
class LayerQuality:
    """Of one layer's predictor, on held-out tokens; shares in 0..1."""

    density: float  # of neurons that fire
    predicted_density: float  # of neurons that are named
    recall: float  # of firings that are named
    precision: float  # of named neurons that fire
    contribution: float  # of sum |h_j| |down_j| that is named


class LayerTrainer:
    """Phase by phase: `add_moment` often, `start`, `train` often, `measure` often, `finish`."""

    def __init__(
        self,
        gate: Gate,
        gate_FD: Tensor,
        down_norm_F: Tensor,
        rank: int,
        gate_bias_F: Tensor | None = None,
    ) -> None:
        self.gate, self.gate_FD, self.down_norm_F, self.rank = gate, gate_FD, down_norm_F, rank
        self.gate_bias_F = gate_FD.new_zeros(len(gate_FD)) if gate_bias_F is None else gate_bias_F
        width, device = gate_FD.shape[1], gate_FD.device
        self.moment_DD = torch.zeros(width, width, dtype=torch.float64, device=device)
        self.num_moment = 0
        # Per logit bin: named neurons, firings, contribution.
        self.held_out = torch.zeros(3, NUM_BINS, dtype=torch.float64, device=device)
        self.num_held_out = 0

    def add_moment(self, x_TD: Tensor) -> None:
        self.moment_DD += (x_TD.T @ x_TD).double()
        self.num_moment += len(x_TD)

    def start(self, num_steps: int) -> None:
        """The whitened SVD start, scaled so that logits have a spread of about 2."""
        moment_DD = self.moment_DD / max(1, self.num_moment)
        value_D, vector_DD = torch.linalg.eigh(moment_DD)
        root_D = value_D.clamp(min=1e-6 * value_D.max().item()).sqrt()
        whitened_FD = self.gate_FD.double() @ (vector_DD * root_D)
        u_FR, s_R, v_RD = torch.linalg.svd(whitened_FD, full_matrices=False)
        rank = self.rank
        spread = whitened_FD.square().sum().div(len(whitened_FD)).sqrt()
        scale = 2 / spread.clamp(min=1e-12)
        threshold = self.gate.threshold if self.gate.activation == "fatrelu" else 0.0
        self.begin(
            (vector_DD / root_D).float(),
            v_RD[:rank].float().contiguous(),
            (u_FR[:, :rank] * s_R[:rank] * scale).float(),
            ((self.gate_bias_F - threshold) * scale).float(),
            num_steps,
        )

    def begin(
        self,
        whiten_DD: Tensor,
        inner_RD: Tensor,
        up_FR: Tensor,
        bias_F: Tensor,
        num_steps: int,
    ) -> None:
        """Starts from these weights, those of `start` or of an earlier run."""
        # Contiguous, as what is loaded is: products of another layout round otherwise.
        self.whiten_DD = whiten_DD.contiguous()
        self.inner_RD = nn.Parameter(inner_RD.contiguous())
        self.up_FR = nn.Parameter(up_FR.contiguous())
        self.bias_F = nn.Parameter(bias_F)
        parameters = [self.inner_RD, self.up_FR, self.bias_F]
        self.optimizer = torch.optim.AdamW(parameters, LEARNING_RATE, weight_decay=0.0)
        self.schedule = torch.optim.lr_scheduler.LinearLR(
            self.optimizer, 1.0, 0.02, max(1, num_steps)
        )

    def logits(self, x_TD: Tensor) -> Tensor:
        return (x_TD @ self.whiten_DD @ self.inner_RD.T) @ self.up_FR.T + self.bias_F

    def contribution(self, hidden_TF: Tensor) -> Tensor:
        return hidden_TF.abs() * self.down_norm_F

    def train(self, x_TD: Tensor, gate_TF: Tensor, hidden_TF: Tensor) -> float:
        """One AdamW step; returns the loss."""
        _, fires_TF = self.gate.act(gate_TF, is_dense=False)
        given_TF = self.contribution(hidden_TF)
        mean = given_TF.sum() / fires_TF.sum().clamp(min=1)
        weight_TF = torch.where(
            fires_TF, (given_TF / mean.clamp(min=1e-30)).clamp(max=MAX_WEIGHT), 1.0
        )
        loss_TF = F.binary_cross_entropy_with_logits(
            self.logits(x_TD), fires_TF.float(), weight=weight_TF, reduction="none"
        )
        loss = loss_TF.mean()
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        return loss.item()

    @torch.no_grad()
    def measure(self, x_TD: Tensor, gate_TF: Tensor, hidden_TF: Tensor) -> None:
        """Adds held-out tokens to the histograms that thresholds are read from."""
        _, fires_TF = self.gate.act(gate_TF, is_dense=False)
        position = (self.logits(x_TD) + LOGIT_RANGE) * (NUM_BINS / (2 * LOGIT_RANGE))
        bins = position.clamp(0, NUM_BINS - 1).long().flatten()
        ones = torch.ones_like(bins, dtype=torch.float64)
        amounts = (ones, fires_TF.flatten().double(), self.contribution(hidden_TF).flatten())
        for row, amount in zip(self.held_out, amounts, strict=True):
            row.index_add_(0, bins, amount.double())
        self.num_held_out += len(x_TD)

    def finish(self, target: float) -> tuple[LayerPredictor, float, LayerQuality]:
        """Weights, the threshold that keeps `target` of the contribution, and its quality."""
        named_B, fired_B, given_B = self.held_out.flip(1).cumsum(1).flip(1)  # of bins from b up
        enough = given_B >= target * given_B[0]
        first = int(enough.nonzero().max())
        threshold = -LOGIT_RANGE + first * (2 * LOGIT_RANGE / NUM_BINS)
        pairs = self.num_held_out * len(self.gate_FD)
        quality = LayerQuality(
            density=(fired_B[0] / pairs).item(),
            predicted_density=(named_B[first] / pairs).item(),
            recall=(fired_B[first] / fired_B[0].clamp(min=1)).item(),
            precision=(fired_B[first] / named_B[first].clamp(min=1)).item(),
            contribution=(given_B[first] / given_B[0].clamp(min=1e-30)).item(),
        )
        down_RD = self.inner_RD.detach() @ self.whiten_DD.T
        weights = LayerPredictor(
            down_RD=down_RD.contiguous().cpu().numpy(),
            up_FR=self.up_FR.detach().contiguous().cpu().numpy(),
            up_bias_F=self.bias_F.detach().cpu().numpy(),
        )
        # A logit equal to the lowest one kept must pass `logit > threshold`.
        return weights, float("-inf") if first == 0 else threshold - 1e-6, quality


class PredictorTrainer:
    """An observer that hands each layer's tensors to its LayerTrainer, in the current phase."""

    def __init__(self, layers: list[LayerTrainer], input_layer_offset: int) -> None:
        self.layers, self.offset = layers, input_layer_offset
        self.phase = "moment"
        self.inputs: dict[int, Tensor] = {}
        self.gate_TF: Tensor | None = None
        self.losses: list[float] = []

    def wants(self, name: str, layer: int | None) -> bool:
        return name == "ffn_norm" or (name in ("ffn_gate", "ffn_hidden") and self.phase != "moment")

    def observe(self, name: str, layer: int | None, tensor: Tensor) -> None:
        assert layer is not None
        # The model runs in inference mode, whose tensors autograd does not take.
        with torch.inference_mode(False), torch.enable_grad():
            if name == "ffn_gate":
                self.gate_TF = tensor.clone()
            elif name == "ffn_norm":
                self.inputs[layer] = tensor.clone()
                if self.phase == "moment":
                    self.layers[layer].add_moment(self._input(layer))
            else:
                assert self.gate_TF is not None
                run = (
                    self.layers[layer].train
                    if self.phase == "train"
                    else self.layers[layer].measure
                )
                loss = run(self._input(layer), self.gate_TF, tensor.clone())
                if loss is not None:
                    self.losses.append(loss)

    def _input(self, layer: int) -> Tensor:
        return self.inputs[max(0, layer - self.offset)]

    def start(self, num_steps: int) -> None:
        for layer in self.layers:
            layer.start(num_steps)


def row_norms(matrix: Matrix) -> Tensor:
    """f32 [N]: the Euclidean length of each row."""
    rows = torch.arange(matrix.num_rows, device=matrix.data.device)
    return torch.cat([matrix.rows(piece).norm(dim=1) for piece in rows.split(1024)])
