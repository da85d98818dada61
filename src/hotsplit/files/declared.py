"""Values from outside, read as the object that is declared for them.

An object is declared once, as a dataclass (or another type) whose annotations are its kinds and
bounds. pydantic compares values with them: strictly (no "1" for 1, no 1 for true), without unknown
keys, and with finite numbers only, unless an annotation says otherwise. It takes 50 ms to import,
which is more than `hotsplit --help` may spend, so it is imported at the first use."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from annotated_types import Ge, Gt, Le

from hotsplit.errors import HotsplitError
from hotsplit.files.typed import MAX_COUNT, MAX_SHOWN, one_line, plain, shown

if TYPE_CHECKING:
    from pydantic import TypeAdapter

T = TypeVar("T")


class InfinityAllowed:
    """Marks a float that may be infinite, in pydantic's terms but without importing it."""

    @staticmethod
    def __get_pydantic_core_schema__(kind: Any, schema_of: Callable[[Any], Any]) -> Any:
        return schema_of(kind) | {"allow_inf_nan": True}


class Lax:
    """Marks a kind that is also taken in another form: 1 for true, "7" for 7."""

    @staticmethod
    def __get_pydantic_core_schema__(kind: Any, schema_of: Callable[[Any], Any]) -> Any:
        return schema_of(kind) | {"strict": False}


@dataclass(frozen=True)
class Rule:
    """Refuses values of a kind for which `is_met` is false; `words` are what is wanted instead."""

    is_met: Callable[[Any], bool]
    words: str

    def __get_pydantic_core_schema__(self, kind: Any, schema_of: Any) -> Any:
        from pydantic import AfterValidator

        return AfterValidator(self._check).__get_pydantic_core_schema__(kind, schema_of)

    def _check(self, value: T) -> T:
        if not self.is_met(value):
            raise ValueError(self.words)
        return value


Count = Annotated[int, Ge(0), Le(MAX_COUNT)]
CountFrom1 = Annotated[int, Ge(1), Le(MAX_COUNT)]
Positive = Annotated[float, Gt(0)]
NotNegative = Annotated[float, Ge(0)]
Share = Annotated[float, Ge(0), Le(1)]
NotNaN = Annotated[float, InfinityAllowed, Ge(-math.inf)]
# Such as an id, which errors can quote as it is.
Line = Annotated[str, Rule(str.isprintable, "a one-line string")]

# What is wanted, by the type of pydantic's error.
_WANTED = {
    "bool_type": "true or false",
    "dataclass_type": "an object",
    "dict_type": "an object",
    "finite_number": "a finite number",
    "float_type": "a number",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "list_type": "a list",
    "mapping_type": "an object",
    "model_type": "an object",
    "string_type": "a string",
    "tuple_type": "a list",
}
_BOUNDS = {
    "ge": "at least {}",
    "gt": "more than {}",
    "le": "at most {}",
    "lt": "less than {}",
    "expected": "{}",
    "min_length": "at least {} of them",
    "max_length": "at most {} of them",
}


def read_declared(kind: type[T], values: object, name: str = "") -> T:
    """`values`, of a JSON file or of GGUF keys, as an object of this kind; errors call it `name`.
    Raises HotsplitError for the first value of another kind, and for an unknown or missing key."""
    from pydantic import ValidationError

    try:
        any_kind: Any = kind
        text = json.dumps([values], default=plain)
        return _adapter(any_kind).validate_json(text)[0]
    except RecursionError as error:
        raise HotsplitError(f"{name or 'the content'} is nested too deep") from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise HotsplitError(_line_of(first, place_of(first["loc"][1:], name))) from error


def _line_of(problem: Mapping[str, Any], place: str) -> str:
    if problem["type"] == "missing":
        return f"key {shown(place)} is missing"
    if problem["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        return f"key {shown(place)} is unknown"
    place = one_line(place or "the content", MAX_SHOWN)
    if problem["type"] == "json_invalid":  # nested beyond pydantic's limit
        return f"{place} cannot be read ({one_line(problem['ctx']['error'])})"
    return f"{place} is {shown(problem['input'])}, wanted {wanted_by(problem)}"


def place_of(path: tuple[int | str, ...], name: str = "") -> str:
    """A path within an object as errors write it: gpus[0].name."""
    for part in path:
        if isinstance(part, int):
            name += f"[{part}]"
        elif part != "[key]":
            name += f".{part}" if name else part
    return name


def wanted_by(problem: Mapping[str, Any]) -> str:
    """What one of pydantic's errors wants, in words."""
    if words := _WANTED.get(problem["type"]):
        return words
    for key, value in problem.get("ctx", {}).items():
        if key in _BOUNDS:
            return _BOUNDS[key].format(value)
    return one_line(problem["msg"].removeprefix("Input should be ").removeprefix("Value error, "))


@cache
def _adapter(kind: Any) -> "TypeAdapter[list[Any]]":
    """In a list, since pydantic takes a configuration only for types that cannot have their own."""
    from pydantic import TypeAdapter

    return TypeAdapter(
        list[kind], config={"extra": "forbid", "strict": True, "allow_inf_nan": False}
    )
