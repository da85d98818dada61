"""What the kernels for experts compute, in a step on a GPU, and their float64 reference. The rules of all
kernels are in kernels.py.

Letters: E experts of the layer, K experts of a row, F neurons of an expert, N rows of a matrix, D
width, S partial sums of an expert, P those of all."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from hotsplit.model.route import Route
from hotsplit.runtime.kernels.gate import Gate
from hotsplit.runtime.kernels.gpu import reference
from hotsplit.runtime.kernels.gpu.step_rows import by_rows
from hotsplit.runtime.kernels.stored import StoredMatrix


class ChooseExperts(Protocol):
    def __call__(
        self,
        logit_E: Tensor,
        choice_bias_E: Tensor | None,
        spec: Route,
        routed_2K: Tensor,
        copy_2K: Tensor | None = None,
        scale_E: Tensor | None = None,
    ) -> None:
        """Writes the numbers of the experts that a router chooses, as f32, and then their weights,
        by the formula of hotsplit.model.spec.Route; of equal choices the lower number, NaN last.
        `copy_2K`: the same again, for example in pinned memory of the host."""


class ExpertGateUp(Protocol):
    def __call__(
        self,
        gate: StoredMatrix,
        gate_bias_N: Tensor | None,
        up: StoredMatrix | None,
        up_bias_N: Tensor | None,
        place_E: Tensor | None,
        routed_2K: Tensor,
        x_D: Tensor,
        rule: Gate,
        hidden_KF: Tensor,
    ) -> None:
        """The hidden values, as of GateUp, of each chosen expert: those of the F rows that begin at
        row F * place_E[expert] of the matrices. `place_E`, int32: below 0, the expert is elsewhere,
        and its hidden values are 0; None: the place is the expert's number."""


class ExpertDown(Protocol):
    def __call__(
        self,
        down: StoredMatrix,
        bias_N: Tensor | None,
        place_E: Tensor | None,
        routed_2K: Tensor,
        hidden_KF: Tensor,
        parts_PD: Tensor,
        *,
        is_by_output: bool,
        skips_zeros: bool = False,
    ) -> None:
        """Row k of `parts_PD` is the weight of the k-th chosen expert times (W hidden + bias), where W
        has the D rows that begin at row D * place_E[expert]; 0 if the expert is elsewhere.

        Unless `is_by_output`, W has a row for each of the F neurons, and S rows of `parts_PD` are
        partial sums of an expert, as of Down; the first has the bias. `add_norm` adds the parts."""


@by_rows
def choose_experts(
    logit_E: Tensor,
    choice_bias_E: Tensor | None,
    spec: Route,
    routed_2K: Tensor,
    copy_2K: Tensor | None = None,
    scale_E: Tensor | None = None,
) -> None:
    score_E = logit_E.double()
    if spec.gating == "softmax":
        score_E = score_E.softmax(dim=0)
    elif spec.gating == "sigmoid":
        score_E = score_E.sigmoid()
    choice_E = score_E if choice_bias_E is None else score_E + choice_bias_E
    choice_E = choice_E.nan_to_num(nan=-torch.inf, posinf=torch.inf)
    if spec.num_groups > 1:
        choice_GE = choice_E.view(spec.num_groups, -1)
        sum_G = choice_GE.topk(2, dim=1).values.sum(dim=1)
        is_used_G = torch.zeros(spec.num_groups, dtype=torch.bool, device=sum_G.device)
        is_used_G[_largest(sum_G, spec.num_used_groups)] = True
        choice_E = choice_GE.masked_fill(~is_used_G[:, None], -torch.inf).flatten()
    id_K = _largest(choice_E, spec.num_used)
    weight_K = score_E[id_K]
    if spec.gating == "softmax_of_chosen":
        weight_K = weight_K.softmax(dim=0)
    if spec.renormalises:
        weight_K = weight_K / (weight_K.sum() + 1e-20)
    weight_K = weight_K * spec.scale * (1.0 if scale_E is None else scale_E[id_K])
    routed_2K.copy_(torch.cat([id_K, weight_K]))
    if copy_2K is not None:
        copy_2K.copy_(routed_2K)


def _largest(value_E: Tensor, count: int) -> Tensor:
    """The indices of the largest values, the largest first; of equal ones the lower."""
    return value_E.sort(descending=True, stable=True).indices[:count]


@by_rows
def expert_gate_up(
    gate: StoredMatrix,
    gate_bias_N: Tensor | None,
    up: StoredMatrix | None,
    up_bias_N: Tensor | None,
    place_E: Tensor | None,
    routed_2K: Tensor,
    x_D: Tensor,
    rule: Gate,
    hidden_KF: Tensor,
) -> None:
    hidden_KF.zero_()
    count = hidden_KF.shape[1]
    for number, place in _stored(place_E, routed_2K):
        biases = (
            None if b is None else b[place * count :][:count] for b in (gate_bias_N, up_bias_N)
        )
        gate_bias_F, up_bias_F = biases
        reference.gate_up(
            _of_expert(gate, place, count),
            gate_bias_F,
            None if up is None else _of_expert(up, place, count),
            up_bias_F,
            None,
            None,
            x_D,
            rule,
            hidden_KF[number],
        )


@by_rows
def expert_down(
    down: StoredMatrix,
    bias_N: Tensor | None,
    place_E: Tensor | None,
    routed_2K: Tensor,
    hidden_KF: Tensor,
    parts_PD: Tensor,
    *,
    is_by_output: bool,
    skips_zeros: bool = False,
) -> None:
    num_used, width = len(hidden_KF), parts_PD.shape[1]
    parts_KSD = torch.zeros(num_used, len(parts_PD) // num_used, width, dtype=torch.float64)
    for number, place in _stored(place_E, routed_2K):
        part_SD, hidden_F = parts_KSD[number], hidden_KF[number]
        if is_by_output:
            part_SD[0] = reference.product(_of_expert(down, place, width), None, hidden_F)
        else:
            own = _of_expert(down, place, len(hidden_F))
            reference.down(own, hidden_F, part_SD, skips_zeros=skips_zeros)
        if bias_N is not None:
            part_SD[0] += bias_N[place * width :][:width].to(part_SD.device)
        part_SD *= float(routed_2K[num_used + number])
    parts_PD.copy_(parts_KSD.flatten(0, 1))


def _stored(place_E: Tensor | None, routed_2K: Tensor) -> Iterator[tuple[int, int]]:
    """The chosen experts that are stored: (number among the chosen, place)."""
    for number, expert in enumerate(routed_2K[: len(routed_2K) // 2].long().tolist()):
        place = expert if place_E is None else int(place_E[expert])
        if place >= 0:
            yield number, place


def _of_expert(matrix: StoredMatrix, place: int, num_rows: int) -> StoredMatrix:
    return replace(matrix, data=matrix.data[place * num_rows :][:num_rows])
