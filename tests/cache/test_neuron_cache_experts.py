"""The neuron cache with experts as its units, with the CPU in both roles: every step equals, bit
for bit, a static step with the same experts on the GPU, and each fault that is planted is found."""

import dataclasses

import numpy as np
import pytest
import torch
from hybrid_plans import stepped
from random_policy import random_setup
from reference import rel_error
from test_experts import ROUTES, mixture
from test_hybrid_experts import loaded, made_plan, stock
from test_native_step import BOUNDS
from test_neuron_cache_hybrid import Cached, ran, weights_of
from test_runtime import IDS as TOKENS

from hotsplit.errors import HotsplitError
from hotsplit.runtime.device.streams import PlainStream
from hotsplit.runtime.kernels.planar import planar
from hotsplit.runtime.neuron_cache.cache_slots import GpuSlots, Residency
from hotsplit.runtime.neuron_cache.expert_parts import ExpertLayer, ExpertParts, as_bytes
from hotsplit.runtime.neuron_cache.native.policy_library import SWAP
from hotsplit.runtime.neuron_cache.setup import first_residents, not_copied
from hotsplit.runtime.weights.expert_block import ExpertMatrices

CPU = torch.device("cpu")
E, NONE = 12, np.zeros(0, np.int32)
IDS = TOKENS[:5]
# Hot experts of both layers, and whether attention is on the GPU. A layer whose router is on the
# CPU has no slots.
PLANS = {
    "both layers": ([[1, 4, 7, 11], [0, 2]], [1, 1]),
    "all but one": ([list(range(1, E)), [5]], [1, 1]),
    "beside the CPU's attention": ([[3, 5], [0, 1, 2]], [0, 1]),
    "behind a layer without experts": ([[], [0, 1, 2]], [1, 1]),
}


def on_a_gpu(model, name, ids):
    """Some experts' matrices of a file as an upload stores them."""
    entry = model.tensors[name]
    raw = torch.from_numpy(np.ascontiguousarray(entry.read())[ids].copy())
    data, kind = planar(raw.view(torch.uint8), entry.kind)
    if kind == "f16":
        data = raw
    return ExpertMatrices(data=data.contiguous(), kind=kind, width=entry.shape[-1])


class CachedExperts(Cached):
    @classmethod
    def of(cls, plan="both layers", **options):
        model = stock(**options)
        setup = random_setup(seed=0, most_rows=3)
        return cls.made(model, made_plan(model, *PLANS[plan]), "dense", None, setup)

    def in_slots(self):
        """Those that tables name."""
        hot, resident = list(self.split.hot), list(first_residents(self.model, self.split))
        for layer, own in self.cache.slots.carrier.layers.items():
            hot[layer] = resident[layer] = np.flatnonzero(own.hot.places >= 0).astype(np.int32)
        return hot, resident


@pytest.mark.parametrize(
    ("plan", "options"),
    [
        ("both layers", {}),
        ("all but one", {"num_shared": 32, "has_shared_gate": True}),
        ("beside the CPU's attention", {"kind": "q8_0", "num_neurons": 32}),
        ("behind a layer without experts", {"num_dense": 1}),
    ],
)
def test_every_step_equals_a_static_one_bit_for_bit(plan, options):
    cached = CachedExperts.of(plan, **options)
    with loaded(cached.model, cached.split) as engine:
        want = stepped(engine, IDS)
    got = []
    for position, token in enumerate(IDS):
        static = cached.static()[0].run(token, position).clone()
        got.append(cached.step.run(token, position).clone())
        assert torch.equal(got[-1], static), position
    assert rel_error(torch.stack(got), want) < BOUNDS[options.get("kind", "f32")]
    cached.cache.complete()
    cached.cache.slots.check()
    assert cached.cache.num_swaps >= 3
    expert_bytes = sum(m.expert_bytes for m in cached.weights.layers[1].ffn.blocks[0].matrices)
    assert cached.cache.num_bytes == cached.cache.num_swaps * expert_bytes


def test_experts_that_are_not_pinned_stay_where_they_are():
    model = stock()
    split = made_plan(model, *PLANS["both layers"])
    resident = first_residents(model, split)
    assert "not pinned" in not_copied(weights_of(model, split, "dense", resident), resident)


def test_the_policy_sees_the_experts_that_are_chosen():
    cached = CachedExperts.of()
    ran(cached, IDS)
    shown = np.concatenate(cached.cache.policy.shown)
    seen = {}
    with loaded(cached.model, cached.split) as engine:
        see = engine.observe(
            lambda name, layer, values: seen.__setitem__(layer, values.clone()),
            lambda name, layer: name == "ffn_experts",
        )
        with see, engine.sequence() as text:
            text.extend(IDS)
    assert list(seen) == [0, 1]
    for layer, id_TK in seen.items():
        bits_TE = shown[:, layer] >> np.arange(E, dtype=np.uint32) & 1
        assert [np.flatnonzero(bits_E).tolist() for bits_E in bits_TE] == np.sort(id_TK).tolist()


