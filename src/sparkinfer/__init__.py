"""Sparse inference. The parts: sparkinfer.convert, .profile, .solver and .runtime."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sparkinfer.runtime.engine import Engine

__all__ = ["Engine"]


def __getattr__(name: str) -> object:
    """`from sparkinfer import Engine`, without importing torch for who does not ask for it."""
    if name == "Engine":
        from sparkinfer.runtime.engine import Engine

        return Engine
    raise AttributeError(f"module 'sparkinfer' has no attribute {name!r}")
