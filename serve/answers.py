"""Answers requests that generate texts, as OpenAI's objects, whole or as chunks of a stream."""

import math
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from starlette.requests import Request
from starlette.responses import Response

from hotsplit.runtime.answers.answer_reader import AnswerPart
from hotsplit.runtime.answers.calls import ToolCall
from hotsplit.runtime.generate.generation import Token
from hotsplit.serve.api_error import ApiError
from hotsplit.serve.exchange import DONE, EventStream, Exchange, dumps, dumps_with, sse, while_there
from hotsplit.serve.served_model import ServedModel
from hotsplit.serve.service import Service
from hotsplit.serve.text_requests import Syntax, TextRequest
from hotsplit.serve.texts import Arrival, Ended, Report

Body = dict[str, object]
Parse = Callable[[Mapping[str, object], ServedModel, Arrival], TextRequest]


@dataclass(kw_only=True)
class Output:
    """The next piece of a text, or all pieces together. `report` comes with the last, as does
    `has_calls`: whether any piece has calls."""

    parts: list[AnswerPart] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)  # those with logprobs
    report: Report | None = None
    has_calls: bool = False

    def add(self, piece: "Output") -> None:
        self.parts += piece.parts
        self.tokens += piece.tokens
        self.report, self.has_calls = piece.report, piece.has_calls

    @property
    def content(self) -> str:
        return "".join(part.text for part in self.parts if part.kind == "content")

    @property
    def reasoning(self) -> str:
        return "".join(part.text for part in self.parts if part.kind == "reasoning")

    @property
    def calls(self) -> list[ToolCall]:
        return [call for part in self.parts for call in part.calls]


class Voice:
    """One text of a request: its tokens become content, reasoning and tool calls."""

    def __init__(self, syntax: Syntax) -> None:
        self._reader = syntax.reader()
        self._num_undecided = 0  # tokens of the text that the reader holds
        self.num_reasoning = 0  # tokens of the reasoning so far, marks included

    def say(self, tokens: Sequence[Token]) -> Output:
        parts = [part for token in tokens for part in self._parts(token)]
        with_logprobs = [token for token in tokens if token.logprob is not None]
        return Output(parts=parts, tokens=with_logprobs)

    def finish(self, report: Report | None = None) -> Output:
        """Flushes the held-back text, once the text has ended."""
        if self._reader is None:
            return Output(report=report)
        parts = self._reader.flush(is_cut=report is not None and not report.is_complete)
        return Output(parts=parts, report=report, has_calls=self._reader.has_calls)

    def _parts(self, token: Token) -> list[AnswerPart]:
        if self._reader is None:
            return [AnswerPart(kind="content", text=token.text)] if token.text else []
        was_inside = self._reader.inside is not None
        parts = self._reader.push(token.text)
        self._num_undecided += token.id is not None
        is_reasoning = was_inside or self._reader.inside is not None
        if is_reasoning:
            self.num_reasoning += self._num_undecided
        if is_reasoning or not self._reader.is_holding:
            self._num_undecided = 0
        return parts


