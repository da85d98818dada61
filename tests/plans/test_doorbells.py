"""Hand-overs by flags (backend.py): their server alone, and steps on the fake CUDA runtime, where
kernels and the server take turns at random. They give the bits of host functions, and every planted
fault is found."""

import threading
import time
from ctypes import CFUNCTYPE, addressof, c_int, c_void_p, cast

import numpy as np
import pytest
import torch
from fake_cuda import library as fake
from fake_cuda.devices import CUDAGraph
from fake_cuda.torch_cuda import fake_cuda

from hotsplit.errors import HotsplitError
from hotsplit.runtime.device.streams import HostNode
from hotsplit.runtime.kernels.cpu import library
from hotsplit.runtime.step import backend
from hotsplit.runtime.step.backend import (
    DoorbellStream,
    Handovers,
    HandoverStruct,
    ServingStruct,
    _captured,
)

on_fake = pytest.mark.skipif(not fake.can_be_built(), reason="needs a C++ compiler, and Linux")
FUNCTION, QUERY = CFUNCTYPE(None, c_void_p), CFUNCTYPE(c_int, c_void_p)
NOT_READY, FAILED = 600, 719
GPU = torch.device("cuda", 0)


# ---- the server alone ---------------------------------------------------------------------------


class NotedHandovers:
    """Hand-overs whose functions note their number; `query` answers for the stream."""

    def __init__(self, count: int, query=lambda: NOT_READY, timeout_s: float = 30.0) -> None:
        self.flags = np.zeros((count, 2, 16), np.int32)
        self.seen: list[int] = []
        self.kept = [FUNCTION(lambda _, n=n: self.note(n)) for n in range(count)]
        self.query = QUERY(lambda _: query())
        size = self.flags.itemsize
        self.structs = (HandoverStruct * count)(
            *[
                HandoverStruct(
                    function=cast(each, c_void_p).value,
                    argument=0,
                    ready=self.flags.ctypes.data + size * 32 * n,
                    done=self.flags.ctypes.data + size * (32 * n + 16),
                )
                for n, each in enumerate(self.kept)
            ]
        )
        self.serving = ServingStruct(
            query=cast(self.query, c_void_p).value, query_us=100, timeout_us=round(1e6 * timeout_s)
        )

    def note(self, number: int) -> None:
        assert not self.flags[number:, 1].any(), "done is set before the function has run"
        self.seen.append(number)

    @property
    def ready(self) -> np.ndarray:
        return self.flags[:, 0, 0]

    def run(self) -> tuple[int, int]:
        return library.serve(self.structs, 0, len(self.structs), self.serving)


def test_functions_run_in_order_each_after_its_flag():
    served = NotedHandovers(5)
    thread = threading.Thread(target=lambda: found.append(served.run()))
    found: list[tuple[int, int]] = []
    thread.start()
    for number in range(5):
        time.sleep(0.002)
        assert served.seen == list(range(number)), "a function has run before its flag was set"
        served.ready[number] = 1
        while len(served.seen) == number:
            time.sleep(0.0005)
    thread.join()
    assert found == [(5, 0)] and served.flags[:, 1, 0].tolist() == [1] * 5


@pytest.mark.parametrize("answer", [NOT_READY, FAILED, 0])
def test_a_flag_that_does_not_come_releases_all(answer):
    """After the timeout; at once if the stream has failed or ended."""
    served = NotedHandovers(4, query=lambda: answer, timeout_s=0.1 if answer == NOT_READY else 30.0)
    served.ready[:2] = 1
    began = time.perf_counter()
    assert served.run() == (2, {0: -1}.get(answer, answer))
    assert time.perf_counter() - began < 10
    assert served.seen == [0, 1] and served.flags[:, 1, 0].tolist() == [1] * 4


def test_a_flag_that_is_set_while_the_stream_is_asked_counts():
    served = NotedHandovers(1, query=lambda: served.ready.fill(1) or 0)
    assert served.run() == (1, 0)
    assert addressof(served.structs)  # lives until here


# ---- a chain of hand-overs on the fake runtime --------------------------------------------------


