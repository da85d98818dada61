"""A GPU's memory, simulated on the CPU: a slab of the plan's bytes, filled from the file; the limit
on torch's allocator; products as on tensor cores; the memory that a pass takes."""

import dataclasses
import math
import os
from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from models import family_model, family_spec, make_model, make_sizes, shape_only
from reference import logits_ref, rel_error
from small_blocks import STORED_KINDS as KINDS
from test_runtime import IDS, PATTERNS, make_split
from test_workspace import spanned_bytes

from hotsplit import Engine
from hotsplit.costs.part_bytes import ITEMS
from hotsplit.errors import HotsplitError
from hotsplit.files.gguf_file import array_entry
from hotsplit.model.attention import HeadVector
from hotsplit.runtime import gpu_setup, resolved_options
from hotsplit.runtime.device import device_memory
from hotsplit.runtime.device.device_memory import (
    ALIGNMENT,
    BESIDE_BYTES,
    DeviceMemory,
    out_of_memory_as_error,
)
from hotsplit.runtime.device.pools import SEGMENT_BYTES, PoolBytes
from hotsplit.runtime.kernels.gpu.kernels import Kernels, reference_kernels
from hotsplit.runtime.kernels.planar import PLANAR_KIND, planar
from hotsplit.runtime.kernels.stored import unpack
from hotsplit.runtime.model.loader import load_weights
from hotsplit.runtime.model.placement import Placement
from hotsplit.runtime.ops.neurons import mixture
from hotsplit.runtime.ops.norm import Norm
from hotsplit.runtime.ops.observers import Observers
from hotsplit.runtime.prefill.cold_stream import LEAST_TOKENS
from hotsplit.runtime.step.batch import rows_of
from hotsplit.runtime.step.gpu_pass import GpuPass
from hotsplit.runtime.step.passes import Pass
from hotsplit.runtime.step.workspace import (
    decode_bytes,
    gpu_bytes,
    reserved_bytes,
    temporaries,
    workspace_bytes,
)
from hotsplit.runtime.weights import gpu_products
from hotsplit.runtime.weights.matrix import Matrix, matrix_of
from hotsplit.runtime.weights.resident import Residence
from hotsplit.runtime.weights.upload import Uploader

CPU = torch.device("cpu")
CARD = torch.device("cpu", 0)  # the simulated GPU: not equal to CPU, so placements distinguish them
WRONG = [torch.zeros_like, lambda y: 0.5 * y, lambda y: y.flip(0)]


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


def load(model, split, *, mode="exact", context=32, is_resident=True):
    """(decoder, the card's memory, the CPU's residence) with the GPU's part in a slab."""
    placement = Placement.of_split(split, (CARD,))
    size = gpu_setup.slab_bytes(model, split.gpu_bytes, context, sum(map(len, split.hot)))
    memory = DeviceMemory.of(CARD, size)
    uploader = Uploader(memory=memory, piece_bytes=1 << 12)
    residence = Residence() if is_resident else None
    weights = load_weights(
        model,
        placement,
        mode,
        context,
        notice=print,
        residence=residence,
        uploaders={CARD: uploader},
    )
    uploader.finish()
    return decoder_of(weights), memory, residence


def decoder_of(weights):
    return GpuPass(weights=weights, observers=Observers())


@torch.inference_mode()
def logits_of(decoder, ids=IDS):
    return decoder.logits(rows_of(ids, 0, "all"))


def test_each_item_takes_the_plans_bytes(planned):
    model, split = planned
    _, memory, residence = load(model, split, mode="predicted")
    for item in ITEMS:
        if item not in ("workspace", "embedding"):
            assert memory.taken.get(item, 0) == split.gpu_bytes[item], item
    assert split.gpu_bytes["neurons"] and split.gpu_bytes["kv_cache"]
    assert memory.taken["workspace"] == 4 * (30 + 96)  # 4-byte ids of the hot neurons
    if residence is None:
        return
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
    decoder, memory, _ = load(model, split)
    assert memory.taken["attention"] == split.gpu_bytes["attention"]
    (layer,) = decoder.weights.layers
    assert is_inside(layer.attention.vectors["head_sinks"], memory.slab)


