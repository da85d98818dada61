"""The options of speculative decoding, in llama.cpp's spellings."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from hotsplit.commands.options.command_options import option_table
from hotsplit.errors import about
from hotsplit.options.generation_options import SpecType, SpeculationOptions

if TYPE_CHECKING:
    from hotsplit.runtime.engine import Engine
    from hotsplit.runtime.generate.speculation import Speculation

_DEFAULTS = SpeculationOptions()
# `take_speculation_options` turns their values into SpeculationOptions.
speculation_options = option_table(
    f"""
--speculate --spec-type | spec_type: kind | Draft tokens and verify several in one step; the text
    stays the same. mtp drafts with the model's own draft block, ngram from the text, ngram-mod from
    a table of all texts so far, draft with a smaller model (-md). [default: auto, where the text
    stays the same: ngram, beside draft with -md, or mtp if the model has a block]
--no-draft-block | no_draft_block: flag | Leave the model's draft block in the file.
-md --model-draft | model_draft: file SOURCE | A smaller model with the same vocabulary, or an
    assistant of Gemma 4, which makes the drafts: a file, a checkpoint folder or a name on the hub.
--draft-max --draft --draft-n | draft_max: int = {_DEFAULTS.most} | Maximum tokens per draft; fewer
    if that is faster; 0: none, as --speculate none.
""",
    kind=click.Choice(get_args(SpecType)),
)


def take_speculation_options(options: dict[str, Any]) -> SpeculationOptions:
    """Takes the options out of a command's, all but the draft model ("model_draft"), and leaves
    whether the draft block is loaded ("draft_block", of EngineConfig). Raises HotsplitError for
    invalid values, click's UsageError for impossible combinations."""
    model_draft: Path | None = options["model_draft"]
    spec_type: SpecType | None = options.pop("spec_type")
    spec_type = "auto" if spec_type is None else spec_type
    is_optional = spec_type == "auto" and model_draft is None
    if spec_type == "draft" and model_draft is None:
        raise click.UsageError("--speculate draft needs a draft model: -md SOURCE.")
    if spec_type not in ("auto", "draft") and model_draft is not None:
        raise click.UsageError(f"-md is for --speculate draft, not for {spec_type}.")
    is_left = options.pop("no_draft_block")
    if spec_type == "mtp" and is_left:
        raise click.UsageError("--speculate mtp needs the draft block: leave --no-draft-block out.")
    most = options.pop("draft_max")
    if most == 0:
        spec_type, is_optional, most = "none", False, _DEFAULTS.most
    is_block_used = spec_type == "mtp" or (spec_type == "auto" and model_draft is None)
    options["draft_block"] = is_block_used and not is_left
    with about("--draft-max"):  # no other value can be wrong
        return SpeculationOptions(type=spec_type, is_optional=is_optional, most=most)


def speculation_lines(options: SpeculationOptions, texts: "Sequence[Speculation]") -> list[str]:
    """What became of the drafts of `texts`, for the user; none of these: they could change it."""
    if not texts and options.type != "none":
        return ["[speculation: off, since rows of a step may differ from a single token's here]"]
    return [f"[{drafts.line()}]" for drafts in texts]


@contextmanager
def speculating(
    engine: "Engine", options: SpeculationOptions, model_draft: Path | None = None
) -> "Iterator[Speculation | None]":
    """Yields the drafts of one Generation after another; None if none are wanted, or if the default
    could change the text: see runtime.drafting."""
    from hotsplit.runtime.drafting import drafting

    with drafting(engine, options, model_draft) as made:
        yield None if made is None else made.begin()
