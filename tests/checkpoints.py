"""Tiny random checkpoints and predictors for the tests, as transformers and DejaVu save them."""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)

TINY = {
    "num_hidden_layers": 3,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
    "tie_word_embeddings": False,
    "initializer_range": 0.1,
    "rms_norm_eps": 1e-5,
}
END = "<|endoftext|>"
TEXT = ["the quick brown fox jumps over the lazy dog", "def add(a, b):\n    return a + b\n"] * 4


def random_llama(
    folder: Path,
    *,
    hidden_act: str = "relu",
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    is_sharded: bool = False,
    has_tokenizer: bool = True,
    **config_overrides: object,
) -> Path:
    """Saves a Llama with random weights (norms too) and a tokenizer with at most as many tokens as
    the model has; returns the folder.

    `fatrelu` and `drelu`, which transformers lacks, are saved as relu and renamed in
    config.json; fatrelu gets `hidden_act_param` 0.01 by default."""
    known = hidden_act if hidden_act in ("relu", "silu") else "relu"
    param = config_overrides.pop("hidden_act_param", 0.01 if hidden_act == "fatrelu" else None)
    config = LlamaConfig(**{**TINY, "hidden_act": known, **config_overrides})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
        for name, weight in model.named_parameters():
            if "norm" in name:
                torch.nn.init.normal_(weight, mean=1.0, std=0.2)
    model.to(dtype).save_pretrained(folder, max_shard_size="100KB" if is_sharded else "1GB")
    if hidden_act != known:
        edit_config(folder, lambda values: values.update(hidden_act=hidden_act))
    if param is not None:
        edit_config(folder, lambda values: values.update(hidden_act_param=param))
    if has_tokenizer:
        save_tokenizer(folder, int(config.vocab_size))
    return folder


def auto_class(
    config: PretrainedConfig,
) -> type[AutoModelForCausalLM] | type[AutoModelForImageTextToText]:
    """The class of transformers that makes a model of a text, or of one beside images."""
    is_text = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    return AutoModelForCausalLM if is_text else AutoModelForImageTextToText


def class_of(config: PretrainedConfig) -> type[PreTrainedModel]:
    """What `architectures` says of a checkpoint with this config."""
    is_text = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    return (MODEL_FOR_CAUSAL_LM_MAPPING if is_text else MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING)[
        type(config)
    ]


def random_model(folder: Path, config: PretrainedConfig, *, seed: int = 0) -> Path:
    """Saves a model of any family with random weights, norms and biases too; returns the folder."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = auto_class(config).from_config(config, dtype=torch.float32)
        for name, weight in model.named_parameters():
            is_vector = weight.ndim == 1 and name.endswith(("weight", "scale"))
            is_norm = is_vector or name.endswith("norm.weight")
            if weight.ndim == 1 or name.endswith(("q_norm.weight", "k_norm.weight")):
                torch.nn.init.normal_(weight, mean=1.0 if is_norm else 0.0, std=0.2)
            if name.endswith(("conv1d.weight", "conv.conv.weight")):
                # Queries and keys longer than the 1e-3 that transformers adds to their lengths; and
                # embeddings of the size of what layers add to them.
                torch.nn.init.normal_(weight, std=0.5)
        if hasattr(config, "linear_num_key_heads"):
            model.get_input_embeddings().weight.data *= 10
        for name, values in model.named_buffers():
            if name.endswith(
                ("e_score_correction_bias", "expert_bias")
            ):  # decides, as trained ones do
                torch.nn.init.normal_(values, std=0.2)
            if name.endswith("layer_scalar"):
                torch.nn.init.normal_(values, mean=0.8, std=0.2)
    model.save_pretrained(folder)
    return folder


def edit_config(folder: Path, edit: Callable[[dict], object], name: str = "config.json") -> None:
    """Changes a JSON file of a checkpoint in place."""
    values = json.loads((folder / name).read_text())
    edit(values)
    (folder / name).write_text(json.dumps(values, indent=2))


def save_tokenizer(folder: Path, vocab_size: int) -> None:
    """Saves a byte-level BPE tokenizer with GPT-2's pre-tokenizer, trained on a few words.

    It has 257 to `vocab_size` tokens; token 0 is END."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    assert tokenizer.get_vocab_size() <= vocab_size, "257 tokens are the least"
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": END, "eos_token": END}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))


def random_dejavu(
    folder: Path,
    *,
    num_layers: int = 3,
    width: int = 64,
    num_neurons: int = 160,
    rank: int = 24,
    has_biases: bool = False,
    seed: int = 0,
) -> Path:
    """Saves predictors in DejaVu's format, model_{layer}.pt; that of layer l has rank
    `rank` + 8 l."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    for layer in range(num_layers):
        r = rank + 8 * layer
        shapes: dict[str, tuple[int, ...]] = {
            "fc1.weight": (r, width),
            "fc2.weight": (num_neurons, r),
        }
        if has_biases:
            shapes |= {"fc1.bias": (r,), "fc2.bias": (num_neurons,)}
        state = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        torch.save(state, folder / f"model_{layer}.pt")
    return folder
