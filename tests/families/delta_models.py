"""Small random models of which most layers have a state: gated delta nets, as in Qwen3-Next, 3.5
and 3.6, or as in Kimi Linear, short convolutions, as in LFM2, Mamba-2, as in Granite 4, or n-grams
beside delta nets, as in Qwen3.8-Flash-Next."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from models import _without_tensors, changed, make_model, required_shapes

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.families.decoder_sizes import Sizes
from hotsplit.families.expert_keys import Experts
from hotsplit.families.glm import SECOND_NORM
from hotsplit.families.latent_keys import attention_of
from hotsplit.families.plain_decoder import decoder_spec
from hotsplit.files.gguf_file import TensorEntry, array_entry
from hotsplit.model.arrangements import Arrangement, Mixture
from hotsplit.model.delta_net import DECAY, DeltaNet, KimiDelta
from hotsplit.model.indexer import Indexer
from hotsplit.model.latent import Latent
from hotsplit.model.mamba2 import Mamba2
from hotsplit.model.ngrams import NgramInputs, NgramRows
from hotsplit.model.operations import Recurrent
from hotsplit.model.rope import RopeScaling, Rotary
from hotsplit.model.short_conv import ShortConv
from hotsplit.model.spec import Attention, LayerSpec, ModelSpec, Neurons, Route
from hotsplit.model.streams import BeginStreams, StreamsToHead
from hotsplit.model.tensors import is_router

PERIOD = 4  # the last of so many layers attends
TINY = DeltaNet(num_key_heads=2, num_value_heads=4, key_head_dim=16, value_head_dim=8, epsilon=1e-6)
KIMI = KimiDelta(
    num_key_heads=2, num_value_heads=2, key_head_dim=32, value_head_dim=32, epsilon=1e-6
)
SMALL = Mamba2(num_heads=6, head_dim=16, num_groups=2, state_size=12, epsilon=1e-6)
FEW = Experts(
    route=Route(num_experts=6, num_used=2), num_neurons=32, num_shared=32, has_shared_gate=True
)


def spec_of(
    sizes: Sizes,
    delta: DeltaNet = TINY,
    *,
    experts: Experts | None = None,
    period: int = PERIOD,
    attends_L: Sequence[bool] = (),
    theta: float = 10000.0,
) -> ModelSpec:
    """A Qwen 3.5, or with experts its mixture; a quarter of each attention head rotates."""
    rotary = Rotary(theta=theta, pairing="halves", num_values=sizes.head_dim // 4)
    attends_L = attends_L or [(layer + 1) % period == 0 for layer in range(sizes.num_layers)]
    name = "qwen35" if experts is None else "qwen35moe"
    delta = replace(delta, epsilon=sizes.epsilon)
    return decoder_spec(
        sizes,
        rotary,
        "silu",
        architecture=name,
        arrange=partial(Arrangement.pre_norm, second=SECOND_NORM),
        mixers=[None if attends else delta for attends in attends_L],
        experts=experts,
        has_head_norms=True,
        attention={"is_gated": True},
    )


def with_recurrent(spec: ModelSpec, mixer: Recurrent = TINY, period: int = PERIOD) -> ModelSpec:
    """The model with this block instead of attention in all layers but every `period`-th, where
    heads have gates. No family has such a spec, so it cannot be in a file."""
    layers = []
    for index, layer in enumerate(changed(spec, Attention, is_gated=True).layers):
        if (index + 1) % period:
            blocks = (mixer if isinstance(block, Attention) else block for block in layer.blocks)
            layer = replace(layer, blocks=tuple(blocks))
        layers.append(layer)
    return spec.with_layers(layers)


def delta_model(
    sizes: Sizes,
    *,
    delta: DeltaNet = TINY,
    experts: Experts | None = None,
    period: int = PERIOD,
    **more,
) -> ModelFile:
    """A random model in memory; `more`: as for make_model. Its states fade over tens of tokens."""
    return faded(make_model(spec=spec_of(sizes, delta, experts=experts, period=period), **more))


def conv_spec(
    sizes: Sizes, *, experts: Experts | None = None, period: int = PERIOD, num_taps: int = 3
) -> ModelSpec:
    """An LFM2, or with experts its mixture."""
    conv = ShortConv(size=sizes.hidden_size, num_taps=num_taps)
    if experts is not None:
        route = replace(experts.route, gating="sigmoid", has_choice_bias=True)
        experts = replace(experts, route=route, num_shared=0, has_shared_gate=False, num_dense=1)
    return decoder_spec(
        sizes,
        Rotary(theta=10000.0, pairing="halves"),
        "silu",
        architecture="lfm2" if experts is None else "lfm2moe",
        mixers=[None if (i + 1) % period == 0 else conv for i in range(sizes.num_layers)],
        experts=experts,
        has_head_norms=True,
    )


def conv_model(
    sizes: Sizes, *, experts: Experts | None = None, period: int = PERIOD, num_taps: int = 3, **more
) -> ModelFile:
    """A random model in memory; `more`: as for make_model."""
    spec = conv_spec(sizes, experts=experts, period=period, num_taps=num_taps)
    return make_model(spec=spec, **more)


def mamba_model(
    sizes: Sizes,
    *,
    mamba: Mamba2 = SMALL,
    experts: Experts | None = None,
    period: int = PERIOD,
    **more,
) -> ModelFile:
    """A random Granite 4 in memory, or with experts its mixture, whose states fade over tens of
    tokens; `more`: as for make_model."""
    if experts is not None:
        experts = replace(experts, has_shared_gate=False)
    spec = decoder_spec(
        sizes,
        Rotary(theta=10000.0, pairing="adjacent"),
        "silu",
        architecture="granitehybrid",
        mixers=[
            None if (layer + 1) % period == 0 else replace(mamba, epsilon=sizes.epsilon)
            for layer in range(sizes.num_layers)
        ],
        experts=experts,
    )
    return faded(make_model(spec=spec, **more))


def single_model(
    sizes: Sizes, *, experts: Experts | None = None, latent_size: int | None = None, **more
) -> ModelFile:
    """A random Nemotron-H in memory, or with experts a Nemotron 3: layers of one block each.
    `latent_size`: values of what experts read; None: the hidden state."""
    neurons: Neurons | Mixture = sizes.neurons("relu2", is_gated=False)
    if experts is not None:
        mixture = replace(experts, is_gated=False, has_shared_gate=False).mixture("relu2")
        neurons = replace(mixture, latent_size=latent_size)
    mamba = replace(SMALL, epsilon=sizes.epsilon)
    order = mamba, neurons, sizes.attention(None), mamba, neurons
    arrangement, count = sizes.arrangement(), sizes.num_layers
    layers = [arrangement.single(order[layer % len(order)]) for layer in range(count)]
    name = "nemotron_h" if experts is None else "nemotron_h_moe"
    return faded(make_model(spec=sizes.model(name, layers), **more))


def both_model(sizes: Sizes, **more) -> ModelFile:
    """A random Falcon-H1 in memory: attention and Mamba-2 side by side."""
    mamba = replace(SMALL, epsilon=None, writes="ssm_out")

    def arrange(arrangement: Arrangement, attention: Attention, neurons: Neurons) -> LayerSpec:
        return arrangement.pre_norm((attention, mamba), neurons)

    rotary = Rotary(theta=10000.0, pairing="halves")
    spec = decoder_spec(sizes, rotary, "silu", architecture="falcon-h1", arrange=arrange)
    return faded(make_model(spec=spec, **more))


def kimi_model(
    sizes: Sizes, *, experts: Experts | None = None, period: int = PERIOD, **more
) -> ModelFile:
    """A random Kimi Linear in memory, whose states fade over tens of tokens, with experts in all
    layers; `more`: as for make_model."""
    experts = replace(experts or FEW, has_shared_gate=False)
    route = replace(experts.route, gating="sigmoid", has_choice_bias=True)
    latent = Latent(
        query_rank=None, size=32, num_plain=32, num_rotated=8, value_size=16, epsilon=sizes.epsilon
    )
    heads = sizes.num_heads
    sizes = replace(sizes, num_kv_heads=1, head_dim=latent.width)
    kimi = replace(KIMI, num_key_heads=heads, num_value_heads=heads, epsilon=sizes.epsilon)
    spec = decoder_spec(
        sizes,
        None,
        "silu",
        architecture="kimi-linear",
        mixers=[None if (i + 1) % period == 0 else kimi for i in range(sizes.num_layers)],
        experts=replace(experts, route=route),
        attention=attention_of(latent, RopeScaling()),
    )
    return faded(make_model(spec=spec, **more))


def flash_model(
    sizes: Sizes, *, experts: Experts | None = None, period: int = PERIOD, **more
) -> ModelFile:
    """A random Qwen3.8-Flash-Next in memory, whose states fade over tens of tokens, with experts in
    all layers, three streams, and n-grams of up to three tokens in the first layer; `more`: as for
    make_model. Attention by its indexer is to all tokens."""
    numbers = {"num_streams": 3, "rank": 32, "epsilon": sizes.epsilon}
    rows = NgramRows(
        length=3,
        per_length=2,
        width=32,
        num_rows=420,
        multipliers=(0x5DEECE66D, 0x2545F4914F, 0x1B873593CD),
        sizes=(101, 103, 107, 109),
        end_token=2,
    )
    indexer = Indexer(num_heads=2, head_dim=32, budget=-(-sizes.context_length // 4) * 4, ratio=4)
    delta = replace(TINY, epsilon=sizes.epsilon, has_sigmoid_gates=True)
    spec = decoder_spec(
        sizes,
        Rotary(theta=10000.0, pairing="halves", num_values=sizes.head_dim // 4),
        "silu",
        architecture="qwen4exp",
        arrange=partial(Arrangement.streams, num_streams=3, rank=32),
        mixers=[None if (i + 1) % period == 0 else delta for i in range(sizes.num_layers)],
        experts=experts or FEW,
        has_head_norms=True,
        attention={"is_gated": True, "indexer": indexer},
        output_norm=False,
        first=(rows, BeginStreams(num_streams=3)),
        last=(StreamsToHead(**numbers),),
    )
    inputs = NgramInputs(
        num_streams=3,
        hidden_size=sizes.hidden_size,
        total=rows.total,
        num_taps=3,
        distance=rows.length,
        epsilon=sizes.epsilon,
    )
    first, *others = spec.layers
    spec = spec.with_layers([replace(first, blocks=(inputs, *first.blocks)), *others])
    return faded(make_model(spec=spec, **more))


def faded(model: ModelFile) -> ModelFile:
    """The model with decays that are below zero and small."""
    decays = {
        name: array_entry(-0.1 * np.abs(entry.read()), "f32")
        for name, entry in model.tensors.items()
        if name.endswith(DECAY)
    }
    return replace(model, tensors=model.tensors | decays)


RECURRENT = {
    "delta nets": delta_model,
    "Kimi delta attention": kimi_model,
    "short convolutions": conv_model,
    "Mamba-2": mamba_model,
}
# Those and what no GPU computes.
STATEFUL = RECURRENT | {"n-grams": flash_model}


def without_weights(spec: ModelSpec, kind: str = "q4_k") -> ModelFile:
    """A model of this shape that cannot be read, every matrix in this type."""

    def read(start: int, stop: int) -> np.ndarray:
        raise AssertionError("this model has no weights to read")

    def kind_of(name: str, dims: tuple[int, ...]) -> str:
        return "f32" if len(dims) == 1 or dims[-1] % 256 or is_router(name) else kind

    model = _without_tensors(spec, str(spec), Path("shape-only.gguf"), 0)
    shapes = required_shapes(model)
    tensors = {
        name: TensorEntry(shape=dims, kind=kind_of(name, dims), read_rows=read)
        for name, dims in shapes.items()
    }
    return replace(model, tensors=tensors)
