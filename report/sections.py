"""The report's sections: text, tables and plots made from the loaded files.

A section whose input is missing names the command that makes it.

Letters: L layers, F neurons of a layer, N plotted shares of the neurons."""

from collections.abc import Sequence

import numpy as np

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.artifacts.profile_file import Profile
from hotsplit.artifacts.split_file import Split
from hotsplit.costs.part_bytes import ITEMS
from hotsplit.report import plots
from hotsplit.report.artifacts import Artifacts
from hotsplit.report.names import Names
from hotsplit.report.page import NONE, Missing, Section, Table
from hotsplit.report.speeds import Speeds
from hotsplit.system.sizes import format_bytes


def rate(seconds: float) -> str:
    """Tokens per second, as text."""
    speed = 1 / seconds
    return f"{speed:,.0f}" if speed >= 100 else f"{speed:,.1f}"


def speed_section(found: Artifacts, speeds: Speeds, names: Names) -> Section:
    missing: list[Missing] = []
    if found.profile is None:
        missing.append(names.no_profile)
    if found.machine is None:
        missing.append(names.no_machine)
    if speeds.why_not is not None:
        missing.append(Missing(line=speeds.why_not, command=names.new_machine))
    if not missing and found.split is None:
        missing.append(names.no_split)
    tables: tuple[Table, ...] = ()
    if found.split is not None:
        tables += (_speed_table(found.split, speeds),)
    drawn: tuple[plots.Plot, ...] = ()
    curve = speeds.curve
    if curve is not None:
        drawn = (plots.plot_curve(curve, found.split),)
        rows = tuple(
            (
                format_bytes(p.budget_bytes),
                p.mode,
                rate(p.objective_s),
                rate(p.layer_split_s),
                f"{p.num_hot:,}",
            )
            for p in curve.points
        )
        what = "experts" if found.model.spec.has_experts else "neurons"
        head = ("GPU memory", "mode", "best plan, tokens/s", "whole layers", f"{what} on the GPU")
        tables += (
            Table(caption="Speed by budget", head=head, rows=rows, num_texts=2, is_folded=True),
        )
    return Section(
        name="speed",
        title="Budget and speed",
        lead="Tokens per second that the solver predicts for one text, from the machine's figures.",
        plots=drawn,
        tables=tables,
        missing=tuple(missing),
    )


def _speed_table(split: Split, speeds: Speeds) -> Table:
    def row(name: str, seconds: float | None, meaning: str) -> tuple[str, ...]:
        told = (
            (NONE, NONE)
            if seconds is None
            else (rate(seconds), f"{seconds / split.objective_s:.2f}x")
        )
        return (name, meaning, *told)

    rows = [row("this plan", split.objective_s, f"at most {split.gap:.2%} slower than the best")]
    if (advice := speeds.advice) is not None:
        there = f"{advice.layer_split_layers} of {len(split.hot)} on GPUs, all weights read"
        rows += [
            row("the CPU alone", advice.cpu_only_s, "the same with nothing on a GPU"),
            row("whole layers", advice.layer_split_s, there),
            row("the machine's limit", advice.limit_s, "the plan's bytes at full bandwidth"),
        ]
    head = ("", "", "tokens/s", "the plan over it")
    return Table(caption="The plan and others", head=head, rows=tuple(rows), num_texts=2)


def placement_section(found: Artifacts, names: Names) -> Section:
    split, profile = found.split, found.profile
    missing = [] if split is not None else [names.no_split]
    missing += [] if profile is not None else [names.no_profile]
    drawn: tuple[plots.Plot, ...] = ()
    tables: tuple[Table, ...] = ()
    if split is not None and profile is not None:
        drawn = (plots.plot_map(split, profile),)
        tables = (_device_table(split, profile), _layer_table(split, profile))
    return Section(
        name="placement",
        title="Placement",
        lead=f"The {'neurons' if split is None else split.units} that GPUs hold: the hottest of each layer,"
        " as many as fit and pay off.",
        plots=drawn,
        tables=tables,
        missing=tuple(missing),
    )


def _device_table(split: Split, profile: Profile) -> Table:
    """Shares of neurons and firings, dense blocks and the head, by device."""
    home = np.array(split.home or (0,) * (len(split.hot) + 1))
    units = plots.units_of(split, profile)
    total, fired_LF = units.count_LF.size, units.count_LF
    rows, left, left_fired = [], total, int(fired_LF.sum())
    all_fired, dense_L = max(1, left_fired), np.array(split.dense_on_gpu)
    for gpu in range(len(split.budgets)):
        layers = np.flatnonzero(home[:-1] == gpu)
        hot = sum(len(units.hot[layer]) for layer in layers)
        fired = int(sum(fired_LF[layer][units.hot[layer]].sum() for layer in layers))
        left, left_fired = left - hot, left_fired - fired
        has_head = split.head_on_gpu and home[-1] == gpu
        rows.append(
            (
                f"GPU {gpu}",
                f"{hot / total:.1%}",
                f"{fired / all_fired:.1%}",
                str(int(dense_L[layers].sum())),
                "yes" if has_head else "no",
            )
        )
    rows.append(
        (
            "CPU",
            f"{left / total:.1%}",
            f"{left_fired / all_fired:.1%}",
            str(int((~dense_L).sum())),
            "no" if split.head_on_gpu else "yes",
        )
    )
    head = ("device", units.name, units.events, "dense blocks", "output head")
    return Table(caption="By device", head=head, rows=tuple(rows))


