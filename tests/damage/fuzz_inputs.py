"""Tiny valid inputs of every kind, for the fuzz tests to damage; our own writers and third-party
ones make them."""

import json
import shutil
from pathlib import Path

import numpy as np
import torch
from checkpoints import edit_config, random_dejavu, random_llama, random_model, save_tokenizer
from fuzz_readers import QUALITY, SETTINGS, TARGETS
from models import make_machine, make_profile, sizes_of
from safetensors.torch import load_file, save_file
from test_cache_plan import a_cache
from test_gguf_source import powerinfer_file
from test_importances import dat
from test_runtime import make_split
from texts import byte_level_tokenizer, put_tokenizer, sentencepiece_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    FalconConfig,
    Gemma2Config,
    OPTConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen3Config,
)

from hotsplit import Engine
from hotsplit.artifacts.importance_file import Importance, Importances
from hotsplit.artifacts.model_file import TOKENIZER_KEY, ModelFile, PredictorInfo
from hotsplit.artifacts.predictor_file import FILE_NAME, LayerPredictor, Predictors
from hotsplit.artifacts.profile_file import Corpus
from hotsplit.convert.convert import convert
from hotsplit.convert.options import ConvertConfig
from hotsplit.export.export import ExportConfig, export
from hotsplit.files.gguf_file import read_gguf, write_gguf
from hotsplit.profile.count.resume import Position, save_position
from hotsplit.runtime.generate.prompt_cache import save_prompt

SIZES = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32, "vocab_size": 300}
TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' }}{% if loop.first and m.content %}"
    "{{ m['content'] | trim }}{% else %}{{ m.content }}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{{ eos_token }}{% endif %}"
)
GRAMMARS = {
    "gbnf": 'root ::= item (", " item){0,3} "."\nitem ::= [a-z]+ | "\\x41" digit | (digit "-")?'
    "  # one\ndigit ::= [0-9] | [^a-zA-Z\\n]\n",
    "schema": json.dumps(
        {
            "type": "object",
            "required": ["a"],
            "additionalProperties": False,
            "properties": {
                "a": {"type": "integer", "minimum": 0, "maximum": 10},
                "b": {
                    "type": "array",
                    "items": {"$ref": "#/$defs/c"},
                    "minItems": 1,
                    "maxItems": 3,
                },
                "c": {"enum": ["x", 1, None]},
                "d": {"type": "string", "pattern": "^[a-z]{1,4}$"},
                "e": {"anyOf": [{"type": "null"}, {"const": 2}]},
            },
            "$defs": {"c": {"type": "string", "maxLength": 5}},
        }
    ),
    "regex": r"(a|b)+[0-9]{2,4}(\.\d+)?[^x-z]*",
    "lark": 'start: word ("," word)*\nword: /[a-z]+/ | DIGIT\nDIGIT: /[0-9]/\n%ignore / /\n',
}


def make_inputs(folder: Path) -> None:
    _checkpoints(folder)
    _model_files(folder)
    _artifacts(folder)
    _tokenizers(folder)
    _texts(folder)
    make_further(folder)


def _checkpoints(folder: Path) -> None:
    whole = random_llama(folder / "safetensors", has_tokenizer=False, **SIZES)
    tensors = load_file(whole / "model.safetensors")
    shutil.copytree(whole, folder / "index", ignore=shutil.ignore_patterns("*.safetensors"))
    weight_map = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(tensors)}
    for shard in set(weight_map.values()):
        part = {name: t for name, t in tensors.items() if weight_map[name] == shard}
        save_file(part, folder / "index" / shard)
    index = json.dumps({"weight_map": weight_map})
    (folder / "index" / "model.safetensors.index.json").write_text(index)
    shutil.copytree(whole, folder / "bin", ignore=shutil.ignore_patterns("*.safetensors"))
    torch.save(tensors, folder / "bin" / "pytorch_model.bin")
    shutil.copytree(whole, folder / "config")
    shutil.copytree(whole, folder / "values")
    random_dejavu(folder / "pt", num_layers=1, width=32, num_neurons=32, rank=4)
    (folder / "pt" / "config.json").write_text('{"sparse_threshold": 0.5, "input_layer_offset": 1}')


def predictors_of(model: ModelFile, **changes: object) -> Predictors:
    """Predictors of rank 4, with all weights 1."""
    shape, num_layers = sizes_of(model.bare_spec), model.spec.num_layers
    down, up = (
        np.ones((4, shape.hidden_size), np.float32),
        np.ones((shape.num_neurons, 4), np.float32),
    )
    info = {
        "kind": "linear",
        "rank_L": (4,) * num_layers,
        "threshold_L": (0.0,) * num_layers,
        "density_L": (0.5,) * num_layers,
    }
    return Predictors(
        model_id=model.model_id,
        info=PredictorInfo(**(info | changes)),
        layers=(LayerPredictor.of(down_RD=down, up_FR=up),) * num_layers,
        quality={"exact": QUALITY, "predicted": QUALITY},
    )


