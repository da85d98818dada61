"""The three stores of weights, and the roles of the blocks loaded through them."""

import dataclasses

import numpy as np
import pytest
import torch
from models import make_model, make_sizes
from small_blocks import STORED_KINDS
from test_runtime import make_split

from hotsplit import Engine
from hotsplit.files import gguf_file
from hotsplit.files.gguf_file import TensorEntry, in_memory, values_of
from hotsplit.files.gguf_types import block_sizes
from hotsplit.model.modes import MODES
from hotsplit.runtime.device.device_memory import DeviceMemory
from hotsplit.runtime.kernels.cpu import library
from hotsplit.runtime.model.loader import load_weights
from hotsplit.runtime.model.placement import Placement
from hotsplit.runtime.weights.neuron_block import by_role
from hotsplit.runtime.weights.resident import Residence
from hotsplit.runtime.weights.store import MappedStore, ResidentStore, Stores
from hotsplit.runtime.weights.upload import Uploader

CPU = torch.device("cpu")
CARD = torch.device("cpu", 0)  # stands for the GPU
NAMES = ("ffn_gate", "ffn_up", "ffn_down_t")
ROWS = np.array([1, 2, 17])


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("stores") / "m.gguf"
    made = make_model(sizes=make_sizes(width=64, num_neurons=32), kind="q4_0")
    made.save(path)
    return type(made).load(path)


@pytest.fixture
def stores():
    """A store of each kind, and a function that returns the bytes in it by item."""
    residence = Residence()
    memory = DeviceMemory.of(CARD, 1 << 20)
    uploader = Uploader(memory=memory, piece_bytes=1 << 12)
    both = Stores.of(residence, {CARD: uploader})
    return {
        "mapped": (Stores.of().on(CPU), lambda: {}),
        "resident": (both.on(CPU), lambda: {"all": residence.num_bytes}),
        "device": (both.on(CARD), lambda: {**memory.taken}),
    }


KINDS = ["mapped", "resident", "device"]


def values(matrix):
    return matrix.rows(torch.arange(matrix.num_rows))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("groups, num_whole", [((3,), 0), ((1, 2), 1), ((1, 1, 1), 2)])
@pytest.mark.parametrize("rows", [None, ROWS])
def test_every_store_has_the_rows_of_the_file(model, stores, kind, groups, num_whole, rows):
    store, taken = stores[kind]
    entries = [model.tensors[f"blk.0.{name}.weight"] for name in NAMES]
    grouped, start = [], 0
    for size in groups:
        grouped.append(entries[start : start + size])
        start += size
    found = store.neurons(grouped, rows, num_whole)
    if rows is not None and num_whole and kind == "resident" and library.prefers_tiles():
        rows = np.pad(rows, (0, 16 - len(rows)), mode="edge")
    for entry, matrix in zip(entries, found, strict=True):
        whole = values(MappedStore(CPU).matrix(entry, "neurons"))
        want = whole if rows is None else whole[rows]
        if entry is entries[-1] and want[len(ROWS) :].shape[0] == 16 - len(ROWS):
            want[len(ROWS) :] = 0  # silent neurons
        assert torch.equal(values(matrix), want) and want.abs().sum() > 0
        assert not torch.equal(values(matrix), want.flip(0))
    num_bytes = sum(matrix.num_bytes for matrix in found)
    item = {"mapped": {}, "resident": {"all": num_bytes}, "device": {"neurons": num_bytes}}
    assert taken() == item[kind]


