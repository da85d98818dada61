"""The types that weights are stored in, with every fact of a type that is not arithmetic.

Lists of types elsewhere are derived from this table. Kernels and encoders have a type's arithmetic;
`gguf` has its sizes and its unpacking as well, and tests compare the two.

A kind is the name of a type, or of a type in another layout in memory (`kind_in`)."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

FileTypeName = Literal[
    "f32",
    "f16",
    "bf16",
    "q8_0",
    "q4_0",
    "q4_k",
    "q5_k",
    "q6_k",
    "mxfp4",
    "iq4_nl",
    "q5_0",
    "q4_1",
    "q5_1",
    "q3_k",
    "q2_k",
    "iq4_xs",
    "tq2_0",
    "q2_0",
    "q1_0",
]
# Types in memory, made from a file's IQ1, IQ2 and IQ3 types when it is read (TABLES).
TableTypeName = Literal["iq1_table", "iq2_table", "iq3_xxs_table", "iq3_s_table"]
TypeName = FileTypeName | TableTypeName | Literal["nvfp4_scaled"]
PredictorTypeName = Literal["f16", "q8_0", "q4_0"]  # types of predictors that `profile` trains
Form = Literal["planar", "tiled", "grouped"]  # layouts of rows in memory, on the CPU

FILE_NAMES: tuple[FileTypeName, ...] = get_args(FileTypeName)
TABLE_NAMES: tuple[TableTypeName, ...] = get_args(TableTypeName)
NAMES: tuple[TypeName, ...] = (*FILE_NAMES, *TABLE_NAMES, "nvfp4_scaled")
# The table type of each of a file's types with grids. It holds their values exactly: entries of a
# grid are a few small numbers, and a group's scale is an odd number up to 31 (dequantize_row_iq* in
# ggml-quants.c).
TABLES: dict[str, TableTypeName] = {
    "iq1_s": "iq1_table",
    "iq1_m": "iq1_table",
    "iq2_xxs": "iq2_table",
    "iq2_xs": "iq2_table",
    "iq2_s": "iq2_table",
    "iq3_xxs": "iq3_xxs_table",
    "iq3_s": "iq3_s_table",
}
# Those that a CPU may multiply as files have them (cpu/grid_formats.h).
GRID_NAMES = ("iq2_xxs", "iq2_xs", "iq3_xxs", "iq3_s")
# The type in memory of each of a file's types without kernels, with the same values:
# - tq1_0 has the powers of three of tq2_0's codes.
# - q2_0_128 are PrismML's groups of 128 values, which have the number of q2_0 in a file.
# - nvfp4_scaled has the tensor's scale, which a file has in a tensor of its own, before each row.
IN_MEMORY: dict[str, TypeName] = {
    **TABLES,
    "tq1_0": "tq2_0",
    "q2_0_128": "q2_0",
    "nvfp4": "nvfp4_scaled",
}
FORMS: tuple[Form, ...] = get_args(Form)
PREDICTOR_NAMES: tuple[PredictorTypeName, ...] = get_args(PredictorTypeName)
# What the codes of iq4_nl and iq4_xs stand for (kvalues_iq4nl in ggml-common.h).
IQ4_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
# Magnitudes from here on round to infinity in f16.
F16_OVERFLOW = 65520.0


@dataclass(frozen=True, kw_only=True)
class WeightType:
    """A type, named as in GGUF but in lower case.

    - `file_type`: the member of gguf.LlamaFileType for a file in this type; "": no file has it.
    - `forms`: the CPU's layouts. Small blocks with a planar one have sums of integers, and caches
      and predictors store them too; the rows of other blocks are summed in f32.
    - `is_chosen`: whether `run` chooses it by itself.
    - `layout`: the type that has the same bytes in a block: itself, except for table types.
    - `levels`: what the codes of a block with nibbles (and perhaps fifth bits), of q3_k or of a
      table type stand for, in units of its scale. The highest bit of a table type's code is a sign.
    - `unit`: the power of two that a block's f16 scale is multiplied by, in f32.
    - `planes`: (first byte in a block, bytes) of the parts of a planar row; (): GPUs read the rows
      as stored. In small blocks, numbers, fifth bits if there are any, quants.
    - `halves`: first and last + 1 of the bytes of a block that are f16 numbers; None for floats and
      for scales that are powers of two.
    - `overflows_at`: the smallest magnitude that `convert` refuses. Floats: where rounding
    overflows
      the type. Blocks: where their f16 scale (the largest magnitude over 127, about 110, 16 or 8)
      or
      minimum overflows.
      K-quants: about half of that at which the f16 scale of the minima of q4_k and q5_k (the
      largest magnitude over 63) overflows.
    - `relative_error`: bound of a value's error, relative to the largest magnitude of its block or,
      for floats, to its own magnitude. Blocks add the rounding of their f16 scale; nibbles go from
      -8 to 7, so a value at the far end is off by a whole step. Those of mxfp4 end at 6 / 8 of what
      the exponent stands for. The scales of K-quants and iq4_nl are fitted and clip outliers: the
      largest errors in 240,000 unusual blocks of each were 0.13, 0.07 and 0.024, about half of the
      bounds, and 0.17 of iq4_nl; in 16,500 of q3_k, q2_k and iq4_xs 0.28, 0.44 and 0.14.
    - `absolute_error`: bound near zero, where f16 has steps of 2^-24. So has the scale of a block,
      which is multiplied by up to 127 or 8. The scales of K-quants are multiplied by up to 63 * 15,
      63 * 31 and 128 * 32, and are off by half a step."""

    name: TypeName
    file_type: str
    block_values: int
    block_bytes: int
    forms: tuple[Form, ...]
    is_chosen: bool
    layout: TypeName
    levels: tuple[int, ...]
    unit: float
    planes: tuple[tuple[int, int], ...]
    halves: tuple[int, int] | None
    overflows_at: float
    relative_error: float
    absolute_error: float

    @property
    def code(self) -> int:
        """The number in `enum Kind` of kernels.h."""
        return NAMES.index(self.name)

    @property
    def row_head(self) -> int:
        """Bytes before a row's blocks: an f32 factor of all its values."""
        return 4 if self.name == "nvfp4_scaled" else 0

    @property
    def shares_heads(self) -> bool:
        """True for blocks of 64 or 128 values, in which parts of 32 share what is before them."""
        return self.block_values in (64, 128)

    @property
    def is_in_files(self) -> bool:
        return bool(self.file_type)

    @property
    def is_encoded(self) -> bool:
        """True if `convert` encodes values in this type."""
        return self.name in _BOUNDS

    @property
    def is_float(self) -> bool:
        return self.block_values == 1

    @property
    def has_small_blocks(self) -> bool:
        """True for blocks of 32 values, which begin with a scale and perhaps a minimum."""
        return self.block_values == 32

    @property
    def head_bytes(self) -> int:
        """Bytes of a block before its quants, unless it is a K-quant's."""
        if self.shares_heads:
            return self.halves[1] if self.halves else 4
        return self.planes[0][1]

    @property
    def has_integer_sums(self) -> bool:
        """True for small blocks whose rows the CPU sums in integers; the cache of keys and values
        has them too, and so have predictors."""
        return "planar" in self.forms

    @property
    def is_k_quant(self) -> bool:
        return self.block_values == 256

    @property
    def has_nibbles(self) -> bool:
        """True for small blocks whose last 16 bytes have two values each."""
        return self.has_small_blocks and bool(self.levels)

    @property
    def bytes_per_value(self) -> float:
        return self.block_bytes / self.block_values

    @property
    def has_exact_rows(self) -> bool:
        """True if, on a GPU, a row's result does not depend on how many rows a step has."""
        return not self.is_k_quant

    @property
    def gpu_kind(self) -> str:
        """The kind that GPUs read."""
        return self.kind_in("planar") if self.planes else self.name

    def kind_in(self, form: Form) -> str:
        return f"{self.name}_{form}"

    def code_in(self, form: Form) -> int:
        """The number of a layout's kind in `enum Kind` of kernels.h, after all types."""
        kinds = [each.kind_in(f) for f in FORMS for each in TYPES if f in each.forms]
        return len(TYPES) + kinds.index(self.kind_in(form))


