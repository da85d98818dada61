"""A decoder in float64 numpy, with or without experts, written from the papers and independent of the
runtime.

It also defines the error measures that other tests use."""

from dataclasses import replace
from functools import cache

import numpy as np
import torch
from gguf.quants import dequantize

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.files.gguf_file import type_of
from hotsplit.model.rope import Rotary
from hotsplit.model.spec import Add, Attention, Neurons, Norm, Route
from hotsplit.runtime.kernels.cpu import library
from hotsplit.runtime.ops.route import route_ref


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
        is_rounded = kind == "bf16" and library.rounds_to_bf16()
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
    """Logits [T, V] of a text, block by block. Neurons outside the mask `named_LTF` are left out;
    `silent(activated gates)` says which gates of a SiLU model count as closed."""
    spec = model.bare_spec
    factors = weights(model, "rope_freqs.weight") if "rope_freqs.weight" in model.tensors else 1.0
    x = weights(model, "token_embd.weight")[ids] * spec.embedding_scale
    for number, layer in enumerate(spec.layers):

        @cache
        def w(name, number=number):
            return weights(model, f"blk.{number}.{name}")

        value = {"x": x}
        for block in layer.blocks:
            if isinstance(block, Add):
                first, *others = (value[name] for name in block.terms)
                result = first + block.factor * sum(others)
                result = result * (w(f"{block.scale}.weight") if block.scale else 1.0)
            elif isinstance(block, Norm):
                result = norm(value[block.reads], w, block)
            elif isinstance(block, Attention):
                result = _attention(value[block.reads], block, w, factors)
            elif isinstance(block, Route):
                result = _routed(value[block.reads], block, w)
            else:
                assert isinstance(block, Neurons), block
                mask = 1 if named_LTF is None else named_LTF[number]
                given = model, block, w, model.threshold_L[number], mask, silent
                result = _neurons(value[block.reads], value.get("routed"), *given)
            value[block.writes] = result
        x = value["x"]
    x = norm(x, lambda name: weights(model, name), spec.output_norm) * spec.logit_scale
    logits_TV = x @ weights(model, model.head_name).T
    cap = spec.logit_cap
    return logits_TV if cap is None else cap * np.tanh(logits_TV / cap)


def norm(x, w, block: Norm):
    if block.kind != "rms":
        x = x - x.mean(axis=-1, keepdims=True)
    x = x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + block.epsilon)
    x = x * w(f"{block.name}.{block.part}") * block.factor
    return x + w(f"{block.name}.bias") if block.kind == "layer" else x


def _linear(x, w, name: str, biases):
    y = x @ w(f"{name}.weight").T
    return y + w(f"{name}.bias") if name in biases else y


def _attention(x, block: Attention, w, factors):
    assert not block.growth and block.score_cap is None, block
    assert not block.norms_by_head and not block.is_fused, block
    heads = {"attn_q": block.num_heads, "attn_k": block.num_kv_heads}
    heads |= {} if block.num_kv_projections == 1 else {"attn_v": block.num_kv_heads}
    q, k, *rest = (
        _linear(x, w, name, block.biases).reshape(len(x), number, -1)
        for name, number in heads.items()
    )
    v = rest[0] if rest else k
    if block.norms_values:
        v = norm(v, lambda name: 1.0, block.head_norm)
    q, gate = q[..., : block.head_dim], q[..., block.head_dim :]
    if block.head_norm is not None:
        q, k = (_head_norm(y, block, w, name) for y, name in ((q, "attn_q"), (k, "attn_k")))
    if block.rotary is not None:
        own = factors if block.rotary.has_factors else 1.0
        q, k = (rotated(y, block.rotary, block.num_rotated, own) for y in (q, k))
    out = np.zeros_like(q)
    for head in range(block.num_heads):
        group = head * block.num_kv_heads // block.num_heads
        sink = [w("attn_sinks.weight")[head]] if block.head_sinks else []
        for t in range(len(x)):
            seen = slice(0 if block.window is None else max(0, t + 1 - block.window), t + 1)
            scores = np.append(k[seen, group] @ q[t, head] * block.score_scale, sink)
            share = np.exp(scores - scores.max())
            share = (share / share.sum())[: t + 1 - seen.start]
            out[t, head] = share @ v[seen, group]
    out = out / (1 + np.exp(-gate)) if block.is_gated else out
    return _linear(out.reshape(len(x), -1), w, "attn_output", block.biases)


