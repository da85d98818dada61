"""Gemma 4 beyond its logits, which test_families compares: plans with both roles on the CPU, the
GPU's kernels, keys in main memory, files of llama.cpp's converter."""

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import edit_config, random_model, save_tokenizer
from fake_cuda.graph import Graph
from hybrid_plans import stepped
from models import make_machine
from reference import rel_error
from test_fake_step import checked_cuda
from test_families import CASES, GATED, GEMMA4, IDS, MQA, converted, transformers_logits
from test_hybrid_step import hybrid, steps
from test_runtime import make_split
from transformers import Gemma4TextConfig

from hotsplit import Engine
from hotsplit.artifacts.model_file import ModelFile
from hotsplit.artifacts.model_gguf import read_model_gguf
from hotsplit.costs.kernel_counts import HEAD_KERNELS, HOT_KERNELS, dense_kernels
from hotsplit.costs.part_bytes import bytes_on_one_side, kv_bytes
from hotsplit.errors import HotsplitError
from hotsplit.families.from_config import read_blueprint
from hotsplit.model.spec import Add
from hotsplit.options.key_selection import KeySelection
from hotsplit.solver.fullest import fullest_plan
from hotsplit.solver.inputs import Inputs, load_inputs
from hotsplit.solver.mode_choice import find, obvious_plans
from hotsplit.solver.multi_gpu import plan_is_feasible
from hotsplit.solver.optimise import find_plan
from hotsplit.solver.solver_config import SolveConfig

BOUND = 1e-5
# All layers without a window, one key head, values that are keys.
FULL = Gemma4TextConfig(
    **GATED | MQA,
    **GEMMA4,
    head_dim=16,
    global_head_dim=32,
    attention_k_eq_v=True,
    layer_types=["full_attention"] * 3,
)


def made(tmp_path, config=CASES["gemma4"], **options) -> ModelFile:
    folder = random_model(tmp_path / "hf", config)
    save_tokenizer(folder, 320)
    return ModelFile.load(converted(folder, tmp_path / "m.gguf", outtype="f32", **options))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return made(tmp_path_factory.mktemp("gemma4"))


@pytest.fixture(scope="module")
def want(model):
    with Engine.load(model.path, mode="dense") as engine:
        return engine.logits(IDS)


def on_the_gpu(tmp_path, model, **options):
    """A plan with a layer wholly on the GPU, a divided one, and one without neurons there."""
    hot = [np.arange(160), np.arange(0, 160, 3), np.arange(0)]
    split = dataclasses.replace(make_split(model, hot, **options), mode="dense")
    split.save(tmp_path / "s.gguf")
    return split


def test_the_layers_factors_cost_no_kernel(tmp_path, model):
    """Values that are keys save a product. A layer's own input takes a sum, three kernels and a
    norm."""
    split = on_the_gpu(tmp_path, model)
    counted = [dense_kernels(model, index, has_predictor=False) for index in range(3)]
    assert counted == [4 + 4 + 3 + 5, 4 + 3 + 3 + 5, 4 + 3 + 3 + 5]
    with checked_cuda() as cuda, Engine.of(model, split, mode="dense", device="cuda"):
        kernels = Graph.of(cuda.graphs[0].handle).kernels
    # Queries, keys and values are one product, and attention's kernels do the append as well.
    fewer = 3 + 2 + 2
    assert len(kernels) == sum(counted) - fewer + 2 * (HOT_KERNELS - 1) + HEAD_KERNELS


def test_the_cpu_attends_with_keys_as_values(tmp_path):
    model = made(tmp_path, FULL)
    rule = KeySelection(window=64)
    split = on_the_gpu(tmp_path, model, kv_offload=rule)
    with Engine.load(model.path, mode="dense") as engine:
        want = stepped(engine, IDS)
    with Engine.load(model.path, split=tmp_path / "s.gguf", mode="dense", device="cpu") as engine:
        got = steps(hybrid(engine, split), IDS)
    assert rel_error(got, want) < BOUND


def test_the_comparison_finds_other_factors(model, want):
    add = dataclasses.replace(model.bare_spec.layers[1].blocks[-1], scale="")
    assert isinstance(add, Add)
    layers = list(model.bare_spec.layers)
    layers[1] = dataclasses.replace(layers[1], blocks=(*layers[1].blocks[:-1], add))
    other = dataclasses.replace(model, bare_spec=model.bare_spec.with_layers(layers))
    with Engine.of(other, mode="dense", device="cpu") as engine:
        assert rel_error(engine.logits(IDS), want) > 1e-3