_STEP = 2.0**-24  # of f16 near zero
_ROUNDED = 2.0**-11  # relative error of a number rounded to f16
# Where it is not MOSTLY_ and the name.
_FILE_TYPES: dict[str, str] = {
    "f32": "ALL_F32",
    "mxfp4": "MOSTLY_MXFP4_MOE",
    **{name: f"MOSTLY_{name.upper()}_S" for name in ("q3_k", "q4_k", "q5_k")},
}
_FILE_TYPES |= dict.fromkeys((*TABLE_NAMES, "nvfp4_scaled"), "")
_CHOSEN = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_k", "q5_k", "q6_k")
_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12)
_IQ2, _IQ3_XXS, _IQ3_S = (8, 25, 43, 0), (4, 12, 20, 28, 36, 44, 52, 62), tuple(range(1, 16, 2))
_LEVELS: dict[str, tuple[int, ...]] = {
    "q4_0": tuple(range(-8, 8)),
    "q4_1": tuple(range(16)),
    "q5_0": tuple(range(-16, 16)),
    "q5_1": tuple(range(32)),
    **dict.fromkeys(("mxfp4", "nvfp4_scaled"), (*_E2M1, *(-level for level in _E2M1))),
    **dict.fromkeys(("tq2_0", "q2_0"), (-1, 0, 1, 2)),
    "q1_0": (-1, 1),
    "iq4_nl": IQ4_LEVELS,
    "iq4_xs": IQ4_LEVELS,
    "q3_k": tuple(range(-4, 4)),
    # Eight times -1, 0 or 1, plus 1 or, with the sign, minus 1.
    "iq1_table": (-7, 1, 9, 0, -9, -1, 7, 0),
    "iq2_table": (*_IQ2, *(-level for level in _IQ2)),
    "iq3_xxs_table": (*_IQ3_XXS, *(-level for level in _IQ3_XXS)),
    "iq3_s_table": (*_IQ3_S, *(-level for level in _IQ3_S)),
}
_LAYOUTS: dict[TypeName, TypeName] = {
    "iq1_table": "q3_k",
    "iq2_table": "q3_k",
    "iq3_xxs_table": "iq4_xs",
    "iq3_s_table": "iq4_xs",
}
_UNITS = {"iq1_table": 1 / 8, "iq2_table": 1 / 8, "iq3_xxs_table": 1 / 4}
_TILED: tuple[Form, ...] = ("tiled",)
# Values and bytes of a block, forms, planes, halves.
_BLOCKS: dict[
    TypeName, tuple[int, int, tuple[Form, ...], tuple[tuple[int, int], ...], tuple[int, int] | None]
] = {
    "f32": (1, 4, (), (), None),
    "f16": (1, 2, ("grouped",), (), None),
    "bf16": (1, 2, ("grouped",), (), None),
    "q8_0": (32, 34, FORMS, ((0, 2), (2, 32)), (0, 2)),
    "q4_0": (32, 18, FORMS, ((0, 2), (2, 16)), (0, 2)),
    "q4_k": (256, 144, _TILED, (), (0, 4)),
    "q5_k": (256, 176, _TILED, (), (0, 4)),
    "q6_k": (256, 210, _TILED, ((0, 128), (128, 64), (192, 16), (208, 2)), (208, 210)),
    "mxfp4": (32, 17, _TILED, ((0, 1), (1, 16)), None),
    "iq4_nl": (32, 18, _TILED, ((0, 2), (2, 16)), (0, 2)),
    "q5_0": (32, 22, _TILED, ((0, 2), (2, 4), (6, 16)), (0, 2)),
    "q4_1": (32, 20, _TILED, ((0, 4), (4, 16)), (0, 4)),
    "q5_1": (32, 24, _TILED, ((0, 4), (4, 4), (8, 16)), (0, 4)),
    "q3_k": (256, 110, _TILED, ((32, 64), (0, 32), (96, 12), (108, 2)), (108, 110)),
    "q2_k": (256, 84, _TILED, ((16, 64), (0, 16), (80, 4)), (80, 84)),
    "iq4_xs": (256, 136, _TILED, ((8, 128), (0, 8)), (0, 2)),
    "tq2_0": (256, 66, _TILED, ((0, 64), (64, 2)), (64, 66)),
    "q2_0": (64, 18, _TILED, ((2, 16), (0, 2)), (0, 2)),
    "q1_0": (128, 18, _TILED, ((2, 16), (0, 2)), (0, 2)),
    "nvfp4_scaled": (64, 36, _TILED, ((4, 32), (0, 4)), None),
}
# Where values overflow, relative and absolute error; nothing is rounded to the other types.
_BOUNDS: dict[str, tuple[float, float, float]] = {
    "f32": (math.inf, 0.0, 0.0),
    "f16": (F16_OVERFLOW, _ROUNDED, _STEP),
    "bf16": (float.fromhex("0x1.FFp127"), 2.0**-8, 1e-38),
    "q8_0": (127 * F16_OVERFLOW, 0.5 / 127 + _ROUNDED, 127 * _STEP),
    "q4_0": (8 * F16_OVERFLOW, 1 / 8 + _ROUNDED, 8 * _STEP),
    "q4_k": (32 * F16_OVERFLOW, 0.25, 2.0**-15),
    "q5_k": (32 * F16_OVERFLOW, 0.15, 2.0**-14),
    "q6_k": (32 * F16_OVERFLOW, 0.06, 2.0**-13),
    "mxfp4": (math.inf, 0.25 + 2.0**-20, 2.0**-126),
    "iq4_nl": (100 * F16_OVERFLOW, 0.22, 127 * _STEP),
    "q5_0": (16 * F16_OVERFLOW, 1 / 16 + _ROUNDED, 16 * _STEP),
    "q4_1": (F16_OVERFLOW, 1 / 15 + 3 * _ROUNDED, 16 * _STEP),
    "q5_1": (F16_OVERFLOW, 1 / 31 + 3 * _ROUNDED, 32 * _STEP),
    "q3_k": (32 * F16_OVERFLOW, 0.5, 2.0**-17),
    "q2_k": (8 * F16_OVERFLOW, 0.75, 2.0**-18),
    "iq4_xs": (32 * F16_OVERFLOW, 0.3, 2.0**-12),
}
_BOUNDS |= dict.fromkeys(TABLE_NAMES, (math.inf, 0.0, 0.0))
# Of scales that a packed checkpoint has in other types.
_MOVED = {"q2_0": (math.inf, _ROUNDED, 2 * _STEP)}


