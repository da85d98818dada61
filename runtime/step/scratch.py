"""Bytes that each kind of operation takes while torch runs it over several tokens, on the CPU or on
a GPU: its result and its temporaries at their peak, without what it reads. Where they depend on
values, all neurons are named and fire. On a GPU, each tensor is counted by itself, in the pool that
torch takes it from; the bounds hold for fewer tokens and earlier positions, too."""

from collections.abc import Callable
from functools import reduce
from operator import add, or_

import torch

from hotsplit.costs import part_bytes, pass_parts
from hotsplit.costs.cache_layout import cache_layout
from hotsplit.costs.part_bytes import FLOAT_BYTES
from hotsplit.model.neurons import SMOOTH
from hotsplit.model.position_wise import TOKEN, PositionWise
from hotsplit.model.spec import Attention, DeltaNet, Neurons
from hotsplit.runtime.device.pools import PoolBytes
from hotsplit.runtime.kernels.gpu.expert_pairs import SMALL_TILE
from hotsplit.runtime.kernels.stored import FLOATS
from hotsplit.runtime.ops.attention.attend import MOST_SCORES, stores_scores
from hotsplit.runtime.ops.structs import MAX_ROWS
from hotsplit.runtime.step.hollow import chosen_bytes, neurons_bytes
from hotsplit.runtime.step.passes import Pass
from hotsplit.runtime.step.program import Kind, Op, name_of
from hotsplit.runtime.weights.store import num_appended


def written(p: Pass, index: int, op: Op, held: PoolBytes) -> dict[str, PoolBytes]:
    """The values that exist, or have another size, after an operation of a layer whose first operand
    has `held`, nothing if the caller holds it. On a GPU, a sum is two values until a norm reads it."""
    read, name = name_of(op.reads[0]), name_of(op.writes[0])
    width = p.floats(p.spec.hidden_size)
    if op.kind == "predict":  # a byte for each
        return {name: p.tensor(p.num_tokens * p.spec.layers[index].neurons.number)}
    if (block := _own_block(p, index, op)) is not None:
        sizes = block.values(p.spec.hidden_size).items()
        return {name: p.floats(size) for name, size in sizes}
    if not p.is_on_gpu:
        return {name: width}
    if op.kind == "norm":
        summed = {read: width} if read == "x" and held.total else {}
        return {**summed, name: _norm(p, index)}
    return {name: width * 2 if op.kind == "add" and held.total else width}


def taken(p: Pass, index: int, op: Op) -> PoolBytes:
    """What an operation of a layer takes while it runs."""
    block = _own_block(p, index, op)
    return SCRATCH[op.kind](p, index) if block is None else own(p, block, index)


def _own_block(p: Pass, index: int, op: Op) -> PositionWise | None:
    """The block of a position-wise operation; None for others."""
    return next((b for b in p.spec.layers[index].position_wise if b.kind == op.kind), None)


def _norm(p: Pass, index: int) -> PoolBytes:
    """A norm's result on a GPU, where it is made in the types that read it: here is only the one for
    f32; the products count the others."""
    layer, predictor = p.spec.layers[index], f"blk.{index}.ffn_pred"
    kinds = {p.kind(f"blk.{index}.{each}") for each in layer.mixer.projections}
    kinds |= {p.kind(f"blk.{index}.{layer.neurons.gate_name}")}
    if layer.predict:
        kinds |= {p.kind(f"{predictor}_{'down' if layer.predict.rank else 'up'}")}
    is_in_f32 = "f32" in kinds or layer.route is not None  # routers read f32
    return p.floats(p.spec.hidden_size) if is_in_f32 else PoolBytes()


def kept_norm(p: Pass, index: int) -> PoolBytes:
    """What a GPU keeps of the input of a layer's neurons for the next layer's predictor, beside one
    f32 tensor: the hidden state, and the rounded input."""
    if not p.is_on_gpu:
        return PoolBytes()
    width, gate_name = p.spec.hidden_size, p.spec.layers[index].neurons.gate_name
    return p.floats(width) + p.rounded(p.kind(f"blk.{index}.{gate_name}"), width)


