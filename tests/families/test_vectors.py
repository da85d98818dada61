"""Vectors of a GGUF in every type: norms, biases, scales, what delta nets and routers have.

Oracle: gguf's own unpacking, and the same file with these values in f32, whose logits must have the
same bits."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import random_model
from gguf import GGML_QUANT_SIZES, quants
from gguf.quants import dequantize
from models import make_model, make_sizes
from small_blocks import random_rows as random_small_rows
from test_families import CASES, IDS

from hotsplit import Engine
from hotsplit.artifacts.model_file import ModelFile
from hotsplit.convert.convert import convert
from hotsplit.convert.options import ConvertConfig
from hotsplit.costs.default_mode import dense_bytes
from hotsplit.errors import HotsplitError
from hotsplit.files.gguf_file import TensorEntry, array_entry, read_gguf, type_of, write_gguf
from hotsplit.inspection.inspect_file import inspect_file
from hotsplit.measure.evaluate.verify_conversion import verify
from hotsplit.runtime.weights.matrix import vector_of

# One of each family, with all kinds of vectors: biases of attention and of experts, norms of heads
# and of all of them, scales of layers and experts, sinks, rotary factors, choices' biases,
# convolutions.
_FAMILIES = """
    llama-biases nemotron-biases-tied starcoder2 command-r-plus qwen2 qwen3 opt falcon-11b phi3
    gemma3 olmo2 exaone4 ernie-biases glm4 granite gemma4 gemma3n gemma4moe qwen2moe glm4moe gpt-oss
    qwen3nextmoe qwen35
"""
FAMILIES = _FAMILIES.split()
SMALL = ("bf16", "f16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl", "mxfp4")
NUMBERS = {"f64": np.float64, "i32": np.int32}  # types that no weights have
ARCHITECTURE = "general.architecture"


def stored(entry: TensorEntry, kind: str) -> TensorEntry:
    """An f32 vector, or several, in another type; as it is, if its rows are not whole blocks,
    and if it holds what no f16 does (frequencies that do not turn)."""
    if kind in NUMBERS:
        return array_entry(np.sign(entry.read()), kind)
    largest = np.abs(entry.read()).max(initial=0)
    if entry.shape[-1] % GGML_QUANT_SIZES[type_of(kind)][0] or largest > np.finfo(np.float16).max:
        return entry
    if kind == "iq4_nl":
        count, width = int(np.prod(entry.shape[:-1])), entry.shape[-1]
        data = random_small_rows(kind, count, width, scale=0.5).reshape(*entry.shape[:-1], -1)
    else:
        data = quants.quantize(entry.read(), type_of(kind))
    of_value = data.shape[-1] / entry.shape[-1]

    def read_rows(start: int, stop: int) -> np.ndarray:
        if len(entry.shape) == 1:
            return data[int(start * of_value) : int(stop * of_value)]
        return data[start:stop]

    return replace(entry, kind=kind, read_rows=read_rows)


def values(entry: TensorEntry) -> np.ndarray:
    if entry.kind == "f32":
        return entry.read()
    return dequantize(entry.read(), type_of(entry.kind)).reshape(entry.shape)


def written(path: Path, keys, tensors) -> Path:
    own = {name: value for name, value in keys.items() if name != ARCHITECTURE}
    write_gguf(path, keys[ARCHITECTURE], own, tensors)
    return path


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A function that gives the keys, tensors and names of vectors of a case's file, which has
    matrices in f16."""
    made = {}

    def get(case: str):
        if case not in made:
            folder = tmp_path_factory.mktemp(case)
            checkpoint = random_model(folder / "hf", CASES[case])
            path = folder / "m.gguf"
            convert(ConvertConfig(source=checkpoint, output=path, outtype="f16"))
            keys, tensors = read_gguf(path, "model")
            routers = "ffn_gate_inp.weight", "_router.weight"
            vectors = [n for n, e in tensors.items() if e.kind == "f32" and not n.endswith(routers)]
            made[case] = keys, tensors, vectors
        return made[case]

    return get


@pytest.mark.parametrize("case", ["llama-biases", "gemma4moe", "gpt-oss", "qwen35"])
def test_a_vector_has_the_values_of_its_type(source, tmp_path, case):
    keys, tensors, vectors = source(case)
    for kind in (*SMALL, *NUMBERS):
        own = {name: stored(tensors[name], kind) for name in vectors}
        path = written(tmp_path / "m.gguf", keys, tensors | own)
        if kind in NUMBERS:
            with pytest.raises(HotsplitError, match=f"is in {kind}, which .*another type$"):
                ModelFile.load(path)
            continue
        read = ModelFile.load(path).tensors
        for name, entry in own.items():
            assert np.array_equal(vector_of(read[name], torch.device("cpu")), values(entry)), name
        assert any(entry.kind == kind for entry in own.values())


