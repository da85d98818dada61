"""The model to train: a Hugging Face checkpoint folder, or a model file (GGUF) converted to one."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.errors import HotsplitError
from hotsplit.families.rope_scalings import config_parameters
from hotsplit.families.sizes import sizes_of
from hotsplit.files.atomic import partial_folder
from hotsplit.files.gguf_file import TensorEntry, values_of
from hotsplit.files.json_file import read_object
from hotsplit.files.typed import shown
from hotsplit.model.neurons import SMOOTH
from hotsplit.runtime.text.codec import TextCodec
from hotsplit.sparsify.trained_checkpoint import save_tensors

# transformers' class and model type, by llama.cpp's name of the graph. All use the same tensor
# names.
CLASSES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
}
TRAINABLE = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
TURNED_IN_PAIRS = ("llama",)  # graphs that rotate adjacent rows of queries and keys
OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
HIDDEN_ACTS = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_tanh": "gelu_pytorch_tanh",
}  # transformers' names
INNER = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj", "ffn_down_t": "mlp.down_proj",
}  # fmt: skip


def check_trainable(path: Path, config: Mapping[str, object]) -> None:
    """Raises HotsplitError for the config of a model that cannot be trained, or need not be."""
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    activation = config.get("hidden_act", "silu")
    if name in TRAINABLE and activation in ("silu", "swish", "gelu_pytorch_tanh", "gelu"):
        return
    if name in TRAINABLE or name in ("SparseLlamaForCausalLM", "BambooForCausalLM"):
        raise HotsplitError(
            f"{path}: its activation is {shown(activation)}: the model is sparse by itself and needs no"
            " training; convert and profile it as it is"
        )
    raise HotsplitError(
        f"{path}: {name if name is None else shown(name)} cannot be trained here; wanted one of {', '.join(TRAINABLE)}"
    )


# The files of `write_checkpoint`.
CHECKPOINT_FILES = (
    "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
)  # fmt: skip


def as_checkpoint(source: Path, folder: Path) -> Path:
    """`source` if it is a checkpoint folder; otherwise `folder`, written from the model file unless
    it is there already.

    Raises HotsplitError for a model that cannot be trained."""
    if source.is_dir():
        check_trainable(source, read_object(source / "config.json", "checkpoint's config.json"))
        return source
    model = ModelFile.load(source)
    if model.activation not in SMOOTH:
        raise HotsplitError(
            f"{source}: its activation is {model.activation}: the model is sparse by itself and"
            " needs no training; profile it as it is"
        )
    if model.has_limits:
        raise HotsplitError(
            f"{source}: has limits already; give the model that it was made from, with --start-from to"
            " continue a trained checkpoint"
        )
    rotary = model.bare_spec.rotary
    is_scaled = rotary is not None and (rotary.factors or rotary.num_values)
    is_scaled = is_scaled or any(attention.window for attention in model.bare_spec.attentions)
    if model.architecture not in CLASSES or is_scaled:
        raise HotsplitError(
            f"{source}: a {model.architecture} graph"
            f"{' with scaled or partial rotary angles, or windows,' if model.architecture in CLASSES else ''} cannot be"
            " trained from a GGUF; give its checkpoint folder"
        )
    if not (folder / "config.json").exists():
        with partial_folder(folder) as unfinished:
            write_checkpoint(model, unfinished)
    return folder


def write_checkpoint(model: ModelFile, folder: Path) -> None:
    """Writes config.json, tokenizer and weights of a model file, as transformers reads them."""
    (folder / "config.json").write_text(json.dumps(_config(model), indent=1) + "\n")
    save_tensors(dict(_tensors(model)), folder / "model.safetensors")
    codec = TextCodec.of(model)
    codec.tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(_tokenizer_config(model, codec), indent=1) + "\n"
    )


def _config(model: ModelFile) -> dict[str, object]:
    name, kind = CLASSES[model.architecture]
    spec, sizes = model.bare_spec, sizes_of(model.bare_spec)
    codec = TextCodec.of(model)
    config: dict[str, object] = {
        "architectures": [name], "model_type": kind, "vocab_size": sizes.vocab_size,
        "hidden_size": sizes.hidden_size, "intermediate_size": sizes.num_neurons,
        "num_hidden_layers": sizes.num_layers, "num_attention_heads": sizes.num_heads,
        "num_key_value_heads": sizes.num_kv_heads, "head_dim": sizes.head_dim,
        # the value before it was stored in f32: 1e-05, not 9.999999747378752e-06
        "rms_norm_eps": float(str(np.float32(sizes.epsilon))),
        "max_position_embeddings": sizes.context_length,
        "hidden_act": HIDDEN_ACTS[model.activation],
        "tie_word_embeddings": model.is_tied, "bos_token_id": codec.begin_id,
        "eos_token_id": sorted(codec.end_ids) or None, "dtype": "float32",
    }  # fmt: skip
    if name == "LlamaForCausalLM":
        config |= {
            "attention_bias": any(attention.biases for attention in spec.attentions),
            "mlp_bias": any(layer.neurons.biases for layer in spec.layers),
        }
    assert spec.rotary is not None
    config["rope_parameters"] = {
        **config_parameters(spec.rotary.scaling), "rope_theta": spec.rotary.theta,
    }  # fmt: skip
    return config


def _tokenizer_config(model: ModelFile, codec: TextCodec) -> dict[str, object]:
    names = {"bos_token": codec.begin_id, "eos_token": min(codec.end_ids, default=None)}
    config: dict[str, object] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    number = model.extra_keys.get("tokenizer.ggml.eos_token_id")
    if isinstance(number, np.integer):
        names["eos_token"] = int(number)
    for name, token in names.items():
        if token is not None:
            config[name] = codec.tokenizer.id_to_token(token)
    template = model.text("tokenizer.chat_template")
    return config | ({"chat_template": template} if template else {})


def _tensors(model: ModelFile) -> Iterator[tuple[str, Tensor]]:
    for name, entry in model.tensors.items():
        if "ffn_pred_" in name:
            continue
        yield _name_of(name), _values(model, name, entry)


def _name_of(name: str) -> str:
    if name in OUTER:
        return OUTER[name]
    _, layer, inner, end = name.split(".")
    return f"model.layers.{layer}.{INNER[inner]}.{end}"


def _values(model: ModelFile, name: str, entry: TensorEntry) -> Tensor:
    """A tensor's values in transformers' layout: as stored for floats, else unpacked to f32."""
    if entry.kind == "bf16":
        values = torch.from_numpy(entry.read().copy()).view(torch.bfloat16).view(entry.shape)
    elif entry.kind in ("f16", "f32"):
        values = torch.from_numpy(np.array(entry.read()))
    else:
        values = torch.from_numpy(values_of(entry.read(), entry.kind).copy())
    if "ffn_down_t" in name:
        return values.T.contiguous()
    inner = name.split(".")[2] if name.startswith("blk.") else ""
    if model.architecture in TURNED_IN_PAIRS and inner in ("attn_q", "attn_k"):
        attention = model.bare_spec.layers[int(name.split(".")[1])].attention
        assert attention is not None
        heads = attention.num_heads if inner == "attn_q" else attention.num_kv_heads
        pairs = values.reshape(heads, attention.head_dim // 2, 2, -1)
        return pairs.transpose(1, 2).reshape(values.shape).contiguous()
    return values
