"""Queries and the key of latent attention (MLA), from their low-rank products: what
hotsplit.model.latent computes beside products and the attention to latents.

Letters: T rows, H heads, C values of a latent, N and P values of a head's query that do not rotate
and that do, W = P + C."""

import torch
from torch import Tensor

from hotsplit.runtime.kernels.gpu.gpu_kernel import Versions, gpu_kernel
from hotsplit.runtime.kernels.gpu.language import tl, triton
from hotsplit.runtime.kernels.gpu.launch import overlap_options, power_of_2, step_rows
from hotsplit.runtime.kernels.gpu.norm import normed
from hotsplit.runtime.kernels.gpu.overlap import admit_next, await_last
from hotsplit.runtime.kernels.gpu.reference import rms_norm


@gpu_kernel(reads=("query_Q", "latent_W"), writes=("qkv",))
def join_latents(
    query_Q: Tensor, latent_W: Tensor, weight_C: Tensor, epsilon: float, qkv: Tensor
) -> Versions:
    """Writes what rotates of the queries [H (N + P)] and of `latent_W`, which has the C values of
    the latent and then P of the key, to the first P values of each head of `qkv` [(H + 1) W], and
    the norm of the latent behind those of the key, the last head. The other values of queries stay
    as they are. Rows of the inputs may be strided."""

    def reference() -> None:
        width, size = len(latent_W), len(weight_C)
        heads_HW = qkv.view(-1, width)
        rotated = width - size
        heads_HW[:-1, :rotated] = query_Q.view(len(heads_HW) - 1, -1)[:, -rotated:]
        latent_C, key_P = latent_W.double().split([size, rotated])
        heads_HW[-1] = torch.cat([key_P, rms_norm(latent_C, weight_C, epsilon)])

    def launch() -> None:
        width, size, num_rows = latent_W.shape[-1], len(weight_C), step_rows(qkv)
        num_heads = qkv.shape[-1] // width - 1
        assert qkv.is_contiguous() and query_Q.stride(-1) == latent_W.stride(-1) == 1
        _join_latents[(num_heads + 1, num_rows)](
            query_Q,
            latent_W,
            weight_C,
            float(epsilon),
            qkv,
            query_Q.stride(0),
            latent_W.stride(0),
            NUM_HEADS=num_heads,
            OF_QUERY=query_Q.shape[-1] // num_heads,
            SIZE=size,
            ROTATED=width - size,
            BLOCK=power_of_2(size),
            ROTATED_BLOCK=power_of_2(width - size),
            **overlap_options(),
            num_warps=4,
        )

    return reference, launch


@triton.jit
def _join_latents(
    query,
    latent,
    weight,
    epsilon,
    qkv,
    query_stride,
    latent_stride,
    NUM_HEADS: tl.constexpr,
    OF_QUERY: tl.constexpr,
    SIZE: tl.constexpr,
    ROTATED: tl.constexpr,
    BLOCK: tl.constexpr,
    ROTATED_BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """One program per head and row, the last of a row for the key."""
    admit_next(OVERLAPS)
    await_last(OVERLAPS)
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    target = qkv + (row * (NUM_HEADS + 1) + head) * (ROTATED + SIZE)
    turned_P = tl.arange(0, ROTATED_BLOCK)
    is_turned_P = turned_P < ROTATED
    if head < NUM_HEADS:
        source = query + row * query_stride + head * OF_QUERY + OF_QUERY - ROTATED
    else:
        source = latent + row * latent_stride + SIZE
        column_C = tl.arange(0, BLOCK)
        in_row_C = column_C < SIZE
        value_C = tl.load(latent + row * latent_stride + column_C, mask=in_row_C, other=0.0)
        value_C = normed(value_C, in_row_C, column_C, weight, None, epsilon, SIZE)
        tl.store(target + ROTATED + column_C, value_C, mask=in_row_C)
    tl.store(target + turned_P, tl.load(source + turned_P, mask=is_turned_P), mask=is_turned_P)
