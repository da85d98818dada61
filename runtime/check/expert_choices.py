"""Choices of experts in comparisons with a reference.

Two right computations of a router's scores differ by rounding, so where the last expert that is taken and the
first that is left are a near tie, they may take different ones. From there on everything differs: later layers
and, through attention, later tokens. So the reference follows the choices of what it is compared with wherever
its own scores leave them open; then all values can be compared. A choice that they do not leave open is a fault.

Letters: T tokens, E experts, K experts of a token, N experts or groups of experts, C of them taken."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hotsplit.model.route import Route
from hotsplit.model.spec import ModelSpec

_TOP, _SORTED = torch.ops.aten.topk.default, torch.ops.aten.sort.stable


@dataclass(frozen=True, kw_only=True)
class Fault:
    """The scores of the reference for experts that it has taken and that were taken instead are `gap` apart;
    at most `tie` would be one."""

    layer: int
    token: int
    got: tuple[int, ...]
    wanted: tuple[int, ...]
    gap: float
    tie: float

    def __str__(self) -> str:
        got, wanted = (", ".join(map(str, ids)) for ids in (self.got, self.wanted))
        return (
            f"the router of layer {self.layer} chooses experts {got} for token {self.token}, not {wanted},"
            f" whose scores are {self.gap:.1e} higher (a tie within rounding is up to {self.tie:.1e})"
        )


class Followed(TorchDispatchMode):
    """Within its `with` block, the routers of a reference take the experts `id_LTK` where their own scores are
    within `bound`, relative to the largest of a token, of a choice of these.

    The reference runs all tokens in order, in one pass or several, in torch: each router takes the largest of
    scores [T, E] once, by topk or by a stable sort, as those of transformers and of runtime.ops.route do, and
    with groups first the largest of [T, G]. `is_complete` says afterwards whether all routers did."""

    def __init__(self, spec: ModelSpec, id_LTK: Sequence[Tensor], bound: float) -> None:
        super().__init__()
        routes = ((i, layer.route) for i, layer in enumerate(spec.layers))
        self._routes = [(layer, route) for layer, route in routes if route is not None]
        self._id_LTK, self._bound = id_LTK, bound
        self._next, self._start = 0, 0  # router, and first token of the pass
        self.num_ties = 0
        self.fault: Fault | None = None  # the first

    @property
    def num_choices(self) -> int:
        return sum(len(id_TK) for id_TK in self._id_LTK)

    @property
    def is_complete(self) -> bool:
        return self._start == len(self._id_LTK[0]) and self._next == 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        found = function(*args, **(kwargs or {}))
        if function not in (_TOP, _SORTED) or args[0].dim() != 2:
            return found
        score_TN, indices = args[0], found[1]
        layer, route = self._routes[self._next]
        is_last = score_TN.shape[1] == route.num_experts
        count = route.num_used if is_last else route.num_used_groups
        is_choice = is_last or (route.num_groups > 1 and score_TN.shape[1] == route.num_groups)
        stop = self._start + len(score_TN)
        if not is_choice or stop > len(self._id_LTK[0]) or (function is _TOP and args[1] != count):
            return found
        given_TC = self._id_LTK[self._next][self._start : stop].to(score_TN.device)
        if not is_last:
            given_TC = _groups_of(given_TC, score_TN, route)
        taken_TC = self._taken(layer, score_TN, given_TC, indices[:, :count])
        if is_last:
            self._next = (self._next + 1) % len(self._routes)
            self._start = self._start if self._next else stop
        if function is _SORTED:
            is_rest = ~_are_in(taken_TC, score_TN).gather(1, indices)
            rest_TN = indices[is_rest].view(len(score_TN), -1)
            taken_TC = torch.cat([taken_TC, rest_TN], dim=1)
        return score_TN.gather(1, taken_TC), taken_TC

    def _taken(self, layer: int, score_TN: Tensor, given_TC: Tensor, own_TC: Tensor) -> Tensor:
        """The given choices where the scores leave them open, else the own ones."""
        is_given, is_own = _are_in(given_TC, score_TN), _are_in(own_TC, score_TN)
        lowest_T = score_TN.masked_fill(~is_given, torch.inf).amin(1)
        gap_T = score_TN.masked_fill(is_given, -torch.inf).amax(1) - lowest_T
        largest_T = score_TN.masked_fill(score_TN.isinf(), 0.0).abs().amax(1)
        tie_T = 2 * self._bound * largest_T
        is_other, is_open = (is_given != is_own).any(1), gap_T <= tie_T
        self.num_ties += int((is_other & is_open).sum())
        faults = (is_other & ~is_open).nonzero()
        if self.fault is None and len(faults):
            t = int(faults[0])
            self.fault = Fault(
                layer=layer, token=self._start + t, got=_ids(is_given[t] & ~is_own[t]),
                wanted=_ids(is_own[t] & ~is_given[t]), gap=float(gap_T[t]), tie=float(tie_T[t]),
            )  # fmt: skip
        return torch.where(is_open[:, None], given_TC, own_TC)


def _are_in(id_TC: Tensor, score_TN: Tensor) -> Tensor:
    """bool [T, N]."""
    return torch.zeros_like(score_TN, dtype=torch.bool).scatter_(1, id_TC, True)


def _ids(is_in_N: Tensor) -> tuple[int, ...]:
    return tuple(is_in_N.nonzero().flatten().tolist())


def _groups_of(id_TK: Tensor, score_TG: Tensor, route: Route) -> Tensor:
    """The groups of these experts, and, if there are fewer than a token has, the best of the others."""
    is_in = _are_in(id_TK // (route.num_experts // route.num_groups), score_TG)
    best_TG = score_TG.masked_fill(is_in, torch.inf)
    return best_TG.sort(dim=1, descending=True).indices[:, : route.num_used_groups]
