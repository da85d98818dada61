"""The command `hotsplit advise`."""

import os
import shutil
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, cast

import click

from hotsplit.commands.options.shared import (
    FILE,
    FOLDER,
    OUTPUT,
    FileCommand,
    aligned,
    finish,
    report_options,
    say,
    texts_and_model,
    threads_option,
)
from hotsplit.errors import HotsplitError
from hotsplit.files.atomic import temporary_folder
from hotsplit.files.gguf_parts import num_bytes_of
from hotsplit.files.outputs import check_outputs
from hotsplit.model.weight_types import BY_NAME, LARGE_NAMES, SMALL_BLOCK_NAMES

if TYPE_CHECKING:
    from hotsplit.artifacts.limits_file import Limits
    from hotsplit.artifacts.model_file import ModelFile
    from hotsplit.convert.options import Outtype
    from hotsplit.measure.advise.advise import Advice
    from hotsplit.measure.advise.choice import Point
    from hotsplit.measure.advise.config import AdviseConfig

# Rules are compared with the model in smaller types of small blocks.
SMALLER: dict[str, tuple[str, ...]] = {
    large: tuple(
        name
        for name in SMALL_BLOCK_NAMES
        if BY_NAME[name].bytes_per_value < BY_NAME[large].bytes_per_value
    )
    for large in LARGE_NAMES
}


@click.command(
    cls=FileCommand,
    short_help="Measure which type and limits suit a model.",
)
@click.argument("model", type=FILE)
@click.option("--corpus", "corpora", type=FILE, multiple=True, required=True,
              help="Text like what you will use the model on: a text, .jsonl or .parquet file, or a"
                   " folder of them.")  # fmt: skip
@click.option("--type", "types", multiple=True, type=click.Choice(SMALL_BLOCK_NAMES),
              help="Smaller types to compare with. [default: all below the model's own]")  # fmt: skip
@click.option("--tokens", "max_tokens", default=16_384, show_default=True,
              help="Tokens to measure on.")  # fmt: skip
@click.option("--max-loss", default=0.01, show_default=True,
              help="Largest rise in perplexity that you accept; 0.01 is 1 %.")  # fmt: skip
@click.option("--limits", "limits_path", type=OUTPUT,
              help="Write the limits of the advised rule to this file, for convert --limits.")  # fmt: skip
@click.option("--dense", type=FILE,
              help="For a model that was trained to be sparse: the model that it was trained from,"
                   " to compare with. [default: its own mode dense]")  # fmt: skip
@click.option("--plot", type=OUTPUT, help="Write a picture (PNG) of everything that was measured.")
@click.option(
    "--work", type=FOLDER, help="Folder for temporary model files. [default: the system's]"
)
@click.option("--seed", default=0, show_default=True)
@threads_option
@report_options
def advise(
    model: Path, corpora: tuple[Path, ...], types: tuple[str, ...], max_tokens: int, max_loss: float,
    limits_path: Path | None, dense: Path | None, plot: Path | None, work: Path | None, seed: int,
    threads: int | None, force: bool, as_json: bool,
) -> None:  # fmt: skip
    """Measure which type, and which limits if any, suit a model.

    Limits silence neurons that contribute little, without training. The model with them is compared
    with the unchanged dense model on your text, and with the same model in smaller types. A file that
    has limits already, such as one made by hotsplit sparsify, is compared as it is."""
    from hotsplit.artifacts.model_file import ModelFile
    from hotsplit.measure.advise.config import AdviseConfig

    config = AdviseConfig(
        model=model, corpora=corpora, max_tokens=max_tokens, max_loss=max_loss, seed=seed
    )
    file = ModelFile.load(model)
    has_limits = file.has_limits
    _check(file, limits_path, dense)
    outputs = [path for path in (limits_path, plot) if path is not None]
    check_outputs(outputs, force=force, inputs=texts_and_model(model, corpora))
    from hotsplit.runtime.kernels.threads import use_threads  # imports torch

    use_threads(threads)
    own = file.own_type
    kinds = (own, *(kind for kind in SMALLER[own] if not types or kind in types))
    with temporary_folder("hotsplit-advise-", work) as folder:
        advice, limits = _advice(config, folder, kinds, dense, has_limits=has_limits)
    lines = _lines(advice, _compared_with(model, dense, has_limits=has_limits))
    if limits_path is not None and limits is not None:
        limits.save(limits_path)
        lines.append(f"wrote {limits_path}")
    if plot is not None:
        from hotsplit.measure.advise.plot import draw

        draw(advice, plot)
        lines.append(f"wrote {plot}")
    next_step = (
        _next_of_trained(model, dense, advice) if has_limits else _next(model, advice, limits_path)
    )
    finish(advice, as_json, [*lines, next_step])


def _check(file: "ModelFile", limits_path: Path | None, dense: Path | None) -> None:
    """Raises HotsplitError for options that do not go with the file, or if no rule can be tried."""
    if file.has_limits and limits_path is not None:
        raise HotsplitError(
            f"{file.path}: has limits already, so there are none to write; leave --limits out"
        )
    if dense is not None and not file.has_limits:
        raise HotsplitError(
            f"{file.path}: has no limits and is itself the dense model to compare with; leave --dense"
            " out"
        )
    if file.predictor is not None and not file.has_limits:
        raise HotsplitError(
            f"{file.path}: has predictors, which are for the model without limits, so no rule can be"
            " tried; give the model without them"
        )
    if file.own_type not in SMALLER:
        raise HotsplitError(
            f"{file.path}: is in {file.own_type}, in which rules cannot be tried; give the model in f16"
            " or q8_0"
        )


