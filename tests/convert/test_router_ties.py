"""Choices of experts that rounding decides, in the verification of a conversion: files of random
mixtures are kept at every level of the processor, and wrong routers are found.

Oracle: transformers. In half of the mixtures the experts of a pair have all but the same scores
(2e-7 apart), so that f32 sums in another order choose the other one of a pair in most layers."""

import dataclasses
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import random_model, save_tokenizer
from models import make_model, make_sizes, mixture_spec
from reference import rel_error
from safetensors.torch import load_file, save_file
from test_families import CASES, MIXTURES
from test_verify_conversion import MARGIN, verification

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.convert import convert as convert_module
from hotsplit.convert.convert import convert
from hotsplit.convert.options import ConvertConfig
from hotsplit.errors import HotsplitError
from hotsplit.files.gguf_file import array_entry
from hotsplit.measure.evaluate.verify_conversion import BOUND
from hotsplit.model.route import Route
from hotsplit.options.cache_types import CacheTypes
from hotsplit.runtime import device_check
from hotsplit.runtime.kernels.cpu import library
from hotsplit.runtime.ops.expert_choices import Followed
from hotsplit.runtime.step import native_step

# Mixtures of test_families of which a token chooses an odd number of experts: more than a pair.
ODD_CHOICES = {"gpt-oss": {"num_experts_per_tok": 3}, "mixtral": {"num_experts_per_tok": 3}}
ROUTERS = (
    "gate.weight",
    "router.weight",
    "router.layer.weight",
    "router.proj.weight",
    "router.bias",
    "e_score_correction_bias",
)


def mixture(folder: Path, case: str, *, has_twins: bool = False, seed: int = 0) -> Path:
    """A random checkpoint of a case of test_families."""
    config = CASES[case].to_dict() | ODD_CHOICES.get(case, {})
    random_model(folder, type(CASES[case])(**config), seed=seed)
    save_tokenizer(folder, 320)
    return with_twins(folder) if has_twins else folder


