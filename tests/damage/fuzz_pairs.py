"""Two whole files that do not belong together: the pair must be refused where anything shows it.

The model `base` is used with artifacts of itself and of others, which differ from it in one thing.
Another model's artifact is tried as it is, and with the base's id put into it, so that a check of
ids alone does not suffice. If the id is the base's and all sizes that the artifact shows agree,
nothing tells that it belongs to another model, and it is accepted."""

import dataclasses
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from fuzz_inputs import predictors_of
from fuzz_kind import QUALITY
from models import byte_level_keys, make_machine, make_model, make_profile, make_sizes
from test_runtime import make_split

from hotsplit import Engine
from hotsplit.artifacts.model_file import ModelFile
from hotsplit.convert.convert import convert
from hotsplit.convert.options import ConvertConfig
from hotsplit.export.export import ExportConfig, export
from hotsplit.profile.count.merge import MergeConfig, merge
from hotsplit.runtime.generate.draft_model import check_vocabulary
from hotsplit.runtime.generate.prompt_cache import restore_prompt, save_prompt
from hotsplit.runtime.step.workspace import workspace_bytes
from hotsplit.runtime.text.codec import TextCodec
from hotsplit.solver.solve import SolveConfig, solve

CONTEXT = 32
# The one difference of each other model; None: only the weights.
OTHERS: dict[str, dict[str, int] | None] = {
    "weights": None,
    "layers": {"num_layers": 3},
    "fewer layers": {"num_layers": 1},
    "width": {"width": 128, "head_width": 16},
    "neurons": {"num_neurons": 128},
    "heads": {"num_kv_heads": 4},
    "vocabulary": {"vocab_size": 300},
}


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A kind of artifact. `use` does what a command does with it and the base model. An artifact of
    a model that differs in one of `sees` must be refused even with the base's id in it."""

    make: Callable[[ModelFile, Path], None]
    use: Callable[[Path, Path, Path], object]
    sees: frozenset[str]
    suffix: str = ".safetensors"
    has_id: bool = True  # and it is compared


# ------------------------------------------------------------------ models and artifacts


@cache
def model_of(folder: Path, name: str) -> Path:
    """The file of a model: `base`, or one of OTHERS."""
    path = folder / f"{name}.gguf"
    path.parent.mkdir(parents=True, exist_ok=True)
    keys, vocab_size = byte_level_keys()
    sizes = {"vocab_size": vocab_size, "context_length": CONTEXT, **(OTHERS.get(name) or {})}
    model = make_model(
        sizes=make_sizes(**sizes),
        seed=int(name == "weights"),
        path=path,
        predictor_rank=8,
        extra_keys=keys,
        predictor_density=0.5,
    )
    dataclasses.replace(model, quality={"exact": QUALITY, "predicted": QUALITY}).save(path)
    return path


def save_profile(model: ModelFile, path: Path) -> None:
    make_profile(model).save(path)


def make_plan(model: ModelFile, path: Path) -> None:
    make_split(model, [np.arange(9, dtype=np.int32)] * model.spec.num_layers).save(path)


def make_prompt(model: ModelFile, path: Path) -> None:
    with Engine.of(model, device="cpu", mode="exact") as engine, engine.sequence() as text:
        text.extend([5, 6, 7])
        key = engine.prompt_key()
        save_prompt(text, path, dataclasses.replace(key, weights=""))


# ------------------------------------------------------------------ what is done with the two


def solve_with(model: Path, artifact: Path, output: Path) -> None:
    machine = output.parent / "machine.json"
    try:
        make_machine().save(machine)
        solve(
            SolveConfig(
                model=model,
                profile=artifact,
                machine=machine,
                output=output,
                mode="exact",
                vram_budget_bytes=1 << 22,
                time_limit_s=1.0,
            ),
            workspace_bytes,
        )
    finally:
        machine.unlink()


def export_plan_with(model: Path, artifact: Path, output: Path) -> None:
    """Exports a plan of the model with a profile of the other model."""
    plan = output.parent / "plan.gguf"
    try:
        make_plan(ModelFile.load(model), plan)
        export(ExportConfig(source=plan, output=output, profile=artifact, format="gpuidx"))
    finally:
        plan.unlink()


