"""Trained predictors: what they do to the model, and the files that they become.

What this module does not know: how predictors are trained."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from sparkinfer.files import check_output
from sparkinfer.gguf_file import array_entry
from sparkinfer.model_file import ModelFile
from sparkinfer.predictor_file import FILE_NAME, Predictors
from sparkinfer.profile.dejavu import check_dejavu_output, dejavu_paths, save_dejavu
from sparkinfer.profile.predictor_options import PredictorFormat
from sparkinfer.profile.quality import EvalReport, compare
from sparkinfer.profile.report import JSON_NAME, MARKDOWN_NAME, save_report
from sparkinfer.runtime.engine import Engine
from sparkinfer.runtime.feed_forward import Gate

if TYPE_CHECKING:
    from sparkinfer.profile.collect import ProfileReport

MAX_TOKENS = 8192  # of the text on which the model is compared with its dense self

ModelQuality = EvalReport


@dataclass(frozen=True, kw_only=True)
class PredictorOutput:
    """A folder for predictors in one of two formats, and for the report on them."""

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
        for path in (*paths, self.folder / JSON_NAME, self.folder / MARKDOWN_NAME):
            check_output(path, force=self.force, inputs=inputs)

    def measure(
        self,
        dense: Engine,
        gates: tuple[Gate, ...],
        predictors: Predictors,
        windows: Sequence[Tensor],
    ) -> ModelQuality:
        """The model with these predictors against its dense self."""
        model = with_predictors(dense.model, gates, predictors)
        chosen, left = [], MAX_TOKENS
        for ids in windows:
            chosen.append(ids[: max(2, left)])
            left -= len(ids)
            if left <= 0:
                break
        device, context = str(dense.device), dense.context_length
        with Engine.of(model, mode="predicted", device=device, context_length=context) as engine:
            return compare(dense, engine, chosen)

    def save(self, predictors: Predictors, report: "ProfileReport") -> None:
        """Both files or a SparkinferError."""
        if self.format == "dejavu":
            save_dejavu(predictors, self.folder)
        else:
            predictors.save(self.path)
        save_report(report, self.folder)


def with_predictors(model: ModelFile, gates: tuple[Gate, ...], predictors: Predictors) -> ModelFile:
    """The model as `convert` would make it; matrices are f32 here, with the rounded values."""
    entries = {n: e for n, e in model.tensors.items() if ".ffn_pred_" not in n}
    for layer, predictor in enumerate(predictors.layers):
        arrays = predictor.arrays(layer)
        entries |= {name: array_entry(array, "f32") for name, array in arrays.items()}
    return replace(
        model,
        tensors=entries,
        predictor=predictors.info,
        threshold_L=tuple(gate.threshold for gate in gates),
    )