def with_twins(folder: Path) -> Path:
    """The scores of each second expert are all but those of the one before it."""
    weights, chance = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(0)
    routers = [n for n in weights if n.endswith(ROUTERS) and "shared" not in n]
    for name in routers:
        values = weights[name].clone()
        firsts = values[::2][: len(values) // 2]
        noise = 2e-7 * torch.randn(firsts.shape, generator=chance)
        values[1::2] = firsts * (1 + noise * (values.dim() == 2))
        weights[name] = values
    assert routers
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize(
    "case", ["qwen3moe", "glm4moe-groups", "gpt-oss", "granitemoe", "gemma4moe"]
)
def test_a_file_whose_routers_have_ties_is_kept(tmp_path, case):
    folder = mixture(tmp_path / "hf", case, has_twins=True)
    for level in {library.usable_levels()[0], "generic"}:
        library.set_level(level)
        found = verification(folder, tmp_path / "m.gguf", "q8_0")
        assert found.relative_error is not None and found.relative_error < BOUND / MARGIN, level
        assert "where the choice is a tie within rounding (" in found.line


def test_so_is_a_file_that_is_made_from_one(tmp_path):
    """The source's graph follows, too: in the stock layout down projections are summed in another
    order."""
    folder = mixture(tmp_path / "hf", "mixtral", has_twins=True)
    source = tmp_path / "stock.gguf"
    convert(ConvertConfig(source=folder, output=source, layout="stock", outtype="f16"))
    found = verification(source, tmp_path / "m.gguf", "q8_0")
    assert found.relative_error is not None and found.relative_error < BOUND / MARGIN
    assert "where the choice is a tie within rounding (" in found.line


@pytest.mark.slow
@pytest.mark.parametrize("has_twins", [False, True], ids=["plain", "with ties"])
@pytest.mark.parametrize("case", MIXTURES)
def test_no_mixture_is_refused_at_any_level(tmp_path, case, has_twins):
    for seed in range(4):
        folder = mixture(tmp_path / f"hf{seed}", case, has_twins=has_twins, seed=seed)
        for level in library.usable_levels():
            library.set_level(level)
            outtype = ("f16", "bf16", "q8_0", "f32")[seed]
            found = verification(folder, tmp_path / "m.gguf", outtype)
            assert found.relative_error is not None and found.relative_error < BOUND / 4, level


# ---- wrong routers --------------------------------------------------------------------------


def graph(**keys):
    """Other keys of the experts in the file."""

    def mutated(plan):
        own = {f"expert_{name}": value for name, value in keys.items()}
        return dataclasses.replace(plan, keys={**plan.keys, **own})

    return mutated


ONE = np.uint32(1)
WRONG = {
    "sum": ("qwen3moe-first-dense", graph(weights_norm=True), "its logits differ"),
    "order of softmax": (
        "qwen3moe-first-dense",
        graph(gating_func=np.uint32(3)),
        "its logits differ",
    ),
    "sigmoid": ("qwen3moe", graph(gating_func=np.uint32(2)), "its logits differ"),
    "softmax": ("glm4moe", graph(gating_func=ONE), "the router of layer 1 chooses experts"),
    "scale": ("glm4moe", graph(weights_scale=np.float32(1.81)), "its logits differ"),
    "groups": (
        "glm4moe-groups",
        graph(group_count=ONE, group_used_count=ONE),
        "the router of layer 0",
    ),
    "number": ("mixtral", graph(used_count=np.uint32(2)), "its logits differ"),
}


@pytest.mark.parametrize("has_twins", [False, True], ids=["plain", "with ties"])
@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_router_is_found(tmp_path, monkeypatch, wrong, has_twins):
    case, mutate, words = WRONG[wrong]
    folder = mixture(tmp_path / "hf", case, has_twins=has_twins)
    right = convert_module.read_blueprint
    monkeypatch.setattr(convert_module, "read_blueprint", lambda *args: mutate(right(*args)))
    with pytest.raises(HotsplitError, match=words):
        verification(folder, tmp_path / "m", "f16")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def without_bias(right, structs, router):
    struct = right(structs, router)
    struct.choice_bias = None
    return struct


def with_other_rows(right, structs, router):
    """Each expert has the score of the one two before it."""
    if router is None:
        return right(structs, router)
    weight = router.linear.weight
    weight = dataclasses.replace(weight, data=weight.data.roll(2, 0))
    linear = dataclasses.replace(router.linear, weight=weight)
    return right(structs, dataclasses.replace(router, linear=linear))


@pytest.mark.parametrize("has_twins", [False, True], ids=["plain", "with ties"])
@pytest.mark.parametrize("wrong", [without_bias, with_other_rows])
def test_a_runtime_that_routes_otherwise_is_found(tmp_path, monkeypatch, wrong, has_twins):
    folder = mixture(tmp_path / "hf", "glm4moe", has_twins=has_twins)
    monkeypatch.setattr(native_step, "route_struct", partial(wrong, native_step.route_struct))
    words = (
        r"m: .*: the router of layer 1 chooses experts .* for token \d+, not .*the file is not kept"
    )
    with pytest.raises(HotsplitError, match=words):
        verification(folder, tmp_path / "m", "f16")


@pytest.mark.parametrize("case", ["glm4moe", "glm4moe-groups", "mixtral"])
@pytest.mark.parametrize("scale, bias", [(1e-4, 0.0), (1.0, 1e5)])
def test_scores_that_are_all_but_equal_are_no_ties_for_that(
    tmp_path, monkeypatch, case, scale, bias
):
    """Where the largest score says nothing of how far scores are apart, as with small weights
    behind a sigmoid or a bias that all experts share, another choice is still found, and the right
    one kept."""
    folder = mixture(tmp_path / "hf", case)
    weights = load_file(folder / "model.safetensors")
    for name in weights:
        if name.endswith("e_score_correction_bias"):
            weights[name] = torch.full_like(weights[name], bias)
        elif name.endswith(ROUTERS):
            weights[name] = weights[name] * scale
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    right = verification(folder, tmp_path / "right.gguf", "f16")
    assert right.relative_error is not None and right.relative_error < BOUND / MARGIN
    wrong = partial(with_other_rows, native_step.route_struct)
    monkeypatch.setattr(native_step, "route_struct", wrong)
    with pytest.raises(HotsplitError, match=r"the router of layer \d chooses experts"):
        verification(folder, tmp_path / "m", "f16")


# ---- what is followed -----------------------------------------------------------------------


def spec_of(route: Route):
    return mixture_spec(make_sizes(num_layers=2), route=route)


SCORES = torch.tensor([[4.0, 3.0, 3.0 - 1e-5, 1.0], [1.0, 2.0, 3.0, 4.0]])


@pytest.mark.parametrize("select", ["topk", "sort"])
def test_a_tie_is_followed_and_anything_else_is_a_fault(select):
    ids = [torch.tensor([[2, 0], [3, 2]]), torch.tensor([[0, 1], [2, 1]])]
    followed = Followed(spec_of(Route(num_experts=4, num_used=2)), ids, 1e-4)

    def largest(score_TE):
        if select == "topk":
            return score_TE.topk(2)
        found = score_TE.sort(dim=1, descending=True, stable=True)
        assert all(sorted(row) == [0, 1, 2, 3] for row in found.indices.tolist())
        return found.values[:, :2], found.indices[:, :2]

    with followed:
        first, second = largest(SCORES), largest(SCORES)
    assert first[1].tolist() == [[2, 0], [3, 2]]
    assert torch.equal(first[0], SCORES.gather(1, first[1]))
    assert second[1].tolist() == [[0, 1], [3, 2]]  # its own
    assert followed.is_complete and (followed.num_ties, followed.num_choices) == (1, 4)
    fault = followed.fault
    assert (fault.layer, fault.token, fault.got, fault.wanted) == (1, 1, (1,), (3,))
    assert fault.gap == pytest.approx(2.0)
    assert fault.tie == pytest.approx(6e-4, rel=1e-2)  # of their spread
    assert (
        "the router of layer 1 chooses experts 1 for token 1, not 3, whose scores are 2.0e+00"
        in str(fault)
    )


def test_passes_are_followed_in_order_and_nothing_else_is():
    ids = [torch.tensor([[1, 0], [2, 3], [0, 2]]), torch.tensor([[0, 1], [3, 2], [1, 0]])]
    followed = Followed(spec_of(Route(num_experts=4, num_used=2)), ids, 1e-4)
    same = torch.ones(3, 4)
    with followed:
        for rows in ([0, 1], [2]):
            for layer in range(2):
                assert not followed.is_complete
                torch.ones(2, 5).topk(2), torch.ones(4).topk(2), torch.ones(2, 4).topk(3)
                assert torch.equal(same[rows].topk(2).indices, ids[layer][rows])
        assert followed.is_complete
        assert same[:1].topk(2).indices.shape == (1, 2)  # after the text
    assert followed.fault is None


def test_a_tie_of_groups_is_followed():
    route = Route(num_experts=6, num_used=2, num_groups=3, num_used_groups=2)
    ids = [torch.tensor([[5, 4]])] * 2
    followed = Followed(spec_of(route), ids, 1e-4)
    score = torch.tensor([[2.0, 1.0, 1.0, 1.0, 1.0, 1.0 - 1e-6]])
    with followed:
        groups = torch.tensor([[3.0, 2.0, 2.0 - 1e-6]]).topk(2).indices
        assert sorted(groups[0].tolist()) == [0, 2]
        score[:, 0], score[:, 2:4] = 1.0 - 1e-6, 0.5
        assert score.topk(2).indices.tolist() == [[5, 4]]
    assert followed.fault is None and followed.num_ties == 2


# ---- the check of a load with a GPU ---------------------------------------------------------


def mixture_with_near_ties(path: Path, distance: float):
    """The scores of each second expert are `distance`, relative to their size, from those before
    it."""
    route = Route(num_experts=6, num_used=1)
    model = make_model(
        spec=mixture_spec(make_sizes(num_layers=3, context_length=64), route=route), kind="f16"
    )
    tensors, chance = dict(model.tensors), np.random.default_rng(0)
    for name in [name for name in tensors if name.endswith("ffn_gate_inp.weight")]:
        values = tensors[name].read().copy()
        values[1::2] = values[::2] * (1 + distance * chance.standard_normal(values[::2].shape))
        tensors[name] = array_entry(values, "f32")
    dataclasses.replace(model, tensors=tensors).save(path)
    return ModelFile.load(path)


def test_a_gpu_that_decides_ties_otherwise_is_used(tmp_path, caplog):
    caplog.set_level("INFO")
    model = mixture_with_near_ties(tmp_path / "m.gguf", 1e-3)
    asked = model, "dense", CacheTypes.of("f32")
    plain, near = device_check._routed_on_cpu(*asked, ())
    assert rel_error(plain["a step"], device_check.logits_on_cpu(*asked)["a step"]) < 1e-5
    # Of the prompt's last token and of the step's.
    assert {token for _, token in near} == {31, 32} and len(near) == 6
    got, _ = device_check._routed_on_cpu(*asked, near[1:5])
    assert min(device_check._errors(got, plain)) > device_check.BOUND
    device_check.check_against_cpu(got, *asked)
    assert (
        "choices of experts are ties within the GPU's rounding" in caplog.records[-1].getMessage()
    )
    halved = {name: 0.5 * values for name, values in got.items()}
    with pytest.raises(device_check.DeviceFails, match="are off by"):
        device_check.check_against_cpu(halved, *asked)


def test_a_gpu_that_takes_other_experts_is_not(tmp_path):
    model = mixture_with_near_ties(tmp_path / "m.gguf", 1.0)
    asked = model, "dense", CacheTypes.of("f32")
    _, near = device_check._routed_on_cpu(*asked, ())
    places = {(router, token) for router in range(3) for token in (31, 32)} - {*near}
    assert len(places) >= 4
    got, _ = device_check._routed_on_cpu(*asked, places)
    with pytest.raises(device_check.DeviceFails, match="are off by"):
        device_check.check_against_cpu(got, *asked)
