"""What `collect` does with a model that streams by, a layer at a time: thresholds and training.

What this module does not know: corpora, files, or several processes."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from sparkinfer.profile.counting import Counter
from sparkinfer.profile.stream_training import Finished, train_layers
from sparkinfer.profile.streaming import LayerStream
from sparkinfer.profile.trainer_state import num_steps
from sparkinfer.profile.training import LayerTrainer
from sparkinfer.runtime.feed_forward import Gate
from sparkinfer.runtime.loader import Layer


@dataclass(frozen=True)
class Streamed:
    stream: LayerStream
    on_tokens: Callable[[float], None]

    def histogram(self, gates: tuple[Gate, ...], windows: tuple[Tensor, ...]) -> np.ndarray:
        """int64 [L, B], of a pass of its own over the weights."""
        counter = Counter(gates, self.stream.model.shape.num_neurons)
        with self.stream.observe(counter.observe, counter.wants):
            self.stream.run(windows, self.on_tokens)
        counter.check()
        return counter.arrays()["gate_histogram_LB"].numpy()

    def train(
        self,
        windows: tuple[Tensor, ...],
        bounds: tuple[int, int],
        *,
        trainer_of: Callable[[int, Layer], LayerTrainer],
        input_layer_offset: int,
        target: float,
    ) -> list[Finished]:
        """Of every layer; `bounds` divide the windows as in collect._bounds."""
        first, last = bounds
        return train_layers(
            self.stream, windows, self.on_tokens,
            trainer_of=trainer_of, input_layer_offset=input_layer_offset,
            first=first, last=last, num_steps=num_steps(windows[first:last], 1), target=target,
        )  # fmt: skip
