"""Further readers of the fuzz tests: of files that are only shown or exported, of models that are
run or trained, of what `run` keeps in its cache, and of texts. fuzz_readers lists the kinds that
use them."""

import contextlib
import io
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

from fuzz_kind import FuzzCase, codec_of

from hotsplit import Engine
from hotsplit.artifacts.model_file import ModelFile
from hotsplit.commands.terminal.prompt_sources import prompts_of
from hotsplit.convert.checkpoint_summary import summarise_checkpoint
from hotsplit.export.export import ExportConfig, export
from hotsplit.inspection.file_summary import print_facts, to_json
from hotsplit.inspection.inspect_file import inspect_file
from hotsplit.profile.corpus.corpus import read_chat_windows
from hotsplit.run.cache_folder import LOCK, read_entry
from hotsplit.run.housekeeping import list_cache
from hotsplit.run.rates import Rates
from hotsplit.runtime.step.program_summary import facts_of, lines_of, summarise_program
from hotsplit.runtime.text.chat_template import chat_template_of
from hotsplit.runtime.text.codec import TextCodec

PROMPT = "the fox, 12 times"
KEPT = "look-0123456789abcdef01234567"  # a folder of the cache of `run`


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


# ------------------------------------------------------------------ the cache of run


def list_entry(case: FuzzCase) -> None:
    """Lists a cache folder with a damaged entry: it is `ready` if and only if `run` would use
    it."""
    cache = case.output.parent
    folder = Path(shutil.copytree(case.folder, cache / KEPT))
    (folder / LOCK).touch()  # as `run` leaves it; without it a damaged entry is not known as ours
    with stdout_of_a_pipe():
        shown = list_cache(cache)
        json.dumps([vars(each) for each in shown], allow_nan=False)
        print(*(each.state for each in shown))
    entry = read_entry(folder)
    is_used = entry is not None and entry.is_current and entry.is_whole
    assert [each.name for each in shown] == [KEPT], "a damaged entry could not be cleared"
    assert [each.name for each in shown if each.state == "ready"] == [KEPT] * is_used


def remember_rates(case: FuzzCase) -> None:
    """Loads damaged rates, which must be positive or dropped, and stores a new one. Those of other
    machines stay as they are."""
    others = _rates_of_others(case.path)
    rates = Rates.load(case.folder, "m")
    assert all(rate > 0 for rate in rates.stored.values())
    rates.note("new", 2.0)
    assert Rates.load(case.folder, "m").stored["new"] == 2.0
    assert _rates_of_others(case.path) == others


def _rates_of_others(path: Path) -> str:
    """The rates as JSON text, so that NaN equals NaN; "{}" if the file cannot be read."""
    found = {}
    with contextlib.suppress(ValueError, OverflowError, RecursionError):
        found = json.loads(path.read_text(encoding="utf-8"))
    others = found if isinstance(found, dict) else {}
    return json.dumps({name: rates for name, rates in others.items() if name != "m"})


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
