"""Mixtures of experts: their numbers, from a checkpoint's config or a GGUF's keys, and where a
checkpoint has the matrices of each expert."""

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

import gguf
import numpy as np

from hotsplit.errors import HotsplitError
from hotsplit.families.blueprint import NameOf, gguf_names, suffixed
from hotsplit.families.config_reader import ConfigReader
from hotsplit.families.key_reader import KeyReader
from hotsplit.files.gguf_file import Value
from hotsplit.files.typed import shown
from hotsplit.model.arrangements import Mixture
from hotsplit.model.route import Gating
from hotsplit.model.spec import Activation, ModelSpec, Neurons, Route

MAX_EXPERTS = 4096
# llama.cpp's numbers (llama_expert_gating_func_type).
GATINGS: dict[int, Gating] = {1: "softmax", 2: "sigmoid", 3: "softmax_of_chosen"}
# Names of the number of experts in configs, in the order in which they are looked for.
COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
KEYS = (
    "expert_count",
    "expert_used_count",
    "expert_feed_forward_length",
    "expert_shared_count",
    "expert_shared_feed_forward_length",
    "expert_gating_func",
    "expert_weights_norm",
    "expert_weights_scale",
    "expert_group_count",
    "expert_group_used_count",
    "leading_dense_block_count",
)


@dataclass(frozen=True, kw_only=True)
class Experts:
    """The numbers of the experts of a model. `num_neurons`: of one; `num_shared`: neurons of the
    shared experts, 0 without any; `num_dense`: layers at the beginning without experts."""

    route: Route
    num_neurons: int
    num_shared: int = 0
    has_shared_gate: bool = False
    num_dense: int = 0
    is_gated: bool = True

    def mixture(self, activation: Activation, options: Collection[str] = ()) -> Mixture:
        """`options`: names of optional tensors, of which the biases are used."""
        count = self.route.num_experts
        experts = Neurons(
            number=count * self.num_neurons,
            activation=activation,
            is_gated=self.is_gated,
            suffix="_exps",
            num_experts=count,
        )
        names = (*experts.matrices, experts.down_name)
        biases = frozenset(name for name in names if f"{name}.bias" in options)
        shared = None
        if self.num_shared:
            shared = Neurons(
                number=self.num_shared,
                activation=activation,
                is_gated=self.is_gated,
                suffix="_shexp",
                has_output_gate=self.has_shared_gate,
                writes="shared_out",
            )
        return Mixture(route=self.route, experts=replace(experts, biases=biases), shared=shared)


