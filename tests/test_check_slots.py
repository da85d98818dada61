"""The check of the neuron cache's kernels: if one fails, the cache is turned off, with one line,
and the logits stay the same but for rounding."""

import numpy as np
import pytest
import torch
from failing_parts import CPU, failing, fake_parts, halved, idle, raising, with_slot_kernel
from gpu_matrices import device
from reference import rel_error
from test_neuron_cache import with_cache

from hotsplit import Engine
from hotsplit.artifacts.device_checks import forget_checks, stored_checks
from hotsplit.runtime.check import parts as device_parts
from hotsplit.runtime.check.device_check import SLOT_PARTS
from hotsplit.runtime.check.kernels import Wrong
from hotsplit.runtime.check.slots import check_pack_open, check_scatter
from hotsplit.runtime.kernels.cpu import library
from hotsplit.runtime.kernels.gpu.slots import reference_slot_kernels, triton_slot_kernels
from hotsplit.system.log_lines import lines_on_stderr

pytestmark = [
    pytest.mark.skipif(not library.is_available(), reason="the C++ kernels are not built"),
    pytest.mark.usefixtures("nothing_checked"),
]
IDS = np.random.default_rng(0).integers(0, 200, 6).tolist()


def misplaced(kernel):
    """Copies to a target address that is off by 2 bytes, the alignment of addresses."""

    def scatter(staging_B, copies_C4, most_bytes):
        kernel(staging_B, copies_C4 + torch.tensor([0, 2, 0, 0]), most_bytes)

    return scatter


def formless(kernel):
    """Copies blocks without converting them from the file's layout."""

    def scatter(staging_B, copies_C4, most_bytes):
        kernel(staging_B, copies_C4 * torch.tensor([1, 1, 1, 0]), most_bytes)

    return scatter


def deaf_to_nan(kernel):
    return lambda hidden_N, *others: kernel(hidden_N.nan_to_num(), *others)


FAILURES = {
    "neuron cache's copies": [("scatter", wrong) for wrong in (idle, raising, misplaced, formless)],
    "neuron cache's bits": [("pack_open", wrong) for wrong in (idle, raising, halved, deaf_to_nan)],
}


@pytest.mark.parametrize(
    ("part", "name", "wrong"), [(part, *each) for part, found in FAILURES.items() for each in found]
)
def test_a_wrong_kernel_is_detected(part, name, wrong):
    with pytest.raises((Wrong, ValueError)):
        SLOT_PARTS[part](with_slot_kernel(name, wrong)(), CPU, lambda: None)


@pytest.mark.parametrize("kernels", [reference_slot_kernels, triton_slot_kernels])
def test_right_kernels_pass(kernels):
    """Triton's kernels run on a CUDA device, or in its interpreter if there is none."""
    place = CPU if kernels is reference_slot_kernels else device()
    wait = torch.cuda.synchronize if place.type == "cuda" else lambda: None
    check_scatter(kernels(), place, wait)
    check_pack_open(kernels(), place, wait)


@pytest.fixture
def load(tmp_path, monkeypatch, capsys):
    """Loads an engine whose check uses the given parts; returns (whether it has a cache, the lines
    about the cache, the logits of a text)."""
    model = with_cache(tmp_path)

    def loaded(parts):
        monkeypatch.setattr(device_parts, "parts_of", lambda device: parts)
        capsys.readouterr()
        with (
            lines_on_stderr(),
            Engine.load(model.path, tmp_path / "s.gguf", mode="exact", device="cpu") as engine,
        ):
            lines = [x for x in capsys.readouterr().err.splitlines() if "neuron cache" in x]
            logits = [engine._step(token, at).clone() for at, token in enumerate(IDS)]
            return engine.neuron_cache is not None, lines, torch.stack(logits)

    return loaded


def verdicts():
    (checks,) = stored_checks()
    return checks.verdicts


def test_working_kernels_are_checked_once_and_print_nothing(load):
    has_cache, lines, _ = load(fake_parts())
    assert has_cache and lines == []
    assert all(verdicts()[part].is_fine for part in SLOT_PARTS)
    has_cache, lines, _ = load(fake_parts(slot_kernels=with_slot_kernel("scatter", raising)))
    assert has_cache and lines == []  # nothing was tried again


@pytest.mark.parametrize(("name", "part"), [("scatter", "copies"), ("pack_open", "bits")])
def test_a_kernel_that_fails_turns_the_cache_off(load, name, part):
    _, _, want = load(fake_parts())
    forget_checks()
    parts = fake_parts(slot_kernels=with_slot_kernel(name, idle))
    for _ in range(2):  # the second load finds the verdict of the first
        has_cache, (line,), got = load(parts)
        assert not has_cache and rel_error(got, want) < 3e-3
        assert f"the neuron cache's {part}: " in line
        assert line.endswith(" are wrong: the neuron cache is off; hotsplit doctor says more")
        parts = fake_parts()
    assert not verdicts()[f"neuron cache's {part}"].is_fine


def test_without_triton_the_cache_is_off(load):
    def missing():
        raise ImportError("the GPU kernels need Triton, found none: pip install triton")

    has_cache, lines, _ = load(fake_parts(slot_kernels=missing))
    assert not has_cache
    (line,) = lines
    assert "pip install triton: the neuron cache is off" in line


def test_without_a_cache_its_kernels_are_not_checked(load, monkeypatch, tmp_path):
    monkeypatch.setattr(device_parts, "parts_of",
                        lambda device: fake_parts(slot_kernels=failing()))  # fmt: skip
    with Engine.load(tmp_path / "m.gguf", tmp_path / "s.gguf", mode="exact", device="cpu",
                     neuron_cache="off") as engine:  # fmt: skip
        assert engine.neuron_cache is None
    assert not set(SLOT_PARTS) & set(verdicts())
