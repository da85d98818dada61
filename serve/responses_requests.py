"""Converts /v1/responses requests to chat requests: items to messages, fields to fields.

Nothing is stored here, so references to an earlier response are refused."""

import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, ClassVar, Literal, TypeGuard

from pydantic import Field

from hotsplit.serve.api_error import wrong
from hotsplit.serve.chat_requests import MAX_TOOLS
from hotsplit.serve.other_apis import translated
from hotsplit.serve.request_body import RequestBody, Whole, checked, only
from hotsplit.serve.served_model import ServedModel
from hotsplit.serve.text_requests import TextRequest
from hotsplit.serve.texts import Arrival

log = logging.getLogger("hotsplit.serve")
MAX_ITEMS = 4096
_REFERS = "nothing is stored here; send the whole conversation as input"
# Fields of a chat that have another name in this API.
_PARAMS = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
}
# Belongs to items that no answer here has.
_Included = Literal[
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
    "file_search_call.results",
    "code_interpreter_call.outputs",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
]


class TextFormat(RequestBody):
    ignored: ClassVar = frozenset({"name", "description", "strict"})
    type: Literal["text", "json_object", "json_schema"] = "text"
    schema_: object = Field(None, alias="schema")


class TextSettings(RequestBody):
    ignored: ClassVar = frozenset({"verbosity"})
    format: TextFormat | None = None


class ReasoningSettings(RequestBody):
    ignored: ClassVar = frozenset({"summary", "generate_summary"})
    effort: object = None


class ResponsesBody(RequestBody):
    """The fields that a chat does not have under the same name; the chat checks the others."""

    is_open: ClassVar = True
    previous_response_id: Annotated[object, only(why=_REFERS)] = None
    conversation: Annotated[object, only(why=_REFERS)] = None
    prompt: Annotated[object, only(why="there are no stored prompts here")] = None
    background: Annotated[object, only(False, why="a response is sent on its connection")] = None
    truncation: Literal["auto", "disabled"] | None = None  # what is too long is refused
    client_metadata: object = None
    include: Annotated[list[_Included], Field(max_length=64)] = []
    max_tool_calls: Annotated[object, only(why="tools are called by the client")] = None
    n: Annotated[object, only(1, why="a response has one answer")] = None
    top_logprobs: Annotated[object, only(0, why="/v1/chat/completions has logprobs")] = None
    instructions: str | None = None
    input: object = None
    max_output_tokens: Annotated[Whole, Field(ge=1, lt=1 << 31)] | None = None
    tools: Annotated[list[object], Field(max_length=MAX_TOOLS)] = []
    text: TextSettings = TextSettings()
    reasoning: ReasoningSettings = ReasoningSettings()


def responses_request(
    values: Mapping[str, object], served: ServedModel, arrival: Arrival
) -> TextRequest:
    """Parses a request as a chat. Raises ApiError if it is invalid or has no equivalent chat."""
    body = checked(ResponsesBody, values)
    chat, places = chat_fields(body)
    request = translated(chat, served, arrival, places=places, params=_PARAMS)
    functions = [t for t in body.tools if isinstance(t, dict) and t["type"] == "function"]
    defaults = {name: getattr(served.defaults, name) for name in ("temperature", "top_p")}
    given = {name: value for name, value in values.items() if value is not None}
    return replace(request, settings={**defaults, **given, "tools": functions})


def chat_fields(body: ResponsesBody) -> tuple[dict[str, object], list[str]]:
    """(the fields of the chat that a response is, its messages' places in the request)."""
    messages, places = _messages(body.input, body.instructions)
    chat: dict[str, object] = {
        "messages": messages,
        "max_completion_tokens": body.max_output_tokens,
        "tools": _tools(body.tools),
        "reasoning_effort": body.reasoning.effort,
    }
    if (shape := body.text.format) is not None:
        chat["response_format"] = {"type": shape.type, "schema": shape.schema_}
    return chat | body.extra, places


