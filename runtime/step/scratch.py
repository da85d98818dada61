"""Bytes that each kind of operation takes while torch runs it over several tokens on a GPU: its result and
its temporaries at their peak, without what it reads. Each tensor is counted by itself, in the pool that
torch takes it from; the bounds hold for fewer tokens and earlier positions, too."""

from collections.abc import Callable
from functools import reduce
from operator import or_

from hotsplit.costs import part_bytes, pass_parts
from hotsplit.costs.part_bytes import FLOAT_BYTES
from hotsplit.model.position_wise import PositionWise
from hotsplit.model.spec import Attention, Neurons
from hotsplit.runtime.device.pools import PoolBytes
from hotsplit.runtime.kernels.gpu.expert_pairs import SMALL_TILE
from hotsplit.runtime.kernels.stored import FLOATS
from hotsplit.runtime.step.passes import Pass
from hotsplit.runtime.step.program import Kind, Op, name_of


def written(p: Pass, index: int, op: Op, held: PoolBytes) -> dict[str, PoolBytes]:
    """The values that exist, or have another size, after an operation of a layer whose first operand
    has `held`, nothing if the caller holds it. A sum is two values until a norm reads it."""
    read, name = name_of(op.reads[0]), name_of(op.writes[0])
    width = p.floats(p.spec.hidden_size)
    if op.kind == "predict":  # a byte for each
        return {name: p.tensor(p.num_tokens * p.spec.layers[index].neurons.number)}
    if (block := _own_block(p, index, op)) is not None:
        sizes = block.values(p.spec.hidden_size).items()
        return {name: p.floats(size) for name, size in sizes}
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
    """A norm's result is made in the types that read it: here is only the one for f32; the products count
    the others."""
    layer, predictor = p.spec.layers[index], f"blk.{index}.ffn_pred"
    kinds = {p.kind(f"blk.{index}.{each}") for each in layer.mixer.projections}
    kinds |= {p.kind(f"blk.{index}.{layer.neurons.gate_name}")}
    if layer.predict:
        kinds |= {p.kind(f"{predictor}_{'down' if layer.predict.rank else 'up'}")}
    is_in_f32 = "f32" in kinds or layer.route is not None  # routers read f32
    return p.floats(p.spec.hidden_size) if is_in_f32 else PoolBytes()


def kept_norm(p: Pass, index: int) -> PoolBytes:
    """What is kept of the input of a layer's neurons for the next layer's predictor, beside one f32 tensor:
    the hidden state, and the rounded input."""
    width, gate_name = p.spec.hidden_size, p.spec.layers[index].neurons.gate_name
    return p.floats(width) + p.rounded(p.kind(f"blk.{index}.{gate_name}"), width)


def attention(p: Pass, index: int) -> PoolBytes:
    """Projections, then queries in the type of the cache and the heads' output, and its projection."""
    a, width = p.spec.layers[index].attention, p.spec.hidden_size
    assert a is not None
    is_half = p.model.kv_kind != "f32"
    heads = p.floats(a.query_size / (2 if is_half else 1))
    qkv = p.floats(a.qkv_size + a.gate_size)
    kinds = [p.kind(f"blk.{index}.{each}") for each in a.projections]
    rounded = reduce(or_, [p.rounded(kind, width) for kind in kinds])
    after = qkv + heads + p.floats(width) * (1 + ("attn_output" in a.biases))
    after += p.product(p.kind(f"blk.{index}.attn_output"), a.query_size, width)
    return _projected(p, index) | qkv + rounded + heads * 2 | after + rounded


def _projected(p: Pass, index: int) -> PoolBytes:
    """The input projections of attention or of a delta net, from one product or from several that are
    joined."""
    mixer, width = p.spec.layers[index].mixer, p.spec.hidden_size
    kinds = {p.kind(f"blk.{index}.{each}") for each in mixer.projections}
    is_joined = isinstance(mixer, Attention) and not (mixer.biases or mixer.is_gated)
    is_joined &= len(kinds) == 1
    size = sum(mixer.projections.values())
    joined = p.floats(size) if is_joined else p.floats(size) * 2
    for kind in kinds:
        joined |= p.floats(size) + p.product(kind, width, size)
    return joined


def delta(p: Pass, index: int) -> PoolBytes:
    """Projections; inputs of the recurrence, its outputs and slots; the outputs' projection."""
    d, width = p.spec.layers[index].delta, p.spec.hidden_size
    assert d is not None
    projected = p.floats(sum(d.projections.values()))
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
    found += p.product(p.kind(f"{name}_up"), predictor.rank or width, number)
    if predictor.rank:
        found += p.product(p.kind(f"{name}_down"), width, predictor.rank)
    return found


def route(p: Pass, index: int) -> PoolBytes:
    """Logits, scores, choices, their order, and the masks of groups."""
    spec = p.spec.layers[index].route
    assert spec is not None
    of_chosen = p.floats(2 * spec.num_used) * 6
    return p.floats(spec.num_experts) * 6 + p.floats(2 * spec.num_experts) * 2 + of_chosen


def experts(p: Pass, index: int) -> PoolBytes:
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
    """Some copies of hidden values, and the products with the matrices."""
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
    return _by_output(p, index, spec, spec.number) + p.floats(width) * 3 + p.floats(1) * 2


def own(p: Pass, block: PositionWise, index: int) -> PoolBytes:
    """An operation of a layer: its outputs, as they are made of the values that they replace; products of its
    matrices, as they are activated and multiplied."""
    width, sizes = p.spec.hidden_size, block.values(p.spec.hidden_size).values()
    found = p.floats(block.scratch(width)) + sum((p.floats(x) * 3 for x in sizes), PoolBytes())
    for name, shape in block.shapes(width).items():
        if len(shape) == 1:
            continue
        rows, columns = shape
        found += p.floats(rows) * (0 if rows == width else 6)
        found += p.product(p.model.tensors[f"blk.{index}.{name}"].kind, columns, rows)
    return found


def neurons(p: Pass, index: int) -> PoolBytes:
    """The blocks' outputs."""
    if p.spec.layers[index].route is not None:
        return experts(p, index)
    width, number = p.floats(p.spec.hidden_size), p.spec.layers[index].neurons.number
    hot = 0 if p.num_hot is None else p.num_hot[index]
    blocks = (hot,) if hot == number else (hot, number - hot)
    gate = p.kind(f"blk.{index}.{p.spec.layers[index].neurons.gate_name}")
    most = named = PoolBytes()
    waiting = p.rounded(gate, p.spec.hidden_size)
    for size in blocks:
        named = p.floats(size / 4) if p.spec.layers[index].predict else PoolBytes()
        most |= waiting + named + _block(p, index, size, is_divided=len(blocks) > 1)
        waiting += width
    return most | waiting + named + (width * 2 if len(blocks) > 1 else width)


def _block(p: Pass, index: int, number: int, *, is_divided: bool) -> PoolBytes:
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
