"""benchmarks/wide_model.py: a wide model computes the same function as the narrow one."""

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

from wide_model import LIMITS_FILE, widen  # noqa: E402

NEURONS, LAYERS, COPIES = 48, 2, 3


def _narrow(folder: Path, *, is_tied: bool) -> LlamaForCausalLM:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=NEURONS, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=is_tied,
        initializer_range=0.2,
    )  # fmt: skip
    model = LlamaForCausalLM(config).float().eval()
    for name, values in model.named_parameters():
        if "norm" in name:
            values.data += 0.3 * torch.randn(values.shape)
    model.save_pretrained(folder)
    return model


def _with_limits(model: LlamaForCausalLM, folder: Path) -> Tensor:
    """Logits [1, T, V] of a model with limits: a neuron is silent if the magnitude of its activated
    gate is at most its limit."""
    limits = load_file(folder / LIMITS_FILE)
    for number, layer in enumerate(model.model.layers):
        limit_F = limits[f"blk.{number}.ffn_gate.limit"]

        def silence(_module: object, _inputs: object, gate: Tensor, limit_F: Tensor = limit_F):
            return gate * (torch.nn.functional.silu(gate).abs() > limit_F)

        layer.mlp.gate_proj.register_forward_hook(silence)
    return _logits(model)


def _logits(model: LlamaForCausalLM) -> Tensor:
    with torch.no_grad():
        return model(torch.arange(24)[None] * 5 % 64).logits


@pytest.mark.parametrize("is_tied", [True, False])
def test_the_function_stays(tmp_path: Path, is_tied: bool) -> None:
    model = _narrow(tmp_path / "narrow", is_tied=is_tied)
    metadata = {"format": "hotsplit.limits", "num_layers": str(LAYERS)}
    limits = {f"blk.{layer}.ffn_gate.limit": 0.3 * torch.rand(NEURONS) for layer in range(LAYERS)}
    save_file(limits, tmp_path / "narrow" / LIMITS_FILE, metadata=metadata)
    widen(tmp_path / "narrow", tmp_path / "wide", COPIES, dtype=torch.float32)
    wide = LlamaForCausalLM.from_pretrained(tmp_path / "wide").float().eval()
    assert wide.config.intermediate_size == COPIES * NEURONS
    dense = _logits(model)
    assert dense.std() > 0.5
    torch.testing.assert_close(_logits(wide), dense, atol=1e-4, rtol=0)
    limited = _with_limits(model, tmp_path / "narrow")
    assert (limited - dense).abs().max() > 0.05
    torch.testing.assert_close(_with_limits(wide, tmp_path / "wide"), limited, atol=1e-4, rtol=0)


def test_copies_are_scattered_and_differ(tmp_path: Path) -> None:
    _narrow(tmp_path / "narrow", is_tied=True)
    widen(tmp_path / "narrow", tmp_path / "wide", COPIES)
    gate_FD = load_file(tmp_path / "wide/model.safetensors")["model.layers.0.mlp.gate_proj.weight"]
    narrow_FD = load_file(tmp_path / "narrow/model.safetensors")[
        "model.layers.0.mlp.gate_proj.weight"
    ]
    assert gate_FD.dtype == torch.float16 and len(gate_FD.unique(dim=0)) == COPIES * NEURONS
    summed_FD = gate_FD.float().unflatten(1, (COPIES, -1)).sum(1)
    of = torch.cdist(summed_FD, narrow_FD).argmin(1)
    assert of.bincount().tolist() == [COPIES] * NEURONS
    assert of.tolist() != (torch.arange(COPIES * NEURONS) % NEURONS).tolist()
    sizes = json.loads((tmp_path / "wide/config.json").read_text())
    assert (sizes["head_dim"], sizes["num_key_value_heads"]) == (8, 6)
