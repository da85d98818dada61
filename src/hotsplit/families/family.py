"""A family: functions from a checkpoint's config, and from a GGUF's keys, to a model's spec."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hotsplit.files.gguf_file import TensorEntry, Value
from hotsplit.model.spec import Activation, ModelSpec

if TYPE_CHECKING:  # their readers refuse what they read with the names of all families
    from hotsplit.families.blueprint import Blueprint
    from hotsplit.families.config_reader import ConfigReader
    from hotsplit.families.key_reader import KeyReader

Tensors = dict[str, TensorEntry]
PROJECTION_BIASES = ("attn_q.bias", "attn_k.bias", "attn_v.bias", "attn_output.bias")
GATED_BIASES = ("ffn_gate.bias", "ffn_up.bias", "ffn_down.bias")


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A graph by llama.cpp's name for it, or PowerInfer's. `options`: the tensors that all layers
    of a model have or none. `stock_activations` and `stock_options`: what llama.cpp's graph of this
    name computes and loads; empty if it has none; `not_in_stock` says what else of a spec it would
    compute otherwise. `keys` writes what `of_keys` reads beyond the
    keys that all architectures have (spec_keys); `known_keys` are the names of these. `apart` takes
    apart what files of llama.cpp's converter have in one tensor, and `joined` makes one of what its graph
    wants in one. `fuses_attention`: its queries, keys and values are one matrix; what others have in one is
    taken apart before `of_keys`."""

    name: str
    of_keys: Callable[["KeyReader"], ModelSpec]
    keys: Callable[[ModelSpec], Mapping[str, Value]] = lambda spec: {}
    known_keys: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    fuses_attention: bool = False
    stock_activations: tuple[Activation, ...] = ()
    stock_options: tuple[str, ...] = ()
    not_in_stock: Callable[[ModelSpec], str | None] = lambda spec: None
    apart: Callable[[ModelSpec, Tensors], Tensors] = lambda spec, tensors: tensors
    joined: Callable[[ModelSpec, Tensors], Tensors] = lambda spec, tensors: tensors


@dataclass(frozen=True, kw_only=True)
class Family:
    """A class of checkpoints. `title`: the name of its models for people. `defaults` are those of
    transformers' config class for the keys that `blueprint` reads and that may be missing; a key that is
    null in the file stays null. A missing key that is not listed here is refused, unless transformers'
    default for it is null or the reader has its own (as for rope_theta). `model_types`: what a config
    says it is; () for a class that transformers does not have, whose configs say various things.
    `read_keys`: of the keys that other families refuse (CONFIG_KEYS), those that this one reads.
    `text_key`: the key of the config of the text model, if the checkpoint has others beside it."""

    title: str
    blueprint: Callable[["ConfigReader"], "Blueprint"]
    defaults: Mapping[str, object] = field(default_factory=dict)
    model_types: tuple[str, ...] = ()
    read_keys: tuple[str, ...] = ()
    text_key: str = ""
