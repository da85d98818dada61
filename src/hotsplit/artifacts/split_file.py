"""model.split.gguf, the plan: the neurons and dense blocks on the GPU, and the predicted time.

Specified in docs/formats.md. `check_against` compares its byte counts with a model file."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from annotated_types import Ge

from hotsplit.artifacts.cache_plan import CachePlan
from hotsplit.artifacts.model_file import ModelFile
from hotsplit.artifacts.model_gguf import SPLIT_ARCHITECTURE
from hotsplit.costs import part_bytes
from hotsplit.costs.cache_bytes import CacheSize
from hotsplit.errors import HotsplitError, about
from hotsplit.files.atomic import sha256_of
from hotsplit.files.declared import (
    Count,
    CountFrom1,
    Lax,
    Line,
    NotNegative,
    Positive,
    Rule,
    read_declared,
)
from hotsplit.files.gguf_file import TensorEntry, Value, array_entry, read_gguf, write_gguf
from hotsplit.files.typed import other_version, shown
from hotsplit.model.modes import Mode, runs_predictors
from hotsplit.model.together import refuse_apart
from hotsplit.model.unsupported import refuse_divided
from hotsplit.options.cache_types import CacheTypes
from hotsplit.options.key_selection import KeySelection
from hotsplit.options.prompt_rates import PromptRates

VERSION = 1
_PREFIX = "hotsplit.split."
UNKNOWN = "unknown"
_OrNone = Annotated[int, Ge(-1)]
Bytes = Annotated[
    dict[str, Count],
    Rule(
        lambda items: items.keys() == set(part_bytes.ITEMS),
        f"the bytes of {', '.join(part_bytes.ITEMS)}",
    ),
]


@dataclass(frozen=True, kw_only=True)
class SplitKeys:
    """The keys of the file, without their prefix."""

    model_id: Line
    mode: Mode  # how the feed-forward layers run
    vram_budget_bytes: Count
    context_length: CountFrom1
    # Per layer: attention, norms, predictor, router, shared experts, KV cache unless kv_offload.
    dense_on_gpu: tuple[Annotated[bool, Lax], ...]
    head_on_gpu: bool  # output norm and output matrix
    gpu_bytes: Bytes
    cpu_bytes: Bytes
    status: str
    objective_s: Positive  # predicted seconds per token
    bound_s: NotNegative  # lower bound for all plans that keep to the rules in docs/solver.md
    solve_s: NotNegative
    # The GPU of each layer and, last, of the head, in non-decreasing order; () for one GPU.
    home: tuple[Count, ...] = ()
    # Per GPU; () for one GPU. Stored as text.
    gpu_budget_bytes: tuple[Annotated[Count, Lax], ...] = ()
    host_budget_bytes: Count = 0  # 0: not limited
    profile_sha256: str = UNKNOWN  # of the files that the plan was made from
    machine_sha256: str = UNKNOWN
    num_sequences: CountFrom1 = 1  # texts at a time, each with its own context in the KV cache
    num_experts: Count = 0  # of a layer of a mixture, of which `hot` lists experts; 0: neurons
    # By which a prompt's experts on the CPU are computed there or streamed; None: all are streamed.
    prompt_rates: PromptRates | None = None
    # The dense block of the draft block, and its keys and values, are on the GPU that has those of
    # the last layer that attends; False: in main memory.
    draft_on_gpu: bool = False


@dataclass(frozen=True, kw_only=True)
class Split(SplitKeys):
    # Per layer: int32 ids of the neurons, or the experts, on the GPU, hottest first.
    hot: tuple[np.ndarray, ...]
    cache: CachePlan | None = None  # the neuron cache; None: hot neurons stay as planned
    # If set, keys and values are in main memory, and a token reads those that this rule selects.
    # None: they are where their layer's attention runs, and all are read.
    kv_offload: KeySelection | None = None
    # Per layer: int32 ids, ascending, of the experts that stay in main memory; the others that are
    # not on a GPU are read from the drive when a token chooses them. None: all are in main memory.
    # (): so they are in every layer.
    resident_experts: tuple[np.ndarray | None, ...] = ()

    @property
    def num_on_drive_L(self) -> list[int]:
        """Experts of each layer that are in no memory."""
        there = self.resident_experts or (None,) * len(self.hot)
        return [
            0 if ids is None else self.num_experts - len(hot) - len(ids)
            for hot, ids in zip(self.hot, there, strict=True)
        ]

    @property
    def units(self) -> Literal["neurons", "experts"]:
        """What `hot` lists."""
        return "experts" if self.num_experts else "neurons"

    @property
    def budgets(self) -> tuple[int, ...]:
        return self.gpu_budget_bytes or (self.vram_budget_bytes,)

    @property
    def is_whole(self) -> bool:
        """True if everything but the embedding is on GPUs."""
        return self.head_on_gpu and all(self.dense_on_gpu) and not self.cpu_bytes["neurons"]

    @property
    def gap(self) -> float:
        """Upper bound on the distance to the best plan, as a share of the objective."""
        return max(0.0, 1.0 - self.bound_s / self.objective_s)

    @classmethod
    def load(cls, path: Path) -> "Split":
        """Raises HotsplitError for anything but a whole, valid split file."""
        keys, tensors = read_gguf(path, "split file (hotsplit solve)")
        if keys.get("general.architecture") != SPLIT_ARCHITECTURE:
            raise HotsplitError(f"{path}: not a split file; make one with hotsplit solve")
        version = keys.get(_PREFIX + "version")
        if not isinstance(version, np.integer) or version != VERSION:
            again = "run hotsplit solve again"
            raise HotsplitError(f"{path}: {other_version(version, VERSION, again)}")
        with about(path, "; run hotsplit solve again"):
            # A plan's own keys without their prefix.
            values: dict[str, Any] = {}
            groups: dict[str, dict[str, Value]] = {}
            for key, value in keys.items():
                if not key.startswith(("general.", "GGUF.", _PREFIX + "version")):
                    group, _, name = key.removeprefix(_PREFIX).rpartition(".")
                    (groups.setdefault(group, {}) if group else values)[name] = value
            values = values | groups
            counts = read_declared(tuple[Count, ...], values.pop("hot_count", None), "hot_count")
            hot = _take_ids(tensors, "hot", counts)
            found = values.pop("resident_count", None)
            resident: list[np.ndarray | None] = []
            if found is not None:
                there = read_declared(tuple[_OrNone, ...], found, "resident_count")
                ids_L = _take_ids(tensors, "resident", [max(0, count) for count in there])
                pairs = zip(there, ids_L, strict=True)
                resident = [None if count < 0 else ids for count, ids in pairs]
            if "prompt" in values:
                values["prompt_rates"] = values.pop("prompt")
            cache, offload = values.pop("cache", None), values.pop("kv_offload", None)
            split = cls(
                hot=tuple(hot),
                resident_experts=tuple(resident),
                cache=cache and CachePlan.take(cache, tensors, len(counts)),
                kv_offload=None if offload is None else KeySelection.parse(str(offload)),
                **vars(read_declared(SplitKeys, values)),
            )
            if tensors:
                raise HotsplitError(f"unknown tensor {shown(min(tensors))}")
            split.validate()
        return split

    def save(self, path: Path) -> None:
        self.validate()
        keys: dict[str, Value] = {
            "version": np.uint32(VERSION),
            "model_id": self.model_id,
            "mode": self.mode,
            "vram_budget_bytes": np.uint64(self.vram_budget_bytes),
            "context_length": np.uint32(self.context_length),
            "head_on_gpu": self.head_on_gpu,
            "status": self.status,
            "objective_s": np.float64(self.objective_s),
            "bound_s": np.float64(self.bound_s),
            "solve_s": np.float64(self.solve_s),
            "host_budget_bytes": np.uint64(self.host_budget_bytes),
            "profile_sha256": self.profile_sha256,
            "machine_sha256": self.machine_sha256,
            "dense_on_gpu": [int(flag) for flag in self.dense_on_gpu],
            "hot_count": [len(ids) for ids in self.hot],
        }
        if self.home:
            keys["home"] = list(self.home)
            keys["gpu_budget_bytes"] = [str(number) for number in self.gpu_budget_bytes]
        if self.num_sequences > 1:
            keys["num_sequences"] = np.uint32(self.num_sequences)
        if self.kv_offload is not None:
            keys["kv_offload"] = str(self.kv_offload)
        if self.num_experts:
            keys["num_experts"] = np.uint32(self.num_experts)
        if self.draft_on_gpu:
            keys["draft_on_gpu"] = True
        if self.prompt_rates is not None:
            rates = vars(self.prompt_rates)
            keys |= {f"prompt.{name}": np.float64(seconds) for name, seconds in rates.items()}
        for side, items in (("gpu_bytes", self.gpu_bytes), ("cpu_bytes", self.cpu_bytes)):
            keys |= {f"{side}.{item}": np.uint64(count) for item, count in items.items()}
        tensors = {
            f"blk.{layer}.ffn_hot": array_entry(ids, "i32")
            for layer, ids in enumerate(self.hot)
            if len(ids)
        }
        if self.resident_experts:
            there = self.resident_experts
            keys["resident_count"] = [-1 if ids is None else len(ids) for ids in there]
            tensors |= {
                f"blk.{layer}.ffn_resident": array_entry(ids, "i32")
                for layer, ids in enumerate(there)
                if ids is not None and len(ids)
            }
        if self.cache is not None:
            keys |= self.cache.keys()
            tensors |= self.cache.tensors()
        own = {_PREFIX + name: value for name, value in keys.items()}
        write_gguf(path, SPLIT_ARCHITECTURE, own, tensors)

    def validate(self) -> None:
        """Raises HotsplitError if the plan contradicts itself."""
        if not self.hot or len(self.hot) != len(self.dense_on_gpu):
            raise HotsplitError(f"{len(self.hot)} layers, {len(self.dense_on_gpu)} dense blocks")
        for layer, ids in enumerate(self.hot):
            is_whole = ids.dtype == np.int32 and ids.ndim == 1 and not (ids < 0).any()
            if not is_whole or len(np.unique(ids)) != len(ids):
                raise HotsplitError(f"layer {layer}: ids must be distinct int32, at least 0")
        used, held = sum(self.gpu_bytes.values()), sum(self.cpu_bytes.values())
        if used > self.vram_budget_bytes:
            raise HotsplitError(f"{used:,} bytes for a budget of {self.vram_budget_bytes:,}")
        if self.host_budget_bytes and held > self.host_budget_bytes:
            raise HotsplitError(
                f"{held:,} bytes of main memory for a budget of {self.host_budget_bytes:,}"
            )
        self._validate_gpus()
        self._validate_cache()
        self._validate_resident()
        if not 0 <= self.bound_s <= self.objective_s * (1 + 1e-9):
            raise HotsplitError(f"bound {self.bound_s} above objective {self.objective_s}")

    def _validate_gpus(self) -> None:
        if not self.home and not self.gpu_budget_bytes:
            return
        is_rising = list(self.home) == sorted(self.home)
        if len(self.home) != len(self.hot) + 1 or not is_rising:
            raise HotsplitError(
                f"homes {list(self.home)}, wanted one per layer and one of the head, never"
                " decreasing"
            )
        budgets = self.gpu_budget_bytes
        if self.home[-1] >= len(budgets) or sum(budgets) != self.vram_budget_bytes:
            raise HotsplitError(
                f"budgets {list(budgets)} for homes up to {self.home[-1]} and"
                f" {self.vram_budget_bytes:,} bytes in all"
            )

    def _validate_resident(self) -> None:
        there = self.resident_experts
        if not there:
            return
        if not self.num_experts or self.home or self.cache is not None:
            raise HotsplitError(
                "experts on the drive of a model without experts, of several GPUs, or beside a"
                " neuron cache"
            )
        if len(there) != len(self.hot):
            raise HotsplitError(f"resident experts of {len(there)} layers for {len(self.hot)}")
        for layer, (hot, ids) in enumerate(zip(self.hot, there, strict=True)):
            if ids is None:
                continue
            is_whole = ids.dtype == np.int32 and ids.ndim == 1 and not (ids < 0).any()
            if not is_whole or (np.diff(ids) <= 0).any() or np.isin(ids, hot).any():
                raise HotsplitError(
                    f"layer {layer}: resident experts must be ascending int32, at least 0, and not"
                    " on a GPU"
                )

    def _validate_cache(self) -> None:
        if self.draft_on_gpu and (self.cache is not None or self.kv_offload is not None):
            raise HotsplitError(
                "a draft block on a GPU beside a neuron cache, or keys in main memory"
            )
        if self.cache is None:
            return
        if self.mode == "dense" and not self.num_experts:
            raise HotsplitError("a neuron cache in mode dense, which reads every neuron")
        if self.home:
            raise HotsplitError("a neuron cache over several GPUs")
        if self.cache.num_layers != len(self.hot):
            raise HotsplitError(
                f"a neuron cache of {self.cache.num_layers} layers for {len(self.hot)}"
            )

    def held(self, model: ModelFile) -> ModelFile:
        """The model as held in memory under this plan: with predictors only in mode predicted."""
        return held_in(model, self.mode)

    @property
    def cache_size(self) -> CacheSize | None:
        if self.cache is None:
            return None
        return CacheSize(most_rows=self.cache.most_rows, packs_bits=not runs_predictors(self.mode))

    def cache_types(self, model: ModelFile) -> CacheTypes:
        """How keys and values are stored under this plan, and which of them a token reads."""
        return replace(CacheTypes.of(model.kv_kind), selection=self.kv_offload)

    def items_of_gpus(self, model: ModelFile) -> tuple[list[part_bytes.Items], part_bytes.Items]:
        """Itemised bytes of each GPU, and of the CPU, recomputed from the model file; only the
        workspace is as the plan states it."""
        return part_bytes.plan_bytes(
            self.held(model),
            context_length=self.context_length,
            num_hot=[len(ids) for ids in self.hot],
            dense_on_gpu=self.dense_on_gpu,
            head_on_gpu=self.head_on_gpu,
            workspace=self.cpu_bytes["workspace"],
            home=self.home,
            neuron_cache=self.cache_size,
            num_sequences=self.num_sequences,
            cache_types=self.cache_types(model),
            draft_on_gpu=self.draft_on_gpu,
            num_resident=[None if ids is None else len(ids) for ids in self.resident_experts],
        )

    def check_files(self, plan: Path, *, profile: Path | None, machine: Path | None = None) -> None:
        """Raises HotsplitError if a file that is given is not the one that the plan was made
        from, as far as the plan names it."""
        files = (
            ("profile", profile, self.profile_sha256),
            ("machine file", machine, self.machine_sha256),
        )
        for what, path, known in files:
            if path is not None and known != UNKNOWN and sha256_of(path) != known:
                raise HotsplitError(
                    f"{plan}: was made from another {what} than {path}, or it has changed since;"
                    " run hotsplit solve again"
                )

    def check_against(self, model: ModelFile, path: Path) -> None:
        """Raises HotsplitError if the plan is for another model, or for other layers or neurons,
        if its context is too long for the model, or if its bytes are wrong or exceed a budget."""
        if self.model_id != model.model_id:
            raise HotsplitError(
                f"{path}: made for model {self.model_id[:12]}, but {model.path} is"
                f" {model.model_id[:12]}; run hotsplit solve on this model"
            )
        if self.context_length > model.spec.context_length:
            raise HotsplitError(
                f"{path}: for a context of {self.context_length} tokens, {model.path} has up to"
                f" {model.spec.context_length}; give the --rope-scaling that it was made with, or"
                " run hotsplit solve again"
            )
        layers = model.spec.layers
        if len(self.hot) != len(layers) or any(
            (ids < 0).any() or (ids >= part_bytes.placed_units(model, layer)[0]).any()
            for layer, ids in enumerate(self.hot)
        ):
            raise HotsplitError(f"{path}: names layers, neurons or experts missing in {model.path}")
        for layer, ids in enumerate(self.resident_experts):
            number = layers[layer].neurons.num_experts if layers[layer].route is not None else 0
            if ids is not None and (not number or (ids >= number).any()):
                raise HotsplitError(f"{path}: names layers or experts missing in {model.path}")
        refuse_divided(path, model.spec, self.hot)
        if self.draft_on_gpu and (
            model.draft is None or not self.dense_on_gpu[model.spec.last_attending]
        ):
            raise HotsplitError(
                f"{path}: has a draft block on a GPU that {model.path} lacks, or that does not have"
                " the last layer's attention; run hotsplit solve on this model"
            )
        groups = model.spec.together(keys_on_host=self.kv_offload is not None)
        refuse_apart(path, groups, self.dense_on_gpu, self.home)
        num_experts = max(layer.neurons.num_experts for layer in layers)
        if self.num_experts and self.num_experts != num_experts:
            raise HotsplitError(
                f"{path}: places {self.num_experts} experts of a layer, {model.path} has"
                f" {num_experts}; run hotsplit solve on this model"
            )
        number = part_bytes.most_units(model.spec)
        if self.cache is not None and self.cache.frequency_LF.shape[1] != number:
            raise HotsplitError(
                f"{path}: its neuron cache has frequencies of {self.cache.frequency_LF.shape[1]}"
                f" {self.units} a layer, {model.path} has {number}; run hotsplit solve on this file"
            )
        gpus, cpu = self.items_of_gpus(model)
        for number, (items, limit) in enumerate(zip(gpus, self.budgets, strict=False)):
            if sum(items.values()) > limit:
                raise HotsplitError(
                    f"{path}: {sum(items.values()):,} bytes on GPU {number} for a budget of"
                    f" {limit:,}; run hotsplit solve on this file"
                )
        gpu = {item: sum(items[item] for items in gpus) for item in part_bytes.ITEMS}
        sides = (("GPU", gpu, self.gpu_bytes), ("CPU", cpu, self.cpu_bytes))
        for item, (side, found, said) in product(part_bytes.ITEMS, sides):
            if found[item] != said[item]:
                raise HotsplitError(
                    f"{path}: {item} of {model.path} takes {found[item]:,} bytes on the {side}, but"
                    f" the plan says {said[item]:,}; run hotsplit solve on this file"
                )


def _take_ids(
    tensors: dict[str, TensorEntry], name: str, counts: Sequence[int]
) -> list[np.ndarray]:
    """Takes each layer's ids out of the tensors. Raises HotsplitError for other counts."""
    ids_L = []
    for layer, count in enumerate(counts):
        entry = tensors.pop(f"blk.{layer}.ffn_{name}", None) if count else None
        ids_L.append(np.zeros(0, np.int32) if entry is None else np.array(entry.read()))
    if list(counts) != [len(ids) for ids in ids_L]:
        raise HotsplitError(f"{name}_count differs from the tensors")
    return ids_L


def held_in(model: ModelFile, mode: Mode) -> ModelFile:
    """The model as a mode holds it in memory: without predictors that it does not run."""
    if model.predictor is None or runs_predictors(mode):
        return model
    kept = {
        name: entry
        for name, entry in model.tensors.items()
        if not part_bytes.is_predictor(name.removeprefix("blk.").partition(".")[2])
    }
    return replace(model, predictor=None, tensors=kept)
