"""Measures how predictors, thresholds and limits change the model, and writes the predictors'
files."""

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from torch import Tensor

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.artifacts.predictor_file import FILE_NAME, Predictors
from hotsplit.artifacts.profile_file import Corpus
from hotsplit.files.outputs import check_output_folder, check_outputs
from hotsplit.measure.evaluate.quality import EvalReport, ShareCounter, compare_all, mean_bytes
from hotsplit.model.mode_quality import ModeQuality, SparseMode
from hotsplit.model.modes import Mode
from hotsplit.model.neurons import SMOOTH
from hotsplit.profile.predictors.dejavu import dejavu_paths, is_dejavu_file, save_dejavu
from hotsplit.profile.predictors.options import PredictorFormat
from hotsplit.runtime.engine import Engine
from hotsplit.runtime.kernels.gate import Gate

# The model is compared with its dense self on at most this many tokens, and one more if the last
# window would otherwise have a single one.
MAX_TOKENS = 8192


@dataclass(frozen=True, kw_only=True)
class PredictorOutput:
    """A folder for predictors in one of two formats."""

    folder: Path
    format: PredictorFormat
    force: bool

    @property
    def path(self) -> Path:
        return self.folder if self.format == "dejavu" else self.folder / FILE_NAME

    def check(self, num_layers: int, inputs: Sequence[Path], outputs: Sequence[Path]) -> None:
        """Raises HotsplitError if the predictors' files exist already (unless `force`) or are
        among `inputs`, and if a folder of DejaVu's form, which is replaced as a whole, holds other
        files, or `outputs` are to be written into it."""
        check_outputs(self.paths(num_layers), force=self.force, inputs=inputs)
        if self.format == "dejavu":
            check_output_folder(
                self.folder, force=self.force, is_ours=is_dejavu_file, inputs=inputs,
                outputs=outputs,
            )  # fmt: skip

    def paths(self, num_layers: int) -> list[Path]:
        """All files of a model with `num_layers` layers."""
        is_ours = self.format == "hotsplit"
        return [self.path] if is_ours else dejavu_paths(self.folder, num_layers)

    def save(self, predictors: Predictors) -> None:
        if self.format == "dejavu":
            save_dejavu(predictors, self.folder)
        else:
            predictors.save(self.path)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A comparison of the run's target mode with the dense model, and the record of every mode."""

    report: EvalReport | None = None  # None: no mode to measure, or no room for the hidden states
    record: Mapping[SparseMode, ModeQuality] = field(default_factory=dict)


def measure(
    dense: Engine,
    gates: tuple[Gate, ...],
    predictors: Predictors | None,
    windows: Sequence[Tensor],
    corpus_sha256: str,
) -> Measured:
    """Compares the model with its dense self in each mode of `changed`, with one dense pass for all
    of them."""
    chosen, left = [], MAX_TOKENS
    for ids in windows:
        chosen.append(ids[: max(2, left)])
        left -= len(ids)
        if left <= 0:
            break
    device, context = str(dense.device), dense.context_length
    dense_shares = ShareCounter(dense.model)
    with ExitStack() as stack:
        engines = [
            stack.enter_context(
                Engine.of(
                    model, mode=mode, device=device, context_length=context, is_resident=False
                )
            )
            for model, mode in changed(dense.model, gates, predictors)
        ]
        reports = compare_all(dense, engines, chosen, dense_shares=dense_shares)
    return recorded(dense.model, reports, dense_shares, corpus_sha256)


def changed(
    model: ModelFile, gates: tuple[Gate, ...], predictors: Predictors | None
) -> list[tuple[ModelFile, Mode]]:
    """The model with these thresholds and predictors, once for each mode to measure; the run's
    target mode is last. Mode exact of a natively sparse model is left out: it equals its dense
    self."""
    found: list[tuple[ModelFile, Mode]] = []
    if model.activation in SMOOTH:
        thresholds = tuple(gate.threshold for gate in gates)
        found.append((replace(model, threshold_L=thresholds, quality={}), "exact"))
    if predictors is not None:
        found.append((with_predictors(model, gates, predictors), "predicted"))
    return found


def recorded(
    model: ModelFile, reports: Sequence[EvalReport], dense_shares: ShareCounter, corpus_sha256: str
) -> Measured:
    """The last of the reports on the modes of `changed`, and the record of all modes."""
    if not reports:
        return Measured()
    record: dict[SparseMode, ModeQuality] = {}
    for report in reports:
        quality = report.record(corpus_sha256)
        if quality is not None and report.mode != "dense":
            record[report.mode] = quality
    if model.activation not in SMOOTH:
        record["exact"] = ModeQuality(
            perplexity_increase=0.0,
            perplexity_half_width=0.0,
            kl_mean=0.0,
            top1_agreement=1.0,
            num_tokens=reports[-1].num_tokens,
            bytes_per_token=mean_bytes(model, "exact", dense_shares),
            dense_bytes_per_token=reports[-1].dense_bytes_per_token,
            corpus_sha256=corpus_sha256,
        )
    return Measured(report=reports[-1], record=record)


def sha256_of_corpora(corpora: Sequence[Corpus]) -> str:
    """The corpus's hex digest; for several, the sha256 of their concatenated hex digests."""
    if len(corpora) == 1:
        return corpora[0].sha256
    return hashlib.sha256("".join(c.sha256 for c in corpora).encode()).hexdigest()


def with_predictors(model: ModelFile, gates: tuple[Gate, ...], predictors: Predictors) -> ModelFile:
    """The model with these predictors and thresholds, as `convert` would make it."""
    entries = {n: e for n, e in model.tensors.items() if ".ffn_pred_" not in n}
    for layer, predictor in enumerate(predictors.layers):
        entries |= predictor.entries(layer)
    return replace(
        model,
        tensors=entries,
        predictor=predictors.info,
        threshold_L=tuple(gate.threshold for gate in gates),
        quality={},
    )
