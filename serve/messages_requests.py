"""Converts requests of Anthropic's /v1/messages to chat requests: blocks to messages, fields to
fields."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from hotsplit.serve.api_error import wrong
from hotsplit.serve.chat_requests import MAX_MESSAGES, MAX_TOOLS, RenderingBody, rendering_of
from hotsplit.serve.exchange import JsonResponse
from hotsplit.serve.other_apis import in_its_words, translated
from hotsplit.serve.request_body import RequestBody, Whole, checked, only, texts
from hotsplit.serve.served_model import ServedModel
from hotsplit.serve.service import Service
from hotsplit.serve.text_requests import TextRequest
from hotsplit.serve.texts import Arrival

log = logging.getLogger("hotsplit.serve")
# Fields of a chat that have another name in this API.
_PARAMS = {
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
}
# Fields that do not affect an answer's text here.
_NEUTRAL = """
cache_control container context_management diagnostics inference_geo speed user_profile_id
workspace_id
"""
_BILLING = "x-anthropic-billing-header:"  # a block of Claude Code's, other in each request


class MessagesToolChoice(RequestBody):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Thinking(RequestBody):
    ignored: ClassVar = frozenset({"budget_tokens", "display"})
    type: Literal["enabled", "adaptive", "disabled"]


class OutputFormat(RequestBody):
    type: Literal["json_schema"]
    schema_: dict[str, object] = Field(alias="schema")


class OutputConfig(RequestBody):
    format: OutputFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class MessagesBody(RequestBody):
    """The fields that a chat does not have under the same name; the chat checks the others."""

    is_open: ClassVar = True
    messages: Annotated[list[object], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: object = None
    max_tokens: Annotated[Whole, Field(ge=1, lt=1 << 31)] | None = None
    stop_sequences: Annotated[tuple[str, ...], texts(64, 256)] = ()
    tools: Annotated[list[object], Field(max_length=MAX_TOOLS)] = []
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig = OutputConfig()
    mcp_servers: Annotated[object, only([], why="tools are called by the client")] = None
    n: Annotated[object, only(1, why="a message is one answer")] = None


def messages_request(
    values: Mapping[str, object], served: ServedModel, arrival: Arrival
) -> TextRequest:
    """Parses a request as a chat. Raises ApiError if it is invalid or has no equivalent chat."""
    body = checked(MessagesBody, values)
    chat, places = chat_fields(body)
    request = translated(chat, served, arrival, places=places, params=_PARAMS)
    return replace(request, settings={"stop_sequences": body.stop_sequences})


async def count_tokens(service: Service, request: Request) -> Response:
    """The number of tokens of a request's prompt."""
    values = await service.fields(request)
    served = service.served

    def count() -> int:
        chat, places = chat_fields(checked(MessagesBody, values))
        names = RenderingBody.model_fields.keys() & chat.keys()
        with in_its_words(places, _PARAMS):
            body = checked(RenderingBody, {name: chat[name] for name in names})
            text = rendering_of(body, served).text
        served.check_length(text, "messages")
        return len(served.encode_plain(text, "messages"))

    return JsonResponse({"input_tokens": await service.prepared(count)})


def chat_fields(body: MessagesBody) -> tuple[dict[str, object], list[str]]:
    """(the fields of the chat that a request is, its messages' places in the request)."""
    messages = list[object]()
    places = list[str]()
    if body.system is not None and (system := _system(body.system)):
        messages.append({"role": "system", "content": system})
        places.append("system")
    for number, message in enumerate(body.messages):
        messages += _converted(message, f"messages[{number}]")
        places += [f"messages[{number}]"] * (len(messages) - len(places))
    chat: dict[str, object] = {
        "messages": messages,
        "max_completion_tokens": body.max_tokens,
        "stop": list(body.stop_sequences),
        "tools": _tools(body.tools),
    }
    if body.tool_choice is not None:
        chat["tool_choice"] = _choice(body.tool_choice)
        chat["parallel_tool_calls"] = not body.tool_choice.disable_parallel_tool_use
    if body.thinking is not None:
        is_on = body.thinking.type != "disabled"
        chat["chat_template_kwargs"] = {"enable_thinking": is_on}
    config = body.output_config
    if config.effort is not None:
        chat["reasoning_effort"] = "xhigh" if config.effort == "max" else config.effort
    if config.format is not None:
        chat["response_format"] = {"type": "json_schema", "schema": config.format.schema_}
    extra = {name: value for name, value in body.extra.items() if name not in _NEUTRAL.split()}
    return chat | extra, places


def _system(system: object) -> object:
    if not isinstance(system, list):
        return system

    def is_billing(block: object) -> bool:
        text = block.get("text") if isinstance(block, dict) else None
        return isinstance(text, str) and text.startswith(_BILLING)

    return [block for block in system if not is_billing(block)]


def _converted(message: object, place: str) -> list[object]:
    """The messages of a chat that a message is: each result of a tool is one of its own."""
    if not isinstance(message, dict):
        raise wrong(place, f"{place}: wanted an object with role and content")
    role, content = message.get("role"), message.get("content")
    if not isinstance(content, list):
        return [{"role": role, "content": content}]
    found = list[object]()
    parts, calls, thoughts = list[object](), list[object](), list[str]()
    for block in content:
        kind = block.get("type") if isinstance(block, dict) else None
        if not isinstance(block, dict) or kind not in ("tool_use", "tool_result", *_THOUGHTS):
            parts.append(block)
        elif kind == "tool_use":
            function = {"name": block.get("name"), "arguments": block.get("input")}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "tool_result":
            result = block.get("content", "")
            found.append(
                {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": result}
            )
        elif isinstance(thought := block.get("thinking"), str):
            thoughts.append(thought)
    if parts or calls or thoughts or not found:
        own: dict[str, object] = {"role": role, "content": parts}
        own |= {"tool_calls": calls} if calls else {}
        own |= {"reasoning_content": "\n".join(thoughts)} if thoughts else {}
        found.append(own)
    return found


_THOUGHTS = ("thinking", "redacted_thinking")


def _choice(choice: MessagesToolChoice) -> object:
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    return {"auto": "auto", "any": "required", "none": "none"}[choice.type]


def _tools(tools: list[object]) -> list[Mapping[str, object]]:
    """The functions in a chat's form. Tools that Anthropic's servers run are left out."""
    found = list[Mapping[str, object]]()
    for number, tool in enumerate(tools):
        place = f"tools[{number}]"
        if not isinstance(tool, dict):
            raise wrong(place, f"{place}: wanted an object with a name")
        if tool.get("type", "custom") != "custom":
            log.info("a tool of type %s is left out: models call functions", str(tool["type"])[:40])
            continue
        if not isinstance(tool.get("name"), str):
            raise wrong(place, f"{place}: wanted a tool with a name")
        function = {"name": tool["name"], "description": tool.get("description", "")}
        schema = tool.get("input_schema")
        schema = {"type": "object"} if schema is None else schema
        if not isinstance(schema, dict):
            raise wrong(place, f"{place}.input_schema: wanted a schema, an object")
        found.append({"type": "function", "function": {**function, "parameters": schema}})
    return found
