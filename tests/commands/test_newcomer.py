"""What newcomers type: options of other programs, near misses, third-party files."""

import contextlib
import dataclasses
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
from importlib.metadata import version
from itertools import islice
from pathlib import Path

import click
import numpy as np
import pytest
from case_tables import rows_of
from checkpoints import edit_config, random_llama
from models import changed, make_model, make_profile, make_sizes
from paths import ROOT, TESTS
from safetensors.numpy import load_file

import hotsplit
from hotsplit.artifacts.machine_file import Machine
from hotsplit.artifacts.model_file import ModelFile, PredictorInfo
from hotsplit.artifacts.predictor_file import LayerPredictor, Predictors
from hotsplit.artifacts.profile_file import Profile
from hotsplit.cli import main
from hotsplit.commands.all_commands import cli
from hotsplit.commands.help.groups import EXAMPLES
from hotsplit.commands.options import llamacpp_flags, llamacpp_table
from hotsplit.commands.options.llamacpp_flags import translate
from hotsplit.commands.options.llamacpp_table import TABLE
from hotsplit.commands.options.preparation import OUTTYPE
from hotsplit.commands.terminal import prompt_sources
from hotsplit.commands.terminal.prompt_sources import note_unread, prompts_of
from hotsplit.convert.convert import convert
from hotsplit.convert.options import ConvertConfig
from hotsplit.convert.tensor_types import TensorTypes
from hotsplit.errors import HotsplitError
from hotsplit.families.from_config import read_blueprint
from hotsplit.measure.evaluate.verify_conversion import verify
from hotsplit.model.spec import Neurons
from hotsplit.model.weight_types import BY_NAME
from hotsplit.profile.corpus.sources import find_sources
from hotsplit.system.log_lines import lines_on_stderr

OPTIONS = TESTS / "llamacpp" / "options.txt"  # of llama.cpp's programs


def lines_of(capsys, arguments: list[object], code: int) -> list[str]:
    assert main([str(argument) for argument in arguments]) == code
    return capsys.readouterr().err.splitlines()


def line_of(capsys, arguments: list[object], code: int) -> str:
    (line,) = lines_of(capsys, arguments, code)
    return line


# ---- the command line ---------------------------------------------------------------------------


WRONG = """
serv => no such command 'serv', did you mean serve?; see hotsplit --help
rum => no such command 'rum', did you mean run?; see hotsplit --help
quantize => llama.cpp's is convert MODEL -o FILE --outtype q8_0 here; see hotsplit --help
perplexity => no such command 'perplexity'; llama.cpp's is eval here; see hotsplit --help
pull => here: hotsplit run ORG/NAME, which downloads what is not there; see hotsplit --help
list => no such command 'list'; here: hotsplit cache list; see hotsplit --help
rm => no such command 'rm'; here: hotsplit cache clear NAME; see hotsplit --help
ps => a model is loaded as long as its command runs; see hotsplit --help
convert => missing argument 'SOURCE'; see hotsplit convert --help
doctor m => got unexpected extra argument (m); see hotsplit doctor --help
run m -m b -p hi => hotsplit run: there are two models, m and b: leave one out
solve m --machine c -o o => option '-vb' / '--vram' / '--vram-budget'; see hotsplit solve --help
generate m hello => hotsplit generate: a text is given with -p: -p hello
run m hello you => hotsplit run: a text is given with -p: -p 'hello you'
run m --vram 8 GB => a size is one word: write 8GB, not 8 GB
solve m --vram-buget 8GB => '--vram-buget', did you mean --vram-budget?; see hotsplit solve --help
generate m --tfx => no such option '--tfx'; see hotsplit generate --help
generate m --top-kk => did you mean --top-k?; see hotsplit generate --help
generate m -n => generate: option '-n' requires an argument; see hotsplit generate --help
generate m -nab => no such option '-nab'; see hotsplit generate --help
profile m --train-predictors -o x => needs a value, and -o comes next; see hotsplit profile --help
solve m --machine --profile p => needs a value, and --profile comes next; see hotsplit solve --help
generate m -p a -n --temp 0 => -n needs a value, and --temp comes next; see hotsplit generate --help
run m --outtype --chat -p a => needs a value, and --chat comes next; see hotsplit run --help
plan m -hx => no such option '-hx'; see hotsplit plan --help
run m -yes => no such option '-yes', did you mean --yes?; see hotsplit run --help
generate m -n b => 'b' is not a valid integer; see hotsplit generate --help
"""


@pytest.mark.parametrize("arguments, line", rows_of(WRONG))
def test_a_wrong_command_line_gives_one_line(capsys, arguments, line):
    assert line_of(capsys, arguments.split(), 2).endswith(line)


