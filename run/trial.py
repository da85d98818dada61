"""The trial of a plan: a few steps and a prompt by the plan, and a few steps on the CPU alone, each
loaded as it would run. What is measured decides, not what was predicted.

A plan that is slower than the CPU alone by SLOWER is not run. If a token takes longer than predicted
by MISSED, the machine's figures are scaled so that they explain what was measured (`scales_of`), and
the solver runs once more; that plan and the one by whole layers are tried too. The fastest runs, and
one line says why."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Literal, get_args

from hotsplit.artifacts.split_file import Split
from hotsplit.errors import HotsplitError
from hotsplit.files.atomic import partial_file
from hotsplit.files.json_file import read_object
from hotsplit.files.typed import Fields, shown
from hotsplit.options.engine_config import EngineConfig
from hotsplit.runtime.engine import Engine, load_engine
from hotsplit.solver.prediction import Scales

WARM_UP, STEPS, PROMPT_TOKENS = 2, 16, 64
SLOWER, MISSED = 1.05, 1.3
MOST_SCALE = 100.0
FORMAT, VERSION = "hotsplit.trial", 1
Winner = Literal["the plan", "the second plan", "whole layers", "the CPU alone"]
FILES: Mapping[Winner, str] = {
    "the second plan": "second.split.gguf",
    "whole layers": "layers.split.gguf",
}


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Median seconds of a token, and those of a prompt of PROMPT_TOKENS or the context."""

    token_s: float
    prompt_s: float


@dataclass(frozen=True, kw_only=True)
class Trial:
    """The result for one plan, model and machine, which `run` keeps in its cache."""

    runs: Winner
    predicted_s: float  # of the plan
    plan_s: float
    cpu_s: float
    prompt_s: float  # by the plan
    second_s: float | None = None  # None: not tried
    layers_s: float | None = None

    @classmethod
    def load(cls, path: Path) -> "Trial":
        """Raises HotsplitError for anything but a whole trial file."""
        values = read_object(path, "trial of a plan (hotsplit run)")
        if (values.pop("format", None), values.pop("version", None)) != (FORMAT, VERSION):
            raise HotsplitError(f"{path}: not a trial of a plan; run makes it again")
        read = Fields(values, keys=set(cls.__dataclass_fields__))
        if read.values["runs"] not in get_args(Winner):
            raise HotsplitError(f"{path}: runs is {shown(read.values['runs'])}")

        def time(name: str) -> float | None:
            return None if read.values[name] is None else read.number(name)

        return cls(
            runs=read.values["runs"],
            predicted_s=read.number("predicted_s"),
            plan_s=read.number("plan_s"),
            cpu_s=read.number("cpu_s"),
            prompt_s=read.number("prompt_s"),
            second_s=time("second_s"),
            layers_s=time("layers_s"),
        )

    def save(self, path: Path) -> None:
        with partial_file(path) as partial:
            content = {"format": FORMAT, "version": VERSION, **asdict(self)}
            partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    @property
    def line(self) -> str:
        """What was measured, and what runs."""
        plan = (
            f"the plan takes {_ms(self.plan_s)} a token (predicted {_ms(self.predicted_s)}), the CPU"
            f" alone {_ms(self.cpu_s)}"
        )
        if self.runs == "the plan":
            return plan
        if self.runs == "the CPU alone":
            return f"{plan}: everything runs on the CPU"
        seconds = self.second_s if self.runs == "the second plan" else self.layers_s
        assert seconds is not None
        what = "one by what was measured" if self.runs == "the second plan" else "whole layers"
        return f"{plan}: {what} runs instead, at {_ms(seconds)}"


def measure(engine: Engine) -> Measured:
    """Times single steps and one prompt."""
    positions = min(WARM_UP + STEPS, engine.context_length)
    times = [engine.decode_seconds(steps=1, start=place) for place in range(positions)]
    ids = [token % engine.model.spec.vocab_size for token in range(PROMPT_TOKENS)]
    with engine.sequence() as text:
        began = perf_counter()
        text.extend(ids[: engine.context_length], "last")
        prompt_s = perf_counter() - began
    return Measured(token_s=median(times[WARM_UP:] or times), prompt_s=prompt_s)


def measured_by(model: Path, split: Path | None, config: EngineConfig) -> Measured:
    """Times a model as this configuration runs it."""
    with load_engine(model, split, config) as engine:
        return measure(engine)


def scales_of(
    parts: Mapping[str, float], predicted_cpu_s: float, first: Measured, cpu_s: float
) -> Scales:
    """The factors of the CPU's figures, of hand-overs and of the GPU's that explain a trial.

    `parts`: the predicted seconds of a plan's "cpu", "hand_over" and "gpu". The CPU alone shows the
    first factor. What is then left of the plan's seconds is laid to its hand-overs, which depend most
    on the machine, or if it has none, to the GPU."""
    cpu = cpu_s / predicted_cpu_s
    rest_s = first.token_s - cpu * parts["cpu"]
    name, other = ("hand_over", "gpu") if parts["hand_over"] > 0 else ("gpu", "hand_over")
    share = (rest_s - parts[other]) / parts[name] if parts[name] > 0 else 1.0
    scales = {"hand_over": 1.0, "gpu": 1.0, name: min(MOST_SCALE, max(1.0, share))}
    return Scales(cpu=min(MOST_SCALE, max(1 / MOST_SCALE, cpu)), **scales)


def tried(
    predicted_s: float,
    plan: Callable[[], Measured],
    cpu: Callable[[], Measured],
    others: Callable[[Measured, float], Mapping[Winner, Measured]],
) -> Trial:
    """Measures the plan and the CPU alone; if the prediction was missed, `others` makes and measures
    further plans."""
    first, alone = plan(), cpu()
    times: dict[Winner, float] = {"the plan": first.token_s}
    if first.token_s > MISSED * predicted_s:
        times |= {name: other.token_s for name, other in others(first, alone.token_s).items()}
    runs = min(times, key=lambda name: times[name])
    if times[runs] > SLOWER * alone.token_s:
        runs = "the CPU alone"
    return Trial(
        runs=runs, predicted_s=predicted_s, plan_s=first.token_s, cpu_s=alone.token_s,
        prompt_s=first.prompt_s, second_s=times.get("the second plan"),
        layers_s=times.get("whole layers"),
    )  # fmt: skip


def slow_plan_line(split: Path, token_s: float, cpu_s: float | None) -> str | None:
    """The warning on a plan that was given by hand; None if it is as fast as it should be. `cpu_s`:
    seconds of a token on the CPU alone, if an earlier trial measured them."""
    predicted_s = Split.load(split).objective_s
    took = f"{split}: a token takes {_ms(token_s)} by this plan, predicted {_ms(predicted_s)}"
    if cpu_s is not None and token_s > SLOWER * cpu_s:
        return f"{took}, and {_ms(cpu_s)} on the CPU alone (--device cpu without --split)"
    if token_s > MISSED * predicted_s:
        return f"{took}; calibrate and solve again, or let hotsplit run try other plans"
    return None


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"
