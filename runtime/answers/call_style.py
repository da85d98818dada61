"""What a chat template wants of the calls in earlier messages, found by trying it once.

Most templates want the arguments as an object and write it as JSON. Others join them with other
text or print them, and so need JSON in a string. Some only write the calls of a message without
content, or one call a message; some of Mistral's refuse ids that are not nine letters and digits;
Granite's write no call at all. Of a template without tools, only the role of the system is
tried."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hotsplit.errors import HotsplitError
from hotsplit.runtime.answers.calls import Tool, json_text
from hotsplit.runtime.answers.formats import format_of
from hotsplit.runtime.text.chat_template import ChatTemplate, Message

_KEY, _VALUE = "probe_key", "probe_value"
_LONG_ID, _SHORT_ID = "call_0123456789abcdef01234567", "abcDEF012"
_FUNCTION = {
    "name": "probe",
    "parameters": {"type": "object", "properties": {_KEY: {"type": "string"}}},
}
_BARE_TOOL: Tool = {"type": "function", "function": _FUNCTION}
_TOOL: Tool = {"type": "function", "function": {**_FUNCTION, "description": "A probe."}}


@dataclass(frozen=True, kw_only=True)
class CallStyle:
    has_text_arguments: bool = False
    has_null_content: bool = False  # in messages with calls and no content
    has_short_ids: bool = False
    has_single_calls: bool = False  # one in a message
    has_calls_as_content: bool = False  # the template leaves calls out
    has_responses_in_calls: bool = False  # results are in the message with the calls
    has_descriptions: bool = False  # it refuses a tool without one
    describes_tools: bool = False  # the server does, because the template's form is not known
    has_system: bool = True  # the template writes such a message; tried only if `describes_tools`


def call_style(template: ChatTemplate) -> CallStyle:
    """The first style, beginning with the usual one, in which the template writes a call whole; the
    usual one if it does so in none. Calls that a template never reads have to be in the content."""
    text = template.tool_text or template.text
    if format_of(text).describes_tools:
        return CallStyle(
            has_calls_as_content=True, describes_tools=True, has_system=_has_system(template)
        )
    if "tool_calls" not in text:
        return CallStyle(has_calls_as_content=True)
    for is_null, is_text, is_short in itertools.product((False, True), repeat=3):
        style = CallStyle(
            has_text_arguments=is_text, has_null_content=is_null, has_short_ids=is_short
        )
        if _are_written(template, style, 1):
            return replace(
                style,
                has_single_calls=not _are_written(template, style, 2),
                has_responses_in_calls="tool_responses" in text and "tool_call_id" not in text,
                has_descriptions=not _are_written(template, style, 1, _BARE_TOOL),
            )
    return CallStyle()


def with_responses(messages: Sequence[Message]) -> list[dict[str, object]]:
    """The messages as Gemma 4's first template wants them: results, and the answer behind them, in
    the message with the calls."""
    found = list[dict[str, object]]()
    for message in messages:
        last = found[-1] if found else {}
        calls = last.get("tool_calls")
        if message["role"] == "tool" and isinstance(calls, list):
            names = {call.get("id"): call["function"]["name"] for call in calls}
            name = message.get("name") or names.get(message.get("tool_call_id"), "unknown")
            response = {"name": name, "response": message["content"]}
            responses = last.get("tool_responses")
            last["tool_responses"] = [*(responses if isinstance(responses, list) else []), response]
        elif (
            message["role"] == "assistant"
            and "tool_responses" in last
            and not last.get("content")
            and not message.get("tool_calls")
        ):
            last["content"] = message["content"]
        else:
            found.append(dict(message))
    return found


def with_descriptions(tools: Sequence[Tool]) -> list[Tool]:
    """The tools with an empty description where they have none."""
    return [{**tool, "function": {"description": "", **tool["function"]}} for tool in tools]


def _has_system(template: ChatTemplate) -> bool:
    """Whether the template writes a system message."""
    messages = [{"role": "system", "content": _VALUE}, {"role": "user", "content": "Hello"}]
    try:
        return _VALUE in template.render(messages)
    except HotsplitError:
        return False


def _are_written(template: ChatTemplate, style: CallStyle, count: int, tool: Tool = _TOOL) -> bool:
    """Whether the template writes a message with this number of calls of the tool whole."""
    first_id = _SHORT_ID if style.has_short_ids else _LONG_ID
    call_ids = [f"{first_id[:-1]}{number}" for number in range(count)]
    calls, results = list[object](), list[Message]()
    for number, call_id in enumerate(call_ids):
        arguments: object = {_KEY: f"{_VALUE}_{number}"}
        if style.has_text_arguments:
            arguments = json_text(arguments)
        function = {"name": "probe", "arguments": arguments}
        calls.append({"id": call_id, "type": "function", "function": function})
        results.append({"role": "tool", "name": "probe", "tool_call_id": call_id, "content": "1"})
    content = None if style.has_null_content else ""
    messages: list[Message] = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": content, "tool_calls": calls},
        *results,
    ]
    try:
        text = template.render(messages, tools=[tool], keeps_none=style.has_null_content)
    except HotsplitError:
        return False
    is_printed = f"'{_KEY}': '{_VALUE}" in text  # as Python writes an object
    is_escaped = f'\\"{_KEY}' in text  # JSON of a string with JSON
    is_whole = all(f"{_VALUE}_{number}" in text for number in range(count))
    return is_whole and not is_printed and not is_escaped


# Qwen 2.5's words (tokenizer_config.json of Qwen2.5-7B-Instruct), for templates without tools.
_BEFORE = """\
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
"""
_AFTER = """
</tools>

For each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>"""


def with_described(
    messages: Sequence[Mapping[str, object]],
    tools: Sequence[Mapping[str, object]],
    *,
    has_system: bool,
) -> list[dict[str, object]]:
    """The messages with a description of the tools, and with results as a user's text. The
    description ends the system message; without one it is a message of its own, or begins the first
    message if the template has no such role."""
    found = _with_results(messages)
    if not tools:
        return found
    text = _BEFORE + "\n".join(map(json_text, tools)) + _AFTER
    first = found[0]
    if first["role"] == "system":
        found[0] = first | {"content": f"{first['content']}\n\n{text}"}
    elif has_system:
        found.insert(0, {"role": "system", "content": text})
    else:
        found[0] = first | {"content": f"{text}\n\n{first['content']}"}
    return found


def _with_results(messages: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
    """Consecutive results are one message, since templates may want roles to alternate."""
    found: list[dict[str, object]] = []
    is_after_result = False
    for message in messages:
        is_result = message["role"] == "tool"
        if not is_result:
            found.append(dict(message))
        else:
            text = f"<tool_response>\n{message['content']}\n</tool_response>"
            if is_after_result:
                text = f"{found.pop()['content']}\n{text}"
            found.append({"role": "user", "content": text})
        is_after_result = is_result
    return found
