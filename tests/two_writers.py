"""Two processes write one artifact at the same time, many times.

    python tests/two_writers.py [--rounds N] [--kind KIND]

A round starts two processes at once, each with its own content. Afterwards the file must hold one
of the two artifacts as a whole, nothing may be left next to it, and neither process may have
failed. The last line on stdout counts by kind how often each of the two wrote last."""

import argparse
import json
import os
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np

SIZE = 3000  # values of an artifact


def _safetensors(path: Path, value: int) -> None:
    from sparkinfer.safetensors_file import save_arrays

    save_arrays(path, "test", 1, {"value": value}, {"a": np.full(SIZE, value, np.int64)})


def _gguf(path: Path, value: int) -> None:
    from sparkinfer.gguf_file import array_entry, write_gguf

    write_gguf(path, "test", {}, {"a": array_entry(np.full((3, SIZE), value, np.float32), "f32")})


def _json(path: Path, value: int) -> None:
    from models import make_machine

    make_machine(gpu_gb_per_s=100.0 + value).save(path)


def _picture(path: Path, value: int) -> None:
    from matplotlib.figure import Figure

    from sparkinfer.solver.plots import _save

    figure = Figure(figsize=(1 + value, 1))
    figure.subplots().plot([0, value])
    _save(figure, path)


def _folder(path: Path, value: int) -> None:
    from models import make_model, make_profile

    from sparkinfer.export.powerinfer_activations import write_activations

    write_activations(make_profile(make_model(), num_tokens=1000 * value), path)


KINDS: dict[str, Callable[[Path, int], None]] = {
    "safetensors": _safetensors, "gguf": _gguf, "json": _json, "picture": _picture,
    "folder": _folder,
}  # fmt: skip


def content_of(path: Path) -> object:
    if path.is_dir():
        return {file.name: file.read_bytes() for file in path.iterdir()}
    return path.read_bytes()


def run_rounds(kind: str, rounds: int, folder: Path) -> Counter:
    """How often each content was written last. Raises AssertionError if a round goes wrong."""
    write, found = KINDS[kind], Counter()
    expected = {}
    for value in (1, 2):
        write(folder / f"{kind} alone {value}", value)
        expected[value] = content_of(folder / f"{kind} alone {value}")
    assert expected[1] != expected[2]
    place = folder / kind
    place.mkdir()
    for number in range(rounds):
        _together(lambda value: write(place / "x", value))
        content = content_of(place / "x")
        winners = [value for value, wanted in expected.items() if content == wanted]
        assert winners, f"{kind}, round {number}: neither of the two artifacts"
        left = sorted(path.name for path in place.iterdir())
        assert left == ["x"], f"{kind}, round {number}: left {left}"
        found[winners[0]] += 1
    return found


def _together(write: Callable[[int], None]) -> None:
    """Calls `write` in two processes, which start together when a pipe is closed."""
    gate, opener = os.pipe()
    children = [_begin(write, value, gate, opener) for value in (1, 2)]
    os.close(gate)
    os.close(opener)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert codes == [0, 0], codes


def _begin(write: Callable[[int], None], value: int, gate: int, opener: int) -> int:
    child = os.fork()
    if child:
        return child
    try:
        os.close(opener)
        os.read(gate, 1)
        write(value)
        os._exit(0)
    except BaseException:  # noqa: BLE001  # the exit code reports it
        traceback.print_exc()
    os._exit(1)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--kind", choices=KINDS)
    options = parser.parse_args()
    kinds = [options.kind] if options.kind else [*KINDS]
    with tempfile.TemporaryDirectory(prefix="two-writers-") as name:
        counts = {kind: dict(run_rounds(kind, options.rounds, Path(name))) for kind in kinds}
    print(json.dumps({"rounds": options.rounds, "second": counts}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
