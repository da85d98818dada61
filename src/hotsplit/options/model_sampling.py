"""The sampling settings that a model comes with: keys general.sampling.* of a GGUF (llama.cpp's,
gguf-py's Keys.General), which `convert` takes from a checkpoint's generation_config.json.

Imports no numpy, as options.generation_options."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from hotsplit.errors import HotsplitError, about
from hotsplit.files.typed import plain
from hotsplit.options.generation_options import SamplingOptions, samplers_of_names

PREFIX = "general.sampling."


@dataclass(frozen=True)
class ModelSetting:
    """A field of SamplingOptions, the end of its GGUF key, its name in GenerationConfig."""

    field: str
    key: str
    config_name: str | None = None


SETTINGS = (
    ModelSetting("samplers", "sequence"),
    ModelSetting("temperature", "temp", "temperature"),
    ModelSetting("top_k", "top_k", "top_k"),
    ModelSetting("top_p", "top_p", "top_p"),
    ModelSetting("min_p", "min_p", "min_p"),
    ModelSetting("xtc_probability", "xtc_probability"),
    ModelSetting("xtc_threshold", "xtc_threshold"),
    ModelSetting("repeat_last_n", "penalty_last_n"),
    ModelSetting("repeat_penalty", "penalty_repeat", "repetition_penalty"),
    ModelSetting("mirostat", "mirostat"),
    ModelSetting("mirostat_ent", "mirostat_tau"),
    ModelSetting("mirostat_lr", "mirostat_eta"),
)


def settings_of(
    path: Path, keys: Mapping[str, object], given: Collection[str] = ()
) -> dict[str, object]:
    """The fields of SamplingOptions that a file sets, without those that are `given` instead.
    Raises HotsplitError for a value of another type or beyond its bounds."""
    found: dict[str, object] = {}
    for setting in SETTINGS:
        key = PREFIX + setting.key
        if key in keys and setting.field not in given:
            value = plain(keys[key])
            if isinstance(value, float):  # of 32 bits: the shortest decimal that it is closest to
                value = float(str(keys[key]))
            with about(path, "; set it by an option, which replaces it, or correct the file"):
                found[setting.field] = checked(setting.field, value, key)
    return found


def sampling_of(
    path: Path, keys: Mapping[str, object], given: Mapping[str, object]
) -> SamplingOptions:
    """The `given` fields, others as the file sets them, the rest as in llama.cpp. Raises
    HotsplitError as `settings_of` does."""
    return SamplingOptions(**{**settings_of(path, keys, given), **given})  # type: ignore[arg-type]


def sampling_line(
    path: Path, keys: Mapping[str, object], given: Mapping[str, object]
) -> str | None:
    """A line about the settings that come from the file; None without any."""
    settings = settings_of(path, keys, given)
    known = {PREFIX + setting.key for setting in SETTINGS}
    unknown = sorted(key for key in keys if key.startswith(PREFIX) and key not in known)
    words = [
        f"{name} {';'.join(value) if isinstance(value, tuple) else f'{value:g}'}"
        for name, value in settings.items()
    ]
    parts = [f"sampling as the model's file says: {', '.join(words)}; options replace it"] * bool(
        words
    )
    parts += [f"{', '.join(unknown)[:200]}: not known here, and left out"] * bool(unknown)
    return "; ".join(parts) or None


def checked(field: str, value: object, name: str) -> object:
    """The value as SamplingOptions takes it. Raises HotsplitError, which calls it `name`."""
    is_count = isinstance(getattr(SamplingOptions, field), int)
    if is_count and isinstance(value, float) and value.is_integer():
        value = int(value)
    try:
        if field == "samplers" and isinstance(value, str):
            value = samplers_of_names(value)
        SamplingOptions(**{field: value})  # type: ignore[arg-type]
    except HotsplitError as error:
        raise HotsplitError(str(error).replace(field, name, 1)) from error
    return value
