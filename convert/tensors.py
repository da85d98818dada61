"""The tensors of a checkpoint, renamed, reordered and encoded when they are written, according to
its blueprint."""

import dataclasses
from collections.abc import Iterator, Mapping
from functools import partial

import numpy as np
import torch

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.convert.checkpoint import Checkpoint
from hotsplit.convert.encode import encode, restore
from hotsplit.convert.experts import (
    PACKED_TYPE,
    ExpertSource,
    expert_entry,
    find_experts,
    of_expert,
    source_names,
)
from hotsplit.convert.tensor_types import TensorTypes
from hotsplit.errors import HotsplitError
from hotsplit.families.blueprint import Blueprint
from hotsplit.families.row_order import Rows
from hotsplit.files.gguf_file import TensorEntry, array_entry
from hotsplit.files.written import Restored
from hotsplit.model.tensors import (
    Layout,
    Shapes,
    in_layout,
    layer_shapes,
    outer_shapes,
    transposed_shape,
)


def tensor_entries(
    checkpoint: Checkpoint, plan: Blueprint, layout: Layout, types: TensorTypes
) -> dict[str, TensorEntry]:
    """Every tensor of the model file by its name there; its source is read when it is written.
    The down projections of the sparse layout are transposed.

    Raises HotsplitError for an unknown or missing tensor, a wrong shape, a tied head that differs
    from the embedding, and a type that does not fit."""
    wanted = _wanted(plan)
    experts = find_experts(checkpoint, wanted, plan.expert_form)
    sources = _sources(checkpoint, plan, wanted, experts)
    entries = {}
    for name, shape in wanted.items():
        target = in_layout(name, layout)
        is_transposed = target != name
        target_shape = transposed_shape(shape) if is_transposed else shape
        if name in experts:
            is_packed = experts[name][0].is_packed and not is_transposed
            kind = types.kind(target, target_shape, packed=PACKED_TYPE if is_packed else None)
            entries[target] = expert_entry(
                checkpoint, experts[name], target_shape, kind, is_transposed=is_transposed,
                importance_EM=types.importance(target, target_shape),
            )  # fmt: skip
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
        kind = types.kind(target, target_shape)
        order = rows.order if rows else None
        added = _by_end(plan.added, name) or 0.0
        importance = types.importance(target, target_shape)
        read = partial(
            _read_rows, checkpoint, source, order, len(shape) == 1, is_transposed, kind, added,
            None if importance is None else importance[0],
        )  # fmt: skip
        entries[target] = TensorEntry(shape=target_shape, kind=kind, read_rows=read)
    if plan.rope_factors is not None:
        entries["rope_freqs.weight"] = array_entry(plan.rope_factors, "f32")
    types.check_used(entries)
    return entries


def restored(
    checkpoint: Checkpoint, plan: Blueprint, types: TensorTypes, written: ModelFile
) -> Iterator[Restored]:
    """Every tensor of the checkpoint in use, a fused one in parts, with the values in `written`."""
    wanted = _wanted(plan)
    experts = find_experts(checkpoint, wanted, plan.expert_form)
    for name, each in experts.items():
        yield from _restored_experts(checkpoint, types, written, name, each)
    sources = _sources(checkpoint, plan, wanted, experts)
    for name in wanted:
        rows = _rows(plan, name)
        source = sources.get(rows.source if rows else name)
        if source is None or _by_end(plan.constants, name) is not None:
            continue
        order = rows.order if rows else None
        target = in_layout(name, written.layout)
        is_transposed = target != name
        tensor = checkpoint.read(source)
        tensor = tensor.flatten() if len(wanted[name]) == 1 else tensor
        tensor = tensor if order is None else tensor[torch.from_numpy(order)]
        added = _by_end(plan.added, name) or 0.0
        want = (tensor.T if is_transposed else tensor).to(torch.float32).numpy() + added
        entry, what = written.tensors[target], f"{checkpoint.folder}: tensor {source!r}"
        importance = types.importance(target, entry.shape)
        values = restore(entry, want, what, None if importance is None else importance[0]) - added
        yield Restored(source=source, rows=order, values=values.T if is_transposed else values)


def _restored_experts(
    checkpoint: Checkpoint, types: TensorTypes, written: ModelFile, name: str,
    sources: list[ExpertSource],
) -> Iterator[Restored]:  # fmt: skip
    """The experts of one tensor of the stock layout, each by itself."""
    target = in_layout(name, written.layout)
    importance_EM = types.importance(target, written.tensors[target].shape)
    for expert, source in enumerate(sources):
        want = source.read(checkpoint).to(torch.float32).numpy()
        want = want if target == name else want.T
        what = f"{checkpoint.folder}: tensor {source.name!r}"
        importance_M = None if importance_EM is None else importance_EM[expert]
        values = restore(of_expert(written.tensors[target], expert), want, what, importance_M)
        yield Restored(
            source=source.name, rows=None, values=values if target == name else values.T,
            expert=expert, tensor=name,
        )  # fmt: skip


