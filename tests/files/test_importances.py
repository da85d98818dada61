"""Importance matrices: both formats of llama.cpp, what `convert` makes of them and what `profile`
writes. The oracles are gguf's reader, the encoder given the weights directly, and transformers'
inputs in f64."""

import struct
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from checkpoints import random_llama, random_model, save_tokenizer
from test_families import GATED
from transformers import AutoModelForCausalLM, MixtralConfig

from hotsplit import Engine
from hotsplit.artifacts.importance_file import Importance, Importances
from hotsplit.artifacts.model_file import ModelFile
from hotsplit.cli import main
from hotsplit.convert.convert import convert
from hotsplit.convert.native.encoder_library import encode_rows
from hotsplit.convert.options import ConvertConfig
from hotsplit.errors import HotsplitError
from hotsplit.files.gguf_file import array_entry, write_gguf
from hotsplit.profile.corpus.corpus import read_windows
from hotsplit.profile.count.input_squares import InputSquares

SIZES = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 320}
NAMES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return random_llama(tmp_path_factory.mktemp("llama") / "hf", hidden_act="silu", **SIZES)


def importances(path: Path, *, layers=2, width=256, experts=None, seed=0) -> Importances:
    random = np.random.default_rng(seed)
    names = NAMES if experts is None else (f"{name}_exps" for name in NAMES[4:])
    return Importances(
        path=path,
        tensors={
            f"blk.{layer}.{name}.weight": Importance(
                np.exp(2 * random.standard_normal((experts or 1) * width)).astype(np.float32),
                np.full(experts or 1, 7, np.float32),
            )
            for layer in range(layers)
            for name in names
        },
        datasets=("a.txt", "b.txt"),
        num_chunks=3,
        chunk_tokens=512,
    )


TAIL = struct.pack("<ii", 3, 5) + b"a.txt"  # 3 chunks of a text


def dat(entries, *, num_entries=None, tail=TAIL) -> bytes:
    """The old format of (name, calls, values)."""
    data = struct.pack("<i", len(entries) if num_entries is None else num_entries)
    for name, calls, values in entries:
        data += struct.pack("<i", len(name)) + name + struct.pack("<ii", calls, len(values))
        data += np.asarray(values, "<f4").tobytes()
    return data + tail


# ---- files --------------------------------------------------------------------------------------


def test_a_file_is_llama_cpps(tmp_path):
    """gguf's reader finds llama.cpp's keys and tensors, and `load` the same importances."""
    path = tmp_path / "i.gguf"
    made = importances(path, experts=3)
    made.save(path)
    reader = gguf.GGUFReader(path)
    keys = {name: field.contents() for name, field in reader.fields.items()}
    assert keys["general.type"] == "imatrix" and keys["imatrix.datasets"] == ["a.txt", "b.txt"]
    assert (keys["imatrix.chunk_count"], keys["imatrix.chunk_size"]) == (3, 512)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    assert len(tensors) == 2 * len(made.tensors)
    for name, each in Importances.load(path).tensors.items():
        squares, counts = tensors[f"{name}.in_sum2"], tensors[f"{name}.counts"]
        assert squares.shape.tolist() == [256, 3] and counts.shape.tolist() == [1, 3]
        want = made.tensors[name].squares.reshape(3, 256)
        assert np.array_equal(squares.data, want) and (counts.data == 7).all()
        assert np.array_equal(each.mean((3, 8, 256)), want / np.float32(7))
        assert each.mean((3, 8, 255)) is None and each.mean((8, 256)) is None


def test_an_expert_that_no_token_chose_has_ones():
    each = Importance(np.arange(6, dtype=np.float32), np.array([2, 0, 1], np.float32))
    assert each.mean((3, 9, 2)).tolist() == [[0, 0.5], [1, 1], [4, 5]]


def test_the_old_format(tmp_path):
    path = tmp_path / "i.dat"
    entries = [(b"blk.0.ffn_up.weight", 4, [1, 2, 3]), (b"output.weight", 0, [5, 6])]
    for tail in (b"", struct.pack("<i", 3), struct.pack("<ii", 3, 0)):
        path.write_bytes(dat(entries, tail=tail))
        assert Importances.load(path).datasets == ()
    path.write_bytes(dat(entries))
    found = Importances.load(path)
    assert found.datasets == ("a.txt",) and found.num_chunks == 3
    means = {name: each.means().tolist() for name, each in found.tensors.items()}
    assert means == {"blk.0.ffn_up.weight": [[0.25, 0.5, 0.75]], "output.weight": [[5, 6]]}


