"""`hotsplit plan`: what a model will be like on a machine, before it is downloaded or prepared."""

import shlex
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import click

from hotsplit.commands.options.engine import cache_type_options, rope_options
from hotsplit.commands.options.outtype import OUTTYPE
from hotsplit.commands.options.preparation import tokenizer_option, vram_option
from hotsplit.commands.options.shared import (
    FILE,
    SIZE,
    FileCommand,
    context_option,
    finish,
    given,
    joined,
    json_option,
    running_options,
    say,
    take_engine_options,
)
from hotsplit.costs.part_bytes import ITEMS
from hotsplit.errors import HotsplitError
from hotsplit.system.sizes import UNITS, format_bytes

if TYPE_CHECKING:
    from hotsplit.artifacts.machine_file import Machine
    from hotsplit.run.forecast import Forecast
    from hotsplit.run.stages import Job

MIB = 1 << 20
_options = joined(
    vram_option("most of what is free on the first, or on --device"),
    click.option("--machine", type=FILE,
                 help="Another machine than this one: a file of hotsplit calibrate, or a card by its data"
                 " sheet beside a typical processor, e.g. rtx-4060-8gb or rtx-4060-8gb+ddr5-5600."),
    click.option("--host-budget", "host_budget", type=SIZE,
                 help="Main memory to use, e.g. 16GiB. [default: all of it]"),
    context_option("Context length in tokens. [default: the model's, up to 4,096]"),
    click.option("--outtype", type=OUTTYPE,
                 help="Type of the matrices. [default: one that fits into memory]"),
    tokenizer_option,
    click.option("--activation", metavar="NAME",
                 help="The activation, which other programs' GGUF files do not record: relu,"
                 " fatrelu=0.01, ..."),
)  # fmt: skip


@click.command(
    cls=FileCommand, short_help="Predict how fast a model will run, before any download."
)
@click.argument("source", type=FILE)
@_options
@rope_options
@cache_type_options
@running_options
@json_option
def plan(
    source: Path, vram: tuple[int, ...], machine: Path | None, host_budget: int | None,
    outtype: Any, tokenizer: Path | None, activation: str | None, as_json: bool, **options: Any,
) -> None:  # fmt: skip
    """Predict how fast a model will run and what will be where, from its header alone.

    SOURCE is what hotsplit run takes. Of a model on the hub only headers, configuration and tokenizer
    are fetched. Nothing is made; the last line is the command that runs the model."""
    from hotsplit.artifacts.data_sheets import is_named, load_machine
    from hotsplit.run.cache_folder import Cache
    from hotsplit.run.choice import Wishes
    from hotsplit.run.default_budgets import room_here, room_of
    from hotsplit.run.estimate import estimate, expected_tokens
    from hotsplit.run.forecast import forecast, source_of
    from hotsplit.run.prepare import job_of, summary
    from hotsplit.run.source import check_tokenizer
    from hotsplit.runtime.kernels.threads import use_threads

    use_threads(options["threads"])
    engine = take_engine_options(dict(options))
    wishes = Wishes(vram=vram or None, outtype=outtype, engine=engine)
    other = None if machine is None else load_machine(machine)
    if other is not None and machine is not None and is_named(machine):
        other = replace(other, gpus=other.gpus * max(1, len(vram)))
    with Cache.open(say) as cache, TemporaryDirectory() as scratch:
        if other is None:
            room = room_here(wishes.vram, engine.device)
            _check_gpu(vram, room.gpus, engine.device)
        else:
            room = room_of(other, wishes.vram, engine.device)
        room = room if host_budget is None else replace(room, main=host_budget)
        read, num_bytes = source_of(source, activation, tokenizer, Path(scratch))
        job = job_of(read, wishes, (), cache, room=room, is_here=other is None)
        check_tokenizer(read, job.choice.model)
        figures, where = (
            _this_machine(job) if other is None or machine is None else (other, machine)
        )
        found = forecast(job, figures, where, room, host_budget)
        report: dict[str, Any] = {"source": str(source), "machine": str(machine or "this one")}
        lines = lines_of(job, figures, found)
        if other is None:
            planned = estimate(job, expected_tokens(job))
            report |= summary(job, planned)
            lines.append(planned.line)
    command = shlex.join(_next_command(source))
    download = f"  (downloads {format_bytes(num_bytes)} first)" * bool(num_bytes)
    report |= asdict(found) | {"download_bytes": num_bytes, "next": command}
    report |= {
        "outtype": job.choice.model.own_type, "device": job.choice.device,
        "reasons": job.choice.lines, "context_length": job.choice.context_length,
    }  # fmt: skip
    finish(report, as_json, [*lines, f"next: {command}{download}"])


def _check_gpu(vram: Sequence[int], gpus: Sequence[int], device: str | None) -> None:
    if any(vram) and not gpus and not (device or "").startswith("cpu"):
        raise HotsplitError(
            "--vram: torch sees no GPU on this machine; --machine plans for another one, e.g. --machine"
            " rtx-4060-8gb, and without --vram the plan is for this processor"
        )


