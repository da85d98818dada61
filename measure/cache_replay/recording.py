"""Records which neurons each token of a text reads, so that policies of the neuron cache can be
compared without running the model again.

Letters: T tokens, L layers, F neurons of a layer, W 32-bit words that hold a bit for each of F
neurons."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hotsplit.costs.part_bytes import most_units
from hotsplit.errors import HotsplitError
from hotsplit.model.modes import computes_all, runs_predictors
from hotsplit.runtime.engine import Engine
from hotsplit.runtime.neuron_cache.policy import packed


@dataclass(frozen=True, kw_only=True)
class Trace:
    """The neurons read by each token of a text, as bits."""

    num_neurons: int
    bits_TLW: np.ndarray  # uint32, bit j % 32 of word j // 32 for neuron j

    def layers(self, chosen: Sequence[int]) -> "Trace":
        """The trace of these layers only."""
        bits = np.ascontiguousarray(self.bits_TLW[:, list(chosen)])
        return Trace(num_neurons=self.num_neurons, bits_TLW=bits)

    def is_read(self, token: int) -> np.ndarray:
        """Whether a token reads each neuron, bool [L, F]."""
        as_bytes = self.bits_TLW[token].view(np.uint8)
        bits = np.unpackbits(as_bytes, axis=1, bitorder="little", count=self.num_neurons)
        return bits.view(bool)

    @property
    def read_TL(self) -> np.ndarray:
        """Number of neurons read, int64."""
        return np.bitwise_count(self.bits_TLW).sum(axis=2, dtype=np.int64)

    def frequency_LF(self) -> np.ndarray:
        """The share of tokens that read each neuron, f64."""
        total = np.zeros(self.bits_TLW.shape[1:2] + (self.num_neurons,), np.int64)
        for token in range(len(self.bits_TLW)):
            total += self.is_read(token)
        return total / len(self.bits_TLW)


def record(engine: Engine, token_ids: Sequence[int], window: int) -> Trace:
    """Runs the model over the tokens in windows of at most `window`, each a separate text.

    In mode predicted a neuron is read if the predictor names it; in mode exact, if its hidden value
    is not 0, so that its `down` row is read. In mode dense it records which experts a mixture's routers
    choose, and raises HotsplitError for other models, of which every neuron is read."""
    if computes_all(engine.mode) and engine.model.spec.has_experts:
        return _record_experts(engine, token_ids, window)
    if computes_all(engine.mode):
        raise HotsplitError(
            f"{engine.model.path}: runs in mode dense, which reads every neuron for every token: there is"
            " nothing to cache; give --mode exact or predicted"
        )
    name = "ffn_predicted" if runs_predictors(engine.mode) else "ffn_hidden"
    parts: dict[int, list[np.ndarray]] = {}
    chosen: dict[int, Tensor] = {}  # [T, K], by layer

    def see(shown: str, layer: int | None, value: Tensor) -> None:
        assert layer is not None
        if shown == "ffn_experts":
            chosen[layer] = value
            return
        predictor = engine.layers[layer].ffn.predictor
        is_read = ~(value <= predictor.threshold) if predictor else value != 0
        if layer in chosen:
            num_experts = engine.model.spec.layers[layer].neurons.num_experts
            is_read = _of_all_experts(is_read, chosen[layer], num_experts)
        parts.setdefault(layer, []).append(packed(is_read.cpu().numpy()))

    _observe(engine, token_ids, window, see, (name, "ffn_experts"))
    bits = [np.concatenate(parts[layer]) for layer in range(len(engine.layers))]
    return Trace(num_neurons=engine.model.spec.most_neurons, bits_TLW=np.stack(bits, axis=1))


def _record_experts(engine: Engine, token_ids: Sequence[int], window: int) -> Trace:
    """The experts that each token's routers choose; none in layers without."""
    number = most_units(engine.model.spec)
    is_read_TLE = np.zeros((len(token_ids), engine.model.spec.num_layers, number), bool)
    first_L = np.zeros(engine.model.spec.num_layers, np.int64)

    def see(_: str, layer: int | None, id_TK: Tensor) -> None:
        assert layer is not None
        own_TE = is_read_TLE[first_L[layer] :, layer][: len(id_TK)]
        np.put_along_axis(own_TE, id_TK.cpu().numpy(), True, axis=1)
        first_L[layer] += len(id_TK)

    _observe(engine, token_ids, window, see, ("ffn_experts",))
    return Trace(num_neurons=number, bits_TLW=packed(is_read_TLE))


def _observe(
    engine: Engine,
    token_ids: Sequence[int],
    window: int,
    see: Callable[[str, int | None, Tensor], None],
    wanted: Sequence[str],
) -> None:
    with engine.observe(see, lambda shown, layer: shown in wanted), torch.inference_mode():
        for start in range(0, len(token_ids), window):
            engine.logits(list(token_ids[start : start + window]))


def _of_all_experts(is_read_TA: Tensor, id_TK: Tensor, num_experts: int) -> Tensor:
    """bool [T, F]: the neurons of all experts, of those of the chosen ones [T, K * neurons]."""
    is_read_TKN = is_read_TA.unflatten(1, (id_TK.shape[1], -1))
    whole_TEN = is_read_TKN.new_zeros(len(id_TK), num_experts, is_read_TKN.shape[2])
    whole_TEN[torch.arange(len(id_TK))[:, None], id_TK] = is_read_TKN
    return whole_TEN.flatten(1)
