"""A conversation with a model: its messages, and the sequence that holds their tokens.

    with engine.chat(system="Be brief.") as chat:
        for token in chat.say("Hello"):
            print(token.text, end="")

Each turn renders the messages again and computes only the tokens after the common prefix with the
sequence."""

import json
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

from hotsplit.errors import HotsplitError
from hotsplit.files.atomic import partial_file
from hotsplit.files.json_file import read_object
from hotsplit.files.typed import one_line, shown
from hotsplit.options.generation_options import GenerationOptions
from hotsplit.options.kinds import check_fields, kinds_checked
from hotsplit.runtime.answers.answer_reader import AnswerPart, AnswerReader
from hotsplit.runtime.answers.formats import format_for
from hotsplit.runtime.device.device_memory import out_of_memory_as_error
from hotsplit.runtime.generate.answer_mask import Mask, answer_mask
from hotsplit.runtime.generate.constraints import Constraint
from hotsplit.runtime.generate.generation import ENDLESS, Generation, Run, Token, num_common
from hotsplit.runtime.generate.sampler_chain import SamplerChain
from hotsplit.runtime.generate.speculation import Speculation
from hotsplit.runtime.ops.neurons.feed_forward import Traffic
from hotsplit.runtime.step.sequences import Sequence as TextSequence
from hotsplit.runtime.text.chat_template import ChatTemplate, Message
from hotsplit.runtime.text.codec import TextCodec

FORMAT, VERSION = "hotsplit-chat", 1
# Tokens of a piece. A longer prompt is computed in pieces, so the caller can stop between them.
PIECE = 512


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """Options of a conversation. `variables`: template variables besides the messages, e.g.
    enable_thinking. `drops_oldest`: when the messages take more than three quarters of the context,
    the oldest turns are no longer rendered; without it, a conversation that fills the context is an
    error."""

    generation: GenerationOptions = field(
        default_factory=lambda: GenerationOptions(max_tokens=ENDLESS)
    )
    tools: tuple[Mapping[str, object], ...] | None = None
    variables: Mapping[str, object] = field(default_factory=dict)
    drops_oldest: bool = False

    def __post_init__(self) -> None:
        check_fields(self)


