"""Engines with plans of mixtures, also of layers with states, on fake CUDA devices (fake_cuda):
captured steps, hand-overs by flags, prompts and rollbacks use the code for a real GPU, and give the
CPU's logits."""

import dataclasses

import numpy as np
import pytest
import torch
from fake_cuda import library
from fake_cuda.graph import Graph
from fake_cuda.ptx_kernels import StreamedPtx
from fake_cuda.torch_cuda import fake_cuda
from hybrid_plans import model_of, split_of, stepped
from models import changed, latent_spec, make_model, make_sizes, mixture_spec
from reference import rel_error
from test_expert_prompts import HOT, RATES, noted
from test_experts import IDS, ROUTES, clear_routers, mixture
from test_fake_step import checked_cuda, prompted
from test_hybrid_delta import MIXERS, delta_mixture
from test_hybrid_delta import PLANS as DELTA_PLANS
from test_hybrid_experts import PLANS, made_plan, stock
from test_latent import OF_BLOCKS
from test_sandwich import FAMILY
from test_sandwich import made as norms_of

from hotsplit import Engine
from hotsplit.artifacts.cache_plan import CachePlan
from hotsplit.costs.kernel_counts import HEAD_KERNELS, HOT_KERNELS, dense_kernels
from hotsplit.families.expert_keys import Experts
from hotsplit.files.gguf_file import array_entry
from hotsplit.model.attention import HeadVector
from hotsplit.model.spec import Attention
from hotsplit.options.key_selection import KeySelection
from hotsplit.options.neuron_cache_options import CacheCosts, CacheOptions
from hotsplit.runtime import gpu_setup
from hotsplit.runtime.device.device_memory import kept_budget
from hotsplit.system.log_lines import lines_on_stderr

pytestmark = [
    pytest.mark.skipif(not library.can_be_built(), reason="needs a C++ compiler, and Linux")
]
TOKENS = [3, 41, 7, 7]
EVERY_KEY = KeySelection(window=64)
CONV = "short convolutions"
MIB, CONTEXT = 1 << 20, 1024
SHARED = {"num_shared": 32, "has_shared_gate": True}


def on_the_cpu(model, ids=TOKENS):
    with Engine.of(model, mode="dense", device="cpu", context_length=32) as engine:
        return stepped(engine, ids), prompted(engine, ids)


def on_the_device(model, split, ids=TOKENS, **options):
    with Engine.of(model, split, device="cuda", **options) as engine:
        return stepped(engine, ids), prompted(engine, ids)


def latent_mixture(kind: str = "f32"):
    """Latent attention, with a rank of queries, and experts."""
    sizes = make_sizes(num_layers=2, width=64, num_neurons=32, num_heads=5, context_length=96)
    experts = Experts(route=ROUTES["groups"], num_neurons=32, num_shared=32)
    model = make_model(spec=latent_spec(sizes, OF_BLOCKS, experts=experts), kind=kind)
    return dataclasses.replace(model, tensors=model.tensors | clear_routers(model))


def of_experts(layout: str, kind: str = "q8_0", **numbers):
    numbers = {"num_neurons": 32, **SHARED} | numbers
    return mixture(route=ROUTES["groups"], layout=layout, kind=kind, **numbers)


PLANNED = {
    "some experts": (lambda: of_experts("stock"), PLANS["some"]),
    "experts by neurons": (lambda: of_experts("sparse"), PLANS["beside the CPU's attention"]),
    "experts of two bits": (
        lambda: of_experts("stock", "iq2_xs", num_neurons=256, width=256, num_shared=256),
        PLANS["some"],
    ),
    **{f"delta nets: {name}": (delta_mixture, plan) for name, plan in DELTA_PLANS.items()},
    "short convolutions": (lambda: delta_mixture(mixer=CONV), DELTA_PLANS["some"]),
    "latents": (latent_mixture, PLANS["some"]),
    "latents beside the CPU's": (latent_mixture, PLANS["one layer on the CPU"]),
    "latents in main memory": (latent_mixture, PLANS["some"], {"kv_offload": EVERY_KEY}),
}


