"""The section on the modes' quality, from all comparisons and records given."""

from dataclasses import dataclass

from hotsplit.measure.evaluate.quality import EvalReport
from hotsplit.model.mode_quality import ModeQuality
from hotsplit.model.modes import Mode
from hotsplit.report.artifacts import Artifacts
from hotsplit.report.page import Names, Section, Table
from hotsplit.report.plots import plot_quality


@dataclass(frozen=True)
class MeasuredMode:
    """A measurement of a mode, from one source. A record lacks two half-widths."""

    mode: Mode
    source: str  # described in a few words
    quality: EvalReport | ModeQuality
    kl_half_width: float | None = None
    agreement_half_width: float | None = None

    @property
    def share_of_bytes(self) -> float:
        return self.quality.bytes_per_token / self.quality.dense_bytes_per_token

    @property
    def rise(self) -> tuple[float, float | None]:
        """The increase of the perplexity, and half the width of its interval."""
        return self.quality.perplexity_increase, self.quality.perplexity_half_width

    @property
    def perplexity_text(self) -> str:
        return within(*self.rise, "+.2%", ".2%")

    def agreement_text(self, form: str) -> str:
        return within(self.quality.top1_agreement, self.agreement_half_width, form, form)


def measured_of(found: Artifacts) -> list[MeasuredMode]:
    """Comparisons, then records of model, predictors and profile, without duplicates."""
    measured = []
    for number, report in enumerate(found.evals, 1):
        name = "eval" if len(found.evals) == 1 else f"eval {number}"
        widths = report.kl_half_width, report.top1_half_width
        measured.append(MeasuredMode(report.mode, name, report, *widths))
    seen: list[ModeQuality] = []
    holders = (("model", found.model), ("predictors", found.predictors), ("profile", found.profile))
    for source, holder in holders:
        for mode, quality in sorted(holder.quality.items()) if holder is not None else ():
            if quality not in seen:
                seen.append(quality)
                measured.append(MeasuredMode(mode, f"the {source}'s record", quality))
    return measured


def cost_of(found: Artifacts, mode: Mode) -> MeasuredMode | None:
    """The first measurement of a mode, in the order of `measured_of`."""
    return next((one for one in measured_of(found) if one.mode == mode), None)


def costs_nothing(mode: Mode) -> bool:
    """True if a mode by definition computes the same as the dense model."""
    return mode != "predicted"


def quality_section(found: Artifacts, names: Names) -> Section:
    measured = measured_of(found)
    missing = () if found.evals else (names.no_eval,)
    lead = "What each mode loses against the same file run densely on the same held-out text."
    if not measured:
        return Section("quality", "Quality against dense", lead, missing=missing)
    rows = tuple(
        (
            one.mode,
            one.source,
            one.perplexity_text,
            within(one.quality.kl_mean, one.kl_half_width, ".5f", ".5f"),
            one.agreement_text(".2%"),
            f"{one.share_of_bytes:.1%}",
            f"{one.quality.num_tokens:,}",
        )
        for one in measured
    )
    head = ("mode", "by", "perplexity", "KL, nats", "same top token", "bytes read", "tokens")
    tables = [Table("Against dense", head, rows, num_texts=2, is_wide=True)]
    tables += [_own_table(found)] if found.evals else []
    drawn = plot_quality(
        [(f"{x.mode}, {x.source.removeprefix('the ')}", *x.rise) for x in measured]
    )
    return Section(
        "quality", "Quality against dense", lead, (drawn,), tuple(tables), missing=missing
    )


def _own_table(found: Artifacts) -> Table:
    rows = []
    for number, one in enumerate(found.evals, 1):
        p99 = f"{one.kl_p99:.4f}"
        if one.kl_p99_interval is not None:
            p99 += " in {:.4f}..{:.4f}".format(*one.kl_p99_interval)
        own = within(one.perplexity, one.perplexity_own_half_width, ".3f", ".2f")
        dense = within(one.dense_perplexity, one.dense_perplexity_half_width, ".3f", ".2f")
        computed = sum(one.hidden_share_L) / max(1, len(one.hidden_share_L))
        share = within(computed, one.hidden_half_width, ".1%", ".1%")
        rows.append((f"eval {number}", one.mode, own, dense, p99, share))
    perplexities = "its perplexity", "dense perplexity"
    head = ("", "mode", *perplexities, "KL, 99th percentile", "neurons computed")
    return Table("Comparisons in full", head, tuple(rows), num_texts=2, is_folded=True)


def within(value: float, half_width: float | None, form: str, half_form: str) -> str:
    return f"{value:{form}}" + ("" if half_width is None else f" ± {half_width:{half_form}}")