class Chain:
    """x is sent to the CPU, which returns y = x + n + 1 for hand-over n, and a hot kernel beside it
    computes 3 x; their sum is the next x."""

    COUNT = 3

    def __init__(self, stream=None, *, order=("data", "flag"), has_join: bool = True) -> None:
        self.stream = stream or DoorbellStream(GPU)
        self.order, self.has_join = order, has_join
        self.x, self.hot = torch.zeros(2, device=GPU), torch.zeros(2, device=GPU)
        self.sent, self.back = torch.zeros(2, pin_memory=True), torch.zeros(2, pin_memory=True)
        self.nodes = [self._node(number) for number in range(self.COUNT)]
        self.stream.follow()

    def _node(self, number: int) -> HostNode:
        sent, back = self.sent.numpy(), self.back.numpy()

        def answer(_: int) -> None:
            back[:] = sent + number + 1

        made = FUNCTION(answer)
        address = cast(made, c_void_p).value
        return HostNode(
            function=address,
            argument=address,
            reads=(self.sent,),
            writes=(self.back,),
            kept=(made,),
        )

    def _kernel(self, run, reads, writes) -> None:
        self.stream.launch(run, reads=reads, writes=writes)

    def submit(self) -> None:
        x, hot, sent, back = self.x, self.hot, self.sent, self.back
        for node in self.nodes:
            for part in self.order:
                if part == "data":
                    self.stream.copy(sent, x)
                else:
                    handed = self.stream.start(node)
            self._kernel(lambda: hot.copy_(x).mul_(3), [x], [hot])
            if self.has_join:
                self.stream.join(handed)
            self.stream.copy(x, back)
            self._kernel(lambda: x.add_(hot), [x, hot], [x])

    @staticmethod
    def want(value: float, count: int) -> float:
        for number in range(count):
            value = value + number + 1 + 3 * value
        return value

    def check(self, run, times: int = 1) -> None:
        value = float(self.x[0])
        torch.cuda.synchronize()
        for _ in range(times):
            run()
            self.stream.finish(sleeps=True)
            value = self.want(value, self.COUNT)
        got = self.x.tolist()
        assert got == [value] * 2, f"got {got[0]:g}, wanted {value:g}"


@pytest.fixture
def cuda(monkeypatch):
    monkeypatch.setattr(backend, "POLL_S", 0.0)  # nothing runs meanwhile on the fake runtime
    with fake_cuda() as found:
        yield found


@on_fake
def test_a_thousand_interleavings_of_the_gpu_and_the_server_give_the_same_values(cuda):
    chain = Chain()
    replay = _captured(chain.stream, chain.submit)
    orders = set()
    for seed in range(1000):
        chain.x.zero_()
        torch.cuda.synchronize()
        chain.stream.follow()
        fake.load().fakeSeed(seed)
        if seed == 500:  # submitted one by one, too
            chain.check(chain.submit, times=2)
            continue
        before = len(fake.text("log")) if seed < 100 else 0
        chain.check(replay)
        if seed < 100:
            orders.add(tuple(fake.text("log")[before:]))
    assert len(orders) > 10 and not fake.text("violations")


def faulty_server(fault: str):
    """`library.serve` in Python, with a fault."""

    def serve(structs, start, stop, serving):
        query = QUERY(serving.query)
        numbers = list(range(start, stop))
        if fault == "wrong order":
            numbers = numbers[::-1]
        if fault == "one flag too few":
            numbers = numbers[:-1]
        end = time.perf_counter() + 1e-6 * serving.timeout_us
        for count, number in enumerate(numbers):
            one = structs[number]
            ready, done = (c_int.from_address(each) for each in (one.ready, one.done))
            while not ready.value:
                found = query(serving.stream)
                if time.perf_counter() > end or found != NOT_READY:
                    for left in range(start, stop):
                        c_int.from_address(structs[left].done).value = 1
                    return count, NOT_READY
            if fault == "done before y":
                done.value = 1
                for _ in range(8):
                    query(serving.stream)
            if fault == "stops" and count == 1:
                raise MemoryError("the server has stopped")
            FUNCTION(one.function)(one.argument)
            done.value = 1
        return stop - start, 0

    return serve


