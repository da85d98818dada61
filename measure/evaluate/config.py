"""Options of `eval`, on text and on tasks. Imports no torch, so that wrong ones are refused at
once."""

from dataclasses import dataclass
from pathlib import Path

from hotsplit.errors import HotsplitError
from hotsplit.files.typed import shown
from hotsplit.options.engine_config import EngineConfig


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    model: Path
    corpora: tuple[Path, ...]
    # Mode None: with a plan as in Engine.load, else the mode that the file's predictors or activation
    # are for, whatever it costs. The dense model has the device, the context and
    # the rotary embeddings of `engine`, and its own cache.
    engine: EngineConfig = EngineConfig()
    split: Path | None = None
    max_tokens: int = 16_384
    # None: plain text. Otherwise every paragraph is a message: "" for the model's own template, or
    # the name of one, or a file
    chat_template: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.corpora:
            raise HotsplitError("no corpus; give one or more text files with --corpus")
        if self.max_tokens < 2:
            raise HotsplitError(f"tokens is {self.max_tokens}, wanted 2 or more")
        if self.seed < 0:
            raise HotsplitError(f"seed is {self.seed}, wanted 0 or more")


@dataclass(frozen=True, kw_only=True)
class TasksConfig:
    model: Path
    tasks: tuple[str, ...]
    limit: int | None = None  # documents per task; None is all
    num_fewshot: int | None = None  # None is the task's own
    folder: Path | None = None  # of tasks in addition to lm-eval's own
    engine: EngineConfig = EngineConfig()
    split: Path | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.tasks or not all(self.tasks) or len(set(self.tasks)) < len(self.tasks):
            raise HotsplitError(
                f"tasks are {', '.join(map(shown, self.tasks)) or 'none'}; wanted different names,"
                " separated by commas"
            )
        for name, least in (("limit", 1), ("num_fewshot", 0), ("seed", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise HotsplitError(f"{name} is {value}, wanted {least} or more")
        if self.folder is not None and not self.folder.is_dir():
            raise HotsplitError(f"{self.folder}: no such folder; wanted one with tasks (YAML)")
