"""Whole inputs for the fuzz tests, besides those of fuzz_inputs: other families, RoPE scalings and
tokenizers, exports, what `run` keeps in its cache, and texts."""

import json
import shutil
from pathlib import Path

import torch
from checkpoints import edit_config, random_llama, random_model
from safetensors.torch import load_file
from texts import put_tokenizer, sentencepiece_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    FalconConfig,
    Gemma2Config,
    OPTConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen3Config,
)

from hotsplit.convert.convert import convert
from hotsplit.convert.options import ConvertConfig
from hotsplit.export.export import ExportConfig, export
from hotsplit.files.gguf_file import read_gguf, write_gguf
from hotsplit.run.cache_folder import FORMAT as ENTRY_FORMAT
from hotsplit.run.cache_folder import current_version

SIZES = {
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "vocab_size": 300,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
}
GATED = SIZES | {"intermediate_size": 32, "num_key_value_heads": 2, "initializer_range": 0.1}
FAMILIES: dict[str, PretrainedConfig] = {
    "falcon": FalconConfig(
        **SIZES,
        ffn_hidden_size=32,
        activation="relu",
        num_kv_heads=2,
        new_decoder_architecture=True,
    ),
    "opt": OPTConfig(**SIZES, ffn_dim=32, init_std=0.1, word_embed_proj_dim=32),
    "phi": Phi3Config(**GATED, sliding_window=None),
    "qwen": Qwen3Config(
        **GATED, head_dim=16, use_sliding_window=True, sliding_window=8, max_window_layers=0
    ),
    "gemma": Gemma2Config(**GATED, head_dim=16, sliding_window=8),
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "attention_factor": 1.2,
    "rope_theta": 1e4,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 1e4,
}
# Some regular parts become lexemes, others do not; rules refer to each other.
RULES = r"""root ::= object | list+
object ::= "{" pair ("," pair)* "}"
pair ::= string ":" (object | number | "true" | "to" "go" | letters{2,5} "!")
list ::= "[" (root ("," root)*)? "]"
string ::= "\"" ([^"\\] | "\\" ["\\/bfnrt] | "\\u" [0-9a-fA-F]{4})* "\""
number ::= "-"? ("0" | [1-9] [0-9]*) ("." digit+)?
digit ::= [0-9]
letters ::= [a-y] | [\x41-\x5A] | "z" # one of each
"""


def make_further(folder: Path) -> None:
    """Makes the inputs, partly from those of fuzz_inputs: the checkpoints `safetensors`, `bin` and
    `silu`, and others."""
    _families(folder)
    _rotations(folder)
    _further_tokenizers(folder)
    _shown(folder)
    _kept(folder)


def _families(folder: Path) -> None:
    for name, config in FAMILIES.items():
        source = random_model(folder / name, config)
        if name not in ("qwen", "gemma"):
            shutil.copytree(source, folder / f"{name}-weights")
        if name != "phi":  # its model file has the architecture llama
            convert(ConvertConfig(source=source, output=folder / f"{name}-gguf" / "model.gguf"))
    shutil.copytree(folder / "safetensors", folder / "folder")
    whole = folder / "bin-index"
    shutil.copytree(folder / "bin", whole, ignore=shutil.ignore_patterns("*.bin"))
    tensors = load_file(folder / "safetensors" / "model.safetensors")
    weight_map = {name: f"pytorch_model-{i % 2}.bin" for i, name in enumerate(tensors)}
    for shard in sorted(set(weight_map.values())):
        part = {name: t for name, t in tensors.items() if weight_map[name] == shard}
        torch.save(part, whole / shard)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (whole / "pytorch_model.bin.index.json").write_text(json.dumps(index))


def _rotations(folder: Path) -> None:
    for name, parameters in (("yarn", YARN), ("llama3", LLAMA3)):
        shutil.copytree(folder / "safetensors", folder / name)
        edit_config(folder / name, lambda values, p=parameters: values.update(rope_parameters=p))  # type: ignore[misc]
    convert(ConvertConfig(source=folder / "yarn", output=folder / "yarn-gguf" / "model.gguf"))


