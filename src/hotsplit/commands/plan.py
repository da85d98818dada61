"""`hotsplit plan`: what a model will be like on a machine, before it is downloaded or prepared."""

import shlex
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import click

from hotsplit.commands.options import command_options as common
from hotsplit.commands.options import preparation
from hotsplit.commands.options.engine_options import cache_type_options, rope_options
from hotsplit.errors import DoesNotFitError, HotsplitError
from hotsplit.system.sizes import format_bytes, size_words

if TYPE_CHECKING:
    from hotsplit.artifacts.machine_file import Machine
    from hotsplit.run.cache_folder import RunCache
    from hotsplit.run.choice import Wishes
    from hotsplit.run.forecast import Forecast
    from hotsplit.run.source import RunSource
    from hotsplit.run.stages import RunJob

MIB, GIB = 1 << 20, 1 << 30
_CPU_READS = (
    "note: only the CPU alone runs experts from the drive so far: beside a GPU, run refuses this"
    " plan; --vram 0 predicts and runs it there"
)
_options = common.joined(
    preparation.vram_option("most of what is free on the first, or on --device"),
    common.option_table(
        """
--machine | file | Another machine than this one: a file of hotsplit calibrate, or a card by its
    data sheet beside a typical processor, e.g. rtx-4060-8gb or rtx-4060-8gb+ddr5-5600.
"""
    ),
    common.host_budget_option,
    common.context_option("Context length in tokens. [default: the model's, up to 4,096]"),
    preparation.outtype_option,
    preparation.tokenizer_option,
    preparation.activation_option,
)


