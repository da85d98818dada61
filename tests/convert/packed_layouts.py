"""Matrices in the layouts of published packed checkpoints, written from their formulas in float64,
bit by bit and independent of what reads them.

Letters: N rows, M columns, G groups of columns with one scale."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

GROUP = 32
Packed = tuple[dict[str, torch.Tensor], np.ndarray]  # tensors by suffix, the values in float64
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


@dataclass(frozen=True)
class Layout:
    """`pack` makes a matrix [N, M]; `kind` is the type of ours that keeps it, `is_exact` whether
    with all values."""

    config: dict
    pack: Callable[[np.random.Generator, int, int], Packed]
    kind: str
    is_exact: bool = True
    more: dict = field(default_factory=dict)  # of the test's checkpoint


def words(numbers: np.ndarray, bits: int) -> torch.Tensor:
    """int32 [..., W] of numbers [..., M], the first in the lowest bits, straddling words."""
    rows = numbers.reshape(-1, numbers.shape[-1])
    count = -(-rows.shape[1] * bits // 32)
    out = np.zeros((len(rows), count), np.int32)
    for row, values in zip(out, rows, strict=True):
        whole = sum(int(value) << bits * place for place, value in enumerate(values))
        row[:] = np.frombuffer(whole.to_bytes(4 * count, "little"), np.int32)
    return torch.from_numpy(out.reshape(*numbers.shape[:-1], count))


def scales(chance: np.random.Generator, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(chance.uniform(0.004, 0.02, shape)).to(dtype)


def spread(scale: torch.Tensor, num_rows: int, width: int, block: tuple[int, int]) -> np.ndarray:
    """Scales of blocks [N / block, M / block] for each value, float64."""
    whole = np.repeat(np.repeat(scale.double().numpy(), block[0], 0), block[1], 1)
    return whole[:num_rows, :width]


def gptq(bits: int, *, is_symmetric: bool, more: int = 1, order: str = "") -> Callable[..., Packed]:
    def pack(chance: np.random.Generator, num_rows: int, width: int) -> Packed:
        groups = width // GROUP
        codes_MN = chance.integers(0, 1 << bits, (width, num_rows))
        middle = 1 << bits - 1
        zeros_GN = np.full((groups, num_rows), middle)
        if not is_symmetric:
            zeros_GN = chance.integers(more, (1 << bits) - 1 + more, (groups, num_rows))
        scale_GN = scales(chance, (groups, num_rows), torch.float16)
        group_M = np.arange(width) // GROUP
        if order == "act":
            group_M = chance.permutation(group_M)
        values = (codes_MN - zeros_GN[group_M]) * scale_GN.double().numpy()[group_M]
        tensors = {
            "qweight": words(codes_MN.T, bits).T.contiguous(),
            "qzeros": words(zeros_GN - more, bits),
            "scales": scale_GN,
            "g_idx": torch.from_numpy(group_M.astype(np.int32)),
        }
        return {n: t for n, t in tensors.items() if n != "g_idx" or order != "none"}, values.T

    return pack


def awq(chance: np.random.Generator, num_rows: int, width: int) -> Packed:
    codes_MN = chance.integers(0, 16, (width, num_rows))
    zeros_GN = chance.integers(0, 16, (width // GROUP, num_rows))
    scale_GN = scales(chance, zeros_GN.shape, torch.float16)
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    packed = {
        name: words(values.reshape(len(values), -1, 8)[..., order].reshape(len(values), -1), 4)
        for name, values in (("qweight", codes_MN), ("qzeros", zeros_GN))
    }
    group_M = np.arange(width) // GROUP
    values = (codes_MN - zeros_GN[group_M]) * scale_GN.double().numpy()[group_M]
    return {**packed, "scales": scale_GN}, values.T


def compressed(bits: int, *, is_symmetric: bool, group: int = GROUP) -> Callable[..., Packed]:
    def pack(chance: np.random.Generator, num_rows: int, width: int) -> Packed:
        size = width if group < 0 else group
        codes_NM = chance.integers(0, 1 << bits, (num_rows, width))
        zeros_NG = np.full((num_rows, width // size), 1 << bits - 1)
        if not is_symmetric:
            zeros_NG = chance.integers(0, 1 << bits, zeros_NG.shape)
        scale_NG = scales(chance, zeros_NG.shape, torch.bfloat16)
        tensors = {
            "weight_packed": words(codes_NM, bits),
            "weight_scale": scale_NG,
            "weight_shape": torch.tensor([num_rows, width]),
        }
        if not is_symmetric:
            tensors["weight_zero_point"] = words(zeros_NG.T, bits).T.contiguous()
        group_M = np.arange(width) // size
        return tensors, (codes_NM - zeros_NG[:, group_M]) * scale_NG.double().numpy()[:, group_M]

    return pack


def int8(chance: np.random.Generator, num_rows: int, width: int) -> Packed:
    codes = chance.integers(-128, 128, (num_rows, width))
    scale = scales(chance, (num_rows, 1), torch.bfloat16) / 16
    tensors = {"weight": torch.from_numpy(codes.astype(np.int8)), "weight_scale": scale}
    return tensors, codes * scale.double().numpy()


def mlx(bits: int) -> Callable[..., Packed]:
    def pack(chance: np.random.Generator, num_rows: int, width: int) -> Packed:
        codes = chance.integers(0, 1 << bits, (num_rows, width))
        scale = scales(chance, (num_rows, width // GROUP), torch.float16)
        bias = scales(chance, scale.shape, torch.float16) * -8
        group_M = np.arange(width) // GROUP
        values = codes * scale.double().numpy()[:, group_M] + bias.double().numpy()[:, group_M]
        packed = words(codes, bits).view(torch.uint32)
        return {"weight": packed, "scales": scale, "biases": bias}, values

    return pack


def humming(chance: np.random.Generator, num_rows: int, width: int) -> Packed:
    tensors, values = compressed(2, is_symmetric=True, group=64)(chance, num_rows, width)
    return {"weight": tensors["weight_packed"], "weight_scale": tensors["weight_scale"]}, values


def fp8(
    suffix: str, shape: Callable[[int, int], tuple[int, ...]], dtype: torch.dtype = torch.float32
) -> Callable[..., Packed]:
    """`shape`: of the scales' grid, of which blocks follow; the last ones may be cut short."""

    def pack(chance: np.random.Generator, num_rows: int, width: int) -> Packed:
        raw = torch.from_numpy(chance.normal(size=(num_rows, width)) * 100)
        codes = raw.to(torch.float8_e4m3fn)
        grid = shape(num_rows, width)
        if dtype in (torch.float8_e8m0fnu, torch.uint8):
            exponents = torch.from_numpy(chance.integers(112, 118, grid).astype(np.uint8))
            scale = exponents if dtype == torch.uint8 else exponents.view(dtype)
            numbers = torch.exp2(exponents.double() - 127)
        else:
            scale = scales(chance, grid, dtype) / 50
            numbers = scale.double()
        numbers = numbers.reshape(grid if len(grid) == 2 else (1, 1))
        rows, columns = numbers.shape
        tall = num_rows if rows == 1 else 1 if rows == num_rows else 128
        wide = width if columns == 1 else 32 if columns == width // 32 else 128
        tensors = {"weight": codes, suffix: scale}
        return tensors, codes.double().numpy() * spread(numbers, num_rows, width, (tall, wide))

    return pack


