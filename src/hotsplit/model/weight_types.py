"""The types that weights are stored in: one row a type, with every fact that is not arithmetic.

Lists of types elsewhere are derived from this table. Kernels and encoders have a type's arithmetic;
`gguf` has its sizes and its unpacking as well, and tests compare the two.

A kind is the name of a type, or of a type in another layout in memory (`kind_in`)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

TypeName = Literal["f32", "f16", "bf16", "q8_0", "q4_0", "q4_k", "q5_k", "q6_k"]
PredictorTypeName = Literal["f16", "q8_0", "q4_0"]  # types of predictors that `profile` trains
Form = Literal["planar", "tiled", "grouped"]  # layouts of rows in memory, on the CPU

NAMES: tuple[TypeName, ...] = get_args(TypeName)
FORMS: tuple[Form, ...] = get_args(Form)
PREDICTOR_NAMES: tuple[PredictorTypeName, ...] = get_args(PredictorTypeName)
# Magnitudes from here on round to infinity in f16.
F16_OVERFLOW = 65520.0


@dataclass(frozen=True, kw_only=True)
class WeightType:
    """A type, named as in GGUF but in lower case.

    - `file_type`: the member of gguf.LlamaFileType for a file in this type.
    - `forms`: the CPU's layouts, and their numbers in `enum Kind` of kernels.h.
    - `planes`: (first byte in a block, bytes) of the parts of a planar row; (): GPUs read the rows
      as stored.
    - `halves`: first and last + 1 of the bytes of a block that are f16 numbers; None for floats.
    - `overflows_at`: the smallest magnitude that `convert` refuses. Floats: where rounding overflows
      the type. Blocks: where their f16 scale (the largest magnitude over 127 or 8) overflows.
      K-quants: about half of that at which the f16 scale of the minima of q4_k and q5_k (the
      largest magnitude over 63) overflows.
    - `relative_error`: bound of a value's error, relative to the largest magnitude of its block or,
      for floats, to its own magnitude. Blocks add the rounding of their f16 scale; nibbles go from
      -8 to 7, so a value at the far end is off by a whole step. The scales of K-quants are fitted
      and clip outliers: the largest errors in 240,000 unusual blocks of each were 0.13, 0.07 and
      0.024, about half of the bounds.
    - `absolute_error`: bound near zero, where f16 has steps of 2^-24. So has the scale of a block,
      which is multiplied by up to 127 or 8. The scales of K-quants are multiplied by up to 63 * 15,
      63 * 31 and 128 * 32, and are off by half a step."""

    name: TypeName
    file_type: str
    block_values: int
    block_bytes: int
    forms: Mapping[Form, int]
    planes: tuple[tuple[int, int], ...] = ()
    halves: tuple[int, int] | None = None
    overflows_at: float
    relative_error: float
    absolute_error: float

    @property
    def code(self) -> int:
        """The number in `enum Kind` of kernels.h and of convert's encode.h."""
        return NAMES.index(self.name)

    @property
    def is_float(self) -> bool:
        return self.block_values == 1

    @property
    def has_small_blocks(self) -> bool:
        """True for blocks of 32 values with one scale; the cache of keys and values has them too,
        and so have predictors."""
        return self.block_values == 32

    @property
    def is_k_quant(self) -> bool:
        return self.block_values == 256

    @property
    def has_nibbles(self) -> bool:
        """True for small blocks of 4-bit values, from -8 to 7 steps."""
        return self.has_small_blocks and self.block_bytes == 2 + 32 // 2

    @property
    def bytes_per_value(self) -> float:
        return self.block_bytes / self.block_values

    @property
    def is_large(self) -> bool:
        """True if a smaller type takes far fewer bytes."""
        return self.bytes_per_value > 1

    @property
    def transposed(self) -> TypeName:
        """The type of a matrix that is transposed at load: blocks become f16, because they run
        along the other dimension."""
        return self.name if self.is_float else "f16"

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


