"""Matrices that are parts of one keep their scales of nvfp4, or are refused."""

from dataclasses import replace

import numpy as np
import pytest
from models import family_spec, make_sizes

from hotsplit.errors import HotsplitError
from hotsplit.families.row_order import gates_joined, matrices_apart, matrices_joined
from hotsplit.files.gguf_file import TensorEntry, unpacked
from hotsplit.files.gguf_types import block_sizes


def nvfp4(shape: tuple[int, ...], scale: list[float]) -> TensorEntry:
    block, size = block_sizes("nvfp4")
    chance = np.random.default_rng(0)
    rows = chance.integers(0, 256, (*shape[:-1], shape[-1] // block * size), np.uint8)
    own = np.array(scale, np.float32)
    return TensorEntry(shape=shape, kind="nvfp4", read_rows=lambda a, b: rows[a:b], scale=own)


@pytest.mark.parametrize("scale", [[0.5], [0.5, -2.0, 3.0]])
def test_matrices_of_one_tensor_have_their_own_scales(scale):
    whole = nvfp4((3, 4, 64), scale)
    apart = matrices_apart({"a.weight": whole}, ("a",))
    for number in range(3):
        values = unpacked(apart[f"a.{number}.weight"]).read()
        assert np.array_equal(values, unpacked(whole).read()[number])
    joined = matrices_joined(apart, ("a",))
    assert np.array_equal(unpacked(joined["a.weight"]).read(), unpacked(whole).read())


def test_gates_and_ups_of_two_scales_are_not_joined():
    spec = family_spec("llama", make_sizes(num_layers=1))
    gate, up = nvfp4((96, 64), [0.5]), nvfp4((96, 64), [0.25])
    names = "blk.0.ffn_gate.weight", "blk.0.ffn_up.weight"
    with pytest.raises(HotsplitError, match="ffn_gate.weight and the ups have scales of their own"):
        gates_joined(spec, dict(zip(names, (gate, up), strict=True)))
    alike = replace(up, scale=gate.scale)
    (joined,) = gates_joined(spec, dict(zip(names, (gate, alike), strict=True))).values()
    assert joined.shape == (192, 64) and joined.scale == gate.scale
