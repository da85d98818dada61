"""Files that other programs and other years made: one tensor for each expert, queries, keys and
values in one, key heads listed with zeros, metadata that are not UTF-8, pieces of a file.

Oracle: the same model in today's form, whose logits must have the same bits."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import random_model, save_tokenizer
from models import make_model, make_sizes
from test_families import CASES, GATED, IDS
from transformers import MixtralConfig, Qwen3Config

from hotsplit import Engine
from hotsplit.artifacts.model_file import ModelFile
from hotsplit.artifacts.model_gguf import read_model_gguf
from hotsplit.cli import main
from hotsplit.convert.convert import convert
from hotsplit.convert.options import ConvertConfig
from hotsplit.errors import HotsplitError
from hotsplit.files.gguf_file import TensorEntry, array_entry, read_gguf, row_range, write_gguf
from hotsplit.measure.evaluate.verify_conversion import verify

MIXTRAL = MixtralConfig(**GATED | {"intermediate_size": 32}, num_local_experts=5)


def stock_file(folder: Path, config, outtype: str = "q8_0") -> Path:
    checkpoint = random_model(folder / "hf", config)
    save_tokenizer(checkpoint, 320)
    path = folder / "today.gguf"
    convert(ConvertConfig(source=checkpoint, output=path, outtype=outtype, layout="stock"))
    return path


def rewritten(path: Path, change, **changed_keys) -> Path:
    """A file with the tensors that `change` makes of those of another."""
    keys, tensors = read_gguf(path, "model")
    own = {
        name: value
        for name, value in (keys | changed_keys).items()
        if name != "general.architecture"
    }
    write_gguf(path.with_name("old.gguf"), keys["general.architecture"], own, change(tensors))
    return path.with_name("old.gguf")


def logits(path: Path, **options) -> torch.Tensor:
    with Engine.load(path, mode="dense", device="cpu", **options) as engine:
        return engine.logits(IDS)


# ---- one tensor for each expert
# ----------------------------------------------------------------------


def of_each_expert(tensors, order=None, kinds=None):
    """llama.cpp's converter of 2023 wrote files like these: expert by expert, the matrices of one
    after another."""
    found, apart = {}, {}
    for name, entry in tensors.items():
        match = re.fullmatch(r"(blk\.\d+\.ffn_\w+)_exps\.weight", name)
        if match is None:
            found[name] = entry
            continue
        for number in range(entry.shape[0]):
            rows = entry.read()[number]
            own = TensorEntry(
                shape=entry.shape[1:], kind=entry.kind, read_rows=lambda a, b, r=rows: r[a:b]
            )
            apart[name.split(".")[1], number, f"{match[1]}.{number}.weight"] = own
    keys = sorted(apart) if order is None else order(sorted(apart))
    return found | {name: apart[layer, number, name] for layer, number, name in keys}


def shuffled(keys):
    return [keys[place] for place in np.random.default_rng(0).permutation(len(keys))]


@pytest.mark.parametrize("order", [None, shuffled], ids=["in order", "sprinkled"])
@pytest.mark.parametrize("is_resident", [False, True])
def test_experts_in_tensors_of_their_own_are_joined(tmp_path, order, is_resident):
    today = stock_file(tmp_path, MIXTRAL)
    old = rewritten(today, lambda tensors: of_each_expert(tensors, order))
    want, got = read_model_gguf(today)[1], read_model_gguf(old)[1]
    assert got.keys() == want.keys()
    for name, entry in want.items():
        assert (got[name].shape, got[name].kind) == (entry.shape, entry.kind)
        assert np.array_equal(got[name].read(), entry.read()), name
        assert np.array_equal(got[name].read_rows(1, 3), entry.read_rows(1, 3)), name
    is_view = got["blk.1.ffn_down_exps.weight"].read().base is not None
    assert is_view == (order is None)
    assert torch.equal(logits(old, is_resident=is_resident), logits(today, is_resident=is_resident))


def test_they_are_converted_like_others(tmp_path):
    old = rewritten(stock_file(tmp_path, MIXTRAL), of_each_expert)
    config = ConvertConfig(source=old, output=tmp_path / "m.gguf", outtype="f16")
    report = convert(config, verify=lambda made: [verify(made).line])
    assert report.verified.startswith("verified: logits equal the source's")


@pytest.mark.parametrize(
    "change, words",
    [
        (
            lambda own: own.pop("blk.1.ffn_up.2.weight"),
            r"experts \[0, 1, 3, 4\] of blk.1.ffn_up_exps.weight",
        ),
        (
            lambda own: own.update(
                {"blk.1.ffn_up.2.weight": array_entry(np.zeros((32, 64)), "f16")}
            ),
            r"ffn_up_exps.weight in f16 \[32, 64\] and q8_0 \[32, 64\], which cannot be one tensor",
        ),
        (
            lambda own: own.update(
                {"blk.1.ffn_up_exps.weight": array_entry(np.zeros((5, 32, 64)), "f16")}
            ),
            "wanted all, once",
        ),
    ],
    ids=["missing", "of two types", "twice"],
)
def test_experts_that_are_no_whole_are_refused_in_one_line(tmp_path, change, words):
    def changed(tensors):
        own = of_each_expert(tensors)
        change(own)
        return own

    old = rewritten(stock_file(tmp_path, MIXTRAL), changed)
    with pytest.raises(HotsplitError, match=words):
        ModelFile.load(old)


# ---- queries, keys and values in one
# ----------------------------------------------------------------


def with_fused_attention(tensors):
    found = dict(tensors)
    for name in [n for n in tensors if ".attn_q." in n]:
        own = [found.pop(name.replace("attn_q.", f"attn_{part}.")) for part in "qkv"]
        rows = np.concatenate([entry.read() for entry in own])
        shape = sum(entry.shape[0] for entry in own), *own[0].shape[1:]
        whole = TensorEntry(shape=shape, kind=own[0].kind, read_rows=lambda a, b, r=rows: r[a:b])
        found[name.replace("attn_q.", "attn_qkv.")] = whole
    return found


@pytest.mark.parametrize("case", ["llama", "qwen2", "qwen3", "mixtral", "starcoder2-stock", "glm4"])
def test_fused_queries_keys_and_values_are_divided(tmp_path, case):
    """With biases in half of the cases, and heads of one key among several."""
    config = Qwen3Config(**GATED, head_dim=32) if case == "qwen3" else CASES[case]
    folder = random_model(tmp_path / "hf", config)
    convert(ConvertConfig(source=folder, output=tmp_path / "today.gguf", outtype="q8_0"))
    old = rewritten(tmp_path / "today.gguf", with_fused_attention)
    assert "blk.0.attn_qkv.weight" in read_gguf(old, "model")[1]
    assert torch.equal(logits(old), logits(tmp_path / "today.gguf"))


def test_a_fused_matrix_of_another_height_is_refused(tmp_path):
    def shorter(tensors):
        found = with_fused_attention(tensors)
        name = "blk.1.attn_qkv.weight"
        return found | {name: row_range(found[name], 0, 65)}

    old = rewritten(stock_file(tmp_path, MIXTRAL), shorter)
    with pytest.raises(HotsplitError, match=r"unknown tensor 'blk.1.attn_qkv.weight'"):
        ModelFile.load(old)


# ---- ollama's keys
# -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case, attends", [("qwen35-stock", [1, 0, 0, 1]), ("qwen3nextmoe-stock", [0, 0, 0, 1])]
)
def test_key_heads_of_each_layer_may_be_listed_with_zeros(tmp_path, case, attends):
    today = stock_file(tmp_path, CASES[case])
    keys, _ = read_gguf(today, "model")
    name = f"{keys['general.architecture']}.attention.head_count_kv"
    count = int(keys[name])
    listed = {name: [count * own for own in attends]}
    if case == "qwen35-stock":
        listed |= {"qwen35.ssm.v_head_reordered": True, "qwen35.mrope_sections": [1, 1, 0]}
    old = rewritten(today, dict, **listed)
    assert ModelFile.load(old).bare_spec == ModelFile.load(today).bare_spec
    assert torch.equal(logits(old), logits(today))
    wrong = rewritten(today, dict, **{name: [count * (1 - own) for own in attends]})
    with pytest.raises(HotsplitError, match="has key heads in other layers than those that attend"):
        ModelFile.load(wrong)
    if case == "qwen35-stock":
        other = rewritten(today, dict, **{"qwen35.ssm.v_head_reordered": False})
        with pytest.raises(HotsplitError, match="v_head_reordered is False, wanted true"):
            ModelFile.load(other)


# ---- bytes that are no text, pieces of a file
# ---------------------------------------------------------


def test_metadata_that_are_not_utf_8_do_not_matter(tmp_path, capsys):
    author = "Jos\u00e9"
    model = make_model(
        sizes=make_sizes(vocab_size=320),
        extra_keys={"general.author": author, "general.name": "tiny"},
    )
    model.save(tmp_path / "m.gguf")
    data = (tmp_path / "m.gguf").read_bytes()
    latin = author.encode("latin-1") + b"!"  # as long as in UTF-8
    assert data.count(author.encode()) == 1 and len(latin) == len(author.encode())
    (tmp_path / "l.gguf").write_bytes(data.replace(author.encode(), latin))
    assert torch.equal(*[logits(tmp_path / name)[:0] for name in ("m.gguf", "l.gguf")])
    assert ModelFile.load(tmp_path / "l.gguf").extra_keys["general.author"] == "Jos\ufffd!"
    assert main(["inspect", str(tmp_path / "l.gguf"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["keys"]["general.author"] == "Jos\ufffd!"
    again = ConvertConfig(source=tmp_path / "l.gguf", output=tmp_path / "c.gguf", outtype="q8_0")
    convert(again)
    assert ModelFile.load(tmp_path / "c.gguf").extra_keys["general.author"] == "Jos\ufffd!"


@pytest.mark.parametrize(
    "suffix, pieces",
    [
        (".part1of2", ".part*of2"),
        (".part2of2", ".part*of2"),
        ("-split-a", "-split-*"),
        ("-split-b", "-split-*"),
        (".part-a", ".part-*"),
    ],
)
def test_a_piece_of_a_file_is_called_one(tmp_path, suffix, pieces):
    make_model(sizes=make_sizes()).save(tmp_path / "m.gguf")
    data = (tmp_path / "m.gguf").read_bytes()
    path = tmp_path / f"big.gguf{suffix}"
    path.write_bytes(data[len(data) // 2 :] if suffix[-1] in "b" or "2of" in suffix else data[:-99])
    with pytest.raises(HotsplitError) as caught:
        ModelFile.load(path)
    line = str(caught.value)
    assert "is by its name one piece of big.gguf" in line
    assert f"cat big.gguf{pieces} > big.gguf" in line
