"""One forward pass: token ids in, hidden states and logits out.

What this module does not know: text, sampling, and where weights came from.

Letters: T tokens, D model width, V vocabulary."""

from dataclasses import dataclass

import torch
from torch import Tensor

from sparkinfer.budget import LOGITS_CHUNK, PREFILL_CHUNK
from sparkinfer.runtime.attention import Turn
from sparkinfer.runtime.loader import Layer, Weights
from sparkinfer.runtime.observers import Observers


@dataclass(frozen=True, kw_only=True)
class Decoder:
    weights: Weights
    input_layer_offset: int  # whose FFN input a predictor takes: this layer's, or one before
    observers: Observers

    def forward(self, ids_T: Tensor, start: int) -> Tensor:
        """Hidden states [T, D] before the head, of tokens at positions from `start`.

        Takes at most PREFILL_CHUNK tokens; keys and values go into the cache."""
        assert 1 <= len(ids_T) <= PREFILL_CHUNK, len(ids_T)
        weights = self.weights
        x_TD = weights.embedding.rows(ids_T.to(weights.embedding.data.device))
        if weights.positions:
            positions_T = torch.arange(start, start + len(ids_T))
            x_TD = x_TD + weights.positions.rows(positions_T).to(x_TD.device)
        self.observers.show("embedding", None, x_TD)
        turns = {d: r.turn(start, len(ids_T)) for d, r in weights.rotary.items()}
        ffn_inputs: list[Tensor] = []
        for index, layer in enumerate(weights.layers):
            x_TD = x_TD.to(layer.device)
            x_TD = self._layer(index, layer, x_TD, start, turns.get(layer.device), ffn_inputs)
            self.observers.show("layer_out", index, x_TD)
        return x_TD.to(weights.head_device)

    def _layer(
        self,
        index: int,
        layer: Layer,
        x_TD: Tensor,
        start: int,
        turn: Turn | None,
        ffn_inputs: list[Tensor],
    ) -> Tensor:
        """The three orders of blocks: norm before each, norm after each sum, both blocks at once.

        Falcon's layers are of the last kind; of two norms the second is then attention's."""
        show = self.observers.show

        def attention(input_TD: Tensor) -> Tensor:
            show("attn_norm", index, input_TD)
            out_TD = layer.attention.forward(input_TD, start, turn)
            show("attn_out", index, out_TD)
            return out_TD

        def feed_forward(input_TD: Tensor) -> Tensor:
            show("ffn_norm", index, input_TD)
            ffn_inputs.append(input_TD)
            named_by_TD = ffn_inputs[max(0, index - self.input_layer_offset)].to(layer.device)
            out_TD = layer.ffn.forward(input_TD, named_by_TD)
            show("ffn_out", index, out_TD)
            return out_TD

        if layer.ffn_norm is None:
            normed_TD = layer.attn_norm.apply(x_TD)
            own_TD = layer.attn_norm_2.apply(x_TD) if layer.attn_norm_2 else normed_TD
            return x_TD + attention(own_TD) + feed_forward(normed_TD)
        if layer.is_post_norm:
            x_TD = layer.attn_norm.apply(x_TD + attention(x_TD))
            return layer.ffn_norm.apply(x_TD + feed_forward(x_TD))
        x_TD = x_TD + attention(layer.attn_norm.apply(x_TD))
        return x_TD + feed_forward(layer.ffn_norm.apply(x_TD))

    def logits(self, hidden_TD: Tensor) -> Tensor:
        """f32 [T, V] on the CPU."""
        pieces = []
        for piece_TD in hidden_TD.split(LOGITS_CHUNK):
            if self.weights.output_norm:
                piece_TD = self.weights.output_norm.apply(piece_TD)
            self.observers.show("output_norm", None, piece_TD)
            logits_TV = self.weights.head.apply(piece_TD).cpu()
            self.observers.show("logits", None, logits_TV)
            pieces.append(logits_TV)
        return torch.cat(pieces)
