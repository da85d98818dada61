"""The process that renders chat templates.

A template is a program by the author of the model file. jinja2's sandbox keeps it from Python's
internals, and the operating system enforces further limits: the process has limited memory, and
limited CPU time per rendering, and cannot open files or (unless it is root) start processes. A
request is {"template": text, "variables": {...}, "cpu_s": seconds}, its answer {"text": ...} or
{"kind": "syntax" | "template" | "other" | "size", "error": ...}.

Environment, filters and globals match transformers' apply_chat_template
(utils/chat_template_utils.py), so that the outputs are equal."""

import encodings.unicode_escape  # noqa: F401  imported now, because later no file can be opened
import json
import socket
import textwrap  # noqa: F401
from collections.abc import Callable
from datetime import datetime
from functools import lru_cache

import jinja2.constants  # noqa: F401
import jinja2.debug  # noqa: F401
from jinja2 import Template, nodes
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from hotsplit.runtime.text import worker_inside

MEMORY_BYTES = 1 << 30
MOST_CHARACTERS = 16 << 20
# Errors that a wrong template, or one that does not fit the messages, can raise.
ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    OSError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
)


class _Generation(Extension):
    """{% generation %}, which marks training targets; renders its content."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

    def _content(self, caller: Callable[[], str]) -> str:
        return caller()


class _Environment(ImmutableSandboxedEnvironment):
    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        end_idle_loops(template)
        return template


class _Namespace(Namespace):
    """jinja2's namespace, without access to Python's special attributes."""

    def __init__(*args: object, **names: object) -> None:  # allows a variable named `self`
        made = dict(*args[1:], **names)
        for name in made:
            _check_attribute(name)
        Namespace.__init__(args[0], made)  # type: ignore[arg-type]

    def __setitem__(self, name: str, value: object) -> None:
        _check_attribute(name)
        Namespace.__setitem__(self, name, value)


class _Dict:
    """`dict` for templates, with no attribute of the type but `fromkeys`."""

    def __call__(self, *args: object, **names: object) -> dict:
        return dict(*args, **names)

    def fromkeys(self, *args: object) -> dict:
        return dict.fromkeys(*args)  # type: ignore[call-overload]


def main() -> None:
    """Answers requests until its input ends."""
    datetime.now().strftime("%c")  # reads the time zone while files can be opened
    worker_inside.confine(more_memory_bytes=MEMORY_BYTES, open_files=3)  # stdin, stdout and stderr
    with socket.socket(fileno=0) as connection:
        while (request := worker_inside.receive(connection)) is not None:
            worker_inside.send(connection, json.dumps(_answer(json.loads(request))).encode())


def _reason(error: Exception) -> str:
    """What a template did wrong, without Python's names for it."""
    if isinstance(error, RecursionError):
        return "a macro calls itself without end"
    if isinstance(error, KeyError):
        return f"there is no {error}"
    if str(error).startswith("no loader"):
        return "it includes another template, which is not supported"
    return str(error) or "it uses an operation that its values do not support"


def _answer(request: dict) -> dict[str, str]:
    try:
        with worker_inside.limited(request["cpu_s"]):
            text = _compiled(request["template"]).render(**request["variables"])
    except TemplateSyntaxError as error:
        return {"kind": "syntax", "error": _one_line(f"{error.message} (line {error.lineno})")}
    except TemplateError as error:
        return {"kind": "template", "error": _one_line(str(error))}
    except MemoryError:
        return {"kind": "other", "error": f"they need more than {MEMORY_BYTES >> 20} MiB"}
    except ERRORS as error:
        return {"kind": "other", "error": _one_line(_reason(error))}
    if len(text) > MOST_CHARACTERS:
        return {"kind": "size", "error": f"{len(text)} characters"}
    return {"text": text}


@lru_cache(maxsize=4)
def _compiled(text: str) -> Template:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["dict"] = _Dict()
    environment.globals["namespace"] = _Namespace
    return environment.from_string(text)


def _to_json(
    x: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON, without the HTML escapes of jinja2's filter."""
    return json.dumps(
        x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: object) -> None:
    raise TemplateError(str(message))


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _check_attribute(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot have the attribute {name[:40]!r}")


def _one_line(message: str) -> str:
    return " ".join(message[:2000].split())[:300]


# ---- loops that have found what they look for ---------------------------------------------------

# What a condition may consist of; reading it changes nothing.
_PLAIN = (
    nodes.Name,
    nodes.Const,
    nodes.Getattr,
    nodes.Getitem,
    nodes.Not,
    nodes.And,
    nodes.Or,
    nodes.Compare,
    nodes.Operand,
)


def end_idle_loops(template: nodes.Template) -> None:
    """Changes `template`: loops over numbers or a slice, whose body is one `if`, end at an
    iteration without effect that is followed only by others.

    Jinja has no `break` of its own, so templates search with a flag:

        {%- for j in range(loop.index0 - 1, -1, -1) %}
            {%- if not seen.it %}...{%- set seen.it = true %}...{%- endif %}
        {%- endfor %}

    Where every message looks at all others, as in Gemma 4's template, 4,096 messages take 10 to
    20 s. An iteration without any effect, because of conditions that do not depend on the loop's
    variable, is followed by others of the same kind: the text is the same if the loop ends
    there."""
    for loop in template.find_all(nodes.For):
        if len(loop.body) == 1 and isinstance(choice := loop.body[0], nodes.If):
            own = {"loop", *_names(loop.target)}
            if _is_sequence(loop.iter):
                _end_where_idle(choice, own)


def _end_where_idle(choice: nodes.If, own: set[str]) -> None:
    """Adds a break to each empty branch that is reached through conditions without `own`, the names
    of the loop's variables."""
    for branch in (choice, *choice.elif_):
        if not _is_plain(branch.test, own):
            return
        if not branch.body:
            branch.body = [nodes.Break(lineno=branch.lineno)]
    if not choice.else_:
        choice.else_ = [nodes.Break(lineno=choice.lineno)]


def _is_sequence(iterated: nodes.Node) -> bool:
    """Whether reading fewer of its items changes nothing, as it would for a generator."""
    if isinstance(iterated, nodes.Call):
        return isinstance(iterated.node, nodes.Name) and iterated.node.name == "range"
    return isinstance(iterated, nodes.Getitem) and isinstance(iterated.arg, nodes.Slice)


def _is_plain(test: nodes.Node, own: set[str]) -> bool:
    is_known = all(isinstance(part, _PLAIN) for part in (test, *test.find_all(nodes.Node)))
    return is_known and not own & _names(test)


def _names(node: nodes.Node) -> set[str]:
    found = {name.name for name in node.find_all(nodes.Name)}
    return found | {node.name} if isinstance(node, nodes.Name) else found
