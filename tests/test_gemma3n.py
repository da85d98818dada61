"""Gemma 3n beyond its logits, which test_families compares: files of llama.cpp's converter, the text of a model
for images, the density that a profile counts, and what is refused."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import edit_config, random_model, save_tokenizer
from reference import rel_error
from safetensors.torch import load_file, save_file
from test_families import CASES, IDS, converted, transformers_logits

from hotsplit import Engine
from hotsplit.artifacts.model_file import ModelFile
from hotsplit.artifacts.model_gguf import read_model_gguf
from hotsplit.artifacts.profile_file import Profile
from hotsplit.errors import HotsplitError
from hotsplit.families.gemma3n import SPARSE_LAYERS, STOCK_CUTOFF
from hotsplit.families.row_order import planes_joined
from hotsplit.families.table import read_blueprint
from hotsplit.model.planes import BEGIN, END, PREDICT
from hotsplit.profile.collect import profile
from hotsplit.profile.config import ProfileConfig
from hotsplit.runtime.kernels.cpu import library
from hotsplit.runtime.ops.attention.attend import capped

pytestmark = pytest.mark.skipif(not library.is_available(), reason="the C++ kernels are not built")
CONFIG = CASES["gemma3n"].to_dict() | {"architectures": ["Gemma3nForCausalLM"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint as those with models for images beside are: nested, with tensors of others."""
    found = random_model(tmp_path_factory.mktemp("gemma3n") / "hf", CASES["gemma3n"])
    save_tokenizer(found, 320)
    return found


@pytest.fixture(scope="module")
def path(folder):
    want = transformers_logits(folder)
    whole = {"architectures": ["Gemma3nForConditionalGeneration"], "model_type": "gemma3n"}

    def nest(config):
        text = dict(config)
        config.clear()
        config.update(whole, text_config=text)

    edit_config(folder, nest)
    file = folder / "model.safetensors"
    tensors = {n.replace("model.", "model.language_model."): t for n, t in load_file(file).items()}
    tensors["model.audio_tower.x.weight"] = tensors["model.embed_vision.y"] = torch.zeros(2)
    save_file({name: t.clone() for name, t in tensors.items()}, file, {"format": "pt"})
    path = converted(folder, folder.parent / "m.gguf", outtype="f32")
    with Engine.load(path, mode="exact") as engine:
        assert rel_error(engine.logits(IDS), want) < 1e-5
    return path


def test_matrices_of_planes_in_one_tensor_as_llama_cpp_has_them(path):
    keys, tensors = read_model_gguf(path)
    joined = planes_joined(tensors, (BEGIN, END))
    assert joined[f"{BEGIN}.weight"].shape == (2, 64, 64)
    with Engine.of(ModelFile.of(path, keys, joined)) as engine, Engine.load(path) as own:
        assert torch.equal(engine.logits(IDS), own.logits(IDS))


def test_cutoffs_of_a_file_without_the_key_are_those_of_llama_cpp(path):
    keys, tensors = read_model_gguf(path)
    key = "gemma3n.activation_sparsity_scale"
    found = ModelFile.of(path, {n: v for n, v in keys.items() if n != key}, tensors).spec
    assert {layer.neurons.cutoff for layer in found.layers[:SPARSE_LAYERS]} == {STOCK_CUTOFF}
    with pytest.raises(HotsplitError, match="has infinity: no neuron would fire"):
        ModelFile.of(path, keys | {key: [float("inf")] * 4}, tensors)


def test_hidden_states_are_what_the_head_reads(path):
    """After the planes have become one and the last norm; in pieces of several tokens and of one."""
    with Engine.load(path, mode="exact") as engine:
        want_TV, weights = engine.logits(IDS), engine._live.weights
        with engine.sequence() as text:
            pieces = (IDS[:5], IDS[5:6], IDS[6:])
            states_TD = torch.cat([engine.hidden_states(text, piece) for piece in pieces])
        found_TV = capped(weights.head.apply(states_TD), weights.spec.logit_cap)
    assert rel_error(found_TV, want_TV) < 1e-5


def test_a_wrong_coefficient_of_the_planes_is_seen(path):
    """The measure rejects planes that are mixed the other way round."""
    model = ModelFile.load(path)
    name = f"blk.1.{PREDICT}.weight"
    entry = model.tensors[name]
    turned = entry.read().reshape(3, 3, 3).swapaxes(0, 1).reshape(9, 3).copy()
    other = replace(entry, read_rows=lambda start, stop: turned[start:stop])
    wrong = replace(model, tensors=model.tensors | {name: other})
    with Engine.of(wrong, mode="exact") as engine, Engine.load(path, mode="exact") as own:
        assert rel_error(engine.logits(IDS), own.logits(IDS)) > 1e-3


def test_a_profile_counts_the_neurons_that_a_cutoff_leaves(path, tmp_path):
    text = tmp_path / "t.txt"
    text.write_text("the quick brown fox def add(a, b):\n" * 40)
    report = profile(ProfileConfig(model=path, corpora=(text,), output=tmp_path / "p.gguf"))
    found = report.density_L  # shares of each layer's own neurons, of which it has 96 to 160
    assert np.allclose(found, [0.2, 0.5, 1.0, 0.7], atol=0.1), found
    counted = Profile.load(report.output)
    assert counted.density_L[2] == 1.0 and counted.never_fired_L()[2] == 0
    assert counted.hottest_fifth_L()[2] == round(0.2 * 131) / 131
    assert replace(counted, num_neurons_L=()).density_L[2] == 131 / 160
    for wrong, words in (((160, 96), "layers have"), ((160, 96, 130, 160), "more neurons fired")):
        with pytest.raises(HotsplitError, match=words):
            replace(counted, num_neurons_L=wrong).validate()


REFUSED = {
    "altup_active_idx is 1": {"altup_active_idx": 1},
    "altup_correct_scale is False": {"altup_correct_scale": False},
    "altup_num_inputs is 1, wanted 2 to 8": {"altup_num_inputs": 1},
    "attention_bias is True": {"attention_bias": True},
    "intermediate_size is .*, wanted a number or 4 of them": {"intermediate_size": [96]},
    "activation_sparsity_pattern is .*, wanted 4 shares": {"activation_sparsity_pattern": [1.0] * 4},
    "the last 3 of 4 layers read the keys and values": {"num_kv_shared_layers": 3},
}  # fmt: skip


@pytest.mark.parametrize("words", REFUSED)
def test_what_is_not_computed_is_refused_with_its_key(words):
    with pytest.raises(HotsplitError, match=words) as caught:
        read_blueprint(Path("config.json"), CONFIG | REFUSED[words], 1 << 20)
    assert "\n" not in str(caught.value)