def translated(command: str, *arguments: str) -> tuple[list[str], list[str]]:
    context = click.Context(cli.commands[command], info_name=command)
    return translate(context, arguments)


# What is typed, what is taken, and what is dropped with a note.
TAKEN = f"""
generate -m a.gguf -p x -no-cnv --jinja => a.gguf -p x =>
generate a -ngl 0 => a --device cpu =>
generate a -ngl 99 -fa on => a =>
generate a --n-gpu-layers=all -fa => a =>
generate a -fa off => a => -fa off
generate a -b 512 -ub=64 --mlock --no-mmap => a => -b 512 -ub 64 --mlock --no-mmap
generate a --predict 5 -dev CUDA1 => a --n-predict 5 --device cuda:1 =>
generate a -dev none => a --device cpu =>
generate a -jf b.json --grammar-file=c => a --json-schema @b.json --grammar @c =>
chat a -cnv -i => a =>
serve a -cb --metrics --chat-template-file f => a --chat-template f =>
convert -hf org/name -o b => org/name -o b =>
generate a -p -m -f - => a -p -m -f - =>
generate a -n5 -t2 => a -n5 -t2 =>
generate a -- -m => a -- -m =>
generate --kv-offload -m a -fa => a --kv-offload =>
generate --kv-offload top=64 -m a => a --kv-offload top=64 =>
generate a -ngl {"9" * 5000} => a =>
serve a --reasoning-budget 0 => a --chat-template-kwargs {{"enable_thinking":false}} =>
run a -rea on => a --chat-template-kwargs {{"enable_thinking":true}} =>
chat a --reasoning off => a --chat-template-kwargs {{"enable_thinking":false}} =>
serve a --reasoning-effort low => a --chat-template-kwargs {{"reasoning_effort":"low"}} =>
serve a -rea auto --reasoning-budget -1 --reasoning-effort default => a =>
serve a --reasoning-format deepseek --cache-reuse 0 --fit on => a =>
serve a --cache-reuse 256 --fit off --swa-full -v => a => --cache-reuse 256 --fit off --swa-full -v
serve a --cors-origins=http://x:1,https://y => a --cors http://x:1 --cors https://y =>
run a --spec-draft-model b --spec-draft-n-max 3 => a -md b --draft-max 3 =>
serve a --spec-draft-model b --draft-n 3 => a -md b --draft-n 3 =>
serve -hf o/n:Q4_K_M -hff a.gguf -c 512 => o/n:a.gguf -c 512 =>
serve -hff d/a.gguf -hf o/n => o/n:d/a.gguf =>
generate --kv-offload -hf o/n -p x => o/n --kv-offload -p x =>
plan -hf o/n:Q8_0 --machine m => o/n:Q8_0 --machine m =>
inspect -m a.gguf => a.gguf =>
"""


@pytest.mark.parametrize("given, taken, noted", rows_of(TAKEN))
def test_options_of_llamacpp_are_translated(given, taken, noted, monkeypatch):
    monkeypatch.setattr(llamacpp_flags, "GPU_DEVICES", ("/dev/null",))
    found, notes = translated(*given.split())
    assert [word.replace('": ', '":') for word in found] == taken.split()
    assert " ".join(note.split(" has ")[0].removeprefix("note: ") for note in notes) == noted


def test_layers_for_a_gpu_that_is_not_there_are_noted(monkeypatch):
    monkeypatch.setattr(llamacpp_flags, "GPU_DEVICES", ("/dev/null/none",))
    for layers, shown in (("99", "99"), ("all", "all"), ("9" * 5000, "9" * 9)):
        taken, notes = translated("generate", "a", "-ngl", layers)
        assert taken == ["a"]
        assert notes == [f"note: -ngl {shown} has no effect: there is no NVIDIA GPU here"]
    assert translated("generate", "a", "-ngl", "0") == (["a", "--device", "cpu"], [])


