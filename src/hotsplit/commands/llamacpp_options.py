"""`hotsplit export --llama-cpp`: prints the options of llama.cpp that come closest to a plan."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click

from hotsplit.artifacts.split_file import Split
from hotsplit.commands.options.shared import aligned
from hotsplit.errors import HotsplitError
from hotsplit.model.rope import RopeScaling
from hotsplit.solver.llamacpp import Told, ways
from hotsplit.solver.prediction import inputs_for
from hotsplit.solver.solve import SolveConfig


def told(
    model: Path,
    split: Path | None,
    profile: Path | None,
    machine: Path | None,
    *,
    rope: tuple[str | None, float | None],
    as_json: bool,
) -> tuple[dict[str, Any], bool, list[str]]:
    """What `finish` takes; without --json, the options are printed on stdout. `rope`: the scaling that
    the plan was made with, as in EngineConfig. Raises HotsplitError for files that do not belong
    together, and click.UsageError if one is not given."""
    from hotsplit.runtime.step.workspace import workspace_bytes

    for name, path in (("split", split), ("machine", machine)):
        if path is None:
            raise click.UsageError(
                f"--llama-cpp needs --{name}: the plan, its machine file and, of a mixture of experts,"
                " its profile."
            )
    assert split is not None and machine is not None
    plan = Split.load(split)
    plan.check_files(split, profile=profile, machine=machine)
    if plan.kv_offload is not None:
        raise HotsplitError(
            f"{split}: a plan with --kv-offload; llama.cpp has no such option: make a plan without it"
        )
    config = SolveConfig(
        model=model,
        profile=profile,
        machine=machine,
        output=split,
        mode="dense",
        vram_budget_bytes=plan.budgets,
        context_length=plan.context_length,
        num_sequences=plan.num_sequences,
        rope_scaling=rope[0],
        rope_scale=rope[1],
    )
    inputs = inputs_for(plan, config, workspace_bytes)
    inputs = replace(inputs, workspace=plan.cpu_bytes["workspace"])
    plan.check_against(inputs.model, split)
    best, *others = ways(inputs)
    if not as_json:
        scaling = _scaling(inputs.model.spec.rope_scaling) if any(rope) else ""
        click.echo(f"{_context(plan)}{scaling} {best.line}")
    content = {"plan_s": plan.objective_s, "llama_cpp": [asdict(way) for way in (best, *others)]}
    rows = [
        ("the plan, by hotsplit", _speed(plan.objective_s), ""),
        ("llama.cpp by these options", _speed(best.seconds), f"({best.words})"),
        *((f"llama.cpp {_short(w)}", _speed(w.seconds), f"({w.words})") for w in others),
    ]
    return (
        content,
        as_json,
        [
            *aligned(rows),
            "for the model in llama.cpp's layout; its own kernels' rates are not known: those of this"
            " machine file are assumed",
        ],
    )


def _context(plan: Split) -> str:
    """llama.cpp divides its context among texts."""
    texts = f" -np {plan.num_sequences}" if plan.num_sequences > 1 else ""
    return f"-c {plan.num_sequences * plan.context_length}{texts}"


def _scaling(scaling: RopeScaling) -> str:
    """llama.cpp's options for a scaling that replaces the model's own."""
    factor = "" if scaling.kind == "none" else f" --rope-scale {scaling.factor:.9g}"
    length = f" --yarn-orig-ctx {scaling.original_length}" if scaling.kind == "yarn" else ""
    return f" --rope-scaling {scaling.kind}{factor}{length}"


def _speed(seconds: float) -> str:
    return f"{1 / seconds:>9,.1f} tokens/s predicted"


def _short(way: Told) -> str:
    """The options but for patterns, which are long."""
    return "-ngl 999 -ot ..." if "-ot" in way.arguments else way.line
