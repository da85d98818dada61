"""Reads the predictors' section of the report that `profile` writes next to its output.

Letters: L layers."""

from dataclasses import dataclass
from pathlib import Path
from typing import cast, get_args

from hotsplit.errors import HotsplitError
from hotsplit.files.json_file import read_object
from hotsplit.files.typed import Fields, shown
from hotsplit.profile.predictors.layer_trainer import LayerQuality
from hotsplit.profile.predictors.selection import Form, Quality
from hotsplit.profile.report.lines import FORMAT, VERSION

MOST = 1e18  # the largest number that is accepted
_WHAT = "report of a profile"


@dataclass(frozen=True, kw_only=True)
class PredictorReport:
    """`quality_L` is () if no predictors were trained."""

    model_id: str
    quality_L: tuple[LayerQuality, ...]


def load_predictor_report(path: Path, model_id: str) -> PredictorReport:
    """Raises HotsplitError for anything but the report of a profile of this model."""
    values = read_object(path, _WHAT)
    found = (values.get("format"), values.get("version"), values.get("model_id"))
    if found != (FORMAT, VERSION, model_id):
        raise HotsplitError(
            f"{path}: not the report of a profile of model {model_id[:12]}; profile again"
        )
    try:
        layers = Fields(values).items("quality_L")
        quality_L = tuple(
            _layer(Fields(layer, f"quality_L[{number}]")) for number, layer in enumerate(layers)
        )
    except HotsplitError as error:
        raise HotsplitError(f"{path}: {error}; profile again") from error
    return PredictorReport(model_id=model_id, quality_L=quality_L)


def _layer(read: Fields) -> LayerQuality:
    candidates = read.items("candidates")
    return LayerQuality(
        chosen=_quality(read.part("chosen")),
        start=_quality(read.part("start")),
        hottest_fifth=_share(read, "hottest_fifth"),
        candidates=tuple(
            _quality(Fields(one, f"{read.name}.candidates[{i}]"))
            for i, one in enumerate(candidates)
        ),
        break_even_density=_share(read, "break_even_density"),
    )


def _quality(read: Fields) -> Quality:
    return Quality(
        form=cast(Form, read.choice("form", get_args(Form))),
        rank=read.count("rank"),
        matrix_kind=read.line("matrix_kind"),
        is_trained=read.flag("is_trained"),
        num_bytes=read.count("num_bytes"),
        threshold=read.number("threshold"),
        density=_share(read, "density"),
        predicted_density=_share(read, "predicted_density"),
        recall=_share(read, "recall"),
        precision=_share(read, "precision"),
        contribution=_share(read, "contribution"),
        lost_norm=_number(read, "lost_norm", MOST),
        bytes_per_token=_number(read, "bytes_per_token", MOST),
    )


def _share(read: Fields, key: str) -> float:
    return _number(read, key, 1)


def _number(read: Fields, key: str, most: float) -> float:
    number = read.number(key, least=0)
    if number > most:
        raise HotsplitError(f"{read.name}.{key} is {shown(number)}, wanted 0 to {most:g}")
    return number
