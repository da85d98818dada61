"""Request bodies: JSON within limits, then models of pydantic, one for each object.

Null counts as absent, because OpenAI's clients send nulls. Unknown fields are logged, or
refused."""

import json
import logging
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args

import numpy as np
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError

from hotsplit.files.declared import place_of, wanted_by
from hotsplit.serve.api_error import ApiError, wrong

log = logging.getLogger("hotsplit.serve")

OwnCode = Literal["invalid_value", "unsupported_value", "unsupported_content"]
OWN_CODES = get_args(OwnCode)
MAX_SHOWN = 60  # characters of a wrong value in an error
MAX_DEPTH = 64  # of lists and objects in a request
# Marks of a body, see `num_marks`; so many values take up to 0.1 s to parse, with the GIL held.
MAX_MARKS = 3 << 16
_IS_MARK = np.isin(np.arange(256), np.frombuffer(b",:[{.", np.uint8))
_DEEPER = np.zeros(256, np.int8)
_DEEPER[[*b"[{"]], _DEEPER[[*b"]}"]] = 1, -1
_SLICE = 1 << 20  # bytes
MAX_SAID = 64  # names of unknown fields that the log says, each once
_SAID: set[str] = set()


class RequestBody(BaseModel):
    """An object of a request. `ignored`: fields that do not change an answer. `is_open`: a template
    may read fields that are not declared."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)
    ignored: ClassVar[frozenset[str]] = frozenset()
    is_open: ClassVar[bool] = False

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, values: object) -> object:
        if not isinstance(values, dict):
            return values
        return {name: value for name, value in values.items() if value is not None}

    @property
    def extra(self) -> dict[str, Any]:
        """Fields that are not declared."""
        return self.__pydantic_extra__ or {}

    def unknown(self, above: str = "") -> Iterator[str]:
        """Paths of the fields that nothing reads."""
        if self.is_open:
            return
        for name, value in self:
            if isinstance(value, RequestBody):
                yield from value.unknown(f"{above}{name}.")
            elif name in self.extra and name not in self.ignored:
                yield f"{above}{name}"


Parsed = TypeVar("Parsed", bound=RequestBody)


def _without_fraction(value: object) -> object:
    """JavaScript has no integer type, so 3.0 is a whole number."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = Annotated[int, BeforeValidator(_without_fraction)]
Number = Annotated[float, Field(allow_inf_nan=False)]


def refused(code: OwnCode, message: str) -> PydanticCustomError:
    """A validator's error with a code of its own; the field's path precedes the message."""
    return PydanticCustomError(code, "{message}", {"message": message})


def only(*values: object, why: str) -> AfterValidator:
    """Refuses a field unless it is absent or has one of these values; `why` is the reason."""

    def check(value: object) -> object:
        if value not in values:
            raise refused("unsupported_value", f": {_shown(value)} is not supported: {why}")
        return value

    return AfterValidator(check)


def texts(most: int, longest: int) -> PlainValidator:
    """A text or a list of texts, none of them empty, as a tuple."""

    def check(value: object) -> tuple[str, ...]:
        values = [value] if isinstance(value, str) else value
        if not isinstance(values, list) or len(values) > most:
            raise ValueError(f"a text, or a list of up to {most}")
        if not all(isinstance(text, str) and 0 < len(text) <= longest for text in values):
            raise ValueError(f"texts of 1 to {longest} characters")
        return tuple(values)

    return PlainValidator(check)


def checked(kind: type[Parsed], values: Mapping[str, object]) -> Parsed:
    """The request as its model; the log says each unknown field once, since a misspelt one changes
    an answer. Raises ApiError for wrong fields."""
    try:
        body = kind.model_validate(values)
    except ValidationError as error:
        raise _refusal(error) from error
    for name in body.unknown():
        name = name[:MAX_SHOWN]
        if name not in _SAID and len(_SAID) < MAX_SAID:
            _SAID.add(name)
            log.warning("ignored %r, which is no parameter here", name)
    return body


def _refusal(error: ValidationError) -> ApiError:
    first = error.errors(include_url=False)[0]
    kind, location = first["type"], first["loc"]
    if isinstance(location[-1], int) and kind not in ("model_type", "dict_type"):
        location = location[:-1]  # in a list of numbers or texts
    place = place_of(location)
    if kind == "missing":
        return wrong(place, f"{place} is missing")
    if kind in OWN_CODES:
        return wrong(place, f"{place}{first['msg']}", kind)
    return wrong(place, f"{place} is {_shown(first['input'])}, wanted {wanted_by(first)}")


def parsed(content: bytes) -> dict[str, object]:
    """A request's fields. Raises ApiError unless the body is a JSON object within MAX_DEPTH."""
    num_marks, depth = marks_and_depth(content)
    if num_marks > MAX_MARKS:
        line = (
            f"The body has more values than are read here (over {MAX_MARKS} commas, colons, points"
            " and opening brackets outside of strings); send several requests."
        )
        raise wrong(None, line, "invalid_json")
    if depth > MAX_DEPTH:
        line = f"The body has lists and objects more than {MAX_DEPTH} deep."
        raise wrong(None, line, "invalid_json")
    try:
        found = json.loads(content.decode("utf-8"), parse_constant=_refuse_constant)
    except ValueError as error:
        reason = str(error)[:100] or type(error).__name__
        raise wrong(None, f"The body is not JSON: {reason}.", "invalid_json") from error
    if not isinstance(found, dict):
        raise wrong(None, f"The body is {_shown(found)}, wanted a JSON object.", "invalid_json")
    # JSON's escapes can express lone surrogates; tokenizers and UTF-8 cannot.
    for name, value in found.items() if b"\\u" in content else ():
        try:
            json.dumps({name: value}, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            place = name.encode(errors="replace").decode()
            half = error.object[error.start]
            line = f"{place}: {half!r} is half of a character, wanted Unicode text"
            raise wrong(place, line) from error
    return found


def marks_and_depth(content: bytes) -> tuple[int, int]:
    """(marks outside of strings that come with every value but the first: commas, colons and
    opening brackets; how deep lists and objects are). Points are counted too, because fractions
    take long to parse. Up to the first error, the strings are those that JSON has."""
    if b"\\" in content:
        content = content.replace(rb"\\", b"__").replace(rb"\"", b"__")
    bytes_B = np.frombuffer(content, np.uint8)
    count, depth, deepest, is_inside = 0, 0, 0, np.uint8(0)
    for start in range(0, len(bytes_B), _SLICE):
        part_B = bytes_B[start : start + _SLICE]
        inside_B = (np.cumsum(part_B == ord('"'), dtype=np.uint8) + is_inside) & 1
        is_inside = inside_B[-1]
        part_B = part_B[inside_B == 0]
        count += int(np.count_nonzero(_IS_MARK[part_B]))
        depth_B = depth + np.cumsum(_DEEPER[part_B], dtype=np.int64)
        if len(depth_B):
            depth, deepest = int(depth_B[-1]), max(deepest, int(depth_B.max()))
    return count, deepest


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def _shown(value: object) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "..."