class AnswerBody(ABC):
    """The answer to one request, whole or as pieces of a stream that `end` ends."""

    end: ClassVar[bytes] = DONE
    media_type: ClassVar[str] = "text/event-stream; charset=utf-8"

    def __init__(self, service: Service, asked: TextRequest, request: Request) -> None:
        self._service, self._asked, self._request = service, asked, request
        self._more: Body = {"usage": None} if asked.has_usage else {}
        self._reports: dict[int, Report] = {}  # of the texts that have ended, by index
        self._num_reasoning = 0  # tokens of these texts

    @abstractmethod
    async def whole(self, exchange: Exchange) -> bytes:
        """The answer as JSON."""

    @abstractmethod
    def pieces(self, exchange: Exchange) -> AsyncIterator[bytes]: ...

    def failed(self, error: ApiError) -> bytes:
        """The piece of a stream that says why it ends early."""
        return sse(error.body(self._request.url.path))

    async def _batches(self, exchange: Exchange) -> AsyncIterator[list[tuple[int, Output]]]:
        """Yields new pieces of texts, each with the text's index."""
        voices = [Voice(self._asked.syntax) for _ in self._asked.jobs]
        async for batch in exchange.batches():
            pieces = []
            for number, event in batch:
                if isinstance(event, Ended):
                    self._reports[number] = event.report
                    pieces.append((number, voices[number].finish(event.report)))
                    self._num_reasoning += voices[number].num_reasoning
                else:
                    pieces.append((number, voices[number].say(event.tokens)))
            yield pieces

    async def _outputs(self, exchange: Exchange) -> list[Output]:
        """Collects the complete outputs of all texts."""
        outputs = [Output() for _ in self._asked.jobs]
        async for batch in self._batches(exchange):
            for number, piece in batch:
                outputs[number].add(piece)
        return outputs

    async def _dumped(self, head: Body, choices: Iterable[Body], *, is_long: bool) -> bytes:
        """A whole answer as JSON. A long one, with logprobs, is built in another thread."""

        def build() -> bytes:
            return dumps_with(head, "choices", map(dumps, choices))

        return await self._service.prepared(build) if is_long else build()

    def _report(self) -> list[Report]:
        reports = [self._reports[number] for number in sorted(self._reports)]
        self._service.report(self._request, reports)
        return reports

    def _usage(self) -> Body:
        reports = self._report()
        usage = usage_of(reports, self._num_reasoning, len(self._asked.prompts) or 1)
        return {"usage": usage, "timings": timings_of(reports)}


async def answered(
    service: Service, request: Request, parse: Parse, answer_of: type[AnswerBody]
) -> Response:
    """Reads a request and answers it."""
    arrival = service.arrival()
    fields = await service.fields(request)
    return await answer_to(service, request, fields, arrival, parse, answer_of)


async def answer_to(
    service: Service,
    request: Request,
    fields: Mapping[str, object],
    arrival: Arrival,
    parse: Parse,
    answer_of: type[AnswerBody],
) -> Response:
    """Parses a request, submits its texts and answers it, as a stream if it asks for one."""
    asked = await service.prepared(lambda: parse(fields, service.served, arrival))
    if asked.grammar is not None:
        masked = service.with_masks(asked, asked.grammar)
        asked = await while_there(request.receive, masked)
    exchange = service.exchange(asked.jobs, is_stream=asked.is_stream)
    answer = answer_of(service, asked, request)
    if asked.is_stream:
        pieces = answer.pieces(exchange)
        return EventStream(
            exchange,
            pieces,
            service.config.read_s,
            failed=answer.failed,
            end=answer.end,
            media_type=answer.media_type,
        )
    try:
        body = await while_there(request.receive, answer.whole(exchange))
        return Response(body, media_type="application/json")
    finally:
        exchange.cancel()


def head_of(service: Service, prefix: str, kind: str) -> Body:
    """The fields that an answer, or each of its chunks, begins with."""
    return {
        "id": f"{prefix}-{secrets.token_hex(12)}",
        "object": kind,
        "created": int(time.time()),
        "model": service.served.name,
        "system_fingerprint": service.fingerprint,
    }


def finish_reason(output: Output) -> str | None:
    """None if the text goes on. A limit that ends it counts more than calls, the last of which may
    be missing; so it is in llama-server."""
    if output.report is None:
        return None
    if not output.report.is_complete:
        return "length"
    return "tool_calls" if output.has_calls else "stop"


def usage_of(reports: Sequence[Report], num_reasoning: int, num_prompts: int = 1) -> Body:
    """Token usage. A prompt counts once, even with several answers to it."""
    each = len(reports) // num_prompts
    prompts = reports[::each]
    prompt = sum(report.prompt_tokens for report in prompts)
    generated = sum(report.generated_tokens for report in reports)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": sum(r.cached_tokens for r in prompts)},
        "completion_tokens_details": {"reasoning_tokens": num_reasoning},
    }


