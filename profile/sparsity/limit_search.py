"""Searches for the shares of values to silence in each layer that save a given number of bytes at
the least loss, without training.

The loss of a choice is modelled as a sum over layers and rules,

    KL = sum_l s_l,neurons * energy(gate_l, hidden_l) + sum_l sum_r s_l,r * energy_r(share_l,r)

with energies from the sample (`limit_scores`) and sensitivities s from probes: the KL divergence of
the whole model from its dense self with limits in one part of one layer (its neurons, or one of its
inputs). The sensitivities of a part are scaled such that the KLs of its layers add up to that of
one probe with limits in this part of all layers. With four parts (PARTS), this takes four probes
per layer and four more, and no gradients.
Silencing inputs of the feed-forward needs gate and up stored by columns, and silencing gates needs
the rows of up, so a layer has at most one of these two rules. A choice for a number of saved bytes
is found by a price per byte: each layer minimises its loss minus the price times the bytes saved,
and the price is bisected. The caller measures the true cost of a choice.

Letters: L layers, A shares."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hotsplit.artifacts.limits_file import LayerLimits, Limits
from hotsplit.artifacts.model_file import ModelFile
from hotsplit.files.gguf_file import TensorEntry
from hotsplit.profile.sparsity.limit_scores import INPUTS, SHARES, LayerScores

# The shares that the probes silence.
PROBE = {"gate": 0.2, "hidden": 0.5, "qkv": 0.3, "output": 0.3, "ffn": 0.25}
BISECTIONS = 60
LEAST_KL = 1e-12  # a probe's KL is at least this: rounding can make a harmless one negative
RULES = {
    "gates": ("gate",),
    "hidden": ("hidden",),
    "neurons": ("gate", "hidden"),
    "inputs": ("qkv", "output", "ffn"),
    "mixed": ("gate", "hidden", "qkv", "output", "ffn"),
}
ATTENTION = ("qkv", "output")
PARTS = {"neurons": ("gate", "hidden")} | {name: (name,) for name in INPUTS}  # of a layer


@dataclass(frozen=True, kw_only=True)
class Bytes:
    """Bytes of the matrices that a token reads in mode dense: by layer, and of the output head."""

    qkv_L: np.ndarray
    output_L: np.ndarray
    gate_L: np.ndarray
    up_L: np.ndarray
    down_L: np.ndarray
    head: int

    @classmethod
    def of(cls, model: ModelFile) -> "Bytes":
        def of_layers(*names: str) -> np.ndarray:
            rows = [[_size(model, f"blk.{n}.{name}.weight") for name in names] for n in layers]
            return np.array(rows, np.int64).sum(axis=1)

        layers = range(model.spec.num_layers)
        is_gated = model.spec.layers[layers.start].neurons.is_gated
        gate, up = ("ffn_gate", "ffn_up") if is_gated else ("ffn_up", "ffn_none")
        return cls(
            qkv_L=of_layers("attn_q", "attn_k", "attn_v", "attn_qkv", "attn_q_t", "attn_k_t",
                            "attn_v_t"),
            output_L=of_layers("attn_output", "attn_output_t"),
            gate_L=of_layers(gate, f"{gate}_t"),
            up_L=of_layers(up, f"{up}_t"),
            down_L=of_layers("ffn_down", "ffn_down_t"),
            head=_size(model, "output.weight") or _size(model, "token_embd.weight"),
        )  # fmt: skip

    @property
    def total(self) -> int:
        parts = (self.qkv_L, self.output_L, self.gate_L, self.up_L, self.down_L)
        return self.head + int(sum(part.sum() for part in parts))


def _size(model: ModelFile, name: str) -> int:
    entry: TensorEntry | None = model.tensors.get(name)
    return 0 if entry is None else entry.num_bytes


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Shares by layer; `hidden_L` includes the neurons that the gates silence."""

    gate_L: tuple[float, ...]
    hidden_L: tuple[float, ...]
    inputs_L: tuple[dict[str, float], ...]
    loss: float  # nats, as modelled
    saved_share: float  # of the weight bytes of a token

    def limits(self, scores: Sequence[LayerScores], model_id: str | None) -> Limits:
        layers = map(LayerScores.limits, scores, self.gate_L, self.hidden_L, self.inputs_L)
        return Limits(model_id=model_id, layers=tuple(layers))