@pytest.mark.parametrize("store", KINDS)
@pytest.mark.parametrize("kind", ["iq2_xxs", "tq1_0", "q2_0_128", "nvfp4"])
@pytest.mark.parametrize("rows", [ROWS, np.array([4, 5, 6, 7])])
def test_of_a_packed_matrix_only_the_rows_asked_for_are_packed(
    monkeypatch, stores, store, kind, rows
):
    """The type nvfp4 has a scale in each row here, as in experts."""
    block, size = block_sizes(kind)
    data = np.zeros((32, 512 // block * size), np.uint8)
    data[:] = np.random.default_rng(0).integers(0, 60, data.shape)
    scale = np.arange(1, 33, dtype=np.float32) if kind == "nvfp4" else None
    read = lambda start, stop: data[start:stop]  # noqa: E731
    entry = in_memory(TensorEntry(shape=(32, 512), kind=kind, read_rows=read, scale=scale))
    want, packed = values_of(entry.read()[rows], entry.kind), []
    for name in ("packed_rows", "scaled_rows"):
        real = getattr(gguf_file, name)
        monkeypatch.setattr(
            gguf_file,
            name,
            lambda raw, *more, real=real: packed.append(len(raw)) or real(raw, *more),
        )
    (matrix,) = stores[store][0].neurons([[entry]], rows)
    assert np.array_equal(values(matrix).numpy(), want) and sum(packed) == len(rows)


def test_biases_are_kept_only_for_gpus_to_copy():
    residence = Residence()
    alone = ResidentStore(residence=residence, is_streamed=False)
    bias_N = torch.ones(4)
    assert alone.neuron_bias(bias_N) is bias_N and residence.num_bytes == 0
    kept = dataclasses.replace(alone, is_streamed=True).neuron_bias(bias_N)
    assert kept is not bias_N and residence.num_bytes == bias_N.nbytes


def forms(matrices):
    """The kind of each matrix, and whether its rows follow each other."""
    return [(matrix.kind, matrix.data.is_contiguous()) for matrix in matrices]


def loaded(model, mode, placement, uploaders):
    return load_weights(
        model, placement, mode, 32, notice=print, residence=Residence(), uploaders=uploaders
    )


def weights_of(layer):
    attention = layer.attention
    return [linear.weight for linear in (*attention.inputs, attention.output)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", STORED_KINDS)
def test_beside_a_gpu_weights_have_the_forms_of_the_cpu_alone(kind, mode):
    """Layers on the CPU, cold neurons and the head, though the GPU streams neurons from there."""
    shape = make_sizes(num_layers=3, width=256, num_neurons=192, vocab_size=64)
    model = make_model(sizes=shape, kind=kind, predictor_rank=32)
    split = make_split(model, [range(64), [], []], dense_on_gpu=[1, 1, 0], head_on_gpu=False)
    uploader = Uploader(memory=DeviceMemory.of(CARD, 8 << 20), piece_bytes=1 << 16)
    planned = loaded(model, mode, Placement.of_split(split, (CARD,)), {CARD: uploader})
    alone = loaded(model, mode, Placement.on_one_device(3, CPU), {})
    assert forms([planned.head.weight]) == forms([alone.head.weight])
    assert forms(weights_of(planned.layers[2])) == forms(weights_of(alone.layers[2]))
    for mine, whole in zip(planned.layers, alone.layers, strict=True):
        cold = by_role(mine.ffn.blocks)[1]
        assert forms(cold.matrices) == forms(whole.ffn.blocks[0].matrices)
    if library.prefers_tiles() and mode == "dense":
        kinds = {matrix.kind for matrix in (*cold.matrices, *weights_of(planned.layers[2]))}
        assert {kind.rpartition("_")[2] for kind in kinds} == FASTEST[kind]


@pytest.mark.parametrize("mode, together", [("dense", 64), ("exact", 16), ("predicted", 1)])
@pytest.mark.parametrize("kind", ["q8_0", "q4_0"])
def test_cold_neurons_of_any_number_are_whole_tiles(kind, mode, together):
    """Neurons that repeat the last one, and add nothing, complete the last tile or group."""
    shape = make_sizes(num_layers=2, width=64, num_neurons=192, vocab_size=64)
    model = make_model(sizes=shape, kind=kind, predictor_rank=32)
    whole = loaded(model, mode, Placement.on_one_device(2, CPU), {}).layers[0].ffn.blocks[0]
    for num_hot in (1, 61, 120, 190):
        cold_ids = list(range(num_hot, 192))
        split = make_split(model, [range(num_hot), []])
        uploader = Uploader(memory=DeviceMemory.of(CARD, 8 << 20), piece_bytes=1 << 16)
        planned = loaded(model, mode, Placement.of_split(split, (CARD,)), {CARD: uploader})
        cold = by_role(planned.layers[0].ffn.blocks)[1]
        if not library.prefers_tiles():
            assert len(cold.id_N) == len(cold_ids)
            continue
        assert forms(cold.matrices) == forms(whole.matrices)
        missing = -len(cold_ids) % together
        assert cold.id_N.tolist() == [*cold_ids, *[191] * missing]
        for mine, right in zip(cold.matrices, whole.matrices, strict=True):
            found, want = values(mine), values(right)[cold.id_N]
            if mine is cold.down:
                want[len(cold_ids) :] = 0
            assert torch.equal(found, want) and mine.num_rows == len(cold.id_N)


# The layouts of a layer in mode dense, by the type of its weights.
FASTEST = {
    "f32": {"f32"},
    "f16": {"f16", "grouped"},
    "bf16": {"bf16", "grouped"},
    "q8_0": {"tiled", "grouped"},
    "q4_0": {"tiled", "grouped"},
    "q4_k": {"tiled", "k"},
    "q5_k": {"tiled", "k"},
    "q6_k": {"tiled", "k"},
    "mxfp4": {"tiled", "mxfp4"},
}


def test_blocks_have_their_plans_roles(model):
    hot = [[0, 5], [], range(32)]
    made = make_model(sizes=make_sizes(num_layers=3, num_neurons=32))
    with Engine.of(made, make_split(made, hot), device="cpu") as engine:
        roles = [[block.role for block in layer.ffn.blocks] for layer in engine.layers]
        for layer, ids in zip(engine.layers, hot, strict=True):
            is_hot, is_cold = by_role(layer.ffn.blocks)
            assert (is_hot.id_N.tolist() if is_hot else []) == list(ids)
            assert (is_cold.id_N.tolist() if is_cold else []) == sorted({*range(32)} - {*ids})
        assert roles == [["hot", "cold"], ["cold"], ["hot"]]
        (first, second) = engine.layers[0].ffn.blocks
        with pytest.raises(AssertionError, match="hot"):
            by_role((first, dataclasses.replace(second, role="hot")))
    with Engine.of(model, device="cpu") as engine:
        assert [block.role for layer in engine.layers for block in layer.ffn.blocks] == (
            ["hot"] * model.spec.num_layers
        )
