"""Explains why an architecture is not supported.

The name comes from a checkpoint's `architectures` or a GGUF's `general.architecture`."""

from collections.abc import Mapping
from numbers import Integral

# Part of a name, case-insensitive -> why; the first match counts.
_BY_NAME = (
    (("moe", "mixtral", "dbrx", "deepseek", "gptoss", "gpt-oss", "grok", "arctic", "llama4",
      "minimax", "kimi"), "mixtures of experts are not supported"),
    (("mamba", "rwkv", "jamba", "recurrentgemma", "plamo", "lfm2", "bamba", "nemotron_h",
      "qwen3next"), "recurrent layers (Mamba, RWKV and the like) are not supported"),
    (("t5", "bart", "marian", "whisper", "pegasus"),
     "encoder-decoder models are not supported"),
    (("bert", "electra", "modernbert", "nomic"),
     "an encoder, which cannot write text, is not supported"),
    (("vl", "vision", "llava", "forconditionalgeneration", "audio", "clip"),
     "models for images and audio are not supported"),
    (("gemma",), "Gemma's graph (scaled embeddings, further norms) is not supported"),
    (("gpt2", "gptneo", "gpt_neo", "gptj", "bloom", "mpt", "starcoder", "codegen", "stablelm",
      "phi2", "phiforcausallm", "olmo", "cohere", "command-r", "granite", "glm", "internlm",
      "baichuan", "minicpm", "exaone", "smollm3", "nemotron", "ernie", "hunyuan"),
     "its graph is a different one and is not supported"),
)  # fmt: skip
_EXPERTS = "mixtures of experts are not supported"
_EXPERT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts", "expert_count")
# A key of a GGUF, without its architecture -> why a file with it is not run.
_BY_KEY = {
    "expert_count": _EXPERTS,
    "expert_used_count": _EXPERTS,
    "attention.sliding_window": "attention over a sliding window is not supported",
    "attn_logit_softcapping": "logits with a soft cap are not supported",
    "final_logit_softcapping": "logits with a soft cap are not supported",
    "rope.scaling.yarn_log_multiplier": "DeepSeek's form of YaRN is not supported",
    "ssm.state_size": "recurrent layers (Mamba, RWKV and the like) are not supported",
}
CHECKPOINTS = (
    "Llama, Mistral, Qwen 2, Qwen 3, Phi-3, Falcon and OPT, and sparse variants of them (ReLULLaMA,"
    " ProSparse, Bamboo, TurboSparse)"
)


def why_not_run(name: object, values: Mapping[str, object]) -> str | None:
    """The reason for an unknown architecture; None if its name says nothing.

    `values` are the other keys of the config or of the header."""
    for key, value in values.items():
        is_count = key.rpartition(".")[2] in _EXPERT_KEYS and isinstance(value, Integral)
        if is_count and int(value) > 1:  # type: ignore[call-overload]
            return _EXPERTS
    if name == "phi3":
        return "only its checkpoints are supported; convert the one it was made from"
    plain = name.lower() if isinstance(name, str) else ""
    return next((why for parts, why in _BY_NAME if any(p in plain for p in parts)), None)


def why_key(name: str) -> str | None:
    """The reason for a key of a GGUF's architecture, without its prefix."""
    return _BY_KEY.get(name)
