"""The state of predictor training: what a run saves and loads, and what processes share.

What this module does not know: how predictors are trained; profile.training does."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sparkinfer.budget import PREFILL_CHUNK
from sparkinfer.profile.ranks import Ranks
from sparkinfer.profile.training import LayerTrainer, PredictorTrainer

WEIGHTS = ("whiten_DD", "inner_RD", "up_FR", "bias_F")


class Sums:
    """Two sums of every layer, a tensor and a number of tokens: moments, or held-out histograms.

    Sums of f64: over two processes they are those of one up to rounding."""

    is_sum = True

    def __init__(self, layers: Sequence[LayerTrainer], tensor: str, number: str) -> None:
        self.layers, self.names = layers, (tensor, number)

    def arrays(self) -> dict[str, Tensor]:
        return {
            f"{index}/{name}": torch.as_tensor(getattr(layer, name))
            for index, layer in enumerate(self.layers)
            for name in self.names
        }

    def load(self, arrays: dict[str, Tensor]) -> None:
        tensor, number = self.names
        for index, layer in enumerate(self.layers):
            getattr(layer, tensor).copy_(arrays[f"{index}/{tensor}"])
            setattr(layer, number, int(arrays[f"{index}/{number}"]))

    def check(self) -> None:
        pass


class Weights:
    """Predictors in training with their optimizers; in all processes the same."""

    is_sum = False

    def __init__(self, layers: Sequence[LayerTrainer], num_steps: int) -> None:
        self.layers, self.num_steps = layers, num_steps

    def arrays(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for index, layer in enumerate(self.layers):
            found |= {f"{index}/{name}": getattr(layer, name).detach() for name in WEIGHTS}
            for number, state in layer.optimizer.state_dict()["state"].items():
                found |= {f"{index}/adam/{number}/{name}": value for name, value in state.items()}
            rate = layer.optimizer.param_groups[0]["lr"]
            found[f"{index}/rate"] = torch.tensor(rate, dtype=torch.float64)
            found[f"{index}/steps"] = torch.tensor(layer.schedule.last_epoch)
        return found

    def load(self, arrays: dict[str, Tensor]) -> None:
        """Instead of the trainers' `start`."""
        for index, layer in enumerate(self.layers):
            device = layer.gate_FD.device
            weights = [arrays[f"{index}/{name}"].to(device) for name in WEIGHTS]
            layer.begin(weights[0], weights[1], weights[2], weights[3], self.num_steps)
            state: dict[int, dict[str, Tensor]] = {}
            prefix = f"{index}/adam/"
            for key in (key for key in arrays if key.startswith(prefix)):
                number, name = key.removeprefix(prefix).split("/")
                state.setdefault(int(number), {})[name] = arrays[key]
            groups = layer.optimizer.state_dict()["param_groups"]
            layer.optimizer.load_state_dict({"state": state, "param_groups": groups})
            layer.optimizer.param_groups[0]["lr"] = float(arrays[f"{index}/rate"])
            layer.schedule.last_epoch = int(arrays[f"{index}/steps"])

    def spread(self, ranks: Ranks) -> None:
        """The first process's start for all: another processor may round its own otherwise."""
        for layer in self.layers:
            for name in WEIGHTS:
                ranks.spread(getattr(layer, name).detach())

    def check(self) -> None:
        pass


class SharedSteps:
    """All processes take every step together, with the mean of their gradients.

    The mean is by tokens; a process that has no text left takes part with nothing. A step of n
    processes is that of one process on n chunks, so there are n times fewer of them."""

    def __init__(self, ranks: Ranks, trainer: PredictorTrainer) -> None:
        self.ranks, self.layers = ranks, trainer.layers
        self.length_of_rank: Sequence[int] = ()
        self.steps = [0] * len(self.layers)  # of each layer, in this round
        if ranks.size > 1:
            for index, layer in enumerate(self.layers):
                layer.optimizer.register_step_pre_hook(self._hook(index))

    def begin(self, length_of_rank: Sequence[int]) -> None:
        self.length_of_rank, self.steps = length_of_rank, [0] * len(self.layers)

    def end(self) -> None:
        """The steps that others have and this process has no text for."""
        for _ in range(num_chunks(self.length_of_rank[self.ranks.rank]), self._num_steps):
            for layer in self.layers:
                for parameter in layer.optimizer.param_groups[0]["params"]:
                    parameter.grad = torch.zeros_like(parameter)
                layer.optimizer.step()
                layer.schedule.step()

    @property
    def _num_steps(self) -> int:
        return max(map(num_chunks, self.length_of_rank))

    def _hook(self, index: int) -> Any:
        def share(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
            start = self.steps[index] * PREFILL_CHUNK
            self.steps[index] += 1
            counts = [max(0, min(PREFILL_CHUNK, n - start)) for n in self.length_of_rank]
            share_of_mine = counts[self.ranks.rank] / sum(counts)
            gradients = [p.grad for p in optimizer.param_groups[0]["params"]]
            flat = torch.cat([gradient.flatten() for gradient in gradients]) * share_of_mine
            sizes = [gradient.numel() for gradient in gradients]
            for gradient, mean in zip(gradients, self.ranks.sum(flat).split(sizes), strict=True):
                gradient.copy_(mean.view_as(gradient))

        return share


def num_chunks(length: int) -> int:
    """Steps that a window of `length` tokens makes."""
    return -(-length // PREFILL_CHUNK)


def num_steps(windows: Sequence[Tensor], size: int) -> int:
    """Steps that `size` processes make on the windows."""
    chunks = [num_chunks(len(window)) for window in windows]
    return sum(max(chunks[start : start + size]) for start in range(0, len(chunks), size))
