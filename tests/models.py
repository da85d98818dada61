"""Small synthetic models with random weights, profiles and machines for the tests.

Letters: L layers, F neurons, B bins of a histogram."""

import functools
import hashlib
from collections.abc import Collection, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from gguf import quants
from grid_blocks import grid_rows
from k_quants import BLOCK_BYTES, random_rows
from small_blocks import CODED, GROUPS
from small_blocks import random_rows as random_small_rows
from spec_keys import spec_keys
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from hotsplit.artifacts.machine_file import CpuCosts, Figure, Gpu, Machine
from hotsplit.artifacts.model_file import ModelFile, PredictorInfo
from hotsplit.artifacts.profile_file import NUM_BINS, Corpus, Profile
from hotsplit.families import falcon
from hotsplit.families.decoder_sizes import Sizes
from hotsplit.families.expert_keys import Experts
from hotsplit.families.family import Architecture
from hotsplit.families.from_config import read_blueprint
from hotsplit.families.latent_keys import attention_of
from hotsplit.families.plain_decoder import decoder, decoder_spec
from hotsplit.families.table import ARCHITECTURES
from hotsplit.files.gguf_file import TensorEntry, Value, array_entry, in_memory, type_of
from hotsplit.model.arrangements import Arrangement
from hotsplit.model.blocks import PredictorKind
from hotsplit.model.latent import Latent
from hotsplit.model.neurons import SMOOTH
from hotsplit.model.rope import NO_SCALING, Pairing, RopeScaling
from hotsplit.model.spec import (
    Activation,
    Attention,
    Block,
    LayerSpec,
    ModelSpec,
    Neurons,
    Norm,
    Rotary,
    Route,
)
from hotsplit.model.tensors import is_router, is_vector
from hotsplit.model.weight_types import IN_MEMORY, TABLES
from hotsplit.model.weight_types import NAMES as KINDS
from hotsplit.solver.inputs import Inputs
from hotsplit.solver.problem import Problem

WORKSPACE = 1 << 16  # bytes of temporaries in plans of these models


def take_workspace(*given: object) -> int:
    """What `solve` takes to count the bytes of temporaries."""
    return WORKSPACE


def make_sizes(
    *,
    num_layers: int = 2,
    width: int = 64,
    num_neurons: int = 96,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_width: int | None = None,
    vocab_size: int = 50,
    context_length: int = 32,
) -> Sizes:
    """Sizes of a small decoder; by default widths are multiples of 32, as blocks of q8_0 and q4_0
    need."""
    return Sizes(
        num_layers=num_layers,
        hidden_size=width,
        num_neurons=num_neurons,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_width or width // num_heads,
        vocab_size=vocab_size,
        context_length=context_length,
    )


SANDWICH = {"arrange": Arrangement.sandwich}
# Until a family has this arrangement: files of tests are read by this architecture.
ARCHITECTURES["sandwich"] = Architecture(
    name="sandwich",
    of_keys=lambda read: decoder(
        read, pairing="adjacent", embedding_scale=read.count("embedding_length") ** 0.5, **SANDWICH
    ),
    options=ARCHITECTURES["llama"].options,
)


def sizes_of(spec: ModelSpec) -> Sizes:
    """The numbers of a model whose layers are all alike."""
    (layer,) = set(spec.layers)
    attention, (norm, *_) = spec.attentions[0], layer.norms.values()
    return Sizes(
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        num_neurons=layer.neurons.number,
        num_heads=attention.num_heads,
        num_kv_heads=attention.num_kv_heads,
        head_dim=attention.head_dim,
        vocab_size=spec.vocab_size,
        context_length=spec.context_length,
        epsilon=norm.epsilon,
    )


