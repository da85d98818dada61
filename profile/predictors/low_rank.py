"""A low-rank predictor: its initialisation, its training, and its matrices as stored in a file.

It is initialised from the whitened SVD of profile.predictors.moments, with logits in units of each
neuron's residual: for a normal residual of standard deviation s, P(gate > 0 | estimate) is close to
a logistic function of 1.7 estimate / s. With one scale for all neurons, training made the predictor
worse than its initialisation (docs/log/predictors.md).

Training is AdamW on a logistic loss, in which a neuron that fires is weighted by its contribution
to the output, |h_j| |down_j|, so that the neurons missed are the least important ones. It stops
early once the loss on held-out tokens no longer falls, and keeps the best weights.

Letters: T tokens, D model width, F or N neurons, R rank."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hotsplit.model.weight_types import BY_NAME
from hotsplit.profile.predictors.moments import Start
from hotsplit.profile.predictors.rounding import rounded, values_of
from hotsplit.runtime.kernels.gate import Gate
from hotsplit.runtime.ops.predict import Predictor
from hotsplit.runtime.weights.matrix import Linear, Matrix

# Relative to a tensor's RMS; 0.003 and 0.03 are no better (docs/log/predictors.md).
LEARNING_RATE = 0.01
LOGISTIC = 1.7  # normal to logistic
MAX_WEIGHT = 20.0  # of a firing neuron in the loss, in units of the mean contribution
CHECKS = 16  # the held-out loss is checked about this often
PATIENCE = 4  # checks without a better loss before training stops
Agree = Callable[[Tensor], None]


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Tokens of one layer: the predictor's input, firings, and contributions |h_j| |down_j|."""

    x_TD: Tensor
    fires_TF: Tensor
    given_TF: Tensor

    @property
    def weight_TF(self) -> Tensor:
        mean = self.given_TF.sum() / self.fires_TF.sum().clamp(min=1)
        share_TF = (self.given_TF / mean.clamp(min=1e-30)).clamp(max=MAX_WEIGHT)
        return torch.where(self.fires_TF, share_TF.float(), 1.0)


