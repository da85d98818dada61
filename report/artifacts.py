"""The files of a report, loaded and checked to belong to one model."""

from dataclasses import dataclass
from pathlib import Path

from hotsplit.artifacts.machine_file import Machine
from hotsplit.artifacts.model_file import ModelFile
from hotsplit.artifacts.predictor_file import FILE_NAME, Predictors
from hotsplit.artifacts.profile_file import Profile
from hotsplit.artifacts.split_file import Split
from hotsplit.errors import HotsplitError
from hotsplit.measure.evaluate.quality import EvalReport, load_eval
from hotsplit.profile.predictors.layer_trainer import LayerQuality
from hotsplit.profile.report import load_predictor_report, report_path
from hotsplit.report.report_config import ReportConfig
from hotsplit.solver.verify import verify


@dataclass(frozen=True, kw_only=True)
class Artifacts:
    """The loaded files; None or () if not given. `quality_L`: from the report by the profile."""

    model: ModelFile
    profile: Profile | None
    split: Split | None
    machine: Machine | None
    predictors: Predictors | None
    quality_L: tuple[LayerQuality, ...]
    evals: tuple[EvalReport, ...]
    paths: tuple[tuple[str, Path], ...]  # what each file is, and where


def load_artifacts(config: ReportConfig) -> Artifacts:
    """Loads the files. Raises HotsplitError for a file that is damaged or of another model or
    limits, and for a plan made from another profile or machine."""
    model = ModelFile.load(config.model)
    profile = None if config.profile is None else Profile.load(config.profile)
    machine = None if config.machine is None else Machine.load(config.machine)
    predictors_path = config.predictors
    if predictors_path is not None and predictors_path.is_dir():
        predictors_path /= FILE_NAME
    predictors = None if predictors_path is None else Predictors.load(predictors_path)
    evals = tuple(map(load_eval, config.evals))
    if config.profile is not None and profile is not None:
        _check_model(model, config.profile, profile, profile.active_count_LF.shape)
    if predictors_path is not None and predictors is not None:
        found = (len(predictors.layers), max(layer.up.shape[0] for layer in predictors.layers))
        _check_model(model, predictors_path, predictors, found)
    for path, found_eval in zip(config.evals, evals, strict=True):
        _check_model(model, path, found_eval)
    split = None if config.split is None else _load_split(config, model, profile, machine)
    beside = None if config.profile is None else report_path(config.profile)
    quality_L: tuple[LayerQuality, ...] = ()
    if beside is not None and beside.exists():
        quality_L = load_predictor_report(beside, model.model_id)
        num_layers = model.spec.num_layers
        _check_shape(beside, (len(quality_L) or num_layers,), (num_layers,))
    named = [
        ("model", config.model),
        ("profile", config.profile),
        ("report of the profile", beside if quality_L else None),
        ("plan", config.split),
        ("machine", config.machine),
        ("predictors", predictors_path),
        *(("comparison", path) for path in config.evals),
    ]
    return Artifacts(
        model=model,
        profile=profile,
        split=split,
        machine=machine,
        predictors=predictors,
        quality_L=quality_L,
        evals=evals,
        paths=tuple((what, path) for what, path in named if path is not None),
    )


def _load_split(
    config: ReportConfig, model: ModelFile, profile: Profile | None, machine: Machine | None
) -> Split:
    assert config.split is not None
    split = Split.load(config.split)
    if model.spec.has_experts and not split.num_experts:
        raise HotsplitError(
            f"{config.split}: does not say how many experts it places; run hotsplit solve again"
        )
    split.check_against(model, config.split)
    split.check_files(config.split, profile=config.profile, machine=config.machine)
    if profile is not None and machine is not None:
        verify(split, model=model, profile=profile, machine=machine)
    return split


def _check_model(
    model: ModelFile,
    path: Path,
    found: Profile | Predictors | EvalReport,
    shape: tuple[int, ...] | None = None,
) -> None:
    """Raises HotsplitError for a file of another model or shape; an id of None fits any."""
    if found.model_id not in (None, model.model_id):
        raise HotsplitError(
            f"{path}: is for model {str(found.model_id)[:12]}, but {model.path} is"
            f" {model.model_id[:12]}; give files of one model"
        )
    if shape is not None:
        _check_shape(path, shape, (model.spec.num_layers, model.spec.most_neurons))


def _check_shape(path: Path, found: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    if found != wanted:
        raise HotsplitError(
            f"{path}: has {list(found)} layers and neurons, but the model has {list(wanted)}; give"
            " files of one model"
        )
