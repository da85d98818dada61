"""The files between stages, one module each: a dataclass with `load`, `save` and checks."""
