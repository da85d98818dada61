"""What `hotsplit doctor` says about torch, drivers, GPUs and trials of them."""

import os

import pytest
from fake_cuda import library as fake_library
from fake_cuda.kernels import launched
from fake_cuda.torch_cuda import fake_cuda
from test_doctor import broken  # noqa: F401

from hotsplit.doctor import gpu_findings as gpu
from hotsplit.doctor.children import Child, ProbeResult
from hotsplit.doctor.probes import probe_gpu
from hotsplit.runtime.kernels.gpu.kernels import reference_kernels

# ---- torch, drivers and GPUs as children report them ---------------------------------------------

CARD = {"index": 0, "name": "Some Card", "free": 6 << 30, "total": 8 << 30, "capability": "8.9"}
DRIVER = {"cuda": "12.8", "driver": "570.1", "gpus": [CARD]}
TORCH = {
    "version": "2.13.0",
    "cuda": "12.8",
    "is_right": True,
    "gpus": [CARD],
    "runtime_error": None,
}


def lines(findings):
    return "\n".join(each.line for each in findings)


NONE = {"cuda": None, "driver": None, "gpus": []}
BLIND = TORCH | {"gpus": []}  # torch that sees no GPU


@pytest.mark.parametrize(
    ("driver", "torch", "said"),
    [
        (DRIVER, TORCH, "ok    driver: 570.1, CUDA up to 12.8"),
        (NONE, BLIND, "note  driver: no NVIDIA driver"),
        (DRIVER, BLIND | {"cuda": None}, "it is built for the CPU -> install torch for"),
        (
            DRIVER | {"cuda": "12.2"},
            BLIND,
            "update the driver, which is older than torch's CUDA 12.8",
        ),
        (DRIVER, BLIND | {"gpu_error": "no device"}, "sees no GPU: no device -> check"),
        (DRIVER, {"error": "ImportError: x", "is_missing": False}, "ok    driver"),
    ],
)
def test_drivers(driver, torch, said):
    assert said in lines(gpu.driver(ProbeResult(done=driver), ProbeResult(done=torch)))


def test_a_library_of_another_version_is_reported(broken):  # noqa: F811
    """After an update without a build, a function is missing."""
    assert lines(gpu.torch(ProbeResult(done=TORCH))) == "ok    torch: 2.13.0, for CUDA 12.8"
    broken(
        "sitecustomize",
        "import ctypes\nclass CDLL(ctypes.CDLL):\n"
        "    def __getattr__(self, name):\n"
        "        if name == 'hs_neurons': raise AttributeError('undefined symbol: ' + name)\n"
        "        return super().__getattr__(name)\n"
        "ctypes.CDLL = CDLL\n",
    )
    broken(
        "torch",
        "class Tensor:\n    def __matmul__(self, other): return self\n"
        "    def __eq__(self, other): return self\n    def all(self): return True\n"
        "ones = lambda *shape: Tensor()\n__version__ = '0'\nclass version: cuda = None\n"
        "float32 = float16 = bfloat16 = uint8 = int32 = dtype = None\n"
        "class cuda: is_available = staticmethod(lambda: False)\n"
        "get_num_threads = lambda: 1\ncuda.device_count = staticmethod(lambda: 0)\n",
    )
    found = gpu.torch(Child("torch").result())
    assert [each.state for each in found] == ["ok", "wrong"]
    assert "undefined symbol: hs_neurons" in found[1].text and "make build" in found[1].advice


@pytest.mark.parametrize(
    ("capability", "said"),
    [
        ("8.9", "ok    GPU 0: Some Card, compute capability 8.9, 6.00 GiB free of 8.00 GiB"),
        ("7.5", "note  GPU 0"),
        ("6.1", "use --device cpu"),
        ("12.0", "ok    GPU 0"),
    ],
)
def test_gpus(capability, said):
    found = TORCH | {"gpus": [CARD | {"capability": capability}]}
    assert said in lines(gpu.gpus(ProbeResult(done=found), ProbeResult(done=DRIVER)))
    crashed = ProbeResult(done=None, how="crashed by SIGSEGV")
    driver = DRIVER | {"gpus": found["gpus"]}
    assert said in lines(
        gpu.gpus(crashed, ProbeResult(done=driver))
    )  # only what the driver reports


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "ok    triton: 3.6.0"),
        ({"error": "ImportError: x", "is_missing": False}, "triton: fails: ImportError: x"),
        ({"error": "", "is_missing": True}, "triton: is not installed"),
        ({"compiler": None}, "a C compiler not found"),
        ({"compiler": None, "has_headers": False}, "a C compiler and Python's headers not found"),
        ({"can_write": False}, "its cache cannot be written, so every load compiles"),
    ],
)
def test_triton(changes, said):
    done = {
        "version": "3.6.0",
        "num_files": 5,
        "num_bytes": 99,
        "can_write": True,
        "compiler": "gcc",
        "has_headers": True,
    } | changes
    for has_gpu in (True, False):
        found = gpu.triton(ProbeResult(done=done), has_gpu=has_gpu)
        assert said in lines(found)
        states = {each.state for each in found if each.state != "ok"}
        assert states == ({"wrong" if has_gpu else "note"} if changes else set())


SMI = """#!/bin/sh
case "$1" in
--query-gpu=*) echo "570.1, 0, Some Card, 6144, 8192, 8.9" ;;
*) echo "| NVIDIA-SMI 570.1   Driver Version: 570.1   CUDA Version: 12.8 |" ;;
esac
"""
SILENT = "#!/bin/sh\necho 'Failed to initialize NVML'\nexit 9\n"


@pytest.mark.parametrize(
    ("program", "found"), [(SMI, DRIVER), (SILENT, {"cuda": None, "driver": None, "gpus": []})]
)
def test_the_driver_is_queried_without_torch(tmp_path, monkeypatch, program, found):
    (tmp_path / "nvidia-smi").write_text(program)
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert Child("driver").result().done == found


# ---- trials of GPUs ------------------------------------------------------------------------------


def test_trials_of_gpus_are_lines():
    results = [
        ProbeResult(done={"why": None}),
        ProbeResult(done={"why": "cuda:1: the logits of a step are off by 0.9"}),
        ProbeResult(done=None, how="crashed by SIGSEGV", at="a small model on cuda:2"),
    ]
    found = gpu.trials(results)
    assert [each.state for each in found] == ["ok", "wrong", "wrong"]
    assert [each.about for each in found] == [f"trial of GPU {n}" for n in range(3)]
    assert "off by 0.9" in found[1].text and "crashed by SIGSEGV" in found[2].text


@pytest.mark.skipif(not fake_library.can_be_built(), reason="needs a C++ compiler, and Linux")
@pytest.mark.parametrize("is_right", [True, False])
def test_a_gpu_is_tried_with_a_small_model(is_right):
    """In this process."""
    right = reference_kernels()
    wrong = right.replaced(down=lambda *arguments, **options: None)
    with fake_cuda(is_checked=True, kernels=launched(right if is_right else wrong)):
        found = probe_gpu("cuda:0")
    assert (found["why"] is None) == is_right
    assert is_right or "the logits of a step are off by" in found["why"]
