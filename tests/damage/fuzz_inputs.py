"""Tiny valid inputs of every kind, for the fuzz tests to damage; our own writers and third-party
ones make them."""

import json
import shutil
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from checkpoints import edit_config, random_dejavu, random_llama, save_tokenizer
from fuzz_further_inputs import make_further
from fuzz_kind import QUALITY
from fuzz_readers import SETTINGS, TARGETS
from models import make_machine, make_profile, sizes_of
from safetensors.torch import load_file, save_file
from test_cache_plan import a_cache
from test_gguf_source import powerinfer_file
from test_importances import dat
from test_runtime import make_split
from texts import byte_level_tokenizer, put_tokenizer, sentencepiece_tokenizer

from hotsplit import Engine
from hotsplit.artifacts.importance_file import Importance, Importances
from hotsplit.artifacts.model_file import TOKENIZER_KEY, ModelFile, PredictorInfo
from hotsplit.artifacts.predictor_file import FILE_NAME, LayerPredictor, Predictors
from hotsplit.artifacts.profile_file import Corpus
from hotsplit.convert.convert import convert
from hotsplit.convert.options import ConvertConfig
from hotsplit.files.gguf_file import read_gguf, write_gguf
from hotsplit.measure.evaluate.quality import EvalReport, eval_content
from hotsplit.profile.count.resume import Position, save_position
from hotsplit.profile.predictors.layer_trainer import LayerQuality
from hotsplit.profile.predictors.selection import Quality
from hotsplit.profile.report import FORMAT, VERSION
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
    """Profiles, a plan, machines, reports, and saved states of runs."""
    plain, silu = (ModelFile.load(folder / f"{name}.gguf") for name in ("plain", "silu"))
    kinds = "profile machine figures merge resume prompt conversation imatrix imatrix-dat"
    for kind in (*kinds.split(), "comparison", "told"):
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
    _written_reports(folder)
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


def _written_reports(folder: Path) -> None:
    """A comparison as eval prints it, and the part of profile's report that is read again."""
    comparison = EvalReport(
        model_id="0" * 64,
        mode="exact",
        num_tokens=100,
        perplexity=5.1,
        perplexity_own_half_width=0.5,
        dense_perplexity=5.0,
        dense_perplexity_half_width=0.5,
        perplexity_increase=0.02,
        perplexity_half_width=0.01,
        kl_mean=0.01,
        kl_half_width=0.001,
        kl_p99=0.1,
        kl_p99_interval=(0.05, 0.2),
        top1_agreement=0.97,
        top1_half_width=0.01,
        bytes_per_token=600,
        bytes_half_width=5.0,
        dense_bytes_per_token=1000,
        named_share_L=(),
        named_half_width=None,
        hidden_share_L=(0.1,),
        hidden_half_width=0.01,
    )
    (folder / "comparison" / TARGETS["comparison"]).write_text(json.dumps(eval_content(comparison)))
    one = Quality(
        form="low-rank",
        rank=8,
        matrix_kind="q8_0",
        is_trained=True,
        num_bytes=100,
        threshold=-0.5,
        density=0.1,
        predicted_density=0.2,
        recall=0.9,
        precision=0.8,
        contribution=0.99,
        lost_norm=0.03,
        bytes_per_token=500.5,
    )
    layer = LayerQuality(
        chosen=one, start=one, hottest_fifth=0.5, candidates=(one, one), break_even_density=0.5
    )
    told = {
        "format": FORMAT,
        "version": VERSION,
        "model_id": "0" * 64,
        "quality_L": [asdict(layer)],
    }
    (folder / "told" / TARGETS["told"]).write_text(json.dumps(told))


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