def _messages(items: object, instructions: str | None) -> tuple[list[object], list[str]]:
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    if not isinstance(items, list) or not 0 < len(items) <= MAX_ITEMS:
        raise wrong("input", f"input: wanted a text, or a list of 1 to {MAX_ITEMS} items")
    messages: list[object] = []
    places: list[str] = []
    rules = [] if instructions is None else [_part(instructions)]
    thought = ""  # belongs to the answer or call that follows it
    for number, item in enumerate(items):
        if _is_rule(item):
            content = item.get("content")
            if not isinstance(content, str | list):
                place = f"input[{number}].content"
                raise wrong(place, f"{place}: wanted a text or a list of parts")
            rules += [_part(content)] if isinstance(content, str) else content
        else:
            _add(messages, item, f"input[{number}]")
            places += [f"input[{number}]"] * (len(messages) - len(places))
            last = messages[-1] if messages else None
            if thought and isinstance(last, dict) and last["role"] == "assistant":
                last.setdefault("reasoning_content", thought)
            thought = _thought(item)
    if rules:
        return [{"role": "system", "content": rules}, *messages], ["instructions", *places]
    return messages, places


def _is_rule(item: object) -> TypeGuard[dict[str, object]]:
    """True for what belongs into the system message: most templates have one, at the beginning."""
    if not isinstance(item, dict) or item.get("type", "message") != "message":
        return False
    return item.get("role") in ("system", "developer")


def _part(text: str) -> object:
    return {"type": "input_text", "text": text}


def _thought(item: object) -> str:
    """The text of a reasoning item, if it has one; encrypted ones and summaries are not its own."""
    if not isinstance(item, dict) or item.get("type") != "reasoning":
        return ""
    content = item.get("content")
    parts = content if isinstance(content, list) else []
    texts = [part.get("text") for part in parts if isinstance(part, dict)]
    return "\n".join(text for text in texts if isinstance(text, str))


def _add(messages: list[object], item: object, place: str) -> None:
    kind = item.get("type", "message") if isinstance(item, dict) else None
    if not isinstance(item, dict) or kind not in _KINDS:
        raise wrong(place, f"{place}: wanted an item of type {', '.join(_KINDS)}")
    if kind == "message":
        messages.append({"role": item.get("role"), "content": item.get("content")})
    elif kind in ("function_call", "custom_tool_call"):
        arguments = item.get("arguments", "{}")
        if kind == "custom_tool_call":  # its input is any text
            arguments = {"input": item.get("input")}
        function = {"name": item.get("name"), "arguments": arguments}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        last = messages[-1] if messages else None
        if isinstance(last, dict) and last.get("role") == "assistant":
            last.setdefault("tool_calls", []).append(call)
        else:
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
    elif kind not in _SKIPPED_ITEMS:
        output = item.get("output")
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})


# Actions without their results: nothing that a template shows to the model. Thoughts go to the
# message behind them.
_SKIPPED_ITEMS = ("reasoning", "web_search_call")
_KINDS = (
    "message",
    "function_call",
    "function_call_output",
    "custom_tool_call",
    "custom_tool_call_output",
    *_SKIPPED_ITEMS,
)


_FUNCTION_KEYS = ("name", "description", "parameters")


def _tools(tools: list[object]) -> list[Mapping[str, object]]:
    """The functions, converted from this API's flat form to the nested form of a chat. Tools of
    other kinds, which some clients offer to every model, are left out."""
    found: list[Mapping[str, object]] = []
    others: set[str] = set()
    for number, tool in enumerate(tools):
        place = f"tools[{number}]"
        if not isinstance(tool, dict) or not isinstance(kind := tool.get("type"), str):
            raise wrong(place, f"{place}: wanted an object with a type")
        if kind != "function":
            others.add(kind[:40])
            continue
        if not isinstance(tool.get("name"), str):
            raise wrong(place, f"{place}: wanted a function with a name")
        function = {name: tool[name] for name in _FUNCTION_KEYS if name in tool}
        found.append({"type": "function", "function": function})
    if others:
        names = json.dumps(sorted(others))[:300]
        log.info("tools of types %s are left out: models here only call functions", names)
    return found
