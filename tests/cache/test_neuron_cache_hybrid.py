"""The neuron cache over a GPU and the CPU, with the CPU in both roles: every step equals, bit for
bit, a static step with the same neurons in the same slots. test_fake_step and test_fake_mixtures
have copies that arrive late."""

import dataclasses

import numpy as np
import pytest
import torch
from models import make_model, make_sizes
from random_policy import random_setup
from test_runtime import IDS as TOKENS
from test_runtime import make_split

from hotsplit import Engine
from hotsplit.errors import HotsplitError
from hotsplit.runtime.device.bits import unpack_bits
from hotsplit.runtime.kernels.gpu.kernels import reference_kernels, triton_kernels
from hotsplit.runtime.kernels.planar import PLANAR_KIND, planar
from hotsplit.runtime.model.loader import load_weights
from hotsplit.runtime.model.placement import Placement
from hotsplit.runtime.neuron_cache.setup import first_residents
from hotsplit.runtime.ops.neurons.feed_forward import Traffic
from hotsplit.runtime.step import hybrid_builder
from hotsplit.runtime.step.backend import plain_backend
from hotsplit.runtime.weights.resident import Residence

CPU = torch.device("cpu")
F, L = 96, 4
IDS = TOKENS[:5]
ALL, NONE = np.arange(F), np.arange(0)
SOME = np.random.default_rng(5).permutation(F)[:37]
# Hot neurons of each layer, which layers have attention on the GPU, whether the head is there.
PLANS = {
    "random": ([SOME] * L, [1] * L, True),
    "all but one": ([ALL[1:]] * L, [1] * L, True),
    "every kind of layer": ([SOME, ALL, NONE, SOME], [1, 1, 0, 0], False),
}


@dataclasses.dataclass
class Cached:
    """A step with a cache, and what it was made from."""

    model: object
    split: object
    mode: str
    weights: object
    cache: object
    step: object = None

    @classmethod
    def of(cls, tmp_path, plan="random", mode="predicted", backend=None, seed=0, **options):
        shape = options.pop("sizes", None) or make_sizes(num_layers=L, num_neurons=F)
        hot, dense, head = PLANS[plan] if isinstance(plan, str) else plan
        model = make_model(sizes=shape, predictor_rank=8, **options)
        model = dataclasses.replace(
            model, threshold_L=(0.05,) * shape.num_layers, path=tmp_path / "m.gguf"
        )
        split = make_split(model, hot, dense_on_gpu=dense, head_on_gpu=head)
        return cls.made(model, split, mode, backend, random_setup(seed=seed, most_rows=12))

    @classmethod
    def made(cls, model, split, mode, backend, setup):
        resident = first_residents(model, split)
        weights = weights_of(model, split, mode, resident)
        found = cls(model, split, mode, weights, setup.cache(model.spec, resident))
        found.step = found.built(backend or plain_backend(reference_kernels()))
        return found

    def built(self, backend):
        placement = Placement.of_split(self.split, (CPU,) * len(self.split.budgets))
        return hybrid_builder.build(
            self.weights, placement, Traffic(), backend, neuron_cache=self.cache
        )

    def in_slots(self):
        """(the units on the GPU now, the residents of a load with those)."""
        residency = self.cache.residency
        return [
            residency.id_N(layer).copy() if residency.num_slots_L[layer] else ids
            for layer, ids in enumerate(self.split.hot)
        ], None

    def static(self):
        """(a step without a cache, its weights), with the same units on the GPU and the same keys
        and values."""
        hot, resident = self.in_slots()
        split = dataclasses.replace(self.split, hot=tuple(hot))
        weights = weights_of(self.model, split, self.mode, resident)
        placement = Placement.of_split(split, (CPU,) * len(split.budgets))
        backend = plain_backend(reference_kernels())
        step = hybrid_builder.build(weights, placement, Traffic(), backend)
        restore(weights, keys_and_values(self.weights))  # building ran a trial step
        return step, weights


def keys_and_values(weights):
    return [(c.key_BKPX.clone(), c.value_BKPX.clone()) for c in weights.cache.layers]


def restore(weights, kept):
    for cache, (keys, values) in zip(weights.cache.layers, kept, strict=True):
        cache.key_BKPX.copy_(keys)
        cache.value_BKPX.copy_(values)


