"""Our own keys of a model file's header."""

from collections.abc import Mapping

import numpy as np

from hotsplit.families.key_reader import QUALITY
from hotsplit.files.gguf_file import Value
from hotsplit.model.mode_quality import ModeQuality, SparseMode, quality_values


def quality_keys(quality: Mapping[SparseMode, ModeQuality]) -> dict[str, Value]:
    """The keys that `KeyReader.quality` reads."""
    keys: dict[str, Value] = {}
    for mode, values in quality_values(quality).items():
        for name, value in values.items():
            if isinstance(value, str):
                keys[f"{QUALITY}{mode}.{name}"] = value
            else:
                is_count = isinstance(value, int)
                keys[f"{QUALITY}{mode}.{name}"] = (
                    np.uint64(value) if is_count else np.float64(value)
                )
    return keys
