"""What convert reads: pickled state dicts, the hub and its cache, the predictors' input, and
tokenizers.

Oracles: torch.load, the same weights as safetensors, transformers and sentencepiece."""

import json
import os
import pickle
import shutil
import sys
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import sentencepiece as spm
import torch
from checkpoints import END, random_dejavu, random_llama, random_model, save_tokenizer
from safetensors.torch import load_file
from test_families import CASES
from transformers import AutoTokenizer

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.cli import main
from hotsplit.convert import hub
from hotsplit.convert.checkpoint import Checkpoint
from hotsplit.convert.convert import convert
from hotsplit.convert.options import ConvertConfig
from hotsplit.convert.weight_files import read_state_dict
from hotsplit.errors import HotsplitError
from hotsplit.files import json_file, safetensors_file
from hotsplit.runtime.text.codec import TextCodec


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    return random_llama(tmp_path_factory.mktemp("llama") / "tiny")


def pickled(source: Path, folder: Path, num_shards: int = 1, **options) -> Path:
    """The checkpoint with its weights as .bin files."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    tensors = load_file(source / "model.safetensors")
    if num_shards == 1:
        torch.save(tensors, folder / "pytorch_model.bin", **options)
        return folder
    weight_map = {}
    for shard in range(num_shards):
        name = f"pytorch_model-{shard + 1:05}-of-{num_shards:05}.bin"
        part = dict(list(tensors.items())[shard::num_shards])
        torch.save(part, folder / name, **options)
        weight_map |= dict.fromkeys(part, name)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize("num_shards", [1, 3])
def test_pickled_checkpoints_convert_like_safetensors(llama, tmp_path, num_shards):
    folder = pickled(llama, tmp_path / "tiny", num_shards)
    for source, name in ((llama, "a.gguf"), (folder, "b.gguf")):
        convert(ConvertConfig(source=source, output=tmp_path / name))
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()


def test_tied_weights_are_found_and_views_are_not(tmp_path):
    base = torch.randn(6, 8)
    views = {"transposed": base.T, "rows": base[2:4], "column": base[:, 3], "strided": base[::2]}
    torch.save({"whole": base, "tied": base[:], **views}, tmp_path / "a.bin")
    found = read_state_dict(tmp_path / "a.bin")
    assert {name: each.same_as for name, each in found.items() if each.same_as} == {"tied": "whole"}
    for name, want in views.items():
        assert torch.equal(found[name].read(), want)


def test_nothing_is_read_until_it_is_needed(tmp_path):
    """A sparse file with 8 GiB of weights, of which one row is read."""

    def resident_kib() -> int:
        return int(Path("/proc/self/status").read_text().split("VmRSS:")[1].split()[0])

    with torch.serialization.skip_data():
        torch.save({"big": torch.empty(1 << 20, 2048)}, tmp_path / "a.bin")
    assert (tmp_path / "a.bin").stat().st_size > 8 << 30
    before = resident_kib()
    tensor = read_state_dict(tmp_path / "a.bin")["big"].read()
    assert tensor.shape == (1 << 20, 2048) and not tensor[-1].any()
    assert resident_kib() - before < 1 << 20


def test_tied_weights_have_the_same_id_in_both_formats(tmp_path):
    folder = random_llama(tmp_path / "tied", tie_word_embeddings=True)
    tensors = load_file(folder / "model.safetensors")
    assert "lm_head.weight" not in tensors
    want = Checkpoint.open(folder).model_id()
    (folder / "model.safetensors").unlink()
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    torch.save(tensors, folder / "pytorch_model.bin")
    assert Checkpoint.open(folder).model_id() == want
    convert(ConvertConfig(source=folder, output=tmp_path / "a.gguf"))
    assert ModelFile.load(tmp_path / "a.gguf").is_tied
    tensors["lm_head.weight"] = tensors["lm_head.weight"] + 1
    torch.save(tensors, folder / "pytorch_model.bin")
    assert Checkpoint.open(folder).model_id() != want


def test_safetensors_are_preferred(llama, tmp_path):
    folder = shutil.copytree(llama, tmp_path / "tiny")
    (folder / "pytorch_model.bin").write_bytes(b"nothing")
    assert Checkpoint.open(folder).model_id() == Checkpoint.open(llama).model_id()


class Evil:
    """Creates a folder if it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def compress(path: Path) -> None:
    with zipfile.ZipFile(path) as old:
        entries = [(info.filename, old.read(info)) for info in old.infolist()]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as new:
        for name, data in entries:
            new.writestr(name, data)


