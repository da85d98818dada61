"""Tests of `inspect`: what it shows for every kind of file, against what was written to it."""

import dataclasses
import json
import os
import shutil
import struct
import subprocess
import sys

import numpy as np
import pytest
from case_tables import rows_of
from models import make_machine, make_model, make_profile, make_sizes
from test_artifacts import make_predictors, one_of_each
from test_runtime import make_split

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.cli import main
from hotsplit.costs.part_bytes import plan_bytes
from hotsplit.files.gguf_file import TensorEntry, array_entry, write_gguf
from hotsplit.inspection.file_summary import to_json
from hotsplit.inspection.gguf_summary import part_of
from hotsplit.system.sizes import format_bytes

KINDS = ["model file", "profile", "machine file", "split file", "predictors"]  # of one_of_each


def refuse_constant(name):
    raise AssertionError(f"{name} is not JSON")


def inspected(path, capsys):
    """The JSON object; asserts that it is strict JSON and the only output."""
    assert main(["inspect", str(path), "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == "" and out.count("\n") == 1
    return json.loads(out, parse_constant=refuse_constant)


def shown(path, capsys, *options):
    assert main(["inspect", str(path), *options]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def refused(path, capsys):
    assert main(["inspect", str(path)]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and str(path) in err
    return err


@pytest.mark.parametrize("index", range(5))
def test_the_kind_is_detected_from_content(tmp_path, capsys, index):
    path, _ = one_of_each(tmp_path)[index]
    odd = tmp_path / "file.txt"
    shutil.copy(path, odd)
    found = inspected(odd, capsys)
    assert found["kind"] == KINDS[index]
    assert found["file_bytes"] == odd.stat().st_size
    assert shown(odd, capsys).startswith(KINDS[index])


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("kind", ["f32", "f16"])
def test_a_model(tmp_path, capsys, is_tied, kind):
    """Bytes are counted again from the shapes: L 3, D 64, F 96, R 5, V 50, and kv width 32."""
    keys = {"tokens": ["a", "b"], "model": "gpt2", "bos_token_id": np.uint32(1)}
    keys = {f"tokenizer.ggml.{name}": value for name, value in keys.items()}
    predicted = {"predictor_rank": 5, "predictor_density": 0.25}
    model = make_model(
        sizes=make_sizes(num_layers=3),
        kind=kind,
        is_tied=is_tied,
        extra_keys=keys | {"tokenizer.chat_template": "{{ x }}"},
        **predicted,
    )
    model.save(tmp_path / "m")
    found = inspected(tmp_path / "m", capsys)
    facts, size = found["model"], {"f32": 4, "f16": 2}[kind]
    assert (found["architecture"], found["refusal"]) == ("llama", None)
    assert (facts["layout"], facts["activation"]) == ("sparse", "relu")
    assert facts["is_tied"] is is_tied
    assert facts["model_id"] == model.model_id
    spec = facts["spec"]
    assert (len(spec["layers"]), spec["hidden_size"], spec["vocab_size"]) == (3, 64, 50)
    assert spec["layers"] == json.loads(to_json(ModelFile.load(tmp_path / "m").bare_spec))["layers"]
    assert facts["predictor"]["rank_L"] == [5, 5, 5]
    assert facts["predictor"]["density_L"] == [0.25] * 3
    tokenizer = found["tokenizer"]
    assert "so how its text is split is not known; give the model's" in tokenizer.pop("refusal")
    assert tokenizer == {
        "is_whole": False,
        "model": "gpt2",
        "num_tokens": 2,
        "special_ids": {"bos": 1},
        "has_chat_template": True,
    }
    parts = {name: amount["num_bytes"] for name, amount in found["by_part"].items()}
    assert parts == {
        "attention": 3 * (64 * (64 + 32 + 32 + 64) * size + 2 * 64 * 4),
        "ffn": 3 * 3 * 96 * 64 * size,
        "predictors": 3 * (5 * 64 + 96 * 5) * 4,
        "embedding": 50 * 64 * size,
        "head": 64 * 4 + (0 if is_tied else 50 * 64 * size),
    }
    assert sum(a["num_bytes"] for a in found["by_type"].values()) == sum(parts.values())
    assert set(found["by_type"]) == {"f32", kind}
    assert len(found["tensors"]) == 2 + (not is_tied) + 3 * 11


def test_tensors_of_one_layer_or_of_all(tmp_path, capsys):
    make_model(sizes=make_sizes(num_layers=12)).save(tmp_path / "m")
    some, every = shown(tmp_path / "m", capsys), shown(tmp_path / "m", capsys, "--tensors")
    assert "blk.0.ffn_up.weight" in some and "blk.1.ffn_up.weight" not in some
    assert "and 99 of the other layers: --tensors" in some
    assert all(f"blk.{layer}.ffn_up.weight" in every for layer in range(12))
    assert "--tensors" not in every
    lines = [line for line in every.splitlines() if "blk.11.ffn_up.weight" in line]
    assert lines[0].split() == ["blk.11.ffn_up.weight", "f32", "96", "x", "64", "ffn", "24,576"]


PARTS = """
attention => blk.0.attn_q.weight blk.10.ffn_norm.weight blk.2.ssm_out.weight
ffn => blk.3.ffn_down_t.weight blk.3.ffn_down.weight blk.3.ffn_gate_exps.weight
predictors => blk.3.ffn_pred_up.bias blk.3.fc1.weight
embedding => token_embd.weight
head => output.weight output_norm.weight
other => rope_freqs.weight blk.2.ssm_in.weight
"""


@pytest.mark.parametrize(("part", "names"), rows_of(PARTS))
def test_the_part_that_a_tensor_belongs_to(part, names):
    assert {part_of(name) for name in names.split()} == {part}


def test_a_profile(tmp_path, capsys):
    model = make_model(sizes=make_sizes(num_layers=2, num_neurons=10))
    frequency_LF = np.zeros((2, 10))
    frequency_LF[0, [7, 3]], frequency_LF[0, 1] = 0.9, 0.2
    frequency_LF[1] = 0.5
    make_profile(model, frequency_LF, num_tokens=100).save(tmp_path / "p")
    found = inspected(tmp_path / "p", capsys)
    assert (found["num_tokens"], found["num_layers"], found["num_neurons"]) == (100, 2, 10)
    assert found["corpora"] == [{"name": "synthetic", "sha256": "0" * 64, "num_tokens": 100}]
    assert found["density_L"] == pytest.approx([0.2, 0.5])
    assert found["density"] == pytest.approx(0.35)
    assert found["hottest_fifth_L"] == pytest.approx([0.9, 0.2])
    assert found["never_fired_L"] == [7, 0]
    out = shown(tmp_path / "p", capsys)
    rows = [line.split() for line in out.splitlines()]
    assert ["density", "0.35"] in rows and ["0", "synthetic", "0" * 64, "100"] in rows
    assert ["0", "0.2", "0.9", "7"] in rows  # the layer, its density, hottest fifth, never fired


def test_predictors_with_a_threshold_that_names_all(tmp_path, capsys):
    make_predictors().save(tmp_path / "p")
    found = inspected(tmp_path / "p", capsys)
    assert found["predictor"]["threshold_L"] == [0.5, "-inf"]
    assert (found["width"], found["num_neurons"], found["has_biases"]) == (8, 10, True)
    assert found["weight_bytes"] == 2 * 4 * (3 * 8 + 10 * 3 + 10)
    assert "-inf" in shown(tmp_path / "p", capsys)


def test_a_split(tmp_path, capsys):
    model = make_model(predictor_rank=4)
    split = make_split(model, [[4, 2, 9], []], dense_on_gpu=False, head_on_gpu=True)
    dataclasses.replace(split, objective_s=0.002, bound_s=0.001).save(tmp_path / "s")
    found = inspected(tmp_path / "s", capsys)
    given = {"context_length": 32, "num_hot": [3, 0], "head_on_gpu": True, "workspace": 2 << 20}
    (gpu,), cpu = plan_bytes(model, dense_on_gpu=[False] * 2, **given)
    assert (found["gpu_bytes"], found["cpu_bytes"]) == (gpu, cpu)
    assert found["vram_budget_bytes"] == split.vram_budget_bytes
    assert (found["num_hot_L"], found["dense_on_gpu"]) == ([3, 0], [False, False])
    assert (found["gap"], found["context_length"], found["status"]) == (0.5, 32, "by hand")
    out = shown(tmp_path / "s", capsys)
    rows = [line.split() for line in out.splitlines()]
    assert ["gap", "0.5"] in rows and ["tokens_per_s", "500"] in rows
    assert ["neurons", *format_bytes(cpu["neurons"]).split()] in rows
    assert found["tokens_per_s"] == 500
    (gpu,) = found["gpus"]
    assert (gpu["budget_bytes"], gpu["layers"]) == (split.vram_budget_bytes, [0, 1])
    assert (gpu["num_dense"], gpu["num_hot"], gpu["has_head"]) == (0, 3, True)


def test_a_split_over_two_gpus_shows_all_that_it_holds(tmp_path, capsys):
    model = make_model(predictor_rank=4)
    split = make_split(model, [[4, 2, 9], [1]], head_on_gpu=True)
    total, first = split.vram_budget_bytes, split.vram_budget_bytes // 3
    hashes = {"profile_sha256": "a" * 64, "machine_sha256": "b" * 64}
    budgets = {"gpu_budget_bytes": (first, total - first), "host_budget_bytes": 7 << 30}
    split = dataclasses.replace(split, home=(0, 1, 1), solve_s=1.25, **hashes, **budgets)
    split.save(tmp_path / "s")
    found, out = inspected(tmp_path / "s", capsys), shown(tmp_path / "s", capsys)
    assert [gpu["budget_bytes"] for gpu in found["gpus"]] == [first, total - first]
    assert [gpu["layers"] for gpu in found["gpus"]] == [[0], [1]]
    assert [gpu["num_hot"] for gpu in found["gpus"]] == [3, 1]
    assert [gpu["has_head"] for gpu in found["gpus"]] == [False, True]
    # Every field of the plan is shown by its own name, except `hot`, of which only the lengths are
    # shown, and `gpu_budget_bytes`, whose values are listed GPU by GPU.
    wanted = {field.name for field in dataclasses.fields(split)} - {"hot", "gpu_budget_bytes"}
    assert wanted <= found.keys()
    assert (found["host_budget_bytes"], found["home"]) == (7 << 30, [0, 1, 1])
    for words in ("a" * 64, "b" * 64, "7.00 GiB", "gpus", "1.25", "workspace"):
        assert words in out, words


def test_a_machine_shows_everything(tmp_path, capsys):
    machine = make_machine(num_gpus=2)
    machine.save(tmp_path / "m")
    found = inspected(tmp_path / "m", capsys)["machine"]
    want = json.loads((tmp_path / "m").read_text())
    del want["format"], want["version"]
    assert found == want
    out = shown(tmp_path / "m", capsys)
    assert all(name in out for name in want["gpus"][0])
    assert "gpus 1" in out and "synthetic CPU" in out and "40 (not measured)" in out


# ---- what the runtime refuses --------------------------------------------------------------


def test_an_unsupported_architecture_is_inspected_with_the_reason(tmp_path, capsys):
    keys = {
        "mamba.block_count": np.uint32(1),
        "mamba.big": np.uint64(2**40),
        "general.name": "bad \x1b[31m name [red]tag[/red]",
        "tokenizer.ggml.tokens": ["<s>"] * 9,
    }
    tensors = {"blk.0.ssm_in.weight": array_entry(np.zeros((4, 8)), "f16")}
    write_gguf(tmp_path / "m", "mamba", keys, tensors)
    found = inspected(tmp_path / "m", capsys)
    assert (found["kind"], found["architecture"], found["model"]) == ("GGUF", "mamba", None)
    assert found["refusal"].startswith("architecture 'mamba': recurrent layers")
    assert found["keys"]["mamba.big"] == 2**40
    assert found["keys"]["tokenizer.ggml.tokens"].endswith("(9 values)")
    assert found["by_part"] == {"other": {"num_tensors": 1, "num_bytes": 64}}
    out = shown(tmp_path / "m", capsys)
    assert "refused by the runtime" in out and "recurrent layers" in out
    assert "\x1b" not in out and "[red]tag[/red]" in out


def test_stdout_that_takes_only_ascii(tmp_path):
    make_model(extra_keys={"general.name": "Ġ ünï"}).save(tmp_path / "m")
    done = subprocess.run(
        [sys.executable, "-m", "hotsplit", "inspect", str(tmp_path / "m")],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        check=True,
        capture_output=True,
    )
    assert b"\\u0120 \\xfcn\\xef" in done.stdout


def test_unsupported_block_types_are_inspected_with_the_reason(tmp_path, capsys):
    """A q8_k block of 256 values has 292 bytes; no file has it."""
    model = make_model(sizes=make_sizes(num_layers=1, width=256, num_neurons=32))
    data = np.zeros((32, 292), np.uint8)
    q8_k = TensorEntry(shape=(32, 256), kind="q8_k", read_rows=lambda a, b: data[a:b])
    keys = {**model._own_keys(), **model.extra_keys}
    write_gguf(tmp_path / "m", "llama", keys, {**model.tensors, "blk.0.ffn_up.weight": q8_k})
    found = inspected(tmp_path / "m", capsys)
    assert "blk.0.ffn_up.weight is in q8_k, which cannot be computed with" in found["refusal"]
    assert found["refusal"].endswith("cannot be converted; use a file of another type")
    assert found["by_type"]["q8_k"] == {"num_tensors": 1, "num_bytes": 32 * 292}
    assert str(tmp_path) not in found["refusal"]


def test_texts_where_numbers_belong_are_a_reason_too(tmp_path, capsys):
    model = make_model()
    keys = {**model._own_keys(), "hotsplit.ffn.threshold": ["a", "b"]}
    write_gguf(tmp_path / "m", "llama", keys, model.tensors)
    assert "'hotsplit.ffn.threshold'" in inspected(tmp_path / "m", capsys)["refusal"]


def test_a_powerinfer_file_is_inspected(tmp_path, capsys):
    make_model().save(tmp_path / "m")
    content = (tmp_path / "m").read_bytes()
    (tmp_path / "m").write_bytes(b"PWRI" + content[4:])
    found = inspected(tmp_path / "m", capsys)
    assert (found["kind"], found["architecture"]) == ("model file", "llama")
    (tmp_path / "m").write_bytes(b"PWRI" + content[4:20])
    assert "not a whole GGUF file" in refused(tmp_path / "m", capsys)


# ---- refusals ------------------------------------------------------------------------------


SAFETENSORS = b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "of an unknown kind"),
        (b"GGU", "of an unknown kind"),
        (b"\x89PNG\r\n\x1a\n" + bytes(40), "of an unknown kind"),
        (b"PK\x03\x04" + bytes(40), "of an unknown kind"),
        (b"def main():\n    pass\n", "of an unknown kind"),
        (b"GGUF", "not a whole GGUF"),
        (b"GGUF" + b"\xff" * 60, "not a whole GGUF"),
        (b'{"format": "another"}', "JSON of format 'another'"),
        (b'\n {"format": ', "not whole"),
        (b"{\xff\xfe}", "cannot be read as text"),
        (b"[1, 2]", "of an unknown kind"),
        (struct.pack("<Q", len(SAFETENSORS)) + SAFETENSORS + bytes(4), "hotsplit convert"),
        (struct.pack("<Q", 9_000) + SAFETENSORS, "ends before"),
        (struct.pack("<Q", 20) + SAFETENSORS, "not JSON, or not whole"),
        (struct.pack("<Q", 2) + b"{}", "of format None"),
        (struct.pack("<Q", 22) + b'{"__metadata__": null}', "of format None"),
    ],
)
def test_a_file_of_no_known_kind_gives_one_line(tmp_path, capsys, content, said):
    (tmp_path / "x").write_bytes(content)
    assert said in refused(tmp_path / "x", capsys)


def test_a_header_above_the_bound_is_not_read(tmp_path, capsys):
    """A sparse file may claim a header of any size, and be that large."""
    with (tmp_path / "x").open("wb") as file:
        file.write(struct.pack("<Q", 1 << 40) + b'{"')
        file.truncate((1 << 40) + 8)
    assert "above the bound of 33,554,432" in refused(tmp_path / "x", capsys)


def test_a_missing_file_and_a_folder(tmp_path, capsys):
    assert "no such file; wanted a model" in refused(tmp_path / "nowhere", capsys)
    assert "is a folder" in refused(tmp_path, capsys)


def test_a_plan_that_contradicts_itself_is_refused(tmp_path, capsys):
    make_split(make_model(), [[4, 2], []]).save(tmp_path / "s")
    content = (tmp_path / "s").read_bytes()
    at = content.rindex(struct.pack("<ii", 4, 2))
    (tmp_path / "s").write_bytes(content[:at] + struct.pack("<ii", 4, 4) + content[at + 8 :])
    assert "distinct" in refused(tmp_path / "s", capsys)
