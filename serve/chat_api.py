"""Answers /v1/chat/completions. Requests are parsed in chat_requests."""

from collections.abc import AsyncIterator

from starlette.requests import Request
from starlette.responses import Response

from hotsplit.serve.answers import (
    Body,
    Delta,
    Head,
    Said,
    Voice,
    chat_logprobs,
    delta_of,
    finish_reason,
    message_of,
    timings_of,
    usage_of,
)
from hotsplit.serve.chat_requests import ChatRequest, chat_request
from hotsplit.serve.exchange import EventStream, Exchange, JsonResponse, sse
from hotsplit.serve.service import Service
from hotsplit.serve.texts import Ended, Report


async def chat_completions(service: Service, request: Request) -> Response:
    fields = await service.fields(request)
    chat = await service.prepared(
        lambda: chat_request(fields, service.served, service.config.timeout_s)
    )
    exchange = service.exchange(chat.jobs, is_stream=chat.wanted.is_stream)
    stream = _Stream(service, chat, request)
    if chat.wanted.is_stream:
        return EventStream(exchange, stream.pieces(exchange), service.config.read_s, lambda: None)
    said = await service.while_there(request, exchange, gathered(chat, exchange))
    reports = [text.report for text in said if text.report is not None]
    service.report(request, reports)
    head = Head.of(service.served, "chatcmpl", "chat.completion", service.fingerprint)
    choices = [stream.choice(index, text) for index, text in enumerate(said)]
    return JsonResponse(head.body(choices, usage=usage_of(reports), timings=timings_of(reports)))


async def gathered(chat: ChatRequest, exchange: Exchange) -> list[Said]:
    """Collects the complete outputs of a request's texts."""
    voices = [Voice(chat) for _ in chat.jobs]
    said = [Said() for _ in chat.jobs]
    async for batch in exchange.batches():
        for number, event in batch:
            if isinstance(event, Ended):
                said[number].add(voices[number].finish())
                said[number].report = event.report
            else:
                said[number].add(voices[number].say(event.tokens))
    return said


class _Stream:
    """Builds the answer to one request."""

    def __init__(self, service: Service, chat: ChatRequest, request: Request) -> None:
        self._service, self._chat, self._request = service, chat, request
        self._head = Head.of(
            service.served, "chatcmpl", "chat.completion.chunk", service.fingerprint
        )
        self._more: Body = {"usage": None} if chat.wanted.has_usage else {}

    def choice(self, index: int, said: Said) -> Body:
        assert said.report is not None
        logprobs = chat_logprobs(self._service.served, said.tokens)
        return {
            "index": index,
            "message": message_of(said),
            "logprobs": logprobs,
            "finish_reason": finish_reason(said.report, has_calls=bool(said.calls)),
        }

    async def pieces(self, exchange: Exchange) -> AsyncIterator[bytes]:
        voices = [Voice(self._chat) for _ in self._chat.jobs]
        has_begun = [False] * len(voices)
        reports: dict[int, Report] = {}
        async for batch in exchange.batches():
            found = b""
            for number, event in batch:
                if not has_begun[number]:
                    has_begun[number] = True
                    found += self._chunk(number, {"role": "assistant", "content": ""})
                voice = voices[number]
                if isinstance(event, Ended):
                    reports[number] = event.report
                    found += self._said(number, voice.finish())
                    found += self._end(number, event.report, has_calls=voice.has_calls)
                else:
                    found += self._said(number, voice.say(event.tokens))
            yield found
        ended = [reports[number] for number in sorted(reports)]
        self._service.report(self._request, ended)
        if self._chat.wanted.has_usage:
            yield sse(self._head.body([], usage=usage_of(ended), timings=timings_of(ended)))

    def _said(self, number: int, delta: Delta) -> bytes:
        logprobs = chat_logprobs(self._service.served, delta.tokens)
        content = delta_of(delta)
        return self._chunk(number, content, logprobs) if content or logprobs else b""

    def _chunk(self, number: int, delta: Body, logprobs: Body | None = None) -> bytes:
        choice = {"index": number, "delta": delta, "logprobs": logprobs, "finish_reason": None}
        return sse(self._head.body([choice], **self._more))

    def _end(self, number: int, report: Report, *, has_calls: bool) -> bytes:
        reason = finish_reason(report, has_calls=has_calls)
        choice = {"index": number, "delta": {}, "logprobs": None, "finish_reason": reason}
        return sse(self._head.body([choice], timings=timings_of([report]), **self._more))
