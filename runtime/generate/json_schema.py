"""Prepares a JSON schema for llguidance, which reads it as the standard (Draft 2020-12) says: it
enforces keywords and formats, ignores those that the standard does not know, and refuses those that
it would not enforce.

What is left to do here: objects get no properties that the schema does not name, as in llama.cpp; bounds
that llguidance cannot hold are narrowed; and what it would read wrongly or refuse needlessly is
changed."""

import json
from collections.abc import Iterator
from typing import TypeGuard
from urllib.parse import unquote

from hotsplit.errors import HotsplitError
from hotsplit.files.typed import json_kind, one_line, shown

Schema = dict[str, object]
_SCHEMAS = {"items", "additionalProperties", "anyOf", "allOf", "oneOf", "prefixItems"}
_NAMED_SCHEMAS = {"properties", "patternProperties", "$defs", "definitions"}
_MAX_WHOLE = 1 << 53  # llguidance stores numbers as float64
_LIMITS = {
    "minimum": -_MAX_WHOLE,
    "exclusiveMinimum": -_MAX_WHOLE,
    "maximum": _MAX_WHOLE,
    "exclusiveMaximum": _MAX_WHOLE,
}
# The standard's keywords that are more than annotations.
_KEYWORDS = (
    _SCHEMAS
    | _NAMED_SCHEMAS
    | _LIMITS.keys()
    | {
        "$anchor",
        "$dynamicAnchor",
        "$dynamicRef",
        "$id",
        "$recursiveAnchor",
        "$recursiveRef",
        "$ref",
        "additionalItems",
        "const",
        "contains",
        "dependencies",
        "dependentRequired",
        "dependentSchemas",
        "else",
        "enum",
        "format",
        "if",
        "maxContains",
        "maxItems",
        "maxLength",
        "maxProperties",
        "minContains",
        "minItems",
        "minLength",
        "minProperties",
        "multipleOf",
        "not",
        "pattern",
        "propertyNames",
        "required",
        "then",
        "type",
        "unevaluatedItems",
        "unevaluatedProperties",
        "uniqueItems",
    }
)
_OF_OBJECTS = {
    "properties",
    "patternProperties",
    "additionalProperties",
    "required",
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
    """Changes the schema for llguidance. Raises HotsplitError, with the place as a JSON pointer, for
    what it would not enforce: numbers that it would round, and counts of properties."""
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
    """Gives objects that name properties `additionalProperties: false` where the schema leaves it out,
    as llama.cpp does: a model that may invent further properties does. A schema that is part of another
    object's, by allOf, by alternatives beside properties or by a reference, stays open."""
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


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _refused(place: str, keyword: str, why: str) -> HotsplitError:
    return HotsplitError(f"JSON schema, {one_line(place)}: {shown(keyword)}: {why}")


def _token(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _not_a_number(text: str) -> float:
    raise ValueError(f"{text} is not a JSON number")
