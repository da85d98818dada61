"""Attention to positions selected for each token (hotsplit.options.key_selection), in torch.

Letters: T tokens, C cached tokens, H heads, K key-value heads, W head width, G heads that share a
key head."""

import torch
from torch import Tensor

from hotsplit.model.spec import Attention as AttentionSpec
from hotsplit.runtime.cache.key_tables import KeyTables
from hotsplit.runtime.ops.attention.attend import attend_one


def attend_to_chosen(
    query_THW: Tensor,
    key_CKW: Tensor,
    value_CKW: Tensor,
    tables: KeyTables,
    sequence: int,
    spec: AttentionSpec,
) -> Tensor:
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
