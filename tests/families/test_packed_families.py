"""Packed checkpoints of every family: the tensors of a model file are those that the same values in
32 bits give, whatever a family does with rows, columns, names and experts."""

import shutil

import numpy as np
import pytest
import torch
from checkpoints import edit_config, random_model, save_tokenizer
from gguf.quants import dequantize
from safetensors.torch import load_file, save_file
from test_families import CASES, DELTA, GATED, MOE
from transformers import Gemma3TextConfig, Phi3Config, Qwen3_5TextConfig, Qwen3MoeConfig

from hotsplit.convert.convert import draft_of
from hotsplit.convert.options import ConvertConfig
from hotsplit.files.gguf_file import type_of

LEFT = (
    "embed",
    "norm",
    "router",
    "gate.weight",
    "lm_head",
    "conv",
    "score",
    "wte",
    "wpe",
    "inp",
    "bias",
)
WHOLE = GATED | {"intermediate_size": 96, "head_dim": 32}
DELTA_32 = {"linear_key_head_dim": 32, "linear_value_head_dim": 32, "linear_num_value_heads": 4}
INTEGERS = {
    "fused rows": Phi3Config(**GATED | {"intermediate_size": 96}),
    "columns of values": Qwen3_5TextConfig(**WHOLE | DELTA | DELTA_32 | {"head_dim": 32}),
    "experts": Qwen3MoeConfig(
        **MOE | {"moe_intermediate_size": 32}, head_dim=32, norm_topk_prob=True
    ),
    "norms more": Gemma3TextConfig(**WHOLE, query_pre_attn_scalar=32),
}


def fp8(chance, values):
    codes = (values * 400).to(torch.float8_e4m3fn)
    scale = torch.from_numpy(chance.uniform(0.01, 0.1, (*values.shape[:-1], 1))).float()
    return {"": codes, "_scale_inv": scale}, codes.float() * scale


def int4(chance, values):
    """Symmetric, groups of 32, scales that f16 holds."""
    codes = torch.from_numpy(chance.integers(0, 16, values.shape))
    scale = torch.from_numpy(chance.integers(1, 99, (*values.shape[:-1], values.shape[-1] // 32)))
    scale = scale.half() / 1024
    words = (codes.reshape(*values.shape[:-1], -1, 8) << torch.arange(0, 32, 4)).sum(-1)
    packed = words.to(torch.uint32).view(torch.int32)
    spread = scale.float().repeat_interleave(32, -1)
    return {"_packed": packed, "_scale": scale}, (codes - 8).float() * spread


def packed_and_dense(folder, config, pack, packing):
    """Two folders: all matrices packed but those in LEFT, and their values in 32 bits."""
    random_model(folder / "dense", config)
    save_tokenizer(folder / "dense", 320)
    shutil.copytree(folder / "dense", folder / "packed")
    dense, chance = load_file(folder / "dense/model.safetensors"), np.random.default_rng(0)
    packed = dict(dense)
    for name, values in dense.items():
        if values.ndim > 1 and min(values.shape) > 1 and not any(each in name for each in LEFT):
            parts, want = pack(chance, packed.pop(name))
            packed |= {name + suffix: tensor.contiguous() for suffix, tensor in parts.items()}
            dense[name] = want.contiguous()
    save_file(dense, folder / "dense/model.safetensors", {"format": "pt"})
    save_file(packed, folder / "packed/model.safetensors", {"format": "pt"})
    edit_config(folder / "packed", lambda values: values.update(quantization_config=packing))
    return folder / "packed", folder / "dense"


def tensors_of(folder, output, layout, outtype):
    options = {"source": folder, "output": output, "layout": layout, "outtype": outtype}
    return draft_of(ConvertConfig(**options)).model.tensors


@pytest.mark.parametrize("case", CASES)
def test_a_packed_checkpoint_has_the_tensors_of_its_values(tmp_path, case):
    packing = {"quant_method": "fp8", "weight_block_size": None}
    packed, dense = packed_and_dense(tmp_path, CASES[case], fp8, packing)
    got, want = (tensors_of(each, tmp_path / "m.gguf", "sparse", "f32") for each in (packed, dense))
    assert got.keys() == want.keys()
    for name, entry in want.items():
        assert np.array_equal(got[name].read(), entry.read()), name


@pytest.mark.parametrize("case", INTEGERS)
def test_rows_and_columns_in_another_order_keep_their_bits(tmp_path, case):
    weights = {"num_bits": 4, "type": "int", "group_size": 32}
    packing = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    packing |= {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}
    packed, dense = packed_and_dense(tmp_path, INTEGERS[case], int4, packing)
    layout = "sparse" if case == "columns of values" else "stock"
    got = tensors_of(packed, tmp_path / "m.gguf", layout, None)
    want = tensors_of(dense, tmp_path / "m.gguf", layout, "f32")
    kept = 0
    for name, entry in got.items():
        if entry.kind == "q4_0":
            values = dequantize(entry.read(), type_of("q4_0"))
            assert np.array_equal(values, want[name].read()), name
            kept += 1
    assert kept >= 4 * 3 - 2, {name: entry.kind for name, entry in got.items()}
    assert case != "columns of values" or got["blk.0.ssm_out.weight"].kind == "q4_0"
