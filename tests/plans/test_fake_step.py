"""An engine on fake CUDA devices (fake_cuda): planned memory, uploads, captured steps and prompts
with streamed weights use the code for a real GPU, and give the CPU's logits."""

from contextlib import contextmanager

import pytest
import torch
from fake_cuda import library
from fake_cuda.kernels import launched
from fake_cuda.ptx_kernels import StreamedPtx
from fake_cuda.torch_cuda import fake_cuda
from hybrid_plans import ALL, F, L, made, make, stepped
from models import make_sizes
from random_policy import random_setup
from reference import assert_rows_agree, rel_error
from test_native_step import BOUNDS
from test_runtime import IDS, make_split

from hotsplit import Engine
from hotsplit.runtime import loading
from hotsplit.runtime.kernels.gpu.kernels import reference_kernels
from hotsplit.system.log_lines import lines_on_stderr

pytestmark = [
    pytest.mark.skipif(not library.can_be_built(), reason="needs a C++ compiler, and Linux")
]
TOKENS = IDS[:4]


def prompted(engine, ids):
    """Logits after a prompt, which is computed in one pass."""
    with engine.sequence() as text:
        return text.extend(ids, "last")


def on_the_cpu(path, mode, ids=TOKENS):
    """(logits of single steps, logits after a prompt)."""
    with Engine.load(path, mode=mode, device="cpu", context_length=32) as engine:
        return stepped(engine, ids), prompted(engine, ids)


def on_the_device(path, split, mode, ids=TOKENS, **options):
    with Engine.load(path, split=split, mode=mode, device="cuda", **options) as engine:
        return stepped(engine, ids), prompted(engine, ids)


@contextmanager
def checked_cuda(**options):
    """Fake devices, of which no use was wrong: afterwards no memory is left except pinned memory,
    and every host function has declared its memory."""
    with fake_cuda(**options) as cuda:
        yield cuda
    assert not library.text("violations")
    assert not [line for line in library.text("left") if not line.startswith("pinned")]
    assert not library.load().fakeNumUndeclared()


@pytest.mark.parametrize(
    "plan, is_tied", [("two GPUs, layers on the CPU", False), ("two GPUs", True)]
)
@lines_on_stderr()
def test_a_plan_on_devices_gives_the_cpus_logits(tmp_path, plan, is_tied, capsys):
    """test_fake_replay has every kind of layer. Tied weights are embedded on the head's GPU."""
    model, _ = made(tmp_path, plan, is_tied=is_tied)
    want = on_the_cpu(model.path, "predicted")
    with checked_cuda(num_devices=2) as cuda:
        got = on_the_device(model.path, tmp_path / "s.gguf", "predicted")
        assert cuda.num_graphs >= 1
    assert "hotsplit doctor" not in capsys.readouterr().err  # no part took its fallback
    for mine, right in zip(got, want, strict=True):
        assert rel_error(mine, right) < BOUNDS["f32"]


@pytest.mark.parametrize("kind", ["iq1_m", "iq3_xxs", "q1_0", "nvfp4"])
def test_types_that_are_packed_on_devices_give_the_cpus_logits(tmp_path, kind):
    """In layers of every kind. Both processors have small tables where the file has grids, and the
    scale of an nvfp4 tensor in each row."""
    sizes = make_sizes(num_layers=L, num_neurons=F, width=256)
    model, _ = made(tmp_path, "every kind of layer", kind=kind, sizes=sizes)
    want = on_the_cpu(model.path, "exact")
    with checked_cuda(num_devices=1):
        got = on_the_device(model.path, tmp_path / "s.gguf", "exact")
    for mine, right in zip(got, want, strict=True):  # a pass rounds its inputs to 16 bits
        assert rel_error(mine, right) < 2 * BOUNDS["q4_k"]


def test_captured_and_submitted_steps_give_the_same_bits_in_any_order(tmp_path):
    model, _ = made(tmp_path, "every kind of layer")
    found = []
    for number, graph in ((0, True), (1, True), (9, False)):
        with checked_cuda(seed=number):
            steps, _ = on_the_device(model.path, tmp_path / "s.gguf", "predicted", graph=graph)
            found.append(steps)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_neurons_swap_slots_beside_a_captured_step(tmp_path, monkeypatch):
    """Staging and slots are in the slab with the step's vectors, and are freed with the engine."""
    monkeypatch.setattr(loading, "setup_of", lambda *_: random_setup(most_rows=12))
    model, plan = made(tmp_path, "random")[0], tmp_path / "s.gguf"
    want, _ = on_the_cpu(model.path, "exact")
    with checked_cuda(num_devices=1, seed=2):
        with Engine.load(model.path, split=plan, mode="exact", device="cuda") as engine:
            got = stepped(engine, TOKENS)
            assert engine.neuron_cache.num_swaps > 5
            engine.neuron_cache.complete()
            torch.cuda.synchronize(0)
            engine.neuron_cache.slots.check()
            assert library.text("log").count("scatter") >= 3  # one of them is the check's
        assert not [line for line in library.text("left") if not line.startswith("pinned")]
    assert rel_error(got, want) < BOUNDS["f32"]


def small(tmp_path, kind="q4_0"):
    """Two layers with divided neurons; the attention of the second is on the CPU."""
    shape = make_sizes(num_layers=2, width=32, num_neurons=24, vocab_size=20)
    model = make(tmp_path, kind=kind, sizes=shape)
    model.save(model.path)
    split = make_split(model, [ALL[:24:2], ALL[:9]], dense_on_gpu=[1, 0], head_on_gpu=True)
    split.save(tmp_path / "s.gguf")
    return model


def test_executed_ptx_host_functions_and_a_graph_give_the_cpus_logits(tmp_path):
    """The kernels' PTX, the C++ of the cold neurons and a captured graph together."""
    model = small(tmp_path)
    ids = [3, 17, 4]
    want, _ = on_the_cpu(model.path, "predicted", ids)
    ptx = StreamedPtx(80)
    with (
        checked_cuda(kernels=ptx.kernels) as cuda,
        Engine.load(
            model.path, split=tmp_path / "s.gguf", mode="predicted", device="cuda"
        ) as engine,
    ):
        assert len(cuda.graphs) == 1
        before = len(library.text("log"))
        launches = sum(sum(texts.values()) for texts in ptx.launches.values())
        got = stepped(engine, ids)
        log = library.text("log")[before:]
        assert log.count("gate_up") == 2 * len(ids) and log.count("host function") == 4 * len(ids)
        done = sum(sum(texts.values()) for texts in ptx.launches.values()) - launches
        # torch's own kernels restore the cache after the load's trial step, and may run only now.
        others = ("copy", "host function", "write flag", "wait for flag", "torch's index_put_")
        assert done == sum(name not in others for name in log)
    assert_rows_agree(got, want, BOUNDS["q4_0"])


def test_the_comparison_notices_a_kernel_that_does_nothing(tmp_path):
    model = small(tmp_path)
    want, _ = on_the_cpu(model.path, "predicted", [3, 17, 4])
    broken = reference_kernels().replaced(down=lambda *args, **options: None)
    with fake_cuda(kernels=launched(broken)):
        got, _ = on_the_device(model.path, tmp_path / "s.gguf", "predicted", [3, 17, 4])
    assert not rel_error(got, want) < 1e-2  # NaN where nothing was written