def claim_more(path: Path) -> None:
    """Lets the pickle claim 64 of the 16 bytes that a storage has."""
    with zipfile.ZipFile(path) as old:
        entries = [(info.filename, old.read(info)) for info in old.infolist()]
    with zipfile.ZipFile(path, "w") as new:
        for name, data in entries:
            changed = data.replace(pickle.BININT1 + b"\4", pickle.BININT1 + b"\20")
            assert not name.endswith("data.pkl") or changed != data
            new.writestr(name, changed if name.endswith("data.pkl") else data)


ONES = {"a": torch.ones(4, 4)}
FOUR = {"a": torch.ones(4), "b": torch.ones(4), "c": torch.ones(64)}
REFUSED = {
    "before torch 1.6": lambda p: torch.save(ONES, p, _use_new_zipfile_serialization=False),
    "compressed": lambda p: (torch.save(ONES, p), compress(p)),
    "calls 'posix.mkdir'": lambda p: torch.save({"a": Evil(p.parent / "evil")}, p),
    "has what no state dict has": lambda p: torch.save(ONES, p, pickle_protocol=4),
    "'state_dict' is a value of type dict": lambda p: torch.save({"state_dict": ONES}, p),
    "'step' is a value of type int": lambda p: torch.save({**ONES, "step": 3}, p),
    "'3' is a tensor, wanted tensors by name": lambda p: torch.save({**ONES, 3: ONES["a"]}, p),
    "holds a value of type list": lambda p: torch.save([torch.ones(1)], p),
    "torch.complex64": lambda p: torch.save({"a": torch.ones(1, dtype=torch.complex64)}, p),
    "torch.sparse_coo": lambda p: torch.save({"a": torch.ones(2, 2).to_sparse()}, p),
    "no storage in it has 64 bytes": lambda p: (torch.save(FOUR, p), claim_more(p)),
    "cut short": lambda p: (torch.save(ONES, p), p.write_bytes(p.read_bytes()[:-30])),
    "is damaged": lambda p: zipfile.ZipFile(p, "w").writestr("a/b", "c"),
}


@pytest.mark.parametrize("words", REFUSED)
def test_other_pickles_are_refused(tmp_path, words):
    path = tmp_path / "a.bin"
    REFUSED[words](path)
    with pytest.raises(HotsplitError, match="a.bin") as caught:
        read_state_dict(path)
    assert words in str(caught.value), caught.value
    assert not (tmp_path / "evil").exists()


def test_a_pickle_of_integers_is_refused_by_type(llama, tmp_path):
    folder = pickled(llama, tmp_path / "tiny")
    torch.save({"model.norm.weight": torch.arange(64)}, folder / "pytorch_model.bin")
    with pytest.raises(HotsplitError, match="is I64, wanted one of F32"):
        Checkpoint.open(folder)


@pytest.mark.parametrize(
    "module, limit, words",
    [
        (json_file, "MAX_BYTES", "over 30 bytes"),
        (json_file, "MAX_VALUES", "over 30 values"),
        (safetensors_file, "MAX_HEADER_BYTES", "its header claims"),
    ],
)
def test_oversized_descriptions_are_refused(llama, tmp_path, monkeypatch, module, limit, words):
    folder = llama if module is safetensors_file else pickled(llama, tmp_path / "tiny")
    index = {"weight_map": {str(i): "x" for i in range(40)}}
    if module is json_file:
        (folder / "pytorch_model.bin").rename(folder / "x")
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    monkeypatch.setattr(module, limit, 30)
    with pytest.raises(HotsplitError, match=words):
        Checkpoint.open(folder)


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, '{"a": ' + "9" * 5000 + "}", '{"a": "\\ud800"}', '{"a": "\\ud800"', "[1]", ""],
)
def test_json_that_python_cannot_hold_is_refused(tmp_path, text):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(HotsplitError, match="a.json: ") as caught:
        json_file.read_object(tmp_path / "a.json", "test file")
    assert len(str(caught.value)) < 400
    (tmp_path / "a.json").write_text('{"a": "\\ud83d\\ude00"}')  # one character
    assert json_file.read_object(tmp_path / "a.json", "test file") == {"a": "\U0001f600"}


# ------------------------------------------------------------------ the hub


def cached(source: Path, cache: Path, name: str) -> None:
    """Copies a checkpoint into the layout of the hub's cache, as the only snapshot."""
    repository = cache / f"models--{name.replace('/', '--')}"
    shutil.copytree(source, repository / "snapshots" / ("0" * 40))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)


