"""Tells whether the GPU checks can run here.

If they cannot, prints the reason in one line and exits with 1; if they can, prints nothing.

    python gpu_ready.py [--packages torch,triton] [--needs-kernels] [--without-device]

Installing anything is left to gpu_setup.sh."""

import argparse
import importlib
import sys
from importlib.util import find_spec

OURS = {"gguf", "pulp", "highspy", "hotsplit"}  # installed by gpu_setup.sh
PACKAGES = ",".join(("torch", "triton", *sorted(OURS)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--packages", default=PACKAGES, help="packages that this Python must have")
    parser.add_argument(
        "--needs-kernels", action="store_true", help="the C++ kernels must be built"
    )
    parser.add_argument("--without-device", action="store_true", help="a CPU will do")
    arguments = parser.parse_args()
    found = reason(
        arguments.packages.split(","),
        needs_kernels=arguments.needs_kernels,
        needs_device=not arguments.without_device,
    )
    if found:
        sys.exit(f"gpu_ready: {found}")


def reason(packages: list[str], *, needs_kernels: bool, needs_device: bool) -> str | None:
    """Why the GPU checks cannot run here; None if they can."""
    if find_spec("torch") is None:
        return f"{sys.executable} has no torch; name the Python that has it: PYTHON=..."
    torch = importlib.import_module("torch")
    if needs_device and not torch.cuda.is_available():
        build = torch.version.cuda
        what = (
            f"torch {torch.__version__} built for CUDA {build}" if build else "a torch without CUDA"
        )
        return f"no CUDA device ({what}); these checks cannot run without one"
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        ours = set(missing) <= OURS
        remedy = (
            "run benchmarks/gpu_setup.sh"
            if ours
            else "install it, or name another Python: PYTHON=..."
        )
        return f"{sys.executable} has no {', '.join(missing)}; {remedy}"
    if needs_kernels and find_spec("hotsplit.runtime._cpu") is None:
        return "the C++ kernels are not built; run benchmarks/gpu_setup.sh again"
    return None


if __name__ == "__main__":
    main()
