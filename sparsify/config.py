"""Options of `sparsify`. Imports no torch, so that wrong ones are refused at once."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from hotsplit.convert.options import OUTTYPES, Outtype, check_type
from hotsplit.errors import HotsplitError
from hotsplit.sparsify.schedule import check_shares

Precision = Literal["auto", "f32", "bf16"]
Rule = Literal["threshold", "relu", "fatrelu", "drelu"]
RULES: tuple[Rule, ...] = get_args(Rule)
Allocation = Literal["sensitivity", "uniform", "global"]
ALLOCATIONS: tuple[Allocation, ...] = get_args(Allocation)
SAVE_EVERY_S = 600.0
DEFAULT_SHARE = 0.6
TRAINED = "trained"  # in the work folder; the beginning of the names of trained checkpoints
# Activations that decide by themselves which neurons are silent, so that no share can be chosen.
UNCHOSEN: tuple[Rule, ...] = ("relu", "drelu")


@dataclass(frozen=True, kw_only=True)
class SparsifyConfig:
    """Options of a run. Texts are measured in tokens; a process's step has `batch_tokens`."""

    model: Path
    corpora: tuple[Path, ...]
    output: Path  # the model file; with several shares, one for each (see `of_share`)
    shares: tuple[float, ...] = ()  # (): DEFAULT_SHARE; none may be given for the rules in UNCHOSEN
    tokens: int = 1_000_000  # per share, over all processes
    held_out: tuple[Path, ...] = ()  # the first selects the best state
    held_out_tokens: int = 16_384  # per file, at the end of a share
    check_tokens: int = 4_096  # of the first file, at every check
    checks: int = 12  # per share, about
    rule: Rule = "threshold"
    allocation: Allocation = "sensitivity"
    rank: int | None = None  # of low-rank updates; None trains whole matrices
    learning_rate: float = 3e-4
    warmup_steps: int = 10
    layer_weight: float = 10.0  # in the loss, of the relative squared error of layers' outputs
    window: int = 256
    batch_tokens: int = 512
    micro_tokens: int = 512  # per pass; gradients of several passes accumulate
    precision: Precision = "auto"
    text_key: str = "text"
    start_from: Path | None = None  # a trained checkpoint of the same model
    save_checkpoint: Path | None = None  # folder of a Hugging Face checkpoint for each share
    outtype: Outtype = "f16"  # of the model files' matrices
    device: str | None = None
    seed: int = 0
    force: bool = False
    save_every_s: float = SAVE_EVERY_S

    def __post_init__(self) -> None:
        if not self.corpora:
            raise HotsplitError("no corpus; give one or more text files with --corpus")
        for name in ("tokens", "held_out_tokens", "check_tokens", "checks", "window",
                     "batch_tokens", "micro_tokens"):  # fmt: skip
            if getattr(self, name) < 1:
                raise HotsplitError(f"{name} is {getattr(self, name)}, wanted 1 or more")
        if self.window < 16 or self.batch_tokens % self.window or self.micro_tokens % self.window:
            raise HotsplitError(
                f"batches of {self.batch_tokens} tokens in passes of {self.micro_tokens} and windows"
                f" of {self.window}: wanted windows of 16 or more, and whole windows in both"
            )
        if self.batch_tokens % self.micro_tokens:
            raise HotsplitError(
                f"a batch of {self.batch_tokens} tokens is not a whole number of passes of"
                f" {self.micro_tokens}"
            )
        if self.rule in UNCHOSEN and self.shares:
            raise HotsplitError(
                f"{self.rule} decides by itself which neurons are silent; leave --share out, or take"
                " --activation fatrelu"
            )
        if self.start_from is not None and (self.rule, self.rank) != ("threshold", None):
            raise HotsplitError(
                "only whole matrices with thresholds can continue a trained checkpoint; leave"
                " --start-from out, or --rank and --activation"
            )
        check_shares(self.targets)
        if not 0 < self.learning_rate < math.inf:
            raise HotsplitError(f"learning rate is {self.learning_rate}, wanted e.g. 3e-4")
        if not 0 <= self.layer_weight < math.inf:
            raise HotsplitError(f"layer weight is {self.layer_weight}, wanted 0 or more")
        if self.rule not in RULES or self.allocation not in ALLOCATIONS:
            raise HotsplitError(
                f"rule {self.rule!r} with allocation {self.allocation!r}; known:"
                f" {', '.join(RULES)}; {', '.join(ALLOCATIONS)}"
            )
        check_type(self.outtype, "outtype", OUTTYPES)
        if self.rank is not None and self.rank < 1:
            raise HotsplitError(f"rank is {self.rank}, wanted 1 or more")
        if self.seed < 0 or self.warmup_steps < 0:
            raise HotsplitError(
                f"seed is {self.seed} and warm-up steps are {self.warmup_steps}, wanted 0 or more"
            )

    @property
    def targets(self) -> tuple[float, ...]:
        """The shares to reach, in sequence; for the rules in UNCHOSEN only DEFAULT_SHARE, which has
        no effect on their limits."""
        return self.shares or (DEFAULT_SHARE,)

    @property
    def chooses_share(self) -> bool:
        return self.rule not in UNCHOSEN

    def of_share(self, path: Path, share: float) -> Path:
        """`path`; with several shares, "model-60.gguf" for "model.gguf" and a share of 0.6."""
        if len(self.targets) == 1:
            return path
        return path.with_name(f"{path.stem}-{100 * share:g}{path.suffix}")

    def output_of(self, share: float) -> Path:
        return self.of_share(self.output, share)

    def checkpoint_of(self, share: float) -> Path:
        """The path of the trained checkpoint."""
        return self.of_share(self.save_checkpoint or self.work_folder / TRAINED, share)

    @property
    def work_folder(self) -> Path:
        """The folder for the files that a resumed run needs."""
        return self.output.with_name(self.output.name + ".sparsify")

    @property
    def state_path(self) -> Path:
        return self.work_folder / "state.safetensors"
