"""Choices of experts in comparisons with a reference.

Two right computations of a router's scores differ by rounding, so where the last expert that is
taken and the first that is left are a near tie, they may take different ones. From there on
everything differs: later layers and, through attention, later tokens. So the reference follows the
choices of what it is compared with wherever its own scores leave them open; then all values can be
compared. A choice that they do not leave open is a fault.

Letters: T tokens, E experts, K experts of a token, N experts or groups of experts, C of them
taken."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hotsplit.model.route import Route
from hotsplit.model.spec import ModelSpec

_ROUNDING = 8 * torch.finfo(torch.float32).eps  # of two scores, relative to the largest
_TOP, _SORTED = torch.ops.aten.topk.default, torch.ops.aten.sort.stable


@dataclass(frozen=True, kw_only=True)
class Fault:
    """The scores of the reference for experts that it has taken and that were taken instead are
    `gap` apart; at most `tie` would be one."""

    layer: int
    token: int
    got: tuple[int, ...]
    wanted: tuple[int, ...]
    gap: float
    tie: float

    def __str__(self) -> str:
        got, wanted = (", ".join(map(str, ids)) for ids in (self.got, self.wanted))
        return (
            f"the router of layer {self.layer} chooses experts {got} for token {self.token}, not"
            f" {wanted}, whose scores are {self.gap:.1e} higher (a tie within rounding is up to"
            f" {self.tie:.1e})"
        )


class _Choices(TorchDispatchMode, ABC):
    """Within its `with` block, the choices of routers in torch are those of `_taken`.

    All tokens run in order, in one pass or several. Each router takes the largest of scores [T, E]
    once, by topk or by a stable sort, as those of transformers and of runtime.ops.route do, and
    with groups first the largest of [T, G]."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        routes = ((i, layer.route) for i, layer in enumerate(spec.layers))
        self._routes = [(layer, route) for layer, route in routes if route is not None]
        self._router, self._start = 0, 0  # the next router, and the first token of the pass

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        found = function(*args, **(kwargs or {}))
        if function not in (_TOP, _SORTED) or args[0].dim() != 2:
            return found
        score_TN, indices = args[0], found[1]
        _, route = self._routes[self._router]
        is_last = score_TN.shape[1] == route.num_experts
        count = route.num_used if is_last else route.num_used_groups
        is_choice = is_last or (route.num_groups > 1 and score_TN.shape[1] == route.num_groups)
        if not is_choice or (function is _TOP and args[1] != count) or self._is_over(len(score_TN)):
            return found
        taken_TC = self._taken(score_TN, indices[:, :count], is_last=is_last)
        if is_last:
            self._router = (self._router + 1) % len(self._routes)
            self._start += 0 if self._router else len(score_TN)
        if function is _SORTED:
            is_rest = ~_are_in(taken_TC, score_TN).gather(1, indices)
            rest_TN = indices[is_rest].view(len(score_TN), -1)
            taken_TC = torch.cat([taken_TC, rest_TN], dim=1)
        return score_TN.gather(1, taken_TC), taken_TC

    def _is_over(self, num_tokens: int) -> bool:
        """True after the last token, when other values of this shape may be sorted."""
        return False

    @abstractmethod
    def _taken(self, score_TN: Tensor, own_TC: Tensor, *, is_last: bool) -> Tensor:
        """The experts or, unless `is_last`, the groups that are taken, where the router takes
        `own_TC`."""