def _read_rows(
    checkpoint: Checkpoint,
    source: str,
    order: np.ndarray | None,
    is_vector: bool,
    is_transposed: bool,
    kind: str,
    added: float,
    importance_M: np.ndarray | None,
    start: int,
    stop: int,
) -> np.ndarray:
    """The encoded bytes of some rows of a tensor, which does not stay in memory. `is_vector`: it is
    one in the model file, so a matrix of one row is taken as its row."""
    whole, rows = checkpoint.read(source), None  # held to the end: its mapping is shared
    whole = whole.flatten() if is_vector else whole
    tensor = whole
    if is_transposed:
        columns = whole[:, start:stop]
        tensor = (columns if order is None else columns[torch.from_numpy(order)]).T
    elif order is not None and whole.dim() == 2:
        rows = order[start:stop]
    elif order is not None:
        tensor = whole[torch.from_numpy(order[start:stop])]
    else:
        tensor = whole[start:stop]
    what = f"{checkpoint.tensors[source].file}: tensor {source!r}"
    if added:
        tensor = tensor.to(torch.float32) + added
    return encode(tensor, kind, what, rows=rows, importance=importance_M)


def _wanted(plan: Blueprint) -> Shapes:
    """Shapes by name in the stock layout, with an output head even if it is tied."""
    spec = plan.spec
    wanted = outer_shapes(spec) | {"output.weight": (spec.vocab_size, spec.hidden_size)}
    for index, layer in enumerate(spec.layers):
        in_layer = layer_shapes(spec, layer, "stock")
        wanted |= {f"blk.{index}.{name}": dims for name, dims in in_layer.items()}
    return wanted


def _rows(plan: Blueprint, name: str) -> Rows | None:
    """How a tensor's rows are reordered, with the source's full name; None if they are not."""
    inner = name.split(".", 2)[2] if name.startswith("blk.") else name
    rows = plan.rows.get(inner)
    prefix = name.removesuffix(inner)
    return None if rows is None else dataclasses.replace(rows, source=prefix + rows.source)


def _by_end(values: Mapping[str, float], name: str) -> float | None:
    """The value for a name that ends with one of the keys."""
    return next((value for end, value in values.items() if name.endswith(end)), None)


def _sources(
    checkpoint: Checkpoint, plan: Blueprint, wanted: Shapes,
    experts: Mapping[str, list[ExpertSource]],
) -> dict[str, str]:  # fmt: skip
    """The checkpoint's name of each tensor that is read, by the name that `plan.name_of` gives,
    without those of experts."""
    shapes: Shapes = {}
    of_experts = source_names(experts)
    for name, shape in wanted.items():
        if name in experts:
            continue
        rows = _rows(plan, name)
        if _by_end(plan.constants, name) is None:
            shapes[rows.source if rows else name] = (rows.num_rows, *shape[1:]) if rows else shape
    sources: dict[str, str] = {}
    for source, tensor in checkpoint.tensors.items():
        is_ignored = source.endswith(plan.ignored) or source.startswith(plan.ignored_layers)
        if is_ignored or source in of_experts:
            continue
        place = plan.name_of(source)
        if place not in shapes or place in sources:
            raise HotsplitError(
                f"{tensor.file}: no rule for tensor {source!r} in a {plan.spec.architecture} of"
                f" {plan.spec.num_layers} layers; is this another architecture?"
            )
        if tensor.shape not in (shapes[place], *_of_one_row(shapes[place])):
            raise HotsplitError(
                f"{tensor.file}: tensor {source!r} is {list(tensor.shape)}, wanted"
                f" {list(shapes[place])} by config.json; the two belong to different models"
            )
        sources[place] = source
    return _tied(checkpoint, plan, sources, shapes.keys() - sources.keys())


def _of_one_row(shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """The shape of the matrix of one row in which a checkpoint may have a vector."""
    return ((1, *shape),) if len(shape) == 1 else ()


def _tied(
    checkpoint: Checkpoint, plan: Blueprint, sources: dict[str, str], missing: set[str]
) -> dict[str, str]:
    """`sources` without an output head that repeats the embedding.

    Raises HotsplitError for missing tensors, and for a tied head that differs."""
    may_tie = plan.is_tied is not False
    lacking = sorted(missing - ({"output.weight"} if may_tie else set()))
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
