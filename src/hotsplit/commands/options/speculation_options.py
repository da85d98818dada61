"""The options of speculative decoding, in llama.cpp's spellings."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from hotsplit.commands.options.command_options import option_table
from hotsplit.errors import HotsplitError, about
from hotsplit.options.generation_options import SpecType, SpeculationOptions

if TYPE_CHECKING:
    from hotsplit.runtime.engine import Engine
    from hotsplit.runtime.generate.speculation import Speculation

_DEFAULTS = SpeculationOptions()
# docs/measured.md: rewriting a file with changes is 2.6 times as fast in q8_0; all other cases, in
# small blocks, are at most 2 % slower.
_UNLESS_TOLD: SpecType = "ngram"
# `take_speculation_options` turns their values into SpeculationOptions.
speculation_options = option_table(
    f"""
--speculate --spec-type | spec_type: kind | Draft tokens and verify several in one step; the text
    stays the same. mtp drafts with the model's own draft block, ngram from the text, ngram-mod from
    a table of all texts so far, draft with a smaller model (-md). [default: auto, where the text
    stays the same: mtp if the model has a block, else {_UNLESS_TOLD}; draft with -md]
--no-draft-block | no_draft_block: flag | Leave the model's draft block in the file.
-md --model-draft | model_draft: file SOURCE | A smaller model with the same vocabulary, which makes
    the drafts: a file, a checkpoint folder or a name on the hub.
--draft-max --draft --draft-n | draft_max: int = {_DEFAULTS.most} | Maximum tokens per draft; fewer
    if that is faster.
""",
    kind=click.Choice(get_args(SpecType)),
)


def take_speculation_options(options: dict[str, Any]) -> SpeculationOptions:
    """Takes the options out of a command's, all but the draft model ("model_draft"), and leaves
    whether the draft block is loaded ("draft_block", of EngineConfig). Raises HotsplitError for
    invalid values, click's UsageError for impossible combinations."""
    model_draft: Path | None = options["model_draft"]
    spec_type: SpecType | None = options.pop("spec_type")
    is_optional = spec_type in (None, "auto") and model_draft is None
    if spec_type in (None, "auto"):
        spec_type = "auto" if model_draft is None else "draft"
    if spec_type == "draft" and model_draft is None:
        raise click.UsageError("--speculate draft needs a draft model: -md SOURCE.")
    if spec_type != "draft" and model_draft is not None:
        raise click.UsageError(f"-md is for --speculate draft, not for {spec_type}.")
    is_left = options.pop("no_draft_block")
    if spec_type == "mtp" and is_left:
        raise click.UsageError("--speculate mtp needs the draft block: leave --no-draft-block out.")
    options["draft_block"] = spec_type in ("auto", "mtp") and not is_left
    return SpeculationOptions(
        type=spec_type, is_optional=is_optional, most=options.pop("draft_max")
    )


@contextmanager
def speculating(
    engine: "Engine", options: SpeculationOptions, model_draft: Path | None = None
) -> "Iterator[Speculation | None]":
    """Yields the Speculation for one Generation after another; None if none is wanted, or if the
    default could change the text. The draft model is loaded at the beginning of the block and
    closed at its end. Raises HotsplitError if speculation that was asked for could change the text,
    and for a draft model of another vocabulary."""
    from hotsplit.runtime.generate.draft_model import DraftModel
    from hotsplit.runtime.generate.ngrams import NgramDrafter, NgramPool
    from hotsplit.runtime.generate.speculation import Speculation, check_rows, has_equal_steps
    from hotsplit.runtime.step.native_step import NativeStep

    if options.type == "none" or (options.is_optional and not has_equal_steps(engine._live)):
        yield None
        return
    check_rows(engine._live)
    if options.type in ("auto", "mtp") and (engine.has_draft_block or options.type == "mtp"):
        if not engine.has_draft_block:
            raise HotsplitError(
                f"{engine.model.path}: has no draft block (--speculate mtp), or none that drafts"
                " here; leave --speculate out"
            )
        with engine.block_drafts(options) as new_drafts:
            yield new_drafts()
    elif options.type in ("auto", "ngram"):
        yield Speculation(NgramDrafter(), options)
    elif options.type == "ngram-mod":
        yield Speculation(NgramPool(), options)
    else:
        assert model_draft is not None
        with _draft_engine(engine, model_draft) as draft, draft.sequence() as sequence:
            native = draft._live.native
            limit = native.limit_ids if isinstance(native, NativeStep) else None
            num_ids = min(e.model.spec.vocab_size for e in (engine, draft))
            yield Speculation(DraftModel(sequence, num_ids, limit), options)


def _draft_engine(engine: "Engine", path: Path) -> "Engine":
    """The draft model on the CPU, with the main model's context length, up to its own maximum."""
    from hotsplit.artifacts.model_file import ModelFile
    from hotsplit.runtime.engine import Engine
    from hotsplit.runtime.generate.draft_model import check_vocabulary
    from hotsplit.runtime.text.codec import TextCodec

    file = ModelFile.load(path)
    with about(path):
        check_vocabulary(
            engine.codec.tokenizer,
            engine.model.spec.vocab_size,
            TextCodec.of(file).tokenizer,
            file.spec.vocab_size,
        )
    context_length = min(engine.context_length, file.spec.context_length)
    return Engine.of(file, device="cpu", context_length=context_length)
