"""One forward pass: token ids in, hidden states and logits out.

What this module does not know: text, sampling, and where weights came from.

Letters: T tokens, D model width, V vocabulary."""

from dataclasses import dataclass

import torch
from torch import Tensor

from sparkinfer.budget import LOGITS_CHUNK, PREFILL_CHUNK
from sparkinfer.runtime.attention import multiply, rms_norm
from sparkinfer.runtime.loader import Layer, Weights
from sparkinfer.runtime.observers import Observers


@dataclass(frozen=True, kw_only=True)
class Decoder:
    weights: Weights
    norm_epsilon: float
    input_layer_offset: int  # whose FFN input a predictor takes: this layer's, or one before
    observers: Observers

    def forward(self, ids_T: Tensor, start: int) -> Tensor:
        """Hidden states [T, D] before the head, of tokens at positions from `start`.

        Takes at most PREFILL_CHUNK tokens; keys and values go into the cache."""
        assert 1 <= len(ids_T) <= PREFILL_CHUNK, len(ids_T)
        weights = self.weights
        x_TD = weights.embedding.rows(ids_T.to(weights.embedding.data.device))
        self.observers.show("embedding", None, x_TD)
        angles = {d: r.angles(start, len(ids_T)) for d, r in weights.rotary.items()}
        ffn_inputs: list[Tensor] = []
        for index, layer in enumerate(weights.layers):
            x_TD = self._layer(index, layer, x_TD.to(layer.device), start, angles, ffn_inputs)
        return x_TD.to(weights.head_device)

    def _layer(
        self,
        index: int,
        layer: Layer,
        x_TD: Tensor,
        start: int,
        angles: dict[torch.device, tuple[Tensor, Tensor]],
        ffn_inputs: list[Tensor],
    ) -> Tensor:
        show = self.observers.show
        normed_TD = rms_norm(x_TD, layer.attention.norm_D, self.norm_epsilon)
        show("attn_norm", index, normed_TD)
        attended_TD = layer.attention.forward(normed_TD, start, angles[layer.device])
        show("attn_out", index, attended_TD)
        x_TD = x_TD + attended_TD
        normed_TD = rms_norm(x_TD, layer.ffn_norm_D, self.norm_epsilon)
        show("ffn_norm", index, normed_TD)
        ffn_inputs.append(normed_TD)
        named_by_TD = ffn_inputs[max(0, index - self.input_layer_offset)].to(layer.device)
        out_TD = layer.ffn.forward(normed_TD, named_by_TD)
        show("ffn_out", index, out_TD)
        x_TD = x_TD + out_TD
        show("layer_out", index, x_TD)
        return x_TD

    def logits(self, hidden_TD: Tensor) -> Tensor:
        """f32 [T, V] on the CPU."""
        pieces = []
        for piece_TD in hidden_TD.split(LOGITS_CHUNK):
            normed_TD = rms_norm(piece_TD, self.weights.output_norm_D, self.norm_epsilon)
            self.observers.show("output_norm", None, normed_TD)
            logits_TV = multiply(self.weights.head, normed_TD).cpu()
            self.observers.show("logits", None, logits_TV)
            pieces.append(logits_TV)
        return torch.cat(pieces)