def attention(p: Pass, index: int) -> PoolBytes:
    """Projections, then norms and rotation of the heads (on a GPU in one kernel), the heads, and the
    output's projection."""
    a, width = _attention_of(p, index), p.spec.hidden_size
    qkv, query, key = p.floats(a.qkv_size), p.floats(a.query_size), p.floats(a.key_size)
    heads = _heads(p, a)
    gates = p.floats(a.qkv_size + 2 * a.gate_size) + p.floats(a.gate_size) * 3
    if p.is_on_gpu or not a.is_gated:  # else also apart, and with the heads
        gates, qkv = PoolBytes(), p.floats(a.qkv_size + a.gate_size)
    after = qkv + heads + p.floats(width) * (1 + ("attn_output" in a.biases))
    if p.is_on_gpu:
        kinds = [p.kind(f"blk.{index}.{each}") for each in a.projections]
        rounded = reduce(or_, [p.rounded(kind, width) for kind in kinds])
        after += p.product(p.kind(f"blk.{index}.attn_output"), a.query_size, width)
        return _projected(p, index) | qkv + rounded + _attend(p, a) | after + rounded
    own = {name: p.floats(size) for name, size in a.normed_sizes.items()}
    values = own.pop("values", PoolBytes())
    normed = sum(own.values(), PoolBytes())
    turned = qkv + normed + values + (query * 2 | query + key * 2 | p.floats(a.head_dim) * 4)
    kept = values + (query + key if a.rotary else normed)
    return gates + (_projected(p, index) | turned | qkv + kept + _attend(p, a) | after)


def _attention_of(p: Pass, index: int) -> Attention:
    attention = p.spec.layers[index].attention
    assert attention is not None
    return attention


def _projected(p: Pass, index: int) -> PoolBytes:
    """The input projections of attention or of a delta net, from one product or from several that are
    joined."""
    mixer, width = p.spec.layers[index].mixer, p.spec.hidden_size
    kinds = {p.kind(f"blk.{index}.{each}") for each in mixer.projections}
    is_joined = isinstance(mixer, Attention) and not (mixer.biases or mixer.is_gated)
    is_joined &= len(kinds if p.is_on_gpu else mixer.projections) == 1
    size = sum(mixer.projections.values())
    joined = p.floats(size) if is_joined else p.floats(size) * 2
    for kind in kinds if p.is_on_gpu else ():
        joined |= p.floats(size) + p.product(kind, width, size)
    return joined


def _heads(p: Pass, a: Attention) -> PoolBytes:
    """The heads' output: on a GPU in the type of the cache."""
    is_half = p.is_on_gpu and p.model.kv_kind != "f32"
    return p.floats(a.query_size / (2 if is_half else 1))


