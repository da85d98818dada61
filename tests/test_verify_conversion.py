"""The comparison of a written file with its source: correct files pass by a wide margin, and
slightly wrong ones are refused.

Oracle: transformers."""

import dataclasses
import shutil
from pathlib import Path

import pytest
from checkpoints import edit_config, random_llama, random_model
from models import changed as changed_spec
from test_families import CASES, FALCON, GATED, OPT
from transformers import FalconConfig, LlamaConfig, OPTConfig

from hotsplit.convert import convert as convert_module
from hotsplit.convert.convert import convert
from hotsplit.convert.options import ConvertConfig
from hotsplit.errors import HotsplitError
from hotsplit.measure.evaluate.verify_conversion import BOUND, Verification, verify
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


RIGHT = {"llama": OUTTYPES, "qwen3": ("bf16", "q8_0"), "opt-norm-after": ("q4_0",),
         "falcon-40b": ("f16",), "phi3": ("q4_0",)}  # fmt: skip


@pytest.mark.parametrize("case", RIGHT)
def test_right_files_are_far_below_the_bound_in_every_type(tmp_path, case):
    folder = random_model(tmp_path / "hf", CASES[case])
    for outtype in RIGHT[case]:
        error = verification(folder, tmp_path / "m", outtype).relative_error
        assert error is not None and error < BOUND / MARGIN, outtype


SMALL = GATED | {"initializer_range": 0.02}
LINEAR = {"rope_type": "linear", "factor": 1.1, "rope_theta": 1e4}


YARN = {
    "rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 64,
}  # fmt: skip


def spec(kind, **changes):
    def mutated(plan):
        found = changed_spec(plan.spec, kind, **changes)
        if kind is Norm:
            last = dataclasses.replace(plan.spec.output_norm, **changes)
            found = dataclasses.replace(found, output_norm=last)
        return dataclasses.replace(plan, spec=found)

    return mutated


def changed(**changes):
    return lambda plan: dataclasses.replace(plan, **changes)


# For each mistake: a checkpoint's config, and a function that makes the mistake in what was read.
MUTATIONS = {
    "rows not permuted": (LlamaConfig(**SMALL), changed(rows={})),
    "linear factor": (LlamaConfig(**SMALL, rope_parameters=LINEAR), spec(Rotary, scaling=NO_SCALING)),
    "yarn factor": (
        LlamaConfig(**SMALL, rope_parameters=YARN),
        spec(Rotary, scaling=RopeScaling(kind="yarn", factor=3.0, original_length=64)),
    ),
    "yarn magnitude": (
        LlamaConfig(**SMALL, rope_parameters=YARN),
        spec(Rotary, scaling=RopeScaling(kind="yarn", factor=4.0, original_length=64, attn_factor=0.9)),
    ),
    "rope theta": (LlamaConfig(**SMALL), spec(Rotary, theta=1.2e4)),
    "llama epsilon": (LlamaConfig(**GATED, rms_norm_eps=1e-5), spec(Norm, epsilon=1e-6)),
    "opt epsilon": (OPTConfig(**OPT), spec(Norm, epsilon=1e-3)),
    "falcon epsilon": (
        FalconConfig(**FALCON, layer_norm_epsilon=1e-6), spec(Norm, epsilon=1e-5),
    ),
    "form of gelu": (LlamaConfig(**GATED, hidden_act="gelu_new"), spec(Neurons, activation="gelu")),
}  # fmt: skip


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
    {"model_type": ["llama"]}, {"model_type": "unheard of"},
    {"use_cache": "maybe"}, {"pad_token_id": 99999}, {"max_position_embeddings": 64.0},
    {"hidden_act": "relu", "attention_dropout": "x"}, {"torch_dtype": 7}, {"dtype": "no type"},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "factor": "x"}},
]  # fmt: skip


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
