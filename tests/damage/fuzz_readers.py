"""Readers of files that others may have written: every kind of file, and its reader.

Readers, and the kinds that go through them (a kind is a folder of whole inputs, one file of which
is damaged):

    config.json                         config, values, yarn, llama3 (RoPE scalings)
    config.json of other families       falcon, opt, phi, qwen, gemma
    checkpoints by inspect              folder
    weights                             safetensors, index, bin, bin-index
    files of tokenizers                 tokenizer, tokens, unigram, vocab, merges, sentencepiece
    names and numbers of special tokens special, generation
    chat templates, rendered; by name   template; templates
    GGUF of ours                        gguf, run (predictors and tokenizer; it is run),
                                        falcon-gguf, gemma-gguf, yarn-gguf
    GGUF of others, their tokenizers    stock, theirs (merges), scores, powerinfer
    shown by inspect                    shown, shown-theirs, shown-predictors, gpuidx, model-split
    predictors                          ours, pt (DejaVu's)
    profile; merged                     profile, merge
    plan; run by it, exported           plan; export (with a damaged profile)
    machine; solved with it             machine, figures
    importance matrices                 imatrix, imatrix-dat
    what a run saved                    resume (of profile), prompt, conversation
    grammars                            gbnf, rules (regular parts), schema, regex, lark
    corpora, as messages; prompts       text, jsonl, parquet, messages; prompts

Requests to the server are in test_serve_guard and its neighbours."""

import contextlib
import io
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from constrained_texts import is_finished

from hotsplit import Engine
from hotsplit.artifacts.model_file import TOKENIZER_KEY, ModelFile
from hotsplit.artifacts.profile_file import Profile
from hotsplit.artifacts.split_file import Split
from hotsplit.commands.terminal.prompt_sources import prompts_of
from hotsplit.convert.checkpoint_summary import summarise_checkpoint
from hotsplit.convert.convert import convert
from hotsplit.convert.options import ConvertConfig
from hotsplit.errors import HotsplitError
from hotsplit.export.export import ExportConfig, export
from hotsplit.files.json_file import read_text
from hotsplit.inspection.file_summary import print_facts, to_json
from hotsplit.inspection.inspect_file import inspect_file
from hotsplit.model.mode_quality import ModeQuality
from hotsplit.profile.corpus.corpus import read_chat_windows, read_windows
from hotsplit.profile.corpus.processes import Ranks
from hotsplit.profile.count.merge import MergeConfig, merge
from hotsplit.profile.count.resume import load_position
from hotsplit.runtime.generate import constraints as made
from hotsplit.runtime.generate.prompt_cache import restore_prompt
from hotsplit.runtime.step.program_summary import facts_of, lines_of, summarise_program
from hotsplit.runtime.step.workspace import workspace_bytes
from hotsplit.runtime.text.chat_template import chat_template_of
from hotsplit.runtime.text.codec import TextCodec
from hotsplit.solver.solve import SolveConfig, solve

QUALITY = ModeQuality(
    perplexity_increase=0.001,
    perplexity_half_width=0.01,
    kl_mean=0.001,
    top1_agreement=0.99,
    num_tokens=100,
    bytes_per_token=1000,
    dense_bytes_per_token=2000,
    corpus_sha256="0" * 64,
)


@dataclass(frozen=True, kw_only=True)
class FuzzCase:
    """`path` is the damaged file, `inputs` the folder of all valid inputs, `output` a path in a new
    folder."""

    number: int
    path: Path
    inputs: Path
    output: Path

    @property
    def folder(self) -> Path:
        return self.path.parent


@dataclass(frozen=True, kw_only=True)
class Kind:
    """`target` is the file that is damaged; `is_values`: in its JSON values, not its bytes."""

    target: str
    read: Callable[[FuzzCase], object]
    is_values: bool = False


@cache
def codec_of(inputs: Path) -> TextCodec:
    return TextCodec.of(ModelFile.load(inputs / "silu.gguf"))


PROMPT = "the fox, 12 times"


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


@contextlib.contextmanager
def stdout_of_a_pipe() -> Iterator[None]:
    """Redirects stdout into a UTF-8 buffer; raises for text that cannot be encoded."""
    with contextlib.redirect_stdout(io.TextIOWrapper(io.BytesIO(), encoding="utf-8")) as written:
        yield
        written.flush()


# ------------------------------------------------------------------ models


