"""A GPU's memory, simulated on the CPU: a slab of the plan's bytes, filled from the file; the limit
on torch's allocator; the memory that passes take."""

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from checkpoints import random_model, save_tokenizer
from delta_models import FEW, conv_model, delta_model
from hybrid_plans import random_plan
from models import (
    differing_spec,
    family_spec,
    gemma3n_spec,
    make_model,
    make_sizes,
    mixture_spec,
    shape_only,
)
from reference import logits_ref, rel_error
from small_blocks import STORED_KINDS as KINDS
from test_families import CASES, converted
from test_runtime import IDS, PATTERNS, make_split
from torch import Tensor

from hotsplit import Engine
from hotsplit.artifacts.model_file import ModelFile
from hotsplit.costs.part_bytes import ITEMS
from hotsplit.errors import HotsplitError
from hotsplit.model.attention import HeadVector
from hotsplit.runtime import gpu_setup, resolved_options
from hotsplit.runtime.device import device_memory
from hotsplit.runtime.device.device_memory import (
    ALIGNMENT,
    SEGMENT_BYTES,
    DeviceMemory,
    out_of_memory_as_error,
)
from hotsplit.runtime.kernels.gpu.kernels import reference_kernels
from hotsplit.runtime.kernels.planar import PLANAR_KIND
from hotsplit.runtime.kernels.stored import unpack
from hotsplit.runtime.model.layers import Weights
from hotsplit.runtime.model.loader import load_weights
from hotsplit.runtime.model.placement import Placement
from hotsplit.runtime.ops.neurons.feed_forward import Traffic
from hotsplit.runtime.step import hybrid_builder
from hotsplit.runtime.step.backend import plain_backend
from hotsplit.runtime.step.batch import rows_of
from hotsplit.runtime.step.pass_device import PassSetup
from hotsplit.runtime.step.workspace import decode_bytes, gpu_bytes, pass_bytes, workspace_bytes
from hotsplit.runtime.weights.matrix import matrix_of
from hotsplit.runtime.weights.resident import Residence
from hotsplit.runtime.weights.upload import Uploader

CPU = torch.device("cpu")
CARD = torch.device("cpu", 0)  # the simulated GPU: not equal to CPU, so placements distinguish them


@pytest.fixture(params=["llama", "tied"])
def planned(request, tmp_path):
    """(model, its plan): divided neurons, one layer's attention on the CPU, and the head there too
    unless it is tied."""
    shape = make_sizes(num_layers=3, width=256, num_neurons=96)
    model = make_model(sizes=shape, predictor_rank=8, is_tied=request.param == "tied", kind="q4_0")
    return model, make_split(
        model,
        [PATTERNS["random"][0], [], range(96)],
        dense_on_gpu=[1, 1, 0],
        head_on_gpu=request.param == "tied",
    )


@dataclass(frozen=True, kw_only=True)
class InSlabs:
    """Weights whose GPU part is in slabs, and what they were loaded by."""

    model: ModelFile
    placement: Placement
    weights: Weights
    memories: dict[torch.device, DeviceMemory]
    residence: Residence | None = None

    @property
    def memory(self) -> DeviceMemory:
        (memory,) = self.memories.values()
        return memory

    def passes(self, said: list[str], most_rows: int = 128) -> PassSetup:
        return gpu_setup.pass_setup(
            self.weights, self.memories, self.placement, most_rows, said.append
        )

    def logits(self, setup: PassSetup, ids=IDS):
        """Logits of a pass whose memory is the arenas."""
        backend = plain_backend(reference_kernels())
        step = hybrid_builder.build(self.weights, self.placement, Traffic(), backend, passes=setup)
        return step.run_pass(rows_of(ids, 0, "all"))


def load(model, split, *, mode="exact", context=32, is_resident=True, cards=(CARD,)) -> InSlabs:
    placement = Placement.of_split(split, cards)
    gpus, _ = split.items_of_gpus(model)
    num_ids = sum(map(len, split.hot))
    memories = {
        card: DeviceMemory.of(card, gpu_setup.slab_bytes(model, items, context, num_ids))
        for card, items in zip(cards, gpus, strict=True)
    }
    uploaders = {
        card: Uploader(memory=memory, piece_bytes=1 << 12) for card, memory in memories.items()
    }
    residence = Residence() if is_resident else None
    weights = load_weights(
        model, placement, mode, context, notice=print, residence=residence, uploaders=uploaders
    )
    for uploader in uploaders.values():
        uploader.finish()
    return InSlabs(
        model=model, placement=placement, weights=weights, memories=memories, residence=residence
    )


