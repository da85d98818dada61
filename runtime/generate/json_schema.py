"""Accepts only JSON schemas (Draft 2020-12) that a constraint enforces in full.

llguidance raises for some unknown keywords and ignores others ("nullable", misspelt ones, formats
of numbers), so this module lists the keywords that a schema may contain."""

import json
import math
from collections.abc import Iterator
from decimal import Decimal
from urllib.parse import unquote

from hotsplit.errors import HotsplitError
from hotsplit.files.typed import json_kind, one_line, shown

_ANNOTATIONS = {
    "$schema", "$comment", "title", "description", "default", "examples", "deprecated",
    "readOnly", "writeOnly", "contentEncoding", "contentMediaType", "contentSchema",
    "discriminator", "example", "externalDocs", "xml",  # OpenAPI's
}  # fmt: skip
_SCHEMA = {"items", "additionalProperties"}
_SCHEMAS = {"anyOf", "allOf", "oneOf", "prefixItems"}
_NAMED_SCHEMAS = {"properties", "patternProperties", "$defs", "definitions"}
_BOUNDS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
_VALUES = _BOUNDS | {
    "type", "enum", "const", "minLength", "maxLength", "pattern", "format", "minItems",
    "maxItems", "required", "minProperties", "maxProperties", "$ref", "$id", "$anchor",
}  # fmt: skip
_KNOWN = _ANNOTATIONS | _SCHEMA | _SCHEMAS | _NAMED_SCHEMAS | _VALUES
_OF_OBJECTS = {
    "properties",
    "patternProperties",
    "additionalProperties",
    "required",
    "allOf",
    "$ref",
}
_OPEN = {"additionalProperties", "patternProperties", "allOf", "anyOf", "oneOf", "$ref"}
_FORMATS = {
    "date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri",
}  # fmt: skip
_MAX_WHOLE = 1 << 53  # llguidance stores numbers as float64
# Automata of multiples have a state for each remainder, except for factors that end decimal
# numbers, and those of texts that match several patterns up to the product of all patterns' states.
_MAX_DEPTH = 120  # llguidance's JSON reader has a limit of 128
_MAX_REMAINDERS = 10_000
_MAX_PATTERNS = 8


def parse_schema(text: str) -> object:
    """Parses a schema. Raises HotsplitError for invalid JSON."""
    try:
        return json.loads(text, object_pairs_hook=_object, parse_constant=_not_a_number)
    except (ValueError, RecursionError) as error:
        raise HotsplitError(f"the JSON schema is not JSON: {str(error)[:200]}") from error


def check_schema(schema: object) -> dict[str, object]:
    """Returns the schema if all its keywords are enforced or annotations. Raises HotsplitError
    with the first one that is neither, and its place as a JSON pointer, and for a schema without
    finite documents."""
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        kind = "false, which allows no document" if schema is False else json_kind(schema)
        raise HotsplitError(f"the JSON schema is {kind}; wanted an object")
    schemas = schemas_of(schema)
    anchors = {f"#{found['$anchor']}" for found in schemas.values() if "$anchor" in found}
    for place, part in schemas.items():
        if place.count("/") > _MAX_DEPTH:
            raise HotsplitError(
                f"JSON schema, {one_line(place)}: is nested over {_MAX_DEPTH} deep; put parts of it"
                " into $defs"
            )
        _check_keywords(place, part)
        _check_numbers(place, part)
        target = part.get("$ref", "#")
        if not isinstance(target, str) or unquote(target) not in {*schemas, *anchors}:
            raise _refused(place, "$ref", f"{shown(target)} is not a schema inside this one")
    if "#" not in _ending(schemas):
        raise HotsplitError(
            "the JSON schema has no finite document: its required parts refer to themselves"
        )
    return schema


def close_objects(schema: dict[str, object]) -> None:
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
        if _are_named(required, names):
            least = part.get("minProperties", 0)
            if isinstance(least, int) and least <= len(names):
                part["additionalProperties"] = False


def _are_named(required: object, names: dict[str, object]) -> bool:
    return isinstance(required, list) and all(isinstance(n, str) and n in names for n in required)


def schemas_of(root: dict[str, object]) -> dict[str, dict[str, object]]:
    """Every subschema except true and false, by JSON pointer."""
    return dict(_schemas(root))


def _schemas(root: dict[str, object]) -> Iterator[tuple[str, dict[str, object]]]:
    waiting: list[tuple[str, object]] = [("#", root)]
    while waiting:
        place, schema = waiting.pop()
        if isinstance(schema, bool):
            continue
        if not isinstance(schema, dict):
            raise HotsplitError(
                f"JSON schema, {place}: is a {type(schema).__name__}; wanted an object or a boolean"
            )
        yield place, schema
        for keyword, value in schema.items():
            below = f"{place}/{_token(keyword)}"
            if keyword in _SCHEMA:
                waiting.append((below, value))
            elif keyword in _SCHEMAS:
                if not isinstance(value, list) or not value:
                    raise _refused(place, keyword, "wanted a list of schemas")
                waiting += [(f"{below}/{number}", found) for number, found in enumerate(value)]
            elif keyword in _NAMED_SCHEMAS:
                if not isinstance(value, dict):
                    raise _refused(place, keyword, "wanted an object of schemas")
                waiting += [(f"{below}/{_token(name)}", found) for name, found in value.items()]


