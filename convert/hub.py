"""Finds a checkpoint or a GGUF named as on the Hugging Face hub: downloaded, or cached.

Only data is fetched, no Python file."""

import glob
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import unquote

from hotsplit.convert.tokenizer import OTHERS
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
    """`source` itself if it is a path and no name on the hub (`hub_names`); otherwise, in the hub's
    usual cache, with missing files downloaded, the folder of the checkpoint, or the GGUF, in one
    file or several. Raises HotsplitError if files are missing there and cannot be downloaded, if
    there is no such type or file, and for another address."""
    found = named_on_hub(source)
    if found is None:
        return source
    with hub_errors(found.name):
        files = files_of(found)
        return files.place(fetched(found, files))


@dataclass(frozen=True, kw_only=True)
class Files:
    """The files of a model in its repository: the weights by their names, of a GGUF in order, and
    of a checkpoint what describes them."""

    weights: tuple[str, ...]
    is_gguf: bool

    def place(self, folder: Path) -> Path:
        """The model in a folder that has these files: the folder, or the GGUF."""
        return folder / self.weights[0] if self.is_gguf else folder


def files_of(given: Named) -> Files:
    """Which files of the repository are the model. Raises HotsplitError for a type or a file that
    is not there, and exceptions for `hub_errors` if the hub does not answer."""
    names = _names(given)
    is_free = given.kind is None and given.file is None and given.folder is None
    for patterns in (SAFETENSORS, PICKLED) if is_free else ():
        weights = [each for each in names if any(fnmatchcase(each, p) for p in patterns)]
        if weights:
            return Files(weights=tuple(weights), is_gguf=False)
    if not is_free or any(_is_gguf(each) or RAW_PIECE.search(each) for each in names):
        return Files(weights=tuple(_gguf(given, names)), is_gguf=True)
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
            reason = str(error.__cause__ or "no answer").strip().splitlines()[0][:160]
            tried = (
                f"the network failed: {constants.ENDPOINT} cannot be reached ({reason}), and"
                f" {constants.HF_HUB_CACHE} has no copy"
            )
        _refuse(name, tried, "download it elsewhere and give its folder or file", error)
    except HfHubHTTPError as error:
        reason = str(error).strip().splitlines()[-1][:160]
        next_step = "check the name, and HF_TOKEN if the model is private or gated"
        _refuse(name, f"{constants.ENDPOINT} refuses it ({reason})", next_step, error)
    except (OSError, ValueError, library.HTTPError) as error:
        reason = str(error).strip().splitlines()[0][:160] if str(error).strip() else "no reason"
        failed = "the network failed: it" if isinstance(error, library.HTTPError) else "it"
        _refuse(
            name, f"{failed} cannot be downloaded ({reason})", "give the folder of a copy", error
        )


def _library() -> Any:
    """The HTTP library of the hub's client, which differs between its versions (httpx, httpx2). A
    broken connection raises its HTTPError."""
    from huggingface_hub import get_session

    return sys.modules[type(get_session()).__module__.partition(".")[0]]


def _names(given: Named) -> list[str]:
    """The names of the files of a repository; of those in the cache if the hub cannot be asked."""
    from huggingface_hub import HfApi, constants, snapshot_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    name, revision = given.name, given.revision
    if not constants.HF_HUB_OFFLINE:
        try:
            info = HfApi().model_info(name, revision=revision)
            return [each.rfilename for each in info.siblings or ()]
        except (RepositoryNotFoundError, RevisionNotFoundError):
            raise
        except (OSError, HfHubHTTPError, _library().HTTPError):
            pass  # the next call says why, if there is no copy
    folder = Path(snapshot_download(name, revision=revision, allow_patterns=[]))
    return [file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()]


def fetched(given: Named, files: Files, *, has_weights: bool = True) -> Path:
    """The folder of these files in the hub's cache; without weights, only what describes them."""
    from huggingface_hub import snapshot_download

    patterns = [] if files.is_gguf else list(DESCRIPTIONS)
    patterns += [glob.escape(each) for each in files.weights if has_weights]
    ignored = [] if files.is_gguf else IN_FOLDERS
    found = snapshot_download(
        given.name, revision=given.revision, allow_patterns=patterns, ignore_patterns=ignored
    )
    return Path(found)


