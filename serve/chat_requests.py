"""Parses chat requests: messages and tools become a prompt and rules that split the answer into
text, reasoning and tool calls."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal, NotRequired

from pydantic import BeforeValidator, ConfigDict, FailFast, Field, ValidationInfo, field_validator
from typing_extensions import TypedDict

from hotsplit.errors import HotsplitError
from hotsplit.runtime.answers.answer_reader import MAX_CALLS, CallRules
from hotsplit.runtime.answers.call_style import (
    CallStyle,
    with_described,
    with_descriptions,
    with_responses,
)
from hotsplit.runtime.answers.calls import Tool, json_text, name_of, schema_of, short_id
from hotsplit.runtime.answers.formats import AnswerFormat
from hotsplit.runtime.answers.scanner import sound_json
from hotsplit.runtime.generate.call_grammar import forced_calls
from hotsplit.serve import text_requests
from hotsplit.serve.api_error import ApiError, wrong
from hotsplit.serve.request_body import RequestBody, checked, only, refused
from hotsplit.serve.served_model import ServedModel
from hotsplit.serve.texts import Arrival

MAX_MESSAGES = 4096
MAX_TOOLS = 128


def _arguments(value: object) -> object:
    """A call's arguments, which are JSON in a text; none are an empty object."""
    if not isinstance(value, str):
        return {} if value is None else value
    try:
        return sound_json(value) if value.strip() else {}
    except ValueError as error:
        raise refused("invalid_value", f" is not JSON: {str(error)[:100]}") from error


# Of dictionaries, since 24,000 models would take the collector 0.3 s, with the GIL held.
_OPEN = ConfigDict(strict=True, extra="allow")


class CalledFunction(TypedDict):
    __pydantic_config__ = _OPEN  # type: ignore[misc]
    name: str
    arguments: NotRequired[Annotated[dict[str, object], BeforeValidator(_arguments)]]


class CallInMessage(TypedDict):
    __pydantic_config__ = _OPEN  # type: ignore[misc]
    function: CalledFunction


class ChatMessage(RequestBody):
    is_open: ClassVar = True
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str = Field(None, validate_default=True)
    refusal: object = None  # the content of another model's answer
    tool_calls: Annotated[list[CallInMessage], FailFast()] = []

    @field_validator("content", mode="plain")
    @classmethod
    def _content(cls, content: object, info: ValidationInfo) -> str:
        """The content's text; parts are joined by newlines, as in llama-server."""
        is_answer = info.data.get("role") == "assistant"
        if content is None and not is_answer:
            raise refused("invalid_value", " is missing; only an assistant's may be")
        if content is None or isinstance(content, str):
            return content or ""
        if not isinstance(content, list):
            raise ValueError("a text or a list of parts")
        texts = []
        fields = _ANSWER_TYPES if is_answer else _PART_TYPES
        for part in content:
            kind = part.get("type") if isinstance(part, dict) else None
            if not isinstance(part, dict) or not isinstance(kind, str) or kind not in fields:
                shown = json.dumps(kind)[:40]
                line = f" has a part of type {shown}; this model only reads text"
                raise refused("unsupported_content", line)
            if not isinstance(text := part.get(fields[kind]), str):
                line = f" has a part of type {kind} whose {fields[kind]} is missing or not a string"
                raise refused("invalid_value", line)
            texts.append(text)
        return "\n".join(texts)


# Types of parts, with the field that has their text; a refusal is an answer of other models.
_PART_TYPES = {"text": "text", "input_text": "text", "output_text": "text"}
_ANSWER_TYPES = {**_PART_TYPES, "refusal": "refusal"}
_TEXT_ONLY = "this server writes text"


class RenderingBody(RequestBody):
    """What a chat's prompt is made of, and all that /apply-template reads."""

    ignored: ClassVar = frozenset({"model"})
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES), FailFast()]
    tools: Annotated[list[object], Field(max_length=MAX_TOOLS)] = []
    tool_choice: object = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    chat_template_kwargs: dict[str, object] = {}
    chat_template: Annotated[object, only(why="the server's --chat-template sets it")] = None
    add_generation_prompt: bool = True
    continue_final_message: bool | None = None


