"""`hotsplit plan`: predictions from headers alone, and machines by data sheets."""

import dataclasses
import json
import re
import shlex
from collections import Counter
from math import ceil, prod
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from models import (
    byte_level_keys,
    make_inputs,
    make_model,
    make_sizes,
    mixture_spec,
    save_solver_files,
)
from published_headers import HEADERS, Header, keys_of, tensors_of, write, write_parts
from test_experts import mixture
from test_solver_experts import tiny

from hotsplit.artifacts.data_sheets import CARDS, SOURCE, load_machine, machine_of
from hotsplit.artifacts.machine_file import PASS_TOKENS, Figure, Machine
from hotsplit.artifacts.model_file import ModelFile
from hotsplit.artifacts.model_gguf import read_model_gguf
from hotsplit.cli import main
from hotsplit.commands.plan import _draft_place
from hotsplit.commands.run_command import run as run_command
from hotsplit.costs.part_bytes import packed_bytes
from hotsplit.errors import HotsplitError
from hotsplit.files.gguf_reader import header_reach
from hotsplit.inspection.inspect_file import inspect_file
from hotsplit.options.engine_config import EngineConfig
from hotsplit.run import choice as run_choice
from hotsplit.run import default_budgets
from hotsplit.run.choice import Wishes, choose, choose_type, context_of, left_bytes, run_bytes
from hotsplit.run.default_budgets import Room
from hotsplit.run.source import look_at
from hotsplit.runtime.resolved_options import no_drafts_on_gpu
from hotsplit.solver import assumed
from hotsplit.solver.assumed import drawn_experts, zipf_shares
from hotsplit.solver.draft_prediction import DraftGain
from hotsplit.solver.inputs import Inputs
from hotsplit.solver.layer_split import moe_division
from hotsplit.solver.llamacpp_speed import Division, prompt_seconds, step_seconds, whole
from hotsplit.system.sizes import format_bytes, parse_bytes, size_words

CARD = "rtx-4060-8gb"
SPEED = re.compile(r"  this plan +([\d,]+\.\d) tokens/s")
# With each kind of layer that they have, or as many as a key lists.
FEW_LAYERS = {
    "deepseek2": 4,
    "deepseek32": 4,
    "glm-dsa": 4,
    "qwen35": 4,
    "qwen35moe": 4,
    "gemma4": 12,
    "lfm2": 16,
    "lfm2moe": 24,
}
FEW_LAYERS |= {
    "granitehybrid": 6,
    "nemotron_h_moe": 8,
    "kimi-linear": 4,
}  # which have each of their blocks


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HOTSPLIT_CACHE", str(tmp_path / "cache"))


def silu_model(**sizes):
    sizes = make_sizes(num_layers=3, **sizes)
    keys, _ = byte_level_keys()
    return make_model(sizes=sizes, activation="silu", kind="f16", extra_keys=keys)


def planned(capsys, *words: object) -> dict:
    """The report of a plan that is made."""
    capsys.readouterr()
    assert main(["plan", *map(str, words), "--machine", CARD, "--json"]) == 0, (
        capsys.readouterr().err
    )
    return json.loads(capsys.readouterr().out)


# ---- published headers --------------------------------------------------------------------------


def published(tmp_path, monkeypatch, name: str, num_layers: int | None = None) -> Path:
    """A file that has the published header whose name begins so, or that of a model of few layers;
    there are no weights to sample."""
    monkeypatch.setattr("hotsplit.artifacts.model_gguf.sample_bytes", lambda raw: b"")
    header = next(each for each in HEADERS if each.name.startswith(name))
    sizes = (num_layers or header.sizes[0], *header.sizes[1:])
    header = dataclasses.replace(header, sizes=sizes)
    write(tmp_path / "h.gguf", keys_of(header), list(tensors_of(header)))
    return tmp_path / "h.gguf"


def outcome(path, capsys, header: Header, *words: str) -> str:
    """The last line of `plan`, or its speed; `inspect` says of the same files that they are
    refused."""
    write(path, keys_of(header), list(tensors_of(header)))
    code = main(["plan", str(path), "--machine", CARD, *words])
    shown = capsys.readouterr().err
    summary = inspect_file(path)
    refusal = getattr(summary, "refusal", None)
    is_converted = refusal is not None and "first run hotsplit convert" in refusal
    assert (refusal is not None and not is_converted) == header.is_refused, refusal
    last = shown.splitlines()[-1]
    if header.is_refused:
        assert code == 1 and refusal in last and header.words in last, shown
        return last
    assert code == 0 and header.words in shown, shown
    assert last == f"next: hotsplit run {path} {' '.join(words[:2])}"
    return f"{SPEED.search(shown)[1]} tokens/s"


def test_published_headers_end_in_a_plan_or_in_one_true_sentence(tmp_path, capsys, monkeypatch):
    """With few layers."""
    monkeypatch.setattr("hotsplit.artifacts.model_gguf.sample_bytes", lambda raw: b"")
    for header in HEADERS:
        num_layers = FEW_LAYERS.get(header.architecture, 2)
        short = dataclasses.replace(header, sizes=(num_layers, *header.sizes[1:]))
        vram = "1GiB" if header.name.startswith(("Qwen3-30B", "Qwen3.6", "Mixtral")) else "0"
        assert outcome(tmp_path / "h.gguf", capsys, short, "--vram", vram)


