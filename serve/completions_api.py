"""Answers /v1/completions. Requests are parsed in text_requests."""

from collections.abc import AsyncIterator, Sequence

from starlette.requests import Request
from starlette.responses import Response

from hotsplit.runtime.generate.generation import Token
from hotsplit.serve.answers import (
    Answer,
    Body,
    Head,
    answered,
    completion_logprobs,
    finish_reason,
    timings_of,
    usage_of,
)
from hotsplit.serve.exchange import Exchange, sse
from hotsplit.serve.service import Service
from hotsplit.serve.text_requests import TextRequest, completion_request
from hotsplit.serve.texts import Report


async def completions(service: Service, request: Request) -> Response:
    return await answered(service, request, completion_request, _Answer)


class _Answer(Answer):
    """A whole answer and each chunk of a stream have the same form."""

    def __init__(self, service: Service, asked: TextRequest, request: Request) -> None:
        super().__init__(service, asked, request)
        self._head = Head.of(service, "cmpl", "text_completion")

    async def whole(self, exchange: Exchange) -> Body:
        outputs = await self._outputs(exchange)
        choices = [
            self._choice(number, self._prompt(number) + text.content, text.tokens, text.report)
            for number, text in enumerate(outputs)
        ]
        return self._head.body(choices, **self._usage([text.report for text in outputs]))

    async def pieces(self, exchange: Exchange) -> AsyncIterator[bytes]:
        begun = [self._prompt(number) for number in range(len(self._asked.jobs))]
        lengths = [len(prompt) for prompt in begun]
        reports: dict[int, Report] = {}
        async for batch in self._deltas(exchange):
            found = b""
            for number, delta, report in batch:
                text = begun[number] + delta.content
                if report is not None:
                    reports[number] = report
                    choice = self._choice(number, text, (), report)
                    more = {"timings": timings_of([report]), **self._more}
                    found += sse(self._head.body([choice], **more))
                elif delta.content or delta.tokens:
                    choice = self._choice(number, text, delta.tokens, None, lengths[number])
                    found += sse(self._head.body([choice], **self._more))
                    begun[number] = ""
                    lengths[number] += len(delta.content)
            yield found
        ended = [reports[number] for number in sorted(reports)]
        self._service.report(self._request, ended)
        if self._asked.wanted.has_usage:
            yield sse(self._head.body([], **self._usage(ended)))

    def _usage(self, reports: Sequence[Report]) -> Body:
        usage = usage_of(reports, len(self._asked.prompts))
        return {"usage": usage, "timings": timings_of(reports)}

    def _prompt(self, number: int) -> str:
        """The prompt's text if the answer repeats it (`echo`), else ""."""
        if not self._asked.echoes:
            return ""
        text, ids = self._asked.prompts[number // self._asked.wanted.count]
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
