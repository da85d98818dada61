"""Makes random models in the shapes of known ones: mixtures of experts (of Nemotron 3 Nano 13
layers, six of them with experts) and Minitron 4B with fewer layers, Gemma 3n E2B with all of them,
and TinyLlama.

Weights are random, a few rows of them repeated. In mixtures, the router's choices are skewed as by
Zipf's law: every embedding has the same component, of mean 0, by which the logit of the expert with
rank r is lower by log r. What decides whether a ReLU neuron fires has a part against that
component, so that 60 % of those of experts are silent, 70 % of those of Nemotron 3's, and 90 % of
Minitron's; the latter two are squared.
Vocabularies have 32,000 tokens, because a head of the full size would count several times as much
beside a quarter of the layers.

Letters: E experts, D hidden size."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from statistics import NormalDist

import numpy as np
import torch
from random_checkpoint import TINYLLAMA, config_of, write_tokenizer

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.convert.encode import encode
from hotsplit.convert.tokenizer import tokenizer_keys
from hotsplit.convert.type_mixtures import NAMES as MIXTURES
from hotsplit.convert.type_mixtures import Roles
from hotsplit.families import gemma3n
from hotsplit.families.blueprint import Blueprint
from hotsplit.families.from_config import read_blueprint
from hotsplit.families.smallthinker import STOCK_WINDOW
from hotsplit.files.gguf_file import TensorEntry, array_entry, is_whole_blocks
from hotsplit.files.gguf_types import block_sizes
from hotsplit.model.delta_net import CONV, DECAY
from hotsplit.model.route import Route
from hotsplit.model.tensors import Layout, is_down, is_router, is_vector
from hotsplit.model.weight_types import SMALLER_BLOCKS

PIECE = 1536  # rows of random values, encoded once and repeated
COMMON = 1.0  # of all embeddings, relative to their random part
MEAN = COMMON / np.hypot(1.0, COMMON)  # of the values of a normed embedding
# Of the values of random blocks whose scale is 1.
ROOT_MEAN_SQUARE = {"iq1_s": 7.2, "iq1_m": 7.2, "iq3_xxs": 142.0, "iq3_s": 141.0}
ROOT_MEAN_SQUARE |= dict.fromkeys(("iq2_xxs", "iq2_xs", "iq2_s"), 55.0)
ROOT_MEAN_SQUARE |= {"q1_0": 1.0, "q2_0": 1.2, "tq1_0": 0.8, "tq2_0": 0.8, "nvfp4": 2.9}
SILENT = {"relu": 0.6, "relu2": 0.9}  # of the neurons
SILENT_OF_EXPERTS = {"relu": 0.6, "relu2": 0.7}


# Of all shapes, but for the context, where another is there; vocabularies as above.
COMMON_CONFIG = {
    "vocab_size": 32_000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
}
LAYOUTS: dict[str, Layout] = {
    "smallthinker-4b": "sparse",
    "gemma3n-e2b": "sparse",
    "minitron-4b": "sparse",
    "nemotron-3-nano": "sparse",
}
# The configs, in the names of transformers.
SHAPES: dict[str, dict[str, object]] = {
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_hidden_layers": 12,
        "hidden_size": 2048,
        "moe_intermediate_size": 768,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "rope_theta": 1e6,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
    },
    "qwen3.6-35b-a3b": {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "num_hidden_layers": 8,
        "hidden_size": 2048,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "max_position_embeddings": 40_960,
        "rope_theta": 1e7,
    },
    "gpt-oss-20b": {
        "architectures": ["GptOssForCausalLM"],
        "num_hidden_layers": 8,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_attention_heads": 64,
        "rms_norm_eps": 1e-5,
        "num_local_experts": 32,
    },
    "glm-4.7-flash": {
        "architectures": ["Glm4MoeLiteForCausalLM"],
        "num_hidden_layers": 6,
        "hidden_size": 2048,
        "intermediate_size": 10_240,
        "moe_intermediate_size": 1536,
        "num_attention_heads": 20,
        "num_key_value_heads": 20,
        "q_lora_rank": 768,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "v_head_dim": 256,
        "n_routed_experts": 64,
        "num_experts_per_tok": 4,
        "routed_scaling_factor": 1.8,
        "max_position_embeddings": 40_960,
        "rope_theta": 1e6,
    },
    "smallthinker-4b": {
        "architectures": ["SmallThinkerForCausalLM"],
        "num_hidden_layers": 12,
        "hidden_size": 1536,
        "moe_ffn_hidden_size": 768,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "hidden_act": "relu",
        "max_position_embeddings": 8192,
        "rope_theta": 1.5e6,
        "moe_num_primary_experts": 32,
        "moe_num_active_primary_experts": 4,
        "moe_primary_router_apply_softmax": True,
        "sliding_window_size": STOCK_WINDOW,
    },
    "gemma3n-e2b": {
        "architectures": ["Gemma3nForCausalLM"],
        "num_hidden_layers": 30,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_attention_heads": 8,
        "num_kv_shared_layers": 10,
        "rope_theta": 1e6,
        "vocab_size_per_layer_input": 32_000,
        "sliding_window_pattern": 5,
    },
    "nemotron-3-nano": {
        "architectures": ["NemotronHForCausalLM"],
        "hybrid_override_pattern": "MEMEM*EMEMEME",
        "num_hidden_layers": 13,
        "hidden_size": 2688,
        "moe_intermediate_size": 1856,
        "moe_shared_expert_intermediate_size": 3712,
        "num_key_value_heads": 2,
        "mamba_num_heads": 64,
        "n_routed_experts": 128,
        "num_experts_per_tok": 6,
        "routed_scaling_factor": 2.5,
    },
    "minitron-4b": {
        "architectures": ["NemotronForCausalLM"],
        "num_hidden_layers": 8,
        "hidden_size": 3072,
        "intermediate_size": 9216,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_act": "relu2",
        "norm_eps": 1e-5,
    },
}


def blueprint_of(name: str, num_layers: int | None = None, *, has_block: bool = False) -> Blueprint:
    """The shape's keys and spec, with fewer layers perhaps, and a draft block if asked for."""
    config = COMMON_CONFIG | SHAPES[name]
    count = num_layers or config["num_hidden_layers"]
    assert isinstance(count, int)
    if name == "smallthinker-4b":
        layout = [int(layer % 4 != 0) for layer in range(count)]
        config |= {"sliding_window_layout": layout, "rope_layout": layout}
    if name == "gemma3n-e2b":
        config["num_kv_shared_layers"] = max(0, count - gemma3n.STOCK_OWN_LAYERS)
    names = ("mtp.fc.weight",) if has_block else ()
    return read_blueprint(Path(name), config | {"num_hidden_layers": count}, 1 << 20, names)


