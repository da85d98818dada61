"""Reports on a profile's predictors: a few lines, JSON, and Markdown; and
reads the predictors' section of the JSON.

The quality of a layer's chosen predictor is measured on held-out text, that of its candidates on
the text that the choice was made on.

Letters: L layers."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, cast, get_args

from hotsplit.errors import HotsplitError
from hotsplit.files.atomic import partial_file
from hotsplit.files.json_file import read_object
from hotsplit.files.typed import Fields, shown
from hotsplit.measure.evaluate.quality import EvalReport
from hotsplit.model.mode_quality import MAX_LOSS, ModeQuality
from hotsplit.profile.predictors.layer_trainer import LayerQuality
from hotsplit.profile.predictors.selection import Form, Quality
from hotsplit.system.sizes import format_bytes

if TYPE_CHECKING:
    from hotsplit.profile.collect import ProfileReport

FORMAT, VERSION = "hotsplit.profile_report", 1


def report_paths(output: Path) -> tuple[Path, Path]:
    """The JSON and the Markdown beside a profile: for model.profile.safetensors,
    model.profile.report.json and model.profile.report.md."""
    stem = output.name.removesuffix(".safetensors")
    return output.with_name(stem + ".report.json"), output.with_name(stem + ".report.md")


def short_lines(report: "ProfileReport") -> list[str]:
    """Lines for the terminal about predictors, if there are any."""
    if not report.quality_L:
        return []
    forms = [q.chosen.name for q in report.quality_L]
    counted = {name: forms.count(name) for name in sorted(set(forms))}
    what = ", ".join(f"{count} x {name}" for name, count in counted.items())
    return [
        f"wrote {report.predictors}: {what}; {format_bytes(report.predictor_bytes)},"
        f" {report.predictor_bytes / report.ffn_bytes:.1%} of the feed-forward bytes",
        f"chosen:    {_summary([q.chosen for q in report.quality_L])}",
        _untrained(report.quality_L),
        _of_model(report.quality),
        *warnings(report),
    ]


def warnings(report: "ProfileReport") -> list[str]:
    """Warns of predictors that read more than they save, and of modes that lose more than
    MAX_LOSS."""
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
        f"in {len(bad)} of {len(quality_L)} layers the predictor reads more than it saves: {density:.0%}"
        f" of the neurons fire there, and it pays off below {limit:.0%}; mode exact reads less"
    ]


def _of_model(quality: EvalReport | None) -> str:
    if quality is None:
        return "not compared with its dense self: no room for its hidden states"
    return f"mode {quality.mode} compared with dense: {quality.line}"


def _untrained(quality_L: Sequence[LayerQuality]) -> str:
    trained = sum(q.chosen.is_trained for q in quality_L)
    if not trained:
        return "untrained: the same, since no layer's best predictor is a trained one"
    what = f"untrained (in {trained} of {len(quality_L)} layers training was better): "
    return what + _summary([q.start for q in quality_L])


def _summary(qualities: Sequence[Quality]) -> str:
    """Means over the layers."""
    return (
        f"predicted sparsity {1 - _mean([q.predicted_density for q in qualities]):.1%}"
        f" (true {1 - _mean([q.density for q in qualities]):.1%}),"
        f" recall {_mean([q.recall for q in qualities]):.1%},"
        f" precision {_mean([q.precision for q in qualities]):.1%},"
        f" contribution {_mean([q.contribution for q in qualities]):.2%},"
        f" lost norm {_mean([q.lost_norm for q in qualities]):.2%}"
    )


def save_report(report: "ProfileReport") -> None:
    """Writes both files beside the profile."""
    json_path, markdown_path = report_paths(report.output)
    content = {"format": FORMAT, "version": VERSION, **asdict(report)}
    with partial_file(json_path) as partial:
        partial.write_text(json.dumps(content, default=str, indent=1) + "\n")
    with partial_file(markdown_path) as partial:
        partial.write_text(markdown(report))


def markdown(report: "ProfileReport") -> str:
    """The whole report as Markdown."""
    lines = [
        "# Profile",
        "",
        f"Model {report.model_id[:12]}, {report.num_tokens:,} tokens, {report.seconds:.0f} s.",
        "",
    ]
    if report.quality is not None:
        lines += [f"On text that this run fitted nothing to, {_of_model(report.quality)}.", ""]
        lines += ["± is half of the 95 % confidence interval.", ""]
    for line in warnings(report):
        lines += [f"**{line[:1].upper()}{line[1:]}.**", ""]
    if report.record:
        lines += _of_modes(report)
    head = ("layer", "density: neurons that fire", "firings of the hottest fifth", "threshold")
    columns = zip(report.density_L, report.hottest_fifth_L, report.threshold_L, strict=True)
    lines += _table(
        head,
        [(str(layer), f"{density:.2%}", f"{fifth:.1%}", f"{threshold:.4g}")
         for layer, (density, fifth, threshold) in enumerate(columns)],
    )  # fmt: skip
    if report.quality_L:
        lines += _of_predictors(report)
    return "\n".join(lines) + "\n"


def _of_modes(report: "ProfileReport") -> list[str]:
    head = ("mode", "perplexity", "KL", "same top token", "bytes a token", "of dense")
    rows = [
        (mode, f"{q.perplexity_increase:+.2%} ± {q.perplexity_half_width:.2%}", f"{q.kl_mean:.5f}",
         f"{q.top1_agreement:.2%}", f"{q.bytes_per_token:,}",
         f"{q.bytes_per_token / q.dense_bytes_per_token:.1%}")
        for mode, q in sorted(report.record.items())
    ]  # fmt: skip
    return [*_table(head, rows), ""]


def _of_predictors(report: "ProfileReport") -> list[str]:
    lines = [
        "",
        "# Predictors",
        "",
        f"They take {format_bytes(report.predictor_bytes)},"
        f" {report.predictor_bytes / report.ffn_bytes:.1%} of the feed-forward bytes.",
        "",
        "## Chosen",
        "",
        "On text that this run fitted nothing to. *Lost norm*: |y - y_named| / |y| of the layer."
        " *Break-even*: the density below which predicted mode reads fewer bytes than exact.",
        "",
    ]
    lines += _chosen_table(report.quality_L)
    lines += ["", "## The same without training", ""]
    lines += _quality_table([(str(i), q.start) for i, q in enumerate(report.quality_L)])
    lines += ["", "## All candidates", "", "On the text that the choice was made on.", ""]
    lines += _quality_table(
        [(str(i), q) for i, layer in enumerate(report.quality_L) for q in layer.candidates]
    )
    return lines


def _chosen_table(quality_L: Sequence[LayerQuality]) -> list[str]:
    rows = _quality_table([(str(i), q.chosen) for i, q in enumerate(quality_L)])
    extra = [" hottest fifth | break-even |", " --- | --- |"]
    extra += [f" {q.hottest_fifth:.1%} | {q.break_even_density:.1%} |" for q in quality_L]
    return [row + more for row, more in zip(rows, extra, strict=True)]


def _quality_table(rows: Sequence[tuple[str, Quality]]) -> list[str]:
    head = ("layer", "predictor", "trained", "bytes", "density", "named", "recall", "precision",
            "contribution", "lost norm", "bytes a token")  # fmt: skip
    return _table(head, [
        (label, q.name, "yes" if q.is_trained else "no", f"{q.num_bytes:,}", f"{q.density:.2%}",
         f"{q.predicted_density:.2%}", f"{q.recall:.2%}", f"{q.precision:.2%}",
         f"{q.contribution:.3%}", f"{q.lost_norm:.2%}", f"{q.bytes_per_token:,.0f}")
        for label, q in rows
    ])  # fmt: skip


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(cells) + " |" for cells in (head, *rows)]
    return [lines[0], "|" + " --- |" * len(head), *lines[1:]]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


MOST = 1e18  # the largest number that is accepted
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
    try:
        layers = Fields(values).items("quality_L")
        return tuple(
            _layer(Fields(layer, f"quality_L[{number}]")) for number, layer in enumerate(layers)
        )
    except HotsplitError as error:
        raise HotsplitError(f"{path}: {error}; profile again") from error


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
