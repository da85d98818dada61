"""Trains the predictor of each layer while the model runs, and chooses among candidates.

The text is divided among five phases:

- moments: collects the second moments from which the untrained predictors are computed
  (profile.predictors.moments).
- keep: sets up to KEPT_TOKENS tokens aside, for early stopping and for choosing the rank to train.
- train: trains one low-rank predictor, of that rank (profile.predictors.low_rank).
- measure: measures every candidate with every threshold: low-rank ones of several ranks and types,
  trained or not, and the whole gate in quantised types. The choice follows
  (profile.predictors.selection).
- examine: measures the chosen predictor and the untrained one of the same shape, their thresholds
  fixed, on held-out text.

Only the kept tokens' activations are stored.

Letters: T tokens, D model width, F or N neurons."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from hotsplit.artifacts.predictor_file import LayerPredictor
from hotsplit.costs.part_bytes import LayerBytes, tile_rows
from hotsplit.files.declared import Share
from hotsplit.files.gguf_file import is_whole_blocks
from hotsplit.profile.predictors import selection
from hotsplit.profile.predictors.low_rank import Agree, Batch, LowRankNetwork, whole
from hotsplit.profile.predictors.moments import Moments
from hotsplit.profile.predictors.predictor_options import KEPT_TOKENS, PredictorChoices
from hotsplit.profile.predictors.rounding import stored
from hotsplit.runtime.kernels.gate import Gate
from hotsplit.runtime.weights.matrix import Matrix

Phase = Literal["moments", "keep", "train", "measure", "examine"]
# The phases' shares of the windows; training gets the rest.
SHARES = {"moments": 0.1, "keep": 0.02, "measure": 0.1, "examine": 0.06}


@dataclass(frozen=True, kw_only=True)
class LayerQuality:
    """Quality of the chosen predictor and of `start`, the untrained one of the same shape, on
    held-out text; `candidates` on the text that the choice was made on."""

    chosen: selection.Quality
    start: selection.Quality
    hottest_fifth: Share  # share of the firings of the hottest 20 %
    candidates: tuple[selection.Quality, ...]
    break_even_density: Share  # below it, mode predicted reads fewer bytes than exact


class LayerTrainer:
    def __init__(
        self,
        *,
        gate: Gate,
        gate_FD: Tensor,
        down: Matrix,
        sizes: LayerBytes,
        tried: PredictorChoices,
        gate_bias_F: Tensor | None = None,
    ) -> None:
        self.gate, self.down, self.sizes, self.tried = gate, down, sizes, tried
        self.down_norm_F = row_norms(down)
        self.num_neurons, self.width = gate_FD.shape
        self.device = gate_FD.device
        self.moments = Moments(gate_FD, gate_bias_F)
        self.kept: list[Batch] = []
        self.candidates: list[selection.Candidate] = []
        self.trained: LowRankNetwork | None = None
        self.tallies: list[selection.Tally] = []
        self.examiners: list[selection.Examiner] = []
        self.phase: Phase = "moments"

    def enter(self, phase: Phase, num_steps: int, agree: Agree = lambda tensor: None) -> None:
        """Begins a phase, in order. `num_steps` and `agree`: see LowRankNetwork.begin."""
        self.phase = phase
        if phase == "train":
            self._begin_training(num_steps, agree)
        elif phase == "measure":
            assert self.trained is not None
            self.trained.end()
            if self.trained.is_trained:
                self.candidates += self._rounded(self.trained)
            self.tallies = self._tallies(self.candidates)
        elif phase == "examine":
            self._choose_and_examine()

    def add(self, x_TD: Tensor, gate_TF: Tensor, hidden_TF: Tensor) -> None:
        """Adds tokens of the current phase: the predictor's input, gates, and act(gate) * up."""
        if self.phase == "moments":
            self.moments.add(x_TD, gate_TF)
        elif self.phase == "keep":
            left = KEPT_TOKENS - sum(len(batch.x_TD) for batch in self.kept)
            if left > 0:
                # Copied, since a slice would keep all of the window in memory.
                batch = self.batch(x_TD[:left].clone(), gate_TF[:left], hidden_TF[:left])
                self.kept.append(replace(batch, given_TF=batch.given_TF.half()))
        elif self.phase == "train":
            assert self.trained is not None
            if not self.trained.is_done:
                self.trained.step(self.batch(x_TD, gate_TF, hidden_TF))
        elif self.phase == "measure":
            batch = self.batch(x_TD, gate_TF, hidden_TF)
            y_TD = self.down.combine_many(hidden_TF * batch.fires_TF)
            square = y_TD.double().square().sum().item()
            for tally in self.tallies:
                self._count(tally, batch, square)
        else:
            fires_TF = self.gate.act(gate_TF)[1]
            for examiner in self.examiners:
                examiner.add(x_TD, fires_TF, hidden_TF, self.down_norm_F)

    def batch(self, x_TD: Tensor, gate_TF: Tensor, hidden_TF: Tensor) -> Batch:
        fires_TF = self.gate.act(gate_TF)[1]
        given_TF = hidden_TF.abs() * self.down_norm_F * fires_TF
        return Batch(x_TD=x_TD, fires_TF=fires_TF, given_TF=given_TF)

    def _begin_training(self, num_steps: int, agree: Agree) -> None:
        """Makes the untrained candidates, and starts to train the best low-rank one."""
        self.start = self.moments.start()
        for tensor in vars(self.start).values():  # processes on different processors may differ
            agree(tensor)
        self.held_out, self.kept = joined(self.kept), []
        if self.tried.has_whole:
            for kind in self._kinds(self.start.map_FD.shape[1]):
                made = whole(self.start, kind)
                self.candidates.append(selection.Candidate(predictor=made, is_trained=False))
        low_rank = [
            each
            for rank in self.tried.ranks
            for each in self._rounded(LowRankNetwork(self.start, rank, self.gate))
        ]
        tallies = self._tallies(low_rank)
        square = self.held_out.given_TF.square().sum().item()
        for tally in tallies:
            self._count(tally, self.held_out, square)
        qualities = [tally.quality(self.tried.target, self.sizes) for tally in tallies]
        best = torch.tensor(self._choose(qualities))
        agree(best)
        self.candidates += low_rank
        self.trained = LowRankNetwork(self.start, low_rank[int(best)].rank, self.gate)
        self.trained.begin(num_steps, self.held_out, agree)

    def _choose_and_examine(self) -> None:
        target = self.tried.target
        self.qualities = [tally.quality(target, self.sizes) for tally in self.tallies]
        index = self._choose(self.qualities)
        shapes = [(q.rank, q.matrix_kind, q.is_trained) for q in self.qualities]
        untrained = shapes.index((*shapes[index][:2], False))
        self.examiners = [
            selection.Examiner(
                self.candidates[i], self.qualities[i].threshold, self.down, self.sizes
            )
            for i in (index, untrained)
        ]
        self.predictor = self.candidates[index].predictor
        self.candidates, self.tallies = [], []

    def finish(self) -> tuple[LayerPredictor, LayerQuality]:
        chosen, start = (examiner.quality() for examiner in self.examiners)
        quality = LayerQuality(
            chosen=chosen,
            start=start,
            hottest_fifth=self.examiners[0].hottest_fifth,
            candidates=tuple(self.qualities),
            break_even_density=self._break_even(chosen),
        )
        down, up = self.predictor.down, self.predictor.up
        weights = LayerPredictor(
            down=None if down is None else stored(down.weight),
            up=stored(up.weight),
            up_bias_F=None if up.bias_N is None else up.bias_N.cpu().numpy(),
        )
        return weights, quality

    def _choose(self, qualities: list[selection.Quality]) -> int:
        density = qualities[0].density
        exact = selection.bytes_per_token(0, 1.0, density, self.num_neurons, self.sizes)
        return selection.choose(qualities, self.tried.target, exact)

    def _break_even(self, chosen: selection.Quality) -> float:
        """The density at which both modes read the same bytes: exact reads every gate, predicted
        reads the predictor and a share of the gates, the density times the over-fetch."""
        gates = len(self.down_norm_F) * self.sizes.gate_row
        overfetch = chosen.predicted_density / max(chosen.density, 1e-12)
        return min(1.0, max(0.0, 1 - chosen.num_bytes / gates) / max(overfetch, 1e-12))

    def _kinds(self, *widths: int) -> list[str]:
        return [k for k in self.tried.kinds if all(is_whole_blocks(w, k) for w in widths)]

    def _rounded(self, network: LowRankNetwork) -> list[selection.Candidate]:
        width = self.start.map_FD.shape[1]
        return [
            selection.Candidate(predictor=network.predictor(kind), is_trained=network.is_trained)
            for kind in self._kinds(width, network.rank) or ["f16"]
        ]

    def _tallies(self, candidates: list[selection.Candidate]) -> list[selection.Tally]:
        device = self.down_norm_F.device
        with torch.no_grad():
            return [
                selection.Tally(c, c.predictor.scores(self.held_out.x_TD).std().item(), device)
                for c in candidates
            ]

    @torch.no_grad()
    def _count(self, tally: selection.Tally, batch: Batch, square: float) -> None:
        score_TF = tally.candidate.predictor.scores(batch.x_TD)
        tally.add(score_TF, batch.fires_TF, batch.given_TF, square)