ANSWERED = """
generate a --reset-gpu-index => is PowerInfer's: a plan is used only if --split names it
run a -ngl 20 => llama.cpp's: GPU memory is given in bytes, not in layers: --vram 8GiB makes a plan
chat a -ngl 20 => --vram 8GiB makes a plan, --split PLAN takes one
serve a -ngl 20 => in bytes, not in layers: --vram 8GiB
eval a -ngl 20 => hotsplit solve
serve a -ot x=CPU => --vram 8GiB makes one
serve a -ncmoe 20 => --vram 8GiB makes one
run a --n-cpu-moe 20 => run makes the plan itself
run a -nkvo => run makes the plan itself
solve a -ngl 20 => --vram-budget 8GiB
generate a -cnv => hotsplit chat
chat a -no-cnv => hotsplit generate
generate a --tfs 0.9 => --min-p
generate a --lora x => merge them
generate a --sampling-seq kt => samplers have names
serve a --api-key-file x => HOTSPLIT_API_KEY
eval a -vb => is an option of commands that run a model: hotsplit run MODEL --vram
eval a --vram 8G => hotsplit solve MODEL
eval a --vram-budget=8GiB => --split PLAN
serve a --reasoning-budget 512 => --reasoning-budget 512 is llama.cpp's: thoughts are not counted
serve a --reasoning-budget on => --reasoning-budget on is llama.cpp's
serve a --reasoning 0 => --reasoning 0 is llama.cpp's
serve a --reasoning-format none => "reasoning_format": "none"
serve a -mm b => no model runs with images
serve a --override-kv x=int:1 => the file's keys are used as they are
serve a -hff b.gguf -hf => there are two models
serve a.gguf -hf o/n => there are two models, a.gguf and o/n: leave one out
run a.gguf -m b.gguf => there are two models, a.gguf and b.gguf: leave one out
serve -hff b.gguf => -hff b.gguf is a file of a repository: -hf ORG/NAME
solve -hf o/n => hotsplit convert ORG/NAME -o model.gguf
"""


@pytest.mark.parametrize("given, told", rows_of(ANSWERED))
def test_options_of_others_without_an_equivalent_are_answered(given, told):
    with pytest.raises(click.UsageError) as error:
        translated(*given.split())
    assert told in error.value.message


def llamacpps(letters: str) -> list[tuple[str, bool]]:
    """(name, whether a value follows) of the options of llama-server (s), llama-cli (c) or
    llama-completion (p)."""
    found, head = [], ("", "")
    for line in OPTIONS.read_text().splitlines():
        if not line.startswith(("#", "  ")):
            head = line.split()
        elif line[0] == " " and set(head[0]) & set(letters):
            names = [name for option in line.split() for name in option.split("/")]
            found += [(name, head[1] != "-") for name in names]
    return found


DIFFERENT = {"--kv-offload", "--spec-type", "--device"}  # other values, under the same name


@pytest.mark.parametrize(
    "command, letters, count",
    [("serve", "s", 412), ("run", "cp", 363), ("generate", "p", 260), ("chat", "c", 343)],
)
def test_every_option_of_llamacpp_is_taken_or_answered(command, letters, count):
    """Each stands with its value before the model: what is taken is ours, and neither the model nor
    the value is lost or taken for another argument."""
    known, names = cli.commands[command], ["-h", "--help"]
    context = click.Context(known, info_name=command, help_option_names=names)
    params = [p for p in known.get_params(context) if isinstance(p, click.Option)]
    own = {name: p for p in params for name in (*p.opts, *p.secondary_opts)}
    options = llamacpps(letters)
    assert len(options) >= count
    for name, has_value in options:
        given = [name, *["0"] * has_value, "m.gguf"]
        try:
            taken, notes = translate(context, given)
        except click.UsageError as error:
            begin = (f"{name} is llama.cpp's: ", f"{name} 0 is llama.cpp's: ", f"{name} is for a ")
            assert error.message.startswith(begin), name
            assert len(error.message) > len(name) + 25, name
            continue
        if name in context.help_option_names:  # click keeps those of the first context
            assert taken == given
        elif name in own:
            assert taken == given and (own[name].is_flag != has_value or name in DIFFERENT), name
        elif name in ("-m", "--model", *HUB):
            assert taken == ["0", "m.gguf"], name  # two models, the second of which click refuses
        elif name in ("-hff", "--hf-file"):
            assert taken == ["m.gguf:0"]
        else:
            words, taken = taken[:-1], taken[-1]
            assert taken == "m.gguf" and len(words) <= 2 and len(notes) <= 1, name
            assert not words or words[0] in own, (name, words)
            if words:
                assert own[words[0]].is_flag == (len(words) == 1), (name, words)
            assert all(f"note: {name}" in note and " has no effect: " in note for note in notes)


HUB = ("-hf", "-hfr", "--hf-repo", "-mu", "--model-url")


@pytest.mark.parametrize(
    "option, change",
    [("--swa-full", None), ("-dt", {"values": "none"}), ("--cors-origins", {"text": "--origins"})],
)
def test_the_walk_over_the_options_finds_a_wrong_row(monkeypatch, option, change):
    rows = [
        (names, flag if change is None else dataclasses.replace(flag, **change))
        if option in names.split()
        else (names, flag)
        for names, flag in TABLE
    ]
    rows = [row for row in rows if change or option not in row[0].split()]
    monkeypatch.setattr(llamacpp_table, "TABLE", tuple(rows))
    with pytest.raises(AssertionError):
        test_every_option_of_llamacpp_is_taken_or_answered("serve", "s", 412)


