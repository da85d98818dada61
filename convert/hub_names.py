"""Names of models on the Hugging Face hub, as people write them.

org/name                      the checkpoint, or the GGUF in Q4_K_M, or the only one
org/name:Q8_0                 the GGUF of a type, as llama.cpp's -hf has it
org/name:folder/file.gguf     this file
org/name@REVISION             of a branch, a tag or a commit; :Q8_0 or :FILE may follow
https://huggingface.co/org/name/blob/REVISION/file.gguf, also with resolve, and tree for a folder
https://huggingface.co/, huggingface.co/, hf.co/ or hf:// before any of them"""

import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from hotsplit.errors import HotsplitError

# A path has one slash where an address has two.
_ADDRESS = r"(?P<address>hf:/|(https?:/)?((www\.)?huggingface\.co|hf\.co)/)"
_NAME = r"(?P<name>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)"
_NAMED = re.compile(rf"{_ADDRESS}?{_NAME}(@(?P<revision>[\w./-]+))?(:(?P<wanted>[^:]+))?")
_PAGE = re.compile(
    rf"{_ADDRESS}{_NAME}/(?P<page>tree|blob|resolve|raw)/(?P<revision>[^/?]+)"
    r"(/(?P<wanted>[^?]*[^?/]))?/?(\?.*)?"
)
_OTHER_ADDRESS = re.compile(r"[a-z][a-z0-9]+:/")
# Pieces into which a file was cut, without a header of their own: .gguf.part1of2, .gguf-split-a
RAW_PIECE = re.compile(r"(\.gguf)([.-](part|split)[-_]?\w+|\.\d+)$", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Named:
    """A model as it is named: a repository, and the type of one of its GGUFs, or its file, or the
    folder that has it."""

    name: str
    revision: str | None = None
    kind: str | None = None
    file: str | None = None
    folder: str | None = None


def named_on_hub(source: Path) -> Named | None:
    """What a source names on the hub; None for a path. Raises HotsplitError for another address."""
    text = source.as_posix()
    found = _PAGE.fullmatch(text) or _NAMED.fullmatch(text)
    if found is None and _OTHER_ADDRESS.match(text) and not source.exists():
        raise HotsplitError(
            f"{text.replace(':/', '://', 1)}: not an address of the hub (huggingface.co/ORG/NAME);"
            " download the file and give its path, or name a mirror of the hub in the variable"
            " HF_ENDPOINT"
        )
    if found is None or source.exists():
        return None
    parts = {name: value and unquote(value) for name, value in found.groupdict().items()}
    wanted = parts["wanted"]
    # models/llama beside a folder `models` is a mistyped path rather than an organisation, and so
    # is the name of a file.
    if not parts["address"] and (
        source.parent.is_dir() or (not wanted and source.suffix == ".gguf")
    ):
        return None
    named = {"name": str(parts["name"]), "revision": parts["revision"]}
    if wanted is None:
        return Named(**named)
    if parts.get("page") == "tree":
        return Named(**named, folder=wanted)
    is_file = wanted.endswith(".gguf") or "/" in wanted or RAW_PIECE.search(wanted) is not None
    return (
        Named(**named, file=wanted) if is_file or "page" in parts else Named(**named, kind=wanted)
    )
