"""A layer's neurons with slots before them, in one range of addresses:

    row    0 .. N - 1      the slots, in the fast memory
           N .. N + F - 1  all neurons of the layer, in order

Neuron j is read at row `row_N[j]` of the block: its slot, or N + j. The neurons of the block stay in the
same order, so that no sum depends on which of them have a slot.

Letters: F neurons of a layer, N slots."""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from sparkinfer.runtime.weights.neuron_block import NeuronBlock


def rows_of_slots(hot_N: np.ndarray, num_neurons: int) -> np.ndarray:
    """The neurons that such a block's rows are loaded with."""
    return np.concatenate([hot_N, np.arange(num_neurons)])


def joined(block: NeuronBlock, hot_N: np.ndarray, num_neurons: int) -> NeuronBlock:
    """The block of a layer, from one that has the rows of `rows_of_slots`."""
    num_slots = len(hot_N)
    assert block.down.num_rows == num_slots + num_neurons, block.down.num_rows
    row_F = torch.arange(num_slots, num_slots + num_neurons, dtype=torch.int32)
    row_F[torch.from_numpy(hot_N).long()] = torch.arange(num_slots, dtype=torch.int32)
    return replace(block, id_N=torch.arange(num_neurons), row_N=row_F, is_whole=True)


def tensors_of(block: NeuronBlock) -> list[Tensor]:
    """Gate, up (if there is one), down, and their biases: a row, or a value, per neuron."""
    linears = [block.gate] if block.up is None else [block.gate, block.up]
    biases = [linear.bias_N for linear in linears if linear.bias_N is not None]
    return [*(linear.weight.data for linear in linears), block.down.data, *biases]
