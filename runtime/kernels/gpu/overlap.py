"""Triton: programmatic dependent launch, with which a kernel begins while the one before it in its
stream still runs (CUDA C++ Programming Guide; from compute capability 9.0 on).

A kernel lets the next one begin at once, loads weights, which no kernel of a step writes, and then
waits until the one before has ended and its results are visible. All its blocks wait, so that a
kernel that has ended has seen the end of all before it. Before its wait, a kernel neither reads nor
writes anything that other kernels write or read."""

from hotsplit.runtime.kernels.gpu.language import gdc_launch_dependents, gdc_wait, tl, triton


@triton.jit
def admit_next(OVERLAPS: tl.constexpr):
    """Lets the next kernel begin, when all blocks of this one have."""
    if OVERLAPS:
        gdc_launch_dependents()


@triton.jit
def await_last(OVERLAPS: tl.constexpr):
    """Waits for the kernel before; a second wait takes no time."""
    if OVERLAPS:
        gdc_wait()
