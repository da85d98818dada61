"""The decode step over a GPU and the CPU, with both roles on the CPU.
Its logits agree with the ordinary path's up to rounding for every division of the neurons, graph of
layers, type and mode, and have the same bits in every order that the events allow."""

import dataclasses
import gc
import weakref

import numpy as np
import pytest
import torch
from checkpoints import random_model, save_tokenizer
from fake_streams import FakeDevice, Race
from hybrid_plans import ALL, PLANS, SOME, F, L, made, make, planned, stepped
from models import make_sizes
from reference import assert_rows_agree, rel_error
from test_families import CASES, converted
from test_native_step import BOUNDS
from test_runtime import IDS, make_split

from hotsplit import Engine
from hotsplit.artifacts.model_file import ModelFile
from hotsplit.costs.kernel_counts import HEAD_KERNELS, HOT_KERNELS, dense_kernels
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


def hybrid(engine, split, backend):
    """The step of a loaded engine with a plan, both roles on the CPU."""
    cpu = torch.device("cpu")
    placement = Placement.of_split(split, (cpu,) * len(split.budgets))
    weights = engine._live.weights
    return hybrid_builder.build(weights, placement, engine.traffic, backend)


def steps(step, ids=IDS):
    """Logits after each of the tokens."""
    return torch.stack([step.run(token, i).clone() for i, token in enumerate(ids)])


def assert_same_in_any_order(engine, split, ids=IDS):
    want = steps(hybrid(engine, split, plain_backend(reference_kernels())), ids)
    for seed in range(3):
        step = hybrid(engine, split, FakeDevice(seed=seed).backend(reference_kernels()))
        assert torch.equal(steps(step, ids), want)


def assert_every_event_is_needed(engine, split):
    """Without any one of the waits of a step, two streams race."""
    device = FakeDevice()
    step = hybrid(engine, split, device.backend(reference_kernels()))
    before = device.num_waits
    step.run(IDS[0], 0)
    assert device.num_waits > before
    for number in range(before, device.num_waits):
        step = hybrid(engine, split, FakeDevice(dropped=number).backend(reference_kernels()))
        with pytest.raises(Race):
            step.run(IDS[0], 0)


def logged(engine, split):
    """The operations of the first token."""
    device = FakeDevice()
    step = hybrid(engine, split, device.backend(reference_kernels()))
    device.log.clear()
    step.run(IDS[0], 0)
    return device.log


@pytest.mark.parametrize("mode", ["dense", "exact", "predicted"])
@pytest.mark.parametrize("plan", PLANS)
def test_every_division_gives_the_logits_of_the_undivided_model(tmp_path, plan, mode):
    model, split = made(tmp_path, plan)
    with Engine.load(model.path, mode=mode) as whole:
        want = stepped(whole)
    with Engine.load(model.path, split=tmp_path / "s.gguf", mode=mode) as engine:
        step = hybrid(engine, split, plain_backend(reference_kernels()))
        assert rel_error(steps(step), want) < BOUNDS["f32"]


@pytest.mark.parametrize("plan", ["every kind of layer", "random"])
def test_scaled_rotary_embeddings(tmp_path, plan):
    """YaRN's magnitude reaches the kernels of both sides."""
    model, split = made(tmp_path, plan)
    scaled = {"rope_scaling": "yarn", "rope_scale": 4.0}
    with Engine.load(model.path) as plain, Engine.load(model.path, **scaled) as whole:
        unscaled, want = stepped(plain), stepped(whole)
    with Engine.load(model.path, split=tmp_path / "s.gguf", **scaled) as engine:
        got = steps(hybrid(engine, split, plain_backend(reference_kernels())))
    assert rel_error(got, want) < BOUNDS["f32"]
    assert rel_error(unscaled, want) > 100 * BOUNDS["f32"]


@pytest.mark.parametrize("mode", ["exact", "predicted"])
@pytest.mark.parametrize("plan", ["every kind of layer", "two GPUs, layers on the CPU"])
@pytest.mark.parametrize("kind", [kind for kind in BOUNDS if kind != "f32"])
def test_every_type_of_weights(tmp_path, kind, plan, mode):
    shape = make_sizes(num_layers=L, num_neurons=F, width=256 if kind.endswith("_k") else 64)
    model, split = made(tmp_path, plan, kind=kind, sizes=shape)
    with Engine.load(model.path, split=tmp_path / "s.gguf", mode=mode) as engine:
        step = hybrid(engine, split, plain_backend(reference_kernels()))
        got, want = steps(step), stepped(engine)
        if mode == "predicted":
            assert_rows_agree(got, want, BOUNDS[kind])
        else:
            assert rel_error(got, want) < BOUNDS[kind]


