"""Upper bound on the temporary bytes of a prefill pass on a GPU, computed from shapes.

It covers the tensors that are alive at the same time in attention, the feed-forward layer and the
head, in a pass without observers. It is tested against the bytes that torch reports
(tests/test_device_memory.py). `measure_workspace`, which plans use, measures a pass on the CPU,
where the keys of the whole context are unpacked together and all values are kept for observers. The
difference is available for streaming cold weights (runtime.prefill.cold_stream)."""

from collections.abc import Sequence

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.costs.budget import (
    BLOCK_LENGTH,
    FLOAT_BYTES,
    LOGITS_CHUNK,
    gpu_part_neurons,
    kv_bytes,
    kv_kind,
    kv_positions,
)
from hotsplit.model.modes import Mode
from hotsplit.model.spec import SMOOTH, Attention
from hotsplit.runtime.device.device_memory import SMALL_BYTES
from hotsplit.runtime.kernels.gpu.kernels import ROWS
from hotsplit.runtime.kernels.gpu.ranges import attend_scratch
from hotsplit.runtime.ops.attention.attend import SCORE_BYTES, takes_flash
from hotsplit.runtime.weights import gpu_products

# Maximum number of partial sums over a layer's hot neurons: kernels.gpu.ranges.down_parts.
_MOST_PARTS = 32
ROWS_SHARE = 0.25  # the part of the workspace that the buffers of a step of several rows may take
# What a plan reserves on a GPU, if that is at most PLANNED_SHARE of the model's file: a pass of
# PLANNED_TOKENS, two pieces of streamed weights, and the workspace of matrix products. Each pass
# copies all cold weights; twice as many tokens would take twice the memory from hot neurons.
PLANNED_TOKENS, PLANNED_PIECE_BYTES, PLANNED_SHARE, PLANNED_ROWS = 256, 16 << 20, 0.02, 8
_PRODUCT_BYTES = 8 << 20  # of cuBLAS and cuBLASLt: device_memory._warm_up
# The share of the memory for temporaries that may be lost to gaps between them.
GAPS = 0.1
_DECODE_TENSORS = 64  # upper bound on the buffers of a step; each may have an alignment gap


