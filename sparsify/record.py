"""The record of a run so far: the curve of quality and the finished shares, without weights."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from hotsplit.sparsify.quality import Quality


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
        return cls(
            untrained=_qualities(values["untrained"]),
            started=_quality(values["started"]) if values["started"] else None,
            curve=[Point(**{**p, "quality": _quality(p["quality"])}) for p in values["curve"]],
            made=[
                Made(
                    **{
                        **m,
                        "checkpoint": Path(m["checkpoint"]),
                        "quality": _qualities(m["quality"]),
                    }
                )
                for m in values["made"]
            ],
            seconds=values["seconds"],
        )


def _qualities(values: dict[str, dict]) -> dict[str, Quality]:
    return {name: _quality(found) for name, found in values.items()}


def _quality(values: dict) -> Quality:
    return Quality(**{**values, "silent_share_L": tuple(values["silent_share_L"])})
