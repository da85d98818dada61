"""The comparison of a written file with its source: correct files pass by a wide margin, and
slightly wrong ones are refused.

Oracle: transformers."""

import dataclasses
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import edit_config, random_llama, random_model
from models import changed as changed_spec
from spec_keys import spec_keys
from test_families import CASES, FALCON, GATED, OPT
from transformers import AutoModelForCausalLM, FalconConfig, LlamaConfig, OPTConfig

from hotsplit import Engine
from hotsplit.artifacts.model_file import ModelFile
from hotsplit.convert import convert as convert_module
from hotsplit.convert.convert import convert
from hotsplit.convert.options import ConvertConfig
from hotsplit.errors import HotsplitError
from hotsplit.measure.evaluate import verify_conversion
from hotsplit.measure.evaluate.verify_conversion import BOUND, Verification, text_token_ids, verify
from hotsplit.model.rope import NO_SCALING, RopeScaling
from hotsplit.model.spec import Neurons, Norm, Rotary

OUTTYPES = ("f32", "f16", "bf16", "q8_0", "q4_0")
# Right files must be this many times below BOUND. The largest difference from transformers measured
# with right small files, of all families and types, was 9e-7.
MARGIN = 20


def verification(source: Path, output: Path, outtype: str) -> Verification:
    found: list[Verification] = []

    def check(written):
        found.append(verify(written))
        return [found[0].line]

    convert(ConvertConfig(source=source, output=output, outtype=outtype, force=True), verify=check)
    return found[0]


RIGHT = {
    "llama": OUTTYPES,
    "qwen3": ("bf16", "q8_0"),
    "opt-norm-after": ("q4_0",),
    "falcon-40b": ("f16",),
    "phi3": ("q4_0",),
}


@pytest.mark.parametrize("case", RIGHT)
def test_right_files_are_far_below_the_bound_in_every_type(tmp_path, case):
    folder = random_model(tmp_path / "hf", CASES[case])
    for outtype in RIGHT[case]:
        error = verification(folder, tmp_path / "m", outtype).relative_error
        assert error is not None and error < BOUND / MARGIN, outtype


SMALL = GATED | {"initializer_range": 0.02}
LINEAR = {"rope_type": "linear", "factor": 1.1, "rope_theta": 1e4}


YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "rope_theta": 1e4,
    "original_max_position_embeddings": 64,
}


def spec(kind, **changes):
    def mutated(plan):
        found = changed_spec(plan.spec, kind, **changes)
        if kind is Norm:
            last = dataclasses.replace(plan.spec.output_norm, **changes)
            found = dataclasses.replace(found, output_norm=last)
        return dataclasses.replace(plan, spec=found, keys=spec_keys(found))

    return mutated


def changed(**changes):
    return lambda plan: dataclasses.replace(plan, **changes)


def names_exchanged(plan):
    """Gates are taken for ups, and ups for gates."""
    other = {"ffn_gate": "ffn_up", "ffn_up": "ffn_gate"}

    def name_of(source):
        return ".".join(other.get(part, part) for part in plan.name_of(source).split("."))

    return dataclasses.replace(plan, name_of=name_of)


# For each mistake: a checkpoint's config, and a function that makes the mistake in what was read.
MUTATIONS = {
    "rows not permuted": (LlamaConfig(**SMALL), changed(rows={})),
    "names": (LlamaConfig(**SMALL), names_exchanged),
    "linear factor": (
        LlamaConfig(**SMALL, rope_parameters=LINEAR),
        spec(Rotary, scaling=NO_SCALING),
    ),
    "yarn factor": (
        LlamaConfig(**SMALL, rope_parameters=YARN),
        spec(Rotary, scaling=RopeScaling(kind="yarn", factor=3.0, original_length=64)),
    ),
    "yarn magnitude": (
        LlamaConfig(**SMALL, rope_parameters=YARN),
        spec(
            Rotary,
            scaling=RopeScaling(kind="yarn", factor=4.0, original_length=64, attn_factor=0.9),
        ),
    ),
    "rope theta": (LlamaConfig(**SMALL), spec(Rotary, theta=1.2e4)),
    "llama epsilon": (LlamaConfig(**GATED, rms_norm_eps=1e-5), spec(Norm, epsilon=1e-6)),
    "opt epsilon": (OPTConfig(**OPT), spec(Norm, epsilon=1e-3)),
    "falcon epsilon": (FalconConfig(**FALCON, layer_norm_epsilon=1e-6), spec(Norm, epsilon=1e-5)),
    "form of gelu": (LlamaConfig(**GATED, hidden_act="gelu_new"), spec(Neurons, activation="gelu")),
}


@pytest.mark.parametrize("outtype", ["f16", "q4_0"])
@pytest.mark.parametrize("wrong", MUTATIONS)
def test_a_slightly_wrong_graph_is_refused(tmp_path, monkeypatch, wrong, outtype):
    config, mutate = MUTATIONS[wrong]
    folder = random_model(tmp_path / "hf", config)
    right = convert_module.read_blueprint
    monkeypatch.setattr(convert_module, "read_blueprint", lambda *args: mutate(right(*args)))
    with pytest.raises(HotsplitError, match="m: its logits differ from transformers'"):
        verification(folder, tmp_path / "m", outtype)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


