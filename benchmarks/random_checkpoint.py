"""Writes a Llama checkpoint of a given shape with random weights, for benchmarks.

Its tokenizer is of a kind that llama.cpp's converter accepts: SentencePiece's BPE with byte
fallback, whose ordinary tokens are one to three letters, digits or spaces.

    python random_checkpoint.py FOLDER NUM_LAYERS"""

import itertools
import json
import string
import sys
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from hotsplit.families.decoder_sizes import Sizes

SPACE = "\u2581"


# TinyLlama's shape, of 1.1 B parameters.
TINYLLAMA = Sizes(
    num_layers=22,
    hidden_size=2048,
    num_neurons=5632,
    num_heads=32,
    num_kv_heads=4,
    head_dim=64,
    vocab_size=32_000,
    context_length=2048,
)


def make_checkpoint(folder: Path, shape: Sizes, layers_a_file: int = 8) -> None:
    """Writes bf16 weights in shards (matrices normal with standard deviation 0.02, norms 1),
    config.json and a tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_of(shape), indent=2))
    write_tokenizer(folder, shape.vocab_size)
    generator = torch.Generator().manual_seed(0)
    shapes = list(_shapes(shape).items())
    size = 9 * layers_a_file
    shards = [shapes[start : start + size] for start in range(0, len(shapes), size)]
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        tensors = {key: _random(dims, generator) for key, dims in shard}
        save_file(tensors, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    (folder / "tokenizer.json").write_text(json.dumps(_tokenizer(vocab_size)))
    names = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<unk>",
        "bos_token": "<s>",
        "eos_token": "</s>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(names))


def _random(dims: tuple[int, ...], generator: torch.Generator) -> Tensor:
    if len(dims) == 1:
        return torch.ones(dims, dtype=torch.bfloat16)
    return torch.empty(dims, dtype=torch.bfloat16).normal_(std=0.02, generator=generator)


def config_of(shape: Sizes) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.num_neurons,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.context_length,
        "rms_norm_eps": shape.epsilon,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "bfloat16",
    }


def _shapes(shape: Sizes) -> dict[str, tuple[int, ...]]:
    width, neurons, kv_width = shape.hidden_size, shape.num_neurons, shape.key_size
    layer = {
        "input_layernorm": (width,),
        "self_attn.q_proj": (width, width),
        "self_attn.k_proj": (kv_width, width),
        "self_attn.v_proj": (kv_width, width),
        "self_attn.o_proj": (width, width),
        "post_attention_layernorm": (width,),
        "mlp.gate_proj": (neurons, width),
        "mlp.up_proj": (neurons, width),
        "mlp.down_proj": (width, neurons),
    }
    layers = {
        f"model.layers.{number}.{name}.weight": dims
        for number in range(shape.num_layers)
        for name, dims in layer.items()
    }
    ends = {
        "model.embed_tokens.weight": (shape.vocab_size, width),
        "model.norm.weight": (width,),
        "lm_head.weight": (shape.vocab_size, width),
    }
    return layers | ends


def _tokenizer(vocab_size: int) -> dict[str, object]:
    special = ["<unk>", "<s>", "</s>"]
    letters = [SPACE, *string.ascii_letters, *string.digits]
    texts = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    pairs = [(a, b) for a in letters for b in letters]
    triples = ((a + b, c) for a, b in pairs for c in letters)
    merges = list(itertools.islice(itertools.chain(pairs, triples), vocab_size - len(texts)))
    texts += [a + b for a, b in merges]
    assert len(texts) == len(set(texts)) == vocab_size
    return {
        "version": "1.0",
        "added_tokens": [
            {
                "id": number,
                "content": text,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for number, text in enumerate(special)
        ],
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": SPACE},
                {"type": "Replace", "pattern": {"String": " "}, "content": SPACE},
            ],
        },
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": {
            "type": "BPE",
            "unk_token": "<unk>",
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": {text: number for number, text in enumerate(texts)},
            "merges": [f"{a} {b}" for a, b in merges],
        },
    }


if __name__ == "__main__":
    make_checkpoint(Path(sys.argv[1]), replace(TINYLLAMA, num_layers=int(sys.argv[2])))