@pytest.mark.parametrize("activation", ["relu2", "fatrelu", "drelu", "silu", "gelu", "gelu_tanh"])
def test_every_activation(tmp_path, activation):
    model, split = made(tmp_path, "every kind of layer", activation=activation)
    for mode in ("dense", "exact"):
        with Engine.load(model.path, split=tmp_path / "s.gguf", mode=mode) as engine:
            step = hybrid(engine, split, plain_backend(reference_kernels()))
            assert rel_error(steps(step), stepped(engine)) < BOUNDS["f32"]


@pytest.mark.parametrize("kind", ["linear", "relu"])
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize(
    "plan", ["every kind of layer", "attention on the CPU", "two GPUs", "last layers on the CPU"]
)
def test_predictors_of_every_kind_and_of_the_layer_before(tmp_path, plan, offset, kind):
    model = make(tmp_path, predictor_kind=kind)
    info = dataclasses.replace(model.predictor, input_layer_offset=offset)
    dataclasses.replace(model, predictor=info).save(model.path)
    split = planned(tmp_path, model, plan)
    with Engine.load(model.path, mode="predicted") as whole:
        want = stepped(whole)
    with Engine.load(model.path, split=tmp_path / "s.gguf", mode="predicted") as engine:
        step = hybrid(engine, split, plain_backend(reference_kernels()))
        assert rel_error(steps(step), want) < BOUNDS["f32"]
    with Engine.load(model.path, mode="dense") as engine:
        assert rel_error(stepped(engine), want) > 1e-3  # the predictors make a difference


@pytest.mark.parametrize(
    "case",
    [
        "llama-biases",
        "llama-mqa-tied",
        "qwen3-biases-tied",
        "opt",
        "opt-norm-after",
        "opt-untied-plain",
        "falcon-11b",
        "falcon-one-after-the-other",
        "falcon-many-keys",
    ],
)
def test_every_graph_of_layers(tmp_path, case):
    """Random checkpoints, whose logits other tests compare with transformers'."""
    folder = random_model(tmp_path / "hf", CASES[case])
    save_tokenizer(folder, 320)
    path = converted(folder, tmp_path / "m.gguf", outtype="f32")
    model = ModelFile.load(path)
    neurons = np.arange(model.spec.most_neurons)
    some, none = neurons[::3], neurons[:0]
    for hot, dense, head in (
        ([some, neurons, none], [1, 1, 1], True),
        ([none, some, some], [0, 0, 1], True),
        ([some, some, none], [1, 0, 0], False),
    ):
        split = make_split(model, hot, dense_on_gpu=dense, head_on_gpu=head)
        split.save(tmp_path / "s.gguf")
        with Engine.load(path, split=tmp_path / "s.gguf", mode="exact") as engine:
            step = hybrid(engine, split, plain_backend(reference_kernels()))
            assert rel_error(steps(step), stepped(engine)) < BOUNDS["f32"]


@pytest.mark.parametrize("plan", PLANS)
def test_any_order_that_the_events_allow_gives_the_same_bits(tmp_path, plan):
    model, split = made(tmp_path, plan)
    with Engine.load(model.path, split=tmp_path / "s.gguf", mode="predicted") as engine:
        assert_same_in_any_order(engine, split)


@pytest.mark.parametrize("plan", ["mixed", "every kind of layer", "two GPUs, layers on the CPU"])
def test_every_event_is_needed(tmp_path, plan):
    model, split = made(tmp_path, plan)
    with Engine.load(model.path, split=tmp_path / "s.gguf", mode="predicted") as engine:
        assert_every_event_is_needed(engine, split)


def test_each_layer_with_cold_neurons_takes_one_round_trip(tmp_path):
    """A round trip is a function of the host and no copy: kernels write its input to the host and
    read its output there. A layer wholly on the GPU needs none."""
    model, split = made(tmp_path, "mixed")  # divided, all on the CPU, all on the GPU, divided
    with Engine.load(model.path, split=tmp_path / "s.gguf", mode="predicted") as engine:
        log = logged(engine, split)
        main, side = ([o.name for o in log if o.stream == stream] for stream in (0, 1))
        assert side == ["host"] * 3
        assert main.count("copy") == 3 and "host" not in main  # position, embedding, logits
        counted = sum(dense_kernels(model, i, has_predictor=True) for i in range(L))
        # Attention's kernels do the append as well, and the next norm adds up the parts.
        assert main.count("kernel") == counted - L + 3 * (HOT_KERNELS - 1) + HEAD_KERNELS


