"""Trains the predictors of all layers.

How one layer's predictor is trained is in layer_trainer (its phases) and low_rank
(the network and its steps); here are the loops over layers and windows, and the state that a run
saves and that processes share.

Letters: T tokens, D model width, F or N neurons of a layer, L layers."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hotsplit.artifacts.model_file import PredictorInfo
from hotsplit.artifacts.predictor_file import Predictors
from hotsplit.costs.part_bytes import layer_bytes
from hotsplit.costs.pass_length import SHORT_CHUNK
from hotsplit.profile.corpus.processes import Ranks
from hotsplit.profile.count.run import ResumableRun, RunPart, Tensors
from hotsplit.profile.predictors.layer_trainer import (
    LayerQuality,
    LayerTrainer,
    Phase,
    PredictorTrainer,
    phases,
)
from hotsplit.profile.predictors.low_rank import Batch
from hotsplit.profile.predictors.predictor_options import KEPT_TOKENS, PredictorChoices
from hotsplit.profile.predictors.selection import Examiner, Tally
from hotsplit.profile.profile_config import ProfileConfig
from hotsplit.runtime.kernels.gate import Gate
from hotsplit.runtime.weights.neuron_block import NeuronBlock

Trained = tuple[Predictors, tuple[LayerQuality, ...]]


def train(
    run: ResumableRun, gates: Sequence[Gate], windows: Sequence[Tensor], config: ProfileConfig
) -> Trained:
    """Trains all layers at once, on as many processes as `run` has; can be interrupted and resumed.
    Only sums, kept tokens and the state of the training are saved; the rest is derived again."""
    model, ranks = run.engine.model, run.ranks
    tried, layers = PredictorChoices.of(config.predictor_rank, model), list[LayerTrainer]()
    for index, (layer, gate) in enumerate(zip(run.engine.layers, gates, strict=True)):
        (block,) = layer.ffn.blocks  # an engine without a plan has one block per layer
        assert isinstance(block, NeuronBlock)
        trainer = LayerTrainer(
            gate=gate,
            gate_FD=block.gate.weight.rows(block.id_N),
            gate_bias_F=block.gate.bias_N,
            down=block.down,
            sizes=layer_bytes(model, index),
            tried=tried,
        )
        layers.append(trainer)
    pieces = {phase: windows[piece] for phase, piece in phases(len(windows)).items()}
    steps = num_steps(pieces["train"], ranks.size)
    observer = PredictorTrainer(layers)

    def enter(phase: Phase) -> None:
        for layer in layers:
            layer.enter(phase, steps, ranks.spread)

    def gather(phase: Phase, part_of: Callable[[], Sums | KeptTokens]) -> None:
        enter(phase)
        part = part_of()
        run.add(phase, part)
        run.phase(pieces[phase])
        part.settle(run.total(phase))

    with run.engine.observe(observer.observe, observer.wants):
        gather("moments", lambda: Sums([layer.moments.sums() for layer in layers]))
        gather("keep", lambda: KeptTokens(layers, ranks))
        enter("train")
        run.add("train", TrainingState(layers))
        run.phase(pieces["train"], SharedSteps(ranks, layers).round)
        gather("measure", lambda: Sums([_sums(layer.tallies) for layer in layers]))
        gather("examine", lambda: Sums([_sums(layer.examiners) for layer in layers]))
    weights, quality = zip(*(layer.finish() for layer in layers), strict=True)
    info = PredictorInfo(
        kind="linear",
        rank_L=tuple(layer.rank for layer in weights),
        threshold_L=tuple(q.chosen.threshold for q in quality),
        density_L=tuple(q.chosen.predicted_density for q in quality),
    )
    return Predictors(model_id=model.model_id, info=info, layers=weights), quality


def _sums(parts: Sequence[Tally] | Sequence[Examiner]) -> dict[str, Tensor]:
    return _numbered([part.sums() for part in parts])


class Sums(Tensors):
    """Sums of every layer; the processes' shares add up. In f64 or int64, so that the total is that
    of any number of processes, up to rounding."""

    def __init__(self, sums_L: Sequence[dict[str, Tensor]]) -> None:
        super().__init__(_numbered(sums_L), is_sum=True)

    def settle(self, total: dict[str, Tensor]) -> None:
        """Gives all processes the total."""
        self.load(total)
        self.is_sum = False


class KeptTokens(RunPart):
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
            for name, field in _FIELDS.items():
                width = layer.width if name == "x" else layer.num_neurons
                rows = torch.zeros(total, width, device=layer.device)
                if pieces := [getattr(batch, field) for batch in layer.kept]:
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


_FIELDS = {"x": "x_TD", "fires": "fires_TF", "given": "given_TF"}


class TrainingState(RunPart):
    """Predictors in training with their optimizers; identical in all processes."""

    is_sum = False

    def __init__(self, layers: Sequence[LayerTrainer]) -> None:
        self.networks = [layer.trained for layer in layers if layer.trained is not None]

    def arrays(self) -> dict[str, Tensor]:
        return _numbered([network.state() for network in self.networks])

    def load(self, arrays: dict[str, Tensor]) -> None:
        for index, network in enumerate(self.networks):
            prefix = f"{index}/"
            network.load_state(
                {k.removeprefix(prefix): v for k, v in arrays.items() if k.startswith(prefix)}
            )


def _numbered(tensors_L: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {f"{n}/{name}": t for n, tensors in enumerate(tensors_L) for name, t in tensors.items()}


class SharedSteps:
    """Makes all processes take every step together, with the mean of their gradients. The mean is
    weighted by tokens; a process that has no text left contributes nothing. A step of n processes
    takes up to n chunks, so there are about n times fewer steps."""

    def __init__(self, ranks: Ranks, layers: Sequence[LayerTrainer]) -> None:
        self.ranks = ranks
        self.networks = TrainingState(layers).networks
        self.length_of_rank: Sequence[int] = ()
        self.steps = [0] * len(self.networks)  # in this round
        if ranks.size > 1:
            for number, network in enumerate(self.networks):
                assert network.optimizer is not None
                network.optimizer.register_step_pre_hook(self._hook(number))

    @contextmanager
    def round(self, length_of_rank: Sequence[int]) -> Iterator[None]:
        """Around a window of each process; at its end, takes the others' further steps."""
        self.length_of_rank, self.steps = length_of_rank, [0] * len(self.networks)
        yield
        most = max(map(num_chunks, length_of_rank))
        for _ in range(num_chunks(length_of_rank[self.ranks.rank]), most):
            for network in self.networks:
                network.step(None)

    def _hook(self, number: int) -> Any:
        def share(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
            start = self.steps[number] * SHORT_CHUNK
            self.steps[number] += 1
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
