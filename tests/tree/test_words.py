"""Docstrings, comments and documents avoid phrases for which the field has a better word."""

import ast
import re
import tomllib
from itertools import groupby
from pathlib import Path

import pytest
from paths import ROOT

PACKAGES = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["scikit-build"]["wheel"]
CODE = (*PACKAGES["packages"].values(), "benchmarks", "examples", "tests")
DOCUMENTS = ("README.md", "docs")
# Each with a sentence that contains it.
PHRASES = {
    r"(module|program|file|class) does not know\b": "What this module does not know: plans.",
    r"\b(is|are) told\b(?! apart)": "The caller is told.",
    r"\b(is|are) no numbers?\b": "What is no number fires.",
    r"\bask(s|ed|ing)? for ahead\b": "Rows are asked for ahead of their use.",
    r"\blets? go of\b": "It lets go of the pages.",
    r"\bone behind the other\b": "Rows lie one behind the other.",
    r"\bhears? (of|what)\b": "`on_bytes` hears of every piece.",
    r"\bwhoever (is|brings)\b": "The weights with whoever brings them.",
    r"\b(is|are) had by\b": "A quick bound is had by pricing.",
    r"\bby and by\b": "It becomes ReLU by and by.",
    r"\b(nobody|somebody|someone|who) watches\b": "None where nobody watches.",
}
FRAGMENTS = ("Of ", "As ", "By ", "From ")  # a docstring's first words that make no sentence
BANNED = re.compile("|".join(PHRASES), re.IGNORECASE)
COMMENT = re.compile(r"(?:^|\s\s)\s*# (.*)$")
CPP_COMMENT = re.compile(r"(?:^|\s)// ?(.*)$")


def docstrings(source: str) -> list[str]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = (node for node in ast.walk(ast.parse(source)) if isinstance(node, kinds))
    return [text for node in nodes if (text := ast.get_docstring(node))]


def comments(source: str, pattern: re.Pattern[str]) -> list[str]:
    """Comments, those of consecutive lines joined, so that a phrase may span them."""
    found = [pattern.search(line) for line in source.splitlines()]
    blocks = [list(block) for _, block in groupby(found, key=bool)]
    return [" ".join(match.group(1) for match in block if match) for block in blocks]


def faults(path: Path, source: str) -> list[str]:
    """Banned phrases with their surroundings, and docstrings that begin with a fragment."""
    texts, found = [source], list[str]()
    if path.suffix == ".py":
        texts = docstrings(source)
        found = [text[:60] for text in texts if text.startswith(FRAGMENTS)]
        texts += comments(source, COMMENT)
    elif path.suffix in (".cpp", ".h"):
        texts = comments(source, CPP_COMMENT)
    for text in (" ".join(text.split()) for text in texts):
        found += [text[max(0, m.start() - 40) : m.end() + 40] for m in BANNED.finditer(text)]
    return found


def faults_in(place: str, *endings: str) -> list[str]:
    paths = sorted((ROOT / place).rglob("*")) if (ROOT / place).is_dir() else [ROOT / place]
    paths = [path for path in paths if path.suffix in endings]
    assert paths, place
    return [f"{path}: {fault}" for path in paths for fault in faults(path, path.read_text())]


@pytest.mark.parametrize("place", CODE)
def test_code_has_the_words_of_the_field(place):
    found = faults_in(place, ".py", ".cpp", ".h")
    assert not found, "\n".join(found)


@pytest.mark.parametrize("place", DOCUMENTS)
def test_documents_have_the_words_of_the_field(place):
    found = faults_in(place, ".md")
    assert not found, "\n".join(found)


@pytest.mark.parametrize("sentence", PHRASES.values())
def test_each_phrase_is_found_wherever_it_stands(sentence):
    first, second = sentence.rsplit(" ", 2)[0], " ".join(sentence.rsplit(" ", 2)[1:])
    assert faults(Path("a.py"), f'def f():\n    """Sums.\n\n    {first}\n    {second}"""\n')
    assert faults(Path("a.py"), f"x = 1\n    # {first}\n    # {second}\n")
    assert faults(Path("a.py"), f"x = 1  # {sentence}\n")
    assert faults(Path("a.h"), f"// {first}\n// {second}\nint x;\n")
    assert faults(Path("a.md"), f"{first}\n{second}\n")
    assert not faults(Path("a.py"), f'x = "{sentence}"\n')


@pytest.mark.parametrize("first", FRAGMENTS)
def test_a_docstring_begins_with_a_sentence(first):
    assert faults(Path("a.py"), f'def f():\n    """{first}what is left."""\n')
    assert not faults(Path("a.py"), 'def f():\n    """Bytes of what is left."""\n')
