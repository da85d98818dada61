"""The text that the bundled model was trained on and is measured with: Python's standard library.

    python bundled_corpus.py --part held-out -o FILE      # or --part train

It comes with the interpreter, so nothing has to be downloaded or shipped. Tests, installed
packages, generated tables and the text of the manual are left out. The library of another Python
version differs, so perplexities are comparable within one version only."""

import argparse
import sysconfig
from pathlib import Path
from typing import Literal

Part = Literal["train", "held-out"]

LIBRARY = Path(sysconfig.get_path("stdlib"))
# Whole modules, so that no function of a held-out text was ever seen in training.
HELD_OUT = frozenset(
    """argparse code concurrent configparser csv dataclasses fractions heapq json mimetypes queue
    sched shelve shutil statistics string tarfile textwrap wsgiref zipfile""".split()  # noqa: SIM905
)
SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})
GENERATED = frozenset({"encodings", "pydoc_data"})


def library_files(part: Part) -> list[Path]:
    """The source files of one part, sorted by path.

    Raises FileNotFoundError if the interpreter came without the source of its library."""
    files = []
    for path in sorted(LIBRARY.rglob("*.py")):
        names = path.relative_to(LIBRARY).parts
        module = names[0].removesuffix(".py")
        is_source = SKIPPED_FOLDERS.isdisjoint(names) and module not in GENERATED
        if is_source and (module in HELD_OUT) == (part == "held-out"):
            files.append(path)
    if not files:
        raise FileNotFoundError(f"{LIBRARY}: no source of the standard library here")
    return files


def library_texts(part: Part) -> list[str]:
    """The texts of `library_files`, decoded as UTF-8; blank files and those in another encoding are
    left out."""
    texts = []
    for path in library_files(part):
        try:
            texts.append(path.read_text(encoding="utf-8"))
        except UnicodeDecodeError:
            continue
    return [text for text in texts if text.strip()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=["train", "held-out"], required=True)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--bytes", type=int, help="stop after the file that passes this many bytes")
    args = parser.parse_args()
    kept, size = [], 0
    for text in library_texts(args.part):
        if args.bytes is not None and size >= args.bytes:
            break
        kept.append(text)
        size += len(text.encode())
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text("\n".join(kept), encoding="utf-8")


if __name__ == "__main__":
    main()
