"""Bytes that each kind of operation takes while torch runs it over several tokens, on the CPU or on
a GPU: its result and its temporaries at their peak, without what it reads. Where they depend on
values, all neurons are named and fire."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import add
from typing import Literal

import torch

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.costs import part_bytes
from hotsplit.costs.part_bytes import FLOAT_BYTES
from hotsplit.costs.pass_length import LOGITS_CHUNK
from hotsplit.model.modes import Mode, computes_all
from hotsplit.model.spec import SMOOTH, Attention, ModelSpec
from hotsplit.runtime.kernels.cpu import library
from hotsplit.runtime.kernels.stored import FLOATS
from hotsplit.runtime.model.loader import Builder
from hotsplit.runtime.ops.attention.attend import SCORE_BYTES, has_flash, takes_flash
from hotsplit.runtime.ops.structs import MAX_ROWS
from hotsplit.runtime.step.hollow import hollow_builder, neurons_bytes
from hotsplit.runtime.step.program import Kind, Op, name_of
from hotsplit.runtime.weights import gpu_products
from hotsplit.runtime.weights.store import num_appended


def way_on(device: torch.device) -> Literal["gpu", "flash"]:
    """The way of passes on a GPU."""
    is_fast = has_flash(device) and gpu_products.multiplies_blocks(device)
    return "flash" if is_fast else "gpu"


@dataclass(frozen=True, kw_only=True)
class Pass:
    """A pass over T tokens at the end of a context. `way`: "watched" by observers, who see all
    values; "flash" on a GPU with flash attention and products of matrices in blocks. `num_hot`: of each layer; None: any number."""

    model: ModelFile
    mode: Mode
    num_tokens: int
    context_length: int
    way: Literal["watched", "unwatched", "gpu", "flash"]
    num_hot: Sequence[int] | None = None
    num_sequences: int = 1

    @property
    def is_on_gpu(self) -> bool:
        return self.way in ("gpu", "flash")

    @cached_property
    def hollow(self) -> Builder:
        is_whole = self.model.spec.has_experts and self.model.layout == "stock"
        return hollow_builder(self.model, "dense" if is_whole else "exact", is_divided=False)

    @cached_property
    def spec(self) -> ModelSpec:
        return self.model.spec.in_mode(self.mode)

    def floats(self, values: float) -> int:
        """Bytes of f32 values, given for one token."""
        return int(FLOAT_BYTES * self.num_tokens * values)

    def kind(self, name: str) -> str:
        return self.model.tensors[f"{name}.weight"].kind

    def rounded(self, kind: str, width: int) -> int:
        """Bytes of the input of a product on a GPU, rounded for a matrix of this kind."""
        return 0 if kind == "f32" else self.floats(width / 2 + 2)

    def tile(self, kind: str, width: int, num_rows: int, *, is_copied: bool = False) -> int:
        """Bytes of a product on a GPU beside its input and its result: unless the matrix is read as
        stored, a tile of rows and, if there are several, a tile's product."""
        dtype = gpu_products.tile_dtype(kind)
        is_as_stored = FLOATS.get(kind) == dtype or (kind not in FLOATS and self.way == "flash")
        if is_as_stored and not is_copied:
            return 0
        rows = min(gpu_products.tile_rows(width), num_rows)
        return dtype.itemsize * rows * width + self.floats(rows * (rows < num_rows))

    def product(self, kind: str, width: int, num_rows: int) -> int:
        """Bytes of a product on a GPU beside its result."""
        return self.rounded(kind, width) + self.tile(kind, width, num_rows)


def written_bytes(p: Pass, index: int, op: Op, held: int) -> dict[str, int]:
    """Bytes of the values that exist, or have another size, after an operation of a layer whose first
    operand has `held`, 0 if the caller holds it. On a GPU, a sum is two values until a norm reads
    it."""
    read, written = name_of(op.reads[0]), name_of(op.writes[0])
    width = p.floats(p.spec.hidden_size)
    if op.kind == "predict":
        return {written: p.num_tokens * p.spec.layers[index].neurons.number}  # a byte for each
    if op.kind == "norm" and p.is_on_gpu:
        summed = {read: width} if read == "x" and held else {}
        return {**summed, written: _norm_bytes(p, index)}
    return {written: 2 * width if op.kind == "add" and p.is_on_gpu and held else width}


