"""Predicted speeds: those of a plan's alternatives, and the curve of speed over GPU memory.

All come from the solver's time model and are reproducible."""

from dataclasses import dataclass, replace
from pathlib import Path

from hotsplit.artifacts.split_file import Split
from hotsplit.errors import HotsplitError
from hotsplit.model.mode_quality import MAX_LOSS
from hotsplit.options.neuron_cache_options import CacheOptions
from hotsplit.report.artifacts import Artifacts
from hotsplit.report.report_config import ReportConfig
from hotsplit.runtime.step.workspace import workspace_bytes
from hotsplit.solver.advice import Advice, advise
from hotsplit.solver.inputs import Inputs, load_inputs
from hotsplit.solver.mode_choice import allowed_modes
from hotsplit.solver.prediction import placement_of
from hotsplit.solver.solver_config import SolveConfig
from hotsplit.solver.sweep import Sweep, sweep_of

NUM_BUDGETS = 25
BEYOND = 1.08  # end of the curve, relative to the memory that holds everything


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """The predicted speeds; all None without a profile or a machine file. If both are
    given, `why_not` says why there is no prediction, or no curve because the machine has no GPU."""

    advice: Advice | None = None  # on the plan
    curve: Sweep | None = None
    why_not: str | None = None


def speeds_of(config: ReportConfig, found: Artifacts) -> Speeds:
    """Speeds of the plan if there is one, else of the fastest allowed mode."""
    profile, machine = config.profile, config.machine
    if profile is None or machine is None:
        return Speeds()
    try:
        inputs = _inputs(config, machine, found.split)
        advice = None
        if found.split is not None:
            advice = advise(inputs, inputs.pipeline(), placement_of(found.split, inputs))
        if not inputs.machine.gpus:
            return Speeds(advice=advice, why_not="The machine file has no GPU to plan for.")
        return Speeds(advice=advice, curve=_curve(inputs, found.split))
    except HotsplitError as error:  # the files are valid, but there is no plan for them
        line = str(error)
        for path in (config.model, profile, machine):  # the page names files, not folders
            line = line.replace(str(path), path.name)
        return Speeds(why_not=f"There is no prediction: {line}.")


def _inputs(config: ReportConfig, machine: Path, split: Split | None) -> Inputs:
    solved = SolveConfig(
        model=config.model,
        profile=config.profile,
        machine=machine,
        output=config.output,
        vram_budget_bytes=0,
    )
    if split is None:
        return load_inputs(solved, workspace_bytes)
    workspace, rule = split.cpu_bytes["workspace"], split.kv_offload
    solved = replace(
        solved,
        vram_budget_bytes=split.budgets,
        host_budget_bytes=split.host_budget_bytes or None,
        context_length=split.context_length,
        mode=split.mode,
        neuron_cache=CacheOptions(most_rows=split.cache.most_rows) if split.cache else None,
        num_sequences=split.num_sequences,
        kv_offload=None if rule is None else str(rule),
    )
    return load_inputs(solved, lambda *asked: workspace)


def _curve(inputs: Inputs, split: Split | None) -> Sweep:
    """The speeds from no memory to a little more than everything takes, or to the GPU's memory."""
    modes = allowed_modes(inputs, MAX_LOSS)[0] if split is None else [inputs.mode]

    workspace = workspace_bytes if split is None else lambda *asked: inputs.workspace
    problem = inputs.pipeline().model
    all_of_it = problem.placeable_bytes + problem.workspace_bytes
    last = max(int(BEYOND * all_of_it), *inputs.budgets)
    last = max(min(last, inputs.machine.gpus[0].memory_bytes), inputs.budgets[0])
    return sweep_of(
        inputs,
        modes,
        first=0,
        last=last,
        num_budgets=NUM_BUDGETS,
        workspace=workspace,
        is_proven=False,
    )
