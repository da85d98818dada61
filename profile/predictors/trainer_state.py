"""The state of predictor training that a run saves and loads and that processes share.

Training itself is in profile.layer_trainer.

Letters: T tokens, D model width, F neurons, L layers."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hotsplit.costs.budget import SHORT_CHUNK
from hotsplit.profile.corpus.processes import Ranks
from hotsplit.profile.predictors.layer_trainer import KEPT_TOKENS, LayerTrainer
from hotsplit.profile.predictors.training import Batch, LowRank


class Sums:
    """Sums of every layer, tensors that are updated in place; the processes' shares add up.

    They are in f64 or int64, so that the total does not depend on the number of processes, up to
    rounding."""

    def __init__(self, sums_L: Sequence[dict[str, Tensor]]) -> None:
        self.is_sum = True
        self.tensors = {
            f"{layer}/{name}": tensor
            for layer, sums in enumerate(sums_L)
            for name, tensor in sums.items()
        }

    def arrays(self) -> dict[str, Tensor]:
        return self.tensors

    def load(self, arrays: dict[str, Tensor]) -> None:
        for name, tensor in self.tensors.items():
            tensor.copy_(arrays[name])

    def settle(self, total: dict[str, Tensor]) -> None:
        """Gives all processes the total."""
        self.load(total)
        self.is_sum = False

    def check(self) -> None:
        pass


class Kept:
    """The tokens that every layer keeps, concatenated over the processes."""

    def __init__(self, layers: Sequence[LayerTrainer], ranks: Ranks) -> None:
        self.layers, self.ranks, self.is_sum = layers, ranks, True
        self.settled: dict[str, Tensor] = {}

    def arrays(self) -> dict[str, Tensor]:
        """All processes must call this together: each fills in the rows of its own tokens."""
        if self.settled:
            return self.settled
        count = max(sum(len(batch.x_TD) for batch in layer.kept) for layer in self.layers)
        count_of_rank = torch.zeros(self.ranks.size, dtype=torch.int64)
        count_of_rank[self.ranks.rank] = count
        count_of_rank = self.ranks.sum(count_of_rank)
        start, total = int(count_of_rank[: self.ranks.rank].sum()), int(count_of_rank.sum())
        found: dict[str, Tensor] = {}
        for index, layer in enumerate(self.layers):
            for name, width in (("x", layer.width), ("fires", layer.num_neurons),
                                ("given", layer.num_neurons)):  # fmt: skip
                rows = torch.zeros(total, width, device=layer.device)
                pieces = [getattr(batch, _FIELDS[name]) for batch in layer.kept]
                if pieces:
                    rows[start : start + count] = torch.cat(pieces).float()
                found[f"{index}/{name}"] = rows
        return found

    def load(self, arrays: dict[str, Tensor]) -> None:
        for index, layer in enumerate(self.layers):
            rows = {name: arrays[f"{index}/{name}"].to(layer.device) for name in _FIELDS}
            layer.kept = [
                Batch(x_TD=rows["x"], fires_TF=rows["fires"] != 0, given_TF=rows["given"])
            ]

    def settle(self, total: dict[str, Tensor]) -> None:
        """Gives all processes the same tokens: the first KEPT_TOKENS of all."""
        self.settled = {name: rows[:KEPT_TOKENS].contiguous() for name, rows in total.items()}
        self.load(self.settled)
        self.is_sum = False

    def check(self) -> None:
        pass


_FIELDS = {"x": "x_TD", "fires": "fires_TF", "given": "given_TF"}


class Weights:
    """Predictors in training with their optimizers; identical in all processes."""

    is_sum = False

    def __init__(self, layers: Sequence[LayerTrainer]) -> None:
        self.networks = networks_of(layers)

    def arrays(self) -> dict[str, Tensor]:
        return {
            f"{index}/{name}": tensor
            for index, network in self.networks.items()
            for name, tensor in network.state().items()
        }

    def load(self, arrays: dict[str, Tensor]) -> None:
        for index, network in self.networks.items():
            prefix = f"{index}/"
            network.load_state(
                {k.removeprefix(prefix): v for k, v in arrays.items() if k.startswith(prefix)}
            )

    def check(self) -> None:
        pass


def networks_of(layers: Sequence[LayerTrainer]) -> dict[int, LowRank]:
    """The networks of the layers that train one."""
    return {i: layer.trained for i, layer in enumerate(layers) if layer.trained is not None}


class SharedSteps:
    """Makes all processes take every step together, with the mean of their gradients.

    The mean is weighted by tokens; a process that has no text left contributes nothing. A step of n
    processes takes up to n chunks, so there are about n times fewer steps."""

    def __init__(self, ranks: Ranks, layers: Sequence[LayerTrainer]) -> None:
        self.ranks, self.networks = ranks, networks_of(layers)
        self.length_of_rank: Sequence[int] = ()
        self.steps = dict.fromkeys(self.networks, 0)  # per layer, in this round
        if ranks.size > 1:
            for index, network in self.networks.items():
                network.before_step(self._hook(index))

    def begin(self, length_of_rank: Sequence[int]) -> None:
        self.length_of_rank, self.steps = length_of_rank, dict.fromkeys(self.networks, 0)

    def end(self) -> None:
        """Takes the steps of this round for which only other processes have text."""
        for _ in range(num_chunks(self.length_of_rank[self.ranks.rank]), self._num_steps):
            for network in self.networks.values():
                network.step_without_text()

    @property
    def _num_steps(self) -> int:
        return max(map(num_chunks, self.length_of_rank))

    def _hook(self, index: int) -> Any:
        def share(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
            start = self.steps[index] * SHORT_CHUNK
            self.steps[index] += 1
            counts = [max(0, min(SHORT_CHUNK, n - start)) for n in self.length_of_rank]
            share_of_mine = counts[self.ranks.rank] / sum(counts)
            gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
            flat = torch.cat([gradient.flatten() for gradient in gradients]) * share_of_mine
            sizes = [gradient.numel() for gradient in gradients]
            for gradient, mean in zip(gradients, self.ranks.sum(flat).split(sizes), strict=True):
                gradient.copy_(mean.view_as(gradient))

        return share


def num_chunks(length: int) -> int:
    """Steps in a window of `length` tokens."""
    return -(-length // SHORT_CHUNK)


def num_steps(windows: Sequence[Tensor], size: int) -> int:
    """Number of steps that `size` processes take on the windows."""
    chunks = [num_chunks(len(window)) for window in windows]
    return sum(max(chunks[start : start + size]) for start in range(0, len(chunks), size))
