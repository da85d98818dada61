"""The rows of a layer whose hot neurons are in slots, which other neurons can take.

If one processor reads both memories, one block has the slots, followed by all neurons:

    row    0 .. N - 1      the slots, in the fast memory
           N .. N + F - 1  all neurons of the layer, in order

Neuron j is read at row `row_N[j]`: its slot, or N + j. The order of the block's neurons never
changes, so no sum depends on which of them have a slot. If the slots are on a GPU, they are one
block, and the cold neurons are another.

Letters: F neurons of a layer, N slots, C cold neurons."""

from dataclasses import replace

import numpy as np
import torch

from hotsplit.runtime.weights.neuron_block import NeuronBlock


def rows_of_slots(hot_N: np.ndarray, num_neurons: int) -> np.ndarray:
    """The neuron in each row of a block of slots and all neurons, at load time."""
    return np.concatenate([hot_N, np.arange(num_neurons)])


def joined(block: NeuronBlock, hot_N: np.ndarray, num_neurons: int) -> NeuronBlock:
    """The block of a layer, made from one with the rows of `rows_of_slots`."""
    num_slots = len(hot_N)
    assert block.down.num_rows == num_slots + num_neurons, block.down.num_rows
    row_F = torch.arange(num_slots, num_slots + num_neurons, dtype=torch.int32)
    row_F[torch.from_numpy(hot_N).long()] = torch.arange(num_slots, dtype=torch.int32)
    return replace(block, id_N=torch.arange(num_neurons), row_N=row_F, is_whole=True)


def apart(hot: NeuronBlock, cold: NeuronBlock, cold_C: np.ndarray) -> tuple[NeuronBlock, ...]:
    """The hot block, whose rows are the slots on a GPU, and the cold one, which refers to rows of
    the whole layer. Ids are int32; the cold block's ids and rows are one tensor, which swaps change
    in place."""
    id_C = torch.from_numpy(cold_C.astype(np.int32))
    hot_id_N = hot.id_N.to(torch.int32)
    return replace(hot, id_N=hot_id_N), replace(cold, id_N=id_C, row_N=id_C)
