"""Installed packages are those pinned and listed; built archives hold what they should, and no
more."""

import ast
import socket
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from dependencies import EXTRAS, ROOT, closure, constraint_lines, pins, table_lines, version_of

# A licence that asks for more than attribution would be a decision, not an update.
ALLOWED = {
    "0BSD", "Apache-2.0", "Apache-2.0 WITH LLVM-exception", "BSD-2-Clause", "BSD-3-Clause",
    "BSL-1.0", "CC0-1.0", "CNRI-Python", "ISC", "MIT", "MIT-CMU", "MPL-2.0", "PSF-2.0", "Zlib",
}  # fmt: skip


def test_every_package_is_pinned_at_the_version_that_is_installed():
    installed = {name: version_of(found) for name, found in closure(EXTRAS).items()}
    wanted = pins()
    wrong = {
        name: (version, wanted.get(name))
        for name, version in installed.items()
        if wanted.get(name) != version
    }
    assert not wrong, "python tests/dependencies.py constraints > constraints.txt"
    assert (ROOT / "constraints.txt").read_text().splitlines()[:2] == list(constraint_lines())[:2]


def test_every_package_is_listed_with_its_licence():
    rows = [
        line.split(" | ") for line in table_lines() if line.startswith("| ") and "==" not in line
    ]
    listed = (ROOT / "docs" / "dependencies.md").read_text().splitlines()
    assert all(" | ".join(row) in listed for row in rows), "python tests/dependencies.py table"
    for row in rows:
        licence = row[2].removesuffix(" |")
        if licence != "licence":
            parts = licence.replace(" OR ", " AND ").split(" AND ")
            assert set(parts) <= ALLOWED, row


def test_what_is_imported_is_required():
    """Every foreign module that our packages import belongs to a package that pyproject.toml
    names."""
    modules = {"yaml": "pyyaml", "google": "protobuf", "prometheus_client": "prometheus-client"}
    required = {name.split(">")[0].split("[")[0].replace("_", "-") for name in requirements()}
    ours = {"sparkinfer"}
    for folder in (
        "src",
        "convert",
        "profile",
        "solver",
        "sparsify",
        "runtime",
        "serve",
        "bench",
        "report",
        "run",
    ):
        for path in (ROOT / folder).rglob("*.py"):
            for name in imported(path) - set(sys.stdlib_module_names) - ours - {"_typeshed"}:
                package = modules.get(name, name).replace("_", "-")
                # Triton comes with torch for CUDA; the other is imported by a rival's own Python.
                is_optional = name in ("triton", "llama_cpp")
                assert package in required or is_optional, f"{path}: {name}"


def requirements() -> list[str]:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    own = ("grammar", "serve", "parquet", "tasks")
    return [*project["dependencies"], *(name for extra in own for name in extras[extra])]


def imported(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module.split(".")[0])
    return found


@pytest.mark.slow
def test_the_archives_hold_what_they_should(tmp_path):
    """The wheel runs in a fresh environment; neither it nor the sdist has what is not ours to give."""
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation",
         "-w", tmp_path, ROOT],
        check=True,
    )  # fmt: skip
    (wheel,) = tmp_path.glob("sparkinfer-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert not [n for n in names if not n.startswith(("sparkinfer/", "sparkinfer-"))]
    assert not [n for n in names if n.endswith((".cpp", ".h", ".partial", ".pyc", ".gguf"))]
    for wanted in ("sparkinfer/py.typed", "sparkinfer/serve/page.html", "sparkinfer/cli.py",
                   "sparkinfer/runtime/engine.py", "sparkinfer/solver/solve.py"):  # fmt: skip
        assert wanted in names, wanted
    assert [n for n in names if n.endswith("_cpu.so")] and [n for n in names if "LICENSE" in n]
    script = (
        "import sys; from scikit_build_core.build import build_sdist;"
        " print(build_sdist(sys.argv[1]))"
    )
    made = subprocess.run(
        [sys.executable, "-c", script, tmp_path],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    with tarfile.open(tmp_path / made.stdout.split()[-1]) as archive:
        inside = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    assert {"pyproject.toml", "LICENSE", "CMakeLists.txt", "runtime/engine.py"} <= inside
    assert not [n for n in inside if n.split("/")[0] in ("build", ".venv", ".git")]
    environment = tmp_path / "environment"
    subprocess.run(
        [sys.executable, "-m", "venv", "--system-site-packages", environment], check=True
    )
    python = environment / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", wheel], check=True)
    said = subprocess.run(
        [python, "-m", "sparkinfer", "--version"], cwd=tmp_path, check=True, capture_output=True,
        text=True,
    )  # fmt: skip
    assert "0.1.0" in said.stdout


def test_no_test_reaches_for_the_network():
    with socket.socket() as one, pytest.raises(AssertionError, match="reaches for the network"):
        one.connect(("192.0.2.1", 80))
