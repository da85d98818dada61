"""What was measured: the times of each test, their statistics, and where the time went."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from sparkinfer.bench.config import BenchConfig, BenchTest
from sparkinfer.bench.rival import About


@dataclass(frozen=True, kw_only=True)
class Times:
    """One sample for each round, in order."""

    num_tokens: int  # of a run
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
        """The number of the round whose time is the median (of an even count the faster of two)."""
        order = sorted(range(len(self.samples_ns)), key=lambda i: self.samples_ns[i])
        return order[(len(order) - 1) // 2]


@dataclass(frozen=True, kw_only=True)
class Part:
    """One token's share of a test's median run."""

    name: str  # of parts.ORDER
    ns: float | None  # None where it is not measured
    share: float | None  # of the run
    num_bytes: float | None  # None for prompts, and where it reads none


@dataclass(frozen=True, kw_only=True)
class Limit:
    """The speed that the bytes of a token allow on this machine."""

    bytes_a_token: float
    tokens_per_s: float  # at the median bandwidth
    share: float  # of it that was reached: the median of the rounds, each by its own bandwidth


@dataclass(frozen=True, kw_only=True)
class Result:
    test: BenchTest
    began: str  # UTC
    ours: Times
    theirs: Times | None
    parts: tuple[Part, ...]
    bytes_by_role: dict[str, float | None]  # of a token; empty for prompts
    limit: Limit | None

    @property
    def ratios(self) -> tuple[float, ...]:
        """Theirs over ours in each round: above 1 ours is faster."""
        if self.theirs is None:
            return ()
        pairs = zip(self.ours.samples_ns, self.theirs.samples_ns, strict=True)
        return tuple(theirs / ours for ours, theirs in pairs)

    @property
    def ratio(self) -> float | None:
        return statistics.median(self.ratios) if self.ratios else None


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What was measured, and on what."""

    model_type: str
    model_size: int
    model_n_params: int
    mode: str
    device: str  # "cpu" or "cuda"
    gpu_layers: int
    num_threads: int
    rows_a_pass: int
    type_k: str
    type_v: str
    cpu_name: str
    gpu_name: str
    level: str | None  # instruction set of the kernels
    last_cache_bytes: int
    num_processors: int  # that this process may run on
    load_before: (
        float | None
    )  # of the last minute before the start; None if the system does not say


@dataclass(frozen=True, kw_only=True)
class BenchReport:
    config: BenchConfig
    setting: Setting
    bandwidth_gb_per_s: dict[str, tuple[float, ...]]  # by device, of the rounds
    results: tuple[Result, ...]
    rival: About | None
    parts_missing: str | None  # why no time is given by part
    limit_missing: str | None  # why no limit is given
    notes: tuple[str, ...]


def _stddev(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0
