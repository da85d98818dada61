"""Options of `profile`, and checks of a model and a text against them.

Imports no torch, so that wrong options are refused at once."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.artifacts.predictor_file import FILE_NAME
from hotsplit.errors import HotsplitError
from hotsplit.profile.count.resume import SAVE_EVERY_S
from hotsplit.profile.predictors.predictor_options import PredictorChoices

MIN_TRAINING_WINDOWS = 10
DEFAULT_TOKENS = 131_072


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    model: Path
    corpora: tuple[Path, ...]
    output: Path
    max_tokens: int | None = None  # None: up to DEFAULT_TOKENS; otherwise fewer are an error
    text_key: str = "text"  # for JSON lines and parquet
    importances: Path | None = None  # an importance matrix to write (artifacts.importance_file)
    train_predictors: Path | None = None  # a folder for them
    predictor_rank: int | None = None  # None: several are tried
    device: str | None = None
    seed: int = 0
    force: bool = False
    save_every_s: float = SAVE_EVERY_S

    @property
    def predictor_path(self) -> Path | None:
        """The file of predictors that is written; None if none are trained."""
        return None if self.train_predictors is None else self.train_predictors / FILE_NAME

    def __post_init__(self) -> None:
        if not self.corpora:
            raise HotsplitError("no corpus; give one or more text files with --corpus")
        if self.seed < 0:
            raise HotsplitError(f"seed is {self.seed}, wanted 0 or more")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise HotsplitError(f"tokens is {self.max_tokens}, wanted 1 or more")


def check_model(config: ProfileConfig, model: ModelFile) -> None:
    """Raises HotsplitError if the model does not suit the options."""
    if config.train_predictors is not None:
        model.refuse_predictors("leave --train-predictors out")
        PredictorChoices.of(config.predictor_rank, model)


def check_text(config: ProfileConfig, windows: Sequence[object]) -> None:
    """Raises HotsplitError if there is too little text for the options."""
    from hotsplit.profile.corpus.corpus import WINDOW  # imports torch

    count = len(windows)
    if config.train_predictors is not None and count < MIN_TRAINING_WINDOWS:
        raise HotsplitError(
            f"{count} windows of {WINDOW} tokens cannot train predictors,"
            f" wanted {MIN_TRAINING_WINDOWS} or more; give a longer corpus or more --tokens"
        )
