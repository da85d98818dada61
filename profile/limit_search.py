"""Which share of what each layer may silence, at equal bytes: limits without training.

The loss of a choice is taken to be a sum over layers and rules,

    KL = sum_l s_l,neurons * c * energy(gate_l, hidden_l) + sum_l sum_r s_l,attention * c_r * energy_r(share_l,r)

with energies from the sample (`limit_scores`) and sensitivities s from probes: the KL divergence of
the whole model from its dense self where one half of one layer alone has limits, and c from one probe
with the rule in all layers. Two probes a layer and one a rule; no gradients. Given the sum, the best
choice of a number of saved bytes is found by a price: each layer takes what loses least plus price
times bytes, and the price is bisected. What a choice really costs is measured afterwards.

What this module does not know: files, modes, seconds.

Letters: L layers, A shares."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from sparkinfer.gguf_file import TensorEntry
from sparkinfer.limits import LayerLimits, Limits
from sparkinfer.model_file import ModelFile
from sparkinfer.profile.limit_scores import INPUTS, SHARES, LayerScores

PROBE = {"gate": 0.2, "hidden": 0.5, "qkv": 0.3, "output": 0.3}  # shares that probes silence
BISECTIONS = 60
RULES = {
    "gates": ("gate",),
    "hidden": ("hidden",),
    "neurons": ("gate", "hidden"),
    "inputs": ("qkv", "output"),
    "mixed": ("gate", "hidden", "qkv", "output"),
}


@dataclass(frozen=True, kw_only=True)
class Bytes:
    """Weight bytes that a token reads, dense: by layer, and the rest (the head)."""

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

        layers = range(model.shape.num_layers)
        return cls(
            qkv_L=of_layers("attn_q", "attn_k", "attn_v", "attn_qkv", "attn_q_t", "attn_k_t",
                            "attn_v_t"),
            output_L=of_layers("attn_output", "attn_output_t"),
            gate_L=of_layers("ffn_gate"),
            up_L=of_layers("ffn_up"),
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
    """Shares by layer; `hidden` counts what the gates silence too."""

    gate_L: tuple[float, ...]
    hidden_L: tuple[float, ...]
    inputs_L: tuple[dict[str, float], ...]
    loss: float  # nats, by the sum
    saved_share: float  # of the weight bytes of a token

    def limits(self, scores: Sequence[LayerScores], model_id: str) -> Limits:
        layers = map(LayerScores.limits, scores, self.gate_L, self.hidden_L, self.inputs_L)
        return Limits(model_id=model_id, layers=tuple(layers))


class Allocation:
    """The sum, ready to be minimised for any rule and any number of bytes."""

    def __init__(self, scores: Sequence[LayerScores], bytes_of: Bytes) -> None:
        self.bytes_of, self.num_layers = bytes_of, len(scores)
        self.neurons_LAA = np.stack([layer.neurons_lost_AA() for layer in scores])
        self.inputs_LA = {
            name: np.stack([layer.inputs[name].lost_A() for layer in scores]) for name in INPUTS
        }
        shares = np.array(SHARES)
        up, down = (b[:, None, None] for b in (bytes_of.up_L, bytes_of.down_L))
        # A gate with neither up nor down behind it saves nothing by itself.
        self.neurons_saved_LAA = up * shares[:, None] + down * np.maximum(shares[:, None], shares)
        self.inputs_saved_LA = {
            "qkv": bytes_of.qkv_L[:, None] * shares,
            "output": bytes_of.output_L[:, None] * shares,
        }
        self.neurons_price_L = np.ones(self.num_layers)
        self.inputs_price_L = {name: np.ones(self.num_layers) for name in INPUTS}

    def energies(self, layer: int) -> tuple[float, float]:
        """What the two probes of a layer lose: neurons, attention."""
        at = {name: SHARES.index(share) for name, share in PROBE.items()}
        neurons = float(self.neurons_LAA[layer, at["gate"], at["hidden"]])
        return neurons, float(sum(self.inputs_LA[n][layer, at[n]] for n in INPUTS))

    def calibrate(
        self,
        neurons_kl_L: Sequence[float],
        attention_kl_L: Sequence[float],
        rule_kl: dict[str, float],
    ) -> None:
        """Sensitivities from the probes' divergences; `rule_kl` of PROBE's share in all layers."""
        at = {name: SHARES.index(share) for name, share in PROBE.items()}
        energy_L = [self.energies(layer) for layer in range(self.num_layers)]
        neurons = _ratio(neurons_kl_L, [energy for energy, _ in energy_L])
        attention = _ratio(attention_kl_L, [energy for _, energy in energy_L])
        lost_L = self.neurons_LAA[:, at["gate"], at["hidden"]]
        self.neurons_price_L = neurons * rule_kl["neurons"] / max(1e-30, float(neurons @ lost_L))
        for name in INPUTS:
            whole = max(1e-30, float(attention @ self.inputs_LA[name][:, at[name]]))
            self.inputs_price_L[name] = attention * rule_kl[name] / whole

    def best(self, rule: str, saved_share: float) -> Choice | None:
        """What loses least of those that save this share of all bytes; None where the rule cannot
        save so much."""
        wanted = saved_share * self.bytes_of.total
        low, high = 0.0, 1e30
        if self._take(rule, high).saved_share * self.bytes_of.total < wanted:
            return None
        low = 1e-30
        for _ in range(BISECTIONS):
            price = (low * high) ** 0.5
            if self._take(rule, price).saved_share * self.bytes_of.total < wanted:
                low = price
            else:
                high = price
        return self._take(rule, high)

    def _take(self, rule: str, price: float) -> Choice:
        """The best of every layer at a price of bytes, in nats a byte."""
        kinds = RULES[rule]
        loss, saved = 0.0, 0.0
        gate_L, hidden_L, inputs_L = [], [], []
        for layer in range(self.num_layers):
            lost_AA = self.neurons_LAA[layer] * self.neurons_price_L[layer]
            saved_AA = self.neurons_saved_LAA[layer]
            is_allowed = np.isfinite(lost_AA)
            if "gate" not in kinds:
                is_allowed[1:] = False
            if "hidden" not in kinds:
                is_allowed &= np.eye(len(SHARES), dtype=bool)
            worth_AA = np.where(is_allowed, lost_AA - price * saved_AA, np.inf)
            gate, hidden = np.unravel_index(int(worth_AA.argmin()), worth_AA.shape)
            loss, saved = loss + lost_AA[gate, hidden], saved + saved_AA[gate, hidden]
            gate_L.append(SHARES[gate])
            hidden_L.append(SHARES[hidden])
            shares = {}
            for name in INPUTS:
                if name not in kinds:
                    continue
                lost_A = self.inputs_LA[name][layer] * self.inputs_price_L[name][layer]
                saved_A = self.inputs_saved_LA[name][layer]
                best = int((lost_A - price * saved_A).argmin())
                loss, saved = loss + lost_A[best], saved + saved_A[best]
                shares[name] = SHARES[best]
            inputs_L.append(shares)
        return Choice(
            gate_L=tuple(gate_L),
            hidden_L=tuple(hidden_L),
            inputs_L=tuple(inputs_L),
            loss=float(loss),
            saved_share=float(saved) / self.bytes_of.total,
        )


def _ratio(kl_L: Sequence[float], energy_L: Sequence[float]) -> np.ndarray:
    return np.maximum(1e-12, np.array(kl_L)) / np.maximum(1e-30, np.array(energy_L))


def num_probes(num_layers: int) -> int:
    return 2 * num_layers + 1 + len(INPUTS)


def allocate(
    scores: Sequence[LayerScores],
    bytes_of: Bytes,
    kl_of: Callable[[tuple[LayerLimits, ...]], float],
) -> Allocation:
    """The sum with sensitivities from `num_probes` measurements; `kl_of` gives nats a token of the
    whole model with these limits. Deterministic."""
    allocation = Allocation(scores, bytes_of)
    number = range(len(scores))
    neurons_L = [s.limits(PROBE["gate"], PROBE["hidden"], {}) for s in scores]
    attention_L = [s.limits(0.0, 0.0, {name: PROBE[name] for name in INPUTS}) for s in scores]

    def alone(layer: int, limits_L: list[LayerLimits]) -> float:
        return kl_of(tuple(limits_L[n] if n == layer else LayerLimits() for n in number))

    rule_kl = {"neurons": kl_of(tuple(neurons_L))}
    for name in INPUTS:
        rule_kl[name] = kl_of(tuple(s.limits(0.0, 0.0, {name: PROBE[name]}) for s in scores))
    allocation.calibrate(
        [alone(layer, neurons_L) for layer in number],
        [alone(layer, attention_L) for layer in number],
        rule_kl,
    )
    return allocation