def test_each_item_takes_the_plans_bytes(planned):
    model, split = planned
    loaded = load(model, split, mode="predicted")
    memory, residence = loaded.memory, loaded.residence
    for item in ITEMS:
        if item not in ("workspace", "embedding"):
            assert memory.taken.get(item, 0) == split.gpu_bytes[item], item
    assert split.gpu_bytes["neurons"] and split.gpu_bytes["kv_cache"]
    assert memory.taken["workspace"] == 4 * (30 + 96)  # 4-byte ids of the hot neurons
    # On the CPU, torch holds the cache and vectors outside of neurons; the embedding is mapped.
    on_cpu = split.cpu_bytes["neurons"] + split.cpu_bytes["attention"]
    on_cpu += split.cpu_bytes["predictor"] + split.cpu_bytes["head"]
    vectors = 2 * 4 * 256 + (0 if split.head_on_gpu else 4 * 256)
    assert residence.num_bytes == on_cpu - vectors


def test_vectors_of_heads_are_in_the_slab():
    spec = family_spec("llama", make_sizes(num_layers=1), "relu")
    sinks = HeadVector("attn_sinks.weight")
    layers = [layer.with_attention(head_sinks=sinks) for layer in spec.layers]
    model = make_model(spec=spec.with_layers(layers))
    split = make_split(model, [range(model.spec.most_neurons)])
    loaded = load(model, split)
    assert loaded.memory.taken["attention"] == split.gpu_bytes["attention"]
    (layer,) = loaded.weights.layers
    assert is_inside(layer.attention.vectors["head_sinks"], loaded.memory.slab)


def test_weights_in_the_slab_give_the_results_of_the_file(planned):
    model, split = planned
    for mode in ("dense", "exact", "predicted"):
        loaded = load(model, split, mode=mode)
        memory, got = loaded.memory, loaded.logits(loaded.passes([]))
        with Engine.of(model, mode=mode) as engine:
            want = engine.logits(IDS)
        assert rel_error(got, want) < 3e-3
        inside = [t for t in tensors_of(loaded.weights) if is_inside(t, memory.slab)]
        assert sum(t.nbytes for t in inside) == sum(
            count for item, count in memory.taken.items() if item not in ("kv_cache", "workspace")
        )
    assert rel_error(want, logits_ref(model, IDS)) > 1e-3  # the last mode, predicted


def test_each_of_two_gpus_gets_its_part():
    """Each GPU also streams the cold weights of its own layers."""
    cards = (torch.device("cpu", 0), torch.device("cpu", 1))
    model = make_model(sizes=make_sizes(num_layers=3), predictor_rank=8)
    hot = [*PATTERNS["random"], [3]]
    split = make_split(model, hot, home=[0, 1, 1, 1])
    loaded = load(model, split, mode="predicted", cards=cards)
    gpus, _ = split.items_of_gpus(model)
    for card, items in zip(cards, gpus, strict=True):
        for item in ITEMS:
            if item not in ("workspace", "embedding"):
                assert loaded.memories[card].taken.get(item, 0) == items[item], item
        blocks = gpu_setup.cold_blocks(loaded.weights, loaded.placement, card)
        assert list(blocks) == ([0] if card == cards[0] else [1, 2])
    setup = loaded.passes([])
    assert setup.piece_bytes.keys() == {*cards} and setup.streamed == {0, 1, 2}
    ids = (IDS * 4)[:32]  # passes of fewer stream nothing
    got = loaded.logits(setup, ids)
    with Engine.of(model, mode="predicted") as engine:
        assert rel_error(got, engine.logits(ids)) < 1e-5


def tensors_of(weights):
    """The weight tensors, each once, without biases and the embedding."""
    found = [weights.head.weight.data]
    found += [weights.output_norm.weight_D]
    for layer in weights.layers:
        found += [norm.weight_D for norm in layer.norms.values()]
        found += [
            linear.weight.data for linear in (*layer.attention.inputs, layer.attention.output)
        ]
        if layer.ffn.predictor:
            found += [layer.ffn.predictor.down.weight.data, layer.ffn.predictor.up.weight.data]
        for block in layer.ffn.blocks:
            found += [block.gate.weight.data, block.up.weight.data, block.down.data]
    return found


