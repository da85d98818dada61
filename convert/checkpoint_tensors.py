"""The tensors of a checkpoint, renamed, reordered and encoded when written, by its blueprint."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from math import prod
from typing import TypeVar

import numpy as np
import torch

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.convert.checkpoint import Checkpoint
from hotsplit.convert.encode import encode, restore
from hotsplit.convert.expert_sources import (
    ExpertSource,
    expert_entry,
    find_experts,
    find_heads,
    of_expert,
    source_names,
)
from hotsplit.convert.tensor_types import TensorTypes
from hotsplit.errors import HotsplitError
from hotsplit.families.blueprint import SAME, Blueprint, Rows, ValueChange
from hotsplit.files.gguf_file import TensorEntry, array_entry, chosen_rows, in_memory
from hotsplit.files.written import Restored
from hotsplit.model import tensors
from hotsplit.model.weight_types import FLOAT_NAMES

V = TypeVar("V")


def tensor_entries(
    checkpoint: Checkpoint, plan: Blueprint, layout: tensors.Layout, types: TensorTypes
) -> dict[str, TensorEntry]:
    """Every tensor of the model file by its name there; its source is read when it is written. The
    down projections of the sparse layout are transposed. Raises HotsplitError for an unknown or
    missing tensor, a wrong shape, a tied head that differs from the embedding, and a type that does
    not fit."""
    wanted = _wanted(plan, checkpoint)
    experts = find_experts(checkpoint, wanted, plan.expert_form)
    experts |= find_heads(checkpoint, plan, wanted)
    pieces = _pieces(checkpoint, plan, wanted)
    sources = _sources(checkpoint, plan, wanted, experts, pieces)
    entries = {}
    for name, shape in wanted.items():
        if name in pieces:
            entries[name] = _of_pieces(checkpoint, types, name, shape, pieces[name])
            continue
        target = tensors.in_layout(name, layout)
        is_transposed = target != name
        target_shape = tensors.transposed_shape(shape) if is_transposed else shape
        if name in experts:
            names = [each.name for each in experts[name]]
            first = experts[name][0]
            turned = is_transposed or first.are_columns or first.is_turned
            kind = _kind_of(checkpoint, types, target, target_shape, names, None, turned)
            entry = expert_entry(
                checkpoint,
                experts[name],
                target_shape,
                kind,
                is_transposed=is_transposed,
                importance_EM=types.importance(target, target_shape),
            )
            parts = [(each.name, each.expert) for each in experts[name]]
            entries[target] = _with_scale(checkpoint, entry, parts)
            continue
        constant = _by_end(plan.constants, name)
        if constant is not None:
            entries[name] = array_entry(np.full(shape, constant), "f32")
            continue
        rows = _rows(plan, name)
        source = sources.get(rows.source if rows else name)
        if source is None:
            assert name == "output.weight", name
            continue
        order = _order_of(plan, name, shape)
        columns = order.columns
        kind = _kind_of(checkpoint, types, target, target_shape, [source], columns, is_transposed)
        importance = types.importance(target, target_shape)
        read = partial(
            _read_rows,
            checkpoint,
            source,
            order,
            is_transposed,
            kind,
            None if importance is None else importance[0],
        )
        entry = TensorEntry(shape=target_shape, kind=kind, read_rows=read)
        entries[target] = _with_scale(checkpoint, entry, [(source, None)])
    entries |= {name: array_entry(each, "f32") for name, each in plan.rope_factors.items()}
    types.check_used(entries)
    return entries


def restored(
    checkpoint: Checkpoint, plan: Blueprint, types: TensorTypes, written: ModelFile
) -> Iterator[Restored]:
    """Every tensor of the checkpoint in use, a fused one in parts, with the values in `written`;
    those of a draft block, which transformers does not run, are only checked."""
    block = f"blk.{plan.spec.num_layers}."
    wanted = _wanted(plan, checkpoint)
    experts = find_experts(checkpoint, wanted, plan.expert_form)
    experts |= find_heads(checkpoint, plan, wanted)
    for name, each in experts.items():
        for made in _restored_experts(checkpoint, types, written, name, each):
            if not name.startswith(block):
                yield made
    pieces = _pieces(checkpoint, plan, wanted)
    for name, parts in pieces.items():
        yield from _restored_pieces(checkpoint, written, name, parts)
    sources = _sources(checkpoint, plan, wanted, experts, pieces)
    for name in wanted:
        rows = _rows(plan, name)
        source = sources.get(rows.source if rows else name)
        if source is None or _by_end(plan.constants, name) is not None:
            continue
        target = tensors.in_layout(name, written.layout)
        is_transposed = target != name
        order = _order_of(plan, name, wanted[name])
        tensor = order.rows_of(checkpoint.read(source)).to(torch.float32)
        want = order.change.apply((tensor.T if is_transposed else tensor).numpy())
        entry, what = written.tensors[target], f"{checkpoint.folder}: tensor {source!r}"
        importance = types.importance(target, entry.shape)
        values = restore(entry, want, what, None if importance is None else importance[0])
        values = order.change.undo(values)
        values = values if order.factor_N is None else values / order.factor_N[:, None]
        if order.columns is not None:
            values = values[:, np.argsort(order.columns)]
        values = values.T if is_transposed else values
        if not name.startswith(block):
            yield Restored(source=source, rows=order.rows, values=values)


def _pieces(
    checkpoint: Checkpoint, plan: Blueprint, wanted: tensors.Shapes
) -> dict[str, list[str]]:
    """The checkpoint's tensors that have the rows of one, in order, by its name. Raises
    HotsplitError for pieces that are missing or do not fit together."""
    found: dict[str, dict[str, str]] = {}
    for source in checkpoint.tensors if plan.pieces else ():
        stem, _, number = (plan.name_of(source) or "").removesuffix(".weight").rpartition(".")
        if (name := f"{stem}.weight") in plan.pieces:
            found.setdefault(name, {})[number] = source
    for name, by_number in found.items():
        numbers = [str(number) for number in range(len(by_number))]
        shapes = [checkpoint.tensors[by_number[n]].shape for n in numbers if n in by_number]
        rows = sum(shape[0] for shape in shapes)
        widths = {shape[1:] for shape in shapes}
        if len(shapes) != len(by_number) or name not in wanted or widths != {wanted[name][1:]}:
            raise HotsplitError(
                f"{checkpoint.folder}: {len(by_number)} pieces of a tensor, the first"
                f" {min(by_number.values())!r}, which are not numbered from 0 or not"
                f" {wanted.get(name, (0, 0))[1]} values wide; download the checkpoint again"
            )
        if rows != wanted[name][0]:
            raise HotsplitError(
                f"{checkpoint.folder}: {len(by_number)} pieces such as {by_number['0']!r} have"
                f" {rows:,} rows, wanted {wanted[name][0]:,} by config.json; the two belong to"
                " different models"
            )
    return {name: [each[str(n)] for n in range(len(each))] for name, each in found.items()}


def _of_pieces(
    checkpoint: Checkpoint,
    types: TensorTypes,
    name: str,
    shape: tuple[int, ...],
    sources: Sequence[str],
) -> TensorEntry:
    """The tensor with the rows of all pieces, one after another, of which one is read at a time."""
    kind = types.kind(name, shape)
    begins = [0, *accumulate(checkpoint.tensors[source].shape[0] for source in sources)]

    def read_rows(start: int, stop: int) -> np.ndarray:
        parts = []
        for source, begin, end in zip(sources, begins, begins[1:], strict=False):
            first, last = max(start, begin), min(stop, end)
            if first < last:
                rows = checkpoint.read(source)[first - begin : last - begin]
                what = f"{checkpoint.tensors[source].file}: tensor {source!r}"
                parts.append(encode(rows, kind, what))
        found: np.ndarray = np.concatenate(parts)
        return found

    return TensorEntry(shape=shape, kind=kind, read_rows=read_rows)


def _restored_pieces(
    checkpoint: Checkpoint, written: ModelFile, name: str, sources: Sequence[str]
) -> Iterator[Restored]:
    """The values of each piece."""
    begin, entry = 0, written.tensors[name]
    for source in sources:
        want = checkpoint.read(source).to(torch.float32).numpy()
        rows = np.arange(begin, begin + len(want))
        part = chosen_rows(entry, rows)
        values = restore(part, want, f"{checkpoint.folder}: tensor {source!r}", None)
        yield Restored(source=source, rows=rows, values=values)
        begin += len(want)


def _restored_experts(
    checkpoint: Checkpoint,
    types: TensorTypes,
    written: ModelFile,
    name: str,
    sources: list[ExpertSource],
) -> Iterator[Restored]:
    target = tensors.in_layout(name, written.layout)
    importance_EM = types.importance(target, written.tensors[target].shape)
    for expert, source in enumerate(sources):
        want = source.read(checkpoint).to(torch.float32).numpy()
        want = want if target == name else want.T
        what = f"{checkpoint.folder}: tensor {source.name!r}"
        importance_M = None if importance_EM is None else importance_EM[expert]
        values = restore(of_expert(written.tensors[target], expert), want, what, importance_M)
        if source.of_head:
            rows = np.arange(source.begin, source.end)
            values = values.T if source.is_turned else values
            yield Restored(source=source.name, rows=rows, values=values)
            continue
        yield Restored(
            source=source.name,
            rows=None,
            values=values if target == name else values.T,
            expert=expert,
            tensor=name,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Order:
    """How a tensor is made of the checkpoint's. `width`: of a matrix's rows; None for a vector."""

    width: int | None
    rows: np.ndarray | None
    columns: np.ndarray | None
    change: ValueChange
    factor_N: np.ndarray | None = None  # of the rows, or one of all

    @property
    def is_plain(self) -> bool:
        """True if its values are those of the checkpoint."""
        return self.change is SAME and self.factor_N is None

    def rows_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """All rows, with values as in the checkpoint."""
        shaped = self.shaped(tensor)
        shaped = shaped if self.rows is None else shaped[torch.from_numpy(self.rows)]
        return shaped if self.columns is None else shaped[:, torch.from_numpy(self.columns)]

    def shaped(self, tensor: torch.Tensor) -> torch.Tensor:
        shaped = tensor.reshape(-1) if self.width is None else tensor.reshape(-1, self.width)
        if self.factor_N is None:
            return shaped
        return shaped.to(torch.float32) * torch.from_numpy(self.factor_N)[:, None]


def _order_of(plan: Blueprint, name: str, shape: tuple[int, ...]) -> _Order:
    rows, inner = _rows(plan, name), name.split(".", 2)[2] if name.startswith("blk.") else name
    factor_N = plan.factors.get(inner)
    assert rows is None or factor_N is None, name
    return _Order(
        width=None if len(shape) == 1 else shape[-1],
        rows=rows.order if rows else None,
        columns=plan.columns.get(inner),
        change=_by_end(plan.changes, name) or SAME,
        factor_N=factor_N.astype(np.float32) if factor_N is not None else None,
    )


def _read_rows(
    checkpoint: Checkpoint,
    source: str,
    order: _Order,
    is_transposed: bool,
    kind: str,
    importance_M: np.ndarray | None,
    start: int,
    stop: int,
) -> np.ndarray:
    """The encoded bytes of some rows of a tensor, which does not stay in memory."""
    is_packed = checkpoint.tensors[source].packed is not None
    if is_packed and order.width is not None and order.is_plain and not is_transposed:
        chosen = slice(start, stop) if order.rows is None else order.rows[start:stop]
        return checkpoint.packed_rows(
            source, kind, chosen, columns=order.columns, importance=importance_M
        )
    whole = order.shaped(checkpoint.read(source))  # held to the end: its mapping is shared
    rows, tensor = None, whole
    if is_transposed:
        columns = whole[:, start:stop]
        tensor = (columns if order.rows is None else columns[torch.from_numpy(order.rows)]).T
    elif order.rows is not None and whole.dim() == 2:
        rows = order.rows[start:stop]
    elif order.rows is not None:
        tensor = whole[torch.from_numpy(order.rows[start:stop])]
    else:
        tensor = whole[start:stop]
    if order.columns is not None:
        tensor = tensor[:, torch.from_numpy(order.columns)]
    what = f"{checkpoint.tensors[source].file}: tensor {source!r}"
    if order.change is not SAME:
        tensor = torch.from_numpy(order.change.apply(tensor.to(torch.float32).numpy()))
    return encode(tensor, kind, what, rows=rows, importance=importance_M)


def _kind_of(
    checkpoint: Checkpoint,
    types: TensorTypes,
    target: str,
    shape: tuple[int, ...],
    sources: Sequence[str],
    columns: np.ndarray | None,
    is_transposed: bool,
) -> str:
    """The type of a tensor, whose sources may be packed. Raises HotsplitError if these would be in
    blocks with their columns in another order, and no type is asked for."""
    found = [checkpoint.tensors[source].packed for source in sources]
    held = {None if each is None else each.kind_in(columns) for each in found}
    packed, kind = found[0], held.pop() if len(held) == 1 else None
    if packed is None:
        return types.kind(target, shape)
    unsorted = next((each for each in found if each and each.is_unsorted(columns)), None)
    if unsorted is not None and types.keeps_packed and types.override(target) is None:
        raise HotsplitError(
            f"{unsorted.label} is quantised in act-order: neighbouring columns have different"
            " scales, which no type holds, and no layer here reads its inputs in another order;"
            " give an outtype: f32 keeps its values, q8_0 or q4_k_m round them"
        )
    is_kept = kind in FLOAT_NAMES or (kind is not None and not is_transposed)
    written = types.kind(target, shape, packed=kind if is_kept else None)
    fate = "transposed and unpacked to" if kind and not is_kept else "unpacked to"
    is_moved = is_kept and written == kind and kind not in FLOAT_NAMES
    fate = "as they are, in" if is_moved else fate
    checkpoint.fates[packed.packing, f"{fate} {written}"] += 1
    return written


def _with_scale(
    checkpoint: Checkpoint, entry: TensorEntry, parts: Sequence[tuple[str, int | None]]
) -> TensorEntry:
    """The tensor as it is in memory; in nvfp4 with the factor of each of its matrices, which are a
    packed tensor and perhaps an expert in it."""
    if entry.kind != "nvfp4":
        return entry
    packed = [(checkpoint.tensors[name].packed, expert) for name, expert in parts]
    factors = [each.factor(expert) for each, expert in packed if each and each.factor]
    return in_memory(dataclasses.replace(entry, scale=np.array(factors, np.float32)))


def _wanted(plan: Blueprint, checkpoint: Checkpoint) -> tensors.Shapes:
    """Shapes by name in the stock layout, with an output head even if it is tied."""
    spec = plan.spec
    wanted = tensors.outer_shapes(spec) | {"output.weight": (spec.vocab_size, spec.hidden_size)}
    for index, layer in enumerate(spec.layers):
        in_layer = tensors.layer_shapes(spec, layer, "stock")
        wanted |= {f"blk.{index}.{name}": dims for name, dims in in_layer.items()}
    of_draft, optional = tensors.draft_shapes(spec, "stock")
    own = set(map(plan.name_of, checkpoint.tensors)) if optional else set()
    return wanted | of_draft | {name: dims for name, dims in optional.items() if name in own}


def _rows(plan: Blueprint, name: str) -> Rows | None:
    """How a tensor's rows are reordered, with the source's full name; None if they are not."""
    inner = name.split(".", 2)[2] if name.startswith("blk.") else name
    rows = plan.rows.get(inner)
    prefix = name.removesuffix(inner)
    return None if rows is None else dataclasses.replace(rows, source=prefix + rows.source)


def _by_end(values: Mapping[str, V], name: str) -> V | None:
    """The value for a name that ends with one of the keys."""
    return next((value for end, value in values.items() if name.endswith(end)), None)


def _sources(
    checkpoint: Checkpoint,
    plan: Blueprint,
    wanted: tensors.Shapes,
    experts: Mapping[str, list[ExpertSource]],
    pieces: Mapping[str, list[str]],
) -> dict[str, str]:
    """Names of the tensors read but experts' and pieces, by the names that `plan.name_of` gives."""
    shapes: tensors.Shapes = {}
    apart = source_names(experts) | {source for each in pieces.values() for source in each}
    for name, shape in wanted.items():
        if name in experts or name in pieces:
            continue
        rows = _rows(plan, name)
        if _by_end(plan.constants, name) is None:
            shapes[rows.source if rows else name] = (rows.num_rows, *shape[1:]) if rows else shape
    sources: dict[str, str] = {}
    for source, tensor in checkpoint.tensors.items():
        is_ignored = source.endswith(plan.ignored) or source.startswith(plan.ignored_prefixes)
        if is_ignored or source in apart:
            continue
        place = plan.name_of(source)
        if place not in shapes and checkpoint.is_bias_of_packing(source):
            continue
        if place not in shapes or place in sources:
            raise HotsplitError(
                f"{tensor.file}: no rule for tensor {source!r} in a {plan.spec.architecture} of"
                f" {plan.spec.num_layers} layers; is this another architecture?"
            )
        if not _fits(tensor.shape, place, shapes[place]):
            raise HotsplitError(
                f"{tensor.file}: tensor {source!r} is {list(tensor.shape)}, wanted"
                f" {list(shapes[place])} by config.json; the two belong to different models"
            )
        sources[place] = source
    # An output head that repeats the embedding is left out.
    may_tie = plan.is_tied is not False
    lacking = sorted((shapes.keys() - sources.keys()) - ({"output.weight"} if may_tie else set()))
    if lacking:
        raise HotsplitError(
            f"{checkpoint.folder}: no tensor for {lacking[0]!r}"
            f" ({len(lacking)} missing); download the checkpoint again"
        )
    if plan.is_tied and "output.weight" in sources:
        head, embedding = sources.pop("output.weight"), sources["token_embd.weight"]
        if not torch.equal(checkpoint.read(head), checkpoint.read(embedding)):
            raise HotsplitError(
                f"{checkpoint.folder}: tie_word_embeddings is true, but {head!r} differs from"
                f" {embedding!r}; set it to false in config.json, or remove {head!r}"
            )
    return sources


def _fits(found: tuple[int, ...], name: str, shape: tuple[int, ...]) -> bool:
    """True for a tensor of this shape and, if it has vectors, for one of the same shape but for
    dimensions of 1, such as that of a convolution of channels by themselves, or with all vectors in
    one."""
    if found == shape or not tensors.is_vector(name, shape):
        return found == shape
    large, wanted = ([size for size in each if size > 1] for each in (found, shape))
    return large == wanted or found == (prod(shape),)
