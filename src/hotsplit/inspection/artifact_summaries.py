"""Summaries of profiles, predictors, importance matrices, machine files and plans.

Letters: L layers, F neurons of a layer."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from hotsplit.artifacts.cache_plan import CachePlan
from hotsplit.artifacts.importance_file import Importances
from hotsplit.artifacts.machine_file import Machine
from hotsplit.artifacts.predictor_file import Predictors
from hotsplit.artifacts.profile_file import Profile
from hotsplit.artifacts.split_file import Split
from hotsplit.inspection.file_summary import Summary


@dataclass(frozen=True)
class ProfileSummary(Summary):
    profile: Profile
    kind = "profile"

    @property
    def content(self) -> dict[str, Any]:
        profile = self.profile
        num_layers, num_neurons = profile.active_count_LF.shape
        return {
            "model_id": profile.model_id,
            "num_tokens": profile.num_tokens,
            "corpora": profile.corpora,
            "num_layers": num_layers,
            "num_neurons": num_neurons,  # of the layer with most
            # The share that fires for a token.
            "density": float(profile.density_L[profile.has_neurons_L].mean()),
            "density_L": profile.density_L.tolist(),
            "hottest_fifth_L": profile.hottest_fifth_L().tolist(),
            "never_fired_L": profile.never_fired_L().tolist(),
            "experts": self._experts(),
            "threshold_L": profile.threshold_L,
            "arithmetic": profile.arithmetic,
        }

    def _experts(self) -> list[dict[str, float]]:
        """Shares of tokens and choices in each layer, 0 without experts; [] of a dense model."""
        count_LE, fifth_L = self.profile.expert_count_LE, self.profile.hottest_fifth_of_experts_L()
        if count_LE is None or fifth_L is None:
            return []
        return [
            {
                "hottest": float(share_E.max()),
                "coldest": float(share_E.min()),
                "hottest_fifth": float(fifth),
                "never_chosen": int((share_E == 0).sum()),
            }
            for share_E, fifth in zip(count_LE / self.profile.num_tokens, fifth_L, strict=True)
        ]


@dataclass(frozen=True)
class PredictorsSummary(Summary):
    predictors: Predictors
    kind = "predictors"

    @property
    def content(self) -> dict[str, Any]:
        layers = self.predictors.layers
        entries = [entry for n, layer in enumerate(layers) for entry in layer.entries(n).values()]
        return {
            "model_id": self.predictors.model_id,
            "predictor": self.predictors.info,
            "num_layers": len(layers),
            "width": max((layer.width for layer in layers), default=0),
            "num_neurons": max((layer.up.shape[0] for layer in layers), default=0),
            "type_L": [layer.matrix_kind or "f32" for layer in layers],
            "has_biases": any(len(entry.shape) == 1 for entry in entries),
            "weight_bytes": sum(entry.num_bytes for entry in entries),  # in these types
        }


@dataclass(frozen=True)
class ImportancesSummary(Summary):
    importances: Importances
    kind = "importance matrix"

    @property
    def content(self) -> dict[str, Any]:
        found = self.importances
        return {
            "datasets": found.datasets,
            "num_chunks": found.num_chunks,
            "chunk_tokens": found.chunk_tokens,
            "tensors": [
                {
                    "name": name,
                    "num_values": mean_EM.size,
                    "num_experts": len(mean_EM),
                    "never_chosen": int((found.tensors[name].count == 0).sum()),
                    "mean": float(mean_EM.mean()),
                    "largest": float(mean_EM.max()),
                }
                for name, mean_EM in sorted((n, each.means()) for n, each in found.tensors.items())
            ],
        }


@dataclass(frozen=True)
class MachineSummary(Summary):
    machine: Machine
    kind = "machine file"

    @property
    def content(self) -> dict[str, Any]:
        return {"machine": self.machine}


@dataclass(frozen=True, kw_only=True)
class GpuShare:
    """A plan's share on one GPU, which is the home of `layers`."""

    budget_bytes: int
    layers: tuple[int, ...]
    num_dense: int
    num_hot: int
    has_head: bool


@dataclass(frozen=True)
class SplitSummary(Summary):
    split: Split
    kind = "split file"

    @property
    def home(self) -> tuple[int, ...]:
        """The GPU of each layer and of the head."""
        return self.split.home or (0,) * (len(self.split.hot) + 1)

    @property
    def num_hot_L(self) -> list[int]:
        return [len(ids) for ids in self.split.hot]

    @property
    def gpus(self) -> list[GpuShare]:
        split, num_hot_L = self.split, self.num_hot_L
        layers_of = [
            tuple(layer for layer, home in enumerate(self.home[:-1]) if home == gpu)
            for gpu in range(len(split.budgets))
        ]
        return [
            GpuShare(
                budget_bytes=split.budgets[gpu],
                layers=layers,
                num_dense=sum(split.dense_on_gpu[layer] for layer in layers),
                num_hot=sum(num_hot_L[layer] for layer in layers),
                has_head=split.head_on_gpu and self.home[-1] == gpu,
            )
            for gpu, layers in enumerate(layers_of)
        ]

    @property
    def content(self) -> dict[str, Any]:
        split = self.split
        return {
            "model_id": split.model_id,
            "profile_sha256": split.profile_sha256,
            "machine_sha256": split.machine_sha256,
            "mode": split.mode,
            "status": split.status,
            "tokens_per_s": 1 / split.objective_s,
            "objective_s": split.objective_s,
            "bound_s": split.bound_s,
            "gap": split.gap,
            "solve_s": split.solve_s,
            "vram_budget_bytes": split.vram_budget_bytes,  # of all GPUs together
            "host_budget_bytes": split.host_budget_bytes,
            "gpus": self.gpus,
            "context_length": split.context_length,
            "num_sequences": split.num_sequences,
            "num_experts": split.num_experts,
            "prompt_rates": None if split.prompt_rates is None else vars(split.prompt_rates),
            "kv_offload": None if split.kv_offload is None else str(split.kv_offload),
            "head_on_gpu": split.head_on_gpu,
            "draft_on_gpu": split.draft_on_gpu,
            "home": split.home,
            "dense_on_gpu": split.dense_on_gpu,
            "num_hot_L": self.num_hot_L,
            # Of each layer with experts on the drive, how many stay in main memory.
            "resident_experts": [None if i is None else len(i) for i in split.resident_experts],
            "gpu_bytes": split.gpu_bytes,
            "cpu_bytes": split.cpu_bytes,
            "cache": None if split.cache is None else _cache_content(split.cache),
        }


def _cache_content(cache: CachePlan) -> dict[str, Any]:
    """Most neurons that a token swaps, mean shares that it reads, and times of decisions."""
    costs = vars(cache.costs)
    times = {name: value.tolist() for name, value in costs.items() if isinstance(value, np.ndarray)}
    return {
        "most_rows": cache.most_rows,
        "rest_s": cache.costs.rest_s,
        "copy_s": cache.costs.copy_s,
        **times,
        "read_L": [float(row_F.mean()) for row_F in cache.frequency],
    }
