"""The decode step over a GPU and the CPU, with both roles on the CPU.
Its logits agree with the ordinary path's up to rounding for every division of the neurons, graph of
layers, type and mode. test_fake_step and test_fake_replay have the order of its operations."""

import dataclasses
import gc
import weakref

import numpy as np
import pytest
import torch
from hybrid_plans import ALL, PLANS_AND_MODES, SOME, F, L, model_of, split_of, stepped
from models import make_model, make_sizes
from reference import assert_rows_agree, rel_error
from test_native_step import BOUNDS
from test_runtime import IDS, make_split

from hotsplit import Engine
from hotsplit.errors import HotsplitError
from hotsplit.files.gguf_file import array_entry
from hotsplit.runtime.cache.kv_cache import KVCache
from hotsplit.runtime.device.streams import HostNode
from hotsplit.runtime.kernels.gpu.kernels import reference_kernels, triton_kernels
from hotsplit.runtime.model.placement import Placement
from hotsplit.runtime.ops.neurons.feed_forward import Traffic
from hotsplit.runtime.step import hybrid_builder
from hotsplit.runtime.step.backend import plain_backend, without_collection
from hotsplit.runtime.step.batch import LogitsMemory
from hotsplit.runtime.step.hybrid_step import HybridStep, Meter, Segment
from hotsplit.runtime.step.native_parts import HostBuffers


def hybrid(engine, split, backend=None, **options):
    """The step of a loaded engine with a plan, both roles on the CPU; by default by the kernels'
    reference, without streams."""
    cpu = torch.device("cpu")
    placement = Placement.of_split(split, (cpu,) * len(split.budgets))
    backend = backend or plain_backend(reference_kernels())
    return hybrid_builder.build(engine._live.weights, placement, engine.traffic, backend, **options)


def steps(step, ids=IDS):
    """Logits after each of the tokens."""
    return torch.stack([step.run(token, i).clone() for i, token in enumerate(ids)])


def loaded(model, split=None, mode="predicted", **options):
    return Engine.of(model, split, mode=mode, device="cpu", **options)


def assert_as_undivided(model, *splits, mode="predicted", **options):
    """The logits of the engine's own step, without a plan."""
    with loaded(model, mode=mode, **options) as whole:
        want = stepped(whole)
    for split in splits:
        with loaded(model, split, mode, **options) as engine:
            assert rel_error(steps(hybrid(engine, split)), want) < BOUNDS["f32"]


@pytest.mark.parametrize("plan, mode", PLANS_AND_MODES)
def test_every_division_gives_the_logits_of_the_undivided_model(plan, mode):
    model = model_of()
    assert_as_undivided(model, split_of(model, plan), mode=mode)


@pytest.mark.parametrize("plan", ["every kind of layer", "random"])
def test_scaled_rotary_embeddings(plan):
    """YaRN's magnitude reaches the kernels of both sides."""
    model, scaled = model_of(), {"rope_scaling": "yarn", "rope_scale": 4.0}
    assert_as_undivided(model, split_of(model, plan), **scaled)
    with loaded(model) as plain, loaded(model, **scaled) as whole:
        assert rel_error(stepped(plain), stepped(whole)) > 100 * BOUNDS["f32"]


@pytest.mark.parametrize(
    "plan, mode", [("every kind of layer", "predicted"), ("two GPUs, layers on the CPU", "exact")]
)
@pytest.mark.parametrize("kind", [*(kind for kind in BOUNDS if kind != "f32"), "iq1_table"])
def test_every_type_of_weights(kind, plan, mode):
    width = 256 if kind.endswith(("_k", "_table")) else 64
    model = model_of(kind=kind, sizes=make_sizes(num_layers=L, num_neurons=F, width=width))
    with loaded(model, split := split_of(model, plan), mode) as engine:
        got, want = steps(hybrid(engine, split)), stepped(engine)
    if mode == "predicted":
        assert_rows_agree(got, want, BOUNDS[kind])
    else:
        assert rel_error(got, want) < BOUNDS[kind]