@pytest.mark.parametrize(
    "written, read",
    [("a b\n", "a b"), ("a b\r\n", "a b"), ("a b\n\n", "a b\n"), ("a b", "a b"), ("a\nb ",) * 2],
)
def test_the_newline_that_ends_a_file_is_not_part_of_the_prompt(
    tmp_path, monkeypatch, written, read
):
    """Nor is it with llama.cpp's -f. A text after -p keeps its newline."""
    (tmp_path / "t.txt").write_bytes(written.encode())
    assert prompts_of(None, tmp_path / "t.txt", None) == [read]
    for prompt, file in (("-", None), (None, Path("-"))):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(written.encode())))
        assert prompts_of(prompt, file, None) == [read]
    assert prompts_of(written, None, None) == [written]


def test_a_prompt_from_a_closed_stdin_is_refused(monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(HotsplitError, match="stdin is closed; give the prompt with -p or -f FILE"):
        prompts_of("-", None, None)


def test_a_context_of_zero_is_the_models_own(tmp_path):
    """Users of llama.cpp write -c 0."""
    make_model(sizes=make_sizes(context_length=16)).save(tmp_path / "m.gguf")
    with hotsplit.Engine.load(tmp_path / "m.gguf", device="cpu", context_length=0) as engine:
        assert engine.context_length == 16


def test_a_pipe_is_read_as_a_prompt_and_a_device_is_named(tmp_path):
    """A shell makes one for <(command)."""
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=(tmp_path / "pipe").write_text, args=("Once upon\n",))
    writer.start()
    assert prompts_of(None, tmp_path / "pipe", None) == ["Once upon"]
    writer.join()
    with pytest.raises(HotsplitError, match="^/dev/null: is not a regular file; wanted a prompt"):
        prompts_of(None, Path("/dev/null"), None)


@pytest.mark.parametrize("digits", ["٠١٢٣٤٥٦٧٨٩", "０１２３４５６７８９"])
@pytest.mark.parametrize(
    "line",
    """
solve m --profile p --machine c -o o -vb 8GiB
solve m --profile p --machine c -o o --sweep 1GiB:2GiB
run m --vram 8
generate m -p a -n 12
generate m -p a --temp 0.5
generate m -p a --device cuda:1
generate m -p a -ngl 99
generate m -p a --neuron-cache decay=0.9
generate m -p a --kv-offload top=512
bench m -p 128,512
serve m --port 8080
profile m --corpus t -o o --tokens 25
""".strip().splitlines(),
)
def test_numbers_in_other_digits_are_refused(capsys, tmp_path, monkeypatch, line, digits):
    """Python's int and float accept the digits of all scripts."""
    *arguments, value = line.split()
    value = value.translate(str.maketrans("0123456789", digits))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m").write_bytes(b"")
    assert main([*arguments, value]) in (1, 2)
    (line,) = capsys.readouterr().err.splitlines()
    assert not value.isascii() and any(c in line for c in value if not c.isascii())


# ---- the first minutes --------------------------------------------------------------------------


STUBS = {  # of make setup: a Python that stops where a virtual environment would be made
    "python3": "#!/bin/sh\n[ $1 = -c ] && exit 0\necho python3 $*\nexit 3\n",
    "old": "#!/bin/sh\nexit 1\n",
    "c++": "#!/bin/sh\ncat >/dev/null\nexit 0\n",
    "broken": "#!/bin/sh\necho vector: No such file >&2\nexit 1\n",
}


# Compilers that there are => variables => the line that says what happens.
SET_UPS = """
c++:c++ => => python3 -m venv .venv
clang++:c++ => => python3 -m venv .venv
=> => set-up: no C++17 compiler among c++, g++, clang++: install one
c++:broken g++:broken => => set-up: no C++17 compiler among c++, g++, clang++
c++:c++ => CXX=broken => set-up: no C++17 compiler among broken: install one
c++:c++ => PYTHON=old => set-up: old has to be Python 3.11 or later with venv
"""


@pytest.mark.parametrize("compilers, variables, words", rows_of(SET_UPS))
def test_set_up_looks_for_a_compiler_before_it_downloads(tmp_path, compilers, variables, words):
    for name in ("pyproject.toml", "constraints.txt", "CMakeLists.txt"):
        (tmp_path / name).touch()
    for name in "bin src convert profile measure solver runtime serve report run".split():  # noqa: SIM905
        (tmp_path / name).mkdir()
    (tmp_path / "Makefile").write_text((ROOT / "Makefile").read_text())
    kinds = {name: name for name in ("python3", "old", "broken")}
    for name, kind in (kinds | dict(each.split(":") for each in compilers.split())).items():
        (tmp_path / "bin" / name).write_text(STUBS[kind])
        (tmp_path / "bin" / name).chmod(0o755)
    for name in ("find", "cat", "uname", "mkdir", "touch", "sh"):
        (tmp_path / "bin" / name).symlink_to(shutil.which(name))
    given = variables.split()
    done = subprocess.run(
        [shutil.which("make"), "setup", *given],
        cwd=tmp_path,
        env={"PATH": str(tmp_path / "bin")} | dict(each.split("=") for each in given),
        text=True,
        capture_output=True,
    )
    lines = [line for line in (done.stdout + done.stderr).splitlines() if "find:" not in line]
    assert done.returncode and any(line.startswith(words) for line in lines), lines
    assert ("python3 -m venv .venv" in lines) == words.startswith("python3")


