"""Bytes of the online neuron cache (runtime/neuron_cache) in both memories, and which layers it
serves: as part_bytes for what else a plan holds.

Letters: L layers, F neurons or experts of a layer."""

from collections.abc import Sequence
from dataclasses import dataclass

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.costs.part_bytes import (
    FLOAT_BYTES,
    NUMBER_BYTES,
    is_expert,
    layer_bytes,
    most_units,
    placed_units,
)
from hotsplit.model.tensors import is_neuron_major
from hotsplit.model.weight_types import BY_NAME

# The online neuron cache (runtime/neuron_cache). In staging, each part of a neuron (row, bias)
# begins at a multiple of STAGED_ALIGNMENT. A swap copies each part and changes up to three numbers
# (int32); staging holds a descriptor for every copy, and the numbers.
STAGED_ALIGNMENT = 16
_TOGETHER = {"tiled": 16, "grouped": 64}  # rows that a layout on the CPU interleaves
NUMBERS_OF_SWAP = 3
COPY_BYTES = 32
# A candidate of the policy: layer, slot, incoming and outgoing neuron, and the seconds it gains.
CANDIDATE_BYTES = 24
PENDING_TOKENS = 32  # tokens whose bits the neuron cache's policy keeps (MOST_PENDING in policy.h)


def is_cached(num_hot: int, num_neurons: int) -> bool:
    """True for a layer whose neurons are on both sides: only there can a swap change anything."""
    return 0 < num_hot < num_neurons


def cached_layers(
    model: ModelFile, num_hot: Sequence[int], dense_on_gpu: Sequence[bool]
) -> list[bool]:
    """Whether a neuron cache serves each layer. That of a mixture serves layers with experts whose
    router is on the GPU, which writes its choices to main memory."""
    has_experts = model.spec.has_experts
    return [
        is_cached(hot, placed_units(model, layer)[0])
        and (not has_experts or (model.spec.layers[layer].route is not None and bool(is_on_gpu)))
        for layer, (hot, is_on_gpu) in enumerate(zip(num_hot, dense_on_gpu, strict=True))
    ]


def staging_bytes(model: ModelFile, most_rows: int) -> int:
    """Bytes of a neuron cache's staging, the same on the GPU and in main memory: the rows and
    biases of `most_rows` neurons of the largest layer, and each swap's copy descriptors and
    numbers. That of experts is on the GPU alone, and has their matrices and biases, and
    tables of the layouts that they change there."""
    parts_L = [_parts(model, layer) for layer in range(model.spec.num_layers)]
    row = max(sum(map(staged, parts)) for parts in parts_L)
    if model.spec.has_experts:
        # Numbers beside the rows that a layout of the CPU has together, for every type and width.
        sizes: dict[tuple[str, int, str], int] = {}
        for layer in range(model.spec.num_layers):
            for name, entry in model.layer_tensors[layer].items():
                if not is_expert(name) or not name.endswith(".weight"):
                    continue
                forms, is_down = BY_NAME[entry.kind].forms, is_neuron_major(f"blk.{layer}.{name}")
                form = "grouped" if is_down and "grouped" in forms else "tiled"
                together = _TOGETHER[form] if form in forms else 1
                sizes[entry.kind, entry.row_bytes, form] = together * entry.row_bytes
        return most_rows * row + (NUMBER_BYTES * sum(sizes.values()))
    return bytes_in_staging(row, max(map(len, parts_L)), most_rows)


def bytes_in_staging(row_bytes: int, num_parts: int, most_rows: int) -> int:
    """Bytes of staging for `most_rows` neurons of `num_parts` parts and `row_bytes` bytes each."""
    copies = staged(COPY_BYTES * (num_parts + NUMBERS_OF_SWAP) * most_rows)
    return copies + most_rows * (row_bytes + NUMBER_BYTES * NUMBERS_OF_SWAP)


