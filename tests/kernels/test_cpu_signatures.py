"""Python's signatures of the kernels' C functions are those of their headers."""

import ctypes
import re

import pytest
from paths import ROOT

from hotsplit.runtime.kernels.cpu.shared_library import SIGNATURES

RUNTIME = ROOT / "runtime"
HEADERS = ("kernels.h", "step.h", "row_copies.h", "step_server.h")
DECLARED = re.compile(r"^(\w[\w* ]*?[* ])(hs_\w+)\(([^)]*)\);", re.MULTILINE)
TYPES = {
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "double": ctypes.c_double,
    "void": None,
}


def type_of(declared: str) -> object:
    """The ctypes type of a parameter, which may be followed by its name, or of a result."""
    if "*" in declared:
        return ctypes.c_char_p if re.search(r"\bchar\b", declared) else ctypes.c_void_p
    return TYPES[declared.split()[0]]


def declared_in(text: str) -> dict[str, tuple[object, tuple[object, ...]]]:
    return {
        name: (type_of(returned), tuple(type_of(each) for each in taken.split(",") if each.strip()))
        for returned, name, taken in DECLARED.findall(text)
    }


def headers() -> str:
    folder = RUNTIME / "kernels" / "cpu"
    return "\n".join((folder / name).read_text(encoding="utf-8") for name in HEADERS)


def test_signatures_are_those_of_the_headers():
    assert declared_in(headers()) == SIGNATURES


@pytest.mark.parametrize(
    "old, new",
    [
        ("int64_t count, float* logits", "int32_t count, float* logits"),
        ("void hs_part", "int32_t hs_part"),
        ("const float* x, int64_t T", "const float* x"),
        ("hs_set_level", "hs_put_level"),
    ],
)
def test_another_declaration_is_found(old, new):
    text = headers()
    assert old in text
    assert declared_in(text.replace(old, new)) != SIGNATURES


def test_every_function_that_is_called_has_a_signature():
    """Without one, ctypes takes any arguments and cuts a result to 32 bits."""
    text = (RUNTIME / "kernels" / "cpu" / "library.py").read_text(encoding="utf-8")
    called = set(re.findall(r"\bhs_\w+", text))
    assert len(called) >= 15 and called <= set(SIGNATURES)
