"""A request's tools, and its choice among them."""

import json
from dataclasses import dataclass, field

from hotsplit.runtime.answers.calls import Tool, name_of
from hotsplit.serve.api_error import wrong


def tools_of(items: list[object]) -> list[Tool]:
    """The checked tools of a request. Raises ApiError."""
    found: list[Tool] = []
    for number, item in enumerate(items):
        place = f"tools[{number}]"
        if not isinstance(item, dict) or item.get("type") != "function":
            raise wrong(place, f"{place}: wanted a tool of type function", "unsupported_value")
        function = item.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise wrong(place, f"{place}.function: wanted an object with a name")
        found.append(item)
    return found


@dataclass(frozen=True, kw_only=True)
class Choice:
    """`tools`: those of the prompt. `forced`: those of which the model must call one; empty if it
    need not call any. `is_single`: it calls one, once."""

    tools: list[Tool]
    forced: list[Tool] = field(default_factory=list)
    is_single: bool = False


def chosen(tools: list[Tool], choice: object) -> Choice:
    """The choice of a request among its tools. Raises ApiError."""
    if choice in (None, "auto"):
        return Choice(tools=tools)
    if choice == "none":
        return Choice(tools=[])
    if choice == "required":
        return Choice(tools=tools, forced=_some(tools))
    kind = choice.get("type") if isinstance(choice, dict) else None
    if isinstance(choice, dict) and kind == "function":
        return Choice(tools=tools, forced=_named([choice], tools), is_single=True)
    if isinstance(choice, dict) and kind == "allowed_tools":
        inner = choice.get("allowed_tools", choice)
        allowed = inner.get("tools") if isinstance(inner, dict) else None
        mode = inner.get("mode", "auto") if isinstance(inner, dict) else None
        if isinstance(allowed, list) and mode in ("auto", "required"):
            allowed = _named(allowed, tools)
            return Choice(tools=allowed, forced=_some(allowed) if mode == "required" else [])
    raise wrong(
        "tool_choice",
        'tool_choice: wanted auto, none, required, {"type": "function", "function": {"name": ...}}'
        ' or {"type": "allowed_tools", "allowed_tools": {"mode": ..., "tools": [...]}}',
    )


def _some(tools: list[Tool]) -> list[Tool]:
    if not tools:
        raise wrong("tool_choice", "tool_choice requires a call, but there are no tools")
    return tools


def _named(choices: list[object], tools: list[Tool]) -> list[Tool]:
    """The tools that are named, as a chat names them or as a response does."""
    by_name = {name_of(tool): tool for tool in tools}
    found = []
    for choice in choices:
        inner = choice.get("function", choice) if isinstance(choice, dict) else None
        name = inner.get("name") if isinstance(inner, dict) else None
        if not isinstance(name, str) or name not in by_name:
            shown = json.dumps(name)[:60]
            raise wrong("tool_choice", f"tool_choice: there is no tool named {shown} in tools")
        found.append(by_name[name])
    return found
