"""The router of a mixture of experts: as a struct for C++, and as a GPU's kernels.

Letters: D hidden size, E experts, K experts of a token."""

from collections.abc import Mapping
from ctypes import Structure, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass

from torch import Tensor

from hotsplit.model.route import CHOICE_BIAS, OWN_SCALES, Route
from hotsplit.runtime.ops.device import Launcher
from hotsplit.runtime.ops.structs import MatrixStruct, Structs, members
from hotsplit.runtime.weights.matrix import Linear

# In the order of step.h's enum.
GATINGS = ("softmax", "sigmoid", "softmax_of_chosen")


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
    choose, bias_E = on.kernels.choose_experts, router.choice_bias_E
    on.dot(router.linear, x_D, logit_E)
    on.run(choose, logit_E, bias_E, router.spec, routed, copy, router.scale_E)


class RouteStruct(Structure):
    _fields_ = [
        ("router", MatrixStruct),
        *members(c_void_p, "choice_bias own_scale"),
        *members(c_int64, "num_used num_groups num_used_groups"),
        *members(c_int32, "gating renormalises"),
        ("scale", c_float),
        ("groups_by_largest", c_int32),
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
        groups_by_largest=spec.groups_by_largest,
    )
