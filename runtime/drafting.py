"""Drafts for the texts of an engine, of which several may be in progress: opens what makes the
guesses, and begins each text with what earlier ones have shown of it."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.errors import HotsplitError
from hotsplit.options.generation_options import SpeculationOptions
from hotsplit.runtime.engine import Engine
from hotsplit.runtime.generate.block_drafter import BlockDrafter
from hotsplit.runtime.generate.draft_model import DraftModel, vocabulary_fault
from hotsplit.runtime.generate.drafters import CostlyDrafter, Drafter
from hotsplit.runtime.generate.frequent_ids import FrequentIds
from hotsplit.runtime.generate.ngrams import NgramDrafter, NgramPool
from hotsplit.runtime.generate.row_ratios import ratios_here
from hotsplit.runtime.generate.speculation import Learnt, Speculation, check_rows, has_equal_steps
from hotsplit.runtime.kernels.gpu.launch import ROWS
from hotsplit.runtime.model.assistant_loader import load_assistant, why_not_beside
from hotsplit.runtime.step.assistant_step import AssistantStep
from hotsplit.runtime.step.draft_step import DraftStep
from hotsplit.runtime.step.native_step import NativeStep
from hotsplit.runtime.text.codec import TextCodec

log = logging.getLogger(__name__)
_LEAST_TOKENS = 32  # of a text that shows the next one what to expect


class Drafting:
    """Makes the drafts of texts: `begin` for each, `end` when it is over."""

    def __init__(
        self,
        options: SpeculationOptions,
        new_costly: Callable[[], CostlyDrafter] | None,
        new_free: Callable[[], Drafter] | None,
        ratios: Mapping[int, float] | None,
    ) -> None:
        """`ratios`: see draft_costs.RowCosts."""
        self._options, self._new_costly, self._new_free = options, new_costly, new_free
        self._ratios = ratios
        self._idle: list[CostlyDrafter] = []
        self._learnt: Learnt | None = None  # by the latest text

    def begin(self) -> Speculation:
        """The drafts of a text, or of several in succession."""
        free = None if self._new_free is None else self._new_free()
        drafter: CostlyDrafter | Drafter | None = free
        if self._new_costly is not None:
            drafter = self._idle.pop() if self._idle else self._new_costly()
        assert drafter is not None
        beside = None if free is drafter else free
        made = Speculation(drafter, self._options, beside, self._ratios)
        if self._learnt is None:
            self._learnt = made.learnt
        made.begin_with(self._learnt)
        return made

    def end(self, drafts: Speculation) -> None:
        """The text is over; what makes its guesses is free for another."""
        if drafts.totals.tokens >= _LEAST_TOKENS:
            self._learnt = drafts.learnt
        if drafts.costly is not None:
            self._idle.append(drafts.costly)


@contextmanager
def drafting(
    engine: Engine, options: SpeculationOptions, model_draft: Path | None = None, num_texts: int = 1
) -> Iterator[Drafting | None]:
    """Yields what makes drafts for up to `num_texts` texts at a time, with a draft model that is
    loaded meanwhile; None if none are wanted, or if the default could change a text. A draft model
    of another vocabulary is not used, unless the options ask for it alone.

    Raises HotsplitError if drafts that were asked for could change the text, and for a draft model
    of another vocabulary that was."""
    kind = options.type
    if kind == "none" or (options.is_optional and not has_equal_steps(engine._live)):
        yield None
        return
    check_rows(engine._live)
    if engine._live.has_hybrid_steps:  # a longer check would be a pass, which rounds otherwise
        most = min(options.most, ROWS[-1] - 1)
        options = replace(options, most=most, least=min(options.least, most))
    if kind == "mtp" and not engine.has_draft_block:
        raise HotsplitError(
            f"{engine.model.path}: has no draft block (--speculate mtp), or none that drafts here;"
            " leave --speculate out"
        )
    new_costly: Callable[[], CostlyDrafter] | None = None
    new_free: Callable[[], Drafter] | None = None
    if kind in ("auto", "ngram"):
        new_free = NgramDrafter
    elif kind == "ngram-mod":
        pool = NgramPool()
        new_free = lambda: pool  # noqa: E731
    ratios = ratios_here(engine._sequences, engine.model, engine.mode)
    with ExitStack() as stack:
        if kind in ("auto", "draft") and model_draft is not None:
            file = ModelFile.load(model_draft)
            if not (fault := _fault_beside(engine, file)):
                new_costly = stack.enter_context(
                    _assistant_drafters(engine, file)
                    if file.graph.is_assistant
                    else _model_drafters(engine, file, num_texts)
                )
            elif kind == "draft":
                raise HotsplitError(fault)
            else:  # llama-server goes on, too
                log.warning(f"{fault}. Drafts come from the text alone")
        elif kind in ("auto", "mtp") and engine.has_draft_block:
            new_costly = stack.enter_context(_block_drafters(engine))
        yield Drafting(options, new_costly, new_free, ratios)


@contextmanager
def _block_drafters(engine: Engine) -> Iterator[Callable[[], CostlyDrafter]]:
    """Meanwhile the block follows all texts."""
    block = engine._live.draft
    assert block is not None
    with _following(engine, block, "mtp", engine.model.spec.vocab_size) as new_drafter:
        yield new_drafter


@contextmanager
def _assistant_drafters(engine: Engine, file: ModelFile) -> Iterator[Callable[[], CostlyDrafter]]:
    """Meanwhile the assistant follows all texts, in place of the model's own block."""
    decoder = engine._live
    assistant = AssistantStep(load_assistant(file, decoder.weights), decoder.weights)
    engine._sequences.decoder = replace(decoder, draft=assistant)
    try:
        with _following(engine, assistant, "draft", file.spec.vocab_size) as new_drafter:
            yield new_drafter
    finally:
        engine._sequences.decoder = replace(decoder)


@contextmanager
def _following(
    engine: Engine, block: DraftStep | AssistantStep, name: str, num_ids: int
) -> Iterator[Callable[[], CostlyDrafter]]:
    frequent = FrequentIds(num_ids, block.limit_ids)
    frequent.use_for(())
    with engine.sequence() as text:
        seconds = block.step_seconds(text.number)
    block.is_on = True
    try:
        yield lambda: BlockDrafter(block, seconds, frequent, name)
    finally:
        block.is_on = False


def _fault_beside(engine: Engine, file: ModelFile) -> str:
    """Why a draft model cannot guess for the engine's; "" if it can."""
    if file.graph.is_assistant:
        fault = why_not_beside(file, engine._live.weights)
    else:
        fault = vocabulary_fault(
            engine.codec.tokenizer,
            engine.model.spec.vocab_size,
            TextCodec.of(file).tokenizer,
            file.spec.vocab_size,
        )
    return f"{file.path}: {fault}" if fault else ""


@contextmanager
def _model_drafters(
    engine: Engine, file: ModelFile, num_texts: int
) -> Iterator[Callable[[], CostlyDrafter]]:
    """The draft model on the CPU, with the main model's context length, up to its own maximum."""
    context_length = min(engine.context_length, file.spec.context_length)
    with Engine.of(
        file, device="cpu", context_length=context_length, num_sequences=num_texts
    ) as draft:
        native = draft._live.native
        limit = native.limit_ids if isinstance(native, NativeStep) else None
        frequent = FrequentIds(min(e.model.spec.vocab_size for e in (engine, draft)), limit)
        yield lambda: DraftModel(draft.sequence(), frequent)
