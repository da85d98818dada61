"""Two processes write one artifact at the same time, many times.

    PYTHONPATH=tests python tests/damage/two_writers.py [--rounds N] [--kind KIND]

A round starts two processes at once, each with its own content. Afterwards the path must hold one
of the two artifacts as a whole, and nothing may be left next to it. Every kind of artifact gets N
rounds that write as commands do with --force, in which neither process may fail. Then it gets N
rounds without --force, in which exactly one process must succeed, and its artifact must be there;
the other must end with exit code 1 and one line that names the path.

The last line on stdout is a JSON object. For each kind, "second" counts how often each of the two
contents was written last, and "refused" why the losers were refused: their output was there before
they began, or came meanwhile."""

import argparse
import json
import os
import shutil
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import click

SIZE = 3000  # values of an artifact
REFUSALS = ("exists already", "holds files already", "was written by another run meanwhile")


def _gguf(path: Path, value: int) -> None:
    from hotsplit.files.gguf_file import array_entry, write_gguf

    write_gguf(path, "test", {}, {"a": array_entry(np.full((3, SIZE), value, np.float32), "f32")})


def _json(path: Path, value: int) -> None:
    from models import make_machine

    make_machine(gpu_gb_per_s=100.0 + value).save(path)


def _folder(path: Path, value: int) -> None:
    from models import make_model, make_profile

    from hotsplit.export.powerinfer import write_activations

    write_activations(make_profile(make_model(), num_tokens=1000 * value), path)


KINDS: dict[str, Callable[[Path, int], None]] = {"gguf": _gguf, "json": _json, "folder": _folder}


def content_of(path: Path) -> object:
    if path.is_dir():
        return {file.name: file.read_bytes() for file in path.iterdir()}
    return path.read_bytes()


def expected_of(kind: str, folder: Path) -> dict[int, object]:
    """The content of each artifact, by value."""
    expected = {}
    for value in (1, 2):
        KINDS[kind](folder / f"{kind} alone {value}", value)
        expected[value] = content_of(folder / f"{kind} alone {value}")
    assert expected[1] != expected[2]
    return expected


def run_rounds(kind: str, rounds: int, folder: Path) -> Counter:
    """Counts how often each content came last. Raises AssertionError if a round goes wrong."""
    write, found = KINDS[kind], Counter()
    expected = expected_of(kind, folder)
    place = folder / kind
    place.mkdir()
    for number in range(rounds):
        codes = _together(lambda value: write(place / "x", value))
        assert codes == [0, 0], f"{kind}, round {number}: {codes}"
        content = content_of(place / "x")
        winners = [value for value, wanted in expected.items() if content == wanted]
        assert winners, f"{kind}, round {number}: neither of the two artifacts"
        left = sorted(path.name for path in place.iterdir())
        assert left == ["x"], f"{kind}, round {number}: left {left}"
        found[winners[0]] += 1
    return found


def run_new_rounds(kind: str, rounds: int, folder: Path) -> Counter:
    """Counts how the loser was refused. Raises AssertionError if a round goes wrong."""
    # The processes of the rounds would otherwise import these, one after another.
    from hotsplit.commands import all_commands, exit_codes  # noqa: F401

    found: Counter = Counter()
    expected = expected_of(kind, folder)
    place, said = folder / f"{kind} new", folder / f"{kind} said"
    command = _command(kind)
    for number in range(rounds):
        place.mkdir()
        said.mkdir()
        codes = _together(lambda value: _run(command, place / "x", value, said / str(value)))
        where = f"{kind}, round {number}"
        assert sorted(codes) == [0, 1], f"{where}: {codes}"
        winner, loser = codes.index(0) + 1, codes.index(1) + 1
        assert content_of(place / "x") == expected[winner], f"{where}: not the winner's artifact"
        assert [path.name for path in place.iterdir()] == ["x"], where
        assert not (said / str(winner)).read_text(), where
        (line,) = (said / str(loser)).read_text().splitlines()
        assert line.startswith(f"hotsplit: {place / 'x'}: "), line
        how = [words for words in REFUSALS if words in line]
        assert how, line
        found[how[0]] += 1
        shutil.rmtree(place)
        shutil.rmtree(said)
    return found


def _command(kind: str) -> "click.Command":
    """A command that writes an artifact as hotsplit's commands do without --force."""
    import click

    from hotsplit.commands.options.command_options import OUTPUT, FileCommand
    from hotsplit.files.outputs import check_output, check_output_folder

    def callback(output: Path, value: int) -> None:
        if kind == "folder":
            check_output_folder(output, force=False, is_ours=lambda name: True)
        else:
            check_output(output, force=False)
        KINDS[kind](output, value)

    options = [click.Option(["--output"], type=OUTPUT), click.Option(["--value"], type=int)]
    return FileCommand("write", callback=callback, params=[*options])


def _run(command: "click.Command", path: Path, value: int, said: Path) -> int:
    """Runs the command as the program does, with stderr in the file `said`."""
    from hotsplit.commands import all_commands, exit_codes

    all_commands.cli = command  # type: ignore[assignment]  # in a process of its own
    with said.open("w") as sys.stderr:
        return exit_codes.run(["--output", str(path), "--value", str(value)])


def _together(write: Callable[[int], int | None]) -> list[int]:
    """The exit codes of two processes that call `write` at once, when a pipe is closed."""
    gate, opener = os.pipe()
    children = [_begin(write, value, gate, opener) for value in (1, 2)]
    os.close(gate)
    os.close(opener)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def _begin(write: Callable[[int], int | None], value: int, gate: int, opener: int) -> int:
    child = os.fork()
    if child:
        return child
    try:
        os.close(opener)
        os.read(gate, 1)
        os._exit(write(value) or 0)
    except BaseException:  # noqa: BLE001  # the exit code reports it
        traceback.print_exc(file=sys.__stderr__)
    os._exit(3)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--kind", choices=KINDS)
    options = parser.parse_args()
    kinds = [options.kind] if options.kind else [*KINDS]
    with tempfile.TemporaryDirectory(prefix="two-writers-") as name:
        counts = {kind: dict(run_rounds(kind, options.rounds, Path(name))) for kind in kinds}
        new = {kind: dict(run_new_rounds(kind, options.rounds, Path(name))) for kind in kinds}
    print(json.dumps({"rounds": options.rounds, "second": counts, "refused": new}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
