"""Answers /v1/completions. Requests are parsed in text_requests."""

from collections.abc import AsyncIterator

from starlette.requests import Request
from starlette.responses import Response

from hotsplit.serve.answers import (
    Answer,
    Body,
    Output,
    answered,
    completion_logprobs,
    finish_reason,
    head_of,
    timings_of,
)
from hotsplit.serve.exchange import Exchange, sse
from hotsplit.serve.service import Service
from hotsplit.serve.text_requests import TextRequest, completion_request


async def completions(service: Service, request: Request) -> Response:
    return await answered(service, request, completion_request, _Answer)


class _Answer(Answer):
    """A whole answer and each chunk of a stream have the same form."""

    def __init__(self, service: Service, asked: TextRequest, request: Request) -> None:
        super().__init__(service, asked, request)
        self._head = head_of(service, "cmpl", "text_completion")

    async def whole(self, exchange: Exchange) -> Body:
        outputs = await self._outputs(exchange)
        choices = [
            self._choice(number, self._prompt(number) + output.content, output)
            for number, output in enumerate(outputs)
        ]
        return {**self._head, "choices": choices, **self._usage()}

    async def pieces(self, exchange: Exchange) -> AsyncIterator[bytes]:
        begun = [self._prompt(number) for number in range(len(self._asked.jobs))]
        lengths = [len(prompt) for prompt in begun]
        async for batch in self._batches(exchange):
            found = b""
            for number, piece in batch:
                choice = self._choice(number, begun[number] + piece.content, piece, lengths[number])
                if piece.report is not None:
                    end = {"timings": timings_of([piece.report]), **self._more}
                    found += sse({**self._head, "choices": [choice], **end})
                elif piece.content or piece.tokens:
                    found += sse({**self._head, "choices": [choice], **self._more})
                    begun[number] = ""
                    lengths[number] += len(piece.content)
            yield found
        usage = self._usage()
        if self._asked.wanted.has_usage:
            yield sse({**self._head, "choices": [], **usage})

    def _prompt(self, number: int) -> str:
        """The prompt's text if the answer repeats it (`echo`), else ""."""
        if not self._asked.echoes:
            return ""
        text, ids = self._asked.prompts[number // self._asked.wanted.count]
        return text or self._service.served.codec.tokenizer.decode(ids, skip_special_tokens=False)

    def _choice(self, number: int, text: str, output: Output, start: int = 0) -> Body:
        return {
            "index": number,
            "text": text,
            "logprobs": completion_logprobs(self._service.served, output.tokens, start),
            "finish_reason": finish_reason(output),
        }
