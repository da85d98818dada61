"""The graph that most families share: an embedding, layers that are alike but for their windows,
their rotary embeddings and their experts, a norm and a head."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hotsplit.families.decoder_sizes import Sizes
from hotsplit.families.expert_keys import Experts
from hotsplit.families.key_reader import KeyReader
from hotsplit.families.windows import KEYS, Windows, windows_of_keys
from hotsplit.model.arrangements import Arrangement
from hotsplit.model.blocks import NormKind
from hotsplit.model.rope import Pairing
from hotsplit.model.spec import Activation, LayerSpec, Mixer, ModelSpec, Rotary


def decoder_spec(
    sizes: Sizes,
    rotary: Rotary | None,
    activation: Activation,
    options: Collection[str] = (),
    *,
    architecture: str = "llama",
    norm: NormKind = "rms",
    arrange: Callable[..., LayerSpec] = Arrangement.pre_norm,
    windows: Windows = (),
    rotates_L: Sequence[bool] = (),
    local: Rotary | None = None,
    mixers: Sequence[Mixer | None] = (),
    experts: Experts | None = None,
    is_gated: bool = True,
    has_head_norms: bool = False,
    head_norm: NormKind = "rms",
    attention: Mapping[str, Any] | None = None,
    output_norm: bool = True,
    **model: Any,
) -> ModelSpec:
    """A model of these sizes. options: names of optional tensors that it has, of which the biases
    are used. arrange: of the blocks of a layer, a method of Arrangement. windows: of each layer; ()
    for none. local: the rotary embedding of layers with one, if it is another. rotates_L: whether
    each layer rotates; () for all. mixers: of each layer, in place of attention; None: it attends.
    experts: in all layers but the first `num_dense`. attention: further fields of attention. model:
    further fields of the spec."""
    neurons = sizes.neurons(activation, options, is_gated=is_gated)
    mixture = None if experts is None else experts.mixture(activation, options)
    num_dense = sizes.num_layers if experts is None else experts.num_dense
    layers = []
    for index in range(sizes.num_layers):
        window = windows[index] if windows else None
        own = rotary if local is None or window is None else local
        block = sizes.attention(
            own if not rotates_L or rotates_L[index] else None,
            options,
            window=window,
            has_head_norms=has_head_norms,
            head_norm=head_norm,
        )
        layers.append(
            arrange(
                sizes.arrangement(norm),
                (mixers and mixers[index]) or replace(block, **(attention or {})),
                neurons if mixture is None or index < num_dense else mixture,
            )
        )
    spec = sizes.model(architecture, layers, output_norm=norm if output_norm else None)
    return replace(spec, **model)


def decoder(
    read: KeyReader,
    *,
    pairing: Pairing = "halves",
    norm: NormKind = "rms",
    is_partly_rotated: bool = False,
    windows: Windows = (),
    **own: Any,
) -> ModelSpec:
    """The model by its file's keys, with windows where the architecture has keys for them. `own`:
    as for `decoder_spec`."""
    sizes = read.sizes(norm, is_partly_rotated=is_partly_rotated)
    if not windows and KEYS[0] in read.graph.known_keys:
        windows = windows_of_keys(read, sizes.num_layers)
    usual = {
        "rotary": read.rotary(pairing, sizes.head_dim),
        "activation": read.activation(),
        "options": read.options(sizes.num_layers),
        "architecture": read.graph.name,
    }
    return decoder_spec(sizes, norm=norm, windows=windows, **{**usual, **own})