def route_of(name: str) -> Route | None:
    return blueprint_of(name).spec.layers[-1].route


Entry = Callable[[str, tuple[int, ...]], TensorEntry]  # of a tensor's name and shape
TypeOf = Callable[[str], str]  # of a tensor's name


def make_mixture(
    path: Path,
    name: str,
    kind: str | TypeOf,
    num_layers: int | None = None,
    layout: Layout | None = None,
    *,
    has_block: bool = False,
) -> None:
    """Writes a model of one type, of a type by matrix, or of one of llama.cpp's mixtures, MXFP4
    among them: experts in that type and all else in q8_0."""
    plan = blueprint_of(name, num_layers, has_block=has_block)
    roles = Roles.of(plan.spec, is_tied=False)
    type_of = kind if callable(kind) else partial(_type_of, roles, kind)
    route, activation = plan.spec.layers[-1].route, plan.spec.activation
    entry = partial(_entry, type_of, route, activation, np.random.default_rng(0))
    _make(path, plan, layout or LAYOUTS.get(name, "stock"), entry)


def make_dense(path: Path, kind: str) -> None:
    """Writes a Llama in TinyLlama's shape, all matrices of one type, or of llama.cpp's mixture."""
    plan = read_blueprint(path, config_of(TINYLLAMA), 1 << 20)
    type_of = partial(_type_of, Roles.of(plan.spec, is_tied=False), kind)
    random = np.random.default_rng(0)

    def entry(name: str, dims: tuple[int, ...]) -> TensorEntry:
        if len(dims) == 1:
            return array_entry(np.ones(dims), "f32")
        values = 0.02 * random.standard_normal((min(PIECE, dims[0]), dims[1]), np.float32)
        return _encoded(values, type_of(name), name, dims)

    _make(path, plan, "stock", entry)


def _make(path: Path, plan: Blueprint, layout: Layout, entry: Entry) -> None:
    spec = plan.spec
    folder = path.with_suffix(".tokenizer")
    folder.mkdir(exist_ok=True)
    write_tokenizer(folder, spec.vocab_size)
    model = ModelFile(
        path=path,
        layout=layout,
        model_id="0" * 64,
        bare_spec=spec,
        keys=plan.keys,
        threshold_L=(0.0,) * spec.num_layers,
        predictor=None,
        tensors={},
        extra_keys=dict(tokenizer_keys(folder, spec.vocab_size, "stock").keys),
    )
    shutil.rmtree(folder)
    shapes, _ = model.expected_shapes()
    shapes["output.weight"] = (spec.vocab_size, spec.hidden_size)
    tensors = {tensor: entry(tensor, dims) for tensor, dims in shapes.items()}
    replace(model, tensors=tensors).save(path)


