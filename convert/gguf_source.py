"""Any GGUF as the source of a model file: in another layout, another type, or as it is.

Unchanged tensors are copied as they are; those that change their type or are transposed are
unpacked and repacked a few rows at a time.

Letters: N rows, M values of a row."""

import dataclasses
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np

from hotsplit.artifacts.importance_file import Importances
from hotsplit.artifacts.model_file import TOKENIZER_KEY, ModelFile
from hotsplit.artifacts.model_gguf import read_model_gguf
from hotsplit.convert.draft_tensors import without_copies
from hotsplit.convert.encode import encode, not_finite, restore
from hotsplit.convert.expert_sources import by_expert, of_expert
from hotsplit.convert.importances import check_and_note
from hotsplit.convert.options import ConvertConfig
from hotsplit.convert.tensor_types import TensorTypes
from hotsplit.convert.tokenizer import given_tokenizer
from hotsplit.convert.type_mixtures import Roles
from hotsplit.errors import HotsplitError, refuse_together
from hotsplit.families.key_reader import KeyReader
from hotsplit.files.gguf_file import (
    TensorEntry,
    Value,
    in_memory,
    packed_rows,
    row_bytes,
    values_of,
)
from hotsplit.files.gguf_types import block_sizes
from hotsplit.files.written import Restored
from hotsplit.model.neurons import SMOOTH
from hotsplit.model.spec import ModelSpec
from hotsplit.model.tensors import in_layout, layout_of, transposed_shape
from hotsplit.model.weight_types import BY_NAME, FLOAT_NAMES, IN_MEMORY
from hotsplit.tokens.ggml_tokenizer import check_text_keys

LARGEST_EXPONENT = 252  # of a block of mxfp4 whose values are all finite: 12 * 2^(e - 128)
BF16_EXPONENT = np.uint16(0x7F80)  # all ones: infinite or NaN


def model_of_gguf(config: ConvertConfig) -> tuple[ModelFile, TensorTypes, tuple[str, ...]]:
    """The model in `config.source`, in the layout and types asked for, these, and notes for the
    user. Raises HotsplitError for a file that cannot be run, for types that do not fit it, and if
    there is nothing to change."""
    keys, tensors = read_model_gguf(config.source)
    if config.tokenizer is not None:
        keys = keys | {TOKENIZER_KEY: given_tokenizer(config.tokenizer, config.source, keys)}
    found = layout_of(tensors)
    keys = keys | _activation_keys(config, keys)
    spec, tensors = read_runnable(config.source, keys, tensors)
    tensors = without_copies(spec, tensors)
    roles = Roles.of(spec, is_tied="output.weight" not in tensors)
    importances = Importances.load(config.importances) if config.importances else None
    types = TensorTypes(
        outtype=config.outtype or "f16",
        roles=roles,
        overrides=config.tensor_types,
        importances=importances,
    )
    names = _targets(config, tensors)
    entries = {
        target: _entry(config, types, target, tensors[name], is_transposed=target != name)
        for target, name in names.items()
    }
    types.check_used(entries)
    copied = {
        name: _checked(entry, f"{config.source}: tensor {name!r}")
        for name, entry in entries.items()
        if entry is tensors[names[name]]
    }
    model = ModelFile.of(config.source, keys, entries | copied)
    is_more = config.predictors or config.activation or config.tokenizer
    fallen = types.fallen_note(entries) if config.outtype else None
    if entries == tensors and not is_more and fallen is not None:
        raise HotsplitError(f"{config.source}: the file would not change: {fallen}")
    if entries == tensors and not is_more:
        raise HotsplitError(
            f"{config.source}: is a {found} model file already; give predictors, another type or"
            " the other layout"
        )
    notes = (
        *activation_notes(keys, model),
        *([note] if (note := model.skipped_note or model.draft_note) else []),
        *([fallen] if fallen else []),
        *check_and_note(types.importances, entries),
        *_error_notes(tensors, entries, names),
    )
    return model, types, notes


def read_runnable(
    path: Path, keys: dict[str, Value], tensors: dict[str, TensorEntry]
) -> tuple[ModelSpec, dict[str, TensorEntry]]:
    """The spec and the tensors. Raises HotsplitError for a file that cannot be run; if so, also
    with what is wrong with its tokenizer."""
    try:
        return KeyReader(path, keys, tensors).model()
    except HotsplitError:
        refuse_together(
            path,
            lambda: KeyReader(path, keys, tensors).model(),
            lambda: check_text_keys(path, keys),
        )
        raise


