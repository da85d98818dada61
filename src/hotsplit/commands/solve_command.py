"""`hotsplit solve`: makes, checks, explains and plots plans, and computes the curve over budgets.

This module has the runtime measure the memory of a pass, since the solver only reads files."""

import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.artifacts.split_file import Split
from hotsplit.commands.options.command_options import speed_lines
from hotsplit.costs.part_bytes import ITEMS
from hotsplit.errors import HotsplitError
from hotsplit.files.atomic import all_or_none
from hotsplit.files.outputs import check_outputs
from hotsplit.solver.assumed import profile_for
from hotsplit.solver.explain import explain, meanings_of
from hotsplit.solver.solve import SolveConfig, SolveReport, check, solve
from hotsplit.solver.sweep import sweep
from hotsplit.system.sizes import format_bytes, parse_bytes

NUM_BUDGETS = 23  # of a curve, unless told


def run_solve(
    config: SolveConfig, *, explained: bool, heat_map: Path | None
) -> tuple[Any, list[str]]:
    """Writes a plan; returns (report for JSON, lines for the user)."""
    from hotsplit.runtime.step.workspace import workspace_bytes

    outputs = [config.output] if heat_map is None else [config.output, heat_map]
    check_outputs(outputs, force=config.force, inputs=config.inputs)
    with all_or_none():
        report = solve(config, workspace_bytes)
        if heat_map is not None:
            from hotsplit.report.plots import save_map

            split = Split.load(config.output)
            profile = profile_for(ModelFile.load(config.model), config.profile, split.mode)
            save_map(split, profile, config.model.name, heat_map)
    content, lines = asdict(report), [f"note: {note}" for note in report.notes]
    lines += _gpu_lines(report)
    if explained:
        explanation = explain(config, workspace_bytes)
        content["explanation"] = asdict(explanation)
        lines += explanation.lines
    if heat_map is not None:
        lines.append(f"wrote {heat_map}")
    # Predicted speeds.
    advice = report.advice
    gap = "less than 0.01%" if report.gap < 1e-4 else f"at most {report.gap:.2%}"
    rows = [("this plan", report.objective_s, f"{gap} slower than the best")]
    if sum(report.gpu_bytes.values()):
        rows.append(("the CPU alone", advice.cpu_only_s, "the same model without a GPU"))
    there = f"{advice.layer_split_layers} of {report.num_layers} layers"
    there += " and the head" if advice.layer_split_has_head else ""
    there = f"{there} on the GPU, no overlap" if advice.layer_split_layers else "all on the CPU"
    there = there if report.units == "experts" else f"every weight read; {there}"
    rows.append(("llama.cpp's layer split", advice.layer_split_s, there))
    if advice.cpu_moe is not None:
        count, seconds = advice.cpu_moe
        name, of = f"llama.cpp's --n-cpu-moe {count}", f"{count} of {report.num_layers} layers"
        rows.append((name, seconds, f"the experts of {of} on the CPU, no overlap"))
    rows.append(("this machine's limit", advice.limit_s, "the plan's bytes at full bandwidth"))
    return content, lines + speed_lines(rows) + _mode_lines(report) + [_last_line(report)]


def run_check(config: SolveConfig, budgets: tuple[int, ...]) -> tuple[Any, list[str]]:
    """Checks a plan against its files and any budgets; returns (JSON, lines for the user)."""
    split = check(config)
    if budgets and budgets != split.budgets:
        raise HotsplitError(
            f"{config.output}: is for budgets of {' and '.join(map(format_bytes, split.budgets))},"
            f" not {' and '.join(map(format_bytes, budgets))}; run hotsplit solve again"
        )
    line = f"{config.output}: agrees with its files; {1 / split.objective_s:,.1f} tokens/s"
    return {"plan": str(config.output), "is_valid": True, "gap": split.gap}, [line]