def is_inside(tensor, slab):
    return slab.data_ptr() <= tensor.data_ptr() < slab.data_ptr() + len(slab)


@pytest.mark.parametrize("kind", [*KINDS, "iq2_table", "q2_0", "nvfp4_scaled"])
@pytest.mark.parametrize("rows", [None, np.array([0, 63, 7, 8, 1])])
@pytest.mark.parametrize("piece_bytes", [1, 1000, 1 << 20])
def test_pieces_of_any_size_are_put_together(kind, rows, piece_bytes):
    model = make_model(sizes=make_sizes(width=256, num_neurons=64), kind=kind)
    entry = model.tensors["blk.0.ffn_up.weight"]
    heard = []
    memory = DeviceMemory.of(CARD, 1 << 20)
    uploader = Uploader(memory=memory, on_bytes=heard.append, piece_bytes=piece_bytes)
    got, want = uploader.matrix(entry, "neurons", rows), matrix_of(entry, CPU, rows)
    assert got.kind == PLANAR_KIND.get(kind, kind)
    assert torch.equal(unpack(got.data, got.kind), unpack(want.data, want.kind))
    assert got.num_bytes == want.num_bytes == sum(heard) == memory.taken["neurons"]
    assert got.data.data_ptr() % ALIGNMENT == 0


def test_the_slab_is_cut_without_overlap_and_not_beyond_its_end():
    memory = DeviceMemory.of(CARD, 10 * ALIGNMENT)
    taken = [
        memory.take((7,), torch.float32, "a"),
        memory.take((3, 5), torch.uint8, "b"),
        memory.take((4 * ALIGNMENT,), torch.uint8, "a"),
    ]
    for number, tensor in enumerate(taken):
        tensor.fill_(number + 1)
        assert tensor.data_ptr() % ALIGNMENT == 0
    assert [t.unique().tolist() for t in taken] == [[1], [2], [3]]
    assert memory.taken == {"a": 28 + 4 * ALIGNMENT, "b": 15}
    take = memory.take_for_step()
    assert not take((4, ALIGNMENT), torch.uint8).any()
    with pytest.raises(
        HotsplitError, match="step needs 1 more bytes, but .* of the 2,560 set aside"
    ):
        take((1,), torch.uint8)
    take = memory.take_for_step()  # another step reuses the memory
    assert take((ALIGNMENT,), torch.float32).nbytes == 4 * ALIGNMENT
    assert memory.taken["step"] == 4 * ALIGNMENT  # of the second step alone
    assert memory.report().slab == 10 * ALIGNMENT


def test_a_plan_whose_bytes_do_not_match_is_refused_while_loading(planned):
    model, split = planned
    memory = DeviceMemory.of(CARD, split.gpu_bytes["neurons"])
    with pytest.raises(HotsplitError, match="run hotsplit solve again"):
        load_weights(
            model,
            Placement.of_split(split, (CARD,)),
            "exact",
            32,
            notice=print,
            uploaders={CARD: Uploader(memory=memory)},
        )


# ---- the limit, on a simulated card -----------------------------------------------------------


@pytest.fixture
def card(monkeypatch):
    """A simulated card: what torch reports of it, and the limit that was set."""
    state = SimpleNamespace(total=24 << 30, free=20 << 30, reserved=0, backend="native")
    state.limit = None
    cuda = torch.cuda
    monkeypatch.setattr(cuda, "mem_get_info", lambda device: (state.free, state.total))
    monkeypatch.setattr(cuda, "memory_reserved", lambda device: state.reserved)
    monkeypatch.setattr(cuda, "memory_allocated", lambda device: state.reserved)
    monkeypatch.setattr(cuda, "get_allocator_backend", lambda: state.backend)
    monkeypatch.setattr(cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(
        cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=state.total)
    )

    def keep(fraction, device):
        assert 0 <= fraction <= 1
        state.limit = int(fraction * state.total)  # as CUDACachingAllocator.cpp computes it

    monkeypatch.setattr(cuda, "set_per_process_memory_fraction", keep)
    monkeypatch.setattr(device_memory, "_living", set())
    for name in device_memory._ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return state


