"""The rule that benchmarks/kv_selection.py calls the runtime's chooses the keys that the runtime
chooses."""

import sys
from pathlib import Path

import pytest
import torch

from hotsplit.options.key_selection import KeySelection
from hotsplit.runtime.cache.block_table import BlockTable
from hotsplit.runtime.cache.key_tables import KeyTables

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import kv_selection

del sys.path[0]
LENGTH, WIDTH = 2048, 64


def chosen_by(head: kv_selection.Head, rule: KeySelection, score, again) -> set[int]:
    """The positions between sinks and window that the rule chooses for the last position."""
    query_GW, first, last = head.query_NGW[-1], rule.sinks, LENGTH - rule.window
    score_T = score(query_GW, LENGTH)[first:last]
    best_B = score_T.unflatten(0, (-1, rule.block))[:, 0].topk(
        rule.candidates * rule.top // rule.block
    )
    again_BP = again(query_GW, LENGTH)[first:last].unflatten(0, (-1, rule.block))
    position_BP = torch.arange(first, last).unflatten(0, (-1, rule.block))
    won = again_BP[best_B.indices].flatten().topk(rule.top).indices
    return set(position_BP[best_B.indices].flatten()[won].tolist())


@pytest.mark.parametrize("candidates", [1, 4])
@pytest.mark.parametrize("block", [32, 64])
def test_the_rule_named_the_runtimes_chooses_as_the_runtime_does(block, candidates):
    (_, head), *_ = kv_selection.planted_heads(LENGTH)
    rule = KeySelection(block=block, sinks=64, window=128, top=128, candidates=candidates)
    tables = KeyTables.of(
        rule, BlockTable(1, LENGTH), 1, WIDTH, False, lambda shape, kind: torch.zeros(shape, dtype=kind)
    )  # fmt: skip
    tables.summarise(0, 0, head.key_NW[:, None])
    low_BW, high_BW = kv_selection.rounded_bounds(head, block)
    value_NS = (tables.summary_BKNS[0, 0].float() - 64) * tables.unit_BKN[0, 0][:, None]
    torch.testing.assert_close(torch.cat([high_BW, low_BW], dim=1), value_NS)
    taken = tables.choose(0, LENGTH - 1, head.query_NGW[-1:], WIDTH**-0.5)
    wanted = {p for p in taken[0].tolist() if rule.sinks <= p < LENGTH - rule.window}
    ours = kv_selection.rules(head)[f"{block} > rest"]
    assert chosen_by(head, rule, ours.score, ours.then) == wanted
    assert chosen_by(head, rule, lambda *of: -ours.score(*of), ours.then) != wanted
    if candidates > 1:
        assert chosen_by(head, rule, ours.score, lambda *of: -ours.then(*of)) != wanted
