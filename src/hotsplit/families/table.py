"""The table of families. docs/adding-a-family.md says how to add one."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from hotsplit.errors import HotsplitError
from hotsplit.families import (
    arcee,
    cohere,
    delta_nets,
    ernie,
    exaone,
    falcon,
    gemma,
    gemma3n,
    gemma4,
    glm,
    glm_dense,
    gpt_oss,
    granite,
    llama,
    mistral,
    mixtures,
    nemotron,
    olmo,
    opt,
    phi,
    qwen,
    smallthinker,
    smollm,
    starcoder,
)
from hotsplit.families.blueprint import Blueprint
from hotsplit.families.config_reader import ConfigReader
from hotsplit.families.family import Architecture, Family
from hotsplit.families.text_models import text_model
from hotsplit.files.typed import shown
from hotsplit.model.unsupported import CONFIG_KEYS, elsewhere_as_gguf, why_not_run

# By the first of `architectures` in config.json.
FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": llama.LLAMA,
    "SparseLlamaForCausalLM": llama.PROSPARSE,
    "ArceeForCausalLM": arcee.ARCEE,
    "MistralForCausalLM": mistral.MISTRAL,
    "MinistralForCausalLM": mistral.MINISTRAL,
    "Ministral3ForCausalLM": mistral.MINISTRAL3,
    "Mistral3ForConditionalGeneration": mistral.MISTRAL3,
    "BambooForCausalLM": mistral.BAMBOO,
    "Qwen2ForCausalLM": qwen.QWEN2,
    "Qwen3ForCausalLM": qwen.QWEN3,
    "OPTForCausalLM": opt.OPT,
    "FalconForCausalLM": falcon.FALCON,
    "RWForCausalLM": falcon.FALCON,
    "Phi3ForCausalLM": phi.PHI3,
    "NemotronForCausalLM": nemotron.NEMOTRON,
    "Starcoder2ForCausalLM": starcoder.STARCODER2,
    "CohereForCausalLM": cohere.COMMAND_R,
    "Cohere2ForCausalLM": cohere.COHERE2,
    "Gemma2ForCausalLM": gemma.GEMMA2,
    "Gemma3ForCausalLM": gemma.GEMMA3,
    "Gemma3nForCausalLM": gemma3n.GEMMA3N,
    "Gemma3nForConditionalGeneration": gemma3n.GEMMA3N_WITH_IMAGES,
    "Gemma4ForCausalLM": gemma4.GEMMA4,
    "Gemma4ForConditionalGeneration": gemma4.GEMMA4_WITH_IMAGES,
    "SmolLM3ForCausalLM": smollm.SMOLLM3,
    "MixtralForCausalLM": mixtures.MIXTRAL,
    "Olmo2ForCausalLM": olmo.OLMO2,
    "Olmo3ForCausalLM": olmo.OLMO3,
    "Exaone4ForCausalLM": exaone.EXAONE4,
    "Ernie4_5ForCausalLM": ernie.ERNIE4_5,
    "OlmoeForCausalLM": mixtures.OLMOE,
    "Qwen2MoeForCausalLM": mixtures.QWEN2,
    "Qwen3MoeForCausalLM": mixtures.QWEN3,
    "GraniteForCausalLM": granite.GRANITE,
    "GraniteMoeForCausalLM": granite.GRANITE_MOE,
    "GraniteMoeSharedForCausalLM": granite.GRANITE_MOE,
    "GraniteMoeHybridForCausalLM": granite.GRANITE_OF_HYBRIDS,
    "Glm4MoeForCausalLM": glm.GLM4,
    "Glm4ForCausalLM": glm_dense.GLM4,
    "GlmForCausalLM": glm_dense.GLM,
    "GptOssForCausalLM": gpt_oss.GPT_OSS,
    "SmallThinkerForCausalLM": smallthinker.SMALLTHINKER,
    "Qwen3NextForCausalLM": delta_nets.QWEN3_NEXT,
    "Qwen3_5ForCausalLM": delta_nets.QWEN3_5,
    "Qwen3_5MoeForCausalLM": delta_nets.QWEN3_5_MOE,
    "Qwen3_5ForConditionalGeneration": delta_nets.QWEN3_5_WITH_IMAGES,
    "Qwen3_5MoeForConditionalGeneration": delta_nets.QWEN3_5_MOE_WITH_IMAGES,
}

# By llama.cpp's or PowerInfer's name.
ARCHITECTURES: dict[str, Architecture] = {
    graph.name: graph
    for graph in (
        llama.GRAPH,
        arcee.GRAPH,
        mistral.GRAPH,
        qwen.QWEN2_GRAPH,
        qwen.QWEN3_GRAPH,
        falcon.GRAPH,
        opt.GRAPH,
        nemotron.GRAPH,
        starcoder.GRAPH,
        *cohere.GRAPHS,
        *gemma.GRAPHS,
        gemma3n.GRAPH,
        gemma4.GRAPH,
        smollm.GRAPH,
        phi.GRAPH,
        olmo.GRAPH,
        exaone.GRAPH,
        ernie.GRAPH,
        mixtures.OLMOE_GRAPH,
        mixtures.QWEN2_GRAPH,
        mixtures.QWEN3_GRAPH,
        *granite.GRAPHS,
        glm.GRAPH,
        *glm_dense.GRAPHS,
        gpt_oss.GRAPH,
        smallthinker.GRAPH,
        *delta_nets.GRAPHS,
    )
}


def read_blueprint(path: Path, config: Mapping[str, object], max_rows: int) -> Blueprint:
    """The blueprint that the config's family derives from it.

    Raises HotsplitError, naming the key, for a model that would be computed wrongly, or whose
    sizes are above the largest dimension of the checkpoint's tensors (`max_rows`).

    Only the config is read: Python code in a checkpoint is never run."""
    architectures = config.get("architectures")
    name = architectures[0] if isinstance(architectures, list) and architectures else None
    family = FAMILIES.get(name) if isinstance(name, str) else None
    if family is None:
        why = why_not_run(name, config) or "is unknown"
        raise HotsplitError(
            f"{path}: architecture {shown(name)}: {why}{elsewhere_as_gguf(name)}; supported:"
            f" {_titles()}"
        )
    model_type = config.get("model_type")
    if family.text_key:
        config = _text_config(path, config, family.text_key)
    read = ConfigReader(path, config, defaults=family.defaults, max_rows=max_rows)
    read.refuse("is_causal", True, why="bidirectional attention is not supported")
    if "quantization_config" not in family.read_keys:
        read.refuse(
            "quantization_config", why="its weights are packed; use the original checkpoint"
        )
    for key, (plain, why) in CONFIG_KEYS.items():
        if key not in family.read_keys:
            read.refuse(key, *plain, why=why)
    found = family.blueprint(read)
    if family.text_key:
        found = text_model(found)
    threshold = read.threshold(found.spec.activation)
    notes = (*found.notes, *_type_notes(path, model_type, family, str(name)))
    return replace(found, threshold=threshold, is_tied=read.is_tied(), notes=notes)


def _titles() -> str:
    """The titles of all families, each name once before its versions."""
    versions: dict[str, dict[str, None]] = {}
    for family in FAMILIES.values():
        name, *version = re.split(r"(?=\d)", family.title, maxsplit=1)
        versions.setdefault(name, {}).update(dict.fromkeys(version))
    return ", ".join(name + ", ".join(each) for name, each in versions.items())


def _text_config(path: Path, config: Mapping[str, object], key: str) -> Mapping[str, object]:
    """The config of the text model, with what that of the whole says of it."""
    own = config.get(key)
    if not isinstance(own, dict):
        raise HotsplitError(f"{path}: {key} is {shown(own)}, wanted the text model's config")
    of_all = ("tie_word_embeddings", "quantization_config")
    return {**own, **{name: config[name] for name in of_all if name in config}}


def _type_notes(path: Path, said: object, family: Family, name: str) -> tuple[str, ...]:
    """A note on a `model_type` that is not the architecture's."""
    if said is None or not family.model_types or said in family.model_types:
        return ()
    return (
        f"{path}: model_type is {shown(said)}, wanted {family.model_types[0]!r} beside {name}: the"
        f" model is converted as {name}, which is wrong if it computes anything else",
    )
