"""The kinds of rotary embeddings (model/rope.py) as files have them: in a config, in the keys of a
GGUF and as parameters for transformers. A kind that is read from configs is a row of CONFIG_KINDS.

Letters: W width of a head."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from hotsplit.errors import HotsplitError
from hotsplit.families.decoder_sizes import MAX_COUNT
from hotsplit.files.gguf_file import Value
from hotsplit.files.typed import shown
from hotsplit.model.rope import FREQUENCIES, KINDS, LONG, NO_SCALING, SHORT, RopeScaling

if TYPE_CHECKING:
    from hotsplit.families.config_reader import ConfigReader
    from hotsplit.families.key_reader import KeyReader

THETA, _PREFIX = "rope.freq_base", "rope.scaling."
# What `scaling_of_keys` reads, without the architecture's prefix.
SCALING_KEYS = tuple(
    _PREFIX + name
    for name in (
        "type",
        "factor",
        "original_context_length",
        "attn_factor",
        "yarn_ext_factor",
        "yarn_attn_factor",
        "yarn_beta_fast",
        "yarn_beta_slow",
    )
)


@dataclass(frozen=True, kw_only=True)
class Rope:
    """How the configs of a family state rotary embeddings. kinds: of CONFIG_KINDS. theta: without a
    key for it. share: of the values of a head that rotate, without a key, where a part of them may.
    rounds_borders: what YaRN does. layers: the type of layers, if these have parameters of their
    own in `rope_parameters` (transformers 5) or at least a theta, `theta_key` (4)."""

    kinds: tuple[str, ...] = ("default", "linear", "llama3", "yarn")
    theta: float = 10000.0
    share: float | None = None
    rounds_borders: bool = True
    layers: str = ""
    theta_key: str = "rope_theta"


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """What a config says of its rotary embeddings. `own`: a reader of their object in the config,
    `whole` of the config. `num_pairs`: of the values of a head that rotate."""

    whole: "ConfigReader"
    own: "ConfigReader"
    head_dim: int
    context_length: int
    theta: float
    num_pairs: int
    rounds_borders: bool

    def error(self, words: str) -> HotsplitError:
        """An error about a key of the object."""
        return HotsplitError(f"{self.own.path}: {self.own.prefix}{words}")


# The keys of a scaling, with the context if it extends it, and the divisors of the frequencies, f32
# [W / 2], by the names of their tensors.
Scaled = tuple[dict[str, Value], Mapping[str, np.ndarray]]


@dataclass(frozen=True, kw_only=True)
class ConfigKind:
    """A kind of rotary embeddings in configs. `words`: for people. `spellings`: beside its own
    name. `reads_share`: of a head's pairs, by `partial_rotary_factor`."""

    words: str
    read: Callable[[Parameters], Scaled]
    spellings: tuple[str, ...] = ()
    reads_share: bool = False


def rope_keys(whole: "ConfigReader", rope: Rope, head_dim: int, context_length: int) -> Scaled:
    """The keys of the rotary embedding. They are read from `rope_scaling` (transformers 4) or
    `rope_parameters` (5); if both keys are given, `rope_scaling` takes precedence, as in
    transformers. `rope_theta` may also be a key of the config itself."""
    if rope.layers:
        # A reader in which the parameters of a type of layers are those of the model.
        nested = whole.values.get("rope_parameters") or {}
        if not isinstance(nested, dict):
            raise HotsplitError(
                f"{whole.path}: rope_parameters is {shown(nested)}, wanted an object or null"
            )
        is_full = rope.layers == "full_attention"
        whole = whole.with_values(
            {
                "rope_parameters": nested.get(rope.layers),
                "rope_theta": whole.values.get(rope.theta_key),
                "rope_scaling": whole.values.get("rope_scaling") if is_full else None,
            }
        )
    own = whole.rope()
    # The kind that the object in a config names, of those known for its family.
    name = own.values.get("rope_type", own.values.get("type", "default"))  # the latter is old
    kinds = {each: CONFIG_KINDS[each] for each in rope.kinds}
    spelt = {s: each for each, kind in kinds.items() for s in (*kind.spellings, each)}
    if not isinstance(name, str) or name not in spelt:
        raise HotsplitError(
            f"{own.path}: {own.prefix[:-1]} is of type {shown(name)}, which is not supported;"
            f" supported for this family: {', '.join(kind.words for kind in kinds.values())}"
        )
    kind, num_rotated = kinds[spelt[name]], head_dim
    if rope.share is not None:
        num_rotated = rotated_values(whole, own, head_dim, rope.share)
    elif not kind.reads_share:
        for reader in (whole, own):
            reader.refuse("partial_rotary_factor", 1.0, 1)
    theta = own.positive_or("rope_theta", whole.positive("rope_theta", rope.theta))
    scaling, divisors = kind.read(
        Parameters(
            whole=whole,
            own=own,
            head_dim=head_dim,
            context_length=context_length,
            theta=theta,
            num_pairs=num_rotated // 2,
            rounds_borders=rope.rounds_borders,
        )
    )
    keys: dict[str, Value] = {"rope.dimension_count": np.uint32(num_rotated)}
    return keys | {THETA: np.float32(theta)} | scaling, divisors