GPU = torch.device("cuda", 0)


def living(budget):
    memory = DeviceMemory(GPU, torch.empty(0, dtype=torch.uint8), budget)
    device_memory._living.add(memory)
    return memory


def test_several_engines_get_the_sum_of_their_budgets(card):
    first = living(1 << 30)
    device_memory._limit_all(GPU)
    assert card.limit == 1 << 30
    second = living(2 << 30)
    device_memory._limit_all(GPU)
    assert card.limit == 3 << 30
    card.reserved = 1 << 30
    assert second.room_bytes == (2 << 30) - device_memory.SMALL_BYTES
    first.close()
    assert card.limit == 2 << 30
    living(None)  # an engine without a plan, and so without a limit
    second.close()
    assert card.limit == card.total


def test_other_allocators_are_refused(card, monkeypatch):
    card.backend = "cudaMallocAsync"
    with pytest.raises(HotsplitError, match="cudaMallocAsync"):
        device_memory.limit(GPU, 1 << 30)
    card.backend = "native"
    monkeypatch.setitem(os.environ, "PYTORCH_CUDA_ALLOC_CONF", "expandable_segments: True")
    with pytest.raises(HotsplitError, match="does not keep a budget to the byte; unset"):
        device_memory.limit(GPU, 1 << 30)


def test_out_of_memory_is_one_line_that_says_what_to_do(card):
    card.free, card.reserved = 1 << 30, 3 << 30
    with pytest.raises(HotsplitError) as caught, out_of_memory_as_error(GPU, 5 << 30):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate ...\nmore lines")
    said = str(caught.value)
    assert said.startswith("cuda:0: 5.00 GiB wanted, 1.00 GiB of 24.00 GiB free")
    assert "3.00 GiB, and 20.00 GiB are its context's or other programs'" in said
    assert "smaller --vram-budget" in said
    # Errors of Triton and torch when the driver has no memory left.
    for text in ("Triton Error [CUDA]: out of memory", "CUDA error: out of memory\nmore lines"):
        with pytest.raises(HotsplitError, match="cuda:0: more memory"), out_of_memory_as_error(GPU):
            raise RuntimeError(text)
    with pytest.raises(RuntimeError, match="of another kind"), out_of_memory_as_error(GPU):
        raise RuntimeError("of another kind")


@pytest.mark.parametrize("room", ["none", "for a pass", "for cold weights too"])
def test_cold_weights_are_streamed_where_there_is_room_for_them(room, monkeypatch):
    shape = make_sizes(width=256, num_neurons=2048, context_length=256)
    model = make_model(sizes=shape, kind="q8_0", predictor_rank=8)
    split = make_split(model, [range(0, 2048, 2), range(100)], context_length=256)
    loaded, said = load(model, split, context=256, is_resident=False), []
    (memory,) = loaded.memories.values()
    alone = gpu_setup.room_bytes(PassSetup(num_rows=32), loaded.weights, loaded.placement, CARD)
    beside = {"none": -SEGMENT_BYTES, "for a pass": 0, "for cold weights too": 2 * SEGMENT_BYTES}[
        room
    ]
    # Rounded as torch's allocator does: see arena_bytes.
    monkeypatch.setattr(device_memory, "LEAST_OWN_BYTES", 1)
    memory.budget_bytes = len(memory.slab) + device_memory.arena_bytes(alone) + beside
    if room == "none":
        with pytest.raises(HotsplitError, match="a pass of 32 tokens takes .*larger --vram-budget"):
            loaded.passes(said)
        return
    setup = loaded.passes(said)
    if room == "for a pass":
        assert not setup.streamed and not setup.piece_bytes
        assert "too little of" in said[0] and "to stream cold weights" in said[0]
        return
    assert not said and setup.streamed == {0, 1} and setup.num_rows >= 32
    assert memory.room_bytes - SEGMENT_BYTES < len(memory.arena) <= memory.room_bytes


