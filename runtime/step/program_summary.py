"""The step program of a model file and a plan, for display: its operations with the bytes of the
weights that each reads, equal layers merged, and bytes by device.

Neurons count in full, although modes "exact" and "predicted" read only some of them; the embedding
counts as one row."""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.artifacts.split_file import Split, held_in
from hotsplit.costs.cache_bytes import is_cached
from hotsplit.costs.default_mode import mode_meant
from hotsplit.costs.part_bytes import (
    block_read,
    head_bytes,
    is_dense,
    layer_bytes,
    outside_of,
    placed_units,
    stored_neuron_bytes,
)
from hotsplit.runtime.step.forms import step_form
from hotsplit.runtime.step.program import HOST, Op, StepForm, at, device_of, name_of, step_program
from hotsplit.system.sizes import format_bytes

if TYPE_CHECKING:
    from hotsplit.runtime.weights.neuron_block import Role


def file_form(model: ModelFile, split: Split | None, by_output: Collection[int] = ()) -> StepForm:
    """The form of a step with this plan; None: everything on the host. `model` has only what is
    loaded, so no predictors if they are not used (Split.held). `by_output`: the layers whose
    feed-forward matrices are used as a stock file has them."""
    num_hot = [0] * model.spec.num_layers if split is None else [len(ids) for ids in split.hot]
    rows = [
        model.tensors[name]
        for name in ("token_embd.weight", "position_embd.weight")
        if name in model.tensors
    ]
    head = model.tensors[model.head_name].num_bytes
    parts_L = [_part_bytes(model, index, hot) for index, hot in enumerate(num_hot)]
    for index in by_output:
        parts_L[index]["all"] = stored_neuron_bytes(model, index)
    layers, planned = model.spec.layers, dict[str, Any]()
    roles_L: list[tuple[Role, ...]] = [("cold",)] * len(layers)
    if split is not None:
        units = [x.neurons.num_units for x in layers]
        divided = [is_cached(*pair) for pair in zip(num_hot, units, strict=True)]
        roles_L = [
            ("hot", "cold") if is_divided else ("hot",) if hot else ("cold",)
            for hot, is_divided in zip(num_hot, divided, strict=True)
        ]
        packs_bits = split.cache is not None
        planned = {
            "homes": split.home or (0,) * (len(layers) + 1),
            "dense_on_gpu": split.dense_on_gpu,
            "head_on_gpu": split.head_on_gpu,
            "is_cache_on_host": split.kv_offload is not None,
            "has_bits_L": [
                packs_bits and is_divided and layer.predict is None
                for layer, is_divided in zip(layers, divided, strict=True)
            ],
        }
    outer = {block.part(): block_read(model, block) for block in outside_of(model)}
    outer |= {
        "embedding": sum(entry.row_bytes for entry in rows),
        "head": head,
        "output_norm": head_bytes(model) - head,
    }
    return step_form(
        model.spec,
        roles_L,
        is_tied=model.is_tied,
        layer_bytes=parts_L,
        outer_bytes=outer,
        **planned,
    )


# "ffn_down_exps" is the scale of each expert; its matrices are none of these parts.
_PARTS = {
    "ffn_down": "down_bias",
    "ffn_gate_inp": "router",
    "exp_probs_b": "router",
    "ffn_down_exps": "router",
}


def _part_bytes(model: ModelFile, index: int, num_hot: int) -> dict[str, int]:
    """Bytes by part. Those of the parts that the layer's operations read sum to what plans count
    (part_bytes.layer_bytes); "attention" contains other parts, and so does "all"."""
    sizes, spec = layer_bytes(model, index), model.spec.layers[index]
    own = {
        name.partition(".")[0]: block.part()
        for block in spec.operations
        for name in block.shapes(model.spec.hidden_size)
    }
    parts = _PARTS | own
    found = dict.fromkeys((*spec.norms, "attention", "shared", *parts.values()), 0)
    of_layer = model.layer_tensors[index]
    for name, entry in of_layer.items():
        stem = name.partition(".")[0]
        part = parts.get(stem, stem if stem in spec.norms else "attention")
        part = "shared" if "_shexp" in stem else part
        found[part] += entry.num_bytes if is_dense(name) else 0
    output = sum(e.num_bytes for n, e in of_layer.items() if n.startswith("attn_output"))
    num_units, unit = placed_units(model, index)
    return found | {
        "qkv": found["attention"] - output - sizes.head_norms,
        "head_norms": sizes.head_norms,
        "attn_output": output,
        "predictor": sizes.predictor,
        "all": num_units * unit,
        "hot": num_hot * unit,
        "cold": (num_units - num_hot) * unit,
    }


# Parts that are shown with the operation's name, besides those of norms.
_SHOWN_PARTS = ("positions", "hot", "cold", "qkv", "attn_output")


@dataclass(frozen=True, kw_only=True)
class OpFact:
    operation: str
    part: str
    layer: int | None
    device: str
    beside: str | None  # the GPU beside whose kernels it runs
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    weight_bytes: int


