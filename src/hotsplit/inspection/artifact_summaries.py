"""Summaries of profiles, predictors, importance matrices and machine files.

Letters: L layers, F neurons of a layer."""

from dataclasses import dataclass
from typing import Any

from hotsplit.artifacts.importance_file import Importances
from hotsplit.artifacts.machine_file import Machine
from hotsplit.artifacts.predictor_file import Predictors
from hotsplit.artifacts.profile_file import Profile
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
            "density": float(profile.density_L.mean()),  # share that fires for a token
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
