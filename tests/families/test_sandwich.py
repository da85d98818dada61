"""Norms after attention and feed-forward, before the residual sums, and a scaled embedding, as in
Gemma 2 and 3: torch agrees with a decoder in float64, the native step and hybrid steps with torch.
These do also in OLMo 2, which has no other norms but one of all heads."""

import dataclasses
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from hybrid_plans import PLANS, SOME, F, L, planned, stepped
from models import family_model, make_sizes
from reference import rel_error
from test_hybrid_step import assert_same_in_any_order, hybrid, logged, steps
from test_native_step import BOUNDS
from test_runtime import IDS, make_split

from hotsplit import Engine
from hotsplit.costs.kernel_counts import HEAD_KERNELS, HOT_KERNELS, dense_kernels
from hotsplit.model.spec import Add, LayerSpec, Norm
from hotsplit.runtime.kernels.cpu import library
from hotsplit.runtime.kernels.gpu.kernels import reference_kernels, triton_kernels
from hotsplit.runtime.model.placement import Placement
from hotsplit.runtime.ops.attention.gpu_pass import attend_tokens
from hotsplit.runtime.ops.attention.rotary import Turns
from hotsplit.runtime.step import hybrid_builder
from hotsplit.runtime.step.batch import rows_of
from hotsplit.runtime.step.plain_backend import plain_backend
from hotsplit.runtime.weights import gpu_products

FAMILY = ("olmo2", "sandwich with biases")
MODES = ("dense", "exact", "predicted")


def watched(engine, ids=IDS):
    """Logits in torch."""
    with engine.observe(lambda n, i, t: None, lambda n, i: False, in_torch=True):
        return engine.logits(ids)


def saved(tmp_path, family, *, offset=0, num_layers=L, is_tied=False):
    sizes = make_sizes(num_layers=num_layers, num_neurons=F)
    model = family_model(
        family, sizes=sizes, predictor_rank=8, input_layer_offset=offset, threshold=0.0
    )
    tensors = {n: e for n, e in model.tensors.items() if not is_tied or n != "output.weight"}
    model = dataclasses.replace(model, path=tmp_path / "m.gguf", tensors=tensors)
    model.save(model.path)
    return model


