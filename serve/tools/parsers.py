"""Parsers of tool calls, one for each way of writing them. A parser starts at a mark that begins
calls; what it returns has been written between there and `reader.at`."""

import re
from collections.abc import Callable, Mapping

from hotsplit.serve.tools.calls import Call, call_of, calls_of
from hotsplit.serve.tools.reader import Malformed, Reader, Steps
from hotsplit.serve.tools.xml_values import Schema, xml_value

Tools = Mapping[str, Schema]  # the request's tools: names -> schemas of their arguments
Parser = Callable[[Reader, Tools], Steps[list[Call]]]

DEEPSEEK_BEGIN, DEEPSEEK_END = (
    "<\uff5ctool\u2581calls\u2581begin\uff5c>",
    "<\uff5ctool\u2581calls\u2581end\uff5c>",
)
DEEPSEEK_CALL, DEEPSEEK_SEP = (
    "<\uff5ctool\u2581call\u2581begin\uff5c>",
    "<\uff5ctool\u2581sep\uff5c>",
)
DEEPSEEK_CALL_END = "<\uff5ctool\u2581call\u2581end\uff5c>"
_NAME = re.compile(r"[^\s<>\"'{}]{1,256}")


def hermes(reader: Reader, tools: Tools) -> Steps[list[Call]]:
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>, or a list in <tool_calls>."""
    begins, ends = ("<tool_call>", "<tool_calls>"), ("</tool_call>", "</tool_calls>")
    return (yield from _tagged(reader, begins, ends))


def granite(reader: Reader, tools: Tools) -> Steps[list[Call]]:
    """<|tool_call|>[{"name": ..., "arguments": {...}}, ...]; Phi-4 closes it with <|/tool_call|>."""
    begins, ends = ("<|tool_call|>", "<tool_call>"), ("<|/tool_call|>", "</tool_call>")
    return (yield from _tagged(reader, begins, ends))


def _tagged(reader: Reader, begins: tuple[str, ...], ends: tuple[str, ...]) -> Steps[list[Call]]:
    """One or several objects, or lists of them, between tags. The closing tag may be missing."""
    yield from reader.take(*begins)
    calls = calls_of((yield from reader.json()))
    while not (yield from reader.skip_after_space(*ends)):
        end = reader.at
        try:
            calls += calls_of((yield from reader.json()))
        except Malformed:
            reader.at = end
            break
    return calls


def llama(reader: Reader, tools: Tools) -> Steps[list[Call]]:
    """{"name": ..., "parameters": {...}}, perhaps behind <|python_tag|>. Without that mark, the
    name must be that of a tool: any answer in JSON begins in the same way."""
    is_marked = yield from reader.skip("<|python_tag|>")
    calls = calls_of((yield from reader.json()))
    if not is_marked and any(call.name not in tools for call in calls):
        raise Malformed
    return calls


def mistral(reader: Reader, tools: Tools) -> Steps[list[Call]]:
    """[TOOL_CALLS][{"name": ..., "arguments": {...}, "id": ...}, ...] or, newer,
    [TOOL_CALLS]name[CALL_ID]id[ARGS]{...}."""
    yield from reader.take("[TOOL_CALLS]")
    yield from reader.space()
    if (yield from reader.follows("[", "{")):
        return calls_of((yield from reader.json()))
    name = _name((yield from reader.word()))
    call_id = None
    if (yield from reader.skip_after_space("[CALL_ID]")):
        yield from reader.space()
        call_id = yield from reader.word()
    yield from reader.skip_after_space("[ARGS]")
    return [call_of(name, (yield from reader.json()), call_id)]


def deepseek(reader: Reader, tools: Tools) -> Steps[list[Call]]:
    """Between marks of their own: `name`, separator, {...} in V3.1; `function`, separator, `name`
    and {...} as a block of Markdown before."""
    if (yield from reader.skip(DEEPSEEK_BEGIN)):
        yield from reader.space()
    yield from reader.take(DEEPSEEK_CALL)
    name = yield from reader.until(DEEPSEEK_SEP)
    yield from reader.take(DEEPSEEK_SEP)
    yield from reader.space()
    is_block = not (yield from reader.follows("{"))
    if is_block:
        name = yield from reader.until("\n")
        yield from reader.space()
        yield from reader.skip("```json", "```")
    call = call_of(_name(name.strip()), (yield from reader.json()))
    if is_block:
        yield from reader.skip_after_space("```")
    yield from reader.skip_after_space(DEEPSEEK_CALL_END)
    yield from reader.skip_after_space(DEEPSEEK_END)
    return [call]


def qwen_xml(reader: Reader, tools: Tools) -> Steps[list[Call]]:
    """<tool_call><function=name><parameter=key>value</parameter>...</function></tool_call>, where
    values are text; or JSON, as Hermes has it."""
    start = reader.at
    if (yield from reader.skip("<tool_call>")):
        yield from reader.space()
        if (yield from reader.follows("{", "[")):
            reader.at = start
            return (yield from hermes(reader, tools))
    yield from reader.take("<function=")
    name = _name((yield from reader.word()))
    yield from reader.take(">")
    schema, arguments = tools.get(name, {}), dict[str, object]()
    while not (yield from reader.skip_after_space("</function>")):
        yield from reader.space()
        yield from reader.take("<parameter=")
        key = _name((yield from reader.word()))
        yield from reader.take(">")
        arguments[key] = xml_value((yield from _parameter(reader)), schema, key)
    yield from reader.skip_after_space("</tool_call>")
    return [call_of(name, arguments)]


def _parameter(reader: Reader) -> Steps[str]:
    """A parameter's text. Its end is the first closing tag with what may come behind one: the text
    itself may contain the tag."""
    parts = []
    while True:
        parts.append((yield from reader.until("</parameter>")))
        yield from reader.take("</parameter>")
        start = reader.at
        yield from reader.space()
        is_end = yield from reader.follows("<parameter=", "</function>")
        reader.at = start
        if is_end:
            return "".join(parts)
        parts.append("</parameter>")


def harmony(reader: Reader, tools: Tools) -> Steps[list[Call]]:
    """A message of gpt-oss to a recipient: a header with to=functions.name, <|message|>, {...}."""
    header = yield from reader.until("<|message|>")
    yield from reader.take("<|message|>")
    name = recipient_of(header)
    if name is None:
        raise Malformed
    call = call_of(name, (yield from reader.json()))
    yield from reader.skip_after_space("<|call|>", "<|end|>", "<|return|>")
    return [call]


_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")


def recipient_of(header: str) -> str | None:
    """The function that a message of gpt-oss calls; None if it is for the user."""
    found = _RECIPIENT.search(header)
    return None if found is None else found.group(1)


def _name(text: str) -> str:
    if _NAME.fullmatch(text) is None:
        raise Malformed
    return text
