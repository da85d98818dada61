"""The feed-forward layer of a prompt's tokens in modes dense, exact and predicted, over one or two blocks of
neurons.

    h_j = act(gate_j . x) * (up_j . x),   y = sum_j h_j * down_j

(plus biases, if a model has them). Without gates (OPT, Falcon) h_j = act(up_j . x), and `gate` is
the up projection.

Blocks on the CPU are the C++ kernels' (ops.neurons.native), which compute the rows that any token needs, and
a token's result is the same as if it were alone. A GPU, and what observers see, computes every row; values
that a token does not need are then masked.

Letters: T tokens, D model width, F neurons of the layer, N neurons of a block."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hotsplit.costs.pass_parts import gpu_part_neurons
from hotsplit.runtime.kernels.gate import Gate
from hotsplit.runtime.ops.neurons.native import add_neurons
from hotsplit.runtime.ops.observers import Observers
from hotsplit.runtime.ops.predict import Predictor
from hotsplit.runtime.weights import gpu_products
from hotsplit.runtime.weights.expert_block import ExpertBlock
from hotsplit.runtime.weights.gpu_products import Factor
from hotsplit.runtime.weights.matrix import Linear
from hotsplit.runtime.weights.neuron_block import NeuronBlock

if TYPE_CHECKING:
    from hotsplit.runtime.prefill.cold_stream import ColdStream
    from hotsplit.runtime.prefill.expert_stream import ExpertStream


@dataclass
class Traffic:
    """Weight bytes read so far. `attention`: query, key, value and output projections on the CPU;
    the others: the feed-forward layers. Hybrid steps count only the neurons that the CPU reads.
    Where the C++ kernels compute several tokens together, rows of the same groups that no token
    needs may be read too, and are not counted."""

    gate: int = 0
    up: int = 0
    down: int = 0
    predictor: int = 0
    attention: int = 0

    @property
    def total(self) -> int:
        """Bytes of the feed-forward layers."""
        return self.gate + self.up + self.down + self.predictor

    def add(self, read: tuple[int, int, int]) -> None:
        """Counts bytes of gate, up and down."""
        self.gate += read[0]
        self.up += read[1]
        self.down += read[2]


@dataclass(frozen=True, kw_only=True)
class BlockResult:
    """Output [T, D] and, if observers see them, the gate and hidden values [T, N]."""

    y_TD: Tensor
    gate_TN: Tensor | None = None
    hidden_TN: Tensor | None = None


SHOWN = ("ffn_gate", "ffn_hidden")  # tensors of a layer's neurons that observers see


@dataclass(frozen=True, kw_only=True)
class FeedForward:
    layer: int
    num_neurons: int  # F
    gate: Gate
    blocks: tuple[
        NeuronBlock, ...
    ]  # hot before cold; every neuron is in exactly one, or in `experts`
    down_bias_D: Tensor | None
    predictor: Predictor | None
    traffic: Traffic = field(repr=False)
    cold: "ColdStream | None" = field(default=None, repr=False)
    experts: tuple[ExpertBlock, ...] = ()  # hot before cold; every expert is in exactly one
    cold_experts: "ExpertStream | None" = field(default=None, repr=False)
    is_input_small: bool = False  # see gpu_products.Factor

    def forward(
        self, x: Tensor | Factor, named_TF: Tensor | None = None, *, observers: Observers
    ) -> Tensor:
        """Output [T, D] for the normed input of T tokens; of the neurons in
        `named_TF`, if given. The hot block comes first, so that a GPU computes it while the CPU
        computes the cold one."""
        is_watched = self.is_watched(observers)
        cold = None if observers.active else self.cold  # observers need every value
        results = []
        for block in self.blocks:
            if cold is not None and self._is_streamed(cold, block, len(x)):
                results.append(self._streamed(cold, x, named_TF))
                continue
            named_TN = None if named_TF is None else named_TF.to(block.device)
            if named_TN is not None and not block.is_whole:
                named_TN = named_TN[:, block.id_N]
            results.append(self.run_block(block, x, named_TN, is_watched=is_watched))
        self._show(results, observers)
        total = results[0].y_TD.to(x.device)
        for result in results[1:]:
            total = total + result.y_TD.to(x.device)
        return total if self.down_bias_D is None else total + self.down_bias_D

    def is_watched(self, observers: Observers) -> bool:
        return any(observers.want(name, self.layer) for name in SHOWN)

    def run_block(
        self, block: NeuronBlock, x: Tensor | Factor, named_TN: Tensor | None, *, is_watched: bool
    ) -> BlockResult:
        """A block of neurons, on its device."""
        is_on_gpu = gpu_products.is_gpu(block.device)
        if is_on_gpu and not (is_watched or block.is_by_output):
            y_TD = self._on_gpu(block, self._factor(x, block.device), named_TN)
            return BlockResult(y_TD=y_TD)
        x_TD = gpu_products.as_tensor(x).to(block.device)
        if is_on_gpu or is_watched:
            return self._with_all_values(block, x_TD, named_TN)
        y_TD = torch.zeros_like(x_TD)
        self._add_on_cpu(y_TD, block, x_TD, named_TN)
        return BlockResult(y_TD=y_TD)

    def _add_on_cpu(
        self, y_TD: Tensor, block: NeuronBlock, x_TD: Tensor, named_TN: Tensor | None
    ) -> None:
        self.traffic.add(add_neurons(y_TD, block, self.gate, x_TD, named_TN))

    def _factor(self, x: Tensor | Factor, device: torch.device) -> Factor:
        """The input on a GPU."""
        if not gpu_products.is_on(x, device):
            x = gpu_products.as_tensor(x).to(device)
        return Factor.of(x, is_small=self.is_input_small)

    def named(self, x: Tensor | Factor, *, observers: Observers) -> Tensor:
        """bool [T, F]: the predicted neurons."""
        assert self.predictor is not None
        score_TF = self.predictor.scores(x, is_small=self.is_input_small)
        self.traffic.predictor += self.predictor.num_bytes
        observers.show("ffn_predicted", self.layer, score_TF)
        return ~(score_TF <= self.predictor.threshold)

    def _is_streamed(self, cold: "ColdStream", block: NeuronBlock, num_tokens: int) -> bool:
        """True if the block is streamed to a GPU; not in pieces of neurons if all gates are needed."""
        is_long = num_tokens >= cold.least_tokens
        return is_long and not self.gate.needs_all and cold.has(self.layer, block)

    def _streamed(
        self, cold: "ColdStream", x: Tensor | Factor, named_TF: Tensor | None
    ) -> BlockResult:
        """Several tokens on the layer's GPU, to which the weights are streamed in pieces."""
        named_TF = None if named_TF is None else named_TF.to(cold.device)
        factor, is_on_gpu = self._factor(x, cold.device), gpu_products.is_gpu(cold.device)
        kind = self.blocks[-1].gate.weight.kind
        # Rounded here, for all pieces.
        x_TD = factor.rounded(gpu_products.tile_dtype(kind))[0] if is_on_gpu else factor.values()
        y_TD = torch.zeros(x_TD.shape, device=cold.device)

        def add(piece: NeuronBlock) -> None:
            named_TN = None if named_TF is None else named_TF[:, piece.id_N]
            if is_on_gpu:
                self._on_gpu(piece, factor, named_TN, y_TD)
            else:
                self._add_on_cpu(y_TD, piece, x_TD, named_TN)

        cold.run(self.layer, add, x_TD, y_TD)
        return BlockResult(y_TD=y_TD)

    def _on_gpu(
        self, block: NeuronBlock, x: Factor, named_TN: Tensor | None, y_TD: Tensor | None = None
    ) -> Tensor:
        """Adds the output of a block, of which all rows are read, because finding those that fire
        would synchronise with the device; None: to zeros."""
        count, size = len(block.id_N), gpu_part_neurons(len(x))
        if self.gate.needs_all:
            assert count == self.num_neurons, (count, self.num_neurons)
            size = count
        for start in range(0, count, size):
            stop = min(start + size, count)
            part = block if size >= count else block.part(start, stop)
            gate_TN = _product(part.gate, x, part.row_N)
            up_TN = None if part.up is None else _product(part.up, x, part.row_N)
            named = None if named_TN is None else named_TN[:, start:stop]
            dtype = gpu_products.tile_dtype(part.down.kind)
            hidden = gpu_products.hidden_values(self.gate, gate_TN, up_TN, named, dtype)
            del gate_TN, up_TN  # before the sum is allocated
            self._count(part, stop - start)
            y_TD = part.down.add_many(y_TD, hidden, part.row_N)
        return torch.zeros(len(x), block.width, device=block.device) if y_TD is None else y_TD

    def _with_all_values(
        self, block: NeuronBlock, x_TD: Tensor, named_TN: Tensor | None
    ) -> BlockResult:
        """Computes all neurons of a block, and keeps their values for observers."""
        down, is_on_gpu = block.down, gpu_products.is_gpu(block.device)
        gate_TN = self.gate.prepare(_product(block.gate, x_TD, block.row_N))
        up_TN = None if block.up is None else _product(block.up, x_TD, block.row_N)
        activated_TN, _ = self.gate.act(gate_TN)
        hidden_TN = self.gate.hidden(activated_TN, up_TN)
        if named_TN is not None:
            hidden_TN = hidden_TN * named_TN
            gate_TN = gate_TN.masked_fill(~named_TN, torch.nan)
        if not is_on_gpu:
            y_TD = torch.zeros_like(x_TD)
            self._add_on_cpu(y_TD, block, x_TD, named_TN)
        elif block.is_by_output:
            up_bytes = 0 if block.up is None else block.up.weight.num_bytes
            self.traffic.add((block.gate.weight.num_bytes, up_bytes, down.num_bytes))
            y_TD = down.product(hidden_TN)
        else:
            self._count(block, len(block.id_N))
            y_TD = down.add_many(None, hidden_TN, block.row_N)
        return BlockResult(y_TD=y_TD, gate_TN=gate_TN, hidden_TN=hidden_TN)

    def _count(self, block: NeuronBlock, number: int) -> None:
        """Counts so many neurons of a block."""
        up_bytes = 0 if block.up is None else block.up.weight.row_bytes
        sizes = block.gate.weight.row_bytes, up_bytes, block.down.row_bytes
        self.traffic.add((number * sizes[0], number * sizes[1], number * sizes[2]))

    def _show(self, results: list[BlockResult], observers: Observers) -> None:
        """Passes the values of all blocks to observers, with neurons in the layer's order."""
        for name in SHOWN:
            if not observers.want(name, self.layer):
                continue
            parts = [r.gate_TN if name == "ffn_gate" else r.hidden_TN for r in results]
            assert parts[0] is not None
            whole = parts[0].new_empty(len(parts[0]), self.num_neurons)
            for block, part in zip(self.blocks, parts, strict=True):
                assert part is not None
                whole[:, block.id_N.to(whole.device)] = part.to(whole.device)
            observers.show(name, self.layer, whole)


def _product(linear: Linear, x: Tensor | Factor, rows_A: Tensor | None) -> Tensor:
    """f32 [T, A]: some rows (None: all) times several tokens."""
    y_TA = linear.weight.product(x, rows_A)
    if linear.bias_N is None:
        return y_TA
    return y_TA + (linear.bias_N if rows_A is None else linear.bias_N[rows_A])