def weights_of(model, split, mode, resident):
    placement = Placement.of_split(split, (CPU,) * len(split.budgets))
    options = {"residence": Residence(), "resident_LN": resident}
    length = model.spec.context_length
    return load_weights(model, placement, mode, length, notice=print, **options)


def ran(cached, ids, start=0):
    """The logits of each step."""
    return [cached.step.run(token, at).clone() for at, token in enumerate(ids, start)]


def are_static(cached, ids, start=0):
    """Whether each step equals a static one bit for bit."""
    found = []
    for position, token in enumerate(ids, start):
        static, _ = cached.static()
        want = static.run(token, position).clone()
        found.append(torch.equal(cached.step.run(token, position), want))
    return found


@pytest.mark.parametrize("mode", ["exact", "predicted"])
@pytest.mark.parametrize("plan", PLANS)
def test_every_step_equals_a_static_one_bit_for_bit(tmp_path, plan, mode):
    cached = Cached.of(tmp_path, plan, mode)
    for position, token in enumerate(IDS):
        assert are_static(cached, [token], position) == [True]
        cached.cache.slots.check()
    assert cached.cache.num_swaps >= len(IDS)


@pytest.mark.parametrize(
    "kind, mode",
    [("f16", "exact"), ("q8_0", "predicted"), ("q4_0", "exact"), ("q6_k", "predicted")],
)
def test_every_type_of_rows(tmp_path, kind, mode):
    shape = make_sizes(num_layers=2, num_neurons=F, width=256 if kind == "q6_k" else 64)
    cached = Cached.of(
        tmp_path, mode=mode, kind=kind, sizes=shape, plan=([SOME, SOME], [1, 0], True)
    )
    assert all(are_static(cached, IDS[:3]))


@pytest.mark.parametrize("mode", ["exact", "predicted"])
@pytest.mark.parametrize("plan", ["random", "every kind of layer"])
def test_the_policy_sees_the_neurons_that_are_read(tmp_path, plan, mode):
    cached = Cached.of(tmp_path, plan, mode)
    cached.model.save(cached.model.path)
    ids = TOKENS[:8]
    ran(cached, ids)
    shown = np.concatenate(cached.cache.policy.shown).view(np.int32)
    seen = {}
    with Engine.load(cached.model.path, mode=mode) as whole:
        ffn = whole.layers[0].ffn

        def observe(name, layer, tensor):
            is_read = ffn.gate.act(tensor)[1]
            seen[layer] = tensor > ffn.predictor.threshold if mode == "predicted" else is_read

        name = "ffn_predicted" if mode == "predicted" else "ffn_gate"
        with whole.observe(observe, lambda n, layer: n == name), whole.sequence() as text:
            text.extend(ids)
    for layer in range(L):
        if not cached.cache.residency.num_slots_L[layer]:
            continue
        got = torch.stack([unpack_bits(torch.from_numpy(row))[:F] for row in shown[:, layer]])
        assert (got != seen[layer]).float().mean() < 0.01 and 0.05 < got.float().mean() < 0.95


def test_an_interrupted_step_leaves_its_swaps_to_the_next(tmp_path):
    cached = Cached.of(tmp_path)
    ran(cached, IDS[:3])
    due, count = cached.cache._num_pending, cached.cache.num_swaps
    submitted = cached.step._submitted
    cached.step._submitted = interrupted
    with pytest.raises(KeyboardInterrupt):
        cached.step.run(IDS[3], 3)
    assert due and cached.cache._num_pending == due and cached.cache.num_swaps == count
    cached.step._submitted = submitted
    for position, token in enumerate(TOKENS[3:6], 3):
        assert are_static(cached, [token], position) == [True]
        cached.cache.slots.check()


def interrupted(*arguments):
    raise KeyboardInterrupt


@pytest.mark.parametrize("where", ["finish", "start"])
def test_an_interrupted_move_is_not_computed_with(tmp_path, monkeypatch, where):
    """Tables and slots may disagree then, so the next step is refused."""
    cached = Cached.of(tmp_path)
    cached.step.run(IDS[0], 0)
    assert cached.cache._num_pending
    monkeypatch.setattr(cached.cache.slots, where, interrupted)
    with pytest.raises(KeyboardInterrupt):
        cached.step.run(IDS[1], 1)
    monkeypatch.undo()
    with pytest.raises(HotsplitError, match="was interrupted while it moved neurons"):
        cached.step.run(IDS[2], 2)
    with pytest.raises(HotsplitError, match="was interrupted while it moved neurons"):
        cached.cache.complete()  # as rebuilding a step does


