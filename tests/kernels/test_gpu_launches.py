"""The launches of a pass over a prompt on a GPU, counted layer by layer: kernels, copies, and
torch's operations. On the H100 each took Python some 30 microseconds, so a pass of a small model
takes as long as its launches."""

from collections import Counter
from dataclasses import replace

import pytest
from models import make_model, make_sizes
from test_device_memory import load
from test_runtime import make_split

from hotsplit.runtime.device.streams import PlainStream
from hotsplit.runtime.kernels.gpu.kernels import Kernels
from hotsplit.runtime.ops.neurons.feed_forward import Traffic
from hotsplit.runtime.step import hybrid_builder
from hotsplit.runtime.step.backend import plain_backend
from hotsplit.runtime.step.batch import rows_of

TOKENS = 40
# Two sums with their norms, as products take them; queries, keys and values; rotation and cache;
# attention; output; gate; up; hidden values; down.
LAYER = {
    "round_tokens": 2,
    "rotate_append": 1,
    "attend_tokens": 1,
    "hidden_tokens": 1,
    "multiply": 4,
    "multiply_down": 1,
}


class Counting(PlainStream):
    """Counts what is submitted, by the kernel that runs, if one does."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def counted(self, kernel):
        return lambda *arguments, **options: self.found.update([kernel.name])

    def launch(self, run, *, reads, writes):
        before = self.found.total()
        run()
        assert self.found.total() <= before + 1
        self.found.update(["another"] * (self.found.total() == before))

    def copy(self, target, source):
        self.found.update(["copy"])


def launches(kind: str, num_layers: int, activation: str) -> Counter[str]:
    sizes = make_sizes(num_layers=num_layers, width=256, num_neurons=512, context_length=64)
    model = make_model(sizes=sizes, kind=kind, activation=activation)
    split = make_split(model, [range(512)] * num_layers, context_length=64)
    stream = Counting()
    backend = replace(plain_backend(Kernels(stream.counted)), stream=lambda device: stream)
    loaded = load(model, split, mode="dense", context=64)
    step = hybrid_builder.build(
        loaded.weights, loaded.placement, Traffic(), backend, passes=loaded.passes([])
    )
    rows = rows_of(list(range(TOKENS)), 0, "last")
    step.run_pass(rows)  # which prepares it
    stream.found.clear()
    step.run_pass(rows)
    return Counter(stream.found)


@pytest.mark.parametrize("activation", ["silu", "relu"])
@pytest.mark.parametrize("kind", ["f16", "q8_0", "q4_k"])
def test_launches_of_a_layer(kind, activation):
    more, fewer = (launches(kind, num_layers, activation) for num_layers in (3, 2))
    more.subtract(fewer)
    assert {name: count for name, count in more.items() if count} == LAYER
