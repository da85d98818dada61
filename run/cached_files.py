"""Finds the files that `hotsplit run` has cached for a model, for use by other commands."""

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import NamedTuple, get_args

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.artifacts.split_file import Split
from hotsplit.convert.options import OUTTYPES
from hotsplit.errors import HotsplitError
from hotsplit.model.tensors import Layout
from hotsplit.run.cache_folder import RunCache
from hotsplit.run.housekeeping import list_cache
from hotsplit.run.keys import conversion_key, identity_of_source
from hotsplit.system.cache_place import cache_folder

Load = Callable[[Path], ModelFile | Split]


class CachedFiles(NamedTuple):
    """A copy of a model, with predictors or converted from a source (the given file itself, if it
    is such a copy), and its plan; None if there is none."""

    model: Path | None = None
    split: Path | None = None


def cached_files_for(model: Path) -> CachedFiles:
    """The files cached for a model file, or for a source of `run`. Unfinished and stale artifacts
    are left out, and so are plans and models with predictors that cannot be loaded."""
    try:
        cache = RunCache(cache_folder())
        ready = [each for each in list_cache(cache.folder) if each.state == "ready"]
        own, copy = _id(ModelFile.load, model), None
        if own is None:
            copy = _converted(cache, model)
            own = None if copy is None else _id(ModelFile.load, copy)
    except (HotsplitError, OSError):
        return CachedFiles()

    def first(kind: str, load: Load) -> Path | None:
        paths = [cache.folder / each.name / each.file for each in ready if each.kind == kind]
        return next((path for path in paths if own and _id(load, path) == own), None)

    return CachedFiles(first("full", ModelFile.load) or copy, first("plan", Split.load))


def _converted(cache: RunCache, source: Path) -> Path | None:
    """A file that `run` converted the source to, in any type and layout; None if none."""
    identity = identity_of_source(source)
    for outtype, layout in product((None, *OUTTYPES), get_args(Layout)):
        key = conversion_key(identity, outtype, layout, None)
        if (found := cache.find("model", key)) is not None:
            return found.file
    return None


def _id(load: Load, path: Path) -> str | None:
    """The id of the model that a file contains or was made for; None if it cannot be loaded."""
    try:
        return load(path).model_id
    except (HotsplitError, OSError):
        return None
