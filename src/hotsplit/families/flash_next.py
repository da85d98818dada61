"""Qwen3.8-Flash-Next (`qwen4_exp`): the delta nets, the gated attention and the experts of Qwen 3.5
between hyper-connections of several streams (model/streams.py), embeddings of n-grams in one layer
(model/ngrams.py), and attention to the tokens that an indexer chooses (model/indexer.py), which is
to all of them while a text is short; longer texts are refused."""

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import count, islice
from typing import cast

import gguf
import numpy as np

from hotsplit.errors import HotsplitError
from hotsplit.families import delta_nets
from hotsplit.families.blueprint import ADD_ONE, IGNORED, NameOf, Rows, Sources
from hotsplit.families.config_reader import ConfigReader
from hotsplit.families.decoder_sizes import MAX_COUNT
from hotsplit.families.expert_keys import KEYS
from hotsplit.families.family import Architecture
from hotsplit.families.key_reader import KeyReader
from hotsplit.files.gguf_file import Value
from hotsplit.files.typed import shown
from hotsplit.model.arrangements import Arrangement
from hotsplit.model.indexer import STEM, Indexer
from hotsplit.model.ngrams import (
    CONV,
    KEY,
    MOST_HEADS,
    MOST_IDS,
    MOST_LENGTH,
    MOST_TAPS,
    NORMS,
    TABLE,
    VALUE,
    NgramInputs,
    NgramRows,
)
from hotsplit.model.spec import ModelSpec
from hotsplit.model.streams import MOST_STREAMS, BeginStreams, StreamsToHead

STREAMS, RANK = "hyper_connection.count", "hyper_connection.low_rank"
INDEXER, RATIOS = "attention.indexer.", "attention.compress_ratios"
ROW = "embedding_length_per_layer_input"
PLE = "ple."
# Parts of names in checkpoints and in model files.
_MEAN = {
    "hc_norm": "norm",
    "input_mix_weight_down": "down",
    "input_mix_weight_up": "up",
    "block_inject_weight": "inject",
}
_MEANS = {"attn_hyper_connection": "hc_attn", "mlp_hyper_connection": "hc_ffn"}
_IN_LAYER = {
    **{f"{a}.{b}": f"{own}_{part}" for a, own in _MEANS.items() for b, part in _MEAN.items()},
    "ple.key_proj": KEY,
    "ple.value_proj": VALUE,
    "ple.conv1d": CONV,
    **{f"ple.{name.removeprefix('ple_')}": name for name in NORMS},
    "self_attn.indexer.index_qk_proj": f"{STEM}.qk_proj",
    "self_attn.indexer.q_layernorm": f"{STEM}.q_norm",
    "self_attn.indexer.k_layernorm": f"{STEM}.k_norm",
}
_MIXER = "model.hyper_connection_mixer."
_PLE_TABLE = "ple.ple_embedding.ngram_embedding"
# Of a checkpoint, by which rows are chosen; they follow from the config (`hashes`).
_BUFFERS = ("layer_multipliers", "ngram_heads_offsets", "ngram_heads_vocab_sizes")


