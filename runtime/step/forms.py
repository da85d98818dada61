"""Builds the form of a step from loaded weights: all on the host, or placed on GPUs and the
host."""

from collections.abc import Sequence

from hotsplit.runtime.model.layers import Layer, Weights
from hotsplit.runtime.model.placement import Placement
from hotsplit.runtime.step.program import HOST, LayerForm, Order, StepForm, gpu, in_line


def order_of(layer: Layer) -> Order:
    if layer.ffn_norm is None:
        return "parallel"
    return "post-norm" if layer.is_post_norm else "pre-norm"


def layer_form(
    layer: Layer, *, device: str = HOST, home: str = HOST, attends_on_host: bool = False,
    has_bits: bool = False, copies_bits: bool = False,
) -> LayerForm:  # fmt: skip
    """The form of a layer with attention on `device`, hot neurons on `home` and cold ones on the
    host."""
    places = {"hot": home, "cold": HOST}
    blocks = layer.ffn.blocks
    is_divided = len(blocks) > 1
    return LayerForm(
        order=order_of(layer),
        has_second_norm=layer.attn_norm_2 is not None,
        has_predictor=layer.ffn.mode == "predicted",
        has_down_bias=layer.ffn.down_bias_D is not None,
        device=device,
        attends_on_host=attends_on_host,
        home=home,
        blocks=tuple((b.role if is_divided else "all", places[b.role]) for b in blocks),
        has_bits=has_bits,
        copies_bits=copies_bits,
    )


def host_form(weights: Weights, input_layer_offset: int) -> StepForm:
    """The form of a step entirely on the host."""
    layers = [layer_form(layer) for layer in weights.layers]
    return StepForm(
        layers=tuple(layers),
        input_layer_offset=input_layer_offset,
        has_positions=weights.positions is not None,
        has_output_norm=weights.output_norm is not None,
    )


def placed_form(
    weights: Weights,
    placement: Placement,
    input_layer_offset: int,
    bits: Sequence[tuple[bool, bool]],
) -> StepForm:
    """The form of a hybrid step. `bits`, for each layer: whether its GPU writes the bits of its hot
    neurons, and whether that GPU's bits of all layers are copied to the host after this one."""
    layers: list[LayerForm] = []
    for index, layer in enumerate(weights.layers):
        home = gpu(placement.numbers[index])
        device = home if placement.dense_on_gpu[index] else HOST
        has_bits, copies_bits = bits[index]
        form = layer_form(
            layer, device=device, home=home, has_bits=has_bits, copies_bits=copies_bits,
            attends_on_host=placement.is_cache_on_host and device != HOST,
        )  # fmt: skip
        layers.append(form)
    embedding, head_home = HOST, gpu(placement.numbers[-1])
    # Tied weights are on the head's device.
    if placement.head_on_gpu and weights.embedding is weights.head.weight:
        embedding = head_home
    return StepForm(
        layers=in_line(layers),
        input_layer_offset=input_layer_offset,
        embedding=embedding,
        head=head_home if placement.head_on_gpu else HOST,
        head_home=head_home,
        has_positions=weights.positions is not None,
        has_output_norm=weights.output_norm is not None,
    )