def local_theta_key(
    read: "ConfigReader", theta: float, theta_key: str = "", kinds: tuple[str, ...] = ("default",)
) -> dict[str, Value]:
    """The key of the theta of layers with a window, which have parameters of their own."""
    rope = Rope(kinds=kinds, theta=theta, layers="sliding_attention", theta_key=theta_key)
    keys, _ = rope_keys(read, rope, 2, 1)
    return {f"{THETA}_swa": keys[THETA]}


def rotated_values(
    whole: "ConfigReader", own: "ConfigReader", head_dim: int, default: float
) -> int:
    """The number of values of a head that rotate."""
    key = "partial_rotary_factor"
    share = own.positive_or(key, whole.positive(key, default))
    count = int(head_dim * share)
    if share > 1 or count % 2 or not count:
        raise HotsplitError(
            f"{whole.path}: {key} is {share:g}: {count} of {head_dim} values of a head cannot"
            " rotate in pairs"
        )
    return count


def _linear(p: Parameters) -> Scaled:
    return _keys(type="linear", factor=np.float32(p.own.positive("factor"))), {}


def _dynamic(p: Parameters) -> Scaled:
    """NTK-aware: by a fixed `alpha` the theta is larger (Hunyuan; transformers,
    modeling_hunyuan_v1_dense.py); a factor alone counts beyond the context."""
    if not p.own.values.get("alpha"):
        p.own.positive("factor")
        return {}, {}
    exponent = p.num_pairs / (p.num_pairs - 1)
    return {THETA: np.float32(p.theta * p.own.positive("alpha") ** exponent)}, {}


def _llama3(p: Parameters) -> Scaled:
    """The divisors are `factor` for long waves, 1 for short ones; between them the reciprocal is
    interpolated (transformers, modeling_rope_utils.py; llama.cpp stores these divisors as
    rope_freqs.weight)."""
    factor = p.own.positive("factor")
    low, high = p.own.positive("low_freq_factor"), p.own.positive("high_freq_factor")
    context = p.own.positive("original_max_position_embeddings")
    if not low < high:
        raise p.error(f"low_freq_factor {low} is not below high_freq_factor {high}")
    exponents = np.arange(0, p.head_dim, 2, dtype=np.float64) / p.head_dim
    wavelengths = 2 * np.pi * p.theta**exponents
    share = np.clip((context / wavelengths - low) / (high - low), 0.0, 1.0)
    return {}, {FREQUENCIES: (1.0 / ((1.0 - share) / factor + share)).astype(np.float32)}


def _yarn(p: Parameters) -> Scaled:
    """YaRN's constants, but for those at their defaults (transformers, modeling_rope_utils.py), and
    the context length that they extend the original one to, unless it is longer already."""
    p.own.refuse("truncate", p.rounds_borders)
    if p.theta <= 1.0:
        raise HotsplitError(f"{p.own.path}: rope_theta is {p.theta:g}; YaRN wants above 1")
    length = p.own.count("original_max_position_embeddings", p.context_length)
    longer = p.context_length / length
    factor = p.own.positive("factor", longer if longer > 1.0 else None)
    usual = whole = RopeScaling(kind="yarn", factor=factor).magnitude
    keys = ("mscale", "mscale_all_dim")
    scales = [1 + p.own.positive(key) * (usual - 1) for key in keys if p.own.values.get(key)]
    if len(scales) == 2:  # one alone changes nothing
        whole = scales[0] / scales[1]
    constants = {
        "attn_factor": (p.own.positive("attention_factor", whole) / usual, 1.0),
        "yarn_beta_fast": (p.own.positive("beta_fast", 32.0), 32.0),
        "yarn_beta_slow": (p.own.positive("beta_slow", 1.0), 1.0),
    }
    longest = factor * length
    if longest > MAX_COUNT:
        raise p.error(
            f"factor is {factor:g}; times {length:,} tokens it is a context of more than"
            f" {MAX_COUNT}"
        )
    found = _keys(
        type="yarn",
        factor=np.float32(factor),
        original_context_length=np.uint32(length),
        **{n: np.float32(own) for n, (own, plain) in constants.items() if own != plain},
    )
    return found | {"context_length": np.uint32(max(p.context_length, int(longest)))}, {}


def _longrope(p: Parameters) -> Scaled:
    """Longrope, of a model that was trained on texts of `original_max_position_embeddings` tokens
    first; its magnitude is as in transformers (modeling_rope_utils.py)."""
    key = "original_max_position_embeddings"
    length = (p.whole if p.whole.values.get(key) else p.own).count(key)  # as in transformers
    factor = p.own.positive("factor", p.context_length / length)
    magnitude = 1.0
    if factor > 1.0:
        if length < 2:
            raise HotsplitError(
                f"{p.own.path}: original_max_position_embeddings is {length}, wanted at least 2"
            )
        magnitude = math.sqrt(1.0 + math.log(factor) / math.log(length))
    what = "one for each pair of values that rotate"
    divisors = {
        name: np.array(p.own.positives(key, p.num_pairs, what), np.float32)
        for key, name in (("short_factor", SHORT), ("long_factor", LONG))
    }
    keys = _keys(
        type="longrope",
        original_context_length=np.uint32(length),
        attn_factor=np.float32(p.own.positive("attention_factor", magnitude)),
    )
    return keys, divisors