class ChatBody(RenderingBody, text_requests.TextBody):
    ignored: ClassVar = text_requests.TextBody.ignored
    parallel_tool_calls: bool = True
    reasoning_format: Literal["auto", "deepseek", "none"] = "auto"
    logprobs: bool = False
    top_logprobs: text_requests.NumLogprobs | None = None
    modalities: Annotated[object, only(["text"], why=_TEXT_ONLY)] = None
    audio: Annotated[object, only(why=_TEXT_ONLY)] = None
    functions: Annotated[object, only([], why="use tools instead")] = None
    function_call: Annotated[object, only("none", "auto", why="use tool_choice instead")] = None


@dataclass(frozen=True, kw_only=True)
class ToolChoice:
    """`tools`: those of the prompt. `forced`: those of which the model must call one; empty if it
    need not call any. `is_single`: it calls one, once."""

    tools: list[Tool]
    forced: list[Tool] = field(default_factory=list)
    is_single: bool = False


@dataclass(frozen=True, kw_only=True)
class Rendering:
    """A prompt. `continued`: the message that the answer continues; "" if it begins one."""

    text: str
    continued: str
    choice: ToolChoice


def chat_request(
    values: Mapping[str, object], served: ServedModel, arrival: Arrival
) -> text_requests.TextRequest:
    """The request of /v1/chat/completions. Raises ApiError."""
    body = checked(ChatBody, values)
    if body.top_logprobs is not None and not body.logprobs:
        raise wrong("top_logprobs", "top_logprobs is only allowed when logprobs is true")
    rendering = rendering_of(body, served)
    rules = None
    choice = rendering.choice
    is_parallel = body.parallel_tool_calls and not choice.is_single
    if choice.tools:
        rules = CallRules(
            tools={name_of(tool): schema_of(tool) for tool in choice.tools},
            most=MAX_CALLS if is_parallel else 1,
            has_short_ids=served.call_style.has_short_ids,
        )
    served.check_length(rendering.text, "messages")
    codec, stops = served.chat_codec()
    request = text_requests.text_request(
        body,
        served,
        arrival,
        [served.encode_plain(rendering.text, "messages")],
        "messages",
        codec=codec,
        num_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        stops=stops,
        marks=served.marks,
    )
    if choice.forced:
        if request.grammar is not None:
            raise wrong(
                "tool_choice",
                "tool_choice requires a call, which response_format, json_schema and"
                " grammar exclude; give one of them",
            )
        calls, tools = served.format.calls, choice.forced
        forced = text_requests.Grammar(
            param="tool_choice",
            size=len(json.dumps(tools)),
            make=lambda: forced_calls(calls, tools, codec, is_parallel=is_parallel),
        )
        request = replace(request, grammar=forced)
    syntax = text_requests.Syntax(
        format=served.format,
        rules=rules,
        splits_reasoning=body.reasoning_format != "none",
        prompt=rendering.text,
        continued=rendering.continued,
        has_forced_calls=bool(choice.forced),
    )
    return replace(request, syntax=syntax)


