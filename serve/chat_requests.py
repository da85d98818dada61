"""Parses chat requests: messages and tools become a prompt and rules that split the answer into
text, reasoning and tool calls."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from hotsplit.errors import HotsplitError
from hotsplit.runtime.answers.answer_reader import MAX_CALLS, CallRules
from hotsplit.runtime.answers.call_style import CallStyle, with_descriptions, with_responses
from hotsplit.runtime.answers.calls import Tool, json_text, name_of, schema_of, short_id
from hotsplit.runtime.answers.described import with_described
from hotsplit.runtime.answers.formats import AnswerFormat
from hotsplit.runtime.answers.scanner import sound_json
from hotsplit.runtime.generate.call_grammar import forced_calls
from hotsplit.runtime.text.codec import TextCodec
from hotsplit.serve.api_error import ApiError, wrong
from hotsplit.serve.fields import Fields
from hotsplit.serve.served_model import ServedModel
from hotsplit.serve.text_requests import (
    MAX_LOGPROBS,
    Grammar,
    Syntax,
    TextRequest,
    Wanted,
    jobs_of,
    take_wanted,
)
from hotsplit.serve.texts import Arrival
from hotsplit.serve.tool_choice import Choice, chosen, tools_of

MAX_MESSAGES = 4096
MAX_TOOLS = 128
ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True, kw_only=True)
class Rendering:
    """A prompt. `continued`: the message that the answer continues; "" if it begins one."""

    text: str
    continued: str
    choice: Choice


def chat_request(fields: Fields, served: ServedModel, arrival: Arrival) -> TextRequest:
    """The request of /v1/chat/completions. Raises ApiError."""
    rendering = take_rendering(fields, served)
    rules = None
    choice = rendering.choice
    is_parallel = fields.flag("parallel_tool_calls", True) and not choice.is_single
    if choice.tools:
        rules = CallRules(
            tools={name_of(tool): schema_of(tool) for tool in choice.tools},
            most=MAX_CALLS if is_parallel else 1,
            has_short_ids=served.call_style.has_short_ids,
        )
    reasoning = fields.choice("reasoning_format", ("auto", "deepseek", "none")) or "auto"
    codec, stops = served.chat_codec()
    num_logprobs = _num_logprobs(fields)
    wanted = take_wanted(fields, served, num_logprobs, codec, arrival, stops, served.marks)
    if choice.forced:
        forced = _forced(wanted, choice.forced, served, codec, is_parallel)
        wanted = replace(wanted, grammar=forced)
    fields.only("modalities", ["text"], why="this server writes text")
    fields.only("audio", why="this server writes text")
    fields.only("functions", [], why="use tools instead")
    fields.only("function_call", "none", "auto", why="use tool_choice instead")
    fields.finish()
    served.check_length(rendering.text, "messages")
    ids = served.encode_plain(rendering.text, "messages")
    syntax = Syntax(
        format=served.format,
        rules=rules,
        splits_reasoning=reasoning != "none",
        prompt=rendering.text,
        continued=rendering.continued,
        has_forced_calls=bool(choice.forced),
    )
    jobs = jobs_of(served, ids, wanted, codec, "messages")
    return TextRequest(wanted=wanted, jobs=jobs, syntax=syntax)


def take_rendering(fields: Fields, served: ServedModel) -> Rendering:
    """Renders messages and tools with the template. Raises ApiError."""
    messages = messages_of(fields.items("messages", MAX_MESSAGES), served.call_style, served.format)
    choice = chosen(tools_of(fields.items("tools", MAX_TOOLS)), fields.take("tool_choice"))
    variables = dict(served.variables)
    effort = fields.choice(
        "reasoning_effort", ("none", "minimal", "low", "medium", "high", "xhigh")
    )
    if effort is not None:
        variables["reasoning_effort"] = effort
    if effort == "none":  # templates read enable_thinking
        variables["enable_thinking"] = False
    if (more := fields.take("chat_template_kwargs")) is not None:
        if not isinstance(more, dict):
            raise fields.refuse("chat_template_kwargs", more, "an object")
        variables |= more
    fields.only("chat_template", why="the server's --chat-template sets it")
    in_template = choice.tools
    if served.call_style.describes_tools:
        is_known = served.call_style.has_system
        messages, in_template = with_described(messages, choice.tools, has_system=is_known), []
    if served.call_style.has_descriptions:
        in_template = with_descriptions(in_template)
    if served.call_style.has_responses_in_calls:
        messages = with_responses(messages)
    is_answered = messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls")
    begins = fields.flag("add_generation_prompt", True)
    continues = fields.flag("continue_final_message", is_answered and begins)
    if isinstance(served.template, str):
        raise ApiError(501, served.template, code="no_chat_template")
    try:
        text = served.template.render(
            messages,
            tools=in_template or None,
            variables=variables,
            continue_final_message=continues,
            add_generation_prompt=begins and not continues,
            keeps_none=served.call_style.has_null_content,
        )
    except HotsplitError as error:
        raise wrong("messages", str(error)) from error
    continued = str(messages[-1]["content"]) if continues else ""
    return Rendering(text=text, continued=continued, choice=choice)


def messages_of(
    items: list[object], style: CallStyle, known: AnswerFormat
) -> list[dict[str, object]]:
    """Messages as templates expect them: contents as strings, calls in the template's style."""
    if not items:
        raise wrong("messages", "messages is missing or empty; a chat has at least one")
    messages = list[dict[str, object]]()
    for number, item in enumerate(items):
        message = _message(item, f"messages[{number}]", style, known)
        calls = message.get("tool_calls")
        messages.append(message)
        if style.has_single_calls and isinstance(
            calls, list
        ):  # the others in messages of their own
            message["tool_calls"] = calls[:1]
            content = None if style.has_null_content else ""
            messages += [{**message, "content": content, "tool_calls": [c]} for c in calls[1:]]
    return messages


