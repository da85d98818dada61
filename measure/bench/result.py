"""The results of `bench`: times of each test, their statistics, and time by part."""

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.artifacts.split_file import Split
from hotsplit.costs.part_bytes import is_predictor
from hotsplit.measure.bench.bench_config import BenchConfig, BenchTest
from hotsplit.measure.bench.rival import About
from hotsplit.measure.calibrate.cpu_bandwidth import last_cache_bytes
from hotsplit.runtime.engine import Engine
from hotsplit.runtime.kernels.cpu import library
from hotsplit.system.processors import processor_name, processors


@dataclass(frozen=True, kw_only=True)
class RunTimes:
    """The times of a test, one sample per round in order."""

    num_tokens: int  # per run
    samples_ns: tuple[int, ...]

    @property
    def samples_ts(self) -> tuple[float, ...]:
        return tuple(1e9 * self.num_tokens / ns for ns in self.samples_ns)

    @property
    def avg_ns(self) -> int:
        return round(statistics.mean(self.samples_ns))

    @property
    def stddev_ns(self) -> int:
        return round(_stddev(self.samples_ns))

    @property
    def avg_ts(self) -> float:
        return statistics.mean(self.samples_ts)

    @property
    def stddev_ts(self) -> float:
        return _stddev(self.samples_ts)

    @property
    def median_ts(self) -> float:
        return statistics.median(self.samples_ts)

    @property
    def range_ts(self) -> tuple[float, float]:
        return min(self.samples_ts), max(self.samples_ts)

    @property
    def middle(self) -> int:
        """The round whose time is the median (for an even count, the faster of the middle two)."""
        order = sorted(range(len(self.samples_ns)), key=lambda i: self.samples_ns[i])
        return order[(len(order) - 1) // 2]


@dataclass(frozen=True, kw_only=True)
class PartTime:
    """A part's time and bytes per token, in a test's median run."""

    name: str  # one of parts.ORDER
    ns: float | None  # None if not measured
    share: float | None  # of the run's time
    num_bytes: float | None  # None for prompts, and if the part reads nothing or it is unknown


@dataclass(frozen=True, kw_only=True)
class Limit:
    """The speed that memory bandwidth allows for the bytes of a token."""

    bytes_a_token: float
    tokens_per_s: float  # from the median over rounds of the least seconds per token
    share: float  # of the limit that was reached; the median over rounds, by each one's bandwidth


@dataclass(frozen=True, kw_only=True)
class Result:
    """The results of one test."""

    test: BenchTest
    began: str  # UTC
    ours: RunTimes
    theirs: RunTimes | None
    parts: tuple[PartTime, ...]
    bytes_by_role: dict[str, float | None]  # of a token; empty for prompts
    limit: Limit | None
    predicted_s: float | None  # of a token, by the plan; None for prompts, and without a plan

    @property
    def predicted_over_measured(self) -> float | None:
        return None if self.predicted_s is None else self.predicted_s * self.ours.median_ts

    @property
    def ratios(self) -> tuple[float, ...]:
        """Their time over ours, by round; above 1, ours is faster."""
        if self.theirs is None:
            return ()
        pairs = zip(self.ours.samples_ns, self.theirs.samples_ns, strict=True)
        return tuple(theirs / ours for ours, theirs in pairs)

    @property
    def ratio(self) -> float | None:
        return statistics.median(self.ratios) if self.ratios else None


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The measured model and machine."""

    model_type: str
    model_size: int
    model_n_params: int
    mode: str
    device: str  # e.g. "cpu" or "cuda:0"
    gpu_layers: int
    num_threads: int
    rows_a_pass: int
    type_k: str
    type_v: str
    cpu_name: str
    gpu_name: str
    level: str  # instruction set of the kernels
    last_cache_bytes: int
    num_processors: int  # available to this process
    load_before: float | None  # load average of the minute before; None if unknown

    @property
    def is_cached(self) -> bool:
        """Whether a token finds the weights of the token before in the last-level cache."""
        return self.model_size <= self.last_cache_bytes


@dataclass(frozen=True, kw_only=True)
class BenchReport:
    """All results of `bench`, and the setting they hold for."""

    config: BenchConfig
    setting: Setting
    bandwidth_gb_per_s: dict[str, tuple[float, ...]]  # by device, one per round of every depth
    results: tuple[Result, ...]
    rival: About | None
    parts_missing: str | None  # the reason, if there are no times by part
    limit_missing: str | None  # the reason, if generation has no limit; prompts never have one
    notes: tuple[str, ...]


def _stddev(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def setting_of(
    engine: Engine, plan: Split | None, num_threads: int, load_before: float | None
) -> Setting:
    model, types = engine.model, engine.cache_types
    is_gpu = engine.device.type == "cuda"
    on_gpu = len(engine.layers) if plan is None else sum(plan.dense_on_gpu)
    sizes: Counter[str] = Counter()
    for entry in model.tensors.values():
        sizes[entry.kind] += entry.num_bytes
    main_kind = sizes.most_common(1)[0][0]
    return Setting(
        model_type=f"{model.architecture} {format_count(num_params(model))} {main_kind}",
        model_size=sizes.total(),
        model_n_params=num_params(model),
        mode=engine.mode,
        device=str(engine.device),
        gpu_layers=on_gpu if is_gpu else 0,
        num_threads=num_threads,
        rows_a_pass=engine._live.most_tokens,
        type_k=types.key.name,
        type_v=types.value.name,
        cpu_name=processor_name(),
        gpu_name=torch.cuda.get_device_name(engine.device) if is_gpu else "",
        level=library.level(),
        last_cache_bytes=last_cache_bytes(),
        num_processors=processors().usable,
        load_before=load_before,
    )


def num_params(model: ModelFile) -> int:
    """The model's parameters, without predictors."""
    count = 0
    for name, entry in model.tensors.items():
        of_layer = name.split(".", 2)[-1] if name.startswith("blk.") else name
        if not is_predictor(of_layer):
            count += torch.Size(entry.shape).numel()
    return count


def format_count(count: int) -> str:
    """A number of parameters as llama-bench writes it, e.g. 134.52 M."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return str(count)