def save_importances(folder: Path) -> None:
    """Importances of the matrices that read the hidden state, in both formats."""
    values = np.linspace(0, 2, 32, dtype=np.float32)
    names = [
        f"blk.0.{name}.weight" for name in ("attn_q", "attn_k", "attn_v", "ffn_gate", "ffn_up")
    ]
    each = Importance(values, np.array([3], np.float32))
    path = folder / "imatrix" / TARGETS["imatrix"]
    Importances(path=path, tensors=dict.fromkeys(names, each), datasets=("a.txt",)).save(path)
    entries = [(name.encode(), 3, values) for name in names]
    (folder / "imatrix-dat" / TARGETS["imatrix-dat"]).write_bytes(dat(entries))


def _model_files(folder: Path) -> None:
    """plain.gguf (ReLU), silu.gguf, files with predictors, files of other layouts."""
    convert(ConvertConfig(source=folder / "safetensors", output=folder / "plain.gguf"))
    predictors_of(ModelFile.load(folder / "plain.gguf")).save(folder / "ours" / FILE_NAME)
    for kind in ("gguf", "stock", "run", "theirs", "powerinfer"):
        (folder / kind).mkdir()
    convert(
        ConvertConfig(
            source=folder / "plain.gguf",
            output=folder / "gguf" / "model.gguf",
            predictors=folder / "ours",
        )
    )
    silu = random_llama(folder / "silu", hidden_act="silu", **SIZES)
    (silu / "chat_template.jinja").write_text(TEMPLATE)
    convert(ConvertConfig(source=silu, output=folder / "stock" / "model.gguf", layout="stock"))
    convert(ConvertConfig(source=silu, output=folder / "silu.gguf"))
    relu = random_llama(folder / "relu", **SIZES)
    (relu / "chat_template.jinja").write_text(TEMPLATE)
    predictors_of(ModelFile.load(folder / "plain.gguf")).save(folder / "trained" / FILE_NAME)
    convert(
        ConvertConfig(
            source=relu, output=folder / "run" / "model.gguf", predictors=folder / "trained"
        )
    )
    keys, tensors = read_gguf(folder / "stock" / "model.gguf", "model")
    own = (TOKENIZER_KEY, "general.architecture")
    write_gguf(
        folder / "theirs" / "model.gguf",
        "llama",
        {k: v for k, v in keys.items() if k not in own and "hotsplit" not in k},
        tensors,
    )
    plain = ModelFile.load(folder / "plain.gguf")
    powerinfer_file(folder / "powerinfer" / "model.gguf", plain, "llama", folder / "pt")


