"""Fills the tables of the documents from the results that the benchmarks wrote.

    python benchmarks/tables.py            rewrites every marked block
    python benchmarks/tables.py --check    exits with 1 if a block has drifted; writes nothing

A block in a Markdown file is `<!-- table: NAME -->`, the table, `<!-- end -->`. The files
table_*.py define the names. The measurements in these tables come from JSON files in
benchmarks/results."""

import argparse
import re
import sys
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import table_cache
import table_contents
import table_expected
import table_gpu
import table_proof
import table_speed

TABLES = {
    **table_cache.TABLES,
    **table_contents.TABLES,
    **table_expected.TABLES,
    **table_gpu.TABLES,
    **table_proof.TABLES,
    **table_speed.TABLES,
}
ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"(<!-- table: ([a-z0-9 -]+) -->\n)(?:(?!<!-- ).*\n)*(<!-- end -->)")


def documents() -> list[Path]:
    """Every Markdown file that may hold a block."""
    return [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def filled(text: str, where: Path) -> str:
    """The text with every block rewritten. Raises SystemExit for a name that no table has."""

    def table(match: re.Match[str]) -> str:
        name = match[2]
        if name not in TABLES:
            raise SystemExit(f"{where}: no table is called {name!r}; see benchmarks/table_*.py")
        return f"{match[1]}\n{TABLES[name]()}\n\n{match[3]}"

    return BLOCK.sub(table, text)


def names_in(text: str) -> list[str]:
    return [match[2] for match in BLOCK.finditer(text)]


def drifted(paths: Iterable[Path]) -> list[Path]:
    """Documents whose blocks differ from the results."""
    return [path for path in paths if filled(path.read_text(), path) != path.read_text()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit with 1 if a block has drifted"
    )
    wrong = drifted(documents())
    if parser.parse_args().check:
        for path in wrong:
            print(f"{path.relative_to(ROOT)}: has drifted from benchmarks/results; run make tables")
        return 1 if wrong else 0
    for path in wrong:
        path.write_text(filled(path.read_text(), path))
        print(f"wrote {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
