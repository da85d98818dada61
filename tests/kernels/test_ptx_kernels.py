"""The GPU kernels compiled and executed as PTX: the comparisons of their own tests, the launches of
plans, and planted faults. A share that executes every kind of instruction runs by default; the rest
is marked slow. docs/gpu-proof.md has the results of one run of all of it."""

import json
from dataclasses import replace
from functools import cache

import ptx_mutants
import ptx_plans
import pytest
import torch
from gpu_matrices import REFERENCE
from kernel_check import Wrong
from models import changed, make_sizes, shape_only
from paths import ROOT
from ptx.kernels import PtxKernels
from ptx_mutants import BARRIERS, CASES, MUTANTS, is_as_expected, outcome, without_each_barrier

from hotsplit.model.spec import Attention
from hotsplit.runtime.kernels.gpu import launch

RESULT = ROOT / "benchmarks" / "results" / "gpu-proof.json"

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="they run on the device instead"),
    pytest.mark.usefixtures("several_rows"),
]
HOPPER, BLACKWELL = 90, 120
QUICK = [
    ("dot q4_k", HOPPER),
    ("dot q4_0", BLACKWELL),
    ("dot q8_0", HOPPER),
    ("unpack q4_k", HOPPER),
    ("unpack to bf16", BLACKWELL),
    ("unpack q6_k in tiles", HOPPER),
    ("unpack f16 in groups", BLACKWELL),
    ("unpack to f16", HOPPER),
    ("predict", HOPPER),
    ("gate_up of ids", BLACKWELL),
    ("silu", HOPPER),
    ("down, zeros skipped", HOPPER),
    ("norm", BLACKWELL),
    ("norm, term and copy", HOPPER),
    ("rotation", BLACKWELL),
    ("rotation of pairs", HOPPER),
    ("attention", BLACKWELL),
    ("down of q6_k", HOPPER),
    ("experts chosen", HOPPER),
    ("hidden values of experts", BLACKWELL),
    ("outputs of experts", HOPPER),
    ("sums of experts", BLACKWELL),
]


@pytest.fixture(scope="module")
def machines():
    return {arch: PtxKernels(arch) for arch in (HOPPER, BLACKWELL)}


@pytest.fixture(scope="module")
def compare(machines):
    """A function that runs a comparison of QUICK, unless an earlier test of this process has."""
    return cache(lambda case, arch: CASES[case](machines[arch].kernels))


@pytest.mark.parametrize(("case", "arch"), QUICK)
def test_comparisons_of_the_kernels(compare, case, arch):
    compare(case, arch)


def test_the_quick_share_executes_every_kind_of_instruction(machines, compare):
    """Every kind that the launches of all plans execute. A kind is an instruction's first word."""
    for case, arch in QUICK:
        compare(case, arch)
    known = json.loads(RESULT.read_text())["instructions"]
    executed = {name.split(".")[0] for m in machines.values() for name in m.num_lane_instructions}
    missing = {name.split(".")[0] for names in known.values() for name in names} - executed
    assert not missing


def test_launches_of_a_plan(monkeypatch):
    """A small model with predictors and soft caps; the launches are the runtime's own list."""
    monkeypatch.setattr(launch, "LEAST_PROGRAMS", 512)
    shape = make_sizes(num_layers=3, width=64, num_neurons=96, num_heads=2, context_length=64)
    model = ptx_plans.like(shape_only(shape), kind="q8_0", rank=64)
    spec = replace(changed(model.bare_spec, Attention, score_cap=0.7), logit_cap=2.0)
    model = replace(model, bare_spec=spec)
    found = ptx_plans.launches(model, mode="predicted", context=64)
    assert {each.kernel for each in found} >= {"dot", "predict", "gate_up", "down", "attend"}
    assert {each.kernel for each in found if "cap" in each.variant} >= {"dot", "attend"}
    kernels = PtxKernels(89).kernels
    for each in found:
        ptx_plans.assert_right(each, kernels)


@pytest.mark.parametrize("wrong", [torch.zeros_like, lambda t: 0.5 * t, lambda t: t.flip(-1)])
def test_the_comparison_rejects_wrong_results(monkeypatch, wrong):
    monkeypatch.setattr(launch, "LEAST_PROGRAMS", 512)
    right = REFERENCE

    def spoilt(name, output):
        def run(**given):
            getattr(right, name)(**given)
            given[output].copy_(wrong(given[output].float()).to(given[output].dtype))

        return run

    outputs = {
        "dot": "out_N",
        "down": "parts_SD",
        "unpack": "out_AD",
        "attend": "out_HW",
        "gate_up": "hidden_N",
    }
    kernels = right.replaced(**{name: spoilt(name, out) for name, out in outputs.items()})
    shape = make_sizes(num_layers=3, width=64, num_neurons=96, num_heads=2, context_length=64)
    model = ptx_plans.like(shape_only(shape), kind="f16")
    for each in ptx_plans.launches(model, mode="exact", context=64):
        if each.kernel in outputs:
            with pytest.raises(Wrong):
                ptx_plans.assert_right(each, kernels)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        "dot q4_k",
        "unpack q4_k",
        "predict",
        "silu",
        "down, zeros skipped",
        "norm",
        "rotation",
        "attention",
    ],
)
def test_three_architectures_have_the_same_text(case):
    def texts(arch):
        machine = PtxKernels(arch)
        CASES[case](machine.kernels)
        every = [text for counts in machine.launches.values() for text in counts]
        without_names = (text.partition("\t.file\t")[0] for text in every)
        return [text.replace(f".target sm_{arch}", "") for text in without_names]

    assert texts(80) == texts(86) == texts(89) != texts(90)


# ---- planted faults ------------------------------------------------------------------------


def names(mutants):
    return [pytest.param(mutant, id=mutant.what) for mutant in mutants]


@pytest.mark.parametrize("mutant", names(m for m in MUTANTS if m.is_quick))
def test_planted_faults_are_found(mutant):
    assert is_as_expected(mutant, outcome(mutant))


@pytest.mark.parametrize(("kernel", "case"), BARRIERS[:1])
def test_removing_any_barrier_of_a_kernel_is_found(kernel, case):
    mutants = without_each_barrier(kernel, case)
    assert mutants and {outcome(mutant) for mutant in mutants} == {"DataRace"}


@pytest.mark.slow
@pytest.mark.parametrize("mutant", names(m for m in MUTANTS if not m.is_quick))
def test_all_planted_faults_are_found(mutant):
    assert is_as_expected(mutant, outcome(mutant))


@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "case"), BARRIERS[1:])
def test_removing_any_barrier_of_any_kernel_is_found(kernel, case):
    mutants = without_each_barrier(kernel, case)
    assert mutants and {outcome(mutant) for mutant in mutants} == {"DataRace"}


def test_a_mutant_that_changes_nothing_is_an_error():

    mutant = replace(MUTANTS[0], old="no such text in it")
    with pytest.raises(AssertionError):
        ptx_mutants.changed_source(mutant)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ptx_plans.ARCHITECTURES)
@pytest.mark.parametrize("plan", ptx_plans.PLANS)
def test_launches_of_all_plans(monkeypatch, tmp_path, plan, arch):
    monkeypatch.setattr(launch, "LEAST_PROGRAMS", 512)
    found = ptx_plans.launches_of_plan(plan, tmp_path)
    if not found:
        pytest.skip("its model is not here: make smollm2")
    kernels = PtxKernels(arch).kernels
    for each in found:
        ptx_plans.assert_right(each, kernels)
