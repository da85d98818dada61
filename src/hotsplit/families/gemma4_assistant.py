"""Gemma 4's assistants (model/assistant.py): the layers of a Gemma 4 that have queries alone. Those
of the E-models have a head of centroids beside, which chooses the tokens whose logits are computed;
guesses come from the whole head instead, as in llama.cpp."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import gguf
import numpy as np

from hotsplit.errors import HotsplitError
from hotsplit.families.blueprint import NameOf, Sources
from hotsplit.families.config_reader import ConfigReader
from hotsplit.families.gemma4 import GEMMA4, spec_of
from hotsplit.families.gemma4 import GRAPHS as MAIN
from hotsplit.families.gemma4 import derived as derived_of_main
from hotsplit.families.gemma4 import keys as keys_of_main
from hotsplit.families.key_reader import DRAFT_LAYERS, KeyReader
from hotsplit.families.shared_keys import SHARED, Readers
from hotsplit.files.gguf_file import Value
from hotsplit.model.assistant import POST, PRE, SOURCES, AssistantInput, AssistantOutput
from hotsplit.model.spec import ModelSpec

MAIN_SIZE, CONFIG_SIZE = "embedding_length_out", "backbone_hidden_size"
# Keys of the text model's config that no assistant may have.
_PLAIN = {"enable_moe_block": False, "use_double_wide_mlp": False, "hidden_size_per_layer_input": 0}


def derived(read: ConfigReader) -> dict[str, object]:
    """As if no layer read others' keys and values: those that all read are no layer's."""
    for key, value in _PLAIN.items():
        read.refuse(key, value)
    return derived_of_main(read) | {"num_kv_shared_layers": 0}


def keys(read: ConfigReader) -> dict[str, Value]:
    count = np.uint32(read.count("num_hidden_layers"))
    own = {MAIN_SIZE: np.uint32(read.count(CONFIG_SIZE)), DRAFT_LAYERS: count, SHARED: count}
    return keys_of_main(read) | own


def _sources_of_main(read: KeyReader, is_local_L: Sequence[bool]) -> Readers:
    return [SOURCES[is_local] for is_local in is_local_L]


def of_keys(read: KeyReader) -> ModelSpec:
    """Queries see the window of the token after the last one that has keys."""
    spec, size = spec_of(read, _sources_of_main), read.count(MAIN_SIZE)
    windows = [attention.window for attention in spec.attentions]
    if 1 in windows:
        raise HotsplitError(f"{read.path}: a window of one token, in which no token has keys")
    layers = [
        layer.with_attention(window=window and window - 1)
        for layer, window in zip(spec.layers, windows, strict=True)
    ]
    norm = spec.output_norm
    assert norm is not None
    return replace(
        spec.with_layers(layers),
        first=(AssistantInput(main_size=size),),
        last=(AssistantOutput(norm=norm, main_size=size),),
        output_norm=None,
        logit_cap=None,  # transformers caps none of an assistant's
    )


def _names(name_of: NameOf) -> NameOf:
    outer = {"pre_projection": PRE, "post_projection": POST}

    def name(source: str) -> str | None:
        stem, _, part = source.rpartition(".")
        return f"{outer[stem]}.{part}" if stem in outer else name_of(source)

    return name


def _sources(spec: ModelSpec, read: ConfigReader) -> Sources:
    main = GEMMA4.sources(spec, read)
    return replace(
        main,
        renamed=lambda name_of: _names(main.renamed(name_of)),
        ignored_prefixes=("masked_embedding.",),
    )


def _tensors(read: ConfigReader) -> Mapping[str, tuple[int, ...]]:
    return {name: shape for name, shape in GEMMA4.tensors(read).items() if "attn_v" not in name}


ASSISTANT = replace(
    GEMMA4,
    classes=("Gemma4AssistantForCausalLM",),
    graph="gemma4-assistant",
    names=gguf.MODEL_ARCH.GEMMA4,
    model_types=("gemma4_assistant",),
    text_key="text_config",
    outer_keys=("tie_word_embeddings", CONFIG_SIZE),
    derived=derived,
    keys=keys,
    tensors=_tensors,
    sources=_sources,
)
FAMILIES = (ASSISTANT,)
GRAPHS = (
    replace(
        MAIN[0],
        name="gemma4-assistant",
        of_keys=of_keys,
        is_assistant=True,
        known_keys=(*MAIN[0].known_keys, MAIN_SIZE, DRAFT_LAYERS),
        not_in_stock=lambda spec: None,
    ),
)