class LowRankNetwork:
    """z = up (right whiten x) + bias. `is_trained`: training improved the held-out loss."""

    def __init__(self, start: Start, rank: int, gate: Gate) -> None:
        self.start, self.rank = start, rank
        unit_F = LOGISTIC / start.residual_F(rank)
        self.right_RD = nn.Parameter(start.right_RD[:rank].clone())
        self.up_FR = nn.Parameter((start.left_FR[:, :rank] * unit_F[:, None]).contiguous())
        self.bias_F = nn.Parameter((start.bias_F - gate.opens_above) * unit_F)
        self.is_trained, self.is_done = False, False
        self.optimizer: torch.optim.AdamW | None = None

    def scores(self, x_TD: Tensor) -> Tensor:
        return (x_TD @ self.start.whiten_DD @ self.right_RD.T) @ self.up_FR.T + self.bias_F

    def loss(self, batch: Batch) -> Tensor:
        return F.binary_cross_entropy_with_logits(
            self.scores(batch.x_TD), batch.fires_TF.float(), weight=batch.weight_TF
        )

    def begin(self, num_steps: int, held_out: Batch, agree: Agree = lambda tensor: None) -> None:
        """Call this before the first step. `held_out` is never trained on. `agree` overwrites a
        tensor with the first process's values in all processes that train the same network."""
        self.held_out, self.num_steps, self.steps = held_out, max(1, num_steps), 0
        self.agree = agree
        groups = [
            {"params": [p], "lr": LEARNING_RATE * p.detach().square().mean().sqrt().item()}
            for p in (self.right_RD, self.up_FR)
        ]
        typical = self.bias_F.detach().square().mean().sqrt().item()
        groups.append({"params": [self.bias_F], "lr": LEARNING_RATE * max(1.0, typical)})
        self.optimizer = torch.optim.AdamW(groups, weight_decay=0.0)
        self.schedule = torch.optim.lr_scheduler.LinearLR(self.optimizer, 1.0, 0.02, self.num_steps)
        self.best_loss, self.num_worse = self._held_out_loss(), 0
        self.best = tuple(p.detach().clone() for p in self._parameters())

    def step(self, batch: Batch | None) -> None:
        """One AdamW step, or nothing once training has stopped. Without a batch, takes part with
        zero gradients in a step for which other processes have text."""
        if self.is_done:
            return
        assert self.optimizer is not None
        self.optimizer.zero_grad(set_to_none=True)
        if batch is not None:
            self.loss(batch).backward()
        else:
            for group in self.optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        self.schedule.step()
        self.steps += 1
        if self.steps % max(1, self.num_steps // CHECKS) == 0 or self.steps == self.num_steps:
            loss = self._held_out_loss()
            if loss < self.best_loss:
                self.best_loss, self.num_worse, self.is_trained = loss, 0, True
                self.best = tuple(p.detach().clone() for p in self._parameters())
            else:
                self.num_worse += 1
                self.is_done = self.num_worse >= PATIENCE

    def end(self) -> None:
        """Restores the weights with the least held-out loss."""
        with torch.no_grad():
            for parameter, kept in zip(self._parameters(), self.best, strict=True):
                parameter.copy_(kept)
        self.is_done, self.optimizer = True, None
        self.best = tuple(p.detach() for p in self._parameters())

    def state(self) -> dict[str, Tensor]:
        """Everything that steps change: `load_state` of an equal network continues from it."""
        found = {f"now/{n}": p.detach() for n, p in enumerate(self._parameters())}
        found |= {f"best/{n}": tensor for n, tensor in enumerate(self.best)}
        numbers = [self.best_loss, self.num_worse, self.is_trained, self.is_done, self.steps]
        found["numbers"] = torch.tensor(numbers, dtype=torch.float64)
        if self.optimizer is not None:
            for number, state in self.optimizer.state_dict()["state"].items():
                found |= {f"adam/{number}/{name}": value for name, value in state.items()}
            rates = [group["lr"] for group in self.optimizer.param_groups]
            found["rates"] = torch.tensor(rates, dtype=torch.float64)
        return found

    def load_state(self, state: dict[str, Tensor]) -> None:
        assert self.optimizer is not None, "begin it first"
        with torch.no_grad():
            for number, parameter in enumerate(self._parameters()):
                parameter.copy_(state[f"now/{number}"])
                self.best[number].copy_(state[f"best/{number}"])
        best_loss, *counts = state["numbers"].tolist()
        self.best_loss, self.num_worse, self.steps = best_loss, int(counts[0]), int(counts[3])
        self.is_trained, self.is_done = bool(counts[1]), bool(counts[2])
        if "rates" not in state:
            return  # training had ended
        moments: dict[int, dict[str, Tensor]] = {}
        for key in (key for key in state if key.startswith("adam/")):
            _, number_, name = key.split("/")
            moments.setdefault(int(number_), {})[name] = state[key].clone()
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": moments, "param_groups": groups})
        for group, rate in zip(self.optimizer.param_groups, state["rates"].tolist(), strict=True):
            group["lr"] = rate
        self.schedule.last_epoch = self.steps

    def predictor(self, kind: str) -> Predictor:
        """The predictor with matrices of `kind`; its threshold is not set yet."""
        down_RD = (self.right_RD @ self.start.whiten_DD.T).detach()
        up_FR = self.up_FR.detach()
        down = rounded(down_RD, kind, self.start.moment_DD)
        moment_RR = None
        if BY_NAME[kind].has_nibbles:  # `up` is fitted to the rounded `down`
            rounded_RD = values_of(down)
            through_DR = (self.start.moment_DD @ rounded_RD.T).double()
            moment_RR = rounded_RD.double() @ through_DR
            ridge = 1e-6 * moment_RR.diagonal().mean().clamp(min=1e-30)
            eye_RR = torch.eye(self.rank, dtype=torch.float64, device=up_FR.device)
            cross_FR = up_FR.double() @ (down_RD.double() @ through_DR)
            up_FR = torch.linalg.solve(moment_RR + ridge * eye_RR, cross_FR.T).T.float()
        up = rounded(up_FR, kind, moment_RR)
        return _predictor(Linear(weight=down), up, self.bias_F.detach())

    def _parameters(self) -> tuple[nn.Parameter, ...]:
        return (self.right_RD, self.up_FR, self.bias_F)

    def _held_out_loss(self) -> float:
        with torch.no_grad():
            loss = self.loss(self.held_out).double()
        self.agree(loss)
        return loss.item()


def whole(start: Start, kind: str) -> Predictor:
    """A predictor that is the whole map of `start` in one matrix of `kind`; it is not trained."""
    return _predictor(None, rounded(start.map_FD, kind, start.moment_DD), start.bias_F)


def _predictor(down: Linear | None, up: Matrix, bias_F: Tensor) -> Predictor:
    up_linear = Linear(weight=up, bias_N=bias_F if bias_F.any() else None)
    return Predictor(kind="linear", down=down, up=up_linear, threshold=0.0)
