"""The bundled trained mixture of experts with a draft block: the claims of its README, and each
stage on it, against transformers."""

import json
import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from paths import ROOT
from serving import Served
from test_speculation import Eager
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from hotsplit import Engine
from hotsplit.artifacts.profile_file import Profile
from hotsplit.cli import main
from hotsplit.convert.convert import convert
from hotsplit.convert.options import ConvertConfig
from hotsplit.measure.evaluate.evaluate_config import EvalConfig
from hotsplit.measure.evaluate.quality import evaluate
from hotsplit.options.engine_config import EngineConfig
from hotsplit.options.generation_options import SpeculationOptions
from hotsplit.profile.collect import profile
from hotsplit.profile.corpus.corpus import read_windows
from hotsplit.profile.profile_config import ProfileConfig
from hotsplit.runtime.drafting import drafting

EXAMPLES = ROOT / "examples"
MOE = EXAMPLES / "tiny-moe"
PROMPTS = ["class Parser:\n    def __init__(", "import os\n", "def area(width, height):\n", "for "]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with held-out.txt, f32.gguf and profile.safetensors of 4,096 tokens of that text."""
    folder = tmp_path_factory.mktemp("mixture")
    corpus = [
        EXAMPLES / "tiny-relu" / "bundled_corpus.py",
        "--part",
        "held-out",
        "-o",
        "held-out.txt",
    ]
    subprocess.run([sys.executable, *map(str, corpus)], check=True, cwd=folder)
    convert(ConvertConfig(source=MOE, output=folder / "f32.gguf", outtype="f32"))
    profile(
        ProfileConfig(
            model=folder / "f32.gguf",
            corpora=(folder / "held-out.txt",),
            output=folder / "profile.safetensors",
            max_tokens=4096,
        )
    )
    return folder


@pytest.fixture(scope="module")
def oracle():
    """transformers' model, in f32."""
    return AutoModelForCausalLM.from_pretrained(MOE, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def continuations(oracle):
    """transformers' most likely continuation of each prompt, 32 tokens."""
    # By its own file: AutoTokenizer splits as Qwen does, whatever the file says.
    tokenizer, texts = PreTrainedTokenizerFast.from_pretrained(MOE), []
    for prompt in PROMPTS:
        ids = torch.tensor([tokenizer(prompt).input_ids])
        with torch.inference_mode():
            whole = oracle.generate(ids, max_new_tokens=32, do_sample=False)[0]
        texts.append(tokenizer.decode(whole[ids.shape[1] :], skip_special_tokens=True))
    assert len(set(texts)) == len(texts) and all(texts)
    return texts


def test_the_card_is_true(made):
    """The load and how much a token says about its experts: as measured on all held-out text."""
    metrics = json.loads((MOE / "metrics.json").read_text())
    assert metrics["perplexity"] <= 17
    assert sum(f.stat().st_size for f in MOE.iterdir() if f.is_file()) < 15e6
    shares_LE = np.array(metrics["expert_shares"])
    assert shares_LE.shape == (6, 16) and np.allclose(shares_LE.sum(1), 1)
    bits_L, by_chance_L = (np.array(metrics[f"expert_bits{n}"]) for n in ("", "_shuffled"))
    assert (bits_L > 5 * by_chance_L).all() and bits_L.mean() > 0.7
    counted = Profile.load(made / "profile.safetensors")
    assert (counted.expert_count_LE.sum(1) == 4 * counted.num_tokens).all()
    assert np.allclose(counted.expert_count_LE / (4 * counted.num_tokens), shares_LE, atol=0.05)
    assert np.allclose(counted.density_L, 1 / 4)


def test_perplexity_equals_that_of_transformers(made, oracle):
    config = EvalConfig(
        model=made / "f32.gguf",
        corpora=(made / "held-out.txt",),
        max_tokens=1536,
        engine=EngineConfig(context_length=512),
    )
    with Engine.load(config.model) as engine:
        windows = read_windows(
            config.corpora, engine.codec, context_length=512, max_tokens=1536, seed=config.seed
        ).ids
    losses = []
    for ids_T in windows:
        with torch.inference_mode():
            logits_TV = oracle(ids_T[None, :-1]).logits[0]
        losses.append(torch.nn.functional.cross_entropy(logits_TV, ids_T[1:], reduction="none"))
    report = evaluate(config)
    assert report.num_tokens == len(torch.cat(losses)) == 3 * 511
    assert report.perplexity == pytest.approx(math.exp(torch.cat(losses).mean()), rel=1e-4)


def test_generated_texts_are_those_of_transformers(made, continuations):
    with Engine.load(made / "f32.gguf") as engine:
        for prompt, want in zip(PROMPTS, continuations, strict=True):
            tokens = [token.text for token in engine.generate(prompt, 32, 0.0)]
            assert "".join(tokens) == want


def test_served_answers_are_those_of_transformers(made, continuations):
    with Served(made / "f32.gguf") as served:
        body = {"prompt": PROMPTS, "max_tokens": 32, "temperature": 0}
        status, answer = served.ask("/v1/completions", body)
    assert status == 200
    assert [choice["text"] for choice in answer["choices"]] == continuations


def test_commands_know_experts(made, capsys):
    model, counted = str(made / "f32.gguf"), str(made / "profile.safetensors")
    assert main(["inspect", model]) == 0
    said = capsys.readouterr().out
    # The matrices of experts are 6 x 3 x 512 KiB, of which a token reads a quarter.
    assert "4 of 16 a token" in said and "16.18 MiB of 27.08 MiB" in said
    assert main(["inspect", counted]) == 0
    assert "hottest_fifth" in capsys.readouterr().out
    page = made / "page.html"
    assert main(["report", model, "--profile", counted, "-o", str(page)]) == 0
    text = page.read_text()
    assert "4 of 16 a token" in text and "Experts by layer" in text
    assert "has routers instead of predictors" in text and "--train-predictors" not in text
    capsys.readouterr()


def test_its_block_guesses_right_on_code_and_changes_no_byte(made):
    """Chains of three guesses at all places of texts that begin as modules which it has not seen;
    by the second right one in a row, guesses come from the block's own states."""
    text = (made / "held-out.txt").read_text()
    convert(ConvertConfig(source=MOE, output=made / "q8_0.gguf", outtype="q8_0"))
    checks = []
    with Engine.load(made / "q8_0.gguf", draft_block=True) as engine:
        for start in range(0, 80_000, 10_000):
            prompt = text[start : start + 600]
            want = [token.text for token in engine.generate(prompt, 96, 0.0)]
            with drafting(engine, SpeculationOptions(type="mtp")) as found:
                drafts = Eager(found.begin()._drafter, 3)
                tokens = engine.generate(prompt, 96, 0.0, drafts=drafts)
                assert [token.text for token in tokens] == want
            checks += [accepted for rows, accepted in drafts.heard if rows == 4]
    right = [sum(accepted > place for accepted in checks) for place in range(3)]
    print(right, len(checks))
    assert right[0] > 0.5 * len(checks) and right[2] > 0.5 * right[1] > 10
