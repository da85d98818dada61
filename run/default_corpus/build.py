"""Builds default.txt.xz, the text that `hotsplit run` profiles on if none is given.

    python build.py --python-docs FOLDER --brotli FOLDER

The first FOLDER is the HTML of Python's documentation (Debian's python3.11-doc), the second
Brotli's source, whose tests contain two books. NOTICE.md in this folder states their licences."""

import argparse
import hashlib
import lzma
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

OUTPUT = Path(__file__).with_name("default.txt.xz")
# Prose with code in it. Only a part of the library reference is taken, since it is mostly lists.
CHAPTERS = ("tutorial", "howto", "faq", "library")
LEFT_OUT = ("logging-cookbook", "clinic", "argparse", "changelog")  # long; nearly all code or lists
MOST_OF_A_PAGE = 20_000  # characters
MOST_OF_A_CHAPTER = {"library": 260_000}
BOOKS = {"alice29.txt": 150_000, "asyoulik.txt": 60_000}
BLOCKS = {"p", "li", "h1", "h2", "h3", "dd", "dt", "pre", "blockquote", "tr"}
SKIPPED = {"script", "style", "nav", "head", "table"}


class DocumentPage(HTMLParser):
    """The paragraphs of a page, short ones left out; code keeps its line breaks, prose does not."""

    def __init__(self) -> None:
        super().__init__()
        self.paragraphs: list[str] = []
        self._pieces: list[str] = []
        self._depth = self._skipped = self._code = 0
        self._is_in_headerlink = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._skipped += tag in SKIPPED
        classes = dict(attrs).get("class") or ""
        if tag == "div" and (
            self._depth or classes.startswith(("sphinxsidebar", "related", "footer"))
        ):
            self._depth += 1
        if tag == "a":  # links do not nest
            self._is_in_headerlink = "headerlink" in classes
        if tag in BLOCKS:
            self._end()
        self._code += tag == "pre"

    def handle_endtag(self, tag: str) -> None:
        self._skipped = max(0, self._skipped - (tag in SKIPPED))
        self._depth = max(0, self._depth - (tag == "div"))
        if tag == "a":
            self._is_in_headerlink = False
        if tag in BLOCKS:
            self._end()
        self._code = max(0, self._code - (tag == "pre"))

    def handle_data(self, data: str) -> None:
        if not (self._depth or self._skipped or self._is_in_headerlink):
            self._pieces.append(data)

    def _end(self) -> None:
        text = "".join(self._pieces)
        text = text.strip("\n") if self._code else " ".join(text.split())
        self._pieces = []
        if len(text) > 40 or (self._code and text):
            self.paragraphs.append(text)


def pages(folder: Path) -> Iterator[str]:
    for chapter in CHAPTERS:
        left = MOST_OF_A_CHAPTER.get(chapter, 1 << 30)
        found = [p for p in (folder / chapter).rglob("*.html") if p.stem not in LEFT_OUT]
        for path in sorted(found, key=lambda p: hashlib.sha256(p.name.encode()).hexdigest()):
            page = DocumentPage()
            page.feed(path.read_text(encoding="utf-8"))
            text = "\n\n".join(page.paragraphs)[: min(MOST_OF_A_PAGE, left)]
            left -= len(text)
            if len(text) > 1500:
                yield text


def books(folder: Path) -> Iterator[str]:
    for name, most in BOOKS.items():
        text = (folder / "tests" / "testdata" / name).read_text(encoding="ascii", errors="replace")
        lines = [line.rstrip() for line in text.replace("\x1a", "").splitlines()]
        yield re.sub(r"\n{3,}", "\n\n", "\n".join(lines))[:most].strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--python-docs", type=Path, required=True)
    parser.add_argument("--brotli", type=Path, required=True)
    args = parser.parse_args()
    text = "\n\n\n".join([*pages(args.python_docs), *books(args.brotli)]) + "\n"
    OUTPUT.write_bytes(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))
    print(f"{len(text):,} characters, {OUTPUT.stat().st_size:,} bytes")  # noqa: T201


if __name__ == "__main__":
    main()