# None of these changes the computation; transformers refuses some of them, in its own ways.
ODD = [
    {"model_type": ["llama"]},
    {"model_type": "unheard of"},
    {"use_cache": "maybe"},
    {"pad_token_id": 99999},
    {"max_position_embeddings": 64.0},
    {"hidden_act": "relu", "attention_dropout": "x"},
    {"torch_dtype": 7},
    {"dtype": "no type"},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "factor": "x"}},
]


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    return random_llama(tmp_path_factory.mktemp("llama") / "hf")


@pytest.mark.parametrize("change", ODD, ids=str)
def test_what_transformers_cannot_run_is_noted_in_one_line(llama, tmp_path, change, capfd):
    folder = Path(shutil.copytree(llama, tmp_path / "hf"))
    edit_config(folder, lambda config: config.update(change))
    capfd.readouterr()
    found = verification(folder, tmp_path / "m", "f16")
    assert "\n" not in found.line
    if found.relative_error is None:
        assert found.line.startswith("values verified, logits not: transformers ")
    assert change != ODD[1] or found.relative_error is None  # an unheard-of type runs nowhere
    told = capfd.readouterr()
    assert not told.out and "[transformers]" not in told.err


def test_a_model_type_that_contradicts_the_architecture_is_refused(llama, tmp_path, capfd):
    folder = Path(shutil.copytree(llama, tmp_path / "hf"))
    edit_config(folder, lambda config: config.update(model_type="gpt2"))
    capfd.readouterr()
    with pytest.raises(HotsplitError, match="model_type is 'gpt2', which is GPT2LMHeadModel"):
        verification(folder, tmp_path / "m", "f16")
    assert "UNEXPECTED" not in "".join(capfd.readouterr())
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


# ---- what the rounding cost -----------------------------------------------------------------


def divergence(want_TV, got_TV):
    want_TV, got_TV = (np.asarray(each, np.float64)[:-1] for each in (want_TV, got_TV))
    want_TV, got_TV = (x - np.log(np.exp(x).sum(1, keepdims=True)) for x in (want_TV, got_TV))
    same = (want_TV.argmax(1) == got_TV.argmax(1)).mean()
    return (np.exp(want_TV) * (want_TV - got_TV)).sum(1).mean(), same


def test_the_rounding_is_compared_with_the_source_as_it_is(llama, tmp_path, monkeypatch):
    model = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32).eval()
    found = {}
    for outtype in ("q8_0", "q4_0"):
        path = tmp_path / f"{outtype}.gguf"
        found[outtype] = verification(llama, path, outtype)
        ids = text_token_ids(ModelFile.load(path))
        assert len(ids) == 128  # the model's context
        with torch.inference_mode():
            want_TV = model(torch.tensor([ids])).logits[0].numpy()
        with Engine.load(path, mode="dense", context_length=len(ids)) as engine:
            kl, same = divergence(want_TV, engine.logits(ids).numpy())
        rounding = found[outtype].rounding
        assert rounding.divergence.mean == pytest.approx(kl, rel=0.05)
        assert rounding.agreement.mean == pytest.approx(same, abs=0.03)
        shown = f"KL {rounding.divergence.mean:.3g} from the source, same top token"
        assert shown in found[outtype].line and found[outtype].warning is None
    cost = {kind: each.rounding.divergence.mean for kind, each in found.items()}
    assert 0 < 30 * cost["q8_0"] < cost["q4_0"]
    # From a GGUF, whose values are unpacked by gguf's reference:
    again = verification(tmp_path / "q8_0.gguf", tmp_path / "a.gguf", "q4_0")
    assert again.rounding.divergence.mean == pytest.approx(cost["q4_0"], rel=0.3)
    monkeypatch.setattr(verify_conversion, "LARGE_DIVERGENCE", 0.5 * cost["q4_0"])
    warned = verification(llama, tmp_path / "b.gguf", "q4_0")
    assert "may babble; --outtype q8_0" in warned.lines[1] and warned.lines[0] == warned.line


def test_logits_of_several_pieces_are_compared_as_a_whole():
    want_TV = torch.randn(130, 7, generator=torch.Generator().manual_seed(0))
    got_TV = want_TV.clone()
    got_TV[[3, 129]] += 0.5
    error = (got_TV - want_TV).double().norm() / want_TV.double().norm()
    assert verify_conversion._relative_error(got_TV, want_TV) == pytest.approx(error.item())
    assert math.isinf(verify_conversion._relative_error(got_TV[:129], want_TV))


def test_a_text_of_one_token_says_nothing_of_the_rounding(llama, tmp_path, monkeypatch):
    monkeypatch.setattr(verify_conversion, "MAX_TOKENS", 1)
    found = verification(llama, tmp_path / "m.gguf", "q8_0")
    assert found.rounding is None
    assert found.line.endswith("on 1 tokens, both with the weights as rounded to q8_0")


def test_nothing_is_said_of_a_rounding_that_there_was_not(tmp_path):
    llama = random_llama(tmp_path / "hf", hidden_act="silu")
    first = verification(llama, tmp_path / "f.gguf", "f16")
    assert first.rounding is None and "rounding itself" not in first.line
    convert(ConvertConfig(source=llama, output=tmp_path / "q.gguf", outtype="q8_0"))
    found = []
    config = ConvertConfig(source=tmp_path / "q.gguf", output=tmp_path / "s.gguf", layout="stock")
    convert(config, verify=lambda written: found.append(verify(written)) or [""])
    assert found[0].rounding is None and found[0].relative_error is not None
