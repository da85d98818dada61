"""Prepares a JSON schema for llguidance, which reads it as the standard (Draft 2020-12) says: it
enforces keywords and formats, ignores those that the standard does not know, and refuses those that
it would not enforce.

What is left to do here: objects get no properties that the schema does not name, as in llama.cpp;
bounds that llguidance cannot hold are narrowed; and what it would read wrongly or refuse needlessly
is changed."""

import json
from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import TypeGuard
from urllib.parse import unquote

from hotsplit.errors import HotsplitError
from hotsplit.files.typed import json_kind, one_line, shown

Schema = dict[str, object]
_SCHEMAS = {"items", "additionalProperties", "anyOf", "allOf", "oneOf", "prefixItems"}
_NAMED_SCHEMAS = {"properties", "patternProperties", "$defs", "definitions"}
_DEPTH = 8  # of properties that are compared
_MAX_WHOLE = 1 << 53  # llguidance stores numbers as float64
_LIMITS = {
    "minimum": -_MAX_WHOLE,
    "exclusiveMinimum": -_MAX_WHOLE,
    "maximum": _MAX_WHOLE,
    "exclusiveMaximum": _MAX_WHOLE,
}
# The standard's keywords that are more than annotations.
_OTHER_KEYWORDS = """
$anchor $dynamicAnchor $dynamicRef $id $recursiveAnchor $recursiveRef $ref additionalItems
const contains dependencies dependentRequired dependentSchemas else enum format if maxContains
maxItems maxLength maxProperties minContains minItems minLength minProperties multipleOf not
pattern propertyNames required then type unevaluatedItems unevaluatedProperties uniqueItems
"""
_KEYWORDS = {*_SCHEMAS, *_NAMED_SCHEMAS, *_LIMITS, *_OTHER_KEYWORDS.split()}
_OF_OBJECTS = {
    "required",
    "properties",
    "patternProperties",
    "additionalProperties",
    "allOf",
    "$ref",
}
_OPEN = {"additionalProperties", "patternProperties", "allOf", "anyOf", "oneOf", "$ref"}


def parse_schema(text: str) -> Schema:
    """Parses a schema. Raises HotsplitError for what is not JSON, or no object."""
    try:
        schema = json.loads(text, parse_constant=_not_a_number)
    except (ValueError, RecursionError) as error:
        raise HotsplitError(f"the JSON schema is not JSON: {str(error)[:200]}") from error
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        kind = "false, which allows no document" if schema is False else json_kind(schema)
        raise HotsplitError(f"the JSON schema is {kind}; wanted an object")
    return schema


def prepare_schema(schema: Schema) -> None:
    """Changes the schema for llguidance. Raises HotsplitError, with the place as a JSON pointer,
    for what it would not enforce: numbers that it would round, and counts of properties."""
    schema.pop("$schema", None)  # llguidance refuses those that it does not know
    for place, part in schemas_of(schema).items():
        if place != "#":  # the root may hold definitions under any name
            # Beside a reference to a schema that is being read, any keyword would be refused.
            for keyword in part.keys() - _KEYWORDS - {"discriminator"}:
                del part[keyword]
        if part.get("uniqueItems") is False:  # says nothing
            del part["uniqueItems"]
        _check_numbers(place, part)
        required, least = part.get("required", []), part.get("minProperties", 0)
        # A grammar cannot tell whether a key is repeated: {"a": 1, "a": 2} has one property.
        num_required = len(set(map(str, required))) if isinstance(required, list) else 0
        if isinstance(least, int | float) and least > num_required + 1:
            raise _refused(
                place, "minProperties", "at most one more than there are names in 'required'"
            )
    _close_objects(schema)


