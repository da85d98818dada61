"""Converts /v1/responses requests to chat requests: items to messages, fields to fields.

Nothing is stored here, so references to an earlier response are refused."""

from collections.abc import Mapping

from hotsplit.serve.api_error import ApiError, wrong
from hotsplit.serve.chat_requests import MAX_TOOLS, chat_request
from hotsplit.serve.fields import Fields
from hotsplit.serve.served_model import ServedModel
from hotsplit.serve.text_requests import TextRequest

MAX_ITEMS = 4096
MAX_INSTRUCTIONS = 1 << 24
_REFERS = "nothing is stored here; send the whole conversation as input"
# Fields of a chat that have another name in this API.
_PARAMS = {"messages": "input", "max_completion_tokens": "max_output_tokens",
           "response_format": "text.format"}  # fmt: skip


def responses_request(fields: Fields, served: ServedModel, timeout_s: float) -> TextRequest:
    """Parses a request as a chat. Raises ApiError if it is invalid or has no equivalent chat."""
    chat = _chat_fields(fields)
    try:
        return chat_request(Fields(chat), served, timeout_s)
    except ApiError as error:
        error.param = _PARAMS.get(error.param or "", error.param)
        raise


def _chat_fields(fields: Fields) -> dict[str, object]:
    for name in ("previous_response_id", "conversation"):
        fields.only(name, why=_REFERS)
    fields.only("prompt", why="there are no stored prompts here")
    fields.only("background", False, why="a response is sent on its request's connection")
    fields.only("truncation", "disabled", why="a conversation that is too long is refused")
    fields.only("include", [], why="answers contain only text and tool calls")
    fields.only("max_tool_calls", why="tools are called by the client")
    fields.only("n", 1, why="a response has one answer")
    fields.only("top_logprobs", 0, why="logprobs are available from /v1/chat/completions")
    instructions = fields.text("instructions", MAX_INSTRUCTIONS)
    chat: dict[str, object] = {"messages": _messages(fields.take("input"), instructions)}
    if (most := fields.whole("max_output_tokens", 1, (1 << 31) - 1)) is not None:
        chat["max_completion_tokens"] = most
    if tools := fields.items("tools", MAX_TOOLS):
        chat["tools"] = [_tool(tool, f"tools[{number}]") for number, tool in enumerate(tools)]
    if (text := fields.inner("text")) is not None:
        text.ignore("verbosity")
        if (shape := text.inner("format")) is not None:
            chat["response_format"] = _format(shape)
        text.finish()
    if (reasoning := fields.inner("reasoning")) is not None:
        reasoning.ignore("summary", "generate_summary")
        chat["reasoning_effort"] = reasoning.take("effort")
        reasoning.finish()
    return chat | fields.rest()


def _messages(items: object, instructions: str | None) -> list[object]:
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    if not isinstance(items, list) or not 0 < len(items) <= MAX_ITEMS:
        raise wrong("input", f"input: wanted a text, or a list of 1 to {MAX_ITEMS} items")
    messages: list[object] = []
    if instructions is not None:
        messages.append({"role": "system", "content": instructions})
    for number, item in enumerate(items):
        _add(messages, item, f"input[{number}]")
    return messages


def _add(messages: list[object], item: object, place: str) -> None:
    kind = item.get("type", "message") if isinstance(item, dict) else None
    if not isinstance(item, dict) or kind not in _KINDS:
        raise wrong(place, f"{place}: wanted an item of type {', '.join(_KINDS)}")
    if kind == "message":
        messages.append({"role": item.get("role"), "content": item.get("content")})
    elif kind == "function_call":
        call = {
            "id": item.get("call_id"),
            "type": "function",
            "function": {"name": item.get("name"), "arguments": item.get("arguments", "{}")},
        }
        last = messages[-1] if messages else None
        if isinstance(last, dict) and last.get("role") == "assistant":
            last.setdefault("tool_calls", []).append(call)
        else:
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
    elif kind == "function_call_output":
        output = item.get("output")
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})


_KINDS = ("message", "function_call", "function_call_output", "reasoning")


def _tool(tool: object, place: str) -> Mapping[str, object]:
    """Converts this API's flat form to the nested form of a chat."""
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise wrong(place, f"{place}: wanted a tool of type function", "unsupported_value")
    function = {name: tool[name] for name in ("name", "description", "parameters") if name in tool}
    return {"type": "function", "function": function}


def _format(shape: Fields) -> dict[str, object]:
    kind = shape.choice("type", ("text", "json_object", "json_schema"))
    schema = shape.take("schema")
    shape.ignore("name", "description", "strict")
    shape.finish()
    if kind == "json_schema":
        return {"type": kind, "json_schema": {"schema": schema}}
    return {"type": kind}