def test_a_note_says_which_budget_is_enforced_instead_of_a_small_one(card):
    said = []
    assert device_memory.kept_budget(1 << 20) == device_memory.LEAST_BUDGET_BYTES
    model = make_model()
    split = make_split(model, PATTERNS["half"])
    placement = Placement.of_split(split, (GPU,))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_setup.DeviceMemory, "of", lambda *arguments: arguments)
        found = gpu_setup.memories_of(model, split, placement, {}, 32, said.append)
    assert list(found) == [GPU] and len(said) == 1 and "128.00 MiB is enforced instead" in said[0]
    stays = sum(split.gpu_bytes.values()) - split.gpu_bytes["workspace"]
    assert 0 < found[GPU][1] - stays - 4 * 96 - decode_bytes(model, 32) < 60 * ALIGNMENT


def test_a_slab_that_does_not_fit_leaves_no_limit_behind(card, monkeypatch):
    def empty(*arguments, device=None, **options):
        if device == GPU:
            assert card.limit == 9 << 30
            raise torch.OutOfMemoryError("no")
        return was(*arguments, device=device, **options)

    was = torch.empty
    monkeypatch.setattr(torch, "empty", empty)
    with pytest.raises(HotsplitError, match="cuda:0: 8.00 GiB wanted, 20.00 GiB of 24.00 GiB free"):
        DeviceMemory.of(GPU, 8 << 30, 9 << 30)
    assert card.limit == card.total and not device_memory._living


# ---- what a pass takes --------------------------------------------------------------------------


def test_plans_of_large_models_reserve_longer_passes():
    """Those of others the shortest, rather than none."""
    heads = {"num_heads": 32, "num_kv_heads": 32}
    large = make_sizes(
        width=4096, num_neurons=11008, vocab_size=32000, context_length=1024, **heads
    )
    found, wanted = {}, {}
    for num_layers in (32, 2):
        model = shape_only(dataclasses.replace(large, num_layers=num_layers), predictor_rank=256)
        found[num_layers] = gpu_bytes(model, 1024)
        tokens, piece = (256, 16 << 20) if num_layers == 32 else (32, 4 << 20)
        wanted[num_layers] = pass_bytes(model, 1024, tokens, piece_bytes=piece)
        size = sum(entry.num_bytes for entry in model.tensors.values())
        assert (found[num_layers] <= 0.02 * size) == (num_layers == 32)
    assert all(wanted[n] < found[n] < wanted[n] + (40 << 20) for n in found)


@pytest.mark.parametrize("budget", [1 << 20, 100 << 20, 128 << 20, 1 << 30])
def test_a_budget_below_the_one_enforced_needs_a_smaller_reserve(budget):
    """What is enforced beyond it is free for passes."""
    model = make_model(sizes=make_sizes(context_length=64), kind="f16")
    alone, whole = workspace_bytes(model, 64, "exact"), gpu_bytes(model, 64)
    found = workspace_bytes(model, 64, "exact", gpu_budget_bytes=budget)
    free = max(0, device_memory.LEAST_BUDGET_BYTES - budget)
    assert max(alone, whole - free) <= found < max(alone, whole - free) + (64 << 10)


SIZES = make_sizes(num_layers=4, num_neurons=64, context_length=96)
FORMS = {
    "sparse": lambda: make_model(sizes=SIZES, predictor_rank=8),
    "stock": lambda: dataclasses.replace(make_model(sizes=SIZES), layout="stock"),
    "windows, and sizes by layer": lambda: make_model(spec=differing_spec(SIZES)),
    "experts": lambda: make_model(spec=mixture_spec(SIZES)),
    "experts and a shared one": lambda: make_model(
        spec=mixture_spec(SIZES, num_shared=32, has_shared_gate=True)
    ),
    "delta nets": lambda: delta_model(SIZES),
    "delta nets and experts": lambda: delta_model(SIZES, experts=FEW),
    "short convolutions": lambda: conv_model(SIZES),
    "short convolutions and experts": lambda: conv_model(SIZES, experts=FEW),
    "Gemma 3n": lambda: make_model(spec=gemma3n_spec(SIZES)),
}


@pytest.mark.parametrize("num_sequences", [1, 3])
@pytest.mark.parametrize("form", FORMS)
def test_passes_take_all_of_the_arena_and_no_more_than_plans_reserve(form, num_sequences):
    """For any division. Tensors of an arena do not overlap."""
    model = FORMS[form]()
    for seed in range(6):
        split = random_plan(model, seed, num_sequences=num_sequences, context=96)
        with Engine.of(model, split, mode="dense", device="cpu") as engine:
            check_arenas(model, split, engine._live.weights)


