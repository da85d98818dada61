"""The options of `hotsplit solve`."""

from dataclasses import dataclass, fields
from pathlib import Path

from hotsplit.errors import HotsplitError
from hotsplit.model.mode_quality import MAX_LOSS
from hotsplit.model.modes import MODES, Mode
from hotsplit.model.rope import check_scaling
from hotsplit.options.engine_config import MAX_SEQUENCES
from hotsplit.options.key_selection import KeySelection
from hotsplit.options.neuron_cache_options import CacheOptions


@dataclass(frozen=True, kw_only=True)
class SolveConfig:
    """Options of `hotsplit solve`."""

    model: Path
    profile: Path | None = None  # None: for a plan in which every neuron is computed
    machine: Path
    output: Path
    vram_budget_bytes: int | tuple[int, ...]  # for the first GPU, or for each
    host_budget_bytes: int | None = None  # None: the machine's main memory
    context_length: int | None = None  # None: the model's, up to DEFAULT_CONTEXT
    mode: Mode | None = None  # None: the fastest that costs at most `max_loss`
    max_loss: float = MAX_LOSS  # of the perplexity, by the model file's record
    time_limit_s: float = 10.0  # for the integer program, which ends before on most small models
    neuron_cache: CacheOptions | None = None  # None: hot neurons stay as planned
    num_sequences: int = 1  # texts at a time, each with a context of its own
    rope_scaling: str | None = None  # as in EngineConfig: for a context above the trained one
    rope_scale: float | None = None
    kv_offload: str | None = None  # keys and values in main memory; "on", or sizes (key_selection)
    force: bool = False

    def __post_init__(self) -> None:
        if not self.budgets or min(*self.budgets, self.host_budget_bytes or 0) < 0:
            raise HotsplitError(
                f"budgets of {self.budgets} bytes on GPUs and {self.host_budget_bytes} in main"
                " memory; wanted 0 or more"
            )
        if self.context_length is not None and self.context_length < 1:
            raise HotsplitError(f"a context of {self.context_length} tokens; wanted 1 or more")
        if not 1 <= self.num_sequences <= MAX_SEQUENCES:
            raise HotsplitError(
                f"a plan for {self.num_sequences} sequences; wanted 1 to {MAX_SEQUENCES}"
            )
        if self.mode is not None and self.mode not in MODES:
            raise HotsplitError(f"mode {self.mode!r}; wanted one of {MODES}")
        if not self.max_loss >= 0:
            raise HotsplitError(f"max loss is {self.max_loss}; wanted 0 or more")
        if not self.time_limit_s > 0:
            raise HotsplitError(f"a time limit of {self.time_limit_s} s; wanted more than 0")
        if self.output in self.inputs:
            raise HotsplitError(f"{self.output}: is an input; give the plan another name")
        check_scaling(self.rope_scaling, self.rope_scale)
        if self.neuron_cache is None:
            return
        others = [
            f"{field.name}={getattr(self.neuron_cache, field.name):g}"
            for field in fields(self.neuron_cache)
            if field.name != "most_rows" and getattr(self.neuron_cache, field.name) != field.default
        ]
        if others:
            raise HotsplitError(
                f"--neuron-cache {','.join(others)}: a plan stores only most_rows; give other"
                " values to the command that runs the plan"
            )
        if len(self.budgets) > 1:
            raise HotsplitError(
                f"--neuron-cache with {len(self.budgets)} GPUs; it is planned for one: give"
                " --vram-budget once, or leave --neuron-cache out"
            )
        if not any(self.budgets):
            raise HotsplitError(
                "--neuron-cache with a --vram-budget of 0; its slots are in the GPU's memory: give"
                " it some, or leave --neuron-cache out"
            )

    @property
    def inputs(self) -> tuple[Path, ...]:
        """The files that are read."""
        return tuple(p for p in (self.model, self.profile, self.machine) if p is not None)

    @property
    def selection(self) -> KeySelection | None:
        return None if self.kv_offload is None else KeySelection.parse(self.kv_offload)

    @property
    def budgets(self) -> tuple[int, ...]:
        budget = self.vram_budget_bytes
        return budget if isinstance(budget, tuple) else (budget,)