def _norm_bytes(p: Pass, index: int) -> int:
    """Bytes of a norm's result on a GPU, where it is made in the types that read it: here is only
    the one for f32; the products count the others."""
    layer, predictor = p.spec.layers[index], f"blk.{index}.ffn_pred"
    kinds = {p.kind(f"blk.{index}.{each}") for each in layer.attention.projections}
    kinds |= {p.kind(f"blk.{index}.{layer.neurons.gate_name}")}
    if layer.predict:
        kinds |= {p.kind(f"{predictor}_{'down' if layer.predict.rank else 'up'}")}
    return p.floats(p.spec.hidden_size) * ("f32" in kinds)


def kept_norm(p: Pass, index: int) -> int:
    """What a GPU keeps of the input of a layer's neurons for the next layer's predictor, beside one
    f32 tensor: the hidden state, and the rounded input."""
    kind = p.kind(f"blk.{index}.{p.spec.layers[index].neurons.gate_name}")
    width = p.spec.hidden_size
    return p.floats(width) + p.rounded(kind, width) if p.is_on_gpu else 0


def attention(p: Pass, index: int) -> int:
    """Projections, then norms and rotation of the heads (on a GPU in one kernel), the heads, and the
    output's projection."""
    a, width, name = p.spec.layers[index].attention, p.spec.hidden_size, f"blk.{index}"
    qkv, query, key = a.qkv_size, a.query_size, a.key_size
    normed = query + key if a.head_norm and not p.is_on_gpu else 0
    turning = 0 if p.is_on_gpu else max(2 * query, query + 2 * key, 4 * a.head_dim)
    kinds = {p.kind(f"{name}.{each}") for each in a.projections}
    is_joined = len(kinds if p.is_on_gpu else a.projections) == 1 and not a.biases
    joined = qkv if is_joined else 2 * qkv
    before = p.floats(max(joined, qkv + normed + turning))
    kept = normed if p.is_on_gpu or not a.rotary else query + key
    rounded = max(p.rounded(kind, width) for kind in kinds) if p.is_on_gpu else 0
    heads = query / 2 if _is_flash(p, a) else query
    after = p.floats(qkv + heads + width * (1 + ("attn_output" in a.biases)))
    if p.is_on_gpu:
        before = max(before, p.floats(qkv) + max(p.product(k, width, qkv) for k in kinds))
        after += p.product(p.kind(f"{name}.attn_output"), query, width)
    return max(before, p.floats(qkv + kept) + rounded + _attend(p, a), after + rounded)


def _is_flash(p: Pass, a: Attention) -> bool:
    is_whole = a.window is None or a.window >= p.context_length
    is_f16 = part_bytes.kv_kind(p.model) != "f32"
    return p.way == "flash" and is_f16 and takes_flash(a.head_dim) and is_whole


