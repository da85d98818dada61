"""Typed reads of a checkpoint's config.json, each with its own error message.

Keys may be spelt as in transformers 4 or 5."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from hotsplit.errors import HotsplitError
from hotsplit.families.decoder_sizes import MAX_COUNT, MAX_LAYERS
from hotsplit.files.typed import shown
from hotsplit.model.spec import Activation


class ConfigReader:
    """`values` are those in the file, `defaults` those of transformers' config class for missing
    keys. `max_rows` is the size of the largest dimension of any tensor, and `prefix` precedes the
    name of a numeric key in an error."""

    def __init__(
        self,
        path: Path,
        values: Mapping[str, object],
        *,
        defaults: Mapping[str, object] = {},  # noqa: B006  # never changed
        max_rows: int = MAX_COUNT,
        prefix: str = "",
    ) -> None:
        self.path, self.prefix, self.max_rows = path, prefix, max_rows
        self.said, self.defaults, self.values = values, defaults, {**defaults, **values}

    def positive(self, key: str, default: float | None = None) -> float:
        """A positive number; `default` replaces a key that is null or missing."""
        value = self.values.get(key)
        number = _number(default if value is None else value)
        if number is None or not _is_positive(number):
            found = f"is {shown(value)}" if key in self.values else "is missing"
            raise HotsplitError(
                f"{self.path}: {self.prefix}{key} {found}, wanted a positive number"
            )
        return number

    def positive_or(self, key: str, default: float) -> float:
        """A positive number; `default` replaces only a missing key: transformers computes with
        null."""
        return self.positive(key, None if key in self.values else default)

    def count(self, key: str, default: int | None = None) -> int:
        value = self.positive(key, default)
        most = MAX_LAYERS if key == "num_hidden_layers" else MAX_COUNT
        if value > most or value != int(value):
            raise HotsplitError(
                f"{self.path}: {self.prefix}{key} is {value}, wanted a count up to {most}"
            )
        return int(value)

    def positives(self, key: str, count: int, what: str) -> list[float]:
        """`count` positive numbers; `what`: which, for an error."""
        values = self.values.get(key)
        found = [_number(value) for value in values] if isinstance(values, list) else []
        numbers = [number for number in found if number is not None and _is_positive(number)]
        if not len(found) == len(numbers) == count:
            raise HotsplitError(
                f"{self.path}: {self.prefix}{key} is {shown(values)}, wanted {count} positive"
                f" numbers, {what}"
            )
        return numbers

    def whole(self, key: str) -> int:
        """A whole number, at least 0."""
        value = self.values.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_COUNT:
            raise HotsplitError(f"{self.path}: {key} is {shown(value)}, wanted a whole number")
        return value

    def flag(self, key: str) -> bool:
        value = self.values.get(key)
        if not isinstance(value, bool):
            raise HotsplitError(f"{self.path}: {key} is {shown(value)}, wanted true or false")
        return value

    def is_tied(self) -> bool | None:
        """True if the output head is the embedding; None if that is only transformers' default, in
        which case transformers still uses a head that the checkpoint has."""
        is_tied = self.flag("tie_word_embeddings")
        return None if is_tied and "tie_word_embeddings" not in self.said else is_tied

    def refuse(
        self, key: str, *plain: object, why: str = "the graph does not compute that"
    ) -> None:
        """Raises HotsplitError unless the key is absent, null or one of `plain`."""
        if self.values.get(key) not in (*plain, None):
            raise HotsplitError(
                f"{self.path}: {key} is {shown(self.values[key])}, wanted"
                f" {' or '.join(map(repr, plain)) or 'none'}: {why}; this checkpoint is not"
                " supported"
            )

    def activation(self, key: str, known: Mapping[str, Activation]) -> Activation:
        """`known` maps the checkpoint's names to a model file's."""
        found = self.values.get(key)
        if not isinstance(found, str) or found not in known:
            raise HotsplitError(
                f"{self.path}: {key} {shown(found)} is unknown; known: {', '.join(known)}"
            )
        return known[found]

    def threshold(self, activation: Activation) -> float:
        """FATReLU's threshold (ProSparse, arXiv 2402.13516); 0 for another activation."""
        if activation != "fatrelu":
            return 0.0
        number = _number(self.values.get("hidden_act_param"))
        if number is None or number < 0:
            raise HotsplitError(
                f"{self.path}: hidden_act is fatrelu and hidden_act_param is"
                f" {shown(self.values.get('hidden_act_param'))}; wanted its threshold, a number;"
                " ask the model's authors for it and add it"
            )
        return number

    def with_values(self, values: Mapping[str, object]) -> "ConfigReader":
        """A reader of the config with these values of keys."""
        if not values:
            return self
        return ConfigReader(
            self.path, {**self.said, **values}, defaults=self.defaults, max_rows=self.max_rows
        )

    def heads(self, heads_key: str, kv_heads_key: str) -> tuple[int, int, int]:
        """(heads, key-value heads, width of a head)."""
        heads, width = self.count(heads_key), self.count("hidden_size")
        kv_heads = self.count(kv_heads_key, heads)
        head_width = self.count("head_dim", max(1, width // heads))
        is_even = self.values.get("head_dim") is not None or width % heads == 0
        if not is_even or heads % kv_heads or head_width % 2:
            raise HotsplitError(
                f"{self.path}: {heads_key} is {heads}, {kv_heads_key} {kv_heads}, head_dim"
                f" {head_width} and hidden_size {width}; wanted whole groups of heads of even width"
            )
        return heads, kv_heads, head_width

    def check_size(self, named: Mapping[str, int]) -> None:
        """Raises HotsplitError for a size above the largest dimension of the checkpoint's
        tensors. Called before anything of that size is allocated."""
        name, size = max(named.items(), key=lambda item: item[1])
        if size > self.max_rows:
            raise HotsplitError(
                f"{self.path}: {name} is {size}, but the largest dimension of a tensor is"
                f" {self.max_rows}; config and weights belong to different models"
            )

    def rope(self) -> "ConfigReader":
        """A reader of `rope_scaling`, or without one of `rope_parameters`."""
        key = "rope_scaling" if self.values.get("rope_scaling") else "rope_parameters"
        values = self.values.get(key) or {}
        if not isinstance(values, dict):
            raise HotsplitError(f"{self.path}: {key} is {shown(values)}, wanted an object or null")
        return ConfigReader(self.path, values, prefix=key + ".")

    def layers_with_window(self, period: int) -> list[bool]:
        """Whether each layer has the window."""
        return self.other_layers("sliding_attention", "sliding_window_pattern", period)

    def other_layers(self, other: str, key: str, period: int) -> list[bool]:
        """Whether each layer is of the type `other`, by `layer_types`, or else all layers but each
        last one of a period, which is the value of a key."""
        types, num_layers = self.values.get("layer_types"), self.count("num_hidden_layers")
        if not isinstance(types, list) and types is not None:
            types = [types]
        if types is None:
            period = self.count(key, period)
            return [(layer + 1) % period != 0 for layer in range(num_layers)]
        known = ("full_attention", other)
        if len(types) != num_layers or not all(name in known for name in types):
            raise HotsplitError(
                f"{self.path}: layer_types is {shown(types)}, wanted {num_layers} of"
                f" {' or '.join(known)}; this checkpoint is not supported"
            )
        return [name == known[1] for name in types]

    def check_layer_types(self, *kinds: str, why: str = "the graph does not compute that") -> None:
        """Raises HotsplitError if `layer_types` has others than these."""
        known = [f"{kind}_attention" for kind in kinds]
        types = self.values.get("layer_types") or []
        found = [t for t in types if t not in known] if isinstance(types, list) else [types]
        if found:
            raise HotsplitError(
                f"{self.path}: layer_types has {shown(found[0])}, wanted {' or '.join(known)}:"
                f" {why}; this checkpoint is not supported"
            )


def _is_positive(number: float) -> bool:
    """True if it is positive and finite as a model file stores it, in f32."""
    with np.errstate(over="ignore"):
        return bool(0 < np.float32(number) < np.inf)


def _number(value: object) -> float | None:
    """The value if it is a number below 1e38 in magnitude, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) < 1e38 else None  # a model file has f32
