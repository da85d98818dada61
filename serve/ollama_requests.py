"""Converts requests of Ollama's /api/chat and /api/generate to chats and completions."""

from collections import deque
from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import AfterValidator, BeforeValidator, Field

from hotsplit.options.generation_options import ENDLESS
from hotsplit.serve.chat_requests import MAX_MESSAGES, MAX_TOOLS
from hotsplit.serve.other_apis import translated
from hotsplit.serve.request_body import RequestBody, checked, only, texts
from hotsplit.serve.sampling_fields import SamplingBody
from hotsplit.serve.served_model import ServedModel
from hotsplit.serve.text_requests import NumLogprobs, NumTokens, TextRequest, completion_request
from hotsplit.serve.texts import Arrival

_OF_THE_ENGINE = """
num_ctx num_keep num_batch num_gpu num_thread main_gpu low_vram f16_kv vocab_only use_mmap use_mlock
numa penalize_newline tfs_z logits_all embedding_only draft_num_predict
"""


def _endless(count: object) -> object:
    """-1 is until the end, -2 until the context is full; Ollama's runner treats 0 like them."""
    return ENDLESS if type(count) is int and count in (-2, 0) else count


def _format(value: object) -> object:
    if value not in ("", "json") and not isinstance(value, dict):
        raise ValueError('"json" or a schema')
    return value


def _think(value: object) -> object:
    if not isinstance(value, bool) and value not in _EFFORTS:
        raise ValueError(f"true, false, {', '.join(_EFFORTS[:-1])} or {_EFFORTS[-1]}")
    return value


_EFFORTS = ("low", "medium", "high", "max")
_PICTURES = only([], why="this model only reads text")
_PARAMS = {
    "max_completion_tokens": "options.num_predict",
    "stop": "options.stop",
    "response_format": "format",
    "reasoning_effort": "think",
    "top_logprobs": "top_logprobs",
}


class OllamaOptions(SamplingBody):
    """Options of the engine have no effect: those of `hotsplit serve` hold."""

    ignored: ClassVar = frozenset(_OF_THE_ENGINE.split())
    num_predict: Annotated[NumTokens, BeforeValidator(_endless)] | None = None
    stop: Annotated[tuple[str, ...], texts(64, 256)] = ()


class OllamaBody(RequestBody):
    """The fields that both paths have."""

    ignored: ClassVar = frozenset({"model", "keep_alive", "truncate", "shift"})
    stream: bool = True
    format: Annotated[object, AfterValidator(_format)] = None
    options: OllamaOptions = OllamaOptions()
    think: Annotated[object, AfterValidator(_think)] = None
    logprobs: Annotated[object, only(False, why="/v1/chat/completions has them")] = None
    top_logprobs: NumLogprobs | None = None

    def chat(self) -> dict[str, object]:
        """The fields of a chat, except for its messages."""
        given = {name: getattr(self.options, name) for name in SamplingBody.model_fields}
        fields = {name: value for name, value in given.items() if value is not None}
        fields |= {"stream": self.stream, "stop": list(self.options.stop)}
        if self.options.num_predict not in (None, ENDLESS):
            fields["max_completion_tokens"] = self.options.num_predict
        if self.format == "json":
            fields["response_format"] = {"type": "json_object"}
        elif isinstance(self.format, dict):
            fields["response_format"] = {"type": "json_schema", "schema": self.format}
        if isinstance(self.think, bool):
            fields["chat_template_kwargs"] = {"enable_thinking": self.think}
        elif self.think is not None:
            fields["reasoning_effort"] = "xhigh" if self.think == "max" else self.think
        return fields


class OllamaMessage(RequestBody):
    is_open: ClassVar = True
    role: object = None
    content: object = ""
    thinking: str | None = None
    images: Annotated[object, _PICTURES] = None
    tool_calls: list[dict[str, object]] = []
    tool_name: str | None = None


class OllamaChatBody(OllamaBody):
    messages: Annotated[list[OllamaMessage], Field(max_length=MAX_MESSAGES)] = []
    tools: Annotated[list[object], Field(max_length=MAX_TOOLS)] = []
    tool_choice: object = None  # not Ollama's


class OllamaGenerateBody(OllamaBody):
    prompt: str = ""
    suffix: str = ""
    system: str | None = None
    raw: bool = False
    images: Annotated[object, _PICTURES] = None
    template: Annotated[object, only("", why="the server's --chat-template sets it")] = None
    context: Annotated[object, only([], why="send the conversation to /api/chat")] = None


def ollama_chat_request(
    values: Mapping[str, object], served: ServedModel, arrival: Arrival
) -> TextRequest:
    """The request of /api/chat. Raises ApiError."""
    body = checked(OllamaChatBody, values)
    chat = {**body.chat(), "messages": _messages(body.messages), "tools": body.tools}
    chat["tool_choice"] = body.tool_choice
    places = [f"messages[{number}]" for number in range(len(body.messages))]
    return translated(chat, served, arrival, places=places, params=_PARAMS)


def ollama_generate_request(
    values: Mapping[str, object], served: ServedModel, arrival: Arrival
) -> TextRequest:
    """The request of /api/generate: a chat of one question or, if it is raw or has a suffix, a
    completion. Raises ApiError."""
    body = checked(OllamaGenerateBody, values)
    fields = body.chat()
    if body.raw or body.suffix:
        for name in ("chat_template_kwargs", "reasoning_effort"):
            fields.pop(name, None)  # there is no template
        completion = {**fields, "prompt": body.prompt, "suffix": body.suffix}
        return completion_request(completion, served, arrival)
    system = [] if body.system is None else [{"role": "system", "content": body.system}]
    chat = {**fields, "messages": [*system, {"role": "user", "content": body.prompt}]}
    places = ["system"] * len(system) + ["prompt"]
    return translated(chat, served, arrival, places=places, params=_PARAMS)


def is_load(values: Mapping[str, object]) -> bool:
    """True for a request without a text, by which a client has the model loaded."""
    return not any(values.get(name) for name in ("messages", "prompt", "suffix"))


def _messages(items: list[OllamaMessage]) -> list[object]:
    """Messages of a chat. Where calls have no ids and results name the function, each is that of
    the first call that has none yet."""
    messages = list[object]()
    waiting = deque[tuple[object, object]]()  # (id, function's name)
    num_calls = 0
    for item in items:
        message: dict[str, object] = {"role": item.role, "content": item.content, **item.extra}
        if item.thinking is not None:
            message["reasoning_content"] = item.thinking
        calls = []
        for call in item.tool_calls:
            call_id, function = call.get("id") or f"{num_calls:09d}", call.get("function")
            num_calls += 1
            name = function.get("name") if isinstance(function, dict) else None
            waiting.append((call_id, name))
            calls.append({"type": "function", **call, "id": call_id})
        if calls:
            message["tool_calls"] = calls
        if item.role == "tool":
            message |= _named(waiting, item.tool_name, item.extra.get("tool_call_id"))
        messages.append(message)
    return messages


def _named(
    waiting: deque[tuple[object, object]], name: str | None, call_id: object
) -> dict[str, object]:
    own = (pair for pair in waiting if call_id in (None, "", pair[0]))
    fitting = (pair for pair in own if name in (None, pair[1]))
    pair = next(fitting, None)
    if pair is None:
        return {} if name is None else {"name": name}
    waiting.remove(pair)
    return {"tool_call_id": pair[0], "name": pair[1]}