def _attend(p: Pass, a: Attention) -> int:
    """Keys and values appended, gathered from blocks if there are several sequences, and unpacked;
    then the heads' output."""
    tokens, context, is_f32 = p.num_tokens, p.context_length, part_bytes.kv_kind(p.model) == "f32"
    seen = context if a.window is None else min(context, tokens + a.window - 1)
    appended, head = (0, 0) if is_f32 else (p.floats(a.key_size), 8 * seen * a.head_dim)
    appended = 0 if p.is_on_gpu else appended
    positions = 0 if p.num_sequences == 1 else part_bytes.kv_positions(context, 2) // 2
    gathered = positions * a.key_size * (FLOAT_BYTES if is_f32 else 2)
    unpacked, out = 0, p.floats(a.query_size + a.num_heads)
    if _is_flash(p, a):  # queries and heads in f16
        out = p.floats(a.query_size + a.num_heads)
        appended = p.floats(a.query_size / 2)
    elif p.is_on_gpu:  # one key head, and some tokens, at a time; masks, and scores twice
        group = a.num_heads // a.num_kv_heads
        rows = min(tokens, max(1, SCORE_BYTES // (FLOAT_BYTES * group * seen)))
        out += head + 8 * seen + rows * seen * (1 if a.window is None else 2)
        out += 2 * FLOAT_BYTES * rows * group * (seen + a.head_dim)
    elif tokens == 1:
        unpacked, out = head * a.num_kv_heads, out + 2 * FLOAT_BYTES * a.num_heads * seen
    else:  # torch's flash attention: a mask as bool and as f32, and some scores in each thread
        mask = tokens * seen if seen > tokens or a.window is not None else 0
        rows = min(tokens, 256 if tokens >= 768 else 64 if tokens >= 192 else 32)
        scores = torch.get_num_threads() * rows * (min(seen, 512) + 2 + a.head_dim)
        unpacked, out = head * a.num_kv_heads, out + 5 * mask + FLOAT_BYTES * scores
    return max(appended + 3 * gathered, 2 * gathered + unpacked, (unpacked or 2 * gathered) + out)


def predict(p: Pass, index: int) -> int:
    """Scores, with a bias or an activation once more; then two masks."""
    layer, width, name = p.spec.layers[index], p.spec.hidden_size, f"blk.{index}.ffn_pred"
    predictor, number = layer.predict, layer.neurons.number
    assert predictor is not None
    is_again = predictor.kind == "gate" or f"{name}_up.bias" in p.model.tensors
    found = p.floats(number * (2 if is_again else 1.5) + 2 * predictor.rank)
    if p.is_on_gpu:
        found += p.product(p.kind(f"{name}_up"), predictor.rank or width, number)
        found += p.product(p.kind(f"{name}_down"), width, predictor.rank) if predictor.rank else 0
    return found


def route(p: Pass, index: int) -> int:
    """Logits, scores, choices, their order, and the masks of groups."""
    spec = p.spec.layers[index].route
    assert spec is not None
    return p.floats(8 * spec.num_experts + 8 * spec.num_used)


def experts(p: Pass, index: int) -> int:
    """The outputs of all experts of each token, twice, and one expert's values if it has all tokens; if
    watched, gates and hidden values of all."""
    spec, width = p.spec.layers[index], p.spec.hidden_size
    assert spec.route is not None
    seen = 2 * spec.neurons.number + 5 * spec.neurons.of_expert if p.way == "watched" else 0
    outputs = p.floats(2 * spec.route.num_used * width + 4 * width + seen)
    tile = FLOAT_BYTES * width * part_bytes.tile_rows(min(width, spec.neurons.of_expert))
    return outputs + max(tile, _on_cpu(p, index, spec.neurons.of_expert, is_divided=False))


def shared(p: Pass, index: int) -> int:
    """Gates, what they are multiplied by, and the output, twice."""
    spec, width = p.spec.layers[index].shared, p.spec.hidden_size
    assert spec is not None
    tile = FLOAT_BYTES * width * min(part_bytes.tile_rows(width), spec.number)
    return p.floats(5 * spec.number + 3 * width) + tile


def neurons(p: Pass, index: int) -> int:
    """The blocks' outputs and, if watched, gates and hidden values of both, and then of all."""
    if p.spec.layers[index].route is not None:
        return experts(p, index)
    width, number = p.spec.hidden_size, p.spec.layers[index].neurons.number
    hot = 0 if p.num_hot is None else p.num_hot[index]
    blocks = (hot,) if hot == number else (hot, number - hot)
    shown, of_block = 2 if p.way == "watched" else 0, _on_gpu if p.is_on_gpu else _on_cpu
    gate = p.kind(f"blk.{index}.{p.spec.layers[index].neurons.gate_name}")
    most, waiting, named = 0, p.rounded(gate, width) if p.is_on_gpu else 0, 0
    more = [_appended(p, index, size) for size in blocks]
    if p.num_hot is None:  # blocks of any number, each with as many more as it may have
        waiting += p.floats(shown * 2 * max(_appended(p, index, size) for size in range(1, 65)))
    for size in map(add, blocks, more):
        named = p.floats(size / 4) if p.spec.layers[index].predict else 0
        most = max(most, waiting + named + of_block(p, index, size, is_divided=len(blocks) > 1))
        waiting += p.floats(width + shown * size)
    joined = max(shown * number, 2 * width) if len(blocks) > 1 else width
    return max(most, waiting + named + p.floats(joined))


def _appended(p: Pass, index: int, number: int) -> int:
    """Neurons by which a part of a layer on the CPU is completed to whole tiles."""
    layer = p.spec.layers[index]
    own, adds_all = layer.neurons, computes_all(p.mode)
    if p.is_on_gpu or layer.predict or number in (0, own.number) or not library.is_available():
        return 0
    kinds = [p.kind(f"blk.{index}.{name}") for name in own.matrices][: None if adds_all else 1]
    down = part_bytes.down_kind(p.model, index)
    return num_appended(kinds, down, number, own.number, adds_all=adds_all)


def _on_cpu(p: Pass, index: int, number: int, *, is_divided: bool) -> int:
    """A block: in the C++ kernels; else gates, what they are multiplied by and masks, then the tile to
    which rows of down are unpacked. (If weights stay in the mapped file, blocks share its matrices,
    and selected rows take one more copy.)"""
    own, is_named = p.spec.layers[index].neurons, p.spec.layers[index].predict is not None
    width, is_all, is_drelu = p.spec.hidden_size, computes_all(p.mode), own.activation == "drelu"
    if p.way == "unwatched" and library.is_available() and (p.num_tokens > 1 or is_all):
        rows = min(p.num_tokens, MAX_ROWS)
        packed = 17 * rows * -(-number // 32) * 32 * is_named
        return p.floats(2 * width) + packed + neurons_bytes(p.hollow, index, number, rows)
    is_copied = is_drelu or (own.activation in SMOOTH and not own.is_gated and not is_all)
    values = 2.25 + 2 * own.is_gated + (2 if is_named else is_copied)
    if p.num_tokens == 1 and not is_all:  # with indices in int64
        return p.floats((10.25 + 5 * is_named) * number + width)
    rows = 0 if part_bytes.down_kind(p.model, index) == "f32" else part_bytes.tile_rows(width)
    tile = FLOAT_BYTES * width * min(rows, number)
    return max(p.floats(values * number), p.floats((2 + own.is_gated) * number + width) + tile)


def _on_gpu(p: Pass, index: int, number: int, *, is_divided: bool) -> int:
    """A part of a block at a time: gates and what they are multiplied by; their hidden values; and
    the sum of the rows of down, apart from that of earlier parts."""
    own, width = p.spec.layers[index].neurons, p.spec.hidden_size
    part = min(number, part_bytes.gpu_part_neurons(p.num_tokens))
    values, has_biases = 1 + own.is_gated, bool(own.biases & set(own.matrices))
    gate, down = p.kind(f"blk.{index}.{own.gate_name}"), part_bytes.down_kind(p.model, index)
    hidden = p.floats(part * (1 if down == "f32" else 0.5) + 1)
    tile = p.tile(gate, width, part, is_copied=is_divided)
    gates = p.floats(values * part) + max(tile, p.floats(has_biases * part), hidden)
    sums = hidden + p.tile(down, width, part, is_copied=is_divided)
    again = p.floats(width) * (part < number and (down in FLOATS or is_divided))
    if part == number and not is_divided:  # else earlier parts or pieces have begun the sum
        return max(gates, p.floats(width) + sums)
    return p.floats(width) + max(gates, sums + again)


def head(p: Pass) -> int:
    """A norm, logits, and the logits once more while pieces are joined."""
    p = replace(p, num_tokens=min(p.num_tokens, LOGITS_CHUNK))
    width, vocab_size = p.spec.hidden_size, p.spec.vocab_size
    kind = p.model.tensors[p.model.head_name].kind
    product = p.product(kind, width, vocab_size) if p.is_on_gpu else 0
    return p.floats(width + vocab_size) + max(p.floats(max(width, vocab_size)), product)


SCRATCH: dict[Kind, Callable[[Pass, int], int]] = {
    "norm": lambda p, index: p.floats(2 * p.spec.hidden_size + 1),
    "add": lambda p, index: p.floats(p.spec.hidden_size),
    "attention": attention, "predict": predict, "neurons": neurons, "route": route,
    "shared": shared,
}  # fmt: skip
