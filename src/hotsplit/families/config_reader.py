"""Typed reads of a checkpoint's config.json, each with its own error message.

Keys may be spelt as in transformers 4 or 5."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np

from hotsplit.errors import HotsplitError
from hotsplit.families.family import GATED_BIASES, PROJECTION_BIASES
from hotsplit.families.rope_scalings import USUAL_KINDS, Parameters, kind_of
from hotsplit.families.sizes import MAX_COUNT, MAX_LAYERS, Sizes
from hotsplit.files.typed import shown
from hotsplit.model.neurons import ACTIVATIONS
from hotsplit.model.rope import FREQUENCIES, Pairing
from hotsplit.model.spec import Activation, Rotary

# transformers' names, and a model file's.
GATED = {name: own for own, facts in ACTIVATIONS.items() for name in facts.names}
UNGATED = {name: own for name, own in GATED.items() if not ACTIVATIONS[own].needs_gates}


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
        self.said, self.values = values, {**defaults, **values}

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
        """A positive number; `default` replaces only a missing key: transformers computes with null."""
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
                f"{self.path}: {self.prefix}{key} is {shown(values)}, wanted {count} positive numbers,"
                f" {what}"
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
                f" {' or '.join(map(repr, plain)) or 'none'}: {why}; this checkpoint is not supported"
            )

    def activation(self, key: str, known: Mapping[str, str]) -> Activation:
        """`known` maps the checkpoint's names to a model file's."""
        found = self.values.get(key)
        if not isinstance(found, str) or found not in known:
            raise HotsplitError(
                f"{self.path}: {key} {shown(found)} is unknown; known: {', '.join(known)}"
            )
        return cast(Activation, known[found])

    def biases(self) -> tuple[str, ...]:
        """The biases that `attention_bias` and `mlp_bias` say all layers have."""
        found = PROJECTION_BIASES if self.flag("attention_bias") else ()
        return (*found, *(GATED_BIASES if self.flag("mlp_bias") else ()))

    def threshold(self, activation: Activation) -> float:
        """FATReLU's threshold, above which values pass (ProSparse, arXiv 2402.13516); 0 for another
        activation."""
        if activation != "fatrelu":
            return 0.0
        number = _number(self.values.get("hidden_act_param"))
        if number is None or number < 0:
            raise HotsplitError(
                f"{self.path}: hidden_act is fatrelu and hidden_act_param is"
                f" {shown(self.values.get('hidden_act_param'))}; wanted its threshold, a number; ask the"
                " model's authors for it and add it"
            )
        return number

    def heads(self, heads_key: str, kv_heads: int | None = None) -> tuple[int, int, int]:
        """(heads, key-value heads, width of a head); `kv_heads` is given if its key is not the
        usual one."""
        heads, width = self.count(heads_key), self.count("hidden_size")
        kv_words = "the number of key heads" if kv_heads else "num_key_value_heads"
        kv_heads = kv_heads or self.count("num_key_value_heads", heads)
        head_width = self.count("head_dim", max(1, width // heads))
        is_even = self.values.get("head_dim") is not None or width % heads == 0
        if not is_even or heads % kv_heads or head_width % 2:
            raise HotsplitError(
                f"{self.path}: {heads_key} is {heads}, {kv_words} {kv_heads}, head_dim {head_width} and"
                f" hidden_size {width}; wanted whole groups of heads of even width"
            )
        return heads, kv_heads, head_width

    def check_size(self, sizes: Sizes, num_positions: int = 0) -> None:
        """Raises HotsplitError for a size above the largest dimension of the checkpoint's
        tensors. Called before anything of that size is allocated."""
        named = {
            "hidden_size": sizes.hidden_size,
            "vocab_size": sizes.vocab_size,
            "the width of the heads": sizes.query_size,
            "the width of the feed-forward layers": sizes.num_neurons,
            "max_position_embeddings": num_positions,
        }
        name, size = max(named.items(), key=lambda item: item[1])
        if size > self.max_rows:
            raise HotsplitError(
                f"{self.path}: {name} is {size}, but the largest dimension of a tensor is"
                f" {self.max_rows}; config and weights belong to different models"
            )

    def rotary(
        self,
        sizes: Sizes,
        pairing: Pairing,
        known: tuple[str, ...] = USUAL_KINDS,
        default_theta: float = 10000.0,
        default_share: float | None = None,
        rounds_borders: bool = True,
    ) -> tuple[Sizes, Rotary, Mapping[str, np.ndarray]]:
        """The sizes, whose context a scaling may extend, the rotary embedding, and the divisors of its
        frequencies (f32 [head_dim / 2]), by the names of their tensors.

        They are read from `rope_scaling` (transformers 4) or `rope_parameters` (5); if both keys
        are given, `rope_scaling` takes precedence, as in transformers. `rope_theta` may also be a
        key of the config itself. `known`: kinds (rope_scalings.CONFIG_KINDS) of this family.
        `default_share`: of the values of a head that rotate, where a part of them may.
        `rounds_borders`: what YaRN does in this family."""
        self.check_size(sizes)
        rope = self.rope()
        kind = kind_of(rope, known)
        num_values = None
        if default_share is not None:
            num_values = self._rotated(rope, sizes.head_dim, default_share)
        elif not kind.reads_share:
            for reader in (self, rope):
                reader.refuse("partial_rotary_factor", 1.0, 1)
        theta = rope.positive_or("rope_theta", self.positive("rope_theta", default_theta))
        found = kind.read(
            Parameters(
                whole=self,
                own=rope,
                sizes=sizes,
                theta=theta,
                num_pairs=(num_values or sizes.head_dim) // 2,
                rounds_borders=rounds_borders,
            )
        )
        rotary = Rotary(
            theta=theta,
            pairing=pairing,
            scaling=found.scaling,
            has_factors=FREQUENCIES in found.divisors,
            num_values=num_values,
        )
        longer = found.context_length or sizes.context_length
        return replace(sizes, context_length=longer), rotary, found.divisors

    def rope(self) -> "ConfigReader":
        """A reader of `rope_scaling`, or without one of `rope_parameters`."""
        key = "rope_scaling" if self.values.get("rope_scaling") else "rope_parameters"
        values = self.values.get(key) or {}
        if not isinstance(values, dict):
            raise HotsplitError(f"{self.path}: {key} is {shown(values)}, wanted an object or null")
        return ConfigReader(self.path, values, prefix=key + ".")

    def _rotated(self, rope: "ConfigReader", head_dim: int, default: float) -> int | None:
        """The number of values of a head that rotate; None for all."""
        key = "partial_rotary_factor"
        share = rope.positive_or(key, self.positive(key, default))
        count = int(head_dim * share)
        if share > 1 or count % 2 or not count:
            raise HotsplitError(
                f"{self.path}: {key} is {share:g}: {count} of {head_dim} values of a head cannot rotate"
                " in pairs"
            )
        return None if count == head_dim else count

    def rotary_of(
        self,
        sizes: Sizes,
        layers: str,
        theta_key: str,
        default_theta: float,
        known: tuple[str, ...] = ("default", "linear"),
    ) -> tuple[Sizes, Rotary, Mapping[str, np.ndarray]]:
        """`rotary`, with pairs half a head apart, of the layers of a type of which the config has
        parameters of their own (`rope_parameters[layers]`, transformers 5) or at least a theta
        (4); `rope_scaling` is that of layers with full attention."""
        nested = self.values.get("rope_parameters") or {}
        if not isinstance(nested, dict):
            raise HotsplitError(
                f"{self.path}: rope_parameters is {shown(nested)}, wanted an object or null"
            )
        theta = self.values.get(theta_key)
        own = {"rope_parameters": nested.get(layers), "rope_theta": theta, "rope_scaling": None}
        if layers == "full_attention":
            own["rope_scaling"] = self.values.get("rope_scaling")
        read = ConfigReader(self.path, {**self.said, **own}, max_rows=self.max_rows)
        return read.rotary(sizes, "halves", known, default_theta)

    def layers_with_window(self, num_layers: int, period: int) -> list[bool]:
        """Whether each layer has the window."""
        return self.other_layers(num_layers, "sliding_attention", "sliding_window_pattern", period)

    def window_of(self, has_window_L: Sequence[bool]) -> int:
        """The window of the layers that have one; 0, and not asked for, if none has."""
        return self.count("sliding_window") if any(has_window_L) else 0

    def other_layers(self, num_layers: int, other: str, key: str, period: int) -> list[bool]:
        """Whether each layer is of the type `other`, by `layer_types`, or else all layers but each
        last one of a period, which is the value of a key."""
        types = self.values.get("layer_types")
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