def logits_ref(model, ids):
    """Logits [T, V] in float64, in mode dense."""

    def read(name):
        entry = model.tensors.get(name)
        return 0.0 if entry is None else np.asarray(entry.read(), np.float64)

    def norm(x, name):
        scale = np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5)
        return x / scale * read(f"{name}.weight")

    def heads(x, name, count):
        return (x @ read(f"{name}.weight").T).reshape(len(ids), count, 16)

    def rotate(x):
        angle = np.arange(len(ids))[:, None, None] * 1e4 ** (-np.arange(0, 16, 2) / 16)
        even, odd = x[..., ::2], x[..., 1::2]
        turned = (
            even * np.cos(angle) - odd * np.sin(angle),
            even * np.sin(angle) + odd * np.cos(angle),
        )
        return np.stack(turned, -1).reshape(x.shape)

    x = 8.0 * read("token_embd.weight")[ids]
    for layer in range(model.spec.num_layers):
        at = f"blk.{layer}."
        y = norm(x, at + "attn_norm")
        q, k = rotate(heads(y, at + "attn_q", 4)), rotate(heads(y, at + "attn_k", 2))
        v = heads(y, at + "attn_v", 2)
        out = np.zeros_like(q)
        for t in range(len(ids)):
            for head in range(4):
                weight = np.exp(k[: t + 1, head // 2] @ q[t, head] / 4.0)
                out[t, head] = weight / weight.sum() @ v[: t + 1, head // 2]
        y = out.reshape(len(ids), 64) @ read(at + "attn_output.weight").T
        x = x + norm(y + read(at + "attn_output.bias"), at + "post_attention_norm")
        y = norm(x, at + "ffn_norm")
        gate = np.maximum(y @ read(at + "ffn_gate.weight").T, 0)
        y = gate * (y @ read(at + "ffn_up.weight").T) @ read(at + "ffn_down_t.weight")
        x = x + norm(y + read(at + "ffn_down.bias"), at + "post_ffw_norm")
    return norm(x, "output_norm") @ read("output.weight").T


def test_torch_agrees_with_a_decoder_in_float64(tmp_path):
    model = saved(tmp_path, "sandwich with biases")
    with Engine.load(model.path, mode="dense") as engine:
        assert rel_error(watched(engine), logits_ref(model, IDS)) < BOUNDS["f32"]
        assert rel_error(engine.logits(IDS), logits_ref(model, IDS)) < BOUNDS["f32"]


def after_the_sum(layer):
    """The layer with its second norms after the residual sums: a norm of x instead of an output."""
    blocks = list(layer.blocks)
    for index, block in enumerate(blocks[:-1]):
        if isinstance(block, Norm) and isinstance(blocks[index + 1], Add):
            norm = dataclasses.replace(block, reads="x", writes="x")
            blocks[index : index + 2] = [blocks[index + 1], norm]
    return LayerSpec(blocks=tuple(blocks))


def unscaled(spec):
    return dataclasses.replace(spec, embedding_scale=1.0)


@pytest.mark.parametrize(
    "mutant", [unscaled, lambda s: s.with_layers([after_the_sum(x) for x in s.layers])]
)
def test_the_comparison_rejects_other_models(tmp_path, monkeypatch, mutant):
    model = saved(tmp_path, "sandwich with biases")
    want = logits_ref(model, IDS)
    of = type(model).of

    def changed(path, keys, tensors):
        found = of(path, keys, tensors)
        return dataclasses.replace(found, bare_spec=mutant(found.bare_spec))

    monkeypatch.setattr(type(model), "of", changed)
    with Engine.load(model.path, mode="dense") as engine:
        assert rel_error(engine.logits(IDS), want) > 0.05


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("level", library.usable_levels())
@pytest.mark.parametrize("family", FAMILY)
def test_the_native_step_agrees_with_torch(tmp_path, restore_library, family, level, mode):
    library.set_level(level)
    model = saved(tmp_path, family, offset=1)
    with Engine.load(model.path, mode=mode) as engine:
        assert rel_error(stepped(engine), watched(engine)) < BOUNDS["f32"]
    make_split(model, [SOME] * L).save(tmp_path / "s.gguf")
    with Engine.load(model.path, split=tmp_path / "s.gguf", mode=mode) as engine:  # two blocks
        assert rel_error(stepped(engine), watched(engine)) < BOUNDS["f32"]


@pytest.mark.parametrize(
    ("family", "mode"), [*((FAMILY[1], mode) for mode in MODES), (FAMILY[0], "predicted")]
)
@pytest.mark.parametrize("plan", PLANS)
def test_hybrid_steps_agree_with_torch(tmp_path, family, plan, mode):
    model = saved(tmp_path, family, offset=1)
    split = planned(tmp_path, model, plan)
    with Engine.load(model.path, mode=mode) as whole:
        want = watched(whole)
    with Engine.load(model.path, split=tmp_path / "s.gguf", mode=mode) as engine:
        step = hybrid(engine, split, plain_backend(reference_kernels()))
        assert rel_error(steps(step), want) < BOUNDS["f32"]


@pytest.mark.parametrize("plan", ["mixed", "every kind of layer", "attention on the CPU"])
@pytest.mark.parametrize("family", FAMILY)
def test_steps_of_several_rows(tmp_path, plan, family):
    model = saved(tmp_path, family)
    split = planned(tmp_path, model, plan)
    with Engine.load(model.path, split=tmp_path / "s.gguf", mode="exact") as engine:
        placement = Placement.of_split(split, (torch.device("cpu"),) * len(split.budgets))
        step = hybrid_builder.build(
            engine._live.weights,
            placement,
            engine.traffic,
            plain_backend(reference_kernels()),
            max_rows=4,
        )
        got = step.run_rows(rows_of(IDS, 0, "all"))
        assert rel_error(got, watched(engine)) < BOUNDS["f32"]


def test_the_tied_embedding_is_scaled_on_the_gpu(tmp_path):
    model = saved(tmp_path, "sandwich with biases", is_tied=True)
    split = planned(tmp_path, model, "all on the GPU")
    with Engine.load(model.path, split=tmp_path / "s.gguf", mode="exact") as engine:
        step = hybrid(engine, split, plain_backend(reference_kernels()))
        assert rel_error(steps(step), watched(engine)) < BOUNDS["f32"]


def test_a_hybrid_step_of_tritons_kernels(tmp_path, several_rows):
    """In the interpreter: an undivided layer and a divided one."""
    model = saved(tmp_path, "olmo2", num_layers=2, is_tied=True)
    split = make_split(model, [np.arange(F), SOME], dense_on_gpu=[1, 1], head_on_gpu=True)
    split.save(tmp_path / "s.gguf")
    with Engine.load(model.path, split=tmp_path / "s.gguf", mode="exact") as engine:
        want = watched(engine, IDS[:2])
        got = steps(hybrid(engine, split, plain_backend(triton_kernels())), IDS[:2])
        assert rel_error(got, want) < BOUNDS["f32"]


@pytest.mark.parametrize("plan", ["mixed", "every kind of layer", "two GPUs, layers on the CPU"])
@pytest.mark.parametrize("family", FAMILY)
def test_any_order_that_the_events_allow_gives_the_same_bits(tmp_path, family, plan):
    model = saved(tmp_path, family)
    split = planned(tmp_path, model, plan)
    with Engine.load(model.path, split=tmp_path / "s.gguf", mode="predicted") as engine:
        assert_same_in_any_order(engine, split)


@pytest.mark.parametrize("family", FAMILY)
def test_each_norm_is_one_kernel_with_the_sum_before_it(tmp_path, family):
    model = saved(tmp_path, family)
    of_norms = 2 + 2 + 2 if family == "olmo2" else 4  # with those of heads, and sums before none
    assert dense_kernels(model, 0, has_predictor=False) == of_norms + 4 + 3
    split = planned(tmp_path, model, "mixed")  # divided, all on the CPU, all on the GPU, divided
    with Engine.load(model.path, split=tmp_path / "s.gguf", mode="predicted") as engine:
        log = logged(engine, split)
        main = [operation.name for operation in log if operation.stream == 0]
        counted = sum(dense_kernels(model, index, has_predictor=True) for index in range(L))
        # Attention's kernels do the append as well.
        assert main.count("kernel") == counted - L + 3 * (HOT_KERNELS - 1) + HEAD_KERNELS


@pytest.mark.parametrize("num_tokens", [1, 20])
def test_a_prompt_with_one_norm_of_all_heads(monkeypatch, num_tokens):
    """In a GPU's kernels, which compute these norms in place, and in torch."""
    monkeypatch.setattr(gpu_products, "kernels", reference_kernels)
    monkeypatch.setattr(gpu_products, "made_current", lambda device: nullcontext())
    model = family_model("olmo2", sizes=make_sizes(context_length=64))
    with Engine.of(model, mode="dense", cache_type_k="f32") as engine, torch.inference_mode():
        attention, turns = engine.layers[0].attention, Turns(0, num_tokens)
        joined_TQ = torch.randn(num_tokens, attention.widths[0])
        want = attention._attend(joined_TQ.clone(), 0, 0, turns)
        assert rel_error(attend_tokens(attention, joined_TQ, 0, 0, turns), want) < BOUNDS["f32"]
