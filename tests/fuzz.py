"""Damaged inputs for convert, one after the other, in a process that may not survive them.

    python fuzz.py INPUTS WORK LIMIT_S KIND:START:STOP ...

INPUTS holds whole inputs (see `make_inputs`); case number N of a kind is a seeded mutation of one
of its files. A line on stdout for each case: its kind, number and outcome. `refused` (in one line
of SparkinferError, nothing left behind) and `done` (a model file that loads) are right, all else
is wrong. A case that takes over LIMIT_S or kills the process has no line; one that takes over
1 GiB of memory ends in MemoryError, or kills."""

import contextlib
import ctypes
import io
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # slow to import, and the child counts the memory of what it needs
    from sparkinfer.model_file import ModelFile

MEMORY_BYTES = 1 << 30
EXTREMES = (0, 1, 2, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 1 << 24, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF,
            1 << 32, 1 << 40, (1 << 62) - 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)  # fmt: skip
NUMBERS = (b"-1", b"0", b"1", b"7", b"1e308", b"0.5", b"4294967296", b"9" * 20, b"9" * 400,
           b"null", b'"x"', b"[]", b"true", b"NaN", b"Infinity", b"1000000000")  # fmt: skip


# ------------------------------------------------------------------ mutations


def mutated(raw: bytes, spots: list[tuple[int, int]], rng: random.Random) -> bytes:
    """One to three damages, most of them within the spots (start, stop) that describe the rest."""
    data = bytearray(raw)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        start, stop = rng.choice(spots)
        stop = min(stop, len(data))
        if start < stop:
            rng.choice(DAMAGES)(data, start, stop, rng)
    return bytes(data)


def flip_bits(data: bytearray, start: int, stop: int, rng: random.Random) -> None:
    for _ in range(rng.choice((1, 1, 2, 8))):
        data[rng.randrange(start, stop)] ^= 1 << rng.randrange(8)


def set_integer(data: bytearray, start: int, stop: int, rng: random.Random) -> None:
    place, size = rng.randrange(start, stop), rng.choice((1, 2, 4, 4, 8, 8))
    value = rng.choice((*EXTREMES, len(data), len(data) - 1, len(data) + 1))
    data[place : place + size] = (value % (1 << 8 * size)).to_bytes(size, "little")


def change_field(data: bytearray, start: int, stop: int, rng: random.Random) -> None:
    """A small integer, as lengths, counts and offsets are: eight or four bytes with zeros."""
    found = [m.start() for m in re.finditer(rb"[\x01-\xff]\0{3}", data[start:stop])]
    if found:
        place = start + rng.choice(found)
        size = rng.choice((1, 4, 8))
        value = rng.choice((*EXTREMES, data[place] + 1, data[place] - 1))
        data[place : place + size] = (value % (1 << 8 * size)).to_bytes(size, "little")


def change_number(data: bytearray, start: int, stop: int, rng: random.Random) -> None:
    """A number written in digits, as in JSON."""
    found = list(re.finditer(rb"\d+", data[start:stop]))
    if found:
        match = rng.choice(found)
        data[start + match.start() : start + match.end()] = rng.choice(NUMBERS)


def truncate(data: bytearray, start: int, stop: int, rng: random.Random) -> None:
    del data[rng.choice((start, stop, rng.randrange(start, stop), len(data) - 1)) :]


def splice(data: bytearray, start: int, stop: int, rng: random.Random) -> None:
    place, size = rng.randrange(start, stop), rng.choice((1, 2, 4, 8, 30, 64))
    source = rng.randrange(start, stop)
    piece = rng.choice((rng.randbytes(size), bytes(data[source : source + size]), b"[" * 5000,
                        b"\0" * size, b"\\ud800", b""))  # fmt: skip
    data[place : place + rng.choice((0, 0, size, len(piece)))] = piece


DAMAGES = (flip_bits, set_integer, change_field, change_number, truncate, splice)


