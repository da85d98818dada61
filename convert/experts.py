"""The experts of a checkpoint: the matrices of all experts of a layer are one tensor of a model file,
encoded one expert at a time.

Letters: E experts, N rows, M values of a row."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from hotsplit.convert.checkpoint import Checkpoint
from hotsplit.convert.encode import encode
from hotsplit.errors import HotsplitError
from hotsplit.families.experts import ExpertPlace, expert_place
from hotsplit.files.gguf_file import TensorEntry
from hotsplit.model.tensors import Shapes


@dataclass(frozen=True, kw_only=True)
class ExpertSource:
    """One expert's matrix in a checkpoint: a tensor, or of one with all experts' matrices, some rows
    of one of them."""

    name: str
    expert: int | None  # None: the tensor is one expert's
    begin: int
    end: int

    def read(self, checkpoint: Checkpoint) -> Tensor:
        """[N, M], a view of the mapped file if possible."""
        whole = checkpoint.read(self.name)
        of_expert = whole if self.expert is None else whole[self.expert]
        return of_expert[self.begin : self.end]


Found = dict[str, dict[int, ExpertSource]]  # by the name in a model file, then by expert


def find_experts(checkpoint: Checkpoint, wanted: Shapes) -> dict[str, list[ExpertSource]]:
    """The source of each expert, by the name of their tensor in a model file in the stock layout;
    `wanted` has its shape. Raises HotsplitError for a wrong shape, and for an expert that is missing,
    or that there is twice."""
    found: Found = {}
    for source in checkpoint.tensors:
        place = expert_place(source)
        if place is not None and all(name in wanted for name in place.names):
            _add(found, checkpoint, source, place, wanted)
    experts: dict[str, list[ExpertSource]] = {}
    for name, by_number in found.items():
        count = wanted[name][0]
        missing = next((e for e in range(count) if e not in by_number), None)
        if missing is not None or len(by_number) > count:
            what = f"{len(by_number)} experts" if missing is None else f"no expert {missing}"
            raise HotsplitError(
                f"{checkpoint.folder}: {what} for {name!r}, wanted {count} by config.json; download"
                " the checkpoint again"
            )
        experts[name] = [by_number[expert] for expert in range(count)]
    return experts


def _add(
    found: Found, checkpoint: Checkpoint, source: str, place: ExpertPlace, wanted: Shapes
) -> None:
    """Adds the experts of one tensor of the checkpoint."""
    count, num_rows, width = wanted[place.names[0]]
    one = num_rows * len(place.names), width
    shape: tuple[int, ...] = one if place.expert is not None else (count, *one)
    tensor = checkpoint.tensors[source]
    if tensor.shape != shape:
        raise HotsplitError(
            f"{tensor.file}: tensor {source!r} is {list(tensor.shape)}, wanted {list(shape)} by"
            " config.json; the two belong to different models"
        )
    for part, name in enumerate(place.names):
        begin = part * num_rows
        for expert in range(count) if place.expert is None else (place.expert,):
            number = expert if place.expert is None else None
            own = found.setdefault(name, {})
            if expert in own:
                raise HotsplitError(
                    f"{tensor.file}: expert {expert} of {name!r} is in {source!r} and in"
                    f" {own[expert].name!r}; only one of them can be right: download the checkpoint"
                    " again"
                )
            own[expert] = ExpertSource(
                name=source, expert=number, begin=begin, end=begin + num_rows
            )


def expert_entry(
    checkpoint: Checkpoint, sources: list[ExpertSource], shape: tuple[int, ...], kind: str,
    *, is_transposed: bool,
) -> TensorEntry:  # fmt: skip
    """A tensor of all experts [E, N, M], of which rows are experts; `is_transposed`: the checkpoint
    has [M, N] of each."""

    def read_rows(start: int, stop: int) -> np.ndarray:
        return np.stack([one(expert) for expert in range(start, stop)])

    def one(expert: int) -> np.ndarray:
        source = sources[expert]
        matrix = source.read(checkpoint)
        what = f"{checkpoint.tensors[source.name].file}: tensor {source.name!r}"
        return encode(matrix.T if is_transposed else matrix, kind, what)

    return TensorEntry(shape=shape, kind=kind, read_rows=read_rows)


def by_expert(
    entry: TensorEntry, made: Callable[[TensorEntry], TensorEntry]
) -> Callable[[int, int], np.ndarray]:
    """`read_rows` of a tensor of all experts that has, of each, what `made` makes of its matrix."""

    def read_rows(start: int, stop: int) -> np.ndarray:
        return np.stack([made(of_expert(entry, e)).read() for e in range(start, stop)])

    return read_rows


def of_expert(entry: TensorEntry, expert: int) -> TensorEntry:
    """The matrix of one expert."""

    def read_rows(start: int, stop: int) -> np.ndarray:
        return entry.read_rows(expert, expert + 1)[0][start:stop]

    return TensorEntry(shape=entry.shape[1:], kind=entry.kind, read_rows=read_rows)


def source_names(experts: Mapping[str, Iterable[ExpertSource]]) -> set[str]:
    """The tensors of the checkpoint that have experts."""
    return {source.name for sources in experts.values() for source in sources}
