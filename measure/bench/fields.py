"""The JSON form of a report."""

from dataclasses import asdict
from importlib.metadata import version
from typing import Any

from hotsplit.measure.bench.result import BenchReport, Result, RunTimes, Setting


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
        "compare": None if report.rival is None else _rival(report),
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


def _rival(report: BenchReport) -> dict[str, Any]:
    config = report.config
    assert report.rival is not None
    return {
        "path": str(config.compare),
        "model_filename": str(config.compare_model or config.model),
        **asdict(report.rival),
    }