def spots_of(path: Path) -> list[tuple[int, int]]:
    """Where a file describes itself; the last spot is all of it."""
    raw = path.read_bytes()
    whole = (0, len(raw))
    if path.suffix == ".safetensors":
        end = 8 + int.from_bytes(raw[:8], "little")
        return [(0, 8), (8, end), (8, end), (8, end), whole]
    if path.suffix in (".pt", ".bin"):
        pickle = raw.index(b"data.pkl")
        directory = raw.index(b"PK\1\2")
        end = raw.index(b"PK\3\4", pickle)
        return [(0, pickle), (pickle, end), (pickle, end), (directory, len(raw)),
                (directory, len(raw)), (len(raw) - 98, len(raw)), whole]  # fmt: skip
    if path.name == TARGETS["plan"]:
        return [(0, 24), (24, raw.rindex(b"ffn_hot") + 40), whole]
    if path.suffix == ".gguf":
        end = raw.rindex(b"weight") + 40
        tensors = raw.index(b"token_embd")
        return [(0, 24), (24, tensors), (24, tensors), (tensors, end), (tensors, end), whole]
    return [whole]


# ------------------------------------------------------------------ inputs and cases


def make_inputs(folder: Path) -> None:
    """Whole, tiny inputs of every kind."""
    import torch
    from checkpoints import random_dejavu, random_llama
    from safetensors.torch import load_file, save_file

    from sparkinfer.convert.convert import convert
    from sparkinfer.convert.options import ConvertConfig
    from sparkinfer.model_file import ModelFile, PredictorInfo
    from sparkinfer.predictor_file import FILE_NAME, LayerPredictor, Predictors

    sizes = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32, "vocab_size": 257}
    whole = random_llama(folder / "safetensors", has_tokenizer=False, **sizes)
    tensors = load_file(whole / "model.safetensors")
    shutil.copytree(whole, folder / "index", ignore=shutil.ignore_patterns("*.safetensors"))
    weight_map = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(tensors)}
    for shard in set(weight_map.values()):
        part = {name: t for name, t in tensors.items() if weight_map[name] == shard}
        save_file(part, folder / "index" / shard)
    index = json.dumps({"weight_map": weight_map})
    (folder / "index" / "model.safetensors.index.json").write_text(index)
    shutil.copytree(whole, folder / "bin", ignore=shutil.ignore_patterns("*.safetensors"))
    torch.save(tensors, folder / "bin" / "pytorch_model.bin")
    shutil.copytree(whole, folder / "config")
    random_dejavu(folder / "pt", num_layers=1, width=32, num_neurons=32, rank=4)
    (folder / "pt" / "config.json").write_text('{"sparse_threshold": 0.5, "input_layer_offset": 1}')
    convert(ConvertConfig(source=whole, output=folder / "plain.gguf"))
    model = ModelFile.load(folder / "plain.gguf")
    weights = torch.ones(4, 32).numpy()
    Predictors(
        model_id=model.model_id,
        info=PredictorInfo(kind="linear", rank_L=(4,), threshold_L=(0.0,), density_L=(0.5,)),
        layers=(LayerPredictor.of(down_RD=weights, up_FR=weights.T.copy()),),
    ).save(folder / "ours" / FILE_NAME)
    silu = random_llama(folder / "silu", hidden_act="silu", **sizes)
    (folder / "stock").mkdir()
    stock = folder / "stock" / "model.gguf"
    convert(ConvertConfig(source=silu, output=stock, layout="stock"))
    (folder / "gguf").mkdir()
    convert(ConvertConfig(source=folder / "plain.gguf", output=folder / "gguf" / "model.gguf",
                          predictors=folder / "ours"))  # fmt: skip
    make_inspected(folder, model)
    shutil.copytree(whole, folder / "values")


def make_inspected(folder: Path, model: "ModelFile") -> None:
    """A profile, a plan (with its profile beside it) and a machine."""
    import numpy as np
    from models import make_machine, make_profile
    from test_runtime import make_split

    (folder / "profile").mkdir()
    (folder / "machine").mkdir()
    make_profile(model).save(folder / "profile" / TARGETS["profile"])
    make_machine().save(folder / "machine" / TARGETS["machine"])
    shutil.copytree(folder / "profile", folder / "plan")
    hot = [np.arange(9, dtype=np.int32)] * model.shape.num_layers
    make_split(model, hot).save(folder / "plan" / TARGETS["plan"])


