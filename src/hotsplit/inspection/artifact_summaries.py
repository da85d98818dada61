"""Summaries of profiles, predictors, split files and machine files.

Letters: L layers, F neurons of a layer."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hotsplit.artifacts.cache_plan import CachePlan
from hotsplit.artifacts.machine_file import Machine
from hotsplit.artifacts.model_file import PredictorInfo
from hotsplit.artifacts.predictor_file import Predictors
from hotsplit.artifacts.profile_file import Corpus, Profile
from hotsplit.artifacts.split_file import PlanMode, Split
from hotsplit.costs.budget import Items

HOTTEST = 0.2  # share of the neurons whose part in all firings is reported


@dataclass(frozen=True, kw_only=True)
class ProfileSummary:
    kind: str = "profile"
    path: Path
    file_bytes: int
    model_id: str
    num_tokens: int
    corpora: tuple[Corpus, ...]
    num_layers: int
    num_neurons: int  # per layer
    density: float  # share of neurons that fire for a token, over all layers
    density_L: tuple[float, ...]
    hottest_fifth_L: tuple[float, ...]  # share of the layer's firings that its hottest fifth makes
    never_fired_L: tuple[int, ...]  # neurons
    threshold_L: tuple[float, ...]
    limits: str | None  # sha256 of the limits by which neurons fired; None: by thresholds alone
    arithmetic: str | None  # used for the counts

    @classmethod
    def load(cls, path: Path) -> "ProfileSummary":
        profile = Profile.load(path)
        count_LF = profile.active_count_LF
        return cls(
            path=path,
            file_bytes=path.stat().st_size,
            model_id=profile.model_id,
            num_tokens=profile.num_tokens,
            corpora=profile.corpora,
            num_layers=count_LF.shape[0],
            num_neurons=count_LF.shape[1],
            density=float(profile.density_L.mean()),
            density_L=tuple(profile.density_L.tolist()),
            hottest_fifth_L=tuple(profile.hottest_share_L(HOTTEST).tolist()),
            never_fired_L=tuple((count_LF == 0).sum(axis=1).tolist()),
            threshold_L=profile.threshold_L,
            limits=profile.limits,
            arithmetic=profile.arithmetic,
        )


@dataclass(frozen=True, kw_only=True)
class PredictorsSummary:
    kind: str = "predictors"
    path: Path
    file_bytes: int
    model_id: str | None  # None: made by others
    predictor: PredictorInfo
    num_layers: int
    width: int
    num_neurons: int
    type_L: tuple[str, ...]  # of each layer's matrices
    has_biases: bool
    weight_bytes: int  # in these types

    @classmethod
    def load(cls, path: Path) -> "PredictorsSummary":
        predictors = Predictors.load(path)
        layers = list(enumerate(predictors.layers))
        entries = [entry for n, layer in layers for entry in layer.entries(n).values()]
        return cls(
            path=path,
            file_bytes=path.stat().st_size,
            model_id=predictors.model_id,
            predictor=predictors.info,
            num_layers=len(predictors.layers),
            width=max((layer.width for layer in predictors.layers), default=0),
            num_neurons=max((layer.up.shape[0] for layer in predictors.layers), default=0),
            type_L=tuple(layer.matrix_kind or "f32" for layer in predictors.layers),
            has_biases=any(len(entry.shape) == 1 for entry in entries),
            weight_bytes=sum(entry.num_bytes for entry in entries),
        )


@dataclass(frozen=True, kw_only=True)
class GpuShare:
    """A plan's share on one GPU, which is the home of `layers`."""

    budget_bytes: int
    layers: tuple[int, ...]
    num_dense: int
    num_hot: int
    has_head: bool

    @classmethod
    def of(cls, split: Split, gpu: int) -> "GpuShare":
        home = split.home or (0,) * (len(split.hot) + 1)
        layers = tuple(layer for layer in range(len(split.hot)) if home[layer] == gpu)
        return cls(
            budget_bytes=split.budgets[gpu],
            layers=layers,
            num_dense=sum(split.dense_on_gpu[layer] for layer in layers),
            num_hot=sum(len(split.hot[layer]) for layer in layers),
            has_head=split.head_on_gpu and home[-1] == gpu,
        )


