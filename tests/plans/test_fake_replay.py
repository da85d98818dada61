"""A captured step is replayed in random orders that its graph allows. Every edge that is not
implied by others is needed: without it, two operations race, and for most edges some order changes
the logits."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from fake_cuda import library
from fake_cuda.graph import FLAGS, Graph
from fake_cuda.library import CudaError
from fake_cuda.torch_cuda import fake_cuda
from hybrid_plans import make, planned, stepped
from reference import rel_error
from test_native_step import BOUNDS

from hotsplit import Engine

pytestmark = [
    pytest.mark.skipif(not library.can_be_built(), reason="needs a C++ compiler, and Linux")
]
TOKENS = [3, 17, 4]
NUM_ORDERS = 12


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """An engine with divided layers and layers on the CPU, and its graph."""
    folder = tmp_path_factory.mktemp("replay")
    model = make(folder)
    model.save(model.path)
    planned(folder, model, "every kind of layer")
    with Engine.load(model.path, mode="predicted", device="cpu") as engine:
        want = stepped(engine, TOKENS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOTSPLIT_CACHE", str(folder / "cache"))
        with (
            fake_cuda() as cuda,
            Engine.load(
                model.path, split=folder / "s.gguf", mode="predicted", device="cuda"
            ) as engine,
        ):
            (captured,) = cuda.graphs
            graph = Graph.of(captured.handle)
            yield SimpleNamespace(engine=engine, handle=captured.handle, graph=graph, want=want)
        assert not [line for line in library.text("violations") if "no event orders" not in line]


@pytest.fixture
def omit(loaded):
    """A function that leaves an edge out of the graph."""
    yield lambda number: library.load().fakeGraphOmit(loaded.handle, number)
    library.load().fakeGraphOmit(loaded.handle, -1)
    library.load().fakeCheckRaces(1)


def ran(engine):
    """(logits of the tokens, the names of the operations in the order in which they ran)."""
    before = len(library.text("log"))
    logits = stepped(engine, TOKENS)
    return logits, tuple(library.text("log")[before:])


def test_random_orders_that_the_graph_allows_give_the_same_bits(loaded):
    want, _ = ran(loaded.engine)
    assert rel_error(want, loaded.want) < BOUNDS["f32"]
    orders = set()
    for seed in range(NUM_ORDERS):
        library.load().fakeSeed(seed)
        got, order = ran(loaded.engine)
        orders.add(order)
        assert torch.equal(got, want)
    assert len(orders) > NUM_ORDERS // 2


def test_the_graph_has_the_steps_operations(loaded):
    """Two divided layers and two on the CPU: kernels on one stream, and functions that the host
    runs beside it, without a race."""
    names = Counter(node.name for node in loaded.graph.nodes)
    assert names["gate_up"] == names["down"] == 2 and names["attend"] == 2
    assert names["host function"] == names["write flag"] == 6 and names["wait for flag"] == 4
    assert len({node.stream for node in loaded.graph.nodes}) == 2
    assert loaded.graph.race_without(None) is None
    hosts = [node for node in loaded.graph.nodes if node.name == "host function"]
    assert all(any(is_written for _, _, is_written in node.ranges) for node in hosts)


def test_without_any_one_edge_the_step_races(loaded, omit):
    """Leaves out each edge in turn. An edge is redundant if the others imply the same order, or if
    it is between functions that the host runs one after the other, with no data between their
    flags."""
    graph, engine = loaded.graph, loaded.engine
    want, _ = ran(engine)
    found, redundant = 0, []
    for number, (first, second) in enumerate(graph.edges):
        omit(number)
        names = graph.nodes[first].name, graph.nodes[second].name
        is_between = set(names) <= FLAGS and graph.race_without(number) is None
        if first in graph.before(number)[second] or is_between:
            redundant.append(names)
            assert graph.race_without(number) is None
            assert torch.equal(ran(engine)[0], want)
            continue
        assert graph.race_without(number) is not None
        with pytest.raises(CudaError, match="use the same memory, and no event orders them"):
            engine._step(TOKENS[0], 0)
        found += 1
    omit(-1)
    assert torch.equal(ran(engine)[0], want)  # a refused launch leaves nothing behind
    print(f"{found} of {len(graph.edges)} edges are needed; redundant: {redundant}")
    assert found > 40 and len(redundant) == 9


def changed_bits(loaded, omit, numbers, seeds):
    """The edges without which one of `seeds` orders gives other logits; races are not checked."""
    omit(-1)
    want, _ = ran(loaded.engine)
    library.load().fakeCheckRaces(0)
    changed = []
    for number in numbers:
        omit(number)
        for seed in range(seeds):
            library.load().fakeSeed(seed)
            if not torch.equal(ran(loaded.engine)[0], want):
                changed.append(number)
                break
    return changed


def test_without_an_edge_some_order_gives_other_logits(loaded, omit):
    """So the races reported are real. These edges put data before a flag, and data behind a
    wait."""
    names = [node.name for node in loaded.graph.nodes]
    kept = [
        n
        for n, (a, b) in enumerate(loaded.graph.edges)
        if (names[b] == "write flag" and names[a] in ("copy", "norm"))
        or names[a] == "wait for flag"
    ]
    changed = changed_bits(loaded, omit, kept, 6)
    print(len(kept), len(changed))
    assert len(changed) >= 0.75 * len(kept)
