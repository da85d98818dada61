"""The number of kernels that a token launches on a GPU; plans are priced with these counts.

Plans assume that a step on a GPU is a captured graph, in which every kernel waits for the one
before it; `Gpu.kernels_seconds` has their time. Each matrix product is one kernel, each norm of a
block is one (which also adds the sum before it), and the groups below have as many as stated. The
kernels of the embedding and of the neuron cache are not counted."""

from collections.abc import Sequence

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.model.operations import BlockOp
from hotsplit.model.spec import (
    Add,
    Attention,
    Block,
    LayerSpec,
    Neurons,
    Norm,
    Predict,
    Route,
    read_by,
    written_by,
)

# Norm and rotate heads, append keys and values; attend to parts of the cache; combine the parts.
ATTENTION_KERNELS = 3
ALL_HEADS_KERNELS = 2  # the norm of all queries, and that of all keys
# Products of each head with latents, before and after attention, and what joins them with the key.
LATENT_KERNELS = 3
QUERY_RANK_KERNELS = 2  # the norm and the product of queries with a rank
# At most: gate and up rows with the activation, of neurons or of the chosen experts; down rows; the
# sum of down's parts, which is left to the next norm if that is on the same GPU.
HOT_KERNELS = 3
# More of a layer that needs all of its gates: products with gates and ups, apart from the hidden
# values.
ALL_GATES_KERNELS = 2
HEAD_KERNELS = 2  # the norm and the product


def dense_kernels(
    model: ModelFile, layer: int, *, has_predictor: bool, has_cache: bool = True
) -> int:
    """Kernels of a layer's dense block; `has_predictor`: the predictor is run too. Without the KV
    cache (`has_cache` false), the heads attend on the host."""
    spec = model.spec.layers[layer]
    if not has_predictor:
        spec = spec.with_predict(None)
    kernels = sum(_kernels(block, has_cache=has_cache) for block in spec.blocks)
    return kernels + _lone_sums(spec.blocks, model.spec.layers[layer + 1 :][:1])


def _lone_sums(blocks: Sequence[Block], after: Sequence[LayerSpec]) -> int:
    """The sums of a layer that neither a norm nor another sum reads next (OLMo 2)."""
    later = [*blocks, *(block for layer in after for block in layer.blocks)]
    readers = (
        next(
            (b for b in later[index + 1 :] if not set(written_by(block)).isdisjoint(read_by(b))),
            None,
        )
        for index, block in enumerate(blocks)
        if isinstance(block, Add)
    )
    return sum(reader is not None and not isinstance(reader, Norm | Add) for reader in readers)


def _kernels(block: Block, *, has_cache: bool) -> int:
    match block:
        case Norm():
            return 1
        case Attention():
            products = len(block.projections) + 1
            if block.latent is not None:
                has_rank = block.latent.query_rank is not None
                products += LATENT_KERNELS + QUERY_RANK_KERNELS * has_rank
            of_heads = ATTENTION_KERNELS + ALL_HEADS_KERNELS * block.norms_all_heads
            return products + (of_heads if has_cache else 0)
        case Predict():
            return 2 if block.rank else 1
        case Route():  # the logits, and the choice
            return 2
        case Neurons() if block.suffix == "_shexp":  # hidden values, output, and a gate as a router
            return 4 if block.has_output_gate else 2
        case BlockOp():
            return block.num_kernels
        case _:  # neurons are counted with the devices that they are on; most sums are in norms
            return 0
