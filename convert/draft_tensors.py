"""The tensors of a draft block in a checkpoint, as those of a layer after the last one."""

from dataclasses import replace

import torch

from hotsplit.convert.checkpoint import Checkpoint
from hotsplit.families.draft_names import COPIES, as_last_layer


def with_draft_block(checkpoint: Checkpoint, num_layers: int) -> Checkpoint:
    """The checkpoint with the names of that layer, and without copies of the embedding and the
    head."""
    tensors = {as_last_layer(n, num_layers): tensor for n, tensor in checkpoint.tensors.items()}
    found = replace(checkpoint, tensors=tensors)
    for inner, name in COPIES.items():
        copy = f"model.layers.{num_layers}.{inner}"
        if copy in tensors and name in tensors and torch.equal(found.read(copy), found.read(name)):
            del tensors[copy]
    return found