def test_weights_in_the_slab_give_the_results_of_the_file(planned):
    model, split = planned
    for mode in ("dense", "exact", "predicted"):
        decoder, memory, _ = load(model, split, mode=mode)
        got = logits_of(decoder)
        with Engine.of(model, mode=mode) as engine:
            want = engine.logits(IDS)
        assert rel_error(got, want) < torch.finfo(torch.float16).eps
        inside = [t for t in tensors_of(decoder.weights) if is_inside(t, memory.slab)]
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
    placement = Placement.of_split(split, cards)
    gpus, _ = split.items_of_gpus(model)
    memories = {
        card: DeviceMemory.of(card, gpu_setup.slab_bytes(model, items, 32, 96))
        for card, items in zip(cards, gpus, strict=True)
    }
    uploaders = {card: Uploader(memory=memory) for card, memory in memories.items()}
    weights = load_weights(model, placement, "predicted", 32, notice=print, uploaders=uploaders)
    for card, items in zip(cards, gpus, strict=True):
        for item in ITEMS:
            if item not in ("workspace", "embedding"):
                assert memories[card].taken.get(item, 0) == items[item], item
    for card in cards:
        blocks = gpu_setup.cold_blocks(weights, placement, card)
        assert list(blocks) == ([0] if card == cards[0] else [1, 2])
        (stream,) = gpu_setup.cold_streams(card, blocks, 1 << 14)
        stream.least_tokens = 1
        weights = gpu_setup.with_stream(weights, stream)
    got = logits_of(decoder_of(weights))
    assert all(layer.ffn.cold._next for layer in weights.layers)
    with Engine.of(model, mode="predicted") as engine:
        assert rel_error(got, engine.logits(IDS)) < 1e-5


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


@pytest.mark.parametrize("kind", KINDS)
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
    monkeypatch.setattr(device_memory, "_warm_up", lambda device: 0)
    monkeypatch.setattr(device_memory, "free_workspaces", lambda: None)
    monkeypatch.setattr(device_memory, "_living", set())
    for name in device_memory._ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return state


GPU = torch.device("cuda", 0)


@pytest.mark.parametrize("budget", [(8 << 30) + 12345, 1234567891, (24 << 30) - 1, 24 << 30])
def test_the_allocator_may_reserve_the_budget_and_not_a_byte_more(card, budget):
    device_memory.limit(GPU, budget)
    assert budget - 1 <= card.limit <= budget


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
    assert second.room_bytes == (2 << 30) - device_memory.BESIDE_BYTES
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
    assert "\n" not in said and said.startswith(
        "cuda:0: 5.00 GiB wanted, 1.00 GiB of 24.00 GiB free"
    )
    assert "3.00 GiB, and 20.00 GiB are its context's or other programs'" in said
    assert "smaller --vram-budget" in said
    # Errors of Triton, torch and cuBLAS when the driver has no memory left.
    for text in (
        "Triton Error [CUDA]: out of memory",
        "CUDA error: out of memory\nmore lines",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    ):
        with pytest.raises(HotsplitError, match="cuda:0: more memory"), out_of_memory_as_error(GPU):
            raise RuntimeError(text)
    with pytest.raises(RuntimeError, match="of another kind"), out_of_memory_as_error(GPU):
        raise RuntimeError("of another kind")


def most_tokens(model, tokens, memory, blocks):
    return gpu_setup._most_tokens(on_gpu(model, "exact", tokens, 1024), memory, blocks)


def test_passes_are_shortened_to_fit_the_memory_left(card):
    model = shape_only(make_sizes(width=4096, num_neurons=11008, context_length=1024))
    memory = living(1 << 30)
    for tokens in (128, 64, 16):
        room = reserved_bytes(on_gpu(model, "exact", tokens, 1024))
        card.reserved = (1 << 30) - device_memory.BESIDE_BYTES - room
        assert most_tokens(model, 128, memory, {}) == tokens
    card.reserved = 1 << 30
    with pytest.raises(HotsplitError, match="one token takes .* larger --vram-budget"):
        most_tokens(model, 128, memory, {})


