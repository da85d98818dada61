"""Fills the tables of the documents from the results that the benchmarks wrote, and draws the
README's picture.

    python benchmarks/tables.py            rewrites every marked block, and the picture
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
import picture_expected
import table_cache
import table_contents
import table_expected
import table_gpu
import table_low_bits
import table_proof
import table_speed
import table_threads

TABLES = {
    **table_cache.TABLES,
    **table_contents.TABLES,
    **table_expected.TABLES,
    **table_gpu.TABLES,
    **table_low_bits.TABLES,
    **table_proof.TABLES,
    **table_speed.TABLES,
    **table_threads.TABLES,
}
ROOT = Path(__file__).parent.parent
PICTURE = ROOT / "docs" / "images" / "expected.svg"
BLOCK = re.compile(r"(<!-- table: ([a-z0-9 -]+) -->\n)(?:(?!<!-- ).*\n)*(<!-- end -->)")


def documents() -> list[Path]:
    """Every Markdown file that may hold a block, and the picture."""
    return [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")), PICTURE]


def filled(text: str, where: Path) -> str:
    """The text with every block rewritten; the picture anew. Raises SystemExit for a name that no
    table has."""
    if where == PICTURE:
        return picture_expected.picture()

    def table(match: re.Match[str]) -> str:
        name = match[2]
        if name not in TABLES:
            raise SystemExit(f"{where}: no table is called {name!r}; see benchmarks/table_*.py")
        return f"{match[1]}\n{TABLES[name]()}\n\n{match[3]}"

    return BLOCK.sub(table, text)


def names_in(text: str) -> list[str]:
    return [match[2] for match in BLOCK.finditer(text)]


def drifted(paths: Iterable[Path]) -> list[Path]:
    """Documents whose blocks, or the picture if it, differ from the results."""
    return [path for path in paths if filled(_text(path), path) != _text(path)]


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


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
        path.write_text(filled(_text(path), path))
        print(f"wrote {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
