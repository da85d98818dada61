"""Compiles the GPU kernels for a device that need not be present: python gpu_compilation.py ARCH
KIND...

Triton's own compiler and ptxas from its wheel compile the runtime's kernels to machine code, on
tensors of a model's sizes and matrices of the given kinds (`none`: the kernels without matrices);
nothing is launched. Launches overlap from 9.0 on. It prints one JSON object per launch, which
tests/kernels/test_gpu_compilation.py checks.

Run it without TRITON_INTERPRET. It is not a test itself: compiled kernels need their own process,
as the interpreter is chosen once when Triton is imported."""

import json
import re
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch
import triton
from gpu_matrices import TILE_KINDS, heads_of
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction
from triton.runtime.driver import driver

from hotsplit.files.gguf_file import row_bytes
from hotsplit.model.attention import HeadVector
from hotsplit.model.route import Route
from hotsplit.model.weight_types import TYPES, file_kind
from hotsplit.runtime.kernels.gate import Gate
from hotsplit.runtime.kernels.gpu.expert_pairs import LARGE_TILE, SMALL_TILE
from hotsplit.runtime.kernels.gpu.kernels import triton_kernels
from hotsplit.runtime.kernels.gpu.launch import overlapping
from hotsplit.runtime.kernels.gpu.ranges import attend_scratch, down_parts
from hotsplit.runtime.ops.device import tile_dtype
from hotsplit.runtime.weights.matrix import Matrix

WIDTH, NEURONS, RANK, HEADS, KV_HEADS, HEAD_WIDTH = 4096, 11008, 1024, 32, 8, 128
OVERLAPPING = 90
FLOATS = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
FILE_KINDS = tuple(t.name for t in TYPES if t.planes)  # supported by `unpack` alone


class AbsentDevice:
    """The device properties that Triton reads before it compiles."""

    def __init__(self, arch: int):
        self._target = GPUTarget("cuda", arch, 32)

    def get_current_target(self):
        return self._target

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


def compile_instead_of_launching(kernels: list) -> None:
    """Makes every launch of a kernel append (its name, its compiled form) to a list instead."""
    run = JITFunction.run

    def compile_only(self, *args, grid, warmup, **options):
        kernels.append((self.__name__, run(self, *args, grid=grid, warmup=True, **options)))

    JITFunction.run = compile_only


def matrix(kind: str, num_rows: int, width: int) -> Matrix:
    if kind in FLOATS:
        data = torch.empty(num_rows, width, dtype=FLOATS[kind])
    else:
        data = torch.empty(num_rows, row_bytes(width, file_kind(kind)), dtype=torch.uint8)
    return Matrix(data=data, kind=kind, width=width)


