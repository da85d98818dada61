"""The tensors of a draft block: in a checkpoint, as those of a layer after the last one, and
without those that repeat the model's."""

from collections.abc import Mapping
from dataclasses import replace

import torch

from hotsplit.convert.checkpoint import Checkpoint
from hotsplit.families.draft_names import COPIES, as_last_layer
from hotsplit.files.gguf_file import TensorEntry, is_equal
from hotsplit.model.draft_block import OWN
from hotsplit.model.spec import ModelSpec


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


def without_copies(spec: ModelSpec, tensors: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """A file's tensors without those of its draft block that repeat the model's embedding or
    head."""
    prefix, embedding = f"blk.{spec.num_layers}.", tensors.get("token_embd.weight")
    found = dict(tensors)
    for name, shared in OWN.items():
        own, same = tensors.get(f"{prefix}{name}"), tensors.get(shared, embedding)
        if spec.draft is not None and own is not None and same is not None and is_equal(own, same):
            del found[f"{prefix}{name}"]
    return found