def _this_machine(job: "Job") -> tuple["Machine", Path]:
    """The figures of this machine, which are measured once and kept for `run`; says it if it was busy."""
    from hotsplit.artifacts.machine_file import Machine
    from hotsplit.run import stages
    from hotsplit.run.rates import machine_key

    make = partial(stages.make_machine, job)
    entry = job.cache.obtain("machine", machine_key(), job.source.name, make)
    made = [kind for kind in stages.OF_MACHINE if any(job.cache.folder.glob(f"{kind}-*"))]
    if note := stages.busy_note(entry, made):
        job.say(note)
    return Machine.load(entry.file), entry.file


def _next_command(source: Path) -> list[str]:
    """The command that runs the model with the same options."""
    words = ["hotsplit", "run", str(source)]
    for param in given(click.get_current_context()):
        value = click.get_current_context().params[str(param.name)]
        if param.name in ("source", "machine", "host_budget", "as_json"):
            continue
        for each in value if isinstance(value, tuple) else (value,):
            text = size_words(each) if param.name == "vram" else str(each)
            words += [next(name for name in param.opts if name.startswith("--")), text]
    return words


def size_words(count: int) -> str:
    """A number of bytes as an option takes it, in the largest unit that divides it."""
    for unit in ("GiB", "MiB", "KiB"):
        if count and count % UNITS[unit.upper()] == 0:
            return f"{count // UNITS[unit.upper()]}{unit}"
    return f"{count}B" if count else "0"


def lines_of(job: "Job", machine: "Machine", found: "Forecast") -> list[str]:
    """The forecast in words."""
    whole = sum(found.cpu_bytes[item] for item in ("attention", "neurons", "head")) == 0
    fits = f"everything would fit into {format_bytes(found.fits_from_bytes)} of GPU memory"
    return [
        *(f"note: {line}" for line in found.assumed),
        f"note: {_machine_words(machine, found)}",
        *_places(job, found),
        *_speeds(job, found),
        *([] if not found.budgets or whole else [f"{found.placed}; {fits}"]),
    ]


def _machine_words(machine: "Machine", found: "Forecast") -> str:
    """Whose figures these are."""
    from hotsplit.artifacts.data_sheets import SOURCE

    gpus = [gpu.name for gpu in machine.gpus[: len(found.budgets)]]
    names = " and ".join([*gpus, machine.cpu_name]).replace(f" ({SOURCE})", "")
    if SOURCE in machine.cpu_name:
        return (
            f"speeds are predicted for {names}, by data sheets and typical latencies: not measured"
        )
    return f"speeds are predicted, by what was measured of {names}"


def _places(job: "Job", found: "Forecast") -> list[str]:
    """What is where, in MiB."""
    from hotsplit.commands.solve import meanings_of

    meanings = meanings_of(has_experts=job.choice.model.spec.has_experts)
    rows = [(meanings[item], found.gpu_bytes[item], found.cpu_bytes[item]) for item in ITEMS]
    rows = [row for row in rows if any(row[1:])]
    rows.append(("in all", sum(found.gpu_bytes.values()), sum(found.cpu_bytes.values())))
    rows.append(("of", sum(found.budgets), found.host_bytes))
    texts = [["MiB", "on the GPU", "main memory"]]
    texts += [
        [name, *(f"{round(n / MIB):,}" if n else "-" for n in counts)] for name, *counts in rows
    ]
    columns = (1, 2) if found.budgets else (2,)
    return [
        "  ".join([f"  {row[0]:22}", *(f"{row[column]:>11}" for column in columns)])
        for row in texts
    ]


def _of_this_plan(job: "Job", found: "Forecast") -> str:
    """For which token the speeds are, and how much faster a plan could be at most."""
    length = f"{job.choice.context_length:,} tokens"
    place = f"in the middle of {length}; {1 / found.first_s:,.1f} at the first"
    gap = "" if found.gap is None else f"; no plan is more than {max(found.gap, 1e-4):.2%} faster"
    return place + gap


def _speeds(job: "Job", found: "Forecast") -> list[str]:
    """Predicted speeds: this plan's, and those of other ways."""
    of = f"of {job.choice.model.spec.num_layers} layers"
    rows = [("this plan", found.token_s, _of_this_plan(job, found))]
    if found.budgets:
        if found.equal_s is not None:
            rows.append(("with equal experts", found.equal_s, "each chosen as often as any other"))
        rows.append(("the CPU alone", found.cpu_only_s, ""))
    if found.layer_split is not None:
        count, seconds = found.layer_split
        rows.append(("llama.cpp's layer split", seconds, f"{count} {of} on the GPU"))
    if found.cpu_moe is not None:
        count, seconds = found.cpu_moe
        name = f"llama.cpp's --n-cpu-moe {count}"
        rows.append((name, seconds, f"the experts of {count} {of} on the CPU"))
    width = max(24, *(len(name) for name, *_ in rows))
    return [
        f"  {name:{width}} {1 / seconds:>9,.1f} tokens/s" + f"  ({words})" * bool(words)
        for name, seconds, words in rows
    ]
