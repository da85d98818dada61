"""`hotsplit export --llama-cpp`: prints the options of llama.cpp that come closest to a plan."""

from dataclasses import asdict, replace
from pathlib import Path

import click
import numpy as np

from hotsplit.artifacts.split_file import Split
from hotsplit.commands.options.command_options import aligned, finish
from hotsplit.errors import HotsplitError
from hotsplit.solver.llamacpp import ways
from hotsplit.solver.llamacpp_hosts import endpoints, several
from hotsplit.solver.prediction import inputs_for
from hotsplit.solver.solve import SolveConfig


def print_options(
    model: Path,
    split: Path | None,
    profile: Path | None,
    machine: Path | None,
    *,
    rpc: str | None,
    rope: tuple[str | None, float | None],
    as_json: bool,
) -> None:
    """Prints the options on stdout. `rpc`: other hosts, HOST:PORT. `rope`: the scaling that the
    plan was made with, as in EngineConfig. Raises HotsplitError for unrelated files,
    click.UsageError if one is not given."""
    from hotsplit.runtime.step.workspace import workspace_bytes

    for name, path in (("split", split), ("machine", machine)):
        if path is None:
            raise click.UsageError(
                f"--llama-cpp needs --{name}: the plan, its machine file and, of a mixture of"
                " experts, its profile."
            )
    assert split is not None and machine is not None
    plan = Split.load(split)
    plan.check_files(split, profile=profile, machine=machine)
    if plan.kv_offload is not None:
        raise HotsplitError(
            f"{split}: a plan with --kv-offload; llama.cpp has no such option: make a plan without"
            " it"
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
    if rpc is not None or len(plan.budgets) > 1:
        home = plan.home or (0,) * (inputs.model.spec.num_layers + 1)
        best, *others = several(inputs, np.array(home), endpoints(rpc) if rpc else ())
    else:
        best, *others = ways(inputs)
    content = {"plan_s": plan.objective_s, "llama_cpp": [asdict(way) for way in (best, *others)]}
    # llama.cpp divides its context among texts.
    words = f"-c {plan.num_sequences * plan.context_length}"
    words += f" -np {plan.num_sequences}" if plan.num_sequences > 1 else ""
    if any(rope):  # a scaling that replaces the model's own
        scaling = inputs.model.spec.rope_scaling
        words += f" --rope-scaling {scaling.kind}"
        words += "" if scaling.kind == "none" else f" --rope-scale {scaling.factor:.9g}"
        words += f" --yarn-orig-ctx {scaling.original_length}" if scaling.kind == "yarn" else ""
    if not as_json:
        click.echo(f"{words} {best.line}")
    rows = [
        ("the plan, by hotsplit", plan.objective_s, ""),
        ("llama.cpp by these options", best.seconds, f"({best.words})"),
        *(
            # Patterns are long.
            (
                f"llama.cpp {'-ngl 999 -ot ...' if '-ot' in way.arguments else way.line}",
                way.seconds,
                f"({way.words})",
            )
            for way in others
        ),
    ]
    lines = aligned(
        [(name, f"{1 / s:>9,.1f} tokens/s predicted", meaning) for name, s, meaning in rows]
    )
    assumed = "its own kernels' rates are not known: those of this machine file are assumed"
    finish(content, as_json, [*lines, f"for the model in llama.cpp's layout; {assumed}"])