def convert_with(model: Path, artifact: Path, output: Path) -> None:
    folder = output.parent / "predictors"
    folder.mkdir()
    try:
        shutil.copy(artifact, folder / "predictors.safetensors")
        convert(ConvertConfig(source=model, predictors=folder, output=output))
    finally:
        shutil.rmtree(folder)


def run_by(model: Path, artifact: Path, output: Path) -> None:
    with Engine.load(model, split=artifact, device="cpu") as engine:
        engine.hidden([1, 2])


def go_on_from(model: Path, artifact: Path, output: Path) -> None:
    with Engine.load(model, mode="exact", device="cpu") as engine, engine.sequence() as text:
        restore_prompt(text, artifact, dataclasses.replace(engine.prompt_key(), weights=""))


def merge_with(model: Path, artifact: Path, output: Path) -> None:
    """Merges a profile of the model with one of the other model; both name the same text."""
    own = output.parent / "own.profile.safetensors"
    try:
        save_profile(ModelFile.load(model), own)
        merge(MergeConfig(profiles=(own, artifact), output=output, force=True))
    finally:
        own.unlink()


def guess_with(model: Path, artifact: Path, output: Path) -> None:
    """Checks the other model as a draft model."""
    pair = [ModelFile.load(path) for path in (model, artifact)]
    tokens = [(TextCodec.of(file).tokenizer, file.spec.vocab_size) for file in pair]
    check_vocabulary(*tokens[0], *tokens[1])


SIZES = frozenset(OTHERS) - {"weights"}
PAIRS = {
    "pair-solve": Pair(
        make=save_profile, use=solve_with, sees=SIZES - {"width", "heads", "vocabulary"}
    ),
    "pair-export": Pair(
        make=save_profile, use=export_plan_with, sees=frozenset({"layers", "fewer layers"})
    ),
    "pair-predictors": Pair(
        make=lambda model, path: predictors_of(model).save(path),
        use=convert_with,
        sees=SIZES - {"heads", "vocabulary"},
    ),
    "pair-plan": Pair(make=make_plan, use=run_by, sees=SIZES, suffix=".gguf"),
    # The sizes of keys and values depend on neither.
    "pair-prompt": Pair(make=make_prompt, use=go_on_from, sees=SIZES - {"neurons", "width"}),
    "pair-merge": Pair(
        make=save_profile, use=merge_with, sees=SIZES - {"width", "heads", "vocabulary"}
    ),
    # A draft model must have the same tokens, which these models have; padding may give it more
    # logits.
    "pair-draft": Pair(
        make=lambda model, path: model.save(path),
        use=guess_with,
        has_id=False,
        sees=frozenset(),
        suffix=".gguf",
    ),
}


def cases_of(pair: Pair) -> list[tuple[str, bool]]:
    """(name of the artifact's model, whether the base model's id is put into the artifact)."""
    return [("base", False), *((name, forged) for name in OTHERS for forged in (False, True))]


def must_refuse(pair: Pair, name: str, forged: bool) -> bool:
    return name in pair.sees or (pair.has_id and name != "base" and not forged)


def artifact_of(pair: Pair, base: Path, other: Path, forged: bool, path: Path) -> None:
    """Writes an artifact of the other model; `forged`: with the base model's id."""
    model = ModelFile.load(other)
    if forged:
        model = dataclasses.replace(model, model_id=ModelFile.load(base).model_id)
    pair.make(model, path)


def put_together(inputs: Path, kind: str, number: int, work: Path) -> str:
    """Uses the base model with an artifact of a model, which the number selects."""
    pair, models = PAIRS[kind], inputs / "pairs"
    artifact, output = work / f"artifact{pair.suffix}", work / "output"
    output.mkdir(exist_ok=True)
    cases = cases_of(pair)
    name, forged = cases[number % len(cases)]
    base, other = model_of(models, "base"), model_of(models, name)
    artifact_of(pair, base, other, forged, artifact)
    pair.use(base, artifact, output / "out.gguf")
    shutil.rmtree(output)
    if must_refuse(pair, name, forged):
        return f"done where it must be refused: {kind} of {name}, forged: {forged}"
    return "done"
