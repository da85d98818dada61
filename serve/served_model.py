"""The parts of the model that requests need: tokenizer, chat template, samplers. Thread-safe."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from gguf.vocab import bytes_to_unicode

from hotsplit.errors import HotsplitError
from hotsplit.model.spec import Pooling
from hotsplit.options.generation_options import SamplingOptions
from hotsplit.runtime.answers.call_style import CallStyle
from hotsplit.runtime.answers.formats import DESCRIBED, AnswerFormat, format_for
from hotsplit.runtime.generate.dry import BreakersOf, cached_breakers
from hotsplit.runtime.generate.sampler_chain import SamplerChain, chain_of
from hotsplit.runtime.text.chat_template import ChatTemplate
from hotsplit.runtime.text.codec import TextCodec, check_unicode
from hotsplit.serve.api_error import wrong
from hotsplit.serve.infill_tokens import InfillTokens
from hotsplit.tokens.tokenizer_text import refused

# GPT-2's characters for bytes.
_BYTES = {character: byte for byte, character in bytes_to_unicode().items()}


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """The served model. Without a chat template, `template` is the reason in one line."""

    name: str
    created: int
    codec: TextCodec
    template: ChatTemplate | str
    vocab_size: int
    context_length: int
    trained_context_length: int
    num_parameters: int
    hidden_size: int
    pooling: Pooling | None  # None: the model does not say
    num_bytes: int
    longest_token: int  # in characters
    defaults: SamplingOptions
    max_tokens: int
    call_style: CallStyle  # what the template wants of the calls in earlier messages
    variables: Mapping[str, object] = field(default_factory=dict)  # of the template
    infill: InfillTokens | None = None  # None: the model does not fill in the middle of a text

    def check_length(self, text: str, param: str) -> None:
        """Refuses, before tokenising, a text that cannot fit into the context."""
        most = self.context_length * self.longest_token
        if len(text) > most:
            raise wrong(
                param,
                f"the prompt has {len(text)} characters, and this model's maximum context length is"
                f" {self.context_length} tokens here, which hold at most {most}",
                "context_length_exceeded",
            )

    def encode(self, text: str, param: str = "prompt") -> list[int]:
        """Tokens of a prompt, as `TextCodec.encode` returns them. Raises ApiError."""
        begin = [] if self.codec.begin_id is None else [self.codec.begin_id]
        ids = self._ids(text, param, is_special=True) or begin
        self.codec.warn_of_two_begins(ids)
        return ids

    def encode_plain(self, text: str, param: str = "content") -> list[int]:
        """Tokens of the text, with none added. Raises ApiError."""
        return self._ids(text, param, is_special=False)

    def encode_literal(self, text: str, param: str) -> list[int]:
        """Tokens of a text in which special tokens are text. Raises ApiError."""
        self.check_length(text, param)
        return replace(self, codec=self.codec.literal).encode_plain(text, param)

    def infill_prompt(
        self, before: Sequence[int], after: Sequence[int], param: str, files: Sequence[int] = ()
    ) -> list[int]:
        """The prompt for what goes between two texts; `files` are the tokens of other ones. Raises
        ApiError if the model has no tokens for that; `param` is the field that asks for it."""
        begin = [self.codec.begin_id] if self.codec.adds_begin else []
        tokens = self.infill_tokens(param)
        marked = [tokens.prefix, *before, tokens.suffix, *after, tokens.middle]
        return [*(i for i in begin if i is not None), *files, *marked]

    def infill_tokens(self, param: str) -> InfillTokens:
        """Raises ApiError if the model has none."""
        if self.infill is None:
            raise wrong(
                param,
                f"{param}: this model has no tokens for filling in the middle of a text; send a"
                " prompt alone, or serve a model of code that has some (Qwen2.5-Coder, Granite)",
                "unsupported_value",
            )
        return self.infill

    def _ids(self, text: str, param: str, *, is_special: bool) -> list[int]:
        """`encode` of tokenizers holds the GIL, and so does freeing the offsets that `encode_batch`
        computes: all answers would stand for up to a second per MiB."""
        try:
            check_unicode(text)
            with refused("its tokenizer cannot encode the text"):
                (found,) = self.codec.tokenizer.encode_batch_fast(
                    [text], add_special_tokens=is_special
                )
        except HotsplitError as error:
            raise wrong(param, str(error)) from error
        return found.ids

    def chain(self, sampling: SamplingOptions) -> SamplerChain:
        return chain_of(sampling, self._breakers_of, self.vocab_size)

    @cached_property
    def _breakers_of(self) -> BreakersOf:
        return cached_breakers(self.codec)

    def chat_codec(self) -> tuple[TextCodec, tuple[str, ...]]:
        """(codec whose end tokens end an answer, strings that also end it)."""
        turn_end = None if isinstance(self.template, str) else self.template.turn_end
        return self.format.with_ends(self.codec, turn_end)

    @cached_property
    def format(self) -> AnswerFormat:
        """How the model answers."""
        if isinstance(self.template, str):
            return DESCRIBED
        return format_for(self.template, self.codec)

    @cached_property
    def marks(self) -> tuple[tuple[int, str], ...]:
        """The special tokens, by id, that a reader of an answer has to see."""
        return self.format.tokens_of(self.codec)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token; for an added one, those of its name."""
        tokenizer = self.codec.tokenizer
        name = tokenizer.id_to_token(token_id)
        if name is None:
            return b""
        if token_id in self._added_ids:
            return name.encode()
        if self._is_byte_level:
            return bytes(_BYTES.get(character, 0x3F) for character in name)
        if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
            return bytes([int(name[3:5], 16)])
        return name.replace("\u2581", " ").encode()

    @cached_property
    def _added_ids(self) -> frozenset[int]:
        return frozenset(self.codec.tokenizer.get_added_tokens_decoder())

    @cached_property
    def _is_byte_level(self) -> bool:
        state = self.codec.tokenizer.decoder
        return state is not None and '"ByteLevel"' in json.dumps(
            json.loads(state.__getstate__()), separators=(",", ":")
        )