def _message(item: object, place: str, style: CallStyle, known: AnswerFormat) -> dict[str, object]:
    if not isinstance(item, dict):
        raise wrong(place, f"{place}: wanted an object with role and content")
    message = {key: value for key, value in item.items() if value is not None}
    role = message.get("role")
    if role not in ROLES:
        shown = json.dumps(role)[:40]
        raise wrong(f"{place}.role", f"{place}.role is {shown}, wanted one of {', '.join(ROLES)}")
    message["role"] = "system" if role == "developer" else role
    if "content" not in message and role != "assistant":
        raise wrong(f"{place}.content", f"{place}.content is missing; only an assistant's may be")
    is_answer = role == "assistant"
    content = _content(message.get("content", ""), f"{place}.content", is_answer=is_answer)
    refusal = message.get("refusal")
    if is_answer and isinstance(refusal, str) and not content:
        content = refusal
    message["content"] = content
    if "tool_calls" in message:
        calls = _calls(message.pop("tool_calls"), f"{place}.tool_calls")
        if calls:
            message |= _styled(str(message["content"]), calls, style, known)
    if style.has_short_ids and isinstance(message.get("tool_call_id"), str):
        message["tool_call_id"] = short_id(message["tool_call_id"])
    for name in ("refusal", "annotations", "audio"):
        message.pop(name, None)
    return message


# Types of parts, with the field that has their text; a refusal is an answer of other models.
_PART_TYPES = {"text": "text", "input_text": "text", "output_text": "text"}
_ANSWER_TYPES = {**_PART_TYPES, "refusal": "refusal"}


def _content(content: object, place: str, *, is_answer: bool) -> str:
    """The content's text; parts are joined by newlines, as in llama-server."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise wrong(place, f"{place}: wanted a text or a list of parts")
    texts = []
    fields = _ANSWER_TYPES if is_answer else _PART_TYPES
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(part, dict) or not isinstance(kind, str) or kind not in fields:
            shown = json.dumps(kind)[:40]
            raise wrong(
                place,
                f"{place} has a part of type {shown}; this model only reads text",
                "unsupported_content",
            )
        if not isinstance(text := part.get(fields[kind]), str):
            raise wrong(
                place,
                f"{place} has a part of type {kind} whose {fields[kind]} is missing or not a string",
            )
        texts.append(text)
    return "\n".join(texts)


def _calls(calls: object, place: str) -> list[dict[str, Any]]:
    """Checked calls; their arguments are values of JSON."""
    if not isinstance(calls, list):
        raise wrong(place, f"{place}: wanted a list of calls")
    found = []
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise wrong(place, f"{place}: wanted objects with a function that has a name")
        arguments = _arguments(function.get("arguments"), place)
        found.append({**call, "function": {**function, "arguments": arguments}})
    return found


def _styled(
    content: str, calls: list[dict[str, Any]], style: CallStyle, known: AnswerFormat
) -> dict[str, object]:
    """The content and calls of a message as its template wants them."""
    functions = [call["function"] for call in calls]
    if style.has_calls_as_content:
        named = [(function["name"], function["arguments"]) for function in functions]
        return {"content": content + known.calls.written.text_of(named)}
    for call, function in zip(calls, functions, strict=True):
        if style.has_text_arguments:
            function["arguments"] = json_text(function["arguments"])
        if style.has_short_ids and isinstance(call.get("id"), str):
            call["id"] = short_id(call["id"])
    content_or_none = content or None if style.has_null_content else content
    return {"content": content_or_none, "tool_calls": calls}


def _arguments(arguments: object, place: str) -> dict[str, object]:
    """The value of a call's arguments, which are JSON in a text; none are an empty object."""
    if isinstance(arguments, str) and arguments.strip():
        try:
            arguments = sound_json(arguments)
        except ValueError as error:
            raise wrong(place, f"{place}: arguments are not JSON: {str(error)[:100]}") from error
    if arguments is None or isinstance(arguments, str):
        return {}
    if not isinstance(arguments, dict):
        raise wrong(place, f"{place}: arguments are not an object")
    return arguments


def _forced(
    wanted: Wanted, tools: Sequence[Tool], served: ServedModel, codec: TextCodec, is_parallel: bool
) -> Grammar:
    if wanted.grammar is not None:
        raise wrong(
            "tool_choice",
            "tool_choice requires a call, which response_format, json_schema and"
            " grammar exclude; give one of them",
        )
    calls = served.format.calls
    return Grammar(
        param="tool_choice",
        size=len(json.dumps(tools)),
        make=lambda: forced_calls(calls, tools, codec, is_parallel=is_parallel),
    )


def _num_logprobs(fields: Fields) -> int | None:
    """Number of most probable tokens to return at each position; None without logprobs."""
    is_wanted = fields.flag("logprobs")
    count = fields.whole("top_logprobs", 0, MAX_LOGPROBS)
    if count is not None and not is_wanted:
        raise wrong("top_logprobs", "top_logprobs is only allowed when logprobs is true")
    return (count or 0) if is_wanted else None
