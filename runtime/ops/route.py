"""The router of a mixture of experts: in torch, as a struct for C++, and as a GPU's kernels.

Letters: T tokens, D hidden size, E experts, K experts of a token, G groups."""

from collections.abc import Mapping
from ctypes import Structure, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from hotsplit.model.route import CHOICE_BIAS, OWN_SCALES, Route
from hotsplit.runtime.ops.device import Launcher
from hotsplit.runtime.ops.structs import MatrixStruct, Structs, members
from hotsplit.runtime.weights.matrix import Linear

# In the order of step.h's enum.
GATINGS = ("softmax", "sigmoid", "softmax_of_chosen")
# Added to the sum by which weights are divided, as in transformers (modeling_glm4_moe.py): it only
# counts where sigmoids are all about zero.
LEAST_SUM = 1e-20


@dataclass(frozen=True, kw_only=True)
class Routed:
    """The experts of each token, the most probable first, and what their outputs are multiplied
    by."""

    id_TK: Tensor  # int64
    weight_TK: Tensor  # f32


@dataclass(frozen=True, kw_only=True)
class Router:
    """`spec` has the formula. In f32; of equal scores the lower index is chosen. `vectors`: its
    tensors of a number for each expert, by the names that `spec` gives."""

    spec: Route
    linear: Linear
    vectors: Mapping[str, Tensor]

    @property
    def choice_bias_E(self) -> Tensor | None:
        return self.vectors.get(CHOICE_BIAS)

    @property
    def scale_E(self) -> Tensor | None:
        return self.vectors.get(OWN_SCALES)

    def forward(self, x_TD: Tensor) -> Routed:
        spec, logit_TE = self.spec, self.linear.apply(x_TD)
        score_TE = _gated(logit_TE, spec)
        choice_TE = score_TE if self.choice_bias_E is None else score_TE + self.choice_bias_E
        if spec.num_groups > 1:
            choice_TE = choice_TE.masked_fill(~_in_groups(choice_TE, spec), -torch.inf)
        id_TK = _largest(choice_TE, spec.num_used)
        weight_TK = score_TE.gather(1, id_TK)
        if spec.gating == "softmax_of_chosen":
            weight_TK = weight_TK.softmax(dim=1)
        if spec.renormalises:
            weight_TK = weight_TK / (weight_TK.sum(dim=1, keepdim=True) + LEAST_SUM)
        weight_TK = weight_TK * spec.scale
        if self.scale_E is not None:
            weight_TK = weight_TK * self.scale_E[id_TK]
        return Routed(id_TK=id_TK, weight_TK=weight_TK)


def _gated(logit_TE: Tensor, spec: Route) -> Tensor:
    if spec.gating == "softmax":
        return logit_TE.softmax(dim=1)
    return logit_TE.sigmoid() if spec.gating == "sigmoid" else logit_TE


def _in_groups(choice_TE: Tensor, spec: Route) -> Tensor:
    """bool [T, E]: the experts of the groups whose two largest choices sum to most."""
    choice_TGE = choice_TE.unflatten(1, (spec.num_groups, -1))
    best_TG = choice_TGE.topk(2, dim=2).values.sum(dim=2)
    mask_TG = torch.zeros_like(best_TG, dtype=torch.bool)
    mask_TG.scatter_(1, _largest(best_TG, spec.num_used_groups), True)
    return mask_TG[:, :, None].expand_as(choice_TGE).flatten(1)


def _largest(value_TE: Tensor, count: int) -> Tensor:
    """The indices of the largest values of each row, the largest first; of equal ones the lower."""
    return value_TE.sort(dim=1, descending=True, stable=True).indices[:, :count]


def launch_route(
    on: Launcher,
    router: Router,
    x_D: Tensor,
    logit_E: Tensor,
    routed: Tensor,
    copy: Tensor | None = None,
) -> None:
    """Writes the experts of each row and their weights, f32 [2 K], and again to `copy` in pinned
    memory. `logit_E`: memory for the logits."""
    bias_E, scale_E = router.choice_bias_E, router.scale_E
    on.dot(router.linear, x_D, logit_E)
    on.launch(
        lambda: on.kernels.choose_experts(logit_E, bias_E, router.spec, routed, copy, scale_E),
        [logit_E, bias_E, scale_E],
        [routed, copy],
    )


class RouteStruct(Structure):
    _fields_ = [
        ("router", MatrixStruct),
        *members(c_void_p, "choice_bias own_scale"),
        *members(c_int64, "num_used num_groups num_used_groups"),
        *members(c_int32, "gating renormalises"),
        ("scale", c_float),
        ("unused", c_int32),
    ]


def route_struct(structs: Structs, router: Router | None) -> RouteStruct:
    if router is None:
        return RouteStruct()
    spec = router.spec
    return RouteStruct(
        router=structs.linear(router.linear),
        choice_bias=structs.vector(router.choice_bias_E, spec.num_experts),
        own_scale=structs.vector(router.scale_E, spec.num_experts),
        num_used=spec.num_used,
        num_groups=spec.num_groups,
        num_used_groups=spec.num_used_groups,
        gating=GATINGS.index(spec.gating),
        renormalises=spec.renormalises,
        scale=spec.scale,
    )
