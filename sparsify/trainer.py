"""A training step, and the state that it changes.

Letters: B windows, T tokens of a window, D model width, L layers, F neurons."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from hotsplit.errors import HotsplitError
from hotsplit.profile.corpus.processes import Ranks
from hotsplit.sparsify.config import SparsifyConfig
from hotsplit.sparsify.distillation import divergence
from hotsplit.sparsify.limits import (
    LAG_STEPS,
    SPEED,
    Limits,
    Measure,
    Scores,
    scaled,
    sensitivities,
)
from hotsplit.sparsify.schedule import Schedule
from hotsplit.sparsify.student import (
    Student,
    Watch,
    dense,
    differences,
    make_trainable,
    put_matrices,
    watched,
)

MAX_NORM = 1.0  # of the gradient
PASSES = 2  # to set the limits of a share, since those of lower layers change upper layers' inputs
BETAS = (0.9, 0.95)


class NotFinite(HotsplitError):
    """The loss or a gradient is NaN or infinite; the step left the model unchanged."""


class Trainer:
    """The student, its optimizer and its limits; `step` is the number of steps done."""

    def __init__(
        self, config: SparsifyConfig, student: Student, schedule: Schedule, ranks: Ranks
    ) -> None:
        self.config, self.student, self.schedule, self.ranks = config, student, schedule, ranks
        self.parameters = make_trainable(student.layers, config.rank, config.seed)
        self.optimizer = torch.optim.AdamW(
            self.parameters.values(), lr=0.0, betas=BETAS, weight_decay=0.0, fused=True
        )
        self.step = 0
        self.speed = min(1.0, max(SPEED, LAG_STEPS / schedule.steps_of_share))
        num_layers = len(student.layers)
        num_neurons = max(len(layer.limit_F) for layer in student.layers)
        # A checkpoint's config can express only one threshold for FATReLU.
        allocation = "global" if config.rule == "fatrelu" else config.allocation
        self.limits = Limits.of(torch.ones(num_layers, num_neurons), allocation)

    def measure(self, windows: Sequence[Tensor]) -> None:
        """Measures the neurons' weights on `windows`, for the rule "threshold"; to be called before
        the first step."""
        allocation = self.limits.allocation
        if self.config.rule != "threshold":
            return
        if allocation == "sensitivity":
            found_LF = sensitivities(self.student, windows, self.ranks, self.config.seed)
            weight_LF = scaled(found_LF, allocation)
        else:
            measure = Measure(self.student.layers)
            self._watch(measure, windows)
            weight_LF = measure.weights(allocation, self.ranks)
        self.limits = Limits.of(weight_LF, allocation)

    def start_from(self, matrices: Mapping[str, Tensor], limits: Limits) -> None:
        """Starts from another run's result; `matrices` by their names in the checkpoint."""
        put_matrices(self.student.layers, matrices)
        self.limits = limits
        limits.set(self.student.layers)

    @torch.no_grad()
    def set_share(self, share: float, windows: Sequence[Tensor]) -> None:
        """Sets limits that silence about `share` of the current model's neurons on `windows`."""
        for _ in range(PASSES):
            scores = Scores(self.limits)
            self._watch(scores, windows)
            self.limits.move(scores.quantiles(share, self.ranks), 1.0)
            self.limits.set(self.student.layers)

    @torch.no_grad()
    def _watch(self, watch: Watch, windows: Sequence[Tensor]) -> None:
        with watched(self.student.layers, watch):
            for ids_T in windows:
                self.student.hidden_states(ids_T[None])

    def train(self, windows: Sequence[Tensor]) -> float:
        """One step on windows of the same length, this process's share of a batch; returns the KL.

        Raises NotFinite in all processes, with the model unchanged."""
        moves = self.config.chooses_share and not self.schedule.is_frozen(self.step)
        for layer in self.student.layers:
            layer.blend = self.schedule.blend(self.step)
        scores = Scores(self.limits)
        size = self.config.micro_tokens // self.config.window
        kl = torch.zeros((), dtype=torch.float64)
        for start in range(0, len(windows), size):
            ids_BT = torch.stack(list(windows[start : start + size]))
            kl += self._backward(ids_BT, len(ids_BT) / len(windows), scores if moves else None)
        kl = self.ranks.sum(kl) / self.ranks.size
        norm = self._join_gradients()
        if not (kl.isfinite() and norm.isfinite()):
            number = self._first_broken(windows)
            self.optimizer.zero_grad(set_to_none=True)
            raise NotFinite(f"NaN or infinity in layer {number} at step {self.step + 1}")
        for group in self.optimizer.param_groups:
            group["lr"] = self.schedule.rate(self.step)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if moves:
            share = self.schedule.share(self.step)
            self.limits.move(scores.quantiles(share, self.ranks), self.speed)
            self.limits.set(self.student.layers)
        self.step += 1
        return float(kl)

    def _backward(self, ids_BT: Tensor, weight: float, scores: Scores | None) -> Tensor:
        """Adds the gradients of one pass; returns its weighted KL."""
        student, weight_of_layers = self.student, self.config.layer_weight
        errors: list[Tensor] = []
        with differences(student.layers if weight_of_layers else (), errors):
            with torch.no_grad(), dense(student.layers):
                dense_TD = student.hidden_states(ids_BT).flatten(0, 1)
            with watched(student.layers, scores):
                sparse_TD = student.hidden_states(ids_BT).flatten(0, 1)
        kl = divergence(sparse_TD, dense_TD, student.head_VD).mean()
        loss = kl
        if weight_of_layers:
            loss = loss + weight_of_layers * torch.stack(errors).mean()
        (loss * weight).backward()  # type: ignore[no-untyped-call]
        return kl.detach().double().cpu() * weight

    def _join_gradients(self) -> Tensor:
        """Averages the gradients over the processes and clips them; returns the norm before."""
        if self.ranks.size > 1:
            for name, parameter in self.parameters.items():
                assert parameter.grad is not None, name
                parameter.grad.copy_(self.ranks.sum(parameter.grad) / self.ranks.size)
        norm = nn.utils.clip_grad_norm_(self.parameters.values(), MAX_NORM, foreach=True)
        return norm.cpu()

    def _first_broken(self, windows: Sequence[Tensor]) -> int:
        """The layer where NaN or infinity first appears: the first with one in the forward pass,
        else the last with one in its gradients; the last of all if neither finds one."""
        found: list[int] = []

        def watch(layer: int, value_TF: Tensor, up_TF: Tensor, x_TD: Tensor) -> None:
            if not all(tensor.isfinite().all() for tensor in (value_TF, up_TF, x_TD)):
                found.append(layer)

        with torch.no_grad(), watched(self.student.layers, watch):
            self.student.hidden_states(torch.stack(list(windows)))
        if found:
            return found[0]
        broken = [int(name.split(".")[0]) for name, parameter in self.parameters.items()
                  if parameter.grad is not None and not parameter.grad.isfinite().all()]  # fmt: skip
        return max(broken, default=len(self.student.layers) - 1)
