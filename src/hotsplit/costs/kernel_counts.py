"""The number of kernels that a token launches on a GPU; plans are priced with these counts.

Plans assume that a step on a GPU is a captured graph, in which every kernel waits for the one
before it and costs `Gpu.launch_s` in addition to the time for its bytes. Each matrix product is one
kernel, each norm of a block is one (which also adds the residual), and the groups below have as
many as stated. The kernels of the embedding and of the neuron cache are not counted."""

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.costs.budget import is_dense, is_predictor, layer_tensors

# Norm and rotate heads, append keys and values; attend to parts of the cache; combine the parts.
ATTENTION_KERNELS = 3
# At most: gate and up rows with the activation; down rows; the sum of down's parts, which is left
# to the next norm if that is on the same GPU.
HOT_KERNELS = 3
# A feed-forward layer run densely, as in other engines: gate, up, activation with product, down.
DENSE_FFN_KERNELS = 4
HEAD_KERNELS = 2  # the norm and the product


def dense_kernels(
    model: ModelFile, layer: int, *, has_predictor: bool, has_cache: bool = True
) -> int:
    """Kernels of a layer's dense block; `has_predictor`: the predictor is run too. Without the KV
    cache (`has_cache` false), the heads attend on the host."""
    count = ATTENTION_KERNELS if has_cache else 0
    for name, entry in layer_tensors(model, layer).items():
        is_matrix = len(entry.shape) == 2
        if is_dense(name):
            is_norm = name.startswith(("attn_norm", "ffn_norm")) and name.endswith(".weight")
            count += is_matrix or is_norm
        elif is_predictor(name):
            count += is_matrix and has_predictor
    return count
