"""A warning on plans that are slower than they should be."""

from pathlib import Path
from typing import TYPE_CHECKING

from hotsplit.commands.options.command_options import say
from hotsplit.system.cache_place import cache_folder

if TYPE_CHECKING:
    from hotsplit.runtime.engine import Engine


def warn_of_slow_plan(engine: "Engine", split: Path | None) -> None:
    """Times a plan that the user gave and that uses a GPU; says in one line if it is slow. Plans of
    `run`, in its cache, were tried there."""
    if split is None or not engine.memories:
        return
    from hotsplit.run.keys import digest
    from hotsplit.run.rates import Rates, cpu_alone_name, machine_key
    from hotsplit.run.trial import measure

    if cache_folder().absolute() in split.absolute().parents:
        return
    rates = Rates.load(cache_folder(), digest(machine_key()))
    alone_per_s = rates.stored.get(cpu_alone_name(engine.model.model_id))
    alone_s = None if alone_per_s is None else 1 / alone_per_s
    line = slow_plan_line(split, measure(engine).token_s, alone_s)
    if line is not None:
        say(f"note: {line}")


def slow_plan_line(split: Path, token_s: float, cpu_s: float | None) -> str | None:
    """The warning; None if the plan is as fast as it should be. `cpu_s`: seconds of a token on the
    CPU alone, if an earlier trial measured them."""
    from hotsplit.artifacts.split_file import Split
    from hotsplit.artifacts.trial_file import MISSED, milliseconds
    from hotsplit.run.trial import SLOWER

    predicted_s = Split.load(split).objective_s
    took = f"{split}: a token takes {milliseconds(token_s)}, predicted {milliseconds(predicted_s)}"
    if cpu_s is not None and token_s > SLOWER * cpu_s:
        return f"{took}, and {milliseconds(cpu_s)} on the CPU alone (--device cpu without --split)"
    if token_s > MISSED * predicted_s:
        return f"{took}; calibrate and solve again, or let hotsplit run try other plans"
    return None