def test_gpt_oss_has_the_published_types_and_size(tmp_path):
    """ggml-org/gpt-oss-20b-GGUF has 12.11 GB, 12 MB of them for words and merges, left out here."""
    header = next(each for each in HEADERS if each.name.startswith("gpt-oss"))
    kinds = {name: kind for name, _, kind in tensors_of(header)}
    experts = {kind for name, kind in kinds.items() if name.endswith("_exps.weight")}
    others = {kinds[f"blk.0.attn_{each}.weight"] for each in ("q", "k", "v", "output")}
    assert experts == {"mxfp4"} and others == {kinds["output.weight"]} == {"q8_0"}
    write(tmp_path / "h.gguf", keys_of(header), list(tensors_of(header)))
    assert (tmp_path / "h.gguf").stat().st_size == pytest.approx(12.11e9 - 12e6, rel=1e-3)


# Gigabytes of files on the hub, as its pages say, some in another type, whose sizes depend on fewer
# rules; words and merges are left out here.
PUBLISHED_GB = {
    "phi-2-Q4_K_M": 1.74,  # mav23/phi-2-GGUF
    "DeepSeek-V2-Lite-Chat-Q4_K_M": 10.4,  # mradermacher/DeepSeek-V2-Lite-Chat-GGUF
    "MiniCPM3-4B-Q4_K_M": 2.47,  # openbmb/MiniCPM3-4B-GGUF
    "Qwen2.5-VL-7B-Instruct-Q4_K_M": 4.68,  # benxh/Qwen2.5-VL-7B-Instruct-GGUF
    "stablelm-2-zephyr-1_6b-Q4_K_M": 1.03,  # brittlewis12/stablelm-2-zephyr-1_6b-GGUF
    "gemma-2b-it-Q4_K_M": 1.63,  # narainp/gemma-2b-it-Q4_K_M-GGUF
    "internlm2_5-7b-chat-Q4_K_M": 4.71,  # legraphista/internlm2_5-7b-chat-IMat-GGUF
    "pythia-1.4b-Q8_0": 1.506737664,  # mav23/pythia-1.4b-GGUF
    "granite-4.0-micro-Q4_K_M": 2.1,  # granite4 of ollama's library
    "Kimi-Linear-48B-A3B-Instruct-Q4_K_M": 29.70,  # ymcki/Kimi-Linear-48B-A3B-Instruct-GGUF
    "ERNIE-4.5-21B-A3B-PT-Q4_K_M as q8_0": 23.21,  # bartowski/baidu_ERNIE-4.5-21B-A3B-PT-GGUF
    "ERNIE-4.5-21B-A3B-PT-Q4_K_M as bf16": 43.66,
    "GLM-4.7-Flash-Q4_K_M as q8_0": 31.84,  # bartowski/zai-org_GLM-4.7-Flash-GGUF
    "GLM-4.7-Flash-Q4_K_M as bf16": 59.91,
    "Hunyuan-7B-Instruct-Q4_K_M as bf16": 15.00,  # marcelone/Hunyuan-7B-Instruct-GGUF
    "Qwen3-8B-Q4_K_M as q8_0": 8.71,  # bartowski/Qwen_Qwen3-8B-GGUF
    "Llama-3.3-70B-Instruct-Q4_K_M as q8_0": 74.98,  # bartowski's, of Llama 3.1
}


@pytest.mark.parametrize("name", PUBLISHED_GB)
def test_inspect_says_the_size_of_the_published_file(name, tmp_path):
    base, _, kind = name.partition(" as ")
    (header,) = (each for each in HEADERS if each.name == base)
    header = dataclasses.replace(header, kind=kind or header.kind)
    write(tmp_path / "h.gguf", keys_of(header), list(tensors_of(header)))
    found = inspect_file(tmp_path / "h.gguf").file["file_bytes"]
    assert found == pytest.approx(1e9 * PUBLISHED_GB[name], rel=0.01)


# As published: the draft block's six large matrices and two small ones are left out here.
CENSUS = {"iq3_xxs": 112, "iq2_s": 67, "iq3_s": 57, "iq2_xxs": 48, "iq2_xs": 34, "iq1_s": 20}
CENSUS |= {"q4_k": 21, "iq4_xs": 19, "q2_k": 16, "q6_k": 6, "q3_k": 5, "q5_k": 2, "iq1_m": 1}
CENSUS |= {"q8_0": 98}
# Bytes of 256 values in memory, where they differ from the file's.
TABLE_BYTES = {"iq1": 110, "iq2": 110, "iq3": 136}


def test_a_file_of_many_types_has_the_published_ones_and_size():
    """unsloth's Qwen3.8-27B-UD-Q2_K_XL has 9.83 GB."""
    (header,) = (each for each in HEADERS if "UD-Q2_K_XL" in each.name)
    tensors = list(tensors_of(header))
    counts = Counter(kind for _, _, kind in tensors)
    missing = {kind: count - counts[kind] for kind, count in CENSUS.items()}
    assert sum(missing.values()) == 8 and all(0 <= count <= 3 for count in missing.values())
    assert sum(bytes_of(shape, kind) for _, shape, kind in tensors) == pytest.approx(
        9.83e9, rel=5e-3
    )


def bytes_of(shape: tuple[int, ...], kind: str) -> int:
    block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind.upper()]]
    return prod(shape) // block * block_bytes


