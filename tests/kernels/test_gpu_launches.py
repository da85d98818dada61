"""The launches of a prompt's pass on a GPU, counted layer by layer: kernels, and torch's operations
that compute something. On the H100 each took Python some 30 microseconds, so a pass of a small
model takes as long as its launches."""

from collections import Counter

import pytest
import torch
from models import make_model, make_sizes
from test_device_memory import as_on_a_gpu, load
from test_runtime import make_split
from torch.utils._python_dispatch import TorchDispatchMode

from hotsplit.runtime.kernels.gpu.kernels import Kernels
from hotsplit.runtime.weights import gpu_products

assert callable(as_on_a_gpu)  # a fixture
TOKENS = 40
# Operations of torch that launch nothing on a GPU: views, and memory without values.
FREE = {
    "_unsafe_view",
    "alias",
    "as_strided",
    "detach",
    "empty",
    "empty_like",
    "expand",
    "new_empty",
    "permute",
    "select",
    "slice",
    "split",
    "split_with_sizes",
    "t",
    "transpose",
    "unbind",
    "unsqueeze",
    "view",
}
# Norm and sum; queries, keys and values; rotation and cache; attention; output; norm and sum;
# gate; up; hidden values; down.
LAYER = {"round_tokens": 2, "rotate_append": 1, "attend_tokens": 1, "hidden_tokens": 1}
IN_BLOCKS = LAYER | {"multiply": 4, "multiply_down": 1}
# A product by torch does not multiply by the powers of two of its hidden values.
IN_F16 = LAYER | {"product": 5, "mul": 1}


class Launches(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.__name__.split(".")[0]
        if name not in FREE:
            self.found[name] += 1
        return function(*args, **(kwargs or {}))


@pytest.fixture
def launches(as_on_a_gpu, monkeypatch):
    """A function that counts the launches of a pass; products and kernels compute nothing."""
    mode = Launches()

    def counted(kernel):
        return lambda *arguments, **options: mode.found.update([kernel.name])

    def product(left, right):
        mode.found["product"] += 1
        return torch.empty(len(left), right.shape[1])

    monkeypatch.setattr(gpu_products, "kernels", lambda: Kernels(counted))
    monkeypatch.setattr(gpu_products, "_in_f32", product)

    def count(kind: str, num_layers: int, activation: str) -> Counter[str]:
        sizes = make_sizes(num_layers=num_layers, width=256, num_neurons=512, context_length=64)
        model = make_model(sizes=sizes, kind=kind, activation=activation)
        split = make_split(model, [range(512)] * num_layers, context_length=64)
        decoder, _, _ = load(model, split, mode="dense", context=64)
        mode.found.clear()
        with mode, torch.no_grad():
            decoder.forward(torch.arange(TOKENS) % 7, 0)
        return Counter(mode.found)

    return count


@pytest.mark.parametrize("activation", ["silu", "relu"])
@pytest.mark.parametrize(
    "kind, wanted", [("f16", IN_F16), ("q8_0", IN_BLOCKS), ("q4_k", IN_BLOCKS)]
)
def test_launches_of_a_layer(launches, kind, wanted, activation):
    more, fewer = (launches(kind, num_layers, activation) for num_layers in (3, 2))
    more.subtract(fewer)
    assert {name: count for name, count in more.items() if count} == wanted


def test_an_operation_is_counted(launches, monkeypatch):
    """With tiles, as on a card without tensor cores."""
    monkeypatch.setattr(gpu_products, "has_tensor_cores", lambda device: False)
    more, fewer = (launches("q8_0", num_layers, "silu") for num_layers in (3, 2))
    more.subtract(fewer)
    assert more["unpack"] == more["product"] == 5 and more.total() > sum(IN_BLOCKS.values())
