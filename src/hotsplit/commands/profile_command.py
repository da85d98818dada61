"""The command `hotsplit profile`."""

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hotsplit.commands.options import command_options as common
from hotsplit.commands.options.preparation import texts_or_default
from hotsplit.files.outputs import check_apart, check_outputs

if TYPE_CHECKING:
    from hotsplit.profile.collect import ProfileReport

NEARLY_ALL = 0.99  # density above which a note says that hardly any neuron is ever silent


@click.command(cls=common.FileCommand, short_help="Count neuron firings on text; train predictors.")
@click.argument(
    "files", type=common.FILE, nargs=-1, required=True, metavar="MODEL | --merge A B [C...]"
)
@common.option_table(
    """
--corpus | corpora: file* | Text to count on: a text, .jsonl or .parquet file, a folder of them, or
    - for stdin; may be repeated. [default: a text in the package]
-o --output | profile! | The profile to write.
--tokens | max_tokens: int | Tokens to count on; a shorter text is an error. [default: 131,072, or
    fewer if the text is shorter]
--text-key | text = text | Key of the text in .jsonl, or its column in .parquet.
--imatrix | importances: gguf | Also write an importance matrix, for convert --imatrix and
    llama.cpp.
--routes | file | Count the choices of a mixture's routers that another engine recorded: arrays
    (.npy, .npz) or vLLM's responses (.jsonl), instead of text.
--merge | is_merge: flag | Add profiles of one model together.
--train-predictors | folder | Train predictors too, and write them to this folder.
--predictor-rank | int | Use low-rank predictors of this rank only.
--seed | int = 0 | Seed of the order of texts.
""",
    profile=common.OutputPath(".safetensors"),
    gguf=common.OutputPath(".gguf"),
    folder=common.FOLDER,
)
@common.device_option
@common.report_options
@click.pass_context
def profile(
    ctx: click.Context,
    files: tuple[Path, ...],
    output: Path,
    force: bool,
    is_merge: bool,
    as_json: bool,
    routes: Path | None,
    **options: Any,
) -> None:
    """Count how often each neuron fires on a text; with --train-predictors, also train predictors.

    If stopped, it leaves OUTPUT.resume, and the same command continues from there. With torchrun -m
    hotsplit profile ... several processes share the text."""
    if is_merge:
        for param in common.given(ctx):
            if param.name not in ("files", "output", "is_merge", "force", "as_json"):
                raise click.UsageError(f"{param.opts[0]} has no effect with --merge: leave it out")
        from hotsplit.profile.count.merge import MergeConfig, merge

        merged = merge(MergeConfig(profiles=files, output=output, force=force))
        lines = [f"note: {note}" for note in merged.notes]
        lines.append(
            f"wrote {output}: {merged.num_tokens:,} tokens of {len(files)} profiles,"
            f" density {common.mean(merged.density_L):.1%}"
        )
        lines += [f"  {c.num_tokens:>13,} tokens of {c.name}" for c in merged.corpora]
        common.finish(merged, as_json, lines)
        return
    if len(files) != 1:
        raise click.UsageError("one model at a time; give text with --corpus")
    if routes is not None:
        for param in common.given(ctx):
            if param.name not in ("files", "output", "routes", "force", "as_json"):
                raise click.UsageError(f"{param.opts[0]} has no effect with --routes: leave it out")
        from hotsplit.profile.routes import profile_routes

        counted = profile_routes(routes, files[0], output, force=force)
        shares = [share for share in counted.hottest_fifth_of_experts_L if share]
        line = (
            f"wrote {output}: the choices of {counted.num_tokens:,} tokens, of which the hottest"
            f" fifth of the experts takes {common.mean(shares):.0%}"
        )
        common.finish(counted, as_json, [line])
        return
    from hotsplit.profile.profile_config import DEFAULT_TOKENS, ProfileConfig

    with texts_or_default(options.pop("corpora")) as texts:
        config = ProfileConfig(model=files[0], output=output, force=force, corpora=texts, **options)
        from hotsplit.profile.collect import profile as run  # seconds of imports
        from hotsplit.profile.corpus.processes import rank_here
        from hotsplit.profile.count.resume import resume_path
        from hotsplit.profile.report import report_path
        from hotsplit.system.progress import progress

        is_first = rank_here() == 0
        if is_first:
            outputs = [config.output, report_path(config.output)]
            outputs += [config.importances] if config.importances else []
            outputs += [config.predictor_path] if config.predictor_path else []
            inputs = common.texts_and_model(config.model, config.corpora)
            check_outputs(outputs, force=config.force, inputs=inputs)
            check_apart([resume_path(config.output)], [*inputs, *outputs])
        total = config.max_tokens or DEFAULT_TOKENS
        with progress("profiling", total, "tokens") if is_first else nullcontext() as advance:
            report = run(config, advance or (lambda count: None))
    if not is_first:
        return
    common.finish(report, as_json, _lines(report))


def _lines(report: "ProfileReport") -> list[str]:
    from hotsplit.profile.report import short_lines

    density, fifth = common.mean(report.density_L), common.mean(report.hottest_fifth_L)
    experts = ""
    if shares := [share for share in report.hottest_fifth_of_experts_L if share]:
        experts = f" and that of the experts {common.mean(shares):.0%} of the choices"
    lines = [
        f"wrote {report.output}: {report.num_tokens:,} tokens, density {density:.1%},"
        f" the hottest fifth takes {fifth:.0%} of the firings{experts}, {report.seconds:.0f} s"
    ]
    if report.importances:
        lines.append(f"wrote {report.importances}: how large the inputs of each matrix are")
    if density > NEARLY_ALL:
        lines.append(
            "note: nearly every neuron fires, as in SiLU and GELU models, so there are none to"
            " leave out"
        )
    return lines + short_lines(report)
