"""Falcon-H1 (arXiv 2507.22448): each layer has attention and Mamba-2 side by side, which read one
norm and whose outputs are added. The factors of its config are multiplied into matrices, as in
llama.cpp's files, whose norms before neurons have a name without an end."""

from dataclasses import replace
from functools import partial

import numpy as np

from hotsplit.errors import HotsplitError
from hotsplit.families.blueprint import NameOf, Sources
from hotsplit.families.config_reader import ConfigReader
from hotsplit.families.family import Architecture, Family, Tensors
from hotsplit.families.key_reader import KeyReader
from hotsplit.families.mamba2_keys import CHANGES, mamba2_keys, mamba2_of_keys, with_step_bias
from hotsplit.families.mamba2_keys import KEYS as MAMBA2
from hotsplit.families.plain_decoder import decoder
from hotsplit.files.typed import shown
from hotsplit.model.arrangements import Arrangement
from hotsplit.model.mamba2 import GROUP_NORM, INPUT, OUTPUT, Mamba2
from hotsplit.model.spec import Attention, LayerSpec, ModelSpec, Neurons

_NORM = ".ffn_norm"
_NUMBERS = (
    "embedding_multiplier",
    "lm_head_multiplier",
    "attention_in_multiplier",
    "attention_out_multiplier",
    "key_multiplier",
    "ssm_in_multiplier",
    "ssm_out_multiplier",
)


def _multipliers(read: ConfigReader, key: str, count: int) -> list[float]:
    found = read.positives(key, count, "the factors of parts of a matrix")
    assert len(found) == count
    return found


def factors(read: ConfigReader) -> dict[str, np.ndarray]:
    """The factors of whole matrices."""
    embedding, head, attn_in, attn_out, key, _, ssm_out = (read.positive(n) for n in _NUMBERS)
    gate, down = _multipliers(read, "mlp_multipliers", 2)
    found = {
        "token_embd.weight": embedding,
        "output.weight": head,
        "attn_q.weight": attn_in,
        "attn_k.weight": attn_in * key,
        "attn_v.weight": attn_in,
        "attn_output.weight": attn_out,
        f"{OUTPUT}.weight": ssm_out,
        "ffn_gate.weight": gate,
        "ffn_down.weight": down,
    }
    return {name: np.array([factor]) for name, factor in found.items()}


def _renamed(name_of: NameOf) -> NameOf:
    theirs = with_step_bias(name_of)

    def name(source: str) -> str | None:
        found = theirs(source)
        return f"{found}.weight" if found is not None and found.endswith(_NORM) else found

    return name


def sources(spec: ModelSpec, read: ConfigReader) -> Sources:
    mamba = spec.layers[0].recurrent
    assert isinstance(mamba, Mamba2)
    groups = mamba.num_groups * mamba.state_size
    sizes = (mamba.query_size, mamba.query_size, groups, groups, mamba.num_heads)
    parts_N = np.repeat(_multipliers(read, "ssm_multipliers", 5), sizes)
    own = {f"{INPUT}.weight": parts_N * read.positive("ssm_in_multiplier")}
    return Sources(renamed=_renamed, changes=CHANGES, factors=factors(read) | own)


def derived(read: ConfigReader) -> dict[str, object]:
    heads, width = read.count("mamba_n_heads"), read.values["mamba_d_head"]
    inner = read.values.get("mamba_d_ssm")
    inner = read.count("mamba_expand") * read.count("hidden_size") if inner is None else inner
    if width == "auto" and isinstance(inner, int):
        width = inner // heads
    if not isinstance(width, int) or inner != heads * width:
        raise HotsplitError(
            f"{read.path}: mamba_d_ssm is {shown(inner)}, wanted mamba_n_heads times mamba_d_head,"
            f" {heads} x {shown(width)}"
        )
    if read.flag("mamba_rms_norm"):
        read.refuse("mamba_norm_before_gate", False, why="gates follow the norm in no other model")
    return {"mamba_d_head": width}


def _side_by_side(
    mamba: Mamba2, arrangement: Arrangement, attention: Attention, neurons: Neurons
) -> LayerSpec:
    return arrangement.pre_norm((attention, mamba), neurons)


def of_keys(read: KeyReader) -> ModelSpec:
    has_norm = f"blk.0.{GROUP_NORM}.weight" in read.tensors
    mamba = mamba2_of_keys(read, epsilon=read.sizes().epsilon if has_norm else None)
    own = replace(mamba, writes="ssm_out")
    return decoder(read, arrange=partial(_side_by_side, own))


def _apart(spec: ModelSpec, tensors: Tensors) -> Tensors:
    return {f"{n}.weight" if n.endswith(_NORM) else n: entry for n, entry in tensors.items()}


def _joined(spec: ModelSpec, tensors: Tensors) -> Tensors:
    return {
        n.removesuffix(".weight") if n.endswith(f"{_NORM}.weight") else n: entry
        for n, entry in tensors.items()
    }


FAMILIES = (
    Family(
        classes=("FalconH1ForCausalLM",),
        title="Falcon-H1",
        graph="falcon-h1",
        model_types=("falcon_h1",),
        read_keys=("embedding_multiplier",),
        defaults={
            "tie_word_embeddings": False,
            "rms_norm_eps": 1e-5,
            "num_key_value_heads": 8,
            "mamba_n_heads": 128,
            "mamba_d_head": "auto",
            "mamba_n_groups": 1,
            "mamba_d_state": 256,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_d_ssm": 1024,
            "mamba_rms_norm": False,
            "mamba_norm_before_gate": True,
            **dict.fromkeys(_NUMBERS, 1.0),
        },
        plain={
            "tie_word_embeddings": False,
            "attention_bias": False,
            "mlp_bias": False,
            "projectors_bias": False,
            "mamba_proj_bias": False,
            "mamba_conv_bias": True,
        },
        derived=derived,
        keys=mamba2_keys,
        tensors=lambda read: {f"{GROUP_NORM}.weight": ()} if read.flag("mamba_rms_norm") else {},
        sources=sources,
    ),
)
GRAPHS = (
    Architecture(
        name="falcon-h1", of_keys=of_keys, known_keys=MAMBA2, apart=_apart, joined=_joined
    ),
)
