"""Gemma 3n beyond its logits, which test_families compares: files of llama.cpp's converter, the
text of a model for images, the density that a profile counts, and what is refused."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import edit_config, random_model, save_tokenizer
from fake_cuda import library as fake_library
from fake_cuda.graph import Graph
from models import make_machine, make_profile
from reference import rel_error
from safetensors.torch import load_file, save_file
from test_fake_step import checked_cuda, on_the_cpu, on_the_device
from test_families import CASES, IDS, converted, transformers_logits
from test_runtime import make_split

from hotsplit import Engine
from hotsplit.artifacts.model_file import ModelFile
from hotsplit.artifacts.model_gguf import read_model_gguf
from hotsplit.artifacts.profile_file import Profile
from hotsplit.artifacts.split_file import Split
from hotsplit.cli import main
from hotsplit.costs.kernel_counts import ALL_GATES_KERNELS, HEAD_KERNELS, HOT_KERNELS, dense_kernels
from hotsplit.costs.part_bytes import bytes_on_one_side
from hotsplit.errors import HotsplitError
from hotsplit.families.from_config import read_blueprint
from hotsplit.families.gemma3n import SPARSE_LAYERS, STOCK_CUTOFF
from hotsplit.families.row_order import matrices_joined
from hotsplit.model.planes import BEGIN, END, PREDICT
from hotsplit.options.neuron_cache_options import CacheOptions
from hotsplit.profile.collect import profile
from hotsplit.profile.profile_config import ProfileConfig
from hotsplit.runtime.ops.head import logits_of
from hotsplit.runtime.step.workspace import workspace_bytes
from hotsplit.solver.assumed import by_activation
from hotsplit.solver.solve import SolveConfig, solve

BOUND = 1e-5
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
    joined = matrices_joined(tensors, (BEGIN, END))
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
    """After the planes have become one and the last norm; in pieces of several tokens and of
    one."""
    with Engine.load(path, mode="exact") as engine:
        want_TV, weights = engine.logits(IDS), engine._live.weights
        with engine.sequence() as text:
            pieces = (IDS[:5], IDS[5:6], IDS[6:])
            states_TD = torch.cat([engine.hidden_states(text, piece) for piece in pieces])
        found_TV = logits_of(states_TD, weights.head, weights.spec)
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


def whole_plan(model, **options):
    hot = [np.arange(layer.neurons.number) for layer in model.spec.layers]
    every = [True] * len(hot)
    split = make_split(model, hot, dense_on_gpu=every, head_on_gpu=True, **options)
    return replace(split, mode="exact")


def test_plans_are_priced_with_the_kernels_of_a_step(path):
    model = ModelFile.load(path)
    split, layers = whole_plan(model), model.spec.layers
    counted = [dense_kernels(model, index, has_predictor=False) for index in range(len(layers))]
    more = ALL_GATES_KERNELS * sum(layer.neurons.cutoff is not None for layer in layers)
    hot = (HOT_KERNELS - 1) * len(layers) + more  # the next norm adds the parts
    with checked_cuda() as cuda, Engine.of(model, split, mode="exact", device="cuda"):
        kernels = Graph.of(cuda.graphs[0].handle).kernels
    fewer = 2 * len(model.spec.storing)  # queries, keys and values are one product
    assert len(kernels) == sum(counted) - fewer + hot + HEAD_KERNELS


@pytest.mark.skipif(not fake_library.can_be_built(), reason="needs a C++ compiler, and Linux")
def test_a_plan_on_a_fake_device(tmp_path, path, capsys):
    """A captured step, and a prompt, within the budget of a plan; no part takes its fallback."""
    model = ModelFile.load(path)
    split = whole_plan(model)
    workspace = workspace_bytes(model, split.context_length, "exact", gpu_budget_bytes=64 << 20)
    gpu, cpu = ({**each, "workspace": workspace} for each in (split.gpu_bytes, split.cpu_bytes))
    budget = sum(gpu.values())
    split = replace(split, gpu_bytes=gpu, cpu_bytes=cpu, vram_budget_bytes=budget)
    split.save(tmp_path / "s.gguf")
    want = on_the_cpu(path, "exact")
    with checked_cuda(num_devices=1) as cuda:
        got = on_the_device(path, tmp_path / "s.gguf", "exact")
        assert cuda.num_graphs >= 1
    assert "hotsplit doctor" not in capsys.readouterr().err
    for mine, right in zip(got, want, strict=True):
        assert rel_error(mine, right) < BOUND


def test_a_plan_that_divides_gates_with_a_cutoff_is_refused(tmp_path, path):
    model = ModelFile.load(path)
    plan = make_split(model, [[0, 1], [], [0], []])
    with pytest.raises(HotsplitError, match="divides layer 0, in which a neuron needs the gates"):
        plan.check_against(model, tmp_path / "p.gguf")


REFUSED = {
    "altup_active_idx is 1": {"altup_active_idx": 1},
    "altup_correct_scale is False": {"altup_correct_scale": False},
    "altup_num_inputs is 1, wanted 2 to 8": {"altup_num_inputs": 1},
    "attention_bias is True": {"attention_bias": True},
    "intermediate_size is .*, wanted a number or 4 of them": {"intermediate_size": [96]},
    "activation_sparsity_pattern is .*, wanted 4 shares": {
        "activation_sparsity_pattern": [1.0] * 4
    },
    "num_kv_shared_layers is 3: the last 3 of 4 layers read the keys and values": {
        "num_kv_shared_layers": 3
    },
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_is_not_computed_is_refused_with_its_key(words):
    with pytest.raises(HotsplitError, match=words):
        read_blueprint(Path("config.json"), CONFIG | REFUSED[words], 1 << 20)


def test_plan_assumes_as_many_neurons_as_normally_distributed_gates_leave(path, capsys):
    found = by_activation(ModelFile.load(path))
    assert np.allclose(found.density_L, [0.2, 0.5, 1.0, 0.7], atol=1e-3), found.density_L
    words = ["plan", str(path), "--vram", "0", "--machine", "rtx-4060-8gb"]
    assert main(words) == 0 and "distributed, 59% of all" in capsys.readouterr().err
    assert main([*words, "--mode", "dense"]) == 0 and "mode dense" in capsys.readouterr().err


def test_solve_keeps_gates_with_a_cutoff_together(tmp_path, path):
    """Plans of any budget pass their verification, which adds up their prices again, and their own
    check; what begins and ends planes stays in main memory."""
    model, machine = ModelFile.load(path), tmp_path / "machine.json"
    make_machine(cpu_gb_per_s=0.01, launch_s=1e-8, hand_over_s=1e-8, cpu_run_s=1e-8).save(machine)
    number_L1 = np.array([CONFIG["intermediate_size"]]).T
    is_neuron_LF, chance = np.arange(160) < number_L1, np.random.default_rng(0)
    frequency_LF = chance.uniform(0, 0.5, is_neuron_LF.shape) * is_neuron_LF
    make_profile(model, frequency_LF).save(tmp_path / "profile")
    whole = sum(bytes_on_one_side(model, 32, 0).values())
    ends = sum(e.num_bytes for n, e in model.tensors.items() if n.startswith((BEGIN, END)))
    found = []
    for share in (0.2, 0.5, 0.7, 1.0):
        config = SolveConfig(
            model=path,
            profile=tmp_path / "profile",
            machine=machine,
            output=tmp_path / "s.gguf",
            vram_budget_bytes=int(share * whole) + (1 << 20),
            context_length=32,
            mode="exact",
            time_limit_s=0.1,
            force=True,
        )
        report = solve(config, lambda *_: 1 << 20)
        split = Split.load(tmp_path / "s.gguf")
        split.check_against(model, tmp_path / "s.gguf")
        assert report.cpu_bytes["embedding"] >= ends > 0
        found.append(sum(map(len, split.hot)) / number_L1.sum())
    assert found == sorted(found) and 0 < found[1] < found[3] == 1 and report.fits_entirely
    with pytest.raises(
        HotsplitError, match="neuron caches are not supported for models that need all gates"
    ):
        solve(replace(config, neuron_cache=CacheOptions()), lambda *_: 1 << 20)
