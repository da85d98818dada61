"""The input of the first layer: rows of the embedding matrix, and learned positions if a model has
them.

Letters: T tokens, D model width."""

import torch
from torch import Tensor

from hotsplit.runtime.ops.device import Launcher
from hotsplit.runtime.weights.matrix import Matrix


def embed(
    embedding: Matrix, positions: Matrix | None, ids_T: Tensor, start: int, *, scale: float
) -> Tensor:
    """The input of the first layer, f32 [T, D], on the device of the embedding: its rows times
    `scale`, and learned positions."""
    x_TD = embedding.rows(ids_T.to(embedding.data.device))
    if scale != 1.0:
        x_TD = x_TD * scale
    if positions is None:
        return x_TD
    positions_T = torch.arange(start, start + len(ids_T))
    return x_TD + positions.rows(positions_T).to(x_TD.device)


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
    on.launch(
        lambda: on.kernels.embed(embedding, token_T, x_D, is_added=has_positions, scale=scale),
        [token_T, x_D, embedding.data],
        [x_D],
    )
