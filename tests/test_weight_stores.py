"""The three stores of weights, and the roles of the blocks loaded through them."""

import dataclasses

import numpy as np
import pytest
import torch
from models import make_model, make_sizes
from test_runtime import make_split

from hotsplit import Engine
from hotsplit.runtime.device.device_memory import DeviceMemory
from hotsplit.runtime.kernels.cpu import library
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


KINDS = [
    "mapped",
    pytest.param("resident", marks=pytest.mark.skipif(
        not library.is_available(), reason="the C++ kernels are not built"
    )),
    "device",
]  # fmt: skip


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
    for entry, matrix in zip(entries, found, strict=True):
        whole = values(MappedStore(CPU).matrix(entry, "neurons"))
        want = whole if rows is None else whole[rows]
        assert torch.equal(values(matrix), want) and want.abs().sum() > 0
        assert not torch.equal(values(matrix), want.flip(0))
    num_bytes = sum(matrix.num_bytes for matrix in found)
    item = {"mapped": {}, "resident": {"all": num_bytes}, "device": {"neurons": num_bytes}}
    assert taken() == item[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_every_store_has_the_vectors_and_the_cache(stores, kind):
    store, _ = stores[kind]
    bias_N = torch.arange(5.0)
    assert torch.equal(store.vector(bias_N, "attention"), bias_N)
    assert torch.equal(store.neuron_bias(bias_N), bias_N)
    for ids, is_all in ((np.array([3, 4]), False), (np.arange(6), True)):
        assert store.neuron_ids(ids, is_all=is_all).tolist() == ids.tolist()
    cache = store.cache((2, 3, 4), torch.float16)
    assert cache.shape == (2, 3, 4) and cache.dtype == torch.float16 and not cache.any()
    assert store.is_mapped == (kind == "mapped")


def test_biases_are_kept_only_for_gpus_to_copy():
    residence = Residence()
    alone = ResidentStore(residence=residence, is_streamed=False)
    bias_N = torch.ones(4)
    assert alone.neuron_bias(bias_N) is bias_N and residence.num_bytes == 0
    kept = dataclasses.replace(alone, is_streamed=True).neuron_bias(bias_N)
    assert kept is not bias_N and residence.num_bytes == bias_N.nbytes


def test_a_device_without_a_store_of_its_own_maps_the_file():
    stores = Stores.of()
    assert stores.on(torch.device("cpu", 3)) is stores.on_cpu
    assert stores.on(torch.device("cuda", 1)) == MappedStore(torch.device("cuda", 1))


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
