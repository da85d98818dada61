"""What drafts by a model's block are predicted to gain, of models without weights: by hand."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from delta_models import FEW, spec_of, without_weights
from models import make_inputs, make_machine, make_sizes

from hotsplit.artifacts.profile_file import Corpus
from hotsplit.artifacts.split_file import Split
from hotsplit.costs import part_bytes
from hotsplit.costs.part_bytes import is_expert, state_bytes
from hotsplit.errors import HotsplitError
from hotsplit.model.draft_block import with_draft_block
from hotsplit.solver.assumed import assumed_experts, every_neuron
from hotsplit.solver.draft_prediction import (
    MATRIX_ROW,
    STATE_ROW,
    draft_gain,
    nothing,
    on_gpus,
    recorded_union,
    rows_seconds,
    shares,
)
from hotsplit.solver.mode_choice import find
from hotsplit.solver.multi_gpu import with_one_home
from hotsplit.solver.problem import SolvedPlacement, on_one_device
from hotsplit.solver.solve import split_of
from hotsplit.solver.verify import verify

RATE = 40e9
TOKEN_S = 1.0


def inputs_of(*, has_experts: bool, has_block: bool = True, budget: int = 0):
    spec = spec_of(make_sizes(num_layers=8, width=256), experts=FEW if has_experts else None)
    model = without_weights(with_draft_block(spec) if has_block else spec, "q8_0")
    profile = assumed_experts(model, 0.0) if has_experts else every_neuron(model)
    return make_inputs(model, profile, make_machine(cpu_gb_per_s=RATE / 1e9), budget)


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


def test_recorded_tokens_say_what_successive_ones_share():
    """Each of a hundred tokens chooses the experts of the one before, or the next two of six."""
    assumed = inputs_of(has_experts=True)
    assert recorded_union(assumed, 2) is None
    first_T = np.arange(100) // 2 * 2 % 6
    routing_LTK = np.tile(np.stack([first_T, first_T + 1], axis=1), (8, 1, 1)).astype(np.int16)
    corpora = (Corpus(name="text", sha256="0" * 64, num_tokens=100),)
    profile = replace(assumed.profile, routing_LTK=routing_LTK, corpora=corpora)
    inputs = replace(assumed, profile=profile)
    for rows, num_read in ((1, 2), (2, 3), (3, 4), (4, 5), (6, 6)):
        union_LE = recorded_union(inputs, rows)
        assert union_LE.shape == (8, 6)
        assert union_LE.sum(axis=1) == pytest.approx(np.full(8, num_read), abs=0.1)
    assert recorded_union(inputs, 101) is None
    shared, alone = (draft_gain(each, TOKEN_S).by_number_s[0] for each in (inputs, assumed))
    assert shared < alone  # of two rows, three experts in place of 3.3


def test_gains_are_those_of_tokens_over_seconds():
    inputs = inputs_of(has_experts=False)
    model, block, machine = inputs.model, inputs.model.draft, inputs.machine
    gain = draft_gain(inputs, TOKEN_S, (0.5, 0.5))

    def seconds(of, rows):
        number = of.spec.num_layers
        return rows_seconds(of, machine, np.ones((number, 1)), rows)

    more_s = [seconds(model, rows) - seconds(model, 1) for rows in (2, 3)]
    want = [
        (TOKEN_S + more_s[0] + seconds(block, 1)) / 1.5,
        (TOKEN_S + more_s[1] + 2 * seconds(block, 1)) / 1.75,
    ]
    assert gain.by_number_s == pytest.approx(want, rel=1e-6)
    assert (gain.num_drafted, gain.token_s) == (2, gain.by_number_s[1])


def test_drafts_that_do_not_pay_are_none():
    gain = draft_gain(inputs_of(has_experts=True), TOKEN_S, (0.0, 0.0, 0.0))
    assert (gain.num_drafted, gain.token_s) == (0, TOKEN_S)
    assert all(seconds > TOKEN_S for seconds in gain.by_number_s)
    assert draft_gain(inputs_of(has_experts=True, has_block=False), TOKEN_S) is None


def placed(inputs, num_hot, dense_L, head):
    """The numbers of the hottest units of each layer on a GPU, and what it has of them."""
    pipeline = inputs.pipeline()
    problem = pipeline.model
    is_hot_LF = np.arange(problem.num_neurons) < np.array(num_hot)[:, None]
    plan = with_one_home(SolvedPlacement(hot_LF=is_hot_LF, dense_L=np.array(dense_L), head=head))
    return problem, plan.placement, on_gpus(inputs, pipeline, plan)


def test_of_a_plan_the_slower_side_of_a_layer_counts():
    """Experts: none, two or all six of a layer on the GPU, with attention there or not. The GPU
    reads experts once a row, the CPU the union of its own."""
    inputs = inputs_of(has_experts=True, budget=1 << 40)
    model, machine = inputs.model, inputs.machine
    num_hot = [0, 2, 6, 0, 2, 6, 4, 0]
    problem, placement, gpus = placed(inputs, num_hot, [False] * 3 + [True] * 5, True)
    share_LE, kv_rate = shares(inputs), 1e9 * machine.costs.kv_gb_per_s.median
    for rows in (1, 3):
        want = 0.0
        for layer, (count, is_on_gpu) in enumerate(zip(num_hot, placement.dense_L, strict=True)):
            entries = model.layer_tensors[layer].items()
            size = sum(entry.num_bytes for name, entry in entries if is_expert(name)) / 6
            dense = sum(entry.num_bytes for name, entry in entries if not is_expert(name))
            order_E = inputs.units.order_LF[layer]
            hot_E, cold_E = (share_LE[layer][ids] for ids in (order_E[:count], order_E[count:]))
            union = float((1 - (1 - cold_E) ** rows).sum())
            cold = size * (union + MATRIX_ROW * (rows * float(cold_E.sum()) - union)) / RATE
            cold += problem.hand_over_s * (0 < count < 6 or (count > 0) != is_on_gpu)
            hot = rows * size * float(hot_E.sum()) * problem.hot_s_per_byte_L[layer]
            want += max(cold, hot + problem.kernels_s * (count > 0))
            state_s = 2 * state_bytes(model, layer) / kv_rate * (1 + STATE_ROW * (rows - 1))
            own = dense * (1 + MATRIX_ROW * (rows - 1)) / RATE + state_s
            want += 0.0 if is_on_gpu else own
        got = rows_seconds(model, machine, share_LE, rows, on_gpus=gpus)
        assert got == pytest.approx(want, rel=1e-6)


def test_rows_of_neurons_and_dense_blocks_on_a_gpu_cost_nothing():
    """So that drafts gain what they would if the block alone took time, on the CPU."""
    inputs = replace(inputs_of(has_experts=False, budget=1 << 40), has_draft=False)
    pipeline = inputs.pipeline()
    whole = with_one_home(on_one_device(pipeline.model, gpu=True))
    gpus = on_gpus(inputs, pipeline, whole)
    gain = draft_gain(inputs, TOKEN_S, (0.5,), gpus)
    block_s = rows_seconds(inputs.model.draft, inputs.machine, np.ones((1, 1)), 1)
    assert gain.by_number_s == pytest.approx([(TOKEN_S + block_s) / 1.5], rel=1e-6)
    half = placed(inputs, [pipeline.model.num_neurons // 2] * 8, [True] * 8, True)[2]
    assert half.cold_LE == pytest.approx(np.full((8, 1), 0.5))
    none = with_one_home(on_one_device(pipeline.model, gpu=False))
    same = on_gpus(inputs, pipeline, none)
    want = rows_seconds(inputs.model, inputs.machine, np.ones((8, 1)), 3)
    got = rows_seconds(inputs.model, inputs.machine, np.ones((8, 1)), 3, on_gpus=same)
    assert got == want and nothing(8).units_s(0, 3) == 0.0


@pytest.mark.parametrize("room", ["all", "too little", "not wanted"])
def test_the_block_is_placed_with_the_last_attention(tmp_path, room):
    """Its bytes are those of the plan, and verified; a plan that says otherwise is refused."""
    inputs = inputs_of(has_experts=True, budget=1 << 40)
    machine = make_machine(cpu_gb_per_s=0.01, launch_s=1e-8, hand_over_s=1e-8, cpu_run_s=1e-8)
    inputs = replace(inputs, machine=machine)
    own = sum(part_bytes.draft_gpu_bytes(inputs.model, inputs.context_length).values())
    last = inputs.model.spec.last_attending
    plain = replace(inputs, has_draft=False).pipeline().model
    assert (inputs.pipeline().model.dense_bytes_L - plain.dense_bytes_L).tolist() == [
        own * (layer == last) for layer in range(8)
    ]
    if room == "too little":
        inputs = replace(inputs, budgets=(plain.workspace_bytes + own // 2,))
    elif room == "not wanted":
        inputs = replace(inputs, has_draft=False)
    paths = inputs.model.path, None, Path("rtx-4060-8gb")  # of which none is read
    found = find(replace(inputs, mode="dense", paths=paths), time_limit_s=0.0)
    split = split_of(found, solve_s=0.0)
    assert split.draft_on_gpu == (room == "all") == (room == "all" and split.dense_on_gpu[last])
    verify(split, model=inputs.model, profile=inputs.profile, machine=inputs.machine)
    split.save(path := tmp_path / "s.gguf")
    assert Split.load(path).draft_on_gpu == split.draft_on_gpu
    if room == "all":
        without = replace(split, draft_on_gpu=False)
        with pytest.raises(HotsplitError, match="attention of .* takes .* bytes on the GPU, but"):
            verify(without, model=inputs.model, profile=inputs.profile, machine=inputs.machine)
        block = replace(inputs.model, bare_spec=replace(inputs.model.bare_spec, draft=None))
        with pytest.raises(HotsplitError, match="has a draft block on a GPU that .* lacks"):
            split.check_against(block, path)


def test_a_block_on_a_gpu_takes_its_part_there():
    """By hand: the layer's dense block and the head as those of the model, neurons on the CPU."""
    inputs = inputs_of(has_experts=False, budget=1 << 40)
    pipeline, block = inputs.pipeline(), inputs.model.draft
    problem = pipeline.model
    gpus = on_gpus(inputs, pipeline, with_one_home(on_one_device(problem, gpu=True)))
    names = block.layer_tensors[0].items()
    neurons = sum(e.num_bytes for n, e in names if not part_bytes.is_dense(n))
    outside = sum(e.num_bytes for n, e in block.tensors.items() if n.startswith("nextn."))
    own_s = (neurons + outside) / RATE
    last = inputs.model.spec.last_attending
    own_s += problem.dense_gpu_s_L[last] + problem.head_gpu_s + problem.use_s + problem.hand_over_s
    gain = draft_gain(inputs, TOKEN_S, (0.5,), gpus)
    assert gain.by_number_s == pytest.approx([(TOKEN_S + own_s) / 1.5], rel=1e-6)