def hashes(
    read: ConfigReader, length: int, heads: int, vocab_size: int
) -> tuple[list[int], list[int]]:
    """The multipliers of tokens, and the sizes of the tables of each hash: the first primes from a
    base on (transformers, modeling_qwen4_exp.py)."""
    gamma, mask = 0x9E3779B97F4A7C15, (1 << 64) - 1
    half = max(1, ((1 << 63) - 1) // vocab_size // 2)
    multipliers = []
    for place in range(length):
        value = (read.whole("seed") + gamma * (place + 2)) & mask
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
        multipliers.append(2 * ((value ^ (value >> 31)) % half) + 1)
    numbers = count(max(2, read.count("ngram_vocab_size_base")))
    return multipliers, list(islice(filter(_is_prime, numbers), heads))


def _is_prime(value: int) -> bool:
    return all(value % divisor for divisor in range(2, math.isqrt(value) + 1))


def ngram_keys(read: ConfigReader) -> dict[str, Value]:
    """None without a layer that reads n-grams."""
    layers = read.values.get("ple_layer_ids") or []
    num_layers, vocab_size = read.count("num_hidden_layers"), read.count("vocab_size")
    if layers == []:
        return {}
    if (
        not isinstance(layers, list)
        or len(layers) != 1
        or layers[0] not in range(1, num_layers + 1)
    ):
        raise HotsplitError(
            f"{read.path}: ple_layer_ids is {shown(layers)}, wanted one of the {num_layers} layers,"
            " counted from 1: n-grams in several layers are not supported"
        )
    length, per_length = read.count("ngram_size"), read.count("heads_per_ngram")
    taps = read.count("ple_conv_kernel_size")
    heads, width = (length - 1) * per_length, read.count("ple_embed_dim", read.count("hidden_size"))
    _check(str(read.path), length, heads, taps, vocab_size)
    if width % heads:
        raise HotsplitError(
            f"{read.path}: ple_embed_dim is {width}, which does not divide among {heads} rows"
        )
    ends = read.values.get("eos_token_id")
    end = ends[0] if isinstance(ends, list) and ends else ends
    if isinstance(end, bool) or not isinstance(end, int) or not 0 <= end < vocab_size:
        raise HotsplitError(
            f"{read.path}: eos_token_id is {shown(ends)}, wanted a token: no n-gram goes beyond it"
        )
    multipliers, sizes = hashes(read, length, heads, vocab_size)
    return {
        f"{PLE}layers": [layers[0] - 1],
        f"{PLE}ngram_size": np.uint32(length),
        f"{PLE}heads_per_ngram": np.uint32(per_length),
        f"{PLE}conv_kernel": np.uint32(taps),
        f"{PLE}eos_token_id": np.uint32(end),
        f"{PLE}layer_multipliers": multipliers,
        f"{PLE}head_offsets": [sum(sizes[:head]) for head in range(heads)],
        f"{PLE}head_vocab_sizes": sizes,
        ROW: np.uint32(width // heads),
    }


def _check(where: str, length: int, heads: int, taps: int, vocab_size: int) -> None:
    """Raises HotsplitError, which begins with `where`, for numbers that the kernels do not take."""
    faults = {
        f"n-grams of {length} tokens, wanted 2 to {MOST_LENGTH}": not 2 <= length <= MOST_LENGTH,
        f"{heads} rows of n-grams a token, wanted 1 to {MOST_HEADS}": not 1 <= heads <= MOST_HEADS,
        f"a convolution of {taps} taps, wanted 2 to {MOST_TAPS}": not 2 <= taps <= MOST_TAPS,
        f"{vocab_size} tokens, wanted up to {MOST_IDS}": vocab_size > MOST_IDS,
    }
    for words, is_wrong in faults.items():
        if is_wrong:
            raise HotsplitError(f"{where}: {words}: this model is not supported")


def keys(read: ConfigReader) -> dict[str, Value]:
    gate = read.values.get("output_gate_type") or read.values.get("hidden_act")
    if gate != "sigmoid":
        raise HotsplitError(
            f"{read.path}: output_gate_type is {shown(gate)}, wanted 'sigmoid': no key of a GGUF"
            " says another; this checkpoint is not supported"
        )
    read.refuse("indexer_kv_heads", 1)
    ratio = read.count("indexer_compress_ratio")
    recurrent_L = read.other_layers("linear_attention", "full_attention_interval", 4)
    return {
        **delta_nets.keys(read, name="qwen35moe"),
        "expert_weights_norm": read.flag("norm_topk_prob"),
        STREAMS: np.uint32(read.count("hc_count")),
        RANK: np.uint32(read.count("hc_lowrank")),
        f"{INDEXER}head_count": np.uint32(read.count("indexer_n_heads")),
        f"{INDEXER}key_length": np.uint32(read.count("indexer_head_dim")),
        f"{INDEXER}top_k": np.uint32(read.count("indexer_budget")),
        RATIOS: [0 if is_recurrent else ratio for is_recurrent in recurrent_L],
        **ngram_keys(read),
    }


def derived(read: ConfigReader) -> dict[str, object]:
    """transformers saves other types of layers than checkpoints are published with."""
    types = read.values.get("layer_types")
    if isinstance(types, list):
        types = ["full_attention" if each == "indexed_attention" else each for each in types]
    return {**delta_nets.derived(read, name="qwen35moe"), "layer_types": types}


def table_of_config(read: ConfigReader) -> Mapping[str, tuple[int, ...]]:
    """The table, whose rows are padded."""
    own = ngram_keys(read)
    if not own:
        return {}
    total = sum(cast(list[int], own[f"{PLE}head_vocab_sizes"]))
    divisor = read.count("make_ngram_vocab_size_divisible_by")
    width = int(cast(np.uint32, own[ROW]))
    return {f"{TABLE}.weight": (-(-total // divisor) * divisor, width)}


def sources(spec: ModelSpec, read: ConfigReader) -> Sources:
    own = delta_nets.sources(spec, read)
    indexer = _indexer_of(spec)
    queries = indexer.num_heads * indexer.head_dim
    both = np.arange(queries + indexer.head_dim)
    joined = f"{STEM}.qk_proj.weight"
    parts = {"q_proj": both[:queries], "k_proj": both[queries:]}
    rows = {
        f"{STEM}.{name}.weight": Rows(source=joined, order=order, num_rows=len(both))
        for name, order in parts.items()
    }
    return replace(
        own,
        renamed=lambda name_of: _renamed(own.renamed(name_of)),
        rows={**own.rows, **rows},
        changes={**own.changes, **{f"{name}.weight": ADD_ONE for name in NORMS}},
        ignored=(*IGNORED, *_BUFFERS),
        pieces=frozenset({f"{TABLE}.weight"}),
    )


def _renamed(name_of: NameOf) -> NameOf:
    """The names; llama.cpp's map that is shared with Qwen 3.5 lacks those of what is new."""

    def name(source: str) -> str | None:
        stem, _, part = source.rpartition(".")
        if stem.startswith(_MIXER):
            found = _MEAN.get(stem.removeprefix(_MIXER))
            return found and f"output_hc_{found}.{part}"
        _, is_in_layer, inner = stem.partition(".layers.")
        layer, _, inner = inner.partition(".")
        if is_in_layer and inner.startswith(_PLE_TABLE):
            piece = inner.removeprefix(_PLE_TABLE).removeprefix(".shard_")
            return f"{TABLE}.{piece}.{part}" if piece else f"{TABLE}.{part}"
        if is_in_layer and inner in _IN_LAYER:
            return f"blk.{layer}.{_IN_LAYER[inner]}.{part}"
        return name_of(source)

    return name


def _indexer_of(spec: ModelSpec) -> Indexer:
    (indexer,) = {attention.indexer for attention in spec.attentions}
    assert indexer is not None
    return indexer


def of_keys(read: KeyReader) -> ModelSpec:
    num_streams, rank, path = read.count(STREAMS), read.count(RANK), read.path
    if not 2 <= num_streams <= MOST_STREAMS:
        raise HotsplitError(
            f"{path}: {num_streams} streams ({read.graph.name}.{STREAMS}), wanted 2 to"
            f" {MOST_STREAMS}: this model is not supported"
        )
    indexer = Indexer(
        num_heads=read.count(f"{INDEXER}head_count"),
        head_dim=read.count(f"{INDEXER}key_length"),
        budget=read.count(f"{INDEXER}top_k"),
        ratio=_ratio(read),
    )
    if indexer.budget % indexer.ratio:
        raise HotsplitError(
            f"{path}: an indexer of {indexer.budget} tokens in blocks of {indexer.ratio}: no such"
            " model; get it again"
        )
    rows, layer, inputs = _ngrams_of_keys(read, num_streams)
    spec = delta_nets.of_keys(
        read,
        has_experts=True,
        arrange=partial(Arrangement.streams, num_streams=num_streams, rank=rank),
        has_sigmoid_gates=True,
        attention={"indexer": indexer},
        output_norm=False,
        first=(*([] if rows is None else [rows]), BeginStreams(num_streams=num_streams)),
        last=(
            StreamsToHead(
                num_streams=num_streams,
                rank=rank,
                epsilon=read.positive(f"{read.graph.name}.attention.layer_norm_rms_epsilon"),
            ),
        ),
    )
    if inputs is not None:
        layers = list(spec.layers)
        if layer >= len(layers) or layers[layer].attention is not None:
            raise HotsplitError(
                f"{path}: n-grams are read in layer {layer}, wanted one with a delta net: this"
                " model is not supported"
            )
        layers[layer] = replace(layers[layer], blocks=(inputs, *layers[layer].blocks))
        spec = spec.with_layers(layers)
    if indexer.dense_length >= spec.context_length:
        return spec
    return replace(
        spec,
        context_length=indexer.dense_length,
        context_limit=f"beyond {indexer.dense_length:,} tokens an indexer chooses what is attended"
        " to, which is not supported so far",
    )


def _ratio(read: KeyReader) -> int:
    """The tokens of a block, which all layers that attend share. llama.cpp's converter writes zeros
    where its transformers has other names of layers: 1, with which attention is dense for the
    least tokens."""
    key = f"{read.graph.name}.{RATIOS}"
    found = read.keys.get(key, [])
    numbers = {value for value in found if value} if isinstance(found, list) else {found}
    ratio = numbers.pop() if len(numbers) == 1 else 0 if numbers else 1
    if isinstance(ratio, bool | str) or not 1 <= ratio <= MAX_COUNT:
        raise HotsplitError(
            f"{read.path}: {key} is {shown(found)}, wanted one number for all layers that attend:"
            " this model is not supported"
        )
    return int(ratio)


def _ngrams_of_keys(
    read: KeyReader, num_streams: int
) -> tuple[NgramRows | None, int, NgramInputs | None]:
    """The rows of n-grams, and the layer that reads them."""
    name, path = f"{read.graph.name}.{PLE}", read.path
    layers = read.keys.get(f"{name}layers")
    if layers is None:
        return None, 0, None
    if not isinstance(layers, list) or len(layers) != 1:
        raise HotsplitError(
            f"{path}: {name}layers is {shown(layers)}, wanted one: n-grams in several layers are"
            " not supported"
        )
    (layer,) = _integers(read, "layers", 1)
    length, per_length = (read.count(f"{PLE}{key}") for key in ("ngram_size", "heads_per_ngram"))
    taps, heads, width = read.count(f"{PLE}conv_kernel"), (length - 1) * per_length, read.count(ROW)
    table = read.tensors.get(f"{TABLE}.weight")
    embedding = read.tensors.get("token_embd.weight")
    vocab_size = embedding.shape[0] if embedding else read.count("vocab_size")
    _check(str(path), length, heads, taps, vocab_size)
    sizes = _integers(read, "head_vocab_sizes", heads)
    rows = NgramRows(
        length=length,
        per_length=per_length,
        width=width,
        num_rows=sum(sizes) if table is None else table.shape[0],
        multipliers=tuple(_integers(read, "layer_multipliers", length)),
        sizes=tuple(sizes),
        end_token=read.whole(f"{PLE}eos_token_id"),
    )
    if rows.num_rows > MAX_COUNT:
        raise HotsplitError(
            f"{path}: {rows.num_rows:,} rows of n-grams, wanted up to {MAX_COUNT:,}: this model is"
            " not supported"
        )
    offsets = _integers(read, "head_offsets", heads)
    if 0 in sizes or tuple(offsets) != rows.offsets or sum(sizes) > rows.num_rows:
        raise HotsplitError(
            f"{path}: {heads} hashes of n-grams begin at {shown(offsets)} of {rows.num_rows:,} rows"
            f" ({name}head_offsets), wanted one after another ({name}head_vocab_sizes); get the"
            " model again"
        )
    inputs = NgramInputs(
        num_streams=num_streams,
        hidden_size=read.count("embedding_length"),
        total=rows.total,
        num_taps=taps,
        distance=length,
        epsilon=read.positive(f"{read.graph.name}.attention.layer_norm_rms_epsilon"),
    )
    return rows, layer, inputs


def _integers(read: KeyReader, key: str, least: int) -> list[int]:
    """So many whole numbers below 2^63."""
    name = f"{read.graph.name}.{PLE}{key}"
    found = read.keys.get(name)
    values = [v for v in found if isinstance(v, int)] if isinstance(found, list) else []
    if len(values) != least or not all(0 <= value < 1 << 63 for value in values):
        raise HotsplitError(
            f"{read.path}: key {name!r} is {shown(found)}, wanted {least} whole numbers; get the"
            " model again"
        )
    return values


FLASH_NEXT = replace(
    delta_nets.QWEN3_5_MOE,
    classes=("Qwen4ExpForCausalLM",),
    title="Qwen3.8-Flash-Next",
    graph="qwen4exp",
    names=gguf.MODEL_ARCH.QWEN35MOE,
    model_types=("qwen4_exp_text",),
    defaults={
        **delta_nets.QWEN3_5_MOE.defaults,
        "num_experts_per_tok": 10,
        "num_experts": 512,
        "norm_topk_prob": True,
        "hc_count": 4,
        "hc_lowrank": 320,
        "ple_conv_kernel_size": 4,
        "ngram_size": 3,
        "heads_per_ngram": 8,
        "ngram_vocab_size_base": 20_000_000,
        "make_ngram_vocab_size_divisible_by": 128,
        "seed": 1234,
    },
    derived=derived,
    keys=keys,
    tensors=table_of_config,
    sources=sources,
)
FAMILIES = (FLASH_NEXT, FLASH_NEXT.with_images("Qwen4ExpForConditionalGeneration", "qwen4_exp"))
GRAPHS = (
    Architecture(
        name="qwen4exp",
        of_keys=of_keys,
        known_keys=(
            *KEYS,
            *delta_nets.KEYS_OF_GRAPH,
            STREAMS,
            RANK,
            RATIOS,
            ROW,
            *(f"{INDEXER}{name}" for name in ("head_count", "key_length", "top_k")),
            *(
                f"{PLE}{name}"
                for name in (
                    *("layers", "ngram_size", "heads_per_ngram", "conv_kernel", "eos_token_id"),
                    *("layer_multipliers", "head_offsets", "head_vocab_sizes"),
                    "image_token_id",  # stands for what an image has; a text has none
                )
            ),
        ),
        runs_draft_block=False,
        # "pending complete reimplementation" (src/models/qwen4exp.cpp)
        not_in_stock=lambda spec: "is not to be relied on by its own note, so no file is for it",
    ),
)
