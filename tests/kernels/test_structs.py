"""Structs that Python mirrors have the names, places and sizes that C++ gives their fields.

A mirror is a subclass of ctypes.Structure in the runtime. C++'s layouts are those of a program that
is made from the declarations of headers and of operations' files."""

import ast
import ctypes
import re
import subprocess
from functools import cache
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from cpp_compiler import KERNELS, compiled
from paths import ROOT

from hotsplit.runtime.neuron_cache.native.policy_library import SWAP

RUNTIME = ROOT / "runtime"
CACHE = "neuron_cache.native.policy_library"
HEADERS = (
    *(
        KERNELS / f"{name}.h"
        for name in (
            "scores",
            "tensors",
            "heads",
            "kernels",
            "gate",
            "step",
            "row_copies",
            "step_server",
        )
    ),
    RUNTIME / "neuron_cache" / "native" / "policy.h",
)
STRUCT = re.compile(r"^struct (Hs\w+|Cache\w+|NeuronCache) \{\n(.*?)^\};", re.MULTILINE | re.DOTALL)
# Names in C++, where they are not Hs and the mirror's name without Struct.
OTHER_NAMES = {(CACHE, "CacheLayerStruct"): "CacheLayer", (CACHE, "CacheStruct"): "NeuronCache"}
# Structs that Python writes as rows of arrays.
ROWS = {"CacheSwap": SWAP, "HsCopy": np.dtype([(n, "i8") for n in ("from", "to", "num_bytes")])}

# The layout of a struct: (name, offset, bytes) of the fields, then (None, 0, bytes of the struct).
Layout = list[tuple[str | None, int, int]]


def of_operations() -> str:
    """The structs of weights of operations that are in files of their own."""
    texts = [path.read_text(encoding="utf-8") for path in sorted(KERNELS.glob("*.cpp"))]
    bases = ('#include "operation.h"', '#include "state_spans.h"')
    own = [text for text in texts if any(base in text for base in bases)]
    return "\n".join(found[0] for text in own for found in STRUCT.finditer(text))


def declared() -> dict[str, list[str]]:
    """The structs, with the names of their fields in order."""
    text = "\n".join(header.read_text(encoding="utf-8") for header in HEADERS)
    return {name: fields_in(body) for name, body in STRUCT.findall(text + of_operations())}


def fields_in(body: str) -> list[str]:
    plain = re.sub(r"//.*|=[^,;]*", "", body)  # without comments and first values
    plain = re.sub(r"\(\*(\w+)\)\([^)]*\)", r"\1", plain)  # a pointer to a function
    each = [part.strip() for declaration in plain.split(";") for part in declaration.split(",")]
    return [re.search(r"(\w+)(\[\w+\])*$", part)[1] for part in each if part]


@cache
def layouts_in_cpp() -> dict[str, Layout]:
    lines = []
    for name, fields in declared().items():
        lines += [f'"{name} {f}", offsetof({name}, {f}), sizeof({name}::{f})' for f in fields]
        lines.append(f'"{name}", size_t(0), sizeof({name})')
    includes = "".join(f'#include "{header}"\n' for header in HEADERS)
    prints = "".join(f'std::printf("%s %zu %zu\\n", {line});\n' for line in lines)
    with TemporaryDirectory() as folder:
        source, program = Path(folder) / "layouts.cpp", Path(folder) / "layouts"
        head = f"#include <cstddef>\n#include <cstdio>\n{includes}{of_operations()}\n"
        source.write_text(f"{head}int main() {{\n{prints}}}\n", encoding="utf-8")
        compiled(source, program.with_suffix(".o"))
        subprocess.run(["g++", program.with_suffix(".o"), "-o", program], check=True)
        found = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    layouts: dict[str, Layout] = {}
    for line in found.splitlines():
        name, *field, offset, size = line.split()
        layouts.setdefault(name, []).append(
            (*field, int(offset), int(size)) if field else (None, 0, int(size))
        )
    return layouts


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


MIRRORS = mirrors()


def test_every_struct_is_in_both_languages():
    assert len(MIRRORS) >= 14
    assert {*layouts_in_cpp()} == {*MIRRORS, *ROWS}


@pytest.mark.parametrize("name", [*MIRRORS, *ROWS])
def test_fields_are_at_their_places(name):
    mirror = layout_of_rows(ROWS[name]) if name in ROWS else layout_of(MIRRORS[name])
    assert mirror == layouts_in_cpp()[name]


def changed(mirror: type[ctypes.Structure], how: str) -> type[ctypes.Structure]:
    """The mirror with a mistake."""
    fields = list(mirror._fields_)
    first, kind = fields[0]
    if how == "swapped":
        fields[:2] = fields[1::-1]
    elif how == "renamed":
        fields[0] = (f"{first}_2", kind)
    elif how == "missing":
        del fields[-1]
    elif how == "added":
        fields.append(("more", ctypes.c_int64))
    else:
        fields[0] = (first, ctypes.c_int8)
    return type(mirror.__name__, (ctypes.Structure,), {"_fields_": fields})


@pytest.mark.parametrize("name", MIRRORS)
def test_a_wrong_mirror_is_rejected(name):
    mirror, right = MIRRORS[name], layouts_in_cpp()[name]
    for how in ("swapped", "renamed", "missing", "added", "narrower"):
        if how != "swapped" or len(mirror._fields_) > 1:
            assert layout_of(changed(mirror, how)) != right, how


def test_a_mirror_that_cpp_does_not_list_is_found(monkeypatch):
    monkeypatch.setitem(MIRRORS, "HsNew", MIRRORS["HsRow"])
    with pytest.raises(AssertionError):
        test_every_struct_is_in_both_languages()
