"""The types of a GGUF's tensors: their numbers, and the sizes of their blocks.

`gguf` has all but q2_0, and q2_0_128, PrismML's groups of 128 values: both have number 42, and only
a tensor's size tells which it is (`groups_of_twos`)."""

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from hotsplit.model.weight_types import BY_NAME

GROUPED_TWOS = "q2_0_128"
_OWN_SIZES = {"q2_0": (64, 18), GROUPED_TWOS: (128, 34)}
_TWOS = 42  # llama.cpp's ggml.h
GROUPS_OF_TWOS = (*_OWN_SIZES,)
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


def groups_of_twos(values: int, width: int, room: int, alignment: int) -> list[str]:
    """The types that a tensor with the number of q2_0 may have: of so many values, in rows of
    `width`, with `room` bytes from its start to the next tensor or the end of the file."""

    def is_whole(block: int, size: int) -> bool:
        num_bytes = values // block * size
        return width % block == 0 and num_bytes <= room < num_bytes + alignment

    return [kind for kind, sizes in _OWN_SIZES.items() if is_whole(*sizes)]
