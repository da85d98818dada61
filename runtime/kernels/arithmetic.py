"""What decides the last bit of a result, beside model and text: one line for artifacts and for what
a run that goes on must have in common with the one before.

What this module does not know: what is computed."""

import torch

from sparkinfer.runtime.kernels.cpu import library


def arithmetic(device: torch.device) -> str:
    """E.g. "avx512vnni, torch 2.13.0 AVX512"; our kernels' level is "torch" where there are none.

    The sums of a training depend on the number of torch's threads besides; those of a pass do not."""
    release = torch.__version__.split("+")[0]
    if device.type != "cpu":
        name = torch.cuda.get_device_name(device)
        return f"{name}, torch {release} for CUDA {torch.version.cuda}"
    level = library.level() if library.is_available() else "torch"
    return f"{level}, torch {release} {torch.backends.cpu.get_cpu_capability()}"
