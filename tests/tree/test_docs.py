"""The documents: numbers that come from files, links that lead somewhere, two READMEs that
agree."""

import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import click
import pytest
import yaml
from paths import ROOT

from hotsplit.commands.all_commands import cli
from hotsplit.convert.options import ConvertReport
from hotsplit.export.export import ExportReport
from hotsplit.families.table import FAMILIES
from hotsplit.measure.evaluate.quality import EvalReport
from hotsplit.profile.collect import ProfileReport
from hotsplit.profile.count.merge import MergeReport
from hotsplit.runtime.generate.generation import Run
from hotsplit.solver.solve import SolveReport

sys.path.insert(0, str(ROOT / "benchmarks"))
import tables  # noqa: E402
from machine import slug  # noqa: E402
from table_contents import ZEN_4, ZEN_5, path_of  # noqa: E402

DOCUMENTS = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "benchmarks" / "README.md",
    *sorted((ROOT / "examples").glob("*/README.md")),
]
ENGLISH, CHINESE = ROOT / "README.md", ROOT / "README.zh.md"
# Records of experiments and decisions may name files that no longer exist.
RECORDS = ("docs/log/", "docs/decisions/", "CHANGELOG.md", "docs/dependencies.md")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]\n]*\]\(([^)\s]+)\)")
PATH = re.compile(r"`((?:[\w.-]+/)+[\w.-]+\.(?:py|cpp|h|json|sh|md|txt|toml)|test_\w+\.py)`")
MOST_TABLE_LETTERS = 200


def prose(text: str) -> str:
    return FENCE.sub("", text)


def named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def anchors(text: str) -> set[str]:
    """The anchors that the site and the usual hosts make of headings."""
    titles = re.findall(r"^#+ (.+)$", prose(text), re.MULTILINE)
    kept = (re.sub(r"[^\w\- ]", "", title.lower()).strip() for title in titles)
    return {title.replace(" ", "-") for title in kept}


def broken_links(text: str, at: Path) -> list[str]:
    """Links to files that do not exist, or to headings that they do not have."""
    broken = []
    for link in LINK.findall(prose(text)):
        if "://" in link or link.startswith("mailto:"):
            continue
        name, _, anchor = link.partition("#")
        target = (at.parent / name).resolve() if name else at
        if not target.exists():
            broken.append(link)
        elif anchor and target.suffix == ".md":
            page = text if target == at else target.read_text()
            broken += [link] if anchor not in anchors(page) else []
    return broken


def missing_paths(text: str) -> list[str]:
    """Paths in the repository that the text names but that do not exist."""
    names = set(PATH.findall(text))
    known = {path.name for path in (ROOT / "tests").rglob("test_*.py")}
    return sorted(n for n in names if not (is_there(n) if "/" in n else n in known))


def is_there(name: str) -> bool:
    """Whether a file exists, seen from the root, or from runtime/ or convert/, as some pages name
    files. True also for what is not ours to check: outputs of commands (build/...), placeholders
    and other projects' files."""
    if "NAME" in name:
        return True
    first = name.partition("/")[0]
    ours = {path.name for path in ROOT.iterdir() if path.is_dir()} - {"build"}
    roots = (ROOT, ROOT / "runtime", ROOT / "convert")
    return first not in ours or any((root / name).exists() for root in roots)


def unknown_options(text: str) -> list[str]:
    """Commands and options of hotsplit that the text uses but that do not exist."""
    code = re.findall(r"^```.*?^```|`[^`\n]+`", text, re.MULTILINE | re.DOTALL)
    lines = "\n".join(code).replace("\\\n", " ").replace("`", "\n")
    unknown = []
    for line in re.findall(r"^(?:\$ )?(?:torchrun.* )?(hotsplit(?: .*)?)$", lines, re.MULTILINE):
        words = line.partition(" #")[0].replace("[", " ").replace("]", " ").split()[1:]
        if not words or not words[0].islower() or words[0] not in cli.commands:
            unknown += [line] if words and re.fullmatch("[a-z]+", words[0]) else []
            continue
        own = {name for param in cli.commands[words[0]].params for name in names_of(param)}
        given = [word.partition("=")[0] for word in words[1:] if re.match(r"--?[a-z]", word)]
        unknown += [f"{words[0]} {name}" for name in given if name not in own]
    return unknown


def names_of(param: click.Parameter) -> list[str]:
    return [*param.opts, *param.secondary_opts, "--help"]


def missing_families(text: str) -> list[str]:
    """The titles of families with a word that no table of a README has, such as 3n in Gemma 3n."""
    words = set(re.findall(r"[\w.-]+", " ".join(re.findall(r"^\|.*", text, re.MULTILINE))))
    titles = {family.title: family.title.replace(" and ", " ") for family in FAMILIES.values()}
    return [
        title
        for title, name in titles.items()
        if not set(name.removesuffix(" MoE").replace(",", "").split()) <= words
    ]


def test_tables_are_what_the_results_say():
    assert tables.drifted(tables.documents()) == [], "make tables"


def test_every_table_is_used():
    used = {name for path in tables.documents() for name in tables.names_in(path.read_text())}
    assert used == set(tables.TABLES)


def test_a_changed_number_and_an_unknown_name_are_found():
    right = tables.filled("<!-- table: predictors -->\n<!-- end -->\n\ntext\n", Path("x"))
    assert tables.filled(right, Path("x")) == right and right.endswith("<!-- end -->\n\ntext\n")
    assert tables.filled(right.replace("11.4 %", "11.5 %"), Path("x")) == right
    two = (
        "<!-- table: predictors -->\n<!-- end -->\n\nbetween\n\n<!-- table: convert -->\n<!-- end"
        " -->\n"
    )
    assert "between" in tables.filled(two, Path("x"))
    with pytest.raises(SystemExit, match="no table is called"):
        tables.filled("<!-- table: nothing -->\n<!-- end -->\n", Path("x"))