def _further_tokenizers(folder: Path) -> None:
    """Scores of SentencePiece in a GGUF, unigrams, templates with names, and models to train."""
    words = random_llama(
        folder / "words",
        has_tokenizer=False,
        num_hidden_layers=1,
        hidden_size=32,
        intermediate_size=32,
        vocab_size=420,
    )
    put_tokenizer(
        words, sentencepiece_tokenizer(420), "<s>", "</s>"
    )  # 300 tokens would leave no room for merges
    convert(ConvertConfig(source=words, output=folder / "with-scores.gguf"))
    _without_whole_tokenizer(folder / "with-scores.gguf", folder / "scores" / "model.gguf")
    ignored = shutil.ignore_patterns("tokenizer*")
    shutil.copytree(folder / "silu", folder / "unigram", ignore=ignored)
    put_tokenizer(folder / "unigram", _unigram(300), "<s>", "</s>")
    shutil.copytree(folder / "silu", folder / "named")
    template = (folder / "silu" / "chat_template.jinja").read_text()
    (folder / "named" / "additional_chat_templates").mkdir()
    (folder / "named" / "additional_chat_templates" / "tool_use.jinja").write_text(template)
    convert(ConvertConfig(source=folder / "named", output=folder / "templates" / "model.gguf"))


def _without_whole_tokenizer(source: Path, path: Path) -> None:
    """Writes the model file with its tokenizer in llama.cpp's keys only."""
    from hotsplit.artifacts.model_file import TOKENIZER_KEY

    keys, tensors = read_gguf(source, "model")
    own = (TOKENIZER_KEY, "general.architecture")
    kept = {k: v for k, v in keys.items() if k not in own and not k.startswith("GGUF.")}
    path.parent.mkdir()
    write_gguf(path, "llama", kept, tensors)


def _unigram(vocab_size: int) -> Tokenizer:
    pieces = [
        token for token in sentencepiece_tokenizer(vocab_size).get_vocab() if token != "<tool>"
    ]
    table = [(token, -float(i)) for i, token in enumerate(sorted(pieces))]
    unknown = next(i for i, (token, _) in enumerate(table) if token == "<unk>")
    tokenizer = Tokenizer(models.Unigram(table, unknown, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens([AddedToken(text) for text in ("<unk>", "<s>", "</s>")])
    return tokenizer


def _shown(folder: Path) -> None:
    """Models and predictors that `inspect` shows, and exports for other engines."""
    for kind, source in (("shown", "run"), ("shown-theirs", "powerinfer")):
        shutil.copytree(folder / source, folder / kind)
    shutil.copytree(folder / "ours", folder / "shown-predictors")
    shutil.copytree(folder / "plan", folder / "export")
    for kind, name, format in (
        ("gpuidx", "model.generated.gpuidx", "gpuidx"),
        ("model-split", "model-4.gguf", "sparkinfer-split"),
    ):
        (folder / kind).mkdir()
        plan, profile = folder / "plan" / "model.split.gguf", folder / "plan"
        export(
            ExportConfig(
                source=plan,
                output=folder / kind / name,
                format=format,  # type: ignore[arg-type]
                profile=profile / "model.profile.safetensors",
            )
        )


def _kept(folder: Path) -> None:
    """An entry of the cache of `run`, its rates; prompts, a corpus, a grammar."""
    for kind in ("entry", "rates", "prompts", "messages", "rules"):
        (folder / kind).mkdir()
    entry = {
        "format": ENTRY_FORMAT,
        "version": current_version("look"),
        "kind": "look",
        "source": "m",
        "seconds": 1.5,
        "sizes": {"look.safetensors": 4},
        "facts": {"density": 0.5, "tokens_per_s": 100.0},
    }
    (folder / "entry" / "entry.json").write_text(json.dumps(entry))
    (folder / "entry" / "look.safetensors").write_bytes(b"abcd")
    rates = {"m": {"encode": 1e9, "write": 2.5e8}, "another": {"encode": 1.0}}
    (folder / "rates" / "rates.json").write_text(json.dumps(rates))
    prompts = [{"prompt": "the fox"}, "a text \u00c4", {"prompt": "12\n", "id": 3}]
    text = "\n".join(json.dumps(prompt) for prompt in prompts)
    (folder / "prompts" / "prompts.jsonl").write_text(text)
    paragraphs = [f"The paragraph of number {i} says \u00c4pfel and no more." for i in range(30)]
    (folder / "messages" / "corpus.txt").write_text("\n\n".join(paragraphs))
    (folder / "rules" / "grammar.gbnf").write_text(RULES)
