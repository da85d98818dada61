"""Triton's language, for modules that hold a kernel beside its reference. Where Triton is missing,
stand-ins take its place: such modules can be imported for their references, and kernels cannot be
launched."""

from typing import Any

try:
    import triton
    import triton.language as tl
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:

    class _Absent:
        """Any of Triton's modules, types and decorators."""

        def __getattr__(self, name: str) -> "_Absent":
            return self

        def __call__(self, *arguments: Any, **options: Any) -> "_Absent":
            return self

    triton = tl = gdc_launch_dependents = gdc_wait = _Absent()

__all__ = ["gdc_launch_dependents", "gdc_wait", "tl", "triton"]
