"""Reports on a profile: lines about its predictors, and JSON, which the report page reads.

The quality of a layer's chosen predictor is measured on held-out text, that of its candidates on
the text that the choice was made on.

Letters: L layers."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from hotsplit.errors import HotsplitError, about
from hotsplit.files.atomic import partial_file
from hotsplit.files.declared import read_declared
from hotsplit.files.json_file import read_object
from hotsplit.model.mode_quality import MAX_LOSS, ModeQuality
from hotsplit.profile.predictors.layer_trainer import LayerQuality
from hotsplit.profile.predictors.selection import Quality
from hotsplit.system.sizes import format_bytes

if TYPE_CHECKING:
    from hotsplit.profile.collect import ProfileReport

FORMAT, VERSION = "hotsplit.profile_report", 1


def report_path(output: Path) -> Path:
    """The JSON beside a profile: for model.profile.safetensors, model.profile.report.json."""
    return output.with_name(output.name.removesuffix(".safetensors") + ".report.json")


def short_lines(report: "ProfileReport") -> list[str]:
    """Lines for the terminal about predictors, if there are any."""
    if not report.quality_L or report.quality is None:
        return []
    forms = [q.chosen.name for q in report.quality_L]
    counted = {name: forms.count(name) for name in sorted(set(forms))}
    what = ", ".join(f"{count} x {name}" for name, count in counted.items())
    return [
        f"wrote {report.predictors}: {what}; {format_bytes(report.predictor_bytes)},"
        f" {report.predictor_bytes / report.ffn_bytes:.1%} of the feed-forward bytes",
        f"chosen:    {_summary([q.chosen for q in report.quality_L])}",
        _untrained(report.quality_L),
        f"mode {report.quality.mode} compared with dense: {report.quality.line}",
        *warnings(report),
    ]


def warnings(report: "ProfileReport") -> list[str]:
    """Warns of predictors that read more than they save, and of losses over MAX_LOSS."""
    lines = [f"warning: {line}" for line in _not_paying(report.quality_L)]
    costly = {m: q for m, q in report.record.items() if q.perplexity_increase > MAX_LOSS}
    if not costly:
        return lines
    each = ", ".join(f"{mode} {_cost(quality)}" for mode, quality in sorted(costly.items()))
    line = f"warning: more than {MAX_LOSS:.0%} of the perplexity is lost: {each}"
    return [*lines, f"{line}; a model file made with this uses them only on request"]


def _cost(quality: ModeQuality) -> str:
    saved = 1 - quality.bytes_per_token / quality.dense_bytes_per_token
    return (
        f"{quality.perplexity_increase:+.1%} ± {quality.perplexity_half_width:.1%} for"
        f" {abs(saved):.0%} {'less' if saved >= 0 else 'more'} to read"
    )


def _not_paying(quality_L: Sequence[LayerQuality]) -> list[str]:
    """A line on the layers whose density is not below the break-even, if there are any."""
    bad = [q for q in quality_L if q.chosen.density >= q.break_even_density]
    if not bad:
        return []
    density = _mean([q.chosen.density for q in bad])
    limit = _mean([q.break_even_density for q in bad])
    return [
        f"in {len(bad)} of {len(quality_L)} layers the predictor reads more than it saves:"
        f" {density:.0%} of the neurons fire there, and it pays off below {limit:.0%}; mode exact"
        " reads less"
    ]


def _untrained(quality_L: Sequence[LayerQuality]) -> str:
    trained = sum(q.chosen.is_trained for q in quality_L)
    if not trained:
        return "untrained: the same, since no layer's best predictor is a trained one"
    what = f"untrained (in {trained} of {len(quality_L)} layers training was better): "
    return what + _summary([q.start for q in quality_L])


def _summary(qualities: Sequence[Quality]) -> str:
    return (
        f"predicted sparsity {1 - _mean([q.predicted_density for q in qualities]):.1%}"
        f" (true {1 - _mean([q.density for q in qualities]):.1%}),"
        f" recall {_mean([q.recall for q in qualities]):.1%},"
        f" precision {_mean([q.precision for q in qualities]):.1%},"
        f" contribution {_mean([q.contribution for q in qualities]):.2%},"
        f" lost norm {_mean([q.lost_norm for q in qualities]):.2%}"
    )


def save_report(report: "ProfileReport") -> None:
    """Writes the JSON beside the profile."""
    content = {"format": FORMAT, "version": VERSION, **asdict(report)}
    with partial_file(report_path(report.output)) as partial:
        partial.write_text(json.dumps(content, default=str, indent=1) + "\n")


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


_WHAT = "report of a profile"


def load_predictor_report(path: Path, model_id: str) -> tuple[LayerQuality, ...]:
    """The quality of each layer's predictors, () if none were trained. Raises HotsplitError for
    anything but the report of a profile of this model."""
    values = read_object(path, _WHAT)
    found = (values.get("format"), values.get("version"), values.get("model_id"))
    if found != (FORMAT, VERSION, model_id):
        raise HotsplitError(
            f"{path}: not the report of a profile of model {model_id[:12]}; profile again"
        )
    with about(path, "; profile again"):
        return read_declared(tuple[LayerQuality, ...], values.get("quality_L"), "quality_L")
