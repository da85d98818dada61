"""Answers Anthropic's /v1/messages with a chat's output as blocks, whole or as events."""

import json
import secrets
from collections.abc import AsyncIterator, Iterator

from starlette.requests import Request

from hotsplit.runtime.answers.calls import ToolCall
from hotsplit.serve.answers import AnswerBody, Body, Output, timings_of
from hotsplit.serve.api_error import ApiError
from hotsplit.serve.exchange import Exchange, dumps, sse
from hotsplit.serve.service import Service
from hotsplit.serve.text_requests import TextRequest
from hotsplit.serve.texts import Report

_DELTAS = {"thinking": "thinking_delta", "text": "text_delta"}


class MessagesAnswer(AnswerBody):
    """The growing list of blocks: thoughts, texts, calls; only the last is open."""

    end = b""

    def __init__(self, service: Service, asked: TextRequest, request: Request) -> None:
        super().__init__(service, asked, request)
        self._id = f"msg_{secrets.token_hex(12)}"
        self._blocks: list[Body] = []
        self._is_open = False
        self._has_calls = False

    async def whole(self, exchange: Exchange) -> bytes:
        (output,) = await self._outputs(exchange)
        (report,) = self._report()
        for _ in (*self._take(output), *self._close()):
            pass  # the events matter only in a stream
        usage = {"usage": self._usage_of(report), "timings": timings_of([report])}
        return dumps(self._message() | self._stop(report) | usage)

    async def pieces(self, exchange: Exchange) -> AsyncIterator[bytes]:
        has_begun = False
        async for batch in self._batches(exchange):
            found = b"" if has_begun else _event("message_start", message=self._message())
            has_begun = True
            for _, piece in batch:
                found += b"".join(self._take(piece))
            yield found
        (report,) = self._report()
        yield b"".join(self._close())
        usage, delta = self._usage_of(report), self._stop(report)
        yield _event("message_delta", delta=delta, usage=usage, timings=timings_of([report]))
        yield _event("message_stop")

    def failed(self, error: ApiError) -> bytes:
        return sse(error.body(self._request.url.path), event="error")

    def _take(self, piece: Output) -> Iterator[bytes]:
        for part in piece.parts:
            if part.kind == "reasoning":
                yield from self._grow("thinking", part.text)
            elif part.kind == "content":
                yield from self._grow("text", part.text)
            for call in part.calls:
                yield from self._close()
                yield from self._call(call)

    def _grow(self, kind: str, text: str) -> Iterator[bytes]:
        if not text:
            return
        if not self._is_open or self._blocks[-1]["type"] != kind:
            yield from self._close()
            more: Body = {"signature": ""} if kind == "thinking" else {}
            self._blocks.append({"type": kind, kind: "", **more})
            self._is_open = True
            yield self._block_event("start", content_block=self._blocks[-1])
        self._blocks[-1][kind] = f"{self._blocks[-1][kind]}{text}"
        yield self._block_event("delta", delta={"type": _DELTAS[kind], kind: text})

    def _call(self, call: ToolCall) -> Iterator[bytes]:
        self._has_calls = True
        block: Body = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
        self._blocks.append(block)
        yield self._block_event("start", content_block=block)
        delta = {"type": "input_json_delta", "partial_json": call.arguments}
        yield self._block_event("delta", delta=delta)
        block["input"] = json.loads(call.arguments)
        yield self._block_event("stop")

    def _close(self) -> Iterator[bytes]:
        if self._is_open:
            self._is_open = False
            yield self._block_event("stop")

    def _message(self) -> Body:
        """The message so far; that of a stream's beginning counts its prompt."""
        num_prompt = sum(len(ids) for job in self._asked.jobs for ids in [job.ids])
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._service.served.name,
            "content": self._blocks,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": num_prompt, "output_tokens": 0},
        }

    def _stop(self, report: Report) -> Body:
        given = self._asked.settings["stop_sequences"]
        assert isinstance(given, tuple)
        if not report.is_complete:
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if self._has_calls:
            return {"stop_reason": "tool_use", "stop_sequence": None}
        if report.stop in given:
            return {"stop_reason": "stop_sequence", "stop_sequence": report.stop}
        return {"stop_reason": "end_turn", "stop_sequence": None}

    def _usage_of(self, report: Report) -> Body:
        """The tokens of the prompt that were computed, and those that were in the cache."""
        return {
            "input_tokens": report.prompt_tokens - report.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": report.cached_tokens,
            "output_tokens": report.generated_tokens,
        }

    def _block_event(self, what: str, **content: object) -> bytes:
        return _event(f"content_block_{what}", index=len(self._blocks) - 1, **content)


def _event(kind: str, **content: object) -> bytes:
    return sse({"type": kind, **content}, event=kind)