def _layer_table(split: Split, profile: Profile) -> Table:
    share_L, units = plots.firings_on_gpu(split, profile), plots.units_of(split, profile)
    num_neurons = units.count_LF.shape[1]
    rows = tuple(
        (
            str(layer),
            "GPU" if is_there else "CPU",
            f"{len(ids):,}",
            f"{len(ids) / num_neurons:.1%}",
            f"{share:.1%}",
        )
        for layer, (ids, is_there, share) in enumerate(
            zip(units.hot, split.dense_on_gpu, share_L, strict=True)
        )
    )
    head = (
        "layer",
        "dense block",
        f"{units.name} on the GPU",
        "of the layer",
        f"of its {units.events}",
    )
    return Table(caption="Placement by layer", head=head, rows=rows, num_texts=2, is_folded=True)


def bytes_section(found: Artifacts, names: Names) -> Section:
    split = found.split
    lead = "Weights, cache and workspace of the plan: what each device holds."
    if split is None:
        return Section(
            name="bytes", title="Where each byte goes", lead=lead, missing=(names.no_split,)
        )
    gpus, cpu = split.items_of_gpus(found.model)
    gpus += [dict.fromkeys(ITEMS, 0)] * (len(split.budgets) - len(gpus))
    rows = [
        (
            plots.name_of(item, split.units),
            *(format_bytes(side[item]) if side[item] else NONE for side in (*gpus, cpu)),
        )
        for item in ITEMS
        if any(side[item] for side in (*gpus, cpu))
    ]
    rows.append(("in all", *(format_bytes(sum(side.values())) for side in (*gpus, cpu))))
    rows.append(
        (
            "granted",
            *map(format_bytes, split.budgets),
            format_bytes(split.host_budget_bytes) if split.host_budget_bytes else NONE,
        )
    )
    texts = f"{split.num_sequences} texts of " if split.num_sequences > 1 else ""
    head = ("", *(f"GPU {number}" for number in range(len(gpus))), "CPU")
    return Section(
        name="bytes",
        title="Where each byte goes",
        lead=f"{lead} The cache is for {texts}{split.context_length:,} tokens.",
        plots=(plots.plot_bytes(gpus, cpu, split.units),),
        tables=(Table(caption="Bytes by device", head=head, rows=tuple(rows)),),
    )


def firing_section(found: Artifacts, names: Names) -> Section:
    profile = found.profile
    lead = "How sparse the model is on the profiled text, and how unevenly its neurons fire."
    if profile is None:
        return Section(name="firings", title="Firings", lead=lead, missing=(names.no_profile,))
    corpora = ", ".join(corpus.name for corpus in profile.corpora[:4])
    more = len(profile.corpora) - 4
    corpora += f" and {more} more" if more > 0 else ""
    return Section(
        name="firings",
        title="Firings",
        lead=f"{lead} {profile.num_tokens:,} tokens of {corpora}.",
        plots=(plots.plot_firings(profile), plots.plot_density(profile)),
        tables=(_firing_table(profile), *_expert_tables(profile)),
    )


def _firing_table(profile: Profile) -> Table:
    curve_LN = plots.firing_curves(profile)
    columns = zip(
        profile.density_L,
        curve_LN[:, 5],
        curve_LN[:, 20],
        curve_LN[:, 50],
        profile.never_fired_L(),
        profile.threshold_L,
        strict=True,
    )
    rows = tuple(
        (
            str(layer),
            f"{density:.2%}",
            f"{five:.1%}",
            f"{fifth:.1%}",
            f"{half:.1%}",
            f"{silent:,}",
            f"{threshold:.4g}",
        )
        for layer, (density, five, fifth, half, silent, threshold) in enumerate(columns)
    )
    head = (
        "layer",
        "neurons that fire",
        "firings of the hottest 5 %",
        "20 %",
        "50 %",
        "never fired",
        "threshold",
    )
    return Table(caption="Firings by layer", head=head, rows=rows, is_folded=True)


