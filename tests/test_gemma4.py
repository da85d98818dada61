"""Gemma 4 beyond its logits, which test_families compares: plans with both roles on the CPU, the GPU's
kernels, keys in main memory, files of llama.cpp's converter."""

import dataclasses

import numpy as np
import pytest
import torch
from checkpoints import edit_config, random_model, save_tokenizer
from hybrid_plans import stepped
from reference import rel_error
from test_families import CASES, GATED, GEMMA4, IDS, MQA, converted, transformers_logits
from test_hybrid_experts import random_plan
from test_hybrid_step import assert_same_in_any_order, hybrid, logged, steps
from test_runtime import make_split
from transformers import Gemma4TextConfig

from hotsplit import Engine
from hotsplit.artifacts.model_file import ModelFile
from hotsplit.artifacts.model_gguf import read_model_gguf
from hotsplit.costs.kernel_counts import HEAD_KERNELS, HOT_KERNELS, dense_kernels
from hotsplit.errors import HotsplitError
from hotsplit.model.spec import Add
from hotsplit.options.key_selection import KeySelection
from hotsplit.runtime.kernels.cpu import library
from hotsplit.runtime.kernels.gpu.kernels import reference_kernels
from hotsplit.runtime.model.placement import Placement
from hotsplit.runtime.step import hybrid_builder
from hotsplit.runtime.step.batch import rows_of
from hotsplit.runtime.step.plain_backend import plain_backend

pytestmark = pytest.mark.skipif(not library.is_available(), reason="the C++ kernels are not built")
BOUND = 1e-5
# All layers without a window, one key head, values that are keys.
FULL = Gemma4TextConfig(
    **GATED | MQA, **GEMMA4, head_dim=16, global_head_dim=32, attention_k_eq_v=True,
    layer_types=["full_attention"] * 3,
)  # fmt: skip


def made(tmp_path, config=CASES["gemma4"], **options) -> ModelFile:
    folder = random_model(tmp_path / "hf", config)
    save_tokenizer(folder, 320)
    return ModelFile.load(converted(folder, tmp_path / "m.gguf", outtype="f32", **options))


def planned(tmp_path, model, seed, **options):
    split = random_plan(model, seed, **options)
    split.save(tmp_path / "s.gguf")
    return split


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return made(tmp_path_factory.mktemp("gemma4"))


@pytest.fixture(scope="module")
def want(model):
    with Engine.load(model.path, mode="dense") as engine:
        return engine.logits(IDS)


@pytest.mark.parametrize("seed", range(4))
def test_random_plans_give_the_logits_of_the_undivided_model(tmp_path, model, want, seed):
    split = planned(tmp_path, model, seed)
    with Engine.load(model.path, split=tmp_path / "s.gguf", mode="dense") as engine:
        step = hybrid(engine, split, plain_backend(reference_kernels()))
        assert rel_error(steps(step, IDS), want) < BOUND
        placement = Placement.of_split(split, (torch.device("cpu"),) * len(split.budgets))
        rows = hybrid_builder.build(
            engine._live.weights, placement, engine.traffic, plain_backend(reference_kernels()),
            max_rows=4,
        )  # fmt: skip
        assert rel_error(rows.run_rows(rows_of(IDS[:4], 0, "all")), want[:4]) < BOUND
        if seed == 0:
            assert_same_in_any_order(engine, split, IDS[:3])


def on_the_gpu(tmp_path, model, **options):
    """A plan with a layer wholly on the GPU, a divided one, and one without neurons there."""
    hot = [np.arange(160), np.arange(0, 160, 3), np.arange(0)]
    split = dataclasses.replace(make_split(model, hot, **options), mode="dense")
    split.save(tmp_path / "s.gguf")
    return split


def test_the_layers_factors_cost_no_kernel(tmp_path, model):
    """Values that are keys save a product. A layer's own input takes a sum, three kernels and a norm."""
    split = on_the_gpu(tmp_path, model)
    counted = [dense_kernels(model, index, has_predictor=False) for index in range(3)]
    assert counted == [4 + 4 + 3 + 5, 4 + 3 + 3 + 5, 4 + 3 + 3 + 5]
    with Engine.load(model.path, split=tmp_path / "s.gguf", mode="dense") as engine:
        log = logged(engine, split)
        main = [operation.name for operation in log if operation.stream == 0]
        # The embedding is on the host; attention's kernels do the append as well.
        more = -3 + 2 * (HOT_KERNELS - 1) + HEAD_KERNELS
        assert main.count("kernel") == sum(counted) + more


def test_the_cpu_attends_with_keys_as_values(tmp_path):
    model = made(tmp_path, FULL)
    rule = KeySelection(window=64)
    split = on_the_gpu(tmp_path, model, kv_offload=rule)
    with Engine.load(model.path, mode="dense") as engine:
        want = stepped(engine, IDS)
    with Engine.load(model.path, split=tmp_path / "s.gguf", mode="dense", device="cpu") as engine:
        got = steps(hybrid(engine, split, plain_backend(reference_kernels())), IDS)
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


@pytest.mark.parametrize("key", ["attention.shared_kv_layers"])
def test_files_of_e_models_are_refused_with_the_key(model, key):
    keys, tensors = read_model_gguf(model.path)
    with pytest.raises(HotsplitError, match=rf"'gemma4.{key}' \(2\): .*Gemma's E-models") as caught:
        ModelFile.of(model.path, keys | {f"gemma4.{key}": np.uint32(2)}, tensors)
    assert "\n" not in str(caught.value)


REFUSED = {
    "num_experts is None": {"enable_moe_block": True},
    "vocab_size_per_layer_input is 330, wanted vocab_size": {"vocab_size_per_layer_input": 330},
    "hidden_size_per_layer_input is -1, wanted": {"hidden_size_per_layer_input": -1},
    "num_kv_shared_layers is 1": {"num_kv_shared_layers": 1},
    "use_bidirectional_attention is 'all'": {"use_bidirectional_attention": "all"},
    "attention_bias is True": {"attention_bias": True},
    "layer_types ends with 'sliding_attention'": {
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"]
    },
    "per_layer_config is": {"per_layer_config": {"1": {"head_dim": 40}, "2": {"head_dim": 32}}},
    "partial_rotary_factor is 1.5: 30 of 20 pairs": {
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional", "partial_rotary_factor": 1.5, "rope_theta": 1e6,
            }
        }
    },
}  # fmt: skip


@pytest.mark.parametrize("words", REFUSED)
def test_what_is_not_computed_is_refused_with_its_key(tmp_path, words):
    folder = random_model(tmp_path / "hf", CASES["gemma4"])
    edit_config(folder, lambda config: config.update(REFUSED[words]))
    with pytest.raises(HotsplitError, match=words) as caught:
        converted(folder, tmp_path / "m.gguf")
    assert "\n" not in str(caught.value)
