"""On a real device, the check at the first load finds no fault, and the second load checks
nothing."""

import dataclasses

import pytest
from test_runtime import make_split

from hotsplit import Engine
from hotsplit.artifacts.device_checks import stored_checks
from hotsplit.runtime.check import device_check
from hotsplit.runtime.step.hybrid_step import HybridStep

pytestmark = pytest.mark.gpu
MIB = 1 << 20


def test_every_part_works(tmp_path, cuda, large_model, some_neurons, monkeypatch):
    monkeypatch.setenv("HOTSPLIT_CACHE", str(tmp_path / "cache"))
    split = make_split(large_model, some_neurons, context_length=256)
    split = dataclasses.replace(split, vram_budget_bytes=split.vram_budget_bytes + 64 * MIB)
    split.save(tmp_path / "s.gguf")
    for number in range(2):
        if number:
            monkeypatch.setattr(device_check, "outcome", lambda run, limit: pytest.fail("again"))
        with Engine.load(large_model.path, split=tmp_path / "s.gguf", device=cuda) as engine:
            assert isinstance(engine._live.native, HybridStep)
    (checks,) = stored_checks()
    print(*(f"{each.seconds:6.2f} s {each.part}" for each in checks.verdicts.values()), sep="\n")
    failed = {each.part: each.why for each in checks.verdicts.values() if not each.is_fine}
    assert not failed
    assert {name.split()[0] for name in checks.verdicts} >= {"memory", "kernel", "host", "graph"}
    assert sum(verdict.seconds for verdict in checks.verdicts.values()) < 60
