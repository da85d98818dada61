"""Answers /v1/responses with a chat's output as items, whole or as events. Requests are parsed in
responses_requests."""

import secrets
import time
from collections.abc import AsyncIterator, Iterator

from starlette.requests import Request
from starlette.responses import Response

from hotsplit.serve.answers import Body, Delta, Voice, timings_of, usage_of
from hotsplit.serve.api_error import ApiError
from hotsplit.serve.chat_api import gathered
from hotsplit.serve.exchange import EventStream, Exchange, JsonResponse, sse
from hotsplit.serve.responses_requests import responses_request
from hotsplit.serve.service import Service
from hotsplit.serve.texts import Ended, Report
from hotsplit.serve.tool_calls import ToolCall


async def responses(service: Service, request: Request) -> Response:
    fields = await service.fields(request)
    chat = await service.prepared(
        lambda: responses_request(fields, service.served, service.config.timeout_s)
    )
    exchange = service.exchange(chat.jobs, is_stream=chat.wanted.is_stream)
    answer = _Answer(service, request, Voice(chat))
    if chat.wanted.is_stream:
        return EventStream(
            exchange, answer.pieces(exchange), service.config.read_s, lambda: None, end=b""
        )
    (said,) = await service.while_there(request, exchange, gathered(chat, exchange))
    assert said.report is not None
    for _ in answer.take(Delta(content=said.content, reasoning=said.reasoning, calls=said.calls)):
        pass  # the events matter only in a stream
    for _ in answer.end(said.report):
        pass
    return JsonResponse(answer.whole(said.report))


class _Answer:
    """The growing list of output items: reasoning, messages, tool calls. Only the last can be
    open."""

    def __init__(self, service: Service, request: Request, voice: Voice) -> None:
        self._service, self._request, self._voice = service, request, voice
        self._id, self._created = f"resp_{secrets.token_hex(16)}", int(time.time())
        self._items: list[Body] = []
        self._text = ""  # of the current item
        self._is_open = False
        self._number = -1

    async def pieces(self, exchange: Exchange) -> AsyncIterator[bytes]:
        report: Report | None = None
        try:
            async for batch in exchange.batches():
                found = b""
                if self._number < 0:
                    found += self._event("response.created", response=self._body("in_progress"))
                    found += self._event("response.in_progress", response=self._body("in_progress"))
                for _, event in batch:
                    if isinstance(event, Ended):
                        report = event.report
                        delta = self._voice.finish()
                    else:
                        delta = self._voice.say(event.tokens)
                    found += b"".join(self.take(delta))
                yield found
        except ApiError as error:
            if self._number < 0:
                raise
            yield self._event("error", code=error.code, message=error.message, param=error.param)
            return
        assert report is not None
        yield b"".join(self.end(report))
        whole = self.whole(report)
        yield self._event(f"response.{whole['status']}", response=whole)

    def take(self, delta: Delta) -> Iterator[bytes]:
        """Adds a delta and yields its events."""
        if delta.reasoning:
            yield from self._grow("reasoning", delta.reasoning)
        if delta.content:
            yield from self._grow("message", delta.content)
        for call in delta.calls:
            yield from self.end()
            yield from self._call(call)

    def end(self, report: Report | None = None) -> Iterator[bytes]:
        """Closes the open item, if there is one, and yields the events for that. `report` is given
        at the end of the answer, which may have cut the item off."""
        if not self._is_open:
            return
        self._is_open = False
        item, place = self._items[-1], self._place()
        item["status"] = "completed" if report is None else _status(report)
        part: Body = {"type": "reasoning_text", "text": self._text}
        if item["type"] == "message":
            part = {"type": "output_text", "text": self._text, "annotations": [], "logprobs": []}
            yield self._event("response.output_text.done", **place, content_index=0,
                              text=self._text, logprobs=[])  # fmt: skip
            yield self._event("response.content_part.done", **place, content_index=0, part=part)
        else:
            yield self._event("response.reasoning_text.done", **place, content_index=0,
                              text=self._text)  # fmt: skip
        item["content"] = [part]
        yield self._event(
            "response.output_item.done", output_index=place["output_index"], item=item
        )

    def whole(self, report: Report) -> Body:
        """The complete response, once its last item is closed. Reports the text to the service."""
        self._service.report(self._request, [report])
        body = self._body(_status(report))
        if body["status"] == "incomplete":  # OpenAI has this reason for a full context, too
            body["incomplete_details"] = {"reason": "max_output_tokens"}
        usage = usage_of([report])
        body["usage"] = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        }
        body["timings"] = timings_of([report])
        return body

    def _grow(self, kind: str, text: str) -> Iterator[bytes]:
        if not self._is_open or self._items[-1]["type"] != kind:
            yield from self.end()
            yield from self._begin(kind)
        self._text += text
        name = "output_text" if kind == "message" else "reasoning_text"
        more: Body = {"logprobs": []} if kind == "message" else {}
        yield self._event(f"response.{name}.delta", **self._place(), content_index=0, delta=text,
                          **more)  # fmt: skip

    def _begin(self, kind: str) -> Iterator[bytes]:
        item: Body = {"type": kind, "status": "in_progress", "content": []}
        if kind == "message":
            item |= {"id": f"msg_{secrets.token_hex(16)}", "role": "assistant"}
        else:
            item |= {"id": f"rs_{secrets.token_hex(16)}", "summary": []}
        self._items.append(item)
        self._is_open, self._text = True, ""
        place = self._place()
        yield self._event("response.output_item.added", output_index=place["output_index"],
                          item=item)  # fmt: skip
        if kind == "message":
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            yield self._event("response.content_part.added", **place, content_index=0, part=part)

    def _call(self, call: ToolCall) -> Iterator[bytes]:
        item: Body = {"type": "function_call", "id": f"fc_{secrets.token_hex(16)}",
                      "call_id": call.id, "name": call.name, "arguments": "",
                      "status": "in_progress"}  # fmt: skip
        self._items.append(item)
        place = self._place()
        index = place["output_index"]
        yield self._event("response.output_item.added", output_index=index, item=item)
        yield self._event("response.function_call_arguments.delta", **place, delta=call.arguments)
        yield self._event("response.function_call_arguments.done", **place, name=call.name,
                          arguments=call.arguments)  # fmt: skip
        item |= {"arguments": call.arguments, "status": "completed"}
        yield self._event("response.output_item.done", output_index=index, item=item)

    def _place(self) -> Body:
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}

    def _body(self, status: str) -> Body:
        return {
            "id": self._id, "object": "response", "created_at": self._created, "status": status,
            "model": self._service.served.name, "output": self._items, "error": None,
            "incomplete_details": None, "instructions": None, "metadata": {},
            "parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "temperature": None,
            "top_p": None, "store": False, "previous_response_id": None, "truncation": "disabled",
            "usage": None,
        }  # fmt: skip

    def _event(self, kind: str, **content: object) -> bytes:
        self._number += 1
        return sse({"type": kind, "sequence_number": self._number, **content}, event=kind)


def _status(report: Report) -> str:
    """The status of a response, and of the item that is open at its end."""
    is_whole = report.stopped_by in ("end of text", "stop string")
    return "completed" if is_whole else "incomplete"