def test_published_configs_and_the_text_of_a_model_for_images(tmp_path):
    """Keys of heads as in published configs, names as beside models for images."""
    from safetensors.torch import load_file, save_file

    folder = random_model(tmp_path / "hf", CASES["gemma4"])
    save_tokenizer(folder, 320)
    want = transformers_logits(folder)

    def nest(config):
        heads = next(iter(config.pop("per_layer_config").values()))
        own = {"global_head_dim": heads["head_dim"], "num_global_key_value_heads": 1}
        text = {**config, **own, "use_bidirectional_attention": "vision"}
        config.clear()
        config.update(
            architectures=["Gemma4ForConditionalGeneration"], model_type="gemma4", text_config=text
        )

    edit_config(folder, nest)
    file = folder / "model.safetensors"
    tensors = {n.replace("model.", "model.language_model."): t for n, t in load_file(file).items()}
    tensors["model.vision_tower.x.weight"] = torch.zeros(2)
    save_file(tensors, file, {"format": "pt"})
    path = converted(folder, tmp_path / "m.gguf", outtype="f32")
    with Engine.load(path, mode="dense") as engine:
        assert rel_error(engine.logits(IDS), want) < BOUND


def test_layers_without_one_to_share_with_are_refused(model):
    keys, tensors = read_model_gguf(model.path)
    with pytest.raises(HotsplitError, match="the last 2 of 3 layers read the keys and"):
        shared = {"gemma4.attention.shared_kv_layers": np.uint32(2)}
        ModelFile.of(model.path, keys | shared, tensors)
    for name, words in (("rope.freq_base_swa", "is -1"), ("attention.key_length_swa", "is -1")):
        with pytest.raises(HotsplitError, match=f"gemma4.{name}'? {words}"):
            ModelFile.of(model.path, keys | {f"gemma4.{name}": np.int32(-1)}, tensors)


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """An E-model: layers 2 to 4 read the keys and values of 0 and 1."""
    return made(tmp_path_factory.mktemp("shared"), CASES["gemma4-stock"])


def plan_of(tmp_path, model, dense_on_gpu, **options):
    hot = [np.arange(160), np.arange(0, 160, 3), np.arange(0), np.arange(7, 320), np.arange(320)]
    split = make_split(model, hot, dense_on_gpu=dense_on_gpu, **options)
    split = dataclasses.replace(split, mode="dense")
    split.save(tmp_path / "s.gguf")
    return split


def test_layers_share_keys_on_either_device(tmp_path, shared):
    assert shared.spec.storing == (0, 1)
    assert [group.layers for group in shared.spec.together()] == [(0, 2), (1, 3, 4)]
    assert [layer.neurons.number for layer in shared.spec.layers] == [160, 160, 320, 320, 320]
    with Engine.load(shared.path, mode="dense") as engine:
        want = engine.logits(IDS)
        assert len(engine._live.weights.cache.layers) == 2
    for dense_on_gpu in ([False, True, False, True, True], [True, False, True, False, False]):
        split = plan_of(tmp_path, shared, dense_on_gpu)
        sizes = {True: split.gpu_bytes["kv_cache"], False: split.cpu_bytes["kv_cache"]}
        assert sizes[dense_on_gpu[0]] == kv_bytes(shared, 0, split.context_length)
        assert sizes[dense_on_gpu[1]] == kv_bytes(shared, 1, split.context_length)
        with Engine.load(shared.path, split=tmp_path / "s.gguf", mode="dense") as engine:
            step = hybrid(engine, split)
            assert rel_error(steps(step, IDS), want) < BOUND
    with checked_cuda(), Engine.of(shared, split, mode="dense", device="cuda") as engine:
        assert rel_error(stepped(engine, IDS), want) < BOUND


def test_a_plan_that_divides_such_layers_is_refused(tmp_path, shared):
    plan_of(tmp_path, shared, [False, True, True, True, True])
    words = "layers 0 and 2 are on different devices, but share keys and values; run"
    with pytest.raises(HotsplitError, match=words):
        Engine.load(shared.path, split=tmp_path / "s.gguf")


