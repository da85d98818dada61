"""Makes random models in the shapes of known ones: mixtures of experts and Minitron 4B with fewer layers,
Gemma 3n E2B with all of them, and TinyLlama.

Weights are random, a few rows of them repeated. In mixtures, the router's choices are skewed as by Zipf's law:
every embedding has the same component, of mean 0, by which the logit of the expert with rank r is lower
by log r. What decides whether a ReLU neuron fires has a part against that component, so that 60 % of those
of experts are silent, and 90 % of Minitron's, which are squared. Vocabularies have
32,000 tokens, because a head of the full size would count several times as much beside a quarter of
the layers.

Letters: E experts, D hidden size."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from statistics import NormalDist

import numpy as np
import torch
from random_checkpoint import TINYLLAMA, write_tokenizer

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.convert.encode import encode
from hotsplit.convert.mixtures import NAMES as MIXTURES
from hotsplit.convert.mixtures import Roles
from hotsplit.convert.tokenizer import tokenizer_keys
from hotsplit.families import gemma3n
from hotsplit.families.delta_nets import PERIOD, delta_spec
from hotsplit.families.experts import Experts
from hotsplit.families.family import PROJECTION_BIASES
from hotsplit.families.gpt_oss import EXPERT_BIASES, gpt_oss_spec
from hotsplit.families.llama import llama_spec
from hotsplit.families.nemotron import nemotron_spec
from hotsplit.families.shared_keys import sources
from hotsplit.families.sizes import Sizes
from hotsplit.families.smallthinker import STOCK_WINDOW, smallthinker_spec
from hotsplit.files.gguf_file import TensorEntry, array_entry
from hotsplit.model.spec import DeltaNet, ModelSpec, Rotary, Route
from hotsplit.model.tensors import CONV, DECAY, Layout, is_down, is_router, is_vector

PIECE = 1536  # rows of random values, encoded once and repeated
COMMON = 1.0  # of all embeddings, relative to their random part
MEAN = COMMON / np.hypot(1.0, COMMON)  # of the values of a normed embedding
SILENT = {"relu": 0.6, "relu2": 0.9}  # of the neurons


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model's sizes, but for the vocabulary, and its experts. `spec_of`: the spec for a number of
    layers, and the route if there is one."""

    sizes: Sizes
    spec_of: Callable[..., ModelSpec]
    route: Route | None = None
    layout: Layout = "stock"


def _qwen3(sizes: Sizes, route: Route) -> ModelSpec:
    rotary = Rotary(theta=1e6, pairing="halves")
    experts = Experts(route=route, num_neurons=sizes.num_neurons)
    return llama_spec(
        sizes, rotary, "silu", architecture="qwen3moe", has_head_norms=True, experts=experts
    )


def _gpt_oss(sizes: Sizes, route: Route) -> ModelSpec:
    has_window_L = [layer % 2 == 0 for layer in range(sizes.num_layers)]
    return gpt_oss_spec(
        sizes,
        Rotary(theta=150_000.0, pairing="halves"),
        "swiglu_oai",
        Experts(route=route, num_neurons=sizes.num_neurons),
        has_window_L,
        128,
        (*PROJECTION_BIASES, *EXPERT_BIASES),
    )


def _smallthinker(sizes: Sizes, route: Route) -> ModelSpec:
    has_window_L = [layer % 4 != 0 for layer in range(sizes.num_layers)]
    return smallthinker_spec(
        sizes,
        Rotary(theta=1.5e6, pairing="halves"),
        "relu",
        Experts(route=route, num_neurons=sizes.num_neurons),
        STOCK_WINDOW,
        has_window_L,
        has_window_L,
    )


def _nemotron(sizes: Sizes) -> ModelSpec:
    return nemotron_spec(sizes, Rotary(theta=1e4, pairing="halves", num_values=64), "relu2")


def _gemma3n(sizes: Sizes) -> ModelSpec:
    layers = range(sizes.num_layers)
    numbers = gemma3n.Numbers(
        num_planes=4,
        rank=64,
        window=512,
        activation="gelu_tanh",
        logit_cap=30.0,
        inputs=256,
        rotaries=(Rotary(theta=1e6, pairing="halves"), Rotary(theta=1e4, pairing="halves")),
    )
    cutoffs = [gemma3n.STOCK_CUTOFF if x < gemma3n.SPARSE_LAYERS else None for x in layers]
    is_local_L = [(layer + 1) % gemma3n.PERIOD != 0 for layer in layers]
    num_shared = max(0, sizes.num_layers - gemma3n.STOCK_OWN_LAYERS)
    source_L = sources("random: shared layers", is_local_L, num_shared)
    return gemma3n.gemma3n_spec([sizes] * sizes.num_layers, is_local_L, source_L, cutoffs, numbers)


def _qwen3_6(sizes: Sizes, route: Route) -> ModelSpec:
    delta = DeltaNet(
        num_key_heads=16,
        num_value_heads=32,
        key_head_dim=128,
        value_head_dim=128,
        epsilon=sizes.epsilon,
    )
    experts = Experts(
        route=route, num_neurons=sizes.num_neurons, num_shared=512, has_shared_gate=True
    )
    return delta_spec(
        "qwen35moe",
        "random",
        sizes,
        Rotary(theta=1e7, pairing="halves", num_values=64),
        "silu",
        delta,
        [(layer + 1) % PERIOD == 0 for layer in range(sizes.num_layers)],
        experts,
    )