@pytest.mark.parametrize("case", PLANNED)
@lines_on_stderr()
def test_plans_on_a_device_give_the_cpus_logits(case, capsys):
    """Steps in a captured graph and submitted, whatever is routed, in any order, and prompts; no
    part takes its fallback."""
    made, plan, *options = PLANNED[case]
    model, found = made(), []
    split, want = made_plan(model, *plan, **dict(*options)), on_the_cpu(model)
    for seed, graph in ((5, True), (9, False)):
        with checked_cuda(seed=seed) as cuda:
            found.append(on_the_device(model, split, graph=graph))
            assert bool(cuda.num_graphs) == graph
    assert "hotsplit doctor" not in capsys.readouterr().err
    for got in found:
        assert torch.equal(got[0], found[0][0])
        for mine, right in zip(got, want, strict=True):
            assert rel_error(mine, right) < 1e-3


# A model and its plan, layers with hot neurons or experts, and those of the CPU's part.
PRICED = {
    "neurons": (model_of, lambda model: split_of(model, "random"), 4, 4),
    "experts": (lambda: stock(**SHARED), lambda model: made_plan(model, *PLANS["some"]), 2, 2),
    "latents": (latent_mixture, lambda model: made_plan(model, *PLANS["some"]), 2, 2),
    **{
        mixer: (
            lambda mixer=mixer: delta_mixture(mixer=mixer),
            lambda model: made_plan(model, *DELTA_PLANS["some"]),
            *(4, 3),
        )
        for mixer in MIXERS
    },
    **{
        family: (
            lambda family=family: norms_of(family),
            lambda model: split_of(model, "random"),
            *(4, 4),
        )
        for family in FAMILY
    },
}


@pytest.mark.parametrize("case", PRICED)
def test_kernels_are_those_that_plans_are_priced_with(case):
    """On a device, queries, keys and values are one product, attention's kernels append as well,
    and the next norm adds up the parts of a divided layer. The CPU computes its part in one
    function, while the GPU computes its own."""
    made, plan, num_hot, num_cold = PRICED[case]
    model = made()
    mode = "predicted" if model.predictor else "dense"
    with checked_cuda() as cuda, Engine.of(model, plan(model), mode=mode, device="cuda"):
        assert len(cuda.graphs) == 1
        graph = Graph.of(cuda.graphs[0].handle)
    kernels, before = graph.kernels, graph.before()
    layers = enumerate(model.spec.layers)
    wanted = (
        HEAD_KERNELS
        + num_hot * (HOT_KERNELS - 1)
        + sum(
            dense_kernels(model, number, has_predictor=mode == "predicted")
            - (layer.attention is not None and len(layer.attention.projections))
            for number, layer in layers
        )
    )
    assert len(kernels) == wanted
    hosts = [n for n, node in enumerate(graph.nodes) if node.name == "host function"]
    assert len(hosts) == num_cold
    for host in hosts:
        beside = [n for n in kernels if n not in before[host] and host not in before[n]]
        assert len(beside) >= HOT_KERNELS - 1


def test_sinks_on_a_device_give_the_cpus_logits():
    """Like those of gpt-oss, in steps and in prompts."""
    model = stock(kind="q8_0", num_neurons=32)
    own, chance = HeadVector("attn_sinks.weight"), np.random.default_rng(0)
    spec = changed(model.bare_spec, Attention, head_sinks=own)
    sinks = {
        f"blk.{n}.{own.name}": array_entry(chance.standard_normal(layer.attention.num_heads), "f32")
        for n, layer in enumerate(spec.layers)
    }
    model = dataclasses.replace(model, bare_spec=spec, tensors=model.tensors | sinks)
    split, want = made_plan(model, *PLANS["some"]), on_the_cpu(model)
    with checked_cuda():
        got = on_the_device(model, split)
    for mine, right in zip(got, want, strict=True):
        assert rel_error(mine, right) < 1e-3


