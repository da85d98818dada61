"""model.split.gguf, the plan: the neurons and dense blocks on the GPU, and the predicted time.

Specified in docs/formats.md. `check_against` compares its byte counts with a model file."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Literal

import numpy as np

from hotsplit.artifacts.cache_plan import KEYS, CachePlan
from hotsplit.artifacts.model_file import ModelFile
from hotsplit.artifacts.model_gguf import SPLIT_ARCHITECTURE
from hotsplit.costs.cache_bytes import CacheSize
from hotsplit.costs.part_bytes import (
    ITEMS,
    Items,
    is_predictor,
    kv_kind,
    most_units,
    placed_units,
    plan_bytes,
)
from hotsplit.errors import HotsplitError
from hotsplit.files.atomic import sha256_of
from hotsplit.files.gguf_file import Value, array_entry, read_gguf, write_gguf
from hotsplit.files.typed import Fields, other_version, shown
from hotsplit.model.modes import MODES, Mode, runs_predictors
from hotsplit.model.together import refuse_apart
from hotsplit.model.unsupported import refuse_divided
from hotsplit.options.cache_types import CacheTypes
from hotsplit.options.key_selection import KeySelection
from hotsplit.options.prompt_rates import PromptRates

VERSION = 1
_PREFIX = "hotsplit.split."
UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True)
class Split:
    model_id: str
    mode: Mode  # how the feed-forward layers run
    vram_budget_bytes: int
    context_length: int
    # Per layer: int32 ids of the neurons, or the experts, on the GPU, hottest first.
    hot: tuple[np.ndarray, ...]
    # Per layer: attention, norms, predictor, router, shared experts, KV cache unless kv_offload.
    dense_on_gpu: tuple[bool, ...]
    head_on_gpu: bool  # output norm and output matrix
    gpu_bytes: Items
    cpu_bytes: Items
    status: str
    objective_s: float  # predicted seconds per token
    bound_s: float  # lower bound for all plans that keep to the rules in docs/solver.md
    solve_s: float
    # The GPU of each layer and, last, of the head, in non-decreasing order; () for one GPU.
    home: tuple[int, ...] = ()
    gpu_budget_bytes: tuple[int, ...] = ()  # per GPU; () for one GPU
    host_budget_bytes: int = 0  # 0: not limited
    profile_sha256: str = UNKNOWN  # of the files that the plan was made from
    machine_sha256: str = UNKNOWN
    cache: CachePlan | None = None  # the neuron cache; None: hot neurons stay as planned
    num_sequences: int = 1  # texts at a time, each with its own context in the KV cache
    # If set, keys and values are in main memory, and a token reads those that this rule selects.
    # None: they are where their layer's attention runs, and all are read.
    kv_offload: KeySelection | None = None
    num_experts: int = 0  # of a layer of a mixture, of which `hot` lists experts; 0: neurons
    # By which a prompt's experts on the CPU are computed there or streamed; None: all are streamed.
    prompt_rates: PromptRates | None = None

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
        try:
            read = Fields({k.removeprefix(_PREFIX): v for k, v in keys.items()})
            _refuse_unknown(keys)
            counts = read.counts("hot_count")
            names = [f"blk.{layer}.ffn_hot" for layer in range(len(counts))]
            none = np.zeros(0, np.int32)
            hot = tuple(
                np.array(tensors.pop(name).read()) if count else none
                for name, count in zip(names, counts, strict=True)
            )
            cache = CachePlan.take(read, tensors, len(counts))
            if tensors:
                raise HotsplitError(f"unknown tensor {shown(min(tensors))}")
            split = cls(
                hot=hot,
                dense_on_gpu=tuple(map(bool, read.counts("dense_on_gpu", most=1))),
                gpu_bytes=_items(read, "gpu_bytes"),
                cpu_bytes=_items(read, "cpu_bytes"),
                **{name: take(read, name) for name, (_, take) in _SCALARS.items()},
                home=tuple(read.counts("home")) if "home" in read.values else (),
                gpu_budget_bytes=_sizes(read) if "home" in read.values else (),
                cache=cache,
                # A plan for one text does not store the number.
                num_sequences=read.count(_SEQUENCES, least=2) if _SEQUENCES in read.values else 1,
                kv_offload=KeySelection.parse(read.line(_OFFLOAD))
                if _OFFLOAD in read.values
                else None,
                num_experts=read.count(_EXPERTS, least=2) if _EXPERTS in read.values else 0,
                prompt_rates=_rates(read),
            )
            split.validate()
            if counts != [len(ids) for ids in hot]:
                raise HotsplitError("hot_count differs from the tensors")
        except (HotsplitError, KeyError) as error:  # KeyError: a layer's tensor is missing
            raise HotsplitError(f"{path}: {error}; run hotsplit solve again") from error
        return split

    def save(self, path: Path) -> None:
        self.validate()
        keys: dict[str, Value] = {_PREFIX + "version": np.uint32(VERSION)}
        for name, (to_value, _) in _SCALARS.items():
            keys[_PREFIX + name] = to_value(getattr(self, name))
        keys[_PREFIX + "dense_on_gpu"] = [int(flag) for flag in self.dense_on_gpu]
        keys[_PREFIX + "hot_count"] = [len(ids) for ids in self.hot]
        if self.home:
            keys[_PREFIX + "home"] = list(self.home)
            keys[_PREFIX + "gpu_budget_bytes"] = [str(n) for n in self.gpu_budget_bytes]
        if self.num_sequences > 1:
            keys[_PREFIX + _SEQUENCES] = np.uint32(self.num_sequences)
        if self.kv_offload is not None:
            keys[_PREFIX + _OFFLOAD] = str(self.kv_offload)
        if self.num_experts:
            keys[_PREFIX + _EXPERTS] = np.uint32(self.num_experts)
        if self.prompt_rates is not None:
            for name, seconds in vars(self.prompt_rates).items():
                keys[f"{_PREFIX}prompt.{name}"] = np.float64(seconds)
        for side in ("gpu_bytes", "cpu_bytes"):
            for item, count in getattr(self, side).items():
                keys[f"{_PREFIX}{side}.{item}"] = np.uint64(count)
        tensors = {
            f"blk.{layer}.ffn_hot": array_entry(ids, "i32")
            for layer, ids in enumerate(self.hot)
            if len(ids)
        }
        if self.cache is not None:
            keys |= {_PREFIX + name: value for name, value in self.cache.keys().items()}
            tensors |= self.cache.tensors()
        write_gguf(path, SPLIT_ARCHITECTURE, keys, tensors)

    def validate(self) -> None:
        """Raises HotsplitError if the plan contradicts itself."""
        if not self.hot or len(self.hot) != len(self.dense_on_gpu):
            raise HotsplitError(f"{len(self.hot)} layers, {len(self.dense_on_gpu)} dense blocks")
        if self.gpu_bytes.keys() != set(ITEMS) or self.cpu_bytes.keys() != set(ITEMS):
            raise HotsplitError(f"bytes are itemised as {list(self.gpu_bytes)}, wanted {ITEMS}")
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
        if not 0 <= self.bound_s <= self.objective_s * (1 + 1e-9):
            raise HotsplitError(f"bound {self.bound_s} above objective {self.objective_s}")

    def _validate_gpus(self) -> None:
        """Raises HotsplitError unless homes never decrease and have budgets that add up."""
        if not self.home:
            return
        is_rising = list(self.home) == sorted(self.home) and self.home[0] >= 0
        if len(self.home) != len(self.hot) + 1 or not is_rising:
            raise HotsplitError(
                f"homes {list(self.home)}, wanted one per layer and one of the head, never decreasing"
            )
        budgets = self.gpu_budget_bytes
        if self.home[-1] >= len(budgets) or sum(budgets) != self.vram_budget_bytes:
            raise HotsplitError(
                f"budgets {list(budgets)} for homes up to {self.home[-1]} and"
                f" {self.vram_budget_bytes:,} bytes in all"
            )

    def _validate_cache(self) -> None:
        """Raises HotsplitError for a neuron cache that does not fit the plan or cannot be run."""
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
        return replace(CacheTypes.of(kv_kind(model)), selection=self.kv_offload)

    def items_of_gpus(self, model: ModelFile) -> tuple[list[Items], Items]:
        """Itemised bytes of each GPU, and of the CPU, recomputed from the model file; only the
        workspace is as the plan states it."""
        return plan_bytes(
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
                f" {model.spec.context_length}; give the --rope-scaling that it was made with, or run"
                " hotsplit solve again"
            )
        layers = model.spec.layers
        if len(self.hot) != len(layers) or any(
            (ids < 0).any() or (ids >= placed_units(model, layer)[0]).any()
            for layer, ids in enumerate(self.hot)
        ):
            raise HotsplitError(f"{path}: names layers, neurons or experts missing in {model.path}")
        refuse_divided(path, model.spec, self.hot)
        groups = model.spec.together(keys_on_host=self.kv_offload is not None)
        refuse_apart(path, groups, self.dense_on_gpu, self.home)
        num_experts = max(layer.neurons.num_experts for layer in layers)
        if self.num_experts and self.num_experts != num_experts:
            raise HotsplitError(
                f"{path}: places {self.num_experts} experts of a layer, {model.path} has {num_experts};"
                " run hotsplit solve on this model"
            )
        number = most_units(model.spec)
        if self.cache is not None and self.cache.frequency_LF.shape[1] != number:
            raise HotsplitError(
                f"{path}: its neuron cache has frequencies of"
                f" {self.cache.frequency_LF.shape[1]} {self.units} a layer, {model.path} has"
                f" {number}; run hotsplit solve on this file"
            )
        gpus, cpu = self.items_of_gpus(model)
        for number, (items, limit) in enumerate(zip(gpus, self.budgets, strict=False)):
            if sum(items.values()) > limit:
                raise HotsplitError(
                    f"{path}: {sum(items.values()):,} bytes on GPU {number} for a budget of"
                    f" {limit:,}; run hotsplit solve on this file"
                )
        gpu = {item: sum(items[item] for items in gpus) for item in ITEMS}
        sides = (("GPU", gpu, self.gpu_bytes), ("CPU", cpu, self.cpu_bytes))
        for item, (side, found, said) in product(ITEMS, sides):
            if found[item] != said[item]:
                raise HotsplitError(
                    f"{path}: {item} of {model.path} takes {found[item]:,} bytes on the {side}, but"
                    f" the plan says {said[item]:,}; run hotsplit solve on this file"
                )


# Fields that are one key each: the type that is stored, and how it is read.
_SCALARS: dict[str, tuple[Callable[[Any], Value], Callable[[Fields, str], Any]]] = {
    "model_id": (str, Fields.line),
    "mode": (str, lambda read, key: read.choice(key, MODES)),
    "vram_budget_bytes": (np.uint64, Fields.count),
    "context_length": (np.uint32, partial(Fields.count, least=1)),
    "head_on_gpu": (bool, Fields.flag),
    "status": (str, Fields.text),
    "objective_s": (np.float64, partial(Fields.number, above=0)),
    "bound_s": (np.float64, partial(Fields.number, least=0)),
    "solve_s": (np.float64, partial(Fields.number, least=0)),
    "host_budget_bytes": (np.uint64, Fields.count),
    "profile_sha256": (str, Fields.text),
    "machine_sha256": (str, Fields.text),
}
# Keys that are stored only with several GPUs, with several texts, with keys and values in main memory,
# and of a mixture of experts.
_OF_GPUS = {"home", "gpu_budget_bytes"}
_SEQUENCES = "num_sequences"
_OFFLOAD = "kv_offload"
_EXPERTS = "num_experts"
_RATES = {f"prompt.{field.name}" for field in fields(PromptRates)}  # only of mixtures of experts


def _rates(read: Fields) -> PromptRates | None:
    if not _RATES & read.values.keys():
        return None
    return PromptRates(**{key.removeprefix("prompt."): read.number(key) for key in _RATES})


def held_in(model: ModelFile, mode: Mode) -> ModelFile:
    """The model as a mode holds it in memory: without predictors that it does not run."""
    if model.predictor is None or runs_predictors(mode):
        return model
    kept = {
        name: entry
        for name, entry in model.tensors.items()
        if not is_predictor(name.removeprefix("blk.").partition(".")[2])
    }
    return replace(model, predictor=None, tensors=kept)


def _items(read: Fields, side: str) -> Items:
    return {item: read.count(f"{side}.{item}") for item in ITEMS}


def _refuse_unknown(keys: Mapping[str, Value]) -> None:
    """Raises HotsplitError for an unknown key of a plan, and if only some of several keys that
    belong together are there."""
    known = {"version", "dense_on_gpu", "hot_count", *_SCALARS, *_OF_GPUS}
    known |= {f"{side}.{item}" for side in ("gpu_bytes", "cpu_bytes") for item in ITEMS}
    known |= {*KEYS, *_RATES, _SEQUENCES, _OFFLOAD, _EXPERTS}
    own = {k.removeprefix(_PREFIX) for k in keys if not k.startswith(("general.", "GGUF."))}
    if not own <= known:
        raise HotsplitError(f"key {shown(min(own - known))} is unknown")
    for together in (_OF_GPUS, _RATES):
        if own & together and not own >= together:
            raise HotsplitError(f"{' and '.join(sorted(together))}: one of them is missing")
    missing = [key for key in KEYS if key not in own]
    if 0 < len(missing) < len(KEYS):
        raise HotsplitError(f"key {shown(missing[0])} is missing")


def _sizes(read: Fields) -> tuple[int, ...]:
    """The GPUs' budgets, which are stored as decimal strings."""
    found = []
    for text in read.items("gpu_budget_bytes"):
        if not (isinstance(text, str) and text.isascii() and text.isdecimal() and len(text) < 20):
            raise HotsplitError(f"gpu_budget_bytes has {shown(text)}, wanted decimal numbers")
        found.append(int(text))
    return tuple(found)
