"""Chooses the experts of a step's rows from their routers' logits.

Letters: E experts of the layer, K experts of a row, T rows of a step; in the kernels G groups of
experts."""

import torch
from torch import Tensor

from hotsplit.model.route import Route
from hotsplit.runtime.kernels.gpu.gpu_kernel import Versions, gpu_kernel
from hotsplit.runtime.kernels.gpu.language import tl, triton
from hotsplit.runtime.kernels.gpu.launch import NUM_WARPS, power_of_2, step_rows


@gpu_kernel(reads=("logit_E",), writes=("routed_2K", "copy_2K"), takes_rows=True)
def choose_experts(
    logit_E: Tensor,
    choice_bias_E: Tensor | None,
    spec: Route,
    routed_2K: Tensor,
    copy_2K: Tensor | None = None,
    scale_E: Tensor | None = None,
) -> Versions:
    """Writes the numbers of the experts that a router chooses, as f32, and then their weights, by
    the formula of hotsplit.model.spec.Route; of equal choices the lower number, NaN last.
    `copy_2K`: the same again, for example in pinned memory of the host."""

    def reference() -> None:
        score_TE = logit_E.double().view(-1, spec.num_experts)
        if spec.gating == "softmax":
            score_TE = score_TE.softmax(dim=1)
        elif spec.gating == "sigmoid":
            score_TE = score_TE.sigmoid()
        choice_TE = score_TE if choice_bias_E is None else score_TE + choice_bias_E
        choice_TE = choice_TE.nan_to_num(nan=-torch.inf, posinf=torch.inf)
        if spec.num_groups > 1:
            choice_TGE = choice_TE.unflatten(1, (spec.num_groups, -1))
            num_best = 1 if spec.groups_by_largest else 2
            sum_TG = choice_TGE.topk(num_best, dim=2).values.sum(dim=2)
            is_used_TG = torch.zeros_like(sum_TG, dtype=torch.bool)
            is_used_TG.scatter_(1, _largest(sum_TG, spec.num_used_groups), True)
            choice_TE = choice_TGE.masked_fill(~is_used_TG[:, :, None], -torch.inf).flatten(1)
        id_TK = _largest(choice_TE, spec.num_used)
        weight_TK = score_TE.gather(1, id_TK)
        if spec.gating == "softmax_of_chosen":
            weight_TK = weight_TK.softmax(dim=1)
        if spec.renormalises:
            # As in transformers (modeling_glm4_moe.py), which counts where all are about zero.
            weight_TK = weight_TK / (weight_TK.sum(dim=1, keepdim=True) + 1e-20)
        weight_TK = weight_TK * spec.scale * (1.0 if scale_E is None else scale_E[id_TK])
        routed_2K.copy_(torch.cat([id_TK, weight_TK], dim=1).view_as(routed_2K))
        if copy_2K is not None:
            copy_2K.copy_(routed_2K)

    def launch() -> None:
        num_experts, num_used = spec.num_experts, spec.num_used
        assert logit_E.shape[-1] == num_experts and routed_2K.shape[-1] == 2 * num_used, spec
        for each in (logit_E, routed_2K, copy_2K):
            assert each is None or each.is_contiguous(), each.stride()
        assert copy_2K is None or copy_2K.shape == routed_2K.shape, (copy_2K.shape, routed_2K.shape)
        block = power_of_2(num_experts)
        _choose_experts[(step_rows(logit_E),)](
            logit_E,
            choice_bias_E,
            routed_2K,
            copy_2K,
            scale_E,
            spec.scale,
            NUM_EXPERTS=num_experts,
            BLOCK=block,
            NUM_USED=num_used,
            USED_BLOCK=power_of_2(num_used),
            NUM_GROUPS=spec.num_groups,
            NUM_USED_GROUPS=spec.num_used_groups,
            GROUPS_BLOCK=power_of_2(spec.num_groups),
            BY_LARGEST=spec.groups_by_largest,
            GATING=spec.gating,
            RENORMALISES=spec.renormalises,
            num_warps=max(1, min(NUM_WARPS, block // 32)),
        )

    return reference, launch


def _largest(value_TE: Tensor, count: int) -> Tensor:
    """The indices of the largest values of each row, the largest first; of equal ones the lower."""
    return value_TE.sort(dim=1, descending=True, stable=True).indices[:, :count]


@triton.jit
def _first_largest(value_E, column_E, SIZE: tl.constexpr):
    """The index of the largest value; of equal ones the first."""
    is_largest_E = value_E == tl.max(value_E, axis=0)
    return tl.min(tl.where(is_largest_E, column_E, SIZE - 1), axis=0)


@triton.jit
def _in_groups(
    choice_E,
    column_E,
    NUM_EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    NUM_USED_GROUPS: tl.constexpr,
    GROUPS_BLOCK: tl.constexpr,
    BY_LARGEST: tl.constexpr,
):
    """Mask of the experts of the groups whose two largest values sum to most, or with the largest
    one."""
    own_E = column_E // (NUM_EXPERTS // NUM_GROUPS)
    group_G = tl.arange(0, GROUPS_BLOCK)
    sum_G = tl.full([GROUPS_BLOCK], float("-inf"), tl.float32)
    for group in range(NUM_GROUPS):
        value_E = tl.where(own_E == group, choice_E, float("-inf"))
        total = tl.max(value_E, axis=0)
        if not BY_LARGEST:
            first = _first_largest(value_E, column_E, BLOCK)
            total += tl.max(tl.where(column_E == first, float("-inf"), value_E), axis=0)
        sum_G = tl.where(group_G == group, total, sum_G)
    is_used_E = column_E < 0
    for _ in range(NUM_USED_GROUPS):
        best = _first_largest(sum_G, group_G, GROUPS_BLOCK)
        is_used_E = is_used_E | (own_E == best)
        sum_G = tl.where(group_G == best, float("-inf"), sum_G)
    return is_used_E


@triton.jit
def _choose_experts(
    logits,
    choice_bias,
    routed,
    copy,
    own_scale,
    scale,
    NUM_EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_USED: tl.constexpr,
    USED_BLOCK: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    NUM_USED_GROUPS: tl.constexpr,
    GROUPS_BLOCK: tl.constexpr,
    BY_LARGEST: tl.constexpr,
    GATING: tl.constexpr,
    RENORMALISES: tl.constexpr,
):
    column_E = tl.arange(0, BLOCK)
    in_row_E = column_E < NUM_EXPERTS
    at = logits + tl.program_id(0) * NUM_EXPERTS + column_E
    score_E = tl.load(at, mask=in_row_E, other=float("-inf"))
    if GATING == "softmax":
        power_E = tl.exp(score_E - tl.max(score_E, axis=0))
        score_E = power_E / tl.sum(power_E, axis=0)
    elif GATING == "sigmoid":
        score_E = 1.0 / (1.0 + tl.exp(-score_E))
    choice_E = score_E
    if choice_bias is not None:
        choice_E += tl.load(choice_bias + column_E, mask=in_row_E, other=0.0)
    # NaN is chosen last.
    choice_E = tl.where(in_row_E & (choice_E == choice_E), choice_E, float("-inf"))
    if NUM_GROUPS > 1:
        is_used_E = _in_groups(
            choice_E,
            column_E,
            NUM_EXPERTS,
            BLOCK,
            NUM_GROUPS,
            NUM_USED_GROUPS,
            GROUPS_BLOCK,
            BY_LARGEST,
        )
        choice_E = tl.where(is_used_E, choice_E, float("-inf"))
    place_K = tl.arange(0, USED_BLOCK)
    is_used_K = place_K < NUM_USED
    expert_K = tl.zeros([USED_BLOCK], tl.float32)
    weight_K = tl.zeros([USED_BLOCK], tl.float32)
    for place in range(NUM_USED):
        expert = _first_largest(choice_E, column_E, NUM_EXPERTS)
        is_expert_E = column_E == expert
        weight = tl.sum(tl.where(is_expert_E, score_E, 0.0), axis=0)
        expert_K = tl.where(place_K == place, expert.to(tl.float32), expert_K)
        weight_K = tl.where(place_K == place, weight, weight_K)
        choice_E = tl.where(is_expert_E, float("-inf"), choice_E)
    if GATING == "softmax_of_chosen":
        top = tl.max(tl.where(is_used_K, weight_K, float("-inf")), axis=0)
        weight_K = tl.where(is_used_K, tl.exp(weight_K - top), 0.0)
        weight_K = weight_K / tl.sum(weight_K, axis=0)
    if RENORMALISES:
        weight_K = weight_K / (tl.sum(weight_K, axis=0) + 1e-20)
    weight_K *= scale
    if own_scale is not None:
        weight_K *= tl.load(own_scale + expert_K.to(tl.int32), mask=is_used_K, other=0.0)
    first = tl.program_id(0) * 2 * NUM_USED + place_K
    tl.store(routed + first, expert_K, mask=is_used_K)
    tl.store(routed + NUM_USED + first, weight_K, mask=is_used_K)
    if copy is not None:
        tl.store(copy + first, expert_K, mask=is_used_K)
        tl.store(copy + NUM_USED + first, weight_K, mask=is_used_K)
