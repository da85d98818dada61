"""What predictors and thresholds do to the model, and the files that predictors become.

What this module does not know: how predictors are trained."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from sparkinfer.files import check_output
from sparkinfer.model_file import ModelFile
from sparkinfer.predictor_file import FILE_NAME, Predictors
from sparkinfer.profile.dejavu import check_dejavu_output, dejavu_paths, save_dejavu
from sparkinfer.profile.predictor_options import PredictorFormat
from sparkinfer.profile.quality import EvalReport, compare
from sparkinfer.runtime.engine import Engine
from sparkinfer.runtime.model.feed_forward import Gate, Mode

MAX_TOKENS = 8192  # of the text on which the model is compared with its dense self


@dataclass(frozen=True, kw_only=True)
class PredictorOutput:
    """A folder for predictors in one of two formats."""

    folder: Path
    format: PredictorFormat
    force: bool

    @property
    def path(self) -> Path:
        return self.folder if self.format == "dejavu" else self.folder / FILE_NAME

    def check(self, num_layers: int, inputs: Sequence[Path]) -> None:
        """Raises SparkinferError for what exists already or is one of `inputs`; called before the
        work starts."""
        paths = [self.path]
        if self.format == "dejavu":
            check_dejavu_output(self.folder, num_layers)
            paths = dejavu_paths(self.folder, num_layers)
        for path in paths:
            check_output(path, force=self.force, inputs=inputs)

    def save(self, predictors: Predictors) -> None:
        if self.format == "dejavu":
            save_dejavu(predictors, self.folder)
        else:
            predictors.save(self.path)


def measure(
    dense: Engine,
    gates: tuple[Gate, ...],
    predictors: Predictors | None,
    windows: Sequence[Tensor],
) -> EvalReport:
    """The model with these thresholds, and in mode predicted where there are predictors, against
    its dense self."""
    model, mode = changed(dense.model, gates, predictors)
    chosen, left = [], MAX_TOKENS
    for ids in windows:
        chosen.append(ids[: max(2, left)])
        left -= len(ids)
        if left <= 0:
            break
    device, context = str(dense.device), dense.context_length
    with Engine.of(
        model, mode=mode, device=device, context_length=context, is_resident=False
    ) as engine:
        return compare(dense, engine, chosen)


def changed(
    model: ModelFile, gates: tuple[Gate, ...], predictors: Predictors | None
) -> tuple[ModelFile, Mode]:
    """The model with these thresholds and predictors, and the mode that uses them."""
    if predictors is not None:
        return with_predictors(model, gates, predictors), "predicted"
    return replace(model, threshold_L=tuple(gate.threshold for gate in gates)), "exact"


def with_predictors(model: ModelFile, gates: tuple[Gate, ...], predictors: Predictors) -> ModelFile:
    """The model as `convert` would make it."""
    entries = {n: e for n, e in model.tensors.items() if ".ffn_pred_" not in n}
    for layer, predictor in enumerate(predictors.layers):
        entries |= predictor.entries(layer)
    return replace(
        model,
        tensors=entries,
        predictor=predictors.info,
        threshold_L=tuple(gate.threshold for gate in gates),
    )
