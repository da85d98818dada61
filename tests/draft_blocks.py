"""Tiny checkpoints with a draft block, and transformers' logits of it."""

import json

import torch
from checkpoints import random_model
from safetensors.torch import load_file, save_file
from test_families import DEEPSEEK, DELTA, EQUAL, GATED, GLM, HUNYUAN3, MOE, ODD, SHARED, TIED
from transformers import (
    AutoModelForCausalLM,
    Cohere2MoeConfig,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    HYV3Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
)
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

# In the last layer all attend: transformers makes the block's norms of the kind that is there.
FOUR = DELTA | {"num_hidden_layers": 4}
CASES = {
    "cohere2moe": Cohere2MoeConfig(
        **MOE | ODD | {"num_hidden_layers": 4, "intermediate_size": 37},
        sliding_window=128,  # transformers' block rotates with a window alone: see below
        expert_selection_fn="sigmoid",
        first_k_dense_replace=1,
        prefix_dense_intermediate_size=96,
        rms_norm_eps=1e-3,
        logit_scale=0.3,
    ),
    "glm4moe": Glm4MoeConfig(**GLM | ODD, head_dim=32, first_k_dense_replace=1, use_qk_norm=True),
    "hunyuan3": HYV3Config(**HUNYUAN3 | ODD, head_dim=24),
    "glm47moe": Glm4MoeLiteConfig(**DEEPSEEK | {"rms_norm_eps": 1e-6}),
    "qwen35": Qwen3_5TextConfig(**GATED | ODD | FOUR | TIED, linear_conv_kernel_dim=3),
    "qwen35moe": Qwen3_5MoeTextConfig(**MOE | EQUAL | SHARED),
    "qwen3next": Qwen3NextConfig(**MOE | ODD | FOUR | SHARED, mlp_only_layers=[0]),
}
for case in CASES.values():
    case.max_position_embeddings = 128
_OUTER = ("eh_proj", "enorm", "hnorm", "shared_head.norm")
_OF_MTP = dict(
    zip(_OUTER, ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"), strict=True)
)


def random_with_block(folder, config, *, seed=0):
    """A checkpoint with a block, whose layer has the values of the last one that attends in another
    order, under the names that its family has."""
    folder = random_model(folder, config, seed=seed)
    weights, layers = load_file(folder / "model.safetensors"), config.num_hidden_layers
    is_mtp, size = "qwen" in config.model_type, config.hidden_size
    attends = max(
        i for i in range(layers) if f"model.layers.{i}.self_attn.o_proj.weight" in weights
    )
    prefix, target = f"model.layers.{attends}.", f"model.layers.{layers}."
    target = "mtp.layers.0." if is_mtp else target
    draw = torch.Generator().manual_seed(seed)
    for name, values in list(weights.items()):
        if name.startswith(prefix):
            order = torch.randperm(len(values), generator=draw)
            weights[target + name.removeprefix(prefix)] = values[order].clone()
    for name in _OUTER:
        shape = (size, 2 * size) if name == "eh_proj" else (size,)
        values = torch.randn(shape, generator=draw) * (0.1 if len(shape) == 2 else 0.2)
        values = values if is_mtp or len(shape) == 2 else values + 1
        own = f"mtp.{_OF_MTP[name]}" if is_mtp else f"{target}{name}"
        weights[f"{own}.weight"] = values
    if not is_mtp:  # as published: copies of the model's
        weights[f"{target}embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
        head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
        weights[f"{target}shared_head.head.weight"] = head.clone()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@torch.no_grad()
def logits_of_transformers(folder, ids):
    """The block's guesses after each token but the first, f32 [T - 1, V], and, made from its own
    hidden state, the one after its first guess beyond the text [V]."""
    config = json.loads((folder / "config.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(folder, experts_implementation="eager").eval()
    own = r"^mtp.*" if "qwen" in config["model_type"] else rf"layers\.{len(model.model.layers)}.*"
    model._keys_to_ignore_on_load_unexpected = [own]
    kind = "sliding" if "cohere" in config["model_type"] else "full"
    model.config.num_mtp_layers, model.config.mtp_layer_types = 1, [f"{kind}_attention"]
    scale = config.get("logit_scale", 1.0)
    if config.get("mlp_layer_types"):
        model.config.mtp_mlp_layer_types = ["sparse"]
    if config.get("mlp_only_layers"):
        model.config.mlp_only_layers = []
    block = MtpModel.from_pretrained(model).eval()
    hidden = model.model(torch.tensor([ids])).last_hidden_state
    cache = MtpCache(config=model.config.get_mtp_config())

    def run(hidden, ids, start):
        at = torch.arange(start, start + len(ids))[None]
        return block.forward_layer(0, hidden, at, cache, input_ids=torch.tensor([ids]))

    hidden = run(hidden[:, :-1], ids[1:], 1)
    logits_TV = block._project_to_logits(hidden)[0] * scale
    hidden = run(hidden[:, -1:], [int(logits_TV[-1].argmax())], len(ids))
    return logits_TV, block._project_to_logits(hidden)[0, 0] * scale