def test_results_have_the_name_that_benchmarks_give_them():
    assert [slug(f"AMD EPYC (family {family})") for family in (25, 26)] == [ZEN_4, ZEN_5]
    for name in (ZEN_4, ZEN_5):
        assert path_of(f"chat-model-{name}").exists()


def test_the_check_of_tables_is_a_command():
    script = [sys.executable, ROOT / "benchmarks" / "tables.py", "--check"]
    assert subprocess.run(script, capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize("path", DOCUMENTS, ids=named)
def test_links_paths_commands_and_options_exist_and_tables_have_short_lines(path):
    text = path.read_text()
    assert broken_links(text, path) == []
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert not [row for row in rows if len(row) > MOST_TABLE_LETTERS]
    if not named(path).startswith(RECORDS):
        assert missing_paths(text) == [] and unknown_options(text) == []


def test_broken_links_are_found():
    assert broken_links("[a](nowhere.md)", ENGLISH) == ["nowhere.md"]
    assert broken_links("[a](README.md#nothing)\n# A b", ENGLISH) == ["README.md#nothing"]
    assert broken_links("[a](#a-b) [b](LICENSE) `[c](d)`\n# A b", ENGLISH) == ["d"]


def test_missing_files_are_found():
    text = "`solver/problem.py` `solver/nothing.py` `test_nothing.py` `test_docs.py` `build/x.json`"
    assert missing_paths(text) == ["solver/nothing.py", "test_nothing.py"]


def test_unknown_options_are_found():
    text = (
        "`hotsplit solve M --profil P`\n```\n$ hotsplit nothing\nhotsplit generate M \\\n  -p -1"
        " -x\n```\n"
    )
    wanted = ["solve --profil", "hotsplit nothing", "generate -x"]
    assert unknown_options(text) == wanted
    assert unknown_options("`hotsplit generate M -p 'a' [--json] # --nothing`") == []


def test_both_readmes_have_the_same_code():
    assert FENCE.findall(ENGLISH.read_text()) == FENCE.findall(CHINESE.read_text()) != []


@pytest.mark.parametrize("readme", [ENGLISH, CHINESE], ids=named)
def test_a_readme_has_all_families(readme):
    text = readme.read_text()
    assert missing_families(text) == []
    assert missing_families(text.replace("SmolLM3", "SmolLM")) == ["SmolLM3"]


def test_all_commands_are_described():
    text = (ROOT / "docs" / "commands.md").read_text()
    missing = [name for name in cli.commands if f"| `{name}` |" not in text]
    assert not missing


@pytest.mark.parametrize(
    ("command", "report", "is_whole"),
    [
        ("convert", ConvertReport, True),
        ("profile", ProfileReport, False),
        ("profile --merge", MergeReport, True),
        ("export", ExportReport, True),
        ("eval", EvalReport, False),
    ],
)
def test_json_keys_are_described(command, report, is_whole):
    """All keys, or some of a long list, and none that does not exist."""
    text = (ROOT / "docs" / "commands.md").read_text()
    (row,) = re.findall(rf"^\| `{command}` \| (`.*) \|$", text, re.MULTILINE)
    described, there = set(re.findall(r"`(\w+)`", row)), {field.name for field in fields(report)}
    assert described == there if is_whole else described <= there


@pytest.mark.parametrize(
    "report", [ProfileReport, SolveReport, Run], ids=lambda report: report.__name__
)
def test_long_lists_of_keys_are_complete(report):
    text = (ROOT / "docs" / "commands.md").read_text()
    assert not [field.name for field in fields(report) if f"`{field.name}`" not in text]


def pages_of(nav: object) -> list[str]:
    """The files that the navigation in mkdocs.yml names, at any depth."""
    if isinstance(nav, str):
        return [nav]
    inner = nav.values() if isinstance(nav, dict) else nav
    return [page for part in inner for page in pages_of(part)]


def test_the_site_shows_every_page():
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    pages = pages_of(nav)
    assert len(pages) == len(set(pages))
    assert set(pages) == {named(path) for path in DOCUMENTS}


def test_the_index_names_every_page():
    index = ROOT / "docs" / "index.md"
    named_there = {name.partition("#")[0] for name in LINK.findall(index.read_text())}
    assert {path.name for path in index.parent.glob("*.md")} - {"index.md"} <= named_there


def written_formats() -> list[tuple[str, int]]:
    """(name, version) of every format that a module of ours writes, from its constants."""
    found = []
    for path in ROOT.glob("[!.]*/**/*.py"):
        if named(path).partition("/")[0] not in ("build", "tests", "benchmarks", "examples"):
            text = path.read_text()
            name = re.search(r'^FORMAT(?:, VERSION)? = "([^"]+)"', text, re.MULTILINE)
            version = re.search(r'^(?:FORMAT, )?VERSION = (?:"[^"]+", )?(\d+)$', text, re.MULTILINE)
            found += [(name[1], int(version[1]))] if name and version else []
    return found


def test_every_format_is_described_with_its_version():
    text = (ROOT / "docs" / "formats.md").read_text()
    formats = written_formats()
    assert len(formats) >= 10
    for name, version in formats:
        near = re.search(rf"{re.escape(name)}\b[^\n]{{0,60}}?\b{version}\b", text)
        assert near, f"{name}, version {version}"