def _check_keywords(place: str, schema: dict[str, object]) -> None:
    for keyword in schema:
        if keyword not in _KNOWN:
            raise _refused(place, keyword, "this keyword is not supported; leave it out")
    if "$id" in schema and place != "#":
        raise _refused(place, "$id", "only the whole schema may have one")
    _check_automata(place, schema)
    found = schema.get("format", "date")
    if not isinstance(found, str) or found not in _FORMATS:
        raise _refused(place, "format", f"{shown(found)} is none of {', '.join(sorted(_FORMATS))}")
    for keyword in _BOUNDS & schema.keys():
        if isinstance(schema[keyword], bool) or not isinstance(schema[keyword], int | float):
            raise _refused(place, keyword, f"is {shown(schema[keyword])}, wanted a number")
    required, least = schema.get("required", []), schema.get("minProperties", 0)
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise _refused(place, "required", "wanted a list of names")
    # A grammar cannot tell whether a key is repeated: {"a": 1, "a": 2} has one property.
    if isinstance(least, int | float) and least > len(set(required)) + 1:
        raise _refused(
            place, "minProperties", "at most one more than there are names in 'required'"
        )


def _check_automata(place: str, schema: dict[str, object]) -> None:
    """Refuses the keywords whose automata are known to be too large."""
    multiple = schema.get("multipleOf")
    if isinstance(multiple, int | float) and math.isfinite(multiple) and multiple > 0:
        remainders = Decimal(repr(multiple)).as_integer_ratio()[0]
        for factor in (2, 5):
            while remainders % factor == 0:
                remainders //= factor
        if remainders > _MAX_REMAINDERS:
            raise _refused(
                place, "multipleOf",
                f"is {shown(multiple)}, wanted at most {_MAX_REMAINDERS:,} apart from factors 2 and 5",
            )  # fmt: skip
    parts = schema.get("allOf")
    if isinstance(parts, list):
        patterns = sum(isinstance(part, dict) and "pattern" in part for part in parts)
        if patterns > _MAX_PATTERNS:
            raise _refused(
                place, "allOf", f"has {patterns} patterns, wanted at most {_MAX_PATTERNS} at once"
            )


def _check_numbers(place: str, schema: dict[str, object]) -> None:
    """Refuses numbers beyond 2^53, which llguidance may round."""
    for keyword in _BOUNDS | {"const", "enum"}:
        waiting = [schema.get(keyword)]
        while waiting:
            value = waiting.pop()
            if isinstance(value, dict):
                waiting += value.values()
            elif isinstance(value, list):
                waiting += value
            elif isinstance(value, int | float) and not abs(value) <= _MAX_WHOLE:
                raise _refused(
                    place, keyword, f"numbers beyond 2^53 are not kept exactly, found {value}"
                )


def _ending(schemas: dict[str, dict[str, object]]) -> set[str]:
    """Places of the schemas that have finite documents, judged by required parts and $ref alone."""
    found: set[str] = set()

    def ends(place: str) -> bool:
        return place not in schemas or place in found  # true, false or an anchor

    while more := {
        place
        for place, schema in schemas.items()
        if place not in found and all(ends(part) if isinstance(part, str) else any(map(ends, part))
                                      for part in _needs(place, schema))
    }:  # fmt: skip
        found |= more
    return found


def _needs(place: str, schema: dict[str, object]) -> Iterator[str | list[str]]:
    """Places of the schemas that must have finite documents for this one to have any; of a list of
    places, one suffices."""
    if "const" in schema or "enum" in schema:
        return
    if isinstance(target := schema.get("$ref"), str):
        yield unquote(target)
    for keyword in ("allOf", "anyOf", "oneOf"):
        if isinstance(parts := schema.get(keyword), list):
            places = [f"{place}/{keyword}/{number}" for number in range(len(parts))]
            yield from places if keyword == "allOf" else [places]
    properties, required = schema.get("properties"), schema.get("required")
    if schema.get("type") == "object" and isinstance(required, list):
        named = properties if isinstance(properties, dict) else {}
        rest = f"{place}/additionalProperties"
        for name in required:
            yield f"{place}/properties/{_token(name)}" if name in named else rest
    least = schema.get("minItems", 0)
    if schema.get("type") == "array" and isinstance(least, int):
        prefix = schema.get("prefixItems")
        num_prefix = len(prefix) if isinstance(prefix, list) else 0
        yield from (f"{place}/prefixItems/{number}" for number in range(min(least, num_prefix)))
        if least > num_prefix:
            yield f"{place}/items"


def _refused(place: str, keyword: str, why: str) -> HotsplitError:
    return HotsplitError(f"JSON schema, {one_line(place)}: {shown(keyword)}: {why}")


def _token(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"an object has the name {shown(twice)} twice")
    return found


def _not_a_number(text: str) -> float:
    raise ValueError(f"{text} is not a JSON number")