def rendering_of(body: RenderingBody, served: ServedModel) -> Rendering:
    """Renders messages and tools with the template. Raises ApiError."""
    style = served.call_style
    messages = messages_of(body.messages, style, served.format)
    choice = chosen(tools_of(body.tools), body.tool_choice)
    variables = dict(served.variables)
    if body.reasoning_effort is not None:
        variables["reasoning_effort"] = body.reasoning_effort
    if body.reasoning_effort == "none":  # templates read enable_thinking
        variables["enable_thinking"] = False
    variables |= body.chat_template_kwargs
    in_template = choice.tools
    if style.describes_tools:
        messages = with_described(messages, choice.tools, has_system=style.has_system)
        in_template = []
    if style.has_descriptions:
        in_template = with_descriptions(in_template)
    if style.has_responses_in_calls:
        messages = with_responses(messages)
    is_answered = messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls")
    begins, continues = body.add_generation_prompt, body.continue_final_message
    if continues is None:
        continues = is_answered and begins
    if isinstance(served.template, str):
        raise ApiError(501, served.template, "no_chat_template")
    try:
        text = served.template.render(
            messages,
            tools=in_template or None,
            variables=variables,
            continue_final_message=continues,
            add_generation_prompt=begins and not continues,
            keeps_none=style.has_null_content,
        )
    except HotsplitError as error:
        raise wrong("messages", str(error)) from error
    continued = str(messages[-1]["content"]) if continues else ""
    return Rendering(text=text, continued=continued, choice=choice)


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
        if not isinstance(function.get("parameters"), dict | None):
            raise wrong(place, f"{place}.function.parameters: wanted a schema, an object")
        found.append(item)
    return found


def chosen(tools: list[Tool], choice: object) -> ToolChoice:
    """The choice of a request among its tools. Raises ApiError."""
    if choice in (None, "auto"):
        return ToolChoice(tools=tools)
    if choice == "none":
        return ToolChoice(tools=[])
    if choice == "required":
        return ToolChoice(tools=tools, forced=_some(tools))
    kind = choice.get("type") if isinstance(choice, dict) else None
    if isinstance(choice, dict) and kind == "function":
        return ToolChoice(tools=tools, forced=_named([choice], tools), is_single=True)
    if isinstance(choice, dict) and kind == "allowed_tools":
        inner = choice.get("allowed_tools", choice)
        allowed = inner.get("tools") if isinstance(inner, dict) else None
        mode = inner.get("mode", "auto") if isinstance(inner, dict) else None
        if isinstance(allowed, list) and mode in ("auto", "required"):
            allowed = _named(allowed, tools)
            return ToolChoice(tools=allowed, forced=_some(allowed) if mode == "required" else [])
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


def messages_of(
    items: Sequence[ChatMessage], style: CallStyle, known: AnswerFormat
) -> list[dict[str, object]]:
    """Messages as templates expect them: calls in the template's style."""
    messages = list[dict[str, object]]()
    for item in items:
        message = _message(item, style, known)
        calls = message.get("tool_calls")
        messages.append(message)
        # The others are in messages of their own.
        if style.has_single_calls and isinstance(calls, list):
            message["tool_calls"] = calls[:1]
            content = None if style.has_null_content else ""
            messages += [{**message, "content": content, "tool_calls": [c]} for c in calls[1:]]
    return messages


def _message(item: ChatMessage, style: CallStyle, known: AnswerFormat) -> dict[str, object]:
    message = item.model_dump(exclude={"refusal", "annotations", "audio"})
    if item.role == "developer":
        message["role"] = "system"
    content = item.content
    if item.role == "assistant" and isinstance(item.refusal, str) and not content:
        content = item.refusal
    message["content"] = content
    if calls := message.pop("tool_calls"):
        for call in calls:
            call["function"].setdefault("arguments", {})
        message |= _styled(content, calls, style, known)
    if style.has_short_ids and isinstance(message.get("tool_call_id"), str):
        message["tool_call_id"] = short_id(message["tool_call_id"])
    return message


def _styled(
    content: str, calls: list[dict[str, Any]], style: CallStyle, known: AnswerFormat
) -> dict[str, object]:
    functions = [call["function"] for call in calls]
    if style.has_calls_as_content:
        named = [(function["name"], function["arguments"]) for function in functions]
        return {"content": content + known.calls.text_of(named)}
    for call, function in zip(calls, functions, strict=True):
        if style.has_text_arguments:
            function["arguments"] = json_text(function["arguments"])
        if style.has_short_ids and isinstance(call.get("id"), str):
            call["id"] = short_id(call["id"])
    content_or_none = content or None if style.has_null_content else content
    return {"content": content_or_none, "tool_calls": calls}
