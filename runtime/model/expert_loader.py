"""Loads the router, the experts and the shared experts of a layer of a mixture: experts as a hot
and a cold block, or as one with all. Experts that do not fit into the memory stay in the mapped
file.

If a neuron cache swaps a layer's experts, the cold block has all of them, those in slots too."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.errors import HotsplitError
from hotsplit.files.gguf_file import TensorEntry, in_memory, release
from hotsplit.model.route import ROUTER
from hotsplit.model.spec import Neurons
from hotsplit.model.tensors import OUTPUT_GATE, in_layout
from hotsplit.runtime.kernels.cpu import library
from hotsplit.runtime.kernels.gate import Gate
from hotsplit.runtime.kernels.grouped import GROUP_ROWS
from hotsplit.runtime.kernels.stored import FLOATS, unpack
from hotsplit.runtime.kernels.tiled import TILE_ROWS
from hotsplit.runtime.model.layers import Layer
from hotsplit.runtime.model.neuron_loader import bias_of
from hotsplit.runtime.model.placement import Placement
from hotsplit.runtime.ops.neurons.feed_forward import SharedNeurons
from hotsplit.runtime.ops.route import Router
from hotsplit.runtime.weights.drive import Arriving
from hotsplit.runtime.weights.expert_block import ExpertBlock, ExpertMatrices
from hotsplit.runtime.weights.matrix import Linear, Matrix, matrix_of, vector_of
from hotsplit.runtime.weights.neuron_block import NeuronBlock, Role
from hotsplit.runtime.weights.store import CPU, MappedStore, ResidentStore, Stores, WeightStore


@dataclass(frozen=True, kw_only=True)
class ExpertLoader:
    """Loads the parts of one layer."""

    model: ModelFile
    layer: int
    placement: Placement
    stores: Stores
    computes_all: bool
    resident_N: np.ndarray | None = None  # the experts in slots of a neuron cache, if it has any
    num_slots: int = 0  # in main memory, of experts that are read from a drive; 0: all are loaded

    @property
    def device(self) -> torch.device:
        """The device of the weights that every token reads."""
        return self.placement.dense_device(self.layer)

    def router(self) -> Router | None:
        """None for a layer without experts."""
        spec = self.model.spec.layers[self.layer].route
        if spec is None:
            return None
        entry, is_on_cpu = self._entry(f"{ROUTER}.weight"), self.device == CPU
        on_device = self.stores.on(self.device)
        weight = matrix_of(entry, CPU) if is_on_cpu else on_device.matrix(entry, "attention")
        bias = f"{ROUTER}.bias"
        has_bias = f"blk.{self.layer}.{bias}" in self.model.tensors
        return Router(
            spec=spec,
            linear=Linear(weight=weight, bias_N=self._own_vector(bias) if has_bias else None),
            vectors={name: self._own_vector(name) for name in spec.vectors},
        )

    def experts(self) -> tuple[ExpertBlock, ...]:
        """The blocks of the experts, the hot one first; none for a layer without experts."""
        neurons, hot = self.model.spec.layers[self.layer].neurons, self.placement.hot
        if not neurons.are_experts:
            return ()
        every = np.arange(neurons.num_experts)
        if self.resident_N is not None and len(self.resident_N):
            return self._with_slots(neurons, self.resident_N)
        if self.num_slots:
            return (self._arriving(neurons, self.num_slots),)
        ids = every if hot is None else hot[self.layer].astype(np.int64)
        parts: dict[Role, np.ndarray] = {"hot": np.sort(ids), "cold": np.setdiff1d(every, ids)}
        return tuple(self._block(role, own) for role, own in parts.items() if len(own))

    def _with_slots(self, neurons: Neurons, resident_N: np.ndarray) -> tuple[ExpertBlock, ...]:
        """The slots, and all experts in main memory, where those in slots are not computed."""
        store = self.stores.on(CPU)
        assert self.computes_all and not store.is_mapped and not self.stores.are_experts_mapped
        hot = self._block("hot", resident_N.astype(np.int64))
        cold_E = np.arange(neurons.num_experts, dtype=np.int32)
        cold_E[resident_N] = -1
        cold = self._made("cold", self._copied(neurons, store, None), store, None)
        return hot, replace(cold, place_E=store.neuron_ids(cold_E, is_all=False))

    def _block(self, role: Role, ids: np.ndarray) -> ExpertBlock:
        """The block of some experts, in order."""
        neurons = self.model.spec.layers[self.layer].neurons
        device = self.placement.homes[self.layer] if role == "hot" else CPU
        store, is_part = self.stores.on(device), len(ids) < neurons.num_experts
        if device == CPU and (store.is_mapped or self.stores.are_experts_mapped):
            store, stored = MappedStore(CPU), None  # all of them, in the file
            matrices = [_in_file(self._entry(name)) for name in self._names(neurons)]
        else:
            stored = ids if is_part else None
            matrices = self._copied(neurons, store, stored)
        place_E = None
        if is_part:
            places = np.full(neurons.num_experts, -1, np.int32)
            places[ids] = ids if stored is None else np.arange(len(ids))
            place_E = store.neuron_ids(places, is_all=False)
        return replace(self._made(role, matrices, store, stored), place_E=place_E)

    def _arriving(self, neurons: Neurons, num_slots: int) -> ExpertBlock:
        """Empty slots of experts that steps read from the drive, in the form of resident ones."""
        drive, store = self.stores.drive, self.stores.on_cpu
        assert drive is not None and isinstance(store, ResidentStore) and self._is_by_output
        stacks = [drive.stack(self._entry(name)) for name in self._names(neurons)]
        form: library.Form = "tiled" if library.prefers_tiles() else "planar"
        matrices = []
        for stack in stacks:
            data = store.residence.room(num_slots * stack.num_bytes)
            kind = library.packed_kind_of(stack.kind, stack.num_rows, stack.width, form)
            data = data.view(FLOATS.get(kind, torch.uint8)).view(num_slots, stack.num_rows, -1)
            matrices.append(ExpertMatrices(data=data, kind=kind, width=stack.width))
        arriving = Arriving(
            layer=self.layer,
            drive=drive,
            stacks=stacks,
            place_E=torch.full((neurons.num_experts,), -1, dtype=torch.int32),
            expert_S=torch.full((num_slots,), -1, dtype=torch.int32),
            worth_E=torch.zeros(-(-drive.num_experts // 32) * 32),
        )
        block = self._made("cold", matrices, store, None)
        return replace(block, place_E=arriving.place_E, arriving=arriving)

    def _made(
        self,
        role: Role,
        matrices: list[ExpertMatrices],
        store: WeightStore,
        stored: np.ndarray | None,
    ) -> ExpertBlock:
        """A block of these matrices, of the experts `stored` (None: all), with their biases."""
        neurons = self.model.spec.layers[self.layer].neurons
        stems = (*neurons.matrices, neurons.down_name)
        gate, *up, down = (
            replace(matrix, bias_PN=bias_of(self.model, f"blk.{self.layer}.{stem}", store, stored))
            for matrix, stem in zip(matrices, stems, strict=True)
        )
        return ExpertBlock(
            role=role,
            gate=gate,
            up=up[0] if up else None,
            down=down,
            is_by_output=self._is_by_output,
        )

    def _copied(
        self, neurons: Neurons, store: WeightStore, ids: np.ndarray | None
    ) -> list[ExpertMatrices]:
        """The matrices of these experts (None: all)."""
        entries = [_flat(self._entry(name)) for name in self._names(neurons)]
        size = self.model.spec.hidden_size
        width = neurons.width(size) if self._is_by_output else neurons.of_expert
        flat = self._neurons(store, entries, neurons.of_expert, width, ids)
        count = neurons.num_experts if ids is None else len(ids)
        apart = [matrix.data.unflatten(0, (count, -1)) for matrix in flat]
        return [
            ExpertMatrices(data=data, kind=matrix.kind, width=matrix.width)
            for data, matrix in zip(apart, flat, strict=True)
        ]

    def _names(self, neurons: Neurons) -> list[str]:
        """The tensors of gate, up (if there is one) and down."""
        down = in_layout(f"{neurons.down_name}.weight", self.model.layout)
        return [*(f"{name}.weight" for name in neurons.matrices), down]

    @property
    def _is_by_output(self) -> bool:
        return self.model.layout == "stock"

    def _neurons(
        self,
        store: WeightStore,
        entries: list[TensorEntry],
        num_rows: int,
        num_down: int,
        ids: np.ndarray | None = None,
    ) -> list[Matrix]:
        """Gate, up (if there is one) and down, of these experts (None: all). An expert has
        `num_rows` rows of gate and up, and `num_down` of down; it begins with a whole tile or
        group, or none are made."""
        *rows, down = [[entry] for entry in entries]
        num_whole = len(rows) if num_rows % TILE_ROWS == 0 else 0
        own = None if ids is None else _rows_of(ids, num_rows)
        if self._is_by_output:
            is_whole = num_whole > 0 and num_down % TILE_ROWS == 0
            own_down = None if ids is None else _rows_of(ids, num_down)
            found = store.neurons(rows, own, num_whole)
            return [*found, *store.neurons([down], own_down, int(is_whole))]
        if self.computes_all:
            adds_all = num_whole > 0 and num_down % GROUP_ROWS == 0
            return store.neurons([*rows, down], own, num_whole, adds_all)
        rest = [entry for (entry,) in (*rows[1:], down)]
        return store.neurons([rows[0], rest], own, min(1, num_whole))

    def shared(self, rule: Gate) -> SharedNeurons | None:
        """The shared experts, if there are any. On a GPU they are a part of what every token reads,
        in its bytes, too."""
        neurons = self.model.spec.layers[self.layer].shared
        if neurons is None:
            return None
        store, entries = self.stores.on(self.device), list(map(self._entry, self._names(neurons)))
        if self.device == CPU:
            matrices = self._neurons(store, entries, 0, 0)
        else:
            matrices = [store.matrix(entry, "attention") for entry in entries]
        gate, *up, down = matrices
        block = NeuronBlock(
            role="hot",
            gate=Linear(weight=gate),
            up=Linear(weight=up[0]) if up else None,
            down=down,
            id_N=store.neuron_ids(np.arange(neurons.number), is_all=True),
            row_N=None,
            is_whole=True,
            is_by_output=self._is_by_output,
        )
        output_gate = None
        if neurons.has_output_gate:
            values_D = self._own_vector(OUTPUT_GATE)
            gate_1D = Matrix(data=values_D[None], kind="f32", width=len(values_D))
            output_gate = Linear(weight=gate_1D)
        return SharedNeurons(block=block, rule=rule, gate=output_gate)

    def _entry(self, name: str) -> TensorEntry:
        return self.model.entry(self.layer, name)

    def _own_vector(self, name: str) -> torch.Tensor:
        entry = self.model.tensors[f"blk.{self.layer}.{name}"]
        return self.stores.on(self.device).vector(vector_of(entry, CPU), "attention")


def _rows_of(ids: np.ndarray, num_rows: int) -> np.ndarray:
    """The rows of these experts, each of which has `num_rows`."""
    return (ids[:, None] * num_rows + np.arange(num_rows)).ravel()


def _in_file(entry: TensorEntry) -> ExpertMatrices:
    """The matrices of all experts as they are in the mapped file, also as a view of a tensor that
    has two of each expert; packed ones in memory."""
    data = torch.from_numpy(entry.read())
    if entry.packed_from is not None:
        release(entry)
    return ExpertMatrices(
        data=data.view(torch.bfloat16) if entry.kind == "bf16" else data,
        kind=entry.kind,
        width=entry.shape[-1],
    )


def _flat(entry: TensorEntry) -> TensorEntry:
    """The matrices of all experts as one, with the rows of one expert after those of another."""
    if entry.packed_from is not None:
        return in_memory(_flat(entry.packed_from))
    raw = entry.read()
    rows = raw.reshape(-1, raw.shape[-1])
    if not raw.flags.c_contiguous:  # one of two matrices in a tensor: the rows are a copy
        release(entry)
    shape, scale = (len(rows), entry.shape[-1]), entry.scale
    if scale is not None and len(scale) > 1:  # of each expert
        scale = np.repeat(scale, len(rows) // len(scale))
    return TensorEntry(shape=shape, kind=entry.kind, read_rows=lambda a, b: rows[a:b], scale=scale)


def check_routers(model: ModelFile, layers: Sequence[Layer]) -> None:
    """Raises HotsplitError for a router with NaN or infinite values, by which no expert can be
    chosen."""
    for index, layer in enumerate(layers):
        if layer.router is None:
            continue
        weight, bias_E = layer.router.linear.weight, layer.router.linear.bias_N
        weight_ED = unpack(weight.data, weight.kind)
        parts = {f"{ROUTER}.weight": weight_ED, f"{ROUTER}.bias": bias_E, **layer.router.vectors}
        for name, values in parts.items():
            if values is not None and not bool(torch.isfinite(values).all()):
                raise HotsplitError(
                    f"{model.path}: blk.{index}.{name} has NaN or infinite values: the router of"
                    f" layer {index} can choose no experts; download the file again"
                )