def timings_of(reports: Sequence[Report]) -> Body:
    """Timings with llama-server's names, and `queued_ms`; for several texts, from their sums."""
    cached = sum(report.cached_tokens for report in reports)
    prompt_n = sum(report.prompt_tokens for report in reports) - cached
    predicted_n = sum(report.generated_tokens for report in reports)
    prompt_ms = 1e3 * sum(report.prompt_s for report in reports)
    predicted_ms = 1e3 * sum(report.generated_s for report in reports)
    drafted = sum(report.drafted_tokens for report in reports)
    accepted = sum(report.accepted_tokens for report in reports)
    return {
        "cache_n": cached,
        "prompt_n": prompt_n,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": _ratio(prompt_ms, prompt_n),
        "prompt_per_second": _ratio(1e3 * prompt_n, prompt_ms),
        "predicted_n": predicted_n,
        "predicted_ms": predicted_ms,
        "predicted_per_token_ms": _ratio(predicted_ms, predicted_n),
        "predicted_per_second": _ratio(1e3 * predicted_n, predicted_ms),
        "queued_ms": 1e3 * sum(report.queued_s for report in reports),
        **({"draft_n": drafted, "draft_n_accepted": accepted} if drafted else {}),
    }


def _ratio(a: float, b: float) -> float:
    return a / b if b else 0.0


def message_of(output: Output) -> Body:
    content, calls = output.content, output.calls
    message: Body = {"role": "assistant", "content": content, "refusal": None}
    if reasoning := output.reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["content"] = content or None
        message["tool_calls"] = [call.body() for call in calls]
    return message


def delta_of(piece: Output) -> Body:
    found: Body = {}
    if content := piece.content:
        found["content"] = content
    if reasoning := piece.reasoning:
        found["reasoning_content"] = reasoning
    if calls := piece.calls:
        found["tool_calls"] = [call.body(has_index=True) for call in calls]
    return found


def chat_logprobs(served: ServedModel, tokens: Sequence[Token]) -> Body | None:
    """Logprobs in the chat format: each token's bytes and logprob, and the alternatives'."""
    if not tokens:
        return None
    content = []
    for token in tokens:
        assert token.id is not None and token.logprob is not None
        content.append(
            _logprob(served, token.id, token.logprob)
            | {"top_logprobs": [_logprob(served, i, logprob) for i, logprob in token.logprobs]}
        )
    return {"content": content, "refusal": None}


def _logprob(served: ServedModel, token_id: int, logprob: float) -> Body:
    found = served.token_bytes(token_id)
    text = found.decode("utf-8", "replace")
    return {"id": token_id, "token": text, "logprob": _finite(logprob), "bytes": list(found)}


def _finite(logprob: float) -> float:
    """Replaces -inf, which JSON lacks, with the value that OpenAI sends."""
    return max(logprob, -9999.0)


def _is_unpredicted(token: Token) -> bool:
    """True for the first token of a prompt."""
    return token.logprob is not None and math.isnan(token.logprob)


def completion_logprobs(served: ServedModel, tokens: Sequence[Token], start: int) -> Body | None:
    """Logprobs in OpenAI's older completions format. `start`: characters before the first token."""
    if not tokens:
        return None
    names, offsets = [], []
    for token in tokens:
        assert token.id is not None
        names.append(served.token_bytes(token.id).decode("utf-8", "replace"))
        offsets.append(start)
        start += len(token.text)
    return {
        "tokens": names,
        "token_logprobs": [
            None if _is_unpredicted(token) else _finite(token.logprob or 0.0) for token in tokens
        ],
        "top_logprobs": [
            None
            if _is_unpredicted(token)
            else {
                served.token_bytes(i).decode("utf-8", "replace"): _finite(logprob)
                for i, logprob in token.logprobs
            }
            for token in tokens
        ],
        "text_offset": offsets,
    }
