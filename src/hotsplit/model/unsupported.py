"""Explains why an architecture is not supported.

The name comes from a checkpoint's `architectures` or a GGUF's `general.architecture`."""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence, Sized
from numbers import Integral
from pathlib import Path

from hotsplit.errors import HotsplitError
from hotsplit.model.spec import ModelSpec

# Parts of a name, case-insensitive, and why it is not supported; the first match counts.
_MIXTURES = "Qwen 3's and 3.6's mixtures and gpt-oss run"
_SMALL = "a Qwen 3 or SmolLM of its size runs"
_CONVERTED = "a copy that was converted to Llama's layout runs"
_DRAFTS = "without -md, drafts come from the text or from the model's own draft block"
_LATENTS = "DeepSeek V2 and V3, Kimi K2 and GLM 4.7 Flash run"
_RECURRENT = "recurrent layers of this kind (Mamba, RWKV and the like) are not supported"
_BY_NAME = f"""
gemma4unifiedassistant gemma4_unified_assistant:\
 an assistant of a Gemma 4 for text, images and sound in one is not supported, as that is not;\
 {_DRAFTS}
eagle: an EAGLE draft model, which reads hidden states of the main model's layers,\
 is not supported; {_DRAFTS}
dflash glimmerassistant glimmer_assistant: a DFlash draft model, which guesses a block of tokens\
 from hidden states of the main model's layers, is not supported; {_DRAFTS}
glm5: attention to pooled keys that an indexer chooses is not supported; {_LATENTS}
deepseek4 deepseekv4: attention to compressed keys is not supported; {_LATENTS}
deepseek kimi: this model of DeepSeek's or Moonshot's is not supported; {_LATENTS}
llama4: attention in chunks, and queries that are scaled by it, are not supported; {_MIXTURES}
dbrx grok arctic minimax jetmoe: this mixture of experts is not supported; {_MIXTURES}
mamba rwkv jamba recurrentgemma plamo2:\
 {_RECURRENT}; delta nets (Qwen 3.5) and Mamba-2 (Granite 4, Nemotron 3) are
step35 step3p step3.: other numbers of heads in layers with windows, and limits of gates behind\
 their activation, are not supported; {_MIXTURES}
mimov mimo2: values of another width than keys are not supported; {_MIXTURES}
t5 bart marian whisper pegasus: encoder-decoder models are not supported
bert electra nomic: an encoder, which generates no text
vl vision llava forconditionalgeneration audio clip:\
 models for images and audio are not supported; the text model alone may be
gemma: this Gemma's graph is not supported
bloom mpt baichuan13: attention biased by distance (ALiBi) is not computed; {_SMALL}
gpt2 gptneo gpt_neo gptj codegen starcoderfor gptbigcode:\
 the layers of GPT-2, GPT-J and GPT-Neo are not supported, those of GPT-NeoX are; {_SMALL}
apertus: an activation with learned numbers of each layer (xIELU) is not supported; {_SMALL}
phimoe: experts chosen one after the other, each weighed against its rivals (SparseMixer),\
 are not supported; {_MIXTURES}
stablelm: the layers of this StableLM are not supported, those of StableLmForCausalLM are
internlm baichuan:\
 queries, keys and values fused in one matrix by groups are not supported; {_CONVERTED}
minicpm: a scale of the residual sums by depth is not supported; {_CONVERTED}
moe: this mixture of experts is not supported; {_MIXTURES}
olmo cohere granite glm exaone nemotron ernie hunyuan plamo:\
 this one of the family has another graph than those that run; {_SMALL}
"""
_EXPERTS = "experts are not supported in this architecture"
_CAPPED_SCORES = "scores with a soft cap are not supported in this architecture"
_CAPPED = "logits with a soft cap are not supported in this architecture"
_SCALED = "values scaled by a factor of the config are not supported"
_LATENT = "attention over latent keys and values is not supported"
_EXPERT_KEYS = (
    "num_local_experts",
    "num_experts",
    "n_routed_experts",
    "moe_num_experts",
    "expert_count",
)
# A key of a config -> (values with which it changes nothing, why another is refused). Configs of
# derived models have them under a supported name, and their tensors need not differ.
CONFIG_KEYS: Mapping[str, tuple[tuple[object, ...], str]] = {
    **dict.fromkeys(_EXPERT_KEYS, ((0, 1), _EXPERTS)),
    "attn_logit_softcapping": ((), _CAPPED_SCORES),
    "final_logit_softcapping": ((), _CAPPED),
    "embedding_multiplier": ((1,), _SCALED),
    "residual_multiplier": ((1,), _SCALED),
    "attention_multiplier": ((), _SCALED),
    "logits_scaling": ((1,), _SCALED),
    "logit_scale": ((1,), _SCALED),
    "scale_emb": ((1,), _SCALED),
    "scale_depth": ((), _SCALED),
    "clip_qkv": ((), "clipped queries, keys and values are not supported"),
    "alibi": ((False,), "attention biased by distance (ALiBi) is not computed"),
    "q_lora_rank": ((), _LATENT),
    "kv_lora_rank": ((), _LATENT),
}
# A GGUF key without the architecture's prefix -> why a file with it is refused.
_BY_KEY = {
    "expert_count": _EXPERTS,
    "expert_used_count": _EXPERTS,
    "attention.sliding_window": "attention over a sliding window is not supported",
    "attn_logit_softcapping": _CAPPED_SCORES,
    "final_logit_softcapping": _CAPPED,
    "rope.scaling.yarn_log_multiplier": "DeepSeek's form of YaRN is not supported",
    "ssm.state_size": _RECURRENT,
}
# general.type of a GGUF that is no model -> what it is.
_TYPES = {
    "adapter": "an adapter (LoRA), not a model; merge it into the checkpoint that it was made for,"
    " and convert that",
    "vocab": "a vocabulary without a model",
    "imatrix": "an importance matrix, for convert --imatrix",
}