def compute(case: FuzzCase) -> None:
    """Loads a model and computes with it, in one of the modes."""
    mode = (None, "dense", "exact")[case.number % 3]
    with Engine.load(case.path, mode=mode, device="cpu") as engine:
        engine.logits([1, 2, 3, 5])


def stretch(case: FuzzCase) -> None:
    """Loads a model with the RoPE scaling of its file, none, linear or YaRN, and computes
    logits."""
    kind = (None, "none", "linear", "yarn")[case.number % 4]
    factor = None if kind in (None, "none") else 2.0
    with Engine.load(case.path, device="cpu", rope_scaling=kind, rope_scale=factor) as engine:
        engine.logits([1, 2, 3, 5])


def find_template(case: FuzzCase) -> None:
    """Finds the default template and the one named `tool_use`; a few cases also render with
    them."""
    model = ModelFile.load(case.path)
    codec = TextCodec.of(model)
    for name in (None, "tool_use"):
        with contextlib.closing(chat_template_of(model, codec, name)) as template:
            if case.number % 50 == 1:  # rendering starts a process
                codec.encode_rendered(template.render([{"role": "user", "content": "a"}]))


# ------------------------------------------------------------------ shown and exported


def inspect(case: FuzzCase) -> None:
    """Shows what a file holds, as tables and as JSON."""
    with stdout_of_a_pipe():
        summary = inspect_file(case.path)
        summary.print(all_tensors=True)
        json.loads(to_json(summary), parse_constant=_refuse_constant)


def inspect_model(case: FuzzCase) -> None:
    """Shows what a model file holds, and the operations of its step."""
    inspect(case)
    with stdout_of_a_pipe():
        summary = summarise_program(case.path, None)
        print_facts(summary.kind, facts_of(summary))
        assert lines_of(summary)
        json.loads(to_json(summary), parse_constant=_refuse_constant)


def inspect_folder(case: FuzzCase) -> None:
    with stdout_of_a_pipe():
        summary = summarise_checkpoint(case.folder)
        print_facts(summary.kind, summary.facts)
        json.loads(to_json(summary), parse_constant=_refuse_constant)


def inspect_and_export(case: FuzzCase) -> None:
    """Shows a file; exports a profile or a plan in the format that PowerInfer reads."""
    inspect(case)
    if case.path.suffix == ".safetensors":
        export(ExportConfig(source=case.path, output=case.output, format="powerinfer-activations"))
    if case.path.suffix == ".gguf":
        profile = case.folder / "model.profile.safetensors"
        export(ExportConfig(source=case.path, output=case.output, profile=profile, format="gpuidx"))


def export_split(case: FuzzCase) -> None:
    """Exports a plan with a damaged profile, as SparkInfer's model-split or as PowerInfer's
    index."""
    plan = case.folder / "model.split.gguf"
    is_index = case.number % 4 == 0
    format, name = ("gpuidx", "out.gpuidx") if is_index else ("sparkinfer-split", "out-4.gguf")
    export(
        ExportConfig(
            source=plan,
            output=case.output.with_name(name),
            profile=case.folder / "model.profile.safetensors",
            format=format,
        )  # type: ignore[arg-type]  # both are formats
    )


# ------------------------------------------------------------------ texts


def read_prompts(case: FuzzCase) -> None:
    for prompt in prompts_of(None, None, case.path):
        codec_of(case.inputs).encode(prompt)


def read_messages(case: FuzzCase) -> None:
    """Reads a corpus as chat messages, in the built-in template chatml."""
    read_chat_windows(
        [case.path],
        ModelFile.load(case.inputs / "silu.gguf"),
        codec_of(case.inputs),
        template="chatml",
        context_length=64,
        max_tokens=200,
        seed=case.number,
    )


SETTINGS = {"model": "m", "seed": 1, "target": None, "is_trained": False, "share": 0.5}


def convert_folder(case: FuzzCase) -> None:
    convert(ConvertConfig(source=case.folder, output=case.output))
    ModelFile.load(case.output)


