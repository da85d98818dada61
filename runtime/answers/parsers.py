"""Parsers of tool calls, one for each way of writing them. A parser starts at a mark that begins
calls; what it returns has been written between there and `scanner.at`."""

import ast
import re
import warnings
from collections.abc import Callable, Collection, Mapping

from hotsplit.runtime.answers.calls import WrittenCall, call_of, calls_of, json_text
from hotsplit.runtime.answers.channels import ENDS, Header
from hotsplit.runtime.answers.scanner import Malformed, Scanner, Steps, sound_json
from hotsplit.runtime.answers.xml_values import Schema, xml_value

Tools = Mapping[str, Schema]  # the request's tools: names -> schemas of their arguments
Parser = Callable[[Scanner, Tools], Steps[list[WrittenCall]]]

DEEPSEEK_BEGIN, DEEPSEEK_END = (
    "<\uff5ctool\u2581calls\u2581begin\uff5c>",
    "<\uff5ctool\u2581calls\u2581end\uff5c>",
)
DEEPSEEK_CALL, DEEPSEEK_SEP = (
    "<\uff5ctool\u2581call\u2581begin\uff5c>",
    "<\uff5ctool\u2581sep\uff5c>",
)
DEEPSEEK_CALL_END = "<\uff5ctool\u2581call\u2581end\uff5c>"
_PARAMETER, _PARAMETER_END, _FUNCTION_END = "<parameter=", "</parameter>", "</function>"
_CALL_END = "</tool_call>"
_MAX_PYTHON = 64 << 10  # characters
_CONSTANTS = {"true": True, "false": False, "null": None}
QUOTE = '<|"|>'
_BARE = re.compile(r"[^,{}\[\]<]*")
_MAX_DEPTH = 64
_NAME = re.compile(r"[^\s<>\"'{}]{1,256}")


def hermes(scanner: Scanner, tools: Tools) -> Steps[list[WrittenCall]]:
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>, or a list in <tool_calls>."""
    begins, ends = ("<tool_call>", "<tool_calls>"), ("</tool_call>", "</tool_calls>")
    return (yield from _tagged(scanner, tools, begins, ends))


def granite(scanner: Scanner, tools: Tools) -> Steps[list[WrittenCall]]:
    """<|tool_call|>[{"name": ..., "arguments": {...}}, ...]; Phi-4 closes it with
    <|/tool_call|>."""
    begins, ends = ("<|tool_call|>", "<tool_call>"), ("<|/tool_call|>", "</tool_call>")
    return (yield from _tagged(scanner, tools, begins, ends))


def _tagged(
    scanner: Scanner, tools: Tools, begins: tuple[str, ...], ends: tuple[str, ...]
) -> Steps[list[WrittenCall]]:
    """One or several objects, or lists of them, between tags. The closing tag may be missing."""
    yield from scanner.take(*begins)
    calls = calls_of((yield from scanner.json()), tools)
    while not (yield from scanner.close(*ends)):
        end = scanner.at
        try:
            calls += calls_of((yield from scanner.json()), tools)
        except Malformed:
            scanner.at = end
            break
    return calls


def llama(scanner: Scanner, tools: Tools) -> Steps[list[WrittenCall]]:
    """{"name": ..., "parameters": {...}}, perhaps behind <|python_tag|>. Without that mark, the
    name must be that of a tool: any answer in JSON begins in the same way."""
    is_marked = yield from scanner.skip("<|python_tag|>")
    calls = calls_of((yield from scanner.json()), tools)
    if not is_marked and any(call.name not in tools for call in calls):
        raise Malformed
    return calls


def mistral(scanner: Scanner, tools: Tools) -> Steps[list[WrittenCall]]:
    """[TOOL_CALLS][{"name": ..., "arguments": {...}, "id": ...}, ...] or, newer,
    [TOOL_CALLS]name[CALL_ID]id[ARGS]{...}."""
    yield from scanner.take("[TOOL_CALLS]")
    yield from scanner.space()
    if (yield from scanner.follows("[", "{")):
        return calls_of((yield from scanner.json()), tools)
    name = _name((yield from scanner.word()))
    call_id = None
    if (yield from scanner.skip_after_space("[CALL_ID]")):
        yield from scanner.space()
        call_id = yield from scanner.word()
    yield from scanner.skip_after_space("[ARGS]")
    return [call_of(name, (yield from scanner.json()), call_id)]


def deepseek(scanner: Scanner, tools: Tools) -> Steps[list[WrittenCall]]:
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
        yield from scanner.close("```")
    yield from scanner.close(DEEPSEEK_CALL_END)
    yield from scanner.close(DEEPSEEK_END)
    return [call]


def qwen_xml(scanner: Scanner, tools: Tools) -> Steps[list[WrittenCall]]:
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
    while not (yield from scanner.close(_FUNCTION_END, least=2)):
        yield from scanner.space()
        if (yield from scanner.at_end()) or (yield from scanner.follows(_CALL_END)):
            break
        yield from scanner.take("<parameter=")
        key = _name((yield from scanner.word()))
        yield from scanner.take(">")
        text = yield from _parameter(scanner, schema, {*arguments, key})
        arguments[key] = xml_value(text.removeprefix("\n").removesuffix("\n"), schema, key)
    yield from scanner.close(_CALL_END)
    return [call_of(name, arguments)]


def _parameter(scanner: Scanner, schema: Schema, known: Collection[str]) -> Steps[str]:
    """A parameter's text. Its end is the first closing tag with what may come behind one, since the
    text itself may contain the tag; where that is missing, as in Qwen's own parser, the next
    parameter or the end of the call. `known`: the parameters so far."""
    marks = (_PARAMETER_END, _PARAMETER, _FUNCTION_END, _CALL_END)
    parts = []
    while True:
        parts.append((yield from scanner.until(*marks, or_end=True)))
        start = scanner.at
        mark = yield from scanner.follows(*marks)
        if mark is None:
            return "".join(parts)
        scanner.at += len(mark)
        if mark == _PARAMETER:
            is_line = not parts[-1] or parts[-1].endswith("\n")
            is_end = yield from _begins_parameter(scanner, schema, known, is_line=is_line)
        else:
            behind = scanner.at
            is_end = yield from _ends_parameter(scanner, mark)
            if mark == _PARAMETER_END:
                start = behind
        if is_end:
            scanner.at = start
            return "".join(parts)
        scanner.at = start if mark == _PARAMETER_END else start + len(mark)
        parts.append(mark)


def _begins_parameter(
    scanner: Scanner, schema: Schema, known: Collection[str], *, is_line: bool
) -> Steps[bool]:
    """Whether behind <parameter= is a new one: of the schema or, without one, at a line's start."""
    key = yield from scanner.word()
    is_tag = yield from scanner.follows(">")
    properties = schema.get("properties")
    is_known = key in properties if isinstance(properties, dict) else is_line
    return is_tag is not None and is_known and key not in known


