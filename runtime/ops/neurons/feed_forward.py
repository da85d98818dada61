"""The sparse feed-forward layer in modes dense, exact and predicted, over one or two blocks of
neurons.

    h_j = act(gate_j . x) * (up_j . x),   y = sum_j h_j * down_j

(plus biases, if a model has them). Without gates (OPT, Falcon) h_j = act(up_j . x), and `gate` is
the up projection.

`exact` computes every gate, and `up` and `down` only for neurons that fire; `predicted` computes
the gates of predicted neurons, and `up` and `down` for those of them that fire. Both give the
results of `dense` up to rounding, except for neurons that the predictor misses. In blocks that the C++ kernels compute
(native_neurons), a token's result is the same as if it were alone. In others, several tokens
compute all rows that any of them needs, or every row; on a GPU, and for observers of several
tokens, every row is computed. Values that a token does not need are then masked.

Letters: T tokens, D model width, F neurons of the layer, N neurons of a block, A active ones."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from hotsplit.costs.pass_parts import gpu_part_neurons, part_neurons
from hotsplit.runtime.kernels.gate import Gate
from hotsplit.runtime.ops.neurons.native import add_neurons
from hotsplit.runtime.ops.neurons.streams import ColdExpertStream, ColdNeurons
from hotsplit.runtime.ops.observers import Observers
from hotsplit.runtime.ops.predict import Predictor
from hotsplit.runtime.weights import gpu_products
from hotsplit.runtime.weights.expert_block import ExpertBlock
from hotsplit.runtime.weights.gpu_products import Factor
from hotsplit.runtime.weights.matrix import Linear
from hotsplit.runtime.weights.neuron_block import NeuronBlock

# If several tokens need more than this share of a block's neurons, all rows are used: selecting
# some would copy the tokens' values for them.
MOST_CHOSEN = 0.9


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
    """Output [T, D] and, if kept for observers, the gate and hidden values [T, A] of the neurons at
    `position_A`."""

    y_TD: Tensor
    gate_TA: Tensor | None = None
    hidden_TA: Tensor | None = None
    position_A: Tensor | None = None  # None: all neurons of the block


# Tensors of a layer's neurons that observers see, with the value for neurons that are not computed.
SHOWN = {"ffn_gate": torch.nan, "ffn_hidden": 0.0}


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
    cold: ColdNeurons | None = field(default=None, repr=False)
    experts: tuple[ExpertBlock, ...] = ()  # hot before cold; every expert is in exactly one
    cold_experts: ColdExpertStream | None = field(default=None, repr=False)
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
            if gpu_products.is_gpu(block.device) and not is_watched and not block.is_by_output:
                y_TD = self.on_gpu(block, self._factor(x, block.device), named_TN)
                results.append(BlockResult(y_TD=y_TD))
                continue
            x_TD = gpu_products.as_tensor(x).to(block.device)
            results.append(self.run_block(block, x_TD, named_TN, is_watched))
        self._show(results, observers)
        total = results[0].y_TD.to(x.device)
        for result in results[1:]:
            total = total + result.y_TD.to(x.device)
        return total if self.down_bias_D is None else total + self.down_bias_D

    def is_watched(self, observers: Observers) -> bool:
        return any(observers.want(name, self.layer) for name in SHOWN)

    def run_block(
        self, block: NeuronBlock, x_TD: Tensor, named_TN: Tensor | None, is_watched: bool
    ) -> BlockResult:
        """A block of neurons, on its device."""
        is_one = len(x_TD) == 1 and block.device.type == "cpu" and not self.gate.computes_all
        run = self._gathered if is_one else self._masked if is_watched else self._in_parts
        if block.is_by_output and (is_watched or not block.is_native):
            run = self._by_output
        return run(block, x_TD, named_TN)

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

    def _gathered(self, block: NeuronBlock, x_TD: Tensor, named_TN: Tensor | None) -> BlockResult:
        """One token on the CPU: reads the gates of all neurons, or of those named, and `up` and `down` of those that fire."""
        x_D = x_TD[0].contiguous()
        if named_TN is None:
            position, rows = None, block.row_N
            rows = None if rows is None else rows.to(torch.int32)
        else:
            position = named_TN[0].nonzero().flatten()
            rows = block.rows(position)
        gate_A = self._prepared(_dot(block.gate, x_D, rows))
        activated_A, fires_A = self.gate.act(gate_A)
        open_A = fires_A.nonzero().flatten()
        open_position = open_A if position is None else position[open_A]
        open_rows = block.rows(open_position)
        up = None if block.up is None else _dot(block.up, x_D, open_rows)
        hidden = self.gate.hidden(activated_A[open_A], up)
        y_D = block.down.combine(hidden, open_rows)
        self._count(block, len(gate_A), len(open_A))
        hidden_A = torch.zeros_like(gate_A).index_put_((open_A,), hidden)
        return BlockResult(
            y_TD=y_D[None], gate_TA=gate_A[None], hidden_TA=hidden_A[None], position_A=position
        )

    def _in_parts(self, block: NeuronBlock, x_TD: Tensor, named_TN: Tensor | None) -> BlockResult:
        """Any number of tokens, unobserved: in the C++ kernels if they support the block, otherwise
        one part of the neurons at a time, so that its values stay in the processor's cache."""
        y_TD = torch.zeros_like(x_TD)
        self._add_parts(y_TD, block, x_TD, named_TN)
        return BlockResult(y_TD=y_TD)

    def _is_streamed(self, cold: ColdNeurons, block: NeuronBlock, num_tokens: int) -> bool:
        """True if the block is streamed to a GPU; not in pieces of neurons if all gates are needed."""
        is_long = num_tokens >= cold.least_tokens
        return is_long and not self.gate.needs_all and cold.has(self.layer, block)

    def _streamed(
        self, cold: ColdNeurons, x: Tensor | Factor, named_TF: Tensor | None
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
                self.on_gpu(piece, factor, named_TN, y_TD)
            else:
                self._add_parts(y_TD, piece, x_TD, named_TN)

        cold.run(self.layer, add, x_TD, y_TD)
        return BlockResult(y_TD=y_TD)

    def _add_parts(
        self, y_TD: Tensor, block: NeuronBlock, x_TD: Tensor, named_TN: Tensor | None
    ) -> None:
        """Adds the output of a block."""
        if block.is_native:
            self.traffic.add(add_neurons(y_TD, block, self.gate, x_TD, named_TN))
            return
        count, size = len(block.id_N), part_neurons(x_TD.shape[1], len(x_TD))
        size = count if self.gate.needs_all else size
        for start in range(0, count, size):
            stop = min(start + size, count)
            named = None if named_TN is None else named_TN[:, start:stop]
            part = block if size >= count else block.part(start, stop)
            self._add_part(y_TD, part, x_TD, named)

    def on_gpu(
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
            self._count(part, stop - start, stop - start)
            y_TD = part.down.add_many(y_TD, hidden, part.row_N)
        return torch.zeros(len(x), block.width, device=block.device) if y_TD is None else y_TD

    def _add_part(
        self, y_TD: Tensor, part: NeuronBlock, x_TD: Tensor, named_TN: Tensor | None
    ) -> None:
        """Adds the output of these neurons; reads the rows that any token needs."""
        rows, position = part.row_N, None
        if named_TN is not None:
            position = self._chosen(part, named_TN)
            if position is not None:
                rows, named_TN = part.rows(position), named_TN[:, position]
        gate_TA = self._prepared(_product(part.gate, x_TD, rows))
        num_gates = gate_TA.shape[1]
        hidden_TA, _ = self.gate.act(gate_TA)
        if named_TN is not None:
            hidden_TA = hidden_TA * named_TN
        # Silent neurons are 0. NaN is not silent: it must reach the result.
        chosen = None if self.gate.computes_all else self._chosen(part, hidden_TA != 0)
        if chosen is not None:
            rows = chosen.to(torch.int32) if rows is None else rows[chosen]
            hidden_TA = hidden_TA[:, chosen]
        up_TA = None if part.up is None else _product(part.up, x_TD, rows)
        hidden_TA = self.gate.hidden(hidden_TA, up_TA)
        self._count(part, num_gates, hidden_TA.shape[1])
        part.down.add_many(y_TD, hidden_TA, rows)

    def _chosen(self, part: NeuronBlock, is_needed_TA: Tensor) -> Tensor | None:
        """Positions of the neurons that any token needs; None: take all of them."""
        chosen = is_needed_TA.any(dim=0).nonzero().flatten()
        return None if len(chosen) > MOST_CHOSEN * is_needed_TA.shape[1] else chosen

    def _masked(self, block: NeuronBlock, x_TD: Tensor, named_TN: Tensor | None) -> BlockResult:
        """Any number of tokens, keeping all values for observers: reads every row of the block
        once."""
        gate_TN = self._prepared(_product(block.gate, x_TD, block.row_N))
        up_TN = None if block.up is None else _product(block.up, x_TD, block.row_N)
        hidden_TN = self._hidden(block, gate_TN, up_TN, named_TN)
        if named_TN is not None:
            gate_TN = gate_TN.masked_fill(~named_TN, torch.nan)
        self._count(block, len(block.id_N), len(block.id_N))
        y_TD = block.down.combine_many(hidden_TN, block.row_N)
        return BlockResult(y_TD=y_TD, gate_TA=gate_TN, hidden_TA=hidden_TN, position_A=None)

    def _by_output(self, block: NeuronBlock, x_TD: Tensor, named_TN: Tensor | None) -> BlockResult:
        """Any number of tokens and all neurons, `down` stored by outputs: three products."""
        gate_TF = self._prepared(block.gate.apply(x_TD))
        up_TF = None if block.up is None else block.up.apply(x_TD)
        hidden_TF = self._hidden(block, gate_TF, up_TF, named_TN)
        up_bytes = 0 if block.up is None else block.up.weight.num_bytes
        self.traffic.add((block.gate.weight.num_bytes, up_bytes, block.down.num_bytes))
        y_TD = block.down.product(hidden_TF)
        return BlockResult(y_TD=y_TD, gate_TA=gate_TF, hidden_TA=hidden_TF, position_A=None)

    def _hidden(
        self, block: NeuronBlock, gate_TN: Tensor, up_TN: Tensor | None, named_TN: Tensor | None
    ) -> Tensor:
        """The inputs of `down` for all neurons of a block."""
        activated_TN, _ = self.gate.act(gate_TN)
        hidden_TN = self.gate.hidden(activated_TN, up_TN)
        if named_TN is not None:
            hidden_TN = hidden_TN * named_TN
        return hidden_TN

    def _prepared(self, gate_TN: Tensor) -> Tensor:
        """What the activation takes, from products with gates."""
        if self.gate.needs_all:
            assert gate_TN.shape[-1] == self.num_neurons, gate_TN.shape
        return self.gate.prepare(gate_TN)

    def _count(self, block: NeuronBlock, num_gates: int, num_fired: int) -> None:
        self.traffic.gate += num_gates * block.gate.weight.row_bytes
        if block.up is not None:
            self.traffic.up += num_fired * block.up.weight.row_bytes
        self.traffic.down += num_fired * block.down.row_bytes

    def _show(self, results: list[BlockResult], observers: Observers) -> None:
        """Passes the values of all blocks to observers, with neurons in the layer's order."""
        for name, unknown in SHOWN.items():
            if not observers.want(name, self.layer):
                continue
            if self.blocks[0].is_whole and results[0].position_A is None:
                result = results[0]
                part = result.gate_TA if name == "ffn_gate" else result.hidden_TA
                assert part is not None
                observers.show(name, self.layer, part)
                continue
            whole = results[0].y_TD.new_full((len(results[0].y_TD), self.num_neurons), unknown)
            for block, result in zip(self.blocks, results, strict=True):
                ids = block.id_N if result.position_A is None else block.id_N[result.position_A]
                part = result.gate_TA if name == "ffn_gate" else result.hidden_TA
                assert part is not None
                whole[:, ids.to(whole.device)] = part.to(whole.device)
            observers.show(name, self.layer, whole)


def _dot(linear: Linear, x_D: Tensor, rows_A: Tensor | None) -> Tensor:
    """f32 [A]: some rows (None: all) times one token."""
    y_A = linear.weight.dot(x_D, rows_A)
    if linear.bias_N is None:
        return y_A
    return y_A + (linear.bias_N if rows_A is None else linear.bias_N[rows_A])


def _product(linear: Linear, x: Tensor | Factor, rows_A: Tensor | None) -> Tensor:
    """f32 [T, A]: some rows (None: all) times several tokens."""
    y_TA = linear.weight.product(x, rows_A)
    if linear.bias_N is None:
        return y_TA
    return y_TA + (linear.bias_N if rows_A is None else linear.bias_N[rows_A])
