"""Child process: queries NVIDIA's driver and the GPUs that it sees, without torch.

Signatures are from nvml.h and cuda.h."""

import ctypes
from ctypes import byref, c_char_p, c_int, c_uint, c_ulonglong, c_void_p, create_string_buffer
from typing import Any

from hotsplit.doctor.children import leave_no_core, tell_at, tell_done

_NVML, _CUDA = "libnvidia-ml.so.1", "libcuda.so.1"


class _Memory(ctypes.Structure):
    """nvmlMemory_t."""

    _fields_ = [("total", c_ulonglong), ("free", c_ulonglong), ("used", c_ulonglong)]


def main() -> None:
    leave_no_core()
    tell_at(_CUDA)
    found: dict[str, Any] = {"cuda": _cuda_version(), "driver": None, "gpus": []}
    tell_at(_NVML)
    nvml = _library(_NVML)
    if nvml is not None and nvml.nvmlInit_v2() == 0:
        text = create_string_buffer(96)
        if nvml.nvmlSystemGetDriverVersion(text, c_uint(len(text))) == 0:
            found["driver"] = text.value.decode(errors="replace")
        count = c_uint()
        nvml.nvmlDeviceGetCount_v2(byref(count))
        found["gpus"] = [_gpu(nvml, number) for number in range(count.value)]
    tell_done(found)


def _library(name: str) -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(name)
    except OSError:
        return None


def _cuda_version() -> str | None:
    """The latest CUDA that the driver supports; None without a driver."""
    cuda, number = _library(_CUDA), c_int()
    if cuda is None or cuda.cuDriverGetVersion(byref(number)):
        return None
    return f"{number.value // 1000}.{number.value % 1000 // 10}"


def _gpu(nvml: ctypes.CDLL, number: int) -> dict[str, Any]:
    handle, name, memory = c_void_p(), create_string_buffer(96), _Memory()
    major, minor = c_int(), c_int()
    nvml.nvmlDeviceGetName.argtypes = [c_void_p, c_char_p, c_uint]
    nvml.nvmlDeviceGetMemoryInfo.argtypes = [c_void_p, c_void_p]
    nvml.nvmlDeviceGetCudaComputeCapability.argtypes = [c_void_p, c_void_p, c_void_p]
    if nvml.nvmlDeviceGetHandleByIndex_v2(c_uint(number), byref(handle)):
        return {"index": number, "name": "unknown", "free": 0, "total": 0, "capability": "unknown"}
    nvml.nvmlDeviceGetName(handle, name, len(name))
    nvml.nvmlDeviceGetMemoryInfo(handle, byref(memory))
    nvml.nvmlDeviceGetCudaComputeCapability(handle, byref(major), byref(minor))
    return {
        "index": number, "name": name.value.decode(errors="replace"), "free": memory.free,
        "total": memory.total, "capability": f"{major.value}.{minor.value}",
    }  # fmt: skip


if __name__ == "__main__":
    main()
