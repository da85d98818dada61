"""The GPU kernels compiled and executed as PTX: a share of the comparisons of their own tests that
executes every kind of instruction, and planted faults, which these comparisons find.
test_ptx_all.py runs all comparisons; docs/gpu-proof.md has the results of one run with more
faults."""

import json
import re
import shutil
from functools import cache, partial

import pytest
import test_gpu_attention as attention
import test_gpu_experts as experts
import test_gpu_kernels as rows
import test_gpu_neurons as neurons
import test_gpu_rows as steps
import test_gpu_slots as slots
import torch
from paths import ROOT
from ptx import Fault
from ptx.kernels import FOLDER, MODULES, PACKAGE, PtxKernels

OF_TRITON_3_6 = {"popc"}  # which compiled the launches of that result
RESULT = ROOT / "benchmarks" / "results" / "gpu-proof.json"
ADA, HOPPER, BLACKWELL = 89, 90, 120

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="they run on the device instead"),
    pytest.mark.usefixtures("several_rows"),
]

# By name: the card, a test of a kernel, and its arguments after the kernels.
TILES, DOWN = rows.test_unpack_of_tiles_and_groups, neurons.test_down_of_rows_of_any_width
SLOTS = slots.test_rows_of_every_kind_reach_their_slots
FEW_NEURONS = partial(experts.test_hidden_values, num_neurons=3)
CASES: dict[str, tuple] = {
    "dot f16": (ADA, rows.test_dot, "f16", 3),
    "dot f16, 5 rows": (ADA, rows.test_dot_of_any_number_of_rows, 5),
    "dot of width 40": (ADA, rows.test_rows_of_floats_may_have_any_width, "f16", 40),
    "dot q4_k": (HOPPER, rows.test_dot, "q4_k", 3),
    "dot q4_0": (BLACKWELL, rows.test_dot, "q4_0_planar", 3),
    "dot q8_0": (HOPPER, rows.test_dot, "q8_0_planar", 3),
    "dot iq1_table": (HOPPER, rows.test_dot, "iq1_table_planar", 1),
    "dot iq3_s_table": (ADA, rows.test_dot, "iq3_s_table_planar", 1),
    "dot q2_0": (ADA, rows.test_dot, "q2_0_planar", 3),
    "dot q1_0": (HOPPER, rows.test_dot, "q1_0_planar", 1),
    "dot tq2_0": (HOPPER, rows.test_dot, "tq2_0_planar", 1),
    "dot nvfp4_scaled": (ADA, rows.test_dot, "nvfp4_scaled_planar", 3),
    "dot with a cap": (ADA, rows.test_dot_with_a_cap),
    "unpack q4_k": (HOPPER, rows.test_unpack, "q4_k"),
    "unpack to bf16": (BLACKWELL, rows.test_unpack_of_chosen_rows_with_gaps, "q8_0_planar"),
    "unpack to f16": (HOPPER, rows.test_unpack_to_f16_into_rows_with_gaps),
    "unpack q6_k in tiles": (HOPPER, TILES, "q6_k_tiled", 1, 2),
    "unpack iq2_table in tiles": (ADA, TILES, "iq2_table_tiled", 1, 1),
    "unpack iq3_xxs_table in tiles": (ADA, TILES, "iq3_xxs_table_tiled", 1, 1),
    **{
        f"unpack {name} in tiles": (ADA, TILES, f"{name}_tiled", 2, 1)
        for name in ("tq2_0", "q2_0", "nvfp4_scaled")
    },
    "unpack f16 in groups": (BLACKWELL, TILES, "f16_grouped", 2, 1),
    "predict": (HOPPER, rows.test_predict, "q8_0_planar", 1),
    "gate_up of ids": (BLACKWELL, neurons.test_named_neurons_are_looked_up_by_their_ids, 19),
    "silu": (HOPPER, neurons.test_gate_up_of_every_activation, "silu", True, False),
    "down, zeros skipped": (HOPPER, neurons.test_down, "f16", True, True),
    "down of q6_k": (HOPPER, DOWN, "q6_k_planar", 256, False),
    "down of iq3_xxs_table": (ADA, DOWN, "iq3_xxs_table_planar", 256, True),
    "down of q1_0": (ADA, DOWN, "q1_0_planar", 128, False),
    "down of tq2_0": (ADA, DOWN, "tq2_0_planar", 256, True),
    "norm": (BLACKWELL, attention.test_add_norm, 96, True),
    "norm, term and copy": (
        HOPPER,
        attention.test_add_norm_with_a_term_and_a_copy_of_the_result,
        (2, 96),
        True,
    ),
    "rotation": (BLACKWELL, attention.test_rotate_append, torch.float16, False, "both", 80, 1),
    "rotation of pairs": (HOPPER, attention.test_rotate_append, torch.float32, True, "none", 32, 0),
    "attention": (BLACKWELL, attention.assert_attention, 65),
    "attention with a cap": (ADA, attention.test_scores_are_scaled),
    "experts chosen": (HOPPER, experts.test_the_choice_equals_its_definition, "groups"),
    "hidden values of experts": (BLACKWELL, experts.test_hidden_values, "q4_0_planar", 1),
    "hidden values of experts in iq2_table": (ADA, FEW_NEURONS, "iq2_table_planar", 1),
    "hidden values of experts in tq2_0": (ADA, FEW_NEURONS, "tq2_0_planar", 1),
    "outputs of experts": (HOPPER, experts.test_outputs, "f16"),
    "sums of experts": (BLACKWELL, experts.test_outputs_of_experts_by_neurons, "q8_0_planar", True),
    "copies into slots": (ADA, slots.test_copies_of_different_lengths_in_one_launch),
    # With a factor before the planes, and of an odd number of bytes.
    "slots of nvfp4_scaled": (HOPPER, SLOTS, "nvfp4_scaled_planar", 9),
    "slots of mxfp4": (BLACKWELL, SLOTS, "mxfp4_planar", 9),
    "rows: dot q4_0": (ADA, steps.test_dot, "q4_0_planar", 4),
    "rows: dot f16": (ADA, steps.test_dot, "f16", 8),
    "rows: dot iq2_table": (ADA, steps.test_dot, "iq2_table_planar", 2),
    "rows: dot q2_0": (ADA, steps.test_dot, "q2_0_planar", 4),
    "rows: dot tq2_0": (ADA, steps.test_dot, "tq2_0_planar", 2),
    "rows: predict": (ADA, steps.test_predict, "f16", 2),
    "rows: gate_up": (ADA, steps.test_gate_up, "q4_0_planar", 4),
    "rows: down": (ADA, steps.test_down, "f16", 8, True),
    "rows: norm": (ADA, steps.test_add_norm, True, 2),
    "rows: append": (ADA, steps.test_append_to_blocks, 8, torch.float16),
    "rows: attend": (ADA, steps.test_attend_to_blocks, 8, torch.float16, None),
}