# By kind: the file that is damaged, and whether the folder is a source, predictors, or a file's.
TARGETS = {
    "safetensors": "model.safetensors",
    "bin": "pytorch_model.bin",
    "gguf": "model.gguf",
    "stock": "model.gguf",
    "pt": "model_0.pt",
    "ours": "predictors.safetensors",
    "config": "config.json",
    "index": "model.safetensors.index.json",
    "values": "config.json",
    "profile": "model.profile.safetensors",
    "plan": "model.split.gguf",
    "machine": "machine.json",
}
INSPECTED = ("profile", "plan", "machine")
# Put in the place of a value of config.json: whole JSON that means something else.
ODD = (None, True, False, 0, 1, -1, 2, 3, 7, 0.5, 1e308, 10**9, 10**30, "", "x", "llama", [], [0],
       ["x"], {}, {"type": "linear", "factor": 2.0}, {"rope_type": "default"})  # fmt: skip


def another_value(raw: bytes, rng: random.Random) -> bytes:
    """config.json with another value, one less or one more."""
    values = json.loads(raw)
    for _ in range(rng.choice((1, 1, 2))):
        key = rng.choice([*values, "sliding_window", "layer_types", "is_causal", "rope_scaling"])
        if rng.random() < 0.1:
            values.pop(key, None)
        else:
            values[key] = rng.choice(ODD)
    return json.dumps(values).encode()


def inspect_damaged(path: Path) -> str:
    """Shows what a file of ours holds, and of a profile or a plan its export."""
    from sparkinfer.export.export import ExportConfig, export
    from sparkinfer.inspection.inspect_file import inspect_file
    from sparkinfer.inspection.tables import print_summary
    from sparkinfer.inspection.to_json import to_json

    output = path.parent.parent / "output" / "out"
    with contextlib.redirect_stdout(io.StringIO()):
        summary = inspect_file(path)
        print_summary(summary, all_tensors=True)
        json.loads(to_json(summary))
    if path.suffix == ".safetensors":
        export(ExportConfig(source=path, output=output, format="powerinfer-activations"))
    if path.suffix == ".gguf":
        profile = path.parent / TARGETS["profile"]
        export(ExportConfig(source=path, output=output, profile=profile, format="gpuidx"))
    shutil.rmtree(output.parent, ignore_errors=True)
    return "done"


def convert_damaged(inputs: Path, kind: str, number: int, work: Path) -> str:
    """Converts with one file damaged; raises whatever convert does."""
    from sparkinfer.convert.convert import convert
    from sparkinfer.convert.options import ConvertConfig
    from sparkinfer.model_file import ModelFile

    folder, target = work / kind, TARGETS[kind]
    if kind == "pt" and number % 8 == 0:
        target = "config.json"
    raw = (inputs / kind / target).read_bytes()
    rng = random.Random(f"{kind} {number}")
    if not folder.exists():
        shutil.copytree(inputs / kind, folder)
    try:
        damaged = (
            another_value(raw, rng) if kind == "values"
            else mutated(raw, spots_of(inputs / kind / target), rng)
        )  # fmt: skip
        (folder / target).write_bytes(damaged)
        if kind in INSPECTED:
            return inspect_damaged(folder / target)
        output = work / "output" / "out.gguf"
        output.parent.mkdir(exist_ok=True)
        if kind == "stock":
            ModelFile.load(folder / target)
            return "done"
        if kind in ("pt", "ours"):
            convert(ConvertConfig(source=inputs / "plain.gguf", predictors=folder, output=output))
        elif kind == "gguf":
            source, predictors = folder / target, inputs / "ours"
            convert(ConvertConfig(source=source, predictors=predictors, output=output))
        else:
            convert(ConvertConfig(source=folder, output=output))
        ModelFile.load(output)
        output.unlink()
    finally:
        (folder / target).write_bytes(raw)
    return "done"


