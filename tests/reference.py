"""A decoder in float64 numpy, with or without experts, written from the papers and independent of
the runtime.

It also defines the error measures that other tests use."""

from dataclasses import replace
from functools import cache
from math import erf as erf_of

import numpy as np
import torch
from gguf.quants import dequantize
from small_blocks import GROUPS, exact_values

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.files.gguf_file import type_of
from hotsplit.model.delta_net import CONV, CONVS, DECAY, DECAY_BIAS, DELTA_NORM, DeltaNet, KimiDelta
from hotsplit.model.draft_block import JOIN, OF_EMBEDDING, OF_HIDDEN
from hotsplit.model.latent import (
    KEY_A,
    KEY_A_NORM,
    KEY_B,
    QUERY,
    QUERY_A,
    QUERY_A_NORM,
    QUERY_B,
    VALUE_B,
)
from hotsplit.model.latent_experts import FROM_LATENT, TO_LATENT, FromLatent, ToLatent
from hotsplit.model.mamba2 import Mamba2
from hotsplit.model.ngrams import NORMS as NGRAM_NORMS
from hotsplit.model.ngrams import ROWS, TABLE, NgramInputs, NgramRows
from hotsplit.model.operations import PositionWise, Recurrent
from hotsplit.model.rope import Rotary
from hotsplit.model.short_conv import CONV as TAPS
from hotsplit.model.short_conv import INPUT, OUTPUT, ShortConv
from hotsplit.model.spec import Add, Attention, Neurons, Norm, Route, written_by
from hotsplit.model.streams import (
    INJECT,
    JOINED,
    BeginStreams,
    MeanOfStreams,
    MixerToStreams,
    NeuronsToStreams,
    StreamsToHead,
    StreamsToMixer,
    StreamsToNeurons,
    ToStreams,
)
from hotsplit.runtime.kernels.cpu import library

erf = np.vectorize(erf_of, otypes=[float])


def rel_error(got, want) -> float:
    """|got - want| / |want| in float64; 1.0 is as wrong as returning zeros."""
    got, want = (np.asarray(torch.as_tensor(a).double()) for a in (got, want))
    assert got.shape == want.shape, (got.shape, want.shape)
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def rounds_to_bf16() -> bool:
    """True if this level rounds the vectors that bf16 rows are multiplied by (bf16_pairs.h)."""
    return library.level() in ("amx", "avx512bf16")


class Bounds(dict[str, float]):
    """Bounds of relative errors by type of weights. Levels that round vectors to bf16 for bf16
    weights err by up to 0.8 % in random models: their bound is 1.5 %."""

    def __getitem__(self, kind: str) -> float:
        bound = super().__getitem__(kind)
        is_rounded = kind == "bf16" and rounds_to_bf16()
        return max(bound, 0.015) if is_rounded else bound

    def __missing__(self, kind: str) -> float:
        """Types that are not listed, as tables of levels, have the bound of K-quants."""
        return super().__getitem__("q4_k")


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
    if entry.kind in GROUPS:
        rows = entry.read()
        values = exact_values(entry.kind, rows.reshape(-1, rows.shape[-1]))
        return values.reshape(entry.shape)
    stored = entry.in_file
    return dequantize(stored.read(), type_of(stored.kind)).astype(np.float64)


