"""A GGUF as the source: other layouts and types, foreign block types, PowerInfer's files; and the
verification of a written file against its source.

Oracles: gguf's writer and block formats, transformers' logits, our runtime on the checkpoint."""

import dataclasses
import itertools
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from checkpoints import edit_config, random_dejavu, random_llama, random_model
from gguf.quants import dequantize, quantize
from grid_blocks import blocks_of, grid_rows
from k_quants import random_rows
from models import sizes_of
from reference import rel_error
from small_blocks import CODED
from small_blocks import random_rows as random_small_rows
from test_families import CASES, IDS, transformers_logits

from hotsplit import Engine
from hotsplit.artifacts.model_file import ModelFile
from hotsplit.convert.convert import convert
from hotsplit.convert.encode import encode, is_rounding
from hotsplit.convert.gguf_source import restored
from hotsplit.convert.options import ConvertConfig, ConvertReport
from hotsplit.convert.tensor_types import TensorTypes
from hotsplit.costs.part_bytes import layer_bytes
from hotsplit.errors import HotsplitError
from hotsplit.files.gguf_file import (
    TensorEntry,
    array_entry,
    read_gguf,
    type_of,
    values_of,
    write_gguf,
)
from hotsplit.files.written import Written
from hotsplit.measure.evaluate.verify_conversion import verify
from hotsplit.model.weight_types import BY_NAME, ENCODED_NAMES, TABLE_NAMES, TABLES
from hotsplit.profile.predictors.check import check_predictors


def run(source: Path, output: Path, **options) -> ConvertReport:
    return convert(ConvertConfig(source=source, output=output, **options))


