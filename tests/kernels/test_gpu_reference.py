"""The GPU kernels' float64 reference compared with the runtime's code in f32, up to f32 rounding,
and planar rows compared with the gguf package."""

import subprocess
import sys

import gguf
import gpu_matrices
import pytest
import torch
from gpu_matrices import KINDS, REFERENCE, block_width, heads_of, make_matrix, vector
from reference import rel_error
from torch.nn import functional

from hotsplit.files.gguf_file import type_of
from hotsplit.runtime.device.bits import pack_bits, unpack_bits
from hotsplit.runtime.kernels.gate import Gate
from hotsplit.runtime.kernels.gpu.kernels import triton_kernels
from hotsplit.runtime.kernels.planar import FILE_KIND, PLANAR_KIND, from_planar, planar
from hotsplit.runtime.kernels.stored import unpack

BOUND = 3e-6
ACTIVATIONS = ("relu", "relu2", "fatrelu", "drelu", "silu", "gelu", "gelu_tanh")


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    """Runs the reference on the CPU, like the code that it is compared with; the kernels' tests
    run it on their device."""
    monkeypatch.setattr(gpu_matrices, "device", lambda: torch.device("cpu"))


# ---- planar rows ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", PLANAR_KIND)
def test_planar_rows_have_the_values_of_the_file(kind):
    """The gguf package gives the values. The number of bytes is unchanged, and converting back is
    exact."""
    raw = make_matrix(kind, 3, 768).data.cpu()
    rows, made = planar(raw, kind)
    assert made == PLANAR_KIND[kind] and rows.shape == raw.shape
    want = gguf.dequantize(raw.numpy(), type_of(kind))
    assert torch.equal(unpack(rows, made), torch.from_numpy(want))
    back, back_kind = from_planar(rows, made)
    assert back_kind == kind and torch.equal(back, raw)


def test_the_planes_of_a_row_follow_one_another():
    blocks = torch.arange(2 * 34, dtype=torch.uint8)[None]
    rows, _ = planar(blocks, "q8_0")
    assert rows[0, :4].tolist() == [0, 1, 34, 35]
    assert rows[0, 4:].tolist() == [*range(2, 34), *range(36, 68)]


@pytest.mark.parametrize("kind", ["f32", "f16", "q4_k", "q5_k"])
def test_other_kinds_are_unchanged(kind):
    data = make_matrix(kind, 2, 256).data
    assert planar(data, kind) == (data, kind) == from_planar(data, kind)


@pytest.mark.parametrize("kind", FILE_KIND)
def test_unpack_of_raw_rows_gives_wrong_values(kind):
    raw = make_matrix(FILE_KIND[kind], 3, 512).data
    assert rel_error(unpack(raw, kind).nan_to_num(), unpack(raw, FILE_KIND[kind])) > 0.1


# ---- rows and neurons ----------------------------------------------------------------------


