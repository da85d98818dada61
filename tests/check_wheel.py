"""Installs a wheel into fresh environments and runs it there, as a user would.

    python tests/check_wheel.py WHEEL                       checks only its contents; no network
    python tests/check_wheel.py WHEEL python3.12 ...        also runs it with each Python
    python tests/check_wheel.py WHEEL --installed PYTHON    also runs it where it is installed

An environment gets PyTorch from pip, on Linux the CUDA build of several GB, and is removed at the
end. Nothing may be compiled there. The pipeline runs on the bundled model; the converted model and
the greedy texts must be those of the Python that runs this. A line is printed for each step that
passes; the exit code is 1 if one fails."""

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from paths import ROOT

MODEL = ROOT / "examples" / "tiny-relu"
CARD = "rtx-4060-8gb"  # by its data sheet
# In CMakeLists.txt.
INSTALLED = re.compile(r"install\(TARGETS (\w+) LIBRARY DESTINATION ([\w/]+)\)")
SCRIPT = re.compile(r"[^/]+\.data/scripts/")  # in a wheel; pip puts its files into bin
LIMIT_S = 900.0  # per step, which takes seconds on an idle machine
PROMPT = ("-p", "def parse_args(argv=None):", "-n", "8", "--temp", "0")
# A program that uses the package, for a type checker that finds no types if py.typed is missing.
TYPED = "from hotsplit import Engine\nreveal_type(Engine.load)\n"
SERVED = """
from pathlib import Path
from hotsplit.report import page
from hotsplit.run.stages import DEFAULT_TEXT
from hotsplit.runtime.kernels.cpu import library  # raises if the C++ kernels do not load
from hotsplit.serve import app
import lzma, hotsplit
assert len(lzma.decompress(DEFAULT_TEXT.read_bytes())) > 100_000, "the default corpus is cut"
print(Path(hotsplit.__file__).parent)
"""


class CheckError(Exception):
    """Something is wrong with the wheel."""


# ---- what it holds --------------------------------------------------------------------------


def expected_names() -> set[str]:
    """The program, the C++ libraries, and all files of the package's folders except C++ sources and
    .pyc files, by their installed names."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    names = {"bin/hotsplit"}
    for name, folder in project["tool"]["scikit-build"]["wheel"]["packages"].items():
        for path in (ROOT / folder).rglob("*"):
            if path.name == "CMakeLists.txt":
                found = INSTALLED.findall(path.read_text())
                names |= {f"{place}/{library}.so" for library, place in found}
            is_source = path.suffix in (".cpp", ".h", ".pyc") or path.name == "CMakeLists.txt"
            if path.is_file() and not is_source:
                names.add(f"{name}/{path.relative_to(ROOT / folder).as_posix()}")
    return names


def content_faults(names: Iterable[str], wanted: set[str]) -> Iterator[str]:
    """A line for each file that is missing in a wheel, or should not be in it."""
    inside = {SCRIPT.sub("bin/", name) for name in names if not name.endswith("/")}
    own = {name for name in inside if name.split("/")[0].endswith(".dist-info")}
    for name in sorted(wanted - inside):
        yield f"lacks {name}"
    for name in sorted(inside - own - wanted):
        yield f"has {name}, which is not the package's"
    if not any("LICENSE" in name for name in own):
        yield "lacks the licence"


def check_content(wheel: Path) -> None:
    if "-py3-none-" not in wheel.name:
        raise CheckError(f"{wheel.name} serves one Python alone, wanted py3-none")
    faults = list(content_faults(zipfile.ZipFile(wheel).namelist(), expected_names()))
    if faults:
        raise CheckError("; ".join(faults))


# ---- what it does ---------------------------------------------------------------------------


class Environment:
    """A Python that has the package, and a new folder to run it in."""

    def __init__(self, python: Path, folder: Path) -> None:
        self.python, self.folder = python, folder
        folder.mkdir()
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        self._variables = kept | {
            "PYTHONNOUSERSITE": "1",
            "PYTHONWARNINGS": "default",
            "HOTSPLIT_CACHE": str(folder / "cache"),
            "CC": "false",
            "CXX": "false",
        }

    def ask(self, *words: object) -> str:
        """stdout of a Python program. Raises CheckError if it fails, or our code warns."""
        command = [str(self.python), *map(str, words)]
        ended = subprocess.run(
            command,
            cwd=self.folder,
            env=self._variables,
            capture_output=True,
            text=True,
            check=False,
            timeout=LIMIT_S,
            stdin=subprocess.DEVNULL,
        )
        warned = [line for line in ended.stderr.splitlines() if is_our_warning(line)]
        if ended.returncode or warned:
            told = "\n".join(warned or ended.stderr.splitlines()[-20:])
            raise CheckError(f"{' '.join(command)[:300]}: exit code {ended.returncode}\n{told}")
        return ended.stdout

    def run(self, *words: object) -> str:
        return self.ask("-m", "hotsplit", *words)

    def digest(self, name: str) -> str:
        return hashlib.sha256((self.folder / name).read_bytes()).hexdigest()


def is_our_warning(line: str) -> bool:
    """True for a Python warning that our code causes, such as a deprecation."""
    return "/hotsplit/" in line and "Warning: " in line


def install(python: str, wheel: Path, folder: Path) -> Path:
    """The Python of a new virtual environment that has the wheel with its extras."""
    subprocess.run([python, "-m", "venv", folder], check=True)
    made = folder / "bin" / "python"
    quiet = "--quiet --disable-pip-version-check --no-cache-dir --only-binary=:all:"
    command = [made, "-m", "pip", "install", *quiet.split(), "-c", ROOT / "constraints.txt"]
    environment = os.environ | {"TMPDIR": str(folder)}
    subprocess.run(
        [*command, f"{wheel}[grammar,parquet,report,serve]"], check=True, env=environment
    )
    return made


def check_package(environment: Environment, wheel: Path) -> None:
    """Checks that the package imported is the installed one, that its kernels and its corpus load,
    and that the program starts."""
    place = Path(environment.ask("-c", SERVED).strip())
    if ROOT in place.parents or place.parent.name not in ("site-packages", "dist-packages"):
        raise CheckError(f"{place} is not what the wheel installed")
    version = wheel.name.split("-")[1]
    said = environment.run("--version")
    program = environment.python.parent / "hotsplit"
    if version not in said or said != environment.ask(program, "--version"):
        raise CheckError(f"--version says {said!r}, wanted {version}, and the same of {program}")
    for shell in ("bash", "zsh", "fish"):
        if "hotsplit" not in environment.run("completion", shell):
            raise CheckError(f"completion {shell} prints no script")


def check_types(environment: Environment) -> None:
    """Checks that the mypy of this Python finds the package's types without settings."""
    (environment.folder / "user.py").write_text(TYPED)
    asked = ["--python-executable", environment.python, "--follow-imports=silent"]
    command = [sys.executable, "-m", "mypy", *asked, "--cache-dir=mypy", "user.py"]
    ended = subprocess.run(
        command, cwd=environment.folder, capture_output=True, text=True, check=False
    )
    if ended.returncode or "-> hotsplit.runtime.engine.Engine" not in ended.stdout:
        raise CheckError(f"mypy: {ended.stdout}{ended.stderr}")


