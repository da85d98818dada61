"""Imports of the runtime only go down: neither its modules nor its rooms import each other in a
cycle, not even one that an import in a function hides."""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from paths import ROOT

RUNTIME = ROOT / "runtime"
PACKAGE = "hotsplit.runtime"


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(RUNTIME).with_suffix("").parts)


MODULES = {module_of(path): path for path in RUNTIME.rglob("*.py")}


def imports_of(path: Path) -> set[str]:
    """Modules of the runtime that a file imports, also inside functions or only for types."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        found |= {name.removeprefix(f"{PACKAGE}.") for name in names if name.startswith(PACKAGE)}
    return found & set(MODULES)


def of_rooms(imports: dict[str, set[str]]) -> dict[str, set[str]]:
    """The rooms that each room imports; a module beside the rooms is one by itself."""
    rooms: dict[str, set[str]] = {}
    for module, names in imports.items():
        room = module.partition(".")[0]
        rooms.setdefault(room, set()).update({name.partition(".")[0] for name in names} - {room})
    return rooms


IMPORTS = {module: imports_of(path) for module, path in MODULES.items()}


def test_imports_have_no_cycle():
    assert len(list(TopologicalSorter(IMPORTS).static_order())) == len(MODULES)
    assert len(list(TopologicalSorter(of_rooms(IMPORTS)).static_order())) > 8


def test_an_import_up_is_found():
    above, below = "engine", "kernels.stored"
    with pytest.raises(CycleError):
        list(TopologicalSorter(of_rooms(IMPORTS | {below: {above}})).static_order())
