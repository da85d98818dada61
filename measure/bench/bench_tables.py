"""Formats a report for people: as lines for a terminal, and as llama-bench's Markdown table."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

from hotsplit.measure.bench.parts import MEANINGS
from hotsplit.measure.bench.result import BenchReport, Result, RunTimes, Setting
from hotsplit.system.sizes import format_bytes

MB = 1e6
Row = Sequence[str]


def lines_of(report: BenchReport) -> list[str]:
    """The report for a terminal: speeds, then each test's time by part."""
    lines = [*_heading(report), "", *_aligned(_speeds(report))]
    if sides := [line for result in report.results for line in _sides(result)]:
        lines += ["", *sides]
    for result in report.results:
        if any(part.ns is not None for part in result.parts):
            lines += ["", *_aligned(_parts(result))]
    if report.parts_missing:
        lines += ["", f"time is not measured by part: {report.parts_missing}"]
    if report.limit_missing:
        lines += ["", f"there is no limit: {report.limit_missing}"]
    lines += [""] * bool(report.notes)
    return lines + [f"note: {note}" for note in report.notes]


def _heading(report: BenchReport) -> list[str]:
    config, setting = report.config, report.setting
    where = f"by {config.split}, " if config.split else ""
    types = ", ".join(dict.fromkeys((setting.type_k, setting.type_v)))
    lines = [
        f"{config.model}: {setting.model_type}, {format_bytes(setting.model_size)}, mode"
        f" {setting.mode}, {where}on {setting.device}, {setting.num_threads} threads, cache"
        f" {types}",
        f"{setting.gpu_name or setting.cpu_name} ({setting.level})"
        + "".join(
            f", {name} reads {statistics.median(rates):.1f} GB/s"
            for name, rates in report.bandwidth_gb_per_s.items()
        ),
    ]
    if report.rival is not None:
        rival = report.rival
        lines.append(
            f"beside {rival.tool} with {config.compare_model or config.model}"
            + (f" ({rival.model_type})" if rival.model_type else "")
        )
    return lines


def _speeds(report: BenchReport) -> list[Row]:
    heading = ["test", "tokens/s", "min", "max", "ms/token", "MB/token", "limit/s", "reached"]
    rows: list[Row] = [heading + ["llama.cpp", "times", "in rounds"] * bool(report.rival)]
    for result in report.results:
        low, high = result.ours.range_ts
        median, limit = result.ours.median_ts, result.limit
        row = [result.test.name, *(f"{value:.2f}" for value in (median, low, high, 1e3 / median))]
        numbers = () if limit is None else (limit.bytes_a_token / MB, limit.tokens_per_s)
        row += [f"{number:.2f}" for number in numbers] or ["", ""]
        row.append("" if limit is None else f"{limit.share:.0%}")
        if result.theirs is not None:
            low, high = min(result.ratios), max(result.ratios)
            row += [f"{result.theirs.median_ts:.2f}", f"{result.ratio:.2f}x"]
            row.append(f"{low:.2f}x to {high:.2f}x")
        rows.append(row)
    return rows


def _sides(result: Result) -> list[str]:
    if len(result.bytes_by_role) < 2:
        return []
    sides = (
        f"{role} side {'?' if num_bytes is None else f'{num_bytes / MB:.2f}'} MB"
        for role, num_bytes in result.bytes_by_role.items()
    )
    return [f"  {result.test.name} reads per token: {', '.join(sides)}"]


def _parts(result: Result) -> list[Row]:
    rows: list[Row] = [[result.test.name, "ms/token", "share", "MB/token", "GB/s"]]
    for part in result.parts:
        row = [MEANINGS[part.name]]
        row += ["", ""] if part.ns is None else [f"{part.ns / 1e6:.4f}", f"{part.share:.1%}"]
        row.append("" if part.num_bytes is None else f"{part.num_bytes / MB:.3f}")
        row.append("" if not part.num_bytes or not part.ns else f"{part.num_bytes / part.ns:.1f}")
        rows.append(row)
    return rows if any(any(row[3:]) for row in rows[1:]) else [row[:3] for row in rows]


def _aligned(rows: Sequence[Row]) -> list[str]:
    """Aligns the first column to the left and the others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  "
        + "  ".join(
            cell.rjust(width) if number else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def to_json(report: BenchReport) -> dict[str, Any]:
    """The report as one object. Its `tests` have llama-bench's fields that apply, and ours."""
    config, setting = report.config, report.setting
    return {
        "benchmark": "bench",
        "model": str(config.model),
        "split": None if config.split is None else str(config.split),
        "mode": setting.mode,
        "device": setting.device,
        "level": setting.level,
        "text": None if config.text is None else str(config.text),
        "seed": config.seed,
        "repetitions": config.repetitions,
        "num_processors": setting.num_processors,
        "load_before": setting.load_before,
        "last_cache_bytes": setting.last_cache_bytes,
        "bandwidth_gb_per_s": {k: list(v) for k, v in report.bandwidth_gb_per_s.items()},
        "tests": [{**_shared(report), **_result(result)} for result in report.results],
        "compare": report.rival
        and {
            "path": str(config.compare),
            "model_filename": str(config.compare_model or config.model),
            **asdict(report.rival),
        },
        "parts_missing": report.parts_missing,
        "limit_missing": report.limit_missing,
        "notes": list(report.notes),
    }


def backend(setting: Setting) -> str:
    """The backend's name in llama-bench."""
    return "CPU" if setting.device == "cpu" else "CUDA"


def _shared(report: BenchReport) -> dict[str, Any]:
    setting = report.setting
    return {
        "build_commit": f"hotsplit-{version('hotsplit')}",
        "build_number": 0,
        "cpu_info": setting.cpu_name,
        "gpu_info": setting.gpu_name,
        "backends": backend(setting),
        "model_filename": str(report.config.model),
        "model_type": setting.model_type,
        "model_size": setting.model_size,
        "model_n_params": setting.model_n_params,
        "n_batch": setting.rows_a_pass,
        "n_ubatch": setting.rows_a_pass,
        "n_threads": setting.num_threads,
        "type_k": setting.type_k,
        "type_v": setting.type_v,
        "n_gpu_layers": setting.gpu_layers,
    }


def _result(result: Result) -> dict[str, Any]:
    test, limit = result.test, result.limit
    return {
        "n_prompt": test.length if test.kind == "pp" else 0,
        "n_gen": test.length if test.kind == "tg" else 0,
        "n_depth": test.depth,
        "test_time": result.began,
        **_times(result.ours),
        "test": test.name,
        "bytes_per_token": None if limit is None else limit.bytes_a_token,
        "bytes_by_role": result.bytes_by_role,
        "limit_ts": None if limit is None else limit.tokens_per_s,
        "share_of_limit": None if limit is None else limit.share,
        "predicted_s": result.predicted_s,
        "predicted_over_measured": result.predicted_over_measured,
        "parts": [asdict(part) for part in result.parts],
        "llamacpp": None if result.theirs is None else _times(result.theirs),
        "ratio": result.ratio,
        "ratios": list(result.ratios),
    }


def _times(times: RunTimes) -> dict[str, Any]:
    names = ("avg_ns", "stddev_ns", "avg_ts", "stddev_ts", "samples_ns", "samples_ts", "median_ts")
    return {name: getattr(times, name) for name in names}
