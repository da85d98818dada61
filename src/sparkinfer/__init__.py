"""Sparse inference. The main stages: sparkinfer.convert, .profile, .solver and .runtime.

Nothing is imported here, not even typing, so that the command line handles Ctrl-C from the
start."""

TYPE_CHECKING = False  # type checkers assume true
if TYPE_CHECKING:
    from sparkinfer.runtime.engine import Engine
    from sparkinfer.runtime.step.sequences import Part

    __version__: str

__all__ = ["Engine", "Part", "__version__"]


def __getattr__(name: str) -> object:
    """Imports `Engine` and `Part`, and torch with them, only when they are used."""
    if name == "Engine":
        from sparkinfer.runtime.engine import Engine

        return Engine
    if name == "Part":
        from sparkinfer.runtime.step.sequences import Part

        return Part
    if name == "__version__":
        from importlib.metadata import version

        return version("sparkinfer")
    raise AttributeError(f"module 'sparkinfer' has no attribute {name!r}")