def _advice(
    config: "AdviseConfig",
    folder: Path,
    kinds: Sequence[str],
    dense: Path | None,
    *,
    has_limits: bool,
) -> "tuple[Advice, Limits | None]":
    """The advice, and the limits of its rule; None for dense, or if the file has limits."""
    from hotsplit.measure.advise.advise import advise as run
    from hotsplit.measure.advise.own_limits import advise_own_limits

    files = _Files(config.model, folder)
    if has_limits:
        return advise_own_limits(config, dense, files.in_type, kinds, say), None
    advice, adviser = run(config, files.of_type, files.with_limits, kinds, say, files.free_bytes)
    return advice, None if advice.best.rule == "dense" else adviser.limits_of(advice.best)


def _compared_with(model: Path, dense: Path | None, *, has_limits: bool) -> str:
    if not has_limits:
        return "the unchanged dense model"
    if dense is not None:
        return f"{dense}, run densely"
    return (
        f"{model} in mode dense, which is not the model that it was trained from; give that with"
        " --dense"
    )


class _Files:
    """Copies of the model in other types and with limits, made on demand in a temporary folder."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.model, self.folder = model, folder

    def free_bytes(self) -> int:
        return shutil.disk_usage(self.folder).free

    def of_type(self, kind: str) -> Path:
        return self._make(f"{kind}.gguf", kind, None)

    def in_type(self, model: Path, kind: str) -> Path:
        """A file, with its own limits if it has any, in another type."""
        role = "own" if model == self.model else "dense"
        return self._make(f"{role}-{kind}.gguf", kind, None, model)

    def with_limits(self, kind: str, limits: "Limits") -> Path:
        path = self.folder / "limits.safetensors"
        limits.save(path)
        return self._make(f"{kind}-limits.gguf", kind, path)

    def _make(self, name: str, kind: str, limits: Path | None, source: Path | None = None) -> Path:
        from hotsplit.convert.convert import convert
        from hotsplit.convert.options import ConvertConfig

        source = source or self.model
        free, wanted = self.free_bytes(), num_bytes_of(source)
        if free < wanted:
            raise HotsplitError(
                f"{self.folder}: {free / 2**30:.1f} GiB free, up to {wanted / 2**30:.1f} GiB"
                " needed for a trial file; name another folder with --work"
            )
        output = self.folder / name
        convert(
            ConvertConfig(
                source=source,
                output=output,
                outtype=cast("Outtype", kind),
                limits=limits,
                force=True,
            )
        )
        return output


def _lines(advice: "Advice", compared_with: str) -> list[str]:
    names = ("bytes/token", "KL", "+-", "perplexity", "same top", "tokens/s", "95% of the ratio")
    rows = [("", *names, "")]
    for point in sorted(advice.points, key=lambda p: p.seconds, reverse=True):
        close = point.close
        rows.append((
            point.name, f"{point.bytes_per_token / 1e6:.1f} MB", f"{close.kl:.4f}",
            f"{close.kl_error:.4f}", f"{close.perplexity_increase:+.2%}", f"{close.same_top:.1%}",
            f"{1 / point.seconds:.1f}", _interval(point),
            "front" if point.is_on_front else "",
        ))  # fmt: skip
    name = "{} {}".format(*advice.reference)
    return [*aligned(rows), f"on {advice.num_tokens:,} tokens, against {compared_with}",
            f"tokens/s: timed in turns, as ratios to {name}; by bytes: extrapolated",
            f"advice: {advice.why}"]  # fmt: skip


def _interval(point: "Point") -> str:
    """The interval of the ratio to the reference, in words."""
    if point.gain is None:
        return "by bytes"
    return f"x {1 + point.gain.low:.2f} to {1 + point.gain.high:.2f}"


def _next(model: Path, advice: "Advice", limits: Path | None) -> str:
    """The next command to type."""
    best = advice.best
    if best.rule == "dense":
        return _convert_or_run(model, best.type, "--mode dense")
    if limits is None:
        return "next: the same command with --limits FILE, which writes the rule's limits"
    return f"{_convert(model, best.type)} --limits {quote(str(limits))}"


def _next_of_trained(model: Path, dense: Path | None, advice: "Advice") -> str:
    """The next command to type for a file that has limits."""
    best = advice.best
    if best.rule != "dense":
        return _convert_or_run(model, best.type, "--mode exact")
    if dense is None:
        return "next: the same command with --dense FILE, the model that it was trained from"
    return _convert_or_run(dense, best.type, "--mode dense")


def _convert_or_run(model: Path, kind: str, mode: str) -> str:
    """The command that converts a file to a type or, if convert would change nothing, runs it."""
    from hotsplit.convert.convert import draft_of
    from hotsplit.convert.options import ConvertConfig

    try:
        draft_of(ConvertConfig(source=model, output=_new_file(), outtype=cast("Outtype", kind)))
    except HotsplitError:  # it is of that type
        return f"next: hotsplit generate {quote(str(model))} {mode} -p TEXT"
    return _convert(model, kind)


def _convert(model: Path, kind: str) -> str:
    return f"next: hotsplit convert {quote(str(model))} -o {_new_file()} --outtype {kind}"


def _new_file() -> Path:
    """A name in the working folder that is not taken."""
    names = (Path(f"out{number or ''}.gguf") for number in count())
    return next(name for name in names if not os.path.lexists(name))