class Conversation:
    """A conversation. `chain` samples the tokens; `new_mask` creates the constraint of each answer.
    `messages` has all messages but the system message, which is `system`; both may be changed
    between turns. An answer's reasoning is in a field of its own, `reasoning_content`, and its
    tokens are marked as such; the marks around it have no text.

    `run` has the statistics of the latest answer. A `with` block closes the sequence and the
    template."""

    def __init__(
        self,
        sequence: TextSequence,
        codec: TextCodec,
        template: ChatTemplate,
        traffic: Traffic,
        chain: SamplerChain,
        *,
        system: str | None = None,
        options: ChatOptions | None = None,
        new_mask: Callable[[], Constraint] | None = None,
        drafts: Speculation | None = None,
    ) -> None:
        self.system, self.messages = system, list[dict[str, object]]()
        self.options = options or ChatOptions()
        self.run = Run()
        self.num_dropped = 0  # messages at the beginning that are no longer rendered
        self._sequence, self._template, self._traffic = sequence, template, traffic
        self._chain, self._new_mask, self._drafts = chain, new_mask, drafts
        self._format = format_for(template, codec)
        self._codec, stops = self._format.with_ends(codec, template.turn_end)
        asked = self.options.generation
        self._generation = replace(
            asked, stops=(*asked.stops, *stops), marks=self._format.tokens_of(codec)
        )

    @property
    def num_tokens(self) -> int:
        """Tokens in the cache."""
        return self._sequence.length

    @property
    def context_length(self) -> int:
        return self._sequence.length + self._sequence.room

    @kinds_checked
    def say(self, text: str) -> Generator[Token, None, None]:
        """Yields the answer to a message. If the caller stops early, the partial answer is kept, or
        the message removed if the answer is empty.

        Raises HotsplitError if the template rejects the messages or the context has no room for
        them; the conversation is then unchanged."""
        count = len(self.messages)
        self.messages.append({"role": "user", "content": text})
        try:
            yield from self.answer()
        finally:
            if len(self.messages) == count + 1:
                del self.messages[count:]

    def answer(self) -> Generator[Token, None, None]:
        """Yields the answer to the present messages and appends it to them; otherwise like
        `say`."""
        rendered, ids = self._prompt()
        mask: Mask | None = None
        if self._new_mask is not None:
            mask = answer_mask(self._new_mask(), self._format, self._codec, rendered)
        given = self._codec, self._chain, self._generation, self._traffic, mask, self._drafts
        generation = Generation(self._sequence, ids, *given)
        self.run = generation.run
        reader = AnswerReader(self._format, opened=self._format.opens_reasoning(rendered))
        said: list[AnswerPart] = []
        try:
            for token in self._computed(generation):
                said += (parts := reader.push(token.text))
                yield from _tokens(parts, token)
            said += (parts := reader.flush())
            yield from _tokens(parts)
        finally:
            if self._sequence.is_open:  # drops an unfinished step if interrupted
                self._sequence.rollback(self._sequence.length)
            self._keep([*said, *reader.flush()], is_over=generation.is_over)

    def _keep(self, said: Sequence[AnswerPart], *, is_over: bool) -> None:
        """Appends the answer to the messages, unless it was stopped before its first text."""
        content = "".join(part.text for part in said if part.kind == "content")
        reasoning = "".join(part.text for part in said if part.kind == "reasoning")
        if content or reasoning or is_over:
            thoughts = {"reasoning_content": reasoning} if reasoning else {}
            self.messages.append({"role": "assistant", "content": content, **thoughts})

    def regenerate(self) -> Generator[Token, None, None]:
        """Yields another answer in place of the last one, which is kept if the new one is stopped
        before its first text.

        Raises HotsplitError if there is no answer yet."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            raise HotsplitError("there is no answer yet to regenerate")
        old = self.messages.pop()
        count = len(self.messages)
        try:
            yield from self.answer()
        finally:
            if len(self.messages) == count:
                self.messages.append(old)

    def undo(self) -> str:
        """Removes the user's last message and everything after it; returns its text.

        Raises HotsplitError if there is no such message."""
        asked = [n for n, message in enumerate(self.messages) if message["role"] == "user"]
        if not asked:
            raise HotsplitError("there is no message to take back")
        text = str(self.messages[asked[-1]].get("content", ""))
        del self.messages[asked[-1] :]
        self.num_dropped = min(self.num_dropped, len(self.messages))
        return text

    def reset(self) -> None:
        """Forgets all messages but the system message."""
        self.messages.clear()
        self.num_dropped = 0

    @kinds_checked
    def save(self, path: str | Path) -> None:
        """Writes the messages as JSON, atomically. Raises HotsplitError if the file cannot be
        written, or exists and is not a saved conversation."""
        path = Path(path)
        if path.exists():
            try:
                _read(path)
            except HotsplitError:
                raise HotsplitError(
                    f"{path}: exists and is not a saved conversation; give another name"
                ) from None
        content = {
            "format": FORMAT,
            "version": VERSION,
            "system": self.system,
            "messages": self.messages,
        }
        try:
            text = json.dumps(content, ensure_ascii=False, indent=1) + "\n"
            with partial_file(path) as partial:
                partial.write_text(text, encoding="utf-8")
        except (OSError, UnicodeError) as error:  # a name that the system cannot have
            why = error.strerror if isinstance(error, OSError) else one_line(error)
            raise HotsplitError(f"{shown(str(path))}: cannot be written: {why}") from error

    @kinds_checked
    def load(self, path: str | Path) -> None:
        """Replaces the conversation with one that `save` wrote. Raises HotsplitError for any other
        file; the conversation is then unchanged."""
        self.system, self.messages = _read(Path(path))
        self.num_dropped = 0

    def close(self) -> None:
        self._sequence.close()
        self._template.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _prompt(self) -> tuple[str, list[int]]:
        """(text, tokens) of the messages, except dropped turns, and of the answer's header. Raises
        HotsplitError if they leave no room for an answer."""
        context, options = self.context_length, self.options
        numbered = enumerate(self.messages[self.num_dropped :], start=self.num_dropped)
        turns = [number for number, message in numbered if message["role"] == "user"]
        system: list[Message] = []
        if self.system is not None:
            system = [{"role": "system", "content": self.system}]
        for dropped in (self.num_dropped, *(turns[1:] if options.drops_oldest else ())):
            messages = [*system, *self.messages[dropped:]]
            rendered = self._template.render(
                messages, tools=options.tools, variables=options.variables
            )
            ids = self._codec.encode_rendered(rendered)
            if len(ids) <= context - context // 4:
                break
        if not ids:
            raise HotsplitError("the chat template renders these messages to an empty text")
        if len(ids) >= context:
            raise HotsplitError(
                f"the conversation has {len(ids)} tokens for a context of {context}: begin another"
                " (/reset), take messages back (/undo), or load with a longer context (-c) or with"
                " --context-shift, which leaves out the oldest messages"
            )
        self.num_dropped = dropped
        return rendered, ids

    def _computed(self, generation: Generation) -> Generator[Token, None, None]:
        """Yields the answer's tokens."""
        sequence, ids = self._sequence, generation.ids
        known = sequence.reusable(num_common(sequence.ids, ids[:-1]))
        sequence.rollback(known)
        seconds, is_first = 0.0, True
        with out_of_memory_as_error():
            for start in range(known, len(ids) - PIECE, PIECE):
                began = time.perf_counter()
                sequence.extend(ids[start : start + PIECE], "none")
                seconds += time.perf_counter() - began
                yield Token(None, "")
            with closing(generation.tokens()) as tokens:
                for token in tokens:
                    if is_first:
                        self.run.cached_tokens = known
                        self.run.prefill_s += seconds
                        is_first = False
                    yield token


def _tokens(parts: Sequence[AnswerPart], token: Token | None = None) -> Iterator[Token]:
    """The token with the text of the first part, and one without an id for each further part."""
    texts = [(part.text, part.kind == "reasoning") for part in parts if part.kind != "markup"]
    if token is not None:
        text, is_reasoning = texts.pop(0) if texts else ("", False)
        yield replace(token, text=text, is_reasoning=is_reasoning)
    for text, is_reasoning in texts:
        yield Token(None, text, is_reasoning=is_reasoning)


def _read(path: Path) -> tuple[str | None, list[dict[str, object]]]:
    content = read_object(path, "saved conversation")
    if content.get("format") != FORMAT or content.get("version") != VERSION:
        found = f"{content.get('format')!r} {content.get('version')!r}"[:80]
        raise HotsplitError(f"{path}: is {found}, wanted {FORMAT!r} {VERSION}, as /save writes it")
    unknown = sorted(content.keys() - {"format", "version", "system", "messages"})
    system, messages = content.get("system"), content.get("messages")
    is_known = isinstance(messages, list) and all(
        isinstance(message, dict)
        and isinstance(message.get("role"), str)
        and isinstance(message.get("content"), str | list)
        for message in messages
    )
    if unknown or not is_known or not (system is None or isinstance(system, str)):
        what = f"has the unknown key {shown(unknown[0])}" if unknown else "has malformed messages"
        raise HotsplitError(f"{path}: {what}; wanted a conversation as /save writes it")
    assert isinstance(messages, list)
    return system, messages
