"""Tools for a model whose chat template has none, or writes calls in a form that is not known here:
a text in the first message describes them in Hermes's form, and calls and results in earlier messages
become text. The words are those of Qwen 2.5's template (tokenizer_config.json of Qwen2.5-7B-Instruct)."""

from collections.abc import Mapping, Sequence

from hotsplit.runtime.answers.calls import json_text

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

Messages = list[dict[str, object]]


def with_described(
    messages: Sequence[Mapping[str, object]],
    tools: Sequence[Mapping[str, object]],
    *,
    has_system: bool,
) -> Messages:
    """The messages with a description of the tools, and with results as a user's text. The description
    ends the system message; without one it is a message of its own, or begins the first message if
    the template has no such role."""
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


def _with_results(messages: Sequence[Mapping[str, object]]) -> Messages:
    """Consecutive results are one message, since templates may want roles to alternate."""
    found: Messages = []
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
