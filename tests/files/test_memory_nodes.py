"""Memory nodes: which ones the processors belong to, and memory that is spread over them."""

import os
import platform
from pathlib import Path
from types import SimpleNamespace

import pytest

from hotsplit.doctor import machine_findings as doctor
from hotsplit.runtime.device import huge_pages
from hotsplit.system import control_groups, memory_nodes
from hotsplit.system.memory_nodes import nodes_of
from hotsplit.system.processors import processors


@pytest.fixture
def two_nodes(tmp_path, monkeypatch):
    """Processors 0 to 3 and 8 in node 0, 4 to 7 in node 2, and a node 3 that has memory alone."""
    for node, processors_there in ((0, "0-3,8\n"), (2, "4-7\n"), (3, "\n")):
        folder = tmp_path / f"sys/devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(processors_there)
    monkeypatch.setattr(control_groups, "ROOT", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(9)))


@pytest.mark.parametrize(
    ("allowed", "nodes"), [({0}, (0,)), ({8}, (0,)), ({4, 7}, (2,)), ({3, 4}, (0, 2)), ({9}, ())]
)
def test_nodes_of_allowed_processors(two_nodes, allowed, nodes):
    assert nodes_of(allowed) == nodes


def test_a_system_that_does_not_say_has_no_nodes(tmp_path, monkeypatch):
    monkeypatch.setattr(control_groups, "ROOT", tmp_path)
    assert processors().nodes == ()


def test_weights_are_spread_over_the_nodes_of_the_processors(two_nodes, monkeypatch):
    spread = []
    monkeypatch.setattr(memory_nodes, "spread", lambda *asked: spread.append(asked) or True)
    mapping, memory = huge_pages.untouched(5 << 20)
    ((address, num_bytes, nodes),) = spread
    assert nodes == (0, 2) and address % 4096 == 0
    assert address <= memory.data_ptr()
    assert memory.data_ptr() + memory.nbytes <= address + num_bytes
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    huge_pages.untouched(5 << 20)
    assert len(spread) == 1  # one node holds all of its processors


def test_a_refusal_is_said_once(two_nodes, monkeypatch, caplog):
    monkeypatch.setattr(memory_nodes, "spread", lambda *asked: False)
    memory_nodes._note_refusal.cache_clear()
    for _ in range(2):
        huge_pages.untouched(1 << 20)
    assert [each.message.split(";")[0] for each in caplog.records] == [
        "note: the system does not let memory be spread over nodes 0, 2"
    ]


@pytest.mark.skipif(
    platform.machine() not in memory_nodes._MBIND or not Path("/proc/self/numa_maps").exists(),
    reason="the system has no memory nodes",
)
def test_the_system_spreads_memory(monkeypatch):
    """/proc/self/numa_maps names the policy of each mapping."""
    mapping, memory = huge_pages.untouched(4 << 20)
    first = memory.data_ptr() // 4096 * 4096
    if not memory_nodes.spread(first, 2 << 20, (0,)):
        pytest.skip("a container that refuses it")
    lines = Path("/proc/self/numa_maps").read_text().splitlines()
    assert any(line.startswith(f"{first:x} interleave:0") for line in lines)
    assert not memory_nodes.spread(first + 1, 2 << 20, (0,))  # no page begins there


def test_doctor_counts_the_nodes(two_nodes):
    done = {"is_built": True, "level": "avx2", "usable": ["avx2"], "faulty": None, "forced": None}
    first, *_ = doctor.processor(SimpleNamespace(done=done))
    assert "threads allowed, 2 memory nodes;" in first.text