@pytest.mark.parametrize("mode", ["dense", "exact"])
@pytest.mark.parametrize("activation", ["relu2", "fatrelu", "drelu", "silu", "gelu", "gelu_tanh"])
def test_every_activation(activation, mode):
    model = model_of(activation=activation)
    assert_as_undivided(model, split_of(model, "every kind of layer"), mode=mode)


@pytest.mark.parametrize("kind", ["linear", "relu"])
@pytest.mark.parametrize(
    "plan, offset",
    [
        ("every kind of layer", 0),
        ("every kind of layer", 1),
        ("attention on the CPU", 1),
        ("two GPUs", 1),
        ("last layers on the CPU", 0),
    ],
)
def test_predictors_of_every_kind_and_of_the_layer_before(plan, offset, kind):
    model = model_of(predictor_kind=kind)
    info = dataclasses.replace(model.predictor, input_layer_offset=offset)
    model = dataclasses.replace(model, predictor=info)
    assert_as_undivided(model, split_of(model, plan))
    with loaded(model) as predicted, loaded(model, mode="dense") as dense:
        assert rel_error(stepped(dense), stepped(predicted)) > 1e-3  # predictors do something


def with_entries(model, name, change):
    """The model in which `change` of each layer's values of this name has been made."""
    tensors = dict(model.tensors)
    for layer in range(L):
        values = np.array(tensors[f"blk.{layer}.{name}.weight"].read())
        kind = tensors[f"blk.{layer}.{name}.weight"].kind
        tensors[f"blk.{layer}.{name}.weight"] = array_entry(change(values), kind)
    return dataclasses.replace(model, tensors=tensors)


@pytest.mark.parametrize("plan", ["random", "all but one", "no neuron on the GPU"])
def test_nan_reaches_the_logits(plan):
    def with_nan(values):
        values[7] = np.nan
        return values

    model = with_entries(model_of(kind="f16"), "ffn_gate", with_nan)
    with loaded(model, split := split_of(model, plan), "exact") as engine:
        assert hybrid(engine, split).run(IDS[0], 0).isnan().all()


@pytest.mark.parametrize("plan", ["attention on the CPU", "random"])
def test_a_nan_score_names_its_neuron(plan):
    """The predictor runs on the CPU in one plan and on the GPU in the other."""

    def with_nan(values):
        values[5], values[6:] = np.nan, 0
        return values

    model = with_entries(model_of(), "ffn_pred_up", with_nan)
    info = dataclasses.replace(model.predictor, threshold_L=(0.0,) * L)
    model = dataclasses.replace(model, predictor=info)
    assert_as_undivided(model, split_of(model, plan))
    gone = with_entries(model, "ffn_pred_up", np.nan_to_num)  # if the neuron is not named
    with loaded(model) as whole, loaded(gone) as other:
        assert rel_error(stepped(other), stepped(whole)) > 1e-3


def test_all_neurons_on_the_cpu():
    """cpu_ffn gives the logits of an engine without a plan and, except for the workspace, the bytes
    of a plan with no neuron on the GPU; it is refused with a plan."""
    model = model_of()
    split = split_of(model, "no neuron on the GPU")
    with loaded(model, mode="exact") as whole:
        want = stepped(whole)
    with loaded(model, mode="exact", cpu_ffn=True) as engine:
        assert rel_error(stepped(engine), want) < BOUNDS["f32"]
        assert rel_error(steps(hybrid(engine, split)), want) < BOUNDS["f32"]
        for side, items in (("gpu", split.gpu_bytes), ("cpu", split.cpu_bytes)):
            assert engine.bytes_by_role[side] | {"workspace": 0} == items | {"workspace": 0}
    with pytest.raises(HotsplitError, match="leave one out"):
        loaded(model, split, cpu_ffn=True)