# What gguf's table of architectures has besides models that llama.cpp continues a text with.
_NO_TEXT = ("bert", "clip", "mmproj", "embedding", "encoder", "tokenizer", "gptj")
_CHECKPOINT = re.compile("(forcausallm|forconditionalgeneration|lmheadmodel|model)$")


def elsewhere(architecture: str) -> str:
    """Says that llama.cpp runs a GGUF of this architecture, by gguf's table; "" if it does not."""
    return "; llama.cpp runs it" if architecture in _of_llamacpp() else ""


def elsewhere_as_gguf(name: object) -> str:
    """The same of a checkpoint's architecture, whose name is compared without its version."""
    checkpoint = _CHECKPOINT.sub("", name.lower() if isinstance(name, str) else "")
    plain = re.sub(r"\dp\d|[^a-z]", "", checkpoint)
    names = {re.sub("[^a-z]", "", each) for each in _of_llamacpp()}
    is_there = plain in names or re.sub("v(flash)?$", "", plain) in names
    return "; llama.cpp may run a GGUF of it" if is_there else ""


_LAYER = re.compile(r"^blk\.\d+\.|\.(weight|bias)$")


def difference(tensors: Iterable[str], known: Collection[str]) -> str:
    """Says what a GGUF of an unknown architecture has beside the tensors of the nearest known one,
    by gguf's table of their names; "" for one without tensors."""
    from gguf import MODEL_ARCH_NAMES, MODEL_TENSORS, TENSOR_NAMES

    own = {_LAYER.sub("", name) for name in tensors}
    of_known = {
        name: {TENSOR_NAMES[tensor].removeprefix("blk.{bid}.") for tensor in MODEL_TENSORS[key]}
        for key, name in sorted(MODEL_ARCH_NAMES.items(), key=lambda item: item[1] != "llama")
        if name in known
    }
    if not own:
        return ""
    nearest = min(of_known, key=lambda name: len(own - of_known[name]))
    more = sorted(own - of_known[nearest])
    if not more:
        return f"; its tensors have the names of {nearest}'s, its graph may be another"
    shown = ", ".join(more[:3]) + (f" and {len(more) - 3} more" if len(more) > 3 else "")
    return f"; beside tensors that {nearest} has, it has {shown}"


def _of_llamacpp() -> list[str]:
    from gguf import MODEL_ARCH_NAMES  # takes too long for a module that every command imports

    found = MODEL_ARCH_NAMES.values()
    return [name for name in found if not any(part in name for part in _NO_TEXT)]


def check_is_model(path: Path, keys: Mapping[str, object]) -> None:
    """Raises HotsplitError for a GGUF whose keys say that it is something else."""
    kind = keys.get("general.type")
    if isinstance(kind, str) and kind in _TYPES:
        raise HotsplitError(f"{path}: is {_TYPES[kind]}")


def why_not_run(name: object, values: Mapping[str, object]) -> str | None:
    """Why an unknown architecture is not supported; None if neither its keys nor its name tell.
    `values` are the keys of the config or of the GGUF header."""
    plain = name.lower() if isinstance(name, str) else ""
    for line in _BY_NAME.strip().splitlines():
        parts, _, why = line.partition(": ")
        if any(part in plain for part in parts.split()):
            return why
    for key, value in values.items():
        is_count = key.rpartition(".")[2] in _EXPERT_KEYS and isinstance(value, Integral)
        if is_count and int(value) > 1:  # type: ignore[call-overload]
            return _EXPERTS
    return None


def why_key(name: str) -> str | None:
    """Why a GGUF with this key (without its prefix) is refused; None if it is unknown."""
    return _BY_KEY.get(name)


def refuse_divided(path: Path, spec: ModelSpec, hot: Sequence[Sized]) -> None:
    """Raises HotsplitError for a plan that divides the neurons of a layer that needs all of its
    gates. `hot`: the neurons of each layer that are on a GPU."""
    for layer, (own, ids) in enumerate(zip((x.neurons for x in spec.layers), hot, strict=True)):
        if own.needs_all_gates and len(ids) not in (0, own.number):
            raise HotsplitError(
                f"{path}: divides layer {layer}, in which a neuron needs the gates of all; run"
                " hotsplit solve on this model"
            )