def nibbles(
    chance: np.random.Generator, num_rows: int, width: int
) -> tuple[np.ndarray, torch.Tensor]:
    """Codes and bytes of two, that of the even column in the lower half."""
    codes = chance.integers(0, 16, (num_rows, width))
    return codes, torch.from_numpy((codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8))


def mxfp4(chance: np.random.Generator, num_rows: int, width: int) -> Packed:
    codes, packed = nibbles(chance, num_rows, width)
    exponents = chance.integers(118, 124, (num_rows, width // 32)).astype(np.uint8)
    values = E2M1[codes] * np.repeat(2.0 ** (exponents.astype(int) - 127), 32, 1)
    return {"weight_packed": packed, "weight_scale": torch.from_numpy(exponents)}, values


def nvfp4(*, is_modelopt: bool) -> Callable[..., Packed]:
    def pack(chance: np.random.Generator, num_rows: int, width: int) -> Packed:
        codes, packed = nibbles(chance, num_rows, width)
        scale = torch.from_numpy(chance.uniform(1, 400, (num_rows, width // 16)))
        scale = scale.to(torch.float8_e4m3fn)
        factor = torch.tensor(2e-4 if is_modelopt else 4096.0)
        values = E2M1[codes] * np.repeat(scale.double().numpy(), 16, 1)
        if is_modelopt:
            tensors = {"weight": packed, "weight_scale": scale, "weight_scale_2": factor}
            return {**tensors, "input_scale": torch.tensor(0.1)}, values * factor.double().item()
        tensors = {"weight_packed": packed, "weight_scale": scale, "weight_global_scale": factor}
        return {**tensors, "input_global_scale": torch.tensor(0.1)}, values / factor.double().item()

    return pack


def _ct(format: str, **weights) -> dict:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def _gptq(bits: int, **more) -> dict:
    return {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "desc_act": False, **more}


BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
LAYOUTS = {
    "fp8, blocks": Layout(
        BLOCKS, fp8("weight_scale_inv", lambda n, m: (-(-n // 128), -(-m // 128))), "bf16", False
    ),
    "fp8, blocks, powers of two": Layout(
        BLOCKS,
        fp8("weight_scale_inv", lambda n, m: (-(-n // 128), -(-m // 128)), torch.float8_e8m0fnu),
        "bf16",
    ),
    "fp8, compressed-tensors": Layout(
        _ct("float-quantized", num_bits=8, type="float", strategy="channel"),
        fp8("weight_scale", lambda n, m: (n, 1), torch.bfloat16),
        "bf16",
        False,
    ),
    "fp8, ModelOpt": Layout(
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        fp8("weight_scale", lambda n, m: ()),
        "bf16",
        False,
    ),
    "fp8, Mistral": Layout(
        {"quant_method": "fp8", "weight_block_size": None, "activation_scheme": "static"},
        fp8("qscale_weight", lambda n, m: ()),
        "bf16",
        False,
    ),
    "mxfp8": Layout(
        _ct("mxfp8-quantized", num_bits=8, type="float", strategy="group", group_size=32),
        fp8("weight_scale", lambda n, m: (n, m // 32), torch.uint8),
        "bf16",
    ),
    "mxfp4": Layout(
        _ct("mxfp4-pack-quantized", num_bits=4, type="float", group_size=32), mxfp4, "mxfp4"
    ),
    "nvfp4, compressed-tensors": Layout(
        _ct("nvfp4-pack-quantized", num_bits=4, type="float", group_size=16),
        nvfp4(is_modelopt=False),
        "nvfp4",
    ),
    "nvfp4, ModelOpt": Layout(
        {"quant_method": "modelopt", "quant_algo": "NVFP4"}, nvfp4(is_modelopt=True), "nvfp4"
    ),
    "int4": Layout(
        _ct("pack-quantized", num_bits=4, type="int", group_size=GROUP, strategy="group"),
        compressed(4, is_symmetric=True),
        "q4_0",
    ),
    "int4, zero points": Layout(
        _ct("pack-quantized", num_bits=4, type="int", group_size=GROUP, symmetric=False),
        compressed(4, is_symmetric=False),
        "q5_0",
    ),
    "int3": Layout(
        _ct("pack-quantized", num_bits=3, type="int", group_size=GROUP),
        compressed(3, is_symmetric=True),
        "q4_0",
    ),
    "int8, a scale a row": Layout(
        _ct("pack-quantized", num_bits=8, type="int", strategy="channel", group_size=None),
        compressed(8, is_symmetric=True, group=-1),
        "q8_0",
    ),
    "int8, zero points": Layout(
        _ct("pack-quantized", num_bits=8, type="int", group_size=GROUP),
        compressed(8, is_symmetric=False),
        "f16",
        False,
    ),
    "W8A8": Layout(_ct("int-quantized", num_bits=8, type="int", strategy="channel"), int8, "q8_0"),
    "GPTQ 4": Layout(_gptq(4, sym=True), gptq(4, is_symmetric=True), "q4_0"),
    "GPTQ 4, no g_idx": Layout(_gptq(4), gptq(4, is_symmetric=True, order="none"), "q4_0"),
    "GPTQ 4, zero points": Layout(_gptq(4, sym=False), gptq(4, is_symmetric=False), "q5_0"),
    "GPTQ 4, version 2": Layout(
        _gptq(4, sym=False, checkpoint_format="gptq_v2"),
        gptq(4, is_symmetric=False, more=0),
        "q5_0",
    ),
    "GPTQ 3, zero points": Layout(_gptq(3, sym=False), gptq(3, is_symmetric=False), "q4_0"),
    "GPTQ 2": Layout(_gptq(2, sym=True), gptq(2, is_symmetric=True), "q4_0"),
    "GPTQ 8": Layout(_gptq(8, sym=True), gptq(8, is_symmetric=True), "q8_0"),
    "AutoRound": Layout(
        {"quant_method": "auto-round", "bits": 4, "group_size": GROUP, "sym": False}
        | {"packing_format": "auto_round:gptqmodel"},
        gptq(4, is_symmetric=False, more=0),
        "q5_0",
    ),
    "AWQ": Layout(
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True}
        | {"version": "gemm"},
        awq,
        "q5_0",
    ),
    "MLX 4": Layout({"group_size": GROUP, "bits": 4}, mlx(4), "q4_1"),
    "MLX 3": Layout({"group_size": GROUP, "bits": 3}, mlx(3), "q4_1"),
    "MLX 5": Layout({"group_size": GROUP, "bits": 5, "mode": "affine"}, mlx(5), "q5_1"),
    "MLX 8": Layout({"group_size": GROUP, "bits": 8}, mlx(8), "f16", False),
    "humming 2": Layout(
        {"quant_method": "humming", "b_dtype": "uint2", "weight_scale_group_size": 64},
        humming,
        "q2_0",
    ),
}