@pytest.mark.parametrize("case", FAMILIES)
def test_a_model_runs_and_is_planned_as_with_these_values_in_f32(source, tmp_path, case):
    keys, tensors, vectors = source(case)
    own = {n: stored(tensors[n], SMALL[i % len(SMALL)]) for i, n in enumerate(vectors)}
    in_f32 = {name: array_entry(values(entry), "f32") for name, entry in own.items()}
    mixed = written(tmp_path / "mixed.gguf", keys, tensors | own)
    plain = written(tmp_path / "plain.gguf", keys, tensors | in_f32)
    logits = []
    for path in (mixed, plain):
        with Engine.load(path, mode="dense", device="cpu") as engine:
            logits.append(engine.logits(IDS))
    assert torch.equal(*logits) and bool(torch.isfinite(logits[0]).all())
    first, second = map(ModelFile.load, (mixed, plain))
    assert dense_bytes(first) == dense_bytes(second)
    facts = {fact.name: fact for fact in inspect_file(mixed).tensors}
    for name, entry in own.items():  # what the file has
        assert (facts[name].kind, facts[name].num_bytes) == (entry.kind, entry.num_bytes), name


@pytest.mark.parametrize("case", ["qwen35", "gpt-oss", "gemma4"])
def test_a_converted_file_has_the_values_in_f32(source, tmp_path, case):
    keys, tensors, vectors = source(case)
    own = {n: stored(tensors[n], SMALL[i % len(SMALL)]) for i, n in enumerate(vectors)}
    path = written(tmp_path / "mixed.gguf", keys, tensors | own)
    config = ConvertConfig(source=path, output=tmp_path / "m.gguf", outtype="q8_0")
    report = convert(config, verify=lambda made: [verify(made).line])
    assert report.verified.startswith("verified: logits equal the source's")
    _, made = read_gguf(config.output, "model")
    for name, entry in own.items():
        assert made[name].kind == "f32" and np.array_equal(made[name].read(), values(entry)), name


@pytest.mark.parametrize("kind", ["q6_k", "q4_k", "tq2_0"])
def test_vectors_in_blocks_of_256_values(tmp_path, kind):
    model = make_model(sizes=make_sizes(width=256), kind="f16")
    block, size = GGML_QUANT_SIZES[type_of(kind)]
    data = np.random.default_rng(0).integers(0, 60, size, dtype=np.uint8)
    entry = TensorEntry(shape=(block,), kind=kind, read_rows=lambda start, stop: data)
    want = dequantize(data, type_of(kind))
    norms = [name for name in model.tensors if "norm" in name]
    path = tmp_path / "m.gguf"
    model.save(path)
    keys, tensors = read_gguf(path, "model")
    written(path, keys, tensors | dict.fromkeys(norms, entry))
    for name in norms:
        assert np.array_equal(ModelFile.load(path).tensors[name].read(), want)


def test_the_gate_of_shared_experts_may_be_a_row_of_any_type(tmp_path):
    """llama.cpp's converter writes it as a matrix of one row."""
    folder = random_model(tmp_path / "hf", CASES["qwen2moe"])
    convert(ConvertConfig(source=folder, output=tmp_path / "m.gguf", outtype="f16"))
    keys, tensors = read_gguf(tmp_path / "m.gguf", "model")
    name = "blk.1.ffn_gate_inp_shexp.weight"
    for kind in ("bf16", "q8_0", "q4_0"):
        own = stored(array_entry(tensors[name].read()[None], "f32"), kind)
        path = written(tmp_path / "row.gguf", keys, tensors | {name: own})
        entry = ModelFile.load(path).tensors[name]
        assert entry.shape == (64,) and np.array_equal(entry.read(), values(own)[0])


WRONG = {"shorter": (32,), "longer": (96,), "none": (0,), "a matrix": (2, 64)}


@pytest.mark.parametrize("kind", ["f32", "bf16", "q8_0", "q4_0"])
@pytest.mark.parametrize("shape", WRONG.values(), ids=WRONG)
def test_a_vector_of_another_length_is_refused(source, tmp_path, kind, shape):
    keys, tensors, _ = source("llama-biases")
    wrong = array_entry(np.ones(shape), "f32")
    wrong = stored(wrong, kind) if wrong.read().size else replace(wrong, kind=kind)
    name = "blk.1.attn_norm.weight"
    path = written(tmp_path / "m.gguf", keys, tensors | {name: wrong})
    with pytest.raises(HotsplitError, match=rf"{name} is .*wanted \[64\]"):
        ModelFile.load(path)
