"""Commands that write artifacts, and tiny inputs for them."""

import dataclasses
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True)
class WritingCommand:
    """`arguments` has {in} and {out} for the folders of inputs and outputs. `further` are outputs
    that it does not name. `state` lists what an ended command may leave beside the outputs, for the
    same command to resume from."""

    name: str
    arguments: str
    further: tuple[str, ...] = ()
    state: tuple[str, ...] = ()
    replaces: bool = True  # --force replaces existing outputs of any kind

    @property
    def inputs(self) -> tuple[str, ...]:
        return tuple(re.findall(r"\{in\}/(\S+)", self.arguments))

    @property
    def outputs(self) -> tuple[str, ...]:
        """The files and folders of the arguments; files in a folder that has `further` ones."""
        named = re.findall(r"\{out\}/(\S+)", self.arguments)
        holders = {name.split("/")[0] for name in self.further if "/" in name}
        return (*(name for name in named if name not in holders), *self.further)

    def argv(self, folder_in: Path, folder_out: Path) -> list[str]:
        words = self.arguments.split()
        places = {"{in}": str(folder_in), "{out}": str(folder_out)}
        filled = [re.sub(r"\{in\}|\{out\}", lambda m: places[m.group()], w) for w in words]
        return [*filled, *(["--force"] if self.replaces else [])]


SOLVE = "{in}/model.gguf --profile {in}/a.safetensors --machine {in}/machine.json"
EXPORT = "export {in}/plan.gguf --profile {in}/a.safetensors --format"
COMMANDS = (
    WritingCommand("convert", "convert {in}/hf -o {out}/m.gguf --outtype f16"),
    WritingCommand("convert-gguf", "convert {in}/model.gguf -o {out}/m.gguf --outtype q8_0"),
    WritingCommand(
        "profile",
        "profile {in}/model.gguf --corpus {in}/t.txt -o {out}/p.safetensors --tokens 1500"
        " --train-predictors {out}/pred --predictor-rank 8",
        further=("p.report.json", "pred/predictors.safetensors"),
        state=("p.safetensors.resume",),
    ),
    WritingCommand("merge", "profile --merge {in}/a.safetensors {in}/b.safetensors -o {out}/p"),
    WritingCommand(
        "solve",
        f"solve {SOLVE} -vb 2400KiB -c 32 --mode exact -o {{out}}/s.gguf --heat-map {{out}}/h.png",
    ),
    WritingCommand(
        "activations",
        "export {in}/a.safetensors --format powerinfer-activations -o {out}/activation",
    ),
    WritingCommand("gpuidx", EXPORT + " gpuidx -o {out}/x"),
    WritingCommand("sparkinfer-split", EXPORT + " sparkinfer-split -o {out}/x-6.gguf"),
    WritingCommand("report", f"report {SOLVE} --split {{in}}/plan.gguf -o {{out}}/r.html"),
    WritingCommand("calibrate", "calibrate -o {out}/machine.json"),
    WritingCommand(
        "prompt-cache",
        "generate {in}/model.gguf -p abcdef -n 2 --seed 0 --threads 1 --prompt-cache {out}/c",
        replaces=False,
    ),
)


def make_inputs(folder: Path) -> None:
    """The inputs of all commands."""
    from checkpoints import random_llama
    from models import byte_level_keys, make_machine, make_model, make_profile, make_sizes

    from hotsplit.artifacts.model_file import ModelFile
    from hotsplit.runtime.step.workspace import workspace_bytes
    from hotsplit.solver.solve import SolveConfig, solve

    folder.mkdir()
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64}
    random_llama(folder / "hf", **sizes)
    keys, vocab_size = byte_level_keys()
    shape = make_sizes(vocab_size=vocab_size, context_length=64)
    make_model(sizes=shape, extra_keys=keys).save(folder / "model.gguf")
    model = ModelFile.load(folder / "model.gguf")
    make_profile(model).save(folder / "a.safetensors")
    make_profile(model, num_tokens=500).save(folder / "b.safetensors")
    slow = {"launch_s": 1e-9, "hand_over_s": 1e-9, "copy_latency_s": 1e-9, "cpu_gb_per_s": 0.01}
    make_machine(**slow).save(folder / "machine.json")
    words = np.random.default_rng(0).choice(["the ", "fox ", "jumps ", "over\n", "dogs "], 4000)
    (folder / "t.txt").write_text("".join(words))
    solve(
        SolveConfig(
            model=folder / "model.gguf",
            profile=folder / "a.safetensors",
            context_length=32,
            machine=folder / "machine.json",
            vram_budget_bytes=2400 << 10,
            mode="exact",
            output=folder / "plan.gguf",
        ),
        workspace_bytes,
    )


def prepare() -> None:
    """Makes commands save their state often, replaces slow measurements of the machine
    with fixed figures, and imports beforehand what commands import."""
    import encodings.unicode_escape  # noqa: F401  # imported by jinja2 with its first template

    import matplotlib.backends.backend_agg  # noqa: F401
    from models import make_machine

    import hotsplit.cli
    import hotsplit.commands.all_commands
    import hotsplit.commands.solve_command
    import hotsplit.export.powerinfer
    import hotsplit.measure.calibrate.calibrate as calibrate
    import hotsplit.measure.calibrate.drive as drive
    import hotsplit.measure.evaluate.verify_conversion
    import hotsplit.profile.collect
    import hotsplit.profile.count.run
    import hotsplit.report.make_report
    import hotsplit.report.plots
    import hotsplit.runtime.generate.prompt_cache
    from hotsplit.profile.profile_config import ProfileConfig

    ProfileConfig.__init__.__kwdefaults__["save_every_s"] = 0.01
    hotsplit.profile.count.run.SAVE_SHARE = 10.0
    machine: Any = make_machine()
    calibrate.measure_cpu = lambda *given: (
        machine.cpu_bandwidth_gb_per_s,
        machine.cpu_sum_gb_per_s,
    )
    calibrate.measure_costs = lambda *sizes: machine.cpu_costs
    drive.WRITTEN_BYTES, drive.SLOT_S, drive.LIMIT_S = drive.WRITTEN_AT_A_TIME, 0.0, 0.0


def content_of(path: Path) -> object:
    """An output without what differs from run to run, such as elapsed seconds; None if it does not
    exist."""
    if path.is_dir():
        return {str(p.relative_to(path)): content_of(p) for p in sorted(path.rglob("*"))}
    if not path.exists():
        return None
    reader = READERS.get(path.name)
    return reader(path) if reader else path.read_bytes()


def _plan(path: Path) -> object:
    from hotsplit.artifacts.split_file import Split

    if path.read_bytes()[:4] != b"GGUF":
        return path.read_bytes()
    split = Split.load(path)
    hot = [ids.tolist() for ids in split.hot]
    return repr(dataclasses.replace(split, solve_s=0.0, hot=())), hot


def _report(path: Path) -> object:
    try:
        content = json.loads(path.read_text())
    except ValueError:
        return path.read_bytes()
    passing = ("seconds", "free_bytes", "output", "drives")
    return {k: v for k, v in content.items() if k not in passing}


READERS: dict[str, Callable[[Path], object]] = {
    "s.gguf": _plan,
    "p.report.json": _report,
    "machine.json": _report,
}