@dataclass(frozen=True, kw_only=True)
class CacheFacts:
    """A plan's neuron cache: the most neurons that a token may swap, the times on which it bases
    decisions, and the mean share of each layer's neurons that a token reads."""

    most_rows: int
    rest_s: float
    copy_s: float
    hot_s_L: tuple[float, ...]
    hot_row_s_L: tuple[float, ...]
    cold_s_L: tuple[float, ...]
    cold_row_s_L: tuple[float, ...]
    copy_row_s_L: tuple[float, ...]
    gather_row_s_L: tuple[float, ...]
    read_L: tuple[float, ...]

    @classmethod
    def of(cls, cache: CachePlan) -> "CacheFacts":
        times: dict[str, Any] = {
            name: tuple(value.tolist()) if isinstance(value, np.ndarray) else value
            for name, value in vars(cache.costs).items()
        }
        read_L = tuple(float(row_F.mean()) for row_F in cache.frequency)
        return cls(most_rows=cache.most_rows, read_L=read_L, **times)


@dataclass(frozen=True, kw_only=True)
class SplitSummary:
    kind: str = "split file"
    path: Path
    file_bytes: int
    model_id: str
    profile_sha256: str  # "unknown" if the plan does not say
    machine_sha256: str
    mode: PlanMode
    status: str
    tokens_per_s: float  # predicted
    objective_s: float  # predicted seconds per token
    bound_s: float
    gap: float
    solve_s: float
    vram_budget_bytes: int  # of all GPUs together
    host_budget_bytes: int  # 0: not limited
    gpus: tuple[GpuShare, ...]
    context_length: int
    num_sequences: int
    kv_offload: str | None  # which keys a token reads; None: no --kv-offload, all are read
    head_on_gpu: bool
    home: tuple[int, ...]  # the GPU of each layer and of the head; () with one GPU
    dense_on_gpu: tuple[bool, ...]
    num_hot_L: tuple[int, ...]
    gpu_bytes: Items
    cpu_bytes: Items
    cache: CacheFacts | None  # None: the plan has no neuron cache

    @classmethod
    def load(cls, path: Path) -> "SplitSummary":
        split = Split.load(path)
        return cls(
            path=path,
            file_bytes=path.stat().st_size,
            model_id=split.model_id,
            profile_sha256=split.profile_sha256,
            machine_sha256=split.machine_sha256,
            mode=split.mode,
            status=split.status,
            tokens_per_s=1 / split.objective_s,
            objective_s=split.objective_s,
            bound_s=split.bound_s,
            gap=split.gap,
            solve_s=split.solve_s,
            vram_budget_bytes=split.vram_budget_bytes,
            host_budget_bytes=split.host_budget_bytes,
            gpus=tuple(GpuShare.of(split, gpu) for gpu in range(len(split.budgets))),
            context_length=split.context_length,
            num_sequences=split.num_sequences,
            kv_offload=None if split.kv_offload is None else str(split.kv_offload),
            head_on_gpu=split.head_on_gpu,
            home=split.home,
            dense_on_gpu=split.dense_on_gpu,
            num_hot_L=tuple(len(ids) for ids in split.hot),
            gpu_bytes=split.gpu_bytes,
            cpu_bytes=split.cpu_bytes,
            cache=None if split.cache is None else CacheFacts.of(split.cache),
        )


@dataclass(frozen=True, kw_only=True)
class MachineSummary:
    kind: str = "machine file"
    path: Path
    file_bytes: int
    machine: Machine

    @classmethod
    def load(cls, path: Path) -> "MachineSummary":
        return cls(path=path, file_bytes=path.stat().st_size, machine=Machine.load(path))

    def gpu_figures(self) -> list[dict[str, object]]:
        """Every field of every GPU, by its name in the file."""
        return [dict(vars(gpu)) for gpu in self.machine.gpus]
