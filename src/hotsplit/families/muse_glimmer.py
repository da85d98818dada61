"""Muse-Glimmer: Gemma's norms before and after each block, the latter with an epsilon of their own,
windows in three of four layers, which alone rotate, an RMS norm without weights of the embedding
and of each head, queries multiplied by a number, gates of attention's output in a matrix of their
own, and logits with a factor and a soft cap."""

from dataclasses import replace
from functools import partial

import gguf
import numpy as np

from hotsplit.errors import HotsplitError
from hotsplit.families.blueprint import ADD_ONE, SAME, Sources
from hotsplit.families.config_reader import ConfigReader
from hotsplit.families.family import ATTN_BIASES, QKV_BIASES, Architecture, Family
from hotsplit.families.key_reader import KeyReader
from hotsplit.families.plain_decoder import decoder
from hotsplit.families.rope_scalings import Rope
from hotsplit.families.row_order import rotary_rows
from hotsplit.families.soft_caps import LOGIT_CAP, cap_of_keys
from hotsplit.families.windows import KEYS, local_window_keys, windows_of_keys
from hotsplit.files.gguf_file import Value
from hotsplit.files.typed import shown
from hotsplit.model.arrangements import Arrangement
from hotsplit.model.spec import ModelSpec, Norm

PERIOD = 4
POST_EPSILON = 1e-8  # of the norms after blocks, which llama.cpp has no key for


def derived(read: ConfigReader) -> dict[str, object]:
    """By default, each fourth layer from the last one has no window."""
    if read.values.get("layer_types") is not None:
        return {}
    last = read.count("num_hidden_layers") - 1
    are_full = [(last - layer) % PERIOD == 0 for layer in range(last + 1)]
    return {"layer_types": [f"{'full' if full else 'sliding'}_attention" for full in are_full]}


def keys(read: ConfigReader) -> dict[str, Value]:
    windows = local_window_keys(read, PERIOD)
    _check_rotation(read, windows[KEYS[1]])
    return {
        "logit_scale": np.float32(read.positive("output_multiplier")),
        LOGIT_CAP: np.float32(read.positive(LOGIT_CAP)),
        **windows,
    }


def _check_rotation(read: ConfigReader, has_window_L: Value) -> None:
    """Raises HotsplitError unless the layers with a window, and no others, rotate: those whose
    theta is not 0, which is all that transformers reads of it."""
    theta_L, num_layers = read.values.get("layer_rope_theta"), read.count("num_hidden_layers")
    if theta_L is None:
        theta_L = [int((num_layers - 1 - layer) % PERIOD != 0) for layer in range(num_layers)]
    if not isinstance(theta_L, list) or [theta != 0 for theta in theta_L] != has_window_L:
        raise HotsplitError(
            f"{read.path}: layer_rope_theta is {shown(theta_L)}, wanted 0 for the layers without a"
            " window and for no others: no key of a GGUF says more; this checkpoint is not"
            " supported"
        )


def sources(spec: ModelSpec, read: ConfigReader) -> Sources:
    """The norms of heads have no weights; llama.cpp's are the factor of queries."""
    return Sources(
        rows=rotary_rows(spec),
        changes={"output_norm.weight": SAME, "norm.weight": ADD_ONE},
        constants={
            "attn_q_norm.weight": read.positive("qk_scale_factor"),
            "attn_k_norm.weight": 1.0,
        },
    )


def of_keys(read: KeyReader) -> ModelSpec:
    sizes = read.sizes()
    windows = windows_of_keys(read, sizes.num_layers, period=PERIOD, window=None)
    spec = decoder(
        read,
        pairing="adjacent",
        arrange=partial(Arrangement.sandwich, epsilon=POST_EPSILON),
        windows=windows,
        rotates_L=[window is not None for window in windows],
        has_head_norms=True,
        attention={"gate_width": sizes.head_dim},
        logit_scale=read.positive(f"{read.graph.name}.logit_scale"),
        logit_cap=cap_of_keys(read, LOGIT_CAP),
    )
    first, *others = spec.layers
    norm = Norm(
        name="embedding_norm", kind="rms", size=sizes.hidden_size, epsilon=sizes.epsilon, part=""
    )
    return spec.with_layers([replace(first, blocks=(norm, *first.blocks)), *others])


MUSE_GLIMMER = Family(
    title="Muse-Glimmer",
    graph="muse-glimmer",
    names=gguf.MODEL_ARCH.AFMOE,  # gguf has no map for it yet
    read_keys=(LOGIT_CAP,),
    defaults={
        "tie_word_embeddings": False,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "hidden_activation": "silu",
        "attention_bias": False,
        "sliding_window": 2048,
        "qk_scale_factor": 3.87,
        "output_multiplier": 0.19611613513818404,
        "post_norm_eps": POST_EPSILON,
        LOGIT_CAP: 20.0,
    },
    fields={"hotsplit.ffn.activation": "hidden_activation"},
    plain={"post_norm_eps": POST_EPSILON, "tie_word_embeddings": False},
    flags={"attention_bias": ATTN_BIASES},
    rope=Rope(kinds=("default",)),
    derived=derived,
    keys=keys,
    sources=sources,
)
FAMILIES = (MUSE_GLIMMER.with_images("MuseGlimmerForConditionalGeneration", "muse_glimmer"),)
GRAPHS = (
    Architecture(
        name="muse-glimmer",
        of_keys=of_keys,
        known_keys=("logit_scale", LOGIT_CAP, *KEYS),
        options=ATTN_BIASES,
        stock_options=QKV_BIASES,
    ),
)