def _targets(config: ConvertConfig, tensors: dict[str, TensorEntry]) -> dict[str, str]:
    names: dict[str, str] = {}
    for name in tensors:
        both = names.setdefault(in_layout(name, config.layout), name)
        if both != name:
            raise HotsplitError(
                f"{config.source}: holds {both} and {name}, one matrix twice; only one of them"
                " can be right: download the file again"
            )
    return names


def restored(source: Path, types: TensorTypes, written: ModelFile) -> Iterator[Restored]:
    """Every tensor of a GGUF except predictors, with the values in `written`."""
    keys, tensors = read_model_gguf(source)
    keys = keys | {"hotsplit.ffn.activation": written.activation}
    spec, tensors = KeyReader(source, keys, tensors).model()
    for name, entry in without_copies(spec, tensors).items():
        if "ffn_pred_" in name:
            continue
        same = in_layout(name, written.layout)
        is_transposed, new = same != name, written.tensors[same]
        importance_EM = types.importance(same, new.shape)
        what = f"{source}: tensor {name!r}"
        for expert in range(entry.shape[0]) if len(entry.shape) == 3 else (None,):
            old, made = entry, new
            if expert is not None:
                old, made = of_expert(entry, expert), of_expert(new, expert)
            want = _unpacked_rows(old, 0, old.shape[0])
            importance_M = None if importance_EM is None else importance_EM[expert or 0]
            values = restore(made, want.T if is_transposed else want, what, importance_M)
            values = values.T if is_transposed else values
            yield Restored(source=name, rows=None, values=values, expert=expert, tensor=name)


def _activation_keys(config: ConvertConfig, keys: dict[str, Value]) -> dict[str, Value]:
    if config.activation is None:
        return {}
    if "hotsplit.ffn.activation" in keys:
        raise HotsplitError(
            f"{config.source}: already states its activation,"
            f" {keys['hotsplit.ffn.activation']}; leave out --activation"
        )
    activation, _, threshold = config.activation.partition("=")
    own: dict[str, Value] = {"hotsplit.ffn.activation": activation}
    if threshold:
        count = keys.get(f"{keys.get('general.architecture')}.block_count", np.uint32(0))
        own["hotsplit.ffn.threshold"] = [float(threshold)] * int(count)  # type: ignore[arg-type]
    return own


def _entry(
    config: ConvertConfig, types: TensorTypes, target: str, entry: TensorEntry, is_transposed: bool
) -> TensorEntry:
    shape = transposed_shape(entry.shape) if is_transposed else entry.shape
    if config.outtype and "ffn_pred_" not in target:
        kind = types.kind(target, shape)
    else:  # blocks run along rows, so that those of a transposed matrix do not stay whole
        kind = types.stored_kind(target, shape, entry.kind, is_whole=not is_transposed)
    if kind == entry.kind and not is_transposed:
        return entry
    label = f"{config.source}: tensor {target!r}"
    importance_EM = types.importance(target, shape)

    def made(one: TensorEntry, number: int = 0) -> TensorEntry:
        importance_M = None if importance_EM is None else importance_EM[number]
        return _made(one, kind, label, is_transposed, importance_M)

    if len(shape) == 3:
        return TensorEntry(shape=shape, kind=kind, read_rows=by_expert(entry, made))
    return made(entry)


def _made(
    entry: TensorEntry, kind: str, label: str, is_transposed: bool, importance_M: np.ndarray | None
) -> TensorEntry:
    shape = transposed_shape(entry.shape) if is_transposed else entry.shape
    if (entry.kind, kind) == ("q5_0", "q8_0") and not is_transposed:
        same = dataclasses.replace(entry, kind=kind, read_rows=partial(_q5_0_as_q8_0, entry))
        return _checked(same, label)
    read = partial(_transposed_rows if is_transposed else _unpacked_rows, entry)

    def read_rows(start: int, stop: int) -> np.ndarray:
        return encode(read(start, stop), kind, label, importance=importance_M)

    return TensorEntry(shape=shape, kind=kind, read_rows=read_rows)


def _checked(entry: TensorEntry, label: str) -> TensorEntry:
    """A tensor copied unchanged; reading it raises HotsplitError for NaN or infinity."""

    def read_rows(start: int, stop: int) -> np.ndarray:
        data = entry.read_rows(start, stop)
        if not _is_finite(data, entry.kind):
            raise not_finite(label)
        return data

    return dataclasses.replace(entry, read_rows=read_rows)