def _type(name: TypeName) -> WeightType:
    layout = _LAYOUTS.get(name, name)
    block_values, block_bytes, forms, planes, halves = _BLOCKS[layout]
    overflows_at, relative_error, absolute_error = (_MOVED | _BOUNDS).get(
        name, (math.inf, 0.0, 0.0)
    )
    return WeightType(
        name=name,
        file_type=_FILE_TYPES.get(name, f"MOSTLY_{name.upper()}"),
        block_values=block_values,
        block_bytes=block_bytes,
        forms=forms,
        is_chosen=name in _CHOSEN,
        layout=layout,
        levels=_LEVELS.get(name, ()),
        unit=_UNITS.get(name, 1.0),
        planes=planes,
        halves=halves,
        overflows_at=overflows_at,
        relative_error=relative_error,
        absolute_error=absolute_error,
    )


TYPES: tuple[WeightType, ...] = tuple(map(_type, NAMES))  # a type's place is its number in C++
BY_NAME: dict[str, WeightType] = {each.name: each for each in TYPES}
# Kinds of matrices for which a row's rounding on a GPU depends on the number of rows of a step.
INEXACT_ROWS = tuple(
    sorted({kind for t in TYPES if not t.has_exact_rows for kind in (t.name, t.gpu_kind)})
)

