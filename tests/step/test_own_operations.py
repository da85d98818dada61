"""A position-wise operation that no file of the product names, at several places of a layer: on a
GPU it gives what torch gives, and memory is counted for it."""

import sys
from collections.abc import Mapping
from ctypes import Structure, c_void_p
from dataclasses import dataclass, replace
from types import ModuleType
from typing import ClassVar

import numpy as np
import pytest
import torch
from models import make_model, make_sizes
from reference import logits_ref, rel_error
from test_hybrid_step import steps
from test_runtime import make_split

from hotsplit import Engine
from hotsplit.costs.bytes_read import bytes_read
from hotsplit.costs.kernel_counts import dense_kernels
from hotsplit.costs.part_bytes import bytes_on_one_side
from hotsplit.errors import HotsplitError
from hotsplit.model.operations import PositionWise
from hotsplit.model.spec import Add, ModelSpec, Neurons
from hotsplit.runtime.kernels.gpu.gpu_kernel import Versions, gpu_kernel
from hotsplit.runtime.kernels.gpu.kernels import reference_kernels
from hotsplit.runtime.model.loader import load_weights
from hotsplit.runtime.model.placement import Placement
from hotsplit.runtime.ops.loaded_op import LoadedOp, in_layer
from hotsplit.runtime.ops.neurons.feed_forward import Traffic
from hotsplit.runtime.step import hybrid_builder
from hotsplit.runtime.step.backend import plain_backend
from hotsplit.runtime.step.batch import rows_of
from hotsplit.runtime.step.pass_device import PassSetup
from hotsplit.runtime.step.program import step_program
from hotsplit.runtime.step.program_summary import file_form
from hotsplit.runtime.step.workspace import workspace_bytes

CPU, IDS = torch.device("cpu"), [1, 5, 2, 3]


@dataclass(frozen=True, kw_only=True)
class Scaling(PositionWise):
    """y = w * x, with w [D]; `name`: of w."""

    room: ClassVar[str] = "scaling"
    num_kernels: ClassVar[int] = 1
    kind: str = "scaling"
    reads: str
    writes: str

    def part(self) -> str:
        return self.kind

    @property
    def inputs(self) -> tuple[str, ...]:
        return (self.reads,)

    @property
    def outputs(self) -> tuple[str, ...]:
        return (self.writes,)

    def shapes(self, hidden_size: int) -> dict[str, tuple[int, ...]]:
        return {f"{self.kind}.weight": (hidden_size,)}


@gpu_kernel(reads=("x_D",), writes=("y_D",))
def scale(weight_D: torch.Tensor, x_D: torch.Tensor, y_D: torch.Tensor) -> Versions:
    def run() -> None:
        y_D.copy_(weight_D.double() * x_D.double())

    return run, run


class ScalingStruct(Structure):
    _fields_ = [("weight", c_void_p)]


@dataclass(frozen=True, kw_only=True)
class LoadedScaling(LoadedOp):
    block: Scaling
    weight_D: torch.Tensor

    def struct(self, structs):
        return ScalingStruct(structs.vector(self.weight_D, *self.weight_D.shape))

    def launch(self, on, read, written, scratch):
        ((x_D,), (y_D,)) = read, written
        kernel = on.kernels.of(scale)
        on.launch(lambda: kernel(self.weight_D, x_D, y_D), [self.weight_D, x_D], [y_D])


@pytest.fixture(autouse=True)
def room(monkeypatch):
    module = ModuleType("hotsplit.runtime.ops.scaling")
    module.load = lambda load, blocks, layer, device: [
        LoadedScaling(
            block=block, weight_D=load.vector(in_layer(layer, f"{block.kind}.weight"), device)
        )
        for block in blocks
    ]
    monkeypatch.setitem(sys.modules, module.__name__, module)


def scaling(reads: str, writes: str) -> Scaling:
    return Scaling(kind=f"scaling_{writes}", reads=reads, writes=writes)


