"""Summary of a plan.

Letters: L layers, F neurons of a layer."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.table import Table

from hotsplit.artifacts.cache_plan import CachePlan
from hotsplit.artifacts.split_file import Split
from hotsplit.inspection.file_summary import Row, Summary, columns_table, formatted
from hotsplit.system.sizes import format_bytes


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

    @property
    def facts(self) -> list[Row]:
        split = self.split
        used, held = sum(split.gpu_bytes.values()), sum(split.cpu_bytes.values())
        host, head = split.host_budget_bytes, f"GPU {self.home[-1]}"
        texts = f"{split.num_sequences} texts of " if split.num_sequences > 1 else ""
        kv = [("keys and values", f"in main memory; {split.kv_offload}")]
        speed = f"{1 / split.objective_s:,.1f} tokens/s ({split.objective_s:.6g} s a token)"
        memory = f"{format_bytes(host) if host else 'not limited'}, used {format_bytes(held)}"
        workspace = format_bytes(split.cpu_bytes["workspace"])
        sides = (split.gpu_bytes, split.cpu_bytes)
        on_gpu, on_cpu = (format_bytes(side["neuron_cache"]) for side in sides)
        cache = (
            split.cache
            and f"up to {split.cache.most_rows:,} swaps a token; {on_gpu} on the GPU and {on_cpu}"
            " in main memory"
        )
        return [
            ("made for model", split.model_id),
            ("made from profile", f"sha256 {split.profile_sha256}"),
            ("made from machine file", f"sha256 {split.machine_sha256}"),
            ("mode", split.mode),
            ("context", f"{texts}{split.context_length:,} tokens"),
            *(kv if split.kv_offload else []),
            ("VRAM budget", f"{format_bytes(split.vram_budget_bytes)}, used {format_bytes(used)}"),
            ("main memory", memory),
            ("workspace", f"{workspace} on every device that holds anything"),
            *([("neuron cache", cache)] if split.cache else []),
            ("status", split.status),
            ("predicted", speed),
            ("bound", f"{split.bound_s:.6g} s a token, gap {split.gap:.2%}"),
            ("solved in", f"{split.solve_s:.2f} s"),
            (f"{split.units} on GPUs", f"{sum(self.num_hot_L):,}"),
            ("dense blocks on GPUs", f"{sum(split.dense_on_gpu)} of {len(split.dense_on_gpu)}"),
            ("output head", head if split.head_on_gpu else "CPU"),
        ]

    def tables(self, *, all_tensors: bool) -> list[Table]:
        return [self._gpus_table(), self._bytes_table(), self._layers_table()]

    def _gpus_table(self) -> Table:
        own = [[layer for layer in gpu.layers if self._has_any(layer)] for gpu in self.gpus]
        columns = {
            "GPU": range(len(self.gpus)),
            "budget": [format_bytes(gpu.budget_bytes) for gpu in self.gpus],
            "layers": [f"{each[0]} to {each[-1]}" if each else "none" for each in own],
            "dense blocks": [gpu.num_dense for gpu in self.gpus],
            self.split.units: [f"{gpu.num_hot:,}" for gpu in self.gpus],
            "head": ["here" if gpu.has_head else "" for gpu in self.gpus],
        }
        return columns_table("GPUs", columns)

    def _has_any(self, layer: int) -> bool:
        return self.split.dense_on_gpu[layer] or len(self.split.hot[layer]) > 0

    def _bytes_table(self) -> Table:
        """Items of bytes; the rows of experts count as neurons in the file."""
        gpu, cpu = (
            {**side, "all": sum(side.values())}
            for side in (self.split.gpu_bytes, self.split.cpu_bytes)
        )
        columns = {
            "": [self.split.units if item == "neurons" else item for item in gpu],
            "GPUs" if self.split.home else "GPU": formatted(",", gpu.values()),
            "\0GPU": map(format_bytes, gpu.values()),
            "CPU": formatted(",", [cpu[item] for item in gpu]),
            "\0CPU": [format_bytes(cpu[item]) for item in gpu],
        }
        return columns_table("bytes", columns)

    def _layers_table(self) -> Table:
        homes = [f"GPU {home}" for home in self.home[: len(self.split.hot)]]
        is_dense_L = self.split.dense_on_gpu
        columns = {
            "layer": range(len(homes)),
            "home": [home if self._has_any(n) else "CPU" for n, home in enumerate(homes)],
            f"{self.split.units} on GPUs": formatted(",", self.num_hot_L),
            "dense block": [h if d else "CPU" for h, d in zip(homes, is_dense_L, strict=True)],
        }
        return columns_table("layers", columns)


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
