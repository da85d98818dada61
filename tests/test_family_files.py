"""Families in the documents: each is in the READMEs' tables of models."""

import re
from pathlib import Path

import pytest

from hotsplit.families.table import FAMILIES

ROOT = Path(__file__).parent.parent


def names_in(text: str) -> set[str]:
    """The names of models in a list such as "Qwen 2, 2.5 and 3, Phi-3": what begins with a digit is a
    version of the name before it."""
    plain = re.sub(r"\(.*?\)|（.*?）", "", text)
    found, name = set(), ""
    for part in re.split(r"\s*(?:[,;、，；|]|\band\b|和|与)\s*", plain):
        if not part[:1].isdigit():
            name = re.match(r"\D*", part)[0]
        found.add(part if not part[:1].isdigit() else name + part)
    return found


def missing_families(text: str) -> list[str]:
    """The titles of families that a README's table of models does not have."""
    rows = [line for line in text.splitlines() if line.startswith("|")]
    return [
        family.title
        for family in FAMILIES.values()
        if not any(names_in(family.title.removesuffix(" MoE")) <= names_in(row) for row in rows)
    ]


@pytest.mark.parametrize("name", ["README.md", "README.zh.md"])
def test_a_readme_has_all_families(name):
    assert missing_families((ROOT / name).read_text()) == []


@pytest.mark.parametrize("change", [("3n", "3"), ("SmolLM3", "SmolLM"), ("4-mini", "4")])
def test_a_family_that_a_readme_lacks_is_named(change):
    text = (ROOT / "README.md").read_text().replace(*change)
    (missing,) = set(missing_families(text))
    assert change[0] in missing
