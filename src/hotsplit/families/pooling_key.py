"""The key of a GGUF that says how a text's vector comes of its hidden states: `pooling_type`."""

import numpy as np

from hotsplit.errors import HotsplitError
from hotsplit.files.gguf_file import Value
from hotsplit.model.spec import Pooling

POOLING: dict[int, Pooling] = {1: "mean", 2: "cls", 3: "last"}  # llama.cpp's LLAMA_POOLING_TYPE
_RANKS = 4


def pooling_of(number: int, where: str) -> Pooling | None:
    """What the key's number says; None for 0. Raises HotsplitError for an unsupported one."""
    if number and number not in POOLING:
        what = "it ranks texts" if number == _RANKS else "the number is unknown"
        raise HotsplitError(
            f"{where}.pooling_type is {number}: {what}, which is not supported; known:"
            f" {', '.join(f'{n} ({name})' for n, name in POOLING.items())}"
        )
    return POOLING.get(number)


def pooling_key(pooling: Pooling | None) -> dict[str, Value]:
    """The key of this pooling; {} without."""
    numbers = [number for number, name in POOLING.items() if name == pooling]
    return {"pooling_type": np.uint32(numbers[0])} if numbers else {}
