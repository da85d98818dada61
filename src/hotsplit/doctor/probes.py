"""What may crash, tried in a child process: `python -m hotsplit.doctor.probes NAME [ARGUMENT...]`.

A probe imports what it tries inside its function and returns what it found. The process prints JSON
objects, one per line: {"at": "..."} before each thing that it tries, and last {"done": {...}}."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from contextlib import suppress
from pathlib import Path
from typing import Any

_IN_WSL = "/usr/lib/wsl/lib"


def main() -> None:
    with suppress(ImportError, OSError, ValueError):  # a crash is expected: no core dumps
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    probes = {
        "kernels": probe_kernels,
        "torch": probe_torch,
        "triton": probe_triton,
        "driver": probe_driver,
        "gpu": probe_gpu,
    }
    name, *arguments = sys.argv[1:]
    print(json.dumps({"done": probes[name](*arguments)}), flush=True)  # noqa: T201


def tell_at(what: str) -> None:
    print(json.dumps({"at": what}), flush=True)  # noqa: T201


def probe_kernels() -> dict[str, Any]:
    """The CPU's levels, as the C++ library finds them."""
    from hotsplit.errors import HotsplitError
    from hotsplit.runtime.kernels.cpu.shared_library import LEVEL_VARIABLE, LEVELS, open_library

    tell_at("loading the library")
    try:
        lib = open_library()
    except HotsplitError:
        return {"is_built": False}
    tell_at("choosing a level")
    faulty = lib.hs_faulty_level()
    return {
        "is_built": True,
        "level": lib.hs_level().decode(),
        "faulty": None if faulty is None else faulty.decode(),
        "usable": [name for name in LEVELS if lib.hs_level_status(name.encode()) == 0],
        "forced": os.environ.get(LEVEL_VARIABLE),
    }


def probe_torch() -> dict[str, Any]:
    """Whether torch works and sees GPUs, and whether the runtime can be imported."""
    tell_at("import torch")
    try:
        import torch
    except (ImportError, OSError) as error:
        is_missing = isinstance(error, ModuleNotFoundError) and error.name == "torch"
        return {"error": f"{type(error).__name__}: {error}", "is_missing": is_missing}
    tell_at("a product")
    product = torch.ones(64, 64) @ torch.ones(64, 64)
    found: dict[str, Any] = {
        "version": str(torch.__version__),
        "cuda": torch.version.cuda,
        "is_right": bool((product == 64).all()),
    }
    tell_at("the runtime")
    # The reason why the runtime cannot be imported, e.g. a library of another version that lacks
    # functions; a forced CPU level is ignored.
    os.environ.pop("HOTSPLIT_CPU_LEVEL", None)
    found["runtime_error"] = None
    try:
        import hotsplit.runtime.kernels.cpu.library  # noqa: F401
    except (ImportError, OSError, AttributeError) as error:
        found["runtime_error"] = f"{type(error).__name__}: {error}"
    tell_at("looking for GPUs")
    try:
        is_there = torch.cuda.is_available()
        numbers = range(torch.cuda.device_count()) if is_there else ()
        gpus = []
        for number in numbers:
            properties = torch.cuda.get_device_properties(number)
            free, total = torch.cuda.mem_get_info(number)
            capability = f"{properties.major}.{properties.minor}"
            gpu = {"index": number, "name": properties.name, "free": free, "total": total}
            gpus.append(gpu | {"capability": capability})
        return {**found, "gpus": gpus}
    except RuntimeError as error:
        return {**found, "gpus": [], "gpu_error": str(error).splitlines()[0]}


def probe_triton() -> dict[str, Any]:
    """Whether Triton can be imported, whether it has a compiler and Python's headers, and whether
    its kernel cache can be written and how large it is."""
    compiler = os.environ.get("CC") or shutil.which("clang") or shutil.which("gcc")
    headers = Path(sysconfig.get_paths()["include"]) / "Python.h"
    found = {
        "compiler": None if compiler is None else Path(compiler.split()[0]).name,
        "has_headers": headers.is_file(),
    }
    tell_at("import triton")
    try:
        import triton
        from triton import knobs

        folder = Path(knobs.cache.dir)
    except (ImportError, OSError, AttributeError) as error:
        is_missing = getattr(error, "name", None) == "triton"
        return {**found, "error": f"{type(error).__name__}: {error}", "is_missing": is_missing}
    sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    can_write = os.access(next(p for p in (folder, *folder.parents) if p.exists()), os.W_OK)
    return {
        **found,
        "version": triton.__version__,
        "num_files": len(sizes),
        "num_bytes": sum(sizes),
        "can_write": can_write,
    }


def probe_driver() -> dict[str, Any]:
    """NVIDIA's driver and its GPUs as nvidia-smi reports them, without torch."""
    tell_at("nvidia-smi")
    program = shutil.which("nvidia-smi", path=f"{os.environ.get('PATH', '')}:{_IN_WSL}")
    if program is None:
        return {"cuda": None, "driver": None, "gpus": []}
    fields = "driver_version,index,name,memory.free,memory.total,compute_cap"
    rows = _output(program, f"--query-gpu={fields}", "--format=csv,noheader,nounits").splitlines()
    gpus = [[cell.strip() for cell in row.split(",")] for row in rows if row.count(",") == 5]
    cuda = re.search(r"CUDA Version: *([0-9.]+)", _output(program))
    return {
        "cuda": cuda and cuda[1],
        "driver": gpus[0][0] if gpus else None,
        "gpus": [
            {
                "index": int(index),
                "name": name,
                "free": int(free) << 20,
                "total": int(total) << 20,
                "capability": capability,
            }
            for _, index, name, free, total, capability in gpus
        ],
    }


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def probe_gpu(*devices: str) -> dict[str, Any]:
    """Loads a small random model on each GPU, once with all neurons there and once
    with them on the CPU. `why`: why one of the GPUs fails the check of a load; None if all pass."""
    from hotsplit.artifacts.random_weights import random_model
    from hotsplit.families.decoder_sizes import Sizes
    from hotsplit.families.plain_decoder import decoder_spec
    from hotsplit.model.spec import Rotary
    from hotsplit.options.engine_config import EngineConfig
    from hotsplit.runtime.device_check import DeviceFails, failures_of_device
    from hotsplit.runtime.loading import LoadedModel
    from hotsplit.runtime.resolved_options import device_of

    sizes = Sizes(
        num_layers=2,
        hidden_size=512,
        num_neurons=1408,
        num_heads=8,
        num_kv_heads=4,
        head_dim=64,
        vocab_size=1000,
        context_length=512,
    )
    spec = decoder_spec(sizes, Rotary(theta=1e4, pairing="adjacent"), "relu")
    for device in devices:
        model = random_model(spec)
        for cpu_ffn in (False, True):
            where = "the CPU" if cpu_ffn else device
            tell_at(f"a small model on {device}, neurons on {where}")
            config = EngineConfig(mode="exact", device=device, cpu_ffn=cpu_ffn)
            try:
                with failures_of_device(device_of(device)):
                    LoadedModel(model, None, config)
            except DeviceFails as failed:
                return {"why": str(failed)}
    return {"why": None}


if __name__ == "__main__":
    main()
