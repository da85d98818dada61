"""What the kernels for experts compute, in a step on a GPU. The rules of all kernels are in kernels.py.

Letters: E experts of the layer, K experts of a row, F neurons of an expert, N rows of a matrix, D
width, S partial sums of an expert, P those of all."""

from typing import Protocol

from torch import Tensor

from hotsplit.model.route import Route
from hotsplit.runtime.kernels.gate import Gate
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
