"""Mistakes of a converter that other tests would miss. Where it could read a wrong value, that
value differs from the right one."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import edit_config, random_dejavu, random_llama, random_model
from reference import rel_error
from safetensors.torch import load_file, save_file
from test_families import GATED, IDS, converted, transformers_logits
from transformers import LlamaConfig, Qwen2Config

from hotsplit import Engine
from hotsplit.artifacts.model_file import ModelFile
from hotsplit.convert import predictors
from hotsplit.convert.convert import convert
from hotsplit.convert.options import ConvertConfig
from hotsplit.errors import HotsplitError
from hotsplit.files import gguf_file


def test_a_window_that_is_not_used_is_none(tmp_path):
    """Old files state it, for which transformers' class writes null."""
    folder = random_model(tmp_path / "hf", Qwen2Config(**GATED, use_sliding_window=False))
    edit_config(folder, lambda c: c.update(sliding_window=16))
    spec = ModelFile.load(converted(folder, tmp_path / "m.gguf")).spec
    assert {a.window for a in spec.attentions} == {None}


@pytest.mark.parametrize(
    "top, inner, theta",
    [(500.0, 900.0, 900.0), (500.0, None, 500.0), (None, 900.0, 900.0), (None, None, 10000.0)],
)
def test_rope_parameters_take_precedence(tmp_path, top, inner, theta):
    folder = random_model(tmp_path / "hf", LlamaConfig(**GATED, hidden_act="relu"))
    rope = {"rope_type": "default"} | ({"rope_theta": inner} if inner else {})
    edit_config(folder, lambda c: c.update(rope_parameters=rope))
    edit_config(folder, lambda c: c.update({"rope_theta": top} if top else {}))
    path = converted(folder, tmp_path / "m.gguf", outtype="f32")
    assert ModelFile.load(path).spec.rotary.theta == theta
    with Engine.load(path, mode="dense") as engine:
        assert rel_error(engine.logits(IDS), transformers_logits(folder)) < 1e-5


def test_predictors_of_twelve_layers_are_read_in_the_order_of_their_numbers(tmp_path):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 12}
    folder = random_llama(tmp_path / "hf", has_tokenizer=False, **sizes)
    random_dejavu(tmp_path / "p", num_layers=12, width=32, num_neurons=64, rank=4)
    report = convert(
        ConvertConfig(source=folder, output=tmp_path / "m.gguf", predictors=tmp_path / "p")
    )
    model = ModelFile.load(report.output)
    assert model.predictor.rank_L == tuple(4 + 8 * layer for layer in range(12))
    for layer in range(12):
        want = torch.load(tmp_path / "p" / f"model_{layer}.pt")["fc2.weight"].numpy()
        got = model.tensors[f"blk.{layer}.ffn_pred_up.weight"].read()
        assert (got == want.astype(np.float16)).all(), layer


def test_a_file_of_predictors_is_not_read_again_for_every_piece(tmp_path, monkeypatch):
    folder, read = random_llama(tmp_path / "hf", has_tokenizer=False), []
    random_dejavu(tmp_path / "p", has_biases=True)
    load = predictors.read_state_dict

    def counted(path):
        read.append(path.name)
        return load(path)

    monkeypatch.setattr(predictors, "read_state_dict", counted)
    monkeypatch.setattr(gguf_file, "PIECE_VALUES", 200)
    config = ConvertConfig(source=folder, output=tmp_path / "m.gguf", predictors=tmp_path / "p")
    convert(config)
    # Each file is read to check it, to get its shapes, to write it, and to compare the output.
    assert len(read) <= 4 * 3 and read.count("model_1.pt") <= 4, read


@pytest.mark.parametrize("name", ["../other.safetensors", "sub/other.safetensors", "/{}"])
def test_files_outside_the_folder_of_an_index_are_refused(tmp_path, name):
    """Even a file that exists and is whole is refused."""
    folder = random_llama(tmp_path / "hf", is_sharded=True)
    index = "model.safetensors.index.json"
    shard = next(iter(json.loads((folder / index).read_text())["weight_map"].values()))
    name = name.format(tmp_path / "other.safetensors")
    target = Path(name) if name.startswith("/") else folder / name
    target.parent.mkdir(exist_ok=True)
    (folder / shard).rename(target)
    edit_config(
        folder,
        lambda i: i["weight_map"].update(
            {t: name for t, s in i["weight_map"].items() if s == shard}
        ),
        index,
    )
    assert target.is_file()
    with pytest.raises(HotsplitError, match="there is no such file"):
        convert(ConvertConfig(source=folder, output=tmp_path / "m.gguf"))


@pytest.mark.parametrize("piece", [7 * 64, 51 * 64])
def test_a_transposed_file_does_not_depend_on_its_pieces(tmp_path, monkeypatch, piece):
    """Pieces whose number of rows is not a multiple of the block size, as with 5,120 columns and
    4 Mi values per piece."""
    folder = random_llama(tmp_path / "hf", hidden_act="silu")
    stock = converted(folder, tmp_path / "s.gguf", layout="stock", outtype="q8_0")
    convert(ConvertConfig(source=stock, output=tmp_path / "want.gguf"))
    monkeypatch.setattr(gguf_file, "PIECE_VALUES", piece)
    convert(ConvertConfig(source=stock, output=tmp_path / "got.gguf"))
    assert (tmp_path / "got.gguf").read_bytes() == (tmp_path / "want.gguf").read_bytes()


MEMORY = """
import sys, threading, time
from pathlib import Path
from hotsplit.files import gguf_file
from hotsplit.convert.convert import convert
from hotsplit.convert.options import ConvertConfig

def kib():
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0])

def watch():
    while not done:
        peak.append(max(peak[-1], kib()))
        time.sleep(0.002)

start, done = kib(), []
peak = [start]
thread = threading.Thread(target=watch)
thread.start()
source, output, outtype = sys.argv[1:]
gguf_file.PIECE_VALUES = 1 << 20
convert(ConvertConfig(source=Path(source), output=Path(output), outtype=outtype))
done.append(1)
thread.join()
print((peak[-1] - start) // 1024)
"""


def test_memory_does_not_grow_with_the_model(tmp_path):
    """Converts more than 140 MiB of weights within 60 MiB of anonymous memory, in pieces of 4 MiB
    instead of 16. benchmarks/conversion_speed.py measures the memory for 1.1 B parameters."""
    shape, name = (18_000, 1024), "model.embed_tokens.weight"
    folder = random_llama(
        tmp_path / "hf",
        hidden_act="silu",
        has_tokenizer=False,
        num_hidden_layers=1,
        hidden_size=1024,
        intermediate_size=32,
        vocab_size=320,
    )
    edit_config(folder, lambda config: config.update(vocab_size=shape[0]))
    tensors = load_file(folder / "model.safetensors")
    large = torch.rand(shape)
    save_file(tensors | {name: large, "lm_head.weight": large + 1}, folder / "model.safetensors")
    size = (folder / "model.safetensors").stat().st_size >> 20
    command = [sys.executable, "-c", MEMORY, str(folder), str(tmp_path / "m.gguf"), "q4_0"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert size > 140 and int(done.stdout) < 60, (size, done.stdout)
