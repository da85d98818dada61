"""Arguments that a model writes as text between tags become values of JSON by the tool's schema."""

from collections.abc import Mapping

from hotsplit.runtime.answers.scanner import sound_json

Schema = Mapping[str, object]

_KINDS: Mapping[str, type | tuple[type, ...]] = {
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "object": dict,
    "array": list,
    "null": type(None),
}
_WORDS = {"True": True, "False": False, "None": None}  # as Python writes them


def xml_value(text: str, schema: Schema, key: str) -> object:
    """The value of a parameter: what the text means as JSON where the schema has that type, else
    the text. Nothing, or null, is null where the schema wants no string."""
    kinds = _kinds(schema, key)
    if kinds == {"string"}:
        return text
    word = text.strip()
    if kinds is not None and "string" not in kinds and word.lower() in ("", "null", "none"):
        return None
    try:
        value = _WORDS[word] if word in _WORDS else sound_json(word)
    except ValueError:
        return text
    if kinds is None:
        return value
    return value if any(_is_of(value, kind) for kind in kinds) else text


def _is_of(value: object, kind: str) -> bool:
    if isinstance(value, bool) and kind != "boolean":
        return False
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()
    return kind != "string" and isinstance(value, _KINDS.get(kind, ()))


def _kinds(schema: Schema, key: str) -> set[str] | None:
    """The types that the schema allows for a parameter; None if it does not say."""
    properties = schema.get("properties")
    part = properties.get(key) if isinstance(properties, dict) else None
    return types_of(part)


def values_of(schema: Schema) -> list[object] | None:
    """The values to which a schema limits a parameter; None if it does not."""
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    return values if isinstance(values, list) else None


def types_of(part: object, depth: int = 0) -> set[str] | None:
    """The types of JSON that a schema allows; None if it does not say."""
    if not isinstance(part, dict) or depth > 8:
        return None
    named = part.get("type")
    if isinstance(named, str):
        return {named}
    if isinstance(named, list):
        return {kind for kind in named if isinstance(kind, str)}
    if (values := values_of(part)) is not None:
        return {kind for value in values for kind in [*_KINDS, "string"] if _named(value, kind)}
    for name in ("anyOf", "oneOf"):
        if isinstance(branches := part.get(name), list):
            found = [types_of(branch, depth + 1) for branch in branches]
            return None if None in found else set().union(*(kinds or set() for kinds in found))
    return None


def _named(value: object, kind: str) -> bool:
    return isinstance(value, str) if kind == "string" else _is_of(value, kind)
