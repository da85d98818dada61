"""Loads the router, the experts and the shared experts of a layer of a mixture. Experts stay in the
mapped file: a token reads few of them, and a copy would read all."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.errors import HotsplitError
from hotsplit.files.gguf_file import TensorEntry
from hotsplit.model.spec import Neurons
from hotsplit.model.tensors import CHOICE_BIAS, OUTPUT_GATE, ROUTER, in_layout
from hotsplit.runtime.model.layers import Layer
from hotsplit.runtime.ops.route import Router
from hotsplit.runtime.weights.expert_block import ExpertBlock, ExpertMatrices
from hotsplit.runtime.weights.matrix import Linear, Matrix, matrix_of, vector_of
from hotsplit.runtime.weights.neuron_block import NeuronBlock
from hotsplit.runtime.weights.store import CPU, WeightStore


@dataclass(frozen=True, kw_only=True)
class ExpertLoader:
    """Loads the parts of one layer. `store`: of the weights on the CPU that every token reads."""

    model: ModelFile
    layer: int
    store: WeightStore
    computes_all: bool

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
        gate, *up = (self._matrices(name) for name in neurons.matrices)
        return ExpertBlock(
            gate=gate,
            up=up[0] if up else None,
            down=self._matrices(neurons.down_name),
            is_by_output=self.model.layout == "stock",
        )

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
        is_by_output = self.model.layout == "stock"
        down = in_layout(f"{neurons.down_name}.weight", self.model.layout)
        names = [f"{name}.weight" for name in neurons.matrices]
        *rows, last = [self._entry(name) for name in (*names, down)]
        if is_by_output:
            matrices = self.store.neurons([[e] for e in (*rows, last)], None, len(rows) + 1)
        elif self.computes_all:
            matrices = self.store.neurons([[e] for e in (*rows, last)], None, len(rows), True)
        else:
            matrices = self.store.neurons([rows[:1], [*rows[1:], last]], None, 1)
        gate, *up, own_down = matrices
        return NeuronBlock(
            role="hot",
            gate=Linear(weight=gate),
            up=Linear(weight=up[0]) if up else None,
            down=own_down,
            id_N=self.store.neuron_ids(np.arange(neurons.number), is_all=True),
            row_N=None,
            is_whole=True,
            is_by_output=is_by_output,
        )

    def _matrices(self, name: str) -> ExpertMatrices:
        entry = self._entry(in_layout(f"{name}.weight", self.model.layout))
        data = torch.from_numpy(entry.read())
        return ExpertMatrices(
            data=data.view(torch.bfloat16) if entry.kind == "bf16" else data,
            kind=entry.kind,
            width=entry.shape[-1],
            bias_EN=self._vector(f"{name}.bias"),
        )

    def _entry(self, name: str) -> TensorEntry:
        return self.model.entry(self.layer, name)

    def _vector(self, name: str) -> torch.Tensor | None:
        entry = self.model.tensors.get(f"blk.{self.layer}.{name}")
        return None if entry is None else vector_of(entry, CPU)


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
