"""machine.json: the machine's figures, measured, or copied from a datasheet and marked as such.

Specified in docs/formats.md."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import quantiles
from typing import Annotated

from annotated_types import Ge, Le, MinLen

from hotsplit.errors import HotsplitError
from hotsplit.files.atomic import partial_file
from hotsplit.files.declared import Count, CountFrom1, Line, NotNegative, Rule, read_declared
from hotsplit.files.gguf_types import block_sizes
from hotsplit.files.json_file import read_object
from hotsplit.files.typed import other_version, shown
from hotsplit.model.weight_types import TABLES
from hotsplit.system.drives import DriveKind, drive_of

FORMAT = "hotsplit.machine"
VERSION = 1
MOST_S = 1e3  # the longest copy, kernel, hand-over, layer or token; keeps the solver in range
# If the interquartile range exceeds this share of the median, other load probably disturbed the
# rounds.
DOUBTFUL_SPREAD = 0.25
# The share of a matrix's rows that is read when the rate for chosen rows is measured.
CHOSEN_SHARE = 0.1
ENOUGH = 0.95  # of a drive's best rate, with fewer reads at a time
PASS_TOKENS = 32  # that all rows are multiplied by when the rate of a prompt's products is measured

Threads = Annotated[int, Ge(1), Le(99_999)]
Quantity = Annotated[float, Ge(1e-18), Le(1e18)]  # within which computations stay finite


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A quantity measured in several rounds. Plans are priced with `median`, what a token usually
    gets; `best`, which other load can only make worse, is for limits. `quartiles` (ascending, with
    the median) are None and `rounds` is 0 if not measured."""

    best: Quantity
    quartiles: tuple[Quantity, Quantity, Quantity] | None = None
    rounds: Count = 0

    def __post_init__(self) -> None:
        quartiles = list(self.quartiles or ())
        if quartiles != sorted(quartiles) or bool(quartiles) != (self.rounds > 0):
            raise ValueError("three ascending quartiles, or none for 0 rounds")

    @classmethod
    def of_rounds(cls, values: Sequence[float], *, is_rate: bool) -> "Figure":
        """A figure from two or more rounds; the best is the largest rate, or the smallest time."""
        low, median, high = quantiles(values, n=4, method="inclusive")
        best = max(values) if is_rate else min(values)
        return cls(best=best, quartiles=(low, median, high), rounds=len(values))

    @property
    def median(self) -> float:
        """The median; `best` if not measured."""
        return self.best if self.quartiles is None else self.quartiles[1]

    @property
    def spread(self) -> float:
        """The interquartile range as a share of the median; 0 if not measured."""
        if self.quartiles is None:
            return 0.0
        low, median, high = self.quartiles
        return (high - low) / median

    @property
    def is_doubtful(self) -> bool:
        return self.spread > DOUBTFUL_SPREAD


