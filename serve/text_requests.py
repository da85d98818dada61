"""Parses completion requests, and the fields that they share with chats, into jobs."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeGuard

from hotsplit.errors import HotsplitError
from hotsplit.options.generation import ENDLESS, GenerationOptions, SamplingOptions
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
from hotsplit.serve.fields import Fields
from hotsplit.serve.sampling_fields import take_sampling, texts_of
from hotsplit.serve.served_model import ServedModel
from hotsplit.serve.texts import Arrival, DeadlineBy, Job

MAX_CHOICES = 16
MAX_STOPS, MAX_STOP_LENGTH = 64, 256
MAX_LOGPROBS = 20
MAX_GRAMMAR_BYTES = 64 << 10
MAX_PROMPTS = 64
# Fields of OpenAI's and llama-server's clients that do not affect an answer's text.
NEUTRAL = (
    "model",
    "user",
    "store",
    "metadata",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "verbosity",
    "prediction",
    "id_slot",
    "timings_per_token",
    "return_tokens",
    "return_progress",
    "sse_ping_interval",
    "n_cache_reuse",
)
# Unsupported fields: the values that turn them off, which llama-server's clients send, and the reason
# given for refusing others.
UNSUPPORTED: tuple[tuple[str, tuple[object, ...], str], ...] = (
    ("n_keep", (0, -1), "the context is not shifted"),
    ("n_discard", (0,), "the context is not shifted"),
    ("n_indent", (0,), "a grammar can require it"),
    ("t_max_predict_ms", (0, -1), "max_tokens and timeout bound an answer"),
    ("post_sampling_probs", (False,), "logprobs are the model's own"),
    ("response_fields", ([],), "an answer has all its fields"),
    ("lora", ([],), "adapters are merged when a model is converted"),
)


@dataclass(frozen=True, kw_only=True)
class Grammar:
    """What each answer to a request must follow, given by its field `param`, in `size` characters."""

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
class Wanted:
    """How each text of a request is generated and returned."""

    count: int  # per prompt
    is_stream: bool
    has_usage: bool  # in a stream
    sampling: SamplingOptions
    options: GenerationOptions
    grammar: Grammar | None
    reuses: bool
    deadline: float
    deadline_by: DeadlineBy
    generates: bool  # tokens beside those of a prompt that it repeats


@dataclass(frozen=True, kw_only=True)
class Syntax:
    """How an answer to a prompt is read, and where a grammar holds in it; without a format, all of it
    is content. `rules` and `splits_reasoning` are those of AnswerReader. `continued`: the message
    that the answer continues."""

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
    """A completion or a chat, ready to be submitted once `with_masks`. `prompts` and `echoes` are a completion's:
    texts ("" if given as ids) with their tokens, and whether its answers repeat them."""

    wanted: Wanted
    jobs: list[Job]
    syntax: Syntax = Syntax()
    prompts: tuple[tuple[str, list[int]], ...] = ()
    echoes: bool = False

    def with_masks(self, grammar: Grammar) -> "TextRequest":
        """The request with the masks of its grammar. May take seconds. Raises ApiError."""
        found = grammar.compiled()
        jobs = [replace(j, mask=self.syntax.mask(found.fork(), j.codec)) for j in self.jobs]
        return replace(self, jobs=jobs)


def completion_request(fields: Fields, served: ServedModel, arrival: Arrival) -> TextRequest:
    """The request of /v1/completions. Raises ApiError."""
    prompts = prompts_of(fields.take("prompt"), served, "prompt", MAX_PROMPTS)
    echoes = fields.flag("echo")
    logprobs = fields.take("logprobs")
    count = _logprobs(logprobs) if logprobs is not False else None
    if (number := fields.whole("n_probs", 0, MAX_LOGPROBS)) is not None and number > 0:
        count = number
    scores = echoes and count is not None
    fields.only("suffix", "", why="fill-in-the-middle is not supported")
    best_of = fields.whole("best_of", 1, MAX_CHOICES)
    wanted = take_wanted(fields, served, count, served.codec, arrival, may_be_empty=scores)
    if best_of not in (None, wanted.count):
        raise wrong("best_of", f"best_of is {best_of}, n is {wanted.count}: both must be the same")
    fields.finish()
    jobs = [
        job for _, ids in prompts for job in jobs_of(served, ids, wanted, served.codec, "prompt")
    ]
    if scores:  # of a prefix that is reused there are no logits
        only = not wanted.generates
        jobs = [replace(job, scores=True, only_scores=only, reuses=False) for job in jobs]
    return TextRequest(wanted=wanted, prompts=tuple(prompts), echoes=echoes, jobs=jobs)


def take_wanted(
    fields: Fields,
    served: ServedModel,
    num_logprobs: int | None,
    codec: TextCodec,
    arrival: Arrival,
    stops: Sequence[str] = (),
    marks: Sequence[tuple[int, str]] = (),
    *,
    may_be_empty: bool = False,
) -> Wanted:
    """Reads the fields shared by completions and chats; `stops` and `marks` are the template's.
    `may_be_empty`: the answer may have no token of its own."""
    fields.ignore(*NEUTRAL)
    for name, values, why in UNSUPPORTED:
        fields.only(name, *values, why=why)
    is_stream = fields.flag("stream")
    stream_options = fields.inner("stream_options")
    has_usage = False
    if stream_options is not None:
        if not is_stream:
            raise wrong("stream_options", "stream_options is only allowed when stream is true")
        has_usage = stream_options.flag("include_usage")
        stream_options.ignore("include_obfuscation", "continuous_usage_stats")
        stream_options.finish()
    count = fields.whole("n", 1, MAX_CHOICES) or fields.whole("n_cmpl", 1, MAX_CHOICES) or 1
    sampling = take_sampling(fields, served.defaults, served.encode_plain, served.vocab_size)
    max_tokens = _max_tokens(fields, served, may_be_empty=may_be_empty)
    options = GenerationOptions(
        max_tokens=max_tokens or 1,
        stops=(*texts_of(fields, "stop", MAX_STOPS, MAX_STOP_LENGTH), *stops),
        ignores_end=fields.flag("ignore_eos"),
        num_logprobs=num_logprobs,
        marks=tuple(marks),
    )
    asked_s = fields.number("timeout")
    if asked_s is not None and asked_s <= 0:
        raise wrong("timeout", f"timeout is {asked_s}, wanted a number over 0, in seconds")
    deadline, deadline_by = arrival.deadline(asked_s)
    return Wanted(
        count=count,
        is_stream=is_stream,
        has_usage=has_usage,
        sampling=sampling,
        options=options,
        grammar=_grammar(fields, codec),
        reuses=fields.flag("cache_prompt", True),
        deadline=deadline,
        deadline_by=deadline_by,
        generates=max_tokens != 0,
    )


def check_room(
    served: ServedModel, ids: Sequence[int], param: str, words: str, num_more: int = 0
) -> None:
    """Refuses no tokens, and more than the context has room for with `num_more` further ones. LiteLLM
    knows the error by the first words."""
    if not ids:
        raise wrong(param, f"{param} has no tokens; give it some text")
    if len(ids) + num_more > served.context_length:
        raise wrong(
            param,
            f"This model's maximum context length is {served.context_length} tokens here;"
            f" {words.format(len(ids))}. Shorten it, or start the server with --context.",
            "context_length_exceeded",
        )


def jobs_of(
    served: ServedModel, ids: list[int], wanted: Wanted, codec: TextCodec, param: str
) -> list[Job]:
    """A job for each choice; with a seed, choice n is drawn with seed + n."""
    check_room(served, ids, param, "the prompt has {}, which leaves no room for an answer", 1)
    jobs = []
    for number in range(wanted.count):
        sampling = wanted.sampling
        if sampling.seed is not None and number:
            sampling = replace(sampling, seed=(sampling.seed + number) % (1 << 64))
        job = Job(
            ids=ids,
            codec=codec,
            draws=served.chain(sampling),
            options=wanted.options,
            deadline=wanted.deadline,
            deadline_by=wanted.deadline_by,
            reuses=wanted.reuses,
        )
        jobs.append(job)
    return jobs


def prompts_of(
    value: object, served: ServedModel, param: str, most: int
) -> list[tuple[str, list[int]]]:
    """Reads a text, its tokens, or a list of either: texts ("" if given as ids) with their tokens.
    Raises ApiError."""
    items = [value] if isinstance(value, str) or _are_ids(value) else value
    if not isinstance(items, list) or not 0 < len(items) <= most:
        raise wrong(param, f"{param}: wanted a text, token ids, or a list of up to {most}")
    found = []
    for item in items:
        if isinstance(item, str):
            served.check_length(item, param)
            found.append((item, served.encode(item, param)))
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


def _logprobs(value: object) -> int | None:
    """Number of most probable tokens to return at each position; None without logprobs."""
    if value is None:
        return None
    if value is True:
        return 1
    if not isinstance(value, int) or not 0 <= value <= MAX_LOGPROBS:
        raise wrong("logprobs", f"logprobs: wanted a whole number, 0 to {MAX_LOGPROBS}")
    return value


def _max_tokens(fields: Fields, served: ServedModel, *, may_be_empty: bool) -> int:
    """The request's limit, under any of its names, but at most the server's."""
    asked = None
    for name in ("max_completion_tokens", "max_tokens", "n_predict"):
        found = fields.whole(name, -1, (1 << 31) - 1)
        if found == 0 and not may_be_empty:
            raise wrong(name, f"{name} is 0, wanted 1 or more")
        asked = found if asked is None else asked
    if asked in (None, ENDLESS):
        return served.max_tokens
    assert asked is not None
    return asked if served.max_tokens == ENDLESS else min(asked, served.max_tokens)


def _grammar(fields: Fields, codec: TextCodec) -> Grammar | None:
    """The grammar of response_format, json_schema or grammar; at most one of them."""
    given = [name for name in ("json_schema", "grammar") if fields.has(name)]
    schema, param = fields.take("json_schema"), "json_schema"
    grammar = fields.text("grammar", MAX_GRAMMAR_BYTES)
    if (shape := fields.inner("response_format")) is not None:
        kind = shape.choice("type", ("text", "json_object", "json_schema"))
        if kind is None:
            raise wrong("response_format.type", "response_format.type is missing")
        if kind != "text":
            given.append("response_format")
            schema, param = _schema(shape, kind), "response_format"
        shape.ignore("type")
        shape.finish()
    if len(given) > 1:
        raise wrong(given[-1], f"{' and '.join(given)} exclude each other; give one")
    if grammar:
        return Grammar(
            param="grammar", size=len(grammar), make=lambda: gbnf_constraint(grammar, codec)
        )
    if schema is None:
        return None
    text = schema if isinstance(schema, str) else json.dumps(schema)
    if len(text.encode("utf-8", "replace")) > MAX_GRAMMAR_BYTES:
        raise wrong(param, f"{param}: the schema has more than {MAX_GRAMMAR_BYTES} bytes")
    return Grammar(param=param, size=len(text), make=lambda: json_schema_constraint(text, codec))


def _schema(shape: Fields, kind: str) -> object:
    if kind == "json_object":  # llama-server: with an optional schema
        return shape.take("schema") or {"type": "object"}
    if shape.has("schema"):
        return shape.take("schema")
    named = shape.inner("json_schema")
    if named is None or not named.has("schema"):
        raise wrong("response_format.json_schema", "response_format.json_schema.schema is missing")
    named.ignore("name", "description", "strict")
    schema = named.take("schema")
    named.finish()
    return schema
