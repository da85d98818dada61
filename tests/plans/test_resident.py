"""Tests of resident weights: interleaved copies with the values of the file, and their memory."""

import errno
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from control_group_files import write_groups
from models import make_model, make_sizes
from reference import rel_error
from small_blocks import STORED_KINDS as KINDS
from test_runtime import IDS, PATTERNS, decoded, make_split

from hotsplit import Engine
from hotsplit.artifacts.model_file import ModelFile
from hotsplit.costs.part_bytes import bytes_on_one_side, packed_bytes
from hotsplit.errors import HotsplitError
from hotsplit.runtime import resolved_options
from hotsplit.runtime.device import huge_pages
from hotsplit.runtime.kernels import grids
from hotsplit.runtime.step.workspace import workspace_bytes
from hotsplit.runtime.weights import resident
from hotsplit.runtime.weights.matrix import matrix_of
from hotsplit.runtime.weights.resident import Residence
from hotsplit.system import control_groups, system_memory
from hotsplit.system.log_lines import lines_on_stderr
from hotsplit.system.sizes import format_bytes

CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=KINDS)
def model(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("resident") / "m.gguf"
    shape = make_sizes(width=256, num_neurons=300, num_heads=8)
    make_model(sizes=shape, kind=request.param, predictor_rank=32).save(path)
    return path


def neurons(engine):
    return [block.matrices for layer in engine.layers for block in layer.ffn.blocks]


def test_copies_have_the_values_of_the_file(model):
    with Engine.load(model) as engine:
        tensors = engine.model.tensors
    names = [f"blk.0.{name}.weight" for name in ("ffn_gate", "ffn_up", "ffn_down_t")]
    rows = np.array([0, 3, 4, 299])
    for chosen in (None, rows):
        home = Residence()
        copies = home.interleaved([tensors[name] for name in names], chosen)
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
            if mode == "dense":  # each matrix is read in full, so none are interleaved
                assert all(m.stride_bytes == m.row_bytes for m in (gate, up, down))
                continue
            together = gate.stride_bytes > gate.row_bytes
            assert together == (mode != "exact")
            assert up.stride_bytes == down.stride_bytes > up.row_bytes
            assert down.data.data_ptr() - up.data.data_ptr() == up.row_bytes


@pytest.mark.parametrize("mode", ["dense", "exact", "predicted"])
def test_mapped_and_resident_weights_give_the_same_logits(model, tmp_path, mode):
    with Engine.load(model) as engine:
        split = make_split(engine.model, PATTERNS["random"])
    split.save(tmp_path / "s.gguf")
    for plan in (None, tmp_path / "s.gguf"):
        with (
            Engine.load(model, plan, mode=mode, is_resident=False) as mapped,
            Engine.load(model, plan, mode=mode, is_resident=True) as copied,
        ):
            assert rel_error(decoded(copied, IDS), decoded(mapped, IDS)) < 1e-3
            assert rel_error(copied.logits(IDS), mapped.logits(IDS)) < 1e-5
            # Copies of these few neurons have some more, which complete tiles and groups.
            num_ids = sum(len(b.id_N) for layer in copied.layers for b in layer.ffn.blocks)
            share = num_ids / sum(layer.ffn.num_neurons for layer in copied.layers) - 1
            assert mapped.traffic.total == pytest.approx(copied.traffic.total, rel=1e-2 + share)


def test_matrices_of_different_types_are_not_interleaved(tmp_path):
    model = make_model(sizes=make_sizes(width=256, num_neurons=64), kind="q8_0")
    other = make_model(sizes=make_sizes(width=256, num_neurons=64), kind="f32")
    home = Residence()
    entries = [model.tensors["blk.0.ffn_gate.weight"], other.tensors["blk.0.ffn_up.weight"]]
    for entry, copy in zip(entries, home.interleaved(entries, None), strict=True):
        assert copy.stride_bytes == copy.row_bytes == entry.row_bytes
        assert torch.equal(
            copy.rows(torch.arange(64)), matrix_of(entry, CPU).rows(torch.arange(64))
        )


def test_memory_grows_by_segments(monkeypatch):
    monkeypatch.setattr(resident, "SEGMENT_BYTES", 10_000)
    home, entries = Residence(), entries_of()
    copies = [home.matrix(entry) for entry in entries]  # each larger than a segment
    for entry, copy in zip(entries, copies, strict=True):
        assert torch.equal(copy.data, torch.from_numpy(entry.read()))
        assert copy.data.data_ptr() % 64 == 0
    assert home.num_bytes == sum(entry.num_bytes for entry in entries)


def test_a_limit_on_address_space_gives_one_line(monkeypatch):
    def refuses(*arguments):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(huge_pages, "PinnableMemory", refuses)
    monkeypatch.setattr(system_memory, "address_space_bytes", lambda: 1 << 30)
    entry = next(iter(make_model().tensors.values()))
    with pytest.raises(
        HotsplitError, match=r"raise the limit on address space \(ulimit -v\), now 1.00 GiB"
    ):
        Residence().matrix(entry)
    with pytest.raises(HotsplitError, match="the cache of 2.00 MiB cannot .* a smaller context"):
        huge_pages.zeros((1 << 20,), torch.float16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("rows", [3, 9000])
def test_zeros_in_huge_pages_are_zeros(dtype, rows):
    found = huge_pages.zeros((2, rows, 256), dtype)
    assert found.shape == (2, rows, 256) and found.dtype == dtype and found.is_contiguous()
    assert not found.any()
    found[1, -1, -1] = 1
    is_large = found.nbytes >= huge_pages.HUGE_PAGE_BYTES
    assert not is_large or found.data_ptr() % huge_pages.HUGE_PAGE_BYTES == 0


def least_free(num_bytes):
    """The least free memory in which the CPU's side may take so many bytes."""
    return math.ceil(num_bytes / resolved_options.FREE_SHARE)


@lines_on_stderr()
def test_without_memory_the_weights_stay_in_the_file(model, monkeypatch, capsys):
    """If there is memory for what is not in the file: keys, values and workspace."""
    with Engine.load(model, mode="exact") as engine:
        items = engine.bytes_by_role["cpu"]
    beside = items["kv_cache"] + items["workspace"]
    for free in (least_free(beside), least_free(sum(items.values())) - 2):
        monkeypatch.setattr(resolved_options, "free_memory_bytes", lambda free=free: free)
        with Engine.load(model, mode="exact") as engine:
            assert all(m.stride_bytes == m.row_bytes for ms in neurons(engine) for m in ms)
        said = capsys.readouterr().err
        assert said.count("\n") == 1 and "the weights stay in the file" in said
    monkeypatch.setattr(resolved_options, "free_memory_bytes", lambda: least_free(beside) - 2)
    said = f"{format_bytes(beside)} of keys, values and workspace cannot stay in the file, and .*"
    with pytest.raises(HotsplitError, match=f"{said} a smaller --context$") as raised:
        Engine.load(model, mode="exact")
    assert str(model) in str(raised.value)
    with Engine.load(model, mode="exact", is_resident=True) as engine:
        assert any(m.stride_bytes > m.row_bytes for ms in neurons(engine) for m in ms)


@pytest.mark.parametrize("kind", ["iq3_xxs", "iq1_m"])
def test_packed_tensors_cannot_stay_in_the_file(tmp_path, monkeypatch, kind):
    """They are packed whether weights are copied or not, and refused where they do not fit beside
    keys, values and workspace."""
    path = tmp_path / "m.gguf"
    make_model(sizes=make_sizes(width=256, num_neurons=256), kind=kind, path=path).save(path)
    monkeypatch.setattr(grids, "are_faster", lambda name: False)
    with Engine.load(path, mode="dense", is_resident=True) as engine:
        want, items = engine.logits(IDS), engine.bytes_by_role["cpu"]
    packed = packed_bytes(ModelFile.load(path).tensors)
    least = least_free(packed + items["kv_cache"] + items["workspace"])
    monkeypatch.setattr(resolved_options, "free_memory_bytes", lambda: least - 2)
    with pytest.raises(HotsplitError, match=f"tensors in {kind}, packed in memory") as raised:
        Engine.load(path, mode="dense")
    assert str(path) in str(raised.value)
    monkeypatch.setattr(resolved_options, "free_memory_bytes", lambda: least)
    with Engine.load(path, mode="dense") as tight:
        assert torch.equal(tight.logits(IDS), want)


def test_sizes_are_known_without_reading(tmp_path):
    """Neither packed tensors nor those of the file are read."""
    path = tmp_path / "m.gguf"
    make_model(sizes=make_sizes(width=256, num_neurons=256), kind="iq2_s", path=path).save(path)
    model, unread = ModelFile.load(path), {}
    for name, entry in model.tensors.items():
        source = entry.packed_from and replace(entry.packed_from, read_rows=None)
        unread[name] = replace(entry, read_rows=None, packed_from=source)
    model = replace(model, tensors=unread)
    assert workspace_bytes(model, 32, "dense") > 0
    assert sum(bytes_on_one_side(model, 32, 0).values()) > packed_bytes(model.tensors) > 0


# ---- pinned memory, with a fake CUDA ----------------------------------------------------------


class Cuda:
    """A fake cudart: registers up to `most` bytes, and records what is registered."""

    def __init__(self, most):
        self.most, self.registered = most, {}

    def cudaHostRegister(self, address, num_bytes, flags):
        assert flags == 1
        if sum(self.registered.values()) + num_bytes > self.most:
            return 2
        self.registered[address] = num_bytes
        return 0

    def cudaHostUnregister(self, address):
        del self.registered[address]
        return 0


def entries_of():
    model = make_model(sizes=make_sizes(width=64, num_neurons=96), kind="f32")
    return [e for name, e in model.tensors.items() if name.endswith(("up.weight", "_q.weight"))]


@pytest.mark.parametrize("segment_bytes", [10_000, 1 << 20])
def test_used_memory_is_pinned_until_it_is_released(monkeypatch, segment_bytes):
    monkeypatch.setattr(resident, "SEGMENT_BYTES", segment_bytes)
    cuda = Cuda(most=1 << 30)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    home = Residence()
    copies = [home.matrix(entry) for entry in entries_of()]
    kept = home.keep(torch.arange(5), is_weight=False)
    home.pin()
    assert kept.tolist() == [0, 1, 2, 3, 4]
    assert home.num_bytes == sum(copy.num_bytes for copy in copies)  # ids do not count as weights
    for tensor in [*(copy.data for copy in copies), kept]:
        start, stop = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        assert any(a <= start and stop <= a + size for a, size in cuda.registered.items())
    used = home.num_bytes + kept.nbytes
    assert used <= sum(cuda.registered.values()) <= used + 64 * (len(copies) + 1)
    del home, tensor
    assert cuda.registered  # the matrices still hold the memory
    del copies, kept
    assert not cuda.registered


def test_memory_that_may_not_be_pinned_is_refused_in_one_line(monkeypatch):
    cuda = Cuda(most=1000)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    home = Residence()
    copies = [home.matrix(entry) for entry in entries_of()]
    with pytest.raises(HotsplitError, match=r"limit on locked memory is .* \(ulimit") as caught:
        home.pin()
    assert "CUDA error 2" in str(caught.value)
    del home, copies, caught
    assert not cuda.registered


# ---- free memory under limits -----------------------------------------------------------------


VERSION_2 = {
    "memory.max": "max",
    "memory.current": "0",
    "memory.stat": "inactive_file 0",
    "a/memory.max": "1000",
    "a/memory.current": "700",
    "a/memory.stat": "anon 1\ninactive_file 200",
    "a/b/memory.max": "900",
    "a/b/memory.current": "100",
    "a/b/memory.stat": "inactive_file 0",
}
VERSION_1 = {
    "memory/memory.limit_in_bytes": str(2**63 - 4096),
    "memory/memory.usage_in_bytes": "5",
    "memory/memory.stat": "total_inactive_file 1",
    "memory/x/memory.limit_in_bytes": "5000",
    "memory/x/memory.usage_in_bytes": "6000",
    "memory/x/memory.stat": "inactive_file 7\ntotal_inactive_file 1200",
}


@pytest.mark.parametrize(
    "lines, files, left",
    [
        ("0::/a/b\n", VERSION_2, [500, 800]),
        ("0::/\n", VERSION_2, []),
        (
            "0::/of/the/host\n",
            {"memory.max": "50", "memory.current": "20", "memory.stat": "inactive_file 5"},
            [35],
        ),
        ("4:cpu:/x\n3:memory:/x\n0::/\n", VERSION_1, [200]),
        ("3:cpuset,memory:/\n", VERSION_1, []),
        ("3:memory:/x\n", {**VERSION_1, "memory/x/memory.stat": "nonsense"}, []),
    ],
)
def test_a_container_has_what_its_limits_leave(tmp_path, monkeypatch, lines, files, left):
    write_groups(tmp_path, lines, files)
    monkeypatch.setattr(control_groups, "ROOT", tmp_path)
    assert sorted(system_memory._left_by_groups()) == left


def test_the_smallest_limit_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(control_groups, "ROOT", tmp_path)
    assert system_memory._left_by_groups() == []
    everything = system_memory.free_memory_bytes()
    write_groups(tmp_path, "0::/a/b\n", VERSION_2)
    assert system_memory.free_memory_bytes() == 500 < everything