def _artifacts(folder: Path) -> None:
    """Profiles, a plan, machines, and saved states of runs."""
    plain, silu = (ModelFile.load(folder / f"{name}.gguf") for name in ("plain", "silu"))
    kinds = "profile machine figures merge resume prompt conversation imatrix imatrix-dat"
    for kind in kinds.split():
        (folder / kind).mkdir()
    made = make_profile(plain)
    made.save(folder / "profile" / TARGETS["profile"])
    made.save(folder / "merge" / TARGETS["merge"])
    other = (Corpus(name="other", sha256="1" * 64, num_tokens=10_000),)
    type(made)(**{**vars(made), "corpora": other}).save(folder / "other.profile.safetensors")
    for kind in ("machine", "figures"):
        make_machine().save(folder / kind / TARGETS[kind])
    shutil.copytree(folder / "profile", folder / "plan")
    hot = [np.arange(9, dtype=np.int32)] * plain.spec.num_layers
    cache = a_cache(plain.spec.num_layers, plain.spec.most_neurons)
    make_split(plain, hot, cache=cache).save(folder / "plan" / TARGETS["plan"])
    save_importances(folder)
    arrays = {"counter/num_tokens": np.array(5), "train/x": np.ones(3)}
    save_position(
        folder / "resume" / TARGETS["resume"], SETTINGS, Position(phase=1, done=2, arrays=arrays)
    )
    with (
        Engine.load(folder / "silu.gguf", device="cpu", num_sequences=2) as engine,
        engine.chat() as chat,
        engine.sequence() as text,
    ):
        text.extend([5, 6, 7, 8])
        save_prompt(text, folder / "prompt" / TARGETS["prompt"], engine.prompt_key())
        chat.system = "s"
        chat.messages += [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        chat.save(folder / "conversation" / TARGETS["conversation"])


def _tokenizers(folder: Path) -> None:
    """Folders of the SiLU model, with each kind of tokenizer file."""
    ignored = shutil.ignore_patterns("tokenizer*", "*.jinja")
    for kind in ("tokenizer", "tokens", "special", "generation", "template"):
        shutil.copytree(folder / "silu", folder / kind)
        (folder / kind / "generation_config.json").write_text(
            '{"eos_token_id": [0, 5], "bos_token_id": 0, "temperature": 0.5}'
        )
    end = "<|endoftext|>"
    put_tokenizer(folder / "tokens", sentencepiece_tokenizer(300), "<s>", "</s>")
    put_tokenizer(folder / "special", byte_level_tokenizer("llama-bpe", 290), end, end)
    names = {
        "add_bos_token": True,
        "unk_token": {"content": end},
        "pad_token": None,
        "chat_template": [{"name": "default", "template": TEMPLATE}],
    }
    edit_config(folder / "special", lambda found: found.update(names), "tokenizer_config.json")
    (folder / "special" / "chat_template.jinja").unlink()
    for kind in ("vocab", "merges", "sentencepiece"):
        shutil.copytree(folder / "silu", folder / kind, ignore=ignored)
    for kind in ("vocab", "merges"):
        _older_bpe(folder / kind)
    _sentencepiece(folder / "sentencepiece")


def _older_bpe(folder: Path) -> None:
    save_tokenizer(folder, 290)
    table = json.loads((folder / "tokenizer.json").read_text())["model"]
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text(json.dumps(table["vocab"]))
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in table["merges"]]
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')


def _sentencepiece(folder: Path) -> None:
    import io

    import sentencepiece

    model = io.BytesIO()
    lines = ["the quick brown fox jumps over the lazy dog", "def add(a, b): return a + b"] * 20
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        vocab_size=300,
        model_type="bpe",
        byte_fallback=True,
        hard_vocab_limit=False,
        minloglevel=2,
        num_threads=1,
    )
    (folder / "tokenizer.model").write_bytes(model.getvalue())
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')


def _texts(folder: Path) -> None:
    """Grammars and corpora."""
    import pyarrow
    import pyarrow.parquet

    for kind, text in GRAMMARS.items():
        (folder / kind).mkdir()
        (folder / kind / TARGETS[kind]).write_text(text)
    for kind in ("text", "jsonl", "parquet"):
        (folder / kind).mkdir()
    lines = [f"The line of number {i} says Äpfel and nothing else." for i in range(40)]
    (folder / "text" / TARGETS["text"]).write_text("\n".join(lines))
    records = "".join(json.dumps({"text": line, "id": i}) + "\n" for i, line in enumerate(lines))
    (folder / "jsonl" / TARGETS["jsonl"]).write_text(records)
    table = pyarrow.table({"text": lines, "id": list(range(40))})
    pyarrow.parquet.write_table(table, folder / "parquet" / TARGETS["parquet"])


OF_FAMILIES = {
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "vocab_size": 300,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
}
GATED = OF_FAMILIES | {"intermediate_size": 32, "num_key_value_heads": 2, "initializer_range": 0.1}
FAMILIES: dict[str, PretrainedConfig] = {
    "falcon": FalconConfig(
        **OF_FAMILIES,
        ffn_hidden_size=32,
        activation="relu",
        num_kv_heads=2,
        new_decoder_architecture=True,
    ),
    "opt": OPTConfig(**OF_FAMILIES, ffn_dim=32, init_std=0.1, word_embed_proj_dim=32),
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
    _further_texts(folder)


def _families(folder: Path) -> None:
    for name, config in FAMILIES.items():
        source = random_model(folder / name, config)
        if name in ("falcon", "gemma"):
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


def _further_texts(folder: Path) -> None:
    """Prompts, a corpus, a grammar."""
    for kind in ("prompts", "messages", "rules"):
        (folder / kind).mkdir()
    prompts = [{"prompt": "the fox"}, "a text \u00c4", {"prompt": "12\n", "id": 3}]
    text = "\n".join(json.dumps(prompt) for prompt in prompts)
    (folder / "prompts" / "prompts.jsonl").write_text(text)
    paragraphs = [f"The paragraph of number {i} says \u00c4pfel and no more." for i in range(30)]
    (folder / "messages" / "corpus.txt").write_text("\n\n".join(paragraphs))
    (folder / "rules" / "grammar.gbnf").write_text(RULES)
