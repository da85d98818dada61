"""Types without kernels whose values a K-quant holds: gguf unpacks both to the same numbers."""

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES
from gguf.quants import dequantize
from test_gguf_source import run, silu, stock, with_matrices  # noqa: F401

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.convert import same_values
from hotsplit.convert.same_values import SAME_VALUES, with_same_values
from hotsplit.errors import HotsplitError
from hotsplit.files.gguf_file import type_of

EDGES = [0.0, -0.0, 2.0**-13, -4000.0]


def blocks_of(kind, scales, seed=0):
    """uint8 [N, block_bytes]: every bit random but those of the f16 scale."""
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 256, (len(scales), GGML_QUANT_SIZES[type_of(kind)][1]), np.uint8)
    at = slice(-2, None) if kind.startswith("tq") else slice(0, 2)
    blocks[:, at] = np.array(scales, np.float16)[:, None].view(np.uint8)
    return blocks


@pytest.mark.parametrize("kind", SAME_VALUES)
def test_every_value_is_the_same(kind):
    scales = [*np.random.default_rng(1).uniform(-0.01, 0.01, 60), *EDGES]
    blocks = blocks_of(kind, scales)
    got = with_same_values(blocks.reshape(4, -1), kind, "x").reshape(64, -1)
    want = dequantize(blocks, type_of(kind))
    assert np.array_equal(dequantize(got, type_of(SAME_VALUES[kind])), want)
    assert len(np.unique(np.abs(want[0]))) > 1
    assert not np.array_equal(dequantize(np.roll(got, 1, axis=0), type_of(SAME_VALUES[kind])), want)


def test_values_that_do_not_fit_are_refused(monkeypatch):
    monkeypatch.setitem(
        same_values._MAKERS, "tq2_0", lambda blocks: 0 * same_values._ternary(blocks)
    )
    with pytest.raises(HotsplitError, match="x has scales that q2_k cannot hold exactly"):
        with_same_values(blocks_of("tq2_0", [0.01]), "tq2_0", "x")


def test_a_file_in_such_types_is_read_without_loss(stock, tmp_path):  # noqa: F811
    kinds = dict(zip(("attn_q", "ffn_up"), SAME_VALUES, strict=True))

    def packed_of(name, entry):
        kind = kinds.get(name.split(".")[-2], "tq2_0")
        scales = np.full(entry.shape[0] * entry.shape[1] // 256, 1e-3)
        return kind, blocks_of(kind, scales).reshape(entry.shape[0], -1)

    with_matrices(stock, tmp_path / "a.gguf", packed_of)
    report = run(tmp_path / "a.gguf", tmp_path / "m.gguf", layout="stock")
    made = {
        e.kind for e in ModelFile.load(tmp_path / "m.gguf").tensors.values() if len(e.shape) == 2
    }
    assert made == {*SAME_VALUES.values()}
    notes = {f"{kind} repacked as {same}: the same values" for kind, same in SAME_VALUES.items()}
    assert notes <= {*report.notes}