@dataclass(frozen=True, kw_only=True)
class ProgramSummary:
    kind: str = "step program"
    path: Path
    split: Path | None
    mode: str
    operations: tuple[OpFact, ...]
    weight_bytes: dict[str, int]  # by device


@dataclass(frozen=True)
class Line:
    """A line of the table: an operation of one or several layers, or a reference to earlier
    layers."""

    layers: str
    device: str
    operation: str
    reads: str
    writes: str
    least_bytes: int
    most_bytes: int

    @property
    def row(self) -> tuple[str, ...]:
        least, most = format_bytes(self.least_bytes), format_bytes(self.most_bytes)
        weights = "" if not self.most_bytes else most if least == most else f"{least} to {most}"
        return self.layers, self.device, self.operation, self.reads, self.writes, weights


def summarise_program(path: Path, split_path: Path | None) -> ProgramSummary:
    """Summarises a model's step program with a plan; without one, everything is on the host.

    Raises HotsplitError for anything but a model file, and for a plan of another model."""
    model = ModelFile.load(path)
    split = None if split_path is None else Split.load(split_path)
    if split is not None and split_path is not None:
        split.check_against(model, split_path)
    mode = mode_meant(model) if split is None else split.mode
    held = held_in(model, mode)
    is_stock = split is None and model.layout == "stock"
    by_output = [
        n for n in range(held.spec.num_layers) if is_stock and held.spec.computes_all(n, mode)
    ]
    ops = step_program(file_form(held, split, by_output))
    devices = dict.fromkeys([HOST, *sorted({op.device for op in ops} - {HOST})])
    return ProgramSummary(
        path=path,
        split=split_path,
        mode=mode,
        operations=tuple(map(_fact, ops)),
        weight_bytes={
            device: sum(op.weight_bytes for op in ops if op.device == device) for device in devices
        },
    )


def _fact(op: Op) -> OpFact:
    return OpFact(
        operation=op.kind,
        part=op.part,
        layer=op.layer,
        device=op.device,
        beside=op.home if op.is_beside else None,
        reads=op.reads,
        writes=op.writes,
        weight_bytes=op.weight_bytes,
    )


def facts_of(summary: ProgramSummary) -> list[tuple[str, object]]:
    sparse = ", which reads fewer of the neurons' weights" if summary.mode != "dense" else ""
    return [
        ("file", summary.path),
        ("plan", summary.split or "none: all on the host"),
        ("mode", summary.mode + sparse),
        ("operations a token", len(summary.operations)),
    ]


def lines_of(summary: ProgramSummary) -> list[Line]:
    """The lines of the table. Neighbouring layers with the same operations are shown once; layers
    that repeat them further on refer to those lines."""
    found: list[Line] = []
    shown: dict[tuple[object, ...], str] = {}
    sections = [list(ops) for _, ops in groupby(summary.operations, key=lambda op: op.layer)]
    for shape, same in groupby(sections, key=_shape):
        run = list(same)
        first, last = run[0][0].layer, run[-1][0].layer
        if first is None:
            found += [_line("", [op]) for section in run for op in section]
            continue
        label = str(first) if first == last else f"{first}-{last}"
        if shape in shown:
            sums = [sum(op.weight_bytes for op in section) for section in run]
            found.append(Line(label, "", f"as {shown[shape]}", "", "", min(sums), max(sums)))
            continue
        shown[shape] = label
        for number, ops in enumerate(zip(*run, strict=True)):
            found.append(_line(label if number == 0 else "", ops))
    return found


def _shape(ops: Sequence[OpFact]) -> tuple[object, ...]:
    """A key that is equal for layers with the same operations."""
    return tuple(
        (op.operation, op.part, op.device, op.beside, _values(op, op.reads), _values(op, op.writes))
        for op in ops
    ) + ((ops[0].layer is None,),)


def _line(layers: str, ops: Sequence[OpFact]) -> Line:
    op, sizes = ops[0], [each.weight_bytes for each in ops]
    is_shown = op.operation == "norm" or op.part in _SHOWN_PARTS
    return Line(
        layers,
        op.device + (", beside" if op.beside else ""),
        f"{op.operation} {op.part}" if is_shown else op.operation,
        _values(op, op.reads),
        _values(op, op.writes),
        min(sizes),
        max(sizes),
    )


def _values(op: OpFact, values: Sequence[str]) -> str:
    """Names of values, without the layer and the device that the line shows anyway."""
    found = []
    for value in values:
        name = name_of(value)
        if op.layer is not None and (parity := re.fullmatch(r"ffn_in\.(\d)", name)):
            is_own = int(parity[1]) == op.layer % 2
            name = "ffn_in" if is_own else "ffn_in of the layer before"
        name = re.sub(r"^(cache|state)\.\d+$", r"\1", name)
        is_plain = op.operation != "copy" and device_of(value) == op.device
        found.append(name if is_plain else at(name, device_of(value)))
    return ", ".join(found)