UP = (b"blk.0.ffn_up.weight", 4, [1, 2, 3])
BROKEN = {
    "cannot be read": b"",
    "0 entries": dat([]),
    "entries, wanted 1 to": dat([UP], num_entries=1 << 30),
    "the name of entry 1 has": dat([UP], num_entries=2, tail=struct.pack("<i", -5)),
    "beyond the end": dat([UP])[:40],
    "is there twice": dat([UP, UP]),
    "has 0 values of 4 calls": dat([(b"x", 4, [])]),
    "has 1 values of -1 calls": dat([(b"x", -1, [1])]),
    "is not text": dat([(b"\xff\xfe", 1, [1])]),
    "bytes after the end": dat([UP]) + b"more",
    "NaN or infinite": dat([(b"x", 1, [1, np.nan])]),
    "negative": dat([(b"x", 1, [1, -1])]),
    "nothing but zeros": dat([(b"x", 1, [0, 0])]),
}


@pytest.mark.parametrize("message", BROKEN)
def test_damaged_old_files_are_refused(tmp_path, message):
    path = tmp_path / "i.dat"
    path.write_bytes(BROKEN[message])
    with pytest.raises(HotsplitError, match=message) as caught:
        Importances.load(path)
    assert str(path) in str(caught.value)


ONES, ONE = np.ones((2, 4), np.float32), np.ones((2, 1), np.float32)
WRONG = {
    "of type 'model'": ({"general.type": "model"}, {}),
    "of no tensors": ({}, {}),
    "unknown tensor 'x.else'": ({}, {"x.else": ONES}),
    "no tensor 'x.counts'": ({}, {"x.in_sum2": ONES}),
    "counts \\[1\\] of sums": ({}, {"x.in_sum2": ONES, "x.counts": np.ones(1, np.float32)}),
    "infinite": ({}, {"x.in_sum2": ONES * np.inf, "x.counts": ONE}),
    "'x': negative": ({}, {"x.in_sum2": ONES, "x.counts": -ONE}),
    "imatrix.chunk_count is 'many'": ({"imatrix.chunk_count": "many"}, {}),
    "imatrix.datasets is": ({"imatrix.datasets": [1]}, {"x.in_sum2": ONES, "x.counts": ONE}),
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_gguf_files_are_refused(tmp_path, message):
    path = tmp_path / "i.gguf"
    keys, arrays = WRONG[message]
    entries = {name: array_entry(array, "f32") for name, array in arrays.items()}
    write_gguf(path, "imatrix", {"general.type": "imatrix", **keys}, entries)
    with pytest.raises(HotsplitError, match=message):
        Importances.load(path)


@pytest.mark.parametrize("is_old", [False, True])
def test_inspect_shows_it(tmp_path, capsys, is_old):
    path = tmp_path / "file"
    made = importances(path, experts=None if is_old else 2)
    if is_old:
        entries = [(n.encode(), 1, each.squares) for n, each in made.tensors.items()]
        path.write_bytes(dat(entries))
    else:
        made.save(path)
    assert main(["inspect", str(path)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("importance matrix") and all(name in out for name in made.tensors)
    assert "a.txt" in out


# ---- convert ------------------------------------------------------------------------------------


def converted(source: Path, output: Path, **options):
    report = convert(ConvertConfig(source=source, output=output, **options))
    return ModelFile.load(output), report


def read(path: Path, name: str) -> torch.Tensor:
    """A tensor of a model file in f32."""
    entry = ModelFile.load(path).tensors[name]
    return torch.from_numpy(np.ascontiguousarray(entry.read()))


@pytest.mark.parametrize("kind", ["q4_k", "q6_k", "q4_0"])
def test_matrices_are_searched_by_their_importances(checkpoint, tmp_path, kind):
    """The source is a checkpoint or a GGUF; the embedding has no importances."""
    path = tmp_path / "i.gguf"
    made = importances(path)
    made.save(path)
    f32 = tmp_path / "f32.gguf"
    convert(ConvertConfig(source=checkpoint, output=f32, layout="stock", outtype="f32"))
    options = {"layout": "stock", "outtype": kind, "importances": path}
    ours, report = converted(checkpoint, tmp_path / "a.gguf", **options)
    again, _ = converted(f32, tmp_path / "b.gguf", **options)
    assert not any("importances" in note for note in report.notes)
    for name, entry in ours.tensors.items():
        if len(entry.shape) < 2:
            continue
        each = made.tensors.get(name)
        mean_M = None if each is None else each.mean(entry.shape)[0]
        written = "q6_k" if (name, kind) == ("output.weight", "q4_0") else kind
        assert entry.kind == written, name
        want, _ = encode_rows(read(f32, name), written, importance_M=mean_M)
        plain, _ = encode_rows(read(f32, name), written)
        assert np.array_equal(entry.read(), want), name
        assert np.array_equal(again.tensors[name].read(), want), name
        assert np.array_equal(want, plain) == (each is None), name


def test_a_transposed_down_projection_has_none(checkpoint, tmp_path):
    path = tmp_path / "i.gguf"
    importances(path).save(path)
    with_them, report = converted(checkpoint, tmp_path / "a.gguf", outtype="q4_k", importances=path)
    without, _ = converted(checkpoint, tmp_path / "b.gguf", outtype="q4_k")
    same = {
        name
        for name, entry in with_them.tensors.items()
        if np.array_equal(entry.read(), without.tensors[name].read())
    }
    downs = {f"blk.{layer}.ffn_down_t.weight" for layer in range(2)}
    assert {name for name in same if len(with_them.tensors[name].shape) > 1} == {
        "token_embd.weight",
        "output.weight",
        *downs,
    }
    assert any("2 of 14 matrices of the layers have no importances" in n for n in report.notes)


def test_each_expert_has_its_own(tmp_path):
    sizes = GATED | {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
    config = MixtralConfig(**sizes, num_local_experts=4, num_experts_per_tok=2)
    folder = random_model(tmp_path / "hf", config)
    save_tokenizer(folder, 320)
    path, f32 = tmp_path / "i.gguf", tmp_path / "f32.gguf"
    made = importances(path, experts=4)
    made.save(path)
    convert(ConvertConfig(source=folder, output=f32, layout="stock", outtype="f32"))
    for source in (folder, f32):
        model, _ = converted(
            source,
            tmp_path / f"{source.name}.out.gguf",
            layout="stock",
            outtype="q4_k",
            importances=path,
        )
        for name, each in made.tensors.items():
            entry, values = model.tensors[name], read(f32, name)
            for expert, mean_M in enumerate(each.mean(entry.shape)):
                want, _ = encode_rows(values[expert], "q4_k", importance_M=mean_M)
                assert np.array_equal(entry.read()[expert], want), (name, expert)


OTHERS = {
    "has 'blk.2.attn_k.weight', which the model lacks": {"layers": 3},
    "128 importances of 'blk.0.attn_q.weight', of which the model has \\[256, 256\\]": {
        "width": 128
    },
    "has none of its matrices": {"layers": 0},
}


@pytest.mark.parametrize("message", OTHERS)
def test_those_of_another_model_are_refused(checkpoint, tmp_path, message):
    path = tmp_path / "i.gguf"
    made = importances(path, **OTHERS[message])
    other = {"output.weight": Importance(np.ones(256, np.float32), np.ones(1, np.float32))}
    replace(made, tensors={**made.tensors, **other}).save(path)
    with pytest.raises(HotsplitError, match=message):
        converted(checkpoint, tmp_path / "a.gguf", outtype="q4_k", importances=path)
    assert not (tmp_path / "a.gguf").exists()


# ---- profile ------------------------------------------------------------------------------------


def squares_ref(folder: Path, windows) -> dict[str, tuple[torch.Tensor, int]]:
    """f64 sums of squares of the inputs of transformers' linear layers, and the numbers of
    tokens."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    found: dict[str, tuple[torch.Tensor, int]] = {}

    def add(name):
        def hook(module, given):
            x_TM = given[0].reshape(-1, given[0].shape[-1])
            sums, count = found.get(name, (0, 0))
            found[name] = sums + x_TM.square().sum(dim=0), count + len(x_TM)

        return hook

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(add(name))
    with torch.inference_mode():
        for ids_T in windows:
            model(ids_T[None])
    return found


def profiled(folder: Path, tmp_path: Path) -> tuple[Importances, list[torch.Tensor]]:
    """What `profile --imatrix` writes, and the windows that it reads."""
    model, text, out = tmp_path / "m.gguf", tmp_path / "t.txt", tmp_path / "i.gguf"
    convert(ConvertConfig(source=folder, output=model, outtype="f32"))
    text.write_text("the quick brown fox jumps over the lazy dog. " * 30)
    command = ["profile", str(model), "--corpus", str(text), "-o", str(tmp_path / "p.safetensors")]
    assert main([*command, "--imatrix", str(out)]) == 0
    spec = ModelFile.load(model).spec
    with Engine.load(model, device="cpu") as engine:
        found = read_windows(
            (text,),
            engine.codec,
            context_length=engine.context_length,
            max_tokens=131_072,
            seed=0,
            text_key="text",
            must_fill=False,
            vocab_size=spec.vocab_size,
        )
    return Importances.load(out), list(found.ids)


def test_profile_adds_up_what_transformers_sees(checkpoint, tmp_path):
    found, windows = profiled(checkpoint, tmp_path)
    wanted = squares_ref(checkpoint, windows)
    assert found.datasets == ("t.txt",) and found.num_chunks == len(windows)
    assert len(found.tensors) == 14
    attention, feed_forward = "qkvo", ("gate", "up", "down")
    modules = [f"self_attn.{part}_proj" for part in attention]
    modules += [f"mlp.{part}_proj" for part in feed_forward]
    theirs = dict(zip(NAMES, modules, strict=True))
    for layer in range(2):
        for name, source in theirs.items():
            sums, count = wanted[f"model.layers.{layer}.{source}"]
            each = found.tensors[f"blk.{layer}.{name}.weight"]
            assert each.count.tolist() == [count] == [sum(map(len, windows))]
            assert np.allclose(each.squares, sums.numpy(), rtol=1e-4)
            assert not np.allclose(each.squares[::-1], sums.numpy(), rtol=1e-1)


def test_profile_adds_up_the_inputs_of_each_expert(tmp_path):
    sizes = GATED | {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2}
    config = MixtralConfig(**sizes, num_local_experts=5, num_experts_per_tok=2)
    folder = random_model(tmp_path / "hf", config)
    save_tokenizer(folder, 320)
    found, windows = profiled(folder, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    seen: dict[int, list] = {0: [], 1: []}
    for layer, block in enumerate(model.model.layers):
        block.mlp.experts.register_forward_pre_hook(
            lambda module, given, layer=layer: seen[layer].append((given[0], given[1]))
        )
    with torch.inference_mode():
        for ids_T in windows:
            model(ids_T[None])
    for layer, block in enumerate(model.model.layers):
        x_TD = torch.cat([x.reshape(-1, 64) for x, _ in seen[layer]]).double()
        chosen_TK = torch.cat([chosen.reshape(-1, 2) for _, chosen in seen[layer]])
        each = {
            n: found.tensors[f"blk.{layer}.ffn_{n}_exps.weight"] for n in ("gate", "up", "down")
        }
        for expert in range(5):
            own_TD = x_TD[(chosen_TK == expert).any(dim=1)]
            gate_TF, up_TF = (own_TD @ block.mlp.experts.gate_up_proj[expert].double().T).chunk(
                2, dim=1
            )
            hidden_TF = torch.nn.functional.silu(gate_TF) * up_TF
            for name, input_TM in (("gate", own_TD), ("up", own_TD), ("down", hidden_TF)):
                assert each[name].count[expert] == len(own_TD) > 0
                sums_M = each[name].squares.reshape(5, -1)[expert]
                want_M = input_TM.square().sum(dim=0).detach().numpy()
                assert np.allclose(sums_M, want_M, rtol=1e-3, atol=1e-9), (layer, expert, name)


def test_sums_continue_from_where_they_were_saved(checkpoint, tmp_path):
    """Half of the windows before, half after a load, give the sums of all."""
    path = tmp_path / "m.gguf"
    convert(ConvertConfig(source=checkpoint, output=path, outtype="f32"))
    windows = torch.randint(0, 320, (4, 24), generator=torch.Generator().manual_seed(0))
    model = ModelFile.load(path)
    whole, first, second = (InputSquares(model) for _ in range(3))
    with Engine.load(path, device="cpu") as engine:
        for counter, part in ((whole, windows), (first, windows[:2]), (second, windows[2:])):
            if counter is second:
                second.load(first.arrays())
            with engine.observe(counter.observe, counter.wants):
                for ids_T in part:
                    engine.hidden(ids_T)
    sums, again = whole.arrays(), second.arrays()
    assert sums.keys() == again.keys() and all(sums[k].sum() > 0 for k in sums)
    assert all(torch.allclose(sums[k], again[k], rtol=1e-12) for k in sums)
    assert not any(torch.equal(sums[k], first.arrays()[k]) for k in sums)