def _attend(p: Pass, a: Attention) -> PoolBytes:
    """On a GPU, queries in the type of the cache, and the heads' output. Else keys and values
    appended, gathered from blocks if there are several sequences, and unpacked; then the output."""
    if p.is_on_gpu:
        return _heads(p, a) * 2
    tokens, context, is_f32 = p.num_tokens, p.context_length, p.model.kv_kind == "f32"
    seen = context if a.window is None else min(context, tokens + a.window - 1)
    appended = PoolBytes() if is_f32 else p.floats(a.key_size / 2) * 2
    layout = cache_layout(context, p.num_sequences, a.window)
    kept = context if layout.window is None else min(context, seen + layout.block_length)
    positions = -(-kept // layout.block_length) * layout.block_length
    gathered = p.tensor(
        (layout.num_blocks > 1) * positions * a.key_size * (FLOAT_BYTES if is_f32 else 2)
    )
    unpacked = p.tensor(0 if is_f32 else 8 * seen * a.key_size)
    out = p.floats(a.query_size) + p.floats(a.num_heads)
    if tokens == 1:
        out += p.tensor(2 * FLOAT_BYTES * a.num_heads * seen)
    elif stores_scores(a):  # scores as they are made, as shares, with sinks
        scores = a.num_heads * min(tokens * seen, max(seen, MOST_SCORES // a.num_heads))
        out += p.tensor(2 * tokens * seen + 3 * FLOAT_BYTES * scores) + p.floats(a.query_size)
    else:  # torch's flash attention: a mask as bool and as f32, and some scores in each thread
        mask = tokens * seen if seen > tokens or a.window is not None else 0
        rows = min(tokens, 256 if tokens >= 768 else 64 if tokens >= 192 else 32)
        scores = torch.get_num_threads() * rows * (min(seen, 512) + 2 + a.head_dim)
        out += p.tensor(5 * mask + FLOAT_BYTES * scores)
    used = unpacked if unpacked.total else gathered * 2
    return appended + gathered * 3 | gathered * 2 + unpacked | used + out


def delta(p: Pass, index: int) -> PoolBytes:
    """Projections; inputs of the convolution, its sums and activations, queries and keys of each value
    head, their norms, values, outputs; some states; the gated output and its projection."""
    d, width = p.spec.layers[index].delta, p.spec.hidden_size
    assert d is not None
    if p.is_on_gpu:
        return _delta_on_gpu(p, index, d)
    projected = p.floats(sum(d.projections.values()))
    repeated = p.floats(d.num_value_heads * d.key_head_dim)
    states = p.tensor(FLOAT_BYTES * (4 * d.value_size * d.key_head_dim + d.num_state_values))
    convolved = p.floats(d.num_channels) * 4 + repeated * 4 + p.floats(d.key_size) * 4
    return projected + convolved + states + p.floats(d.value_size) * 5 + p.floats(width)


def _delta_on_gpu(p: Pass, index: int, d: DeltaNet) -> PoolBytes:
    """Projections; inputs of the recurrence, its outputs and slots; the outputs' projection."""
    width, projected = p.spec.hidden_size, p.floats(sum(d.projections.values()))
    rounded = [p.rounded(p.kind(f"blk.{index}.{each}"), width) for each in d.projections]
    kept = projected + reduce(or_, rounded) + p.floats(d.value_size)
    out = p.floats(width) + p.product(p.kind(f"blk.{index}.ssm_out"), d.value_size, width)
    return _projected(p, index) | kept + p.floats(d.mixed_size) + p.floats(1) | kept + out


def predict(p: Pass, index: int) -> PoolBytes:
    """Scores, with a bias once more; then two masks."""
    layer, width, name = p.spec.layers[index], p.spec.hidden_size, f"blk.{index}.ffn_pred"
    predictor, number = layer.predict, layer.neurons.number
    assert predictor is not None
    is_again = f"{name}_up.bias" in p.model.tensors
    scores, masks = p.floats(number), p.tensor(p.num_tokens * number) * 2
    found = scores + (scores | masks if is_again else masks) + p.floats(predictor.rank) * 2
    if p.is_on_gpu:
        found += p.product(p.kind(f"{name}_up"), predictor.rank or width, number)
        if predictor.rank:
            found += p.product(p.kind(f"{name}_down"), width, predictor.rank)
    return found


def route(p: Pass, index: int) -> PoolBytes:
    """Logits, scores, choices, their order, and the masks of groups."""
    spec = p.spec.layers[index].route
    assert spec is not None
    if p.is_on_gpu:
        of_chosen = p.floats(2 * spec.num_used) * 6
        return p.floats(spec.num_experts) * 6 + p.floats(2 * spec.num_experts) * 2 + of_chosen
    return p.floats(8 * spec.num_experts + 8 * spec.num_used)


def experts(p: Pass, index: int) -> PoolBytes:
    """In one native call, its workspace and the output, twice. Else the outputs of all experts of each token,
    twice, and one expert's values if it has all tokens; if watched, gates and hidden values of the
    chosen ones."""
    spec, width = p.spec.layers[index], p.spec.hidden_size
    assert spec.route is not None
    if p.is_on_gpu:
        return _experts_on_gpu(p, index)
    used, own = spec.route.num_used, spec.neurons.of_expert
    if p.way == "unwatched":
        rows = min(p.num_tokens, MAX_ROWS)
        return p.floats(2 * width + 4 * used) + p.tensor(chosen_bytes(p.hollow, index, rows))
    seen = 2 * used * own + 5 * own if p.way == "watched" else 0
    outputs = p.floats(2 * used * width + 4 * width + seen)
    tile = FLOAT_BYTES * width * part_bytes.tile_rows(min(width, own))
    one = _on_cpu(p, index, own, is_divided=False)
    return outputs + (p.tensor(tile) | one)


def _experts_on_gpu(p: Pass, index: int) -> PoolBytes:
    """The outputs of all experts of each token; the pairs of tokens and experts; and the values of a part
    of them, or the outputs of an expert of the CPU. With tiles, all of one expert for all tokens."""
    spec, width = p.spec.layers[index], p.spec.hidden_size
    assert spec.route is not None
    used, own = spec.route.num_used, spec.neurons
    if p.way == "gpu":
        number = p.num_tokens * used
        pairs = p.tensor(12 * (number + number // SMALL_TILE + 1 + spec.route.num_experts))
        part = min(number, pass_parts.expert_part_pairs(p.num_tokens, own.of_expert))
        hidden = values = p.tensor(FLOAT_BYTES * part * own.of_expert)
        if part_bytes.down_kind(p.model, index) != "f32":
            hidden = p.tensor(2 * part * own.of_expert) + p.tensor(FLOAT_BYTES * part)
        kinds = {p.kind(f"blk.{index}.{name}") for name in own.matrices}
        rounded = sum((p.rounded(kind, width) for kind in kinds), PoolBytes())
        found = p.floats(used * width) + p.floats(width) * 2 + p.floats(used) + pairs + rounded
        return found + (values * (1 + own.is_gated) + hidden | p.floats(width) + p.floats(2))
    chosen = p.tensor(p.num_tokens * used) * 2 + p.floats(2 * used) * 3 + p.floats(2) * 2
    outputs = p.floats(used * width) * 2 + p.floats(width) * 4
    return outputs + chosen + _by_output(p, index, own, own.of_expert)


def _by_output(p: Pass, index: int, own: Neurons, number: int) -> PoolBytes:
    """Some copies of hidden values on a GPU, and the products with the matrices."""
    width, down = p.spec.hidden_size, own.down_name
    down += "" if f"blk.{index}.{down}.weight" in p.model.tensors else "_t"
    gate = p.product(p.kind(f"blk.{index}.{own.gate_name}"), width, number)
    kind = p.kind(f"blk.{index}.{down}")
    downs = p.product(kind, number, width) | p.product(kind, width, number)
    return p.floats(number) * 6 + (gate | downs)


def shared(p: Pass, index: int) -> PoolBytes:
    """Gates, what they are multiplied by, and the output, twice."""
    spec, width = p.spec.layers[index].shared, p.spec.hidden_size
    assert spec is not None
    if p.is_on_gpu:
        return _by_output(p, index, spec, spec.number) + p.floats(width) * 3 + p.floats(1) * 2
    tile = FLOAT_BYTES * width * min(part_bytes.tile_rows(width), spec.number)
    return p.floats(5 * spec.number + 3 * width) + p.tensor(tile)


def own(p: Pass, block: PositionWise, index: int) -> PoolBytes:
    """An operation of a layer: its outputs, as they are made of the values that they replace; products of its
    matrices, as they are activated and multiplied; and what a GPU needs beside."""
    width, sizes = p.spec.hidden_size, block.values(p.spec.hidden_size).values()
    found = p.floats(block.scratch(width)) + sum((p.floats(x) * 3 for x in sizes), PoolBytes())
    for name, shape in block.shapes(width).items():
        if len(shape) == 1:
            continue
        rows, columns = shape
        found += p.floats(rows) * (0 if rows == width else 6)
        if p.is_on_gpu:
            kind = p.model.tensors[f"blk.{index}.{name}"].kind
            found += p.product(kind, columns, rows)
    return found


def outside(p: Pass) -> PoolBytes:
    """Operations before the layers or after them, one after the other, and what they leave to layers; on the
    CPU. What one reads and writes is there twice, in parts and whole, beside a product with a matrix as it is
    scaled, normed and added."""
    width, most = p.spec.hidden_size, PoolBytes()
    for blocks in (p.spec.first, p.spec.last):
        kept = p.floats(width)
        for block in blocks:
            read = (p.spec.value_sizes.get(x, width) for x in block.inputs if x != TOKEN)
            made, shapes = block.values(width), block.shapes(width)
            products = (
                shapes[n][0] for n in shapes if len(shapes[n]) > 1 and n not in block.tables
            )
            values = 2 * (sum(made.values()) + sum(read)) + 3 * max(products, default=0)
            most |= kept + p.floats(values)
            kept += p.floats(sum(size for name, size in made.items() if name != "x"))
    return most


def neurons(p: Pass, index: int) -> PoolBytes:
    """The blocks' outputs and, if watched, gates and hidden values of both, and then of all."""
    if p.spec.layers[index].route is not None:
        return experts(p, index)
    width, number = p.floats(p.spec.hidden_size), p.spec.layers[index].neurons.number
    hot = 0 if p.num_hot is None else p.num_hot[index]
    blocks = (hot,) if hot == number else (hot, number - hot)
    shown, of_block = 2 if p.way == "watched" else 0, _on_gpu if p.is_on_gpu else _on_cpu
    gate = p.kind(f"blk.{index}.{p.spec.layers[index].neurons.gate_name}")
    most = named = PoolBytes()
    waiting = p.rounded(gate, p.spec.hidden_size) if p.is_on_gpu else PoolBytes()
    more = [_appended(p, index, size) for size in blocks]
    if p.num_hot is None:  # blocks of any number, each with as many more as it may have
        waiting += p.floats(shown * 2 * max(_appended(p, index, size) for size in range(1, 65)))
    for size in map(add, blocks, more):
        named = p.floats(size / 4) if p.spec.layers[index].predict else PoolBytes()
        most |= waiting + named + of_block(p, index, size, is_divided=len(blocks) > 1)
        waiting += width + p.floats(shown * size)
    joined = p.floats(shown * number) | width * 2 if len(blocks) > 1 else width
    return most | waiting + named + joined


def _appended(p: Pass, index: int, number: int) -> int:
    """Neurons by which a part of a layer on the CPU is completed to whole tiles."""
    layer = p.spec.layers[index]
    own, adds_all = layer.neurons, p.spec.computes_all(index, p.mode)
    if p.is_on_gpu or layer.predict or number in (0, own.number):
        return 0
    kinds = [p.kind(f"blk.{index}.{name}") for name in own.matrices][: None if adds_all else 1]
    down = part_bytes.down_kind(p.model, index)
    return num_appended(kinds, down, number, own.number, adds_all=adds_all)


def _on_cpu(p: Pass, index: int, number: int, *, is_divided: bool) -> PoolBytes:
    """A block: in the C++ kernels; else gates, what they are multiplied by and masks, then the tile to
    which rows of down are unpacked. (If weights stay in the mapped file, blocks share its matrices,
    and selected rows take one more copy.)"""
    own, is_named = p.spec.layers[index].neurons, p.spec.layers[index].predict is not None
    width, is_drelu = p.spec.hidden_size, own.activation == "drelu"
    is_all = p.spec.computes_all(index, p.mode)
    if p.way == "unwatched" and (p.num_tokens > 1 or is_all):
        rows = min(p.num_tokens, MAX_ROWS)
        packed = 17 * rows * -(-number // 32) * 32 * is_named
        own_bytes = packed + neurons_bytes(p.hollow, index, number, rows)
        return p.floats(2 * width) + p.tensor(own_bytes)
    is_copied = is_drelu or (own.activation in SMOOTH and not own.is_gated and not is_all)
    values = 2.25 + 2 * own.is_gated + (2 if is_named else is_copied)
    if p.num_tokens == 1 and not is_all:  # with indices in int64
        return p.floats((10.25 + 5 * is_named) * number + width)
    rows = 0 if part_bytes.down_kind(p.model, index) == "f32" else part_bytes.tile_rows(width)
    tile = FLOAT_BYTES * width * min(rows, number)
    return p.floats(values * number) | p.floats((2 + own.is_gated) * number + width) + p.tensor(
        tile
    )


def _on_gpu(p: Pass, index: int, number: int, *, is_divided: bool) -> PoolBytes:
    """A part of a block at a time: gates and what they are multiplied by; their hidden values; and
    the sum of the rows of down, apart from that of earlier parts."""
    own, size = p.spec.layers[index].neurons, p.spec.hidden_size
    part, width = min(number, pass_parts.gpu_part_neurons(p.num_tokens)), p.floats(size)
    part = number if own.needs_all_gates else part
    has_biases = bool(own.biases & set(own.matrices))
    gate, down = p.kind(f"blk.{index}.{own.gate_name}"), part_bytes.down_kind(p.model, index)
    hidden = p.floats(part * (1 if down == "f32" else 0.5)) + p.floats(1)
    tile = p.tile(gate, size, part, is_copied=is_divided)
    gates = p.floats(part) * (1 + own.is_gated)
    gates += tile | p.floats(part) * has_biases | hidden
    sums = hidden + p.tile(down, size, part, is_copied=is_divided)
    if part == number and not is_divided:  # else earlier parts or pieces have begun the sum
        return gates | width + sums
    again = width * (part < number and (down in FLOATS or is_divided))
    return width + (gates | sums + again)


SCRATCH: dict[Kind, Callable[[Pass, int], PoolBytes]] = {
    "norm": lambda p, index: p.floats(p.spec.hidden_size) * 2 + p.floats(1),
    "add": lambda p, index: p.floats(p.spec.hidden_size),
    "attention": attention,
    "delta": delta,
    "predict": predict,
    "neurons": neurons,
    "route": route,
    "shared": shared,
}