def _ends_parameter(scanner: Scanner, mark: str) -> Steps[bool]:
    """Whether behind the mark is what ends a parameter there."""
    yield from scanner.space()
    if scanner.is_over and scanner.at == len(scanner.text):
        return True
    behind = {
        _PARAMETER_END: (_PARAMETER, _FUNCTION_END, _CALL_END),
        _FUNCTION_END: (_CALL_END, "<tool_call>"),
        _CALL_END: ("<tool_call>",),
    }
    return (yield from scanner.follows(*behind[mark])) is not None


def arg_tags(scanner: Scanner, tools: Tools) -> Steps[list[WrittenCall]]:
    """<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value>...</tool_call>, with or
    without line ends between the tags, where values are text; or JSON, as Hermes has it."""
    start = scanner.at
    yield from scanner.take("<tool_call>")
    yield from scanner.space()
    if (yield from scanner.follows("{", "[")):
        scanner.at = start
        return (yield from hermes(scanner, tools))
    name = _name((yield from scanner.word()))
    schema, arguments = tools.get(name, {}), dict[str, object]()
    while not (yield from scanner.close(_CALL_END, least=2)):
        yield from scanner.space()
        if (yield from scanner.at_end()):
            break
        yield from scanner.take("<arg_key>")
        key = (yield from scanner.until("</arg_key>")).strip()
        yield from scanner.take("</arg_key>")
        yield from scanner.space()
        yield from scanner.take("<arg_value>")
        arguments[key] = xml_value((yield from _arg_value(scanner)), schema, key)
    return [call_of(name, arguments)]


def _arg_value(scanner: Scanner) -> Steps[str]:
    """A value's text, up to the first closing tag with what may come behind one."""
    end, parts = "</arg_value>", []
    while True:
        parts.append((yield from scanner.until(end, or_end=True)))
        is_there = yield from scanner.skip(end)
        behind = scanner.at
        yield from scanner.space()
        is_last = scanner.is_over and scanner.at == len(scanner.text)
        is_end = is_last or (yield from scanner.follows("<arg_key>", _CALL_END))
        scanner.at = behind
        if is_end or not is_there:
            return "".join(parts)
        parts.append(end)


