"""Summaries of profiles, predictors, importance matrices and machine files.

Letters: L layers, F neurons of a layer."""

from dataclasses import dataclass
from typing import Any

from rich.table import Table

from hotsplit.artifacts.importance_file import Importances
from hotsplit.artifacts.machine_file import Figure, Machine
from hotsplit.artifacts.predictor_file import Predictors
from hotsplit.artifacts.profile_file import Profile
from hotsplit.inspection.summary import (
    Row,
    Summary,
    columns_table,
    facts_table,
    predictor_facts,
    predictor_layers,
    span,
)
from hotsplit.system.sizes import format_bytes


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
            "density": float(profile.density_L.mean()),  # share that fires for a token
            "density_L": profile.density_L.tolist(),
            "hottest_fifth_L": profile.hottest_fifth_L().tolist(),
            "never_fired_L": profile.never_fired_L().tolist(),
            "experts": self._experts(),
            "threshold_L": profile.threshold_L,
            "arithmetic": profile.arithmetic,
        }

    @property
    def facts(self) -> list[Row]:
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
            ("neurons a layer", span(profile.own_neurons_L.tolist(), ",")),
            *(() if count_LE is None else [("experts a layer", f"{count_LE.shape[1]:,}")]),
            ("density", f"{profile.density_L.mean():.2%}"),
        ]

    def tables(self, *, all_tensors: bool) -> list[Table]:
        profile = self.profile
        columns = ["layer", "density", "firings of the hottest fifth", "never fired", "threshold"]
        layers = columns_table(
            "layers",
            columns,
            [
                (layer, f"{density:.2%}", f"{fifth:.1%}", f"{never:,}", f"{threshold:g}")
                for layer, (density, fifth, never, threshold) in enumerate(
                    zip(
                        profile.density_L,
                        profile.hottest_fifth_L(),
                        profile.never_fired_L(),
                        profile.threshold_L,
                        strict=True,
                    )
                )
            ],
        )
        columns = [
            "layer",
            "tokens of the hottest expert",
            "of the coldest",
            "choices of the hottest fifth",
            "never chosen",
        ]
        rows = [
            (
                layer,
                f"{each['hottest']:.1%}",
                f"{each['coldest']:.1%}",
                f"{each['hottest_fifth']:.1%}",
                f"{each['never_chosen']:,}",
            )
            for layer, each in enumerate(self._experts())
            if each["hottest"]
        ]
        return [layers, *([columns_table("experts", columns, rows)] if rows else [])]

    def _experts(self) -> list[dict[str, float]]:
        """Shares of tokens and choices in each layer, 0 in one without experts; [] of a model without
        any."""
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

    @property
    def facts(self) -> list[Row]:
        content = self.content
        size, types = format_bytes(content["weight_bytes"]), ", ".join(sorted({*content["type_L"]}))
        return [
            ("model id", content["model_id"] or "unknown: not made by this program"),
            ("layers", content["num_layers"]),
            ("width", f"{content['width']:,}"),
            ("neurons a layer", f"{content['num_neurons']:,}"),
            *predictor_facts(self.predictors.info),
            ("biases", "yes" if content["has_biases"] else "no"),
            ("weights", f"{size}, {types}"),
        ]

    def tables(self, *, all_tensors: bool) -> list[Table]:
        return [predictor_layers(self.predictors.info)]


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

    @property
    def facts(self) -> list[Row]:
        content = self.content
        chunks, size = content["num_chunks"], content["chunk_tokens"]
        return [
            *(("text", name) for name in content["datasets"]),
            (
                "chunks",
                f"{chunks:,}{f' of {size:,} tokens' if size else ''}" if chunks else "unknown",
            ),
            ("matrices", f"{len(content['tensors']):,}"),
        ]

    def tables(self, *, all_tensors: bool) -> list[Table]:
        columns = ["matrix", "inputs", "experts", "never chosen", "mean square", "largest"]
        rows = [
            (
                each["name"],
                f"{each['num_values']:,}",
                each["num_experts"],
                each["never_chosen"],
                f"{each['mean']:.3g}",
                f"{each['largest']:.3g}",
            )
            for each in self.content["tensors"]
        ]
        return [columns_table("importances", columns, rows)]


@dataclass(frozen=True)
class MachineSummary(Summary):
    machine: Machine
    kind = "machine file"

    @property
    def content(self) -> dict[str, Any]:
        return {"machine": self.machine}

    @property
    def facts(self) -> list[Row]:
        machine = self.machine
        return [
            ("CPU", machine.cpu_name),
            ("threads", machine.num_threads),
            (
                "memory",
                f"{format_bytes(machine.memory_bytes)}, {format_bytes(machine.free_bytes)} free",
            ),
            *(
                (f"bandwidth, threads: {threads}", f"{_shown(rate)} GB/s")
                for threads, rate in machine.cpu_bandwidth_gb_per_s.items()
            ),
            ("GPUs", len(machine.gpus) or "none"),
            *((f"version of {name}", version) for name, version in machine.versions.items()),
        ]

    def tables(self, *, all_tensors: bool) -> list[Table]:
        """Every figure of each GPU under its name in the file, with the unit in the name."""
        return [
            facts_table(
                f"GPU {number}", [(name, _shown(value)) for name, value in vars(gpu).items()]
            )
            for number, gpu in enumerate(self.machine.gpus)
        ]


def _shown(value: object) -> str:
    """A value; of a figure the best one, and the range of the middle half of the rounds."""
    if not isinstance(value, Figure):
        return f"{value:,}" if isinstance(value, int) else str(value)
    if value.quartiles is None:
        return f"{value.best:g} (not measured)"
    low, _, high = value.quartiles
    return f"{value.best:.4g} (half of {value.rounds} rounds {low:.4g} to {high:.4g})"