def logits_ref(
    model: ModelFile,
    ids: list[int],
    *,
    mode="dense",
    named_LTF=None,
    silent=None,
    seen=None,
    own=None,
    hidden_TD=None,
) -> np.ndarray:
    """Logits [T, V] of a text, block by block. Neurons outside the mask `named_LTF` are left out,
    by default in mode "predicted" those that the predictors do not name; `silent(activated gates)`
    says which gates of a SiLU model count as closed. `seen` gets the values that observers see, by
    name and layer; `own(block, values, weights)` computes a position-wise operation. `hidden_TD`:
    the states that a draft block reads beside the embedding."""
    spec, seen = model.bare_spec, {} if seen is None else seen
    factors = weights(model, "rope_freqs.weight") if "rope_freqs.weight" in model.tensors else 1.0
    x = weights(model, "token_embd.weight")[ids] * spec.embedding_scale
    if spec.has_positions:
        x = x + weights(model, "position_embd.weight")[: len(ids)]
    if hidden_TD is not None:
        (join,) = spec.first
        parts = ((OF_EMBEDDING, x), (OF_HIDDEN, hidden_TD))
        joined = [
            norm(each, lambda name: weights(model, name), replace(join.norm, name=name))
            for name, each in parts
        ]
        x = np.concatenate(joined, axis=1) @ weights(model, f"{JOIN}.weight").T
    seen["embedding", None] = x
    of_streams = [block for block in spec.first if isinstance(block, BeginStreams | NgramRows)]
    outer = {JOINED: x}
    for block in of_streams:
        outer |= _OWN[type(block)](outer, block, lambda name: weights(model, name), ids)
    x = outer.get("x", x)
    for number, layer in enumerate(spec.layers):

        @cache
        def w(name, number=number):
            return weights(model, f"blk.{number}.{name}")

        def see(name, value, number=number):
            seen[name, number] = value

        value = {**outer, "x": x}
        for block in layer.blocks:
            if type(block) in _OWN:
                value |= _OWN[type(block)](value, block, w, ids)
                continue
            if isinstance(block, Add):
                first, *others = (value[name] for name in block.terms)
                result = block.times * (first + block.factor * sum(others))
                result = result * (w(f"{block.scale}.weight") if block.scale else 1.0)
            elif isinstance(block, Norm):
                result = norm(value[block.reads], w, block)
            elif isinstance(block, Attention | Recurrent):
                see("attn_norm", value[block.reads])
                if isinstance(block, Attention):
                    result = _attention(value[block.reads], block, w, factors, see)
                else:
                    mix = _MIXERS[type(block)]
                    result = mix(value[block.reads], block, w, see)
                see("attn_out", result)
            elif isinstance(block, ToLatent | FromLatent):
                (read,), name = block.inputs, TO_LATENT
                if isinstance(block, FromLatent):
                    name = FROM_LATENT
                result = value[read] @ w(f"{name}.weight").T
                see("ffn_latent", result) if name == TO_LATENT else None
            elif own is not None and isinstance(block, PositionWise):
                result = own(block, value, w)
            elif isinstance(block, Route):
                result = _routed(value[block.reads], block, w)
                see("ffn_experts", np.array([chosen for chosen, _ in result]))
            else:
                assert isinstance(block, Neurons), block
                see_own = (
                    see
                    if block.suffix != "_shexp"
                    else lambda name, value, see=see: (
                        see("ffn_shared_hidden", value) if name == "ffn_hidden" else None
                    )
                )
                see_own("ffn_norm", value[block.reads])
                mask = 1 if named_LTF is None else named_LTF[number]
                if mode == "predicted" and named_LTF is None:
                    mask = _predicted(model, number, seen)
                given = model, block, w, model.threshold_L[number], mask, silent, see_own
                result = _neurons(value[block.reads], value.get("routed"), *given)
                see_own("ffn_out", result)
            value[written_by(block)[0]] = result
        x = value["x"]
        see("layer_out", x)
    for block in spec.last if of_streams else ():
        x = _OWN[type(block)]({"x": x}, block, lambda name: weights(model, name), ids)[JOINED]
    if spec.output_norm is not None:
        x = norm(x, lambda name: weights(model, name), spec.output_norm)
    logits_TV = (x * spec.logit_scale) @ weights(model, model.head_name).T
    if spec.has_head_bias:
        logits_TV = logits_TV + weights(model, "output.bias")
    return capped(logits_TV, spec.logit_cap)


