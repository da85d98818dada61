"""Tiny checkpoints with a draft block, and transformers' logits of it."""

import json

import torch
from checkpoints import random_model
from safetensors.torch import load_file, save_file
from test_families import (
    DEEPSEEK,
    DELTA,
    EQUAL,
    GATED,
    GLM,
    HUNYUAN3,
    MOE,
    NEMOTRON_3,
    ODD,
    SHARED,
    TIED,
    blocks,
)
from transformers import (
    AutoModelForCausalLM,
    Cohere2MoeConfig,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    HYV3Config,
    NemotronHConfig,
    NemotronHForCausalLM,
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
    "nemotron3": NemotronHConfig(
        **NEMOTRON_3 | ODD,
        layers_block_type=blocks("ME*EM"),
        moe_latent_size=40,
        moe_shared_expert_intermediate_size=45,
    ),
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


def _random_with_two_layers(folder, config, seed):
    """The same of a Nemotron 3: a layer of attention and one of experts."""
    folder = random_model(folder, config, seed=seed)
    weights, size = load_file(folder / "model.safetensors"), config.hidden_size
    draw = torch.Generator().manual_seed(seed)
    for number, kind in enumerate(("full_attention", "moe")):
        prefix = f"layers.{config.layers_block_type.index(kind)}."
        for name, values in list(weights.items()):
            _, found, own = name.partition(prefix)
            if found:
                order = torch.randperm(len(values), generator=draw)
                weights[f"mtp.layers.{number}.{own}"] = values[order].clone()
    weights["mtp.layers.0.eh_proj.weight"] = torch.randn(size, 2 * size, generator=draw) * 0.1
    for name in ("layers.0.enorm", "layers.0.hnorm", "layers.1.final_layernorm"):
        weights[f"mtp.{name}.weight"] = torch.randn(size, generator=draw) * 0.2 + 1
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def _logits_of_two_layers(folder, ids):
    """The same of a Nemotron 3, whose block transformers does not run: as a model of its two layers
    that reads their input."""
    weights = load_file(folder / "model.safetensors")
    model = NemotronHForCausalLM.from_pretrained(folder, experts_implementation="eager").eval()
    own = {n.removeprefix("mtp."): v for n, v in weights.items() if n.startswith("mtp.")}
    config = json.loads((folder / "config.json").read_text())
    config |= {"layers_block_type": ["full_attention", "moe"], "num_hidden_layers": 2}
    config.pop("layer_types", None)
    (beside := folder.parent / "block").mkdir(exist_ok=True)
    (beside / "config.json").write_text(json.dumps(config))
    outer = {name: each for name, each in weights.items() if "layers." not in name}
    prefix = next(name.partition("layers.")[0] for name in weights if "backbone.layers" in name)
    inner = {prefix + name: each for name, each in own.items()}
    save_file(outer | inner, beside / "model.safetensors", {"format": "pt"})
    block = NemotronHForCausalLM.from_pretrained(beside, experts_implementation="eager").model
    block.eval()
    block.norm_f = torch.nn.Identity()
    epsilon = config["layer_norm_epsilon"]

    def run(hidden, ids):
        embedded = model.model.embeddings(torch.tensor([ids]))
        joined = [
            torch.nn.functional.rms_norm(x, x.shape[-1:], own[f"layers.0.{n}.weight"], epsilon)
            for n, x in (("enorm", embedded), ("hnorm", hidden))
        ]
        z = torch.cat(joined, -1) @ own["layers.0.eh_proj.weight"].T
        x = block(inputs_embeds=z).last_hidden_state
        weight = own["layers.1.final_layernorm.weight"]
        x = torch.nn.functional.layer_norm(x, x.shape[-1:], weight, None, epsilon)
        return x, model.lm_head(x)

    hidden = model.model(torch.tensor([ids])).last_hidden_state[:, :-1]
    after, logits = run(hidden, ids[1:])
    guess = int(logits[0, -1].argmax())
    _, chained = run(torch.cat([hidden, after[:, -1:]], 1), [*ids[1:], guess])
    return logits[0], chained[0, -1]


def random_with_block(folder, config, *, seed=0):
    """A checkpoint with a block, whose layer has the values of the last one that attends in another
    order, under the names that its family has."""
    if config.model_type == "nemotron_h":
        return _random_with_two_layers(folder, config, seed)
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
    if config["model_type"] == "nemotron_h":
        return _logits_of_two_layers(folder, ids)
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
