"""How many neurons or experts a pass computes at a time."""

from hotsplit.costs.part_bytes import FLOAT_BYTES, LEAST_TILE_ROWS

GPU_PART_BYTES = 24 << 20


def gpu_part_neurons(num_tokens: int) -> int:
    """Neurons that a pass computes at a time on a GPU, where each part takes a dozen launches: as
    many multiples of LEAST_TILE_ROWS as keep the f32 values of one matrix within GPU_PART_BYTES,
    but at least one."""
    rows = LEAST_TILE_ROWS
    return max(1, GPU_PART_BYTES // (FLOAT_BYTES * num_tokens) // rows) * rows


def expert_part_pairs(num_tokens: int, num_neurons: int) -> int:
    """Pairs of a token and one of its experts, which has so many neurons, that a pass computes at a
    time on a GPU: as many as keep the f32 values of one matrix within GPU_PART_BYTES, but at least
    those of one expert."""
    return max(num_tokens, GPU_PART_BYTES // (FLOAT_BYTES * num_neurons))