def draft_ref(model: ModelFile, ids: list[int]) -> np.ndarray:
    """Logits [T - 1, V] of the draft block: its guesses after each token but the first."""
    seen, spec = {}, model.bare_spec
    logits_ref(model, ids, seen=seen)
    x = seen["layer_out", spec.num_layers - 1]
    hidden_TD = norm(x, lambda name: weights(model, name), spec.output_norm)
    return logits_ref(model.draft, ids[1:], hidden_TD=hidden_TD[:-1])


def capped(x, cap: float | None):
    return x if cap is None else cap * np.tanh(x / cap)


def _predicted(model: ModelFile, number: int, seen):
    """bool [T, F]: the neurons of a layer that its predictor names."""
    info = model.predictor
    x = seen["ffn_norm", max(0, number - info.input_layer_offset)]

    def product(x, name):
        own = f"blk.{number}.ffn_pred_{name}"
        bias = weights(model, f"{own}.bias") if f"{own}.bias" in model.tensors else 0.0
        return x @ weights(model, f"{own}.weight").T + bias

    if info.rank_L[number]:
        x = product(x, "down")
        x = np.maximum(x, 0) if info.kind == "relu" else x
    seen["ffn_predicted", number] = product(x, "up")
    return seen["ffn_predicted", number] > info.threshold_L[number]


def norm(x, w, block: Norm):
    if block.kind != "rms":
        x = x - x.mean(axis=-1, keepdims=True)
    x = x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + block.epsilon)
    x = x * (w(f"{block.name}.{block.part}") if block.part else 1.0) * block.factor
    return x + w(f"{block.name}.bias") if block.kind == "layer" else x


def _linear(x, w, name: str, biases):
    y = x @ w(f"{name}.weight").T
    return y + w(f"{name}.bias") if name in biases else y


def _attention(x, block: Attention, w, factors, see):
    if block.latent is not None:
        return _latent_attention(x, block, w, factors, see)
    counts = [block.num_heads, *[block.num_kv_heads] * block.num_kv_projections]
    assert block.source is None, block
    each = [_linear(x, w, name, block.biases) for name in block.projections]
    if block.is_fused:
        each = np.split(each[0], np.cumsum(counts)[:-1] * block.head_dim, axis=1)
    heads = heads_ref(each, block, w, factors)
    see("attn_heads", heads)
    return _linear(heads, w, "attn_output", block.biases)


def _latent_attention(x, block: Attention, w, factors, see):
    """Expanded: each head has keys and values of its own, made from the latents."""
    own, heads = block.latent, block.num_heads
    norms = own.norms()
    q = x @ w(f"{QUERY if own.query_rank is None else QUERY_A}.weight").T
    if own.query_rank is not None:
        q = norm(q, w, norms[QUERY_A_NORM]) @ w(f"{QUERY_B}.weight").T
    q = q.reshape(len(x), heads, -1)
    c, shared = np.split(x @ w(f"{KEY_A}.weight").T, [own.size], axis=1)
    c = norm(c, w, norms[KEY_A_NORM])
    plain = np.einsum("hcn,tc->thn", w(f"{KEY_B}.weight"), c)
    v = np.einsum("hvc,tc->thv", w(f"{VALUE_B}.weight"), c)
    shared = np.broadcast_to(shared[:, None], (len(x), heads, own.num_rotated))
    turned = [q[..., own.num_plain :], shared]
    if block.rotary is not None:
        by = factors if block.rotary.has_factors else 1.0
        turned = [rotated(y, block.rotary, own.num_rotated, by) for y in turned]
    q = np.concatenate([q[..., : own.num_plain], turned[0]], axis=-1)
    k = np.concatenate([plain, turned[1]], axis=-1)
    if block.growth_length:
        steps = np.arange(len(q)) // block.growth_length
        q = q * (1 + block.growth * np.log(1 + steps))[:, None, None]
    out = attend_ref(q, k, v, replace(block, num_kv_heads=heads))
    out = out.reshape(len(x), -1)
    see("attn_heads", out)
    return out @ w("attn_output.weight").T


