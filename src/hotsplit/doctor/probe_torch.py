"""Child process that checks whether torch can be imported, multiplies correctly and sees GPUs, and
whether the runtime can be imported."""

import os
from dataclasses import asdict
from typing import Any

from hotsplit.doctor.children import leave_no_core, tell_at, tell_done


def main() -> None:
    leave_no_core()
    tell_at("import torch")
    try:
        import torch
    except (ImportError, OSError) as error:
        tell_done({"error": f"{type(error).__name__}: {error}",
                   "is_missing": isinstance(error, ModuleNotFoundError) and error.name == "torch"})  # fmt: skip
        return
    tell_at("a product")
    product = torch.ones(64, 64) @ torch.ones(64, 64)
    found: dict[str, Any] = {
        "version": str(torch.__version__),
        "cuda": torch.version.cuda,
        "is_right": bool((product == 64).all()),
        "num_threads": torch.get_num_threads(),
    }
    tell_at("the runtime")
    found["runtime_error"] = _runtime_error()
    tell_at("looking for GPUs")
    try:
        is_there = torch.cuda.is_available()
        gpus = [_gpu(torch, n) for n in range(torch.cuda.device_count())] if is_there else []
        tell_done({**found, "gpus": gpus})
    except RuntimeError as error:
        tell_done({**found, "gpus": [], "gpu_error": str(error).splitlines()[0]})


def _runtime_error() -> str | None:
    """The reason why the runtime cannot be imported, e.g. a library of another version that lacks
    functions; a forced CPU level is ignored."""
    os.environ.pop("HOTSPLIT_CPU_LEVEL", None)
    try:
        import hotsplit.runtime.kernels.cpu.library  # noqa: F401
    except (ImportError, OSError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def _gpu(torch: Any, number: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(number)
    free, total = torch.cuda.mem_get_info(number)
    return {
        "index": number, "name": properties.name, "free": free, "total": total,
        "capability": f"{properties.major}.{properties.minor}", "key": _key(torch, number),
    }  # fmt: skip


def _key(torch: Any, number: int) -> dict[str, Any] | None:
    """The key under which a load looks up this GPU's checks; None if the runtime cannot be
    imported."""
    try:
        from hotsplit.runtime.check.parts import key_of
    except (ImportError, OSError, AttributeError):
        return None
    return asdict(key_of(torch.device("cuda", number)))


if __name__ == "__main__":
    main()
