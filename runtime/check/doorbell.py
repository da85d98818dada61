"""Checks that the CPU's parts of a step can be handed over by flags, and that this is worth it."""

from collections.abc import Callable
from functools import partial

from hotsplit.runtime.check import step_check
from hotsplit.runtime.check.kernels import Wrong
from hotsplit.runtime.check.outcome import outcome
from hotsplit.runtime.check.parts import DeviceParts
from hotsplit.runtime.step.hybrid_step import Backend


def check_doorbell(
    parts: DeviceParts,
    ringing: Callable[..., Backend],
    calling: Callable[..., Backend] | None,
    limit_s: float,
) -> None:
    """Raises Wrong if doorbells fail, or are slower than callbacks, which may be missing. If both fail
    in a graph, it is not because of the doorbells."""

    def echo(backend: Callable[..., Backend], *, has_graph: bool) -> None:
        step_check.echo(backend(has_graph=has_graph), parts.device)

    echo(ringing, has_graph=False)
    why = outcome(partial(echo, ringing, has_graph=True), limit_s)
    if calling is None:
        return
    if why:
        if not outcome(partial(echo, calling, has_graph=True), limit_s):
            raise Wrong(f"in a graph: {why}")
        return
    mine, theirs = parts.hand_over_s([each(has_graph=True) for each in (ringing, calling)])
    if mine > theirs:
        raise Wrong(f"takes {1e6 * mine:.1f} us, a host function {1e6 * theirs:.1f}")