def _proportional(p: Parameters) -> Scaled:
    """The divisors are 1 for the first pairs, which rotate, and for the others 1e30, as in
    llama.cpp's conversion/gemma.py (transformers, modeling_rope_utils.py)."""
    p.own.refuse("factor", 1.0, 1)
    key, num_pairs = "partial_rotary_factor", p.head_dim // 2
    count = int((share := p.own.positive_or(key, 1.0)) * p.head_dim // 2)
    if not 1 <= count <= num_pairs:
        raise p.error(f"{key} is {share:g}: {count} of {num_pairs} pairs of a head cannot rotate")
    divisors = np.repeat(np.array([1.0, 1e30], np.float32), [count, num_pairs - count])
    return {}, {FREQUENCIES: divisors}


def _keys(**own: Value) -> dict[str, Value]:
    return {_PREFIX + name: value for name, value in own.items()}


CONFIG_KINDS = {
    "default": ConfigKind(words="ordinary rotary embeddings (default)", read=lambda p: ({}, {})),
    "mrope": ConfigKind(words="by time and place in an image (mrope)", read=lambda p: ({}, {})),
    "linear": ConfigKind(words="positions divided by a factor (linear)", read=_linear),
    "dynamic": ConfigKind(words="a larger theta beyond the context (dynamic)", read=_dynamic),
    "llama3": ConfigKind(words="Llama 3's (llama3)", read=_llama3),
    "yarn": ConfigKind(words="YaRN (yarn)", read=_yarn),
    "longrope": ConfigKind(  # as Phi-3's configs have spelt it
        words="LongRoPE (longrope)", read=_longrope, spellings=("su", "yarn")
    ),
    "proportional": ConfigKind(
        words="a part of each head's pairs (proportional)", read=_proportional, reads_share=True
    ),
}


def scaling_of_keys(read: "KeyReader") -> RopeScaling:
    """The scaling of rotary embeddings. As in llama.cpp, a file without a scaling type means
    linear scaling by its factor, or by 1 without one."""
    prefix = f"{read.graph.name}.{_PREFIX}"
    kind = read.keys.get(prefix + "type")
    known = (*KINDS, "longrope")
    if kind not in (None, *known):
        raise HotsplitError(
            f"{read.path}: {prefix}type is {shown(kind)}, wanted {', '.join(known)}: this kind of"
            " rotary embedding is not supported"
        )
    if LONG in read.tensors or kind == "longrope":  # llama.cpp's converter writes no type
        factor, length = read.positive(prefix + "attn_factor", 1.0), _original_length(read)
        return RopeScaling(kind="longrope", attn_factor=factor, original_length=length)
    if kind == "yarn":
        return _yarn_of_keys(read, prefix)
    for name in ("attn_factor", "yarn_attn_factor"):
        if read.number(prefix + name, 1.0) != 1.0:
            raise HotsplitError(f"{read.path}: {prefix}{name} without YaRN is not supported")
    if kind == "none":
        return NO_SCALING
    factor = read.positive(prefix + "factor", 1.0 if kind is None else None)
    return NO_SCALING if factor == 1.0 else RopeScaling(kind="linear", factor=factor)


def _yarn_of_keys(read: "KeyReader", prefix: str) -> RopeScaling:
    if read.number(prefix + "yarn_ext_factor", 1.0) != 1.0:
        raise HotsplitError(
            f"{read.path}: {prefix}yarn_ext_factor is not 1: only YaRN as published is supported"
        )
    base = f"{read.graph.name}.rope.freq_base"
    if read.positive(base, 10000.0) <= 1.0:
        raise HotsplitError(f"{read.path}: key {base!r} must be above 1 for YaRN")
    factor = read.positive(prefix + "factor")
    less = read.number(prefix + "yarn_log_multiplier", 0.0) * math.log(max(1.0, factor))
    scaling = RopeScaling(
        kind="yarn",
        factor=factor,
        original_length=_original_length(read),
        beta_fast=read.positive(prefix + "yarn_beta_fast", 32.0),
        beta_slow=read.positive(prefix + "yarn_beta_slow", 1.0),
        attn_factor=read.positive(prefix + "attn_factor", 1.0) / (1.0 + 0.1 * less),
    )
    # What llama.cpp's converter writes for a config's attention_factor, the whole magnitude;
    # most of llama.cpp's graphs do not read it.
    if prefix + "yarn_attn_factor" not in read.keys:
        return scaling
    whole = read.positive(prefix + "yarn_attn_factor")
    return replace(scaling, attn_factor=scaling.attn_factor * whole / scaling.magnitude)


def _original_length(read: "KeyReader") -> int:
    return read.count(f"{_PREFIX}original_context_length", read.count("context_length"))
