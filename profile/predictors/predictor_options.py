"""Options of predictors, which follow from a model: what is tried, and the memory that it takes.

Does not import torch, so that options that do not suit a model are refused at once.

Letters: T tokens of a chunk, D model width, F neurons of a layer."""

from dataclasses import dataclass

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.costs.pass_length import SHORT_CHUNK
from hotsplit.errors import HotsplitError
from hotsplit.model.weight_types import BY_NAME, SMALL_BLOCK_NAMES
from hotsplit.system.sizes import format_bytes
from hotsplit.system.system_memory import free_memory_bytes

# Ranks tried by default are multiples of it, so that every type can hold them; in models too small
# for any, the rank is a quarter of the width.
BLOCK = 32
# Shares of the width that are tried as ranks. With half of it, a predictor has five eighths as many
# values as the gate matrix if F = 4 D.
RANK_SHARES = (1 / 8, 1 / 4, 1 / 2)
KEPT_TOKENS = 512  # whose activations a layer's trainer stores
FREE_SHARE = 0.9  # of the free memory; the rest is for other programs, and for fragmentation


@dataclass(frozen=True, kw_only=True)
class Target:
    """The target for a predictor on the text that it is chosen on: see
    profile.predictors.selection."""

    contribution: float = 0.992
    lost_norm: float = 0.04
    precision: float = 0.75


@dataclass(frozen=True, kw_only=True)
class PredictorChoices:
    """The predictors to consider: low-rank ones of these ranks and, if `has_whole`, the whole gate.
    Types whose blocks do not divide the rows are left out; a low-rank predictor is f16 if none is
    left. q8_0 is as good as f16 at about half the bytes."""

    ranks: tuple[int, ...]
    has_whole: bool = True
    kinds: tuple[str, ...] = SMALL_BLOCK_NAMES
    target: Target = Target()

    @classmethod
    def of(cls, rank: int | None, model: ModelFile) -> "PredictorChoices":
        """Form and type are chosen by measurement. Without a rank several are tried; with one, only
        low-rank predictors are. Raises HotsplitError for a rank that does not suit this model."""
        width, neurons = model.spec.hidden_size, model.spec.most_neurons
        if rank is not None:
            if not 1 <= rank <= min(width, neurons):
                raise HotsplitError(
                    f"predictor rank is {rank}, wanted 1 to {min(width, neurons)}, the smaller of"
                    " the model's width and its neurons per layer"
                )
            return cls(ranks=(rank,), has_whole=False)
        blocks = {max(1, round(share * width / BLOCK)) * BLOCK for share in RANK_SHARES}
        fitting = tuple(sorted(each for each in blocks if each < width and each <= neurons))
        return cls(ranks=fitting or (max(1, width // 4),))


def check_memory(rank: int | None, model: ModelFile) -> None:
    """Raises HotsplitError if the free main memory does not hold the trainers of all layers, which
    are in it together. Weights need none: they stay in the mapped file."""
    spec = model.spec
    tried = PredictorChoices.of(rank, model)
    lasting, passing = trainer_bytes(spec.hidden_size, spec.most_neurons, tried)
    needed, free = spec.num_layers * lasting + passing, int(FREE_SHARE * free_memory_bytes())
    if needed > free:
        raise HotsplitError(
            f"{model.path}: training predictors of {spec.num_layers} layers takes"
            f" {format_bytes(needed)}, {format_bytes(free)} are free; give a smaller"
            " --predictor-rank, or more memory"
        )


def trainer_bytes(width: int, num_neurons: int, tried: PredictorChoices) -> tuple[int, int]:
    """(lasting bytes, further bytes in a single operation) of one layer's
    profile.predictors.layer_trainer.LayerTrainer, estimated. The first: the gate matrix and its
    map, moments in f64, their start, every candidate in its type, the trained network's weights,
    gradients, Adam's two moments and the best weights, and the kept tokens. The second: the SVD of
    F x D in f64 with LAPACK's copies and workspace (at 3072 x 1024 some 230 MiB, measured once), or
    a step's T x F values."""
    square, gate, both = width * width, num_neurons * width, width + num_neurons
    stored = sum(BY_NAME[kind].bytes_per_value for kind in tried.kinds)
    start = 4 * (2 * gate + 2 * square) + 4 * min(width, num_neurons) * both
    candidates = stored * (tried.has_whole * gate + (sum(tried.ranks) + max(tried.ranks)) * both)
    network = 20 * max(tried.ranks) * both
    kept = KEPT_TOKENS * (4 * width + 5 * num_neurons)
    lasting = start + 8 * square + round(candidates) + network + kept
    return lasting, max(48 * gate + 96 * square, 40 * max(SHORT_CHUNK, KEPT_TOKENS) * num_neurons)
