"""What torch allocates during a run, as its profiler reports it."""

from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def allocations(run: Callable[[], object]) -> list[int]:
    """Bytes of each allocation of a CPU tensor, and of each release as a negative number, in
    order; mapped files are not among them."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    events = profiled.profiler.kineto_results.events()
    changes = sorted(
        (e.start_ns(), i, e.nbytes()) for i, e in enumerate(events) if e.name() == "[memory]"
    )
    return [num_bytes for *_, num_bytes in changes]


def peak_bytes(run: Callable[[], object]) -> int:
    """Peak bytes of torch's CPU tensors during `run`, beyond those alive before it."""
    alive = peak = 0
    for num_bytes in allocations(run):
        alive += num_bytes
        peak = max(peak, alive)
    return peak
