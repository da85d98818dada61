"""config.json of a Llama, in the spelling of transformers 4 or 5, to what a model file says.

Everything that our graph would compute wrongly is refused here. What this module does not know:
the weights."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast, get_args

import numpy as np

from sparkinfer.errors import SparkinferError
from sparkinfer.model_file import MAX_COUNT, MAX_LAYERS, Activation, ModelShape

ARCHITECTURES = ("LlamaForCausalLM",)
ROPE_TYPES = ("default", "linear", "llama3")


@dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """`is_tied` is None where the config does not say; `rope_factors` are f32 [head_width / 2],
    by which the rotary frequencies are divided, or None."""

    shape: ModelShape
    activation: Activation
    threshold_L: tuple[float, ...]
    is_tied: bool | None
    rope_factors: np.ndarray | None


def parse_config(path: Path, config: Mapping[str, object]) -> LlamaConfig:
    """Raises SparkinferError, naming the key, for a model that would be computed wrongly."""
    _refuse_unknown(path, config)
    read = _Reader(path, config)
    rope = _rope(path, config)
    heads, width = read.count("num_attention_heads"), read.count("hidden_size")
    head_width = read.count("head_dim", width // heads)
    kv_heads = read.count("num_key_value_heads", heads)
    if (config.get("head_dim") is None and width % heads) or heads % kv_heads or head_width % 2:
        raise SparkinferError(
            f"{path}: {heads} heads and {kv_heads} key heads of width {head_width} do not fit a"
            f" model of width {width}; wanted whole groups of heads of even width"
        )
    shape = ModelShape(
        num_layers=read.count("num_hidden_layers"),
        width=width,
        num_neurons=read.count("intermediate_size"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_width=head_width,
        vocab_size=read.count("vocab_size"),
        context_length=read.count("max_position_embeddings"),
        norm_epsilon=read.positive("rms_norm_eps"),
        rope_theta=rope.positive("rope_theta", read.positive("rope_theta", 10000.0)),
        rope_linear_factor=rope.positive("factor") if rope.kind == "linear" else 1.0,
    )
    return LlamaConfig(
        shape=shape,
        activation=cast(Activation, config["hidden_act"]),
        threshold_L=(_threshold(path, config),) * shape.num_layers,
        is_tied=read.flag("tie_word_embeddings"),
        rope_factors=_llama3_factors(rope, shape) if rope.kind == "llama3" else None,
    )


class _Reader:
    """Typed reads of a JSON object, each with its own refusal."""

    def __init__(self, path: Path, values: Mapping[str, object], prefix: str = "") -> None:
        self.path, self.values, self.prefix = path, values, prefix

    @property
    def kind(self) -> object:
        """Which rotary embedding; old checkpoints spell the key `type`."""
        return self.values.get("rope_type", self.values.get("type", "default"))

    def positive(self, key: str, default: float | None = None) -> float:
        value = self.values.get(key)
        number = _number(default if value is None else value)
        if number is None or number <= 0:
            found = f"is {value!r}" if key in self.values else "is missing"
            raise SparkinferError(
                f"{self.path}: {self.prefix}{key} {found}, wanted a positive number"
            )
        return number

    def count(self, key: str, default: int | None = None) -> int:
        value = self.positive(key, default)
        most = MAX_LAYERS if key == "num_hidden_layers" else MAX_COUNT
        if value > most or value != int(value):
            raise SparkinferError(
                f"{self.path}: {self.prefix}{key} is {value}, wanted a count up to {most}"
            )
        return int(value)

    def flag(self, key: str) -> bool | None:
        value = self.values.get(key)
        if value is not None and not isinstance(value, bool):
            raise SparkinferError(f"{self.path}: {key} is {value!r}, wanted true or false")
        return value


def _number(value: object) -> float | None:
    """A finite number of JSON, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) < 1e300 else None  # isfinite takes no integer of 400 digits


def _refuse_unknown(path: Path, config: Mapping[str, object]) -> None:
    architectures = config.get("architectures")
    name = architectures[0] if isinstance(architectures, list) and architectures else None
    if name not in ARCHITECTURES:
        raise SparkinferError(
            f"{path}: architecture {name!r} is unknown; known: {', '.join(ARCHITECTURES)}"
        )
    act = config.get("hidden_act")
    if act not in get_args(Activation):
        raise SparkinferError(
            f"{path}: hidden_act {act!r} is unknown; known: {', '.join(get_args(Activation))}"
        )
    for key, plain in (
        ("attention_bias", False),
        ("mlp_bias", False),
        ("quantization_config", None),
        ("partial_rotary_factor", 1.0),
    ):
        if config.get(key) not in (plain, None):
            raise SparkinferError(
                f"{path}: {key} is {config[key]!r}, which the {name} graph does not compute;"
                " this checkpoint is not supported"
            )


def _rope(path: Path, config: Mapping[str, object]) -> _Reader:
    """The rotary parameters: `rope_scaling` (transformers 4) or `rope_parameters` (5).

    Where both are given transformers takes the first, and so does this."""
    key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    values = config.get(key) or {}
    if not isinstance(values, dict):
        raise SparkinferError(f"{path}: {key} is {values!r}, wanted an object or null")
    rope = _Reader(path, values, key + ".")
    if rope.kind not in ROPE_TYPES:
        raise SparkinferError(
            f"{path}: {key} is of type {rope.kind!r}; known: {', '.join(ROPE_TYPES)}"
        )
    if values.get("partial_rotary_factor") not in (None, 1.0):
        raise SparkinferError(f"{path}: {key}.partial_rotary_factor is not 1; not supported")
    return rope


def _threshold(path: Path, config: Mapping[str, object]) -> float:
    """FATReLU passes what is above its threshold (ProSparse, arXiv 2402.13516); others use 0."""
    if config["hidden_act"] != "fatrelu":
        return 0.0
    number = _number(config.get("hidden_act_param"))
    if number is None or number < 0:
        raise SparkinferError(
            f"{path}: hidden_act is fatrelu and hidden_act_param is"
            f" {config.get('hidden_act_param')!r}; wanted its threshold, a number; ask the model's"
            " authors for it and add it"
        )
    return number


def _llama3_factors(rope: _Reader, shape: ModelShape) -> np.ndarray:
    """f32 [head_width / 2]: long waves are slowed by `factor`, short ones not, and between both
    the inverse is interpolated (transformers, modeling_rope_utils.py; llama.cpp stores the
    factors by which the frequencies are divided as rope_freqs.weight)."""
    factor = rope.positive("factor")
    low, high = rope.positive("low_freq_factor"), rope.positive("high_freq_factor")
    context = rope.positive("original_max_position_embeddings")
    if not low < high:
        raise SparkinferError(
            f"{rope.path}: {rope.prefix}low_freq_factor {low} is not below high_freq_factor {high}"
        )
    exponents = np.arange(0, shape.head_width, 2, dtype=np.float64) / shape.head_width
    wavelengths = 2 * np.pi * shape.rope_theta**exponents
    share = np.clip((context / wavelengths - low) / (high - low), 0.0, 1.0)
    return (1.0 / ((1.0 - share) / factor + share)).astype(np.float32)
