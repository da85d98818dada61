"""Weights in memory of our own: the same values as in the file, arranged side by side."""

import numpy as np
import pytest
import torch
from models import make_model, make_shape
from reference import rel_error
from test_runtime import IDS, PATTERNS, decoded, make_split

from sparkinfer import Engine
from sparkinfer.model_file import KINDS
from sparkinfer.runtime import engine_options, resident
from sparkinfer.runtime.kernels.cpu import library
from sparkinfer.runtime.matrix import matrix_of
from sparkinfer.runtime.resident import Residence

pytestmark = pytest.mark.skipif(not library.is_available(), reason="the C++ kernels are not built")
CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=KINDS)
def model(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("resident") / "m.gguf"
    shape = make_shape(width=256, num_neurons=300, num_heads=8)
    make_model(shape=shape, kind=request.param, predictor_rank=32).save(path)
    return path


def neurons(engine):
    return [
        [block.gate.weight, block.up.weight, block.down]
        for layer in engine.layers
        for block in layer.ffn.blocks
    ]


def test_copies_have_the_values_of_the_file(model):
    with Engine.load(model) as engine:
        tensors = engine.model.tensors
    names = [f"blk.0.{name}.weight" for name in ("ffn_gate", "ffn_up", "ffn_down_t")]
    rows = np.array([0, 3, 4, 299])
    for chosen in (None, rows):
        home = Residence()
        copies = home.side_by_side([tensors[name] for name in names], chosen)
        for name, copy in zip(names, copies, strict=True):
            want = matrix_of(tensors[name], CPU, chosen)
            every = torch.arange(want.num_rows)
            assert torch.equal(copy.rows(every), want.rows(every))
            assert (copy.num_bytes, copy.width) == (want.num_bytes, want.width)
        assert home.num_bytes == sum(copy.num_bytes for copy in copies)
        assert {copy.stride_bytes for copy in copies} == {sum(c.row_bytes for c in copies)}
        starts = [copy.data.data_ptr() for copy in copies]
        assert np.diff(starts).tolist() == [copy.row_bytes for copy in copies[:-1]]


@pytest.mark.parametrize("mode", ["dense", "exact", "predicted"])
def test_the_arrangement_suits_the_mode(model, mode):
    with Engine.load(model, mode=mode) as engine:
        for gate, up, down in neurons(engine):
            together = gate.stride_bytes > gate.row_bytes
            assert together == (mode != "exact")
            assert up.stride_bytes == down.stride_bytes > up.row_bytes
            assert down.data.data_ptr() - up.data.data_ptr() == up.row_bytes


@pytest.mark.parametrize("mode", ["dense", "exact", "predicted"])
def test_mapped_and_resident_weights_give_the_same(model, tmp_path, mode):
    with Engine.load(model) as engine:
        split = make_split(engine.model, PATTERNS["random"])
    split.save(tmp_path / "s.gguf")
    for plan in (None, tmp_path / "s.gguf"):
        with (
            Engine.load(model, plan, mode=mode, is_resident=False) as mapped,
            Engine.load(model, plan, mode=mode, is_resident=True) as copied,
        ):
            assert mapped.not_native is copied.not_native is None
            assert rel_error(decoded(copied, IDS), decoded(mapped, IDS)) < 1e-3
            assert rel_error(copied.logits(IDS), mapped.logits(IDS)) < 1e-5
            assert mapped.traffic.total == pytest.approx(copied.traffic.total, rel=1e-2)


def test_types_that_differ_lie_apart(tmp_path):
    model = make_model(shape=make_shape(width=256, num_neurons=64), kind="q8_0")
    other = make_model(shape=make_shape(width=256, num_neurons=64), kind="f32")
    home = Residence()
    entries = [model.tensors["blk.0.ffn_gate.weight"], other.tensors["blk.0.ffn_up.weight"]]
    for entry, copy in zip(entries, home.side_by_side(entries, None), strict=True):
        assert copy.stride_bytes == copy.row_bytes == entry.row_bytes
        assert torch.equal(
            copy.rows(torch.arange(64)), matrix_of(entry, CPU).rows(torch.arange(64))
        )


def test_memory_grows_by_segments(monkeypatch):
    monkeypatch.setattr(resident, "SEGMENT_BYTES", 10_000)
    model = make_model(shape=make_shape(width=64, num_neurons=96), kind="f32")
    entries = [e for name, e in model.tensors.items() if name.endswith(("up.weight", "_q.weight"))]
    home = Residence()
    copies = [home.matrix(entry) for entry in entries]  # some larger than a segment
    for entry, copy in zip(entries, copies, strict=True):
        assert torch.equal(copy.data, torch.from_numpy(entry.read()))
        assert copy.data.data_ptr() % 64 == 0
    assert home.num_bytes == sum(entry.num_bytes for entry in entries)


def test_without_memory_the_weights_stay_in_the_file(model, monkeypatch, capsys):
    monkeypatch.setattr(engine_options, "free_memory_bytes", lambda: 1 << 20)
    with Engine.load(model, mode="exact") as engine:
        assert all(m.stride_bytes == m.row_bytes for ms in neurons(engine) for m in ms)
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "the weights stay in the file" in said
    with Engine.load(model, mode="exact", is_resident=True) as engine:
        assert any(m.stride_bytes > m.row_bytes for ms in neurons(engine) for m in ms)