def family_spec(
    family: str,
    sizes: Sizes,
    activation: Activation = "relu",
    options: Collection[str] = (),
    scaling: RopeScaling = NO_SCALING,
    theta: float = 10000.0,
    is_post_norm: bool = False,
) -> ModelSpec:
    """The spec of an architecture with these sizes and optional tensors."""
    adjacent = {"llama", "sandwich"}
    pairing: Pairing = "adjacent" if family in adjacent else "halves"
    own: dict[str, dict[str, Any]] = {
        "llama": {},
        "sandwich": {"embedding_scale": sizes.hidden_size**0.5, **SANDWICH},
        "olmo2": {
            "arrange": Arrangement.output_norms,
            "has_head_norms": True,
            "attention": {"norms_all_heads": True},
        },
        "opt": {
            "rotary": None,
            "norm": "layer",
            "is_gated": False,
            "arrange": Arrangement.post_norm if is_post_norm else Arrangement.pre_norm,
            "output_norm": not is_post_norm,
            "has_positions": True,
        },
        "falcon": {
            "norm": "layer",
            "is_gated": False,
            "arrange": falcon.arrangement_with(options),
            "attention": {"is_fused": True},
        },
        "qwen2": {},
        "qwen3": {"has_head_norms": True},
    }
    numbers = {"rotary": Rotary(theta=theta, pairing=pairing, scaling=scaling)} | own[family]
    return decoder_spec(
        sizes, activation=activation, options=options, architecture=family, **numbers
    )


def mixture_spec(
    sizes: Sizes,
    *,
    route: Route | None = None,
    num_neurons: int = 37,
    activation: Activation = "silu",
    **numbers: Any,
) -> ModelSpec:
    """A Qwen 3 of experts; `numbers`: those of `Experts`."""
    route = route or Route(num_experts=6, num_used=2)
    experts = Experts(route=route, num_neurons=num_neurons, **numbers)
    rotary = Rotary(theta=10000.0, pairing="halves")
    return decoder_spec(
        sizes, rotary, activation, architecture="qwen3moe", has_head_norms=True, experts=experts
    )


def latent_spec(
    sizes: Sizes, latent: Latent, *, experts: Experts | None = None, **attention: Any
) -> ModelSpec:
    """A DeepSeek; of the sizes of heads only their number counts. `attention`: further fields."""
    own = replace(sizes, num_kv_heads=1, head_dim=latent.width)
    return decoder_spec(
        own,
        Rotary(theta=10000.0, pairing="adjacent", num_values=latent.num_rotated),
        "silu",
        architecture="deepseek2",
        attention=attention_of(latent, NO_SCALING) | attention,
        experts=experts,
    )


def gemma3n_spec(sizes: Sizes) -> ModelSpec:
    """A Gemma 3n of these sizes, without windows, cutoffs and shared keys."""
    config = {
        "architectures": ["Gemma3nForCausalLM"],
        "num_hidden_layers": sizes.num_layers,
        "hidden_size": sizes.hidden_size,
        "intermediate_size": sizes.num_neurons,
        "num_attention_heads": sizes.num_heads,
        "num_key_value_heads": sizes.num_kv_heads,
        "head_dim": sizes.head_dim,
        "vocab_size": sizes.vocab_size,
        "vocab_size_per_layer_input": sizes.vocab_size,
        "hidden_size_per_layer_input": 32,
        "max_position_embeddings": sizes.context_length,
        "layer_types": ["full_attention"] * sizes.num_layers,
        "num_kv_shared_layers": 0,
        "laurel_rank": 32,
        "final_logit_softcapping": None,
    }
    return read_blueprint(Path("config.json"), config, 1 << 20).spec


def changed(spec: ModelSpec, kind: type, **changes: object) -> ModelSpec:
    """The spec with these changes to each of its blocks of a kind; for Rotary, to those of its
    attentions."""

    def block_of(block: Block) -> Block:
        if kind is Rotary and isinstance(block, Attention) and block.rotary:
            return replace(block, rotary=replace(block.rotary, **changes))
        return replace(block, **changes) if isinstance(block, kind) else block

    layers = [replace(x, blocks=tuple(map(block_of, x.blocks))) for x in spec.layers]
    return spec.with_layers(layers)


