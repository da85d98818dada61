"""The table of weight types, against gguf, the enums of the C++ and the lists derived from it."""

import ast
import re
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, LlamaFileType
from gguf.quants import dequantize
from paths import ROOT
from small_blocks import CODED

from hotsplit.model import weight_types
from hotsplit.model.weight_types import BY_NAME, BY_QUALITY, TYPES, PredictorTypeName, file_kind
from hotsplit.options.cache_types import NAMES as CACHE_NAMES
from hotsplit.runtime.kernels.cpu.library import _LAYOUTS
from hotsplit.runtime.kernels.gpu.launch import INEXACT_ROWS
from hotsplit.runtime.kernels.planar import FORMS


def kernel_kinds() -> list[tuple[str, int, int, int]]:
    """Name, values and bytes of a block and of its head of each kind of kernels.h, in order."""
    text = (ROOT / "runtime/kernels/cpu/kernels.h").read_text(encoding="utf-8")
    line = r"^ +KIND\((\w+), \w+, \w+, (\d+), (\d+), (\d+), \w+\)"
    found = re.findall(line, text, re.MULTILINE)
    return [(name.lower(), *map(int, sizes)) for name, *sizes in found]


@pytest.mark.parametrize("each", TYPES, ids=lambda each: each.name)
def test_sizes_are_those_of_gguf(each):
    number = GGMLQuantizationType[each.name.upper()]
    assert GGML_QUANT_SIZES[number] == (each.block_values, each.block_bytes)
    assert each.name in LlamaFileType[each.file_type].name.lower()
    assert not each.planes or sum(size for _, size in each.planes) == each.block_bytes


@pytest.mark.parametrize("each", [t for t in TYPES if t.halves], ids=lambda each: each.name)
def test_a_nan_among_the_halves_shows_in_the_values(each):
    block = np.ones((1, each.block_bytes), np.uint8)
    assert np.isfinite(dequantize(block, GGMLQuantizationType[each.name.upper()])).all()
    for start in range(*each.halves, 2):
        wrong = block.copy()
        wrong[:, start : start + 2] = np.array([np.nan], np.float16).view(np.uint8)
        assert np.isnan(dequantize(wrong, GGMLQuantizationType[each.name.upper()])).any()


def test_numbers_are_those_of_the_kernels():
    kinds = kernel_kinds()
    assert {kind: layout.code for kind, layout in _LAYOUTS.items()} == {
        kind: code for code, (kind, *_) in enumerate(kinds)
    }
    for kind, *sizes in kinds:
        each = BY_NAME[file_kind(kind)]
        if not each.is_float:
            head = each.head_bytes if each.has_small_blocks else 0
            assert sizes == [each.block_values, each.block_bytes, head], kind


def test_derived_lists():
    assert BY_QUALITY == ("q8_0", "q6_k", "q5_k", "q4_k", "q4_0")
    assert CACHE_NAMES == ("f32", "f16", "bf16", "q8_0", "q4_0", "q8_0-plain", "q4_0-plain")
    assert get_args(PredictorTypeName) == ("f16", "q8_0", "q4_0")
    own = ("q6_k", "q3_k", "q2_k", "iq4_xs")
    assert {*INEXACT_ROWS} == {"q4_k", "q5_k", *own, *(f"{name}_planar" for name in own)}
    assert {*FORMS} == {"", "q4_0", "q8_0", *own, *CODED}
    assert [t.transposed for t in TYPES] == ["f32", "f16", "bf16", *["f16"] * (len(TYPES) - 3)]


def test_the_table_needs_no_other_module_of_the_package():
    tree = ast.parse(Path(weight_types.__file__).read_text(encoding="utf-8"))
    names = {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    names |= {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    assert names == {"dataclasses", "math", "typing"}


def test_few_files_name_a_type():
    """A new type is a row of the table and its arithmetic, so few files can list types."""
    stages = ["src", "convert", "profile", "measure", "solver", "runtime", "serve", "report", "run"]
    files = [p for stage in stages for p in (ROOT / stage).rglob("*") if p.is_file()]
    code = [p for p in files if p.suffix in (".py", ".h", ".cpp", ".cu", ".html", ".js")]
    assert len(code) > 300
    naming = {p.name for p in code if re.search(r'q4_0|"Q4_0"', p.read_text(encoding="utf-8"))}
    assert len(naming) <= 8, sorted(naming)
