"""All commands of `hotsplit`, or `python -m hotsplit`.

Commands are thin wrappers: most build the config of one stage, run the stage and print its report.
A stage is imported inside its command, so that `hotsplit --help` needs no torch. Notes and short
reports go to stderr; generated text, tables to look at, and with --json one object go to stdout.
Errors are reported by exit_codes."""

from pathlib import Path
from typing import Any

import click

from hotsplit.commands.bench_command import bench
from hotsplit.commands.cache_command import cache
from hotsplit.commands.doctor import doctor
from hotsplit.commands.evaluate import evaluate
from hotsplit.commands.help.command import completion, help_command
from hotsplit.commands.options import command_options as common
from hotsplit.commands.options.engine_options import kv_offload_option, rope_options
from hotsplit.commands.options.preparation import (
    OUTTYPE,
    activation_option,
    tokenizer_option,
    vram_option,
)
from hotsplit.commands.plan import plan
from hotsplit.commands.profile_command import profile
from hotsplit.commands.report_command import report
from hotsplit.commands.run_command import chat, generate
from hotsplit.commands.run_command import run as run_command
from hotsplit.commands.serve import serve
from hotsplit.files.written import Written
from hotsplit.system.sizes import format_bytes


class InterruptedCommand(Exception):
    """Hides an interrupt from click, which would print an empty line."""

    def __init__(self, how: KeyboardInterrupt) -> None:
        super().__init__(str(how))
        self.how = how


class _Group(click.Group):
    command_class = common.FileCommand

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            raise InterruptedCommand(error) from error


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(None, "-V", "--version", package_name="hotsplit")
def cli() -> None:
    """Run language models on machines whose GPU memory is too small for them.

    `hotsplit run MODEL` does everything needed. Its stages are also commands of their own:
    convert, profile, calibrate, solve, generate. `hotsplit help COMMAND` shows a command's
    options."""


for _command in (help_command, completion, plan, profile, doctor, run_command, cache):
    cli.add_command(_command)
for _command in (generate, chat, serve, bench, evaluate, report):
    cli.add_command(_command)


