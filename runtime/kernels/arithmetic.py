"""Describes in one line the device, kernels and torch release that compute a result: for artifacts,
and to check that a resumed run matches the earlier one."""

import torch

from hotsplit.runtime.kernels.cpu import library


def arithmetic(device: torch.device) -> str:
    """One line, e.g. "avx512vnni, torch 2.13.0 AVX512" for a CPU, or a GPU's name with the
    releases of torch and CUDA.

    Sums in training also depend on torch's number of threads; those of the C++ kernels do not."""
    release = torch.__version__.split("+")[0]
    if device.type != "cpu":
        name = torch.cuda.get_device_name(device)
        return f"{name}, torch {release} for CUDA {torch.version.cuda}"
    return f"{library.level()}, torch {release} {torch.backends.cpu.get_cpu_capability()}"