def failure(chain: Chain, seeds: int = 8) -> str:
    """The error of the first seed for which a chain fails, captured and replayed twice."""
    for seed in range(seeds):
        fake.load().fakeSeed(seed)
        chain.x.zero_()
        chain.stream.follow()
        try:
            chain.check(_captured(chain.stream, chain.submit), times=2)
        except (HotsplitError, RuntimeError, AssertionError, MemoryError) as error:
            fake.load().fakeForgive()
            return str(error)
    return ""


@on_fake
@pytest.mark.parametrize("checks_races", [True, False])
def test_a_chain_without_faults_does_not_fail(cuda, monkeypatch, checks_races):
    fake.load().fakeCheckRaces(checks_races)
    monkeypatch.setattr(library, "serve", faulty_server("none"))
    assert failure(Chain()) == ""


@on_fake
@pytest.mark.parametrize(
    "options, race, lost",
    [
        ({"order": ("flag", "data")}, "use the same memory, and no event orders them", "wanted"),
        ({"has_join": False}, "use the same memory, and no event orders them", "wanted"),
    ],
    ids=["flag before data", "wait left out"],
)
def test_a_submission_in_the_wrong_order_is_a_race_and_gives_other_values(
    cuda, options, race, lost
):
    assert race in failure(Chain(**options)) or "not joined" in fake.text("violations")[0]
    fake.load().fakeCheckRaces(0)
    if options.get("has_join", True):
        assert lost in failure(Chain(**options))


@on_fake
@pytest.mark.parametrize(
    "fault, message",
    [
        ("done before y", "wanted"),
        ("wrong order", "within 0.2 s"),
        ("one flag too few", "cannot set any more"),
        ("stops", "the server has stopped"),
    ],
)
def test_a_fault_of_the_server_is_found(cuda, monkeypatch, fault, message):
    monkeypatch.setattr(library, "serve", faulty_server(fault))
    monkeypatch.setattr(backend, "TIMEOUT_S", 0.2)
    if fault == "one flag too few":  # without the release that would hide it from the stream
        monkeypatch.setattr(Handovers, "release", lambda handovers: None)
    assert message in failure(Chain())


@on_fake
def test_flags_that_are_not_reset_are_found(cuda, monkeypatch):
    monkeypatch.setattr(Handovers, "reset", lambda handovers: None)
    assert failure(Chain())
    assert "a stale flag" in fake.text("violations")[0]


@on_fake
@pytest.mark.parametrize("when", ["launching", "serving"])
def test_an_interrupt_leaves_no_stream_waiting(cuda, monkeypatch, when):
    """Between the launch of a graph and the end of its last hand-over."""
    chain = Chain()
    replay = _captured(chain.stream, chain.submit)

    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if when == "serving":
            patch.setattr(library, "serve", interrupted)
        else:
            launch = CUDAGraph.replay
            patch.setattr(CUDAGraph, "replay", lambda graph: interrupted(launch(graph)))
        with pytest.raises(KeyboardInterrupt):
            replay()
    chain.stream.finish()
    assert not fake.text("violations")
    chain.x.zero_()
    chain.stream.follow()
    chain.check(replay)


@on_fake
def test_two_streams_and_two_graphs_have_flags_of_their_own(cuda):
    chains = [Chain(), Chain()]
    replays = [_captured(each.stream, each.submit) for each in (*chains, chains[0])]
    flags = set()
    for chain, replay in zip((*chains, chains[0]), replays, strict=True):
        handovers = replay.__closure__[1].cell_contents.__self__
        flags |= {address for n in range(chain.COUNT) for address in handovers.addresses(n)}
        chain.x.zero_()
        chain.stream.follow()
        chain.check(replay)
    assert len(flags) == 3 * 2 * Chain.COUNT and not fake.text("violations")
    assert len({address // 64 for address in flags}) == len(flags)  # a cache line for each