@pytest.mark.parametrize("room", ["none", "for a pass", "for cold weights too"])
def test_cold_weights_are_streamed_where_there_is_room_for_them(room, monkeypatch):
    shape = make_sizes(width=256, num_neurons=2048, context_length=256)
    model = make_model(sizes=shape, kind="q8_0", predictor_rank=8)
    split = make_split(model, [range(0, 2048, 2), range(100)], context_length=256)
    decoder, memory, _ = load(model, split, context=256, is_resident=False)
    said = []
    p, piece = on_gpu(model, "exact", 128, 256), 1 << 20
    memory.budget_bytes = len(memory.slab) + (0 if room == "none" else reserved_bytes(p, piece))
    most = gpu_setup._largest_piece
    monkeypatch.setattr(gpu_setup, "_largest_piece", lambda blocks: min(piece, most(blocks)))
    if room == "for a pass":
        monkeypatch.setattr(gpu_setup, "LEAST_PIECE_BYTES", piece + 1)

    def set_up():
        placement = Placement.of_split(split, (CARD,))
        return gpu_setup.with_cold_streams(
            model, decoder.weights, {CARD: memory}, placement, "exact", 256, 128, said.append
        )

    if room == "none":
        with pytest.raises(HotsplitError, match="larger --vram-budget"):
            set_up()
        return
    weights, chunk = set_up()
    assert chunk == 128
    streams = {layer.ffn.cold for layer in weights.layers}
    if room == "for a pass":
        assert streams == {None} and "too little to stream cold weights" in said[0]
        return
    (stream,) = streams
    assert not said and stream.least_tokens == LEAST_TOKENS and stream.staging is not None
    assert 0.8 * piece < stream.piece_bytes <= piece and set(stream.blocks) == {0, 1}
    assert memory.aside == temporaries(p, stream.piece_bytes)
    with torch.inference_mode():
        got = dataclasses.replace(decoder, weights=weights).forward(torch.arange(40), 0)
        want = decoder.forward(torch.arange(40), 0)
    assert stream._next == len(stream._pieces) > 2
    assert rel_error(got, want) < 1e-3


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


def test_both_pools_are_set_aside(card, monkeypatch):
    """The pools get small tensors, and one large enough to get a segment of its own of exactly its size."""
    taken, was = [], torch.empty

    def empty(size, *arguments, device=None, **options):
        if device != GPU:
            return was(size, *arguments, device=device, **options)
        taken.append(size)
        return was(0, dtype=torch.uint8)

    monkeypatch.setattr(torch, "empty", empty)
    memory = DeviceMemory.of(GPU, 900 << 20, 1 << 30)
    assert taken[:2] == [900 << 20, device_memory.PRODUCT_BYTES]
    taken.clear()
    memory.aside = PoolBytes(small=5 << 20, large=40 << 20)
    memory.set_aside()
    products, *small, large = taken
    assert products == device_memory.PRODUCT_BYTES
    assert set(small) == {1 << 20} and sum(small) >= 7 << 20  # two of 0.7 MiB do not share 2 MiB
    assert large % SEGMENT_BYTES == 0 and (44 << 20) < large < (48 << 20)
    taken.clear()
    memory.aside = PoolBytes(large=2 << 20)  # a segment of 20 MiB otherwise
    memory.set_aside()
    assert taken == [device_memory.PRODUCT_BYTES, 10 << 20]


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


def test_without_a_gpu_there_is_nothing_to_set_up():
    model = make_model()
    placement = Placement.on_one_device(2, CPU)
    assert gpu_setup.memories_of(model, None, placement, {}, 32, print) == {}
    assert gpu_setup.step_takes({}) is None