TYPES: tuple[WeightType, ...] = (
    WeightType(
        name="f32", file_type="ALL_F32", block_values=1, block_bytes=4, forms={},
        overflows_at=math.inf, relative_error=0.0, absolute_error=0.0,
    ),
    WeightType(
        name="f16", file_type="MOSTLY_F16", block_values=1, block_bytes=2, forms={"grouped": 14},
        overflows_at=F16_OVERFLOW, relative_error=2.0**-11, absolute_error=2.0**-24,
    ),
    WeightType(
        name="bf16", file_type="MOSTLY_BF16", block_values=1, block_bytes=2, forms={"grouped": 15},
        overflows_at=float.fromhex("0x1.FFp127"), relative_error=2.0**-8, absolute_error=1e-38,
    ),
    WeightType(
        name="q8_0", file_type="MOSTLY_Q8_0", block_values=32, block_bytes=34,
        forms={"planar": 9, "tiled": 11, "grouped": 13},
        planes=((0, 2), (2, 32)), halves=(0, 2), overflows_at=127 * F16_OVERFLOW,
        relative_error=0.5 / 127 + 2.0**-11, absolute_error=127 * 2.0**-24,
    ),
    WeightType(
        name="q4_0", file_type="MOSTLY_Q4_0", block_values=32, block_bytes=18,
        forms={"planar": 8, "tiled": 10, "grouped": 12},
        planes=((0, 2), (2, 16)), halves=(0, 2), overflows_at=8 * F16_OVERFLOW,
        relative_error=1 / 8 + 2.0**-11, absolute_error=8 * 2.0**-24,
    ),
    WeightType(
        name="q4_k", file_type="MOSTLY_Q4_K_S", block_values=256, block_bytes=144,
        forms={"tiled": 16}, halves=(0, 4), overflows_at=32 * F16_OVERFLOW,
        relative_error=0.25, absolute_error=2.0**-15,
    ),
    WeightType(
        name="q5_k", file_type="MOSTLY_Q5_K_S", block_values=256, block_bytes=176,
        forms={"tiled": 17}, halves=(0, 4), overflows_at=32 * F16_OVERFLOW,
        relative_error=0.15, absolute_error=2.0**-14,
    ),
    WeightType(
        name="q6_k", file_type="MOSTLY_Q6_K", block_values=256, block_bytes=210,
        forms={"tiled": 18}, planes=((0, 128), (128, 64), (192, 16), (208, 2)), halves=(208, 210),
        overflows_at=32 * F16_OVERFLOW, relative_error=0.06, absolute_error=2.0**-13,
    ),
)  # fmt: skip

BY_NAME: dict[str, WeightType] = {each.name: each for each in TYPES}
assert tuple(BY_NAME) == NAMES, "a type's place is its number in C++"

FLOAT_NAMES = tuple(each.name for each in TYPES if each.is_float)
SMALL_BLOCK_NAMES = tuple(each.name for each in TYPES if each.has_small_blocks)
LARGE_NAMES = tuple(each.name for each in TYPES if each.is_large)
K_QUANT_NAMES = tuple(each.name for each in TYPES if each.is_k_quant)
# Types that quantise, from nearly lossless to the smallest. Of two with as many bytes, the one with
# larger blocks loses less.
BY_QUALITY: tuple[TypeName, ...] = tuple(
    each.name
    for each in sorted(TYPES, key=lambda each: (-each.bytes_per_value, -each.block_values))
    if not each.is_float
)
SMALLEST = BY_QUALITY[-1]
# Types in which the cache stores keys and values.
CACHE_NAMES = tuple(each.name for each in TYPES if each.is_float or each.has_small_blocks)


def kinds_in(form: Form) -> dict[str, str]:
    """The kinds of a layout on the CPU, by the names of their types."""
    return {each.name: each.kind_in(form) for each in TYPES if form in each.forms}


def file_kind(kind: str) -> str:
    """The name of the type of a kind, without its layout."""
    return next(
        (kind.removesuffix(f"_{form}") for form in FORMS if kind.endswith(f"_{form}")), kind
    )