def expert_keys(
    read: ConfigReader,
    *,
    neurons: str = "moe_intermediate_size",
    used: str = "num_experts_per_tok",
    gating: Gating = "softmax",
    renormalises: bool = True,
    scale: float = 1.0,
    shared: int = 0,
    num_dense: int = 0,
    groups: tuple[int, int] = (1, 1),
) -> dict[str, Value]:
    """The keys that `experts_of_keys` reads. neurons, used: the config's keys of the neurons of an
    expert and of the experts of a token. shared: neurons of the shared experts, 0 without any.
    groups: their number, and how many a token uses."""
    key = next((name for name in COUNTS if name in read.said), None)
    key = key or next((name for name in COUNTS if name in read.values), COUNTS[0])
    count = read.values.get(key)
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MAX_EXPERTS:
        raise HotsplitError(
            f"{read.path}: {key} is {shown(count)}, wanted a number of experts from 1 to"
            f" {MAX_EXPERTS}"
        )
    keys: dict[str, Value] = {
        "expert_count": np.uint32(count),
        "expert_used_count": np.uint32(read.count(used)),
        "expert_feed_forward_length": np.uint32(length := read.count(neurons)),
        "expert_gating_func": np.uint32(next(n for n, each in GATINGS.items() if each == gating)),
        "expert_weights_norm": renormalises,
        "expert_weights_scale": np.float32(scale),
    }
    if shared:
        keys["expert_shared_feed_forward_length"] = np.uint32(shared)
        keys["expert_shared_count"] = np.uint32(max(1, shared // length))
    if num_dense:
        keys["leading_dense_block_count"] = np.uint32(num_dense)
    if groups[0] > 1:
        keys["expert_group_count"], keys["expert_group_used_count"] = map(np.uint32, groups)
    return keys


# A bias for the choice alone, under the names that configs' families have for it.
with_choice_bias = suffixed(
    {".e_score_correction_bias": ".e_score_correction.bias", ".expert_bias": ".expert_bias.bias"}
)


def dense_layers(read: ConfigReader) -> int:
    """The number of layers without experts, which are the first, by `mlp_only_layers` and
    `decoder_sparse_step` (transformers, modeling_qwen2_moe.py)."""
    only, step = read.values.get("mlp_only_layers") or [], read.count("decoder_sparse_step")
    num_layers = read.count("num_hidden_layers")
    if not isinstance(only, list):
        raise HotsplitError(f"{read.path}: mlp_only_layers is {shown(only)}, wanted a list")
    are_dense = [layer in only or (layer + 1) % step != 0 for layer in range(num_layers)]
    return leading_dense(read, are_dense, "mlp_only_layers, decoder_sparse_step")


def dense_layers_of_types(read: ConfigReader, default: int) -> int:
    """The same by `mlp_layer_types`; `default`: without that key."""
    types, num_layers = read.values.get("mlp_layer_types"), read.count("num_hidden_layers")
    if types is None:
        return min(default, num_layers)
    known = {"dense", "sparse"}
    if not isinstance(types, list) or len(types) != num_layers or not known.issuperset(types):
        raise HotsplitError(
            f"{read.path}: mlp_layer_types is {shown(types)}, wanted {num_layers} of dense or"
            " sparse; this checkpoint is not supported"
        )
    return leading_dense(read, [each == "dense" for each in types], "mlp_layer_types")


def leading_dense(read: ConfigReader, are_dense: list[bool], keys: str) -> int:
    """The number of layers without experts, if they are the first; `keys` say so."""
    count = are_dense.index(False) if False in are_dense else len(are_dense)
    if any(are_dense[count:]):
        raise HotsplitError(
            f"{read.path}: layers without experts ({keys}) are supported only before all others;"
            " this checkpoint is not supported"
        )
    return count


def with_dense_layers(num_layers: int) -> Callable[[NameOf], NameOf]:
    """The names, with those of neurons in layers without experts, which llama.cpp's map for a graph
    that has experts in all layers lacks."""
    of_dense = gguf_names(gguf.MODEL_ARCH.LLAMA, num_layers)
    return lambda name_of: lambda source: name_of(source) or of_dense(source)


def experts_of_keys(
    read: KeyReader,
    *,
    gating: Gating = "softmax",
    renormalises: bool = True,
    default_length: int | None = None,
    has_shared: bool = False,
    has_shared_gate: bool = False,
    reads: str = "ffn_in",
) -> Experts:
    """The experts by a GGUF's keys; the arguments are what llama.cpp's graph does if a key is
    absent. `default_length`: neurons of an expert; None: `feed_forward_length`."""
    name, tensors = read.graph.name, read.tensors
    num_layers = read.count("block_count") - read.num_skipped
    count = read.whole("expert_count")
    # By number, not by name: tensors of the last layer, since the first may have no experts.
    last = f"blk.{num_layers - 1}."
    func = read.whole("expert_gating_func", next(n for n, g in GATINGS.items() if g == gating))
    if func not in GATINGS:
        raise HotsplitError(
            f"{read.path}: key '{name}.expert_gating_func' is {func}, wanted one of"
            f" {', '.join(map(str, GATINGS))}: this router is not supported"
        )
    norm_key, scale_key = f"{name}.expert_weights_norm", f"{name}.expert_weights_scale"
    route = Route(
        num_experts=count,
        num_used=read.whole("expert_used_count"),
        gating=GATINGS[func],
        renormalises=read.flag(norm_key) if norm_key in read.keys else renormalises,
        scale=read.positive(scale_key) if read.number(scale_key, 0.0) else 1.0,  # as in llama.cpp
        has_bias=f"{last}ffn_gate_inp.bias" in tensors,
        has_choice_bias=f"{last}exp_probs_b.bias" in tensors,
        num_groups=read.whole("expert_group_count", 1) or 1,
        num_used_groups=read.whole("expert_group_used_count", 1) or 1,
        reads=reads,
    )
    length = (
        read.whole("expert_feed_forward_length", 0)
        or default_length
        or read.count("feed_forward_length")
    )
    shared = read.whole("expert_shared_feed_forward_length", 0)
    shared = shared or length * read.whole("expert_shared_count", 0)
    experts = Experts(
        route=route,
        num_neurons=length,
        num_shared=shared if has_shared else 0,
        has_shared_gate=has_shared_gate,
        num_dense=read.whole("leading_dense_block_count", 0),
    )
    _check(str(read.path), experts, num_layers)
    return experts


def _check(where: str, experts: Experts, num_layers: int) -> None:
    """Raises HotsplitError, which begins with `where`, for numbers that do not fit together."""
    count, used = experts.route.num_experts, experts.route.num_used
    groups, used_groups = experts.route.num_groups, experts.route.num_used_groups
    faults = {
        f"{count} experts, wanted 1 to {MAX_EXPERTS}": not 1 <= count <= MAX_EXPERTS,
        f"{used} experts a token of {count}": not 1 <= used <= count,
        f"{count} experts do not divide into {groups} groups of two or more": (
            groups > 1 and (count % groups or count < 2 * groups)
        ),
        f"{used_groups} groups a token of {groups}": not 1 <= used_groups <= groups,
        f"{used} experts a token from {used_groups} of {groups} groups of {count} experts": (
            used * groups > count * used_groups
        ),
        f"{experts.num_dense} layers without experts of {num_layers}": (
            not 0 <= experts.num_dense < num_layers
        ),
    }
    fault = next((words for words, is_wrong in faults.items() if is_wrong), None)
    if fault is not None:
        raise HotsplitError(f"{where}: {fault}: no such mixture; get the model again")


def other_in_stock(spec: ModelSpec, *, renormalises: bool) -> str | None:
    """What llama.cpp's graph of a softmax router without keys of its own computes otherwise."""
    route = spec.layers[-1].route
    if route is None:
        return None
    if spec.layers[0].route is None:
        return "has experts in every layer, this model not in the first"
    if route.renormalises != renormalises:
        does, other = ("divides", "does not") if renormalises else ("does not divide", "does")
        return f"{does} the weights of experts by their sum, this model {other}"
    return None


def plain_weights_in_stock(spec: ModelSpec) -> str | None:
    """What llama.cpp's graph that reads no keys of the weights of experts computes otherwise."""
    route = spec.layers[-1].route
    if route is None or (route.renormalises and route.scale == 1.0):
        return None
    return "divides the weights of experts by their sum and does not scale them, unlike this model"


# ---- where a checkpoint has experts --------------------------------------------------------------

# Names of an expert's matrices, or of all experts' together, and ours.
_MATRICES = {
    **dict.fromkeys(("gate_proj", "w1", "gate"), "ffn_gate"),
    **dict.fromkeys(("up_proj", "w3", "up"), "ffn_up"),
    **dict.fromkeys(("down_proj", "w2", "down"), "ffn_down"),
}
_LAYER = (
    r"(?:model|backbone)\.(?:language_model\.)?layers\.(\d+)\."
    r"(?:(?:mlp|block_sparse_moe|feed_forward|mixer)\.)?"
)
_ONE = re.compile(_LAYER + r"experts\.(\d+)\.(\w+)\.weight")
_ALL = re.compile(
    _LAYER + r"(?:experts\.(gate_up|up|down)_proj(_bias)?|(input|output)_linear\.weight)"
)


@dataclass(frozen=True, kw_only=True)
class ExpertPlace:
    """Where in a model file the experts of a checkpoint's tensor are. `expert`: the only one that
    it has; None: all, [E, N, M]. `names`: tensors of the model file; of two, the first has the
    first half of each expert's rows."""

    names: tuple[str, ...]
    expert: int | None = None


def expert_place(source: str) -> ExpertPlace | None:
    """The place of a tensor of experts, as published and as transformers 5 joins them
    (conversion_mapping.py); None for another tensor."""
    if (one := _ONE.fullmatch(source)) is not None and one[3] in _MATRICES:
        name = f"blk.{one[1]}.{_MATRICES[one[3]]}_exps.weight"
        return ExpertPlace(names=(name,), expert=int(one[2]))
    if (every := _ALL.fullmatch(source)) is not None:
        alone = {"down": "ffn_down", "up": "ffn_up", "output": "ffn_down"}
        stem = alone.get(every[2] or every[4])
        stems = _JOINED if stem is None else (stem,)
        part = "bias" if every[3] == "_bias" else "weight"
        return ExpertPlace(names=tuple(f"blk.{every[1]}.{stem}_exps.{part}" for stem in stems))
    return None


_JOINED = ("ffn_gate", "ffn_up")
