"""SmallThinker against a definition of its own in float64, from its paper (arXiv 2507.20984), since
transformers does not have it."""

import json
from pathlib import Path

import pytest
import torch
from checkpoints import edit_config, save_tokenizer
from reference import rel_error
from safetensors.torch import load_file, save_file
from test_families import decoded

from hotsplit import Engine
from hotsplit.artifacts.model_file import ModelFile
from hotsplit.convert.convert import convert
from hotsplit.convert.options import ConvertConfig
from hotsplit.errors import HotsplitError

IDS = [5, 17, 300, 4, 99, 5, 5, 210, 33, 0, 250, 7]
SIZES = {
    "architectures": ["SmallThinkerForCausalLM"],
    "model_type": "smallthinker",
    "hidden_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 18,
    "vocab_size": 331,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "moe_ffn_hidden_size": 37,
    "moe_num_primary_experts": 7,
    "moe_num_active_primary_experts": 3,
    "moe_primary_router_apply_softmax": False,
    "tie_word_embeddings": False,
    "sliding_window_layout": None,
    "sliding_window_size": 5,
    "rope_layout": None,
}
LAYOUT = [0, 1, 1, 1, 0]
CASES = {
    "rotating": {},
    "windows": {"sliding_window_layout": LAYOUT, "rope_layout": LAYOUT},
    "softmax": {"moe_primary_router_apply_softmax": True, "tie_word_embeddings": True},
}


