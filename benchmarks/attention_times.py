"""The section of gpu_prompts.py about attention: the kernel of passes against torch's attention,
for passes of two lengths at several places of a text.

Letters: T tokens, H heads, W head width, C positions."""

import time
from collections.abc import Callable
from statistics import median

import torch
from gpu_sections import SectionTable
from torch.nn import functional

from hotsplit.model.spec import Attention
from hotsplit.runtime.kernels.gpu.kernels import reference_kernels, triton_kernels

COLUMNS = (
    "heads of 128, key heads",
    "tokens",
    "positions",
    "ours, us",
    "torch, us",
    "times as long",
)
HEADS, WIDTH, ROUNDS, CALLS = ((32, 32), (32, 8), (9, 3)), 128, 7, 10
PASSES = ((32, 512), (512, 512), (32, 4096), (512, 4096))


def attention(
    device: torch.device, passes: tuple[tuple[int, int], ...] = PASSES
) -> list[SectionTable]:
    rows = [_row(device, *heads, *each) for heads in HEADS for each in passes]
    return [SectionTable(title="attention of a layer, f16", columns=COLUMNS, rows=rows)]


def _row(device: torch.device, heads: int, kv_heads: int, tokens: int, positions: int) -> list[str]:
    dtype = torch.float16
    query_THW = torch.randn(tokens, heads, WIDTH, device=device).mul_(WIDTH**-0.5).to(dtype)
    cache = torch.randn(2, kv_heads, positions, WIDTH, device=device).to(dtype)
    out_THW = torch.empty_like(query_THW)
    position_T = torch.arange(positions - tokens, positions, device=device)
    keys, values = (each.transpose(0, 1) for each in cache)
    spec = Attention(num_heads=heads, num_kv_heads=kv_heads, head_dim=WIDTH, rotary=None)
    kernels = triton_kernels() if device.type == "cuda" else reference_kernels()
    query = query_THW.transpose(0, 1)[None]

    def ours() -> None:
        kernels.attend_tokens(query_THW, keys, values, position_T, spec, out_THW)

    def theirs() -> None:
        if device.type == "cuda":  # aligns the last positions
            torch.ops.aten._scaled_dot_product_flash_attention(
                query, cache[0][None], cache[1][None], is_causal=True, scale=1.0
            )
        else:
            functional.scaled_dot_product_attention(
                query, cache[0][None], cache[1][None], enable_gqa=True
            )

    mine, other = _seconds(ours, device), _seconds(theirs, device)
    return [
        f"{heads}, {kv_heads}",
        str(tokens),
        str(positions),
        f"{1e6 * mine:.1f}",
        f"{1e6 * other:.1f}",
        f"{mine / other:.2f}",
    ]


def _seconds(run: Callable[[], None], device: torch.device) -> float:
    """Median seconds of a call among several."""
    found = []
    for _ in range(ROUNDS):
        _wait(device)
        began = time.perf_counter()
        for _ in range(CALLS):
            run()
        _wait(device)
        found.append((time.perf_counter() - began) / CALLS)
    return median(found[1:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
