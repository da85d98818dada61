"""The names of a draft block's tensors in checkpoints: those of a layer after the last one (GLM,
DeepSeek), or of `mtp` beside the layers (Qwen)."""

from collections.abc import Collection

from hotsplit.families.blueprint import NameOf
from hotsplit.model.draft_block import JOIN, OF_EMBEDDING, OF_HIDDEN, OUTPUT_NORM

# What begins names of `mtp`, and those of the layer.
_OF_MTP = {
    "fc.": "eh_proj.",
    "pre_fc_norm_embedding.": "enorm.",
    "pre_fc_norm_hidden.": "hnorm.",
    "norm.": "shared_head.norm.",
    "layers.0.": "",
    # Nemotron 3 has two layers of a block each, attention and experts.
    "layers.1.norm.": "second_norm.",
    "layers.1.mixer.": "mixer.",
    "layers.1.final_layernorm.": "final_layernorm.",
}
_NAMES = {
    "eh_proj": JOIN,
    "enorm": OF_EMBEDDING,
    "hnorm": OF_HIDDEN,
    "shared_head.norm": OUTPUT_NORM,
    "final_layernorm": OUTPUT_NORM,  # Hunyuan 3, Nemotron 3
    "second_norm": "post_attention_norm",
    "embed_tokens": "nextn.embed_tokens",
    "shared_head.head": "nextn.shared_head_head",
}
# Tensors that repeat one of the model in most checkpoints, by name in the layer, and that one.
COPIES = {
    "embed_tokens.weight": "model.embed_tokens.weight",
    "shared_head.head.weight": "lm_head.weight",
}


def as_last_layer(source: str, num_layers: int) -> str:
    """The name of a tensor of `mtp` as one of the layer after the last; another name as it is."""
    inner = source.removeprefix("model.").removeprefix("mtp.")
    if source in (f"mtp.{inner}", f"model.mtp.{inner}"):
        for theirs, own in _OF_MTP.items():
            if inner.startswith(theirs):
                return f"model.layers.{num_layers}.{own}{inner.removeprefix(theirs)}"
    return source


def has_draft_block(sources: Collection[str], num_layers: int) -> bool:
    """True if a checkpoint with these tensors has one draft block; further ones are not run."""
    own = {as_last_layer(source, num_layers) for source in sources}
    others = ("mtp.layers.1.", "model.mtp.layers.1.", f"model.layers.{num_layers + 1}.")
    is_only = not any(source.startswith(others) for source in own)
    return is_only and f"model.layers.{num_layers}.eh_proj.weight" in own


def with_draft_names(name_of: NameOf, num_layers: int) -> NameOf:
    """The map of names, with those of the draft block."""
    prefix = f"model.layers.{num_layers}."

    def name(source: str) -> str | None:
        stem, _, part = source.removeprefix(prefix).rpartition(".")
        if source.startswith(prefix) and stem in _NAMES:
            return f"blk.{num_layers}.{_NAMES[stem]}.{part}"
        return name_of(source)

    return name
