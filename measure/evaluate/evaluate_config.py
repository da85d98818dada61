"""Options of `eval`, without torch, so that wrong ones are refused at once."""

from dataclasses import dataclass
from pathlib import Path

from hotsplit.errors import HotsplitError
from hotsplit.options.engine_config import EngineConfig


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    model: Path
    corpora: tuple[Path, ...]
    # Mode None: with a plan as in Engine.load, else the mode that the file's predictors or
    # activation are for, whatever it costs. The dense model has the device, the context and the
    # rotary embeddings of `engine`, and its own cache.
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
