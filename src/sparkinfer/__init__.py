"""Sparse inference. The parts: sparkinfer.convert, .profile, .solver and .runtime."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sparkinfer.runtime.engine import Engine
    from sparkinfer.runtime.step.sequences import Part

__all__ = ["Engine", "Part"]


def __getattr__(name: str) -> object:
    """`from sparkinfer import Engine`, which imports torch only when asked for."""
    if name == "Engine":
        from sparkinfer.runtime.engine import Engine

        return Engine
    if name == "Part":
        from sparkinfer.runtime.step.sequences import Part

        return Part
    raise AttributeError(f"module 'sparkinfer' has no attribute {name!r}")
