"""Attention to positions selected for each token (hotsplit.options.key_selection), in torch.

Letters: T tokens, C cached tokens, H heads, K key-value heads, W head width, G heads that share a
key head."""

import torch
from torch import Tensor

from hotsplit.model.spec import Attention as AttentionSpec
from hotsplit.runtime.cache.key_tables import KeyTables
from hotsplit.runtime.ops.attention.attend import attend_one, scored
from hotsplit.runtime.ops.attention.rotary import Rotary


def attend_to_chosen(
    query_THW: Tensor, key_CKW: Tensor, value_CKW: Tensor, tables: KeyTables, sequence: int,
    spec: AttentionSpec,
) -> Tensor:  # fmt: skip
    """Computes `attend` with each token restricted to its chosen positions: f32 [T, H * W]."""
    num_kv, outs = key_CKW.shape[1], []
    for query_HW, position in zip(
        query_THW, range(len(key_CKW) - len(query_THW), len(key_CKW)), strict=True
    ):
        if tables.takes_all(position):
            until = slice(0, position + 1)
            keys, values = key_CKW[until].float(), value_CKW[until].float()
        else:
            query_KGW = query_HW.unflatten(0, (num_kv, -1))
            index_KC = tables.choose(sequence, position, query_KGW, spec.score_scale)
            head_K1 = torch.arange(num_kv)[:, None]
            keys = key_CKW[index_KC, head_K1].transpose(0, 1).float()
            values = value_CKW[index_KC, head_K1].transpose(0, 1).float()
        outs.append(attend_one(query_HW, keys, values, spec))
    return torch.cat(outs)


def attend_capped(
    query_THW: Tensor, key_CKW: Tensor, value_CKW: Tensor, tables: KeyTables, sequence: int,
    spec: AttentionSpec, rotary: Rotary,
) -> Tensor:  # fmt: skip
    """Computes `attend_to_chosen` with capped positions (hotsplit.options.key_selection), from queries
    and keys before the rotary embedding."""
    num_kv, outs, rule = key_CKW.shape[1], [], tables.rule
    num_far = rule.sinks + rule.top
    for query_HW, position in zip(
        query_THW, range(len(key_CKW) - len(query_THW), len(key_CKW)), strict=True
    ):
        base = 0 if tables.takes_all(position) else tables.window_begin(position)
        near_keys = key_CKW[base : position + 1].float()
        near = rotary.turn(0, len(near_keys)).apply(near_keys)
        near_query = rotary.turn(position - base, 1).apply(query_HW[None])
        if not base:
            values = value_CKW[: position + 1].float()
            outs.append(attend_one(near_query[0], near, values, spec))
            continue
        far_query = rotary.turn(rule.window, 1).apply(query_HW[None])[0]
        query_KGW = far_query.unflatten(0, (num_kv, -1))
        index_KC = tables.choose(sequence, position, query_KGW, spec.score_scale)
        head_K1 = torch.arange(num_kv)[:, None]
        values = value_CKW[index_KC, head_K1].transpose(0, 1).float()
        far = key_CKW[index_KC[:, :num_far], head_K1].transpose(0, 1).float()
        outs.append(_attend_two(far_query, far, near_query[0], near, values, spec))
    return torch.cat(outs)


def _attend_two(
    far_HW: Tensor, far_CKW: Tensor, near_HW: Tensor, near_CKW: Tensor, value_CKW: Tensor,
    spec: AttentionSpec,
) -> Tensor:  # fmt: skip
    """Computes `attend_one` over far and near keys together; the query is given twice, rotated for
    the far and for the near ones."""
    scores = [
        query_HW.reshape(key_CKW.shape[1], -1, query_HW.shape[-1]) @ key_CKW.permute(1, 2, 0)
        for query_HW, key_CKW in ((far_HW, far_CKW), (near_HW, near_CKW))
    ]
    share_KGC = scored(torch.cat(scores, dim=-1), spec).softmax(dim=-1)
    return (share_KGC @ value_CKW.transpose(0, 1)).reshape(1, -1)