def heads_ref(each, block: Attention, w, factors=1.0):
    """The outputs of the heads [T, H * W] for queries (and gates), keys and values."""
    counts = [block.num_heads, *[block.num_kv_heads] * block.num_kv_projections]
    counts += [block.num_heads] if block.gate_width else []
    q, k, *rest = (y.reshape(len(y), n, -1) for y, n in zip(each, counts, strict=True))
    own_gate = rest.pop() if block.gate_width else None
    v = rest[0] if rest else k
    if block.norms_values:
        v = norm(v, lambda name: 1.0, block.head_norm)
    q, gate = q[..., : block.head_dim], q[..., block.head_dim :]
    if block.head_norm is not None and not block.norms_rotated:
        q, k = (_head_norm(y, block, w, name) for y, name in ((q, "attn_q"), (k, "attn_k")))
    if block.rotary is not None:
        own = factors if block.rotary.has_factors else 1.0
        q, k = (rotated(y, block.rotary, block.num_rotated, own) for y in (q, k))
    if block.head_norm is not None and block.norms_rotated:
        q, k = (_head_norm(y, block, w, name) for y, name in ((q, "attn_q"), (k, "attn_k")))
    if block.growth_length:
        steps = np.arange(len(q)) // block.growth_length
        q = q * (1 + block.growth * np.log(1 + steps))[:, None, None]
    out = attend_ref(q, k, v, block, w("attn_sinks.weight") if block.head_sinks else None)
    gate = gate if block.is_gated else own_gate
    out = out if gate is None else out / (1 + np.exp(-gate))
    return out.reshape(len(q), -1)


def attend_ref(query_THW, key_CKW, value_CKW, block: Attention, sink_H=None):
    """Attention of the last T of C positions, f64 [T, H, W]."""
    out = np.zeros((*query_THW.shape[:2], value_CKW.shape[2]))
    before = len(key_CKW) - len(query_THW)
    at_T, at_C = before + np.arange(len(query_THW))[:, None], np.arange(len(key_CKW))
    is_seen = (at_C <= at_T) & (at_C > at_T - (block.window or len(key_CKW)))
    for head in range(block.num_heads):
        group = head * block.num_kv_heads // block.num_heads
        scores = query_THW[:, head] @ key_CKW[:, group].T * block.score_scale
        scores = np.where(is_seen, capped(scores, block.score_cap), -np.inf)
        if sink_H is not None:
            scores = np.pad(scores, ((0, 0), (0, 1)), constant_values=sink_H[head])
        share = np.exp(scores - scores.max(axis=1, keepdims=True))
        share = share / share.sum(axis=1, keepdims=True)
        out[:, head] = share[:, : len(key_CKW)] @ value_CKW[:, group]
    return out


def _head_norm(y, block: Attention, w, name: str):
    own = replace(block.head_norm, name=f"{name}_norm")
    if not block.norms_all_heads:
        return norm(y, w, own)
    return norm(y.reshape(len(y), -1), w, own).reshape(y.shape)