@contextlib.contextmanager
def stdin_as(how, tmp_path, monkeypatch):
    content = b"" if "empty" in how else b"a text\n"
    if "pipe" in how:
        reading, writing = os.pipe()
        os.write(writing, content)
    else:
        (tmp_path / "stdin").write_bytes(content)
        reading = os.open("/dev/null" if how == "null" else tmp_path / "stdin", os.O_RDONLY)
        if how == "read file":
            os.lseek(reading, 0, os.SEEK_END)
    with os.fdopen(reading, "rb") as opened:
        if how.startswith("closed"):
            os.close(writing)
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(opened))
        yield
    if how in ("pipe", "empty pipe"):
        os.close(writing)


HOW = ("pipe", "file", "empty pipe", "empty file", "read file", "null")


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("given", [None, Path("a"), Path("-")])
def test_a_text_on_stdin_that_is_not_read_is_said(tmp_path, monkeypatch, capsys, how, given):
    with stdin_as(how, tmp_path, monkeypatch):
        note_unread(given)
    is_waiting = how in ("pipe", "file") and str(given) != "-"
    told = "note: stdin has a text, which is not read; -f - reads it instead\n"
    assert capsys.readouterr().err == told * is_waiting


@pytest.mark.parametrize("how", [*HOW, "closed pipe", "closed empty pipe"])
def test_a_text_on_stdin_is_appended_to_the_prompt(tmp_path, monkeypatch, capsys, how):
    if how == "pipe":
        how = "closed pipe"  # a text ends where its pipe does
    monkeypatch.setattr(prompt_sources, "PIPE_S", 0.01)
    with stdin_as(how, tmp_path, monkeypatch):
        (prompt,) = prompts_of("Sum this up:", None, None)
    is_read = how in ("closed pipe", "file")
    assert prompt == "Sum this up:" + "\n\na text" * is_read
    told = "note: the text on stdin is appended to the prompt\n" * is_read
    if how == "empty pipe":
        told = "note: stdin is an open pipe without a text so far, and is not read\n"
    assert capsys.readouterr().err == told


# ---- files of others ----------------------------------------------------------------------------


def test_transposing_a_stock_file_of_block_types_is_noted_once(tmp_path, capsys):
    shape = make_sizes(num_layers=3, width=32, num_neurons=64)
    make_model(sizes=shape, activation="silu").save(tmp_path / "f32.gguf")
    config = ConvertConfig(
        source=tmp_path / "f32.gguf", output=tmp_path / "m.gguf", outtype="q8_0", layout="stock"
    )
    convert(config)
    for mode, count in (("exact", 1), ("dense", 0)):  # mode dense uses the file's own matrices
        with lines_on_stderr(), hotsplit.Engine.load(tmp_path / "m.gguf", device="cpu", mode=mode):
            pass
        told = [line for line in capsys.readouterr().err.splitlines() if "transposed" in line]
        assert len(told) == count
        if mode == "exact":
            assert "of 3 layers" in told[0] and "hotsplit convert" in told[0]


REFUSED = """
DbrxForCausalLM => {} => this mixture of experts is not supported
SomeForCausalLM => {"num_experts": 8} => experts are not supported
Step3p7ForCausalLM => {} => other numbers of heads in layers with windows
MiMoV2FlashForCausalLM => {} => values of another width than keys
MambaForCausalLM => {} => recurrent layers
ApertusForCausalLM => {} => an activation with learned numbers
PhimoeForCausalLM => {} => experts chosen one after the other
BertModel => {} => an encoder
Idefics3ForConditionalGeneration => {} => models for images
UnheardOf => {} => is unknown
"""


@pytest.mark.parametrize("name, changes, why", rows_of(REFUSED))
def test_the_refusal_of_a_checkpoint_says_why(name, changes, why):
    with pytest.raises(HotsplitError) as error:
        read_blueprint(Path("config.json"), {"architectures": [name], **json.loads(changes)}, 1)
    line = str(error.value)
    assert f"architecture {name!r}: {why}" in line and "families that run" in line
    assert ("; llama.cpp may run a GGUF of it; the README" in line) == (name in OF_LLAMACPP)


