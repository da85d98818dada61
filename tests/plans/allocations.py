"""What torch allocates during a run, as its profiler reports it."""

from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile

from hotsplit.runtime.device.pools import SMALL_TENSOR_BYTES, PoolBytes


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


def pool_peaks(run: Callable[[], object]) -> PoolBytes:
    """Peak bytes of tensors up to SMALL_TENSOR_BYTES, and of larger ones, as `peak_bytes`."""
    alive = {True: 0, False: 0}
    peak = dict(alive)
    for num_bytes in allocations(run):
        is_small = abs(num_bytes) <= SMALL_TENSOR_BYTES
        alive[is_small] += num_bytes
        peak[is_small] = max(peak[is_small], alive[is_small])
    return PoolBytes(small=peak[True], large=peak[False])
