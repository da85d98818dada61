"""Bytes of each part of a model: the one definition that both the solver and the runtime use.

Letters: L layers, D model width, F neurons, T tokens of a prefill chunk, C context length."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.costs.cache_layout import kv_positions
from hotsplit.costs.pass_length import MOST_WAITING, PAST_STATES, PREFILL_CHUNK
from hotsplit.costs.state_bytes import kept_bytes, slots_bytes, state_bytes
from hotsplit.files.gguf_file import TensorEntry
from hotsplit.files.gguf_types import block_sizes
from hotsplit.model.draft_block import OUTPUT_NORM
from hotsplit.model.operations import BlockOp
from hotsplit.model.spec import ModelSpec
from hotsplit.model.tensors import HEAD_BIAS
from hotsplit.model.weight_types import FLOAT_NAMES, INEXACT_ROWS
from hotsplit.options.cache_types import CacheTypes

if TYPE_CHECKING:
    from hotsplit.costs.cache_bytes import CacheSize

# The items of a plan's bytes.
ITEMS = (
    "attention",
    "predictor",
    "kv_cache",
    "head",
    "embedding",
    "neurons",
    "neuron_cache",
    "workspace",
)
BESIDE_WEIGHTS = ("kv_cache", "neuron_cache", "workspace")  # which no file has
Items = dict[str, int]

# Experts that are read from a drive come into slots beside those that stay in main memory: as many
# as a token chooses in so many layers, so that one layer's are read while another's are computed.
SLOT_LAYERS = 2
DEFAULT_CONTEXT = 4096  # tokens of KV cache by default; less if the model's own context is shorter
FLOAT_BYTES = 4
NUMBER_BYTES = 4
# A dense product unpacks its weights to f32 one tile of rows at a time. A tile has at most
# UNPACK_TILE_BYTES, but at least LEAST_TILE_ROWS rows, to amortise reading and writing its result.
UNPACK_TILE_BYTES = 2 << 20
LEAST_TILE_ROWS = 128


def tile_rows(width: int) -> int:
    """Rows of a matrix that are unpacked at a time."""
    return max(LEAST_TILE_ROWS, UNPACK_TILE_BYTES // (FLOAT_BYTES * width))


@dataclass(frozen=True, kw_only=True)
class LayerBytes:
    """Bytes of one layer: its dense block, the predictor, one neuron. `attention` is the dense
    block (see `is_dense`), with the router and shared experts of a mixture, and includes
    `head_norms`, the norms of queries and keys per head, which are stored on the device that holds
    the keys and values. `gate_row` decides whether the neuron fires: without gates (OPT, Falcon) it
    is the row of the up projection, and `up_row` is zero. A neuron's biases are counted with their
    rows."""

    attention: int
    predictor: int
    gate_row: int = 0
    up_row: int = 0
    down_row: int = 0
    head_norms: int = 0

    @property
    def neuron(self) -> int:
        return self.gate_row + self.up_row + self.down_row


_NEURONS = (
    "ffn_gate.",
    "ffn_up.",
    "ffn_down.weight",
    "ffn_down_t.",
    "ffn_pred_",
    "ffn_gate_exps.",
    "ffn_up_exps.",
    "ffn_down_exps.weight",
    "ffn_down_exps.bias",
    "ffn_down_exps_t.",
)


def is_dense(name: str) -> bool:
    """True if a layer's tensor is part of the dense block: attention, norms, the down bias, and all
    that every token reads of a mixture."""
    return not name.startswith(_NEURONS)


def is_expert(name: str) -> bool:
    """True if a layer's tensor has a part for each expert, which only tokens that chose it read."""
    return not is_dense(name) and "_exps" in name


