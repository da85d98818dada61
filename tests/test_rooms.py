"""The runtime's folders: imports only go down, and no cycle is hidden by an import in a
function."""

import ast
import re
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

RUNTIME = Path(__file__).parent.parent / "runtime"
PACKAGE = "hotsplit.runtime"
# From the bottom to the top. Modules outside the folders (such as the engine) are above them all.
ROOMS = ("device", "kernels", "weights", "cache", "ops", "model", "neuron_cache", "step", "prefill",
         "check", "text", "answers", "generate")  # fmt: skip


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


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(RUNTIME).with_suffix("").parts)


MODULES = {module_of(path): path for path in RUNTIME.rglob("*.py")}
IMPORTS = {module: imports_of(path) for module, path in MODULES.items()}


def floor_of(module: str) -> int:
    room, _, rest = module.partition(".")
    return ROOMS.index(room) if rest else len(ROOMS)


def test_every_module_is_in_a_room_or_on_top():
    assert {m.partition(".")[0] for m in MODULES if "." in m} <= set(ROOMS)
    assert {m for m in MODULES if "." not in m} == {
        "engine",
        "resolved_options",
        "gpu_setup",
        "loading",
    }


def test_the_picture_shows_the_rooms():
    picture = (RUNTIME.parent / "docs" / "images" / "rooms.svg").read_text(encoding="utf-8")
    assert tuple(re.findall(r'<text class="left"[^>]*>(\w+)</text>', picture)) == ROOMS[::-1]


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_go_down(module):
    above = [name for name in IMPORTS[module] if floor_of(name) > floor_of(module)]
    assert not above, f"{module} is below {above}"


def test_imports_have_no_cycle():
    assert list(TopologicalSorter(IMPORTS).static_order())
