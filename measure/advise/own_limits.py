"""Advises on a model file that has limits already, such as one that `sparsify` trained.

The file runs in mode exact, in its own type and in smaller ones; the alternative is a dense model
in these types and its own: the one that the file was trained from or, if that is not given, the
file itself in mode dense. Nothing is fitted to the text, so no part of it is set aside. All files
are timed in turns, and measure.advise.choice chooses."""

import gc
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from torch import Tensor

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.costs.part_bytes import head_bytes, outside_read
from hotsplit.errors import HotsplitError
from hotsplit.files.gguf_file import row_bytes
from hotsplit.measure.advise.advise import (
    Advice,
    advice_of,
    line_of,
    text_to_time,
    timed,
    windows_of,
)
from hotsplit.measure.advise.choice import Point
from hotsplit.measure.advise.config import AdviseConfig
from hotsplit.measure.advise.turns import TextDecoder, Turns
from hotsplit.profile.sparsity.limit_meter import LimitMeter, fitting
from hotsplit.profile.sparsity.limit_search import Bytes
from hotsplit.runtime.engine import Engine

RULE = "limits"
WHOLE_BLOCKS = 256  # values that are whole blocks in every type
COUNTED_TOKENS = 128  # at most, decoded to count the bytes that they read
FileOf = Callable[[Path, str], Path]  # returns a model file in another type


def advise_own_limits(
    config: AdviseConfig,
    dense: Path | None,
    file_of: FileOf,
    types: Sequence[str],
    say: Callable[[str], None] = lambda line: None,
) -> Advice:
    """Measures and advises. `dense` is the model that the file was trained from (None: the file's
    own mode dense); `types` begins with the file's own type.

    Raises HotsplitError for a dense model with another vocabulary size, with limits or in a
    smaller type than the file, and for a text that is too short."""
    reference = config.model if dense is None else dense
    own = ModelFile.load(reference).own_type
    _check_reference(config.model, reference)
    sparse = {kind: config.model if kind == types[0] else file_of(config.model, kind)
              for kind in types}  # fmt: skip
    alike = dict.fromkeys((own, *types))  # the types of the dense model
    files = {kind: reference if kind == own else file_of(reference, kind) for kind in alike}
    points: list[Point] = []
    with Engine.load(reference, mode="dense", device="cpu") as engine:
        windows = fitting(windows_of(config, engine).ids, engine.model.spec.vocab_size)
        meter = LimitMeter(engine, windows)
        whole = {kind: Bytes.of(ModelFile.load(file)).total for kind, file in files.items()}
        for kind, file in files.items():
            with Engine.load(file, mode="dense", device="cpu") as other:
                close = meter.measure_itself() if kind == own else meter.measure(None, other)
            points.append(Point(type=kind, rule="dense", share=0.0, bytes_per_token=whole[kind],
                                close=close))  # fmt: skip
            say(line_of(points[-1]))
        for kind, file in sparse.items():
            with Engine.load(file, mode="exact", device="cpu") as other:
                close, count = meter.measure(None, other), _bytes_per_token(other, windows[0])
            share = max(0.0, 1 - count / whole[kind])
            points.append(Point(type=kind, rule=RULE, share=share, bytes_per_token=round(count),
                                close=close))  # fmt: skip
            say(line_of(points[-1]))
        ids_T = text_to_time(windows, engine)
    gc.collect()

    def opened(point: Point) -> TextDecoder:
        if point.rule == "dense":
            return TextDecoder(files[point.type], "dense", ids_T)
        return TextDecoder(sparse[point.type], "exact", ids_T)

    def size(point: Point) -> int:
        return files[point.type].stat().st_size

    with Turns(points[0], opened, size, len(ids_T)) as turns:
        points = timed(points, points, turns, config.max_loss, say)
        times = turns.timings
    return advice_of(points, times, config.max_loss, meter.num_tokens)


def _check_reference(path: Path, dense: Path) -> None:
    model, other = ModelFile.load(path), ModelFile.load(dense)
    if dense != path and other.has_limits:
        raise HotsplitError(
            f"{dense}: has limits; --dense must be the model that {path} was trained from"
        )
    if other.spec.vocab_size != model.spec.vocab_size:
        raise HotsplitError(
            f"{dense}: has a vocabulary of {other.spec.vocab_size:,}, but {path} has one of"
            f" {model.spec.vocab_size:,}; --dense must be the model that {path} was trained from"
        )
    own, kind = model.own_type, other.own_type
    if row_bytes(WHOLE_BLOCKS, kind) < row_bytes(WHOLE_BLOCKS, own):
        raise HotsplitError(
            f"{dense}: is in {kind}, less precise than the {own} of {path}, so its rounding would"
            f" count as a fault of that file; give the model that it was trained from in {own} or a"
            " larger type"
        )


def _bytes_per_token(engine: Engine, ids_T: Tensor) -> float:
    """Mean weight bytes that a decode step reads, over the first tokens of a text."""
    ids = ids_T[:COUNTED_TOKENS].tolist()
    before = asdict(engine.traffic)
    for position, token in enumerate(ids):
        engine._step(token, position)
    read = sum(count - before[part] for part, count in asdict(engine.traffic).items())
    norms = sum(e.num_bytes for n, e in engine.model.tensors.items() if n.startswith("output_norm"))
    return read / len(ids) + head_bytes(engine.model) + outside_read(engine.model) - norms
