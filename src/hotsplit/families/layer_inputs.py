"""The inputs that each layer has of its own (model/per_layer.py)."""

import numpy as np

from hotsplit.errors import HotsplitError
from hotsplit.families.blueprint import Rows
from hotsplit.families.config_reader import ConfigReader
from hotsplit.files.gguf_file import Value
from hotsplit.model.per_layer import TABLE, LayerInputs
from hotsplit.model.spec import ModelSpec

INPUTS = "embedding_length_per_layer_input"
_SIZE, _TOKENS = "hidden_size_per_layer_input", "vocab_size_per_layer_input"


def input_keys(read: ConfigReader) -> dict[str, Value]:
    """The key of their size; 0 without."""
    return {INPUTS: np.uint32(0 if read.values.get(_SIZE) in (None, 0) else read.count(_SIZE))}


def refuse_without_rows(read: ConfigReader) -> None:
    """Raises HotsplitError if some tokens have no row of the embeddings of layers."""
    if read.count(_TOKENS) != read.count("vocab_size"):
        raise HotsplitError(
            f"{read.path}: {_TOKENS} is {read.count(_TOKENS)}, wanted vocab_size"
            f" ({read.count('vocab_size')}): every token needs a row of the embeddings of layers"
        )


def rows_of_first(read: ConfigReader, vocab_size: int) -> dict[str, Rows]:
    """The rows of layers' embeddings; tokens of images and sound have the first token's."""
    name, count = f"{TABLE}.weight", read.count(_TOKENS)
    if count == vocab_size:
        return {}
    order = np.where(np.arange(vocab_size) < count, np.arange(vocab_size), 0)
    return {name: Rows(source=name, order=order, num_rows=count)}


def layer_inputs(spec: ModelSpec, size: int, epsilon: float, *, reads: str = "x") -> LayerInputs:
    """What makes the layers' own inputs, of `size` values each."""
    return LayerInputs(
        size=size,
        epsilon=epsilon,
        num_layers=spec.num_layers,
        vocab_size=spec.vocab_size,
        reads=reads,
    )