@pytest.mark.parametrize("has_relu", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_dot(kind, has_relu):
    matrix = make_matrix(kind, 7, block_width(kind))
    x, bias, got = vector(matrix.width), vector(7, 2), vector(7, 3)
    REFERENCE.dot(matrix, bias, x, got, has_relu=has_relu)
    want = unpack(matrix.data, kind) @ x + bias
    assert rel_error(got, want.relu() if has_relu else want) < BOUND


def test_embed_and_unpack():
    matrix = make_matrix("q6_k_planar", 7, 256)
    rows = unpack(matrix.data, matrix.kind)
    out = torch.empty_like(rows[:2])
    REFERENCE.unpack(matrix, out, torch.tensor([4, 2]))
    assert torch.equal(out, rows[[4, 2]])
    REFERENCE.embed(matrix, torch.tensor([5]), out[0])
    assert torch.equal(out[0], rows[5])
    REFERENCE.embed(matrix, torch.tensor([6]), out[0], is_added=True)
    assert torch.equal(out[0], rows[5] + rows[6])
    REFERENCE.embed(matrix, torch.tensor([4]), out[0], is_added=True, scale=3.0)
    assert torch.equal(out[0], (rows[5] + rows[6]) + 3.0 * rows[4])


@pytest.mark.parametrize("is_dense", [False, True])
@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gate_up(activation, is_gated, is_dense):
    gate, up = make_matrix("f16", 40, 64), make_matrix("q8_0_planar", 40, 64, seed=5)
    x, ids = vector(64) * 0.3, torch.arange(0, 120, 3)
    is_named = torch.arange(120) % 2 == 0
    got = vector(40)
    rule = Gate(activation=activation, threshold=0.15, computes_all=is_dense)
    REFERENCE.gate_up(
        gate,
        vector(40, 6),
        up if is_gated else None,
        vector(40, 7) if is_gated else None,
        ids.int(),
        pack_bits(is_named),
        x,
        rule,
        got,
    )
    value, _ = rule.act(unpack(gate.data, "f16") @ x + vector(40, 6))
    upper = unpack(up.data, up.kind) @ x + vector(40, 7) if is_gated else None
    want = rule.hidden(value, upper) * is_named[ids]
    assert rel_error(got, want) < BOUND
    assert torch.equal(got == 0, want == 0)


@pytest.mark.parametrize("kind", ["linear", "relu"])
def test_predict(kind):
    """`dot` applies the first matrix of the predictor, `predict` the second."""
    down, up = make_matrix("f32", 32, 64), make_matrix("f32", 45, 32, seed=5)
    x, inner, named = vector(64), vector(32), torch.empty(2, dtype=torch.int32)
    REFERENCE.dot(down, None, x, inner, has_relu=kind == "relu")
    REFERENCE.predict(up, vector(45, 3), inner, 0.4, named)
    inner = down.data @ x
    want = up.data @ (inner.relu() if kind == "relu" else inner) + vector(45, 3) > 0.4
    assert unpack_bits(named).tolist() == want.tolist() + [False] * 19
    assert 0 < want.sum() < 45


def test_bits():
    is_set = torch.zeros(70, dtype=torch.bool)
    is_set[[0, 31, 33, 69]] = True
    words = pack_bits(is_set)
    assert words.tolist() == [1 - (1 << 31), 2, 32] and words.dtype == torch.int32
    assert unpack_bits(words)[:70].equal(is_set)


@pytest.mark.parametrize("skips_zeros", [False, True])
def test_down_and_add_norm(skips_zeros):
    matrix, hidden = make_matrix("q4_0_planar", 50, 96), vector(50)
    hidden[::3] = 0
    parts, x, total = torch.empty(4, 96), vector(96, 2), vector(96)
    REFERENCE.down(matrix, hidden, parts, skips_zeros=skips_zeros)
    rows = unpack(matrix.data, matrix.kind)
    assert rel_error(parts[1], hidden[13:26] @ rows[13:26]) < BOUND
    for bias in (None, vector(96, 4)):
        weight, out = vector(96, 3), torch.empty_like(x)
        REFERENCE.add_norm(x, parts, weight, bias, 1e-5, out, total)
        assert rel_error(total, want := x + hidden @ rows) < BOUND
        if bias is None:
            want = functional.rms_norm(want, (96,), weight, 1e-5)
        else:
            want = functional.layer_norm(want, (96,), weight, bias, 1e-5)
        assert rel_error(out, want) < BOUND


# ---- attention -----------------------------------------------------------------------------


@pytest.mark.parametrize(("is_adjacent", "magnitude"), [(False, 1.0), (True, 1.0), (True, 1.25)])
def test_attention(is_adjacent, magnitude):
    """One token is computed with norms of the heads, the next without but with a window; 4 query
    heads share 2 key-value heads. Torch's norm and attention, and rotations by complex numbers."""
    width, num_heads, num_kv = 32, 4, 2
    frequency = 1e4 ** -(torch.arange(0, width, 2, dtype=torch.float64) / width)
    got_cache = vector(6 * 2 * num_kv * width, 5).view(2, 6, num_kv, width)
    want_cache = got_cache.clone()

    def turned(heads_HW, position):
        pairs = heads_HW.double().unflatten(-1, (-1, 2) if is_adjacent else (2, -1))
        pairs = pairs if is_adjacent else pairs.transpose(-1, -2)
        turns = torch.polar(torch.full_like(frequency, magnitude), position * frequency)
        found = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turns)
        return (found if is_adjacent else found.transpose(-1, -2)).flatten(-2)

    for start, has_norms in ((3, True), (4, False)):
        qkv = vector(8 * width, start)
        query, key, value = qkv.clone().view(8, width).split([num_heads, num_kv, num_kv])
        weights = [vector(width, seed) if has_norms else None for seed in (8, 9)]
        if has_norms:
            query, key = (
                functional.rms_norm(heads, (width,), weight, 1e-5)
                for heads, weight in zip((query, key), weights, strict=True)
            )
        query, key = turned(query, start), turned(key, start)
        want_cache[0][start], want_cache[1][start] = key, value
        first, scale = (0, 0.2) if has_norms else (start - 2, None)
        keys, values = want_cache[:, first : start + 1].double().transpose(1, 2)
        want = functional.scaled_dot_product_attention(
            query[:, None], keys, values, scale=scale, enable_gqa=True
        )[:, 0]
        limits = {"scale": scale} if has_norms else {"window": 3}
        spec = heads_of(is_adjacent=is_adjacent, magnitude=magnitude, **limits)
        position, got = torch.tensor([start]), torch.empty(num_heads, width)
        REFERENCE.rotate_append(qkv, frequency, *weights, position, *got_cache, spec)
        REFERENCE.attend(qkv, *got_cache, position, spec, torch.empty(0), got)
        assert rel_error(qkv[: num_heads * width], query.flatten()) < BOUND
        assert rel_error(got_cache[0], want_cache[0]) < BOUND
        assert torch.equal(got_cache[1], want_cache[1])
        assert rel_error(got, want) < BOUND


# ---- the records ---------------------------------------------------------------------------


def test_without_triton_the_error_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(ImportError, match="need Triton.*pip install triton") as caught:
        triton_kernels()
    assert "\n" not in str(caught.value)


def test_the_reference_needs_no_triton():
    program = """if True:
        import sys
        sys.modules["triton"] = None
        import torch
        from hotsplit.runtime.kernels.gpu.kernels import KERNELS, reference_kernels
        x = torch.ones(4)
        reference_kernels().add_norm(x, None, None, None, 0.0, None, out := torch.empty(4), x)
        assert out.tolist() == [2.0] * 4 and len(KERNELS) > 20"""
    subprocess.run([sys.executable, "-c", program], check=True)
