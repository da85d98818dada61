"""Sparse inference. The main stages: sparkinfer.convert, .profile, .solver and .runtime.

Nothing is imported here, not even typing, so that the command line handles Ctrl-C from the
start. docs/api.md describes the public names."""

TYPE_CHECKING = False  # type checkers assume true
if TYPE_CHECKING:
    from sparkinfer.errors import SparkinferError
    from sparkinfer.runtime.engine import Engine
    from sparkinfer.runtime.generate.chat import ChatOptions
    from sparkinfer.runtime.generate.draft_options import SpeculationOptions
    from sparkinfer.runtime.generate.generation_options import GenerationOptions
    from sparkinfer.runtime.generate.ngrams import NgramDrafter
    from sparkinfer.runtime.generate.sampling_options import SamplingOptions
    from sparkinfer.runtime.generate.speculation import Speculation
    from sparkinfer.runtime.step.sequences import Part

    __version__: str

__all__ = [
    "ChatOptions", "Engine", "GenerationOptions", "NgramDrafter", "Part", "SamplingOptions",
    "SparkinferError", "Speculation", "SpeculationOptions", "__version__",
]  # fmt: skip
_MODULES = {
    "ChatOptions": "runtime.generate.chat",
    "Engine": "runtime.engine",
    "GenerationOptions": "runtime.generate.generation_options",
    "NgramDrafter": "runtime.generate.ngrams",
    "Part": "runtime.step.sequences",
    "SamplingOptions": "runtime.generate.sampling_options",
    "SparkinferError": "errors",
    "Speculation": "runtime.generate.speculation",
    "SpeculationOptions": "runtime.generate.draft_options",
}


def __getattr__(name: str) -> object:
    """Imports a public name only when it is used, since most of them import torch."""
    if name in _MODULES:
        from importlib import import_module

        return getattr(import_module(f"sparkinfer.{_MODULES[name]}"), name)
    if name == "__version__":
        from importlib.metadata import version

        return version("sparkinfer")
    raise AttributeError(f"module 'sparkinfer' has no attribute {name!r}")
