"""The experts of a layer over a prompt's tokens, on a GPU: all tokens of a pass against each expert
once. A product is one launch over the pairs of a token and one of its experts, sorted by expert.

Each pair's output has a row of its own, and a token's rows are added in the order in which its router
chose them; then the sum of those that the CPU computes. Which these are depends on the other tokens of
the pass, so that a token's result may differ by the rounding of the devices.

Letters: T tokens, K experts of a token, P = T K pairs, E experts, A some experts, F neurons of an
expert, D model width."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from hotsplit.costs.pass_parts import expert_part_pairs
from hotsplit.runtime.kernels.gate import Gate
from hotsplit.runtime.kernels.gpu.expert_pairs import SMALL_TILE, Pairs, Part, pairs_of
from hotsplit.runtime.ops.route import Routed
from hotsplit.runtime.weights import gpu_products
from hotsplit.runtime.weights.expert_block import ExpertBlock
from hotsplit.runtime.weights.gpu_products import Factor
from hotsplit.runtime.weights.neuron_block import by_role

if TYPE_CHECKING:
    from hotsplit.runtime.prefill.expert_stream import ExpertStream


@dataclass(frozen=True, kw_only=True)
class Choices:
    """What the routers of a pass have chosen, on the host: `pair_P` are the pairs K * token + k sorted by
    expert, those of expert e from start_E[e] on, count_E[e] of them."""

    pair_P: np.ndarray
    start_E: np.ndarray
    count_E: np.ndarray
    num_tokens: int
    num_used: int

    @classmethod
    def of(cls, id_TK: Tensor, num_experts: int) -> "Choices":
        """Waits for the device."""
        id_P = id_TK.cpu().numpy().ravel().astype(np.int16)  # sorted by digits
        count_E = np.bincount(id_P, minlength=num_experts)
        return cls(
            pair_P=np.argsort(id_P, kind="stable"),
            start_E=np.cumsum(count_E) - count_E,
            count_E=count_E,
            num_tokens=len(id_TK),
            num_used=id_TK.shape[1],
        )

    def pairs(self, expert: int) -> np.ndarray:
        return self.pair_P[self.start_E[expert] :][: self.count_E[expert]]

    def in_parts(self, expert_A: np.ndarray, most: int) -> Iterator[np.ndarray]:
        """The chosen ones of some experts, in parts of at most `most` pairs, or of one expert."""
        part: list[int] = []
        number = 0
        for expert in expert_A[self.count_E[expert_A] > 0].tolist():
            if part and number + self.count_E[expert] > most:
                yield np.array(part)
                part, number = [], 0
            part.append(expert)
            number += int(self.count_E[expert])
        if part:
            yield np.array(part)

    def on(self, device: torch.device, parts: Sequence[tuple[np.ndarray, Part]]) -> list[Pairs]:
        """The pairs of parts, given with their experts."""
        if not parts:
            return []
        pair_P = np.concatenate([self.pairs(expert) for part, _ in parts for expert in part])
        return pairs_of([part for _, part in parts], pair_P, self.num_used, device)


def run_experts(
    block: ExpertBlock, gate: Gate, x: Factor, pairs: Pairs, weight_P: Tensor, y_PD: Tensor
) -> None:
    """Writes the outputs of these pairs, times their weights, to their rows of `y_PD`."""
    own, down, num_neurons = block.gate.flat, block.down.flat, len(block.id_F)
    up = None if block.up is None else block.up.flat

    gate_PF = gpu_products.multiply_experts(own.weight, own.bias_N, x, pairs, num_neurons)
    up_PF = None
    if up is not None:
        up_PF = gpu_products.multiply_experts(up.weight, up.bias_N, x, pairs, num_neurons)
    dtype = gpu_products.tile_dtype(down.weight.kind)
    hidden = gpu_products.hidden_values(gate, gate_PF, up_PF, None, dtype)
    del gate_PF, up_PF
    gpu_products.multiply_experts_down(
        down.weight, down.bias_N, hidden, pairs, weight_P, y_PD, is_by_output=block.is_by_output
    )


def device_of(
    blocks: Sequence[ExpertBlock], cold: "ExpertStream | None", num_tokens: int
) -> torch.device | None:
    """The GPU that computes experts of a layer, or None."""
    hot, _ = by_role(blocks)
    if hot is not None and gpu_products.is_gpu(hot.device):
        return hot.device
    return None if cold is None or num_tokens < cold.least_tokens else cold.device


@dataclass(frozen=True, kw_only=True)
class ExpertPass:
    """The experts of a layer on a GPU: those stored there, and of the others those that `cold` streams to
    it; the CPU computes the rest meanwhile by `run_on_cpu`, given a block and the tokens."""

    layer: int
    blocks: tuple[ExpertBlock, ...]
    gate: Gate
    cold: "ExpertStream | None"
    device: torch.device
    is_input_small: bool
    run_on_cpu: Callable[[Sequence[ExpertBlock], Tensor, Routed], Tensor]

    def run(self, x_TD: Tensor, routed: Routed) -> Tensor:
        """Output [T, D] on the GPU."""
        hot, cold = by_role(self.blocks)
        choices = Choices.of(routed.id_TK, self.blocks[0].num_experts)
        streamed, on_cpu = self._divided(choices, cold)
        weight_P, x_host, routed_host = routed.weight_TK.flatten(), None, routed
        if len(on_cpu):  # before launches, for which these copies would wait
            x_host = x_TD.cpu()
            routed_host = Routed(id_TK=routed.id_TK.cpu(), weight_TK=routed.weight_TK.cpu())
        x_TD, weight_P = x_TD.to(self.device), weight_P.to(self.device)
        stored = [] if hot is None else self._parts(choices, np.flatnonzero(hot.places >= 0))
        count_E = choices.count_E
        pairs = choices.on(
            self.device,
            [
                *(
                    (part, Part(place_A=hot.places[part], count_A=count_E[part]))
                    for part in stored
                    if hot is not None
                ),
                *(
                    (
                        part,
                        Part(
                            place_A=np.arange(len(part)),
                            count_A=count_E[part],
                            most_of_tile=SMALL_TILE,
                        ),
                    )
                    for part in streamed
                ),
            ],
        )
        x = Factor.of(x_TD, is_small=self.is_input_small)
        new = torch.zeros if len(on_cpu) else torch.empty
        y_PD = new(weight_P.numel(), x_TD.shape[1], device=self.device)
        for own in pairs[: len(stored)]:
            assert hot is not None
            run_experts(hot, self.gate, x, own, weight_P, y_PD)
        if self.cold is not None and len(x_TD) >= self.cold.least_tokens:
            self.cold.run(
                self.layer,
                streamed,
                lambda number, block: run_experts(
                    block, self.gate, x, pairs[len(stored) + number], weight_P, y_PD
                ),
                x_TD,
                y_PD,
            )
        host_TD = None
        if cold is not None and x_host is not None:  # while the GPU computes
            place_E = np.where(np.isin(np.arange(cold.num_experts), on_cpu), cold.places, -1)
            some = replace(cold, place_E=torch.from_numpy(place_E.astype(np.int32)))
            host_TD = self.run_on_cpu([some], x_host, routed_host)
        y_TD = y_PD.view(choices.num_tokens, choices.num_used, -1).sum(dim=1)
        if host_TD is not None:
            y_TD += host_TD.to(self.device)
        return y_TD

    def _divided(
        self, choices: Choices, cold: ExpertBlock | None
    ) -> tuple[list[np.ndarray], np.ndarray]:
        """(parts of the cold experts that are streamed, the others that have tokens)."""
        if cold is None:
            return [], np.zeros(0, np.int64)
        expert_A = np.flatnonzero((cold.places >= 0) & (choices.count_E > 0))
        if self.cold is None or choices.num_tokens < self.cold.least_tokens:
            return [], expert_A
        streamed_A = self.cold.chosen(self.layer, expert_A, choices.count_E[expert_A])
        most = self.cold.most_experts
        parts = [
            part[start : start + most]
            for part in self._parts(choices, streamed_A)
            for start in range(0, len(part), most)
        ]
        return parts, np.setdiff1d(expert_A, streamed_A)

    def _parts(self, choices: Choices, expert_A: np.ndarray) -> list[np.ndarray]:
        most = expert_part_pairs(choices.num_tokens, len(self.blocks[0].id_F))
        return list(choices.in_parts(expert_A, most))
