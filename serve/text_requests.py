"""Parses completion requests, and the fields that they share with chats, into jobs."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar, Literal, TypeGuard

from pydantic import BeforeValidator, Field

from hotsplit.errors import HotsplitError
from hotsplit.options.generation_options import ENDLESS, GenerationOptions
from hotsplit.runtime.answers.answer_reader import AnswerReader, CallRules
from hotsplit.runtime.answers.formats import AnswerFormat
from hotsplit.runtime.generate.answer_mask import Mask, answer_mask
from hotsplit.runtime.generate.constraints import (
    Constraint,
    gbnf_constraint,
    json_schema_constraint,
)
from hotsplit.runtime.text.codec import TextCodec
from hotsplit.serve.api_error import wrong
from hotsplit.serve.request_body import Number, RequestBody, Whole, checked, only, texts
from hotsplit.serve.sampling_fields import SamplingBody, sampling_of
from hotsplit.serve.served_model import ServedModel
from hotsplit.serve.texts import Arrival, TextJob

MAX_LOGPROBS = 20
MAX_GRAMMAR_BYTES = 64 << 10
MAX_PROMPTS = 64
# Fields of OpenAI's and llama-server's clients that do not affect an answer's text.
NEUTRAL = """
model user store metadata service_tier safety_identifier prompt_cache_key
prompt_cache_retention verbosity prediction id_slot timings_per_token return_tokens
return_progress sse_ping_interval n_cache_reuse
"""
_Choices = Annotated[Whole, Field(ge=1, le=16)]
NumTokens = Annotated[Whole, Field(ge=-1, lt=1 << 31)]
NumLogprobs = Annotated[Whole, Field(ge=0, le=MAX_LOGPROBS)]
_NO_SHIFT = only(0, -1, why="the context is not shifted")


class StreamOptions(RequestBody):
    ignored: ClassVar = frozenset({"include_obfuscation", "continuous_usage_stats"})
    include_usage: bool = False


class NamedSchema(RequestBody):
    ignored: ClassVar = frozenset({"name", "description", "strict"})
    schema_: object = Field(None, alias="schema")


class ResponseFormat(RequestBody):
    type: Literal["text", "json_object", "json_schema"]
    schema_: object = Field(None, alias="schema")  # as llama-server's clients give it
    json_schema: NamedSchema | None = None

    @property
    def given_schema(self) -> object:
        """None for a text. Raises ApiError."""
        if self.type == "text":
            return None
        named = self.json_schema.schema_ if self.json_schema else None
        if self.type == "json_object":
            return self.schema_ or {"type": "object"}
        if self.schema_ is None and named is None:
            place = "response_format.json_schema"
            raise wrong(place, f"{place}.schema is missing")
        return named if self.schema_ is None else self.schema_


class TextBody(SamplingBody):
    """The fields that completions and chats share. Unsupported ones may have the values that turn
    them off, which llama-server's clients send."""

    ignored: ClassVar = frozenset(NEUTRAL.split())
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: _Choices | None = None
    n_cmpl: _Choices | None = None
    max_completion_tokens: NumTokens | None = None
    max_tokens: NumTokens | None = None
    n_predict: NumTokens | None = None
    stop: Annotated[tuple[str, ...], texts(64, 256)] = ()
    ignore_eos: bool = False
    timeout: Annotated[Number, Field(gt=0)] | None = None  # seconds
    cache_prompt: bool = True
    grammar: Annotated[str, Field(max_length=MAX_GRAMMAR_BYTES)] | None = None
    json_schema: object = None
    response_format: ResponseFormat | None = None
    n_keep: Annotated[object, _NO_SHIFT] = None
    n_discard: Annotated[object, _NO_SHIFT] = None
    n_indent: Annotated[object, only(0, why="a grammar can require it")] = None
    t_max_predict_ms: Annotated[object, only(0, -1, why="max_tokens and timeout bound it")] = None
    post_sampling_probs: Annotated[object, only(False, why="logprobs are the model's own")] = None
    response_fields: Annotated[object, only([], why="an answer has all its fields")] = None
    lora: Annotated[object, only([], why="adapters are merged when a model is converted")] = None


def _number_of_logprobs(value: object) -> object:
    return {True: 1, False: None}[value] if isinstance(value, bool) else value


class CompletionBody(TextBody):
    prompt: object = None
    echo: bool = False
    logprobs: Annotated[NumLogprobs | None, BeforeValidator(_number_of_logprobs)] = None
    n_probs: NumLogprobs | None = None
    suffix: str = ""
    best_of: _Choices | None = None


