"""Which keys a token reads, by the formulas of key_selection.h. Scores differ by rounding, so near
ties may be resolved differently.

Letters: K key-value heads, N key blocks of a sequence, W head width, S summary bytes, C code bytes,
G queries that share a head, M candidates."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from hotsplit.options.key_selection import padded
from hotsplit.runtime.cache.key_tables import KeyTables
from hotsplit.runtime.cache.stored_rows import inverse, turn_by_hadamard

QUERY_LARGEST = 127.0


def window_begin(tables: KeyTables, position: int) -> int:
    return max(0, position + 1 - tables.rule.window) // tables.rule.block * tables.rule.block


def takes_all(tables: KeyTables, position: int) -> bool:
    """True if a token at `position` reads all keys."""
    rule = tables.rule
    return position < rule.full or window_begin(tables, position) <= rule.sinks + rule.top


def choose(
    tables: KeyTables, sequence: int, position: int, query_KGW: Tensor, score_scale: float
) -> Tensor:
    """The positions that a token reads for these queries, int64 [K, positions], ascending. Not for
    a token that reads all keys. If stored keys are rotated, queries must be too."""
    rule, window = tables.rule, window_begin(tables, position)
    first, last = torch.arange(rule.sinks), torch.arange(window, position + 1)
    block_N, at_N = tables.places(sequence, rule.sinks // rule.block, window // rule.block)
    found = []
    for head, query_GW in enumerate(query_KGW):
        won = _search(tables, head, block_N, at_N, query_GW, score_scale)
        found.append(torch.cat([first, won + rule.sinks, last]))
    return torch.stack(found)


def _search(
    tables: KeyTables,
    head: int,
    block_N: Tensor,
    at_N: Tensor,
    query_GW: Tensor,
    score_scale: float,
) -> Tensor:
    """The `top` best positions, int64, relative to the end of the sinks."""
    rule, size, width = tables.rule, tables.rule.block, tables.width
    summary_NS = tables.summary_BKNS[block_N, head, at_N].int() - 64
    unit_N = tables.unit_BKN[block_N, head, at_N]
    parts = 2 if rule.summary == "bounds" else 1
    whole_GW, unit_G1 = _query(query_GW, width)
    split_GS = torch.cat([whole_GW.clamp_min(0), whole_GW.clamp_max(0)], dim=1)
    scale = unit_G1 * score_scale
    score_GN = _dots(split_GS if parts == 2 else whole_GW, summary_NS) * unit_N * scale
    wanted = rule.top * max(1, rule.candidates)
    best_M = _largest(_mass(score_GN), min(len(block_N), -(-wanted // size)))
    position_M = (best_M[:, None] * size + torch.arange(size)).flatten()
    if not rule.is_coded:
        return position_M[: rule.top]
    center_GM = _dots(whole_GW.repeat(1, parts), summary_NS[best_M]) * unit_N[best_M]
    turned_GW = query_GW if tables.is_rotated else turn_by_hadamard(query_GW)
    whole_GW, unit_G1 = _query(turned_GW, width)
    code_NPC = tables.code_BKNPC[block_N[best_M], head, at_N[best_M]]
    factor_NP = tables.factor_BKNP[block_N[best_M], head, at_N[best_M]]
    dot_GM = _dots(whole_GW, 2 * decode_keys(code_NPC.flatten(0, 1)) - 3) * factor_NP.flatten()
    score_GM = (center_GM * (scale / parts)).repeat_interleave(size, dim=1)
    score_GM = score_GM + dot_GM * (0.5 * unit_G1 * score_scale)
    return position_M[_largest(_mass(score_GM), rule.top)]


def decode_keys(code_MC: Tensor) -> Tensor:
    """The levels that codes stand for, each plus 2 and so from 0 to 3; int32 [M, W padded]."""
    part_MNB = code_MC.unflatten(-1, (-1, 16))
    parts = [part_MNB >> 2 * number & 3 for number in range(4)]
    return torch.stack(parts, dim=-2).flatten(1).int()


def _query(query_GW: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Quantises queries: (int32 [G, W padded], their unit [G, 1])."""
    unit_G1 = query_GW.abs().amax(dim=1, keepdim=True) / QUERY_LARGEST
    whole_GW = (query_GW * inverse(unit_G1)).round().nan_to_num(0.0, 127.0, -127.0).int()
    return F.pad(whole_GW, (0, padded(width) - width)), unit_G1


def _dots(x_GS: Tensor, row_NS: Tensor) -> Tensor:
    """Exact dot products of integer vectors, f32 [G, N]."""
    return (x_GS.double() @ row_NS.double().T).float()


def _mass(score_GN: Tensor) -> Tensor:
    return score_GN.softmax(dim=-1).sum(dim=0)


def _largest(score_N: Tensor, count: int) -> Tensor:
    """Indices of the `count` largest values, ascending. Of equal values the first win; NaN counts
    as infinite."""
    order_N = torch.where(score_N.isnan(), math.inf, score_N).argsort(descending=True, stable=True)
    return order_N[:count].sort().values