ENCODED_NAMES = tuple(name for name in FILE_NAMES if BY_NAME[name].is_encoded)
FLOAT_NAMES = tuple(each.name for each in TYPES if each.is_float)
# Small blocks with sums of integers.
SMALL_BLOCK_NAMES = tuple(each.name for each in TYPES if each.has_integer_sums)
K_QUANT_NAMES = tuple(each.name for each in TYPES if each.is_k_quant)
# Types that are chosen, from nearly lossless to the smallest. Of two with as many bytes, the one
# with larger blocks loses less.
BY_QUALITY: tuple[FileTypeName, ...] = tuple(
    name
    for name in sorted(
        FILE_NAMES, key=lambda name: (-BY_NAME[name].bytes_per_value, -BY_NAME[name].block_values)
    )
    if BY_NAME[name].is_chosen and not BY_NAME[name].is_float
)
# The types for rows that are not whole blocks of 256, as in tensor_type_fallback of
# llama-quant.cpp.
SMALLER_BLOCKS = {
    "q2_k": "q4_0",
    "q3_k": "q4_0",
    "q4_k": "q5_0",
    "q5_k": "q5_1",
    "q6_k": "q8_0",
    "iq4_xs": "iq4_nl",
}
# Types in which the cache stores keys and values.
CACHE_NAMES = tuple(each.name for each in TYPES if each.is_float or each.has_integer_sums)


def kinds_in(form: Form) -> dict[str, str]:
    """The kinds of a layout on the CPU, by the names of their types."""
    return {each.name: each.kind_in(form) for each in TYPES if form in each.forms}


def file_kind(kind: str) -> str:
    """The name of the type of a kind, without its layout."""
    return next(
        (kind.removesuffix(f"_{each}") for each in FORMS if kind.endswith(f"_{each}")), kind
    )