@dataclass(frozen=True, kw_only=True)
class Grammar:
    """What each answer must follow, given by the field `param`, in `size` characters."""

    param: str
    size: int
    make: Callable[[], Constraint]

    def compiled(self) -> Constraint:
        """May take seconds. Raises ApiError."""
        try:
            return self.make()
        except HotsplitError as error:
            raise wrong(self.param, str(error)) from error


@dataclass(frozen=True, kw_only=True)
class Syntax:
    """How an answer to a prompt is read, and where a grammar holds in it; without a format, all of
    it is content. `rules` and `splits_reasoning` are those of AnswerReader. `continued`: the
    message that the answer continues."""

    format: AnswerFormat | None = None
    rules: CallRules | None = None
    splits_reasoning: bool = False
    prompt: str = ""
    continued: str = ""
    has_forced_calls: bool = False

    def reader(self) -> AnswerReader | None:
        if self.format is None:
            return None
        return AnswerReader(
            self.format,
            rules=self.rules,
            splits_reasoning=self.splits_reasoning,
            opened=self.format.opens_reasoning(self.prompt, self.continued),
        )

    def mask(self, constraint: Constraint, codec: TextCodec) -> Mask:
        """The constraint, applied to what follows the reasoning."""
        if self.format is None:
            return constraint
        return answer_mask(
            constraint,
            self.format,
            codec,
            self.prompt,
            continued=self.continued,
            is_of_calls=self.has_forced_calls,
        )


@dataclass(frozen=True, kw_only=True)
class TextRequest:
    """A completion or a chat, ready to be submitted once `with_masks`. `prompts` and `echoes` are a
    completion's: texts ("" if given as ids) with their tokens, and whether its answers repeat them.
    `settings`: the fields of a response's request, of which its answer repeats some."""

    jobs: list[TextJob]
    num_choices: int  # for each prompt
    is_stream: bool
    has_usage: bool  # in a stream
    grammar: Grammar | None
    syntax: Syntax = Syntax()
    prompts: tuple[tuple[str, list[int]], ...] = ()
    echoes: bool = False
    settings: Mapping[str, object] = field(default_factory=dict)

    def with_masks(self, grammar: Grammar) -> "TextRequest":
        """The request with the masks of its grammar. May take seconds. Raises ApiError."""
        found = grammar.compiled()
        jobs = [replace(j, mask=self.syntax.mask(found.fork(), j.codec)) for j in self.jobs]
        return replace(self, jobs=jobs)


def completion_request(
    values: Mapping[str, object], served: ServedModel, arrival: Arrival
) -> TextRequest:
    """The request of /v1/completions. Raises ApiError."""
    body = checked(CompletionBody, values)
    prompts = prompts_of(body.prompt, served, "prompt", MAX_PROMPTS, is_literal=bool(body.suffix))
    if body.suffix:
        after = served.encode_literal(body.suffix, "suffix")
        prompts = [(text, served.infill_prompt(ids, after, "suffix")) for text, ids in prompts]
    count = body.n_probs or body.logprobs
    num_choices = body.n or body.n_cmpl or 1
    if body.best_of not in (None, num_choices):
        line = f"best_of is {body.best_of}, n is {num_choices}: both must be the same"
        raise wrong("best_of", line)
    request = text_request(
        body,
        served,
        arrival,
        [ids for _, ids in prompts],
        "prompt",
        codec=served.codec,
        num_logprobs=count,
        scores=body.echo and count is not None,
    )
    return replace(request, prompts=tuple(prompts), echoes=body.echo)