Seconds = Annotated[Figure, Rule(lambda figure: figure.best <= MOST_S, f"up to {MOST_S:g} s")]


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU. Bandwidths in GB/s (1e9 bytes), times in seconds, memory in bytes. `token_s`,
    `hand_over_s`, `cpu_run_s` and `kernel_s` are fitted to the times of whole decode steps
    (measure/calibrate/step_costs.py)."""

    name: Line
    source: Line  # "measured", or the origin of the figures
    memory_bytes: CountFrom1
    free_bytes: CountFrom1
    bandwidth_gb_per_s: Figure  # of reading
    host_to_device_gb_per_s: Figure  # pinned
    host_to_device_pageable_gb_per_s: Figure
    chosen_rows_gb_per_s: Figure  # the kernels of hot neurons, if CHOSEN_SHARE of them are read
    copy_latency_s: Seconds  # fixed cost of one copy in a captured graph
    launch_s: Seconds  # a kernel that does nothing, in a captured graph
    kernel_s: Seconds  # least time of a kernel of a step, however little it reads
    token_s: Seconds  # of a step that uses this GPU, on top of CpuCosts.token_s
    hand_over_s: (
        Seconds  # a layer on both sides: to the CPU and back, with next to no neurons there
    )
    cpu_run_s: (
        Seconds  # a run of layers on the CPU between layers on this GPU, on top of its layers
    )

    @property
    def figures(self) -> dict[str, Figure]:
        return {name: value for name, value in vars(self).items() if isinstance(value, Figure)}

    def neurons_rate(self, density: float) -> float:
        """Bytes per second of hot neurons if a token reads a share `density` of them."""
        return _rate_between(self.bandwidth_gb_per_s, self.chosen_rows_gb_per_s, density)

    def kernels_seconds(self, count: int, num_bytes: float) -> float:
        """Seconds of `count` kernels in sequence that read this many bytes together."""
        read_s = num_bytes * 1e-9 / self.bandwidth_gb_per_s.median
        return max(count * self.kernel_s.median, count * self.launch_s.median + read_s)


@dataclass(frozen=True, kw_only=True)
class CpuCosts:
    """The runtime's costs on the CPU, with which plans are priced, with the threads that it uses:
    beside the GPU if the machine has one.

    Rates are in GB/s, by the type of the matrix: for all of its rows, and for CHOSEN_SHARE of them.
    `kv_gb_per_s` is the rate at which a token's attention reads keys and values. `layer_s` (by
    mode) and `token_s` are the fixed costs of a layer and of a token, in seconds, `logit_s` that of
    one of a token's logits: to copy it, and to find the largest. `pass_rows_gb_per_s` is the rate
    at which all rows are read if they are multiplied by PASS_TOKENS tokens."""

    all_rows_gb_per_s: dict[str, Figure]
    chosen_rows_gb_per_s: dict[str, Figure]
    kv_gb_per_s: Figure
    layer_s: dict[str, Seconds]
    token_s: Seconds
    logit_s: Seconds
    pass_rows_gb_per_s: dict[str, Figure] = field(default_factory=dict)

    @property
    def figures(self) -> dict[str, Figure]:
        named = {f"cpu rows of {kind}": f for kind, f in self.all_rows_gb_per_s.items()}
        named |= {f"cpu chosen rows of {k}": f for k, f in self.chosen_rows_gb_per_s.items()}
        named |= {f"cpu rows of {k} in a pass": f for k, f in self.pass_rows_gb_per_s.items()}
        named |= {f"cpu layer in {mode} mode": f for mode, f in self.layer_s.items()}
        named |= {"cpu token": self.token_s, "cpu token's logit": self.logit_s}
        return named | {"cpu cache": self.kv_gb_per_s}


@dataclass(frozen=True, kw_only=True)
class DriveReads:
    """Direct reads of `size_bytes`, `depth` of them at a time, at random places of a file or one
    behind the other. `cpu_s_per_gb`: seconds of a core for each GB."""

    size_bytes: CountFrom1
    depth: CountFrom1
    is_random: bool
    gb_per_s: Figure
    cpu_s_per_gb: NotNegative


@dataclass(frozen=True, kw_only=True)
class Drive:
    """A drive. `identity` says which one it is (`hotsplit.system.drives`)."""

    name: Line
    identity: Line
    kind: DriveKind
    source: Line  # "measured", or the origin of the figures
    reads: Annotated[tuple[DriveReads, ...], MinLen(1)]

    def read_seconds(self, size_bytes: float) -> float:
        """Seconds of one of many random reads of this size."""
        return size_bytes * 1e-9 / self.best_reads(size_bytes).gb_per_s.median

    def best_reads(self, size_bytes: float) -> DriveReads:
        """Random reads of about this size, of the depths that reach ENOUGH of the best rate the
        least: more reads at a time only take memory and threads."""
        reads = [each for each in self.reads if each.is_random] or list(self.reads)
        sizes = {each.size_bytes for each in reads}
        nearest = min(sizes, key=lambda size: abs(math.log(size / max(1.0, size_bytes))))
        reads = [each for each in reads if each.size_bytes == nearest]
        best = max(each.gb_per_s.median for each in reads)
        enough = [each for each in reads if each.gb_per_s.median >= ENOUGH * best]
        return min(enough, key=lambda each: each.depth)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """`cpu_bandwidth_gb_per_s` is measured with the runtime's own row products, `cpu_sum_gb_per_s`
    with torch's sum, by number of threads. `cpu_costs` is None in a file about a GPU alone.
    `drives` are those that were measured, one for each device."""

    cpu_name: Line
    num_threads: CountFrom1
    memory_bytes: CountFrom1
    free_bytes: Count
    cpu_bandwidth_gb_per_s: Annotated[dict[Threads, Figure], MinLen(1)]
    cpu_sum_gb_per_s: dict[Threads, Figure]
    cpu_costs: CpuCosts | None
    gpus: tuple[Gpu, ...]
    versions: dict[str, str]
    drives: tuple[Drive, ...] = ()

    def drive(self, identity: str | None) -> Drive | None:
        """The drive of this identity or, if it is None, the first; None if it is not known."""
        own = [each for each in self.drives if identity in (None, each.identity)]
        return own[0] if own else None

    def drive_at(self, path: Path) -> Drive | None:
        """The drive of a path or, if it was not measured or the path is not here, the first."""
        identity = drive_of(path).identity if path.exists() else None
        return self.drive(identity) or self.drive(None)

    def cpu_rate(self, kind: str, *, density: float = 1.0) -> float:
        """Bytes per second if a share `density` of the rows of a matrix of this type is read.
        Between all rows and CHOSEN_SHARE of them, the seconds per byte are linear in the logarithm
        of the share; below that they are constant. A file's type with a grid takes as long as its
        table type, at most (kernels.grids). Raises HotsplitError for other types."""
        if kind in TABLES:
            share = block_sizes(kind)[1] / block_sizes(TABLES[kind])[1]
            return share * self.cpu_rate(TABLES[kind], density=density)
        costs = self.costs
        for rates in (costs.all_rows_gb_per_s, costs.chosen_rows_gb_per_s):
            if kind not in rates:
                raise HotsplitError(
                    f"the machine file has no rate for matrices of {kind}; run hotsplit calibrate"
                )
        return _rate_between(
            costs.all_rows_gb_per_s[kind], costs.chosen_rows_gb_per_s[kind], density
        )

    def pass_seconds(self, kind: str) -> tuple[float, float] | None:
        """Seconds per byte of a matrix of this type for a prompt's product: whatever its tokens,
        and for each of them. None if the file has no such rate."""
        rated = TABLES.get(kind, kind)
        if rated not in self.costs.pass_rows_gb_per_s:
            return None
        read_s, table_s = 1 / self.cpu_rate(kind), 1 / self.cpu_rate(rated)
        pass_s = read_s / table_s * 1e-9 / self.costs.pass_rows_gb_per_s[rated].median
        return read_s, max(0.0, pass_s - read_s) / PASS_TOKENS

    @property
    def costs(self) -> CpuCosts:
        if self.cpu_costs is None:
            raise HotsplitError(
                "the machine file describes only a GPU; hotsplit calibrate --gpu-from FILE"
                " measures this machine and takes the GPU from it"
            )
        return self.cpu_costs

    @property
    def best_cpu_bandwidth_gb_per_s(self) -> float:
        return max(figure.best for figure in self.cpu_bandwidth_gb_per_s.values())

    @property
    def figures(self) -> dict[str, Figure]:
        """All figures, by display name."""
        named = {f"cpu with {n} threads": f for n, f in self.cpu_bandwidth_gb_per_s.items()}
        named |= {f"cpu sum with {n} threads": f for n, f in self.cpu_sum_gb_per_s.items()}
        named |= {} if self.cpu_costs is None else self.cpu_costs.figures
        return named | {f"{g.name} {name}": f for g in self.gpus for name, f in g.figures.items()}

    @classmethod
    def load(cls, path: Path) -> "Machine":
        """Raises HotsplitError for anything but a whole, valid machine file."""
        values = read_object(path, "machine file (hotsplit calibrate)")
        found, version = values.pop("format", None), values.pop("version", None)
        if found == FORMAT and version != VERSION:
            again = "run hotsplit calibrate again"
            raise HotsplitError(f"{path}: {other_version(version, VERSION, again)}")
        try:
            if found != FORMAT:
                raise HotsplitError(f"format {shown(found)}, wanted {FORMAT!r}")
            return _read(values)
        except HotsplitError as error:
            raise HotsplitError(
                f"{path}: not a valid machine file ({error}); run hotsplit calibrate again"
            ) from error

    def save(self, path: Path) -> None:
        """Raises HotsplitError for a machine that `load` would refuse."""
        _read(asdict(self))
        content = {"format": FORMAT, "version": VERSION, **asdict(self)}
        with partial_file(path) as partial:
            partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _rate_between(whole: Figure, chosen: Figure, density: float) -> float:
    """Bytes per second at a share `density` of rows, from the GB/s of all and of CHOSEN_SHARE."""
    whole_s, chosen_s = 1e-9 / whole.median, 1e-9 / chosen.median
    way = math.log(min(1.0, max(density, CHOSEN_SHARE))) / math.log(CHOSEN_SHARE)
    return 1 / (whole_s + way * (chosen_s - whole_s))


def _read(values: object) -> Machine:
    machine = read_declared(Machine, values)
    memories = [("the machine", machine.free_bytes, machine.memory_bytes)]
    memories += [(gpu.name, gpu.free_bytes, gpu.memory_bytes) for gpu in machine.gpus]
    for name, free_bytes, memory_bytes in memories:
        if free_bytes > memory_bytes:
            raise HotsplitError(f"{shown(name)} has {free_bytes} free bytes of {memory_bytes}")
    return machine
