"""A checkpoint's sampling settings, which a model file keeps under llama.cpp's keys."""

from pathlib import Path

import numpy as np

from hotsplit.errors import HotsplitError, about
from hotsplit.files.gguf_file import Value
from hotsplit.files.json_file import read_object
from hotsplit.files.typed import shown
from hotsplit.options.model_sampling import PREFIX, SETTINGS, checked

FILE = "generation_config.json"
_MOST = 1 << 31  # a larger number is refused, as llama.cpp's of 32 bits would overflow


def sampling_keys(folder: Path) -> dict[str, Value]:
    """The keys for the settings in generation_config.json; those that it leaves out, transformers'
    defaults, are left out too. `do_sample: false` means the likeliest token: temperature 0. Raises
    HotsplitError for a value of another type or beyond its bounds."""
    path = folder / FILE
    config = read_object(path, FILE) if path.exists() else {}
    if not isinstance(draws := config.get("do_sample"), bool | None):
        raise HotsplitError(
            f"{path}: do_sample is {shown(draws)}, wanted true or false; correct it there"
        )
    found: dict[str, Value] = {}
    for setting in SETTINGS:
        name = setting.config_name
        value = None if name is None else config.get(name)
        if name == "temperature" and draws is False:
            value = 0.0
        if value is not None:
            with about(path, "; correct it there"):
                number = checked(setting.field, value, str(name))
                assert isinstance(number, int | float), number
                if not -_MOST <= number < _MOST:
                    raise HotsplitError(f"{name} is {shown(number)}, wanted a number of 32 bits")
            stored = np.int32(number) if name == "top_k" else np.float32(number)
            found[PREFIX + setting.key] = stored
    return found
