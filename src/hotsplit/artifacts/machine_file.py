"""machine.json: the machine's figures, measured, or copied from a datasheet and marked as such.

Specified in docs/formats.md."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from statistics import quantiles
from typing import Any, TypeVar

from hotsplit.errors import HotsplitError
from hotsplit.files.atomic import partial_file
from hotsplit.files.json_file import read_object
from hotsplit.files.typed import MAX_SHOWN, Fields, one_line, other_version, shown

FORMAT = "hotsplit.machine"
VERSION = 1
# Bounds on the figures of a machine, within which computations stay finite.
LEAST, MOST = 1e-18, 1e18
MOST_S = 1e3  # the longest copy, kernel, hand-over, layer or token; keeps the solver in range
RATE = "gb_per_s"
# If the interquartile range exceeds this share of the median, other load probably disturbed the
# rounds.
DOUBTFUL_SPREAD = 0.25
# The share of a matrix's rows that is read when the rate for chosen rows is measured.
CHOSEN_SHARE = 0.1
PASS_TOKENS = 32  # that all rows are multiplied by when the rate of a prompt's products is measured
Record = TypeVar("Record", "Machine", "CpuCosts", "Gpu")


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A quantity measured in several rounds. Plans are priced with `median`, what a token usually
    gets; `best`, which other load can only make worse, is for limits.

    `quartiles` (ascending, with the median) are None and `rounds` is 0 if not measured."""

    best: float
    quartiles: tuple[float, float, float] | None = None
    rounds: int = 0

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


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU. Bandwidths in GB/s (1e9 bytes), times in seconds, memory in bytes.

    `token_s`, `hand_over_s`, `cpu_run_s` and `kernel_s` are fitted to the times of whole decode
    steps (measure/calibrate/step_costs.py)."""

    name: str
    source: str  # "measured", or the origin of the figures
    memory_bytes: int
    free_bytes: int
    bandwidth_gb_per_s: Figure  # of reading
    host_to_device_gb_per_s: Figure  # pinned
    host_to_device_pageable_gb_per_s: Figure
    chosen_rows_gb_per_s: Figure  # the kernels of hot neurons, if CHOSEN_SHARE of them are read
    copy_latency_s: Figure  # fixed cost of one copy in a captured graph
    launch_s: Figure  # a kernel that does nothing, in a captured graph
    kernel_s: Figure  # least time of a kernel of a step, however little it reads
    token_s: Figure  # of a step that uses this GPU, on top of CpuCosts.token_s
    hand_over_s: Figure  # a layer on both sides: to the CPU and back, with next to no neurons there
    cpu_run_s: Figure  # a run of layers on the CPU between layers on this GPU, on top of its layers

    @property
    def figures(self) -> dict[str, Figure]:
        return {name: value for name, value in vars(self).items() if isinstance(value, Figure)}

    def neurons_rate(self, density: float) -> float:
        """Bytes per second of hot neurons if a token reads a share `density` of them; interpolated
        as `Machine.cpu_rate` is."""
        return _rate_between(self.bandwidth_gb_per_s, self.chosen_rows_gb_per_s, density)

    def kernels_seconds(self, count: int, num_bytes: float) -> float:
        """Seconds of `count` kernels in sequence that read this many bytes together."""
        read_s = num_bytes * 1e-9 / self.bandwidth_gb_per_s.median
        return max(count * self.kernel_s.median, count * self.launch_s.median + read_s)


@dataclass(frozen=True, kw_only=True)
class CpuCosts:
    """The runtime's costs on the CPU, with which plans are priced, with the threads that it uses: beside
    the GPU if the machine has one.

    Rates are in GB/s, by the type of the matrix: for all of its rows, and for CHOSEN_SHARE of them.
    `kv_gb_per_s` is the rate at which a token's attention reads keys and values. `layer_s` (by
    mode) and `token_s` are the fixed costs of a layer and of a token, in seconds, `logit_s` that of
    one of a token's logits: to copy it, and to find the largest. `pass_rows_gb_per_s` is the rate at
    which all rows are read if they are multiplied by PASS_TOKENS tokens."""

    all_rows_gb_per_s: dict[str, Figure]
    chosen_rows_gb_per_s: dict[str, Figure]
    kv_gb_per_s: Figure
    layer_s: dict[str, Figure]
    token_s: Figure
    logit_s: Figure
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
class Machine:
    """`cpu_bandwidth_gb_per_s` is measured with the runtime's own row products, `cpu_sum_gb_per_s`
    with torch's sum, by number of threads. `cpu_costs` is None in a file about a GPU alone."""

    cpu_name: str
    num_threads: int
    memory_bytes: int
    free_bytes: int
    cpu_bandwidth_gb_per_s: dict[int, Figure]
    cpu_sum_gb_per_s: dict[int, Figure]
    cpu_costs: CpuCosts | None
    gpus: tuple[Gpu, ...]
    versions: dict[str, str]

    def cpu_rate(self, kind: str, *, density: float = 1.0) -> float:
        """Bytes per second if a share `density` of the rows of a matrix of this type is read.

        Between all rows and CHOSEN_SHARE of them, the seconds per byte are linear in the logarithm
        of the share; below that they are constant. Raises HotsplitError for other types."""
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
        """Seconds per byte of a matrix of this type for a prompt's product: whatever its tokens, and for
        each of them. None if the file has no such rate."""
        if kind not in self.costs.pass_rows_gb_per_s:
            return None
        read_s = 1 / self.cpu_rate(kind)
        pass_s = 1e-9 / self.costs.pass_rows_gb_per_s[kind].median
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

    @property
    def times(self) -> dict[str, Figure]:
        """The figures in seconds, by display name."""
        return {
            name: figure
            for name, figure in self.figures.items()
            if name.startswith(("cpu layer ", "cpu token"))
            or (name.endswith("_s") and not name.endswith(RATE))
        }

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
            machine = _record(cls, Fields(values, keys=_names(cls)))
            machine.validate()
        except HotsplitError as error:
            raise HotsplitError(
                f"{path}: not a valid machine file ({error}); run hotsplit calibrate again"
            ) from error
        return machine

    def save(self, path: Path) -> None:
        self.validate()
        content = {"format": FORMAT, "version": VERSION, **asdict(self)}
        with partial_file(path) as partial:
            partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    def validate(self) -> None:
        """Raises HotsplitError unless every figure is within the bounds with valid quartiles, and
        no memory has more free bytes than it holds."""
        if not self.cpu_bandwidth_gb_per_s:
            raise HotsplitError("no CPU bandwidth")
        numbers: dict[str, float] = {"threads": self.num_threads, "memory": self.memory_bytes}
        for gpu in self.gpus:
            numbers |= {f"{gpu.name} memory": gpu.memory_bytes, f"{gpu.name} free": gpu.free_bytes}
            _check_free(gpu.name, gpu.free_bytes, gpu.memory_bytes)
        _check_free("the machine", self.free_bytes, self.memory_bytes)
        for name, figure in self.figures.items():
            quartiles = figure.quartiles or ()
            numbers |= {name: figure.best}
            numbers |= {f"quartile {i} of {name}": value for i, value in enumerate(quartiles, 1)}
            if list(quartiles) != sorted(quartiles) or bool(quartiles) != (figure.rounds > 0):
                raise HotsplitError(
                    f"{one_line(name, MAX_SHOWN)} has quartiles {list(quartiles)} of"
                    f" {figure.rounds} rounds,"
                    " wanted three ascending ones, or none for 0 rounds"
                )
        for name, number in numbers.items():
            name = one_line(name, MAX_SHOWN)
            if not number > 0:
                raise HotsplitError(f"{name} is {number}, wanted more than 0")
            if not LEAST <= number <= MOST:
                raise HotsplitError(f"{name} is {number}, wanted {LEAST:g} to {MOST:g}")
        for name, figure in self.times.items():
            if figure.best > MOST_S:
                raise HotsplitError(
                    f"{one_line(name, MAX_SHOWN)} is {figure.best} s, wanted up to {MOST_S:g}"
                )


