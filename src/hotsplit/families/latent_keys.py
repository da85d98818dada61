"""Latent attention (model/latent.py) in configs, in the keys of a GGUF, and in tensors.

transformers normalises both latents with an epsilon of 1e-6 whatever `rms_norm_eps` says (the
default of its classes' norms), llama.cpp with that of all norms, so a model file has a key for it
where the two differ."""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from hotsplit.errors import HotsplitError
from hotsplit.families.blueprint import HeadRows, Rows, Sources
from hotsplit.families.config_reader import ConfigReader
from hotsplit.families.decoder_sizes import Sizes
from hotsplit.families.family import Tensors
from hotsplit.families.key_reader import KeyReader
from hotsplit.families.row_order import adjacent_pairs
from hotsplit.files.gguf_file import TensorEntry, Value, array_entry, unpacked
from hotsplit.model.latent import KEY_A, KEY_B, OLD_KEY_VALUE_B, QUERY, QUERY_B, VALUE_B, Latent
from hotsplit.model.rope import RopeScaling
from hotsplit.model.spec import ModelSpec

YARN_KEY, EPSILON_KEY = "rope.scaling.yarn_log_multiplier", "attention.latent_norm_rms_epsilon"
_RANKS = ("q_lora_rank", "kv_lora_rank")
_OF_HEADS = ("key_length_mla", "value_length_mla")
KEYS = (*(f"attention.{name}" for name in (*_RANKS, *_OF_HEADS)), YARN_KEY, EPSILON_KEY)
TRANSFORMERS_EPSILON = 1e-6
# llama.cpp's converter writes `mscale_all_dim` times this, and its graph divides by it again.
LEGACY = 0.1


# ---- configs -------------------------------------------------------------------------------------


def derived(read: ConfigReader) -> dict[str, object]:
    """The part of a head that rotates, which is what rotary embeddings are given for."""
    heads = read.count("num_attention_heads")
    read.refuse("num_key_value_heads", heads, why="latents are keys of all heads")
    return {"head_dim": read.count("qk_rope_head_dim"), "num_key_value_heads": 1}


def latent_keys(read: ConfigReader) -> dict[str, Value]:
    """The keys of the projections, in llama.cpp's form, and of YaRN's scale of scores."""
    plain, rotated = read.count("qk_nope_head_dim"), read.count("qk_rope_head_dim")
    size, value = read.count("kv_lora_rank"), read.count("v_head_dim")
    heads = read.count("num_attention_heads")
    widths = {"queries": plain + rotated, "keys and values": plain + value}
    read.check_size({"kv_lora_rank": size, **{k: heads * w for k, w in widths.items()}})
    counts = {
        "attention.kv_lora_rank": size,
        "attention.key_length": size + rotated,
        "attention.value_length": size,
        "attention.key_length_mla": plain + rotated,
        "attention.value_length_mla": value,
        "attention.head_count_kv": 1,
        "rope.dimension_count": rotated,
    }
    if read.values.get("q_lora_rank", 0) is not None:  # a missing one is refused
        counts["attention.q_lora_rank"] = read.count("q_lora_rank")
    keys: dict[str, Value] = {name: np.uint32(count) for name, count in counts.items()}
    if read.positive("rms_norm_eps") != TRANSFORMERS_EPSILON:
        keys[EPSILON_KEY] = np.float32(TRANSFORMERS_EPSILON)
    return keys | _yarn_keys(read)


def _yarn_keys(read: ConfigReader) -> dict[str, Value]:
    """As llama.cpp's graph reads them: with the multiplier, `attn_factor` is the whole magnitude of
    cosines and sines, otherwise the factor on YaRN's own."""
    rope = read.rope()
    all_dims = rope.values.get("mscale_all_dim")
    if rope.values.get("rope_type", rope.values.get("type")) != "yarn" or not all_dims:
        return {}
    usual = RopeScaling(kind="yarn", factor=rope.positive("factor")).magnitude
    whole, own = 1.0 + rope.positive("mscale_all_dim") * (usual - 1.0), usual
    if rope.values.get("mscale"):
        own = (1.0 + rope.positive("mscale") * (usual - 1.0)) / whole
    return {
        YARN_KEY: np.float32(LEGACY * rope.positive("mscale_all_dim")),
        "rope.scaling.attn_factor": np.float32(rope.positive("attention_factor", own)),
    }