def test_plan_and_inspect_say_what_becomes_of_each_type(tmp_path, monkeypatch, capsys):
    path = published(tmp_path, monkeypatch, "Qwen3.8-27B-UD-Q2_K_XL", num_layers=4)
    header = next(each for each in HEADERS if "UD-Q2_K_XL" in each.name)
    header = dataclasses.replace(header, sizes=(4, *header.sizes[1:]))
    matrices = [(shape, kind) for _, shape, kind in tensors_of(header) if kind != "f32"]
    in_file, in_memory = Counter(), Counter()
    for shape, kind in matrices:
        in_file[kind] += bytes_of(shape, kind)
        grown = TABLE_BYTES.get(kind[:3] if kind not in ("iq4_xs",) else "")
        in_memory[kind] += prod(shape) // 256 * grown if grown else bytes_of(shape, kind)
    report = planned(capsys, path, "--vram", "0")
    found = report["types"]
    assert {each["kind"]: each["file_bytes"] for each in found} == in_file
    assert {each["kind"]: each["memory_bytes"] for each in found} == in_memory
    assert [each["num_matrices"] for each in found] == [
        sum(kind == each["kind"] for _, kind in matrices) for each in found
    ]
    vectors = sum(4 * prod(shape) for _, shape, kind in tensors_of(header) if kind == "f32")
    weights = sum(report["cpu_bytes"][i] for i in ("attention", "neurons", "head", "embedding"))
    assert weights == pytest.approx(sum(in_memory.values()) + vectors, rel=0.01)
    (line,) = (line for line in report["reasons"] if line.startswith("types: "))
    before, after = (format_bytes(sum(each.values())) for each in (in_file, in_memory))
    assert line.endswith(f"; in all {before} become at most {after}")
    for each in found:
        words = f"{each['kind']} {format_bytes(each['file_bytes'])} ({each['num_matrices']})"
        assert words in line, line
    assert not any("llama.cpp's speeds" in line for line in report["assumed"])
    on_a_gpu = planned(capsys, path, "--vram", "2GiB")["assumed"]
    given = format_bytes(sum(in_file.values()))
    assert any(f"it reads the file as it is, {given}" in line for line in on_a_gpu), on_a_gpu
    summary = inspect_file(path)
    assert summary.refusal is None and dict(summary.facts)["in memory"] == line[len("types: ") :]


def test_a_line_says_what_a_draft_block_is_expected_to_gain(tmp_path, capsys, monkeypatch):
    """On the CPU alone; beside a GPU see the next test."""
    make_model(kind="q8_0", extra_keys=byte_level_keys()[0]).save(tmp_path / "m.gguf")
    gain = DraftGain(num_drafted=2, token_s=0.1, by_number_s=(0.2, 0.1), accepted=(0.8, 0.6))
    words = ["plan", str(tmp_path / "m.gguf"), "--machine", CARD, "--vram", "0"]
    for num_drafted, says in ((2, "2 in a check"), (0, "none pays")):
        found = dataclasses.replace(gain, num_drafted=num_drafted)
        monkeypatch.setattr(
            "hotsplit.run.forecast.draft_gain", lambda *_, on_gpus, found=found: found
        )
        assert main([*words, "--json"]) == 0
        report = json.loads(capsys.readouterr().out)["drafts"]
        assert report == dataclasses.asdict(found) | {
            "by_number_s": [0.2, 0.1],
            "accepted": [0.8, 0.6],
        }
        assert main(words) == 0
        (line,) = (n for n in capsys.readouterr().err.splitlines() if "draft block" in n)
        assumed = "80% and 60% of its guesses by place are assumed right"
        assert line.split() == f"with its draft block 10.0 tokens/s ({says}; {assumed})".split()


def test_beside_a_gpu_drafts_are_priced_by_the_plan(tmp_path, capsys, monkeypatch):
    """If its steps check any."""
    gain = DraftGain(num_drafted=1, token_s=0.1, by_number_s=(0.1,), accepted=(0.8,))
    given = []

    def priced(*_, on_gpus):
        given.append(on_gpus)
        return gain

    monkeypatch.setattr("hotsplit.run.forecast.draft_gain", priced)
    (keys, vocab_size), path = byte_level_keys(), tmp_path / "m.gguf"
    spec = mixture_spec(make_sizes(width=256, vocab_size=vocab_size), num_neurons=256)
    for kind in ("q8_0", "q4_k"):
        make_model(spec=spec, kind=kind, extra_keys=keys).save(path)
        assert bool(planned(capsys, path)["drafts"]) == (kind == "q8_0")
    (gpus,) = given
    assert gpus.cold_LE.shape == (2, 6)


@pytest.mark.parametrize(
    "kind, gpu_bytes, plan, options, says",
    [
        ("q8_0", (), (), {}, "in main memory beside$"),
        ("q8_0", (1,), (), {}, "is not loaded, since without a plan, a GPU has the whole model"),
        ("q8_0", (1,), (1,), {}, "in main memory beside: the CPU computes it, the GPU checks"),
        ("q8_0", (1,), (1,), {"kv_offload": "on"}, "is not loaded, since a step takes one token"),
        ("q4_k", (1,), (1,), {}, "is not loaded, since a GPU rounds rows of q4_k differently"),
    ],
)
def test_plan_says_where_the_draft_block_is(kind, gpu_bytes, plan, options, says):
    model = make_model(kind=kind, sizes=make_sizes(width=256, num_neurons=256))
    wishes = Wishes(engine=EngineConfig(**options))
    job = SimpleNamespace(choice=SimpleNamespace(model=model, budgets=plan), wishes=wishes)
    found = SimpleNamespace(budgets=gpu_bytes, draft_on_gpu=False)
    assert re.search(says, _draft_place(job, found))
    found.draft_on_gpu = True
    is_there = says.startswith("in main memory beside: ")
    assert ("beside the last layer's attention" in _draft_place(job, found)) == is_there