def bare_keys(scanner: Scanner, tools: Tools) -> Steps[list[WrittenCall]]:
    """<|tool_call>call:name{key:<|"|>text<|"|>,other:[1,true],...}<tool_call|>: objects whose keys
    have no quotes, and whose strings have a token of their own."""
    yield from scanner.take("<|tool_call>")
    yield from scanner.space()
    yield from scanner.skip("call:")
    name = _name((yield from scanner.until("{")).strip())
    arguments = yield from _bare_object(scanner, 0)
    yield from scanner.close("<tool_call|>")
    return [call_of(name, arguments)]


def _bare_object(scanner: Scanner, depth: int) -> Steps[dict[str, object]]:
    found = dict[str, object]()
    yield from scanner.take("{")
    while not (yield from scanner.skip_after_space("}")):
        if found:
            yield from scanner.space()
            yield from scanner.take(",")
        yield from scanner.space()
        if (yield from scanner.follows(QUOTE, '"')):
            key = yield from _bare_string(scanner)
            yield from scanner.space()
        else:
            key = (yield from scanner.until(":", "}")).strip()
        yield from scanner.take(":")
        if key in found:
            raise Malformed
        found[key] = yield from _bare_value(scanner, depth + 1)
    return found


def _bare_value(scanner: Scanner, depth: int) -> Steps[object]:
    if depth > _MAX_DEPTH:
        raise Malformed
    yield from scanner.space()
    if (yield from scanner.follows("{")):
        return (yield from _bare_object(scanner, depth))
    if (yield from scanner.skip("[")):
        items = list[object]()
        while not (yield from scanner.skip_after_space("]")):
            if items:
                yield from scanner.space()
                yield from scanner.take(",")
            items.append((yield from _bare_value(scanner, depth + 1)))
        return items
    if (yield from scanner.follows(QUOTE, '"')):
        return (yield from _bare_string(scanner))
    text = (yield from scanner.matched(_BARE)).strip()
    if text in ("", "null", "None"):
        return None
    try:
        return sound_json(text.lower() if text in ("True", "False") else text)
    except ValueError:
        return text  # a string without its marks


def _bare_string(scanner: Scanner) -> Steps[str]:
    if (yield from scanner.follows('"')):
        return str((yield from scanner.json_string()))
    yield from scanner.take(QUOTE)
    text = yield from scanner.until(QUOTE)
    yield from scanner.take(QUOTE)
    return text


def action(scanner: Scanner, tools: Tools) -> Steps[list[WrittenCall]]:
    """<|START_ACTION|>[{"tool_call_id": "0", "tool_name": ..., "parameters": {...}}, ...]
    <|END_ACTION|>. The ids count from 0 in each answer, so they are not used."""
    return (yield from _tagged(scanner, tools, ("<|START_ACTION|>",), ("<|END_ACTION|>",)))


def python_calls(scanner: Scanner, tools: Tools) -> Steps[list[WrittenCall]]:
    """<function_calls>name(key=value, ...)</function_calls>, one call a line, with values as in
    Python or JSON."""
    yield from scanner.take("<function_calls>")
    text = yield from scanner.until("</function_calls>", or_end=True)
    yield from scanner.skip("</function_calls>")
    if len(text) > _MAX_PYTHON:
        raise Malformed
    lines = [line.strip() for line in text.strip().split("\n")]
    try:
        with warnings.catch_warnings(action="ignore"):  # of escapes that Python does not know
            parsed = ast.parse("\n".join(lines))
        calls = [_python_call(statement) for statement in parsed.body]
    except (SyntaxError, TypeError, ValueError, RecursionError, MemoryError) as error:
        raise Malformed from error
    if not calls:
        raise Malformed
    return calls


def _python_call(statement: ast.stmt) -> WrittenCall:
    """Raises Malformed, or as literal_eval does for an argument that is no constant."""
    found = statement.value if isinstance(statement, ast.Expr) else None
    if not isinstance(found, ast.Call) or found.args or None in {k.arg for k in found.keywords}:
        raise Malformed  # not only arguments with names
    arguments = {k.arg: ast.literal_eval(_Constants().visit(k.value)) for k in found.keywords}
    return call_of(_name(ast.unparse(found.func)), sound_json(json_text(arguments)))


class _Constants(ast.NodeTransformer):
    """Replaces JSON's names of constants."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_CONSTANTS[node.id]) if node.id in _CONSTANTS else node


def message_to(header: Header) -> Parser:
    """The parser of a message of gpt-oss to a function, which begins with this header."""

    def parse(scanner: Scanner, tools: Tools) -> Steps[list[WrittenCall]]:
        scanner.at += header.length
        call = call_of(header.recipient, (yield from scanner.json()))
        yield from scanner.close(*ENDS)
        return [call]

    return parse


def _name(text: str) -> str:
    if _NAME.fullmatch(text) is None:
        raise Malformed
    return text
