"""Finds the files that `hotsplit run` has cached for a model, for use by other commands."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import get_args

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.artifacts.profile_file import Profile
from hotsplit.artifacts.split_file import Split
from hotsplit.convert.options import OUTTYPES
from hotsplit.errors import HotsplitError
from hotsplit.model.tensors import Layout
from hotsplit.run.cache_folder import Cache
from hotsplit.run.housekeeping import CachedArtifact, list_cache
from hotsplit.run.keys import conversion_key, identity_of_source
from hotsplit.system.cache_place import cache_folder

Load = Callable[[Path], ModelFile | Profile | Split]
_PROFILES = ("profile", "look")  # the better kind first


@dataclass(frozen=True, kw_only=True)
class CachedFiles:
    """Files for one model. `model` is a copy of the given one, with predictors or converted from a
    source (the given file itself, if it is such a copy); None if there is none. `machine` comes
    only with a plan."""

    model: Path | None = None
    profile: Path | None = None
    split: Path | None = None
    machine: Path | None = None


def cached_files_for(model: Path) -> CachedFiles:
    """The files cached for a model file, or for a source of `run`.

    Unfinished and stale artifacts are left out, and so are plans, profiles and models with
    predictors that cannot be loaded."""
    try:
        cache = Cache(cache_folder())
        ready = [each for each in list_cache(cache.folder) if each.state == "ready"]
        own, copy = _id(ModelFile.load, model), None
        if own is None:
            copy = _converted(cache, model)
            own = None if copy is None else _id(ModelFile.load, copy)
    except (HotsplitError, OSError):
        return CachedFiles()

    def first(kinds: tuple[str, ...], load: Load) -> Path | None:
        paths = [_path(cache, each) for kind in kinds for each in ready if each.kind == kind]
        return next((path for path in paths if own and _id(load, path) == own), None)

    split = first(("plan",), Split.load)
    machines = [_path(cache, each) for each in ready if each.kind == "machine"]
    return CachedFiles(
        model=first(("full",), ModelFile.load) or copy,
        profile=first(_PROFILES, Profile.load),
        split=split,
        machine=machines[0] if machines and split else None,
    )


def _converted(cache: Cache, source: Path) -> Path | None:
    """A file that `run` converted the source to, in any type and layout, with the activation that
    the source records; None if there is none."""
    identity = identity_of_source(source)
    for outtype, layout in product((None, *OUTTYPES), get_args(Layout)):
        key = conversion_key(identity, outtype, layout, None)
        if (found := cache.find("model", key)) is not None:
            return found.file
    return None


def _path(cache: Cache, artifact: CachedArtifact) -> Path:
    return cache.folder / artifact.name / artifact.file


def _id(load: Load, path: Path) -> str | None:
    """The id of the model that a file contains or was made for; None if it cannot be loaded."""
    try:
        return load(path).model_id
    except (HotsplitError, OSError):
        return None
