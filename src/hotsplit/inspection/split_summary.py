"""Summary of a plan.

Letters: L layers, F neurons of a layer."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from hotsplit.artifacts.cache_plan import CachePlan
from hotsplit.artifacts.split_file import Split
from hotsplit.inspection.file_summary import Summary


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
            "home": split.home,
            "dense_on_gpu": split.dense_on_gpu,
            "num_hot_L": self.num_hot_L,
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