EXECUTED = {
    "experts": (
        lambda: stock(kind="q4_0", width=32, num_neurons=32, **SHARED),
        PLANS["some"],
        {"_choose_experts", "_expert_gate_up", "_expert_down"},
    ),
    "delta nets": (
        lambda: delta_mixture(num_layers=2, width=32, period=2),
        ([[1, 2], [5]], [1, 1]),
        {"_convolve", "_delta_rule", "_gate_norm"},
    ),
    CONV: (
        lambda: delta_mixture(num_layers=2, width=32, period=2, mixer=CONV),
        ([[1, 2], [5]], [1, 1]),
        {"_convolve_gated"},
    ),
    "latents": (lambda: latent_mixture("q8_0"), PLANS["some"], {"_join_latents", "_attend_part"}),
}


@pytest.mark.parametrize("case", EXECUTED)
def test_executed_ptx_and_a_graph_give_the_cpus_logits(case):
    """The kernels' PTX, the C++ of what is on the CPU and a captured graph together."""
    made, plan, own = EXECUTED[case]
    model = made()
    split = made_plan(model, *plan)
    want, _ = on_the_cpu(model, TOKENS[:2])
    ptx = StreamedPtx(80)
    with (
        checked_cuda(kernels=ptx.kernels) as cuda,
        Engine.of(model, split, device="cuda") as engine,
    ):
        got = stepped(engine, TOKENS[:2])
        assert len(cuda.graphs) == 1
    assert own <= ptx.launches.keys()
    assert rel_error(got, want) < 1e-3


@pytest.mark.parametrize("mixer", [*MIXERS, "latents"])
def test_texts_that_share_steps_are_rolled_back_and_forked(mixer):
    """Prompts, steps of several rows in a graph, rejected drafts and forks: every row of a step has
    the bits of its text alone, and those of the CPU up to rounding. States are rolled back, too."""
    ids, model = IDS, latent_mixture()
    if mixer != "latents":
        model = delta_mixture(num_layers=2, period=2, mixer=mixer)
    plan, options = ([[1, 2], [5]], [1, 1]), {"context_length": 64, "num_sequences": 3}
    split, found = made_plan(model, *plan, **options), []
    with checked_cuda() as cuda, Engine.of(model, split, device="cuda") as engine:
        first, second = engine.sequence(), engine.sequence()
        first.extend(ids[:6])
        found.append(first.extend(ids[6:9], "all"))  # a draft, of which one token is accepted
        first.rollback(7)
        third = first.fork()
        found.append(third.extend(ids[7:9], "all"))
        second.extend([5])
        assert torch.equal(found[0][1:], found[1])
        first.extend([2, 3], "all")
        first.rollback(7)
        assert torch.equal(first.extend(ids[7:9], "all"), found[1])
        assert cuda.num_graphs > 1
    with Engine.of(model, mode="dense", device="cpu", context_length=64) as engine:
        text = engine.sequence()
        text.extend(ids[:6])
        assert rel_error(found[0], text.extend(ids[6:9], "all")) < 1e-3


def long_mixture(**options):
    sizes = make_sizes(width=64, num_neurons=64, context_length=CONTEXT)
    spec = mixture_spec(sizes, route=ROUTES["groups"], num_neurons=64)
    return make_model(spec=spec, **options)