def _delta(x, block: DeltaNet, w, see):
    """The recurrence of model/delta_net.py, token by token."""
    G, V, N = block.num_key_heads, block.num_value_heads, block.key_head_dim
    is_kimi = isinstance(block, KimiDelta)
    if is_kimi:
        inputs = np.concatenate([x @ w(f"attn_{name}.weight").T for name in "qkv"], axis=1)
        taps = np.concatenate([w(name) for name in CONVS])
        beta = x @ w("ssm_beta.weight").T
        alpha, z = (x @ w(f"ssm_{n}_a.weight").T @ w(f"ssm_{n}_b.weight").T for n in "fg")
    else:
        taps = w(CONV)
        inputs, z, beta, alpha = (
            x @ w(f"{name}.weight").T
            for name in (
                *("attn_qkv", "attn_gate"),
                *(["ssm_ba"] * 2 if block.is_grouped else ["ssm_beta", "ssm_alpha"]),
            )
        )
    if block.is_grouped:
        beta, alpha = (
            beta.reshape(len(x), G, 2, -1)[:, :, part].reshape(len(x), V) for part in range(2)
        )
    inputs = np.pad(inputs, ((block.num_taps - 1, 0), (0, 0)))
    mixed = sum(inputs[j : j + len(x)] * taps[:, j] for j in range(block.num_taps))
    mixed = mixed / (1 + np.exp(-mixed))
    q, k, v = np.split(mixed, [G * N, 2 * G * N], axis=1)
    heads = np.arange(V) // (V // G) if block.is_grouped else np.arange(V) % G
    q, k = (y.reshape(len(x), G, N)[:, heads] for y in (q, k))
    q, k = (y / np.sqrt((y**2).sum(-1, keepdims=True) + 1e-6) for y in (q, k))
    beta, steps = 1 / (1 + np.exp(-beta)), np.logaddexp(0, alpha + w(DECAY_BIAS))
    decay = np.exp(w(DECAY).reshape(-1, 1) * steps.reshape(len(x), V, -1))
    state, out = np.zeros(block.state_shapes[0]), np.zeros((len(x), V, block.value_head_dim))
    for t, v_VM in enumerate(v.reshape(out.shape)):
        state = state * decay[t][:, :, None]
        delta = beta[t][:, None] * (v_VM - np.einsum("vn,vnm->vm", k[t], state))
        state = state + k[t][:, :, None] * delta[:, None]
        out[t] = np.einsum("vn,vnm->vm", q[t], state) / N**0.5
    own = Norm(name=DELTA_NORM, kind="rms", size=block.value_head_dim, epsilon=block.epsilon)
    gates = (1 if block.has_sigmoid_gates else z) / (1 + np.exp(-z))
    out = norm(out, w, own).reshape(len(x), -1) * gates
    see("attn_heads", out)
    return out @ w(f"{block.output}.weight").T


def _short_conv(x, block: ShortConv, w, see):
    """The formula of model/short_conv.py."""
    b, c, u = np.split(x @ w(f"{INPUT}.weight").T, 3, axis=1)
    inputs = np.pad(b * u, ((block.num_taps - 1, 0), (0, 0)))
    taps = w(TAPS)
    out = c * sum(inputs[j : j + len(x)] * taps[:, j] for j in range(block.num_taps))
    see("attn_heads", out)
    return out @ w(f"{OUTPUT}.weight").T


