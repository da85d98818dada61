"""Finds a checkpoint or a GGUF named as on the Hugging Face hub: downloaded, or cached.

Only data is fetched, no Python file."""

import glob
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NoReturn

from hotsplit.convert.chat_templates import OTHERS
from hotsplit.errors import HotsplitError

# A path has one slash where an address has two.
HUB_NAME = re.compile(
    r"(https?:/)?((www\.)?huggingface\.co/|hf\.co/)?"
    r"(?P<name>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(:(?P<kind>[A-Za-z0-9_-]+))?"
)
_PART = re.compile(r"-\d{5}-of-\d{5}$")
# A model for images, an importance matrix, layers that only predict tokens further ahead.
_BESIDE = re.compile(r"mmproj|imatrix|(^|/)mtp-", re.IGNORECASE)
# Configs, tokenizers (including SentencePiece's), chat templates, and indices of shards.
DESCRIPTIONS = ["*.json", "*.txt", "*.jinja", "tokenizer.model"]
SAFETENSORS = ["model.safetensors", "model-*.safetensors"]
PICKLED = ["pytorch_model.bin", "pytorch_model-*.bin"]
# Files in folders other than that of further chat templates. The hub's patterns cannot exclude a
# name, so these match the names that differ from it in a letter, are shorter, or are longer.
IN_FOLDERS = [
    *(f"{OTHERS[:i]}[!{letter}]*/*" for i, letter in enumerate(OTHERS)),
    *(f"{OTHERS[:i]}/*" for i in range(1, len(OTHERS))),
    f"{OTHERS}?*/*",
]


def find_source(source: Path) -> Path:
    """`source` itself if it exists, if its parent folder does, or if it is not of the form
    `org/name`, with or without the hub's address before it and `:TYPE` after it; otherwise, in the
    hub's usual cache, with missing files downloaded, the folder of the checkpoint, or the GGUF of that
    type, in one file or several: without TYPE, if there is no checkpoint, that in Q4_K_M, or the only one.

    Raises HotsplitError if files are missing there and cannot be downloaded, or if there is no such
    type."""
    found = named_on_hub(source)
    if found is None:
        return source
    with hub_errors(found.name):
        files = files_of(found)
        return files.place(fetched(found.name, files))


@dataclass(frozen=True)
class Named:
    """A model as it is named: a repository, and the type of one of its GGUFs."""

    name: str
    kind: str | None


@dataclass(frozen=True, kw_only=True)
class Files:
    """The files of a model in its repository: the weights by their names, of a GGUF in order, and of a
    checkpoint what describes them."""

    weights: tuple[str, ...]
    is_gguf: bool

    def place(self, folder: Path) -> Path:
        """The model in a folder that has these files: the folder, or the GGUF."""
        return folder / self.weights[0] if self.is_gguf else folder


def named_on_hub(source: Path) -> Named | None:
    """What a source names on the hub; None for a path."""
    found = HUB_NAME.fullmatch(source.as_posix())
    # models/llama beside a folder `models` is a mistyped path rather than an organisation, and so is
    # the name of a file.
    is_path = source.exists() or source.parent.is_dir() or source.suffix == ".gguf"
    return None if is_path or found is None else Named(found["name"], found["kind"])


def files_of(given: Named) -> Files:
    """Which files of the repository are the model. Raises HotsplitError for a type that is not there,
    and exceptions for `hub_errors` if the hub does not answer."""
    names, kind = _names(given.name), given.kind
    for patterns in (SAFETENSORS, PICKLED) if kind is None else ():
        weights = [each for each in names if any(fnmatchcase(each, p) for p in patterns)]
        if weights:
            return Files(weights=tuple(weights), is_gguf=False)
    if kind is not None or any(map(_is_gguf, names)):
        chosen = _gguf(given.name, kind, list(filter(_is_gguf, names)))
        return Files(weights=tuple(chosen), is_gguf=True)
    return Files(weights=(), is_gguf=False)  # they will be missed


