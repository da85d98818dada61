"""The attention block as a struct for C++ (kernels/cpu/attention.h), with what layers of a step
share: the cache's block tables and the rule by which keys are selected."""

from ctypes import Array, Structure, c_float, c_int32, c_int64, c_void_p

import torch

from hotsplit.model.attention import KEY_NORM, QUERY_NORM, Heads, Scores
from hotsplit.options.key_selection import SUMMARIES, KeySelection
from hotsplit.runtime.cache.block_table import BlockTable
from hotsplit.runtime.ops.attention.block import Attention
from hotsplit.runtime.ops.attention.rotary import Rotaries
from hotsplit.runtime.ops.norm import NormStruct, norm_struct
from hotsplit.runtime.ops.structs import MatrixStruct, Structs, fields_of

_TABLES = ("summary", "summary_unit", "code", "code_factor")  # of KeyTables, in its order


class ScoresStruct(Structure):
    _fields_ = [*fields_of(Scores)]


class AttentionStruct(Structure):
    _fields_ = [
        ("query_norm", NormStruct),
        ("key_norm", NormStruct),
        ("input", MatrixStruct * 3),
        ("output", MatrixStruct),
        ("key", c_void_p),
        ("value", c_void_p),
        ("summary", c_void_p),
        ("code", c_void_p),
        ("summary_unit", c_void_p),
        ("code_factor", c_void_p),
        ("scores", ScoresStruct),
        ("rotary", c_int32),
        ("table", c_int32),
        *fields_of(Heads),
    ]


class TableStruct(Structure):
    _fields_ = [
        ("block", c_void_p),
        ("num_sequences", c_int64),
        ("blocks_per_sequence", c_int64),
        ("block_length", c_int64),
        ("num_blocks", c_int64),
        ("window", c_int64),
    ]


class SelectStruct(Structure):
    _fields_ = [
        ("block", c_int64),
        ("sinks", c_int64),
        ("window", c_int64),
        ("top", c_int64),
        ("candidates", c_int64),
        ("full", c_int64),
        ("summary", c_int32),
        ("is_coded", c_int32),
    ]


def rounded_scale(scale: float) -> float:
    """The scale of scores as 1 / root in f32, with the root of the head width rounded, too."""
    return 1.0 / c_float(1.0 / scale).value


def attention_struct(
    structs: Structs, attention: Attention, rotaries: Rotaries, tables: "Tables", *, projects: bool
) -> AttentionStruct:
    """`projects`: with its matrices; else others project, and only the heads attend here."""
    cache, spec, vectors = attention.cache, attention.spec, attention.vectors
    key_tables = () if cache.tables is None else cache.tables.tensors
    scores = structs.numbers(Scores, spec, vectors) | {"scale": rounded_scale(spec.score_scale)}
    struct = AttentionStruct(
        query_norm=norm_struct(structs, attention.query_norm, *spec.normed.get(QUERY_NORM, ())),
        key_norm=norm_struct(structs, attention.key_norm, *spec.normed.get(KEY_NORM, ())),
        key=structs.pointer(cache.key_BKPX, cache.key_BKPX.dtype),
        value=structs.pointer(cache.value_BKPX, cache.value_BKPX.dtype),
        scores=ScoresStruct(**scores),
        rotary=rotaries.index(attention.rotary),
        table=tables.index(cache.table),
        **structs.numbers(Heads, spec, vectors),
        **{
            name: structs.pointer(tensor, tensor.dtype)
            for name, tensor in zip(_TABLES, key_tables, strict=False)
        },
    )
    if projects:
        struct.input = (MatrixStruct * 3)(*map(structs.linear, attention.inputs))
        struct.output = structs.linear(attention.output)
    return struct


class Tables:
    """The block tables of a step's layers, each once."""

    def __init__(self) -> None:
        self.each: list[BlockTable] = []

    def index(self, table: BlockTable) -> int:
        if table not in self.each:
            self.each.append(table)
        return self.each.index(table)

    def structs(self, structs: Structs) -> Array[TableStruct]:
        found = [
            TableStruct(
                block=structs.pointer(table.block_SN, torch.int32),
                num_sequences=table.num_sequences,
                blocks_per_sequence=table.block_SN.shape[1],
                block_length=table.block_length,
                num_blocks=table.num_blocks,
                window=table.window or 0,
            )
            for table in self.each
        ]
        return structs.array(TableStruct, found)


def select_struct(rule: KeySelection | None) -> SelectStruct:
    if rule is None:
        return SelectStruct()
    return SelectStruct(
        block=rule.block,
        sinks=rule.sinks,
        window=rule.window,
        top=rule.top,
        candidates=max(1, rule.candidates),
        full=rule.full,
        summary=SUMMARIES.index(rule.summary),
        is_coded=rule.is_coded,
    )
