"""Options, sizes and output that several commands have in common."""

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from sparkinfer.errors import SparkinferError
from sparkinfer.mode_quality import MAX_LOSS
from sparkinfer.sizes import parse_bytes

FILE = click.Path(path_type=Path)
split_option = click.option(
    "-spif-ms", "--split", "--sparkinfer-model-split", type=FILE, help="The plan."
)
force_option = click.option("--force", is_flag=True, help="Overwrite what exists.")
json_option = click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
device_option = click.option("--device", help="cpu or cuda[:n]; CUDA where there is one.")
threads_option = click.option(
    "-t", "--threads", type=int, help="CPU threads; one a physical core that it may run on."
)
thresholds_option = click.option(
    "--thresholds", type=FILE, help="Profile whose SiLU thresholds are used for this run."
)
mode_option = click.option(
    "--mode",
    type=click.Choice(["dense", "exact", "predicted"]),
    help="How feed-forward layers run; the plan's, or the one that reads least of those that cost"
    " no quality by the file's record.",
)
max_loss_option = click.option(
    "--max-loss",
    type=float,
    default=MAX_LOSS,
    show_default=True,
    help="Share of the perplexity that a mode may cost which nobody asked for.",
)


class Size(click.ParamType):
    """A number of bytes, e.g. 8GiB, 512MiB or 8 (GiB, as SparkInfer's --vram-budget)."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return value if isinstance(value, int) else parse_bytes(value)
        except SparkinferError as error:
            self.fail(str(error), param, ctx)


def let_threads_sleep() -> None:
    """Has torch's threads sleep while they wait for work; to be called before torch is imported.

    They spin otherwise, for milliseconds behind every operation, on the cores that the C++ kernels'
    threads or another process would have. Counting 512 tokens of a 135 M model on two cores that
    others use too took 22.8 s of processor time (108 s by the clock), and 2.9 s (10 s) with this."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def say(line: str) -> None:
    click.echo(line, err=True)


def finish(report: Any, as_json: bool, lines: list[str]) -> None:
    """The report on stdout as JSON, or its short form on stderr."""
    if as_json:
        content = report if isinstance(report, dict) else asdict(report)
        click.echo(json.dumps(content, default=str))
    else:
        for line in lines:
            say(line)


def mean(values: list[float] | tuple[float, ...]) -> float:
    return sum(values) / len(values)
