"""A tokenizer that cannot be used is refused before any work, with all else that is wrong; a
tokenizer.json that the user gives takes its place."""

import json
import shutil

import pytest
from checkpoints import random_llama

from hotsplit.artifacts.model_file import TOKENIZER_KEY, ModelFile
from hotsplit.cli import main
from hotsplit.convert.convert import convert
from hotsplit.convert.options import ConvertConfig
from hotsplit.errors import HotsplitError
from hotsplit.files.gguf_file import read_gguf, write_gguf
from hotsplit.run.housekeeping import list_cache
from hotsplit.runtime.text.codec import TextCodec

pytest_plugins = ("run_fixtures",)
CARD = "rtx-4060-8gb"  # the machine of a plan, by its data sheet
TEXT = "brown fox 123"
GIVE = "give the model's tokenizer.json with --tokenizer FILE, to run or to convert"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return random_llama(tmp_path_factory.mktemp("hf") / "hf", hidden_act="silu")


@pytest.fixture(scope="module")
def stock(folder, tmp_path_factory):
    path = tmp_path_factory.mktemp("stock") / "m.gguf"
    convert(ConvertConfig(source=folder, output=path, layout="stock"))
    return path


def changed(stock, path, **values):
    """llama.cpp's file with other keys."""
    keys, tensors = read_gguf(stock, "model file")
    del keys[TOKENIZER_KEY], keys["general.architecture"]
    names = {f"tokenizer.ggml.{name}": value for name, value in values.items() if name != "odd"}
    odd = {"llama.odd": True} if values.get("odd") else {}
    write_gguf(path, "llama", keys | names | odd, tensors)
    return path


@pytest.mark.parametrize(
    "values, reasons",
    [
        ({"pre": "new"}, ["its pre-tokenizer (tokenizer.ggml.pre) is 'new', which is unknown"]),
        ({"model": "t5"}, ["its tokenizer (tokenizer.ggml.model) is 't5' (SentencePiece's"]),
        ({"model": "rwkv", "odd": True}, ["key 'llama.odd'", "'rwkv' (RWKV's own tokenizer)"]),
    ],
)
def test_what_cannot_be_used_is_refused_before_any_work(
    stock, tmp_path, capsys, cache, values, reasons
):
    path = changed(stock, tmp_path / "in.gguf", **values)
    with pytest.raises(HotsplitError) as caught:
        convert(ConvertConfig(source=path, output=tmp_path / "out.gguf"))
    for command in (["plan", "--machine", CARD], ["run", "-p", "the", "--outtype", "q8_0"]):
        assert main([*command, str(path)]) == 1
        line = capsys.readouterr().err.splitlines()[-1]
        assert all(why in line for why in [*reasons, GIVE]), line
    assert main(["inspect", str(path)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "refused as tokenizer" in shown
    assert all(why in str(caught.value) for why in [*reasons, GIVE])
    assert not (tmp_path / "out.gguf").exists() and list_cache(cache) == ()


def test_a_given_tokenizer_takes_the_place_of_one_that_cannot_be_used(
    folder, stock, tmp_path, capsys, cache
):
    path, given = changed(stock, tmp_path / "in.gguf", pre="new"), folder / "tokenizer.json"
    output = tmp_path / "out.gguf"
    convert(ConvertConfig(source=path, output=output, tokenizer=given))
    want = TextCodec.of(ModelFile.load(stock)).encode(TEXT)
    assert TextCodec.of(ModelFile.load(output)).encode(TEXT) == want
    asked = ["run", str(path), "-p", TEXT, "-n", "2", "--no-verify", "--tokenizer", str(given)]
    assert main([*asked, "--json", "--device", "cpu"]) == 0
    assert json.loads(capsys.readouterr().out)["prefill_tokens"] == len(want)
    names = json.loads(given.read_text())
    vocabulary = names["model"]["vocab"]
    a, b = list(vocabulary)[40:42]
    vocabulary[a], vocabulary[b] = vocabulary[b], vocabulary[a]
    renamed = tmp_path / "renamed.json"
    renamed.write_text(json.dumps(names))
    convert(ConvertConfig(source=path, output=output, tokenizer=renamed, force=True))
    turned = dict(zip(vocabulary, reversed(vocabulary.values()), strict=True))
    renamed.write_text(json.dumps(names | {"model": names["model"] | {"vocab": turned}}))
    with pytest.raises(HotsplitError, match=r"is another model's tokenizer: its token \d+ is"):
        convert(ConvertConfig(source=path, output=output, tokenizer=renamed, force=True))


def test_a_checkpoint_without_a_tokenizer_is_given_one(folder, tmp_path, capsys, cache):
    bare = tmp_path / "bare"
    shutil.copytree(folder, bare)
    (bare / "tokenizer.json").unlink()
    assert main(["plan", str(bare), "--machine", CARD]) == 1
    assert f"bare: has no tokenizer, which text needs; {GIVE}" in capsys.readouterr().err
    given, output = folder / "tokenizer.json", tmp_path / "m.gguf"
    assert main(["plan", str(bare), "--machine", CARD, "--tokenizer", str(given)]) == 0
    report = convert(ConvertConfig(source=bare, output=output))
    assert f"no tokenizer.json, which text needs; {GIVE}" in report.notes[0]
    convert(ConvertConfig(source=bare, output=output, tokenizer=given, force=True))
    assert len(TextCodec.of(ModelFile.load(output)).encode(TEXT)) > 2
    with pytest.raises(HotsplitError, match="put it there as tokenizer.json"):
        convert(
            ConvertConfig(source=bare, output=output, tokenizer=given, layout="stock", force=True)
        )
    assert list_cache(cache) == ()