def checkpoint(folder: Path, changes: dict) -> Path:
    """A random checkpoint with the names of the published ones."""
    c = SIZES | changes
    width, head, length = c["hidden_size"], c["head_dim"], c["moe_ffn_hidden_size"]
    heads, kv_heads = c["num_attention_heads"], c["num_key_value_heads"]
    shapes = {"model.embed_tokens.weight": (331, width), "model.norm.weight": (width,)}
    if not c["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (331, width)
    for layer in range(c["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        shapes |= {
            f"{at}input_layernorm.weight": (width,),
            f"{at}post_attention_layernorm.weight": (width,),
            f"{at}self_attn.q_proj.weight": (heads * head, width),
            f"{at}self_attn.k_proj.weight": (kv_heads * head, width),
            f"{at}self_attn.v_proj.weight": (kv_heads * head, width),
            f"{at}self_attn.o_proj.weight": (width, heads * head),
            f"{at}block_sparse_moe.primary_router.weight": (7, width),
        }
        for expert in range(7):
            own = f"{at}block_sparse_moe.experts.{expert}."
            shapes |= {f"{own}{name}.weight": (length, width) for name in ("gate", "up")}
            shapes[f"{own}down.weight"] = (width, length)
    folder.mkdir()
    chance = torch.Generator().manual_seed(0)
    weights = {
        name: torch.randn(shape, generator=chance) * (0.2 if len(shape) == 1 else shape[1] ** -0.5)
        + (len(shape) == 1)
        for name, shape in shapes.items()
    }
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(c))
    save_tokenizer(folder, 331)
    return folder


def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def rotated(x: torch.Tensor, theta: float) -> torch.Tensor:
    """[T, heads, W] with pairs half a head apart."""
    half = x.shape[-1] // 2
    angle = torch.arange(len(x))[:, None, None] * theta ** (-torch.arange(half).double() / half)
    first, second = x[..., :half], x[..., half:]
    turned = first * angle.cos() - second * angle.sin(), first * angle.sin() + second * angle.cos()
    return torch.cat(turned, dim=-1)


def attention(w: dict, at: str, x: torch.Tensor, c: dict, layer: int) -> torch.Tensor:
    heads, kv_heads = c["num_attention_heads"], c["num_key_value_heads"]
    q, k, v = (
        (x @ w[f"{at}self_attn.{n}_proj.weight"].T).unflatten(1, (-1, c["head_dim"])) for n in "qkv"
    )
    if (c["rope_layout"] or [1] * 5)[layer]:
        q, k = rotated(q, c["rope_theta"]), rotated(k, c["rope_theta"])
    k, v = (rows.repeat_interleave(heads // kv_heads, dim=1) for rows in (k, v))
    score = torch.einsum("qhw,khw->hqk", q, k) / c["head_dim"] ** 0.5
    distance = torch.arange(len(x))[:, None] - torch.arange(len(x))
    window = c["sliding_window_size"] if (c["sliding_window_layout"] or [0] * 5)[layer] else len(x)
    score = score.masked_fill((distance < 0) | (distance >= window), -torch.inf)
    out = torch.einsum("hqk,khw->qhw", score.softmax(-1), v)
    return out.flatten(1) @ w[f"{at}self_attn.o_proj.weight"].T


def logits_ref(folder: Path, ids: list[int] = IDS) -> torch.Tensor:
    """f64 [T, V]."""
    c = json.loads((folder / "config.json").read_text())
    w = {name: values.double() for name, values in load_file(folder / "model.safetensors").items()}
    x = w["model.embed_tokens.weight"][ids]
    for layer in range(c["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        logit_TE = x @ w[f"{at}block_sparse_moe.primary_router.weight"].T  # of the layer's input
        chosen = logit_TE.topk(3)
        is_softmax = c["moe_primary_router_apply_softmax"]
        weight = chosen.values.softmax(-1) if is_softmax else chosen.values.sigmoid()
        weight = weight / weight.sum(-1, keepdim=True)
        x = x + attention(w, at, rms(x, w[f"{at}input_layernorm.weight"]), c, layer)
        y = rms(x, w[f"{at}post_attention_layernorm.weight"])
        out = torch.zeros_like(x)
        for t in range(len(x)):
            for k in range(3):
                own = f"{at}block_sparse_moe.experts.{int(chosen.indices[t, k])}."
                hidden = (w[f"{own}gate.weight"] @ y[t]).relu() * (w[f"{own}up.weight"] @ y[t])
                out[t] += weight[t, k] * (w[f"{own}down.weight"] @ hidden)
        x = x + out
    head = w.get("lm_head.weight", w["model.embed_tokens.weight"])
    return rms(x, w["model.norm.weight"]) @ head.T


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_the_definition(tmp_path, case):
    """In both layouts; mode exact skips within an expert. In bits, rows equal single steps."""
    folder = checkpoint(tmp_path / "hf", CASES[case])
    want = logits_ref(folder)
    for layout in ("sparse", "stock") if case != "windows" else ("sparse",):
        path = tmp_path / f"{layout}.gguf"
        convert(ConvertConfig(source=folder, output=path, outtype="f32", layout=layout))
        assert ModelFile.load(path).activation == "relu"
        for mode in ("dense", "exact") if layout == "sparse" else ("dense",):
            with Engine.load(path, mode=mode) as engine:
                got = engine.logits(IDS)
                assert rel_error(got, want) < 1e-5
                assert rel_error(decoded(engine, IDS), want[-1]) < 1e-5
                assert rel_error(got.roll(1, 0), want) > 0.1
                for position, token in enumerate(IDS):
                    assert torch.equal(engine._step(token, position), got[position])


def test_by_default_silent_neurons_are_skipped(tmp_path):
    folder = checkpoint(tmp_path / "hf", {})
    for layout, mode in (("sparse", "exact"), ("stock", "dense")):
        path = tmp_path / f"{layout}.gguf"
        convert(ConvertConfig(source=folder, output=path, layout=layout))
        with Engine.load(path) as engine:
            assert engine.mode == mode and bool(engine.logits(IDS).isfinite().all())


REFUSED = {
    "layers without experts are not supported": {"moe_layer_layout": [1, 1, 0, 1, 1]},
    "wanted rotary embeddings in all layers, or in those with a window": {
        "rope_layout": [1, 0, 1, 1, 1]
    },
    "no such experts": {"moe_enable_secondary_experts": True},
    "sliding_window_layout is .*, wanted 5 of 0 or 1": {"sliding_window_layout": [1, 2]},
}


@pytest.mark.parametrize("words", REFUSED)
def test_other_graphs_are_refused(tmp_path, words):
    folder = checkpoint(tmp_path / "hf", {})
    edit_config(folder, lambda config: config.update(REFUSED[words]))
    with pytest.raises(HotsplitError, match=words):
        convert(ConvertConfig(source=folder, output=tmp_path / "m.gguf"))


def test_windows_that_llama_cpp_does_not_have_are_refused_in_its_layout(tmp_path):
    folder = checkpoint(tmp_path / "hf", CASES["windows"])
    with pytest.raises(HotsplitError, match="has windows of 4096 in all layers but each 4th"):
        convert(ConvertConfig(source=folder, output=tmp_path / "m.gguf", layout="stock"))