@pytest.mark.parametrize("layout", ["stock", "sparse"])
@pytest.mark.parametrize("kind", ["q8_0", "q4_k", "q6_k", "iq4_nl", "f16"])
def test_experts_get_the_layout_of_a_gpu(kind, layout):
    """Slots that were loaded as a GPU's, from tiles and groups of the CPU's, have the bytes that a
    load of the incoming experts makes."""
    is_super = kind.endswith("_k")
    size = 256 if is_super else 64
    model = mixture(
        route=ROUTES["groups"], kind=kind, layout=layout, width=size, num_neurons=size, num_dense=0
    )
    split = made_plan(model, [[1, 4], [0, 2, 9]], [1, 1])
    resident = first_residents(model, split)
    (_, cold) = weights_of(model, split, "dense", resident).layers[1].ffn.blocks

    def of_gpu(ids):
        return [
            on_a_gpu(model, f"blk.1.{name}.weight", ids)
            for name in (
                "ffn_gate_exps",
                "ffn_up_exps",
                "ffn_down_exps_t" if layout == "sparse" else "ffn_down_exps",
            )
        ]

    gate, up, down = of_gpu([0, 2, 9])
    hot = dataclasses.replace(cold, role="hot", gate=gate, up=up, down=down)
    hot = dataclasses.replace(hot, place_E=torch.full((E,), -1, dtype=torch.int32))
    residency = Residency([NONE, np.array([0, 2, 9], np.int32)], E)
    main, take = PlainStream(), lambda shape, dtype: torch.zeros(shape, dtype=dtype)
    layers = {1: ExpertLayer(hot=hot, cold=cold)}
    carrier = ExpertParts(layers, residency, take, most_rows=2, is_pinned=False)
    slots = GpuSlots(carrier, residency, main, main)
    slots.start(np.array([(1, 1, 7, 2, 0.0), (1, 0, 11, 0, 0.0)], SWAP))
    slots.finish()
    slots.check()
    for got, want in zip((gate, up, down), of_gpu([11, 7, 9]), strict=True):
        assert torch.equal(got.data, want.data) and got.kind == want.kind
    tiles = [matrix.kind for matrix in cold.matrices]
    is_changed = any(kind.endswith(("_tiled", "_grouped")) for kind in tiles)
    assert is_changed or (kind, layout) == ("f16", "stock"), tiles


# ---- faults --------------------------------------------------------------------------------------


def test_wrong_bytes_in_a_slot_are_found():
    """The matrix of another expert, or one that stays as it was."""
    right = ran(CachedExperts.of(), IDS)
    for wrong in ("another's down", "no down", "no gate"):
        cached = CachedExperts.of()
        slots, move = cached.cache.slots.carrier, cached.cache.slots.carrier._write
        of = {layer: own.hot for layer, own in slots.layers.items()}
        downs = {block.down.data.untyped_storage().data_ptr(): n for n, block in of.items()}
        gates = {block.gate.data.untyped_storage().data_ptr() for block in of.values()}

        def moves(
            staging_B, slot, table, main, wrong=wrong, slots=slots, move=move, d=downs, g=gates
        ):
            first = slot.untyped_storage().data_ptr()
            if wrong == "another's down" and first in d:
                staging_B = as_bytes(slots.layers[d[first]].cold.down.data[0])
            if (wrong, first in d) != ("no down", True) and (wrong, first in g) != (
                "no gate",
                True,
            ):
                move(staging_B, slot, table, main)

        slots._write = moves
        assert not all(map(torch.equal, ran(cached, IDS), right)), wrong
        cached.cache.complete()
        with pytest.raises(AssertionError):
            slots.check()


def test_an_expert_that_both_sides_or_neither_compute_is_found():
    right = ran(CachedExperts.of(), IDS)
    for both in (True, False):
        cached = CachedExperts.of()
        slots = cached.cache.slots.carrier

        def change(layer, main, change=slots._change_tables, slots=slots, both=both):
            new = slots.layers[layer].cold.place_E
            old = new.clone()
            change(layer, main)
            new[:] = torch.maximum(old, new) if both else torch.minimum(old, new)

        slots._change_tables = change
        got = ran(cached, IDS)
        assert max(map(rel_error, got, right)) > 1e-3, both


def test_plans_without_slots_for_experts_are_refused():
    model = stock()
    for hot, dense in (([E, []], [1, 1]), ([[1, 2], E], [0, 1])):
        split = dataclasses.replace(made_plan(model, hot, dense), num_experts=E)
        with pytest.raises(HotsplitError, match="divides no layer's experts"):
            first_residents(model, split)
