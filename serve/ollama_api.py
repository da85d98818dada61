"""Answers Ollama's /api/chat, /api/generate, /api/tags, /api/show and /api/version; a stream is
lines of JSON."""

import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from importlib.metadata import version

from starlette.requests import Request
from starlette.responses import Response

from hotsplit.serve.answers import AnswerBody, Body, Output, Parse, answer_to
from hotsplit.serve.api_error import ApiError
from hotsplit.serve.exchange import Exchange, JsonResponse, dumps
from hotsplit.serve.ollama_requests import is_load, ollama_chat_request, ollama_generate_request
from hotsplit.serve.service import Service
from hotsplit.serve.texts import Report


class OllamaAnswer(AnswerBody):
    """An object, or a line for each piece; the last has the numbers."""

    end = b""
    media_type = "application/x-ndjson"

    async def whole(self, exchange: Exchange) -> bytes:
        (output,) = await self._outputs(exchange)
        return dumps(self._head() | self._piece(output) | self._last())

    async def pieces(self, exchange: Exchange) -> AsyncIterator[bytes]:
        async for batch in self._batches(exchange):
            said = [piece for _, piece in batch if piece.content or piece.reasoning or piece.calls]
            yield b"".join(
                _line(self._head() | self._piece(piece) | {"done": False}) for piece in said
            )
        yield _line(self._head() | self._piece(Output()) | self._last())

    def failed(self, error: ApiError) -> bytes:
        return _line(error.body(self._request.url.path))

    def _head(self) -> Body:
        return _head(self._service)

    def _piece(self, output: Output) -> Body:
        raise NotImplementedError

    def _last(self) -> Body:
        (report,) = self._report()
        return {"done": True, "done_reason": _reason(report), **_numbers(report)}


class OllamaChatAnswer(OllamaAnswer):
    def _piece(self, output: Output) -> Body:
        message: Body = {"role": "assistant", "content": output.content}
        if output.reasoning:
            message["thinking"] = output.reasoning
        if output.calls:
            message["tool_calls"] = [
                {"function": {"name": call.name, "arguments": json.loads(call.arguments)}}
                for call in output.calls
            ]
        return {"message": message}


class OllamaGenerateAnswer(OllamaAnswer):
    def _piece(self, output: Output) -> Body:
        more: Body = {"thinking": output.reasoning} if output.reasoning else {}
        return {"response": output.content, **more}


async def ollama_chat(service: Service, request: Request) -> Response:
    return await _answered(service, request, ollama_chat_request, OllamaChatAnswer)


async def ollama_generate(service: Service, request: Request) -> Response:
    return await _answered(service, request, ollama_generate_request, OllamaGenerateAnswer)


async def _answered(
    service: Service, request: Request, parse: Parse, answer_of: type[AnswerBody]
) -> Response:
    arrival = service.arrival()
    fields = await service.fields(request)
    if is_load(fields):  # the model is there
        empty: Body = {"message": {"role": "assistant", "content": ""}, "response": ""}
        return JsonResponse(_head(service) | empty | {"done": True, "done_reason": "load"})
    return await answer_to(service, request, fields, arrival, parse, answer_of)


async def tags(service: Service, request: Request) -> Response:
    """The one model. Its digest, which Ollama takes of a file's content, is not computed."""
    served = service.served
    more = {"name": served.name, "model": served.name, "size": served.num_bytes, "digest": ""}
    return JsonResponse({"models": [more | _details(service)]})


async def show(service: Service, request: Request) -> Response:
    """What clients ask of the one model, by whatever name: its context and what it can do. Its
    chat template is not one of Ollama's, so `template` only has the fields that are read: editors
    look for the suffix there."""
    await service.fields(request)
    served = service.served
    can = {
        "completion": True,
        "tools": not isinstance(served.template, str),
        "insert": served.infill is not None,
    }
    answer = {
        "parameters": f"num_ctx {served.context_length}",
        "template": "{{ .Prompt }}" + "{{ .Suffix }}" * can["insert"],
        "capabilities": [name for name, is_so in can.items() if is_so],
        "model_info": {"general.parameter_count": served.num_parameters},
    }
    return JsonResponse(answer | _details(service))


def _details(service: Service) -> Body:
    served = service.served
    return {
        "modified_at": datetime.fromtimestamp(served.created, UTC).isoformat(),
        "details": {"format": "gguf", "parameter_size": _amount(served.num_parameters)},
    }


async def ollama_version(service: Service, request: Request) -> Response:
    return JsonResponse({"version": version("hotsplit")})


def _head(service: Service) -> Body:
    return {"model": service.served.name, "created_at": datetime.now(UTC).isoformat()}


def _reason(report: Report) -> str:
    return "stop" if report.is_complete else "length"


def _numbers(report: Report) -> Body:
    """Counts, and durations in nanoseconds."""
    total_s = report.queued_s + report.prompt_s + report.generated_s
    return {
        "total_duration": round(1e9 * total_s),
        "load_duration": 0,
        "prompt_eval_count": report.prompt_tokens,
        "prompt_eval_duration": round(1e9 * report.prompt_s),
        "eval_count": report.generated_tokens,
        "eval_duration": round(1e9 * report.generated_s),
    }


def _amount(count: int) -> str:
    return f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.1f}M"


def _line(value: Body) -> bytes:
    return dumps(value) + b"\n"