@click.command(
    cls=common.FileCommand, short_help="Predict how fast a model will run, before any download."
)
@click.argument("source", type=common.FILE)
@_options
@rope_options
@cache_type_options
@common.running_options
@common.json_option
def plan(
    source: Path,
    vram: tuple[int, ...],
    machine: Path | None,
    host_budget_bytes: int | None,
    outtype: Any,
    tokenizer: Path | None,
    activation: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Predict how fast a model will run and what will be where, from its header alone.

    SOURCE is what hotsplit run takes. Of a model on the hub only headers, configuration and
    tokenizer are fetched. Nothing is made; the last line is the command that runs the model."""
    from hotsplit.run.cache_folder import RunCache
    from hotsplit.run.choice import Wishes
    from hotsplit.run.estimate import estimate, expected_tokens
    from hotsplit.run.forecast import source_of
    from hotsplit.run.prepare import summary
    from hotsplit.runtime.kernels.threads import use_threads

    use_threads(options["threads"])
    engine = common.take_engine_options(dict(options))
    wishes = Wishes(
        vram=vram or None,
        outtype=outtype,
        tokenizer=tokenizer,
        activation=activation,
        engine=engine,
    )
    others = _machines(machine, host_budget_bytes, len(vram))
    # Each line is said once, since what is chosen for a second machine is mostly the same.
    with RunCache.open(cache(common.say)) as run_cache, TemporaryDirectory() as scratch:
        if machine is None:
            _check_gpu(wishes)
        read, num_bytes = source_of(source, activation, tokenizer, Path(scratch))
        read.any_model.refuse_alone()
        for number, other in enumerate(others, 1):
            try:
                job, figures, found = _priced(
                    read, wishes, run_cache, other, machine, host_budget_bytes
                )
                break
            except DoesNotFitError as error:
                if number == len(others):
                    raise
                run_cache.say(f"note: {error}")
        report: dict[str, Any] = {"source": str(source), "machine": str(machine or "this one")}
        lines = lines_of(job, figures, found)
        if machine is None:
            planned = estimate(job, expected_tokens(job))
            report |= summary(job, planned)
            lines.append(planned.line)
    # The command that runs the model with the same options, and these budgets.
    words = ["hotsplit", "run", str(source)]
    words += [word for each in job.wishes.vram or () for word in ("--vram", size_words(each))]
    if host_budget_bytes is not None and found.drive is not None:
        words += ["--ram", size_words(host_budget_bytes)]
    for param in common.given(click.get_current_context()):
        value = click.get_current_context().params[str(param.name)]
        if param.name in ("source", "machine", "vram", "host_budget_bytes", "as_json"):
            continue
        for each in value if isinstance(value, tuple) else (value,):
            words += [next(name for name in param.opts if name.startswith("--")), str(each)]
    command = shlex.join(words)
    download = f"  (downloads {format_bytes(num_bytes)} first)" * bool(num_bytes)
    report |= asdict(found) | {"download_bytes": num_bytes, "next": command}
    report |= {
        "outtype": job.choice.model.own_type,
        "device": job.choice.device,
        "types": [asdict(each) for each in job.choice.types],
        "reasons": job.choice.lines,
        "context_length": job.choice.context_length,
    }
    common.finish(report, as_json, [*lines, f"next: {command}{download}"])


def _machines(
    machine: Path | None, host_budget: int | None, num_budgets: int
) -> "Sequence[Machine | None]":
    """The machines to plan for, until one holds the model: None is this one. A machine by its data
    sheet has two, because its main memory is a guess."""
    from hotsplit.artifacts.data_sheets import MEMORIES_GIB, is_named, load_machine, with_memory

    if machine is None:
        return [None]
    found = load_machine(machine)
    if not is_named(machine):
        return [found]
    found = replace(found, gpus=found.gpus * max(1, num_budgets))
    return [with_memory(found, gib) for gib in MEMORIES_GIB] if host_budget is None else [found]


def _priced(
    read: "RunSource",
    wishes: "Wishes",
    cache: "RunCache",
    other: "Machine | None",
    machine: Path | None,
    host_budget: int | None,
) -> "tuple[RunJob, Machine, Forecast]":
    """What `run` would choose on a machine, the machine's figures, and the speeds; for the CPU
    alone, if that is faster than a GPU that holds everything. Raises DoesNotFitError."""
    from hotsplit.run.default_budgets import room_here, room_of
    from hotsplit.run.forecast import forecast
    from hotsplit.run.prepare import job_of
    from hotsplit.run.source import check_tokenizer

    device = wishes.engine.device
    room = room_here(wishes.vram, device) if other is None else room_of(other, wishes.vram, device)
    room = room if host_budget is None else replace(room, main=host_budget)
    job = job_of(read, wishes, cache, room=room, says_again=True)
    check_tokenizer(read, job.choice.model)
    figures, where = _this_machine(job) if other is None or machine is None else (other, machine)
    found = forecast(job, figures, where, room, host_budget)
    if not found.is_faster_on_cpu:
        return job, figures, found
    cache.say(
        f"on this GPU a token would take {1e3 * found.token_s:.3g} ms, on the CPU alone"
        f" {1e3 * found.cpu_only_s:.3g} ms: planned for the CPU, --vram 0"
    )
    return _priced(read, replace(wishes, vram=(0,)), cache, other, machine, host_budget)


def _check_gpu(wishes: "Wishes") -> None:
    from hotsplit.run.default_budgets import room_here

    vram, device = wishes.vram, wishes.engine.device
    if (
        any(vram or ())
        and not room_here(vram, device).gpus
        and not (device or "").startswith("cpu")
    ):
        raise HotsplitError(
            "--vram: torch sees no GPU on this machine; --machine plans for another one, e.g."
            " --machine rtx-4060-8gb, and without --vram the plan is for this processor"
        )


def _this_machine(job: "RunJob") -> tuple["Machine", Path]:
    """The figures of this machine, measured once and kept; says it if it was busy."""
    from hotsplit.artifacts.machine_file import Machine
    from hotsplit.run import stages
    from hotsplit.run.rates import machine_key

    make = partial(stages.make_machine, job)
    entry = job.cache.obtain("machine", machine_key(), job.source.name, make)
    made = [kind for kind in stages.OF_MACHINE if any(job.cache.folder.glob(f"{kind}-*"))]
    if note := stages.busy_note(entry, made):
        job.say(note)
    return Machine.load(entry.file), entry.file


def lines_of(job: "RunJob", machine: "Machine", found: "Forecast") -> list[str]:
    """The forecast in words: what is where, and the speeds of this plan and others."""
    from hotsplit.costs.context_bytes import draft_words
    from hotsplit.costs.part_bytes import ITEMS
    from hotsplit.run.forecast import PROMPT
    from hotsplit.solver.explain import meanings_of

    meanings = meanings_of(has_experts=job.choice.model.spec.has_experts)
    meanings["neuron_cache"] = "slots of experts"  # which are read from the drive
    rows = [(meanings[item], found.gpu_bytes[item], found.cpu_bytes[item]) for item in ITEMS]
    rows = [row for row in rows if any(row[1:])]
    rows.append(("in all", sum(found.gpu_bytes.values()), sum(found.cpu_bytes.values())))
    rows.append(("of", sum(found.budgets), found.host_bytes))
    unit, name = (GIB, "GiB") if max(rows[-2][1:]) >= GIB else (MIB, "MiB")
    texts = [[name, "on the GPU", "main memory"]]
    texts += [
        [name, *(_amount(count, unit) if count else "-" for count in counts)]
        for name, *counts in rows
    ]
    columns = (1, 2) if found.budgets else (2,)
    places = [
        "  ".join([f"  {row[0]:22}", *(f"{row[column]:>11}" for column in columns)])
        for row in texts
    ]
    of = f"of {job.choice.model.spec.num_layers} layers"
    length = f"{job.choice.context_length:,} tokens"
    place = f"in the middle of {length}; {1 / found.first_s:,.1f} at the first"
    gap = "" if found.gap is None else f"; no plan is more than {max(found.gap, 1e-4):.2%} faster"
    speeds = [("this plan", found.token_s, place + gap)]
    if found.fast_s is not None:
        speeds.append(("with faster hand-overs", found.fast_s, _hand_over_words(machine)))
    if (drafts := found.drafts) is not None:
        *first, last = (f"{share:.0%}" for share in drafts.accepted)
        assumed = f"{', '.join(first)} and {last} of its guesses by place are assumed right"
        best = f"{drafts.num_drafted} in a check" if drafts.num_drafted else "none pays"
        speeds.append(("with its draft block", drafts.token_s, f"{best}; {assumed}"))
    if found.budgets:
        if found.equal_s is not None:
            speeds.append(
                ("with equal experts", found.equal_s, "each chosen as often as any other")
            )
        missing = "if main memory held the model" * (not found.fits_cpu)
        speeds.append(("the CPU alone", found.cpu_only_s, missing))
    held = "; if main memory held the rest" * (found.drive is not None)
    if found.layer_split is not None:
        count, seconds = found.layer_split
        speeds.append(("llama.cpp's layer split", seconds, f"{count} {of} on the GPU{held}"))
    if found.cpu_moe is not None:
        count, seconds = found.cpu_moe
        name = f"llama.cpp's --n-cpu-moe {count}"
        speeds.append((name, seconds, f"the experts of {count} {of} on the CPU{held}"))
    whose = (("its prompts", found.prompt_s), ("llama.cpp's prompts", found.rival_prompt_s))
    for name, prompt_s in whose:
        if prompt_s is not None:
            words = f"of {PROMPT} tokens: {prompt_s:.2g} s to the first word"
            speeds.append((name, prompt_s / PROMPT, words))
    draft = []
    if words := draft_words(job.choice.model):
        draft = [f"the draft block: {words}, {_draft_place(job, found)}"]
    whole = sum(found.cpu_bytes[item] for item in ("attention", "neurons", "head")) == 0
    fits = f"everything would fit into {format_bytes(found.fits_from_bytes)} of GPU memory"
    return [
        *(f"note: {line}" for line in found.assumed),
        f"note: {_machine_words(machine, found)}",
        *places,
        *draft,
        *common.speed_lines(speeds),
        *([] if not found.budgets or whole else [f"{found.placed}; {fits}"]),
        *([] if found.drive is None else [found.drive.line(found.token_s)]),
        *([_CPU_READS] if found.drive is not None and found.budgets else []),
    ]


def _amount(num_bytes: int, unit: int) -> str:
    return f"{num_bytes / unit:,.2f}" if unit == GIB else f"{num_bytes / unit:,.0f}"


def _hand_over_words(machine: "Machine") -> str:
    from hotsplit.artifacts.data_sheets import FAST_HAND_OVER_S

    assumed_s = machine.gpus[0].hand_over_s.median
    return (
        f"if the GPU and the CPU wait {1e6 * FAST_HAND_OVER_S:.0f} us for each other in a layer, as"
        f" flags do, not {1e6 * assumed_s:.0f}"
    )


def _draft_place(job: "RunJob", found: "Forecast") -> str:
    from hotsplit.run.forecast import why_no_drafts

    if not found.budgets:
        return "in main memory beside"
    if why := why_no_drafts(job, uses_gpu=True):
        return f"is not loaded, since {why}"
    if found.draft_on_gpu:
        return "beside the last layer's attention on the GPU; its experts or neurons in main memory"
    return "in main memory beside: the CPU computes it, the GPU checks its guesses"


def _machine_words(machine: "Machine", found: "Forecast") -> str:
    from hotsplit.artifacts.data_sheets import SOURCE, has_assumed_memory

    gpus = [gpu.name for gpu in machine.gpus[: len(found.budgets)]]
    names = " and ".join([*gpus, machine.cpu_name]).replace(f" ({SOURCE})", "")
    if has_assumed_memory(machine):
        words = (
            f"speeds are predicted for {names}, by data sheets and typical latencies: not measured"
        )
        if found.host_bytes != machine.memory_bytes:
            return words
        size = format_bytes(found.host_bytes)
        return f"{words}; {size} of main memory are assumed, --ram gives another size"
    return f"speeds are predicted, by what was measured of {names}"
