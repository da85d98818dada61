"""Engines with plans of gated delta nets on fake CUDA devices (fake_cuda): captured steps of one
and several rows, hand-overs by flags, prompts and rollbacks use the code for a real GPU, and give
the CPU's logits."""

import pytest
import torch
from fake_cuda import library
from fake_cuda.ptx_kernels import StreamedPtx
from fake_cuda.torch_cuda import fake_cuda
from hybrid_plans import stepped
from reference import rel_error
from test_experts import IDS
from test_fake_step import checked_cuda, prompted
from test_hybrid_delta import PLANS, delta_mixture
from test_hybrid_experts import made_plan

from hotsplit import Engine
from hotsplit.system.log_lines import lines_on_stderr

pytestmark = [
    pytest.mark.skipif(not library.can_be_built(), reason="needs a C++ compiler, and Linux")
]
BOUND = 1e-3


def run(model, *given, ids=IDS, **options):
    """Logits of single steps, and after a prompt."""
    with Engine.of(model, *given, mode="dense", **options) as engine:
        return stepped(engine, ids), prompted(engine, ids)


@pytest.mark.parametrize("plan", PLANS)
@lines_on_stderr()
def test_plans_on_a_device_give_the_cpus_logits(plan, capsys):
    """Steps in a captured graph, and prompts; no part takes its fallback."""
    model = delta_mixture()
    split, want = made_plan(model, *PLANS[plan]), run(model, device="cpu", context_length=32)
    with checked_cuda(seed=3) as cuda:
        got = run(model, split, device="cuda")
        assert cuda.num_graphs
    assert "hotsplit doctor" not in capsys.readouterr().err
    for mine, right in zip(got, want, strict=True):
        assert rel_error(mine, right) < BOUND


def test_executed_ptx_and_a_graph_give_the_cpus_logits():
    """The kernels' PTX, the C++ of experts and of a delta net on the CPU, and a captured graph
    together."""
    model = delta_mixture(num_layers=2, width=32, period=2)
    split = made_plan(model, [[1, 2], [5]], [1, 1])
    want, _ = run(model, device="cpu", context_length=32, ids=IDS[:2])
    with fake_cuda():
        run(model, split, device="cuda", ids=IDS[:1])  # checks the device
    ptx = StreamedPtx(80)
    with (
        checked_cuda(kernels=ptx.kernels) as cuda,
        Engine.of(model, split, device="cuda") as engine,
    ):
        got = stepped(engine, IDS[:2])
        assert len(cuda.graphs) == 1
    assert {"_convolve", "_delta_rule", "_gate_norm"} <= ptx.launches.keys()
    assert rel_error(got, want) < BOUND


def test_texts_that_share_steps_are_rolled_back_and_forked():
    """Prompts, steps of several rows in a graph, rejected drafts and forks: every row of a step has
    the bits of its text alone, and those of the CPU up to rounding."""
    model = delta_mixture(num_layers=2, period=2)
    plan, options = ([[1, 2], [5]], [1, 1]), {"context_length": 64, "num_sequences": 3}
    split, found = made_plan(model, *plan, **options), []
    with checked_cuda() as cuda, Engine.of(model, split, device="cuda") as engine:
        first, second = engine.sequence(), engine.sequence()
        first.extend(IDS[:6])
        found.append(first.extend(IDS[6:9], "all"))  # a draft, of which one token is accepted
        first.rollback(7)
        third = first.fork()
        found.append(third.extend(IDS[7:9], "all"))
        second.extend([5])
        assert torch.equal(found[0][1:], found[1])
        first.extend([2, 3], "all")
        first.rollback(7)
        assert torch.equal(first.extend(IDS[7:9], "all"), found[1])
        assert cuda.num_graphs > 1
    with Engine.of(model, mode="dense", device="cpu", context_length=64) as engine:
        text = engine.sequence()
        text.extend(IDS[:6])
        assert rel_error(found[0], text.extend(IDS[6:9], "all")) < BOUND
