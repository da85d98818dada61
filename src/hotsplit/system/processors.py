"""The processors of this machine, and how many of them this process may keep busy.

All counts of threads come from here. `docker run --cpus=2` leaves all processors of the machine in
a process's affinity and limits its processor time instead: if more threads than that are busy, the
system stops them all together for most of the time."""

import os
import platform
import resource
import threading
from dataclasses import dataclass
from pathlib import Path

from hotsplit.system import control_groups, memory_nodes

_MANY = 4096  # a limit on processes that is not asked about


@dataclass(frozen=True, kw_only=True)
class Processors:
    """Processors of the machine, those that this process may run on, and how many physical cores
    these have; `quota`: processor time per time of the process's control groups, None without;
    `nodes`: the memory nodes that these belong to, none if the system does not say. Cores of
    different speeds count alike: threads take work from each other, so a slow core does less of it
    (runtime/kernels/cpu/thread_pool.cpp)."""

    in_machine: int
    allowed: int
    allowed_cores: int
    quota: float | None
    nodes: tuple[int, ...]

    @property
    def usable(self) -> int:
        """The largest useful number of busy threads."""
        return self._within_quota(self.allowed)

    @property
    def threads(self) -> int:
        """The default number of threads: one per physical core, within the quota."""
        return self._within_quota(self.allowed_cores)

    @property
    def threads_beside_gpu(self) -> int:
        """The default beside a GPU: of more than two cores, one is left to the thread that drives
        it, whose work would otherwise wait for that of a pool that spins on all of them."""
        return self.threads - 1 if self.threads > 2 else self.threads

    def _within_quota(self, count: int) -> int:
        """A fraction of a processor is left over: a pool above the quota is stopped as a whole."""
        return count if self.quota is None else max(1, min(count, int(self.quota)))


def processors() -> Processors:
    """Reads affinity, topology and quota as they are now."""
    in_machine = os.cpu_count() or 1
    has_affinity = hasattr(os, "sched_getaffinity")  # Linux
    allowed = os.sched_getaffinity(0) if has_affinity else set(range(in_machine))
    quotas = [_quota(folder, version) for folder, version in control_groups.groups_of("cpu")]
    # Each processor is a core if the system does not say.
    topology = control_groups.ROOT / "sys/devices/system/cpu"
    siblings = (topology / f"cpu{cpu}" / "topology" / "thread_siblings_list" for cpu in allowed)
    return Processors(
        in_machine=in_machine,
        allowed=len(allowed),
        allowed_cores=len({path.read_text() if path.exists() else str(path) for path in siblings}),
        quota=min((quota for quota in quotas if quota is not None), default=None),
        nodes=memory_nodes.nodes_of(allowed),
    )


def can_start_threads(count: int) -> bool:
    """True if the limit on threads (ulimit -u) leaves room for `count` more."""
    most, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if most == resource.RLIM_INFINITY or most > _MANY:
        return True
    gate, started = threading.Event(), list[threading.Thread]()
    try:
        for _ in range(count):
            thread = threading.Thread(target=gate.wait)
            thread.start()
            started.append(thread)
    except RuntimeError:
        return False
    finally:
        gate.set()
        for thread in started:
            thread.join()
    return True


def load_now() -> float | None:
    """The load average of the last minute; None if unknown."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def limit_libraries() -> None:
    """Gives torch, and the BLAS of numpy, the default number of threads unless the environment says
    another; must be called before they are imported."""
    _set_here("OMP_NUM_THREADS", str(processors().threads))


def let_threads_sleep() -> None:
    """Makes torch's threads sleep while they wait for work; must be called before torch is
    imported. Otherwise they spin, for milliseconds after every operation, on cores that the C++
    kernels' threads or another process would use. Counting 512 tokens of a 135 M model on two
    shared cores took 22.8 s of processor time (108 s of wall-clock time), and 2.9 s (10 s) with
    this."""
    _set_here("OMP_WAIT_POLICY", "passive")


_set_by_us: set[str] = set()


def _set_here(variable: str, value: str) -> None:
    """Sets a variable of the environment for this process's libraries unless it is set."""
    if variable not in os.environ:
        os.environ[variable] = value
        _set_by_us.add(variable)


def environment_as_found() -> dict[str, str]:
    """The environment for other programs: without what is set here for this process's libraries."""
    return {name: value for name, value in os.environ.items() if name not in _set_by_us}


def processor_name() -> str:
    try:
        for line in (control_groups.ROOT / "proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() in ("model name", "Model", "cpu model"):
                return " ".join(value.split())
    except OSError:
        pass
    return platform.processor() or platform.machine() or "unknown"


def _quota(group: Path, version: int) -> float | None:
    """The quota of one group in processors; None if it has none."""
    try:
        if version == 2:  # "200000 100000", or "max 100000"
            quota, period = (group / "cpu.max").read_text().split()
        else:  # -1: none
            quota = (group / "cpu.cfs_quota_us").read_text().strip()
            period = (group / "cpu.cfs_period_us").read_text().strip()
    except (OSError, ValueError):
        return None
    is_limit = quota.isdecimal() and period.isdecimal() and int(quota) > 0 and int(period) > 0
    return int(quota) / int(period) if is_limit else None
