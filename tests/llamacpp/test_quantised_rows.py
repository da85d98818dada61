"""Rows of real models, quantised here and by llama.cpp: the same types and bytes, so the same
divergence from f16. After `make smollm2 qwen2.5`: `-m slow`.

Rows are quantised one by one, so the first few of every matrix stand for all of them."""

from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from hotsplit.artifacts.importance_file import Importance, Importances
from hotsplit.artifacts.model_file import ModelFile
from hotsplit.convert.encode import encode
from hotsplit.convert.tensor_types import TensorTypes
from hotsplit.convert.type_mixtures import Roles
from hotsplit.files.gguf_file import TensorEntry, array_entry, read_gguf, write_gguf

BUILD = Path(__file__).parent.parent.parent / "build"
FILES = {
    "smollm2": BUILD / "smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    "qwen2.5": BUILD / "qwen2.5/qwen2.5-0.5b-instruct-q4_k_m.gguf",
}
ROWS = 64  # of each matrix

pytestmark = pytest.mark.slow


def cut(entry: TensorEntry) -> TensorEntry:
    """The first rows of a matrix in f16; a vector as it is."""
    if len(entry.shape) == 1:
        return entry
    kind = GGMLQuantizationType[entry.kind.upper()]
    return array_entry(dequantize(entry.read_rows(0, ROWS), kind), "f16")


def importances_of(model: ModelFile, path: Path) -> Importances:
    random = np.random.default_rng(0)
    tensors = {
        name: Importance(
            np.exp(random.standard_normal(entry.shape[-1])).astype(np.float32),
            np.ones(1, np.float32),
        )
        for name, entry in model.tensors.items()
        if name.startswith("blk.") and len(entry.shape) == 2
    }
    return Importances(path=path, tensors=tensors)


@pytest.mark.parametrize("has_importances", [False, True])
@pytest.mark.parametrize("kind", ["q4_k_m", "q5_k_m", "q3_k_m", "iq4_nl"])
@pytest.mark.parametrize("name", FILES)
def test_types_and_bytes_are_those_of_llama_cpps_quantiser(
    llama_cpp, tmp_path, name, kind, has_importances
):
    assert FILES[name].exists(), f"{FILES[name]} is missing: run make {name} first"
    whole = ModelFile.load(FILES[name])
    tensors = {name: cut(entry) for name, entry in whole.tensors.items()}
    source, target, arrays = (tmp_path / each for each in ("s.gguf", "t.gguf", "i.npz"))
    write_gguf(source, whole.architecture, {**whole._own_keys(), **whole.extra_keys}, tensors)
    made = importances_of(whole, tmp_path / "i.gguf")
    np.savez(arrays, **{name: each.means().reshape(-1) for name, each in made.tensors.items()})
    given = {"importances": arrays} if has_importances else {}
    llama_cpp("quantize", source=source, target=target, kind=kind, **given)
    roles = Roles.of(whole.spec, is_tied="output.weight" not in tensors)
    types = TensorTypes(outtype=kind, roles=roles, importances=made if has_importances else None)
    _, theirs = read_gguf(target, "model")
    for tensor, entry in tensors.items():
        got, shape = theirs[tensor], whole.tensors[tensor].shape
        assert got.kind == types.kind(tensor, shape), tensor
        if len(shape) == 1:
            continue
        importance = types.importance(tensor, shape)
        values = entry.read().view(np.float16).astype(np.float32)
        ours = encode(
            values, got.kind, tensor, importance=None if importance is None else importance[0]
        )
        assert ours.tobytes() == got.read().tobytes(), tensor