def differing_spec(sizes: Sizes, window: int = 5) -> ModelSpec:
    """A Llama whose layers differ, in turn, in the window, the rotary embedding, the scale and cap
    of scores, the numbers and widths of heads and their norms, the growth of queries, the neurons,
    the activation and the norms' epsilon."""
    rotaries = (
        Rotary(theta=10000.0, pairing="adjacent"),
        Rotary(theta=500.0, pairing="halves", scaling=RopeScaling(kind="linear", factor=2.0)),
        None,
    )
    heads: tuple[dict[str, int], ...] = (
        {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16},
        {"num_heads": 3, "num_kv_heads": 1, "head_dim": 32},
        {"num_heads": 2, "num_kv_heads": 2, "head_dim": 32},
        {"num_heads": 6, "num_kv_heads": 2, "head_dim": 16},
    )
    layers: list[LayerSpec] = []
    base = family_spec("llama", sizes)
    for index, layer in enumerate(base.layers):
        attention = replace(
            layer.attention,
            **heads[index % 4],
            rotary=rotaries[index % 3],
            window=(window, None, 2 * window)[index % 3],
            scale=(None, 0.35, 0.2)[index % 3],
            growth=(None, 0.4, None)[index % 3],
            growth_length=(None, 7, None)[index % 3],
            score_cap=(0.6, None, 0.4)[index % 3],
        )
        if index % 4 == 1:
            width = attention.head_dim
            by_head = Norm(name="attn_q_norm", kind="layer_without_bias", size=width, epsilon=0.01)
            attention = replace(attention, head_norm=by_head, norms_by_head=True)
        number = sizes.num_neurons - 32 * (index % 2)
        activation: Activation = ("relu2", "silu", "gelu_tanh")[index % 3]
        neurons = replace(layer.neurons, number=number, activation=activation)
        own = {Attention: attention, Neurons: neurons}
        layer = replace(layer, blocks=tuple(own.get(type(b), b) for b in layer.blocks))
        layers += changed(base.with_layers([layer]), Norm, epsilon=0.01 * (1 + index % 2)).layers
    return replace(base.with_layers(layers), logit_cap=0.3)


def make_model(
    *,
    sizes: Sizes | None = None,
    spec: ModelSpec | None = None,
    kind: str = "f32",
    predictor_rank: int = 0,
    predictor_kind: PredictorKind = "linear",
    predictor_density: float | None = None,
    activation: Activation = "relu",
    is_tied: bool = False,
    seed: int = 0,
    path: Path = Path("memory.gguf"),
    extra_keys: dict[str, Value] | None = None,
    last: Sequence[str] = (),
) -> ModelFile:
    """A sparse model file in memory; `.save(path)` writes it to disk.

    Matrices have the type `kind`, norms are f32; K-quants need widths that are multiples of 256.
    With `predictor_rank` every layer gets a predictor of that rank, in f32 so that any rank will
    do. Weights are scaled so that activations neither grow nor vanish."""
    spec = spec or family_spec("llama", sizes or make_sizes(), activation)
    model = _without_tensors(
        spec, f"{spec} {seed}", path, predictor_rank, predictor_kind, predictor_density
    )
    model = replace(model, extra_keys=extra_keys or {})
    wanted = required_shapes(model, last)
    if is_tied:
        del wanted["output.weight"]
    return replace(model, tensors=_random_tensors(tuple(wanted.items()), kind, seed))


def sparse_model(
    *,
    activation: Activation = "relu",
    predictor_rank: int = 8,
    threshold: float = 0.05,
    **options: Any,
) -> ModelFile:
    """`make_model` with a threshold and predictors, unless every neuron of the activation fires."""
    silences = activation not in SMOOTH
    model = make_model(activation=activation, predictor_rank=predictor_rank * silences, **options)
    return replace(model, threshold_L=(threshold * silences,) * model.spec.num_layers)


def _without_tensors(
    spec: ModelSpec,
    identity: str,
    path: Path,
    predictor_rank: int,
    predictor_kind: PredictorKind = "linear",
    predictor_density: float | None = None,
) -> ModelFile:
    num_layers, predictor = spec.num_layers, None
    if predictor_rank:
        predictor = PredictorInfo(
            kind=predictor_kind,
            rank_L=(predictor_rank,) * num_layers,
            threshold_L=(0.0,) * num_layers,
            density_L=() if predictor_density is None else (predictor_density,) * num_layers,
        )
    return ModelFile(
        path=path,
        layout="sparse",
        model_id=hashlib.sha256(identity.encode()).hexdigest(),
        bare_spec=spec,
        keys=spec_keys(spec),
        threshold_L=(0.0,) * num_layers,
        predictor=predictor,
        tensors={},
        extra_keys={},
    )


# Arrangements of a layer: architecture, optional tensors of the layer, whether norms come after
# attention and feed-forward instead of before.
FAMILIES = {
    "llama": ("llama", (), False),
    "llama with biases": (
        "llama",
        ("attn_q.bias", "attn_k.bias", "attn_v.bias", "attn_output.bias", "ffn_down.bias"),
        False,
    ),
    "olmo2": ("olmo2", (), False),
    "sandwich with biases": ("sandwich", ("attn_output.bias", "ffn_down.bias"), False),
    "qwen3": ("qwen3", (), False),
    "opt": ("opt", ("ffn_up.bias", "ffn_down.bias"), False),
    "opt, norms after": ("opt", ("ffn_down.bias",), True),
    "falcon": ("falcon", (), False),
    "falcon, two norms": ("falcon", ("attn_norm_2.weight", "attn_norm_2.bias"), False),
    "falcon, one after the other": ("falcon", ("ffn_norm.weight", "ffn_norm.bias"), False),
}