# ---- products as on tensor cores --------------------------------------------------------------


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Tiles, products and attention as on a GPU, computed by the reference of its kernels."""
    monkeypatch.setattr(gpu_products, "is_gpu", lambda device: True)
    monkeypatch.setattr(gpu_products, "kernels", reference_kernels)


def random_matrix(kind, num_rows=200, width=256):
    shape = make_sizes(width=width, num_neurons=num_rows)
    entry = make_model(sizes=shape, kind=kind).tensors["blk.0.ffn_up.weight"]
    memory = DeviceMemory.of(CARD, 1 << 22)
    matrix = Uploader(memory=memory).matrix(entry, "neurons")
    return matrix, unpack(matrix.data, matrix.kind).double()


def is_right(got, left, right, eps) -> bool:
    """Whether got is left @ right for factors rounded by eps and sums in f32."""
    terms = left.abs().double() @ right.abs()
    bound = (2 * eps + left.shape[1] * torch.finfo(torch.float32).eps) * terms
    return bool(((got.double() - left.double() @ right).abs() <= bound).all())


def eps_of(kind):
    return {"f32": 0.0, "bf16": 2.0**-8}.get(kind, 2.0**-11)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("has_tensor_cores", [True, False])
def test_products_round_to_the_type_of_the_tile_and_no_more(
    as_on_a_gpu, monkeypatch, kind, has_tensor_cores
):
    monkeypatch.setattr(gpu_products, "has_tensor_cores", lambda device: has_tensor_cores)
    matrix, exact_ND = random_matrix(kind)
    generator = torch.Generator().manual_seed(1)
    for rows in (64, 1000):  # several tiles; one
        monkeypatch.setattr(gpu_products, "tile_rows", lambda width, rows=rows: rows)
        for scale in (1.0, 1e6, 1e-7):  # the last two are outside f16's normal range
            x_TD = scale * torch.randn(5, 256, generator=generator)
            weight_TN = scale * torch.randn(5, 200, generator=generator)
            assert is_right(matrix.product(x_TD), x_TD, exact_ND.T, eps_of(kind))
            assert is_right(matrix.combine_many(weight_TN), weight_TN, exact_ND, eps_of(kind))
    chosen = torch.tensor([3, 199, 0])
    assert is_right(matrix.product(x_TD, chosen), x_TD, exact_ND[chosen].T, eps_of(kind))
    assert rel_error(matrix.dot(x_TD[0]), exact_ND @ x_TD[0].double()) < 1e-5
    assert matrix.product(x_TD, chosen[:0]).shape == (5, 0)


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize("kind", ["q8_0", "q4_0", "q6_k", "q8_0_planar", "q4_0_planar", "f16"])
def test_tiles_unpacked_by_triton(monkeypatch, kind):
    """The rows are strided, as in a streamed piece."""
    monkeypatch.setattr(gpu_products, "is_gpu", lambda device: True)
    monkeypatch.setattr(gpu_products, "has_tensor_cores", lambda device: False)
    monkeypatch.setattr(gpu_products, "tile_rows", lambda width: 64)
    in_file = kind.removesuffix("_planar")
    entry = make_model(sizes=make_sizes(width=256), kind=in_file).tensors["blk.0.ffn_up.weight"]
    data, found = matrix_of(entry, CPU).data, in_file
    if kind in PLANAR_KIND.values():
        data, found = planar(data, in_file)
    assert found == kind
    apart = torch.zeros(len(data), 3, data.shape[1], dtype=data.dtype)
    apart[:, 1] = data
    matrix = Matrix(data=apart[:, 1], kind=kind, width=256)
    exact_ND = unpack(data, kind).double()
    x_TD = torch.randn(5, 256, generator=torch.Generator().manual_seed(1))
    assert is_right(matrix.product(x_TD), x_TD, exact_ND.T, eps_of(kind))
    weight_TN = torch.randn(5, len(data), generator=torch.Generator().manual_seed(2))
    assert is_right(matrix.combine_many(weight_TN), weight_TN, exact_ND, eps_of(kind))


@pytest.mark.parametrize("wrong", WRONG)
def test_the_bound_rejects_wrong_products(as_on_a_gpu, wrong):
    matrix, exact_ND = random_matrix("q4_0")
    x_TD = torch.randn(5, 256, generator=torch.Generator().manual_seed(1))
    assert not is_right(wrong(matrix.product(x_TD)), x_TD, exact_ND.T, eps_of("q4_0"))


def test_rows_of_zeros_and_of_tiny_and_huge_values(as_on_a_gpu):
    matrix, exact_ND = random_matrix("f16")
    x_TD = torch.randn(4, 256, generator=torch.Generator().manual_seed(1))
    x_TD[0], x_TD[1], x_TD[2] = 0.0, x_TD[1] * 1e-41, x_TD[2] * 1e36
    got = matrix.product(x_TD)
    assert torch.equal(got[0], torch.zeros_like(got[0]))
    assert got[1].isfinite().all() and got[1].abs().max() < 1e-38
    assert is_right(got[2:], x_TD[2:], exact_ND.T, eps_of("f16"))


@pytest.mark.parametrize(
    "weight, bias, fits",
    [
        (1.0, None, True),
        (2e4, None, False),
        (1.0, 1e5, False),
        (1e-3, None, False),
        (math.nan, None, False),
        (1.0, math.nan, False),
    ],
)
def test_outputs_of_a_norm_are_not_scaled_if_f16_takes_them(weight, bias, fits):
    weight_D = torch.tensor([0.0, weight, 0.5 * weight, 0.0])
    bias_D = None if bias is None else torch.tensor([0.0, 0.0, -bias, 0.0])
    norm = Norm(weight_D=weight_D, bias_D=bias_D, epsilon=1e-6)
    assert norm.fits_f16 == fits


def test_a_layer_knows_whether_its_inputs_fit_f16(as_on_a_gpu):
    model = make_model(kind="f16")
    split = make_split(model, PATTERNS["random"])
    for weight in (1.0, 1e6):
        norm = array_entry(np.full(model.spec.hidden_size, weight), "f32")
        own = dataclasses.replace(model, tensors=model.tensors | {"blk.1.ffn_norm.weight": norm})
        decoder, _, _ = load(own, split)
        known = {layer.attention.is_input_small for layer in decoder.weights.layers}
        known |= {layer.ffn.is_input_small for layer in decoder.weights.layers}
        assert known == {weight == 1.0}


@pytest.mark.parametrize("missing", [(), ("k",), ("q", "k", "v")])
def test_biases_of_queries_keys_and_values(as_on_a_gpu, monkeypatch, missing):
    """The matrices are stacked if all of them have a bias, or none."""
    model = family_model("llama with biases", kind="f16")
    absent = [f"blk.{layer}.attn_{name}.bias" for layer in range(2) for name in missing]
    tensors = {name: entry for name, entry in model.tensors.items() if name not in absent}
    model = dataclasses.replace(model, tensors=tensors)
    decoder, _, _ = load(model, make_split(model, PATTERNS["random"]))
    assert {len(layer.attention.inputs) for layer in decoder.weights.layers} == {
        1 if len(missing) != 1 else 3
    }
    got = logits_of(decoder)
    monkeypatch.undo()
    with Engine.of(model, mode="exact", context_length=32) as engine:
        assert rel_error(got, engine.logits(IDS)) < 8e-3


def test_nan_stays_in_its_token(as_on_a_gpu):
    matrix, exact_ND = random_matrix("f16")
    x_TD = torch.randn(3, 256, generator=torch.Generator().manual_seed(1))
    x_TD[0, 5], x_TD[2, 7] = torch.nan, torch.inf
    got = matrix.product(x_TD)
    assert got[0].isnan().all() and not got[2].isfinite().any()
    assert is_right(got[1:2], x_TD[1:2], exact_ND.T, eps_of("f16"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["dense", "exact", "predicted"])
def test_a_model_on_a_gpu_gives_what_it_gives_on_the_cpu(monkeypatch, as_on_a_gpu, kind, mode):
    """Both parts of the plan are computed as on a GPU; results differ by the tiles' rounding."""
    shape = make_sizes(width=256, num_neurons=96)
    model = make_model(sizes=shape, kind=kind, predictor_rank=8)
    split = make_split(model, PATTERNS["random"])
    decoder, _, _ = load(model, split, mode=mode)
    got = logits_of(decoder)
    monkeypatch.undo()
    with Engine.of(model, mode=mode, context_length=32) as engine:
        want = engine.logits(IDS)
    # Predictors are f32 in both; a neuron close to the threshold may still be predicted in one and
    # not in the other.
    assert rel_error(got, want) < {"f32": 1e-5, "bf16": 6e-2}.get(kind, 8e-3)


