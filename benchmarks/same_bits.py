"""Compares the logits of two builds bit by bit, over types, modes, levels, model graphs and plans.

    same_bits.py --hashes > before.json      with the Python of each build
    same_bits.py before.json after.json

Each case runs one row per step, many rows in one step, and many rows layer by layer. Plans have
both roles on the CPU, as two blocks of neurons and as a hybrid step. The models are those of
tests/models.py. The second form names the cases that differ, and fails if
there are any."""

import dataclasses
import hashlib
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import torch

sys.path.extend(map(str, Path(__file__).parent.parent.glob("tests/**/")))

from hybrid_plans import PLANS, F, L, planned, stepped
from models import FAMILIES, family_model, make_model, make_sizes
from test_hybrid_step import hybrid, steps
from test_runtime import IDS

from hotsplit import Engine
from hotsplit.artifacts.model_file import ModelFile
from hotsplit.files.gguf_types import block_sizes
from hotsplit.model.weight_types import FILE_NAMES, IN_MEMORY
from hotsplit.runtime.kernels.cpu import library
from hotsplit.runtime.kernels.gpu.kernels import reference_kernels
from hotsplit.runtime.step.backend import plain_backend
from hotsplit.runtime.weights import resident

MODES = ("dense", "exact", "predicted")


def digest(logits: torch.Tensor) -> str:
    assert not logits.isnan().any()
    return hashlib.sha256(logits.contiguous().numpy().tobytes()).hexdigest()[:16]


def of_engine(engine: Engine) -> list[str]:
    """Digests of the logits: one row per step, many rows in one step, and layer by layer, as under
    an observer. The three are equal."""
    with engine.observe(lambda n, i, t: None, lambda n, i: False):
        plain = engine.logits(IDS)
    return [digest(stepped(engine)), digest(engine.logits(IDS)), digest(plain)]


def models() -> Iterator[tuple[str, ModelFile]]:
    for kind in (*FILE_NAMES, *IN_MEMORY):
        width = max(64, block_sizes(kind)[0])
        shape = make_sizes(width=width, num_layers=L, num_neurons=F)
        model = make_model(sizes=shape, kind=kind, predictor_rank=8)
        yield kind, dataclasses.replace(model, threshold_L=(0.05,) * L)
    shape = make_sizes(num_layers=L, num_neurons=F)
    for family in FAMILIES:
        for offset in (0, 1):
            yield (
                f"{family}, offset {offset}",
                family_model(
                    family, kind="q8_0", sizes=shape, predictor_rank=8, input_layer_offset=offset
                ),
            )


def hashes() -> Iterator[tuple[str, list[str]]]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number, (title, model) in enumerate(models()):
            model = dataclasses.replace(model, path=folder / f"{number}.gguf")
            model.save(model.path)
            for level in library.usable_levels():
                library.set_level(level)
                for mode in MODES:
                    with Engine.load(model.path, mode=mode) as engine:
                        yield f"{title}, {mode}, {level}", of_engine(engine)
            library.set_level(library.usable_levels()[0])
            # The CPU stands for devices, which do not read types with grids as files have them.
            with patch.object(resident, "is_read_in_file", return_value=False):
                yield from plans(folder, title, model)


def plans(folder: Path, title: str, model: ModelFile) -> Iterator[tuple[str, list[str]]]:
    cases = ["two GPUs, layers on the CPU", "every kind of layer", "attention on the CPU", "random"]
    for plan in PLANS if title in ("f32", "q8_0") else cases:
        split = planned(folder, model, plan)
        for mode in MODES:
            with Engine.load(model.path, split=folder / "s.gguf", mode=mode) as engine:
                found = of_engine(engine)
                step = hybrid(engine, split, plain_backend(reference_kernels()))
                yield f"{title}, {mode}, {plan}", [*found, digest(steps(step))]


def main() -> None:
    if sys.argv[1:] == ["--hashes"]:
        torch.set_num_threads(1)
        print(json.dumps(dict(hashes()), indent=1))
        return
    before, after = (json.loads(Path(name).read_text()) for name in sys.argv[1:])
    wrong = sorted(
        name for name in before.keys() | after.keys() if before.get(name) != after.get(name)
    )
    for name in wrong:
        print(f"{name}: {before.get(name)} before, {after.get(name)} after")
    print(f"{len(before.keys() | after.keys())} cases, {len(wrong)} differ")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
