"""The form of a step from a model file and a plan, with the bytes of the weights that each
operation reads.

Neurons count in full, although modes "exact" and "predicted" read only some of them; the embedding
counts as one row."""

from collections.abc import Collection

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.artifacts.split_file import Split
from hotsplit.costs.cache_bytes import is_cached
from hotsplit.costs.part_bytes import (
    block_read,
    head_bytes,
    is_dense,
    layer_bytes,
    outside_of,
    placed_units,
    stored_neuron_bytes,
)
from hotsplit.runtime.step.forms import PlannedSides, step_form
from hotsplit.runtime.step.program import StepForm


def file_form(model: ModelFile, split: Split | None, by_output: Collection[int] = ()) -> StepForm:
    """The form of a step with this plan; None: everything on the host. `model` has only what is
    loaded, so no predictors if they are not used (Split.held). `by_output`: the layers whose
    feed-forward matrices are used as a stock file has them."""
    num_hot = [0] * model.spec.num_layers if split is None else [len(ids) for ids in split.hot]
    rows = [
        model.tensors[name]
        for name in ("token_embd.weight", "position_embd.weight")
        if name in model.tensors
    ]
    head = model.tensors[model.head_name].num_bytes
    parts_L = [_part_bytes(model, index, hot) for index, hot in enumerate(num_hot)]
    for index in by_output:
        parts_L[index]["all"] = stored_neuron_bytes(model, index)
    return step_form(
        model.spec,
        _sides(model, split, num_hot),
        layer_bytes=parts_L,
        outer_bytes={
            "embedding": sum(entry.row_bytes for entry in rows),
            "head": head,
            "output_norm": head_bytes(model) - head,
            **{block.part(): block_read(model, block) for block in outside_of(model)},
        },
    )


def _sides(model: ModelFile, split: Split | None, num_hot: list[int]) -> PlannedSides:
    layers = model.spec.layers
    divided = [is_cached(hot, x.neurons.num_units) for hot, x in zip(num_hot, layers, strict=True)]
    if split is None:
        return PlannedSides(roles_L=[("cold",)] * len(layers), is_tied=model.is_tied)
    packs_bits = split.cache is not None
    return PlannedSides(
        roles_L=[
            ("hot", "cold") if is_divided else ("hot",) if hot else ("cold",)
            for hot, is_divided in zip(num_hot, divided, strict=True)
        ],
        homes=split.home or (0,) * (len(layers) + 1),
        dense_on_gpu=split.dense_on_gpu,
        head_on_gpu=split.head_on_gpu,
        is_cache_on_host=split.kv_offload is not None,
        is_tied=model.is_tied,
        has_bits_L=[
            packs_bits and is_divided and layer.predict is None
            for layer, is_divided in zip(layers, divided, strict=True)
        ],
    )


# "ffn_down_exps" is the scale of each expert; its matrices are none of these parts.
_PARTS = {
    "ffn_down": "down_bias",
    "ffn_gate_inp": "router",
    "exp_probs_b": "router",
    "ffn_down_exps": "router",
}


def _part_bytes(model: ModelFile, index: int, num_hot: int) -> dict[str, int]:
    """Bytes by part. Those of the parts that the layer's operations read sum to what plans count
    (part_bytes.layer_bytes); "attention" contains other parts, and so does "all"."""
    sizes, spec = layer_bytes(model, index), model.spec.layers[index]
    own = {
        name.partition(".")[0]: block.part()
        for block in spec.position_wise
        for name in block.shapes(model.spec.hidden_size)
    }
    parts = _PARTS | own
    found = dict.fromkeys((*spec.norms, "attention", "shared", *parts.values()), 0)
    of_layer = model.layer_tensors[index]
    for name, entry in of_layer.items():
        stem = name.partition(".")[0]
        part = parts.get(stem, stem if stem in spec.norms else "attention")
        part = "shared" if "_shexp" in stem else part
        found[part] += entry.num_bytes if is_dense(name) else 0
    output = sum(e.num_bytes for n, e in of_layer.items() if n.startswith("attn_output"))
    num_units, unit = placed_units(model, index)
    return found | {
        "qkv": found["attention"] - output - sizes.head_norms,
        "head_norms": sizes.head_norms,
        "attn_output": output,
        "predictor": sizes.predictor,
        "all": num_units * unit,
        "hot": num_hot * unit,
        "cold": (num_units - num_hot) * unit,
    }
