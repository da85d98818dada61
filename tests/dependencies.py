"""Third-party distributions: everything that the requirements install, directly or indirectly.

    python tests/dependencies.py constraints     the pins that make the next set-up equal this one
    python tests/dependencies.py table           docs/dependencies.md

Versions are those installed here."""

import re
import sys
from collections.abc import Iterator
from importlib import metadata

from packaging.requirements import Requirement
from paths import ROOT

EXTRAS = frozenset({"convert", "dev", "gpu", "grammar", "parquet", "report", "serve"})
# By classifier: for packages without License-Expression whose License names none below.
BY_CLASSIFIER = {
    "Apache Software License": "Apache-2.0",
    "BSD License": "BSD-3-Clause",
    "MIT License": "MIT",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "Python Software Foundation License": "PSF-2.0",
}
BY_WORDS = {
    "3-Clause BSD License": "BSD-3-Clause",
    "BSD 3-Clause License": "BSD-3-Clause",
    "Apache 2.0": "Apache-2.0",
    "Apache 2.0 License": "Apache-2.0",
    "ISC License": "ISC",
}
EXPRESSIONS = {"Apache-2.0", "MIT", "MIT OR Apache-2.0", "MPL-2.0", "MPL-2.0 AND MIT"}
HEAD = """# What comes with an installation

The packages that `constraints.txt` pins and `make setup` installs, with the licence that the
metadata of each states. The first table is what the program and its extras `convert`, `gpu`,
`grammar`, `parquet`, `report` and `serve` need, the second what only development needs. All of them
allow use in a program under Apache-2.0; MPL-2.0 asks for the source of the files under it, not of
the program. None is copied into this repository. A CUDA build of torch contains NVIDIA's libraries
under NVIDIA's own terms; that of torch 2.13.0 is for CUDA 13.0, which wants NVIDIA's driver 580 or
later, and brings Triton 3.7.1, the version that the tests run.
"""


def normal(name: str) -> str:
    """A package's name in the form that registries compare."""
    return re.sub(r"[-_.]+", "-", name).lower()


def closure(extras: frozenset[str]) -> dict[str, metadata.Distribution]:
    """All distributions that hotsplit with these extras needs here, by normal name."""
    found: dict[str, metadata.Distribution] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    waiting = [("hotsplit", extras)]
    while waiting:
        name, wanted = waiting.pop()
        if (normal(name), wanted) in seen:
            continue
        seen.add((normal(name), wanted))
        found[normal(name)] = metadata.distribution(name)
        for text in found[normal(name)].requires or []:
            requirement = Requirement(text)
            marker = requirement.marker
            if marker is None or any(marker.evaluate({"extra": e}) for e in {"", *wanted}):
                waiting.append((requirement.name, frozenset(requirement.extras)))
    del found["hotsplit"]
    return dict(sorted(found.items()))


def licence_of(distribution: metadata.Distribution) -> str:
    """An SPDX expression. Raises ValueError if the metadata name none that is known here."""
    fields = distribution.metadata
    if expression := fields.get("License-Expression"):
        return expression
    words = (fields.get("License") or "").strip()
    if words in EXPRESSIONS or words in BY_WORDS:
        return BY_WORDS.get(words, words)
    for classifier in fields.get_all("Classifier") or []:
        named = classifier.split(" :: ")[-1]
        if classifier.startswith("License ::") and named in BY_CLASSIFIER:
            return BY_CLASSIFIER[named]
    raise ValueError(f"{fields['Name']}: licence {words[:60]!r} is not known here")


def version_of(distribution: metadata.Distribution) -> str:
    """The version without the build's name: torch's is 2.13.0+cpu."""
    return distribution.version.split("+")[0]


def pins() -> dict[str, str]:
    """constraints.txt: versions by normal name."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {normal(name): version for name, version in pairs}


def constraint_lines() -> Iterator[str]:
    yield "# The versions `make setup` installs; pyproject.toml says what would also do. Made by"
    yield "# `python tests/dependencies.py constraints` from an environment that passes the tests."
    for name, distribution in closure(EXTRAS).items():
        yield f"{name}=={version_of(distribution)}"


def table_lines() -> Iterator[str]:
    yield from HEAD.splitlines()
    users = closure(EXTRAS - {"dev"})
    developers = {k: v for k, v in closure(EXTRAS).items() if k not in users}
    for title, group in (("In use", users), ("For development", developers)):
        yield from ("", f"## {title}", "", "| package | version | licence |", "|---|---|---|")
        for name, distribution in group.items():
            yield f"| {name} | {version_of(distribution)} | {licence_of(distribution)} |"


if __name__ == "__main__":
    made = {"constraints": constraint_lines, "table": table_lines}[sys.argv[1]]()
    print("\n".join(made))
