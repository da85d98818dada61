"""Turns `oneOf` into `anyOf` where no document can match two of the alternatives.

llguidance has no oneOf of overlapping alternatives, and does not look through $ref to see that they
do not overlap, as those of pydantic's tagged unions."""

import json
from collections.abc import Mapping
from itertools import combinations
from urllib.parse import unquote

Schema = dict[str, object]
_DEPTH = 8  # of properties that are compared


def mark_unions(schemas: Mapping[str, Schema]) -> str | None:
    """Changes the schemas, given by JSON pointer. Returns the place of the first oneOf whose
    alternatives may overlap; None if there is none."""
    unclear = None
    for place, schema in schemas.items():
        parts = schema.get("oneOf")
        if not isinstance(parts, list) or "anyOf" in schema:
            continue
        alternatives = [_resolved(part, schemas) for part in parts]
        tag = _tag(schema)
        pairs = combinations(alternatives, 2)
        if not all(_are_apart(a, b, tag, schemas, _DEPTH) for a, b in pairs):
            unclear = unclear or place
            continue
        schema["anyOf"] = schema.pop("oneOf")
        for alternative in alternatives:
            if tag is not None and tag in _properties(alternative):
                alternative["required"] = sorted({*_required(alternative), tag})
    return unclear


def _tag(schema: Schema) -> str | None:
    """The property that OpenAPI's discriminator names. It may be optional, for its default, but a
    document without it would match several alternatives, so it is then required."""
    discriminator = schema.pop("discriminator", None)
    name = discriminator.get("propertyName") if isinstance(discriminator, dict) else None
    return name if isinstance(name, str) else None


def _resolved(part: object, schemas: Mapping[str, Schema]) -> Schema:
    """The schema that a $ref stands for; {}, which overlaps any other, if it is not one."""
    for _ in range(_DEPTH):
        if not isinstance(part, dict):
            return {}
        if "$ref" not in part:
            return part
        part = schemas.get(unquote(str(part["$ref"])))
    return {}


def _are_apart(
    a: Schema, b: Schema, tag: str | None, schemas: Mapping[str, Schema], depth: int
) -> bool:
    """True if no document matches both, given that both have the property `tag`."""
    types, values = (_types(a), _types(b)), (_values(a), _values(b))
    if types[0] is not None and types[1] is not None and not types[0] & types[1]:
        return True
    if values[0] is not None and values[1] is not None:
        return not values[0] & values[1]
    if types != ({"object"}, {"object"}) or depth == 0:
        return False
    shared = _properties(a).keys() & _properties(b).keys()
    always = shared & ((_required(a) & _required(b)) | {tag})
    parts = ([_resolved(_properties(x)[name], schemas) for x in (a, b)] for name in always)
    return any(_are_apart(left, right, None, schemas, depth - 1) for left, right in parts)


def _types(schema: Schema) -> set[str] | None:
    """The types of the schema's documents; an integer is a number. None if it does not say."""
    found = schema.get("type")
    if (values := _listed(schema)) is not None:
        names = [_TYPES[type(value)] for value in values]
    elif isinstance(found, str):
        names = [found]
    elif isinstance(found, list):
        names = [str(name) for name in found]
    else:
        return None
    return {"number" if name == "integer" else name for name in names}


_TYPES = {
    str: "string",
    int: "number",
    float: "number",
    bool: "boolean",
    type(None): "null",
    list: "array",
    dict: "object",
}
_NUMERIC = {"number", "array", "object"}  # may be, or contain, numbers


def _listed(schema: Schema) -> list[object] | None:
    """The only documents of the schema; None if it does not list them."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return values if isinstance(values, list) else None


def _values(schema: Schema) -> set[str] | None:
    """The only documents of the schema, as JSON; None if it lists none, or one with numbers, which
    can be written in several ways (1, 1.0)."""
    values = _listed(schema)
    if values is None or any(_TYPES[type(value)] in _NUMERIC for value in values):
        return None
    return {json.dumps(value) for value in values}


def _properties(schema: Schema) -> Mapping[str, object]:
    found = schema.get("properties")
    return found if isinstance(found, dict) else {}


def _required(schema: Schema) -> set[str]:
    found = schema.get("required")
    return {str(name) for name in found} if isinstance(found, list) else set()
