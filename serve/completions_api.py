"""Answers /v1/completions. Requests are parsed in text_requests."""

from collections.abc import AsyncIterator, Sequence

from starlette.requests import Request
from starlette.responses import Response

from hotsplit.runtime.generate.generation import Token
from hotsplit.serve.answers import (
    Body,
    Head,
    Said,
    completion_logprobs,
    finish_reason,
    timings_of,
    usage_of,
)
from hotsplit.serve.exchange import EventStream, Exchange, JsonResponse, sse
from hotsplit.serve.service import Service
from hotsplit.serve.text_requests import TextRequest, completion_request
from hotsplit.serve.texts import Ended, Report


async def completions(service: Service, request: Request) -> Response:
    fields = await service.fields(request)
    text = await service.prepared(
        lambda: completion_request(fields, service.served, service.config.timeout_s)
    )
    exchange = service.exchange(text.jobs, is_stream=text.wanted.is_stream)
    answer = _Answer(service, text, request)
    if text.wanted.is_stream:
        return EventStream(exchange, answer.pieces(exchange), service.config.read_s, lambda: None)
    return JsonResponse(await service.while_there(request, exchange, answer.whole(exchange)))


class _Answer:
    """Builds the answer to one request. A whole answer and each chunk of a stream have the same
    form."""

    def __init__(self, service: Service, text: TextRequest, request: Request) -> None:
        self._service, self._text, self._request = service, text, request
        self._head = Head.of(service.served, "cmpl", "text_completion", service.fingerprint)
        self._more: Body = {"usage": None} if text.wanted.has_usage else {}

    async def whole(self, exchange: Exchange) -> Body:
        said = [Said(content=self._prompt(number)) for number in range(len(self._text.jobs))]
        async for batch in exchange.batches():
            for number, event in batch:
                if isinstance(event, Ended):
                    said[number].report = event.report
                else:
                    said[number].content += _texts(event.tokens)
                    said[number].tokens += _with_logprobs(event.tokens)
        reports = [text.report for text in said if text.report is not None]
        choices = [
            self._choice(number, text.content, text.tokens, text.report)
            for number, text in enumerate(said)
        ]
        return self._head.body(choices, **self._usage(reports))

    async def pieces(self, exchange: Exchange) -> AsyncIterator[bytes]:
        lengths = [len(self._prompt(number)) for number in range(len(self._text.jobs))]
        begun = [self._prompt(number) for number in range(len(lengths))]
        reports: dict[int, Report] = {}
        async for batch in exchange.batches():
            found = b""
            for number, event in batch:
                if isinstance(event, Ended):
                    reports[number] = event.report
                    choice = self._choice(number, begun[number], (), event.report)
                    more = {"timings": timings_of([event.report]), **self._more}
                    found += sse(self._head.body([choice], **more))
                    continue
                text, tokens = _texts(event.tokens), _with_logprobs(event.tokens)
                if text or tokens:
                    choice = self._choice(
                        number, begun[number] + text, tokens, None, lengths[number]
                    )
                    found += sse(self._head.body([choice], **self._more))
                    begun[number] = ""
                    lengths[number] += len(text)
            yield found
        usage = self._usage([reports[number] for number in sorted(reports)])
        if self._text.wanted.has_usage:
            yield sse(self._head.body([], **usage))

    def _usage(self, reports: Sequence[Report]) -> Body:
        self._service.report(self._request, reports)
        usage = usage_of(reports, len(self._text.prompts))
        return {"usage": usage, "timings": timings_of(reports)}

    def _prompt(self, number: int) -> str:
        """The prompt's text if the answer repeats it (`echo`), else ""."""
        if not self._text.echoes:
            return ""
        text, ids = self._text.prompts[number // self._text.wanted.count]
        return text or self._service.served.codec.tokenizer.decode(ids, skip_special_tokens=False)

    def _choice(
        self, number: int, text: str, tokens: Sequence[Token], report: Report | None, start: int = 0
    ) -> Body:
        return {
            "index": number,
            "text": text,
            "logprobs": completion_logprobs(self._service.served, tokens, start),
            "finish_reason": None if report is None else finish_reason(report),
        }


def _texts(tokens: Sequence[Token]) -> str:
    return "".join(token.text for token in tokens)


def _with_logprobs(tokens: Sequence[Token]) -> list[Token]:
    return [token for token in tokens if token.logprob is not None]
