"""The sections of gpu_handover.py about what a hand-over costs."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from gpu_sections import SectionTable
from handover import exchange_forms
from handover.exchange_forms import LAYERS, LINE, Buffers, Forms
from handover.handover_gpu import HandoverGpu, Refused
from handover.host import LIMIT_NS, Host, Job

JOB_FLOATS = 2_550_000  # 10 MB: the cold weights of a layer
DATA_FLOATS = 64 << 20  # 256 MB, so that no cache holds them
LOGITS = 49_152  # a torch copy of so many values wakes OpenMP's threads
TRIPS = 50
TICKS = 12  # replays of which the first three warm up


@dataclass(frozen=True, kw_only=True)
class HandoverBench:
    gpu: HandoverGpu
    host: Host
    buffers: Buffers
    cores: int
    is_small: bool  # --fake: little data, few repeats

    def forms(self, job: Job | None = None) -> Forms:
        b = self.buffers
        return Forms(self.gpu, self.host, b, job or Job(b.x_host, b.y_host))

    @property
    def repeats(self) -> int:
        return 2 if self.is_small else exchange_forms.REPEATS


def handover(bench: HandoverBench) -> list[SectionTable]:
    """An empty job per layer, for three gaps of GPU time."""
    gaps = (20, 100, 300)
    known = bench.forms()
    bases = {gap: known.base_us(gap) for gap in gaps}
    rows = []
    for name in known.layers:
        if name != exchange_forms.NO_HAND_OVER:
            added = [known.added_us(name, gap, bases[gap], bench.repeats) for gap in gaps]
            rows.append([name, *(_cell(us) for us in added)])
    rows.append(["a layer without", *(f"{bases[gap]:.1f}" for gap in gaps)])
    return [
        SectionTable(
            title="us that an empty hand-over adds to a layer, median / 90 % of replays",
            columns=("form", *(f"gap of {gap} us" for gap in gaps)),
            rows=rows,
            note=_caller(known.job),
        )
    ]


def job(bench: HandoverBench) -> list[SectionTable]:
    """10 MB per layer read by a pool: who calls, how many threads, how they wait."""
    wanted = (
        exchange_forms.HOST_SIDE,
        exchange_forms.HOST_MAPPED,
        exchange_forms.MEMOPS_COPIES,
        exchange_forms.MEMOPS,
        exchange_forms.FLAGS,
    )
    floats = JOB_FLOATS // 100 if bench.is_small else JOB_FLOATS
    data = torch.ones(2 * floats if bench.is_small else DATA_FLOATS)
    one, other = torch.zeros(LOGITS), torch.zeros(LOGITS)
    gap, cores, rows = 100, bench.cores, []
    base = bench.forms().base_us(gap)
    for threads, spin_us, yields, spins_beside in (
        (cores, 1000, True, False),
        (cores, 50, False, False),
        (max(1, cores - 1), 1000, True, False),
        (cores, 1000, True, True),
    ):
        cells = []
        for name in wanted:
            with bench.host.pool(threads, spin_us, yields, data) as pool:
                known = bench.forms(Job(bench.buffers.x_host, bench.buffers.y_host, pool, floats))
                if name not in known.layers:
                    cells.append("-")
                    continue
                before = (lambda: other.copy_(one)) if spins_beside else (lambda: None)
                added = known.added_us(name, gap, base, bench.repeats, before)
                own = (known.job.leave[:LAYERS] - known.job.enter[:LAYERS]).double().median() / 1e3
                us = None if added is None else median(added) + exchange_forms.HOT_US
                cells.append("not served" if us is None else f"{us:.0f} ({own:.0f})")
        what = f"{threads} threads, spin {spin_us} us{', yield' if yields else ''}"
        rows.append([what + (", OpenMP spins" if spins_beside else ""), *cells])
    title = (
        "us from the end of the GPU's gap to its next kernel (of which in the job), 10 MB a layer"
    )
    return [SectionTable(title=title, columns=("pool", *wanted), rows=rows)]


def idle(bench: HandoverBench) -> list[SectionTable]:
    """If a host function is faster with the cores kept awake, its cost is that of waking one."""
    known, rows = bench.forms(), []
    names, gaps = (exchange_forms.HOST_ALONE, exchange_forms.MEMOPS), (20, 300)
    for num_awake in (0, bench.cores // 2, max(1, bench.cores - 2)):
        cells = []
        with bench.host.awake(num_awake):
            for gap in gaps:
                base = known.base_us(gap)
                for name in names:
                    has = name in known.layers
                    us = known.added_us(name, gap, base, bench.repeats) if has else None
                    cells.append(_cell(us) if has else "-")
        rows.append([f"{num_awake} cores kept awake", *cells])
    columns = ("", *(f"{name}, gap of {gap} us" for gap in gaps for name in names))
    return [
        SectionTable(title="us that an empty hand-over adds to a layer", columns=columns, rows=rows)
    ]


def split(bench: HandoverBench) -> list[SectionTable]:
    """GPU to CPU and CPU to GPU apart, on one clock."""
    gpu, b = bench.gpu, bench.buffers
    clock, rows = Clock(bench), []
    clock.ahead_ns()  # compiles
    known = bench.forms()
    job, base = known.job, b.stamps.data_ptr()

    def hands_over(name: str, layer: int) -> None:
        ready, done = b.flags(layer)
        if name == exchange_forms.HOST_ALONE:
            gpu.host(bench.host.job_function, job.address)
        elif name == exchange_forms.MEMOPS:
            gpu.write(ready, 1)
            gpu.wait(done, 1)
        else:
            gpu.put(b.x, b.x_host.data_ptr(), ready)
            gpu.add(b.x, b.y_host.data_ptr(), done)

    def submit(name: str) -> Callable[[], None]:
        def all_layers() -> None:
            for layer in range(LAYERS):
                gpu.busy(100, base + 16 * layer)
                hands_over(name, layer)
                gpu.busy(0, base + 16 * layer + 8)

        return all_layers

    for name in (exchange_forms.HOST_ALONE, exchange_forms.MEMOPS, exchange_forms.FLAGS):
        if name not in known.layers:
            continue
        graph, there, back = gpu.captured(submit(name)), [], []
        for number in range(TICKS):
            ahead = clock.ahead_ns()
            if known.replay_us(graph, is_served=name in exchange_forms.SERVED) is None:
                raise Refused(f"{name}: not served in time")
            if number >= exchange_forms.WARM_UP:
                stamps_2L = b.stamps[: 2 * LAYERS].double() - ahead
                there += ((job.enter[:LAYERS] - stamps_2L[0::2]) / 1e3).tolist()
                back += ((stamps_2L[1::2] - job.leave[:LAYERS]) / 1e3).tolist()
        rows.append([name, _cell(there), _cell(back)])
    columns = ("", "kernel ends -> CPU runs", "CPU ends -> next kernel has run")
    title = "us of each direction, median / 90 %"
    note = f"CPU -> polling kernel -> CPU: {clock.trip_us:.1f} us"
    return [SectionTable(title=title, columns=columns, rows=rows, note=note)]


class Clock:
    """The offset between the GPU's clock and the CPU's, by round trips that the CPU begins."""

    def __init__(self, bench: HandoverBench) -> None:
        self.bench, self.trip_us = bench, float("nan")
        self.stamps = bench.gpu.pinned(TRIPS + 2, torch.int64)
        self.times = torch.zeros(2 * TRIPS, dtype=torch.int64)
        self.flags = bench.gpu.pinned(2 * LINE, torch.int32)

    def ahead_ns(self) -> float:
        """The GPU's time minus the CPU's, now: the two drift by some us a second."""
        gpu, library = self.bench.gpu, self.bench.host.library
        self.flags.zero_()
        gpu.synchronize()
        there, back = self.flags.data_ptr(), self.flags.data_ptr() + 4 * LINE
        gpu.launch("answer", (1,), there, back, self.stamps.data_ptr(), TRIPS, num_warps=1)
        num_answered = library.hb_ping(there, back, TRIPS, self.times.data_ptr(), LIMIT_NS)
        gpu.synchronize()
        if num_answered != TRIPS:
            raise Refused(f"{num_answered} of {TRIPS} round trips by flags")
        sent, got = self.times[0::2], self.times[1::2]
        self.trip_us = float((got - sent).median()) / 1e3
        best = int((got - sent).argmin())
        return float(self.stamps[best + 1]) - float(sent[best] + got[best]) / 2


def facts_of(bench: HandoverBench) -> dict[str, object]:
    """The machine, as far as a hand-over depends on it."""
    names = {
        "idle driver": "/sys/devices/system/cpu/cpuidle/current_driver",
        "halt polling, ns": "/sys/module/haltpoll/parameters/guest_halt_poll_ns",
        "NVIDIA driver": "/proc/driver/nvidia/version",
    }
    return {
        **bench.gpu.facts(),
        "cores": bench.cores,
        "torch": torch.__version__,
        "memory operations in a capture": bench.gpu.memops,
        "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "not set"),
        **{name: _read(path) for name, path in names.items()},
        "time": time.strftime("%Y-%m-%dT%H:%M:%S"),
    }


def _caller(job: Job) -> str:
    """The thread that called the job first."""
    known = job.struct
    name = _read(f"/proc/self/task/{known.tid}/comm")
    return (
        f"first caller: thread {known.tid} ({name}), policy {known.policy}, nice {known.nice},"
        f" may run on {known.affinity} cores"
    )


def _cell(us: list[float] | None) -> str:
    if us is None:
        return "not served"
    high = sorted(us)[min(len(us) - 1, int(0.9 * len(us)))]
    return f"{median(us):.1f} / {high:.1f}"


def _read(path: str) -> str:
    try:
        return " ".join(Path(path).read_text().split())[:100]
    except OSError:
        return "unknown"