def spec_with(before: list, between: list, after: list) -> ModelSpec:
    """Layers of two residual sums, with more blocks before the first one, before the neurons, and
    at the end; blocks before the first sum are terms of it."""
    base = make_model(sizes=make_sizes(num_layers=2, num_neurons=96)).spec
    norm, attention, first, second, neurons, last = base.layers[0].blocks
    assert isinstance(neurons, Neurons)
    summed = replace(first, terms=(*first.terms, *(b.writes for b in before)))
    blocks = (norm, *before, attention, summed, second, *between, neurons, last, *after)
    return base.with_layers([replace(base.layers[0], blocks=blocks)] * 2)


def assert_same(spec: ModelSpec) -> None:
    """Logits of steps and of passes are those of the reference."""
    model = replace(make_model(spec=spec), threshold_L=(0.02,) * 2)
    everything = [np.arange(96)] * 2

    def scaled(block: Scaling, values, w):
        return w(f"{block.kind}.weight") * values[block.reads]

    want = logits_ref(model, IDS, own=scaled)
    for hot in (everything, [np.arange(5, 60), np.arange(0)]):
        split = make_split(model, hot)
        placement = Placement.of_split(split, (CPU,))
        weights = load_weights(model, placement, "exact", 32, notice=print)
        backend, passes = plain_backend(reference_kernels()), PassSetup(num_rows=32)
        step = hybrid_builder.build(weights, placement, Traffic(), backend, passes=passes)
        assert rel_error(steps(step, IDS), want) < 1e-5
        assert rel_error(step.run_pass(rows_of(IDS, 0, "all")), want) < 1e-5


PLACES: Mapping[str, tuple] = {
    "one before": ([scaling("attn_in", "a")], [], []),
    "two before": ([scaling("attn_in", "a"), scaling("a", "b")], [], []),
    "two after": ([], [], [scaling("x", "a"), scaling("a", "b"), Add(terms=("x", "a", "b"))]),
    "of the sum that an operation overwrites": (
        [scaling("attn_in", "a")],
        [scaling("ffn_in", "b"), Add(terms=("x", "b"))],
        [],
    ),
    "across the neurons": (
        [],
        [scaling("ffn_in", "a")],
        [scaling("a", "b"), Add(terms=("x", "b"))],
    ),
}


@pytest.mark.parametrize("place", PLACES)
def test_an_operation_at_any_place_of_a_layer(place):
    assert_same(spec_with(*PLACES[place]))


def test_plans_count_an_operation_in_layers_and_outside():
    """Its bytes, and its kernels; without a C++ file, the message names it."""
    spec = spec_with([scaling("attn_in", "a")], [scaling("ffn_in", "b")], [])
    bare, width = spec_with([], [], []), spec.hidden_size
    spec = replace(spec, first=(scaling("e", "x"),), last=(scaling("x", "out"),))
    model, without = (replace(make_model(spec=s), threshold_L=(0.02,) * 2) for s in (spec, bare))
    sizes, before = (bytes_on_one_side(each, 32, 0) for each in (model, without))
    more = {name: sizes[name] - before[name] for name in sizes if sizes[name] > before[name]}
    assert more == {"attention": 2 * 2 * 4 * width, "embedding": 2 * 4 * width}
    assert bytes_read(model) - bytes_read(without) == sum(more.values())
    kernels = [dense_kernels(each, 0, has_predictor=False) for each in (model, without)]
    assert kernels[0] == kernels[1] + 2
    program = step_program(file_form(model, None))
    own = [op for op in program if op.kind.startswith("scaling")]
    assert [op.weight_bytes for op in own] == [4 * width] * (2 + 2 * 2)
    assert workspace_bytes(model, 32, "exact", gpu_budget_bytes=1 << 26) > 0
    with pytest.raises(HotsplitError, match="the C.. library has no operation 'scaling_x'"):
        Engine.of(model, mode="exact")