# ---- keys ----------------------------------------------------------------------------------------


def sizes_of_keys(read: KeyReader) -> tuple[KeyReader, Sizes]:
    """The sizes with absorbed queries and their one key, and a reader with such keys."""
    name = f"{read.graph.name}.attention."
    width = read.count("attention.kv_lora_rank") + read.count("rope.dimension_count")
    of_head = {"key_length": width, "value_length": width, "head_count_kv": 1}
    keys = {**read.keys, **{name + key: np.uint32(value) for key, value in of_head.items()}}
    own = KeyReader(read.path, keys, read.tensors)
    return own, own.sizes(is_partly_rotated=True)


def latent_of_keys(
    read: KeyReader, sizes: Sizes, *, epsilon: float | None = None, layer: int = 0
) -> Latent:
    """The projections, as `layer` has them. Files without lengths of their own for them have the
    heads' as the usual ones."""
    name, is_old = read.graph.name, f"{read.graph.name}.attention.key_length_mla" not in read.keys
    end = "" if is_old else "_mla"
    rotated, key = (read.count("rope.dimension_count"), read.count(f"attention.key_length{end}"))
    default = None if not is_old else sizes.hidden_size // sizes.num_heads
    has_rank = f"blk.{layer}.{QUERY}.weight" not in read.tensors
    rank_key = "attention.q_lora_rank"
    has_rank = has_rank and f"{name}.{rank_key}" in read.keys
    if key <= rotated:
        raise HotsplitError(
            f"{read.path}: {name}.attention.key_length{end} is {key}, wanted more than the"
            f" {rotated} values that rotate ({name}.rope.dimension_count); get the model again"
        )
    return Latent(
        query_rank=read.count(rank_key) if has_rank else None,
        size=read.count("attention.kv_lora_rank"),
        num_plain=key - rotated,
        num_rotated=rotated,
        value_size=read.count(f"attention.value_length{end}", default),
        epsilon=read.positive(f"{name}.{EPSILON_KEY}", epsilon or sizes.epsilon),
    )


def attention_of(latent: Latent, scaling: RopeScaling, multiplier: float = 0.0) -> dict[str, Any]:
    """The fields of attention. `multiplier`: of the logarithm of YaRN's factor in the scale of
    scores."""
    growth = 1.0
    if scaling.kind == "yarn":
        growth += 0.1 * multiplier * math.log(max(1.0, scaling.factor))
    return {
        "latent": latent,
        "num_kv_projections": 1,
        "value_width": latent.size,
        "scale": growth**2 / math.sqrt(latent.of_query),
    }


def scaling_of_keys(read: KeyReader, scaling: RopeScaling) -> tuple[RopeScaling, float]:
    """The scaling, and the multiplier for `attention_of`. With it, the file's `attn_factor` is the
    whole magnitude (llama.cpp, llama-context.cpp)."""
    name = read.graph.name
    multiplier = read.number(f"{name}.{YARN_KEY}", 0.0) / LEGACY
    if scaling.kind != "yarn" or not multiplier:
        return scaling, 0.0
    whole = read.positive(f"{name}.rope.scaling.attn_factor", 1.0)
    plain = replace(scaling, attn_factor=1.0)
    return replace(plain, attn_factor=whole / plain.magnitude), multiplier


def other_yarn(spec: ModelSpec) -> str | None:
    """What llama.cpp's graph computes otherwise: it multiplies scores by the magnitude, too."""
    rotary = spec.rotary
    if rotary is not None and abs(rotary.scaling.magnitude - 1.0) > 1e-6:
        return (
            "multiplies scores by the magnitude of rotary embeddings, which in this model is"
            f" {rotary.scaling.magnitude:g}"
        )
    return None