OF_LLAMACPP = ("DbrxForCausalLM", "MambaForCausalLM", "Step3p7ForCausalLM")
OF_LLAMACPP += ("MiMoV2FlashForCausalLM", "ApertusForCausalLM", "PhimoeForCausalLM")


THEIRS = ("step35", "mimo2", "bailingmoe", "rwkv7")


@pytest.mark.parametrize(
    "architecture", [*THEIRS, "bert", "nomic-bert-moe", "clip", "t5encoder", "made-up"]
)
def test_a_refusal_names_llamacpp_if_it_runs_the_architecture(tmp_path, architecture):
    """The oracle is gguf's table of architectures, which is llama.cpp's."""
    with pytest.raises(HotsplitError) as error:
        ModelFile.of(tmp_path, {"general.architecture": architecture}, {})
    assert ("; llama.cpp runs it; known: " in str(error.value)) == (architecture in THEIRS)


UNKNOWN = (("ssm.state_size", "recurrent layers"), ("something.else", "the key is unknown"))
CAPPED = ("attn_logit_softcapping", "scores with a soft cap are not supported")


@pytest.mark.parametrize("key, why", [*UNKNOWN, CAPPED])
def test_the_refusal_of_a_gguf_says_why(tmp_path, key, why):
    model = make_model()
    keys = {**model._own_keys(), **model.extra_keys, f"llama.{key}": np.uint32(8)}
    with pytest.raises(HotsplitError, match=why):
        ModelFile.of(tmp_path, keys | {"general.architecture": "llama"}, model.tensors)
    for name, reason in (
        ("glm5-next", "attention to pooled keys that an indexer chooses"),
        ("eagle3", "an EAGLE draft model, which reads hidden states"),
        ("dflash", "a DFlash draft model, which guesses a block of tokens"),
    ):
        with pytest.raises(HotsplitError, match=f"'{name}': {reason}"):
            ModelFile.of(tmp_path, {"general.architecture": name}, {})


# ---- help, version, completion ------------------------------------------------------------------


def test_a_folder_of_ggufs_is_not_a_checkpoint_and_they_are_named(tmp_path, codec_model, capsys):
    folder = codec_model.parent
    for words in (["run", folder, "-p", "a"], ["convert", folder, "-o", tmp_path / "x.gguf"]):
        line = line_of(capsys, words, 1)
        assert line.startswith(f"hotsplit: {folder}: no checkpoint (config.json), but GGUF files;")
        assert str(next(iter(sorted(folder.glob("*.gguf"))))) in line


def test_the_help_command_prints_what_the_help_option_does(capsys):
    for name in (*cli.commands, None):
        names = [] if name is None else [name]
        assert main(["help", *names]) == 0
        shown = capsys.readouterr().out
        assert main([*names, "--help"]) == 0
        assert shown == capsys.readouterr().out and "Usage: hotsplit" in shown
    assert "no such command 'nothing'" in line_of(capsys, ["help", "nothing"], 2)


def test_every_example_is_a_command_line():
    """The examples are parsed, not run."""
    found = EXAMPLES.strip().splitlines()
    for line in found:
        _, name, *arguments = shlex.split(line)
        cli.commands[name].make_context(name, arguments)
    shown = {name for name, c in cli.commands.items() if "Examples:" in (c.epilog or "")}
    stages = {"convert", "profile", "calibrate", "solve", "generate", "chat", "serve", "eval"}
    assert len(found) > 25 and shown >= stages
    with pytest.raises(click.UsageError):
        cli.commands["solve"].make_context("solve", ["m.gguf"])


def test_the_version_is_that_of_the_package(capsys):
    assert main(["-V"]) == 0
    assert capsys.readouterr().out.split()[-1] == hotsplit.__version__ == version("hotsplit")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_ask_the_program(capsys, shell):
    assert main(["completion", shell]) == 0
    assert f"_HOTSPLIT_COMPLETE={shell}_complete" in capsys.readouterr().out


