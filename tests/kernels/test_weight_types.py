"""The table of weight types, against gguf, the enums of the C++ and the lists derived from it."""

import re

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, LlamaFileType
from paths import ROOT

from hotsplit.files.gguf_file import values_of
from hotsplit.model.weight_types import BY_NAME, TABLES, TYPES, file_kind
from hotsplit.runtime.kernels.cpu.library import _LAYOUTS


def kernel_kinds() -> list[tuple[str, int, int, int]]:
    """Name, values and bytes of a block and of its head of each kind of kernels.h, in order."""
    text = (ROOT / "runtime/kernels/cpu/kernels.h").read_text(encoding="utf-8")
    line = r"^ +KIND\((\w+), \w+, \w+, (\d+), (\d+), (\d+), \w+\)"
    found = re.findall(line, text, re.MULTILINE)
    return [(name.lower(), *map(int, sizes)) for name, *sizes in found]


IN_FILES = [each for each in TYPES if each.is_in_files]
IN_GGUF = [each for each in IN_FILES if each.name != "q2_0"]


def test_gguf_does_not_know_q2_0_yet():
    assert [each.name.upper() in GGMLQuantizationType.__members__ for each in IN_GGUF]
    assert "Q2_0" not in GGMLQuantizationType.__members__  # else gguf_types.py is to be shorter


@pytest.mark.parametrize("each", IN_GGUF, ids=lambda each: each.name)
def test_sizes_are_those_of_gguf(each):
    number = GGMLQuantizationType[each.name.upper()]
    assert GGML_QUANT_SIZES[number] == (each.block_values, each.block_bytes)
    assert each.name in LlamaFileType[each.file_type].name.lower()
    assert not each.planes or sum(size for _, size in each.planes) == each.block_bytes


@pytest.mark.parametrize("each", [t for t in IN_FILES if t.halves], ids=lambda each: each.name)
def test_a_nan_among_the_halves_shows_in_the_values(each):
    block = np.ones((1, each.block_bytes), np.uint8)
    assert np.isfinite(values_of(block, each.name)).all()
    for start in range(*each.halves, 2):
        wrong = block.copy()
        wrong[:, start : start + 2] = np.array([np.nan], np.float16).view(np.uint8)
        assert np.isnan(values_of(wrong, each.name)).any()


def test_numbers_are_those_of_the_kernels():
    kinds = kernel_kinds()
    assert {kind: layout.code for kind, layout in _LAYOUTS.items()} == {
        kind: code for code, (kind, *_) in enumerate(kinds)
    }
    for kind, *sizes in kinds:
        if (name := file_kind(kind)) in TABLES:
            assert sizes == [*GGML_QUANT_SIZES[GGMLQuantizationType[name.upper()]], 0], kind
        elif not (each := BY_NAME[name]).is_float:
            head = each.head_bytes if each.has_small_blocks or each.shares_heads else 0
            assert sizes == [each.block_values, each.block_bytes, head], kind