# ---- tensors -------------------------------------------------------------------------------------


def latent_sources(spec: ModelSpec, *, is_adjacent: bool = True) -> Sources:
    """Where a checkpoint has the second matrices: each head's keys and values follow one another in
    `kv_b_proj`. Without `is_adjacent`, rotary pairs are half of what rotates apart."""
    attention = spec.attentions[0]
    own = attention.latent
    assert own is not None
    heads = partial(HeadRows, source=f"{OLD_KEY_VALUE_B}.weight", width=own.size)
    rows: dict[str, Rows] = {}
    if not is_adjacent:
        name = QUERY if own.query_rank is None else QUERY_B
        rows[f"{name}.weight"] = _adjacent(
            f"{name}.weight", attention.num_heads, own.num_plain, own.num_rotated
        )
        rows[f"{KEY_A}.weight"] = _adjacent(f"{KEY_A}.weight", 1, own.size, own.num_rotated)
    total = own.num_plain + own.value_size
    return Sources(
        rows=rows,
        heads={
            f"{KEY_B}.weight": heads(begin=0, end=own.num_plain, total=total, is_turned=True),
            f"{VALUE_B}.weight": heads(begin=own.num_plain, end=total, total=total),
        },
    )


def _adjacent(source: str, num_heads: int, num_plain: int, num_rotated: int) -> Rows:
    rows_HW = np.arange(num_heads * (num_plain + num_rotated)).reshape(num_heads, -1)
    rows_HW[:, num_plain:] = rows_HW[:, num_plain:][:, adjacent_pairs(num_rotated, 1)]
    return Rows(source=source, order=rows_HW.reshape(-1), num_rows=rows_HW.size)


def latents_apart(spec: ModelSpec, tensors: Tensors) -> Tensors:
    """The tensors, with keys' and values' parts of each head, which older files and MiniCPM 3's
    have as rows of one matrix. Those of keys are transposed: blocks run along the other dimension,
    so that quantised ones become f16."""
    found = dict(tensors)
    for name, entry in tensors.items():
        prefix, old, part = name.partition(f"{OLD_KEY_VALUE_B}.")
        if not old or part != "weight" or spec.attentions[0].latent is None:
            continue
        heads, own = spec.attentions[0].num_heads, spec.attentions[0].latent
        total = own.num_plain + own.value_size
        if entry.shape != (heads * total, own.size):
            continue  # and is refused as unknown
        del found[name]
        rows_HN = np.arange(heads * total).reshape(heads, total)
        found[f"{prefix}{VALUE_B}.weight"] = _of_heads(entry, rows_HN[:, own.num_plain :])
        found[f"{prefix}{KEY_B}.weight"] = _turned(_of_heads(entry, rows_HN[:, : own.num_plain]))
    return found


def _of_heads(entry: TensorEntry, rows_HN: np.ndarray) -> TensorEntry:
    """[H, N, M] of rows of a matrix [.., M]."""

    def read_rows(start: int, stop: int) -> np.ndarray:
        found: np.ndarray = entry.read()[rows_HN[start:stop]]
        return found

    packed_from = entry.packed_from and _of_heads(entry.packed_from, rows_HN)
    shape = (*rows_HN.shape, entry.shape[1])
    return replace(entry, shape=shape, read_rows=read_rows, packed_from=packed_from)


def _turned(entry: TensorEntry) -> TensorEntry:
    """[H, M, N] of [H, N, M], in f32 if that is the file's type, else in f16."""
    kind, values = "f32" if entry.kind == "f32" else "f16", unpacked(entry)

    def read_rows(start: int, stop: int) -> np.ndarray:
        turned = values.read_rows(start, stop).swapaxes(1, 2)
        made: np.ndarray = array_entry(turned, kind).read()
        return made

    heads, num_rows, width = entry.shape
    return TensorEntry(shape=(heads, width, num_rows), kind=kind, read_rows=read_rows)