@cli.command()
@click.argument("source", type=common.FILE)
@common.option_table(
    """
-o --output | gguf! | The model file to write.
--outtype | type | Type of the matrices. [default: f16 for a checkpoint, the file's own for a GGUF]
--layout | layout = sparse | stock is the layout that llama.cpp loads.
--tensor-type | tensor_types: text* NAME=TYPE | Another type for matrices whose name matches NAME, a
    regular expression; may be repeated.
--imatrix | importances: file | An importance matrix, made by hotsplit profile --imatrix or
    llama.cpp, by which the search for scales weighs errors.
--predictors | file | Predictors to add: predictors.safetensors, or a folder with it or with
    model_0.pt, model_1.pt, ...
--input-layer-offset | offset | The input that the predictors read: 0 for their own layer's, 1 for
    that of the layer before.
""",
    gguf=common.OutputPath(".gguf"),
    type=OUTTYPE,
    layout=click.Choice(["sparse", "stock"]),
    offset=click.IntRange(0, 1),
)
@tokenizer_option
@activation_option
@click.option(
    "--verify/--no-verify",
    "is_verified",
    default=True,
    show_default=True,
    help="Compare the file's logits with the source's before keeping it.",
)
@common.report_options
def convert(
    source: Path,
    tensor_types: tuple[str, ...],
    input_layer_offset: int | None,
    is_verified: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Turn a Hugging Face checkpoint, or a GGUF, into a model file.

    SOURCE is a folder, a .gguf file, or the name of a checkpoint on the hub (org/name)."""
    from hotsplit.convert.options import ConvertConfig

    config = ConvertConfig(
        source=source,
        tensor_types=tensor_types,
        predictor_input_layer_offset=input_layer_offset,
        **options,
    )
    from hotsplit.convert.convert import convert as run  # seconds of imports
    from hotsplit.system.progress import progress

    def verify(written: Written) -> list[str]:
        from hotsplit.measure.evaluate.verify_conversion import verify as compare
        from hotsplit.profile.predictors.check import check_predictors

        advance.begin("verifying")
        check = check_predictors(written.path)
        warnings = [check.line] if check and check.is_near_chance else []
        return [*compare(written).lines, *warnings]

    with progress("converting", None, "MB") as advance:
        report = run(
            config,
            on_bytes=lambda num_bytes: advance(num_bytes / 1e6),
            on_total=lambda num_bytes: advance.set_total(num_bytes / 1e6),
            verify=verify if is_verified else None,
        )
    lines = [f"note: {note}" for note in report.notes]
    lines += [report.verified] if report.verified else []
    lines.append(
        f"wrote {report.output}: {report.num_tensors} tensors, {format_bytes(report.num_bytes)},"
        f" {report.activation}, {'with' if report.has_predictors else 'no'} predictors,"
        f" {report.seconds:.1f} s"
    )
    common.finish(report, as_json, lines)


@cli.command()
@common.option_table(
    """
-o --output | machine! | The machine file to write.
--gpu-from | file | Machine file, or a card by its data sheet, e.g. rtx-4060-8gb, whose GPU to plan
    for, if this machine has none.
--drive | drives: file* | A file or a folder on a drive to measure, e.g. the model; for several
    drives repeatedly. Of a folder, 256 MiB are written and deleted. [default: the output's folder]
""",
    machine=common.OutputPath(".json"),
)
@common.report_options
def calibrate(as_json: bool, **options: Any) -> None:
    """Measure this machine's bandwidths, latencies and memories."""
    from hotsplit.measure.calibrate.calibrate import CalibrateConfig
    from hotsplit.measure.calibrate.calibrate import calibrate as run
    from hotsplit.system.progress import progress

    config = CalibrateConfig(**options)
    with progress("measuring", None, "timings") as advance:
        machine = run(config, common.say, advance)
    common.finish(machine, as_json, [f"wrote {config.output}"])


@cli.command(short_help="Plan what goes on the GPU under a VRAM budget.")
@click.argument("model", type=common.FILE)
@common.option_table(
    """
--profile | file | Made by hotsplit profile. Needless where every neuron is computed: for SiLU and
    GELU models, and with --mode dense. Of a mixture of experts always needed.
--machine | file! | Made by hotsplit calibrate; or a card by its data sheet, beside a typical
    processor, e.g. rtx-4060-8gb.
-o --output | plan! | The plan (split file) to write; with --sweep the curve (JSON).
--sequences | num_sequences: int = 1 | Texts at a time to reserve KV cache for, each with a whole
    --context: --parallel and --kept of serve together, or the prompts of generate.
--neuron-cache | text on|most_rows=N | Plan memory and times for a neuron cache, which swaps hot
    neurons, or experts, as the text needs: up to N per token (on: 64, or 8 experts).
--explain | explained: flag | Explain in words what is where, and why.
--heat-map | output | Write a picture (PNG) of the plan: layers by hotness.
--sweep | sweep_range: text FROM:TO[:NUMBER] | Instead of a plan, compute the speed over a range of
    budgets, e.g. 2GiB:24GiB; at 23 of them unless NUMBER says another.
--check | is_check: flag | Check that the plan at --output is still valid for these files; write
    nothing.
""",
    plan=common.OutputPath(".gguf", ".json"),
)
@vram_option("with --sweep none, else required")
@common.host_budget_option
@common.context_option(
    "Context length to reserve KV cache for. [default: the model's, up to 4,096]"
)
@rope_options
@kv_offload_option
@common.mode_option
@common.max_loss_option
@common.report_options
def solve(
    vram: tuple[int, ...],
    explained: bool,
    heat_map: Path | None,
    sweep_range: str | None,
    is_check: bool,
    as_json: bool,
    neuron_cache: str | None,
    **options: Any,
) -> None:
    """Plan what goes on the GPU under a VRAM budget, and write the plan.

    The plan says which neurons, attention blocks and so on go on the GPU and which stay on the CPU
    so that a token takes the least time on the machine that --machine describes."""
    from hotsplit.commands.solve_command import run_check, run_solve, run_sweep
    from hotsplit.options.neuron_cache_options import CacheOptions
    from hotsplit.solver.solve import SolveConfig

    if not vram and not sweep_range and not is_check:
        context = click.get_current_context()
        (option,) = (param for param in context.command.params if param.name == "vram")
        raise click.MissingParameter(ctx=context, param=option)
    pictured = explained or heat_map
    if (is_check or sweep_range) and (pictured or (is_check and sweep_range)):
        raise click.UsageError("--check, --sweep, and --explain or --heat-map exclude each other.")
    if sweep_range and vram:
        raise click.UsageError("--sweep FROM:TO gives the budgets: leave --vram-budget out.")
    if (is_check or sweep_range) and neuron_cache is not None:
        raise click.UsageError("--neuron-cache is for a new plan: leave it out here.")
    config = SolveConfig(
        vram_budget_bytes=vram or (0,),
        neuron_cache=None if neuron_cache is None else CacheOptions.parse(neuron_cache),
        **options,
    )
    if is_check:
        report, lines = run_check(config, vram)
    elif sweep_range:
        report, lines = run_sweep(config, sweep_range)
    else:
        report, lines = run_solve(config, explained=explained, heat_map=heat_map)
    common.finish(report, as_json, lines)


@cli.command("inspect", short_help="Show what a file or a checkpoint folder holds.")
@click.argument("file", type=common.FILE)
@common.option_table(
    """
--tensors | all_tensors: flag | List the tensors of all layers, not only of the first.
--graph | is_graph: flag | Show the operations of a model's decode step, what each reads and writes,
    and its device.
--split | file | With --graph: place the operations by this plan.
"""
)
@common.json_option
def inspect_command(
    file: Path, all_tensors: bool, is_graph: bool, split: Path | None, as_json: bool
) -> None:
    """Show what a file or a checkpoint folder holds.

    FILE is any GGUF, a profile, predictors, a plan or a machine file, or a checkpoint folder; for a
    folder it also says whether convert would accept it."""
    if is_graph:
        _inspect_graph(file, split, as_json)
        return
    if split is not None:
        raise click.UsageError("--split places the operations that --graph shows; add --graph")
    from hotsplit.inspection.file_summary import print_facts, to_json

    if (file / "config.json").is_file():
        from hotsplit.convert.checkpoint_summary import summarise_checkpoint

        checkpoint = summarise_checkpoint(file)
        if as_json:
            click.echo(to_json(checkpoint))
        else:
            print_facts(checkpoint.kind, checkpoint.facts)
        return
    from hotsplit.inspection.inspect_file import inspect_file  # needs no torch

    summary = inspect_file(file)
    if as_json:
        click.echo(to_json(summary))
    else:
        summary.print(all_tensors=all_tensors)


def _inspect_graph(file: Path, split: Path | None, as_json: bool) -> None:
    from hotsplit.inspection.file_summary import columns_table, facts_table, print_tables, to_json
    from hotsplit.runtime.step.program_summary import facts_of, lines_of, summarise_program

    summary = summarise_program(file, split)
    if as_json:
        click.echo(to_json(summary))
        return
    names = ["layers", "device", "operation", "reads", "writes", "weights a layer"]
    cells = zip(*(line.row for line in lines_of(summary)), strict=True)
    sizes = {
        "device": summary.weight_bytes,
        "bytes": map(format_bytes, summary.weight_bytes.values()),
    }
    print_tables(
        [
            facts_table(summary.kind, facts_of(summary)),
            columns_table("operations, in order", dict(zip(names, cells, strict=True))),
            columns_table("weights", sizes),
        ]
    )


@cli.command("export", short_help="Write files for other engines, or options for llama.cpp.")
@click.argument("source", type=common.FILE)
@common.option_table(
    """
--format | format | powerinfer-activations and eplb are made from a profile, ktransformers from a
    profile or a plan, the others from a plan.
--llama-cpp | is_for_llama_cpp: flag | Of the model SOURCE, print the options of llama.cpp that come
    closest to the plan --split, with the speed that is predicted of both.
--split | file | The plan, for --llama-cpp.
-o --output | output | The file or folder to write.
--profile | file | The profile that the plan was made from.
--machine | file | The machine file of the plan, for --llama-cpp.
--rpc | text HOST:PORT,... | Other hosts that run llama.cpp's rpc-server, for --llama-cpp: they have
    the plan's last GPUs, one each.
""",
    format=click.Choice(
        ["powerinfer-activations", "gpuidx", "sparkinfer-split", "ktransformers", "eplb"]
    ),
)
@rope_options
@common.report_options
def export_command(
    as_json: bool,
    is_for_llama_cpp: bool,
    split: Path | None,
    machine: Path | None,
    rpc: str | None,
    rope_scaling: str | None,
    rope_scale: float | None,
    **options: Any,
) -> None:
    """Write a profile or a plan in the file formats of other engines, or print the options of
    llama.cpp that come closest to a plan."""
    from hotsplit.export.export import ExportConfig, export

    if is_for_llama_cpp:
        from hotsplit.commands.llamacpp_options import print_options

        others = [name for name in ("format", "output") if options[name] is not None]
        if others:
            raise click.UsageError(f"--{others[0]} is not for --llama-cpp.")
        model, profile, rope = options["source"], options["profile"], (rope_scaling, rope_scale)
        print_options(model, split, profile, machine, rpc=rpc, rope=rope, as_json=as_json)
        return
    if options["format"] is None or options["output"] is None:
        raise click.UsageError("give --format and -o, or --llama-cpp.")
    if any(given is not None for given in (split, machine, rpc, rope_scaling, rope_scale)):
        raise click.UsageError(
            "--split, --machine, --rpc, --rope-scaling and --rope-scale are for --llama-cpp."
        )
    report = export(ExportConfig(**options))
    lines = [f"note: {note}" for note in report.notes]
    hot = "" if report.num_hot is None else f", {report.num_hot:,} hot"
    units = f"{report.num_units:,} {report.units}"
    lines.append(
        f"wrote {report.output}: {report.num_layers} layers of {units}{hot},"
        f" {format_bytes(report.num_bytes)}"
    )
    common.finish(report, as_json, lines)
