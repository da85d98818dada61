"""Answers /v1/chat/completions and /v1/completions."""

from collections.abc import AsyncIterator

from starlette.requests import Request

from hotsplit.serve import answers
from hotsplit.serve.exchange import Exchange, sse
from hotsplit.serve.service import Service
from hotsplit.serve.text_requests import TextRequest
from hotsplit.serve.texts import Report


class ChatAnswer(answers.AnswerBody):
    async def whole(self, exchange: Exchange) -> bytes:
        outputs = await self._outputs(exchange)
        head = answers.head_of(self._service, "chatcmpl", "chat.completion") | self._usage()
        choices = (self._choice(index, output) for index, output in enumerate(outputs))
        return await self._dumped(head, choices, is_long=any(o.tokens for o in outputs))

    def _choice(self, index: int, output: answers.Output) -> answers.Body:
        return {
            "index": index,
            "message": answers.message_of(output),
            "logprobs": answers.chat_logprobs(self._service.served, output.tokens),
            "finish_reason": answers.finish_reason(output),
        }

    async def pieces(self, exchange: Exchange) -> AsyncIterator[bytes]:
        self._head = answers.head_of(self._service, "chatcmpl", "chat.completion.chunk")
        has_begun = [False] * len(self._asked.jobs)
        async for batch in self._batches(exchange):
            found = b""
            for number, piece in batch:
                if not has_begun[number]:
                    has_begun[number] = True
                    found += self._chunk(number, {"role": "assistant", "content": ""})
                logprobs = answers.chat_logprobs(self._service.served, piece.tokens)
                delta = answers.delta_of(piece)
                if delta or logprobs:
                    found += self._chunk(number, delta, logprobs)
                if piece.report is not None:
                    found += self._end(number, answers.finish_reason(piece), piece.report)
            yield found
        usage = self._usage()
        if self._asked.has_usage:
            yield sse({**self._head, "choices": [], **usage})

    def _chunk(
        self, number: int, delta: answers.Body, logprobs: answers.Body | None = None
    ) -> bytes:
        choice = {"index": number, "delta": delta, "logprobs": logprobs, "finish_reason": None}
        return sse({**self._head, "choices": [choice], **self._more})

    def _end(self, number: int, reason: str | None, report: Report) -> bytes:
        choice = {"index": number, "delta": {}, "logprobs": None, "finish_reason": reason}
        end = {"timings": answers.timings_of([report]), **self._more}
        return sse({**self._head, "choices": [choice], **end})


class CompletionAnswer(answers.AnswerBody):
    """A whole answer and each chunk of a stream have the same form."""

    def __init__(self, service: Service, asked: TextRequest, request: Request) -> None:
        super().__init__(service, asked, request)
        self._head = answers.head_of(service, "cmpl", "text_completion")

    async def whole(self, exchange: Exchange) -> bytes:
        outputs = await self._outputs(exchange)
        choices = (
            self._choice(number, self._prompt(number) + output.content, output)
            for number, output in enumerate(outputs)
        )
        head = self._head | self._usage()
        return await self._dumped(head, choices, is_long=any(o.tokens for o in outputs))

    async def pieces(self, exchange: Exchange) -> AsyncIterator[bytes]:
        begun = [self._prompt(number) for number in range(len(self._asked.jobs))]
        lengths = [len(prompt) for prompt in begun]
        async for batch in self._batches(exchange):
            found = b""
            for number, piece in batch:
                choice = self._choice(number, begun[number] + piece.content, piece, lengths[number])
                if piece.report is not None:
                    end = {"timings": answers.timings_of([piece.report]), **self._more}
                    found += sse({**self._head, "choices": [choice], **end})
                elif piece.content or piece.tokens:
                    found += sse({**self._head, "choices": [choice], **self._more})
                    begun[number] = ""
                    lengths[number] += len(piece.content)
            yield found
        usage = self._usage()
        if self._asked.has_usage:
            yield sse({**self._head, "choices": [], **usage})

    def _prompt(self, number: int) -> str:
        """The prompt's text if the answer repeats it (`echo`), else ""."""
        if not self._asked.echoes or self._asked.jobs[number].scores:  # whose tokens are said
            return ""
        text, ids = self._asked.prompts[number // self._asked.num_choices]
        return text or self._service.served.codec.tokenizer.decode(ids, skip_special_tokens=False)

    def _choice(
        self, number: int, text: str, output: answers.Output, start: int = 0
    ) -> answers.Body:
        return {
            "index": number,
            "text": text,
            "logprobs": answers.completion_logprobs(self._service.served, output.tokens, start),
            "finish_reason": answers.finish_reason(output),
        }
