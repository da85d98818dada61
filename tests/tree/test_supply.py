"""Installed packages are those pinned and listed; built archives hold what they should; tests reach
no other machine."""

import ast
import socket
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import check_wheel
import pytest
from dependencies import EXTRAS, ROOT, closure, constraint_lines, pins, table_lines, version_of

# Another licence is a decision, not an update.
_ALLOWED = (
    "0BSD, Apache-2.0, Apache-2.0 WITH LLVM-exception, BSD-2-Clause, BSD-3-Clause, BSL-1.0,"
    " CC0-1.0, CNRI-Python, ISC, MIT, MIT-CMU, MPL-2.0, PSF-2.0, Zlib"
)
ALLOWED = set(_ALLOWED.split(", "))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


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


def test_imported_packages_are_required():
    """Every third-party module that our packages import belongs to a package that pyproject.toml
    names."""
    modules = {"yaml": "pyyaml", "google": "protobuf", "prometheus_client": "prometheus-client"}
    required = {name.split(">")[0].split("[")[0].replace("_", "-") for name in requirements()}
    ours = {"hotsplit"}
    for folder in PROJECT["tool"]["scikit-build"]["wheel"]["packages"].values():
        for path in (ROOT / folder).rglob("*.py"):
            for name in imported(path) - set(sys.stdlib_module_names) - ours - {"_typeshed"}:
                package = modules.get(name, name).replace("_", "-")
                is_optional = name == "llama_cpp"  # imported by a rival's own Python
                assert package in required or is_optional, f"{path}: {name}"


def requirements() -> list[str]:
    project = PROJECT["project"]
    extras = project["optional-dependencies"]
    own = ("convert", "gpu", "grammar", "parquet", "report", "serve")
    return [*project["dependencies"], *(name for extra in own for name in extras[extra])]


def imported(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module.split(".")[0])
    return found


def test_a_wheel_has_to_hold_the_packages_files():
    wanted = check_wheel.expected_names()
    names = "py.typed cli.py serve/page.html report/page.html runtime/engine.py runtime/_cpu.so"
    for name in (*names.split(), "run/default_corpus/default.txt.xz"):
        assert f"hotsplit/{name}" in wanted, name
    assert not [n for n in wanted if n.endswith((".cpp", ".h", ".partial", ".pyc", ".gguf"))]


@pytest.mark.parametrize(
    "lost, added, line",
    [
        ("hotsplit/py.typed", None, "lacks hotsplit/py.typed"),
        ("hotsplit/runtime/_cpu.so", None, "lacks hotsplit/runtime/_cpu.so"),
        ("x.dist-info/licenses/LICENSE", None, "lacks the licence"),
        ("x.data/scripts/hotsplit", None, "lacks bin/hotsplit"),
        (None, "x.data/scripts/other", "has bin/other, which is not the package's"),
        (None, "hotsplit/step.cpp", "has hotsplit/step.cpp, which is not the package's"),
        (None, "tests/models.py", "has tests/models.py, which is not the package's"),
    ],
)
def test_a_wheel_that_lacks_a_file_or_has_another_is_refused(lost, added, line):
    wanted = check_wheel.expected_names()
    program, licence = "x.data/scripts/hotsplit", "x.dist-info/licenses/LICENSE"
    names = wanted - {"bin/hotsplit"} | {program, licence}
    assert not list(check_wheel.content_faults(names, wanted))
    assert list(check_wheel.content_faults(names - {lost} | {added or "x/"}, wanted)) == [line]


def test_the_check_of_a_wheel_rejects_a_warning_a_failure_and_another_text(tmp_path):
    here = check_wheel.Environment(Path(sys.executable), tmp_path / "run")
    with pytest.raises(check_wheel.CheckError, match="exit code 3"):
        here.ask("-c", "raise SystemExit(3)")
    warn = "import warnings; warnings.warn_explicit('gone', DeprecationWarning, '{}', 1)"
    assert here.ask("-c", warn.format("/other/a.py")) == ""
    with pytest.raises(check_wheel.CheckError, match="gone"):
        here.ask("-c", warn.format("/site-packages/hotsplit/a.py"))
    assert not list(check_wheel.differences({"run": "a"}, {"run": "a"}))
    assert list(check_wheel.differences({"run": "b"}, {"run": "a"})) == ["run gave 'b', here 'a'"]


@pytest.mark.slow
def test_the_archives_hold_what_they_should(tmp_path):
    """The wheel has the package's files alone, and `--version` runs in a virtual environment that
    has it; the sdist has the sources, and no build folder, .venv or .git."""
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*build, "-w", tmp_path, ROOT], check=True)
    (wheel,) = tmp_path.glob("hotsplit-*.whl")
    check_wheel.check_content(wheel)
    script = (
        "import sys; from scikit_build_core.build import build_sdist;"
        " print(build_sdist(sys.argv[1]))"
    )
    command = [sys.executable, "-c", script, tmp_path]
    made = subprocess.run(command, check=True, cwd=ROOT, capture_output=True, text=True)
    with tarfile.open(tmp_path / made.stdout.split()[-1]) as archive:
        inside = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    assert {"pyproject.toml", "LICENSE", "CMakeLists.txt", "runtime/engine.py"} <= inside
    assert not [n for n in inside if n.split("/")[0] in ("build", ".venv", ".git")]
    environment = tmp_path / "environment"
    create = [sys.executable, "-m", "venv", "--system-site-packages", environment]
    subprocess.run(create, check=True)
    python = environment / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", wheel], check=True)
    command = [python, "-m", "hotsplit", "--version"]
    said = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True)
    assert "0.1.0" in said.stdout


@pytest.mark.parametrize("method", ["connect", "connect_ex", "sendto", "sendmsg"])
def test_connections_to_other_machines_fail(method):
    data = {"sendto": [b"x"], "sendmsg": [[b"x"], [], 0]}.get(method, [])
    with socket.socket(type=socket.SOCK_DGRAM) as one:
        with pytest.raises(AssertionError, match="uses the network"):
            getattr(one, method)(*data, ("192.0.2.1", 80))
        with socket.socket(type=socket.SOCK_DGRAM) as other:
            other.bind(("127.0.0.1", 0))
            getattr(one, method)(*data, other.getsockname())