def test_experts_of_k_quants_are_computed_row_by_row():
    sizes = {"width": 256, "num_neurons": 256, "layout": "stock"}
    model = mixture(kind="q8_0", **sizes)
    experts = {n: e for n, e in mixture(kind="q4_k", **sizes).tensors.items() if "_exps" in n}
    model = dataclasses.replace(model, tensors=model.tensors | experts)
    assert not no_drafts_on_gpu(model, has_plan=True, one_token=False)


@pytest.mark.parametrize(
    "name", ["Mistral-Small-24B-IQ3_XXS", "Qwen2.5-32B-Instruct-IQ2_XXS", "Llama-3.1-8B-TQ1_0"]
)
def test_a_file_in_types_that_are_packed_in_memory_runs_as_it_is(tmp_path, monkeypatch, name):
    path = published(tmp_path, monkeypatch, name, num_layers=2)
    source = look_at(path, None, tmp_path / "none.gguf")
    kind = name.rsplit("-", 1)[1].lower()
    outtype, line = choose_type(source, Wishes(), Room(main=1 << 40))
    assert outtype is None and line.startswith(f"type {kind}: the file's own (")
    model = source.as_it_is(None, "stock")
    assert model is not None and any(entry.packed_from for entry in model.tensors.values())
    packed = left_bytes(model, context_of(model, Wishes()))
    assert packed_bytes(model.tensors) < packed
    _, line = choose_type(source, Wishes(), Room(main=packed - 1))
    assert f"memory, and {format_bytes(packed)} cannot be read from the disk; a smaller" in line
    _, line = choose_type(source, Wishes(), Room(main=packed))
    assert "the rest is read from the disk" in line


def test_a_model_in_several_files_is_planned_as_in_one(tmp_path, capsys):
    header = dataclasses.replace(HEADERS[4], sizes=(2, *HEADERS[4].sizes[1:]))
    write(tmp_path / "whole.gguf", keys_of(header), list(tensors_of(header)))
    first = write_parts(tmp_path, header, 3)
    assert first.name.endswith("-00001-of-00003.gguf")
    whole, parts = (
        planned(capsys, path, "--vram", "0") for path in (tmp_path / "whole.gguf", first)
    )
    same = ("token_s", "cpu_bytes", "reasons", "outtype")
    assert [whole[key] for key in same] == [parts[key] for key in same]


# ---- what is predicted --------------------------------------------------------------------------


def test_a_plan_is_the_one_that_solve_makes(tmp_path, capsys):
    """The figures are the same; the last line is a command line of `run`."""
    model = silu_model(num_neurons=4096)
    save_solver_files(tmp_path, model, c=machine_of(CARD))
    path, options = str(tmp_path / "m.gguf"), ("--vram", "4MiB", "-c", "16", "--outtype", "f16")
    plan = planned(capsys, path, *options)
    solved = ["solve", path, "--machine", CARD, "-vb", "4MiB", "-c", "16", "--json"]
    assert main([*solved, "-o", str(tmp_path / "s.gguf")]) == 0
    want = json.loads(capsys.readouterr().out)
    assert plan["token_s"] == want["objective_s"] and plan["gpu_bytes"] == want["gpu_bytes"]
    assert plan["cpu_only_s"] == want["advice"]["cpu_only_s"]
    assert plan["layer_split"][1] == want["advice"]["layer_split_s"]
    assert plan["fits_from_bytes"] == want["advice"]["fits_from_bytes"]
    words = shlex.split(plan["next"])
    assert words == [
        "hotsplit",
        "run",
        path,
        *("--vram", "4MiB", "--context", "16", "--outtype", "f16"),
    ]
    assert run_command.make_context("run", words[2:]).params["context_length"] == 16


def test_a_text_gets_slower_by_the_keys_and_values_that_it_reads(tmp_path, capsys):
    """The speed in the middle of the context, and at its beginning, where `bench` measures without
    -d."""
    model = silu_model(context_length=4096)
    model.save(tmp_path / "m.gguf")
    options = (tmp_path / "m.gguf", "--vram", "0", "-c", "2048")
    plan = planned(capsys, *options)
    kv_heads, head_dim, value_bytes = 2, 16, 2  # f16
    more = 3 * (1024 - 0.5) * 2 * kv_heads * head_dim * value_bytes
    rate = machine_of(CARD).costs.kv_gb_per_s.median
    assert plan["token_s"] - plan["first_s"] == pytest.approx(more * 1e-9 / rate)
    assert main(["plan", *map(str, options), "--machine", CARD]) == 0
    first = f"(in the middle of 2,048 tokens; {1 / plan['first_s']:,.1f} at the first)"
    assert first in capsys.readouterr().err


