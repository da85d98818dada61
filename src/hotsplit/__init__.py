"""Sparse inference. The main stages: hotsplit.convert, .profile, .solver and .runtime.

Nothing is imported here, not even typing, so that the command line handles Ctrl-C from the
start. docs/api.md describes the public names."""

TYPE_CHECKING = False  # type checkers assume true
if TYPE_CHECKING:
    from hotsplit.errors import HotsplitError
    from hotsplit.options.generation_options import (
        GenerationOptions,
        SamplingOptions,
        SpeculationOptions,
    )
    from hotsplit.runtime.drafting import drafting
    from hotsplit.runtime.engine import Engine
    from hotsplit.runtime.generate.chat import ChatOptions
    from hotsplit.runtime.generate.ngrams import NgramDrafter
    from hotsplit.runtime.generate.speculation import Speculation
    from hotsplit.runtime.step.sequences import Part

    __version__: str

__all__ = [
    "ChatOptions",
    "Engine",
    "GenerationOptions",
    "NgramDrafter",
    "Part",
    "SamplingOptions",
    "HotsplitError",
    "Speculation",
    "SpeculationOptions",
    "__version__",
    "drafting",
]
_MODULES = {
    "ChatOptions": "runtime.generate.chat",
    "Engine": "runtime.engine",
    "GenerationOptions": "options.generation_options",
    "NgramDrafter": "runtime.generate.ngrams",
    "Part": "runtime.step.sequences",
    "SamplingOptions": "options.generation_options",
    "HotsplitError": "errors",
    "Speculation": "runtime.generate.speculation",
    "SpeculationOptions": "options.generation_options",
    "drafting": "runtime.drafting",
}


def __getattr__(name: str) -> object:
    """Imports a public name only when it is used, since most of them import torch."""
    if name in _MODULES:
        from importlib import import_module

        return getattr(import_module(f"hotsplit.{_MODULES[name]}"), name)
    if name == "__version__":
        from importlib.metadata import version

        return version("hotsplit")
    raise AttributeError(f"module 'hotsplit' has no attribute {name!r}")
