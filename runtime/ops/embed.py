"""The input of the first layer: rows of the embedding matrix, and learned positions if a model has
them.

Letters: T tokens, D model width."""

from torch import Tensor

from hotsplit.runtime.ops.device import Launcher
from hotsplit.runtime.weights.matrix import Matrix


def launch_embed(
    on: Launcher,
    embedding: Matrix,
    token_T: Tensor,
    x_D: Tensor,
    *,
    scale: float,
    has_positions: bool,
) -> None:
    """Writes the embedding, times `scale`, to the hidden state, or adds it to the learned positions
    there."""
    on.run(on.kernels.embed, embedding, token_T, x_D, is_added=has_positions, scale=scale)
