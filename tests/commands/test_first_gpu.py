"""Systems that docs/gpu.md lists, with fakes of what CUDA and the system report."""

import sys

import torch

from hotsplit.cli import main
from hotsplit.doctor import machine_findings as machine
from hotsplit.errors import HotsplitError
from hotsplit.runtime import gpu_setup

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def test_weights_that_cannot_be_pinned_stay_as_they_are():
    class Residence:
        def pin(self):
            raise HotsplitError("8.00 GiB of main memory cannot be pinned: raise the limit")

    said = []
    gpu_setup.pin(Residence(), said.append)
    assert said == [
        "8.00 GiB of main memory cannot be pinned: raise the limit; until then, prompts"
        " copy cold weights through staging buffers, more slowly"
    ]


def test_windows_itself_is_refused_by_name(monkeypatch, capsys):
    monkeypatch.setattr(sys, "platform", "win32")
    assert main(["doctor"]) == 1
    assert capsys.readouterr().err.splitlines() == [
        "hotsplit: Windows itself is not supported; use it under WSL 2"
    ]


def test_the_systems_are_named(monkeypatch, tmp_path):
    path = tmp_path / "osrelease"
    path.write_text("6.6.87.2-microsoft-standard-WSL2\n")
    monkeypatch.setattr(machine, "_KERNEL", path)
    assert machine.is_wsl() and "under WSL" in machine.system()[0].text
