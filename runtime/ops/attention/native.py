"""The attention block as a struct for C++ (kernels/cpu/attention.h), with what layers of a step
share: the cache's block tables and the rule by which keys are selected."""

from ctypes import Array, Structure, c_float, c_int32, c_int64, c_void_p

import torch

from hotsplit.model.attention import KEY_NORM, QUERY_NORM, Heads, Scores
from hotsplit.model.attention import Attention as Spec
from hotsplit.options.key_selection import SUMMARIES, KeySelection
from hotsplit.runtime.cache.block_table import BlockTable
from hotsplit.runtime.ops.attention.block import Attention, LatentMatrices
from hotsplit.runtime.ops.attention.rotary import Rotaries
from hotsplit.runtime.ops.norm import NormStruct, norm_struct
from hotsplit.runtime.ops.structs import MatrixStruct, Structs, fields_of, members

_TABLES = ("summary", "summary_unit", "code", "code_factor")  # of KeyTables, in its order


class ScoresStruct(Structure):
    _fields_ = [*fields_of(Scores)]


class LatentStruct(Structure):
    _fields_ = [
        *members(MatrixStruct, "query key value"),
        *members(NormStruct, "query_norm key_norm"),
    ]


class AttentionStruct(Structure):
    _fields_ = [
        *members(NormStruct, "query_norm key_norm"),
        ("input", MatrixStruct * 4),
        ("output", MatrixStruct),
        *members(c_void_p, "latent key value summary code summary_unit code_factor"),
        ("scores", ScoresStruct),
        *members(c_int32, "rotary table"),
        *fields_of(Heads),
    ]


class TableStruct(Structure):
    _fields_ = [
        ("block", c_void_p),
        *members(c_int64, "num_sequences blocks_per_sequence block_length num_blocks window"),
    ]


class SelectStruct(Structure):
    _fields_ = [
        *members(c_int64, "block sinks window top candidates full"),
        *members(c_int32, "summary is_coded"),
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
        struct.input = (MatrixStruct * 4)(*map(structs.linear, attention.inputs))
        struct.output = structs.linear(attention.output)
        if attention.latent is not None:
            struct.latent = structs.address(_latent_struct(structs, spec, attention.latent))
    return struct


def _latent_struct(structs: Structs, spec: Spec, own: LatentMatrices) -> LatentStruct:
    assert spec.latent is not None
    rank, size = spec.latent.query_rank, spec.latent.size
    return LatentStruct(
        query=MatrixStruct() if own.query is None else structs.linear(own.query),
        key=structs.linear(own.key),
        value=structs.linear(own.value),
        query_norm=norm_struct(structs, own.query_norm, *([] if rank is None else [rank])),
        key_norm=norm_struct(structs, own.key_norm, size),
    )


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