def run(name: str, machine: PtxKernels) -> None:
    _, test, *given = CASES[name]
    test(machine.kernels, *given)


@pytest.fixture(scope="module")
def machines():
    return {arch: PtxKernels(arch) for arch in (ADA, HOPPER, BLACKWELL)}


@pytest.fixture(scope="module")
def compare(machines):
    """A function that runs a case, unless an earlier test of this process has."""

    return cache(lambda name: run(name, machines[CASES[name][0]]))


@pytest.mark.parametrize("name", CASES)
def test_comparisons_of_the_kernels(compare, name):
    compare(name)


def test_the_cases_execute_every_kind_of_instruction(machines, compare):
    """Every kind that the launches of plans execute. A kind is an instruction's first word."""
    for name in CASES:
        compare(name)
    known = json.loads(RESULT.read_text())["instructions"]
    executed = {name.split(".")[0] for m in machines.values() for name in m.num_lane_instructions}
    kinds = {name.split(".")[0] for names in known.values() for name in names}
    assert kinds - OF_TRITON_3_6 <= executed


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dot q4_k", "unpack q4_k", "silu", "norm", "attention"])
def test_three_architectures_have_the_same_text(name):
    def texts(arch):
        machine = PtxKernels(arch)
        run(name, machine)
        every = [text for counts in machine.launches.values() for text in counts]
        without_names = (text.partition("\t.file\t")[0] for text in every)
        return [text.replace(f".target sm_{arch}", "") for text in without_names]

    assert texts(80) == texts(86) == texts(ADA) != texts(HOPPER)


# ---- planted faults ------------------------------------------------------------------------


def outcome(case: str, kernels: PtxKernels) -> str:
    """What finds a fault: the name of one of the executor's, "values", or "nothing"."""
    try:
        run(case, kernels)
    except Fault as fault:
        return type(fault).__name__
    except AssertionError:
        return "values"
    return "nothing"


def changed_text(kernel: str, old: str, new: str, at: int = 0) -> PtxKernels:
    """Kernels in whose PTX one occurrence of a pattern is replaced in each text that has it."""
    is_changed = []

    def edit(name: str, text: str) -> str:
        found = list(re.finditer(old, text.partition(".section")[0])) if name == kernel else []
        if len(found) > at:
            one = found[at]
            text = text[: one.start()] + one.expand(new) + text[one.end() :]
            is_changed.append(True)
        assert is_changed or name != kernel, f"nothing like {old!r} in the PTX of {kernel}"
        return text

    return PtxKernels(ADA, edit=edit)


