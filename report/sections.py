"""The report's sections: text, tables and plots made from the loaded files.

A section whose input is missing names the command that makes it.

Letters: L layers, F neurons of a layer, N plotted shares of the neurons."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from hotsplit.artifacts.profile_file import Profile
from hotsplit.artifacts.split_file import Split
from hotsplit.costs.part_bytes import ITEMS, layer_bytes
from hotsplit.report import plots
from hotsplit.report.artifacts import Artifacts
from hotsplit.report.page import NONE, Missing, Names, Section, Table
from hotsplit.report.speeds import Speeds
from hotsplit.report.svg import Plot
from hotsplit.system.sizes import format_bytes


def rate(seconds: float) -> str:
    """Tokens per second, as text."""
    speed = 1 / seconds
    return f"{speed:,.0f}" if speed >= 100 else f"{speed:,.1f}"


def _by_layer(
    caption: str,
    columns: Mapping[str, tuple[str, Iterable[object]]],
    layers: Iterable[int] | None = None,
    **options: Any,
) -> Table:
    """A row a layer (None: all): of each column the head, the form of a value, the values."""
    texts = [[form.format(value) for value in values] for form, values in columns.values()]
    numbers = range(len(texts[0])) if layers is None else layers
    rows = tuple((str(n), *row) for n, *row in zip(numbers, *texts, strict=True))
    return Table(caption, ("layer", *columns), rows, **options)


def speed_section(found: Artifacts, speeds: Speeds, names: Names) -> Section:
    missing: list[Missing] = []
    if found.profile is None:
        missing.append(names.no_profile)
    if found.machine is None:
        missing.append(names.no_machine)
    if speeds.why_not is not None:
        missing.append(Missing(speeds.why_not, names.new_machine))
    if not missing and found.split is None:
        missing.append(names.no_split)
    tables: tuple[Table, ...] = ()
    if found.split is not None:
        tables = (_speed_table(found.split, speeds),)
    curve = speeds.curve
    if curve is not None:
        rows = []
        for p in curve.points:
            per_s = rate(p.objective_s), rate(p.layer_split_s)
            rows.append((format_bytes(p.budget_bytes), p.mode, *per_s, f"{p.num_hot:,}"))
        what = "experts" if found.model.spec.has_experts else "neurons"
        head = ("GPU memory", "mode", "best plan, tokens/s", "whole layers", f"{what} on the GPU")
        tables += (Table("Speed by budget", head, tuple(rows), num_texts=2, is_folded=True),)
    return Section(
        "speed",
        "Budget and speed",
        "Tokens per second that the solver predicts for one text, from the machine's figures.",
        () if curve is None else (plots.plot_curve(curve, found.split),),
        tables,
        missing=tuple(missing),
    )


def _speed_table(split: Split, speeds: Speeds) -> Table:
    rows = [("this plan", split.objective_s, f"at most {split.gap:.2%} slower than the best")]
    if (advice := speeds.advice) is not None:
        there = f"{advice.layer_split_layers} of {len(split.hot)} on GPUs, all weights read"
        rows += [
            ("the CPU alone", advice.cpu_only_s, "the same with nothing on a GPU"),
            ("whole layers", advice.layer_split_s, there),
            ("the machine's limit", advice.limit_s, "the plan's bytes at full bandwidth"),
        ]
    told = tuple(
        (name, meaning, rate(seconds), f"{seconds / split.objective_s:.2f}x")
        for name, seconds, meaning in rows
    )
    head = ("", "", "tokens/s", "the plan over it")
    return Table("The plan and others", head, told, num_texts=2)


def placement_section(found: Artifacts, names: Names) -> Section:
    split, profile = found.split, found.profile
    units = "neurons" if split is None else split.units
    missing = [] if split is not None else [names.no_split]
    missing += [] if profile is not None else [names.no_profile]
    drawn: tuple[Plot, ...] = ()
    tables: tuple[Table, ...] = ()
    if split is not None and profile is not None:
        drawn = (plots.plot_map(split, profile),)
        tables = (_device_table(split, profile), _layer_table(split, profile))
    return Section(
        "placement",
        "Placement",
        f"The {units} that GPUs hold: the hottest of each layer, as many as fit and pay off.",
        drawn,
        tables,
        missing=tuple(missing),
    )


def _device_table(split: Split, profile: Profile) -> Table:
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
        rows.append((f"GPU {gpu}", hot, fired, dense_L[layers].sum(), has_head))
    rows.append(("CPU", left, left_fired, (~dense_L).sum(), not split.head_on_gpu))
    told = []
    for device, hot, fired, num_dense, has_head in rows:
        shares = f"{hot / total:.1%}", f"{fired / all_fired:.1%}"
        told.append((device, *shares, str(num_dense), "yes" if has_head else "no"))
    head = ("device", units.name, units.events, "dense blocks", "output head")
    return Table("By device", head, tuple(told))


def _layer_table(split: Split, profile: Profile) -> Table:
    units = plots.units_of(split, profile)
    num_neurons = units.count_LF.shape[1]
    columns = {
        "dense block": ("{}", ["GPU" if is_there else "CPU" for is_there in split.dense_on_gpu]),
        f"{units.name} on the GPU": ("{:,}", map(len, units.hot)),
        "of the layer": ("{:.1%}", [len(ids) / num_neurons for ids in units.hot]),
        f"of its {units.events}": ("{:.1%}", plots.firings_on_gpu(split, profile)),
    }
    return _by_layer("Placement by layer", columns, num_texts=2, is_folded=True)


def bytes_section(found: Artifacts, names: Names) -> Section:
    split = found.split
    lead = "Weights, cache and workspace of the plan: what each device holds."
    if split is None:
        return Section("bytes", "Where each byte goes", lead, missing=(names.no_split,))
    gpus, cpu = split.items_of_gpus(found.model)
    gpus += [dict.fromkeys(ITEMS, 0)] * (len(split.budgets) - len(gpus))
    sides = (*gpus, cpu)
    rows = [
        (plots.name_of(x, split.units), *(format_bytes(s[x]) if s[x] else NONE for s in sides))
        for x in ITEMS
        if any(side[x] for side in sides)
    ]
    rows.append(("in all", *(format_bytes(sum(side.values())) for side in (*gpus, cpu))))
    host = format_bytes(split.host_budget_bytes) if split.host_budget_bytes else NONE
    rows.append(("granted", *map(format_bytes, split.budgets), host))
    texts = f"{split.num_sequences} texts of " if split.num_sequences > 1 else ""
    head = ("", *(f"GPU {number}" for number in range(len(gpus))), "CPU")
    return Section(
        "bytes",
        "Where each byte goes",
        f"{lead} The cache is for {texts}{split.context_length:,} tokens.",
        (plots.plot_bytes(gpus, cpu, split.units),),
        (Table("Bytes by device", head, tuple(rows)),),
    )


def firing_section(found: Artifacts, names: Names) -> Section:
    profile = found.profile
    lead = "How sparse the model is on the profiled text, and how unevenly its neurons fire."
    if profile is None:
        return Section("firings", "Firings", lead, missing=(names.no_profile,))
    corpora = ", ".join(corpus.name for corpus in profile.corpora[:4])
    more = len(profile.corpora) - 4
    corpora += f" and {more} more" if more > 0 else ""
    curve_NL = plots.firing_curves(profile).T
    columns: dict[str, tuple[str, Iterable[object]]] = {
        "neurons that fire": ("{:.2%}", profile.density_L),
        "firings of the hottest 5 %": ("{:.1%}", curve_NL[5]),
        "20 %": ("{:.1%}", curve_NL[20]),
        "50 %": ("{:.1%}", curve_NL[50]),
        "never fired": ("{:,}", profile.never_fired_L()),
        "threshold": ("{:.4g}", profile.threshold_L),
    }
    return Section(
        "firings",
        "Firings",
        f"{lead} {profile.num_tokens:,} tokens of {corpora}.",
        (plots.plot_firings(profile), plots.plot_density(profile)),
        (_by_layer("Firings by layer", columns, is_folded=True), *_expert_tables(profile)),
    )


def _expert_tables(profile: Profile) -> tuple[Table, ...]:
    count_LE, fifth_L = profile.expert_count_LE, profile.hottest_fifth_of_experts_L()
    if count_LE is None or fifth_L is None:
        return ()
    layers = np.flatnonzero(count_LE.any(axis=1))  # those with experts
    share_LE = count_LE[layers] / profile.num_tokens
    columns = {
        "tokens of the hottest expert": ("{:.1%}", share_LE.max(axis=1)),
        "of the coldest": ("{:.1%}", share_LE.min(axis=1)),
        "choices of the hottest fifth": ("{:.1%}", np.asarray(fifth_L)[layers]),
        "never chosen": ("{:,}", (share_LE == 0).sum(axis=1)),
    }
    return (_by_layer("Experts by layer", columns, layers.tolist()),)


def predictor_section(found: Artifacts, names: Names) -> Section:
    lead = "Small networks that predict which neurons of a layer are worth computing."
    if found.quality_L:
        return Section(
            "predictors",
            "Predictors",
            f"{lead} Measured on text that nothing was fitted to.",
            (plots.plot_predictors(found.quality_L),),
            (_predictor_summary(found), _predictor_table(found)),
        )
    stored = _stored_predictors(found)
    return Section(
        "predictors",
        "Predictors",
        lead,
        tables=() if stored is None else (stored,),
        missing=(names.no_predictors,),
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
    least_and_most = (sum(sizes) // len(sizes), min(sizes), max(sizes))
    rows.append(("size of a layer's", *map(format_bytes, least_and_most)))
    return Table("Over the layers", ("", "mean", "least", "most"), tuple(rows))


def _predictor_table(found: Artifacts) -> Table:
    chosen = [quality.chosen for quality in found.quality_L]
    columns: dict[str, tuple[str, Iterable[object]]] = {
        "form": ("{}", [one.name for one in chosen]),
        "trained": ("{}", ["yes" if one.is_trained else "no" for one in chosen]),
        "size": ("{}", [format_bytes(one.num_bytes) for one in chosen]),
        "recall": ("{:.1%}", [one.recall for one in chosen]),
        "precision": ("{:.1%}", [one.precision for one in chosen]),
        "contribution": ("{:.2%}", [one.contribution for one in chosen]),
        "lost norm": ("{:.2%}", [one.lost_norm for one in chosen]),
        "fire": ("{:.1%}", [one.density for one in chosen]),
        "named": ("{:.1%}", [one.predicted_density for one in chosen]),
        "pays off below": ("{:.1%}", [quality.break_even_density for quality in found.quality_L]),
    }
    return _by_layer("Predictors by layer", columns, num_texts=3, is_folded=True)


def _stored_predictors(found: Artifacts) -> Table | None:
    if found.predictors is not None:
        info = found.predictors.info
        sizes = [
            sum(matrix.data.nbytes for matrix in layer.matrices(n).values())
            for n, layer in enumerate(found.predictors.layers)
        ]
    elif found.model.predictor is not None:
        info, model = found.model.predictor, found.model
        sizes = [layer_bytes(model, layer).predictor for layer in range(model.spec.num_layers)]
    else:
        return None
    named_L = [f"{named:.1%}" for named in info.density_L] or [NONE] * len(info.rank_L)
    columns: dict[str, tuple[str, Iterable[object]]] = {
        "form": ("{}", [f"rank {rank}" if rank else "whole" for rank in info.rank_L]),
        "size": ("{}", map(format_bytes, sizes)),
        "named": ("{}", named_L),
        "threshold": ("{:.4g}", info.threshold_L),
    }
    return _by_layer(f"Predictors of kind {info.kind}", columns, num_texts=2)


def machine_section(found: Artifacts, names: Names) -> Section:
    machine = found.machine
    lead = "The figures that predictions rest on: the best of several rounds, and the middle half."
    if machine is None:
        return Section("machine", "Machine", lead, missing=(names.no_machine,))
    doubtful = sum(figure.is_doubtful for figure in machine.figures.values())
    doubt = Missing(
        f"{doubtful} of {len(machine.figures)} figures varied by more than a quarter while"
        " they were measured: calibrate again when the machine is idle.",
        f"hotsplit calibrate -o {names.machine} --force",
    )
    facts = [
        ("processor", machine.cpu_name, f"{machine.num_threads} threads"),
        ("memory", format_bytes(machine.memory_bytes), f"{format_bytes(machine.free_bytes)} free"),
    ]
    for number, gpu in enumerate(machine.gpus):
        memory = f"{format_bytes(gpu.memory_bytes)}, {format_bytes(gpu.free_bytes)} free"
        facts.append((f"GPU {number}", gpu.name, f"{memory}; {gpu.source}"))
    figures = tuple(
        (name, f"{figure.best:.4g}", f"{figure.spread:.0%}" if figure.rounds else NONE)
        for name, figure in machine.figures.items()
    )
    head = ("rates in GB/s, times in s", "best", "half within")
    tables = (
        Table("Processors and memory", (), tuple(facts), num_texts=3),
        Table("Figures", head, figures, is_folded=True),
    )
    return Section("machine", "Machine", lead, tables=tables, missing=(doubt,) if doubtful else ())