def _rate_between(whole: Figure, chosen: Figure, density: float) -> float:
    """Bytes per second if a share `density` of the rows is read, from the GB/s of all of them and
    of CHOSEN_SHARE."""
    whole_s, chosen_s = 1e-9 / whole.median, 1e-9 / chosen.median
    way = math.log(min(1.0, max(density, CHOSEN_SHARE))) / math.log(CHOSEN_SHARE)
    return 1 / (whole_s + way * (chosen_s - whole_s))


def _check_free(name: str, free_bytes: int, memory_bytes: int) -> None:
    if free_bytes > memory_bytes:
        raise HotsplitError(
            f"{one_line(name, MAX_SHOWN)} has {free_bytes} free bytes of {memory_bytes}"
        )


def _names(kind: type) -> set[str]:
    return {each.name for each in fields(kind)}


def _record(kind: type[Record], read: Fields) -> Record:
    """A record whose fields are read by their types."""
    readers: dict[object, Callable[[str], Any]] = {
        str: read.line,
        int: read.count,
        Figure: partial(_figure, read),
        dict[int, Figure]: lambda key: _by_threads(read.part(key)),
        dict[str, Figure]: lambda key: _each(read.part(key), _figure),
        dict[str, str]: lambda key: _each(read.part(key), Fields.text),
        CpuCosts | None: lambda key: (
            None
            if read.values[key] is None
            else _record(CpuCosts, read.part(key, _names(CpuCosts)))
        ),
        tuple[Gpu, ...]: lambda key: tuple(
            _record(Gpu, gpu) for gpu in read.parts(key, _names(Gpu))
        ),
    }
    return kind(**{each.name: readers[each.type](each.name) for each in fields(kind)})


def _each(read: Fields, value_of: Callable[[Fields, str], object]) -> dict[str, object]:
    return {name: value_of(read, name) for name in read.values}


def _by_threads(read: Fields) -> dict[int, Figure]:
    for name in read.values:
        if not (name.isascii() and name.isdecimal() and len(name) < 6 and name[0] != "0"):
            raise HotsplitError(f"{read.name} has {shown(name)}, wanted numbers of threads")
    return {int(name): _figure(read, name) for name in read.values}


def _figure(parent: Fields, key: str) -> Figure:
    read = parent.part(key, _names(Figure))
    rounds = read.count("rounds")
    if read.values["quartiles"] is None:
        return Figure(best=read.number("best"), rounds=rounds)
    quartiles = read.numbers("quartiles")
    if len(quartiles) != 3:
        raise HotsplitError(f"{read.name} has {len(quartiles)} quartiles, wanted three")
    low, median, high = quartiles
    return Figure(best=read.number("best"), quartiles=(low, median, high), rounds=rounds)
