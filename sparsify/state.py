"""The state of a training run: trained parameters, limits, optimizer, best state, and its record (the
curve of quality, the finished shares, the losses since the last point of the curve), as arrays in
one file of profile.count.resume's format.

No random state is needed: the order of the corpus follows from the seed and the step."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hotsplit.errors import HotsplitError
from hotsplit.profile.count.resume import Position, Settings, save_position
from hotsplit.sparsify.limits import Limits
from hotsplit.sparsify.quality import Quality
from hotsplit.sparsify.trainer import Trainer


@dataclass(frozen=True, kw_only=True)
class Point:
    """A point of the curve; `quality` is measured on the first held-out text."""

    step: int
    tokens: int
    seconds: float
    wanted_share: float
    trained_kl: float  # mean of the steps since the previous point
    quality: Quality


@dataclass(frozen=True, kw_only=True)
class Made:
    """A finished share: its checkpoint, and its quality on each held-out text."""

    share: float
    checkpoint: Path
    best_step: int
    quality: dict[str, Quality]


@dataclass(kw_only=True)
class Record:
    untrained: dict[str, Quality] = field(default_factory=dict)  # by share
    started: Quality | None = None  # of the trained checkpoint that it starts from
    curve: list[Point] = field(default_factory=list)
    made: list[Made] = field(default_factory=list)
    seconds: float = 0.0  # of training steps, without loading and evaluation

    def to_array(self) -> np.ndarray:
        return np.frombuffer(json.dumps(asdict(self), default=str).encode(), np.uint8)

    @classmethod
    def from_array(cls, array: np.ndarray) -> "Record":
        values = json.loads(array.tobytes())
        made = [
            {**m, "checkpoint": Path(m["checkpoint"]), "quality": _qualities(m["quality"])}
            for m in values["made"]
        ]
        return cls(
            untrained=_qualities(values["untrained"]),
            started=_quality(values["started"]) if values["started"] else None,
            curve=[Point(**{**p, "quality": _quality(p["quality"])}) for p in values["curve"]],
            made=[Made(**each) for each in made],
            seconds=values["seconds"],
        )


def _qualities(values: dict[str, dict]) -> dict[str, Quality]:
    return {name: _quality(found) for name, found in values.items()}


def _quality(values: dict) -> Quality:
    return Quality(**{**values, "silent_share_L": tuple(values["silent_share_L"])})


@dataclass(kw_only=True)
class Best:
    """The best state of the share being held; `kl` is infinite if there is none."""

    kl: float = float("inf")
    step: int = 0
    arrays: dict[str, Tensor] = field(default_factory=dict)

    def offer(self, kl: float, trainer: Trainer) -> None:
        """Keeps a copy of the trainer's weights and limits if they are better."""
        if kl < self.kl:
            self.kl, self.step, self.arrays = kl, trainer.step, copied(model_arrays(trainer))


def model_arrays(trainer: Trainer) -> dict[str, Tensor]:
    """The trained parameters, and the weights and thresholds that the limits follow from."""
    limits = {"weight_LF": trainer.limits.weight_LF, "threshold_L": trainer.limits.threshold_L}
    return {**limits, **trainer.parameters}


def copied(arrays: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().clone() for name, tensor in arrays.items()}


@torch.no_grad()
def load_model_arrays(trainer: Trainer, arrays: Mapping[str, Tensor]) -> None:
    """Loads what `model_arrays` saved into the trainer's model."""
    trainer.limits = Limits(
        weight_LF=arrays["weight_LF"].clone(),
        threshold_L=arrays["threshold_L"].clone(),
        allocation=trainer.limits.allocation,
    )
    trainer.limits.set(trainer.student.layers)
    for name, parameter in trainer.parameters.items():
        parameter.copy_(arrays[name])


def position_of(trainer: Trainer, best: Best, record: Record, losses: Sequence[float]) -> Position:
    """The whole state, for `restore`; `losses`: of the steps since the curve's last point."""
    arrays = {f"model/{name}": _numpy(t) for name, t in model_arrays(trainer).items()}
    for name, parameter in trainer.parameters.items():
        for key, value in trainer.optimizer.state[parameter].items():
            arrays[f"optimizer/{name}/{key}"] = _numpy(value)
    arrays |= {f"best/{name}": _numpy(t) for name, t in best.arrays.items()}
    arrays |= {"best_kl": np.array(best.kl), "best_step": np.array(best.step, np.int64)}
    arrays |= {"record": record.to_array(), "losses": np.array(losses, np.float64)}
    return Position(done=trainer.step, arrays=arrays)


def restore(trainer: Trainer, position: Position) -> tuple[Best, Record, list[float]]:
    """Restores the trainer from a position; returns the best state, the record and the losses."""
    load_model_arrays(trainer, _part(position, "model"))
    for name, parameter in trainer.parameters.items():
        state = _part(position, f"optimizer/{name}")
        if state:
            trainer.optimizer.state[parameter] = {
                key: value.clone().to(parameter.device) for key, value in state.items()
            }
    trainer.step = position.done
    best = Best(
        kl=float(position.arrays["best_kl"]),
        step=int(position.arrays["best_step"]),
        arrays=copied(_part(position, "best")),
    )
    record = Record.from_array(position.arrays["record"])
    return best, record, position.arrays["losses"].tolist()


def save(path: Path, settings: Settings, position: Position) -> None:
    """Saves a position. Raises HotsplitError if it cannot be written; an older file then stays."""
    try:
        save_position(path, settings, position)
    except (OSError, HotsplitError) as error:
        kept = "the state saved before is kept" if path.exists() else "nothing was saved"
        raise HotsplitError(f"{error}; {kept}") from error


def _part(position: Position, name: str) -> dict[str, Tensor]:
    return {key: torch.from_numpy(array) for key, array in position.of_part(name).items()}


def _numpy(tensor: Tensor) -> np.ndarray:
    return tensor.detach().cpu().contiguous().numpy()