def test_traffic_of_the_cpu_is_counted():
    model = model_of()
    with loaded(model, split := split_of(model, "random"), "dense") as engine:
        step, before = hybrid(engine, split), engine.traffic.total
        of_token = L * (F - len(SOME)) * 3 * 4 * model.spec.hidden_size
        for position in range(3):
            step.run(IDS[0], position)
            assert engine.traffic.total - before == (1 + position) * of_token


@pytest.mark.parametrize("wrong", ["predict", "down", "cold"])
def test_the_comparison_notices_a_missing_part(wrong):
    """The names, the hot neurons or the cold ones are missing."""
    model, kernels = model_of(), reference_kernels()
    if wrong != "cold":
        kernels = kernels.replaced(**{wrong: lambda *arguments, **options: None})
    with loaded(model, split := split_of(model, "random")) as engine:
        want = stepped(engine)
        step = hybrid(engine, split, plain_backend(kernels))
        elsewhere = torch.zeros(model.spec.hidden_size)
        for struct in step.meter.structs[:-1] if wrong == "cold" else ():
            struct.y = elsewhere.data_ptr()
        assert rel_error(steps(step), want) > 1e-2


def test_memory_that_a_graph_refers_to_is_kept(monkeypatch):
    """A captured graph holds no references to the functions that submitted it."""
    model, nodes, was = model_of(), [], HostNode.run

    def run(node):
        nodes.append(weakref.ref(node.kept[0]))
        was(node)

    with loaded(model, split := split_of(model, "every kind of layer")) as engine:
        backend = plain_backend(reference_kernels())
        forgetful = dataclasses.replace(backend, prepare=lambda stream, submit: print)
        with monkeypatch.context() as patch:
            patch.setattr(HostNode, "run", run)
            step = hybrid(engine, split, forgetful)
        gc.collect()
        assert len(nodes) == 6 and all(node() is not None for node in nodes)
        del step
        gc.collect()
        assert all(node() is None for node in nodes)


class WaitedFor:
    """A stream that does nothing, and remembers whether it was waited for."""

    is_finished = False

    def follow(self):
        pass

    def wait(self, event):
        pass

    def record(self):
        pass

    def finish(self, *, sleeps):
        self.is_finished = True


def test_after_an_interrupt_nothing_is_left_running():
    def interrupted():
        raise KeyboardInterrupt

    streams = WaitedFor(), WaitedFor()
    runs = (lambda: None), interrupted
    segments = [
        Segment(main=main, run=run, is_graph=True) for main, run in zip(streams, runs, strict=True)
    ]
    host = HostBuffers.of(make_model().spec, is_pinned=False)
    step = HybridStep(
        host=host,
        cache=KVCache(layers=()),
        logits=LogitsMemory(vocab_size=8),
        segments={("step", 1): tuple(segments)},
        before=None,
        after=None,
        positions=None,
        meter=Meter(traffic=Traffic(), structs=[]),
        passes=None,
        kept=(),
    )
    with pytest.raises(KeyboardInterrupt):
        step.run(1, 0)
    assert all(main.is_finished for main in streams)


def test_no_garbage_is_collected_during_a_capture():
    with pytest.raises(ZeroDivisionError), without_collection():
        assert not gc.isenabled()
        raise ZeroDivisionError
    assert gc.isenabled()


def test_triton_kernels_give_the_references_logits():
    """In Triton's interpreter, with the weights in main memory."""
    shape = make_sizes(num_layers=1, width=32, num_neurons=24, vocab_size=20)
    model = model_of(kind="q4_0", sizes=shape)
    split = make_split(model, [ALL[:24:2]])
    with loaded(model, split, is_resident=False) as engine:
        want = steps(hybrid(engine, split), IDS[:1])
        got = steps(hybrid(engine, split, plain_backend(triton_kernels())), IDS[:1])
        assert rel_error(got, want) < BOUNDS["q4_0"]