# ---- what a pass takes --------------------------------------------------------------------------


def on_gpu(model, mode, tokens, context, way="gpu"):
    return Pass(model=model, mode=mode, num_tokens=tokens, context_length=context, way=way)


def allocate_as_on_cuda(monkeypatch):
    """Kernels compute nothing, and products allocate only their results, as on CUDA. (Where a
    result's type differs, torch makes a copy on the CPU.)"""

    def nothing(*arguments, **options):
        pass

    def experts_on_cpu(block, gate, x_TD, routed):  # in main memory
        return torch.from_numpy(np.empty(x_TD.shape, np.float32)), (0, 0, 0)

    kernels = Kernels(lambda kernel: nothing)
    monkeypatch.setattr(mixture, "experts_on_cpu", experts_on_cpu)
    monkeypatch.setattr(gpu_products, "kernels", lambda: kernels)
    monkeypatch.setattr(
        gpu_products, "_in_f32", lambda left, right: torch.zeros(len(left), right.shape[1])
    )


@pytest.mark.parametrize(
    "shape",
    [
        make_sizes(
            num_layers=32,
            width=4096,
            num_neurons=11008,
            num_heads=32,
            num_kv_heads=32,
            vocab_size=32000,
        ),
        make_sizes(
            num_layers=8,
            width=8192,
            num_neurons=28672,
            num_heads=64,
            num_kv_heads=8,
            vocab_size=32000,
        ),
    ],
)
@pytest.mark.parametrize("context", [512, 4096, 32768])
def test_a_plan_reserves_a_pass_of_at_least_32_tokens(shape, context):
    """And pieces of cold weights, beside a step's vectors, cuBLAS and the neurons' ids."""
    model = shape_only(dataclasses.replace(shape, context_length=context), predictor_rank=512)
    left = gpu_bytes(model, context, "predicted") - decode_bytes(model, context, 8)
    left -= BESIDE_BYTES + 4 * shape.num_neurons * shape.num_layers
    assert reserved_bytes(on_gpu(model, "predicted", 32, context), 4 << 20) <= left