def _expert_tables(profile: Profile) -> tuple[Table, ...]:
    """How often a mixture's router chose its experts; () of a model without any."""
    count_LE, fifth_L = profile.expert_count_LE, profile.hottest_fifth_of_experts_L()
    if count_LE is None or fifth_L is None:
        return ()
    rows = tuple(
        (
            str(layer),
            f"{count_E.max() / profile.num_tokens:.1%}",
            f"{count_E.min() / profile.num_tokens:.1%}",
            f"{fifth:.1%}",
            f"{(count_E == 0).sum():,}",
        )
        for layer, (count_E, fifth) in enumerate(zip(count_LE, fifth_L, strict=True))
        if count_E.any()  # not in a layer without experts
    )
    head = (
        "layer",
        "tokens of the hottest expert",
        "of the coldest",
        "choices of the hottest fifth",
        "never chosen",
    )
    return (Table(caption="Experts by layer", head=head, rows=rows),)


def predictor_section(found: Artifacts, names: Names) -> Section:
    lead = "Small networks that predict which neurons of a layer are worth computing."
    title, missing = "Predictors", []
    tables: list[Table] = []
    drawn: tuple[plots.Plot, ...] = ()
    if found.quality_L:
        drawn = (plots.plot_predictors(found.quality_L),)
        tables = [_predictor_summary(found), _predictor_table(found)]
        lead += " Measured on text that nothing was fitted to."
    else:
        missing.append(names.no_predictors)
        stored = _stored_predictors(found)
        tables += [] if stored is None else [stored]
    return Section(
        name="predictors",
        title=title,
        lead=lead,
        plots=drawn,
        tables=tuple(tables),
        missing=tuple(missing),
    )


def _predictor_summary(found: Artifacts) -> Table:
    chosen = [quality.chosen for quality in found.quality_L]
    fields = (
        ("recall", "recall", 1),
        ("precision", "precision", 1),
        ("contribution kept", "contribution", 2),
        ("lost norm", "lost_norm", 2),
        ("neurons that fire", "density", 1),
        ("neurons named", "predicted_density", 1),
    )
    rows = []
    for name, field, digits in fields:
        values = [getattr(quality, field) for quality in chosen]
        told = (sum(values) / len(values), min(values), max(values))
        rows.append((name, *(f"{value:.{digits}%}" for value in told)))
    sizes = [quality.num_bytes for quality in chosen]
    rows.append(
        (
            "size of a layer's",
            *map(format_bytes, (sum(sizes) // len(sizes), min(sizes), max(sizes))),
        )
    )
    return Table(caption="Over the layers", head=("", "mean", "least", "most"), rows=tuple(rows))


def _predictor_table(found: Artifacts) -> Table:
    rows = tuple(
        (
            str(layer),
            q.chosen.name,
            "yes" if q.chosen.is_trained else "no",
            format_bytes(q.chosen.num_bytes),
            f"{q.chosen.recall:.1%}",
            f"{q.chosen.precision:.1%}",
            f"{q.chosen.contribution:.2%}",
            f"{q.chosen.lost_norm:.2%}",
            f"{q.chosen.density:.1%}",
            f"{q.chosen.predicted_density:.1%}",
            f"{q.break_even_density:.1%}",
        )
        for layer, q in enumerate(found.quality_L)
    )
    head = (
        "layer",
        "form",
        "trained",
        "size",
        "recall",
        "precision",
        "contribution",
        "lost norm",
        "fire",
        "named",
        "pays off below",
    )
    return Table(caption="Predictors by layer", head=head, rows=rows, num_texts=3, is_folded=True)


def _stored_predictors(found: Artifacts) -> Table | None:
    """The predictors of their file or of the model, for a page without a report on their quality."""
    if found.predictors is not None:
        info = found.predictors.info
        sizes = [
            sum(matrix.data.nbytes for matrix in layer.matrices(n).values())
            for n, layer in enumerate(found.predictors.layers)
        ]
    elif found.model.predictor is not None:
        info, sizes = found.model.predictor, _sizes_in(found.model)
    else:
        return None
    named_L: Sequence[float | None] = info.density_L or (None,) * len(info.rank_L)
    rows = tuple(
        (
            str(layer),
            f"rank {rank}" if rank else "whole",
            format_bytes(size),
            NONE if named is None else f"{named:.1%}",
            f"{threshold:.4g}",
        )
        for layer, (rank, size, named, threshold) in enumerate(
            zip(info.rank_L, sizes, named_L, info.threshold_L, strict=True)
        )
    )
    head = ("layer", "form", "size", "named", "threshold")
    return Table(caption=f"Predictors of kind {info.kind}", head=head, rows=rows, num_texts=2)


def _sizes_in(model: ModelFile) -> list[int]:
    return [
        sum(
            entry.num_bytes
            for name, entry in model.tensors.items()
            if name.startswith(f"blk.{layer}.ffn_pred_")
        )
        for layer in range(model.spec.num_layers)
    ]
