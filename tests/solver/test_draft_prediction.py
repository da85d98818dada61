"""What drafts by a model's block are predicted to gain, of models without weights: by hand."""

import numpy as np
import pytest
from delta_models import FEW, spec_of, without_weights
from models import make_inputs, make_machine, make_sizes

from hotsplit.costs.part_bytes import is_expert, state_bytes
from hotsplit.model.draft_block import with_draft_block
from hotsplit.solver.assumed import assumed_experts, every_neuron
from hotsplit.solver.draft_prediction import MATRIX_ROW, STATE_ROW, draft_gain, rows_seconds, shares

RATE = 40e9
TOKEN_S = 1.0


def inputs_of(*, has_experts: bool, has_block: bool = True):
    spec = spec_of(make_sizes(num_layers=8, width=256), experts=FEW if has_experts else None)
    model = without_weights(with_draft_block(spec) if has_block else spec)
    profile = assumed_experts(model, 0.0) if has_experts else every_neuron(model)
    return make_inputs(model, profile, make_machine(cpu_gb_per_s=RATE / 1e9), 0)


def test_a_step_reads_the_union_of_its_rows_experts():
    """A third of the tokens choose each of six experts, so that r rows read 1 - (2/3)^r of
    them."""
    inputs = inputs_of(has_experts=True)
    model, machine = inputs.model, inputs.machine
    entries = [e for layer in model.layer_tensors[:8] for e in layer.items()]
    experts = sum(entry.num_bytes for name, entry in entries if is_expert(name))
    others = sum(entry.num_bytes for name, entry in entries if not is_expert(name))
    others += model.tensors[model.head_name].num_bytes
    states = 2 * sum(state_bytes(model, layer) for layer in range(8))
    kv_rate = 1e9 * machine.costs.kv_gb_per_s.median
    share_LE = shares(inputs)
    assert share_LE == pytest.approx(np.full((8, 6), 1 / 3), rel=0.1)
    for rows in (1, 2, 5):
        union = float((1 - (1 - share_LE) ** rows).mean())
        more = (rows - 1) * others + (rows * float(share_LE.mean()) - union) * experts
        read = others + union * experts + MATRIX_ROW * more
        want = read / RATE + states / kv_rate * (1 + STATE_ROW * (rows - 1))
        assert rows_seconds(model, machine, share_LE, rows) == pytest.approx(want, rel=1e-6)


def test_gains_are_those_of_tokens_over_seconds():
    inputs = inputs_of(has_experts=False)
    model, block, machine = inputs.model, inputs.model.draft, inputs.machine
    gain = draft_gain(inputs, TOKEN_S, (0.5, 0.5))

    def seconds(of, rows):
        number = of.spec.num_layers
        return rows_seconds(of, machine, np.ones((number, 1)), rows)

    more_s = [seconds(model, rows) - seconds(model, 1) for rows in (2, 3)]
    want = [
        (TOKEN_S + more_s[0] + seconds(block, 1.5)) / 1.5,
        (TOKEN_S + more_s[1] + seconds(block, 1.75) + seconds(block, 1)) / 1.75,
    ]
    assert gain.by_number_s == pytest.approx(want, rel=1e-6)
    assert (gain.num_drafted, gain.token_s) == (2, gain.by_number_s[1])


def test_drafts_that_do_not_pay_are_none():
    gain = draft_gain(inputs_of(has_experts=True), TOKEN_S, (0.0, 0.0, 0.0))
    assert (gain.num_drafted, gain.token_s) == (0, TOKEN_S)
    assert all(seconds > TOKEN_S for seconds in gain.by_number_s)
    assert draft_gain(inputs_of(has_experts=True, has_block=False), TOKEN_S) is None