def _type_of(roles: Roles, kind: str, name: str) -> str:
    if kind == "mxfp4":
        return kind if "_exps" in name else "q8_0"
    return roles.type_in(kind, name) if kind in MIXTURES else kind


def _entry(
    type_of: TypeOf,
    route: Route | None,
    activation: str,
    random: np.random.Generator,
    name: str,
    dims: tuple[int, ...],
) -> TensorEntry:
    if name.endswith(".bias") or "sinks" in name:
        return array_entry(0.1 * random.standard_normal(dims), "f32")
    if name.endswith(DECAY):
        return array_entry(-np.exp(random.standard_normal(dims)), "f32")
    if name.endswith(CONV):
        return array_entry(random.standard_normal(dims) / dims[1] ** 0.5, "f32")
    if len(dims) == 1:
        return array_entry(np.ones(dims), "f32")
    width = dims[-1]
    common_D = np.resize(np.float32([1.0, -1.0]), width)
    if route is not None and "ffn_gate_inp" in name:
        mean = COMMON if route.reads == "x" else MEAN
        return array_entry(_router(random, dims, mean), "f32")
    if is_vector(name, dims) or is_router(name):
        return array_entry(0.1 * random.standard_normal(dims) / width**0.5, "f32")
    values = random.standard_normal((min(PIECE, prod(dims[:-1])), width), np.float32)
    # Outputs are small, so that the common part lasts.
    is_output = is_down(name) or "attn_output" in name or "ssm_out" in name
    values *= 0.1 / width**0.5 if is_output else width**-0.5
    silent = SILENT_OF_EXPERTS if route else SILENT
    decides = ("ffn_up_" if activation == "relu2" else "ffn_gate_exps") if route else "ffn_up"
    if activation in silent and decides in name:
        values -= NormalDist().inv_cdf(silent[activation]) / (width * MEAN) * common_D
    if name == "token_embd.weight":
        values = values * width**0.5 + COMMON * common_D
    kind = type_of(name)
    if not is_whole_blocks(width, kind):  # as llama.cpp's quantiser does
        kind = SMALLER_BLOCKS[kind]
    return _encoded(values, kind, name, dims)


def _encoded(values: np.ndarray, kind: str, name: str, dims: tuple[int, ...]) -> TensorEntry:
    """A tensor whose rows repeat `values`, of one of its rows each; of a type that
    nothing here quantises to, random ones of about their size."""
    if kind in ROOT_MEAN_SQUARE:
        piece = _random_blocks(kind, values.shape, float(values.std()) / ROOT_MEAN_SQUARE[kind])
    else:
        piece = encode(torch.from_numpy(values), kind, name)
    return TensorEntry(shape=dims, kind=kind, read_rows=_repeated(piece, dims))


def _random_blocks(kind: str, shape: tuple[int, ...], scale: float) -> np.ndarray:
    """Rows whose bits are random, except for those of scales."""
    random = np.random.default_rng(0)
    block, size = block_sizes(kind)
    blocks = random.integers(0, 256, (prod(shape) // block, size), np.uint8)
    d = np.full((len(blocks), 1), scale, np.float16)
    if kind == "iq1_m":  # at the top of the last four numbers
        numbers = blocks[:, -8:].view(np.uint16)
        top = d.view(np.uint16) >> np.arange(0, 16, 4, dtype=np.uint16) << 12
        blocks[:, -8:] = (numbers & 0x0FFF | top).view(np.uint8)
    elif kind == "nvfp4":  # floats of eight bits with steps of 2^-9
        blocks[:, :4] = min(7, max(1, round(scale * 512)))
    elif kind in ("tq1_0", "tq2_0"):
        blocks &= blocks >> 1 & 0x55 ^ 0xFF  # no codes of 3
        blocks[:, -2:] = d.view(np.uint8)
    else:
        blocks[:, :2] = d.view(np.uint8)
    return blocks.reshape(shape[0], -1)


def _repeated(piece: np.ndarray, dims: tuple[int, ...]) -> Callable[[int, int], np.ndarray]:
    rows = prod(dims[1:-1])

    def read_rows(start: int, stop: int) -> np.ndarray:
        index = np.arange(start * rows, stop * rows) % len(piece)
        return piece[index].reshape(stop - start, *dims[1:-1], piece.shape[1])

    return read_rows


def _router(random: np.random.Generator, dims: tuple[int, ...], mean: float) -> np.ndarray:
    """f32 [E, D]: random logits of deviation 1, and minus the logarithm of the expert's rank."""
    num_experts, width = dims
    logs_E = np.log(random.permutation(num_experts) + 1.0)
    noise_ED = random.standard_normal(dims) / width**0.5
    common_D = np.resize([1.0, -1.0], width)
    return noise_ED - logs_E[:, None] / (width * mean) * common_D
