"""The projections of latent attention (hotsplit.model.latent) as a GPU's kernels, in the absorbed
form.

Letters: T rows, H heads, D model width, R rank of queries, L values of the first products, C values
of a latent, V values of a head's output, W head width of absorbed queries. For one row there is no
T axis."""

from collections.abc import Sequence

from torch import Tensor

from hotsplit.runtime.ops.attention.block import Attention
from hotsplit.runtime.ops.device import Launcher, Rounded
from hotsplit.runtime.ops.norm import launch_add_norm


def launch_latents(
    on: Launcher, attention: Attention, x_D: Tensor | Rounded, qkv: Tensor, rooms: Sequence[Tensor]
) -> None:
    """Writes absorbed queries and the key to `qkv` [T, (H + 1) W], with the values that rotate
    first in each head. `rooms`: flat memory, of which the first has `qkv`, for what others leave of
    it until then, for the first products, and for queries."""
    own, spec, num_heads = attention.latent, attention.spec, attention.spec.num_heads
    assert own is not None and spec.latent is not None
    low_size, query_size, _ = spec.latent.sizes(num_heads)
    low = _rows(rooms[1], qkv, low_size)
    on.project(attention.inputs, x_D, low)
    first, latent_W = low.tensor_split([low_size - spec.head_dim], dim=-1)
    queries = first
    if own.query is not None:
        normed = _rows(rooms[0], qkv, first.shape[-1])
        launch_add_norm(on, first, None, own.query_norm, normed, None)
        queries = _rows(rooms[2], qkv, query_size)
        on.dot(own.query, normed, queries)
    absorbed = qkv[..., spec.latent.num_rotated :][..., : spec.query_size]
    on.dot(own.key, queries, absorbed, num_heads=num_heads)
    norm = own.key_norm
    on.run(on.kernels.join_latents, queries, latent_W, norm.weight_D, norm.epsilon, qkv)


def launch_latent_values(on: Launcher, attention: Attention, heads: Tensor, room: Tensor) -> Tensor:
    """The heads' outputs [T, H V] in `room`, from their sums of latents [T, H C]."""
    assert attention.latent is not None
    values = _rows(room, heads, attention.spec.output_size)
    on.dot(attention.latent.value, heads, values, num_heads=attention.spec.num_heads)
    return values


def _rows(room: Tensor, like: Tensor, size: int) -> Tensor:
    """The beginning of flat memory as [T, size], with as many rows as others have."""
    shape = (*like.shape[:-1], size)
    return room[: like[..., 0].numel() * size].view(shape)
