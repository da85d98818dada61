"""The kernels of a decode step on a GPU, as one record: a step can run on Triton's kernels
or on the float64 reference.

All of them write to given tensors. Triton's allocate nothing and do not synchronise. They launch on
the current stream of torch's current device, which must be the tensors' device; their grids depend
only on shapes, so a captured CUDA graph stays valid for every position and every set of neurons.
Vectors are contiguous f32 unless stated otherwise; rows of matrices may be strided.

A step computes T rows, T in `launch.ROWS`. With T > 1, every vector of a row becomes [T, ...]
(GpuKernel.axes; sums of parts become [P, T, D]), an index or position becomes [T], and rows of
outputs of `dot` may be strided. A row's result is bit-identical for every T and whatever the other
rows are; for K-quants it is equal up to the f32 rounding of terms, because the compiler fuses
different operations for different T. A row may repeat the previous one.

The cache of one sequence is [C, K, W]; that of several sequences is in blocks [B, C, K, W]:
position p of sequence s is in block table_SN[s, p // C], int32 on the device, where C is a multiple
of 64.

A matrix has the `gpu_kind` of one of hotsplit.model.weight_types (hotsplit.runtime.kernels.planar).

Letters: T rows of a step, D width, F neurons of the layer or of an expert, E experts of the layer,
K experts of a row, N rows of a matrix or neurons of a block, R rank, H heads, K key-value heads, W
head width, C positions of the cache or of one of its blocks, S parts of a sum, P rows to add, A
chosen rows, B words of 32 bits or blocks of a cache; table_SN: S sequences, N blocks of one."""

from collections.abc import Callable, Mapping
from typing import Any

from hotsplit.runtime.kernels.gpu import (
    attention,
    delta,
    experts,
    heads,
    latent,
    mamba2,
    neurons,
    norm,
    planes,
    predictor,
    products,
    prompt_attention,
    routing,
    rows,
    short_conv,
    slots,
    sorting,
    tokens,
)
from hotsplit.runtime.kernels.gpu.gpu_kernel import GpuKernel, KernelVersion
from hotsplit.runtime.kernels.gpu.launch import overlapping


class Kernels(KernelVersion):
    """The kernels of a step, in one version. `record.dot(...)` is that version of `dot`;
    `Kernels.dot` is its declaration."""

    def replaced(self, **others: Callable[..., None]) -> "Kernels":
        """The record with other versions of the kernels of these names."""
        return Kernels(lambda kernel: others.get(kernel.name) or self.of(kernel))

    dot, embed, unpack = rows.dot, rows.embed, rows.unpack
    add_norm = norm.add_norm
    join_latents, rotate_append = latent.join_latents, heads.rotate_append
    attend, attend_tokens = attention.attend, prompt_attention.attend_tokens
    predict = predictor.predict
    gate_up, down = neurons.gate_up, neurons.down
    choose_experts = routing.choose_experts
    expert_gate_up, expert_down = experts.expert_gate_up, experts.expert_down
    convolve, delta_rule, gate_norm = delta.convolve, delta.delta_rule, delta.gate_norm
    convolve_gated = short_conv.convolve_gated
    convolve_channels, scan_states = mamba2.convolve_channels, mamba2.scan_states
    gate_groups = mamba2.gate_groups
    multiply, multiply_down = products.multiply, products.multiply_down
    round_tokens, hidden_tokens = tokens.round_tokens, tokens.hidden_tokens
    predict_planes, correct_planes = planes.predict_planes, planes.correct_planes
    add_to_planes = planes.add_to_planes
    scatter, pack_open = slots.scatter, slots.pack_open
    sort_pairs = sorting.sort_pairs


KERNELS: Mapping[str, GpuKernel[Any]] = {
    name: each for name, each in vars(Kernels).items() if isinstance(each, GpuKernel)
}


def triton_kernels() -> Kernels:
    """Triton's kernels, on the current CUDA device, or in its interpreter (TRITON_INTERPRET=1).

    The first call for each combination of widths, types, alignments, options and T compiles,
    which fails during graph capture, so run the step once before. The numbers of neurons
    and of a matrix's rows count only where they change tile sizes or numbers of parts.
    Raises ImportError with one line if Triton is missing."""
    try:
        import triton  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"the GPU kernels need Triton, found none ({error}): pip install triton"
        ) from error
    return Kernels(lambda kernel: kernel.triton)


def overlapped(kernels: Kernels) -> Kernels:
    """Triton's kernels, each of which begins while the one before in its stream still runs
    (overlap.py); for steps alone, whose weights no kernel writes."""

    def version(kernel: GpuKernel[Any]) -> Callable[..., None]:
        run: Callable[..., None] = kernels.of(kernel)

        def launch(*arguments: Any, **options: Any) -> None:
            with overlapping():
                run(*arguments, **options)

        return launch

    return Kernels(version)


def reference_kernels() -> Kernels:
    """Reference kernels in float64 with torch, on any device, which define the others' results."""
    return Kernels(lambda kernel: kernel.reference)