def _is_gguf(name: str) -> bool:
    return name.endswith(".gguf") and not _BESIDE.search(name)


def _gguf(given: Named, names: list[str]) -> list[str]:
    """The files of the GGUF that is named, of a repository's files. Raises HotsplitError with the
    choices unless it is one, and for pieces of a file that was cut."""
    asked = {name for name in names if name == given.file and name.endswith(".gguf")}
    whole = asked | {name for name in names if _is_gguf(name)}
    by_stem: dict[str, list[str]] = {}  # of a file, or of the parts of one model
    for each in sorted(whole):
        by_stem.setdefault(_PART.sub("", each.removesuffix(".gguf")), []).append(each)
    cut: dict[str, list[str]] = {}  # the pieces of a file
    for each in sorted(names):
        if RAW_PIECE.search(each):
            cut.setdefault(RAW_PIECE.sub("", each), []).append(each)
    chosen = _chosen(given, [*by_stem], by_stem)
    if not chosen and (pieces := _chosen(given, [*cut], cut)):
        files = cut[pieces[0]]
        joined = RAW_PIECE.sub(".gguf", Path(files[0]).name)
        shown = ", ".join(Path(piece).name for piece in files)[:300]
        raise HotsplitError(
            f"{given.name}: on the hub this file is cut into {len(files)} pieces ({shown});"
            f" download them, join them in this order (cat PIECES > {joined}), and give the path of"
            f" {joined}"
        )
    is_alone = given.kind is None and given.file is None and len(by_stem) == 1 and not cut
    chosen = [*by_stem] if is_alone and not chosen else chosen
    if len(chosen) != 1:
        _refuse_choice(
            given, {stem: by_stem[stem] for stem in chosen or by_stem}, [*cut], len(chosen)
        )
    return by_stem[chosen[0]]


def _chosen(given: Named, stems: list[str], files: Mapping[str, list[str]]) -> list[str]:
    if given.file is not None:
        name, is_bare = given.file, "/" not in given.file
        exact = [stem for stem in stems if name in files[stem]]
        return exact or [s for s in stems if is_bare and name in (Path(f).name for f in files[s])]
    if given.folder is not None:
        stems = [stem for stem in stems if stem.startswith(given.folder.rstrip("/") + "/")]
        if len(stems) == 1:
            return stems
    wanted = re.escape((given.kind or "Q4_K_M").upper())
    chosen = [stem for stem in stems if re.search(rf"(^|[-._/]){wanted}$", stem.upper())]
    plain = [stem for stem in chosen if not re.search(rf"UD-{wanted}$", stem.upper())]
    return plain if len(plain) == 1 else chosen  # unsloth's mixtures have names of their own


def _refuse_choice(
    given: Named, by_stem: Mapping[str, list[str]], cut: list[str], count: int
) -> NoReturn:
    where = "" if given.folder is None else f" in {given.folder}"
    wanted = given.file or f"GGUF of type {(given.kind or 'Q4_K_M').upper()}"
    what = "several GGUFs" if count else f"no {wanted}" if by_stem else "no GGUF"
    at = "" if given.revision is None else f"@{given.revision}"
    shown = ", ".join(Path(stem).name for stem in by_stem)[:600]
    line = f"{given.name}: on the hub there is {what}{where}"
    if by_stem:
        first = next(iter(by_stem.values()))[0]
        line += f"; it has {shown}: give a type or a file after a colon, {given.name}{at}:{first}"
    if cut:
        line += (
            "; cut into pieces that have to be joined first:"
            f" {', '.join(Path(each).name for each in cut)[:300]}"
        )
    raise HotsplitError(line)


def _refuse(name: str, what: str, next_step: str, error: Exception) -> NoReturn:
    raise HotsplitError(
        f"{name}: no such folder; as a name on the hub: {what}; {next_step}"
    ) from error
