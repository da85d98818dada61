"""machine.json: what this machine can do, measured (or copied from a datasheet, and then said).

Specified in docs/formats.md. What this module does not know: how to measure."""

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from sparkinfer.errors import SparkinferError
from sparkinfer.files import partial_file, require_file

FORMAT = "sparkinfer.machine"
VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU. Bandwidths in GB/s (1e9 bytes), times in seconds, memory in bytes."""

    name: str
    source: str  # "measured", or where the figures come from
    memory_bytes: int
    free_bytes: int
    bandwidth_gb_per_s: float
    host_to_device_gb_per_s: float  # pinned
    host_to_device_pageable_gb_per_s: float
    copy_latency_s: float  # fixed cost of one copy
    launch_s: float  # fixed cost of one kernel
    round_trip_s: float  # GPU to CPU and back, with nothing computed


@dataclass(frozen=True, kw_only=True)
class Machine:
    cpu_name: str
    num_threads: int
    memory_bytes: int
    free_bytes: int
    cpu_bandwidth_gb_per_s: dict[int, float]  # by number of threads
    gpus: tuple[Gpu, ...]
    versions: dict[str, str]

    @property
    def best_cpu_bandwidth_gb_per_s(self) -> float:
        return max(self.cpu_bandwidth_gb_per_s.values())

    @classmethod
    def load(cls, path: Path) -> "Machine":
        """Raises SparkinferError for anything but a whole, valid machine file."""
        require_file(path, "machine file (sparkinfer calibrate)")
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            header = (content.pop("format", None), content.pop("version", None))
            if header != (FORMAT, VERSION):
                raise SparkinferError(f"format and version {header}, wanted {(FORMAT, VERSION)}")
            unknown = content.keys() ^ {field.name for field in fields(cls)}
            if unknown:
                raise SparkinferError(f"key {min(unknown)!r} is unknown or missing")
            content["gpus"] = tuple(Gpu(**gpu) for gpu in content["gpus"])
            bandwidth = content["cpu_bandwidth_gb_per_s"]
            content["cpu_bandwidth_gb_per_s"] = {int(n): rate for n, rate in bandwidth.items()}
            machine = cls(**content)
            machine.validate()
        except (SparkinferError, TypeError, ValueError, AttributeError, KeyError) as error:
            raise SparkinferError(
                f"{path}: not a machine file of this version ({error}); run sparkinfer calibrate"
            ) from error
        return machine

    def save(self, path: Path) -> None:
        self.validate()
        content = {"format": FORMAT, "version": VERSION, **asdict(self)}
        with partial_file(path) as partial:
            partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    def validate(self) -> None:
        """Raises SparkinferError unless every figure is positive and finite."""
        figures = {f"cpu with {n} threads": r for n, r in self.cpu_bandwidth_gb_per_s.items()}
        figures |= {"threads": self.num_threads, "memory": self.memory_bytes}
        for gpu in self.gpus:
            numbers = {k: v for k, v in asdict(gpu).items() if not isinstance(v, str)}
            figures |= {f"{gpu.name} {key}": value for key, value in numbers.items()}
        if not self.cpu_bandwidth_gb_per_s:
            raise SparkinferError("no CPU bandwidth")
        for name, figure in figures.items():
            if not 0 < figure < float("inf"):
                raise SparkinferError(f"{name} is {figure}, wanted more than 0")
