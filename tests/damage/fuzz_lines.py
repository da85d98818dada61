"""Finds the lines of the readers that a case executes, so that fuzz_long can vary cases that
reached new lines, and list the lines that no case has reached.

Only functions are traced, and each of them only until all of its lines have been seen."""

import sys
import threading
import types
from collections.abc import Iterator
from functools import cache
from pathlib import Path

# Modules that read what others may have written, by folder of the repository.
READERS = (
    "convert/*.py",
    "measure/evaluate/eval_file.py",
    "profile/corpus/*.py",
    "profile/count/merge.py",
    "profile/count/resume.py",
    "profile/report.py",
    "run/cache_folder.py",
    "run/rates.py",
    "runtime/generate/chat.py",
    "runtime/generate/constraints.py",
    "runtime/generate/gbnf*.py",
    "runtime/generate/json_schema.py",
    "runtime/generate/prompt_cache.py",
    "runtime/text/*.py",
    "src/hotsplit/artifacts/*.py",
    "src/hotsplit/commands/terminal/prompts.py",
    "src/hotsplit/export/*.py",
    "src/hotsplit/families/*.py",
    "src/hotsplit/files/gguf_*.py",
    "src/hotsplit/files/json_file.py",
    "src/hotsplit/files/safetensors_file.py",
    "src/hotsplit/files/typed.py",
    "src/hotsplit/inspection/*.py",
    "src/hotsplit/model/mode_quality.py",
    "src/hotsplit/model/rope.py",
    "src/hotsplit/tokens/*.py",
)
IS_FUNCTION = 1  # the flag of code that has its own variables: neither a module nor a class

Line = tuple[str, int]  # a file's path in the repository, and a line number


@cache
def root() -> Path:
    """The repository whose hotsplit is imported."""
    import hotsplit

    return Path(hotsplit.__file__).parents[2]


@cache
def reader_files() -> dict[str, str]:
    """The paths of the readers' files in the repository, by absolute path."""
    found = sorted({path for pattern in READERS for path in root().glob(pattern)})
    return {str(path): str(path.relative_to(root())) for path in found}


def lines_of(code: types.CodeType) -> set[int]:
    """The lines of a function's body, apart from functions within it."""
    return {n for _, _, n in code.co_lines() if n is not None and n != code.co_firstlineno}


def all_lines() -> set[Line]:
    """The lines that cases could reach: those of all functions of the readers."""
    found: set[Line] = set()
    for path, name in reader_files().items():
        module = compile(Path(path).read_text(), path, "exec")
        for code in _functions(module):
            found |= {(name, number) for number in lines_of(code)}
    return found


def _functions(code: types.CodeType) -> Iterator[types.CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            if constant.co_flags & IS_FUNCTION:
                yield constant
            yield from _functions(constant)


class Lines:
    """Collects lines that are not known yet, in this thread and those started while it is
    entered."""

    def __init__(self, known: set[Line]) -> None:
        self._known = known
        self._left: dict[int, set[int]] = {}  # by the code's id: lines that were not reached
        self._codes: list[types.CodeType] = []  # kept alive, so that their ids are not reused
        self._new: set[Line] = set()

    def take(self) -> set[Line]:
        """The lines that are new since the last call."""
        found, self._new = self._new, set()
        return found

    def __enter__(self) -> "Lines":
        threading.settrace(self._call)
        sys.settrace(self._call)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]  # as its documentation says

    def _call(self, frame: types.FrameType, event: str, argument: object):
        code = frame.f_code
        left = self._left.get(id(code))
        if left is None:
            left = self._first_seen(code)
        if not left:
            return None
        name = reader_files()[code.co_filename]

        def line(frame: types.FrameType, event: str, argument: object):
            if event == "line" and frame.f_lineno in left:
                left.discard(frame.f_lineno)
                self._new.add((name, frame.f_lineno))
            return line if left else None

        return line

    def _first_seen(self, code: types.CodeType) -> set[int]:
        name = reader_files().get(code.co_filename)
        lines = set[int]() if name is None or not code.co_flags & IS_FUNCTION else lines_of(code)
        left = {number for number in lines if (name, number) not in self._known}
        self._codes.append(code)
        self._left[id(code)] = left
        return left