def text_request(
    body: TextBody,
    served: ServedModel,
    arrival: Arrival,
    prompts: Sequence[list[int]],
    param: str,
    *,
    codec: TextCodec,
    num_logprobs: int | None,
    stops: Sequence[str] = (),
    marks: Sequence[tuple[int, str]] = (),
    scores: bool = False,
) -> TextRequest:
    """A job for each choice of each prompt, which came in the field `param`; with a seed, choice n
    is drawn with seed + n. `stops` and `marks` are the template's. With `scores`, the answer may
    have no token of its own. Raises ApiError."""
    if body.stream_options is not None and not body.stream:
        raise wrong("stream_options", "stream_options is only allowed when stream is true")
    max_tokens = _max_tokens(body, served, may_be_empty=scores)
    options = GenerationOptions(
        max_tokens=max_tokens or 1,
        stops=(*body.stop, *stops),
        ignores_end=body.ignore_eos,
        num_logprobs=num_logprobs,
        marks=tuple(marks),
    )
    sampling = sampling_of(body, served.defaults, served.encode_plain, served.vocab_size)
    grammar = _grammar(body, codec)
    deadline, deadline_by = arrival.deadline(body.timeout)
    num_choices, jobs = body.n or body.n_cmpl or 1, []
    for ids in prompts:
        check_room(served, ids, param, "the prompt has {}, which leaves no room for an answer", 1)
        for number in range(num_choices):
            own = sampling
            if sampling.seed is not None and number:
                own = replace(sampling, seed=(sampling.seed + number) % (1 << 64))
            job = TextJob(
                ids=ids,
                codec=codec,
                draws=served.chain(own),
                options=options,
                deadline=deadline,
                deadline_by=deadline_by,
                reuses=body.cache_prompt and not scores,  # a prefix that is reused has no logits
                scores=scores,
                only_scores=scores and max_tokens == 0,
            )
            jobs.append(job)
    return TextRequest(
        jobs=jobs,
        num_choices=num_choices,
        is_stream=body.stream,
        has_usage=body.stream_options is not None and body.stream_options.include_usage,
        grammar=grammar,
    )


def check_room(
    served: ServedModel, ids: Sequence[int], param: str, words: str, num_more: int = 0
) -> None:
    """Refuses no tokens, and more than the context has room for with `num_more` further ones.
    LiteLLM knows the error by the first words."""
    if not ids:
        raise wrong(param, f"{param} has no tokens; give it some text")
    if len(ids) + num_more > served.context_length:
        raise wrong(
            param,
            f"This model's maximum context length is {served.context_length} tokens here;"
            f" {words.format(len(ids))}. Shorten it, or start the server with --context.",
            "context_length_exceeded",
        )


def prompts_of(
    value: object, served: ServedModel, param: str, most: int, *, is_literal: bool = False
) -> list[tuple[str, list[int]]]:
    """A text, its tokens, or a list of either, as texts ("" if given as ids) with tokens.
    `is_literal`: special tokens in a text are text, and none is added to it."""
    encode = served.encode_literal if is_literal else served.encode
    items = [value] if isinstance(value, str) or _are_ids(value) else value
    if not isinstance(items, list) or not 0 < len(items) <= most:
        raise wrong(param, f"{param}: wanted a text, token ids, or a list of up to {most}")
    found = []
    for item in items:
        if isinstance(item, str):
            served.check_length(item, param)
            found.append((item, encode(item, param)))
        elif _are_ids(item):
            strange = next((i for i in item if not 0 <= i < served.vocab_size), None)
            if strange is not None:
                last = served.vocab_size - 1
                raise wrong(param, f"there is no token {strange}, wanted 0 to {last}")
            found.append(("", item))
        else:
            raise wrong(param, f"{param}: wanted a list of texts, or of lists of token ids")
    return found


def _are_ids(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


def _max_tokens(body: TextBody, served: ServedModel, *, may_be_empty: bool) -> int:
    asked = None
    for name in ("max_completion_tokens", "max_tokens", "n_predict"):
        found = getattr(body, name)
        if found == 0 and not may_be_empty:
            raise wrong(name, f"{name} is 0, wanted 1 or more")
        asked = found if asked is None else asked
    if asked in (None, ENDLESS):
        return served.max_tokens
    assert asked is not None
    return asked if served.max_tokens == ENDLESS else min(asked, served.max_tokens)


def _grammar(body: TextBody, codec: TextCodec) -> Grammar | None:
    schemas = {
        "json_schema": body.json_schema,
        "response_format": body.response_format and body.response_format.given_schema,
    }
    given = [name for name, schema in schemas.items() if schema is not None]
    if body.grammar is not None:
        given.append("grammar")
    if len(given) > 1:
        raise wrong(given[-1], f"{' and '.join(given)} exclude each other; give one")
    if grammar := body.grammar:
        return Grammar(
            param="grammar", size=len(grammar), make=lambda: gbnf_constraint(grammar, codec)
        )
    if not given or body.grammar is not None:
        return None
    schema = schemas[given[0]]
    text = schema if isinstance(schema, str) else json.dumps(schema)
    if len(text.encode("utf-8", "replace")) > MAX_GRAMMAR_BYTES:
        line = f"{given[0]}: the schema has more than {MAX_GRAMMAR_BYTES} bytes"
        raise wrong(given[0], line)
    return Grammar(param=given[0], size=len(text), make=lambda: json_schema_constraint(text, codec))
