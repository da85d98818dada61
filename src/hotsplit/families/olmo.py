"""OLMo 2 (arXiv 2501.00656): norms of the outputs of attention and feed-forward, instead of their
inputs, and of all heads of queries, and of keys, together. OLMo 3 (arXiv 2512.13961) adds windows
in three of four layers, where rotary embeddings are not scaled."""

from dataclasses import replace

from hotsplit.families.config_reader import ConfigReader
from hotsplit.families.family import ATTN_BIASES, Architecture, Family
from hotsplit.families.key_reader import KeyReader
from hotsplit.families.plain_decoder import decoder
from hotsplit.families.rope_scalings import Rope, local_theta_key
from hotsplit.families.windows import KEYS, other_head_size, window_keys, windows_of_keys
from hotsplit.files.gguf_file import Value
from hotsplit.model.arrangements import Arrangement
from hotsplit.model.rope import NO_SCALING
from hotsplit.model.spec import ModelSpec, Rotary

PERIOD, THETA = 4, 500000.0


def keys_of_third(read: ConfigReader) -> dict[str, Value]:
    """Without parameters of their own, layers with a window have transformers' default theta,
    whatever that of the others is."""
    read.refuse("sliding_window_pattern", PERIOD)
    has_window_L = read.layers_with_window(PERIOD)
    if not any(has_window_L):
        return {}
    window = read.count("sliding_window")
    keys = window_keys([window if has else None for has in has_window_L])
    return keys | local_theta_key(read, THETA)


def of_keys(read: KeyReader) -> ModelSpec:
    """A file with a window is an OLMo 3, as in llama.cpp (src/models/olmo2.cpp)."""
    rotary = read.rotary("halves")
    windows = windows_of_keys(read, read.count("block_count"), period=PERIOD)
    if any(windows):
        rotary = _of_first_files(read, rotary)
    theta = read.positive("olmo2.rope.freq_base_swa", rotary.theta)
    return decoder(
        read,
        arrange=Arrangement.output_norms,
        windows=windows,
        rotary=rotary,
        local=replace(rotary, theta=theta, scaling=NO_SCALING),
        has_head_norms=True,
        attention={"norms_all_heads": True},
    )


def _of_first_files(read: KeyReader, rotary: Rotary) -> Rotary:
    """llama.cpp's converter wrote the whole magnitude of YaRN under `attn_factor` in its first
    files of OLMo 3, which have one theta; its graph takes it for a factor on that magnitude, as we
    write it."""
    scaling, is_ours = rotary.scaling, "olmo2.rope.freq_base_swa" in read.keys
    if is_ours or scaling.kind != "yarn" or "olmo2.rope.scaling.attn_factor" not in read.keys:
        return rotary
    factor = scaling.attn_factor**2 / scaling.magnitude
    return replace(rotary, scaling=replace(scaling, attn_factor=factor))


def not_in_stock(spec: ModelSpec) -> str | None:
    """llama.cpp rotates layers with and without a window by one theta."""
    if (other := other_head_size(spec)) is not None:
        return other
    rotaries = [spec.rotary, *(attention.rotary for attention in spec.attentions)]
    theta, *others = dict.fromkeys(rotary.theta for rotary in rotaries if rotary is not None)
    if others:
        return (
            f"rotates with a theta of {theta:g} everywhere, this model with {others[0]:g} in"
            " some layers"
        )
    return None


DEFAULTS = {"tie_word_embeddings": False, "attention_bias": False, "rms_norm_eps": 1e-5}
OLMO2 = Family(
    classes=("Olmo2ForCausalLM",),
    title="OLMo 2",
    graph="olmo2",
    defaults=DEFAULTS,
    flags={"attention_bias": ATTN_BIASES},
)
FAMILIES = (
    OLMO2,
    replace(
        OLMO2,
        classes=("Olmo3ForCausalLM",),
        title="OLMo 3",
        model_types=("olmo3",),
        defaults=DEFAULTS | {"sliding_window": 4096},
        rope=Rope(kinds=("default", "linear", "yarn"), theta=THETA, layers="full_attention"),
        keys=keys_of_third,
    ),
)
GRAPHS = (
    Architecture(
        name="olmo2",
        of_keys=of_keys,
        known_keys=(*KEYS, "rope.freq_base_swa"),
        options=ATTN_BIASES,
        not_in_stock=not_in_stock,
    ),
)
