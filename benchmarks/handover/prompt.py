"""The section of gpu_handover.py about prompts: the operations of 512 tokens through layers of a 7B
shape, launched by Python as a pass does, and captured in a graph."""

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from gpu_sections import Table
from torch import Tensor
from torch.nn import functional

T, D, F, HEADS, HEAD_DIM = 512, 4096, 11008, 32, 128  # tokens, width, neurons
CONTEXT, LAYERS, ALL_LAYERS, ROUNDS = 1024, 4, 32, 6
HALF: dict[str, Any] = {"dtype": torch.float16, "device": "cuda"}


def prompt() -> list[Table]:
    with torch.inference_mode():
        return [_measured(_layer())]


def _measured(layer: Callable[[Tensor], Tensor]) -> Table:
    x_TD = torch.randn(T, D, device="cuda")

    def run() -> None:
        y_TD = x_TD
        for _ in range(LAYERS):
            y_TD = layer(y_TD)

    run()
    torch.cuda.synchronize()
    eager, host = [], []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        run()
        host.append(time.perf_counter() - began)
        torch.cuda.synchronize()
        eager.append(time.perf_counter() - began)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        run()
    captured = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        graph.replay()
        torch.cuda.synchronize()
        captured.append(time.perf_counter() - began)
    names = {"launched by Python": eager, "of which launches": host, "captured": captured}
    rows = [
        [name, *(f"{1e3 * count * median(found) / LAYERS:.3f}" for count in (1, ALL_LAYERS))]
        for name, found in names.items()
    ]
    columns = ("", "ms a layer", f"ms of {ALL_LAYERS}")
    return Table(title=f"{T} tokens through layers of 7B, f16", columns=columns, rows=rows)


def _layer() -> Callable[[Tensor], Tensor]:
    """A layer as runtime/ computes a pass: the same operations, in the same order."""
    dims = ((3 * D, D), (D, D), (F, D), (F, D), (F, D))
    qkv_ND, out_DD, gate_FD, up_FD, down_FD = (torch.randn(*dim, **HALF).mul_(0.01) for dim in dims)
    weight_D = torch.ones(D, device="cuda")
    cache = torch.zeros(2, HEADS, CONTEXT, HEAD_DIM, **HALF)
    cos, sin = (f(T, 1, HEAD_DIM // 2, device="cuda") for f in (torch.ones, torch.zeros))

    def norm(x_TD: Tensor) -> Tensor:
        return functional.rms_norm(x_TD, (D,), weight_D, 1e-5).to(torch.float16)

    def attention(x_TD: Tensor) -> Tensor:
        qkv = _product(norm(x_TD), qkv_ND.T).unflatten(-1, (-1, HEAD_DIM))
        rotated = qkv[:, : 2 * HEADS]
        first, second = rotated[..., 0::2], rotated[..., 1::2]
        carried = first * sin
        first.mul_(cos).addcmul_(second, sin, value=-1.0)
        second.mul_(cos).add_(carried)
        q, k, v = qkv.split([HEADS, HEADS, HEADS], dim=1)
        cache[0, :, :T] = k.to(torch.float16).transpose(0, 1)
        cache[1, :, :T] = v.to(torch.float16).transpose(0, 1)
        scaled = torch.empty_like(q, dtype=torch.float16)
        torch.mul(q, HEAD_DIM**-0.5, out=scaled)
        heads = torch.ops.aten._scaled_dot_product_flash_attention(
            scaled.transpose(0, 1)[None],
            cache[0, :, :T][None],
            cache[1, :, :T][None],
            is_causal=True,
            scale=1.0,
        )[0][0]
        return _product(heads.transpose(0, 1).flatten(1), out_DD.T)

    def neurons(x_TD: Tensor) -> Tensor:
        a, y_TD = norm(x_TD), torch.zeros_like(x_TD)
        hidden_TF = functional.silu(_product(a, gate_FD.T), inplace=True)
        hidden_TF.mul_(_product(a, up_FD.T))
        largest = torch.linalg.vector_norm(hidden_TF, torch.inf, dim=1, keepdim=True)
        power = largest.view(torch.int32).bitwise_and_(0x7F800000).view(torch.float32)
        power.clamp_(2.0**-126, 2.0**126)
        scaled = torch.empty_like(hidden_TF, dtype=torch.float16)
        torch.div(hidden_TF, power, out=scaled)
        return y_TD.addcmul_(_product(scaled, down_FD), power)

    def layer(x_TD: Tensor) -> Tensor:
        x_TD = x_TD + attention(x_TD)
        return x_TD + neurons(x_TD)

    return layer


def _product(a: Tensor, b: Tensor) -> Tensor:
    return torch.mm(a, b, out_dtype=torch.float32)  # type: ignore[call-overload,no-any-return]