def test_solve_keeps_such_layers_together(tmp_path, shared):
    """Every plan does, also the obvious ones; and memories that a refusal names hold such a
    plan."""
    inputs = make_inputs(tmp_path, shared, 0.3)
    pipeline = inputs.pipeline()
    assert pipeline.together == ((0, 2), (1, 3, 4))
    answer = find_plan(pipeline, time_limit_s=0)
    assert plan_is_feasible(pipeline, answer.plan)
    obvious = obvious_plans(inputs)["whole layers"]
    assert obvious.placement.dense_L.tolist() == [False] * 4 + [True]
    assert not plan_is_feasible(pipeline, obvious)
    assert plan_is_feasible(dataclasses.replace(pipeline, together=()), obvious)
    with pytest.raises(HotsplitError, match="the smallest that works is") as caught:
        find(dataclasses.replace(inputs, host_budget=inputs.always_on_host), time_limit_s=0)
    least = int(
        re.search(r"([\d,]+) bytes\) of main memory", str(caught.value))[1].replace(",", "")
    )
    for host_budget in (least - 1, least):
        tight = dataclasses.replace(inputs, host_budget=host_budget).pipeline()
        assert plan_is_feasible(tight, fullest_plan(tight)) == (host_budget == least)
    machine = dataclasses.replace(inputs.machine, gpus=inputs.machine.gpus * 2)
    two = dataclasses.replace(inputs, machine=machine, budgets=inputs.budgets * 2)
    with pytest.raises(
        HotsplitError, match="2 GPUs, but layers that share keys and values are planned"
    ):
        two.pipeline()


def make_inputs(tmp_path, model, share) -> Inputs:
    make_machine(cpu_gb_per_s=0.5, launch_s=1e-8, hand_over_s=1e-8, cpu_run_s=1e-8).save(
        tmp_path / "machine.json"
    )
    sizes = sum(bytes_on_one_side(model, 64, 0).values())
    config = SolveConfig(
        model=model.path,
        machine=tmp_path / "machine.json",
        output=tmp_path / "plan",
        vram_budget_bytes=int(share * sizes) + (1 << 20),
        context_length=64,
        mode="dense",
    )
    return load_inputs(config, lambda *_: 1 << 20)


def test_tensors_that_nothing_reads_are_left_aside(tmp_path, shared):
    """Published files have keys and values of layers that read those of others."""
    keys, tensors = read_model_gguf(shared.path)
    more = {
        f"blk.{layer}.{name}.weight": tensors[f"blk.{layer % 2}.{name}.weight"]
        for layer in (2, 3, 4)
        for name in ("attn_k", "attn_v", "attn_k_norm")
    }
    found = ModelFile.of(shared.path, keys, tensors | more)
    assert found.tensors.keys() == shared.tensors.keys() and found.spec == shared.spec


REFUSED = {
    "num_experts is None": {"enable_moe_block": True},
    "vocab_size_per_layer_input is 330, wanted vocab_size": {"vocab_size_per_layer_input": 330},
    "hidden_size_per_layer_input is -1, wanted": {"hidden_size_per_layer_input": -1},
    "the last 2 of 3 layers read the keys": {"num_kv_shared_layers": 2},
    "num_kv_shared_layers is -1, wanted": {"num_kv_shared_layers": -1},
    "use_bidirectional_attention is 'all'": {"use_bidirectional_attention": "all"},
    "attention_bias is True": {"attention_bias": True},
    "layer_types ends with 'sliding_attention'": {
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"]
    },
    "per_layer_config is": {"per_layer_config": {"1": {"head_dim": 40}, "2": {"head_dim": 32}}},
    "partial_rotary_factor is 1.5: 30 of 20 pairs": {
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": 1.5,
                "rope_theta": 1e6,
            }
        }
    },
}


def test_indices_of_layers_may_have_zeros_before_them():
    """transformers 5 writes those of ten layers and more so."""
    config = CASES["gemma4"].to_dict() | {"architectures": ["Gemma4ForCausalLM"]}
    given = {str(layer): own for layer, own in config["per_layer_config"].items()}
    specs = [
        read_blueprint(Path("config.json"), config | {"per_layer_config": own}, 1 << 20).spec
        for own in (given, {f"0{layer}": own for layer, own in given.items()})
    ]
    assert specs[0] == specs[1]
    with pytest.raises(HotsplitError, match="per_layer_config is"):
        twice = given | {"01": given["1"]}
        read_blueprint(Path("config.json"), config | {"per_layer_config": twice}, 1 << 20)


@pytest.mark.parametrize("words", REFUSED)
def test_what_is_not_computed_is_refused_with_its_key(words):
    config = CASES["gemma4"].to_dict() | {"architectures": ["Gemma4ForCausalLM"]}
    with pytest.raises(HotsplitError, match=words):
        read_blueprint(Path("config.json"), config | REFUSED[words], 331)