class PredictorTrainer:
    """An observer that passes each layer's tensors to its LayerTrainer."""

    def __init__(self, layers: Sequence[LayerTrainer]) -> None:
        self.layers = layers
        self.x_TD: Tensor | None = None  # of the layer that is being computed, as the gates
        self.gate_TF: Tensor | None = None

    def wants(self, name: str, layer: int | None) -> bool:
        return name in ("ffn_norm", "ffn_gate", "ffn_hidden")

    def observe(self, name: str, layer: int | None, tensor: Tensor) -> None:
        assert layer is not None
        # The model runs in inference mode, whose tensors autograd does not accept.
        with torch.inference_mode(False), torch.enable_grad():
            if name == "ffn_norm":
                self.x_TD = tensor.clone()
            elif name == "ffn_gate":
                self.gate_TF = tensor.clone()
            else:
                assert self.x_TD is not None and self.gate_TF is not None
                self.layers[layer].add(self.x_TD, self.gate_TF, tensor.clone())


def joined(batches: Sequence[Batch]) -> Batch:
    """The concatenated batches, in f32."""
    if len(batches) == 1:
        return replace(batches[0], given_TF=batches[0].given_TF.float())
    return Batch(
        x_TD=torch.cat([b.x_TD for b in batches]),
        fires_TF=torch.cat([b.fires_TF for b in batches]),
        given_TF=torch.cat([b.given_TF for b in batches]).float(),
    )


def phases(count: int) -> dict[Phase, slice]:
    """The windows of each phase, out of `count`, in order; at least one each if five or more."""
    sizes = {name: max(1, round(share * count)) for name, share in SHARES.items()}
    pieces: dict[Phase, slice] = {}
    start = 0
    for name in get_args(Phase):
        size = sizes.get(name, count - sum(sizes.values()))
        pieces[name] = slice(start, start + size)
        start += size
    return pieces


def row_norms(matrix: Matrix) -> Tensor:
    """f32 [N]: the Euclidean length of each row."""
    rows = torch.arange(matrix.num_rows, device=matrix.data.device)
    return torch.cat(
        [matrix.rows(piece).norm(dim=1) for piece in rows.split(tile_rows(matrix.width))]
    )