def family_model(
    family: str,
    *,
    sizes: Sizes | None = None,
    kind: str = "f32",
    predictor_rank: int = 0,
    input_layer_offset: int = 0,
    threshold: float = 0.05,
    seed: int = 0,
    path: Path = Path("memory.gguf"),
) -> ModelFile:
    """A model like `make_model`'s with the graph of one of FAMILIES, and ReLU."""
    name, options, is_post_norm = FAMILIES[family]
    spec = family_spec(name, sizes or make_sizes(), "relu", options, is_post_norm=is_post_norm)
    model = make_model(
        spec=spec, kind=kind, predictor_rank=predictor_rank, seed=seed, path=path, last=options
    )
    predictor = model.predictor
    return replace(
        model,
        threshold_L=(threshold,) * spec.num_layers,
        predictor=predictor and replace(predictor, input_layer_offset=input_layer_offset),
    )


def decided_predictors(num_layers, num_neurons):
    """Biases for a model's predictors that keep all scores away from zero, so that rounding
    selects no other neurons."""
    random = np.random.default_rng(3)
    return {
        f"blk.{layer}.ffn_pred_up.bias": array_entry(
            5.0 * random.choice([-1, 1], num_neurons), "f32"
        )
        for layer in range(num_layers)
    }


def byte_level_keys() -> tuple[dict[str, Value], int]:
    """(keys of a tokenizer of single bytes in which no token ends a text, the number of its
    tokens)."""
    vocab = {token: i for i, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    keys: dict[str, Value] = {
        "tokenizer.huggingface.json": tokenizer.to_str(),
        "tokenizer.ggml.bos_token_id": np.uint32(0),
    }
    return keys, len(vocab)


def required_shapes(model: ModelFile, last: Sequence[str] = ()) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors that a model file with an untied head must have, by name, in the order
    in which random weights are drawn for them: those of the layers follow the others, in a layer
    predictors and biases of norms follow the weights, norms come before other weights of attention
    and of the neurons, and the names in `last` follow all layers."""
    required, _ = model.expected_shapes()
    required |= {"output.weight": (model.spec.vocab_size, model.spec.hidden_size)}

    def place(name: str) -> tuple[int, int, int]:
        if not name.startswith("blk."):
            return -1, 0, 0
        _, layer, inner = name.split(".", 2)
        if inner in last:
            return model.spec.num_layers, int(layer), last.index(inner)
        is_inner = not inner.startswith(("attn_norm", "ffn_norm"))
        return (
            int(layer),
            2 * inner.endswith(".bias") + inner.startswith("ffn_pred_"),
            2 * inner.startswith("ffn_") + is_inner,
        )

    return dict(sorted(required.items(), key=lambda item: place(item[0])))


@functools.lru_cache(maxsize=64)
def _drawn(
    shapes: tuple[tuple[str, tuple[int, ...]], ...], kind: str, seed: int
) -> dict[str, TensorEntry]:
    random = np.random.default_rng(seed)
    return {name: _random_entry(name, dims, kind, random) for name, dims in shapes}


def _random_tensors(
    shapes: tuple[tuple[str, tuple[int, ...]], ...], kind: str, seed: int
) -> dict[str, TensorEntry]:
    """Tensors with these names and shapes. Many tests want the same ones, and drawing and
    quantising them takes longer than most of those tests: small ones are kept."""
    num_values = sum(prod(dims) for _, dims in shapes)
    return dict((_drawn if num_values < 1 << 20 else _drawn.__wrapped__)(shapes, kind, seed))


def _random_entry(
    name: str, shape: tuple[int, ...], kind: str, random: np.random.Generator
) -> TensorEntry:
    kind, data = _random_array(name, shape, kind, random)
    data.setflags(write=False)  # other tests have it, too
    scale = None
    if kind == "nvfp4":
        scale = np.linspace(0.2, 0.6, prod(shape[:-2]), dtype=np.float32) * shape[-1] ** -0.5
    entry = TensorEntry(shape=shape, kind=kind, read_rows=lambda a, b: data[a:b], scale=scale)
    return in_memory(entry)


def _random_array(
    name: str, shape: tuple[int, ...], kind: str, random: np.random.Generator
) -> tuple[str, np.ndarray]:
    """A tensor's type and the bytes of its rows."""
    if len(shape) == 1:
        return "f32", (1 + 0.1 * random.standard_normal(shape)).astype(np.float32)
    values = (random.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)
    if "ffn_pred" in name or is_router(name) or is_vector(name, shape):
        return "f32", values
    if kind in ("f32", "f16"):
        return kind, values.astype(kind.replace("f", "float"))
    if kind in (*BLOCK_BYTES, *CODED, *GROUPS, *IN_MEMORY):
        num_rows, width = prod(shape[:-1]), shape[-1]
        seed = int(random.integers(1 << 30))
        rows = random_rows if kind in BLOCK_BYTES else random_small_rows
        rows = grid_rows if kind in TABLES else rows
        data = rows(kind, num_rows, width, scale=width**-0.5, seed=seed)
        return kind, data.reshape(*shape[:-1], -1)
    return kind, quants.quantize(values, type_of(kind))


def shape_only(
    sizes: Sizes,
    *,
    kind: str = "f16",
    predictor_rank: int = 0,
    architecture: str = "llama",
    spec: ModelSpec | None = None,
) -> ModelFile:
    """A model of any size with a tensor table and no weights: reading a tensor raises. `spec`:
    instead of the family's; routers are f32."""

    def read(start: int, stop: int) -> np.ndarray:
        raise AssertionError("this model has no weights to read")

    def kind_of(name: str, dims: tuple[int, ...]) -> str:
        return "f32" if len(dims) == 1 or "gate_inp" in name else kind

    spec = family_spec(architecture, sizes) if spec is None else spec
    model = _without_tensors(spec, str(spec), Path("shape-only.gguf"), predictor_rank)
    return replace(
        model,
        tensors={
            name: TensorEntry(shape=dims, kind=kind_of(name, dims), read_rows=read)
            for name, dims in required_shapes(model).items()
        },
    )


def power_law_frequencies(
    num_layers: int, num_neurons: int, *, density: float = 0.1, exponent: float = 0.8, seed: int = 0
) -> np.ndarray:
    """Firing frequencies f64 [L, F] that fall as a power of the rank, shuffled within a layer.

    A layer's density varies around `density` by a factor of up to two."""
    random = np.random.default_rng(seed)
    falling_F = np.arange(1, num_neurons + 1) ** -exponent
    rows = []
    for _ in range(num_layers):
        mean = density * 2.0 ** random.uniform(-1, 1)
        rows.append(np.minimum(0.98, random.permutation(falling_F) * mean / falling_F.mean()))
    return np.array(rows)


def make_profile(
    model: ModelFile, frequency_LF: np.ndarray | None = None, *, num_tokens: int = 10_000
) -> Profile:
    """A profile of `model` with these firing frequencies, rounded to whole counts."""
    spec = model.spec
    if frequency_LF is None:
        frequency_LF = power_law_frequencies(spec.num_layers, spec.most_neurons)
    count_LF = np.rint(np.asarray(frequency_LF) * num_tokens).astype(np.int64)
    histogram_LB = np.zeros((spec.num_layers, NUM_BINS), np.int64)
    histogram_LB[:, 0] = num_tokens * spec.most_neurons
    return Profile(
        model_id=model.model_id,
        num_tokens=num_tokens,
        threshold_L=model.threshold_L,
        corpora=(Corpus(name="synthetic", sha256="0" * 64, num_tokens=num_tokens),),
        active_count_LF=count_LF,
        gate_histogram_LB=histogram_LB,
    )


def make_machine(
    *,
    gpu_gb_per_s: float = 500.0,
    cpu_gb_per_s: float = 40.0,
    launch_s: float = 4e-6,
    hand_over_s: float = 15e-6,
    cpu_run_s: float = 17e-6,
    use_s: float = 1e-12,
    kernel_s: float | None = None,
    copy_latency_s: float = 8e-6,
    link_gb_per_s: float = 25.0,
    memory_bytes: int = 24 << 30,
    host_bytes: int = 64 << 30,
    num_gpus: int = 1,
    chosen_share: float = 1.0,
    layer_s: float = 1e-12,
    token_s: float = 1e-12,
    logit_s: float = 1e-15,
    gpu_chosen_share: float = 1.0,
) -> Machine:
    """A machine with these figures; two threads reach `cpu_gb_per_s`, one thread half of it.

    Rows of every type are read at that rate, chosen ones at `chosen_share` of it; on the GPU, at
    `gpu_chosen_share` of its rate. A kernel that reads takes as long as one that does nothing, plus
    its bytes, unless `kernel_s` is given. `use_s` is the GPU's `token_s`."""
    rate, chosen = Figure(best=cpu_gb_per_s), Figure(best=chosen_share * cpu_gb_per_s)
    gpu = Gpu(
        name="synthetic GPU",
        source="synthetic",
        memory_bytes=memory_bytes,
        free_bytes=memory_bytes,
        bandwidth_gb_per_s=Figure(best=gpu_gb_per_s),
        host_to_device_gb_per_s=Figure(best=link_gb_per_s),
        host_to_device_pageable_gb_per_s=Figure(best=8.0),
        copy_latency_s=Figure(best=copy_latency_s),
        launch_s=Figure(best=launch_s),
        chosen_rows_gb_per_s=Figure(best=gpu_chosen_share * gpu_gb_per_s),
        kernel_s=Figure(best=launch_s if kernel_s is None else kernel_s),
        token_s=Figure(best=use_s),
        hand_over_s=Figure(best=hand_over_s),
        cpu_run_s=Figure(best=cpu_run_s),
    )
    return Machine(
        cpu_name="synthetic CPU",
        num_threads=2,
        memory_bytes=host_bytes,
        free_bytes=host_bytes,
        cpu_bandwidth_gb_per_s={1: Figure(best=cpu_gb_per_s / 2), 2: Figure(best=cpu_gb_per_s)},
        cpu_sum_gb_per_s={
            2: Figure(best=cpu_gb_per_s, quartiles=(0.8 * cpu_gb_per_s,) * 3, rounds=7)
        },
        cpu_costs=CpuCosts(
            all_rows_gb_per_s=dict.fromkeys(KINDS, rate),
            chosen_rows_gb_per_s=dict.fromkeys(KINDS, chosen),
            kv_gb_per_s=rate,
            layer_s=dict.fromkeys(("exact", "predicted"), Figure(best=layer_s)),
            token_s=Figure(best=token_s),
            logit_s=Figure(best=logit_s),
        ),
        gpus=(gpu,) * num_gpus,
        versions={},
    )


def save_solver_files(folder: Path, model: ModelFile | None = None, **machines: Machine) -> Path:
    """Saves a model as m.gguf, a profile of it as p, and machines under their names, by default a
    slow one as c; returns the folder."""
    if model is None:
        model = make_model(sizes=make_sizes(num_layers=3), kind="f16", predictor_rank=8)
    model.save(folder / "m.gguf")
    make_profile(model).save(folder / "p")
    slow = make_machine(cpu_gb_per_s=0.005, gpu_gb_per_s=0.5, launch_s=1e-7, hand_over_s=1e-7)
    for name, machine in (machines or {"c": slow}).items():
        machine.save(folder / name)
    return folder


def make_inputs(
    model: ModelFile, profile: Profile, machine: Machine, *budgets: int, **options: Any
) -> Inputs:
    """Inputs of the solver with WORKSPACE and more main memory than is needed, in mode
    exact for the model's whole context."""
    values = {
        "mode": "exact",
        "workspace": WORKSPACE,
        "host_budget": 1 << 60,
        "context_length": model.spec.context_length,
    } | options
    paths = (model.path,) * 3
    return Inputs(
        model=model, profile=profile, machine=machine, paths=paths, budgets=budgets, **values
    )


def make_problem(
    model: ModelFile, profile: Profile, machine: Machine, budget: int, **options: Any
) -> Problem:
    """The placement problem of `make_inputs`, for one GPU."""
    return make_inputs(model, profile, machine, budget, **options).pipeline().model


def solver_files(folder: Path) -> dict[str, Any]:
    """The inputs of a SolveConfig in a folder of `save_solver_files`."""
    return {"model": folder / "m.gguf", "profile": folder / "p", "machine": folder / "c"}


def load_solver_files(folder: Path) -> dict[str, Any]:
    """What `verify` takes, from a folder of `save_solver_files`."""
    kinds = {"model": ModelFile, "profile": Profile, "machine": Machine}
    return {name: kinds[name].load(path) for name, path in solver_files(folder).items()}
