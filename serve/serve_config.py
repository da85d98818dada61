"""The options and limits of a server."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from annotated_types import Ge, Interval

from hotsplit.errors import HotsplitError
from hotsplit.files.typed import shown
from hotsplit.options.generation_options import SpeculationOptions
from hotsplit.options.kinds import check_fields

MAX_PARALLEL = 256
Seconds = Annotated[float, Interval(ge=1e-6, le=1e6)]
HOST_NAME = r"[A-Za-z0-9._-]+"
_ORIGIN = re.compile(rf"null|[a-z][a-z0-9+.-]*://(\[[0-9a-f:.]+\]|{HOST_NAME})(:[0-9]{{1,5}})?")
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}  # which browsers leave out


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """Options of one server. Up to `parallel` texts are generated concurrently, requests are
    refused while `queue` texts wait, and besides the running texts the cache has room for `kept`
    finished ones, for prompts with the same prefix. `max_tokens` bounds every answer (-1: only the
    context does); a request may ask for fewer. Limits in seconds: `timeout_s` for a request's
    texts, counted from its arrival; `drain_s` for running answers at shutdown; `read_s` for a
    client to send a request's headers, to send its body, and to accept each piece of the answer.
    `sampling`: the fields of SamplingOptions that replace the model's own. `drafts`: how tokens are
    guessed, with `model_draft` if that is a file."""

    model: Path
    host: str = "127.0.0.1"
    port: Annotated[int, Interval(ge=0, le=65535)] = 8080
    parallel: Annotated[int, Interval(ge=1, le=MAX_PARALLEL)] = 1
    kept: Annotated[int, Interval(ge=0, le=MAX_PARALLEL)] | None = None  # None: as many as parallel
    queue: Annotated[int, Interval(ge=0, le=1 << 16)] = 64
    max_tokens: Annotated[int, Ge(-1)] = -1
    timeout_s: Seconds = 600.0
    drain_s: Seconds = 30.0
    read_s: Seconds = 30.0
    max_body_bytes: int = 8 << 20
    max_connections: int = 1024
    api_key: str | None = field(default=None, repr=False)
    origins: tuple[str, ...] = ()  # allowed by CORS
    hosts: tuple[str, ...] = ()  # Host headers accepted besides localhost and IP addresses
    alias: str | None = None
    template: str | None = None
    # Of templates; requests add theirs.
    variables: Mapping[str, object] = field(default_factory=dict)
    sampling: Mapping[str, object] = field(default_factory=dict)
    drafts: SpeculationOptions = SpeculationOptions()
    model_draft: Path | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.max_tokens == 0:
            raise HotsplitError("max_tokens is 0, wanted 1 or more, or -1")
        object.__setattr__(self, "origins", tuple(map(_origin_of, self.origins)))
        object.__setattr__(self, "hosts", tuple(map(_allowed_host, self.hosts)))
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable()):
            raise HotsplitError("the API key has characters not allowed in a header; use ASCII")
        if self.api_key == "":
            raise HotsplitError("the API key is empty; omit it or give one")

    @property
    def num_kept(self) -> int:
        return self.parallel if self.kept is None else self.kept


def host_of(name: str) -> str:
    """A host name as it is compared: in lower case, without the root's dot."""
    return name.lower().removesuffix(".")


def _allowed_host(given: str) -> str:
    """The name as browsers send it. Raises HotsplitError for a port, a URL or a pattern."""
    try:
        name = host_of(given if given.isascii() else given.encode("idna").decode())
    except UnicodeError:
        name = ""
    if not re.fullmatch(HOST_NAME, name):
        raise HotsplitError(
            f"--allow-host {shown(given)}: wanted a host name without scheme or port, say"
            " my-machine.local; addresses are always allowed"
        )
    return name


def _origin_of(given: str) -> str:
    """The origin as browsers send it: in lower case, without the scheme's own port."""
    origin = given.lower()
    if origin != "*" and not _ORIGIN.fullmatch(origin):
        raise HotsplitError(
            f"--cors {shown(given)}: wanted a page's origin, say http://localhost:3000 or"
            " https://example.org (no path), or *"
        )
    return origin.removesuffix(_DEFAULT_PORTS.get(origin.partition(":")[0], ""))