def _close_objects(schema: Schema) -> None:
    """Gives objects that name properties `additionalProperties: false` where the schema leaves it
    out, as llama.cpp does: a model that may invent further properties does. A schema that is part
    of another object's, by allOf, by alternatives beside properties or by a reference, stays
    open."""
    schemas = schemas_of(schema)
    by_anchor = {
        f"#{part['$anchor']}": place for place, part in schemas.items() if "$anchor" in part
    }
    joined = set[str]()
    for place, part in schemas.items():
        for keyword in ("allOf", "anyOf", "oneOf"):
            parts = part.get(keyword)
            if isinstance(parts, list) and (keyword == "allOf" or part.keys() & _OF_OBJECTS):
                joined |= {f"{place}/{keyword}/{number}" for number in range(len(parts))}
        if part.keys() & (_OF_OBJECTS - {"$ref"}) and "$ref" in part:
            joined.add(place)
    for place in sorted(joined):
        while isinstance(target := schemas.get(place, {}).get("$ref"), str):
            place = by_anchor.get(target, unquote(target))
            if place in joined:
                break
            joined.add(place)
    for place, part in schemas.items():
        names, required = part.get("properties"), part.get("required", [])
        if not isinstance(names, dict) or part.keys() & _OPEN or place in joined:
            continue
        if isinstance(required, list) and all(name in names for name in map(str, required)):
            least = part.get("minProperties", 0)
            if isinstance(least, int) and least <= len(names):
                part["additionalProperties"] = False


def schemas_of(root: Schema) -> dict[str, Schema]:
    """Every subschema except true and false, by JSON pointer."""
    return dict(_schemas(root))


def _schemas(root: Schema) -> Iterator[tuple[str, Schema]]:
    """Places where llguidance would find no schema are left to its own refusal."""
    waiting: list[tuple[str, object]] = [("#", root)]
    while waiting:
        place, schema = waiting.pop()
        if not isinstance(schema, dict):
            continue
        yield place, schema
        for keyword, value in schema.items():
            below = f"{place}/{_token(keyword)}"
            if keyword in _NAMED_SCHEMAS and isinstance(value, dict):
                waiting += [(f"{below}/{_token(name)}", part) for name, part in value.items()]
            elif keyword in _SCHEMAS and isinstance(value, list):
                waiting += [(f"{below}/{number}", part) for number, part in enumerate(value)]
            elif keyword in _SCHEMAS:
                waiting.append((below, value))


def place_of(schema: Schema, keyword: str) -> str | None:
    """The JSON pointer of the first subschema with a keyword."""
    return next((place for place, part in schemas_of(schema).items() if keyword in part), None)


def _check_numbers(place: str, schema: Schema) -> None:
    """Narrows bounds to 2^53, and refuses other numbers beyond it, which llguidance would round."""
    for keyword, limit in _LIMITS.items():
        value = schema.get(keyword)
        if _is_number(value) and value * limit > limit * limit:
            schema[keyword] = limit
    multiple = schema.get("multipleOf", 1)
    if _is_number(multiple) and not multiple > 0:
        raise _refused(place, "multipleOf", f"is {shown(multiple)}, wanted a number over 0")
    for keyword in (*_LIMITS, "multipleOf", "const", "enum"):
        waiting = [schema.get(keyword)]
        while waiting:
            value = waiting.pop()
            if isinstance(value, dict):
                waiting += value.values()
            elif isinstance(value, list):
                waiting += value
            elif _is_number(value) and not abs(value) <= _MAX_WHOLE:
                raise _refused(
                    place, keyword, f"numbers beyond 2^53 are not kept exactly, found {value}"
                )


def mark_unions(schemas: Mapping[str, Schema]) -> str | None:
    """Turns `oneOf` into `anyOf` where no document can match two of the alternatives: llguidance
    has no oneOf of overlapping ones, and does not look through $ref to see that they do not
    overlap, as those of pydantic's tagged unions. `schemas`: by JSON pointer. Returns the place of
    the first oneOf whose alternatives may overlap; None if there is none."""
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


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _refused(place: str, keyword: str, why: str) -> HotsplitError:
    return HotsplitError(f"JSON schema, {one_line(place)}: {shown(keyword)}: {why}")


def _token(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _not_a_number(text: str) -> float:
    raise ValueError(f"{text} is not a JSON number")