@pytest.mark.parametrize(
    ("num_tokens", "rates", "is_resident"),
    [(40, RATES, True), (60, None, False), (1000, None, True)],
)
def test_prompts_on_a_device(monkeypatch, num_tokens, rates, is_resident):
    """Within the plan's memory, as the CPU computes them: 1,000 tokens in two passes, others
    with an expert in each of the two buffers, which are used again and again."""
    if num_tokens < 1000:
        monkeypatch.setattr(gpu_setup, "MOST_PIECE_BYTES", 1)
    model = long_mixture(kind="q8_0")
    split = made_plan(model, HOT, [1, 1], context_length=CONTEXT)
    budget = split.vram_budget_bytes + 48 * MIB
    split = dataclasses.replace(split, vram_budget_bytes=budget, prompt_rates=rates)
    ids = np.random.default_rng(num_tokens).integers(0, 50, num_tokens).tolist()
    with Engine.of(model, mode="dense", device="cpu") as engine:
        want = prompted(engine, ids)
    with (
        fake_cuda(seed=2),
        Engine.of(model, split, device="cuda", is_resident=is_resident) as engine,
    ):
        (stream,) = set(engine._live.native.passes.streams.values())
        assert (stream.staging is None) == is_resident and stream.rates == rates
        parts, chosen = noted(stream)
        got = prompted(engine, ids)
        del stream.run, stream.chosen  # which keep the engine's memory
        (report,) = engine.memory_report()
        assert report.peak_reserved <= kept_budget(budget), report
    assert not library.text("violations")
    assert rel_error(got, want) < 4 * torch.finfo(torch.float16).eps
    assert any(parts) and len(parts) == 2 * (1 + -(-num_tokens // 512))  # the first one twice
    is_divided = any(0 < len(own) < len(every) for every, own in chosen)
    assert is_divided == (rates is not None)


# ---- the neuron cache ------------------------------------------------------------------------


def cached_plan(model, **changes):
    """A plan whose cache swaps whatever is chosen more often: copies take next to no time."""
    zeros = np.zeros(2)
    times = {
        "hot_s_L": zeros,
        "hot_row_s_L": zeros + 1e-9,
        "cold_s_L": zeros,
        "cold_row_s_L": zeros + 1e-3,
        "copy_row_s_L": zeros + 1e-9,
        "gather_row_s_L": zeros + 1e-9,
    }
    cache = CachePlan(
        most_rows=3,
        costs=CacheCosts(**times | {"rest_s": 1e-3, "copy_s": 0.0} | changes),
        frequency=(np.full(12, 0.3, np.float32),) * 2,
    )
    split = made_plan(model, *PLANS["some"], cache=cache, num_sequences=2, context_length=64)
    budget = split.vram_budget_bytes + 32 * MIB
    return dataclasses.replace(split, num_experts=12, vram_budget_bytes=budget)


@lines_on_stderr()
def test_a_cache_follows_the_experts_on_a_device(capsys):
    """Two texts in turns, and prompts between their steps, while experts are on their way."""
    model = stock(kind="q8_0", num_neurons=32, **SHARED)
    chance = np.random.default_rng(0)
    turns = [chance.integers(0, 50, n).tolist() for n in (3, 1, 1, 2, 1, 5, *[1] * 12, 4, 1, 1)]
    split = cached_plan(model)

    def written(engine):
        with engine.sequence() as one, engine.sequence() as two:
            return [(one, two)[n % 2].extend(ids).clone() for n, ids in enumerate(turns)]

    with Engine.of(model, mode="dense", device="cpu", context_length=64, num_sequences=2) as plain:
        want = written(plain)
    options = CacheOptions(margin=0.0, is_always_on=True, decay=0.5, prior_tokens=1.0)
    with (
        checked_cuda(seed=5) as cuda,
        Engine.of(model, split, device="cuda", neuron_cache=options) as engine,
    ):
        got, cache = written(engine), engine.neuron_cache
        assert cuda.num_graphs
        cache.complete()
        cache.slots.check()
        assert cache.num_swaps >= 10 and cache.policy.report().num_swaps >= 10
        (report,) = engine.memory_report()
        assert report.peak_reserved <= kept_budget(split.vram_budget_bytes), report
    assert "hotsplit doctor" not in capsys.readouterr().err
    assert max(map(rel_error, got, want)) < 2e-3


@lines_on_stderr()
def test_a_cache_is_off_where_nothing_can_be_swapped(capsys):
    """The plan runs as it is: in main memory alone, and with experts in the file."""
    model = stock(kind="q8_0", num_neurons=32)
    split = cached_plan(model)
    want = on_the_cpu(model)
    with Engine.of(model, split, device="cpu") as engine:
        assert engine.neuron_cache is None
        assert rel_error(prompted(engine, TOKENS), want[1]) < 1e-3
    with checked_cuda(), Engine.of(model, split, device="cuda", is_resident=False) as engine:
        assert engine.neuron_cache is None
        assert rel_error(prompted(engine, TOKENS), want[1]) < 1e-3
    lines = capsys.readouterr().err
    assert "it is off without one" in lines and "needs the plan's weights in main memory" in lines
