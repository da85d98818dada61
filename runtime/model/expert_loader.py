"""Loads the router, the experts and the shared experts of a layer of a mixture. Experts that do not
fit into the memory stay in the mapped file."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.errors import HotsplitError
from hotsplit.files.gguf_file import TensorEntry, release
from hotsplit.model.spec import Neurons
from hotsplit.model.tensors import CHOICE_BIAS, OUTPUT_GATE, ROUTER, in_layout
from hotsplit.runtime.kernels.grouped import GROUP_ROWS
from hotsplit.runtime.kernels.tiled import TILE_ROWS
from hotsplit.runtime.model.layers import Layer
from hotsplit.runtime.ops.route import Router
from hotsplit.runtime.weights.expert_block import ExpertBlock, ExpertMatrices
from hotsplit.runtime.weights.matrix import Linear, Matrix, matrix_of, vector_of
from hotsplit.runtime.weights.neuron_block import NeuronBlock
from hotsplit.runtime.weights.store import CPU, MappedStore, WeightStore


@dataclass(frozen=True, kw_only=True)
class ExpertLoader:
    """Loads the parts of one layer. `store`: of the weights on the CPU that every token reads."""

    model: ModelFile
    layer: int
    store: WeightStore
    computes_all: bool
    are_experts_mapped: bool = False

    def router(self) -> Router | None:
        """None for a layer without experts."""
        spec = self.model.spec.layers[self.layer].route
        if spec is None:
            return None
        weight = matrix_of(self._entry(f"{ROUTER}.weight"), CPU)
        return Router(
            spec=spec,
            linear=Linear(weight=weight, bias_N=self._vector(f"{ROUTER}.bias")),
            choice_bias_E=self._vector(CHOICE_BIAS),
        )

    def experts(self) -> ExpertBlock | None:
        neurons = self.model.spec.layers[self.layer].neurons
        if not neurons.are_experts:
            return None
        names = [f"{name}.weight" for name in (*neurons.matrices, self._down_name(neurons))]
        entries = [self._entry(name) for name in names]
        store = MappedStore(CPU) if self.are_experts_mapped else self.store
        if store.is_mapped:  # also views of a tensor that has two matrices of each expert
            matrices = [_in_file(entry) for entry in entries]
        else:
            width = self.model.spec.hidden_size
            flat = self._neurons(
                store, list(map(_flat, entries)), neurons.of_expert,
                width if self._is_by_output else neurons.of_expert,
            )  # fmt: skip
            matrices = [_apart(matrix, neurons.num_experts) for matrix in flat]
        stems = (*neurons.matrices, neurons.down_name)
        gate, *up, down = (
            replace(matrix, bias_EN=self._vector(f"{stem}.bias"))
            for matrix, stem in zip(matrices, stems, strict=True)
        )
        return ExpertBlock(
            gate=gate, up=up[0] if up else None, down=down, is_by_output=self._is_by_output
        )  # fmt: skip

    @property
    def _is_by_output(self) -> bool:
        return self.model.layout == "stock"

    def _down_name(self, neurons: Neurons) -> str:
        down = in_layout(f"{neurons.down_name}.weight", self.model.layout)
        return down.removesuffix(".weight")

    def _neurons(
        self, store: WeightStore, entries: list[TensorEntry], num_rows: int, num_down: int
    ) -> list[Matrix]:
        """Gate, up (if there is one) and down. An expert has `num_rows` rows of gate and up, and
        `num_down` of down; it begins with a whole tile or group, or none are made."""
        *rows, down = [[entry] for entry in entries]
        num_whole = len(rows) if num_rows % TILE_ROWS == 0 else 0
        if self._is_by_output:
            is_whole = num_whole and num_down % TILE_ROWS == 0
            return store.neurons([*rows, down], None, num_whole + 1 if is_whole else num_whole)
        if self.computes_all:
            adds_all = num_whole > 0 and num_down % GROUP_ROWS == 0
            return store.neurons([*rows, down], None, num_whole, adds_all)
        rest = [entry for (entry,) in (*rows[1:], down)]
        return store.neurons([rows[0], rest], None, min(1, num_whole))

    def shared(self) -> tuple[NeuronBlock, Linear | None] | None:
        """The block of the shared experts, and their gate; None without any."""
        neurons = self.model.spec.layers[self.layer].shared
        if neurons is None:
            return None
        gate = None
        if neurons.has_output_gate:
            values_D = self._vector(OUTPUT_GATE)
            assert values_D is not None
            weight = Matrix(data=values_D[None], kind="f32", width=len(values_D))
            gate = Linear(weight=weight)
        return self._shared_block(neurons), gate

    def _shared_block(self, neurons: Neurons) -> NeuronBlock:
        names = [f"{name}.weight" for name in (*neurons.matrices, self._down_name(neurons))]
        matrices = self._neurons(self.store, [self._entry(name) for name in names], 0, 0)
        gate, *up, own_down = matrices
        return NeuronBlock(
            role="hot",
            gate=Linear(weight=gate),
            up=Linear(weight=up[0]) if up else None,
            down=own_down,
            id_N=self.store.neuron_ids(np.arange(neurons.number), is_all=True),
            row_N=None,
            is_whole=True,
            is_by_output=self._is_by_output,
        )

    def _entry(self, name: str) -> TensorEntry:
        return self.model.entry(self.layer, name)

    def _vector(self, name: str) -> torch.Tensor | None:
        entry = self.model.tensors.get(f"blk.{self.layer}.{name}")
        return None if entry is None else vector_of(entry, CPU)


def _in_file(entry: TensorEntry) -> ExpertMatrices:
    """The matrices of all experts as they are in the mapped file."""
    data = torch.from_numpy(entry.read())
    return ExpertMatrices(
        data=data.view(torch.bfloat16) if entry.kind == "bf16" else data,
        kind=entry.kind,
        width=entry.shape[-1],
    )


def _flat(entry: TensorEntry) -> TensorEntry:
    """The matrices of all experts as one, with the rows of one expert after those of another."""
    raw = entry.read()
    rows = raw.reshape(-1, raw.shape[-1])
    if not raw.flags.c_contiguous:  # one of two matrices in a tensor: the rows are a copy
        release(entry)
    shape = len(rows), entry.shape[-1]
    return TensorEntry(shape=shape, kind=entry.kind, read_rows=lambda a, b: rows[a:b])


def _apart(matrix: Matrix, num_experts: int) -> ExpertMatrices:
    data = matrix.data.unflatten(0, (num_experts, -1))
    return ExpertMatrices(data=data, kind=matrix.kind, width=matrix.width)


def check_routers(model: ModelFile, layers: Sequence[Layer]) -> None:
    """Raises HotsplitError for a router with NaN or infinite values, by which no expert can be
    chosen."""
    for index, layer in enumerate(layers):
        if layer.router is None:
            continue
        weight, bias_E = layer.router.linear.weight.data, layer.router.linear.bias_N
        parts = {f"{ROUTER}.weight": weight, f"{ROUTER}.bias": bias_E,
                 CHOICE_BIAS: layer.router.choice_bias_E}  # fmt: skip
        for name, values in parts.items():
            if values is not None and not bool(torch.isfinite(values.float()).all()):
                raise HotsplitError(
                    f"{model.path}: blk.{index}.{name} has NaN or infinite values: the router of layer"
                    f" {index} can choose no experts; download the file again"
                )