def pipeline(environment: Environment, corpus: Path) -> dict[str, str]:
    """Runs the stages on the bundled model; returns results that do not depend on the machine."""
    run, few = environment.run, ("--yes", "--tokens", "6144")
    run("convert", MODEL, "-o", "base.gguf")
    run("profile", "base.gguf", "--corpus", corpus, "-o", "counts", "--tokens", "1024")
    run("calibrate", "-o", "machine.json", "--gpu-from", CARD)
    budget = ("-vb", "8MiB", "-o", "plan.gguf")
    run("solve", "base.gguf", "--profile", "counts", "--machine", "machine.json", *budget)
    planned = run("generate", "base.gguf", "--split", "plan.gguf", *PROMPT)
    run("report", "base.gguf", "--profile", "counts", "-o", "page.html")
    return {
        "convert": environment.digest("base.gguf"),
        "generate": run("generate", "base.gguf", *PROMPT),
        "by a plan": planned,
        "run": run("run", MODEL, *PROMPT, *few),
        "run, from its cache": run("run", MODEL, *PROMPT, *few),
    }


def differences(found: dict[str, str], wanted: dict[str, str]) -> Iterator[str]:
    for step, value in wanted.items():
        if found[step] != value:
            yield f"{step} gave {found[step]!r}, here {value!r}"


def check_runs(python: Path, wheel: Path, folder: Path, wanted: dict[str, str]) -> None:
    environment = Environment(python, folder / "run")
    name = environment.ask("-c", "import sys; print(sys.version.split()[0])").strip()
    check_package(environment, wheel)
    print(f"Python {name}: installed, starts", flush=True)
    check_types(environment)
    print(f"Python {name}: types are found", flush=True)
    if wrong := list(differences(pipeline(environment, folder.parent / "text.txt"), wanted)):
        raise CheckError("; ".join(wrong))
    print(f"Python {name}: the pipeline runs, with the results of this Python", flush=True)


def check_all(wheel: Path, pythons: Sequence[str], installed: Sequence[Path]) -> None:
    with tempfile.TemporaryDirectory(prefix="hotsplit-wheel-") as name:
        folder = Path(name)
        text = [MODEL / "bundled_corpus.py", "--part", "held-out", "--bytes", "50000"]
        subprocess.run([sys.executable, *text, "-o", folder / "text.txt"], check=True)
        here = Environment(Path(sys.executable), folder / "here")
        wanted = pipeline(here, folder / "text.txt")
        for number, python in enumerate((*pythons, *installed)):
            place = folder / str(number)
            place.mkdir()
            is_new = number < len(pythons)
            made = install(str(python), wheel, place / "venv") if is_new else Path(python)
            check_runs(made, wheel, place, wanted)
            shutil.rmtree(place)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("pythons", nargs="*", help="Pythons that each get a fresh environment")
    parser.add_argument("--installed", type=Path, action="append", default=[], metavar="PYTHON")
    arguments = parser.parse_args()
    try:
        check_content(arguments.wheel)
        print(f"{arguments.wheel.name}: holds what it should", flush=True)
        if arguments.pythons or arguments.installed:
            installed = [path.absolute() for path in arguments.installed]
            check_all(arguments.wheel.resolve(), arguments.pythons, installed)
    except CheckError as error:
        sys.exit(f"check_wheel: {error}")


if __name__ == "__main__":
    main()
