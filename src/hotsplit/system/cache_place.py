"""Locates the user's cache folder, which holds artifacts (run.cache_folder) and values measured
on this machine (system.kept_values)."""

import os
from pathlib import Path

from hotsplit.errors import HotsplitError

VARIABLE = "HOTSPLIT_CACHE"
PREFETCH_FILE = "prefetch-distance.json"  # of runtime.kernels.prefetch_distance
ROWS_FILE = "row-costs.json"  # of runtime.generate.row_ratios
GRIDS_FILE = "types-with-grids.json"  # of runtime.kernels.grids


def cache_folder() -> Path:
    """$HOTSPLIT_CACHE, or the folder `hotsplit` in the user's cache folder by the XDG
    specification. Raises HotsplitError if a home folder is needed and there is none."""
    own = os.environ.get(VARIABLE)
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))  # a relative one must be ignored
    try:
        if own:
            return Path(own).expanduser().absolute()
        return (base if base.is_absolute() else Path.home() / ".cache") / "hotsplit"
    except RuntimeError as error:  # no such user, or one without a home
        raise HotsplitError(
            f"{own or '~'}: there is no such home folder; set {VARIABLE} to the absolute path of a"
            " cache folder"
        ) from error


def unwritable(folder: Path, error: OSError) -> HotsplitError:
    """The error for a cache folder that cannot be written, or that is full."""
    return HotsplitError(
        f"{folder}: the cache folder cannot be written: {error.strerror}; {VARIABLE} names another"
    )