@contextmanager
def hub_errors(name: str) -> Iterator[None]:
    """Turns what the hub's client raises into HotsplitErrors about a name."""
    # Slow to import, and not needed for folders.
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    library = _library()
    try:
        yield
    except LocalEntryNotFoundError as error:
        if constants.HF_HUB_OFFLINE:
            tried = f"HF_HUB_OFFLINE is set, and {constants.HF_HUB_CACHE} has no copy"
        elif isinstance(error.__cause__, HfHubHTTPError):
            reason = str(error.__cause__).strip().splitlines()[0][:160]
            tried = f"{constants.ENDPOINT} answers with an error ({reason})"
        else:
            tried = (
                f"no list of its files came from {constants.ENDPOINT}, and"
                f" {constants.HF_HUB_CACHE} has no copy"
            )
        _refuse(name, tried, "download it elsewhere and give its folder", error)
    except HfHubHTTPError as error:
        reason = str(error).strip().splitlines()[-1][:160]
        next_step = "check the name, and HF_TOKEN if the model is private or gated"
        _refuse(name, f"{constants.ENDPOINT} refuses it ({reason})", next_step, error)
    except (OSError, ValueError, library.HTTPError) as error:
        reason = str(error).strip().splitlines()[0][:160] if str(error).strip() else "no reason"
        _refuse(name, f"cannot be downloaded ({reason})", "give the folder of a copy", error)


def _library() -> Any:
    """The HTTP library of the hub's client, which differs between its versions (httpx, httpx2). A broken
    connection raises its HTTPError."""
    from huggingface_hub import get_session

    return sys.modules[type(get_session()).__module__.partition(".")[0]]


def _names(name: str) -> list[str]:
    """The names of the files of a repository; of those in the cache if the hub cannot be asked."""
    from huggingface_hub import HfApi, constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

    if not constants.HF_HUB_OFFLINE:
        try:
            return [each.rfilename for each in HfApi().model_info(name).siblings or ()]
        except RepositoryNotFoundError:
            raise
        except (OSError, HfHubHTTPError, _library().HTTPError):
            pass  # the next call says why, if there is no copy
    folder = Path(snapshot_download(name, allow_patterns=[]))
    return [file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()]


def fetched(name: str, files: Files, *, has_weights: bool = True) -> Path:
    """The folder of these files in the hub's cache; without weights, only what describes them."""
    from huggingface_hub import snapshot_download

    patterns = [] if files.is_gguf else list(DESCRIPTIONS)
    patterns += [glob.escape(each) for each in files.weights if has_weights]
    ignored = [] if files.is_gguf else IN_FOLDERS
    return Path(snapshot_download(name, allow_patterns=patterns, ignore_patterns=ignored))


def _is_gguf(name: str) -> bool:
    return name.endswith(".gguf") and not _BESIDE.search(name)


def _gguf(name: str, kind: str | None, names: list[str]) -> list[str]:
    """The files of the GGUF of a type, of those with these names."""
    by_stem: dict[str, list[str]] = {}  # of a file, or of the parts of one model
    for each in sorted(names):
        by_stem.setdefault(_PART.sub("", each.removesuffix(".gguf")), []).append(each)
    wanted = (kind or "Q4_K_M").upper()
    chosen = [
        stem for stem in by_stem if re.search(rf"(^|[-._/]){re.escape(wanted)}$", stem.upper())
    ]
    plain = [stem for stem in chosen if not re.search(rf"UD-{re.escape(wanted)}$", stem.upper())]
    chosen = plain if len(plain) == 1 else chosen  # unsloth's mixtures have names of their own
    if kind is None and not chosen and len(by_stem) == 1:
        chosen = list(by_stem)
    if len(chosen) != 1:
        shown = ", ".join(Path(stem).name for stem in (chosen or by_stem))[:600]
        what = "several GGUFs" if chosen else f"no GGUF of type {wanted}" if by_stem else "no GGUF"
        more = f"; it has {shown}: give the type after a colon, {name}:Q8_0" if by_stem else ""
        raise HotsplitError(f"{name}: on the hub there is {what}{more}")
    return by_stem[chosen[0]]


def _refuse(name: str, what: str, next_step: str, error: Exception) -> NoReturn:
    raise HotsplitError(
        f"{name}: no such folder; as a name on the hub: {what}; {next_step}"
    ) from error
