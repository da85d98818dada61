"""Options of `eval` on text. Imports no torch, so that wrong ones are refused at once."""

from dataclasses import dataclass
from pathlib import Path

from hotsplit.errors import HotsplitError
from hotsplit.model.mode_quality import RunMode
from hotsplit.model.rope import check_scaling


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    model: Path
    corpora: tuple[Path, ...]
    # None: with a plan or `thresholds` as in Engine.load, else the mode that the file's predictors,
    # thresholds or limits are for, whatever it costs
    mode: RunMode | None = None
    split: Path | None = None
    thresholds: Path | None = None  # a profile; see Engine.load
    max_tokens: int = 16_384
    # None: plain text. Otherwise every paragraph is a message: "" for the model's own template, or
    # the name of one, or a file
    chat_template: str | None = None
    device: str | None = None
    seed: int = 0
    context_length: int | None = None  # also the most tokens of a piece of the text
    # For both models, as in EngineConfig
    rope_scaling: str | None = None
    rope_scale: float | None = None
    # Types of keys and values (hotsplit.options.cache_types); the dense model keeps its own
    cache_type_k: str | None = None
    cache_type_v: str | None = None
    kv_offload: str | None = None

    def __post_init__(self) -> None:
        if not self.corpora:
            raise HotsplitError("no corpus; give one or more text files with --corpus")
        if self.max_tokens < 2:
            raise HotsplitError(f"tokens is {self.max_tokens}, wanted 2 or more")
        if self.seed < 0:
            raise HotsplitError(f"seed is {self.seed}, wanted 0 or more")
        check_scaling(self.rope_scaling, self.rope_scale)
