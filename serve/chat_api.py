"""Answers /v1/chat/completions. Requests are parsed in chat_requests."""

from collections.abc import AsyncIterator

from starlette.requests import Request
from starlette.responses import Response

from hotsplit.serve.answers import (
    Answer,
    Body,
    Output,
    answered,
    chat_logprobs,
    delta_of,
    finish_reason,
    head_of,
    message_of,
    timings_of,
)
from hotsplit.serve.chat_requests import chat_request
from hotsplit.serve.exchange import Exchange, sse
from hotsplit.serve.service import Service
from hotsplit.serve.texts import Report


async def chat_completions(service: Service, request: Request) -> Response:
    return await answered(service, request, chat_request, _Answer)


class _Answer(Answer):
    async def whole(self, exchange: Exchange) -> Body:
        outputs = await self._outputs(exchange)
        head = head_of(self._service, "chatcmpl", "chat.completion")
        choices = [self._choice(index, output) for index, output in enumerate(outputs)]
        return {**head, "choices": choices, **self._usage()}

    def _choice(self, index: int, output: Output) -> Body:
        return {
            "index": index,
            "message": message_of(output),
            "logprobs": chat_logprobs(self._service.served, output.tokens),
            "finish_reason": finish_reason(output),
        }

    async def pieces(self, exchange: Exchange) -> AsyncIterator[bytes]:
        self._head = head_of(self._service, "chatcmpl", "chat.completion.chunk")
        has_begun = [False] * len(self._asked.jobs)
        async for batch in self._batches(exchange):
            found = b""
            for number, piece in batch:
                if not has_begun[number]:
                    has_begun[number] = True
                    found += self._chunk(number, {"role": "assistant", "content": ""})
                logprobs = chat_logprobs(self._service.served, piece.tokens)
                delta = delta_of(piece)
                if delta or logprobs:
                    found += self._chunk(number, delta, logprobs)
                if piece.report is not None:
                    found += self._end(number, finish_reason(piece), piece.report)
            yield found
        usage = self._usage()
        if self._asked.wanted.has_usage:
            yield sse({**self._head, "choices": [], **usage})

    def _chunk(self, number: int, delta: Body, logprobs: Body | None = None) -> bytes:
        choice = {"index": number, "delta": delta, "logprobs": logprobs, "finish_reason": None}
        return sse({**self._head, "choices": [choice], **self._more})

    def _end(self, number: int, reason: str | None, report: Report) -> bytes:
        choice = {"index": number, "delta": {}, "logprobs": None, "finish_reason": reason}
        end = {"timings": timings_of([report]), **self._more}
        return sse({**self._head, "choices": [choice], **end})
