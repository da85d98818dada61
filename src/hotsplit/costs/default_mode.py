"""Chooses a model's default mode: the one that reads the fewest bytes among those that cost next to
nothing.

A mode is allowed by default if it cannot change the output (dense, and exact if neurons are zero by
themselves), or if by the file's own record (mode_quality) it raises the perplexity by no more than
a given share; so are predictors without a record. Of those, the mode that reads the fewest bytes
per token is chosen, with a line that explains the choice if it is not the expected one.

The solver chooses by seconds instead."""

import math
from dataclasses import dataclass

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.costs.bytes_read import bytes_read
from hotsplit.costs.part_bytes import layer_bytes
from hotsplit.model.mode_quality import MAX_LOSS, SparseMode
from hotsplit.model.modes import Mode, runs_predictors


@dataclass(frozen=True, kw_only=True)
class ModeChoice:
    """`line` is for the user; None if the choice is the expected one."""

    mode: Mode
    line: str | None = None


def sparse_modes(model: ModelFile) -> tuple[SparseMode, ...]:
    """The sparse modes that the file supports; predicted first."""
    exact: tuple[SparseMode, ...] = ("exact",) if can_silence(model) else ()
    return ("predicted", *exact) if model.predictor is not None else exact


def mode_meant(model: ModelFile) -> Mode:
    """The mode that the file was made for, whatever its loss: its first sparse mode, or dense."""
    return next(iter(sparse_modes(model)), "dense")


def computes_every_neuron(model: ModelFile, mode: Mode | None) -> bool:
    """True if a model without experts can run in no other mode than dense, or is asked to run in
    it: a plan then needs no counts of firings. None: no mode is asked for."""
    if model.spec.has_experts:
        return False
    return mode == "dense" or (mode is None and not sparse_modes(model))


def can_silence(model: ModelFile) -> bool:
    """True if the activation can silence values, as mode exact requires. Not in experts of the
    stock layout, whose down projections have no row for each neuron."""
    return model.spec.silences and not (model.spec.has_experts and model.layout == "stock")


def refusal(model: ModelFile, mode: Mode, max_loss: float) -> str | None:
    """Why a mode is not run by default; None if it may be: modes dense and exact lose nothing.
    Predictors without a record are allowed, since older files have no records."""
    quality = model.quality.get("predicted") if runs_predictors(mode) else None
    if quality is None or quality.perplexity_increase <= max_loss:
        return None
    return f"it costs {_percent(quality.perplexity_increase)} of perplexity"


def choose_mode(model: ModelFile, max_loss: float = MAX_LOSS) -> ModeChoice:
    """The default mode. Without records of bytes, predicted comes before exact and dense."""
    modes = sparse_modes(model)
    allowed = [mode for mode in modes if refusal(model, mode, max_loss) is None]
    known = {mode: bytes_per_token(model, mode) for mode in allowed}
    if all(count is not None for count in known.values()):
        sizes: dict[Mode, float] = {"dense": float(dense_bytes(model))}
        sizes |= {mode: count for mode, count in known.items() if count is not None}
        mode = min(sizes, key=lambda mode: (sizes[mode], mode != "dense"))
    else:
        mode = allowed[0]
    return ModeChoice(mode=mode, line=_line(model, mode, modes, max_loss))


def loss_line(model: ModelFile, mode: Mode, max_loss: float) -> str | None:
    """A line for a user who asked for a mode that costs more than `max_loss`."""
    quality = None if mode == "dense" else model.quality.get(mode)
    if quality is None or quality.perplexity_increase <= max_loss:
        return None
    return (
        f"mode {mode} costs {_percent(quality.perplexity_increase)} of perplexity by the file's own"
        f" record (limit {_share(max_loss)}); without --mode it is not chosen"
    )


def dense_bytes(model: ModelFile) -> int:
    """Weight bytes that a token reads in mode dense."""
    return round(bytes_read(model))


def predictor_bytes(model: ModelFile) -> int:
    return sum(layer_bytes(model, layer).predictor for layer in range(model.spec.num_layers))


def bytes_per_token(model: ModelFile, mode: SparseMode) -> float | None:
    """Bytes per token according to the record; None without one. If the record was measured with
    other types, all bytes are scaled in proportion to the dense bytes, except those of predictors,
    which keep their types."""
    quality = model.quality.get(mode)
    if quality is None:
        return None
    fixed = predictor_bytes(model) if runs_predictors(mode) else 0
    scale = dense_bytes(model) / quality.dense_bytes_per_token
    return fixed + scale * (quality.bytes_per_token - fixed)


def _line(
    model: ModelFile, mode: Mode, modes: tuple[SparseMode, ...], max_loss: float
) -> str | None:
    """A line on why a supported mode was not chosen; None if there is nothing to say."""
    if mode == mode_meant(model):
        return None
    if refusal(model, "predicted", max_loss) is not None:
        quality, whole = model.quality["predicted"], dense_bytes(model)
        saved = 1 - (bytes_per_token(model, "predicted") or whole) / whole
        reads = f"read {abs(100 * saved):.0f} % {'less' if saved >= 0 else 'more'}"
        unit = 10.0 ** math.floor(math.log10(quality.perplexity_increase))
        above = math.ceil(quality.perplexity_increase / unit * (1 - 1e-12)) * unit  # one digit
        return (
            f"mode {mode}: predicted would {reads} and cost"
            f" {_percent(quality.perplexity_increase)} of perplexity (limit {_share(max_loss)});"
            f" --mode predicted, or --max-loss {above:g}, runs it"
        )
    own = dense_bytes(model) if mode == "dense" else bytes_per_token(model, mode)
    first = bytes_per_token(model, modes[0])
    if own is None or first is None:
        return None
    what = "predictors" if modes[0] == "predicted" else "silent neurons"
    return (
        f"mode {mode}: the {what} save less than they cost: a token reads {first / 1e6:,.1f} MB in"
        f" mode {modes[0]} and {own / 1e6:,.1f} MB in mode {mode}"
    )


def _percent(share: float) -> str:
    return f"{100 * share:+.3g} %"


def _share(share: float) -> str:
    return f"{100 * share:.3g} %"
