"""The experts of a checkpoint, or matrices of heads: those of all experts of a layer are one tensor
of a model file, encoded one expert at a time, and so are those of heads.

Letters: E experts, N rows, M values of a row."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from hotsplit.convert.checkpoint import Checkpoint
from hotsplit.convert.encode import encode
from hotsplit.errors import HotsplitError
from hotsplit.families.blueprint import Blueprint, ExpertForm
from hotsplit.families.expert_keys import ExpertPlace, expert_place
from hotsplit.files.gguf_file import TensorEntry
from hotsplit.model.tensors import Shapes


@dataclass(frozen=True, kw_only=True)
class ExpertSource:
    """One expert's matrix in a checkpoint: a tensor, or of one with all experts' matrices, some
    rows of one of them; or its bias. `are_columns`: the matrices are [M, N]. `of_head`: it is a
    head's, some rows of a matrix of all heads, or their columns if it `is_turned`."""

    name: str
    expert: int | None  # None: the tensor is one expert's
    begin: int
    end: int | None
    step: int = 1
    are_columns: bool = False
    of_head: bool = False
    is_turned: bool = False

    @property
    def rows(self) -> slice:
        return slice(self.begin, self.end, self.step)

    def read(self, checkpoint: Checkpoint) -> Tensor:
        """[N, M] or, of a bias, [N]; a view of the mapped file if possible."""
        packed = checkpoint.tensors[self.name].packed
        if packed is not None and self.are_columns:
            return packed.values(expert=self.expert)[0].T[self.rows]
        if packed is not None:
            found: Tensor = packed.values(self.rows, self.expert)[0]
            return found.T if self.is_turned else found
        whole = checkpoint.read(self.name)
        if self.are_columns and whole.dim() == 3:
            whole = whole.transpose(1, 2)
        of_expert = whole if self.expert is None else whole[self.expert]
        return of_expert[self.rows].T if self.is_turned else of_expert[self.rows]


Found = dict[str, dict[int, ExpertSource]]  # by the name in a model file, then by expert


def find_experts(
    checkpoint: Checkpoint, wanted: Shapes, form: ExpertForm
) -> dict[str, list[ExpertSource]]:
    """The source of each expert, by the name of their tensor in a model file in the stock layout;
    `wanted` has its shape. Raises HotsplitError for one of another shape, missing or double."""
    found: Found = {}
    for source in checkpoint.tensors:
        place = expert_place(source)
        if place is not None and all(name in wanted for name in place.names):
            _add(found, checkpoint, source, place, wanted, form)
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


def find_heads(
    checkpoint: Checkpoint, plan: Blueprint, wanted: Shapes
) -> dict[str, list[ExpertSource]]:
    """The source of each head's matrix, by the name of their tensor in a model file. Raises
    HotsplitError for one of another shape or missing."""
    by_place = {plan.name_of(source): source for source in checkpoint.tensors} if plan.heads else {}
    found: dict[str, list[ExpertSource]] = {}
    for name, shape in wanted.items():
        prefix, inner = name[: -len(name.split(".", 2)[-1])], name.split(".", 2)[-1]
        if (own := plan.heads.get(inner)) is None:
            continue
        source, place = by_place.get(prefix + own.source), f"{prefix}{own.source}"
        if source is None:
            raise HotsplitError(
                f"{checkpoint.folder}: no tensor for {place!r}; download the checkpoint again"
            )
        tensor, rows = checkpoint.tensors[source], (shape[0] * own.total, own.width)
        if tensor.shape != rows:
            raise HotsplitError(
                f"{tensor.file}: tensor {source!r} is {list(tensor.shape)}, wanted {list(rows)} by"
                " config.json; the two belong to different models"
            )
        found[name] = [
            ExpertSource(
                name=source,
                expert=None,
                begin=head * own.total + own.begin,
                end=head * own.total + own.end,
                of_head=True,
                is_turned=own.is_turned,
            )
            for head in range(shape[0])
        ]
    return found