def convert_tokenizer(case: FuzzCase) -> None:
    """Converts into both layouts. A tokenizer that was written can be read again; a template may be
    invalid."""
    with contextlib.suppress(HotsplitError):  # llama.cpp may have no such tokenizer
        convert(ConvertConfig(source=case.folder, output=case.output, layout="stock"))
        case.output.unlink()
    convert(ConvertConfig(source=case.folder, output=case.output))
    model = ModelFile.load(case.output)
    codec = TextCodec.of(model) if TOKENIZER_KEY in model.extra_keys else None
    case.output.unlink()
    if codec is None:
        return
    codec.tokenizer.decode(codec.encode(PROMPT))
    if case.path.suffix == ".jinja":
        template = chat_template_of(model, codec)
        with contextlib.closing(template):
            codec.encode_rendered(template.render([{"role": "user", "content": "a"}]))


def convert_gguf(case: FuzzCase) -> None:
    convert(ConvertConfig(source=case.path, predictors=case.inputs / "ours", output=case.output))
    ModelFile.load(case.output)


def load_model(case: FuzzCase) -> None:
    ModelFile.load(case.path)


def tokenise(case: FuzzCase) -> None:
    codec = TextCodec.of(ModelFile.load(case.path))
    codec.tokenizer.decode(codec.encode(PROMPT))


def run(case: FuzzCase) -> None:
    """Loads and generates, in one of the modes."""
    mode = (None, "dense", "exact", "predicted")[case.number % 4]
    with Engine.load(case.path, mode=mode, device="cpu") as engine:
        for token in engine.generate(PROMPT, max_tokens=2, temperature=0.0):
            token.text.encode()


def add_predictors(case: FuzzCase) -> None:
    plain = case.inputs / "plain.gguf"
    convert(ConvertConfig(source=plain, predictors=case.folder, output=case.output))
    ModelFile.load(case.output)


def search_by(case: FuzzCase) -> None:
    """Shows an importance matrix, and converts by it."""
    inspect(case)
    source = case.inputs / "silu.gguf"
    options = ConvertConfig(
        source=source, importances=case.path, outtype="q4_0", output=case.output
    )
    convert(options)
    ModelFile.load(case.output)


def inspect_and_run_plan(case: FuzzCase) -> None:
    with Engine.load(case.inputs / "plain.gguf", split=case.path, device="cpu") as engine:
        engine.hidden([5, 6, 7])
    inspect_and_export(case)


def merge_profiles(case: FuzzCase) -> None:
    other = case.inputs / "other.profile.safetensors"
    merge(MergeConfig(profiles=(case.path, other), output=case.output))
    Profile.load(case.output)


def plan_with(case: FuzzCase) -> None:
    solve(
        SolveConfig(
            model=case.inputs / "plain.gguf",
            profile=case.inputs / "profile" / PROFILE,
            machine=case.path,
            output=case.output,
            vram_budget_bytes=2_420_000,
            time_limit_s=1.0,
        ),
        workspace_bytes,
    )
    Split.load(case.output)


def restore(case: FuzzCase) -> None:
    with Engine.load(case.inputs / "silu.gguf", device="cpu") as engine, engine.sequence() as text:
        restore_prompt(text, case.path, engine.prompt_key())
        text.extend([5])


def resume(case: FuzzCase) -> None:
    load_position(case.path, SETTINGS, Ranks(), force=False)


def go_on_with(case: FuzzCase) -> None:
    with Engine.load(case.inputs / "run" / "model.gguf", device="cpu") as engine:  # noqa: SIM117
        with engine.chat() as chat:
            chat.load(case.path)
            for _ in zip(range(2), chat.say("c"), strict=False):
                pass


def follow_grammar(case: FuzzCase) -> None:
    """Compiles a grammar and accepts a few tokens that it allows."""
    makers = {
        ".gbnf": made.gbnf_constraint,
        ".json": made.json_schema_constraint,
        ".regex": made.regex_constraint,
        ".lark": made.lark_constraint,
    }
    text = read_text(case.path, "grammar")
    constraint = makers[case.path.suffix](text, codec_of(case.inputs))
    for _ in range(4):
        allowed = constraint.mask_V(300).nonzero().flatten().tolist()
        constraint.accept(allowed[-1])
        if is_finished(constraint):
            break


def read_corpus(case: FuzzCase) -> None:
    codec = codec_of(case.inputs)
    read_windows([case.path], codec, context_length=64, max_tokens=200, seed=case.number)