def _mamba2(x, block: Mamba2, w, see):
    """The recurrence of model/mamba2.py, token by token."""
    H, G, N, size = block.num_heads, block.num_groups, block.state_size, block.query_size
    z, u, steps = np.split(x @ w("ssm_in.weight").T, [size, size + block.num_channels], axis=1)
    inputs, taps = np.pad(u, ((block.num_taps - 1, 0), (0, 0))), w("ssm_conv1d.weight")
    mixed = sum(inputs[j : j + len(x)] * taps[:, j] for j in range(block.num_taps))
    mixed = mixed + w("ssm_conv1d.bias")
    mixed = mixed / (1 + np.exp(-mixed))
    x_THP, b, c = np.split(mixed, [size, size + G * N], axis=1)
    x_THP = x_THP.reshape(len(x), H, -1)
    b, c = (y.reshape(len(x), G, N)[:, np.arange(H) // (H // G)] for y in (b, c))
    steps = np.logaddexp(0, steps + w("ssm_dt.bias"))
    decay, skip = np.exp(w("ssm_a").reshape(-1) * steps), w("ssm_d").reshape(-1, 1)
    state, out = np.zeros(block.state_shapes[0]), np.zeros(x_THP.shape)
    for t in range(len(x)):
        update = b[t][:, :, None] * (steps[t][:, None] * x_THP[t])[:, None]
        state = state * decay[t][:, None, None] + update
        out[t] = np.einsum("hnp,hn->hp", state, c[t]) + skip * x_THP[t]
    out = out.reshape(z.shape) * z / (1 + np.exp(-z))
    if block.epsilon is not None:
        groups = out.reshape(len(x), G, -1)
        root = np.sqrt((groups**2).mean(-1, keepdims=True) + block.epsilon)
        out = (groups / root * w("ssm_norm.weight")).reshape(out.shape)
    see("attn_heads", out)
    return out @ w("ssm_out.weight").T


_MIXERS = {DeltaNet: _delta, KimiDelta: _delta, ShortConv: _short_conv, Mamba2: _mamba2}


def _sigmoid(x):
    return 1 / (1 + np.exp(-x))


def _of_each_stream(x_TX, weight_X, count: int, epsilon: float):
    """Their RMS norms, [T, S, D]."""
    x_TSD = x_TX.reshape(len(x_TX), count, -1)
    root = np.sqrt((x_TSD**2).mean(-1, keepdims=True) + epsilon)
    return x_TSD / root * weight_X.reshape(count, -1)


def _mean_of_streams(value, block: MeanOfStreams, w, ids):
    """The formulas of model/streams.py."""
    count, stem = block.num_streams, block.stem
    normed = _of_each_stream(value["x"], w(f"{stem}_norm.weight"), count, block.epsilon)
    flat = normed.reshape(len(ids), -1)
    low = flat @ w(f"{stem}_down.weight").T / count
    shares = _sigmoid((low * _sigmoid(low)) @ w(f"{stem}_up.weight").T).reshape(normed.shape)
    found = {block.target: (shares * normed).mean(1)}
    if block.injects:
        found[INJECT] = 2 * _sigmoid(flat @ w(f"{stem}_inject.weight").T / count)
    return found


def _to_streams(value, block: ToStreams, w, ids):
    added = value[INJECT][:, :, None] * value[block.source][:, None]
    return {"x": value["x"] + added.reshape(value["x"].shape)}


def _ngram_rows(value, block: NgramRows, w, ids):
    """The rows of each token by its n-grams, in Python's integers."""
    table, end = w(f"{TABLE}.weight"), block.end_token
    rows = []
    for place in range(len(ids)):
        latest = [ids[place]]
        for before in range(1, block.length):
            is_over = before > place or (before > 1 and latest[-1] == end)
            latest.append(end if is_over else ids[place - before])
        mixed, own = 0, []
        for n, (token, multiplier) in enumerate(zip(latest, block.multipliers, strict=True)):
            mixed ^= token * multiplier
            heads = range((n - 1) * block.per_length, n * block.per_length) if n else ()
            own += [table[block.offsets[i] + mixed % block.sizes[i]] for i in heads]
        rows.append(np.concatenate(own))
    return {ROWS: np.array(rows)}


def _ngram_inputs(value, block: NgramInputs, w, ids):
    """The formulas of model/ngrams.py."""
    x, e, count = value["x"], value[ROWS], block.num_streams
    of_key, of_query, of_conv = (w(f"{name}.weight") for name in NGRAM_NORMS)
    key = _of_each_stream(e @ w("ple_key.weight").T, of_key, count, block.epsilon)
    query = _of_each_stream(x, of_query, count, block.epsilon)
    r = (key * query).sum(-1, keepdims=True) / np.sqrt(key.shape[-1])
    gates = _sigmoid(np.sign(r) * np.sqrt(np.maximum(np.abs(r), 1e-6)))
    gated = (gates * (e @ w("ple_value.weight").T)[:, None]).reshape(x.shape)
    inputs = _of_each_stream(gated, of_conv, count, block.epsilon).reshape(x.shape)
    depth, taps = (block.num_taps - 1) * block.distance, w("ple_conv1d.weight")
    inputs = np.pad(inputs, ((depth, 0), (0, 0)))
    begins = [j * block.distance for j in range(block.num_taps)]
    mixed = sum(inputs[b : b + len(x)] * taps[:, j] for j, b in enumerate(begins))
    return {"x": x + gated + mixed * _sigmoid(mixed)}


# Operations by the values that they read, which return those that they write.
_OWN = {
    BeginStreams: lambda value, block, w, ids: {"x": np.tile(value[JOINED], block.num_streams)},
    **dict.fromkeys((StreamsToMixer, StreamsToNeurons, StreamsToHead), _mean_of_streams),
    **dict.fromkeys((MixerToStreams, NeuronsToStreams), _to_streams),
    NgramRows: _ngram_rows,
    NgramInputs: _ngram_inputs,
}


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


def route_ref(
    spec: Route,
    weight_ED: np.ndarray,
    x_D: np.ndarray,
    bias_E: np.ndarray | float = 0.0,
    choice_bias_E: np.ndarray | float = 0.0,
    scale_E: np.ndarray | None = None,
) -> tuple[list[int], np.ndarray]:
    """The definition, in float64, for one token: (experts, their weights [K])."""
    logit_E = weight_ED.astype(np.float64) @ x_D.astype(np.float64) + bias_E
    powers_E = np.exp(logit_E - logit_E.max())
    score_E = {
        "softmax": powers_E / powers_E.sum(),
        "sigmoid": 1.0 / (1.0 + np.exp(-logit_E)),
        "softmax_of_chosen": logit_E,
    }[spec.gating]
    choice_E = score_E + choice_bias_E
    size = spec.num_experts // spec.num_groups
    best = 1 if spec.groups_by_largest else 2
    best_G = [np.sort(choice_E[g * size :][:size])[-best:].sum() for g in range(spec.num_groups)]
    groups = sorted(range(spec.num_groups), key=lambda g: (-best_G[g], g))[: spec.num_used_groups]
    allowed = [e for e in range(spec.num_experts) if e // size in groups]
    chosen = sorted(allowed, key=lambda e: (-choice_E[e], e))[: spec.num_used]
    weight_K = score_E[chosen]
    if spec.gating == "softmax_of_chosen":
        weight_K = np.exp(weight_K - weight_K.max())
        weight_K = weight_K / weight_K.sum()
    if spec.renormalises:
        weight_K = weight_K / weight_K.sum()
    return chosen, weight_K * spec.scale * (1.0 if scale_E is None else scale_E[chosen])


def _neurons(x, routed, model, block: Neurons, w, threshold, mask, silent, see):
    def outputs(x, expert):
        """(gates, hidden values, output)."""

        def own(name):
            return w(name) if expert is None else w(name)[expert]

        sums = [_linear(x, own, name, block.biases) for name in block.matrices]
        hidden = _hidden(block, threshold, silent, *sums) * mask
        name = f"{block.down_name}_t" if model.layout == "sparse" else block.down_name
        down = own(f"{name}.weight")
        y = hidden @ (down if model.layout == "sparse" else down.T)
        y = y + own(f"{block.down_name}.bias") if block.down_name in block.biases else y
        return np.where(mask, sums[0], np.nan), hidden, y

    if not block.are_experts:
        gate, hidden, y = outputs(x, None)
        weight = 1.0
        if block.has_output_gate:
            weight = 1 / (1 + np.exp(-x @ w("ffn_gate_inp_shexp.weight")))[:, None]
        y = weight * y
    else:
        each = [
            [outputs(x_D, expert) for expert in chosen]
            for x_D, (chosen, _) in zip(x, routed, strict=True)
        ]
        gate, hidden = (np.array([[k[part] for k in t] for t in each]) for part in range(2))
        gate, hidden = (values.reshape(len(x), -1) for values in (gate, hidden))
        y = np.stack(
            [
                sum(weight * k[2] for weight, k in zip(own, t, strict=True))
                for t, (_, own) in zip(each, routed, strict=True)
            ]
        )
    see("ffn_gate", gate)
    see("ffn_hidden", hidden)
    return y


def _hidden(block: Neurons, threshold, silent, gate, up=1):
    kind = block.activation
    if kind in ("relu2", "gelu"):
        return (
            np.maximum(gate, 0) ** 2 if kind == "relu2" else gate * (1 + erf(gate / 2**0.5)) / 2
        ) * up
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
