"""Systems that docs/gpu.md lists, with fakes of what CUDA and the system report."""

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from hotsplit.cli import main
from hotsplit.doctor import machine
from hotsplit.errors import HotsplitError
from hotsplit.runtime import gpu_setup
from hotsplit.runtime.check import device_check, step_check
from hotsplit.runtime.check import parts as device_parts
from hotsplit.runtime.check.kernels import Wrong
from hotsplit.runtime.device import device_memory, pinned
from hotsplit.runtime.device.cuda_runtime import CudaRuntime
from hotsplit.runtime.device.staging import Staging
from hotsplit.runtime.device.streams import HostNode, PlainStream
from hotsplit.runtime.kernels.gpu.kernels import reference_kernels
from hotsplit.runtime.step.plain_backend import plain_backend
from hotsplit.runtime.weights import gpu_products

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    """Clears what earlier checks recorded for the process."""
    monkeypatch.setattr(gpu_products, "_in_f32_only", set())
    monkeypatch.setattr(pinned, "_refused", [])


@pytest.mark.parametrize(("major", "minor", "has"), [(7, 5, False), (8, 0, True), (12, 0, True)])
def test_a_gpu_without_bf16_is_not_asked_to_multiply_it_at_load(monkeypatch, major, minor, has):
    asked, was = [], torch.zeros

    def zeros(*shape, dtype, device):
        asked.append(dtype)
        return was(*shape, dtype=torch.float32)

    found = SimpleNamespace(major=major, minor=minor)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch, "zeros", zeros)
    device_memory._warm_up(GPU)
    assert asked == [torch.float32, torch.float16, *([torch.bfloat16] if has else [])]


class OnCuda(torch.Tensor):
    """A CPU tensor that claims to be on CUDA, so that a CUDA-only product is tried and fails."""

    is_cuda = True


def test_products_that_tensor_cores_lack_are_computed_in_f32():
    left = torch.randn(3, 8).bfloat16().as_subclass(OnCuda)
    right = torch.randn(8, 5).bfloat16()
    with pytest.raises((RuntimeError, NotImplementedError)):
        gpu_products._in_f32(left, right)
    gpu_products.multiply_in_f32(torch.bfloat16)
    got = gpu_products._in_f32(left, right)
    assert torch.allclose(got, left.float() @ right.float()) and got.dtype == torch.float32


def test_without_pinned_memory_copies_go_through_a_buffer():
    pinned.refuse("no device has it")
    staging = Staging(16, PlainStream(), is_pinned=True)  # without a GPU, torch itself would raise
    target = torch.zeros(16, dtype=torch.uint8)
    staging.send(target, lambda buffer: buffer.fill_(7))
    assert (target == 7).all()


def test_weights_that_cannot_be_pinned_stay_as_they_are():
    class Residence:
        def pin(self):
            raise HotsplitError("8.00 GiB of main memory cannot be pinned: raise the limit")

    said = []
    gpu_setup.pin(Residence(), said.append)
    assert said == ["8.00 GiB of main memory cannot be pinned: raise the limit; until then, prompts"
                    " copy cold weights through staging buffers, more slowly"]  # fmt: skip
    pinned.refuse("no device has it")
    gpu_setup.pin(Residence(), said.append)
    assert len(said) == 1  # the check has already said it


def test_a_runtime_without_host_functions_fails_only_that_part():
    runtime = CudaRuntime(SimpleNamespace(cudaMemcpyAsync=lambda *arguments: 0))
    runtime.copy(0, 0, 0, 0)
    with pytest.raises(HotsplitError, match="has no cudaLaunchHostFunc"):
        runtime.host_function(0, 0, 0)

    class Stream(PlainStream):
        def host(self, node: HostNode) -> None:
            runtime.host_function(0, node.function, node.argument)

    backend = replace(plain_backend(reference_kernels()), stream=lambda device: Stream())
    why = device_check.outcome(lambda: step_check.echo(backend, CPU), 5.0)
    assert why == "this CUDA runtime has no cudaLaunchHostFunc"


@pytest.mark.parametrize("settings", ["expandable_segments:True", None])
def test_an_allocator_that_keeps_no_limit_fails_only_that_part(monkeypatch, settings):
    """Settings under which no limit holds are refused; exceeding a limit is detected."""
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    if settings is None:
        monkeypatch.setattr(device_memory, "limit", lambda device, num_bytes: None)
        monkeypatch.setattr(device_memory, "_limit_all", lambda device: None)
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        monkeypatch.setattr(torch, "empty", lambda *size, **options: None)
    else:
        monkeypatch.setenv("PYTORCH_ALLOC_CONF", settings)
    why = device_check.outcome(lambda: device_parts.DeviceParts(GPU).limit(), 5.0)
    said = "gives more memory than its limit" if settings is None else "does not keep a budget"
    assert said in why


def test_a_budget_that_is_not_enforced_still_sizes_the_slab(monkeypatch):
    """The slab has the planned size; torch gets no limit."""
    from models import make_model
    from test_runtime import make_split

    from hotsplit.runtime.model.placement import Placement

    model = make_model()
    split = make_split(model, [range(0, 96, 2), range(96)])
    monkeypatch.setattr(gpu_setup.DeviceMemory, "of", lambda *arguments: arguments)
    sizes = [
        gpu_setup.memories_of(
            model, split, Placement.of_split(split, (GPU,)), {}, 32, lambda line: None,
            keeps_budget=keeps,
        )[GPU]
        for keeps in (True, False)
    ]  # fmt: skip
    assert sizes[0][1] == sizes[1][1] and sizes[0][2] == split.budgets[0] and sizes[1][2] is None


def test_drivers_have_a_version_also_under_wsl(monkeypatch, tmp_path):
    path = tmp_path / "version"
    path.write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Tue Jan\nGCC version"
    )
    monkeypatch.setattr(device_parts, "_DRIVER", path)
    assert device_parts.driver_version() == "570.86.15"
    monkeypatch.setattr(device_parts, "_DRIVER", tmp_path / "none")
    monkeypatch.setattr(torch._C, "_cuda_getDriverVersion", lambda: 12080, raising=False)
    assert device_parts.driver_version() == "CUDA 12.8"
    monkeypatch.setattr(torch._C, "_cuda_getDriverVersion", lambda: 0, raising=False)
    assert device_parts.driver_version() == "unknown"


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


def test_a_device_that_copies_or_multiplies_wrongly_fails(monkeypatch):
    parts = device_parts.DeviceParts(CPU)
    parts.use()
    parts.multiply(torch.float16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty_like", torch.zeros_like)
        patch.setattr(torch.Tensor, "copy_", lambda target, source: target)
        with pytest.raises(Wrong, match="off by 1"):
            parts.use()
    monkeypatch.setattr(
        gpu_products, "_in_f32", lambda left, right: left.float() @ right.float() / 2
    )
    with pytest.raises(Wrong, match="a product in bfloat16 is off by 0.5"):
        parts.multiply(torch.bfloat16)
