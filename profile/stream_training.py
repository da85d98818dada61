"""Trains predictors while a model streams by: each layer's from start to end while it is loaded.

The phases, their windows and their order are those of profile.training.PredictorTrainer, so the
predictors are the same; but one layer's trainer is in memory at a time, and one pass over the
weights serves all phases. What this module does not know: how a predictor is trained.

Letters: T tokens of a chunk, F neurons of a layer."""

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from sparkinfer.predictor_file import LayerPredictor
from sparkinfer.profile.streaming import LayerStream, OnTokens, StreamedLayer
from sparkinfer.profile.training import LayerQuality, LayerTrainer
from sparkinfer.runtime.loader import Layer

Finished = tuple[LayerPredictor, float, LayerQuality]


def train_layers(
    stream: LayerStream,
    windows: Sequence[Tensor],
    on_tokens: OnTokens,
    *,
    trainer_of: Callable[[int, Layer], LayerTrainer],
    input_layer_offset: int,
    first: int,
    last: int,
    num_steps: int,
    target: float,
) -> list[Finished]:
    """What LayerTrainer.finish gives, of every layer. Moments are of the windows before `first`,
    training takes those up to `last`, the rest is held out."""

    def train(step: StreamedLayer) -> Finished:
        trainer = trainer_of(step.index, step.layer)
        watcher = _Watcher(step, trainer, input_layer_offset)
        with stream.observe(watcher.observe, watcher.wants):
            step.advance(0, first)
            trainer.start(num_steps)
            watcher.phase = "train"
            step.advance(first, last)
            watcher.phase = "measure"
            step.advance(last, len(windows))
        return trainer.finish(target)

    # A function of its own for a layer: nothing of it is left when the next is loaded.
    steps = stream.steps(windows, on_tokens, keeps_inputs=input_layer_offset == 1)
    return [train(step) for step in steps]


class _Watcher:
    """An observer that hands one layer's tensors to its trainer, in the current phase."""

    def __init__(self, step: StreamedLayer, trainer: LayerTrainer, offset: int) -> None:
        self.step, self.trainer, self.offset = step, trainer, offset
        self.phase: Literal["moment", "train", "measure"] = "moment"
        self.x_TD: Tensor | None = None
        self.gate_TF: Tensor | None = None

    def wants(self, name: str, layer: int | None) -> bool:
        return name == "ffn_norm" or (name in ("ffn_gate", "ffn_hidden") and self.phase != "moment")

    def observe(self, name: str, layer: int | None, tensor: Tensor) -> None:
        # The model runs in inference mode, whose tensors autograd does not take.
        with torch.inference_mode(False), torch.enable_grad():
            if name == "ffn_norm":
                before_TD = self.step.before_TD if self.offset else None
                self.x_TD = (tensor if before_TD is None else before_TD).clone()
                if self.phase == "moment":
                    self.trainer.add_moment(self.x_TD)
            elif name == "ffn_gate":
                self.gate_TF = tensor.clone()
            else:
                assert self.x_TD is not None and self.gate_TF is not None
                run = self.trainer.train if self.phase == "train" else self.trainer.measure
                run(self.x_TD, self.gate_TF, tensor.clone())
