"""Exports our artifacts to the file formats of other engines.

This module loads the artifacts, refuses those that do not belong together, and notes what the other
format cannot express. The formats themselves are in the other modules of this folder."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from hotsplit.artifacts.profile_file import Profile
from hotsplit.artifacts.split_file import Split
from hotsplit.errors import HotsplitError
from hotsplit.export import expert_counts, powerinfer, sparkinfer
from hotsplit.files.outputs import check_output, check_output_folder

Format = Literal["powerinfer-activations", "gpuidx", "sparkinfer-split", "ktransformers", "eplb"]
OF_PROFILES = ("powerinfer-activations", "ktransformers", "eplb")


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """A profile (OF_PROFILES) or a plan (ktransformers, too, and the others), and the path of its
    export. A plan needs the `profile` that it was solved with: the plan lists the hot neurons or
    experts, the profile has their number and the order of the cold ones."""

    source: Path
    output: Path
    format: Format
    profile: Path | None = None
    force: bool = False

    def __post_init__(self) -> None:
        if self.format not in get_args(Format):
            raise HotsplitError(
                f"format {self.format!r} is unknown; known: {', '.join(get_args(Format))}"
            )
        is_of_profile = self.format in OF_PROFILES
        if is_of_profile and self.format != "ktransformers" and self.profile is not None:
            raise HotsplitError(
                f"--profile belongs to the export of a plan; {self.format} is made from the profile"
                " given as SOURCE: leave --profile out"
            )
        if not is_of_profile and self.profile is None:
            raise HotsplitError(
                f"{self.format} needs --profile, the one that the plan was solved with:"
                " a plan does not say how many neurons a layer has"
            )


@dataclass(frozen=True, kw_only=True)
class ExportReport:
    """`notes` tell the user what the other format or engine cannot do, or does with the file."""

    output: Path
    format: Format
    model_id: str
    num_layers: int
    units: Literal["neurons", "experts"]
    num_units: int  # of a layer
    num_hot: int | None  # of all layers; None for a profile
    group_size: int | None
    num_bytes: int
    notes: tuple[str, ...]


def export(config: ExportConfig) -> ExportReport:
    """Writes the export, whole or not at all, and returns a report."""
    if config.format == "powerinfer-activations":
        return _export_profile(config)
    if config.format in OF_PROFILES:
        return _export_counts(config)
    return _export_plan(config)


def _export_profile(config: ExportConfig) -> ExportReport:
    check_output_folder(
        config.output,
        force=config.force,
        is_ours=powerinfer.is_activation_file,
        inputs=[config.source],
    )
    profile = Profile.load(config.source)
    if profile.expert_count_LE is not None:
        raise HotsplitError(
            f"{config.source}: is of a mixture of experts, which PowerInfer does not run; export"
            " the profile of a dense model"
        )
    return ExportReport(
        output=config.output,
        format=config.format,
        model_id=profile.model_id,
        num_layers=profile.active_count_LF.shape[0],
        units="neurons",
        num_units=profile.active_count_LF.shape[1],
        num_hot=None,
        group_size=None,
        num_bytes=powerinfer.write_activations(profile, config.output),
        notes=tuple(powerinfer.activation_notes(profile, config.output)),
    )


def _export_counts(config: ExportConfig) -> ExportReport:
    inputs = [path for path in (config.source, config.profile) if path is not None]
    check_output(config.output, force=config.force, inputs=inputs)
    suffix = {"eplb": ".json", "ktransformers": ".pt"}[config.format]
    if config.output.suffix != suffix:
        raise HotsplitError(
            f"{config.output}: wanted a name that ends in {suffix}, by which the other engine knows"
            " the format"
        )
    path = config.profile or config.source
    profile = Profile.load(path)
    count_LE = expert_counts.counts_of(profile, path)
    total, notes, num_hot = count_LE[count_LE.any(axis=1)].size, list[str](), None
    if config.profile is not None:
        split = Split.load(config.source)
        check_same_model(split, config.source, profile, path)
        split.check_files(config.source, profile=path)
        num_hot = expert_counts.num_hot(count_LE, split)
        notes.append(expert_counts.ratio_note(num_hot, total))
        count_LE = expert_counts.of_plan(count_LE, split)
    if config.format == "eplb":
        num_bytes = expert_counts.write_eplb(count_LE, config.output)
    else:
        num_bytes = expert_counts.write_ktransformers(count_LE, config.output)
    return ExportReport(
        output=config.output,
        format=config.format,
        model_id=profile.model_id,
        num_layers=len(count_LE),
        units="experts",
        num_units=count_LE.shape[1],
        num_hot=num_hot,
        group_size=None,
        num_bytes=num_bytes,
        notes=tuple(notes),
    )


def _export_plan(config: ExportConfig) -> ExportReport:
    assert config.profile is not None
    check_output(config.output, force=config.force, inputs=(config.source, config.profile))
    split, profile = Split.load(config.source), Profile.load(config.profile)
    check_belongs(split, config.source, profile, config.profile)
    split.check_files(config.source, profile=config.profile)
    num_neurons = profile.active_count_LF.shape[1]
    notes = []
    if split.mode != "predicted":
        notes.append(
            f"the plan was solved for mode {split.mode}; the other engine runs with predictors"
        )
    group_size = None
    if config.format == "gpuidx":
        notes += powerinfer.index_notes(split, dense_on_cpu(split), config.output)
        num_bytes = powerinfer.write_index(split, num_neurons, config.output)
    else:
        sparkinfer.hot_pattern(split)
        group_size = sparkinfer.group_size_of(num_neurons, config.output)
        notes += sparkinfer.model_split_notes(split, dense_on_cpu(split), group_size)
        num_bytes = sparkinfer.write_model_split(split, profile, group_size, config.output)
    return ExportReport(
        output=config.output,
        format=config.format,
        model_id=split.model_id,
        num_layers=len(split.hot),
        units="neurons",
        num_units=num_neurons,
        num_hot=sum(len(ids) for ids in split.hot),
        group_size=group_size,
        num_bytes=num_bytes,
        notes=tuple(notes),
    )


def check_belongs(split: Split, split_path: Path, profile: Profile, profile_path: Path) -> None:
    """Raises HotsplitError unless plan and profile are of one model, with as many layers, and the
    profile has all neurons that the plan names."""
    check_same_model(split, split_path, profile, profile_path)
    if profile.expert_count_LE is not None:
        raise HotsplitError(
            f"{split_path}: a plan for a mixture of experts, which this engine's files cannot"
            " express; --format ktransformers can, or run it here with hotsplit generate --split"
        )
    num_layers, num_neurons = profile.active_count_LF.shape
    is_known = [((ids >= 0) & (ids < num_neurons)).all() for ids in split.hot]
    if len(split.hot) != num_layers:
        raise HotsplitError(
            f"{split_path}: has {len(split.hot)} layers, but {profile_path} {num_layers}; run"
            " hotsplit solve again with this profile"
        )
    if not all(is_known):
        layer = is_known.index(False)
        raise HotsplitError(
            f"{split_path}: names neurons of layer {layer} that are not among the {num_neurons} of"
            f" {profile_path}; run hotsplit solve again with this profile"
        )


def check_same_model(split: Split, split_path: Path, profile: Profile, profile_path: Path) -> None:
    """Raises HotsplitError for a profile of another model than the plan's."""
    if split.model_id != profile.model_id:
        raise HotsplitError(
            f"{split_path}: made for model {split.model_id[:12]}, but {profile_path} is of"
            f" {profile.model_id[:12]}; give the profile that the plan was solved with"
        )


def dense_on_cpu(split: Split) -> str:
    """Describes the dense blocks, and the head, that the plan keeps on the CPU; "" for none."""
    layers = split.dense_on_gpu.count(False)
    plural = "s" if layers > 1 else ""
    names = [f"the attention, norms and predictors of {layers} layer{plural}"] if layers else []
    return " and ".join(names + ([] if split.head_on_gpu else ["the output head"]))
