"""Answers /v1/responses with a chat's output as items, whole or as events."""

import secrets
import time
from collections.abc import AsyncIterator, Iterator
from typing import Literal

from starlette.requests import Request

from hotsplit.runtime.answers.calls import ToolCall
from hotsplit.serve.answers import AnswerBody, Body, Output, timings_of, usage_of
from hotsplit.serve.api_error import ApiError
from hotsplit.serve.exchange import Exchange, dumps, sse
from hotsplit.serve.service import Service
from hotsplit.serve.text_requests import TextRequest
from hotsplit.serve.texts import Report

# Fields of a request that a response repeats, with what they are without one.
_SETTINGS: Body = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "reasoning": None,
    "temperature": None,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_p": None,
    "user": None,
}


class ResponsesAnswer(AnswerBody):
    """The growing list of output items: reasoning, messages, calls; only the last is open."""

    end = b""

    def __init__(self, service: Service, asked: TextRequest, request: Request) -> None:
        super().__init__(service, asked, request)
        self._id, self._created = f"resp_{secrets.token_hex(16)}", int(time.time())
        self._items: list[Body] = []
        self._text = ""  # of the current item
        self._is_open = False
        self._number = -1

    async def whole(self, exchange: Exchange) -> bytes:
        (output,) = await self._outputs(exchange)
        (report,) = self._report()
        for _ in (*self._take(output), *self._close(report)):
            pass  # the events matter only in a stream
        return dumps(self._response(report))

    async def pieces(self, exchange: Exchange) -> AsyncIterator[bytes]:
        try:
            async for batch in self._batches(exchange):
                found = b""
                if self._number < 0:
                    found += self._event("response.created", response=self._body("in_progress"))
                    found += self._event("response.in_progress", response=self._body("in_progress"))
                for _, piece in batch:
                    found += b"".join(self._take(piece))
                yield found
        except ApiError as error:
            if self._number < 0:
                raise
            yield self._event("error", code=error.code, message=error.message, param=error.param)
            return
        (report,) = self._report()
        yield b"".join(self._close(report))
        response = self._response(report)
        yield self._event(f"response.{response['status']}", response=response)

    def _take(self, piece: Output) -> Iterator[bytes]:
        for part in piece.parts:
            if part.kind == "reasoning":
                yield from self._grow("reasoning", part.text)
            elif part.kind == "content":
                yield from self._grow("message", part.text)
            for call in part.calls:
                yield from self._close()
                yield from self._call(call)

    def _close(self, report: Report | None = None) -> Iterator[bytes]:
        """Closes the open item, if there is one, and yields the events for that. `report` is given
        at the end of the answer, which may have cut the item off."""
        if not self._is_open:
            return
        self._is_open = False
        item, place = self._items[-1], self._place()
        item["status"] = "completed" if report is None else _status(report)
        part: Body = {"type": "reasoning_text", "text": self._text}
        if item["type"] == "message":
            part = _text_part(self._text)
            yield self._event(
                "response.output_text.done", **place, content_index=0, text=self._text, logprobs=[]
            )
            yield self._event("response.content_part.done", **place, content_index=0, part=part)
        else:
            yield self._event(
                "response.reasoning_text.done", **place, content_index=0, text=self._text
            )
        item["content"] = [part]
        yield self._item_event("done")

    def _response(self, report: Report) -> Body:
        body = self._body(_status(report))
        if body["status"] == "incomplete":  # OpenAI has this reason for a full context, too
            body["incomplete_details"] = {"reason": "max_output_tokens"}
        usage = usage_of([report], self._num_reasoning)
        body["usage"] = {
            "input_tokens": usage["prompt_tokens"],
            # OpenAI's types require the second, which is for bills.
            "input_tokens_details": {
                "cached_tokens": report.cached_tokens,
                "cache_write_tokens": 0,
            },
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": usage["completion_tokens_details"],
            "total_tokens": usage["total_tokens"],
        }
        body["timings"] = timings_of([report])
        return body

    def _grow(self, kind: str, text: str) -> Iterator[bytes]:
        if not self._is_open or self._items[-1]["type"] != kind:
            yield from self._close()
            yield from self._begin(kind)
        self._text += text
        name = "output_text" if kind == "message" else "reasoning_text"
        more: Body = {"logprobs": []} if kind == "message" else {}
        yield self._event(
            f"response.{name}.delta", **self._place(), content_index=0, delta=text, **more
        )

    def _begin(self, kind: str) -> Iterator[bytes]:
        item: Body = {"type": kind, "status": "in_progress", "content": []}
        if kind == "message":
            item |= {"id": f"msg_{secrets.token_hex(16)}", "role": "assistant"}
        else:
            item |= {"id": f"rs_{secrets.token_hex(16)}", "summary": []}
        self._items.append(item)
        self._is_open, self._text = True, ""
        yield self._item_event("added")
        if kind == "message":
            yield self._event(
                "response.content_part.added", **self._place(), content_index=0, part=_text_part("")
            )

    def _call(self, call: ToolCall) -> Iterator[bytes]:
        item: Body = {
            "type": "function_call",
            "id": f"fc_{secrets.token_hex(16)}",
            "call_id": call.id,
            "name": call.name,
            "arguments": "",
            "status": "in_progress",
        }
        self._items.append(item)
        place = self._place()
        yield self._item_event("added")
        yield self._event("response.function_call_arguments.delta", **place, delta=call.arguments)
        yield self._event(
            "response.function_call_arguments.done",
            **place,
            name=call.name,
            arguments=call.arguments,
        )
        item |= {"arguments": call.arguments, "status": "completed"}
        yield self._item_event("done")

    def _place(self) -> Body:
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}

    def _body(self, status: str) -> Body:
        given = {name: self._asked.settings.get(name) for name in _SETTINGS}
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "model": self._service.served.name,
            "output": self._items,
            "error": None,
            "incomplete_details": None,
            "store": False,
            "previous_response_id": None,
            "truncation": "disabled",
            "usage": None,
            **_SETTINGS,
            **{name: value for name, value in given.items() if value is not None},
        }

    def _item_event(self, what: Literal["added", "done"]) -> bytes:
        index = len(self._items) - 1
        return self._event(f"response.output_item.{what}", output_index=index, item=self._items[-1])

    def _event(self, kind: str, **content: object) -> bytes:
        self._number += 1
        return sse({"type": kind, "sequence_number": self._number, **content}, event=kind)


def _status(report: Report) -> str:
    """The status of a response, and of the item that is open at its end."""
    return "completed" if report.is_complete else "incomplete"


def _text_part(text: str) -> Body:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