PROFILE = "model.profile.safetensors"
KINDS = {
    "safetensors": Kind(target="model.safetensors", read=convert_folder),
    "bin": Kind(target="pytorch_model.bin", read=convert_folder),
    "config": Kind(target="config.json", read=convert_folder),
    "values": Kind(target="config.json", read=convert_folder, is_values=True),
    "index": Kind(target="model.safetensors.index.json", read=convert_folder),
    "tokenizer": Kind(target="tokenizer.json", read=convert_tokenizer),
    "tokens": Kind(target="tokenizer.json", read=convert_tokenizer, is_values=True),
    "special": Kind(target="tokenizer_config.json", read=convert_tokenizer, is_values=True),
    "generation": Kind(target="generation_config.json", read=convert_tokenizer, is_values=True),
    "template": Kind(target="chat_template.jinja", read=convert_tokenizer),
    "vocab": Kind(target="vocab.json", read=convert_tokenizer),
    "merges": Kind(target="merges.txt", read=convert_tokenizer),
    "sentencepiece": Kind(target="tokenizer.model", read=convert_tokenizer),
    "gguf": Kind(target="model.gguf", read=convert_gguf),
    "stock": Kind(target="model.gguf", read=load_model),
    "theirs": Kind(target="model.gguf", read=tokenise),
    "powerinfer": Kind(target="model.gguf", read=load_model),
    "run": Kind(target="model.gguf", read=run),
    "pt": Kind(target="model_0.pt", read=add_predictors),
    "ours": Kind(target="predictors.safetensors", read=add_predictors),
    "imatrix": Kind(target="i.gguf", read=search_by),
    "imatrix-dat": Kind(target="i.dat", read=search_by),
    "profile": Kind(target=PROFILE, read=inspect_and_export),
    "merge": Kind(target=PROFILE, read=merge_profiles),
    "plan": Kind(target="model.split.gguf", read=inspect_and_run_plan),
    "machine": Kind(target="machine.json", read=inspect_and_export),
    "figures": Kind(target="machine.json", read=plan_with, is_values=True),
    "prompt": Kind(target="prompt.safetensors", read=restore),
    "resume": Kind(target="out.resume", read=resume),
    "conversation": Kind(target="chat.json", read=go_on_with, is_values=True),
    "gbnf": Kind(target="grammar.gbnf", read=follow_grammar),
    "schema": Kind(target="schema.json", read=follow_grammar, is_values=True),
    "regex": Kind(target="grammar.regex", read=follow_grammar),
    "lark": Kind(target="grammar.lark", read=follow_grammar),
    "text": Kind(target="corpus.txt", read=read_corpus),
    "jsonl": Kind(target="corpus.jsonl", read=read_corpus),
    "parquet": Kind(target="corpus.parquet", read=read_corpus),
    "messages": Kind(target="corpus.txt", read=read_messages),
    "prompts": Kind(target="prompts.jsonl", read=read_prompts),
    # Other families, RoPE scalings and tokenizers, sharded checkpoints, models to train.
    "falcon": Kind(target="config.json", read=convert_folder, is_values=True),
    "opt": Kind(target="config.json", read=convert_folder, is_values=True),
    "phi": Kind(target="config.json", read=convert_folder, is_values=True),
    "qwen": Kind(target="config.json", read=convert_folder, is_values=True),
    "gemma": Kind(target="config.json", read=convert_folder, is_values=True),
    "falcon-gguf": Kind(target="model.gguf", read=compute),
    "gemma-gguf": Kind(target="model.gguf", read=compute),
    "bin-index": Kind(target="pytorch_model.bin.index.json", read=convert_folder),
    "yarn": Kind(target="config.json", read=convert_folder, is_values=True),
    "llama3": Kind(target="config.json", read=convert_folder, is_values=True),
    "yarn-gguf": Kind(target="model.gguf", read=stretch),
    "scores": Kind(target="model.gguf", read=tokenise),
    "unigram": Kind(target="tokenizer.json", read=convert_tokenizer, is_values=True),
    "templates": Kind(target="model.gguf", read=find_template),
    # Shown and exported.
    "folder": Kind(target="config.json", read=inspect_folder, is_values=True),
    "shown": Kind(target="model.gguf", read=inspect_model),
    "shown-theirs": Kind(target="model.gguf", read=inspect),
    "shown-predictors": Kind(target="predictors.safetensors", read=inspect),
    "gpuidx": Kind(target="model.generated.gpuidx", read=inspect),
    "model-split": Kind(target="model-4.gguf", read=inspect),
    "export": Kind(target=PROFILE, read=export_split),
    "rules": Kind(target="grammar.gbnf", read=follow_grammar),
}
TARGETS = {name: kind.target for name, kind in KINDS.items()}
