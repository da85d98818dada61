"""Plots for docs/solver.md: a curve over budgets and two plans, of a 7B shape.

Synthetic activity and datasheet figures, as in placement.py; `hotsplit solve --sweep` and
`--heat-map` plot the same for real files.

    python placement_plots.py [FOLDER]    # docs by default"""

import sys
from dataclasses import replace
from pathlib import Path

from placement import make_inputs, make_model

from hotsplit.solver.optimise import find_plan
from hotsplit.solver.plots import draw_heat_map, plot_sweep
from hotsplit.solver.solve import split_of
from hotsplit.solver.sweep import sweep_of

GIB = 1 << 30


def main(folder: Path) -> None:
    inputs = make_inputs(make_model("7B"), "slow")
    inputs = replace(inputs, paths=(Path("7B shape, f16"), Path(__file__), Path(__file__)))
    found = sweep_of(inputs, first=1 * GIB, last=18 * GIB, num_budgets=24)
    plot_sweep(found, folder / "sweep.png")
    two = replace(inputs.machine, gpus=inputs.machine.gpus * 2)
    for name, budgets in (("heat-map", (8 * GIB,)), ("heat-map-two-gpus", (4 * GIB, 3 * GIB))):
        placed = replace(inputs, machine=two, budgets=budgets)
        pipeline = placed.pipeline()
        answer = find_plan(pipeline, time_limit_s=10)
        assert answer is not None
        split = split_of(answer, pipeline, placed, solve_s=0.0)
        draw_heat_map(split, inputs.profile, "7B shape, f16", folder / f"{name}.png")


if __name__ == "__main__":
    docs = Path(__file__).parent.parent / "docs"
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else docs)
