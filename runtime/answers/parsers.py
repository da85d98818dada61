"""Parsers of tool calls, one for each way of writing them. A parser starts at a mark that begins
calls; what it returns has been written between there and `scanner.at`."""

import re
from collections.abc import Callable, Mapping

from hotsplit.runtime.answers.calls import Call, call_of, calls_of
from hotsplit.runtime.answers.channels import ENDS, Header
from hotsplit.runtime.answers.scanner import Malformed, Scanner, Steps
from hotsplit.runtime.answers.xml_values import Schema, xml_value

Tools = Mapping[str, Schema]  # the request's tools: names -> schemas of their arguments
Parser = Callable[[Scanner, Tools], Steps[list[Call]]]

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


def hermes(scanner: Scanner, tools: Tools) -> Steps[list[Call]]:
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>, or a list in <tool_calls>."""
    begins, ends = ("<tool_call>", "<tool_calls>"), ("</tool_call>", "</tool_calls>")
    return (yield from _tagged(scanner, begins, ends))


def granite(scanner: Scanner, tools: Tools) -> Steps[list[Call]]:
    """<|tool_call|>[{"name": ..., "arguments": {...}}, ...]; Phi-4 closes it with <|/tool_call|>."""
    begins, ends = ("<|tool_call|>", "<tool_call>"), ("<|/tool_call|>", "</tool_call>")
    return (yield from _tagged(scanner, begins, ends))


def _tagged(scanner: Scanner, begins: tuple[str, ...], ends: tuple[str, ...]) -> Steps[list[Call]]:
    """One or several objects, or lists of them, between tags. The closing tag may be missing."""
    yield from scanner.take(*begins)
    calls = calls_of((yield from scanner.json()))
    while not (yield from scanner.skip_after_space(*ends)):
        end = scanner.at
        try:
            calls += calls_of((yield from scanner.json()))
        except Malformed:
            scanner.at = end
            break
    return calls


def llama(scanner: Scanner, tools: Tools) -> Steps[list[Call]]:
    """{"name": ..., "parameters": {...}}, perhaps behind <|python_tag|>. Without that mark, the
    name must be that of a tool: any answer in JSON begins in the same way."""
    is_marked = yield from scanner.skip("<|python_tag|>")
    calls = calls_of((yield from scanner.json()))
    if not is_marked and any(call.name not in tools for call in calls):
        raise Malformed
    return calls


def mistral(scanner: Scanner, tools: Tools) -> Steps[list[Call]]:
    """[TOOL_CALLS][{"name": ..., "arguments": {...}, "id": ...}, ...] or, newer,
    [TOOL_CALLS]name[CALL_ID]id[ARGS]{...}."""
    yield from scanner.take("[TOOL_CALLS]")
    yield from scanner.space()
    if (yield from scanner.follows("[", "{")):
        return calls_of((yield from scanner.json()))
    name = _name((yield from scanner.word()))
    call_id = None
    if (yield from scanner.skip_after_space("[CALL_ID]")):
        yield from scanner.space()
        call_id = yield from scanner.word()
    yield from scanner.skip_after_space("[ARGS]")
    return [call_of(name, (yield from scanner.json()), call_id)]


def deepseek(scanner: Scanner, tools: Tools) -> Steps[list[Call]]:
    """Between marks of their own: `name`, separator, {...} in V3.1; `function`, separator, `name`
    and {...} as a block of Markdown before."""
    if (yield from scanner.skip(DEEPSEEK_BEGIN)):
        yield from scanner.space()
    yield from scanner.take(DEEPSEEK_CALL)
    name = yield from scanner.until(DEEPSEEK_SEP)
    yield from scanner.take(DEEPSEEK_SEP)
    yield from scanner.space()
    is_block = not (yield from scanner.follows("{"))
    if is_block:
        name = yield from scanner.until("\n")
        yield from scanner.space()
        yield from scanner.skip("```json", "```")
    call = call_of(_name(name.strip()), (yield from scanner.json()))
    if is_block:
        yield from scanner.skip_after_space("```")
    yield from scanner.skip_after_space(DEEPSEEK_CALL_END)
    yield from scanner.skip_after_space(DEEPSEEK_END)
    return [call]


def qwen_xml(scanner: Scanner, tools: Tools) -> Steps[list[Call]]:
    """<tool_call><function=name><parameter=key>value</parameter>...</function></tool_call>, where
    values are text; or JSON, as Hermes has it."""
    start = scanner.at
    if (yield from scanner.skip("<tool_call>")):
        yield from scanner.space()
        if (yield from scanner.follows("{", "[")):
            scanner.at = start
            return (yield from hermes(scanner, tools))
    yield from scanner.take("<function=")
    name = _name((yield from scanner.word()))
    yield from scanner.take(">")
    schema, arguments = tools.get(name, {}), dict[str, object]()
    while not (yield from scanner.skip_after_space("</function>")):
        yield from scanner.space()
        yield from scanner.take("<parameter=")
        key = _name((yield from scanner.word()))
        yield from scanner.take(">")
        arguments[key] = xml_value((yield from _parameter(scanner)), schema, key)
    yield from scanner.skip_after_space("</tool_call>")
    return [call_of(name, arguments)]


def _parameter(scanner: Scanner) -> Steps[str]:
    """A parameter's text. Its end is the first closing tag with what may come behind one: the text
    itself may contain the tag."""
    parts = []
    while True:
        parts.append((yield from scanner.until("</parameter>")))
        yield from scanner.take("</parameter>")
        start = scanner.at
        yield from scanner.space()
        is_end = yield from scanner.follows("<parameter=", "</function>")
        scanner.at = start
        if is_end:
            return "".join(parts)
        parts.append("</parameter>")


def message_to(header: Header) -> Parser:
    """The parser of a message of gpt-oss to a function, which begins with this header."""

    def parse(scanner: Scanner, tools: Tools) -> Steps[list[Call]]:
        scanner.at += header.length
        call = call_of(header.recipient, (yield from scanner.json()))
        yield from scanner.skip_after_space(*ENDS)
        return [call]

    return parse


def _name(text: str) -> str:
    if _NAME.fullmatch(text) is None:
        raise Malformed
    return text