def test_a_new_step_takes_over_what_the_old_one_began(tmp_path):
    """This happens after new thresholds: the new step takes over tables, slots and unfinished
    copies."""
    cached = Cached.of(tmp_path, mode="exact")
    ran(cached, IDS[:4])
    assert cached.cache._num_pending
    kept = keys_and_values(cached.weights)
    cached.step = cached.built(plain_backend(reference_kernels()))
    restore(cached.weights, kept)
    for position, token in enumerate(TOKENS[4:7], 4):
        assert are_static(cached, [token], position) == [True]
        cached.cache.slots.check()


@pytest.mark.parametrize("kind", ["q8_0", "q6_k"])
def test_rows_of_a_file_become_planar_on_a_gpu(tmp_path, kind):
    """Cold rows have the file's layout and hot ones the GPU's; Triton's kernel rearranges a row
    that becomes hot."""
    width = 256 if kind == "q6_k" else 64
    shape = make_sizes(num_layers=1, num_neurons=24, width=width, vocab_size=20)
    plan = ([np.arange(9)], [1], True)
    cached = Cached.of(tmp_path, mode="exact", kind=kind, sizes=shape, plan=plan)
    (layer,) = cached.weights.layers
    hot, cold = layer.ffn.blocks
    before = [matrix.data.clone().view(torch.uint8) for matrix in cold.matrices]

    def on_gpu(matrix):
        if matrix.kind not in PLANAR_KIND:
            return dataclasses.replace(matrix, data=matrix.data.contiguous())
        data, made = planar(matrix.data.contiguous(), matrix.kind)
        return dataclasses.replace(matrix, data=data, kind=made)

    moved = dataclasses.replace(
        hot,
        gate=dataclasses.replace(hot.gate, weight=on_gpu(hot.gate.weight)),
        up=dataclasses.replace(hot.up, weight=on_gpu(hot.up.weight)),
        down=on_gpu(hot.down),
    )
    layer = dataclasses.replace(layer, ffn=dataclasses.replace(layer.ffn, blocks=(moved, cold)))
    cached.weights = dataclasses.replace(cached.weights, layers=(layer,))
    triton = triton_kernels()
    kernels = reference_kernels().replaced(scatter=triton.scatter, pack_open=triton.pack_open)
    cached.step = cached.built(plain_backend(kernels))
    ran(cached, [3, 7, 1])
    cached.cache.complete()
    cached.cache.slots.check()
    assert cached.cache.num_swaps > 5
    ids = cached.cache.residency.id_N(0)
    for matrix, rows in zip(moved.matrices, before, strict=True):
        want = rows[torch.from_numpy(ids).long()].contiguous()
        source = cold.down.kind
        assert torch.equal(matrix.data.view(torch.uint8), planar(want, source)[0])
    # The packed bits are those of the reference.
    other = Cached.of(tmp_path, mode="exact", kind=kind, sizes=shape, plan=plan)
    ran(other, [3, 7, 1])
    shown = [np.concatenate(each.cache.policy.shown) for each in (cached, other)]
    assert (shown[0] == shown[1]).all()


@pytest.mark.parametrize("wrong", ["scatter", "ids", "cold"])
def test_the_comparison_finds_what_is_not_moved(tmp_path, wrong):
    backend = plain_backend(reference_kernels())
    if wrong == "scatter":
        kernels = backend.kernels.replaced(scatter=lambda *arguments: None)
        backend = dataclasses.replace(backend, kernels=kernels)
    cached = Cached.of(tmp_path, backend=backend)
    if wrong == "ids":
        cached.cache.slots.carrier._ids = lambda swaps: (np.zeros((len(swaps), 0), np.int64),) * 2
    if wrong == "cold":
        cached.cache.residency.cold = lambda layer: cached.weights.layers[layer].ffn.blocks[1].id_N
    assert not all(are_static(cached, IDS))