def run_sweep(config: SolveConfig, text: str) -> tuple[Any, list[str]]:
    """Writes the curve of predicted speed; returns (JSON, lines for the user)."""
    from hotsplit.runtime.step.workspace import workspace_bytes

    first, last, num_budgets = parse_range(text)
    check_outputs([config.output], force=config.force, inputs=config.inputs)
    found = sweep(
        config, first=first, last=last, num_budgets=num_budgets, workspace=workspace_bytes
    )
    found.save(config.output)
    lines = [f"  {'budget':>11} {'plan':>9} {'layer split':>12} {'limit':>9}   tokens/s, mode"]
    for point in found.points:
        speeds = (point.objective_s, point.layer_split_s, point.limit_s)
        plan, split, limit = (f"{1 / seconds:,.1f}" for seconds in speeds)
        size = format_bytes(point.budget_bytes)
        lines.append(
            f"  {size:>11} {plan:>9} {split:>12} {limit:>9}   {point.mode}, gap {point.gap:.2%}"
        )
    return asdict(found), [*lines, f"wrote {config.output}"]


def parse_range(text: str) -> tuple[int, int, int]:
    """Parses e.g. "2GiB:24GiB", or "2GiB:24GiB:12" for 12 budgets, to bytes and their number.
    Raises HotsplitError for anything else."""
    parts = text.split(":")
    if len(parts) not in (2, 3) or (len(parts) == 3 and not re.fullmatch("[0-9]{1,4}", parts[2])):
        raise HotsplitError(f"{text!r} is not a range; wanted e.g. 2GiB:24GiB, or 2GiB:24GiB:12")
    first, last = (parse_bytes(part) for part in parts[:2])
    if not first < last:
        raise HotsplitError(f"{text!r}: wanted a smaller budget before a larger one")
    return first, last, int(parts[2]) if len(parts) == 3 else NUM_BUDGETS


def _gpu_lines(report: SolveReport) -> list[str]:
    lines, meanings = [], meanings_of(has_experts=report.units == "experts")
    for number, (items, budget) in enumerate(
        zip(report.bytes_of_gpus, report.budgets, strict=False)
    ):
        for item in ITEMS:
            if items[item]:
                size = format_bytes(items[item])
                name = meanings[item]
                lines.append(f"  GPU {number}  {name:20} {size:>11}")
        used = sum(items.values())
        if used:
            lines.append(
                f"  GPU {number}  {'in all':20} {format_bytes(used):>11} of {format_bytes(budget)}"
            )
    host = format_bytes(sum(report.cpu_bytes.values()))
    return [*lines, f"  CPU    {'in all':20} {host:>11}"]


def _mode_lines(report: SolveReport) -> list[str]:
    timed = sorted(
        (other.seconds, other.name, other.is_unproven)
        for other in report.alternatives
        if other.seconds is not None
    )
    left_out = [f"{o.name}: {o.why_not}" for o in report.alternatives if o.seconds is None]
    lines = []
    if timed:
        others = ", ".join(
            f"{'all ' * name.startswith('experts')}{name}"
            f" {1 / seconds:,.1f}{' or so' * is_unproven}"
            for seconds, name, is_unproven in timed
        )
        what = "this plan" if report.units == "experts" else f"mode {report.mode}"
        lines.append(
            f"{what} is the fastest, {report.tokens_per_s:,.1f} tokens/s predicted; others:"
            f" {others}"
        )
    return lines + ([f"not planned for: {'; '.join(left_out)}"] if left_out else [])


def _last_line(report: SolveReport) -> str:
    used, budget = sum(report.gpu_bytes.values()), sum(report.budgets)
    host = sum(report.cpu_bytes.values())
    rest = "the rest" if report.num_on_drive else "everything"
    where = (
        f"{report.num_hot:,} of {report.num_neurons:,} {report.units} and {format_bytes(used)} of"
        f" {format_bytes(budget)} on the GPU{'s' * (len(report.budgets) > 1)},"
        f" {report.hot_traffic_share:.0%} of the feed-forward traffic"
        if used
        else f"{rest} on the CPU, {format_bytes(host)} of main memory"
    )
    if report.num_on_drive:
        where += f"; {report.num_on_drive:,} of {report.num_neurons:,} experts on the drive"
    return (
        f"wrote {report.output}: mode {report.mode}; {where}; {report.tokens_per_s:,.1f} tokens/s"
        f" predicted, {report.status}, gap {report.gap:.2%}, {report.solve_s:.1f} s"
    )
