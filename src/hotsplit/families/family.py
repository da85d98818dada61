"""A family: a table of what a checkpoint's config says, from which its keys are made; and a graph,
whose keys a model's spec is read from. A GGUF enters by its keys."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import gguf

from hotsplit.families.blueprint import NameOf, Sources
from hotsplit.families.rope_scalings import Rope
from hotsplit.files.gguf_file import TensorEntry, Value
from hotsplit.model.draft_block import with_draft_block
from hotsplit.model.neurons import ACTIVATIONS
from hotsplit.model.spec import Activation, ModelSpec

if TYPE_CHECKING:  # their readers refuse what they read with the names of all families
    from hotsplit.families.config_reader import ConfigReader
    from hotsplit.families.key_reader import KeyReader

Tensors = dict[str, TensorEntry]
ATTN_BIASES = ("attn_q.bias", "attn_k.bias", "attn_v.bias", "attn_output.bias")
QKV_BIASES = ATTN_BIASES[:3]
GATED_BIASES = ("ffn_gate.bias", "ffn_up.bias", "ffn_down.bias")
UNGATED_BIASES = GATED_BIASES[1:]
# transformers' names, and a model file's.
GATED: Mapping[str, Activation] = {n: own for own, each in ACTIVATIONS.items() for n in each.names}
UNGATED = {name: own for name, own in GATED.items() if not ACTIVATIONS[own].needs_gates}
# Keys of a GGUF, and their names in the configs of Llama's relatives.
FIELDS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "hotsplit.ffn.activation": "hidden_act",
}


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A graph by llama.cpp's name for it, or PowerInfer's. `of_keys` reads the spec from a file's
    keys and the names of its tensors; `known_keys` are those that it reads beyond the keys of all
    architectures (key_reader). `options`: the tensors that all layers of a model have or none.
    `stock_activations` and `stock_options`: what llama.cpp's graph of this name computes and loads;
    () if it has none; `not_in_stock` says what else of a spec it would compute otherwise.
    `apart` takes apart what files of llama.cpp's converter have in one tensor, and `joined` makes
    one of what its graph wants in one. `runs_draft_block`: where its files have one, it is used;
    `with_draft` adds it to a spec.
    `is_assistant`: its files are draft models, which run beside a main model alone.
    `fuses_attention`: its queries, keys and values are one
    matrix; what others have in one is taken apart before `of_keys`. `usual_keys`: a file's keys as
    those of the spec's own architecture, if that is another."""

    name: str
    of_keys: Callable[["KeyReader"], ModelSpec]
    known_keys: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    fuses_attention: bool = False
    runs_draft_block: bool = True
    with_draft: Callable[[ModelSpec], ModelSpec] = with_draft_block
    is_assistant: bool = False
    stock_activations: tuple[Activation, ...] = ("silu",)
    stock_options: tuple[str, ...] = ()
    not_in_stock: Callable[[ModelSpec], str | None] = lambda spec: None
    apart: Callable[[ModelSpec, Tensors], Tensors] = lambda spec, tensors: tensors
    joined: Callable[[ModelSpec, Tensors], Tensors] = lambda spec, tensors: tensors
    usual_keys: Callable[[ModelSpec, dict[str, Value]], dict[str, Value]] = lambda spec, keys: keys


@dataclass(frozen=True, kw_only=True)
class Family:
    """The classes of checkpoints with one of `classes` first in `architectures` of config.json.

    title: the name of its models for people.
    graph: the architecture of its model files, unless `keys` has another one.
    names: of llama.cpp's maps of names, that for its tensors, if it is not its graph's, or a map of
        its own.
    defaults: transformers' config class's for the keys that are read and that may be missing; a key
        that is null in the file stays null. A missing key that is not listed here is refused,
        unless transformers' default is null or the reader has its own (as for rope_theta).
    model_types: what a config says it is, if not the graph's name; () for a class that transformers
        does not have, whose configs say various things.
    fields: the names of FIELDS that are others in its configs.
    plain: keys of the config that change the graph, with the only value that runs.
    flags: optional tensors of all layers, by the flag of the config that says they are there.
    activations: transformers' names of activations that it may have, and a model file's.
    rope: how the config states rotary embeddings.
    read_keys: of the keys that other families refuse (CONFIG_KEYS), those that this one reads.
    text_key: the key of the config of the text model, if the checkpoint has others beside it.
    outer_keys: keys beside that one that are read as if they were the text model's.
    by_type: for a config that may be one of several families', these by its `model_type`.

    What is peculiar: `derived` gives values of the config that follow from others, `keys` further
    keys of the GGUF, `tensors` optional ones, by name within all layers or in one, as HEAD_BIAS
    or a table, with the shapes that keys lack, and `sources` says where a checkpoint's tensors are
    if they are not named and ordered as a model file's."""

    classes: tuple[str, ...] = ()
    title: str
    graph: str = ""
    names: gguf.MODEL_ARCH | NameOf | None = None
    defaults: Mapping[str, object] = field(default_factory=dict)
    model_types: tuple[str, ...] | None = None
    fields: Mapping[str, str] = field(default_factory=dict)
    plain: Mapping[str, object] = field(default_factory=dict)
    flags: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    activations: Mapping[str, Activation] = field(default_factory=lambda: GATED)
    rope: Rope | None = Rope()
    read_keys: tuple[str, ...] = ()
    text_key: str = ""
    outer_keys: tuple[str, ...] = ("tie_word_embeddings",)
    by_type: Mapping[str, "Family"] = field(default_factory=dict)
    derived: Callable[["ConfigReader"], Mapping[str, object]] = lambda read: {}
    keys: Callable[["ConfigReader"], Mapping[str, Value]] = lambda read: {}
    tensors: Callable[["ConfigReader"], Mapping[str, tuple[int, ...]]] = lambda read: {}
    sources: Callable[[ModelSpec, "ConfigReader"], Sources] = lambda spec, read: Sources()

    def with_images(self, name: str, model_type: str) -> "Family":
        """The family of checkpoints of class `name`, whose text model this is."""
        types = (model_type,)
        return replace(self, classes=(name,), model_types=types, text_key="text_config")