def test_plans_of_large_models_reserve_longer_passes():
    """Those of others the shortest, rather than none."""
    large = make_sizes(
        num_layers=32,
        width=4096,
        num_neurons=11008,
        num_heads=32,
        num_kv_heads=32,
        vocab_size=32000,
        context_length=1024,
    )
    found, wanted = {}, {}
    for num_layers in (32, 4):
        model = shape_only(dataclasses.replace(large, num_layers=num_layers), predictor_rank=256)
        found[num_layers] = gpu_bytes(model, 1024, "predicted")
        tokens, piece = (256, 16 << 20) if num_layers == 32 else (32, 4 << 20)
        p = on_gpu(model, "predicted", tokens, 1024)
        wanted[num_layers] = reserved_bytes(p, piece)
        size = sum(entry.num_bytes for entry in model.tensors.values())
        assert (found[num_layers] <= 0.02 * size) == (num_layers == 32)
    assert all(wanted[n] < found[n] < wanted[n] + (40 << 20) for n in found)
    assert found[32] > found[4] + (40 << 20)


@pytest.mark.parametrize("budget", [1 << 20, 100 << 20, 128 << 20, 1 << 30])
def test_a_budget_below_the_one_enforced_needs_a_smaller_reserve(budget):
    """What is enforced beyond it is free for passes."""
    model = make_model(sizes=make_sizes(context_length=64), kind="f16")
    alone, whole = workspace_bytes(model, 64, "exact"), gpu_bytes(model, 64, "exact")
    found = workspace_bytes(model, 64, "exact", gpu_budget_bytes=budget)
    free = max(0, device_memory.LEAST_BUDGET_BYTES - budget)
    assert max(alone, whole - free) <= found < max(alone, whole - free) + (64 << 10)


def test_a_long_pass_leaves_room_for_pieces(card):
    model = shape_only(make_sizes(width=4096, num_neurons=11008, context_length=1024))
    memory, piece = living(2 << 30), 16 << 20
    blocks = {0: SimpleNamespace(number=1, least_piece_bytes=0, layout_bytes=lambda count: 1 << 30)}
    room = reserved_bytes(on_gpu(model, "exact", 512, 1024))
    card.reserved = (2 << 30) - device_memory.BESIDE_BYTES - room
    assert most_tokens(model, 512, memory, {}) == 512
    assert most_tokens(model, 512, memory, blocks) == 256
    assert reserved_bytes(on_gpu(model, "exact", 256, 1024), piece) <= room
    assert most_tokens(model, 128, memory, blocks) == 128


def test_spanned_bytes_counts_the_memory_taken():
    """Checks spanned_bytes, which another file's tests rely on, on known memory."""
    memory = DeviceMemory.of(CARD, 4096)
    data = memory.take((4, 8), torch.float32, "a")
    assert spanned_bytes([Matrix(data=data, kind="f32", width=8)]) == 128


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
    (stream,) = gpu_setup.cold_streams(CARD, blocks, 1 << 14)
    stream.least_tokens = 2
    weights = gpu_setup.with_stream(weights, stream)
    got = logits_of(decoder_of(weights))
    assert stream._next == len(stream._pieces) > 2
    with Engine.of(model, mode="exact", context_length=32) as engine:
        assert rel_error(got, engine.logits(IDS)) < torch.finfo(torch.float16).eps