@pytest.mark.parametrize("is_pickled", [False, True])
def test_a_cached_model_needs_no_network(llama, tmp_path, monkeypatch, is_pickled):
    from huggingface_hub import constants

    source = pickled(llama, tmp_path / "copy") if is_pickled else llama
    cached(source, tmp_path / "cache", "some-org/tiny")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    convert(ConvertConfig(source=Path("some-org/tiny"), output=tmp_path / "a.gguf"))
    convert(ConvertConfig(source=llama, output=tmp_path / "b.gguf"))
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()
    with pytest.raises(HotsplitError, match="HF_HUB_OFFLINE is set.*give its folder"):
        hub.find_source(Path("some-org/other"))


def test_an_unreachable_hub_gives_one_line(tmp_path, monkeypatch, capsys):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.chdir(tmp_path)
    assert main(["convert", "some-org/none", "-o", str(tmp_path / "a.gguf")]) == 1
    message = capsys.readouterr().err.strip()
    assert "\n" not in message and "some-org/none" in message and "give its folder" in message
    assert "http://127.0.0.1:9 cannot be reached ([Errno 111] Connection refused), and" in message
    assert not (tmp_path / "a.gguf").exists()


@pytest.mark.parametrize(
    "status, code, what",
    [
        (500, None, "answers with an error (Server error '500"),
        (404, None, "answers with an error (Client error '404"),
        (404, "RepoNotFound", "refuses it ("),
    ],
)
def test_a_hub_that_answers_with_an_error_is_not_called_unreachable(
    tmp_path, monkeypatch, status, code, what
):
    from huggingface_hub import constants

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            if code is not None:
                self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_HEAD = do_GET

        def log_message(self, *arguments: object) -> None:
            pass

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.chdir(tmp_path)
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        endpoint = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        try:
            with pytest.raises(HotsplitError) as caught:
                hub.find_source(Path("some-org/none"))
        finally:
            server.shutdown()
    assert f"{endpoint} {what}" in str(caught.value)


@pytest.mark.parametrize("name", ["models/tiny", "/org/name", "org/name/more", "../name", "name"])
def test_paths_are_not_looked_for_on_the_hub(tmp_path, monkeypatch, name):
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hub, "files_of", lambda *_: pytest.fail("asked the hub"))
    assert hub.find_source(Path(name)) == Path(name)
    with pytest.raises(HotsplitError, match="no such folder"):
        convert(ConvertConfig(source=Path(name), output=tmp_path / "a.gguf"))


# ------------------------------------------------------------------ predictors' input


@pytest.mark.parametrize(
    "option, written, want",
    [(None, None, 0), (1, None, 1), (0, None, 0), (None, 1, 1), (1, 1, 1), (0, 0, 0)],
)
def test_an_unstated_input_of_predictors_is_noted(llama, tmp_path, option, written, want):
    folder = random_dejavu(tmp_path / "p")
    if written is not None:
        (folder / "config.json").write_text(json.dumps({"input_layer_offset": written}))
    report = convert(
        ConvertConfig(
            source=llama,
            output=tmp_path / "a.gguf",
            predictors=folder,
            predictor_input_layer_offset=option,
        )
    )
    predictor = ModelFile.load(report.output).predictor
    assert predictor is not None and predictor.input_layer_offset == want
    is_assumed = option is None and written is None
    assert ("--input-layer-offset" in "".join(report.notes)) == is_assumed


@pytest.mark.parametrize(
    "written, words",
    [
        (1, "but 0 was asked for"),
        (2, "is 2, wanted 0 or 1"),
        (True, "is True"),
        ("1", "is 1, wanted"),
    ],
)
def test_contradictions_about_the_input_are_refused(llama, tmp_path, capsys, written, words):
    folder = random_dejavu(tmp_path / "p")
    (folder / "config.json").write_text(json.dumps({"input_layer_offset": written}))
    command = ["convert", str(llama), "-o", str(tmp_path / "a.gguf"), "--predictors", str(folder)]
    assert main([*command, "--input-layer-offset", "0"]) == 1
    assert words in capsys.readouterr().err
    with pytest.raises(HotsplitError, match="but no predictors"):
        ConvertConfig(source=llama, output=tmp_path / "a", predictor_input_layer_offset=0)


# ---- tokenizers --------------------------------------------------------------------------------