def pass_bytes(
    model: ModelFile,
    num_tokens: int,
    context_length: int,
    mode: Mode,
    num_sequences: int = 1,
    *,
    is_flash: bool = False,
) -> int:
    """Upper bound on the temporary bytes of a pass over `num_tokens` at the end of the context.
    `is_flash`: the card has flash attention."""
    spec, tokens = model.spec, num_tokens
    width, neurons = spec.hidden_size, spec.most_neurons
    hidden_norms = max(
        len({norm.writes for norm in layer.norms.values()} & {"attn_in", "ffn_in"})
        for layer in spec.layers
    )
    hidden = (
        tokens * (3 + hidden_norms) * width
    )  # before, between and after the blocks, their inputs
    of_layers = [
        _attention(model, layer.attention, tokens, context_length, is_flash=is_flash)
        for layer in spec.layers
    ]
    attention = hidden + max(values for values, _ in of_layers)
    scores = max(scores for _, scores in of_layers)
    if num_sequences > 1:
        scores += _gathered(model, context_length)
    # Gate, up and hidden values; activations with a threshold also hold masks and magnitudes.
    has_threshold = model.activation in SMOOTH and mode != "dense"
    part = (4 if has_threshold else 3) * min(neurons, gpu_part_neurons(tokens))
    if mode == "predicted":  # scores of all neurons, and two masks of one byte per neuron
        is_smooth = model.predictor is not None and model.predictor.kind == "gate"
        part = max(part + neurons // 2, (4 if is_smooth else 2) * neurons)
    feed_forward = hidden + tokens * (3 * width + part)
    head = hidden + LOGITS_CHUNK * (3 * width + 2 * spec.vocab_size)
    in_layers = _tile_bytes((width, spec.most_query_size), max(spec.most_qkv_size, neurons), tokens)
    in_head = _tile_bytes((width,), spec.vocab_size, LOGITS_CHUNK)
    return max(
        FLOAT_BYTES * attention + scores,
        FLOAT_BYTES * max(attention, feed_forward) + in_layers,
        FLOAT_BYTES * head + in_head,
    )


def _attention(
    model: ModelFile, attention: Attention, tokens: int, context_length: int, *, is_flash: bool
) -> tuple[int, int]:
    """(values of f32 beside the hidden states, bytes of scores and of unpacked keys) in
    attention."""
    inputs, heads, keys = attention.qkv_size, attention.query_size, attention.key_size
    width = model.spec.hidden_size
    if is_flash and kv_kind(model) == "f16" and takes_flash(attention.head_dim):
        # Queries, keys and values; one product, or half of them during the rotation; the queries in
        # f16, and the output in f16 and f32; queries and keys after norms of their own.
        normed = heads + keys if attention.head_norm else 0
        values = width + inputs + max(heads, inputs // 2) + 2 * heads + normed
        return tokens * values, 0
    group = attention.num_heads // attention.num_kv_heads
    of_token = FLOAT_BYTES * group * context_length
    scores = 3 * of_token * min(tokens, max(1, SCORE_BYTES // of_token))
    scores += FLOAT_BYTES * 2 * context_length * attention.head_dim + 16 * context_length
    return tokens * (width + 3 * inputs + 2 * heads), scores


def _tile_bytes(widths: Sequence[int], num_rows: int, num_tokens: int) -> int:
    """Upper bound on the bytes of a tile of matrices of these widths and of its product: quantised
    weights are unpacked to two bytes per value; f32 is multiplied as it is."""
    rows = [min(gpu_products.tile_rows(width), num_rows) for width in widths]
    tile = max(2 * count * width for count, width in zip(rows, widths, strict=True))
    return tile + 2 * FLOAT_BYTES * num_tokens * max(rows)


def planned_bytes(model: ModelFile, context_length: int, mode: Mode) -> int:
    """The workspace that a plan should reserve on a GPU beyond what `measure_workspace` finds; 0 for
    a small model, whose plans can't afford it."""
    tokens = min(PLANNED_TOKENS, context_length)
    of_pass = pass_bytes(model, tokens, context_length, mode, is_flash=True)
    beside = _PRODUCT_BYTES + SMALL_BYTES + decode_bytes(model, context_length, PLANNED_ROWS)
    wanted = int((of_pass + 2 * PLANNED_PIECE_BYTES) / (1 - GAPS)) + beside
    size = sum(entry.num_bytes for entry in model.tensors.values())
    return wanted if wanted <= PLANNED_SHARE * size else 0


def _gathered(model: ModelFile, context_length: int) -> int:
    """Upper bound on the bytes of a sequence's keys and values gathered from their blocks: both,
    and one of them a second time while its blocks are concatenated."""
    positions = kv_positions(context_length, 2) // 2
    largest = max(kv_bytes(model, layer, positions) for layer in range(model.spec.num_layers))
    return 3 * largest // 2 + 16 * positions


def step_rows(model: ModelFile, context_length: int, workspace: int, num_sequences: int = 1) -> int:
    """Most rows of a decode step whose buffers fit into ROWS_SHARE of the workspace; at least 1."""

    def fits(num_rows: int) -> bool:
        taken = decode_bytes(model, context_length, num_rows, num_sequences)
        return taken <= ROWS_SHARE * workspace

    return max(filter(fits, ROWS), default=1)


def decode_bytes(
    model: ModelFile, context_length: int, num_rows: int = 1, num_sequences: int = 1
) -> int:
    """Upper bound on the bytes of a decode step's buffers on a GPU (runtime.step.hybrid_device), of
    the block table of several sequences, and of the ids shared by layers whose neurons are all
    hot."""
    spec = model.spec
    values = spec.hidden_size * (8 + _MOST_PARTS) + spec.most_qkv_size + spec.most_query_size
    values += spec.most_rank + spec.vocab_size + 3 * spec.most_neurons
    values += max(
        attend_scratch(context_length, layer.attention.num_heads, layer.attention.head_dim)
        for layer in spec.layers
    )
    table = num_sequences * -(-context_length // BLOCK_LENGTH)
    return FLOAT_BYTES * (num_rows * (values + 5) + table) + 256 * _DECODE_TENSORS