def test_norms_of_heads_are_counted_with_attention(tmp_path):
    folder = random_model(tmp_path / "hf", CASES["qwen3-biases-tied"])
    save_tokenizer(folder, 320)
    model = ModelFile.load(converted(folder, tmp_path / "m.gguf", outtype="f32"))
    assert "blk.0.attn_q_norm.weight" in model.tensors
    num_layers, neurons = model.spec.num_layers, np.arange(model.spec.most_neurons)
    split = make_split(
        model, [neurons] * num_layers, dense_on_gpu=[1] * num_layers, head_on_gpu=True
    )
    split.save(tmp_path / "s.gguf")
    with Engine.load(model.path, split=tmp_path / "s.gguf", mode="exact") as engine:
        log = logged(engine, split)
    counted = sum(dense_kernels(model, i, has_predictor=False) for i in range(num_layers))
    counted += num_layers * (HOT_KERNELS - 1) + HEAD_KERNELS
    counted += 1 - num_layers  # the embedding is on the head's GPU; attention's kernels append
    assert sum(o.name == "kernel" for o in log) == counted


def test_tied_weights_are_embedded_on_the_heads_gpu(tmp_path):
    model, split = made(tmp_path, "two GPUs", is_tied=True)
    with Engine.load(model.path, split=tmp_path / "s.gguf", mode="exact") as engine:
        log = logged(engine, split)
        first = next(operation for operation in log if operation.name == "kernel")
        assert first.stream == 1  # the stream of the second GPU


def test_the_cpu_and_the_gpu_compute_a_layer_at_the_same_time(tmp_path):
    """A layer's hot and cold neurons do not wait for each other."""
    model, split = made(tmp_path, "random")
    with Engine.load(model.path, split=tmp_path / "s.gguf", mode="predicted") as engine:
        log = logged(engine, split)
        hosts = [o for o in log if o.name == "host"]
        kernels = [o for o in log if o.name == "kernel"]
        assert len(hosts) == L
        for host in hosts:
            beside = [k for k in kernels if not (k.is_before(host) or host.is_before(k))]
            assert len(beside) == HOT_KERNELS - 1


def test_nan_reaches_the_logits(tmp_path):
    model = make(tmp_path, kind="f16")
    entry = model.tensors["blk.2.ffn_gate.weight"]
    values = np.array(entry.read())
    values[7] = np.nan
    model.tensors["blk.2.ffn_gate.weight"] = array_entry(values, "f16")
    model.save(model.path)
    for plan in ("random", "all but one", "no neuron on the GPU"):
        split = planned(tmp_path, model, plan)
        with Engine.load(model.path, split=tmp_path / "s.gguf", mode="exact") as engine:
            step = hybrid(engine, split, plain_backend(reference_kernels()))
            assert step.run(IDS[0], 0).isnan().all()


def test_a_nan_score_names_its_neuron(tmp_path):
    """The predictor runs on the CPU in one plan and on the GPU in the other."""
    model = make(tmp_path)
    for layer in range(L):
        name = f"blk.{layer}.ffn_pred_up.weight"
        values = np.array(model.tensors[name].read())
        values[5] = np.nan
        values[6:] = 0
        model.tensors[name] = array_entry(values, "f32")
    dataclasses.replace(
        model, predictor=dataclasses.replace(model.predictor, threshold_L=(0.0,) * L)
    ).save(model.path)
    with Engine.load(model.path, mode="predicted") as whole:
        want = stepped(whole)
    for plan in ("attention on the CPU", "random"):
        split = planned(tmp_path, model, plan)
        with Engine.load(model.path, split=tmp_path / "s.gguf", mode="predicted") as engine:
            step = hybrid(engine, split, plain_backend(reference_kernels()))
            assert rel_error(steps(step), want) < BOUNDS["f32"]
    gone = dataclasses.replace(model, tensors=dict(model.tensors))
    for layer in range(L):  # if the neuron is not named, the logits change
        name = f"blk.{layer}.ffn_pred_up.weight"
        values = np.nan_to_num(np.array(gone.tensors[name].read()))
        gone.tensors[name] = array_entry(values, "f32")
    gone.save(gone.path)
    with Engine.load(gone.path, mode="predicted") as engine:
        assert rel_error(stepped(engine), want) > 1e-3