def test_older_tokenizer_files_are_converted(tmp_path, monkeypatch):
    """Like OPT's checkpoints: vocab.json and merges.txt, and a token that begins every text."""
    folder = random_model(tmp_path / "hf", CASES["opt"])
    save_tokenizer(folder, 320)
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    (folder / "tokenizer.json").unlink()
    names = {
        "tokenizer_class": "GPT2Tokenizer",
        "bos_token": END,
        "eos_token": END,
        "unk_token": END,
        "add_bos_token": True,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = [" ".join(merge) for merge in model["merges"]]
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "transformers", None)
        report = convert(ConvertConfig(source=folder, output=tmp_path / "none.gguf"))
    assert any("pip install 'hotsplit[convert]'" in note for note in report.notes)
    report = convert(ConvertConfig(source=folder, output=tmp_path / "m.gguf"))
    assert any("made from older files by transformers" in note for note in report.notes)
    codec = TextCodec.of(ModelFile.load(tmp_path / "m.gguf"))
    text = "the quick brown fox\n  jumps, déjà vu"
    want = AutoTokenizer.from_pretrained(folder, use_fast=True)
    assert codec.encode(text) == want(text).input_ids
    assert codec.tokenizer.decode(codec.encode(text)) == text
    for name, broken, words in (
        ("merges.txt", b"\xff\xfe", "cannot be read as text"),
        ("merges.txt", b"no_such tokens\n", "line 1 is not a merge"),
        ("vocab.json", b"[]", "holds a list, wanted"),
        ("vocab.json", b'{"a": -1}', "a token without an id"),
    ):
        whole = (folder / name).read_bytes()
        (folder / name).write_bytes(broken)
        with pytest.raises(HotsplitError, match=words):
            convert(ConvertConfig(source=folder, output=tmp_path / "n.gguf"))
        (folder / name).write_bytes(whole)


def test_sentencepiece_models_are_read(tmp_path):
    """Oracle: sentencepiece itself. Llama 2's checkpoints often have only tokenizer.model."""
    folder = random_model(tmp_path / "hf", CASES["llama-mqa-tied"])
    (tmp_path / "text").write_text("\n".join(f"the quick brown fox {i} jumps" for i in range(200)))
    spm.SentencePieceTrainer.train(
        input=str(tmp_path / "text"),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=320,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,  # as in Llama 2
    )
    names = {
        "tokenizer_class": "LlamaTokenizer",
        "add_bos_token": True,
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    convert(ConvertConfig(source=folder, output=tmp_path / "m.gguf", layout="stock"))
    model = ModelFile.load(tmp_path / "m.gguf")
    assert model.text("tokenizer.ggml.model") == "llama"
    oracle = spm.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    for text in ("the quick brown fox 123", "jumps\tover  two, déjà vu 狐 🦊\n\n", "x"):
        assert TextCodec.of(model).encode(text) == [1, *oracle.encode(text)]
    (folder / "tokenizer.model").write_bytes(b"not a model")
    report = convert(ConvertConfig(source=folder, output=tmp_path / "n.gguf"))
    assert any("transformers cannot make it" in note for note in report.notes)


def test_every_end_token_of_a_checkpoint_ends_a_text(tmp_path):
    """Llama 3 and Qwen have several; config.json and generation_config.json each name some."""
    folder = random_llama(tmp_path / "hf", eos_token_id=[3, 7])
    (folder / "generation_config.json").write_text('{"eos_token_id": [9, 7, 100000]}')
    convert(ConvertConfig(source=folder, output=tmp_path / "m.gguf"))
    assert TextCodec.of(ModelFile.load(tmp_path / "m.gguf")).end_ids >= {3, 7, 9}
    assert max(TextCodec.of(ModelFile.load(tmp_path / "m.gguf")).end_ids) == 9


def test_files_in_folders_are_not_fetched_but_for_chat_templates():
    from huggingface_hub.utils import filter_repo_objects

    wanted = [
        "config.json",
        "tokenizer.json",
        "chat_template.jinja",
        "model-00001-of-00002.safetensors",
        "additional_chat_templates/tool_use.jinja",
    ]
    others = [
        "onnx/config.json",
        "original/params.json",
        "adapter/a.json",
        "a/b.json",
        "additional_chat_templates/old/x.jinja",
        "modeling_llama.py",
        "pytorch_model.bin",
        "additional/config.json",
        "x/additional_chat_templates/y.jinja",
        "additional_chat_templates_2/x.jinja",
    ]
    found = filter_repo_objects(
        wanted + others,
        allow_patterns=[*hub.DESCRIPTIONS, *hub.SAFETENSORS],
        ignore_patterns=hub.IN_FOLDERS,
    )
    assert sorted(found) == sorted(wanted)