class Followed(_Choices):
    """The routers of a reference take the experts `id_LTK` where their own scores are within
    `bound`, relative to the largest of a token or to their spread, of a choice of these.
    `is_complete` says afterwards whether all did."""

    def __init__(self, spec: ModelSpec, id_LTK: Sequence[Tensor], bound: float) -> None:
        super().__init__(spec)
        self._id_LTK, self._bound = id_LTK, bound
        self._spread: dict[tuple[int, int], float] = {}  # of scores, by router and their number
        self.num_ties = 0
        self.fault: Fault | None = None  # the first

    @property
    def num_choices(self) -> int:
        return sum(len(id_TK) for id_TK in self._id_LTK)

    @property
    def is_complete(self) -> bool:
        return self._start == len(self._id_LTK[0]) and self._router == 0

    def _is_over(self, num_tokens: int) -> bool:
        return self._start + num_tokens > len(self._id_LTK[0])

    def _taken(self, score_TN: Tensor, own_TC: Tensor, *, is_last: bool) -> Tensor:
        """The given choices where the scores leave them open, else the own ones."""
        layer, route = self._routes[self._router]
        given_TC = self._id_LTK[self._router][self._start :][: len(score_TN)].to(score_TN.device)
        given_TC = given_TC if is_last else _groups_of(given_TC, score_TN, route)
        is_given, is_own = _are_in(given_TC, score_TN), _are_in(own_TC, score_TN)
        gap_T, tie_T = _gap(score_TN, is_given), self._tie(score_TN)
        is_other, is_open = (is_given != is_own).any(1), gap_T <= tie_T
        self.num_ties += int((is_other & is_open).sum())
        faults = (is_other & ~is_open).nonzero()
        if self.fault is None and len(faults):
            t = int(faults[0])
            self.fault = Fault(
                layer=layer,
                token=self._start + t,
                got=_ids(is_given[t] & ~is_own[t]),
                wanted=_ids(is_own[t] & ~is_given[t]),
                gap=float(gap_T[t]),
                tie=float(tie_T[t]),
            )
        return torch.where(is_open[:, None], given_TC, own_TC)

    def _tie(self, score_TN: Tensor) -> Tensor:
        """The largest gap that rounding explains, f32 [T]: both scores may be off by `bound` of the
        largest or, if that is less, of the spread of this router's scores so far, and by a few ulp.
        Scores that are all but equal, or that share a large bias, are thus no ties for that
        alone."""
        is_score = score_TN.isfinite() & (score_TN != 0)  # of groups that are taken
        highest_T = score_TN.masked_fill(~is_score, -torch.inf).amax(1)
        lowest_T = score_TN.masked_fill(~is_score, torch.inf).amin(1)
        router = self._router, score_TN.shape[1]
        spread = max(self._spread.get(router, 0.0), float((highest_T - lowest_T).max()))
        self._spread[router] = spread
        largest_T = _largest(score_TN)
        return 2 * self._bound * largest_T.clamp(max=spread) + _ROUNDING * largest_T


Place = tuple[int, int]  # the number of a router, and a token


class Swapped(_Choices):
    """At the places `swaps`, the first expert that is left takes the place of the last that is
    taken. `near` are the places where that is a tie within `bound`, of tokens from `first` on."""

    def __init__(
        self, spec: ModelSpec, swaps: Collection[Place], bound: float, *, first: int = 0
    ) -> None:
        super().__init__(spec)
        self._swaps, self._bound, self._first = swaps, bound, first
        self.near: list[Place] = []

    def _taken(self, score_TN: Tensor, own_TC: Tensor, *, is_last: bool) -> Tensor:
        if not is_last:
            return own_TC
        is_own = _are_in(own_TC, score_TN)
        last_T = score_TN.gather(1, own_TC).argmin(1)
        next_T = score_TN.masked_fill(is_own, -torch.inf).argmax(1)
        is_tie_T = -_gap(score_TN, is_own) <= 2 * self._bound * _largest(score_TN)
        taken_TC = own_TC.clone()
        for t in range(max(0, self._first - self._start), len(score_TN)):
            place = self._router, self._start + t
            if bool(is_tie_T[t]):
                self.near.append(place)
            if place in self._swaps:
                taken_TC[t, last_T[t]] = next_T[t]
        return taken_TC


def _gap(score_TN: Tensor, is_taken: Tensor) -> Tensor:
    """How far the best score that is not taken is above the worst that is, f32 [T]."""
    lowest_T = score_TN.masked_fill(~is_taken, torch.inf).amin(1)
    return score_TN.masked_fill(is_taken, -torch.inf).amax(1) - lowest_T


def _largest(score_TN: Tensor) -> Tensor:
    """Largest magnitudes of a token's scores, f32 [T]."""
    return score_TN.masked_fill(score_TN.isinf(), 0.0).abs().amax(1)


def _are_in(id_TC: Tensor, score_TN: Tensor) -> Tensor:
    """bool [T, N]."""
    return torch.zeros_like(score_TN, dtype=torch.bool).scatter_(1, id_TC, True)


def _ids(is_in_N: Tensor) -> tuple[int, ...]:
    return tuple(is_in_N.nonzero().flatten().tolist())


def _groups_of(id_TK: Tensor, score_TG: Tensor, route: Route) -> Tensor:
    """The groups of these experts, and, if there are fewer than a token has, the best of the
    others."""
    is_in = _are_in(id_TK // (route.num_experts // route.num_groups), score_TG)
    best_TG = score_TG.masked_fill(is_in, torch.inf)
    return best_TG.sort(dim=1, descending=True).indices[:, : route.num_used_groups]