def test_all_neurons_on_the_cpu(tmp_path):
    """cpu_ffn gives the logits of an engine without a plan and, except for the workspace, the bytes
    of a plan with no neuron on the GPU; it is refused with a plan."""
    model, split = made(tmp_path, "no neuron on the GPU")
    with Engine.load(model.path, mode="exact") as whole:
        want = stepped(whole)
    with Engine.load(model.path, mode="exact", cpu_ffn=True) as engine:
        assert rel_error(stepped(engine), want) < BOUNDS["f32"]
        step = hybrid(engine, split, plain_backend(reference_kernels()))
        assert rel_error(steps(step), want) < BOUNDS["f32"]
        for side, items in (("gpu", split.gpu_bytes), ("cpu", split.cpu_bytes)):
            got = dict(engine.bytes_by_role[side].items())
            assert {**got, "workspace": 0} == {**items, "workspace": 0}
    with pytest.raises(HotsplitError, match="leave one out"):
        Engine.load(model.path, split=tmp_path / "s.gguf", cpu_ffn=True)


def test_traffic_of_the_cpu_is_counted(tmp_path):
    model, split = made(tmp_path, "random")
    with Engine.load(model.path, split=tmp_path / "s.gguf", mode="dense") as engine:
        step = hybrid(engine, split, plain_backend(reference_kernels()))
        before = engine.traffic.total
        row = 4 * model.spec.hidden_size
        for position in range(3):
            step.run(IDS[0], position)
            want = (1 + position) * L * (F - len(SOME)) * 3 * row
            assert engine.traffic.total - before == want


@pytest.mark.parametrize("wrong", ["names", "cold", "hot"])
def test_the_comparison_notices_a_missing_part(tmp_path, wrong):
    model, split = made(tmp_path, "random")

    def nothing(*arguments, **options) -> None:
        pass

    broken = reference_kernels()
    if wrong != "cold":
        broken = broken.replaced(**{"predict" if wrong == "names" else "down": nothing})
    with Engine.load(model.path, split=tmp_path / "s.gguf", mode="predicted") as engine:
        want = stepped(engine)
        step = hybrid(engine, split, plain_backend(broken))
        elsewhere = torch.zeros(model.spec.hidden_size)
        if wrong == "cold":
            for struct in step.meter.structs[:-1]:
                struct.y = elsewhere.data_ptr()
        assert rel_error(steps(step), want) > 1e-2


def test_memory_that_a_graph_refers_to_is_kept(tmp_path):
    """A captured graph holds no references to the functions that submitted it."""
    model, split = made(tmp_path, "every kind of layer")
    with Engine.load(model.path, split=tmp_path / "s.gguf", mode="predicted") as engine:
        backend = plain_backend(reference_kernels())
        forgetful = dataclasses.replace(backend, prepare=lambda stream, submit: print)
        nodes = []
        was = HostNode.run

        def run(node):
            nodes.append(weakref.ref(node.kept[0]))
            was(node)

        with pytest.MonkeyPatch.context() as patch:
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
    host = HostBuffers.of(8, 8, 8, is_pinned=False)
    step = HybridStep(
        host=host,
        cache=KVCache(layers=()),
        logits=LogitsMemory(vocab_size=8),
        segments={1: tuple(segments)},
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


def test_triton_kernels_give_the_references_logits(tmp_path):
    """In Triton's interpreter, with the weights in main memory."""
    shape = make_sizes(num_layers=2, width=32, num_neurons=24, vocab_size=20)
    model = make(tmp_path, kind="q4_0", sizes=shape)
    model.save(model.path)
    split = make_split(model, [ALL[:24:2], ALL[:9]], dense_on_gpu=[1, 0], head_on_gpu=True)
    split.save(tmp_path / "s.gguf")
    with Engine.load(
        model.path, split=tmp_path / "s.gguf", mode="predicted", is_resident=False
    ) as engine:
        want = steps(hybrid(engine, split, plain_backend(reference_kernels())), IDS[:1])
        got = steps(hybrid(engine, split, plain_backend(triton_kernels())), IDS[:1])
        assert rel_error(got, want) < BOUNDS["q4_0"]
