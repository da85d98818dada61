"""Grammars of tool calls: a call that is required is enforced in the template's form."""

import json
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from string import Formatter

from hotsplit.errors import HotsplitError
from hotsplit.runtime.answers.calls import Tool, name_of, schema_of
from hotsplit.runtime.answers.formats import CallForm, bare_key, bare_text, plain_text
from hotsplit.runtime.answers.parsers import QUOTE
from hotsplit.runtime.answers.xml_values import Schema, types_of, values_of
from hotsplit.runtime.generate.constraints import Constraint, tool_call_constraint
from hotsplit.runtime.text.codec import TextCodec

log = logging.getLogger("hotsplit.serve")

MAX_SCHEMA_BYTES = 64 << 10  # of all tools together
_OBJECT: dict[str, object] = {"type": "object"}
_BARE_KEY = r'/[^\s,:{}\[\]"<]+/'
_MAX_DEPTH = 8  # of schemas within each other that are enforced where keys have no quotes


def forced_calls(
    known: CallForm, tools: Sequence[Tool], codec: TextCodec, *, is_parallel: bool
) -> Constraint:
    """A constraint to calls of these tools, with arguments that are valid under their schemas.
    Where a schema cannot be enforced and its tool is not `strict`, any object is valid.

    Raises HotsplitError."""
    schemas = [_OBJECT | schema_of(tool) for tool in tools]
    names = [name_of(tool) for tool in tools]
    try:
        size = len(json.dumps(schemas))
        if size > MAX_SCHEMA_BYTES:
            raise HotsplitError(
                f"the schemas of tools have {size} bytes, wanted at most {MAX_SCHEMA_BYTES}"
            )
        return _constraint(known, names, schemas, codec, is_parallel=is_parallel)
    except HotsplitError as error:
        if any(tool["function"].get("strict") for tool in tools):
            raise
        log.info("arguments of a required call are any object: %s", error)
        anything = [_OBJECT for _ in tools]
        return _constraint(known, names, anything, codec, is_parallel=is_parallel)


def _constraint(
    known: CallForm,
    names: Sequence[str],
    schemas: Sequence[dict[str, object]],
    codec: TextCodec,
    *,
    is_parallel: bool,
) -> Constraint:
    written = _CallGrammar(codec, known)
    grammar = written.of(known, names, schemas, is_parallel=is_parallel)
    return tool_call_constraint(grammar, written.schemas, codec)