def misbehave(inputs: Path, kind: str, number: int, work: Path) -> str:
    """What the harness must catch: kinds of wrong outcomes, each at its number 2."""
    from sparkinfer.errors import SparkinferError

    if number == 2:
        if kind == "crash":
            ctypes.string_at(0)
        if kind == "hang":
            re.match(r"(a*)*b", "a" * 60)  # within C, as a loop of a library is
        if kind == "allocation":
            bytearray(MEMORY_BYTES + (64 << 20))
        if kind == "traceback":
            raise ValueError("not refused")
        if kind == "leftover":
            (work / "output").mkdir(exist_ok=True)
            (work / "output" / "out.gguf.partial").touch()
        if kind == "lines":
            raise SparkinferError("two\nlines")
    raise SparkinferError("refused")


def outcome_of(case: Callable[[], str], work: Path) -> str:
    from sparkinfer.errors import SparkinferError

    try:
        outcome = case()
    except SparkinferError as error:
        message = str(error)
        message.encode()  # must be printable
        is_line = "\n" not in message and len(message) < 1000
        outcome = "refused" if is_line else f"refused in no line: {message[:200]!r}"
    except BaseException as error:  # a harness reports all there is
        at = error.__traceback__
        while at is not None and at.tb_next is not None:
            at = at.tb_next
        where = f"{at.tb_frame.f_code.co_filename}:{at.tb_lineno}" if at else "?"
        outcome = f"{type(error).__name__} at {where}: {str(error)[:100]!r}"
    left = sorted(path.name for path in (work / "output").glob("*"))
    shutil.rmtree(work / "output", ignore_errors=True)
    return f"left {left} after {outcome}" if left else outcome


def child(inputs: Path, limit_s: int, ranges: list[str], work: Path) -> None:
    if any(text.split(":")[0] in TARGETS for text in ranges):
        # before the limit is taken
        import sparkinfer.convert.convert
        import sparkinfer.export.powerinfer_activations
        import sparkinfer.inspection.tables  # noqa: F401

    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for text in ranges:
        kind, start, stop = text.split(":")
        run = convert_damaged if kind in TARGETS else misbehave
        for number in range(int(start), int(stop)):
            signal.alarm(limit_s)  # the default action: the process ends, wherever it is
            with contextlib.redirect_stderr(io.StringIO()):
                outcome = outcome_of(lambda: run(inputs, kind, number, work), work)  # noqa: B023
            signal.alarm(0)
            print(kind, number, outcome.replace("\n", " "), flush=True)


# ------------------------------------------------------------------ the parent's side

Cases = dict[str, int]  # how many of each kind


def run_cases(
    inputs: Path, work: Path, cases: Cases, limit_s: int = 5
) -> dict[tuple[str, int], str]:
    """The outcome of every case; a process that dies is replaced by another."""
    outcomes: dict[tuple[str, int], str] = {}
    while len(outcomes) < sum(cases.values()):
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        firsts = {k: sum(key[0] == k for key in outcomes) for k in cases}
        ranges = [f"{k}:{firsts[k]}:{n}" for k, n in cases.items() if firsts[k] < n]
        done = subprocess.run(
            [sys.executable, __file__, str(inputs), str(work), str(limit_s), *ranges],
            capture_output=True, text=True, errors="replace",
            env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        )  # fmt: skip
        for line in done.stdout.splitlines():
            kind, number, outcome = line.split(" ", 2)
            outcomes[kind, int(number)] = outcome
        missing = [(k, i) for k, n in cases.items() for i in range(n) if (k, i) not in outcomes]
        if missing:
            outcomes[missing[0]] = f"died ({done.returncode}): {done.stderr[-300:]}"
    return outcomes


def wrong_outcomes(outcomes: dict[tuple[str, int], str]) -> dict[tuple[str, int], str]:
    return {case: text for case, text in outcomes.items() if text not in ("refused", "done")}


if __name__ == "__main__":
    child(Path(sys.argv[1]), int(sys.argv[3]), sys.argv[4:], Path(sys.argv[2]))