def _is_finite(data: np.ndarray, kind: str) -> bool:
    """A block is finite if its f16 numbers are, or, with an exponent, its values (255 is NaN)."""
    if kind == "nvfp4":  # every scale of a block is finite, and that of the tensor was checked
        return True
    if kind in IN_MEMORY:
        data, kind = packed_rows(data, kind), IN_MEMORY[kind]
    if kind in ("f32", "f16"):
        return bool(np.isfinite(data).all())
    if kind == "bf16":
        return bool(((data.view(np.uint16) & BF16_EXPONENT) != BF16_EXPONENT).all())
    blocks = data.reshape(-1, BY_NAME[kind].block_bytes)
    halves = BY_NAME[kind].halves
    if halves is None:
        large = blocks[blocks[:, 0] > LARGEST_EXPONENT]
        return bool((large[:, 0] < 255).all() and np.isfinite(values_of(large, kind)).all())
    return bool(np.isfinite(np.ascontiguousarray(blocks[:, slice(*halves)]).view(np.float16)).all())


def _unpacked_rows(entry: TensorEntry, start: int, stop: int) -> np.ndarray:
    entry = in_memory(entry)
    return values_of(entry.read_rows(start, stop), entry.kind)


def _q5_0_as_q8_0(entry: TensorEntry, start: int, stop: int) -> np.ndarray:
    """Rows of q5_0 as q8_0 with the same values: the scales, and integers of 5 bits as 8 bits
    (block_q5_0 in ggml-common.h: an f16 scale, 32 high bits, 32 low halves of bytes)."""
    packed = entry.read_rows(start, stop)
    blocks = packed.reshape(-1, block_sizes("q5_0")[1])
    high = np.unpackbits(blocks[:, 2:6], axis=1, bitorder="little")
    low = np.concatenate([blocks[:, 6:] & 15, blocks[:, 6:] >> 4], axis=1)
    values = ((high << 4) | low).astype(np.int8) - np.int8(16)
    made = np.concatenate([blocks[:, :2], values.view(np.uint8)], axis=1)
    return made.reshape(len(packed), -1)


def _transposed_rows(entry: TensorEntry, start: int, stop: int) -> np.ndarray:
    """f32 rows of the transposed tensor: columns of [N, M], read in whole blocks."""
    entry = in_memory(entry)
    block, head = block_sizes(entry.kind)[0], BY_NAME[entry.kind].row_head
    first, last = start // block, -(-stop // block)
    data = entry.read()
    size = (data.shape[1] - head) // (entry.shape[1] // block)  # array elements per block
    assert data.nbytes == len(data) * row_bytes(entry.shape[1], entry.kind)
    columns = np.hstack([data[:, :head], data[:, head:][:, first * size : last * size]])
    values = values_of(columns, entry.kind)
    return values[:, start - first * block : stop - first * block].T


def activation_notes(keys: dict[str, Value], model: ModelFile) -> tuple[str, ...]:
    if "hotsplit.ffn.activation" in keys or model.activation not in SMOOTH:
        return ()
    return (
        f"activation assumed to be {model.activation}, llama.cpp's for {model.architecture}: a"
        " stock file does not say; if the model was trained with another, convert with"
        " --activation",
    )


def _error_notes(
    tensors: dict[str, TensorEntry], entries: dict[str, TensorEntry], names: dict[str, str]
) -> tuple[str, ...]:
    first: dict[tuple[str, str], str] = {}
    for target, entry in entries.items():
        old = tensors[names[target]]
        if old.kind not in FLOAT_NAMES and entry is not old:
            first.setdefault((old.kind, entry.kind), target)
    notes = []
    for (old_kind, kind), target in first.items():
        read = _unpacked_rows if names[target] == target else _transposed_rows
        old, new = tensors[names[target]], entries[target]
        if len(new.shape) == 3:
            old, new = of_expert(old, 0), of_expert(new, 0)
        count = min(64, new.shape[0])
        want = read(old, 0, count).astype(np.float64)
        got = _unpacked_rows(new, 0, count).astype(np.float64)
        error = float(np.linalg.norm(got - want)) / max(1e-30, float(np.linalg.norm(want)))
        loss = f"relative error {error:.1e} ({target})" if error else "the same values"
        notes.append(f"{old_kind} repacked as {kind}: {loss}")
    return tuple(notes)