class _CallGrammar:
    """Writes the Lark grammar of calls. `schemas`: of its rules that are JSON."""

    def __init__(self, codec: TextCodec, known: CallForm) -> None:
        added = codec.tokenizer.get_added_tokens_decoder()
        self._ids = {token.content: i for i, token in added.items() if token.content in known.marks}
        self._parameter, self._any = known.parameter, ""
        self._mark = re.compile("|".join(map(re.escape, self._ids)) or r"(?!)")
        self._rules: list[str] = []
        self.schemas: dict[str, dict[str, object]] = {}

    def of(
        self,
        known: CallForm,
        names: Sequence[str],
        schemas: Sequence[dict[str, object]],
        *,
        is_parallel: bool,
    ) -> str:
        calls = [
            " ".join(self._call(known.call, name, schema))
            for name, schema in zip(names, schemas, strict=True)
        ]
        start = [*self._literal(known.begin), "call"]
        if is_parallel and known.between is not None:
            start.append(f"({' '.join([*self._literal(known.between), 'call'])})*")
        start += self._literal(known.end)
        before = " ".join(self._call(known.before, "", {}))
        if before and "<|end|>" in self._ids:
            start.insert(0, f"({before})?")
        rules = [f"start: {' '.join(start)}", f"call: {' | '.join(calls)}", *self._rules]
        return "".join(f"{rule}\n" for rule in rules)

    def _call(self, form: str, name: str, schema: dict[str, object]) -> Iterator[str]:
        for literal, slot, _, _ in Formatter().parse(form):
            yield from self._literal(literal)
            if slot == "name":
                yield from self._literal(name)
            elif slot == "string":
                yield from self._literal(json.dumps(name, ensure_ascii=False))
            elif slot == "object":
                yield self._json(schema)
            elif slot == "parameters":
                yield from self._parameters(schema)
            elif slot == "bare":
                yield self._bare(schema, 0)
            elif slot == "keywords":
                yield self._members(
                    schema, ", ", lambda key, part: f"{json.dumps(f'{key}=')} {self._json(part)}"
                )
            elif slot == "text":
                yield self._rule("/(?s:.*)/", is_terminal=True)

    def _parameters(self, schema: Schema) -> Iterator[str]:
        head, tail = self._parameter.split("{value}")
        properties, required = schema.get("properties"), schema.get("required")
        for key, part in (properties if isinstance(properties, dict) else {}).items():
            value = self._value(part if isinstance(part, dict) else {}, tail)
            rule = " ".join([*self._literal(head.format(key=key)), *value])
            is_required = isinstance(required, list) and key in required
            yield f"({rule})" if is_required else f"({rule})?"

    def _value(self, schema: dict[str, object], tail: str) -> Iterator[str]:
        """A parameter's text, and the tail that closes it."""
        values, kinds = values_of(schema), types_of(schema)
        if values:
            literals = [" ".join(self._literal(plain_text(value) + tail)) for value in values]
            yield f"({' | '.join(literals)})"
        elif kinds is None or "string" in kinds:
            yield from self._text_up_to(tail)
        else:
            yield self._json(schema)
            yield from self._literal(tail)

    def _text_up_to(self, tail: str) -> Iterator[str]:
        """Any text without the tail, and the tail."""
        if self._mark.match(tail):
            yield self._rule("/(?s:.*)/", is_terminal=True)
            yield from self._literal(tail)
        else:
            yield self._rule("/(?s:.*)/", f"[suffix={json.dumps(tail)}]")

    def _bare(self, schema: dict[str, object], depth: int) -> str:
        """A value whose strings are between tokens and whose keys have no quotes; any value of
        their types where the schema says more."""
        values, kinds = values_of(schema), types_of(schema)
        if values:
            return f"({' | '.join(' '.join(self._literal(bare_text(value))) for value in values)})"
        if kinds is None or depth > _MAX_DEPTH:
            return self._bare_any()
        forms = []
        for kind in sorted(kinds):
            if kind == "string":
                forms.append(" ".join([*self._literal(QUOTE), *self._text_up_to(QUOTE)]))
            elif kind == "object":
                forms.append(self._bare_object(schema, depth))
            elif kind == "array":
                items = schema.get("items")
                item = self._bare(items if isinstance(items, dict) else {}, depth + 1)
                forms.append(f'"[" ({item} ("," {item})*)? "]"')
            else:
                forms.append(self._json({"type": kind}))
        return self._rule(" | ".join(forms))

    def _bare_object(self, schema: dict[str, object], depth: int) -> str:
        """Properties in the schema's order; any object if it names none."""
        if not schema.get("properties"):
            anything, key = self._bare_any(), self._rule(_BARE_KEY, is_terminal=True)
            return f'"{{" ({key} ":" {anything} ("," {key} ":" {anything})*)? "}}"'

        def member(key: str, part: dict[str, object]) -> str:
            return " ".join([*self._literal(f"{bare_key(key)}:"), self._bare(part, depth + 1)])

        return f'"{{" {self._members(schema, ",", member)} "}}"'

    def _members(
        self, schema: Schema, comma: str, member_of: Callable[[str, dict[str, object]], str]
    ) -> str:
        """The properties of a schema in its order, with commas between those that are there."""
        properties, required = schema.get("properties"), schema.get("required")
        behind, first, is_optional = "", list[str](), True  # of the members from here on
        named = properties if isinstance(properties, dict) else {}
        for key, part in reversed(named.items()):
            member = member_of(key, part if isinstance(part, dict) else {})
            is_required = isinstance(required, list) and key in required
            first = [f"{member} {behind}", *([] if is_required else first)]
            is_optional &= not is_required
            rest = f"{json.dumps(comma)} {member}"
            behind = self._rule(f"{rest if is_required else f'({rest})?'} {behind}")
        return f"({' | '.join(first)}){'?' if is_optional else ''}" if first else ""

    def _bare_any(self) -> str:
        """Any value, as a rule that names itself."""
        if not self._any:
            self._any = f"any{len(self._rules)}"
            text = " ".join([*self._literal(QUOTE), *self._text_up_to(QUOTE)])
            key = self._rule(_BARE_KEY, is_terminal=True)
            scalar = self._json({"type": ["number", "boolean", "null"]})
            members = f'{key} ":" {self._any} ("," {key} ":" {self._any})*'
            items = f'{self._any} ("," {self._any})*'
            self._rules.append(
                f'{self._any}: {text} | {scalar} | "{{" ({members})? "}}" | "[" ({items})? "]"'
            )
        return self._any

    def _json(self, schema: dict[str, object]) -> str:
        name = f"json{len(self.schemas)}"
        self.schemas[name] = schema
        return name

    def _rule(self, body: str, attributes: str = "", *, is_terminal: bool = False) -> str:
        name = f"{'T' if is_terminal else 't'}{len(self._rules)}"
        self._rules.append(f"{name}{attributes}: {body}")
        return name

    def _literal(self, text: str) -> Iterator[str]:
        """The text as strings and, where it has a mark, the mark's token."""
        at = 0
        for mark in self._mark.finditer(text):
            yield from self._string(text[at : mark.start()])
            yield f"<[{self._ids[mark.group()]}]>"
            at = mark.end()
        yield from self._string(text[at:])

    def _string(self, text: str) -> Iterator[str]:
        if text:
            yield json.dumps(text, ensure_ascii=False)
