"""The mixtures of types: the type of every matrix of seven shapes, as llama.cpp's quantiser chose
it."""

import re

import numpy as np
import pytest

from hotsplit.convert.convert import FILE_TYPES
from hotsplit.convert.tensor_types import TensorTypes
from hotsplit.convert.type_mixtures import NAMED_AS_TYPES, NAMES, Roles, main_type

DENSE = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
EXPERTS = (*DENSE[:4], "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
SHARED = (*EXPERTS, "ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp")
FALCON = ("attn_qkv", "attn_output", "ffn_up", "ffn_down")


def roles(num_layers, *, is_tied, num_experts=1, is_falcon=False, is_70b=False):
    return Roles(
        is_falcon=is_falcon,
        is_70b=is_70b,
        is_tied=is_tied,
        num_layers=num_layers,
        num_experts=num_experts,
    )


# (matrices of a layer, width, width of ffn_down, roles). Types for the shapes by
# llama_model_quantize of llama-cpp-python 0.3.36; without a word, a matrix has the mixture's main
# type in every layer.
SHAPES = {
    "llama": (DENSE, 256, 512, roles(17, is_tied=False)),
    "llama tied": (DENSE, 256, 512, roles(17, is_tied=True)),
    "llama 576": (DENSE, 576, 1536, roles(9, is_tied=True)),
    "mixtral": (EXPERTS, 256, 512, roles(17, is_tied=False, num_experts=8)),
    "qwen2moe": (SHARED, 256, 256, roles(10, is_tied=True, num_experts=4)),
    "falcon": (FALCON, 256, 512, roles(17, is_tied=True, is_falcon=True)),
    "70b": (DENSE, 256, 256, roles(80, is_tied=False, is_70b=True)),
}
# By shape, the types of matrices in a mixture, layer by layer: 3*(2*q4_k,q6_k) are nine of them.
_THEIRS = """
== llama
q3_k_s output: q6_k
q3_k_m output: q6_k; attn_v: 2*q5_k 15*q4_k; attn_output: 17*q4_k; ffn_down: q5_k 16*q4_k
q3_k_l output: q6_k; attn_v attn_output ffn_down: 17*q5_k
q4_k_s output: q6_k; attn_v: 4*q5_k 13*q4_k; ffn_down: 2*q5_k 15*q4_k
q4_k_m output: q6_k; attn_v ffn_down: 2*q6_k 3*(2*q4_k,q6_k) 2*q4_k 4*q6_k
q5_k_s output: q6_k
q5_k_m output: q6_k; attn_v ffn_down: 2*q6_k 3*(2*q5_k,q6_k) 2*q5_k 4*q6_k
== llama 576
q3_k_s token_embd: q8_0; attn_q attn_k attn_v attn_output ffn_gate ffn_up: 9*q4_0
q3_k_m token_embd: q8_0; attn_q attn_k ffn_gate ffn_up: 9*q4_0; attn_v: 2*q5_1 7*q5_0;
  attn_output: 9*q5_0; ffn_down: 9*q4_k
q3_k_l token_embd: q8_0; attn_q attn_k ffn_gate ffn_up: 9*q4_0; attn_v attn_output: 9*q5_1;
  ffn_down: 9*q5_k
q4_k_s token_embd: q8_0; attn_q attn_k attn_output ffn_gate ffn_up: 9*q5_0; attn_v: 4*q5_1 5*q5_0;
  ffn_down: q5_k 8*q4_k
q4_k_m token_embd: q8_0; attn_q attn_k attn_output ffn_gate ffn_up: 9*q5_0; attn_v: q8_0 2*q5_0
  q8_0 2*q5_0 3*q8_0; ffn_down: q6_k 2*q4_k q6_k 2*q4_k 3*q6_k
q5_k_s token_embd: q8_0; attn_q attn_k attn_v attn_output ffn_gate ffn_up: 9*q5_1
q5_k_m token_embd: q8_0; attn_q attn_k attn_output ffn_gate ffn_up: 9*q5_1; attn_v: q8_0 2*q5_1
  q8_0 2*q5_1 3*q8_0; ffn_down: q6_k 2*q5_k q6_k 2*q5_k 3*q6_k
== mixtral
q3_k_s output: q6_k; attn_k attn_v: 17*q8_0; attn_output: 17*q5_k
q3_k_m output: q6_k; attn_k attn_v: 17*q8_0; attn_output: 17*q5_k; ffn_down_exps: q5_k 16*q4_k
q3_k_l output: q6_k; attn_k attn_v: 17*q8_0; ffn_down_exps: 17*q5_k
q4_k_s output: q6_k; attn_k attn_v: 17*q8_0; attn_output: 17*q5_k; ffn_down_exps: 2*q5_k 15*q4_k
q4_k_m output: q6_k; attn_k attn_v: 17*q8_0; attn_output: 17*q5_k; ffn_down_exps: 2*q6_k
  3*(2*q4_k,q6_k) 2*q4_k 4*q6_k
q5_k_s output: q6_k; attn_k attn_v: 17*q8_0
q5_k_m output: q6_k; attn_k attn_v: 17*q8_0; ffn_down_exps: 2*q6_k 3*(2*q5_k,q6_k) 2*q5_k 4*q6_k
== qwen2moe
q3_k_s token_embd: q6_k
q3_k_m token_embd: q6_k; attn_v: 2*q5_k 8*q4_k; attn_output ffn_down_exps ffn_down_shexp: 10*q4_k
q3_k_l token_embd: q6_k; attn_v attn_output ffn_down_exps ffn_down_shexp: 10*q5_k
q4_k_s token_embd: q6_k; attn_v: 4*q5_k 6*q4_k; ffn_down_exps ffn_down_shexp: q5_k 9*q4_k
q4_k_m token_embd: q6_k; attn_v ffn_down_exps ffn_down_shexp: q6_k 2*q4_k q6_k 2*q4_k q6_k q4_k
  2*q6_k
q5_k_s token_embd: q6_k
q5_k_m token_embd: q6_k; attn_v ffn_down_exps ffn_down_shexp: q6_k 2*q5_k q6_k 2*q5_k q6_k q5_k
  2*q6_k
== falcon
q3_k_s token_embd: q8_0
q3_k_m token_embd: q8_0; attn_qkv: 2*q5_k 15*q4_k; ffn_down: q5_k 4*(q4_k,2*q3_k) 4*q4_k
q3_k_l token_embd: q8_0; attn_qkv: 17*q5_k; attn_output ffn_down: 17*q4_k
q4_k_s token_embd: q8_0; attn_qkv: 4*q5_k 13*q4_k
q4_k_m token_embd: q8_0; attn_qkv: 2*q6_k 3*(2*q4_k,q6_k) 2*q4_k 4*q6_k; ffn_down: q6_k
  4*(q5_k,2*q4_k) 4*q5_k
q5_k_s token_embd: q8_0
q5_k_m token_embd: q8_0; attn_qkv ffn_down: 2*q6_k 3*(2*q5_k,q6_k) 2*q5_k 4*q6_k
== 70b
q3_k_m output: q6_k; attn_v: 80*q5_k; attn_output: 80*q4_k; ffn_down: 5*q5_k 75*q4_k
q4_k_s output: q6_k; attn_v: 80*q5_k; ffn_down: 10*q5_k 70*q4_k
q4_k_m output: q6_k; attn_v: 10*q6_k 19*(2*q5_k,q6_k) 2*q5_k 11*q6_k; ffn_down: 10*q6_k
  19*(2*q4_k,q6_k) 2*q4_k 11*q6_k
"""


def _read(text: str) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for line in text.replace("\n  ", " ").strip().splitlines():
        name, _, rest = line.partition(" ")
        if name == "==":
            found[rest] = {}
        else:
            repeat = lambda run: " ".join([run[2].replace(",", " ")] * int(run[1]))  # noqa: E731
            last = found[[*found][-1]]
            last[name] = re.sub(r"(\d+)\*\(([^)]*)\)", repeat, rest)
    return found


THEIRS = _read(_THEIRS)
# A tied embedding has the output's type.
THEIRS["llama tied"] = {
    mixture: f"token_embd{kinds.removeprefix('output')}"
    for mixture, kinds in THEIRS["llama"].items()
}
# In all of NAMED_AS_TYPES.
HEADS = {
    "llama": "output: q6_k",
    "llama tied": "token_embd: q6_k",
    "llama 576": "token_embd: q8_0",
    "mixtral": "output: q6_k; attn_v attn_k: 17*q8_0",
    "falcon": "token_embd: q8_0",
}


def theirs(shape: str, mixture: str) -> dict[str, str]:
    """The types by the matrices' names."""
    matrices, _, _, of = SHAPES[shape]
    layers = range(of.num_layers)
    kinds = {
        f"blk.{layer}.{name}.weight": main_type(mixture) for layer in layers for name in matrices
    }
    kinds["token_embd.weight"] = main_type(mixture)
    kinds |= {} if of.is_tied else {"output.weight": main_type(mixture)}
    given = HEADS[shape] if mixture in NAMED_AS_TYPES else THEIRS[shape][mixture]
    for part in filter(None, given.split("; ")):
        names, each = part.split(": ")
        runs = [run.rpartition("*") for run in each.split()]
        in_turn = [kind for count, _, kind in runs for _ in range(int(count or 1))]
        for name in names.split():
            is_outer = f"{name}.weight" in kinds
            places = [f"{name}.weight"] if is_outer else [f"blk.{n}.{name}.weight" for n in layers]
            kinds |= dict(zip(places, in_turn, strict=True))
    return kinds


@pytest.mark.parametrize("shape", SHAPES)
def test_types_are_those_of_llama_cpp(shape):
    _, width, width_of_down, of = SHAPES[shape]
    for mixture in (*THEIRS[shape], *(NAMED_AS_TYPES if shape in HEADS else ())):
        types, wanted = TensorTypes(outtype=mixture, roles=of), theirs(shape, mixture)
        for name, kind in wanted.items():
            for layout in ("", "_t"):
                is_down = "ffn_down" in name
                stored = name.replace(".weight", f"{layout}.weight") if is_down else name
                shape_of = (8, width_of_down if is_down else width)
                assert types.kind(stored, shape_of) == kind, (mixture, stored)
        other = TensorTypes(outtype=mixture, roles=roles(3, is_tied=not of.is_tied, num_experts=2))
        assert any(other.kind(name, (8, 256)) != kind for name, kind in wanted.items())


def test_every_mixture_has_a_file_type():
    assert {FILE_TYPES[name].name for name in NAMES} == {f"MOSTLY_{name.upper()}" for name in NAMES}
    assert all(np.uint32(FILE_TYPES[name]) != np.uint32(FILE_TYPES["f16"]) for name in NAMES)


def test_vectors_routers_and_overrides_are_not_in_the_mixture():
    types = TensorTypes(
        outtype="q4_k_m", roles=roles(8, is_tied=True, num_experts=8), overrides=("attn_v=q5_k",)
    )
    assert types.kind("blk.0.attn_norm.weight", (256,)) == "f32"
    assert types.kind("blk.0.ffn_gate_inp.weight", (8, 256)) == "f32"
    assert types.kind("blk.0.attn_v.weight", (8, 256)) == "q5_k"
    assert types.kind("blk.0.attn_k.weight", (8, 256)) == "q8_0"
    assert types.kind("blk.0.attn_k.weight", (8, 100)) == "f16"