HELPERS = (
    "activation",
    "group_blocks",
    "small_blocks",
    "super_blocks",
    "blocks",
)  # modules without launches


def changed_source(folder, module: str, old: str, new: str) -> PtxKernels:
    """Kernels of a package in which one place of one module's source is replaced."""
    package = folder / f"changed_{folder.name}"  # of each test another
    shutil.copytree(FOLDER, package, ignore=shutil.ignore_patterns("__pycache__"))
    (package / "__init__.py").touch()
    for name in (*HELPERS, *MODULES):
        path = package / f"{name}.py"
        text = path.read_text()
        for helper in HELPERS:  # the launching modules stay hotsplit's
            text = text.replace(f"{PACKAGE}.{helper} ", f"{package.name}.{helper} ")
        if name == module:
            assert old in text, f"nothing like {old!r} in {module}.py"
            text = text.replace(old, new, 1)
        path.write_text(text)
    return PtxKernels(ADA, folder=folder, package=package.name)


@pytest.mark.parametrize(
    ("module", "case", "old", "new"),
    [
        ("super_blocks", "dot q4_k", "* 144 + 16 +", "* 144 + 17 +"),
        ("small_blocks", "dot iq1_table", "(code & 7) * 8", "(code & 3) * 8"),
        (
            "super_blocks",
            "dot iq1_table",
            "factor_at, is_live) * unit_of(KIND)",
            "factor_at, is_live)",
        ),
        (
            "super_blocks",
            "down of iq3_xxs_table",
            "row + at, is_live) * unit_of(KIND)",
            "row + at, is_live)",
        ),
        ("group_blocks", "dot nvfp4_scaled", "unit % 2 * 2 + 1)", "unit % 2 * 2)"),
        ("group_blocks", "dot q2_0", "unit % GROUP.units * 2 + PART", "unit % GROUP.units + PART"),
        ("blocks", "dot of width 40", " & (unit * 16 + lane < WIDTH)", ""),
        ("tiles", "unpack q6_k in tiles", "- is_second + 1 < WIDTH", "- is_second < WIDTH"),
        ("norm", "norm", "tl.load(x + column, mask=in_row, other=0.0)", "tl.load(x + column)"),
    ],
)
def test_faults_in_a_kernels_source_are_found(tmp_path, module, case, old, new):
    """Those of addresses read beyond a tensor; what is there may be another one of the launch."""
    assert outcome(case, changed_source(tmp_path, module, old, new)) in ("OutOfBounds", "values")


@pytest.mark.parametrize(
    ("case", "old", "new", "found"),
    [
        ("dot f16", r"(ld\.global\.v[24]\.b32 [^\[]*\[ %rd\d+) \+ 0", r"\1 + 4", "Misaligned"),
        ("dot f16, 5 rows", r"@%p\d+ (ld\.global)", r"\1", "OutOfBounds"),
        ("dot f16", r"(shfl\.sync\.bfly\.b32\s+%r\d+, %r\d+), 4,", r"\1, 1,", "DataRace"),
        ("dot f16", r"cvt\.f32\.f16", "cvt.f32.bf16", "values"),
        (
            "dot f16",
            r"bar\.sync\s+0;",
            "setp.lt.u32 %p1, %r1, 5; @%p1 bra $skip; bar.sync 0; $skip:",
            "BadBarrier",
        ),
    ],
)
def test_faults_in_the_ptx_of_a_product_are_found(case, old, new, found):
    assert outcome(case, changed_text("_dot", old, new)) == found


def test_removing_any_barrier_of_a_product_is_found():
    texts = []
    probe = PtxKernels(ADA, edit=lambda name, text: texts.append((name, text)) or text)
    run("dot f16", probe)
    barrier = r"bar\.sync\s+0;"
    count = len(re.findall(barrier, next(text for name, text in texts if name == "_dot")))
    found = [outcome("dot f16", changed_text("_dot", barrier, "", at)) for at in range(count)]
    assert found == ["DataRace"] * count and count


def test_a_fault_that_changes_nothing_is_an_error(tmp_path):
    with pytest.raises(AssertionError, match="nothing like"):
        changed_source(tmp_path, "norm", "no such text in it", "")
    with pytest.raises(AssertionError, match="nothing like"):
        run("dot f16", changed_text("_dot", "no such text in it", ""))
