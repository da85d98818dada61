"""Summaries of profiles, predictors, importance matrices and machine files.

Letters: L layers, F neurons of a layer."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from hotsplit.artifacts.importance_file import Importances
from hotsplit.artifacts.machine_file import Figure, Machine
from hotsplit.artifacts.predictor_file import Predictors
from hotsplit.artifacts.profile_file import Profile
from hotsplit.inspection import file_summary
from hotsplit.system.sizes import format_bytes


@dataclass(frozen=True)
class ProfileSummary(file_summary.Summary):
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
            "density": float(profile.density_L.mean()),  # share that fires for a token
            "density_L": profile.density_L.tolist(),
            "hottest_fifth_L": profile.hottest_fifth_L().tolist(),
            "never_fired_L": profile.never_fired_L().tolist(),
            "experts": self._experts(),
            "threshold_L": profile.threshold_L,
            "arithmetic": profile.arithmetic,
        }

    @property
    def facts(self) -> list[file_summary.Row]:
        profile = self.profile
        corpora, count_LE = profile.corpora, profile.expert_count_LE
        return [
            ("model id", profile.model_id),
            ("tokens", f"{profile.num_tokens:,}"),
            ("counted with", profile.arithmetic or "unknown"),
            *(
                ("corpus", f"{c.name}: {c.num_tokens:,} tokens, sha256 {c.sha256[:12]}")
                for c in corpora
            ),
            ("layers", len(profile.threshold_L)),
            ("neurons a layer", file_summary.span(profile.own_neurons_L.tolist(), ",")),
            *(() if count_LE is None else [("experts a layer", f"{count_LE.shape[1]:,}")]),
            ("density", f"{profile.density_L.mean():.2%}"),
        ]

    def tables(self, *, all_tensors: bool) -> list[Table]:
        profile = self.profile
        layers: dict[str, Iterable[object]] = {
            "layer": range(len(profile.threshold_L)),
            "density": file_summary.formatted(".2%", profile.density_L),
            "firings of the hottest fifth": file_summary.formatted(
                ".1%", profile.hottest_fifth_L()
            ),
            "never fired": file_summary.formatted(",", profile.never_fired_L()),
            "threshold": file_summary.formatted("g", profile.threshold_L),
        }
        found = [(layer, each) for layer, each in enumerate(self._experts()) if each["hottest"]]
        experts: dict[str, Iterable[object]] = {
            "layer": [layer for layer, _ in found],
            "tokens of the hottest expert": [f"{each['hottest']:.1%}" for _, each in found],
            "of the coldest": [f"{each['coldest']:.1%}" for _, each in found],
            "choices of the hottest fifth": [f"{each['hottest_fifth']:.1%}" for _, each in found],
            "never chosen": [f"{each['never_chosen']:,}" for _, each in found],
        }
        tables = [file_summary.columns_table("layers", layers)]
        return [*tables, file_summary.columns_table("experts", experts)] if found else tables

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
class PredictorsSummary(file_summary.Summary):
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

    @property
    def facts(self) -> list[file_summary.Row]:
        content = self.content
        size, types = format_bytes(content["weight_bytes"]), ", ".join(sorted({*content["type_L"]}))
        return [
            ("model id", content["model_id"] or "unknown: not made by this program"),
            ("layers", content["num_layers"]),
            ("width", f"{content['width']:,}"),
            ("neurons a layer", f"{content['num_neurons']:,}"),
            *file_summary.predictor_facts(self.predictors.info),
            ("biases", "yes" if content["has_biases"] else "no"),
            ("weights", f"{size}, {types}"),
        ]

    def tables(self, *, all_tensors: bool) -> list[Table]:
        return [file_summary.predictor_layers(self.predictors.info)]


@dataclass(frozen=True)
class ImportancesSummary(file_summary.Summary):
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

    @property
    def facts(self) -> list[file_summary.Row]:
        content = self.content
        chunks, size = content["num_chunks"], content["chunk_tokens"]
        of = f" of {size:,} tokens" if size else ""
        return [
            *(("text", name) for name in content["datasets"]),
            ("chunks", f"{chunks:,}{of}" if chunks else "unknown"),
            ("matrices", f"{len(content['tensors']):,}"),
        ]

    def tables(self, *, all_tensors: bool) -> list[Table]:
        tensors = self.content["tensors"]
        columns = {
            "matrix": [each["name"] for each in tensors],
            "inputs": [f"{each['num_values']:,}" for each in tensors],
            "experts": [each["num_experts"] for each in tensors],
            "never chosen": [each["never_chosen"] for each in tensors],
            "mean square": [f"{each['mean']:.3g}" for each in tensors],
            "largest": [f"{each['largest']:.3g}" for each in tensors],
        }
        return [file_summary.columns_table("importances", columns)]


@dataclass(frozen=True)
class MachineSummary(file_summary.Summary):
    machine: Machine
    kind = "machine file"

    @property
    def content(self) -> dict[str, Any]:
        return {"machine": self.machine}

    @property
    def facts(self) -> list[file_summary.Row]:
        machine, rates = self.machine, self.machine.cpu_bandwidth_gb_per_s
        memory = f"{format_bytes(machine.memory_bytes)}, {format_bytes(machine.free_bytes)} free"
        return [
            ("CPU", machine.cpu_name),
            ("threads", machine.num_threads),
            ("memory", memory),
            *((f"bandwidth, threads: {n}", f"{_figure(rate)} GB/s") for n, rate in rates.items()),
            ("GPUs", len(machine.gpus) or "none"),
            *((f"version of {name}", version) for name, version in machine.versions.items()),
        ]

    def tables(self, *, all_tensors: bool) -> list[Table]:
        """Every figure of each GPU under its name in the file, with the unit in the name."""
        return [
            file_summary.facts_table(
                f"GPU {n}", [(name, _figure(value)) for name, value in vars(gpu).items()]
            )
            for n, gpu in enumerate(self.machine.gpus)
        ]


def _figure(value: object) -> str:
    """A value; of a figure the best one, and the range of the middle half of the rounds."""
    if not isinstance(value, Figure):
        return f"{value:,}" if isinstance(value, int) else str(value)
    if value.quartiles is None:
        return f"{value.best:g} (not measured)"
    low, _, high = value.quartiles
    return f"{value.best:.4g} (half of {value.rounds} rounds {low:.4g} to {high:.4g})"