def launch_for_kind(kind: str) -> None:
    kernels = triton_kernels()
    weights = matrix(kind, NEURONS, WIDTH)
    x, out = torch.empty(WIDTH), torch.empty(NEURONS)
    if kind in TILE_KINDS:
        kernels.unpack(weights, torch.empty(NEURONS, WIDTH, dtype=torch.float16))
        launch_experts(weights, x)
        return
    kernels.unpack(weights, torch.empty(64, WIDTH, dtype=torch.float16))
    if kind in FILE_KINDS:
        return
    index = torch.zeros(64, dtype=torch.int64)
    kernels.unpack(weights, torch.empty(64, WIDTH, dtype=torch.bfloat16), index)
    kernels.embed(weights, index[:1], x)
    kernels.embed(weights, index[:1], x, scale=8.0)
    kernels.dot(weights, out, x, out, has_relu=True)
    named = torch.empty(NEURONS // 32, dtype=torch.int32)
    predictor = matrix(kind, NEURONS, RANK)
    kernels.predict(predictor, None, x[:RANK], 0.5, named)
    ids = torch.empty(NEURONS, dtype=torch.int32)
    every, named_alone = Gate(activation="silu", computes_all=True), Gate(activation="relu")
    fatrelu = Gate(activation="fatrelu", threshold=0.1)
    kernels.gate_up(weights, None, weights, None, None, None, x, every, out)
    kernels.gate_up(weights, None, weights, None, ids, named, x, fatrelu, out)
    kernels.gate_up(weights, out, None, None, None, named, x, named_alone, out)
    parts = torch.empty(down_parts(NEURONS, WIDTH), WIDTH)
    kernels.down(weights, out, parts, skips_zeros=True)
    kernels.down(weights, out, parts, skips_zeros=False)
    routed, hidden = torch.empty(16), torch.empty(8, NEURONS)
    places = torch.zeros(64, dtype=torch.int32)
    clamped = Gate(activation="swiglu_oai", computes_all=True)
    kernels.expert_gate_up(weights, out, weights, out, places, routed, x, clamped, hidden)
    given = (weights, x, places, routed)
    kernels.expert_down(*given, hidden[:, :WIDTH].clone(), torch.empty(8, 512), is_by_output=True)
    sums = torch.empty(16, WIDTH)
    kernels.expert_down(*given, hidden, sums, is_by_output=False, skips_zeros=True)
    dtype = tile_dtype(kind)
    for tokens in (20, 512):
        x, out = torch.empty(tokens, WIDTH, dtype=dtype), torch.empty(tokens, NEURONS)
        kernels.multiply(weights, out[0], x, out[:, 0].clone(), out)
        hidden, y = out.to(dtype), torch.empty(tokens, WIDTH)
        kernels.multiply_down(weights, hidden, out[:, 0].clone(), y, is_added=True)
    launch_experts(weights, out[0])


def launch_experts(weights: Matrix, bias: torch.Tensor) -> None:
    """Prompts of experts: sums of rows if they are in groups."""
    kernels, count = triton_kernels(), 512
    rows, tile = torch.zeros(2, count, dtype=torch.int32), torch.zeros(4, 3, dtype=torch.int32)
    size = SMALL_TILE if weights.kind in TILE_KINDS else LARGE_TILE
    power, given = torch.empty(count), {"tile_G3": tile, "row_2P": rows, "tile_size": size}
    dtype = tile_dtype(weights.kind)
    x, hidden = (torch.empty(count, size, dtype=dtype) for size in (WIDTH, NEURONS))
    if weights.kind.endswith("_grouped"):
        y = torch.empty(count, WIDTH)
        kernels.multiply_down(
            weights, hidden, power, y, is_added=False, bias_D=bias, factor_P=power, **given
        )
        return
    kernels.multiply(weights, bias, x, power, hidden.float(), factor_P=power, **given)


def launch_the_rest() -> None:
    kernels = triton_kernels()
    x, parts = torch.empty(WIDTH), torch.empty(16, WIDTH)
    kernels.add_norm(x, parts, x, None, 1e-5, x, x)
    kernels.add_norm(x, None, x, x, 1e-5, x, None)
    kernels.add_norm(x, parts[:1], None, None, 1e-5, None, x)
    position = torch.zeros(1, dtype=torch.int64)
    frequency = torch.empty(HEAD_WIDTH // 2, dtype=torch.float64)
    for dtype in (torch.float16, torch.float32):
        cache = torch.empty(4096, KV_HEADS, HEAD_WIDTH, dtype=dtype)
        for heads in (HEADS, KV_HEADS):
            qkv = torch.empty((heads + 2 * KV_HEADS) * HEAD_WIDTH)
            weight = x[:HEAD_WIDTH] if heads == HEADS else None
            spec = heads_of(heads, KV_HEADS, HEAD_WIDTH, is_adjacent=dtype == torch.float16)
            kernels.rotate_append(qkv, frequency, weight, weight, position, cache, cache, spec)
            scratch = torch.empty(attend_scratch(len(cache), heads, HEAD_WIDTH))
            out = torch.empty(heads, HEAD_WIDTH)
            for window in (None, 512):
                capped = replace(spec, window=window, score_cap=window and 50.0)
                kernels.attend(qkv, cache, cache, position, capped, scratch, out)
        for width in (HEAD_WIDTH, 256, 512):
            query = torch.empty(70, 8, width, dtype=dtype)
            keys = torch.empty(9, 2, 64, width, dtype=dtype)
            keys, table = keys.transpose(1, 2), torch.zeros(1, 9, dtype=torch.int32)
            cap = 50.0 if width == HEAD_WIDTH else None
            sinks = HeadVector("attn_sinks.weight")
            spec = heads_of(8, 2, width, window=512, score_cap=cap, head_sinks=sinks)
            at, of_heads = torch.arange(70), {"head_sinks": x[:8]}
            given = (query, keys, keys, at, spec, query.clone(), table[0], table)
            kernels.attend_tokens(*given, vectors=of_heads)
    launch_latents()
    launch_delta()
    launch_delta(32, is_by_row=True)  # Kimi Linear's
    launch_mamba2()
    routed = torch.empty(16)
    kernels.choose_experts(x[:128], None, Route(num_experts=128, num_used=8), routed)
    groups = Route(
        num_experts=256, num_used=8, gating="sigmoid", scale=2.5, num_groups=8, num_used_groups=4
    )
    kernels.choose_experts(x[:256], x[:256], groups, routed, routed)
    tiles, pairs = torch.zeros(90, 3, dtype=torch.int32), torch.zeros(3, 160, dtype=torch.int32)
    given = (torch.zeros(20, 16), None, tiles, pairs, torch.empty(160))
    kernels.sort_pairs(*given, num_experts=64, tile_size=SMALL_TILE)
    half = torch.empty(20, WIDTH, dtype=torch.float16)
    rows, power = torch.empty(20, WIDTH), torch.empty(20)
    kernels.round_tokens(rows, rows, x, x, 1e-5, half, power, rows)
    kernels.round_tokens(rows, None, None, None, 0.0, half.bfloat16(), None, None)
    named = torch.empty(20, WIDTH // 32, dtype=torch.int32)
    kernels.hidden_tokens(rows, rows, named, Gate(activation="gelu", threshold=0.1), half, power)
    kernels.hidden_tokens(
        rows, rows, None, Gate(activation="silu", computes_all=True), half.bfloat16(), None
    )
    kernels.hidden_tokens(rows, rows, None, Gate(activation="gelu_tanh", cutoff=1.6), rows, None)
    planes, choice, mix = torch.empty(4 * WIDTH), torch.empty(4), torch.empty(16, 4)
    kernels.predict_planes(choice, mix, planes, x)
    kernels.correct_planes(choice, mix[:4], x, planes, x)
    kernels.add_to_planes(planes, x)
    row_bytes = 2 * WIDTH
    staging = torch.empty(8 * row_bytes, dtype=torch.uint8)
    kernels.scatter(staging, torch.empty(8, 4, dtype=torch.int64), row_bytes)
    named = torch.empty(NEURONS // 32, dtype=torch.int32)
    kernels.pack_open(x, torch.empty(NEURONS, dtype=torch.int32), named)


def launch_latents(heads: int = 128, size: int = 512, plain: int = 128, rotated: int = 64) -> None:
    """The kernels of latent attention of DeepSeek V3."""
    kernels, width, at = triton_kernels(), size + rotated, torch.arange(70)
    spec = heads_of(heads, 1, width, is_adjacent=True, num_kv_projections=1, value_width=size)
    low, frequency = torch.empty(1536 + width), torch.empty(rotated // 2, dtype=torch.float64)
    query, qkv = torch.empty(heads * (plain + rotated)), torch.empty((heads + 1) * width)
    absorbing = matrix("q8_0_planar", heads * size, plain)
    kernels.dot(absorbing, None, query, qkv[rotated:][: heads * width], num_heads=heads)
    kernels.join_latents(query, low[1536:], low[:size], 1e-6, qkv)
    x, power = torch.empty(70, len(query), dtype=torch.float16), torch.empty(70)
    absorbed = torch.empty(70, len(qkv))[:, rotated:][:, : heads * width]
    kernels.multiply(absorbing, None, x, power, absorbed, num_heads=heads)
    for dtype in (torch.float16, torch.float32):
        keys = torch.empty(4096, 1, width, dtype=dtype)
        values = keys[..., rotated:]
        kernels.rotate_append(qkv, frequency, None, None, at[:1], keys, values, spec)
        scratch = torch.empty(attend_scratch(len(keys), heads, size))
        kernels.attend(qkv, keys, values, at[:1], spec, scratch, torch.empty(heads, size))
        queries = torch.empty(70, heads, width, dtype=dtype)
        out = torch.empty(70, heads, size, dtype=dtype)
        kernels.attend_tokens(queries, keys, values, at, spec, out)


def launch_delta(
    key_heads: int = 16, value_heads: int = 32, width: int = 128, *, is_by_row: bool = False
) -> None:
    """The kernels of a delta net of Qwen3.6-35B-A3B, and of a short convolution."""
    kernels, channels = triton_kernels(), (2 * key_heads + value_heads) * width
    decays = value_heads * (width if is_by_row else 1)
    projected = torch.empty(channels + value_heads * (width + 1) + decays)
    taps, rate, bias = torch.empty(channels, 4), torch.empty(value_heads), torch.empty(decays)
    conv, state = torch.empty(4, 3, channels), torch.empty(4, value_heads, width, width)
    slots = torch.zeros(1, 3, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    mixed, out = torch.empty(channels + value_heads + decays), torch.empty(value_heads, width)
    kernels.convolve(projected, taps, bias, rate, conv, *slots, mixed, key_heads)
    flags = {"is_grouped": False, "is_by_row": is_by_row}
    kernels.delta_rule(mixed, state, *slots, out, key_heads, **flags)
    kernels.gate_norm(out, projected, out[0], 1e-6, is_sigmoid=is_by_row)
    rows, of_lfm2 = torch.empty(1, 3 * WIDTH), torch.empty(4, 2, WIDTH)
    kernels.convolve_gated(rows, torch.empty(WIDTH, 3), of_lfm2, *slots, rows[:, :WIDTH].clone())


def launch_mamba2(heads: int = 64, width: int = 64, groups: int = 8, state: int = 128) -> None:
    """The kernels of Mamba-2 of Nemotron 3 Nano."""
    kernels, channels = triton_kernels(), heads * width + 2 * groups * state
    projected, of_heads = torch.empty(heads * width + channels + heads), torch.empty(heads)
    taps, conv = torch.empty(channels, 4), torch.empty(4, 3, channels)
    slots = torch.zeros(1, 3, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    mixed, out = torch.empty(channels + 2 * heads), torch.empty(heads, width)
    given = projected, taps, taps[:, 0].clone(), of_heads, of_heads, conv
    kernels.convolve_channels(*given, *slots, mixed)
    states = torch.empty(4, heads, state, width)
    kernels.scan_states(mixed, of_heads, states, *slots, out, groups)
    kernels.gate_groups(out.flatten(), projected, out.flatten(), 1e-5, groups)


def facts(name: str, kernel) -> dict[str, str | int]:
    """Registers and stack bytes per thread of the machine code, shared bytes, and counts in the
    PTX."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    ptx = kernel.asm["ptx"]
    return {
        "kernel": name,
        "registers": found["REG"],
        "stack_bytes": found["STACK"] + found["LOCAL"],
        "shared_bytes": kernel.metadata.shared,
        "loads_of_16": len(re.findall(r"ld\.global\S*\.v4\.b32", ptx)),
        "loads_of_8": len(re.findall(r"ld\.global\S*\.v2\.b32", ptx)),
        "smaller_loads": len(re.findall(r"ld\.global\S*[^4]\.b(?:8|16|32)", ptx)),
        "barriers": ptx.count("bar.sync"),
        "ptx_lines": ptx.count("\n"),
    }


def main() -> None:
    driver.set_active(AbsentDevice(int(sys.argv[1])))
    compiled: list = []
    compile_instead_of_launching(compiled)
    overlaps = int(sys.argv[1]) >= OVERLAPPING
    for kind in sys.argv[2:]:
        with overlapping() if overlaps else nullcontext():
            if kind == "none":
                launch_the_rest()
            else:
                launch_for_kind(kind)
        for name, kernel in compiled:
            print(json.dumps({"kind": kind, **facts(name, kernel)}), flush=True)
        compiled.clear()


if __name__ == "__main__":
    main()
