"""The configuration of `hotsplit report`, and the summary that it returns."""

from dataclasses import dataclass
from pathlib import Path

from hotsplit.errors import HotsplitError

MAX_BYTES = 2 << 20  # of a page


@dataclass(frozen=True, kw_only=True)
class ReportConfig:
    """The files of one model. Where some are missing, the page names the command for them."""

    model: Path
    output: Path
    profile: Path | None = None
    split: Path | None = None
    machine: Path | None = None
    predictors: Path | None = None  # predictors.safetensors or its folder
    evals: tuple[Path, ...] = ()  # output of `hotsplit eval --json`
    force: bool = False

    def __post_init__(self) -> None:
        if len(set(self.evals)) < len(self.evals):
            raise HotsplitError("a comparison is given twice; give each --eval-json once")

    @property
    def inputs(self) -> tuple[Path, ...]:
        named = (self.model, self.profile, self.split, self.machine, self.predictors, *self.evals)
        return tuple(path for path in named if path is not None)


@dataclass(frozen=True, kw_only=True)
class ReportSummary:
    """A summary of the page. `missing`: sections with neither a plot nor a table."""

    output: str
    model_id: str
    num_bytes: int
    num_plots: int
    sections: tuple[str, ...]
    missing: tuple[str, ...]