def inexact_kinds(model: ModelFile) -> list[str]:
    """Types of dense matrices whose rows a GPU rounds differently when it computes several, so that
    its steps check no drafts; experts are computed row by row."""
    entries = model.tensors.items()
    dense = {
        entry.kind
        for name, entry in entries
        if not is_expert(name.split(".", 2)[-1]) and name != "token_embd.weight"
    }
    return sorted(dense.intersection(INEXACT_ROWS))


_HEAD_NORMS = ("attn_q_norm.", "attn_k_norm.")


def is_predictor(name: str) -> bool:
    return name.startswith("ffn_pred_")


def layer_bytes(model: ModelFile, layer: int) -> LayerBytes:
    """The exact bytes of a layer, from the tensor table of its model file."""
    entries, neurons = model.layer_tensors[layer], model.spec.layers[layer].neurons
    dense = LayerBytes(
        attention=sum(e.num_bytes for n, e in entries.items() if is_dense(n)),
        head_norms=sum(e.num_bytes for n, e in entries.items() if n.startswith(_HEAD_NORMS)),
        predictor=sum(e.num_bytes for n, e in entries.items() if is_predictor(n)),
    )
    if not neurons.number:
        return dense

    def row(name: str) -> int:
        bias = FLOAT_BYTES if f"{name}.bias" in entries else 0
        return entries[f"{name}.weight"].row_bytes + bias

    # A neuron's part of the down projection need not be whole blocks if the file runs as it is.
    block, size = block_sizes(down_kind(model, layer))
    return replace(
        dense,
        gate_row=row(neurons.gate_name),
        up_row=row(neurons.up_name) if neurons.is_gated else 0,
        down_row=-(-neurons.width(model.spec.hidden_size) * size // block),
    )


def all_neuron_bytes(model: ModelFile) -> int:
    """Bytes of the neurons of all layers."""
    placed = (placed_units(model, index) for index in range(model.spec.num_layers))
    return sum(number * size for number, size in placed)


def placed_units(model: ModelFile, layer: int) -> tuple[int, int]:
    """The number of a layer's experts and the bytes of one or, without experts, of its neurons."""
    neurons = model.spec.layers[layer].neurons
    if not neurons.are_experts:
        return neurons.number, layer_bytes(model, layer).neuron
    tensors = model.layer_tensors[layer]
    total = sum(entry.num_bytes for name, entry in tensors.items() if is_expert(name))
    return neurons.num_experts, total // neurons.num_experts


def layer_units(model: ModelFile, layer: int, number: int) -> dict[str, float]:
    """Bytes of an expert of a layer by type, or of one of `number` equal parts of neurons."""
    entries, neurons = model.layer_tensors[layer], model.spec.layers[layer].neurons
    found: dict[str, float] = {}
    if not neurons.number:
        return found
    if neurons.num_experts > 1:
        for name, entry in entries.items():
            if is_expert(name):
                size = entry.num_bytes / neurons.num_experts
                found[entry.kind] = found.get(entry.kind, 0) + size
        return found
    sizes, share = layer_bytes(model, layer), neurons.number / number
    rows = [
        (entries[f"{neurons.gate_name}.weight"].kind, sizes.gate_row),
        (entries[f"{neurons.up_name}.weight"].kind, sizes.up_row),
        (down_kind(model, layer), sizes.down_row),
    ]
    for kind, size in rows:
        found[kind] = found.get(kind, 0) + size * share
    return found


def expert_slots_bytes(model: ModelFile) -> int:
    """The least bytes of the slots for experts that are read from a drive."""
    layers = enumerate(model.spec.layers)
    return SLOT_LAYERS * max(
        layer.route.num_used * placed_units(model, number)[1]
        for number, layer in layers
        if layer.route is not None
    )


def read_share(model: ModelFile, layer: int, name: str) -> float:
    """The share of a layer's tensor that a token reads: its experts', of a mixture."""
    spec = model.spec.layers[layer]
    if spec.route is None or not is_expert(name):
        return 1.0
    return spec.route.num_used / spec.route.num_experts


def stored_neuron_bytes(model: ModelFile, layer: int) -> int:
    """Bytes of a layer's stored feed-forward matrices, and of biases of neurons and experts."""
    neurons = model.spec.layers[layer].neurons
    names = (*neurons.matrices, neurons.down_name, f"{neurons.down_name}_t")
    return sum(
        entry.num_bytes
        for name, entry in model.layer_tensors[layer].items()
        if name.split(".")[0] in names and not is_dense(name)
    )


def down_kind(model: ModelFile, layer: int) -> str:
    """The type of a layer's down projection as a matrix of neurons. That of a stock file is
    transposed at load, except where the CPU runs all of it in mode "dense"
    (`ModelFile.runs_as_it_is`). Float types are kept; block types become f16, because their blocks
    run along the other dimension."""
    entries, name = model.layer_tensors[layer], model.spec.layers[layer].neurons.down_name
    if f"{name}_t.weight" in entries:
        return entries[f"{name}_t.weight"].kind
    kind = entries[f"{name}.weight"].kind
    return kind if model.runs_as_it_is or kind in FLOAT_NAMES else "f16"


def packed_bytes(tensors: Mapping[str, TensorEntry]) -> int:
    """Bytes of those tensors that are packed in memory, and cannot stay in the mapped file."""
    return sum(entry.num_bytes for entry in tensors.values() if entry.packed_from)


def transposed_bytes(model: ModelFile) -> int:
    """Bytes of the down projections that are transposed at load, which cannot stay there either."""
    if model.layout == "sparse" or model.runs_as_it_is or model.spec.has_experts:
        return 0
    layers = enumerate(model.spec.layers)
    return sum(x.neurons.number * layer_bytes(model, index).down_row for index, x in layers)


def bytes_beside(items: Items) -> int:
    """Bytes of the items that are not weights."""
    return sum(items.get(item, 0) for item in BESIDE_WEIGHTS)


def kv_bytes(
    model: ModelFile, layer: int, num_positions: int, types: CacheTypes | None = None
) -> int:
    """Bytes of the keys and values of so many positions that a layer stores, and of the tables that
    select keys; by default in the type `kv_kind`."""
    types, attention = types or CacheTypes.of(model.kv_kind), model.spec.layers[layer].attention
    if attention is None or layer not in model.spec.storing:
        return 0
    return attention.num_kv_heads * types.head_bytes(
        num_positions, attention.head_dim, stores_values=attention.stores_values
    )


def kv_read(
    model: ModelFile, layer: int, context_length: int, types: CacheTypes | None = None
) -> float:
    """Bytes of a layer's keys, values and tables that a token reads when half of the context is
    filled; of a recurrent state, those that it reads and those that it writes."""
    types, attention = types or CacheTypes.of(model.kv_kind), model.spec.layers[layer].attention
    states = 2 * state_bytes(model, layer)
    if attention is None:
        return states
    positions = context_length / 2
    if attention.window is not None:
        positions = min(positions, attention.window)
    return states + attention.num_kv_heads * types.read_bytes(
        positions, attention.head_dim, stores_values=attention.stores_values
    )


def cache_bytes(
    model: ModelFile,
    layer: int,
    context_length: int,
    num_sequences: int,
    types: CacheTypes | None = None,
) -> int:
    """Bytes of a layer's keys and values of all texts: with a window, of a ring of blocks."""
    attention = model.spec.layers[layer].attention
    window = attention.window if attention else None
    return kv_bytes(model, layer, kv_positions(context_length, num_sequences, window), types)


def head_bytes(model: ModelFile) -> int:
    """Bytes of the output norm and of the output matrix (the embedding's if tied) and its bias."""
    small = ("output_norm.", HEAD_BIAS)
    found = sum(e.num_bytes for n, e in model.tensors.items() if n.startswith(small))
    return found + model.tensors[model.head_name].num_bytes


def embedding_bytes(model: ModelFile) -> int:
    """Bytes of learned positions, operations outside the layers, and an untied embedding."""
    positions = model.tensors.get("position_embd.weight")
    tokens = 0 if model.is_tied else model.tensors["token_embd.weight"].num_bytes
    outside = sum(
        entry.num_bytes for b in outside_of(model) for entry in entries_of(model, b).values()
    )
    return tokens + outside + (positions.num_bytes if positions else 0)


def outside_of(model: ModelFile) -> tuple[BlockOp, ...]:
    """The operations outside the layers, which the host runs."""
    return *model.spec.first, *model.spec.last


def entries_of(model: ModelFile, block: BlockOp) -> dict[str, TensorEntry]:
    """The tensors of such an operation, by name."""
    return {name: model.tensors[name] for name in block.shapes(model.spec.hidden_size)}


def block_read(model: ModelFile, block: BlockOp) -> int:
    """Bytes of such an operation's tensors that the host reads for a token: of a table, a row."""
    entries = entries_of(model, block).items()
    return sum(e.row_bytes if name in block.tables else e.num_bytes for name, e in entries)


def outside_read(model: ModelFile) -> int:
    """Bytes that the host reads for a token outside the layers, without embedding and head."""
    return sum(block_read(model, block) for block in outside_of(model))


def outside_kind(model: ModelFile) -> str:
    """The type of the host's first matrix outside the layers: all counts with its rate."""
    entries = (
        e for b in outside_of(model) for n, e in entries_of(model, b).items() if n not in b.tables
    )
    return next((entry.kind for entry in entries if len(entry.shape) > 1), "f32")


def draft_bytes(
    model: ModelFile,
    context_length: int,
    num_sequences: int = 1,
    types: CacheTypes | None = None,
    *,
    has_head: bool = True,
    is_on_gpu: bool = False,
) -> Items:
    """Itemised bytes of the draft block in main memory, without the embedding and the head that it
    shares, and as workspace the hidden states of tokens that wait for it; none without a block.
    `has_head`: the model's head is in main memory, too. `is_on_gpu`: the rest of it is on a GPU
    (`draft_gpu_bytes`)."""
    block = model.draft
    if block is None:
        return {}
    number, unit_bytes = placed_units(block, 0)
    outside = {n: e.num_bytes for n, e in block.tensors.items() if n.startswith("nextn.")}
    head, own = block.tensors[block.head_name], model.tensors[model.head_name]
    found = {
        "attention": layer_bytes(block, 0).attention + sum(outside.values()),
        "kv_cache": cache_bytes(block, 0, context_length, num_sequences, types),
        "head": 0 if head is own and (has_head or is_on_gpu) else head.num_bytes,
        "neurons": number * unit_bytes,
        "workspace": num_sequences
        * (MOST_WAITING + PREFILL_CHUNK + PAST_STATES)
        * FLOAT_BYTES
        * model.spec.hidden_size,
    }
    of_gpu = draft_gpu_bytes(model, context_length, num_sequences) if is_on_gpu else {}
    return {item: size - of_gpu.get(item, 0) for item, size in found.items()}


def draft_gpu_bytes(model: ModelFile, context_length: int, num_sequences: int = 1) -> Items:
    """Itemised bytes of a draft block that a plan has on a GPU: its dense block, output norm, keys
    and values. Its neurons or experts, and the matrix that joins its inputs, are in main memory,
    and so is a head of its own; none without a block."""
    block = model.draft
    if block is None:
        return {}
    norm = block.tensors[f"{OUTPUT_NORM}.weight"].num_bytes
    return {
        "attention": layer_bytes(block, 0).attention + norm,
        "kv_cache": cache_bytes(block, 0, context_length, num_sequences),
    }


def most_units(spec: ModelSpec) -> int:
    """The most experts of a layer of a mixture or, without experts, neurons of a layer."""
    if not spec.has_experts:
        return spec.most_neurons
    return max(layer.neurons.num_experts for layer in spec.layers)


def bytes_on_one_side(
    model: ModelFile, context_length: int, workspace: int, num_sequences: int = 1
) -> Items:
    """Itemised bytes of a whole model on one device."""
    none, context = [False] * model.spec.num_layers, context_length
    return plan_bytes(
        model,
        context_length=context,
        num_hot=none,
        dense_on_gpu=none,
        head_on_gpu=False,
        workspace=workspace,
        num_sequences=num_sequences,
    )[1]


def plan_bytes(
    model: ModelFile,
    *,
    context_length: int,
    num_hot: Sequence[int],
    dense_on_gpu: Sequence[bool],
    head_on_gpu: bool,
    workspace: int = 0,
    home: Sequence[int] = (),
    num_sequences: int = 1,
    cache_types: CacheTypes | None = None,
    neuron_cache: "CacheSize | None" = None,
    draft_on_gpu: bool = False,
    num_resident: Sequence[int | None] = (),
) -> tuple[list[Items], Items]:
    """Itemised bytes (per GPU, CPU). `num_hot`: neurons of each layer on a GPU, or experts of one
    that has them. `home` has the number of the GPU of each layer and of the head; () is a single
    GPU. `workspace` is counted for the CPU and for every GPU that holds anything. Of the embedding
    matrix only one row is read per token, so an untied one stays on the CPU. With key selection,
    all keys and values are on the CPU, and so are the norms of queries and keys per head.
    `draft_on_gpu`: a part of the draft block is where the last layer that attends is; its rest is
    not counted here (`draft_bytes`). `num_resident`: experts of each layer that main memory
    holds, None for all that are not on a GPU; the others are on the drive and have slots. () is
    None for all."""
    home = home or (0,) * (model.spec.num_layers + 1)
    gpus = [dict.fromkeys(ITEMS, 0) for _ in range(max(home) + 1)]
    cpu = dict.fromkeys(ITEMS, 0)
    for layer, (hot, is_on_gpu) in enumerate(zip(num_hot, dense_on_gpu, strict=True)):
        sizes, gpu = layer_bytes(model, layer), gpus[home[layer]]
        side = gpu if is_on_gpu else cpu
        keys_side = cpu if cache_types is not None and cache_types.selection else side
        side["attention"] += sizes.attention - sizes.head_norms
        keys_side["attention"] += sizes.head_norms
        side["predictor"] += sizes.predictor
        keys_side["kv_cache"] += cache_bytes(
            model, layer, context_length, num_sequences, cache_types
        )
        side["kv_cache"] += slots_bytes(model, layer, num_sequences)
        if side is cpu:
            cpu["kv_cache"] += kept_bytes(model, layer, num_sequences)
        number, unit_bytes = placed_units(model, layer)
        gpu["neurons"] += hot * unit_bytes
        resident = num_resident[layer] if num_resident else None
        cpu["neurons"] += (number - hot if resident is None else resident) * unit_bytes
    if draft_on_gpu:
        gpu = gpus[home[model.spec.last_attending]]
        for item, size in draft_gpu_bytes(model, context_length, num_sequences).items():
            gpu[item] += size
    (gpus[home[-1]] if head_on_gpu else cpu)["head"] += head_bytes(model)
    cpu["embedding"] += embedding_bytes(model)
    cpu["workspace"] += workspace
    if neuron_cache is not None:
        assert len(gpus) == 1, "a neuron cache is planned for one GPU"
        gpus[0]["neuron_cache"] += neuron_cache.gpu_bytes(model, num_hot)
        cpu["neuron_cache"] += neuron_cache.host_bytes(model, num_hot, dense_on_gpu)
    if any(count is not None for count in num_resident):
        cpu["neuron_cache"] += expert_slots_bytes(model)
    for gpu in gpus:
        gpu["workspace"] += workspace if any(gpu.values()) else 0
    return gpus, cpu