class Allocation:
    """The modelled loss, to be minimised for any rule and any number of bytes saved."""

    def __init__(self, scores: Sequence[LayerScores], bytes_of: Bytes) -> None:
        self.bytes_of, self.num_layers = bytes_of, len(scores)
        self.neurons_LAA = np.stack([layer.neurons_lost_AA() for layer in scores])
        self.inputs_LA = {
            name: np.stack([layer.inputs[name].lost_A() for layer in scores]) for name in INPUTS
        }
        shares = np.array(SHARES)
        up, down = (b[:, None, None] for b in (bytes_of.up_L, bytes_of.down_L))
        # A silenced gate saves the rows of up and down; its own row has been read.
        self.neurons_saved_LAA = up * shares[:, None] + down * np.maximum(shares[:, None], shares)
        sizes = {"qkv": bytes_of.qkv_L, "output": bytes_of.output_L,
                 "ffn": bytes_of.gate_L + bytes_of.up_L}  # fmt: skip
        self.inputs_saved_LA = {name: size[:, None] * shares for name, size in sizes.items()}
        self.neurons_price_L = np.ones(self.num_layers)
        self.inputs_price_L = {name: np.ones(self.num_layers) for name in INPUTS}

    def energy_L(self, part: str) -> np.ndarray:
        """f64 [L]: the energy that probes of a part (neurons, or one of INPUTS) lose."""
        if part == "neurons":
            return self.neurons_LAA[:, _place("gate"), _place("hidden")]
        return self.inputs_LA[part][:, _place(part)]

    def calibrate(
        self, part_kl_L: Mapping[str, Sequence[float]], whole_kl: Mapping[str, float]
    ) -> None:
        """Sets the sensitivities from the KL divergences of the probes, by part (neurons, or one of
        INPUTS): `part_kl_L` with limits in one layer, `whole_kl` in all layers; each at the shares
        of PROBE."""

        def price_L(part: str) -> np.ndarray:
            alone = np.maximum(LEAST_KL, np.array(part_kl_L[part]))
            found = alone / np.maximum(1e-30, self.energy_L(part))
            whole = max(LEAST_KL, whole_kl[part])
            return found * whole / max(1e-30, float(found @ self.energy_L(part)))

        self.neurons_price_L = price_L("neurons")
        self.inputs_price_L = {name: price_L(name) for name in INPUTS}

    def best(self, rule: str, saved_share: float) -> Choice | None:
        """The choice at the lowest price that saves this share of all bytes: by the model, no
        choice that saves as many bytes loses less. None if the rule cannot save that share."""
        wanted = saved_share * self.bytes_of.total
        low, high = 1e-30, 1e30
        if self._take(rule, high).saved_share * self.bytes_of.total < wanted:
            return None
        for _ in range(BISECTIONS):
            price = (low * high) ** 0.5
            if self._take(rule, price).saved_share * self.bytes_of.total < wanted:
                low = price
            else:
                high = price
        return self._take(rule, high)

    def _take(self, rule: str, price: float) -> Choice:
        """The best choice of every layer at a price in nats per byte."""
        kinds = RULES[rule]
        layers = [self._of_layer(layer, kinds, price) for layer in range(self.num_layers)]
        return Choice(
            gate_L=tuple(layer.gate for layer in layers),
            hidden_L=tuple(layer.hidden for layer in layers),
            inputs_L=tuple(layer.inputs for layer in layers),
            loss=sum(layer.loss for layer in layers),
            saved_share=sum(layer.saved for layer in layers) / self.bytes_of.total,
        )

    def _of_layer(self, layer: int, kinds: Sequence[str], price: float) -> "_OfLayer":
        attention = [n for n in ATTENTION if n in kinds]
        by_rows = self._parts(layer, kinds, attention, price)
        if "ffn" not in kinds:
            return by_rows
        by_columns = self._parts(
            layer, [k for k in kinds if k != "gate"], [*attention, "ffn"], price
        )
        worth = [found.loss - price * found.saved for found in (by_rows, by_columns)]
        return by_columns if worth[1] < worth[0] else by_rows

    def _parts(
        self, layer: int, kinds: Sequence[str], inputs: Sequence[str], price: float
    ) -> "_OfLayer":
        """The best neurons and the best share of each of `inputs`, chosen independently."""
        lost_AA = self.neurons_LAA[layer] * self.neurons_price_L[layer]
        saved_AA = self.neurons_saved_LAA[layer]
        is_allowed = np.isfinite(lost_AA)
        if "gate" not in kinds:
            is_allowed[1:] = False
        if "hidden" not in kinds:
            is_allowed &= np.eye(len(SHARES), dtype=bool)
        worth_AA = np.where(is_allowed, lost_AA - price * saved_AA, np.inf)
        gate, hidden = np.unravel_index(int(worth_AA.argmin()), worth_AA.shape)
        loss, saved = float(lost_AA[gate, hidden]), float(saved_AA[gate, hidden])
        shares = {}
        for name in inputs:
            lost_A = self.inputs_LA[name][layer] * self.inputs_price_L[name][layer]
            saved_A = self.inputs_saved_LA[name][layer]
            best = int((lost_A - price * saved_A).argmin())
            loss, saved = loss + float(lost_A[best]), saved + float(saved_A[best])
            shares[name] = SHARES[best]
        return _OfLayer(
            gate=SHARES[gate], hidden=SHARES[hidden], inputs=shares, loss=loss, saved=saved
        )


@dataclass(frozen=True, kw_only=True)
class _OfLayer:
    gate: float
    hidden: float
    inputs: dict[str, float]
    loss: float
    saved: float  # bytes


def _place(kind: str) -> int:
    return SHARES.index(PROBE[kind])


def num_probes(num_layers: int) -> int:
    return (num_layers + 1) * len(PARTS)


def allocate(
    scores: Sequence[LayerScores],
    bytes_of: Bytes,
    kl_of: Callable[[tuple[LayerLimits, ...]], float],
) -> Allocation:
    """The modelled loss, with sensitivities from `num_probes` measurements; `kl_of` returns the
    nats per token of the whole model with given limits. Deterministic."""
    allocation = Allocation(scores, bytes_of)

    def probe(kinds: Sequence[str]) -> list[LayerLimits]:
        gate, hidden = (PROBE[k] if k in kinds else 0.0 for k in ("gate", "hidden"))
        inputs = {name: PROBE[name] for name in INPUTS if name in kinds}
        return [layer.limits(gate, hidden, inputs) for layer in scores]

    def alone_L(limits_L: list[LayerLimits]) -> list[float]:
        none, number = LayerLimits(), range(len(scores))
        return [
            kl_of(tuple(limits_L[n] if n == layer else none for n in number)) for layer in number
        ]

    limits_L = {part: probe(kinds) for part, kinds in PARTS.items()}
    whole_kl = {part: kl_of(tuple(own_L)) for part, own_L in limits_L.items()}
    allocation.calibrate({part: alone_L(own_L) for part, own_L in limits_L.items()}, whole_kl)
    return allocation
