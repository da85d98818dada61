"""Options of `profile`, and checks of a model and a text against them.

Imports no torch, so that wrong options are refused at once."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.errors import HotsplitError
from hotsplit.model.neurons import SMOOTH
from hotsplit.profile.count.resume import SAVE_EVERY_S
from hotsplit.profile.predictors.candidates import predictor_choices
from hotsplit.profile.predictors.options import PredictorOptions

T = TypeVar("T")
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
    predictors: PredictorOptions = PredictorOptions()
    input_layer_offset: int = 0
    # SiLU, GELU: choose thresholds that silence this share of the neurons
    target_sparsity: float | None = None
    # SiLU, GELU: silence a different share in each layer, up to this relative increase of the
    # perplexity or up to the target sparsity, whichever comes first
    perplexity_budget: float | None = None
    max_memory_bytes: int | None = None  # see profile.memory.room_of
    device: str | None = None
    seed: int = 0
    force: bool = False
    save_every_s: float = SAVE_EVERY_S

    def __post_init__(self) -> None:
        if not self.corpora:
            raise HotsplitError("no corpus; give one or more text files with --corpus")
        if self.target_sparsity is not None and not 0 < self.target_sparsity < 1:
            raise HotsplitError(
                f"target_sparsity is {self.target_sparsity}, wanted more than 0 and less than 1"
            )
        budget = self.perplexity_budget
        if budget is not None and not 0 < budget < math.inf:
            raise HotsplitError(f"perplexity budget is {budget}, wanted more than 0, e.g. 0.01")
        if self.seed < 0:
            raise HotsplitError(f"seed is {self.seed}, wanted 0 or more")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise HotsplitError(f"tokens is {self.max_tokens}, wanted 1 or more")
        if self.input_layer_offset not in (0, 1):
            raise HotsplitError(f"input layer offset is {self.input_layer_offset}, wanted 0 or 1")

    @property
    def chooses_thresholds(self) -> bool:
        return self.target_sparsity is not None or self.perplexity_budget is not None

    def split(self, windows: Sequence[T]) -> tuple[Sequence[T], Sequence[T]]:
        """The windows to choose thresholds on, and the others, on which firings are counted."""
        first = max(1, len(windows) // 4) if self.chooses_thresholds else 0
        return windows[:first], windows[first:]


def check_model(config: ProfileConfig, model: ModelFile) -> None:
    """Raises HotsplitError if the model does not suit the options."""
    if config.chooses_thresholds and model.activation not in SMOOTH:
        raise HotsplitError(
            f"{model.path}: thresholds are for SiLU and GELU models; the activation here is"
            f" {model.activation}, which silences neurons without thresholds; leave"
            " --target-sparsity and --perplexity-budget out"
        )
    if config.chooses_thresholds and model.has_limits:
        raise HotsplitError(
            f"{model.path}: has limits, by which its firings are counted; thresholds are for a model"
            " without them: leave --target-sparsity and --perplexity-budget out, or give the model"
            " that it was made from"
        )
    if config.train_predictors is None:
        return
    is_dense = model.activation in SMOOTH and not (any(model.threshold_L) or model.has_limits)
    if is_dense and not config.chooses_thresholds:
        raise HotsplitError(
            f"{model.path}: every neuron of a {model.activation} model without thresholds"
            " fires, which leaves nothing to predict; give --target-sparsity, e.g. 0.5, or"
            " --perplexity-budget, e.g. 0.01"
        )
    predictor_choices(config.predictors, model)


def check_text(config: ProfileConfig, windows: Sequence[object]) -> None:
    """Raises HotsplitError if there is too little text for the options."""
    from hotsplit.profile.corpus.corpus import WINDOW  # imports torch

    if config.chooses_thresholds and len(windows) < 2:
        raise HotsplitError("thresholds need two windows of text or more; give a longer corpus")
    count = len(config.split(windows)[1])
    if config.train_predictors is not None and count < MIN_TRAINING_WINDOWS:
        raise HotsplitError(
            f"{count} windows of {WINDOW} tokens cannot train predictors,"
            f" wanted {MIN_TRAINING_WINDOWS} or more; give a longer corpus or more --tokens"
        )
