"""The memory that training predictors takes.

Letters: T tokens of a chunk, D model width, F neurons of a layer."""

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.costs.pass_length import SHORT_CHUNK
from hotsplit.errors import HotsplitError
from hotsplit.model.weight_types import BY_NAME
from hotsplit.profile.config import ProfileConfig
from hotsplit.profile.predictors.candidates import Choices, predictor_choices
from hotsplit.profile.predictors.layer_trainer import KEPT_TOKENS
from hotsplit.system.sizes import format_bytes
from hotsplit.system.system_memory import free_memory_bytes

FREE_SHARE = 0.9  # of the free memory; the rest is for other programs, and for fragmentation


def check_memory(config: ProfileConfig, model: ModelFile) -> None:
    """Raises HotsplitError if the free main memory does not hold the trainers of all layers, which
    are in it together. Weights need none: they stay in the mapped file."""
    spec, choices = model.spec, predictor_choices(config.predictors, model)
    lasting, passing = trainer_bytes(spec.hidden_size, spec.most_neurons, choices)
    needed, free = spec.num_layers * lasting + passing, int(FREE_SHARE * free_memory_bytes())
    if needed > free:
        raise HotsplitError(
            f"{model.path}: training predictors of {spec.num_layers} layers takes"
            f" {format_bytes(needed)}, {format_bytes(free)} are free; give a smaller --predictor-rank,"
            " or --predictor-form whole, or more memory"
        )


def trainer_bytes(width: int, num_neurons: int, choices: Choices) -> tuple[int, int]:
    """(lasting bytes, further bytes in a single operation) of one layer's
    profile.predictors.layer_trainer.LayerTrainer, estimated.

    The first: the gate matrix and its map, moments in f64, their start, every candidate in its
    type, the trained network's weights, gradients, Adam's two moments and the best weights, and the
    kept tokens. The second: the SVD of F x D in f64 with LAPACK's copies and workspace (at 3072 x
    1024 some 230 MiB, measured once), or a step's T x F values."""
    square, gate = width * width, num_neurons * width
    stored = sum(BY_NAME[kind].bytes_per_value for kind in choices.kinds)
    ranks = choices.ranks if "low-rank" in choices.forms else ()
    start = 4 * (2 * gate + 2 * square) + 4 * (min(width, num_neurons) * (num_neurons + width))
    candidates = stored * ("whole" in choices.forms) * gate
    candidates += stored * (sum(ranks) + max(ranks, default=0)) * (width + num_neurons)
    network = 20 * max(ranks, default=0) * (width + num_neurons)
    kept = KEPT_TOKENS * (4 * width + 5 * num_neurons)
    # The regression on the layer before needs the product of both, in f64.
    lasting = start + 8 * square + 8 * gate + round(candidates) + network + kept
    svd = 48 * gate + 96 * square
    return lasting, max(svd, 40 * max(SHORT_CHUNK, KEPT_TOKENS) * num_neurons)