def _head_norm(y, block: Attention, w, name: str):
    own = replace(block.head_norm, name=f"{name}_norm")
    if not block.norms_all_heads:
        return norm(y, w, own)
    return norm(y.reshape(len(y), -1), w, own).reshape(y.shape)


def rotated(y, rotary: Rotary, count: int, factors=1.0):
    """Each pair of the first `count` values of a head is a complex number that turns with the
    position; `factors` divide the frequencies."""
    first, rest = y[..., :count], y[..., count:]
    is_adjacent = rotary.pairing == "adjacent"
    real, imaginary = (
        (first[..., 0::2], first[..., 1::2]) if is_adjacent else np.split(first, 2, axis=-1)
    )
    frequency = rotary.theta ** (-2 * np.arange(count // 2) / count)
    frequency = frequency / rotary.scaling.divisors(rotary.theta, count) / factors
    turn = np.exp(1j * np.arange(len(y))[:, None, None] * frequency) * rotary.scaling.magnitude
    pairs = (real + 1j * imaginary) * turn
    both = np.stack([pairs.real, pairs.imag], axis=-1)
    both = both if is_adjacent else both.swapaxes(-1, -2)
    return np.concatenate([both.reshape(first.shape), rest], axis=-1)


def _routed(x, block: Route, w):
    """For each token its experts and their weights."""
    bias = w("ffn_gate_inp.bias") if block.has_bias else 0.0
    choice = w("exp_probs_b.bias") if block.has_choice_bias else 0.0
    scale = w("ffn_down_exps.scale") if block.has_own_scales else None
    return [route_ref(block, w("ffn_gate_inp.weight"), each, bias, choice, scale) for each in x]


def _neurons(x, routed, model, block: Neurons, w, threshold, mask, silent):
    def outputs(x, expert):
        def own(name):
            return w(name) if expert is None else w(name)[expert]

        sums = [_linear(x, own, name, block.biases) for name in block.matrices]
        hidden = _hidden(block, threshold, silent, *sums) * mask
        name = f"{block.down_name}_t" if model.layout == "sparse" else block.down_name
        down = own(f"{name}.weight")
        y = hidden @ (down if model.layout == "sparse" else down.T)
        return y + own(f"{block.down_name}.bias") if block.down_name in block.biases else y

    if not block.are_experts:
        y = outputs(x, None)
        gate = 1 / (1 + np.exp(-x @ w("ffn_gate_inp_shexp.weight"))) if block.has_output_gate else 1
        return (y.T * gate).T
    return np.stack(
        [
            sum(weight * outputs(each, expert) for expert, weight in zip(*chosen, strict=True))
            for each, chosen in zip(x, routed, strict=True)
        ]
    )


def _hidden(block: Neurons, threshold, silent, gate, up=1):
    kind = block.activation
    if kind == "silu":
        value = gate / (1 + np.exp(-gate))
        return value * up if silent is None else np.where(silent(value), 0, value * up)
    if kind == "gelu_tanh":
        return gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) / 2 * up
    if kind == "swiglu_oai":  # gpt-oss
        gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
        return gate / (1 + np.exp(-1.702 * gate)) * (up + 1)
    if kind == "drelu":
        return np.maximum(gate, 0) * np.maximum(up, 0)
    assert kind in ("relu", "fatrelu"), kind
    return np.where(gate > (threshold if kind == "fatrelu" else 0), gate, 0) * up
