"""Fits the fixed costs of decode steps over a GPU and the CPU to the times of whole steps of the
real backend: its graph, its copies, and the way in which it hands over to the CPU.

For each of two shapes, models with next to no neurons to compute on the CPU are loaded by plans:
all on the GPU with all layers and with a quarter of them; with half of the layers and all of them
divided, COLD neurons of each being on the CPU; and with half of them on the CPU, in one run and in
two. By least squares over these steps,

    seconds = token + gpu * layers on the GPU + cpu * layers on the CPU
              + divided * divided layers + run * runs of layers on the CPU

The terms of plans follow. `kernel_s` is gpu over the layer's kernels, of the narrow shape, where
they read next to nothing. `hand_over_s` is divided, plus what the layer's neurons take on the GPU,
less what the cold ones read on the CPU. `token_s` is token, less the head and a token on the CPU
alone.

Each round of timings is fitted by itself, so that every figure has the quartiles of its rounds.

Letters: S steps, T terms, R rounds, V vocabulary."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from hotsplit.artifacts.machine_file import CpuCosts, Figure
from hotsplit.artifacts.model_file import ModelFile
from hotsplit.artifacts.random_weights import random_model
from hotsplit.artifacts.split_file import Split
from hotsplit.costs.kernel_counts import HEAD_KERNELS, HOT_KERNELS, dense_kernels
from hotsplit.costs.part_bytes import (
    FLOAT_BYTES,
    ITEMS,
    head_bytes,
    kv_read,
    layer_bytes,
    plan_bytes,
)
from hotsplit.families.decoder_sizes import Sizes
from hotsplit.families.plain_decoder import decoder_spec
from hotsplit.measure.calibrate.cpu_costs import step_seconds
from hotsplit.measure.timing.interleave import Probe, time_rounds
from hotsplit.model.spec import Rotary
from hotsplit.runtime.engine import Engine
from hotsplit.runtime.kernels.gpu.kernels import reference_kernels
from hotsplit.runtime.model.placement import Placement
from hotsplit.runtime.step import hybrid_builder
from hotsplit.runtime.step.backend import plain_backend
from hotsplit.runtime.step.workspace import workspace_bytes

COLD = 64  # neurons of a divided layer that are on the CPU
CONTEXT = 64
STEPS = 12
LEAST_S = 1e-9
MORE = 1.05  # than starts and bytes, from which on a narrow layer shows kernel_s


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes of the models of one width."""

    num_layers: int
    hidden_size: int
    num_neurons: int
    vocab_size: int = 32_000
    head_dim: int = 128

    def model(self, num_layers: int) -> ModelFile:
        """A random model whose layers share their tensors."""
        heads = self.hidden_size // self.head_dim
        sizes = Sizes(
            num_layers=1,
            hidden_size=self.hidden_size,
            num_neurons=self.num_neurons,
            num_heads=heads,
            num_kv_heads=max(1, heads // 4),
            head_dim=self.head_dim,
            vocab_size=self.vocab_size,
            context_length=CONTEXT,
        )
        one = random_model(decoder_spec(sizes, Rotary(theta=1e4, pairing="adjacent"), "relu"))
        spec = decoder_spec(
            replace(sizes, num_layers=num_layers), Rotary(theta=1e4, pairing="adjacent"), "relu"
        )
        tensors = {
            name.replace("blk.0.", f"blk.{layer}."): entry
            for name, entry in one.tensors.items()
            for layer in (range(num_layers) if name.startswith("blk.") else (0,))
        }
        return replace(one, bare_spec=spec, threshold_L=(0.0,) * num_layers, tensors=tensors)


NARROW = Shape(num_layers=8, hidden_size=1024, num_neurons=1024)
WIDE = Shape(num_layers=4, hidden_size=4096, num_neurons=8192, vocab_size=4096)
# Where memory is short.
SMALLER = Shape(num_layers=4, hidden_size=2048, num_neurons=4096, vocab_size=4096)


@dataclass(frozen=True, kw_only=True)
class TimedStep:
    """One kind of step that is timed: numbers of layers, and which are on the CPU."""

    num_layers: int
    num_divided: int = 0
    on_cpu: tuple[int, ...] = ()

    @property
    def terms_T(self) -> tuple[int, ...]:
        """How often each term of a step is in it, in the order of the module's docstring."""
        starts = [layer for layer in self.on_cpu if layer - 1 not in self.on_cpu]
        num_cpu = len(self.on_cpu)
        return 1, self.num_layers - num_cpu, num_cpu, self.num_divided, len(starts)


def steps_of(shape: Shape) -> tuple[TimedStep, ...]:
    """The steps that are timed for a shape, of at least four layers."""
    count, half = shape.num_layers, shape.num_layers // 2
    quarter = half // 2
    apart = (*range(quarter), *range(half, half + quarter))
    return (
        TimedStep(num_layers=count),
        TimedStep(num_layers=count // 4),
        TimedStep(num_layers=count, num_divided=half),
        TimedStep(num_layers=count, num_divided=count),
        TimedStep(num_layers=count, on_cpu=tuple(range(half))),
        TimedStep(num_layers=count, on_cpu=apart),
    )


def plan_of(model: ModelFile, step: TimedStep) -> Split:
    """The plan of a step, in mode dense."""
    spec = model.spec
    num_neurons, dense = spec.most_neurons, [n not in step.on_cpu for n in range(spec.num_layers)]
    cold = [COLD if layer < step.num_divided else 0 for layer in range(spec.num_layers)]
    num_hot = [num_neurons - cold[n] if dense[n] else 0 for n in range(spec.num_layers)]
    (gpu,), cpu = plan_bytes(
        model,
        context_length=CONTEXT,
        num_hot=num_hot,
        dense_on_gpu=dense,
        head_on_gpu=True,
        workspace=workspace_bytes(model, CONTEXT, "dense", 1),
    )
    return Split(
        model_id=model.model_id,
        mode="dense",
        vram_budget_bytes=sum(gpu.values()),
        context_length=CONTEXT,
        hot=tuple(np.arange(count, dtype=np.int32) for count in num_hot),
        dense_on_gpu=tuple(dense),
        head_on_gpu=True,
        gpu_bytes={i: gpu[i] for i in ITEMS},
        cpu_bytes={i: cpu[i] for i in ITEMS},
        status="calibrate",
        objective_s=1.0,
        bound_s=1.0,
        solve_s=0.0,
    )


def engine_of(model: ModelFile, plan: Split, device: torch.device) -> Engine:
    """An engine with this plan, whose decode step is a hybrid one. On the CPU, both sides are
    there, with the plain backend."""
    engine = Engine.of(model, plan, mode="dense", device=str(device))
    if device.type == "cpu":
        live = engine._live
        step = hybrid_builder.build(
            live.weights,
            Placement.of_split(plan, (device,)),
            engine.traffic,
            plain_backend(reference_kernels()),
        )
        engine._sequences.decoder = replace(live, native=step)
    return engine


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """The seconds of a shape's steps in every round, f64 [R, S]."""

    shape: Shape
    seconds_RS: np.ndarray

    def fitted_RT(self) -> np.ndarray:
        """The terms of every round."""
        terms_ST = np.array([step.terms_T for step in steps_of(self.shape)], np.float64)
        return np.linalg.lstsq(terms_ST, self.seconds_RS.T, rcond=None)[0].T


def time_steps(
    shapes: Sequence[Shape],
    device: torch.device,
    time_limit_s: float,
    on_probe: Callable[[float], None] = lambda count: None,
) -> list[StepTimes]:
    """Times the steps of all shapes in turn. The engines of one shape are loaded at a time."""
    found = []
    for shape in shapes:
        models = {n: shape.model(n) for n in {step.num_layers for step in steps_of(shape)}}
        with ExitStack() as stack:
            probes = []
            for number, step in enumerate(steps_of(shape)):
                model = models[step.num_layers]
                engine = stack.enter_context(engine_of(model, plan_of(model, step), device))
                probes.append(Probe(name=str(number), seconds=partial(step_seconds, engine, STEPS)))
            times = time_rounds(probes, time_limit_s / len(shapes), on_probe)
        seconds_RS = np.array([times[probe.name] for probe in probes]).T
        found.append(StepTimes(shape=shape, seconds_RS=seconds_RS))
    return found


@dataclass(frozen=True, kw_only=True)
class Card:
    """A GPU's known rates in bytes per second, and the seconds of a kernel that does nothing."""

    bandwidth: float
    link: float
    launch_s: float


@dataclass(frozen=True, kw_only=True)
class FittedCosts:
    """The fitted figures of a GPU; see artifacts.machine_file.Gpu."""

    kernel_s: Figure
    token_s: Figure
    hand_over_s: Figure
    cpu_run_s: Figure


def fit(narrow: StepTimes, wide: StepTimes, card: Card, cpu: CpuCosts) -> FittedCosts:
    """The figures that follow from these times."""
    layer_R = narrow.fitted_RT()[:, 1]
    model = narrow.shape.model(1)
    num_kernels = dense_kernels(model, 0, has_predictor=False) + HOT_KERNELS
    sizes = layer_bytes(model, 0)
    read = sizes.attention + narrow.shape.num_neurons * sizes.neuron + kv_read(model, 0, CONTEXT)
    is_floor = np.median(layer_R) > MORE * (num_kernels * card.launch_s + read / card.bandwidth)
    kernel_R = layer_R / num_kernels
    kernel_s = _figure(kernel_R if is_floor else np.full_like(kernel_R, card.launch_s))
    tokens, hand_overs, runs = [], [], []
    for times in (narrow, wide):
        token_R, _, _, divided_R, run_R = times.fitted_RT().T
        model, vocab = times.shape.model(1), times.shape.vocab_size
        # A token apart from its layers and its use of the GPU: the head, its logits, the CPU.
        launches_s = HEAD_KERNELS * card.launch_s
        head_s = max(
            HEAD_KERNELS * kernel_s.median, launches_s + head_bytes(model) / card.bandwidth
        )
        copy_s = FLOAT_BYTES * vocab / card.link
        tokens.append(token_R - (head_s + copy_s + cpu.token_s.median + vocab * cpu.logit_s.median))
        # A divided layer besides its hand-over: the hot neurons of an undivided one, which the
        # hand-over replaces, less the cold neurons.
        neuron_bytes = layer_bytes(model, 0).neuron
        hot_bytes = times.shape.num_neurons * neuron_bytes
        hot_s = HOT_KERNELS * kernel_s.median + hot_bytes / card.bandwidth
        cold_s = COLD * neuron_bytes / (1e9 * cpu.all_rows_gb_per_s["f16"].median)
        hand_overs.append(divided_R + (hot_s - cold_s))
        runs.append(run_R)
    return FittedCosts(
        kernel_s=kernel_s,
        token_s=_figure(np.concatenate(tokens)),
        hand_over_s=_figure(np.concatenate(hand_overs)),
        cpu_run_s=_figure(np.concatenate(runs)),
    )


def _figure(values_R: np.ndarray) -> Figure:
    return Figure.of_rounds(np.maximum(values_R, LEAST_S).tolist(), is_rate=False)