@pytest.fixture(scope="module")
def silu(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("silu")
    return random_llama(folder / "hf", hidden_act="silu", hidden_size=256, intermediate_size=512)


@pytest.fixture(scope="module")
def stock(silu, tmp_path_factory) -> Path:
    """The checkpoint as a model file in f32, in the stock layout."""
    path = tmp_path_factory.mktemp("stock") / "m.gguf"
    run(silu, path, outtype="f32", layout="stock")
    return path


def logits(path: Path):
    with Engine.load(path, mode="dense") as engine:
        return engine.logits(IDS)


def test_layouts_convert_into_each_other(silu, stock, tmp_path):
    sparse, back = tmp_path / "sparse.gguf", tmp_path / "back.gguf"
    report = run(stock, sparse)
    assert "activation assumed to be silu" in report.notes[0]
    direct = tmp_path / "direct.gguf"
    run(silu, direct, outtype="f32")
    for name, entry in ModelFile.load(direct).tensors.items():
        assert ModelFile.load(sparse).tensors[name].read().tobytes() == entry.read().tobytes()
    assert ModelFile.load(sparse).model_id == ModelFile.load(stock).model_id
    run(sparse, back, layout="stock")
    assert back.read_bytes() == stock.read_bytes()
    assert rel_error(logits(sparse), transformers_logits(silu)) < 1e-5


@pytest.mark.parametrize("outtype", ["f16", "bf16", "q8_0", "q4_0"])
def test_converting_a_gguf_gives_the_bytes_of_converting_its_checkpoint(
    silu, stock, tmp_path, outtype
):
    run(stock, tmp_path / "a.gguf", outtype=outtype)
    run(silu, tmp_path / "b.gguf", outtype=outtype)
    a, b = (ModelFile.load(tmp_path / name) for name in ("a.gguf", "b.gguf"))
    for name, entry in b.tensors.items():
        assert a.tensors[name].kind == entry.kind
        assert a.tensors[name].read().tobytes() == entry.read().tobytes(), name


def with_matrices(stock: Path, path: Path, packed_of, **keys) -> None:
    """The stock file with its matrices replaced by (type, rows) = packed_of(name, entry)."""
    tensors = dict(ModelFile.load(stock).tensors)
    for name, entry in tensors.items():
        if len(entry.shape) == 2:
            kind, packed = packed_of(name, entry)
            read = lambda a, b, packed=packed: packed[a:b]  # noqa: E731
            tensors[name] = TensorEntry(shape=entry.shape, kind=kind, read_rows=read)
    write_gguf(path, "llama", gguf_keys(stock) | keys, tensors)


def requantised(stock: Path, path: Path, kind: str) -> None:
    """The stock file with its matrices in a block type, packed by gguf (q8_0, q4_0, q5_1, ...)."""
    with_matrices(stock, path, lambda _, entry: (kind, quantize(entry.read(), type_of(kind))))


def gguf_keys(path: Path) -> dict:
    keys, _ = read_gguf(path, "model file")
    return {k: v for k, v in keys.items() if k not in ("general.architecture", "hotsplit.model_id")}


@pytest.mark.parametrize("kind", ["q8_0", "q4_0", *CODED, *TABLES])
def test_blocks_are_transposed_and_foreign_ones_packed_again(stock, tmp_path, kind):
    def packed_of(_, entry):
        if kind in TABLES:
            return kind, grid_rows(kind, *entry.shape, scale=entry.shape[1] ** -0.5)
        if kind in CODED:
            return kind, random_small_rows(kind, *entry.shape, scale=entry.shape[1] ** -0.5)
        return kind, quantize(entry.read(), type_of(kind))

    with_matrices(stock, tmp_path / "q.gguf", packed_of)
    report = run(tmp_path / "q.gguf", tmp_path / "m.gguf")
    model = ModelFile.load(tmp_path / "m.gguf")
    _, old = read_gguf(tmp_path / "q.gguf", "model file")
    for name, entry in model.tensors.items():
        source = old[name.replace("ffn_down_t", "ffn_down")]
        want = dequantize(source.read(), type_of(source.kind))
        got = values_of(entry.read(), entry.kind)
        if "ffn_down_t" in name:
            assert entry.kind == "q8_0"
            assert rel_error(got, want.T) < 0.01
        elif len(entry.shape) == 2:
            assert entry.in_file.kind == kind and (got == want).all()
            assert entry.in_file.read().tobytes() == source.read().tobytes()
    assert any(f"{kind} repacked as q8_0: relative error" in note for note in report.notes)
    assert len(report.model_id) == 64


def test_small_blocks_run_as_they_are(stock, tmp_path):
    """A file with all types that `convert` keeps, compared with the same weights in f32 within the
    rounding to f16 of cached keys and values and of the transposed down projections."""
    kinds = itertools.cycle(CODED)

    def packed_of(_, entry):
        kind = next(kinds)
        return kind, random_small_rows(kind, *entry.shape, scale=entry.shape[1] ** -0.5)

    with_matrices(stock, tmp_path / "q.gguf", packed_of)
    run(tmp_path / "q.gguf", tmp_path / "f32.gguf", outtype="f32")
    want = logits(tmp_path / "f32.gguf")
    with Engine.load(tmp_path / "q.gguf", mode="dense") as engine:
        assert rel_error(engine.logits(IDS), want) < 4 * torch.finfo(torch.float16).eps


def test_types_with_grids_run_as_they_are(stock, tmp_path):
    """Compared with the same weights in f32, likewise. A written copy has the file's bytes."""
    kinds = itertools.cycle(TABLES)

    def packed_of(_, entry):
        kind = next(kinds)
        return kind, grid_rows(kind, *entry.shape, scale=entry.shape[1] ** -0.5)

    with_matrices(stock, tmp_path / "q.gguf", packed_of)
    run(tmp_path / "q.gguf", tmp_path / "f32.gguf", outtype="f32")
    want = logits(tmp_path / "f32.gguf")
    model = ModelFile.load(tmp_path / "q.gguf")
    assert {e.kind for e in model.tensors.values()} == {*TABLE_NAMES, "f32"}
    for is_resident in (True, False):
        with Engine.load(tmp_path / "q.gguf", mode="dense", is_resident=is_resident) as engine:
            assert rel_error(engine.logits(IDS), want) < 4 * torch.finfo(torch.float16).eps
    keys, tensors = read_gguf(tmp_path / "q.gguf", "model file")
    model.save(tmp_path / "again.gguf")
    assert read_gguf(tmp_path / "again.gguf", "model file")[0] == keys | model._own_keys()
    for name, entry in read_gguf(tmp_path / "again.gguf", "model file")[1].items():
        assert entry.kind == tensors[name].kind
        assert entry.read().tobytes() == tensors[name].read().tobytes()


@pytest.mark.parametrize("kind", TABLES)
def test_grids_scales_that_are_not_finite_are_refused(stock, tmp_path, kind):
    def packed_of(name, entry):
        scales = np.full(entry.shape[0] * entry.shape[1] // 256, 1e-3)
        scales[1] = np.inf if name.startswith("token") else 1e-3
        return kind, blocks_of(kind, scales.tolist()).reshape(entry.shape[0], -1)

    with_matrices(stock, tmp_path / "bad", packed_of)
    with pytest.raises(HotsplitError, match="'token_embd.weight' has NaN or infinite values"):
        run(tmp_path / "bad", tmp_path / "m.gguf")


@pytest.mark.parametrize("kind", CODED)
def test_small_blocks_that_are_not_finite_are_refused(stock, tmp_path, kind):
    def packed_of(_, entry):
        data = random_small_rows(kind, *entry.shape, scale=1.0)
        data[1, CODED[kind].block_bytes] = 255  # an exponent
        if kind != "mxfp4":
            data[1, CODED[kind].head_bytes - 2 :][:2] = np.frombuffer(b"\x00\x7c", np.uint8)
        return kind, data

    with_matrices(stock, tmp_path / "bad", packed_of)
    with pytest.raises(HotsplitError, match="has NaN or infinite values"):
        run(tmp_path / "bad", tmp_path / "m.gguf")


def k_quantised(stock: Path, path: Path) -> None:
    """The stock file with random matrices as in a file of type Q4_K_M: q4_k, and q6_k for the
    embedding and the down projection of layer 0; other K-quants for some of layer 1."""
    kinds = {
        "token_embd.weight": "q6_k",
        "blk.0.ffn_down.weight": "q6_k",
        "blk.1.attn_q.weight": "q5_k",
        "blk.1.attn_output.weight": "q3_k",
        "blk.1.ffn_up.weight": "q2_k",
        "blk.1.ffn_gate.weight": "iq4_xs",
    }
    seeds = itertools.count()

    def packed_of(name, entry):
        kind, scale = kinds.get(name, "q4_k"), entry.shape[1] ** -0.5
        return kind, random_rows(kind, *entry.shape, scale=scale, seed=next(seeds))

    file_type = np.uint32(gguf.LlamaFileType.MOSTLY_Q4_K_M)
    with_matrices(stock, path, packed_of, **{"general.file_type": file_type})


def test_k_quants_run_as_they_are(stock, tmp_path):
    """Compared with the same weights in f32, within the rounding to f16 of cached keys and values
    and of the transposed down projections."""
    k_quantised(stock, tmp_path / "k.gguf")
    run(tmp_path / "k.gguf", tmp_path / "f32.gguf", outtype="f32")
    bound = 4 * torch.finfo(torch.float16).eps
    want = logits(tmp_path / "f32.gguf")
    for mode in ("dense", "exact"):
        with Engine.load(tmp_path / "k.gguf", mode=mode) as engine:
            assert rel_error(engine.logits(IDS), want) < bound
            engine.hidden(IDS[:1])
            for position in range(1, len(IDS)):
                last_V = engine._step(IDS[position], position)
            assert rel_error(last_V, want[-1]) < bound


def test_k_quants_keep_their_bytes_except_where_transposed(stock, tmp_path):
    k_quantised(stock, tmp_path / "k.gguf")
    report = run(tmp_path / "k.gguf", tmp_path / "m.gguf")
    old, new = (ModelFile.load(tmp_path / name) for name in ("k.gguf", "m.gguf"))
    for name, entry in new.tensors.items():
        if "ffn_down_t" in name:
            source = old.tensors[name.replace("ffn_down_t", "ffn_down")]
            want = dequantize(source.read(), type_of(source.kind))
            assert entry.kind == "q8_0"
            assert rel_error(dequantize(entry.read(), type_of("q8_0")), want.T) < 0.01
        else:
            assert entry.kind == old.tensors[name].kind
            assert entry.read().tobytes() == old.tensors[name].read().tobytes()
    assert report.outtype == "q4_k_m" and report.model_id == old.model_id
    packed = [note for note in report.notes if "repacked" in note]
    assert [note.split(":")[0] for note in packed] == [
        "q6_k repacked as q8_0",
        "q4_k repacked as q8_0",
    ]
    written = Written(
        source=tmp_path / "k.gguf",
        path=tmp_path / "m.gguf",
        output=tmp_path / "m.gguf",
        restored=lambda: restored(tmp_path / "k.gguf", TensorTypes(outtype="f16"), new),
    )
    assert "logits equal" in verify(written).line


def test_a_budget_counts_the_bytes_of_k_quants(stock, tmp_path):
    k_quantised(stock, tmp_path / "k.gguf")
    run(tmp_path / "k.gguf", tmp_path / "m.gguf")
    old, new = (layer_bytes(ModelFile.load(tmp_path / name), 0) for name in ("k.gguf", "m.gguf"))
    assert (old.gate_row, old.up_row, old.down_row) == (144, 144, 2 * 256)  # f16 when transposed
    assert (new.gate_row, new.up_row, new.down_row) == (144, 144, 256 // 32 * 34)
    shape = sizes_of(ModelFile.load(tmp_path / "k.gguf").bare_spec)
    kv = 2 * shape.num_kv_heads * shape.head_dim
    matrices = (2 * 256 + kv) * 144  # a row is one block of 256 values
    assert old.attention == new.attention == matrices + 2 * 256 * 4


@pytest.mark.parametrize("outtype", ["q4_k", "q5_k", "q6_k"])
def test_k_quants_are_written_and_computed_with(silu, stock, tmp_path, outtype):
    report = run(silu, tmp_path / "a.gguf", outtype=outtype)
    run(stock, tmp_path / "b.gguf", outtype=outtype)
    a, b = (ModelFile.load(tmp_path / name) for name in ("a.gguf", "b.gguf"))
    assert report.outtype == outtype and not [n for n in report.notes if "whole" in n]
    for name, entry in a.tensors.items():
        assert entry.kind == (outtype if len(entry.shape) == 2 else "f32")
        assert entry.read().tobytes() == b.tensors[name].read().tobytes(), name
    bits = int(outtype[1])
    error = rel_error(logits(tmp_path / "a.gguf"), transformers_logits(silu))
    assert 2.0 ** -(bits + 2) < error < 10 * 2.0**-bits, error


def test_rows_of_partial_blocks_of_256_get_smaller_blocks_or_are_refused(tmp_path):
    narrow = random_llama(tmp_path / "hf", hidden_size=64, intermediate_size=256)
    run(narrow, tmp_path / "f16.gguf", outtype="f16")
    for source, name in ((narrow, "m.gguf"), (tmp_path / "f16.gguf", "again.gguf")):
        report = run(source, tmp_path / name, outtype="q4_k")
        told = [
            n for n in report.notes if "because their rows are not whole q4_k blocks of 256" in n
        ]
        assert len(told) == 1 and "matrices, 99% of the bytes, are q5_0" in told[0]
        matrices = [
            e for e in ModelFile.load(tmp_path / name).tensors.values() if len(e.shape) == 2
        ]
        assert {entry.kind for entry in matrices} == {"q5_0"}
    with pytest.raises(HotsplitError, match="would not change: .* are q5_0, because their rows"):
        run(tmp_path / "m.gguf", tmp_path / "n.gguf", outtype="q4_k")
    with pytest.raises(HotsplitError, match="rows of 64 values are not whole blocks of 256"):
        run(narrow, tmp_path / "n.gguf", tensor_types=("attn_q=q4_k",))


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize(
    "name, at",
    [
        ("blk.0.ffn_up.weight", 0),
        ("blk.0.ffn_up.weight", 2),
        ("blk.1.attn_q.weight", 2),
        ("token_embd.weight", 208),
    ],
)
def test_k_quants_that_are_not_finite_are_refused(stock, tmp_path, name, at, value):
    k_quantised(stock, tmp_path / "k.gguf")
    _, tensors = read_gguf(tmp_path / "k.gguf", "model file")
    data = np.array(tensors[name].read())
    data[1, at : at + 2] = np.frombuffer(np.float16(value).tobytes(), np.uint8)
    bad = dataclasses.replace(tensors[name], read_rows=lambda a, b: data[a:b])
    write_gguf(tmp_path / "bad", "llama", gguf_keys(tmp_path / "k.gguf"), {**tensors, name: bad})
    with pytest.raises(HotsplitError, match=f"{name}' has NaN or infinite values"):
        run(tmp_path / "bad", tmp_path / "m.gguf")
    assert not (tmp_path / "m.gguf").exists()


def test_a_type_that_cannot_be_unpacked_is_refused(stock, tmp_path):
    model = ModelFile.load(stock)
    width = model.spec.hidden_size
    size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType.Q8_K][1] * width // 256
    zeros = np.zeros((model.spec.vocab_size, size), np.uint8)
    entry = TensorEntry(shape=(len(zeros), width), kind="q8_k", read_rows=lambda a, b: zeros[a:b])
    write_gguf(tmp_path / "q", "llama", gguf_keys(stock), {**model.tensors, "output.weight": entry})
    with pytest.raises(HotsplitError, match="type q8_k cannot be unpacked"):
        run(tmp_path / "q", tmp_path / "m.gguf")
    assert [p.name for p in tmp_path.iterdir()] == ["q"]
    with pytest.raises(HotsplitError, match="output.weight is in q8_k, .* cannot be converted"):
        Engine.load(tmp_path / "q")


def test_a_foreign_file_is_not_called_a_model(tmp_path):
    keys = {"general.architecture": "llama"}
    entry = array_entry(np.ones((2, 32), np.float32), "f32")
    write_gguf(tmp_path / "q", "llama", keys, {"a": entry})
    with pytest.raises(HotsplitError, match=r"key 'llama\.[a-z_.]*' is missing, wanted"):
        run(tmp_path / "q", tmp_path / "m.gguf", outtype="f32")


def test_conversions_that_change_nothing_or_contradict_the_source_are_refused(
    stock, silu, tmp_path
):
    with pytest.raises(HotsplitError, match="stock model file already"):
        run(stock, tmp_path / "m.gguf", layout="stock")
    run(stock, tmp_path / "m.gguf")
    with pytest.raises(HotsplitError, match="sparse model file already"):
        run(tmp_path / "m.gguf", tmp_path / "n.gguf")
    with pytest.raises(HotsplitError, match="already states its activation, silu"):
        run(tmp_path / "m.gguf", tmp_path / "n.gguf", activation="relu")
    with pytest.raises(HotsplitError, match="a checkpoint states its activation"):
        run(silu, tmp_path / "n.gguf", activation="relu")
    for wrong in ("swish", "fatrelu", "fatrelu=x", "relu=0.1", "fatrelu=-1"):
        with pytest.raises(HotsplitError, match="wanted one of relu"):
            ConvertConfig(source=stock, output=tmp_path / "n", activation=wrong)


@pytest.mark.parametrize("activation", ["relu", "fatrelu=0.25"])
def test_the_activation_of_a_stock_file_can_be_stated(tmp_path, activation):
    """llama.cpp's converter writes a ReLU model as if it were SiLU."""
    name, _, threshold = activation.partition("=")
    folder = random_llama(
        tmp_path / "hf",
        hidden_act=name,
        **({"hidden_act_param": float(threshold)} if threshold else {}),
    )
    run(folder, tmp_path / "want.gguf", outtype="f32")
    edit_config(folder, lambda c: c.update(hidden_act="silu"))
    run(folder, tmp_path / "stock.gguf", outtype="f32", layout="stock")
    run(tmp_path / "stock.gguf", tmp_path / "got.gguf", activation=activation)
    assert rel_error(logits(tmp_path / "got.gguf"), logits(tmp_path / "want.gguf")) < 1e-6
    assert rel_error(logits(tmp_path / "stock.gguf"), logits(tmp_path / "want.gguf")) > 0.1
    with pytest.raises(HotsplitError, match="it would run and answer wrongly"):
        run(tmp_path / "got.gguf", tmp_path / "x.gguf", layout="stock")


def test_tensor_types(silu, stock, tmp_path):
    types = ("attn_(q|k)=q8_0", "output=f32", "blk.1.=bf16")
    for source in (silu, stock):
        run(source, tmp_path / "m.gguf", outtype="q4_0", tensor_types=types, force=True)
        kinds = {n: e.kind for n, e in ModelFile.load(tmp_path / "m.gguf").tensors.items()}
        assert kinds["blk.1.attn_q.weight"] == kinds["blk.0.attn_k.weight"] == "q8_0"
        assert kinds["output.weight"] == kinds["blk.0.attn_output.weight"] == "f32"
        assert kinds["blk.1.ffn_up.weight"] == "bf16"
        assert kinds["blk.0.ffn_up.weight"] == kinds["token_embd.weight"] == "q4_0"
        assert kinds["blk.1.attn_norm.weight"] == "f32"
        assert rel_error(logits(tmp_path / "m.gguf"), transformers_logits(silu)) < 0.5
    for wrong, words in {
        "ffn": "wanted NAME=TYPE",
        "ffn=q9": "'q9' is unknown",
        "=f32": "wanted NAME=TYPE",
        "(=f32": "not a regular expression",
        "ffm_up=f32": "no tensor has such a name",
    }.items():
        with pytest.raises(HotsplitError, match=words):
            run(silu, tmp_path / "n.gguf", tensor_types=(wrong,))


# ---- PowerInfer's files ------------------------------------------------------------------------

POWERINFER = {"llama": "llama", "opt": "opt", "falcon-40b": "falcon", "bamboo": "bamboo"}


def powerinfer_file(path: Path, model: ModelFile, architecture: str, folder: Path) -> None:
    """Writes our model and its predictors with gguf's writer, as PowerInfer's converters do."""
    s = sizes_of(model.bare_spec)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(2048)
    writer.add_embedding_length(s.hidden_size)
    writer.add_block_count(s.num_layers)
    writer.add_feed_forward_length(s.num_neurons)
    writer.add_head_count(s.num_heads)
    if architecture != "opt":
        writer.add_head_count_kv(s.num_kv_heads)
        add = (
            writer.add_layer_norm_eps if architecture == "falcon" else writer.add_layer_norm_rms_eps
        )
        add(s.epsilon)
    if architecture == "falcon":
        writer.add_tensor_data_layout("jploski")
    writer.add_float32("powerinfer.sparse_threshold", 0.25)
    for name, entry in model.tensors.items():
        data = entry.read()
        if name == "position_embd.weight":
            data = np.concatenate([np.full((2, s.hidden_size), 7, np.float32), data])
        writer.add_tensor(name.replace("ffn_down.bias", "ffn_down_t.bias"), np.array(data))
    for layer in range(s.num_layers):
        state = torch.load(folder / f"model_{layer}.pt", weights_only=True)
        for part in ("fc1", "fc2"):
            writer.add_tensor(f"blk.{layer}.{part}.weight", state[f"{part}.weight"].numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    data = path.read_bytes()
    path.write_bytes(b"PWRI" + data[4:])


@pytest.mark.parametrize("case", POWERINFER)
def test_powerinfer_files_are_read_and_converted(tmp_path, case):
    """The runtime loads them as they are, and convert rewrites them in our layout."""
    folder = random_model(tmp_path / "hf", CASES["llama" if case == "bamboo" else case])
    if case == "bamboo":
        edit_config(folder, lambda c: c.update(hidden_act="drelu"))
    run(folder, tmp_path / "want.gguf", outtype="f32")
    want = ModelFile.load(tmp_path / "want.gguf")
    random_dejavu(tmp_path / "p", num_neurons=want.spec.most_neurons)
    path = tmp_path / "m.powerinfer.gguf"
    powerinfer_file(path, want, POWERINFER[case], tmp_path / "p")
    model = ModelFile.load(path)
    assert model.activation == want.activation and model.layout == "sparse"
    assert model.predictor.threshold_L == (0.25,) * 3 and model.predictor.kind == "relu"
    assert rel_error(logits(path), logits(want.path)) < 1e-6
    run(path, tmp_path / "f16.gguf", outtype="f16")
    converted = ModelFile.load(tmp_path / "f16.gguf")
    assert converted.predictor == model.predictor
    assert converted.model_id == model.model_id
    assert rel_error(logits(converted.path), logits(want.path)) < 1e-2
    added = tmp_path / "added.gguf"
    (tmp_path / "p" / "config.json").write_text('{"sparse_threshold": 0.25}')
    run(folder, added, outtype="f32", predictors=tmp_path / "p")
    with Engine.load(path, mode="predicted") as a, Engine.load(added, mode="predicted") as b:
        assert rel_error(a.logits(IDS), b.logits(IDS)) < 1e-3  # f32 predictors in both


# ---- comparing with the source -----------------------------------------------------------------


def check(written: Written) -> list[str]:
    return [verify(written).line]


WRONG = {
    "gate and up": lambda t: swap(t, "blk.0.ffn_gate.weight", "blk.0.ffn_up.weight"),
    "two layers": lambda t: swap(t, "blk.0.attn_q.weight", "blk.1.attn_q.weight"),
    "embedding and head": lambda t: swap(t, "token_embd.weight", "output.weight"),
    "two norms": lambda t: swap(t, "blk.0.attn_norm.weight", "blk.2.ffn_norm.weight"),
    "rows of q": lambda t: t | {"blk.0.attn_q.weight": flipped(t["blk.0.attn_q.weight"])},
}


def swap(tensors, one, other):
    return tensors | {one: tensors[other], other: tensors[one]}


def flipped(entry):
    data = entry.read()[::-1]
    return dataclasses.replace(entry, read_rows=lambda a, b: data[a:b])


@pytest.mark.parametrize("outtype", ["f32", "q4_0"])
@pytest.mark.parametrize("wrong", WRONG)
def test_verification_refuses_wrong_values(silu, tmp_path, monkeypatch, outtype, wrong):
    """The written file differs from the source in the way `wrong` names."""
    from hotsplit.convert import checkpoint_tensors as module

    right = module.tensor_entries
    monkeypatch.setattr(module, "tensor_entries", lambda *args: WRONG[wrong](right(*args)))
    config = ConvertConfig(source=silu, output=tmp_path / "m", outtype=outtype)
    with pytest.raises(HotsplitError, match="does not read back as it was"):
        convert(config, verify=check)
    assert not list(tmp_path.iterdir())


def test_verification_says_what_it_skips(silu, stock, tmp_path, monkeypatch):
    from hotsplit.measure.evaluate import verify_conversion as module

    def line(source: Path) -> str:
        config = ConvertConfig(source=source, output=tmp_path / "m", outtype="q8_0", force=True)
        return convert(config, verify=check).verified

    fatrelu = random_llama(tmp_path / "fatrelu", hidden_act="fatrelu")
    reason = "transformers does not know the activation 'fatrelu'"
    assert line(fatrelu) == f"values verified, logits not: {reason}"
    edit_config(fatrelu, lambda c: c.update(model_type="bamboo"))
    assert "transformers does not know model_type 'bamboo'" in line(fatrelu)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "transformers", None)
        patch.setitem(sys.modules, "transformers.utils", None)
        missing = "transformers is not installed: pip install 'hotsplit[convert]'"
        assert line(silu) == f"values verified, logits not: {missing}"
    requantised(stock, tmp_path / "q.gguf", "q5_1")
    assert line(tmp_path / "q.gguf").startswith("verified: logits equal the source's")
    monkeypatch.setattr(module, "free_memory_bytes", lambda: 1000)
    assert "transformers needs about" in line(silu)
    assert "the source needs about" in line(stock)


@pytest.mark.parametrize("kind", ENCODED_NAMES)
def test_rounding_is_distinguished_from_error(kind):
    want = np.random.default_rng(0).standard_normal((4, 512)).astype(np.float32)
    want[0] *= 1e-9  # where a scale or a value underflows
    got = dequantize(encode(want, kind, "test"), type_of(kind)).reshape(want.shape)
    assert is_rounding(got, want, kind)
    more = max(0.3, 1.3 * BY_NAME[kind].relative_error)
    for wrong in (
        0 * want,
        (1 - more) * want,
        want[::-1],
        want[:, ::-1],
        (1 + more) * want,
        want[:2],
    ):
        assert not is_rounding(np.ascontiguousarray(wrong), want, kind)
    off = got.copy()
    off[2, 5] += more * abs(want[2]).max()
    assert not is_rounding(off, want, kind)


def whole_gate_predictors(folder: Path, checkpoint: Path) -> Path:
    """Perfect predictors in DejaVu's format: x and -x through ReLU, then the layer's gate rows."""
    from safetensors.torch import load_file

    folder.mkdir()
    weights = load_file(checkpoint / "model.safetensors")
    eye = torch.eye(64)
    for layer in range(3):
        gate = weights[f"model.layers.{layer}.mlp.gate_proj.weight"]
        torch.save(
            {
                "fc1.weight": torch.cat([eye, -eye]),
                "fc2.weight": torch.cat([gate, -gate], dim=1).contiguous(),
            },
            folder / f"model_{layer}.pt",
        )
    return folder


def test_predictors_near_chance_are_noticed(tmp_path):
    """Random predictors are reported, perfect ones are not."""
    checkpoint = random_llama(tmp_path / "hf", hidden_act="relu")
    for name, make in {
        "perfect": lambda f: whole_gate_predictors(f, checkpoint),
        "random": lambda f: random_dejavu(f),
    }.items():
        run(checkpoint, tmp_path / f"{name}.gguf", predictors=make(tmp_path / name))
    perfect = check_predictors(tmp_path / "perfect.gguf")
    assert perfect.recall > 0.99 and perfect.gain > 0.98 and not perfect.is_near_chance
    random = check_predictors(tmp_path / "random.gguf")
    assert random.is_near_chance and "were they made for this model?" in random.line
    run(checkpoint, tmp_path / "none.gguf")
    assert check_predictors(tmp_path / "none.gguf") is None


def test_predictors_of_a_model_whose_neurons_all_fire_are_refused(silu, tmp_path):
    random_dejavu(tmp_path / "p", width=256, num_neurons=512)
    with pytest.raises(HotsplitError, match="every neuron of this silu model fires.*leave .*p out"):
        run(silu, tmp_path / "m.gguf", predictors=tmp_path / "p")
