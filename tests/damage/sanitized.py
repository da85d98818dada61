"""A pytest plugin: the library of C++ kernels is the one that the variable SANITIZED names, and
products have fewer rows: 300 read no other places than two windows of 64 rows and the next."""

import os

from hotsplit.system import shared_libraries

_find_spec = shared_libraries.find_spec


def _find_sanitized(name: str):
    spec = _find_spec(name)
    if name == "hotsplit.runtime._cpu" and spec is not None:
        spec.origin = os.environ["SANITIZED"]
    return spec


shared_libraries.find_spec = _find_sanitized


def pytest_collection_modifyitems(items):
    for item in items:
        if hasattr(item.module, "NUMBERS_OF_ROWS"):
            item.module.NUMBERS_OF_ROWS = (1, 2, 7, 130)
