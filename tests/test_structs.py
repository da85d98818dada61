"""Structs that Python mirrors have the names, places and sizes that C++ gives their fields.

A mirror is a subclass of ctypes.Structure in the runtime; C++ lists its structs in structs.cpp."""

import ast
import ctypes
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from hotsplit.runtime.kernels.cpu import library
from hotsplit.runtime.neuron_cache.native.library import SWAP

pytestmark = pytest.mark.skipif(not library.is_available(), reason="the C++ kernels are not built")
RUNTIME = Path(__file__).parent.parent / "runtime"
LIBRARIES = ("hotsplit.runtime._cpu", "hotsplit.runtime._neuron_cache")
CACHE = "neuron_cache.native.library"
# Names in C++, where they are not Hs and the mirror's name without Struct.
OTHER_NAMES = {(CACHE, "LayerStruct"): "CacheLayer", (CACHE, "CacheStruct"): "NeuronCache"}
# Structs that Python writes as rows of arrays.
ROWS = {"CacheSwap": SWAP, "HsCopy": np.dtype([(n, "i8") for n in ("from", "to", "num_bytes")])}


class _Field(ctypes.Structure):
    """StructField in struct_layout.h."""

    _fields_ = [("struct", ctypes.c_char_p), ("name", ctypes.c_char_p),
                ("offset", ctypes.c_int64), ("num_bytes", ctypes.c_int64)]  # fmt: skip


# The layout of a struct: (name, offset, bytes) of the fields, then (None, 0, bytes of the struct).
Layout = list[tuple[str | None, int, int]]


def layouts_in_cpp() -> dict[str, Layout]:
    layouts: dict[str, Layout] = {}
    for name in LIBRARIES:
        spec = find_spec(name)
        assert spec is not None and spec.origin is not None, name
        function = ctypes.CDLL(spec.origin).hs_struct_fields
        function.restype = ctypes.POINTER(_Field)
        fields = function()
        index = 0
        while fields[index].struct is not None:
            field = fields[index]
            field_name = None if field.name is None else field.name.decode()
            layout = layouts.setdefault(field.struct.decode(), [])
            layout.append((field_name, field.offset, field.num_bytes))
            index += 1
    return {name: [*layout[1:], layout[0]] for name, layout in layouts.items()}


def layout_of(mirror: type[ctypes.Structure]) -> Layout:
    places = [(name, getattr(mirror, name)) for name, *_ in mirror._fields_]
    fields: Layout = [(name, place.offset, place.size) for name, place in places]
    return [*fields, (None, 0, ctypes.sizeof(mirror))]


def layout_of_rows(dtype: np.dtype) -> Layout:
    assert dtype.fields is not None and dtype.names is not None
    fields: Layout = [(n, dtype.fields[n][1], dtype.fields[n][0].itemsize) for n in dtype.names]
    return [*fields, (None, 0, dtype.itemsize)]


def mirrors() -> dict[str, type[ctypes.Structure]]:
    """The mirrors in the runtime, by their names in C++."""
    found = {}
    for path in sorted(RUNTIME.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        classes = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.ClassDef)]
        names = [c.name for c in classes if "Structure" in [ast.unparse(b)[-9:] for b in c.bases]]
        module = ".".join(path.relative_to(RUNTIME).with_suffix("").parts)
        for name in names:
            in_cpp = OTHER_NAMES.get((module, name), f"Hs{name.removesuffix('Struct')}")
            assert in_cpp not in found, f"{in_cpp} has two mirrors"
            found[in_cpp] = getattr(import_module(f"hotsplit.runtime.{module}"), name)
    return found


IN_CPP = layouts_in_cpp() if library.is_available() else {}
MIRRORS = mirrors()


def test_every_struct_is_in_both_languages():
    assert len(MIRRORS) >= 14
    assert {*IN_CPP} == {*MIRRORS, *ROWS}


@pytest.mark.parametrize("name", [*MIRRORS, *ROWS])
def test_fields_are_at_their_places(name):
    mirror = layout_of_rows(ROWS[name]) if name in ROWS else layout_of(MIRRORS[name])
    assert mirror == IN_CPP[name]


def changed(mirror: type[ctypes.Structure], how: str) -> type[ctypes.Structure]:
    """The mirror with a mistake, if the struct allows it."""
    fields = list(mirror._fields_)
    (first, kind), (second, other) = fields[:2]
    if how == "swapped":
        fields[:2] = [(second, other), (first, kind)]
    elif how == "renamed":
        fields[0] = (f"{first}_2", kind)
    elif how == "missing":
        del fields[-1]
    elif how == "added":
        fields.append(("more", ctypes.c_int64))
    else:
        fields[0] = (first, ctypes.c_int8)
    return type(mirror.__name__, (ctypes.Structure,), {"_fields_": fields})


@pytest.mark.parametrize("how", ["swapped", "renamed", "missing", "added", "narrower"])
@pytest.mark.parametrize("name", MIRRORS)
def test_a_wrong_mirror_is_rejected(name, how):
    assert layout_of(changed(MIRRORS[name], how)) != IN_CPP[name]


def test_a_mirror_that_cpp_does_not_list_is_found(monkeypatch):
    monkeypatch.setitem(MIRRORS, "HsNew", MIRRORS["HsRow"])
    with pytest.raises(AssertionError):
        test_every_struct_is_in_both_languages()
