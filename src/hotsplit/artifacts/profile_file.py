"""model.profile.safetensors: counts of each neuron's firings, and histograms of gate magnitudes.

Specified in docs/formats.md. Two profiles of one model, with the same thresholds, can be added.

Letters: L layers, F neurons, B histogram bins, E experts, T recorded tokens, K experts of a
token."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

import numpy as np

from hotsplit.errors import HotsplitError, about
from hotsplit.files.declared import Count, CountFrom1, Line, NotNegative, read_declared
from hotsplit.files.safetensors_file import load_arrays, save_arrays
from hotsplit.files.typed import MAX_COUNT, shown
from hotsplit.model.mode_quality import ModeQuality, SparseMode

FORMAT = "hotsplit.profile"
VERSION = 1
# Bin b holds magnitudes m with EDGES[b] <= m < EDGES[b + 1]; the first bin starts at zero and the
# last one has no end. Eight bins per octave: the edges of a bin are 9 % apart.
EDGES = np.concatenate([[0.0], np.exp2(np.arange(-16 * 8, 8 * 8 + 1) / 8)])
NUM_BINS = len(EDGES)
# Tokens whose experts are recorded, of all processes together. With half as many, plans for 8 and
# 12 GiB of Qwen3-30B-A3B's shape take 0.1 and 0.2 % longer on other text (docs/log/solver.md).
MAX_RECORDED = 4096


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """A text of the profile: its name, the sha256 of its bytes, the number of its tokens used."""

    name: str
    sha256: str
    num_tokens: Count


@dataclass(frozen=True, kw_only=True)
class ProfileHeader:
    """The metadata of the file."""

    model_id: Line
    num_tokens: CountFrom1
    threshold_L: tuple[NotNegative, ...]  # a neuron fired above it, as in model_file
    corpora: tuple[Corpus, ...]
    # The quality of modes with the predictors of the same run. {}: unknown.
    quality: Mapping[SparseMode, ModeQuality] = field(default_factory=dict)
    arithmetic: str | None = None  # in which firings were counted; None: unknown
    # Neurons of each layer, the others of F are no neurons; (): all have F.
    num_neurons_L: tuple[Count, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Profile(ProfileHeader):
    active_count_LF: np.ndarray  # int64
    gate_histogram_LB: np.ndarray  # int64, of |act(gate)|, over all neurons of a layer
    # Of a mixture of experts: tokens for which each expert was chosen, int64.
    expert_count_LE: np.ndarray | None = None
    # The experts of some of its tokens, ascending, int16; -1 in layers without experts.
    routing_LTK: np.ndarray | None = None

    @property
    def own_neurons_L(self) -> np.ndarray:
        """Neurons of each layer, int64."""
        num_layers, most = self.active_count_LF.shape
        return np.array(self.num_neurons_L or (most,) * num_layers)

    @property
    def frequency_LF(self) -> np.ndarray:
        """Share of tokens for which each neuron fired, f64 in 0..1."""
        return self.active_count_LF / self.num_tokens

    def fired_of_chosen(self, layer: int, of_expert: int) -> float:
        """Mean share of the neurons of a chosen expert that fire, in 0..1; `of_expert`: how many it
        has. 1 without counts of experts."""
        if self.expert_count_LE is None or not self.expert_count_LE[layer].any():
            return 1.0
        chosen = int(self.expert_count_LE[layer].sum()) * of_expert
        return min(1.0, int(self.active_count_LF[layer].sum()) / chosen)

    @property
    def density_L(self) -> np.ndarray:
        """Mean share of a layer's neurons that fire for a token, f64 in 0..1; 0 without any."""
        return self.frequency_LF.sum(axis=1) / np.maximum(1, self.own_neurons_L)

    @property
    def has_neurons_L(self) -> np.ndarray:
        """Whether a layer has any, bool."""
        return self.own_neurons_L > 0

    def hottest_fifth_L(self) -> np.ndarray:
        """Share of a layer's firings that come from the hottest fifth of its neurons, f64."""
        descending_LF = -np.sort(-self.active_count_LF, axis=1)
        top_L = np.array(
            [
                count_F[: round(0.2 * number)].sum()
                for count_F, number in zip(descending_LF, self.own_neurons_L, strict=True)
            ]
        )
        return top_L / np.maximum(1, descending_LF.sum(axis=1))

    def never_fired_L(self) -> np.ndarray:
        """A layer's neurons that never fired, int64."""
        return self.own_neurons_L - (self.active_count_LF > 0).sum(axis=1)

    def hottest_fifth_of_experts_L(self) -> np.ndarray | None:
        """Share of a layer's choices on the most chosen fifth of its experts; None without."""
        if self.expert_count_LE is None:
            return None
        descending_LE = -np.sort(-self.expert_count_LE, axis=1)
        top_L = descending_LE[:, : max(1, round(0.2 * descending_LE.shape[1]))].sum(axis=1)
        return top_L / np.maximum(1, descending_LE.sum(axis=1))

    def merge(self, other: "Profile") -> "Profile":
        """The profile of both texts, without quality, which cannot be added. Raises HotsplitError
        for different models or thresholds."""
        rules = [(each.model_id, each.threshold_L) for each in (self, other)]
        if rules[0] != rules[1]:
            raise HotsplitError(
                "profiles of two models or thresholds cannot be added: model"
                f" {self.model_id[:12]} and {other.model_id[:12]}"
            )
        return replace(
            self,
            num_tokens=self.num_tokens + other.num_tokens,
            corpora=self.corpora + other.corpora,
            active_count_LF=self.active_count_LF + other.active_count_LF,
            expert_count_LE=None
            if self.expert_count_LE is None or other.expert_count_LE is None
            else self.expert_count_LE + other.expert_count_LE,
            routing_LTK=_joined(self.routing_LTK, other.routing_LTK),
            gate_histogram_LB=self.gate_histogram_LB + other.gate_histogram_LB,
            quality={},
            num_neurons_L=self.num_neurons_L or other.num_neurons_L,
            arithmetic=_of_both(self.arithmetic, other.arithmetic),
        )

    @classmethod
    def load(cls, path: Path) -> "Profile":
        """Raises HotsplitError for anything but a whole, valid profile."""
        metadata, arrays = load_arrays(path, FORMAT, VERSION)
        names = {"active_count_LF", "gate_histogram_LB"}
        if not names <= arrays.keys() <= names | {"expert_count_LE", "routing_LTK"}:
            raise HotsplitError(f"{path}: holds {shown(sorted(arrays))}; profile the model again")
        with about(path, "; profile the model again"):
            profile = cls(**(vars(read_declared(ProfileHeader, metadata)) | arrays))
            profile.validate()
        return profile

    def save(self, path: Path) -> None:
        self.validate()
        values = vars(self)
        arrays = {name: array for name, array in values.items() if isinstance(array, np.ndarray)}
        metadata = asdict(ProfileHeader(**{f.name: values[f.name] for f in fields(ProfileHeader)}))
        read_declared(ProfileHeader, metadata)
        if not self.num_neurons_L:
            del metadata["num_neurons_L"]
        save_arrays(path, FORMAT, VERSION, metadata, arrays)

    def validate(self) -> None:
        """Raises HotsplitError if the numbers contradict each other."""
        counts, histogram = self.active_count_LF, self.gate_histogram_LB
        is_int64 = counts.dtype == histogram.dtype == np.int64
        if counts.ndim != 2 or not counts.size or not is_int64:
            raise HotsplitError(
                f"counts are {counts.dtype} {counts.shape} and histograms {histogram.dtype}, wanted"
                " int64 [L, F] and int64"
            )
        if histogram.shape != (len(counts), NUM_BINS) or len(self.threshold_L) != len(counts):
            raise HotsplitError(
                f"histograms are {histogram.shape} and thresholds {len(self.threshold_L)}"
                f" for {len(counts)} layers, wanted [L, {NUM_BINS}] and L"
            )
        if self.num_tokens < 1 or counts.min() < 0 or counts.max() > self.num_tokens:
            raise HotsplitError(
                f"counts from {counts.min()} to {counts.max()} for {self.num_tokens} tokens"
            )
        number_L, most = self.own_neurons_L, counts.shape[1]
        if len(number_L) != len(counts) or number_L.min() < 0 or number_L.max() > most:
            raise HotsplitError(
                f"layers have {shown(self.num_neurons_L)} neurons, counts are {counts.shape}"
            )
        if counts[np.arange(most) >= number_L[:, None]].any():
            raise HotsplitError("more neurons fired in a layer than it has")
        self._check_experts()
        total = self.num_tokens * counts.shape[1]
        if total > MAX_COUNT:
            raise HotsplitError(
                f"{self.num_tokens} tokens of {counts.shape[1]} neurons are more than can be"
                " counted"
            )
        if histogram.min() < 0 or any(sum(row) != total for row in histogram.tolist()):
            raise HotsplitError("the histograms do not count every neuron once per token")

    def _check_experts(self) -> None:
        count_LE = self.expert_count_LE
        if count_LE is None:
            if self.routing_LTK is not None:
                raise HotsplitError("experts are recorded, but not counted")
            return
        has_shape = count_LE.ndim == 2 and len(count_LE) == len(self.active_count_LF)
        if not has_shape or not count_LE.size or count_LE.dtype != np.int64:
            raise HotsplitError(
                f"counts of experts are {count_LE.dtype} {count_LE.shape}, wanted int64 [L, E]"
            )
        if count_LE.min() < 0 or count_LE.max() > self.num_tokens:
            raise HotsplitError(
                f"experts were chosen {count_LE.min()} to {count_LE.max()} times in"
                f" {self.num_tokens} tokens"
            )
        self._check_routing(*count_LE.shape)

    def _check_routing(self, num_layers: int, num_experts: int) -> None:
        id_LTK = self.routing_LTK
        if id_LTK is None:
            return
        if id_LTK.ndim != 3 or len(id_LTK) != num_layers or id_LTK.dtype != np.int16:
            raise HotsplitError(
                f"recorded experts are {id_LTK.dtype} {id_LTK.shape}, wanted int16 [L, T, K]"
            )
        is_mixed_L = (id_LTK >= 0).any(axis=(1, 2))
        of_mixed_LTK = id_LTK[is_mixed_L]
        is_ascending = (np.diff(of_mixed_LTK, axis=2) > 0).all()
        are_experts = ((of_mixed_LTK >= 0) & (of_mixed_LTK < num_experts)).all()
        if not id_LTK.size or not is_ascending or not are_experts:
            raise HotsplitError(
                f"recorded experts are not different ones of {num_experts} for every token"
            )


def uneven(number_L: Sequence[int]) -> tuple[int, ...]:
    """Profile.num_neurons_L of layers with so many neurons."""
    return tuple(number_L) if len(set(number_L)) > 1 else ()


def _joined(one: np.ndarray | None, other: np.ndarray | None) -> np.ndarray | None:
    if one is None or other is None:
        return other if one is None else one
    return np.concatenate([one, other], axis=1)


def _of_both(one: str | None, other: str | None) -> str | None:
    """The arithmetics of both profiles, without duplicates; None if either is unknown."""
    if one is None or other is None:
        return None
    return " + ".join(dict.fromkeys([*one.split(" + "), *other.split(" + ")]))
