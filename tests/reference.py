"""A decoder in float64 numpy, written from the papers and independent of the runtime.

It also defines the error measures that other tests use."""

import numpy as np
import torch
from gguf.quants import dequantize

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.families.sizes import sizes_of
from hotsplit.files.gguf_file import type_of
from hotsplit.runtime.kernels.cpu import library


def rel_error(got, want) -> float:
    """|got - want| / |want| in float64; 1.0 is as wrong as returning zeros."""
    got, want = (np.asarray(torch.as_tensor(a).double()) for a in (got, want))
    assert got.shape == want.shape, (got.shape, want.shape)
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


class Bounds(dict[str, float]):
    """Bounds of relative errors by type of weights. Levels that round vectors to bf16 for bf16
    weights err by up to 0.8 % in random models: their bound is 1.5 %."""

    def __getitem__(self, kind: str) -> float:
        bound = super().__getitem__(kind)
        is_rounded = kind == "bf16" and library.is_available() and library.rounds_to_bf16()
        return max(bound, 0.015) if is_rounded else bound


def assert_rows_agree(got_TV, want_TV, bound: float, *, most_flips: int = 1) -> None:
    """Checks the rows' relative errors: at most `most_flips` reach the bound, and none reaches 0.1.
    A score within rounding of a predictor's threshold may end up on either side of it, which adds
    or drops a neuron of a random model."""
    assert len(got_TV) == len(want_TV)
    errors = [rel_error(got, want) for got, want in zip(got_TV, want_TV, strict=True)]
    assert max(errors) < 0.1, max(errors)
    assert sum(error >= bound for error in errors) <= most_flips, sorted(errors)[-5:]


def weights(model: ModelFile, name: str) -> np.ndarray:
    entry = model.tensors[name]
    return dequantize(entry.read(), type_of(entry.kind)).astype(np.float64)


def logits_ref(model: ModelFile, ids: list[int], *, named_LTF=None, silent=None) -> np.ndarray:
    """Logits [T, V] of a text. Neurons outside the mask `named_LTF` are left out;
    `silent(activated gates)` says which gates of a SiLU model count as closed."""
    s = sizes_of(model.bare_spec)
    x = weights(model, "token_embd.weight")[ids]
    for layer in range(s.num_layers):

        def w(name, layer=layer):
            return weights(model, f"blk.{layer}.{name}")

        x = x + _attention(norm(x, w("attn_norm.weight"), s.epsilon), model, w)
        y = norm(x, w("ffn_norm.weight"), s.epsilon)
        hidden = _hidden(model, layer, y @ w("ffn_gate.weight").T, y @ w("ffn_up.weight").T, silent)
        if named_LTF is not None:
            hidden = hidden * named_LTF[layer]
        x = x + hidden @ w("ffn_down_t.weight")
    x = norm(x, weights(model, "output_norm.weight"), s.epsilon)
    return x @ weights(model, model.head_name).T


def norm(x, weight, epsilon):
    return x / np.sqrt((x**2).mean(axis=1, keepdims=True) + epsilon) * weight


def _hidden(model, layer, gate, up, silent):
    threshold = model.threshold_L[layer]
    if model.activation == "silu":
        value = gate / (1 + np.exp(-gate))
        return value * up if silent is None else np.where(silent(value), 0, value * up)
    if model.activation == "drelu":
        return np.maximum(gate, 0) * np.maximum(up, 0)
    active = np.where(gate > (threshold if model.activation == "fatrelu" else 0), gate, 0)
    return (active**2 if model.activation == "relu2" else active) * up


def _attention(x, model, w):
    s, count = sizes_of(model.bare_spec), len(x)
    q = rotate(
        (x @ w("attn_q.weight").T).reshape(count, s.num_heads, -1), s, model.spec.rotary.theta
    )
    k = rotate(
        (x @ w("attn_k.weight").T).reshape(count, s.num_kv_heads, -1), s, model.spec.rotary.theta
    )
    v = (x @ w("attn_v.weight").T).reshape(count, s.num_kv_heads, -1)
    out = np.zeros_like(q)
    for head in range(s.num_heads):
        group = head * s.num_kv_heads // s.num_heads
        for t in range(count):
            scores = k[: t + 1, group] @ q[t, head] / np.sqrt(s.head_dim)
            share = np.exp(scores - scores.max())
            out[t, head] = share / share.sum() @ v[: t + 1, group]
    return out.reshape(count, -1) @ w("attn_output.weight").T


def rotate(x, s, theta=10000.0):
    """Each adjacent pair of values is a complex number that rotates with the position."""
    pairs = x[..., 0::2] + 1j * x[..., 1::2]
    frequency = theta ** (-2 * np.arange(s.head_dim // 2) / s.head_dim)
    turned = pairs * np.exp(1j * np.arange(len(x))[:, None, None] * frequency)
    return np.stack([turned.real, turned.imag], axis=-1).reshape(x.shape)
