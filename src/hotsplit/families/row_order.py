"""The order in which a model file has the rows of a checkpoint's tensors, such as rotary pairs that
are neighbours, and tensors that another file has in one."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import numpy as np

from hotsplit.errors import HotsplitError
from hotsplit.families.blueprint import Rows
from hotsplit.families.family import Tensors
from hotsplit.files.gguf_file import TensorEntry, row_range
from hotsplit.model.spec import ModelSpec


def adjacent_pairs(num_rows: int, num_heads: int, num_rotated: int | None = None) -> np.ndarray:
    """The row order of a query or key projection that makes the two rows of a rotary pair adjacent:
    row r of the model file is row order[r] of the checkpoint. `num_rotated`: of a head's rows; its
    last ones stay. transformers pairs row p of a head's 2P rotated ones with row p + P, llama.cpp
    row 2p with row 2p + 1."""
    rows_HW = np.arange(num_rows).reshape(num_heads, -1)
    turned_HW, rest_HW = np.split(rows_HW, [num_rotated or rows_HW.shape[1]], axis=1)
    pairs_HW = turned_HW.reshape(num_heads, 2, -1).swapaxes(1, 2).reshape(num_heads, -1)
    return np.concatenate([pairs_HW, rest_HW], axis=1).reshape(-1)


def rotary_rows(spec: ModelSpec) -> dict[str, Rows]:
    """The rows of queries and keys (and their biases) for a graph that rotates adjacent pairs."""
    attention, rows = spec.attentions[0], {}
    for name, heads in (("attn_q", attention.num_heads), ("attn_k", attention.num_kv_heads)):
        count = heads * attention.head_dim
        order = adjacent_pairs(count, heads, attention.num_rotated or None)
        for part in (".weight", ".bias"):
            rows[name + part] = Rows(source=name + part, order=order, num_rows=count)
    return rows


def gate_rows(num_neurons: int, suffix: str = "") -> dict[str, Rows]:
    """The rows of gates and ups of a checkpoint that has them in one matrix, the gates first."""
    neurons, source = np.arange(num_neurons), f"ffn_up{suffix}.weight"
    orders = {"ffn_gate": neurons, "ffn_up": num_neurons + neurons}
    return {
        f"{name}{suffix}.weight": Rows(source=source, order=order, num_rows=2 * num_neurons)
        for name, order in orders.items()
    }


def projections_apart(tensors: Mapping[str, TensorEntry]) -> Tensors:
    """The tensors, with queries, keys and values that a file has in one `attn_qkv`, in this order,
    as three views of it, and its bias; how many rows are queries, the columns of the output
    projection say. What cannot be divided so stays, and is refused as unknown."""
    found = dict(tensors)
    for name, entry in tensors.items():
        stem, fused, part = name.partition("attn_qkv.")
        output = tensors.get(f"{stem}attn_output.weight")
        rest = 0 if output is None else entry.shape[0] - output.shape[-1]
        if not fused or output is None or rest < 2 or rest % 2:
            continue
        begin = 0
        for own, rows in zip("qkv", (output.shape[-1], rest // 2, rest // 2), strict=True):
            found[f"{stem}attn_{own}.{part}"] = row_range(entry, begin, begin + rows)
            begin += rows
        del found[name]
    return found


def gates_apart(spec: ModelSpec, tensors: Tensors) -> Tensors:
    """The tensors, with gates and ups, which some of llama.cpp's graphs have in one `ffn_up`, the
    gates first, as two views of it. One of another height stays, and is refused for its shape."""
    found = dict(tensors)
    for layer, block in enumerate(layer.neurons for layer in spec.layers):
        gate, up = _gate_and_up(layer)
        entry = tensors.get(up)
        if gate not in tensors and entry is not None and entry.shape[0] == 2 * block.number:
            found[gate] = row_range(entry, 0, block.number)
            found[up] = row_range(entry, block.number, entry.shape[0])
    return found


def gates_joined(spec: ModelSpec, tensors: Tensors) -> Tensors:
    """The opposite of `gates_apart`. Raises HotsplitError for gates and ups of two types, or with
    two scales."""
    found = dict(tensors)
    for layer in range(spec.num_layers):
        gate, up = (tensors[name] for name in _gate_and_up(layer))
        if gate.kind != up.kind:
            raise HotsplitError(
                f"{_gate_and_up(layer)[0]} is {gate.kind} and the ups are {up.kind}, but"
                f" llama.cpp's {spec.architecture} graph has both in one matrix; use the sparse"
                " layout"
            )
        scales = [entry.scale for entry in (gate, up) if entry.scale is not None]
        if any(not np.array_equal(scales[0], scale) for scale in scales) or len(scales) == 1:
            raise HotsplitError(
                f"{_gate_and_up(layer)[0]} and the ups have scales of their own, but llama.cpp's"
                f" {spec.architecture} graph has both in one matrix; use the sparse layout"
            )
        del found[_gate_and_up(layer)[0]]
        found[_gate_and_up(layer)[1]] = _stacked(gate, up)
    return found


def _gate_and_up(layer: int) -> tuple[str, str]:
    return f"blk.{layer}.ffn_gate.weight", f"blk.{layer}.ffn_up.weight"


def _stacked(first: TensorEntry, second: TensorEntry) -> TensorEntry:
    count = first.shape[0]

    def read_rows(start: int, stop: int) -> np.ndarray:
        above = first.read_rows(min(start, count), min(stop, count))
        below = second.read_rows(max(start - count, 0), max(stop - count, 0))
        return np.concatenate([above, below])

    return replace(first, shape=(count + second.shape[0], first.shape[1]), read_rows=read_rows)


def matrices_apart(tensors: Tensors, names: tuple[str, ...]) -> Tensors:
    """The tensors, with matrices of one shape, which llama.cpp's files have in one tensor of this
    name, as views of it: NAME.0 and so on."""
    found = dict(tensors)
    for name in names:
        entry = tensors.get(f"{name}.weight")
        if entry is not None and len(entry.shape) == 3:
            del found[f"{name}.weight"]
            for number in range(entry.shape[0]):
                scale = entry.scale
                if scale is not None and len(scale) > 1:
                    scale = scale[number : number + 1]
                read_rows = partial(_rows_of_matrix, entry, number)
                found[f"{name}.{number}.weight"] = replace(
                    entry, shape=entry.shape[1:], read_rows=read_rows, scale=scale
                )
    return found


def _rows_of_matrix(entry: TensorEntry, number: int, start: int, stop: int) -> np.ndarray:
    found: np.ndarray = entry.read_rows(number, number + 1)[0][start:stop]
    return found


def matrices_joined(tensors: Tensors, names: tuple[str, ...]) -> Tensors:
    """The inverse of `matrices_apart`."""
    found = {n: e for n, e in tensors.items() if not n.startswith(tuple(f"{n}." for n in names))}
    for name in names:
        count = sum(each.startswith(f"{name}.") for each in tensors)
        parts = [tensors[f"{name}.{number}.weight"] for number in range(count)]
        scales = [part.scale for part in parts if part.scale is not None]
        found[f"{name}.weight"] = replace(
            parts[0],
            shape=(count, *parts[0].shape),
            read_rows=partial(_of_all, parts),
            scale=np.concatenate(scales) if scales else None,
        )
    return found


def _of_all(parts: list[TensorEntry], start: int, stop: int) -> np.ndarray:
    return np.stack([part.read() for part in parts[start:stop]])
