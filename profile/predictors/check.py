"""Checks that a model file's predictors do better than chance, and read the input that they were
made for.

A predictor that was made for the input of the layer before, but is given that of its own layer (or
the other way round), selects the wrong neurons without raising an error.

Letters: T tokens, D model width, F neurons, L layers."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.measure.evaluate.verify_conversion import text_token_ids
from hotsplit.profile.count.counting import gates_of
from hotsplit.runtime.engine import Engine
from hotsplit.runtime.model.loader import load_predictors
from hotsplit.runtime.ops.predict import Predictor

# Below this, (recall - predicted share) / (1 - predicted share) is near chance: 1 is perfect, 0 is
# random.
CHANCE = 0.15


@dataclass(frozen=True, kw_only=True)
class PredictorCheck:
    """Quality on a short text, with the file's offset and with the other one."""

    offset: int
    recall: float
    named: float
    gain: float  # over chance, see CHANCE
    other_gain: float

    @property
    def is_near_chance(self) -> bool:
        return self.gain < CHANCE

    @property
    def line(self) -> str:
        """The line for a user whose predictors are near chance."""
        line = (
            f"predictors catch {self.recall:.0%} of the firing neurons while naming"
            f" {self.named:.0%} of all, on a short text: little better than chance"
        )
        if self.other_gain > max(2 * self.gain, CHANCE):
            return (
                f"{line}; they do better with --input-layer-offset {1 - self.offset}:"
                " convert with it"
            )
        return f"{line}; were they made for this model?"


def check_predictors(path: Path) -> PredictorCheck | None:
    """Checks predictors; None for a model without any, or if more than 95 % of the neurons fire or
    are predicted: then there is nothing to judge by."""
    model = ModelFile.load(path)
    if model.predictor is None:
        return None
    # Each layer on a short text: its input [T, D], and which neurons fire, bool [T, F].
    gates = gates_of(model)
    inputs: list[Tensor] = []
    fires: list[Tensor] = []

    def observe(name: str, layer: int | None, tensor: Tensor) -> None:
        assert layer is not None
        if name == "ffn_norm":
            inputs.append(tensor.clone())
        else:
            fires.append(gates[layer].act(tensor)[1])

    ids = text_token_ids(model)
    with (
        Engine.load(
            model.path, mode="dense", device="cpu", context_length=len(ids), is_resident=False
        ) as engine,
        engine.observe(observe, lambda name, layer: name in ("ffn_norm", "ffn_gate")),
    ):
        engine.hidden(ids)
    predictors = load_predictors(model, torch.device("cpu"))
    offset = model.predictor.input_layer_offset
    recall, named, gain = _quality(predictors, inputs, fires, offset)
    _, _, other_gain = _quality(predictors, inputs, fires, 1 - offset)
    if named > 0.95 or torch.stack(fires).float().mean() > 0.95:
        return None
    return PredictorCheck(
        offset=offset, recall=recall, named=named, gain=gain, other_gain=other_gain
    )


def _quality(
    predictors: tuple[Predictor, ...], inputs: list[Tensor], fires: list[Tensor], offset: int
) -> tuple[float, float, float]:
    """(recall, predicted share, gain over chance) of all layers but layer 0, whose predictor reads
    its own layer's input with either offset; of layer 0 if it is the only one."""
    first = 1 if len(predictors) > 1 else 0
    caught = fired = named = pairs = 0
    with torch.inference_mode():
        for layer in range(first, len(predictors)):
            predictor = predictors[layer]
            named_TF = predictor.scores(inputs[layer - offset]) > predictor.threshold
            caught += int((named_TF & fires[layer]).sum())
            fired += int(fires[layer].sum())
            named += int(named_TF.sum())
            pairs += named_TF.numel()
    recall, share = caught / max(1, fired), named / pairs
    return recall, share, (recall - share) / max(1e-9, 1 - share)
