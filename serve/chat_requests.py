"""Parses chat requests: messages and tools become a prompt and rules that split the answer into
text, reasoning and tool calls."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace

from hotsplit.errors import HotsplitError
from hotsplit.runtime.generate.reasoning import BEGIN, END, AfterReasoning, opens_reasoning
from hotsplit.runtime.text.chat_template import ChatTemplate
from hotsplit.serve.api_error import ApiError, wrong
from hotsplit.serve.fields import Fields
from hotsplit.serve.served_model import ServedModel
from hotsplit.serve.text_requests import (
    MAX_LOGPROBS,
    Syntax,
    TextRequest,
    jobs_of,
    take_wanted,
)
from hotsplit.serve.tool_calls import MAX_CALLS, ToolForm, form_of

MAX_MESSAGES = 4096
MAX_TOOLS = 128
ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True, kw_only=True)
class Rendering:
    """A prompt. `continued`: the message that the answer continues; "" if it begins one."""

    text: str
    continued: str
    has_tools: bool


def chat_request(fields: Fields, served: ServedModel, timeout_s: float) -> TextRequest:
    """The request of /v1/chat/completions. Raises ApiError."""
    rendering = take_rendering(fields, served)
    form = None
    if rendering.has_tools and isinstance(served.template, ChatTemplate):
        form = _tool_form(served.template)
    is_parallel = fields.flag("parallel_tool_calls", True)
    reasoning = fields.choice("reasoning_format", ("auto", "deepseek", "none")) or "auto"
    codec, stops = served.chat_codec()
    wanted = take_wanted(fields, served, _num_logprobs(fields), codec, timeout_s, stops)
    fields.only("modalities", ["text"], why="this server writes text")
    fields.only("audio", why="this server writes text")
    fields.only("functions", [], why="use tools instead")
    fields.only("function_call", "none", "auto", why="use tool_choice instead")
    fields.finish()
    served.check_length(rendering.text, "messages")
    ids = served.encode_plain(rendering.text, "messages")
    begins_reasoning = opens_reasoning(rendering.text, rendering.continued)
    syntax = Syntax(
        form=form,
        most_calls=MAX_CALLS if is_parallel else 1,
        splits_reasoning=reasoning != "none",
        begins_reasoning=begins_reasoning,
        marks=served.hidden_marks([*(form.marks if form else ()), BEGIN, END]),
    )
    jobs = jobs_of(served, ids, wanted, codec, "messages")
    if begins_reasoning and (constraint := wanted.constraint) is not None:
        jobs = [replace(job, mask=AfterReasoning.of(constraint.fork(), codec)) for job in jobs]
    return TextRequest(wanted=wanted, jobs=jobs, syntax=syntax)


def take_rendering(fields: Fields, served: ServedModel) -> Rendering:
    """Renders messages and tools with the template. Raises ApiError."""
    messages = messages_of(fields.items("messages", MAX_MESSAGES))
    tools = tools_of(fields.items("tools", MAX_TOOLS))
    choice = fields.take("tool_choice")
    if choice == "none":
        tools = []
    elif choice not in (None, "auto"):
        raise wrong(
            "tool_choice",
            "tool_choice: this server lets the model choose; give auto or none",
            "unsupported_value",
        )
    variables: dict[str, object] = {}
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
    is_answered = messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls")
    begins = fields.flag("add_generation_prompt", True)
    continues = fields.flag("continue_final_message", is_answered and begins)
    if isinstance(served.template, str):
        raise ApiError(501, served.template, code="no_chat_template")
    try:
        text = served.template.render(
            messages, tools=tools or None, variables=variables, continue_final_message=continues,
            add_generation_prompt=begins and not continues,
        )  # fmt: skip
    except HotsplitError as error:
        raise wrong("messages", str(error)) from error
    continued = str(messages[-1]["content"]) if continues else ""
    return Rendering(text=text, continued=continued, has_tools=bool(tools))


def messages_of(items: list[object]) -> list[dict[str, object]]:
    """Messages as templates expect them: contents as strings, call arguments as parsed JSON."""
    if not items:
        raise wrong("messages", "messages is missing or empty; a chat has at least one")
    return [_message(item, f"messages[{number}]") for number, item in enumerate(items)]


def _message(item: object, place: str) -> dict[str, object]:
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
    message["content"] = _content(message.get("content", ""), f"{place}.content")
    if "tool_calls" in message:
        message["tool_calls"] = _calls(message["tool_calls"], f"{place}.tool_calls")
    for name in ("refusal", "annotations", "audio"):
        message.pop(name, None)
    return message


def _content(content: object, place: str) -> str:
    """The content's text; parts are joined by newlines, as in llama-server."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise wrong(place, f"{place}: wanted a text or a list of parts")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(part, dict) or kind not in ("text", "input_text", "output_text"):
            shown = json.dumps(kind)[:40]
            raise wrong(place, f"{place} has a part of type {shown}; this model only reads text",
                        "unsupported_content")  # fmt: skip
        if not isinstance(text := part.get("text"), str):
            raise wrong(
                place, f"{place} has a part of type {kind} whose text is missing or not a string"
            )
        texts.append(text)
    return "\n".join(texts)


def _calls(calls: object, place: str) -> list[object]:
    if not isinstance(calls, list):
        raise wrong(place, f"{place}: wanted a list of calls")
    found: list[object] = []
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise wrong(place, f"{place}: wanted objects with a function that has a name")
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments) if arguments else {}
            except (ValueError, RecursionError) as error:
                raise wrong(place, f"{place}: arguments are not JSON") from error
        found.append({**call, "function": {**function, "arguments": arguments}})
    return found


def tools_of(items: list[object]) -> list[Mapping[str, object]]:
    found: list[Mapping[str, object]] = []
    for number, item in enumerate(items):
        place = f"tools[{number}]"
        if not isinstance(item, dict) or item.get("type") != "function":
            raise wrong(place, f"{place}: wanted a tool of type function", "unsupported_value")
        function = item.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise wrong(place, f"{place}.function: wanted an object with a name")
        found.append(item)
    return found


def _tool_form(template: ChatTemplate) -> ToolForm:
    form = form_of(template.tool_text or template.text)
    if form is None:
        raise wrong(
            "tools",
            "tools: this model's chat template has no tools, or writes calls in an unknown form;"
            " leave tools out, or start the server with --chat-template",
            "unsupported_value",
        )
    return form


def _num_logprobs(fields: Fields) -> int | None:
    """Number of most probable tokens to return at each position; None without logprobs."""
    is_wanted = fields.flag("logprobs")
    count = fields.whole("top_logprobs", 0, MAX_LOGPROBS)
    if count is not None and not is_wanted:
        raise wrong("top_logprobs", "top_logprobs is only allowed when logprobs is true")
    return (count or 0) if is_wanted else None
