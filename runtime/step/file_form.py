"""The form of a step from a model file and a plan: the same as `forms` builds from loaded weights,
with the bytes of the weights that each operation reads.

Neurons count in full, although modes "exact" and "predicted" read only some of them; the embedding
counts as one row."""

from dataclasses import replace

import numpy as np

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.artifacts.split_file import Split
from hotsplit.costs.budget import (
    head_bytes,
    is_cached,
    is_dense,
    layer_bytes,
    layer_tensors,
    stored_neuron_bytes,
)
from hotsplit.runtime.step.program import HOST, Block, LayerForm, Order, StepForm, gpu, in_line

NORMS = ("attn_norm", "attn_norm_2", "ffn_norm")


def file_form(model: ModelFile, split: Split | None, *, is_by_output: bool = False) -> StepForm:
    """The form of a step with this plan; None: everything on the host. `model` has only what is
    loaded, so no predictors if they are not used (Split.held). `is_by_output`: the feed-forward
    matrices are used as a stock file has them."""
    num_layers = model.spec.num_layers
    home = np.zeros(num_layers + 1, int)
    if split is not None and split.home:
        home = np.asarray(split.home)
    layers = [_layer(model, split, index, gpu(int(home[index]))) for index in range(num_layers)]
    if is_by_output:
        layers = [
            replace(form, weight_bytes={**form.weight_bytes, "all": stored_neuron_bytes(model, i)})
            for i, form in enumerate(layers)
        ]
    head, head_home = HOST, HOST
    if split is not None:
        head_home = gpu(int(home[-1]))
        head = head_home if split.head_on_gpu else HOST
    rows = [model.tensors[name] for name in ("token_embd.weight", "position_embd.weight")
            if name in model.tensors]  # fmt: skip
    return StepForm(
        layers=in_line(_with_bits(layers)),
        input_layer_offset=model.predictor.input_layer_offset if model.predictor else 0,
        embedding=head if model.is_tied else HOST,
        head=head,
        head_home=head_home,
        has_positions=len(rows) > 1,
        has_output_norm="output_norm.weight" in model.tensors,
        weight_bytes={
            "embedding": sum(entry.row_bytes for entry in rows),
            "head": model.tensors[model.head_name].num_bytes,
            "output_norm": head_bytes(model) - model.tensors[model.head_name].num_bytes,
        },
    )


def _layer(model: ModelFile, split: Split | None, index: int, home: str) -> LayerForm:
    names = layer_tensors(model, index).keys()
    order: Order = "parallel"
    if "ffn_norm.weight" in names:
        order = "post-norm" if model.spec.output_norm is None else "pre-norm"
    num_neurons = model.spec.layers[index].neurons.number
    num_hot = 0 if split is None else len(split.hot[index])
    blocks: tuple[tuple[Block, str], ...] = (("hot", home), ("cold", HOST))
    if num_hot in (0, num_neurons):
        blocks = (("all", home if num_hot else HOST),)
    is_on_gpu = split is not None and split.dense_on_gpu[index]
    packs_bits = split is not None and split.cache is not None and split.mode == "exact"
    return LayerForm(
        order=order,
        has_second_norm="attn_norm_2.weight" in names,
        has_predictor=model.predictor is not None,
        has_down_bias="ffn_down.bias" in names,
        device=home if is_on_gpu else HOST,
        attends_on_host=is_on_gpu and split is not None and split.kv_offload is not None,
        home=HOST if split is None else home,
        blocks=blocks,
        has_bits=packs_bits and is_cached(num_hot, num_neurons),
        weight_bytes=_part_bytes(model, index, num_hot),
    )


def _part_bytes(model: ModelFile, index: int, num_hot: int) -> dict[str, int]:
    """Bytes by part. Those of the parts that the layer's operations read sum to what plans count
    (budget.layer_bytes); "attention" contains other parts, and so does "all"."""
    sizes, num_neurons = layer_bytes(model, index), model.spec.most_neurons
    found = dict.fromkeys((*NORMS, "attention", "down_bias"), 0)
    for name, entry in layer_tensors(model, index).items():
        stem = name.partition(".")[0]
        part = {"ffn_down": "down_bias"}.get(stem, stem if stem in NORMS else "attention")
        found[part] += entry.num_bytes if is_dense(name) else 0
    of_output = layer_tensors(model, index)
    output = sum(e.num_bytes for n, e in of_output.items() if n.startswith("attn_output"))
    return found | {
        "qkv": found["attention"] - output - sizes.head_norms,
        "head_norms": sizes.head_norms,
        "attn_output": output,
        "predictor": sizes.predictor,
        "all": num_neurons * sizes.neuron,
        "hot": num_hot * sizes.neuron,
        "cold": (num_neurons - num_hot) * sizes.neuron,
    }


def _with_bits(layers: list[LayerForm]) -> list[LayerForm]:
    """Sets `copies_bits` for the last layer of each GPU that writes bits."""
    last = {form.home: index for index, form in enumerate(layers) if form.has_bits}
    return [replace(form, copies_bits=index in last.values()) for index, form in enumerate(layers)]