def _add(
    found: Found,
    checkpoint: Checkpoint,
    source: str,
    place: ExpertPlace,
    wanted: Shapes,
    form: ExpertForm,
) -> None:
    count, num_rows = wanted[place.names[0]][:2]
    packed = checkpoint.tensors[source].packed
    are_rows = packed is not None and packed.are_rows
    are_columns = form != "rows" and place.expert is None and not are_rows
    if form == "rows or transposed":  # as in transformers, square matrices are not transposed
        rows = (count, num_rows * len(place.names), *wanted[place.names[0]][2:])
        are_columns = are_columns and checkpoint.tensors[source].shape != rows
    _check_shape(checkpoint, source, place, wanted, are_columns=are_columns)
    for part, name in enumerate(place.names):
        begin, end, step = part * num_rows, (part + 1) * num_rows, 1
        if form == "columns" and len(place.names) == 2:
            begin, end, step = part, 2 * num_rows, 2
        for expert in range(count) if place.expert is None else (place.expert,):
            own = found.setdefault(name, {})
            if expert in own:
                raise HotsplitError(
                    f"{checkpoint.tensors[source].file}: expert {expert} of {name!r} is in"
                    f" {source!r} and in {own[expert].name!r}; only one of them can be right:"
                    " download the checkpoint again"
                )
            own[expert] = ExpertSource(
                name=source,
                expert=expert if place.expert is None else None,
                begin=begin,
                end=end,
                step=step,
                are_columns=are_columns,
            )


def _check_shape(
    checkpoint: Checkpoint, source: str, place: ExpertPlace, wanted: Shapes, *, are_columns: bool
) -> None:
    count, num_rows, *width = wanted[place.names[0]]
    one = (num_rows * len(place.names), *width)
    shape: tuple[int, ...] = (count, *(one[::-1] if are_columns else one))
    if place.expert is not None:
        shape = one
    tensor = checkpoint.tensors[source]
    if tensor.shape != shape:
        raise HotsplitError(
            f"{tensor.file}: tensor {source!r} is {list(tensor.shape)}, wanted {list(shape)} by"
            " config.json; the two belong to different models"
        )


def expert_entry(
    checkpoint: Checkpoint,
    sources: list[ExpertSource],
    shape: tuple[int, ...],
    kind: str,
    *,
    is_transposed: bool,
    importance_EM: np.ndarray | None,
) -> TensorEntry:
    """A tensor of all experts [E, N, M], of which rows are experts; `is_transposed`: the checkpoint
    has [M, N] of each. `importance_EM` is `encode`'s, of each."""

    def read_rows(start: int, stop: int) -> np.ndarray:
        return np.stack([one(expert) for expert in range(start, stop)])

    def one(expert: int) -> np.ndarray:
        source = sources[expert]
        importance = None if importance_EM is None else importance_EM[expert]
        is_packed = checkpoint.tensors[source.name].packed is not None
        if is_packed and not (is_transposed or source.are_columns or source.is_turned):
            return checkpoint.packed_rows(
                source.name, kind, source.rows, expert=source.expert, importance=importance
            )
        matrix = source.read(checkpoint)
        what = f"{checkpoint.tensors[source.name].file}: tensor {source.name!r}"
        return encode(matrix.T if is_transposed else matrix, kind, what, importance=importance)

    return TensorEntry(shape=shape, kind=kind, read_rows=read_rows)


def by_expert(
    entry: TensorEntry, made: Callable[[TensorEntry, int], TensorEntry]
) -> Callable[[int, int], np.ndarray]:
    """`read_rows` of a tensor of all experts: what `made` makes of each one's matrix and number."""

    def read_rows(start: int, stop: int) -> np.ndarray:
        return np.stack([made(of_expert(entry, e), e).read() for e in range(start, stop)])

    return read_rows


def of_expert(entry: TensorEntry, expert: int) -> TensorEntry:
    """The matrix of one expert."""

    def read_rows(start: int, stop: int) -> np.ndarray:
        return entry.read_rows(expert, expert + 1)[0][start:stop]

    scale = entry.scale
    if scale is not None and len(scale) > 1:
        scale = scale[expert : expert + 1]
    return TensorEntry(shape=entry.shape[1:], kind=entry.kind, read_rows=read_rows, scale=scale)


def source_names(experts: Mapping[str, Iterable[ExpertSource]]) -> set[str]:
    """The tensors of the checkpoint that have experts."""
    return {source.name for sources in experts.values() for source in sources}