@pytest.mark.parametrize("case", ["gemma4", "gemma4moe", "gemma4-stock", "gpt-oss"])
def test_arenas_of_families(tmp_path, case):
    """Per-layer inputs, windows, shared keys, values that are keys, dense neurons and experts."""
    save_tokenizer(folder := random_model(tmp_path / "hf", CASES[case]), 320)
    model = ModelFile.load(converted(folder, tmp_path / "m.gguf", outtype="f32"))
    context = min(96, model.spec.context_length)
    for seed in range(2):
        split = random_plan(model, seed, num_sequences=1 + 2 * seed, context=context)
        with Engine.of(model, split, mode="dense", device="cpu") as engine:
            check_arenas(model, split, engine._live.weights, context)


def check_arenas(model, split, weights, context=96):
    cards = tuple(torch.device("cpu", index) for index in range(len(split.budgets)))
    placement = Placement.of_split(split, cards)
    linears = [
        linear
        for layer in weights.layers
        for own in (layer.attending, *layer.own.values())
        if own is not None
        for linear in ((*own.inputs, own.output) if own is layer.attending else own.linears)
    ]
    widest = max(linear.weight.width for linear in linears)
    for number, card in enumerate(cards):
        cold = gpu_setup.cold_blocks(weights, placement, card)
        for num_rows, piece in ((32, 0), (128, 0), (256, 1 << 20), (512, 100)):
            setup = PassSetup(
                num_rows=num_rows,
                piece_bytes={card: piece} if piece else {},
                streamed=frozenset(cold) if piece else (),
            )
            size = gpu_setup.room_bytes(setup, weights, placement, card)
            memory = DeviceMemory.of(card, 0)
            memory.take_arena(size)
            setup = dataclasses.replace(setup, take=lambda _, m=memory: m.take_for_pass())
            room = setup.room(weights, placement, number, is_pinned=False)
            spans = sorted(
                (t.data_ptr(), t.data_ptr() + -(-t.nbytes // ALIGNMENT) * ALIGNMENT)
                for t in tensors_in(room)
                if t.nbytes and is_inside(t, memory.arena)
            )
            ends = [stop for _, stop in spans]
            assert [start for start, _ in spans] == [memory.arena.data_ptr(), *ends[:-1]]
            assert ends[-1] - memory.arena.data_ptr() == size == len(memory.arena)
            planned = pass_bytes(model, context, num_rows, split.num_sequences, piece)
            assert size <= planned, (num_rows, piece)
            assert len(room.rounded) >= num_rows * widest


def tensors_in(value):
    """The tensors of a value and of the records and tables within it."""
    if isinstance(value, Tensor):
        return [value]
    if dataclasses.is_dataclass(value):
        within = [getattr(value, field.name) for field in dataclasses.fields(value)]
    elif isinstance(value, Mapping):
        within = list(value.values())
    else:
        within = list(value) if isinstance(value, tuple) else []
    return [tensor for each in within for tensor in tensors_in(each)]


def test_all_neurons_on_the_cpu_are_streamed_for_prompts():
    """The effect of --cpu-ffn on a model, without a plan."""
    model = make_model(sizes=make_sizes(width=64), kind="q8_0")
    placement = Placement.without_neurons(2, CARD)
    items = resolved_options.bytes_by_role_of(model, None, 32, CPU, cpu_ffn=True)
    memory = DeviceMemory.of(CARD, gpu_setup.slab_bytes(model, items["gpu"], 32))
    weights = load_weights(
        model, placement, "exact", 32, notice=print, uploaders={CARD: Uploader(memory=memory)}
    )
    assert "neurons" not in memory.taken
    assert memory.taken["attention"] == items["gpu"]["attention"]
    blocks = gpu_setup.cold_blocks(weights, placement, CARD)
    assert {layer: block.number for layer, block in blocks.items()} == {0: 96, 1: 96}
    loaded = InSlabs(model=model, placement=placement, weights=weights, memories={CARD: memory})
    setup, ids = loaded.passes([]), (IDS * 4)[:32]
    assert setup.streamed == {0, 1}
    with Engine.of(model, mode="exact", context_length=32) as engine:
        assert rel_error(loaded.logits(setup, ids), engine.logits(ids)) < 3e-3