def test_a_command_name_is_completed():
    words = {"COMP_WORDS": "hotsplit gen", "COMP_CWORD": "1"}
    env = os.environ | words | {"_HOTSPLIT_COMPLETE": "bash_complete"}
    command = [sys.executable, "-m", "hotsplit"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "plain,generate\n"


def test_nothing_else_is_imported_before_ctrl_c_is_handled():
    code = "import sys; was = {*sys.modules}; import hotsplit.cli; print({*sys.modules} - was)"
    command, env = [sys.executable, "-S", "-c", code], {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | env, check=True)
    assert set(eval(done.stdout)) == {"hotsplit", "hotsplit.cli"}


SCRIPT = Path(sys.executable).parent / "hotsplit"


@pytest.mark.skipif(not SCRIPT.exists(), reason="the command is not installed next to Python")
def test_the_script_imports_nothing_before_it_can_answer():
    """Its imports are in a `try`: an interrupt during them prints one line and exits with 130."""
    lines = [line.strip() for line in SCRIPT.read_text().splitlines()]
    code = [line for line in lines if line and line[0] != "#"]
    assert code[:2] == ["try:", "from hotsplit.cli import main"]


# ---- types, sizes, values -----------------------------------------------------------------------


@pytest.mark.parametrize("given, taken", [("Q4_K_S", "q4_k_s"), ("FP16", "f16"), ("q6_K", "q6_k")])
def test_types_in_the_spellings_of_other_programs(capsys, given, taken):
    assert OUTTYPE.convert(given, None, None) == taken
    assert not capsys.readouterr().err
    if taken in BY_NAME:
        types = TensorTypes(outtype="f16", overrides=(f"a={taken.upper()}",))
        assert types.override("a") == taken


def test_types_that_are_never_written():
    for given in ("TQ1_0", "IQ2_XS"):
        with pytest.raises(click.BadParameter, match="cannot be written, wanted one of f32, f16"):
            OUTTYPE.convert(given, None, None)


def test_the_written_file_type_matches_the_tensors(tmp_path):
    """The sources hold f32, whatever their file_type says (3: q4_1, 15: Q4_K_M)."""
    for said, outtype, want in ((3, None, 0), (3, "q8_0", 7), (15, None, 0)):
        keys = {"general.file_type": np.uint32(said)}
        make_model(sizes=make_sizes(width=32, num_neurons=64), extra_keys=keys).save(tmp_path / "a")
        types = {"outtype": outtype, "tensor_types": ("ffn_up=f16",) * (outtype is None)}
        (tmp_path / "a").rename(tmp_path / "a.gguf")
        output = tmp_path / "b"
        convert(ConvertConfig(source=tmp_path / "a.gguf", output=output, force=True, **types))
        number = int(ModelFile.load(tmp_path / "b").extra_keys["general.file_type"])
        assert number == (1 if outtype is None else want)


# ---- the API ------------------------------------------------------------------------------------


# ---- files in the wrong place -------------------------------------------------------------------


def test_the_refusal_of_a_file_of_another_kind_names_the_kind(tmp_path, capsys):
    profile = tmp_path / "p.safetensors"
    make_profile(make_model()).save(profile)
    make_model(path=tmp_path / "m.gguf").save(tmp_path / "m.gguf")
    with pytest.raises(HotsplitError, match="is a safetensors file, as profiles .* machine file"):
        Machine.load(profile)
    with pytest.raises(HotsplitError, match="is a GGUF file, as models and splits are; wanted"):
        Machine.load(tmp_path / "m.gguf")
    (tmp_path / "zeros.txt").write_bytes(bytes(1 << 14))
    with pytest.raises(HotsplitError, match="has NUL bytes, so it is not text"):
        find_sources([tmp_path / "zeros.txt"], "text")


OUTPUTS = """
convert x -o => a.safetensors => .gguf
profile x --corpus y -o => a.gguf => .safetensors
calibrate -o => a.gguf => .json
solve x --profile y --machine z -vb 1G -o => a.safetensors => .gguf or .json
"""


@pytest.mark.parametrize("command, wrong, wanted", rows_of(OUTPUTS))
def test_an_output_is_not_named_as_another_kind_of_file(capsys, command, wrong, wanted):
    line = line_of(capsys, [*command.split(), wrong], 2)
    said = f"{wrong} is named like another kind of file; wanted a name that ends in {wanted}"
    assert said in line


def test_merging_refuses_options_that_it_has_no_use_for(capsys):
    arguments = ["profile", "--merge", "a", "b", "-o", "c.safetensors", "--seed", "1"]
    assert "--seed has no effect with --merge" in line_of(capsys, arguments, 2)


def test_tables_in_a_pipe_have_no_spaces_at_the_ends_of_lines(tmp_path, capsys):
    make_model().save(tmp_path / "m.gguf")
    assert main(["inspect", str(tmp_path / "m.gguf"), "--tensors"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 20 and [line for line in lines if line != line.rstrip()] == []


def test_predictors_may_be_given_as_a_file(tmp_path):
    model = make_model(predictor_rank=4)
    model.save(tmp_path / "with.gguf")
    make_model().save(tmp_path / "base.gguf")
    sizes = (model.spec.most_neurons, model.spec.hidden_size)
    up_FR, down_RD = np.zeros((sizes[0], 4), np.float32), np.zeros((4, sizes[1]), np.float32)
    layers = (LayerPredictor.of(down_RD=down_RD, up_FR=up_FR),) * model.spec.num_layers
    info = dataclasses.replace(model.predictor, rank_L=(4,) * len(layers))
    file = tmp_path / "predictors.safetensors"
    Predictors(model_id=None, info=info, layers=layers).save(file)
    config = ConvertConfig(
        source=tmp_path / "base.gguf", output=tmp_path / "m.gguf", predictors=file
    )
    assert convert(config).has_predictors
    with pytest.raises(HotsplitError, match="is read by this command"):
        convert(dataclasses.replace(config, output=file, force=True))


def test_predictors_are_as_large_as_their_file(tmp_path, capsys):
    weights = np.ones((64, 64), np.float32)
    layers = (LayerPredictor.of(down_RD=None, up_FR=weights, kind="q4_0"),) * 2
    info = PredictorInfo(kind="linear", rank_L=(0, 0), threshold_L=(0.0, 0.0))
    Predictors(model_id=None, info=info, layers=layers).save(tmp_path / "predictors.safetensors")
    assert main(["inspect", str(tmp_path / "predictors.safetensors"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["weight_bytes"] == 2 * 64 * 64 // 32 * 18 < found["file_bytes"]
    assert found["type_L"] == ["q4_0", "q4_0"]


def test_a_checkpoint_folder_is_inspected(tmp_path, capsys):
    folder = random_llama(tmp_path / "hf")
    assert main(["inspect", str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    weights = load_file(folder / "model.safetensors")
    assert found["num_tensors"] == len(weights)
    assert found["num_parameters"] == sum(weight.size for weight in weights.values())
    assert (found["architecture"], found["graph"]) == ("LlamaForCausalLM", "llama")
    assert found["refusal"] is None and len(found["spec"]["layers"]) > 0
    assert main(["inspect", str(folder)]) == 0
    assert re.search(rf"next +hotsplit run {folder}\n", capsys.readouterr().out)
    edit_config(folder, lambda config: config.update(architectures=["DbrxForCausalLM"]))
    assert main(["inspect", str(folder)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "refused by convert" in shown and "mixture of experts is not supported" in shown
    assert "is a folder without config.json; wanted a model" in line_of(
        capsys, ["inspect", tmp_path], 1
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]


# ---- messages -----------------------------------------------------------------------------------


def test_an_interrupted_generation_still_ends_with_its_summary(codec_model, capsys, monkeypatch):
    whole = hotsplit.Engine.generate

    def interrupted(self, *arguments, **options):
        tokens = whole(self, *arguments, **options)
        yield from islice(tokens, 3)
        raise KeyboardInterrupt

    monkeypatch.setattr(hotsplit.Engine, "generate", interrupted)
    line, drafts = lines_of(capsys, ["generate", codec_model, "-p", "ab", "-n", 30], 130)[-2:]
    assert drafts.startswith("[speculation (ngram): drafted nothing")
    assert "decode 2 tokens" in line and line.endswith("stopped by Ctrl-C or a signal]")


def test_a_conversion_that_rounds_says_what_was_compared(tmp_path):
    make_model(sizes=make_sizes(width=32, num_neurons=64)).save(tmp_path / "a.gguf")
    config = ConvertConfig(source=tmp_path / "a.gguf", output=tmp_path / "b.gguf", outtype="q4_0")
    report = convert(config, verify=lambda written: [verify(written).line])
    checked, cost = report.verified.split("; ")
    assert checked.endswith(" tokens, both with the weights as rounded to q4_0")
    assert re.fullmatch(
        r"the rounding itself: KL [\d.e-]+ from the source, same top token \d+%", cost
    )


def test_a_profile_without_silent_neurons_says_what_to_do(
    tmp_path, codec_model, capsys, monkeypatch
):
    """With a text of the user's, or that of the package."""
    monkeypatch.setenv("HOTSPLIT_CACHE", str(tmp_path / "cache"))
    text = tmp_path / "text.txt"
    text.write_text("ab cd " * 200)
    model = ModelFile.load(codec_model)
    notes = {}
    for activation in ("silu", "relu"):
        path = tmp_path / f"{activation}.gguf"
        spec = changed(model.bare_spec, Neurons, activation=activation)
        dataclasses.replace(model, bare_spec=spec).save(path)
        output = tmp_path / f"{activation}.safetensors"
        given = ["--corpus", text] if activation == "silu" else ["--tokens", 1000]
        lines = lines_of(capsys, ["profile", path, *given, "-o", output], 0)
        notes[activation] = [line for line in lines if line.startswith("note: nearly every")]
        assert any("on the text in the package" in line for line in lines) == (activation == "relu")
    (note,) = notes["silu"]
    assert "SiLU" in note
    assert Profile.load(tmp_path / "relu.safetensors").corpora[0].name == "default.txt"
    assert not notes["relu"]
