"""trial.json: what was measured of a plan, and what runs.

Specified in docs/formats.md."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

from hotsplit.errors import HotsplitError
from hotsplit.files.atomic import partial_file
from hotsplit.files.json_file import read_object
from hotsplit.files.typed import Fields, shown

FORMAT, VERSION = "hotsplit.trial", 1
MISSED = 1.3  # times what was predicted, from which on a prediction was missed
PARTS = {"cpu": "the CPU", "hand_over": "hand-overs", "gpu": "the GPU"}
Winner = Literal["the plan", "the second plan", "whole layers", "the CPU alone"]
# The plans beside trial.json.
FILES: Mapping[Winner, str] = {
    "the second plan": "second.split.gguf",
    "whole layers": "layers.split.gguf",
}


@dataclass(frozen=True, kw_only=True)
class Trial:
    """The result for one plan, model and machine, which `run` keeps in its cache."""

    runs: Winner
    predicted_s: float  # of the plan
    plan_s: float
    cpu_s: float
    prompt_s: float  # by the plan
    parts_s: Mapping[str, float]  # of the predicted seconds, by PARTS
    scales: Mapping[str, float]  # of these parts, which explain what was measured
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
            parts_s=_by_part(read, "parts_s"),
            scales=_by_part(read, "scales"),
            second_s=time("second_s"),
            layers_s=time("layers_s"),
        )

    def save(self, path: Path) -> None:
        with partial_file(path) as partial:
            content = {"format": FORMAT, "version": VERSION, **asdict(self)}
            partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    @property
    def parts_line(self) -> str:
        """The predicted parts, and how many times as long they take by what was measured."""
        parts = ", ".join(
            f"{words} {milliseconds(self.parts_s[name])} (measured {self.scales[name]:.2g} times as long)"
            for name, words in PARTS.items()
        )
        return f"{self.plan_s / self.predicted_s:.2g} times what was predicted: {parts}"

    @property
    def line(self) -> str:
        """What was measured, and what runs."""
        plan = (
            f"the plan takes {milliseconds(self.plan_s)} a token (predicted {milliseconds(self.predicted_s)}), the CPU"
            f" alone {milliseconds(self.cpu_s)}"
        )
        if self.runs == "the plan":
            return plan
        if self.runs == "the CPU alone":
            return f"{plan}: everything runs on the CPU"
        seconds = self.second_s if self.runs == "the second plan" else self.layers_s
        assert seconds is not None
        what = "one by what was measured" if self.runs == "the second plan" else "whole layers"
        return f"{plan}: {what} runs instead, at {milliseconds(seconds)}"


def _by_part(read: Fields, key: str) -> dict[str, float]:
    part = read.part(key, set(PARTS))
    return {name: part.number(name) for name in PARTS}


def milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"
