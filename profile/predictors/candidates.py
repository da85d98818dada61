"""The predictors to try for a model: their ranks, types and forms.

Does not import torch, so that options that do not suit a model are refused at once."""

from dataclasses import dataclass

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.errors import HotsplitError
from hotsplit.model.weight_types import PREDICTOR_NAMES, SMALL_BLOCK_NAMES
from hotsplit.profile.predictors.options import PredictorOptions, Target

# Ranks tried by default are multiples of it, so that every type can hold them; in models too small
# for any, the rank is a quarter of the width.
BLOCK = 32
# Shares of the width that are tried as ranks. With half of it, a predictor has five eighths as many
# values as the gate matrix if F = 4 D.
RANK_SHARES = (1 / 8, 1 / 4, 1 / 2)


@dataclass(frozen=True, kw_only=True)
class Choices:
    """The predictors to consider. Types whose blocks do not divide the rows are left out; a
    low-rank predictor is f16 if none is left."""

    ranks: tuple[int, ...]
    kinds: tuple[str, ...] = PREDICTOR_NAMES
    forms: tuple[str, ...] = ("low-rank", "whole")
    target: Target = Target()


def predictor_choices(options: PredictorOptions, model: ModelFile) -> Choices:
    """The candidates to try. Raises HotsplitError for options that do not suit this model."""
    width, neurons = model.spec.hidden_size, model.spec.most_neurons
    if options.rank is not None and options.rank > min(width, neurons):
        raise HotsplitError(
            f"predictor rank is {options.rank}, wanted at most {min(width, neurons)}, the smaller"
            " of the model's width and its neurons per layer"
        )
    blocks = {max(1, round(share * width / BLOCK)) * BLOCK for share in RANK_SHARES}
    fitting = tuple(sorted(rank for rank in blocks if rank < width and rank <= neurons))
    ranks = (options.rank,) if options.rank else fitting or (max(1, width // 4),)
    forms = ("low-rank", "whole") if options.rank is None else ("low-rank",)
    # q8_0 is as good as f16 at about half the bytes.
    return Choices(ranks=ranks, kinds=SMALL_BLOCK_NAMES, forms=forms, target=options.target)
