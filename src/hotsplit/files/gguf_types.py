"""The types of a GGUF's tensors: their numbers, and the sizes of their blocks.

`gguf` has all but q2_0, and q2_0_128, PrismML's groups of 128 values: both have number 42, and only
a tensor's size tells which it is (`group_of_twos`)."""

from collections.abc import Iterable

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from hotsplit.model.weight_types import BY_NAME

GROUPED_TWOS = "q2_0_128"
_OWN_SIZES = {"q2_0": (64, 18), GROUPED_TWOS: (128, 34)}
_TWOS = 42  # llama.cpp's ggml.h
# The types' names in lower case, by number. Kind q2_0 stands for both that share its number.
KINDS = {int(type): type.name.lower() for type in GGML_QUANT_SIZES} | {_TWOS: "q2_0"}

_NUMBERS = {name: number for number, name in KINDS.items()}


def number_of(kind: str) -> int:
    """The number of a type in a file."""
    return _TWOS if kind == GROUPED_TWOS else _NUMBERS[kind]


def block_sizes(kind: str) -> tuple[int, int]:
    """Values and bytes of a block of a type in a file or in memory."""
    if kind in _OWN_SIZES:
        return _OWN_SIZES[kind]
    if (found := BY_NAME.get(kind)) is not None:
        return found.block_values, found.block_bytes
    return GGML_QUANT_SIZES[GGMLQuantizationType[kind.upper()]]


def group_of_twos(tensors: Iterable[tuple[int, int, int]], alignment: int) -> str | None:
    """The type of a file's tensors with the number of q2_0: (values, values of a row, bytes from
    its start to the next tensor or the end of the file) of each. None if they are of neither."""
    found = [*tensors]

    def is_whole(kind: str) -> bool:
        block, size = block_sizes(kind)
        return all(
            width % block == 0
            and values // block * size <= room < values // block * size + alignment
            for values, width, room in found
        )

    return next((kind for kind in _OWN_SIZES if is_whole(kind)), None)
