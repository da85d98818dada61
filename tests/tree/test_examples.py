"""The scripts in examples/ run on the bundled model and do what they say."""

import ast
import importlib.util
import math
from pathlib import Path

import forked
import pytest
import torch
from paths import ROOT
from transformers import AutoModelForCausalLM, AutoTokenizer

from hotsplit import Engine, HotsplitError
from hotsplit.convert.convert import convert
from hotsplit.convert.options import ConvertConfig

TINY = ROOT / "examples" / "tiny-relu"
SCRIPTS = sorted((ROOT / "examples").glob("*.py"))
TEXT = "def area(width, height):\n    return width * height\n"


AS_A_PROGRAM = """
import runpy, sys
sys.argv[0] = {script!r}
runpy.run_path({script!r}, run_name="__main__")
"""


def run(name: str, *arguments: str):
    """The return value of a script's `main`."""
    path = ROOT / "examples" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"example_{name}", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main(arguments)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("examples") / "model.gguf"
    convert(ConvertConfig(source=TINY, output=path, outtype="f32"))
    return str(path)


def perplexity_by_transformers(text: str, ids: list[int]) -> float:
    oracle = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()
    with torch.inference_mode():
        loss = oracle(torch.tensor([ids]), labels=torch.tensor([ids])).loss
    return math.exp(loss.item())


def test_all_scripts_are_run_here():
    tested = {
        node.args[0].value
        for node in ast.walk(ast.parse(Path(__file__).read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "run"
        and isinstance(node.args[0], ast.Constant)
    }
    assert {path.stem for path in SCRIPTS} == tested


def test_generate_writes_the_most_likely_tokens(model, capsys):
    text = run("generate", model, "--tokens", "5", "--prompt", TEXT)
    with Engine.load(model) as engine:
        ids = engine.codec.encode(TEXT)
        for _ in range(5):
            ids = [*ids, int(engine.logits(ids)[-1].argmax())]
    assert AutoTokenizer.from_pretrained(TINY).decode(ids) == TEXT + text and text
    assert text in capsys.readouterr().out


def test_logits_score_texts_as_transformers_does(model):
    shuffled = "height * width return def area"
    right, wrong = run("logits", model, TEXT, shuffled)
    with Engine.load(model) as engine:
        ids = engine.codec.encode(TEXT)
    assert right == pytest.approx(perplexity_by_transformers(TEXT, ids), rel=1e-4)
    assert right < wrong


def test_a_text_without_a_second_token_has_no_perplexity(model):
    with pytest.raises(HotsplitError, match="'a' has fewer than two tokens; give a longer text"):
        run("logits", model, "a")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_wrong_model_gives_one_line(script):
    """The line says that a folder is not a model file; the script itself names one."""
    more = () if script.stem in ("generate", "observe", "speculate") else ("text",)
    code = AS_A_PROGRAM.format(script=str(script))
    done = forked.run_python(code, TINY, *more, server="command")
    assert done.returncode == 1 and "is a folder; wanted a model file" in done.stderr
    assert done.stderr.count("\n") == 1 and "build/demo/model.gguf" in script.read_text()


def test_observe_counts_what_fires(model):
    density = run("observe", model, "--text", TEXT * 8)
    assert list(density) == list(range(6))
    assert 0.02 < sum(density.values()) / 6 < 0.25  # the model's card: 11 %
    assert density[0] == max(density.values())


def test_chat_answers_every_message(model, capsys):
    answers = run(
        "chat_loop", model, "hello", "again", "--chat-template", "chatml", "--tokens", "6"
    )
    said = capsys.readouterr().out
    assert len(answers) == 2 and all(answers)
    assert said.count("> ") >= 2 and "[0 kept" in said  # nothing precedes the first turn


def test_texts_generated_together_equal_those_generated_alone(model):
    prompts = ["def main():", "class Reader:"]
    together = run("several_prompts", model, *prompts, "--tokens", "8")
    assert together == [
        run("several_prompts", model, prompt, "--tokens", "8")[0] for prompt in prompts
    ]
    assert together[0] != together[1]


def test_branches_are_scored_as_whole_texts(model):
    branches = [" width * height", " import os"]
    stem = "def area(width, height):\n    return"
    scores = run("fork", model, "--prompt", stem, *branches)
    with Engine.load(model) as engine:
        ids = engine.codec.encode(stem)
        for branch, score in zip(branches, scores, strict=True):
            tokens = engine.codec.encode(branch)
            log_p_TV = engine.logits([*ids, *tokens]).log_softmax(-1)
            places = range(len(ids) - 1, len(ids) + len(tokens) - 1)
            assert score == pytest.approx(log_p_TV[places, tokens].sum().item(), rel=1e-5)
    assert scores[0] > scores[1]


def test_guesses_do_not_change_the_text(model, capsys):
    guessed, plain, _ = run(
        "speculate", model, "--tokens", "32"
    )  # the number of right guesses depends on timing
    assert guessed == plain and len(plain) > 32
    assert "same text: True" in capsys.readouterr().out
