"""The numbers of parts into which kernels split sums. They depend only on shapes, so a captured
graph is valid for every position and every set of neurons, and the order of sums does not depend on
the device."""

# Columns of `down` that one program sums, 256 bytes of f16; twice as many in kinds with nibbles.
DOWN_COLUMNS = 128
# Enough for about four programs per multiprocessor of an H200, and not more, because a single
# program of add_norm then reads all parts.
_DOWN_PROGRAMS = 512
_LEAST_DOWN_NEURONS = 64

# Least positions per program of `attend`, and the most such parts of a context.
_LEAST_SPLIT = 64
_MOST_SPLITS = 64


def down_parts(num_neurons: int, width: int) -> int:
    """S: the number of partial sums that `down` writes."""
    columns = -(-width // DOWN_COLUMNS)
    return max(1, min(-(-_DOWN_PROGRAMS // columns), -(-num_neurons // _LEAST_DOWN_NEURONS), 32))


def expert_parts(num_used: int, num_neurons: int, width: int, *, is_by_output: bool) -> int:
    """S: the number of partial sums of an expert's output. One that has a row for each output needs
    none."""
    if is_by_output:
        return 1
    programs = -(-width // DOWN_COLUMNS) * num_used
    return max(1, min(-(-_DOWN_PROGRAMS // programs), -(-num_neurons // _LEAST_DOWN_NEURONS), 8))


def range_of(num_neurons: int, num_parts: int) -> int:
    """Neurons per part; the last parts may have fewer, or none."""
    return -(-num_neurons // num_parts)


def attend_split(context_length: int) -> int:
    """Positions per part: a power of two."""
    least = -(-context_length // _MOST_SPLITS)
    return max(_LEAST_SPLIT, 1 << (least - 1).bit_length())


def attend_parts(context_length: int) -> int:
    return -(-context_length // attend_split(context_length))


def attend_scratch(context_length: int, num_heads: int, width: int) -> int:
    """f32 scratch values per row of a step: for each part and head, a sum of values, a maximum
    score and a sum of weights."""
    return attend_parts(context_length) * num_heads * (width + 2)