def test_a_stock_file_on_the_cpu_is_priced_by_its_own_bytes(tmp_path, capsys):
    """Nothing is transposed there: not even rows of the down projection that no blocks fill."""
    header = next(each for each in HEADERS if each.name == "gemma-3-12b-it-Q4_K_M")
    header = dataclasses.replace(header, sizes=(2, 640, 2048, 4, 1, 256, 1024))
    embedding, *others = tensors_of(header)
    tensors, path = [(*embedding[:2], "q8_0"), *others], tmp_path / "m.gguf"
    write(path, keys_of(header), tensors)
    plan = planned(capsys, path, "--vram", "0")
    stored = [
        prod(shape) // block * size
        for name, shape, kind in tensors
        for block, size in [GGML_QUANT_SIZES[GGMLQuantizationType[kind.upper()]]]
        if re.search(r"ffn_(gate|up|down)\.weight", name)
    ]
    assert plan["cpu_bytes"]["neurons"] == sum(stored)
    solved = ["solve", str(path), "--machine", CARD, "-vb", "0", "-o", str(tmp_path / "s.gguf")]
    assert main([*solved, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    more = report["cpu_bytes"]["neurons"] - sum(stored)
    words = f"transposed to f16 at load, which takes {format_bytes(more)} more; hotsplit convert"
    assert sum(words in note for note in report["notes"]) == 1


def test_what_is_not_known_is_said(tmp_path, capsys):
    """A model whose neurons can be silent has times of mode dense; one that is too large, none."""
    keys, vocab_size = byte_level_keys()
    model = make_model(sizes=make_sizes(vocab_size=vocab_size), kind="f16", extra_keys=keys)
    model.save(tmp_path / "m.gguf")
    plan = planned(capsys, tmp_path / "m.gguf", "--vram", "0")
    assert "which neurons of this relu model fire is not known" in plan["assumed"][0]
    words = f"plan {tmp_path / 'm.gguf'} --machine {CARD} --vram 0 --ram 64KiB"
    assert main(words.split()) == 1
    assert "there are 64.00 KiB of main memory; the" in capsys.readouterr().err.splitlines()[-1]


ASSUMED = "(assumed; --ram gives another size)"


@pytest.mark.parametrize(
    "name, more, ends",
    [  # sizes of main memory that do not hold it, then what the plan is for
        ("Qwen3-8B", (), ["32.00 GiB of main memory are assumed, --ram gives another"]),
        (
            "Llama-3.3-70B",
            (),
            [
                f"and 32.00 GiB of main memory {ASSUMED}; the smallest that works is",
                "64.00 GiB of main memory are assumed, --ram gives another",
            ],
        ),
        (  # experts that do not fit are read from the drive
            "Qwen3-235B",
            (),
            ["32.00 GiB of main memory are assumed, --ram gives another", "limited by the drive: "],
        ),
        (
            "Kimi-K2",
            ("--vram", "0", "--ram", "6GiB"),
            ["and 6.00 GiB of main memory; the smallest"],
        ),
        (
            "Llama-3.3-70B",
            ("--vram", "0"),
            [f"there are 32.00 GiB of main memory {ASSUMED}", "64.00 GiB"],
        ),
    ],
)
def test_an_assumed_main_memory_is_named_and_a_larger_one_is_tried(
    tmp_path, capsys, monkeypatch, name, more, ends
):
    path = published(tmp_path, monkeypatch, name)
    code = main(["plan", str(path), "--machine", CARD, *more])
    lines = capsys.readouterr().err.splitlines()
    told = [line for line in lines if "of main memory" in line]
    assert len(told) == len(ends) and all(end in line for end, line in zip(ends, told, strict=True))
    is_refused = name == "Kimi-K2"
    assert code == is_refused and ("hotsplit: " in lines[-1]) == is_refused
    assert len(lines) == len(set(lines)) and not any(
        "read from the disk" in x for x in lines[:3] if not more
    )
    for line in told:
        for size, unit, count in re.findall(r"([\d.]+) ([GM]iB) \(([\d,]+) bytes\)", line):
            number, unit_bytes = int(count.replace(",", "")), 2 ** {"M": 20, "G": 30}[unit[0]]
            assert (unit == "GiB") == (number >= 2**30)
            assert 0 <= float(size) * unit_bytes - number < 0.01 * unit_bytes + 1


def test_experts_on_the_drive_are_priced_and_more_memory_is_said(tmp_path, capsys, monkeypatch):
    """What is said of 16 GiB more is what a plan for them says; each part of a token's bytes is in
    one memory, and the drive's reads are those of the experts that are missing."""
    path = published(tmp_path, monkeypatch, "Qwen3-30B")
    options = (path, "--vram", "0")
    small, large = (planned(capsys, *options, "--ram", f"{gib}GiB") for gib in (10, 26))
    drive = small["drive"]
    assert drive["limit"] in ("drive", "memory") and large["drive"] is None
    assert drive["more_s"] == pytest.approx(large["token_s"], rel=1e-9)
    assert drive["more_s"] < small["token_s"]
    there, slots = small["cpu_bytes"]["neurons"], small["cpu_bytes"]["neuron_cache"]
    assert there + drive["drive_bytes"] == large["cpu_bytes"]["neurons"] and slots > 0
    assert sum(small["cpu_bytes"].values()) <= 10 << 30
    assert drive["rate"] == pytest.approx(5.6e9)
    # 48 layers of 8 experts: the share that is missing is below that of the bytes, since the most
    # chosen are in memory.
    routed = 48 * 8 * (drive["drive_bytes"] / drive["num_on_drive"])
    share = drive["num_on_drive"] / drive["num_experts"]
    assert 0.2 * share < drive["read_bytes"] / routed < share
    assert small["drafts"] is None
    main(["plan", *map(str, options), "--machine", CARD, "--ram", "10GiB"])
    *_, line, following = capsys.readouterr().err.splitlines()
    assert following.endswith("--vram 0 --ram 10GiB")
    size = format_bytes(drive["drive_bytes"])
    assert f"experts, {size}, are on the drive" in line
    assert f"16.00 GiB more of main memory would bring {1 / drive['more_s']:.1f} tokens/s" in line


@pytest.mark.parametrize(
    "name, more, words",
    [
        ("Qwen3-8B", ("-c", "10000000"), "the model has up to"),
        ("Qwen3-8B", ("--activation", "foo"), "activation 'foo'"),
    ],
)
def test_what_no_memory_would_change_is_refused_once(
    tmp_path, capsys, monkeypatch, name, more, words
):
    path = published(tmp_path, monkeypatch, name)
    assert main(["plan", str(path), "--machine", CARD, *more]) == 1
    assert capsys.readouterr().err.count(words) == 1


@pytest.mark.parametrize("memory, is_said", [("32GiB", False), ("16GiB", True)])
def test_the_cpu_alone_has_a_condition_where_main_memory_does_not_hold_the_model(
    tmp_path, capsys, monkeypatch, memory, is_said
):
    """17.7 GiB."""
    path = published(tmp_path, monkeypatch, "Qwen3-30B")
    words = ("--machine", "rtx-3060-12gb", "--ram", memory)
    assert main(["plan", str(path), *words]) == 0
    shown = capsys.readouterr().err
    (line,) = (line for line in shown.splitlines() if "the CPU alone" in line)
    assert line.endswith("(if main memory held the model)") == is_said


@pytest.mark.parametrize(
    "size_bytes, words",
    [
        (0.5, "it fits: use llama.cpp"),
        (1.0, "it fits: "),
        (1.04, "it fits but for 4%: use llama.cpp"),
        (1.1, "it fits but for 10%: "),
        (1.11, None),
    ],
)
def test_a_model_that_fits_the_card_or_nearly_is_llamacpps(
    tmp_path, monkeypatch, size_bytes, words
):
    # On a small budget it would depend on that.
    monkeypatch.setattr(run_choice, "workspace_bytes", lambda *given, **options: 1 << 16)
    keys, vocab_size = byte_level_keys()
    kwargs = {"sizes": make_sizes(vocab_size=vocab_size), "kind": "f16", "extra_keys": keys}
    make_model(activation="silu", **kwargs).save(tmp_path / "silu.gguf")
    make_model(activation="relu", **kwargs).save(tmp_path / "relu.gguf")
    source = look_at(tmp_path / "silu.gguf", None, tmp_path / "none.gguf")
    size = run_bytes(source.own, 32, 1 << 30)
    wishes = Wishes(outtype="f16")
    room = Room(main=1 << 40, gpus=(ceil(size / size_bytes),))
    told = [line for line in choose(source, wishes, room).lines if "llama.cpp" in line]
    assert (told[0].startswith(words) and len(told) == 1) if words else not told
    silent = look_at(tmp_path / "relu.gguf", None, tmp_path / "none.gguf")
    assert not any("llama.cpp" in line for line in choose(silent, wishes, room).lines)
    on_cpu = choose(source, wishes, Room(main=1 << 40))
    assert not any("llama.cpp" in line for line in on_cpu.lines)


@pytest.mark.parametrize(
    "name, advised",
    [
        ("gpt-oss", ""),
        ("Llama-3.1-8B", ""),
        ("DeepSeek-R1-Distill-Llama", "q4_0"),
        ("gemma-3-27b", ""),
    ],
)
def test_only_a_smaller_type_is_advised(tmp_path, monkeypatch, name, advised):
    path = published(tmp_path, monkeypatch, name, num_layers=2)
    source = look_at(path, None, tmp_path / "none.gguf")
    left = left_bytes(source.stock, context_of(source.stock, Wishes()))
    for room, end in (
        (Room(main=left), "the rest is read from the disk"),
        (Room(main=left - 1), f"and {format_bytes(left)} cannot be read from the disk"),
        (Room(main=1, gpus=(9,)), "take"),
    ):
        _, line = choose_type(source, Wishes(), room)
        advice = f", or --outtype {advised}, a second rounding," if advised else ""
        assert line.endswith(f"{end}; a smaller file{advice} reads less")


@pytest.mark.parametrize(
    "size", ["0", "1GiB", "2.2GiB", "512MiB", "1.5GB", "7", "12.345GiB", "3B", "1000"]
)
def test_a_size_in_the_next_command_is_the_same_and_short(size):
    count = parse_bytes(size)
    assert parse_bytes(size_words(count)) == count and len(size_words(count)) <= max(
        len(size) + 3, 10
    )
    assert size_words(2362232012) == "2.2GiB" and size_words(8 << 30) == "8GiB"


def test_a_model_that_is_faster_on_the_cpu_is_planned_there_as_solve_does(tmp_path, capsys):
    model = silu_model(num_neurons=4096)
    path = tmp_path / "m.gguf"
    model.save(path)
    plan = planned(capsys, path, "--vram", "1GiB")
    solved = ["solve", str(path), "--machine", CARD, "-vb", "1GiB", "--json"]
    assert main([*solved, "-o", str(tmp_path / "s.gguf")]) == 0
    want = json.loads(capsys.readouterr().out)
    assert plan["token_s"] == pytest.approx(want["objective_s"], rel=1e-6)
    assert plan["device"] == "cpu" and not plan["budgets"] and want["num_hot"] == 0
    assert plan["next"] == f"hotsplit run {path} --vram 0"
    fast = load_machine(Path(CARD))
    gpu = dataclasses.replace(
        fast.gpus[0],
        token_s=Figure(best=1e-6),
        kernel_s=Figure(best=1e-7),
        launch_s=Figure(best=1e-7),
    )
    dataclasses.replace(fast, gpus=(gpu,)).save(tmp_path / "fast.json")
    assert (
        main(["plan", str(path), "--vram", "1GiB", "--machine", str(tmp_path / "fast.json")]) == 0
    )
    shown = capsys.readouterr().err
    assert "entirely on the GPU" in shown and f"next: hotsplit run {path} --vram 1GiB" in shown


# ---- machines by data sheets --------------------------------------------------------------------


def test_all_machines_by_data_sheet_are_valid_and_named(tmp_path):
    for card in CARDS:
        for host in ("ddr4-3200", "ddr5-5600x4"):
            machine = load_machine(Path(f"{card}+{host}"))
            machine.save(tmp_path / f"{card}+{host}")
            assert machine == machine_of(card, host) and machine.gpus[0].source == SOURCE
    assert load_machine(Path("RTX-4090-24GB")).gpus[0].memory_bytes == 24 << 30
    rates = [machine_of(CARD, f"ddr5-6000x{n}").best_cpu_bandwidth_gb_per_s for n in (1, 2, 4)]
    assert rates == pytest.approx([0.87 * 48, 0.62 * 96, 0.3 * 96])
    for name in ("rtx-9999", f"{CARD}+ddr9", f"{CARD}+ddr5-5600x3"):
        with pytest.raises(HotsplitError, match=f"no card by data sheet: known are .*{CARD}"):
            load_machine(Path(name))
    with pytest.raises(HotsplitError, match="no such file"):
        load_machine(Path("machine.json"))
    machine_of(CARD).save(tmp_path / "m.json")
    assert Machine.load(tmp_path / "m.json") == machine_of(CARD)


def test_the_room_of_a_card_is_most_of_what_other_programs_leave():
    card = machine_of(CARD)
    room = default_budgets.room_of(card, None, None)
    assert 6 << 30 < room.gpus[0] < card.gpus[0].free_bytes < 8 << 30
    assert default_budgets.room_of(card, (1, 2), None).gpus == (1, 2)
    low = default_budgets.room_of(card, (8 << 30,), None)
    assert low.gpus == room.gpus and "only 7.52 GiB are free on the GPU" in low.lines[0]
    assert default_budgets.room_of(card, (0,), None).gpus == ()
    assert default_budgets.room_of(card, None, "cpu").gpus == ()


def measured_on(tmp_path, name: str, card: str, host: str, depth: int) -> Inputs:
    """A published model on a card beside a host, of which a token reads so many keys."""
    header = next(each for each in HEADERS if each.name.startswith(name))
    write(tmp_path / "h.gguf", keys_of(header), list(tensors_of(header)))
    model = ModelFile.of(tmp_path / "h.gguf", *read_model_gguf(tmp_path / "h.gguf"))
    return make_inputs(
        model, assumed.every_neuron(model), machine_of(card, host), 1, context_length=2 * depth + 1
    )


@pytest.mark.parametrize(
    "name, card, host, cold, measured",
    [  # all but the experts of so many layers on the card; tokens a second, published
        ("Qwen3.6-35B", "rtx-3060-12gb", "ddr5-5600", 40, 42.3),
        ("gpt-oss-20b", "rtx-3060-12gb", "ddr4-3200", 2, 64.0),
        ("Qwen3-30B", "rtx-2070-super-8gb", "ddr5-5600x1", 48, 27.67),
        ("Qwen3-30B", "rtx-2070-super-8gb", "ddr5-5600x1", 32, 37.62),
        ("Qwen3.6-35B", "rtx-5080-16gb", "ddr5-4800", 40, 51.0),
        ("Qwen3.6-35B", "rtx-5080-16gb", "ddr5-4800", 24, 69.6),
        ("Qwen3-8B", "rtx-2080-8gb", "ddr4-3200", 0, 69.34),
        ("Llama-3.1-8B", "rtx-3080-10gb", "ddr4-3200", 0, 111.95),
    ],
)
def test_llamacpp_is_as_fast_as_published(tmp_path, name, card, host, cold, measured):
    """Some rows of docs/plan.md of each kind."""
    inputs = measured_on(tmp_path, name, card, host, 0)
    assert 1 / step_seconds(inputs, moe_division(inputs, cold)) == pytest.approx(measured, rel=0.2)


def test_llamacpps_prompts_are_as_fast_as_published(tmp_path):
    """A card that computes what it holds, and one to which each layer is copied, once a batch."""
    inputs = measured_on(tmp_path, "Qwen2.5-7B", "rtx-2070-super-8gb", "ddr5-5600x1", 0)
    assert 512 / prompt_seconds(inputs, whole(inputs), 512) == pytest.approx(2046, rel=0.3)
    on_cpu = Division(homes=(None,) * inputs.model.spec.num_layers)
    layers = sum(entry.num_bytes for each in inputs.model.layer_tensors for entry in each.values())
    copied = {
        batch: prompt_seconds(inputs, on_cpu, 2048, batch=batch)
        - prompt_seconds(inputs, whole(inputs), 2048)
        for batch in (512, 2048)
    }
    assert copied[512] == pytest.approx(4 * copied[2048])
    assert copied[2048] == pytest.approx(layers / (0.6 * 12e9), rel=0.01)
    alone = prompt_seconds(dataclasses.replace(inputs, budgets=(0,)), on_cpu, 512)
    assert alone > 3 * prompt_seconds(inputs, on_cpu, 512)
    unknown = dataclasses.replace(inputs.gpus[0], name="another")
    machine = dataclasses.replace(inputs.machine, gpus=(unknown,))
    assert prompt_seconds(dataclasses.replace(inputs, machine=machine), on_cpu, 512) is None


def test_a_plan_says_what_it_takes_with_faster_hand_overs(tmp_path, capsys, monkeypatch):
    path = published(tmp_path, monkeypatch, "Qwen3-30B", num_layers=4)
    plan = planned(capsys, path, "--vram", "1GiB")
    assert 0 < plan["fast_s"] < plan["token_s"] and plan["rival_prompt_s"] > 0
    assert plan["prompt_s"] is None
    alone = planned(capsys, path, "--vram", "0")
    assert alone["fast_s"] is alone["rival_prompt_s"] is None
    fast = machine_of(CARD)
    gpu = dataclasses.replace(
        fast.gpus[0], hand_over_s=Figure(best=1e-6), cpu_run_s=Figure(best=1e-6)
    )
    dataclasses.replace(fast, gpus=(gpu,)).save(tmp_path / "fast.json")
    words = ["plan", str(path), "--vram", "1GiB", "--machine", str(tmp_path / "fast.json")]
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fast_s"] is None


def test_the_cpus_prompts_are_priced_by_measured_rates(tmp_path, capsys):
    model = silu_model(num_neurons=4096)
    model.save(tmp_path / "m.gguf")
    machine = machine_of(CARD)
    rates = {"f16": Figure(best=4.0)}
    costs = dataclasses.replace(machine.costs, pass_rows_gb_per_s=rates)
    dataclasses.replace(machine, cpu_costs=costs).save(tmp_path / "c.json")
    words = ["plan", str(tmp_path / "m.gguf"), "--vram", "0", "--json"]
    assert main([*words, "--machine", str(tmp_path / "c.json")]) == 0
    prompt_s = json.loads(capsys.readouterr().out)["prompt_s"]
    layers = sum(e.num_bytes for each in model.layer_tensors for e in each.values())
    assert prompt_s == pytest.approx(layers / 4e9 * 512 / PASS_TOKENS, rel=0.5)
    assert planned(capsys, tmp_path / "m.gguf", "--vram", "0")["prompt_s"] is None


# ---- assumed experts ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "number, used, exponent", [(128, 8, 0.7), (8, 2, 0.0), (60, 4, 2.0), (4, 4, 1.0)]
)
def test_assumed_experts_are_chosen_as_often_as_zipfs_law_says(number, used, exponent):
    id_TK = drawn_experts(number, used, exponent)
    assert id_TK.shape == (assumed.NUM_TOKENS, used) and (np.diff(id_TK, axis=1) > 0).all()
    share_E = zipf_shares(number, used, exponent)
    assert share_E.sum() == pytest.approx(used) and share_E.max() <= 1 + 1e-12
    free_E = share_E < 1 - 1e-9
    weight_E = np.arange(1, number + 1) ** -exponent
    ratio_E = share_E[free_E] / weight_E[free_E]
    assert np.allclose(ratio_E, ratio_E[:1])
    found_E = np.bincount(id_TK.ravel(), minlength=number) / assumed.NUM_TOKENS
    assert np.abs(found_E - share_E).max() < 0.01


def test_layers_that_choose_alike_are_priced_once(monkeypatch):
    """With the prices that each would have had alone."""
    seeds = (tiny(seed) for seed in range(0, 20, 2))
    inputs = next(i for i in seeds if i.model.spec.most_used == 1)
    experts = assumed.assumed_experts(inputs.model, 0.7)
    inputs = dataclasses.replace(inputs, profile=experts)
    problem, other = (inputs.pipeline().model for _ in range(2))
    assert set(problem.twins.values()) == {problem.replayed[0]} and len(problem.replayed) > 1
    vars(other)["twins"] = {layer: layer for layer in other.replayed}
    assert np.array_equal(problem.least_split_s_LN, other.least_split_s_LN)
    assert np.array_equal(problem.hottest_s_2LN, other.hottest_s_2LN)
    experts.routing_LTK[1] = np.roll(experts.routing_LTK[0], 1, axis=0)
    assert dataclasses.replace(inputs).pipeline().model.twins == {0: 0, 1: 1}


# ---- the length of a header ---------------------------------------------------------------------


def test_how_far_a_header_reaches_is_known_from_any_of_its_beginnings(tmp_path):
    """Behind the beginning there are zeros, as in a file of which no more was fetched."""
    header, path = HEADERS[0], tmp_path / "h.gguf"
    write(
        path,
        keys_of(header),
        list(tensors_of(dataclasses.replace(header, sizes=(1, *header.sizes[1:])))),
    )
    with path.open("rb") as file:
        whole = file.read(1 << 14)
    end = header_reach(whole)
    assert 1 << 12 < end < len(whole)
    for length in range(24, end, 211):
        assert header_reach(whole[:length] + bytes(len(whole) - length)) > length
    assert header_reach(whole[:end] + bytes(1 << 10)) == end