SHAPES = {
    "qwen3-30b-a3b": Shape(
        sizes=Sizes(
            num_layers=12,
            hidden_size=2048,
            num_neurons=768,
            num_heads=32,
            num_kv_heads=4,
            head_dim=128,
            vocab_size=32_000,
            context_length=4096,
            epsilon=1e-6,
        ),
        route=Route(num_experts=128, num_used=8),
        spec_of=_qwen3,
    ),
    "qwen3.6-35b-a3b": Shape(
        sizes=Sizes(
            num_layers=8,
            hidden_size=2048,
            num_neurons=512,
            num_heads=16,
            num_kv_heads=2,
            head_dim=256,
            vocab_size=32_000,
            context_length=40_960,
            epsilon=1e-6,
        ),
        route=Route(num_experts=256, num_used=8),
        spec_of=_qwen3_6,
    ),
    "gpt-oss-20b": Shape(
        sizes=Sizes(
            num_layers=8,
            hidden_size=2880,
            num_neurons=2880,
            num_heads=64,
            num_kv_heads=8,
            head_dim=64,
            vocab_size=32_000,
            context_length=4096,
            epsilon=1e-5,
        ),
        route=Route(
            num_experts=32,
            num_used=4,
            gating="softmax_of_chosen",
            renormalises=False,
            has_bias=True,
        ),
        spec_of=_gpt_oss,
    ),
    "smallthinker-4b": Shape(
        sizes=Sizes(
            num_layers=12,
            hidden_size=1536,
            num_neurons=768,
            num_heads=12,
            num_kv_heads=2,
            head_dim=128,
            vocab_size=32_000,
            context_length=8192,
            epsilon=1e-6,
        ),
        route=Route(num_experts=32, num_used=4, reads="x"),
        spec_of=_smallthinker,
        layout="sparse",
    ),
    "gemma3n-e2b": Shape(
        sizes=Sizes(
            num_layers=30,
            hidden_size=2048,
            num_neurons=8192,
            num_heads=8,
            num_kv_heads=2,
            head_dim=256,
            vocab_size=32_000,
            context_length=4096,
            epsilon=1e-6,
        ),
        spec_of=_gemma3n,
        layout="sparse",
    ),
    "minitron-4b": Shape(
        sizes=Sizes(
            num_layers=8,
            hidden_size=3072,
            num_neurons=9216,
            num_heads=24,
            num_kv_heads=8,
            head_dim=128,
            vocab_size=32_000,
            context_length=4096,
            epsilon=1e-5,
        ),
        spec_of=_nemotron,
        layout="sparse",
    ),
}


Entry = Callable[[str, tuple[int, ...]], TensorEntry]  # of a tensor's name and shape


def make_mixture(
    path: Path, name: str, kind: str, num_layers: int | None = None, layout: Layout | None = None
) -> None:
    """Writes a model of one type, or of one of llama.cpp's mixtures, MXFP4 among them: experts in that
    type and all else in q8_0."""
    shape = SHAPES[name]
    sizes = replace(shape.sizes, num_layers=num_layers or shape.sizes.num_layers)
    spec = shape.spec_of(sizes, *([shape.route] if shape.route else []))
    type_of = partial(_type_of, Roles.of(spec, is_tied=False), kind)
    entry = partial(_entry, type_of, shape.route, spec.activation, np.random.default_rng(0))
    _make(path, spec, layout or shape.layout, entry)


def make_dense(path: Path, kind: str) -> None:
    """Writes a Llama in TinyLlama's shape, all matrices of one type, or of llama.cpp's mixture."""
    spec = llama_spec(TINYLLAMA, Rotary(theta=1e4, pairing="adjacent"), "silu")
    type_of = partial(_type_of, Roles.of(spec, is_tied=False), kind)
    random = np.random.default_rng(0)

    def entry(name: str, dims: tuple[int, ...]) -> TensorEntry:
        if len(dims) == 1:
            return array_entry(np.ones(dims), "f32")
        values = 0.02 * random.standard_normal((min(PIECE, dims[0]), dims[1]), np.float32)
        return _encoded(values, type_of(name), name, dims)

    _make(path, spec, "stock", entry)


def _make(path: Path, spec: ModelSpec, layout: Layout, entry: Entry) -> None:
    folder = path.with_suffix(".tokenizer")
    folder.mkdir(exist_ok=True)
    write_tokenizer(folder, spec.vocab_size)
    model = ModelFile(
        path=path,
        layout=layout,
        model_id="0" * 64,
        bare_spec=spec,
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
    type_of: Callable[[str], str],
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
    decides = "ffn_gate_exps" if route else "ffn_up"
    if activation in SILENT and decides in name:
        values -= NormalDist().inv_cdf(SILENT[activation]) / (width * MEAN) * common_D
    if name == "token_embd.weight":
        values = values * width**0.5 + COMMON * common_D
    return _encoded(values, type_of(name), name, dims)


def _encoded(values: np.ndarray, kind: str, name: str, dims: tuple[int, ...]) -> TensorEntry:
    """A tensor whose rows repeat `values`, of one of its rows each."""
    piece = encode(torch.from_numpy(values), kind, name)
    return TensorEntry(shape=dims, kind=kind, read_rows=_repeated(piece, dims))


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