def _parts(model: ModelFile, layer: int) -> list[int]:
    """Bytes of each part of a neuron, its rows, then its biases, or of an expert."""
    if model.spec.has_experts:
        number, tensors = model.spec.layers[layer].neurons.num_experts, model.layer_tensors[layer]
        return [entry.num_bytes // number for name, entry in tensors.items() if is_expert(name)]
    sizes, entries = layer_bytes(model, layer), model.layer_tensors[layer]
    names = model.spec.layers[layer].neurons.matrices
    rows = [entries[f"{name}.weight"].row_bytes for name in names]
    biases = [FLOAT_BYTES for name in names if f"{name}.bias" in entries]
    return [*rows, sizes.down_row, *biases]


def staged(num_bytes: int) -> int:
    """Bytes of a part in staging, including the padding after it."""
    return -(-num_bytes // STAGED_ALIGNMENT) * STAGED_ALIGNMENT


def step_bits_bytes(model: ModelFile) -> int:
    """Bytes of a bit for each neuron or expert; layers start at new 32-bit words."""
    return model.spec.num_layers * NUMBER_BYTES * -(-most_units(model.spec) // 32)


@dataclass(frozen=True, kw_only=True)
class CacheSize:
    """The sizes that a neuron cache's bytes depend on, besides the model and the placement.
    `packs_bits` is true in mode exact, where each side finds out which of its neurons a token reads
    and sets their bits; in mode predicted the predictor names them all."""

    most_rows: int  # most neurons swapped in a step
    packs_bits: bool

    def gpu_bytes(self, model: ModelFile, num_hot: Sequence[int]) -> int:
        """Bytes on the GPU: staging; if the GPU packs bits, also a bit for each neuron, and the
        slot of each neuron of the cached layers. Of experts, staging alone: any plan of theirs has
        tables of places."""
        if model.spec.has_experts:
            return staging_bytes(model, self.most_rows)
        packing = step_bits_bytes(model)
        packing += sum(
            NUMBER_BYTES * layer.neurons.number
            for hot, layer in zip(num_hot, model.spec.layers, strict=False)
            if is_cached(hot, layer.neurons.number)
        )
        return staging_bytes(model, self.most_rows) + packing * self.packs_bits

    def most_gpu_bytes(self, model: ModelFile) -> int:
        """Upper bound on `gpu_bytes`: its value if every layer is cached."""
        tables = 0 if model.spec.has_experts else NUMBER_BYTES * model.spec.num_neurons
        return self.gpu_bytes(model, ()) + tables * self.packs_bits

    def host_bytes(
        self, model: ModelFile, num_hot: Sequence[int], dense_on_gpu: Sequence[bool]
    ) -> int:
        """Bytes of main memory: copies of hot neurons; pinned staging; the bits of a step for the
        CPU, for the GPU if it packs bits, and for both combined; and the tables of the policy and
        the runtime. The tables hold, for each neuron, two scores (f32, padded to whole words of
        bits), its slot twice (int32), two bits (in a slot by the plan, in a slot now) and a bit for
        each of the last PENDING_TOKENS tokens. They also hold the policy's candidates. Of experts,
        which need no staging here, the choices of each layer, the places of all and a byte for
        each."""
        bits, spec, units = step_bits_bytes(model), model.spec, most_units(model.spec)
        scores = 2 * FLOAT_BYTES * 8 * bits
        slots = 2 * NUMBER_BYTES * spec.num_layers * units
        candidates = CANDIDATE_BYTES * spec.num_layers * self.most_rows
        tables = scores + slots + (2 + PENDING_TOKENS) * bits + candidates
        copies = copied_bytes(model, num_hot, dense_on_gpu)
        if spec.has_experts:
            choices = spec.num_layers * NUMBER_BYTES * 2 * spec.most_used
            places = spec.num_layers * units * (NUMBER_BYTES + 1)
            return copies + choices + bits + places + tables
        steps = (2 + self.packs_bits) * bits
        return copies + staging_bytes(model, self.most_rows) + steps + tables


def copied_bytes(model: ModelFile, num_hot: Sequence[int], dense_on_gpu: Sequence[bool]) -> int:
    """Bytes of main memory for the hot neurons or experts of cached layers: a copy of each, so that
    nothing need be written back when it leaves its slot, and two int32 tables of the slots'
    neurons."""
    is_cached_L = cached_layers(model, num_hot, dense_on_gpu)
    return sum(
        hot * (placed_units(model, layer)[1] + 2 * NUMBER_BYTES)
        for layer, hot in enumerate(num_hot)
        if is_cached_L[layer]
    )
