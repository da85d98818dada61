"""trial.json: what was measured of a plan, and what runs.

Specified in docs/formats.md."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

from hotsplit.errors import HotsplitError, about
from hotsplit.files.atomic import partial_file
from hotsplit.files.declared import Line, Rule, read_declared
from hotsplit.files.json_file import read_object
from hotsplit.files.typed import shown

FORMAT, VERSION = "hotsplit.trial", 1
MISSED = 1.3  # times what was predicted, from which on a prediction was missed
PARTS = {"cpu": "the CPU", "hand_over": "hand-overs", "gpu": "the GPU"}
OfParts = Annotated[
    Mapping[str, float],
    Rule(lambda values: values.keys() == PARTS.keys(), f"numbers of {', '.join(PARTS)}"),
]
Winner = Literal[
    "the plan", "the second plan", "experts on the CPU", "whole layers", "the CPU alone"
]
# The plans beside trial.json.
FILES: Mapping[Winner, str] = {
    "the second plan": "second.split.gguf",
    "experts on the CPU": "experts.split.gguf",
    "whole layers": "layers.split.gguf",
}
_NAMES: Mapping[Winner, str] = {
    "the second plan": "one by what was measured",
    "experts on the CPU": "all experts on the CPU",
}


@dataclass(frozen=True, kw_only=True)
class Trial:
    """The result for one plan, model and machine, which `run` keeps in its cache."""

    runs: Winner
    predicted_s: Mapping[Winner, float]  # of a token, of all that was timed
    measured_s: Mapping[Winner, float]
    left_out: Mapping[Winner, Line]  # why the others could not be timed
    prompt_s: float  # by the plan, or if that is left out by what runs
    parts_s: OfParts  # of the plan's predicted seconds
    scales: OfParts  # which explain what was measured

    @classmethod
    def load(cls, path: Path) -> "Trial":
        """Raises HotsplitError for anything but a whole trial file."""
        values = read_object(path, "trial of a plan (hotsplit run)")
        if (values.pop("format", None), values.pop("version", None)) != (FORMAT, VERSION):
            raise HotsplitError(f"{path}: not a trial of a plan; run makes it again")
        with about(path):
            trial = read_declared(cls, values)
        timed = trial.measured_s.keys()
        is_whole = {"the plan", "the CPU alone"} <= timed | trial.left_out.keys()
        if not is_whole or trial.runs not in timed or trial.predicted_s.keys() != timed:
            raise HotsplitError(f"{path}: measured_s is {shown(trial.measured_s)}")
        return trial

    def save(self, path: Path) -> None:
        with partial_file(path) as partial:
            content = {"format": FORMAT, "version": VERSION, **asdict(self)}
            partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    @property
    def ratio(self) -> float | None:
        """How many times as long the plan takes as was predicted; None if it was left out."""
        if "the plan" in self.left_out:
            return None
        return self.measured_s["the plan"] / self.predicted_s["the plan"]

    @property
    def parts_line(self) -> str:
        """The predicted parts, and how many times as long they take by what was measured."""
        if self.ratio is None:
            return "the plan was not timed"
        parts = ", ".join(
            f"{words} {milliseconds(self.parts_s[name])} (measured {self.scales[name]:.2g} times as"
            " long)"
            for name, words in PARTS.items()
        )
        return f"{self.ratio:.2g} times what was predicted: {parts}"

    @property
    def line(self) -> str:
        """What was measured, and what runs."""
        times = [
            f"{_NAMES.get(name, name)}{' takes' if not number else ''} {milliseconds(seconds)}"
            f"{' a token' if not number else ''} (predicted {milliseconds(self.predicted_s[name])})"
            for number, (name, seconds) in enumerate(self.measured_s.items())
        ]
        times += [f"{_NAMES.get(n, n)} is left out ({why})" for n, why in self.left_out.items()]
        line = ", ".join(times)
        if self.runs == "the plan":
            return line
        if self.runs == "the CPU alone":
            return f"{line}: everything runs on the CPU"
        return f"{line}: {_NAMES.get(self.runs, self.runs)} runs instead"


def milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"
