"""Mutants: kernels with one error planted in their source or their PTX, and what finds it.

`MUTANTS`, in ptx_mutants.txt, are all but those of `without_each_barrier`, each with what should
find it: the name of one of the executor's faults, "values" for the comparison with float64, or
"nothing" with the reason."""

import re
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import test_gpu_attention as attention
import test_gpu_experts as experts
import test_gpu_kernels as rows
import test_gpu_neurons as neurons
import torch
from ptx import Fault
from ptx.kernels import FOLDER, MODULES, PACKAGE, PtxKernels

from hotsplit.runtime.kernels.gpu import ranges

ARCH = 89
HELPERS = ("activation", "small_blocks", "super_blocks", "blocks")  # modules without launches

# ---- the comparisons -----------------------------------------------------------------------

CASES: dict[str, Callable] = {
    "dot f16": lambda k: rows.test_dot(k, "f16", 3),
    "dot f16, 5 rows": lambda k: rows.test_dot_of_any_number_of_rows(k, 5),
    "dot of width 40": lambda k: rows.test_rows_of_floats_may_have_any_width(k, "f16", 40),
    "dot with bias": lambda k: rows.test_dot(k, "q8_0_planar", 1),
    "dot q4_k": lambda k: rows.test_dot(k, "q4_k", 3),
    "dot q4_0": lambda k: rows.test_dot(k, "q4_0_planar", 3),
    "dot q5_k": lambda k: rows.test_dot(k, "q5_k", 3),
    "dot q6_k": lambda k: rows.test_dot(k, "q6_k_planar", 3),
    "dot q3_k": lambda k: rows.test_dot(k, "q3_k_planar", 1),
    "dot q2_k": lambda k: rows.test_dot(k, "q2_k_planar", 1),
    "dot iq4_xs": lambda k: rows.test_dot(k, "iq4_xs_planar", 1),
    "dot q8_0": lambda k: rows.test_dot(k, "q8_0_planar", 3),
    "dot with relu": rows.test_dot_with_relu,
    "dot beside others": rows.test_dot_writes_only_its_own_values,
    "unpack q4_k": lambda k: rows.test_unpack(k, "q4_k"),
    "unpack to bf16": lambda k: rows.test_unpack_of_chosen_rows_with_gaps(k, "q8_0_planar"),
    "unpack to f16": rows.test_unpack_to_f16_into_rows_with_gaps,
    "unpack q6_k in tiles": lambda k: rows.test_unpack_of_tiles_and_groups(k, "q6_k_tiled", 1),
    "unpack q3_k in tiles": lambda k: rows.test_unpack_of_tiles_and_groups(k, "q3_k_tiled", 1),
    "unpack q2_k in tiles": lambda k: rows.test_unpack_of_tiles_and_groups(k, "q2_k_tiled", 1),
    "unpack iq4_xs in tiles": lambda k: rows.test_unpack_of_tiles_and_groups(k, "iq4_xs_tiled", 1),
    "unpack q5_k in tiles": lambda k: rows.test_unpack_of_tiles_and_groups(k, "q5_k_tiled", 2),
    "unpack q8_0 in tiles": lambda k: rows.test_unpack_of_tiles_and_groups(k, "q8_0_tiled", 5),
    "unpack q4_0 in groups": lambda k: rows.test_unpack_of_tiles_and_groups(k, "q4_0_grouped", 2),
    "unpack f16 in groups": lambda k: rows.test_unpack_of_tiles_and_groups(k, "f16_grouped", 2),
    "embed added": lambda k: rows.test_embed(k, "f16", True),
    "predict": lambda k: rows.test_predict(k, "q8_0_planar", 1),
    "bits past the last": lambda k: rows.test_bits_past_the_last_neuron_are_zero(k, 9),
    "score at the threshold": rows.test_a_score_at_the_threshold_names_no_neuron,
    "gate_up": lambda k: neurons.test_gate_up(k, "q4_0_planar", 1),
    "gate_up q4_k": lambda k: neurons.test_gate_up(k, "q4_k", 3),
    "silu": lambda k: neurons.test_gate_up_of_every_activation(k, "silu", True, False),
    "gelu": lambda k: neurons.test_gate_up_of_every_activation(k, "gelu", True, True),
    "drelu": lambda k: neurons.test_gate_up_of_every_activation(k, "drelu", True, False),
    "gate_up of ids": lambda k: neurons.test_named_neurons_are_looked_up_by_their_ids(k, 19),
    "rows not needed": neurons.test_rows_that_are_not_needed_are_not_read,
    "down": lambda k: neurons.test_down(k, "f16", True, False),
    "down, zeros skipped": lambda k: neurons.test_down(k, "f16", True, True),
    "down q8_0": lambda k: neurons.test_down(k, "q8_0_planar", False, False),
    "down of 65": lambda k: neurons.test_down_of_any_number_of_neurons(k, 65, False),
    "down of 300": lambda k: neurons.test_down_of_any_number_of_neurons(k, 300, True),
    "down of 17": lambda k: neurons.test_down_of_any_number_of_neurons(k, 17, True),
    "down of q6_k": lambda k: neurons.test_down_of_rows_of_any_width(k, "q6_k_planar", 256, False),
    "rows of zeros": neurons.test_rows_of_zeros_are_not_read,
    "norm": lambda k: attention.test_add_norm(k, 96, True),
    "norm of 2304": lambda k: attention.test_add_norm(k, 2304, True),
    "norm alone": attention.test_norm_alone,
    "norm, term and copy": lambda k: attention.test_add_norm_with_a_term_and_a_copy_of_the_result(
        k, (2, 96), True
    ),
    "experts chosen": lambda k: experts.test_the_choice_equals_its_definition(k, "groups"),
    "hidden values of experts": lambda k: experts.test_hidden_values(k, "q4_0_planar", 1),
    "outputs of experts": lambda k: experts.test_outputs(k, "f16"),
    "sums of experts": lambda k: experts.test_outputs_of_experts_by_neurons(k, "q8_0_planar", True),
    "bits twice": lambda k: rows.test_bits_are_written_twice(k, 2),
    "sum of 17": lambda k: attention.test_add_of_any_number_of_parts_in_place(k, 17),
    "rotation": lambda k: attention.test_rotate_append(k, torch.float16, False, "both", 80, 1),
    "rotation in f32": lambda k: attention.test_rotate_append(
        k, torch.float32, False, "both", 80, 1
    ),
    "rotation of pairs": lambda k: attention.test_rotate_append(
        k, torch.float32, True, "none", 32, 0
    ),
    "late positions": lambda k: attention.test_angles_of_late_positions(k, 131071),
    "attention": lambda k: attention.assert_attention(k, 65),
    "attention to 64": lambda k: attention.assert_attention(k, 63),
    "attention of groups": lambda k: attention.assert_attention(k, 70, heads=(4, 1), width=80),
    "attention of long parts": lambda k: long_parts(k),
    "attention to one": lambda k: attention.assert_attention(k, 130, dtype=torch.float16, by=16.0),
}


def long_parts(kernels) -> None:
    """Attention over parts of several tiles, which contexts of more than 4,096 positions have."""
    before = ranges._LEAST_SPLIT
    ranges._LEAST_SPLIT = 256
    try:
        for position in (64, 255, 400):
            attention.assert_attention(kernels, position, context=600)
    finally:
        ranges._LEAST_SPLIT = before


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """`old` becomes `new` in `place`: a module's source (a name with ".py"), or a kernel's PTX,
    where `old` is a pattern. Only occurrence number `at` changes, counted from 0."""

    what: str
    place: str
    old: str
    new: str
    case: str
    found_by: str
    at: int = 0
    reason: str = ""
    is_quick: bool = False


def is_as_expected(mutant: Mutant, found: str) -> bool:
    """Whether `found` is what should find the mutant. For OutOfBounds any finding counts: an
    address outside its tensor may lie in another tensor of the launch, so that another check finds
    it."""
    return found == mutant.found_by or (mutant.found_by == "OutOfBounds" and found != "nothing")


def outcome(mutant: Mutant) -> str:
    """What finds a mutant: the name of a fault, "values", or "nothing"."""
    try:
        CASES[mutant.case](kernels_of(mutant).kernels)
    except Fault as fault:
        return type(fault).__name__
    except AssertionError:
        return "values"
    return "nothing"


def kernels_of(mutant: Mutant) -> PtxKernels:
    if mutant.place.endswith(".py"):
        folder, package = changed_source(mutant)
        return PtxKernels(ARCH, folder=folder, package=package)
    edited = []

    def edit(name: str, text: str) -> str:
        if name != mutant.place:
            return text
        text, done = _edited(text, mutant)
        edited.append(done)
        assert any(edited), (mutant.what, "changes nothing")
        return text

    return PtxKernels(ARCH, edit=edit)


def _edited(text: str, mutant: Mutant) -> tuple[str, bool]:
    end = text.find(".section")
    found = list(re.finditer(mutant.old, text[: end if end > 0 else None]))
    if len(found) <= mutant.at:
        return text, False
    one = found[mutant.at]
    return text[: one.start()] + one.expand(mutant.new) + text[one.end() :], True


@cache
def changed_source(mutant: Mutant) -> tuple[Path, str]:
    """A package of the kernels' sources, in which one place of one module differs."""
    folder = Path(tempfile.mkdtemp(prefix="mutant-"))
    package = "mutant_" + re.sub(r"\W+", "_", mutant.what)
    target = folder / package
    target.mkdir()
    (target / "__init__.py").touch()
    for path in FOLDER.glob("*.py"):
        shutil.copy(path, target)
    for name in (*HELPERS, *MODULES):
        path = target / f"{name}.py"
        text = path.read_text()
        for helper in HELPERS:  # the launching modules stay hotsplit's
            text = text.replace(f"{PACKAGE}.{helper} ", f"{package}.{helper} ")
        if path.name == mutant.place:
            assert text.count(mutant.old) > mutant.at, (mutant.what, text.count(mutant.old))
            parts = text.split(mutant.old)
            head = mutant.old.join(parts[: mutant.at + 1])
            text = head + mutant.new + mutant.old.join(parts[mutant.at + 1 :])
        path.write_text(text)
    return folder, package


# ---- barriers ------------------------------------------------------------------------------


def without_each_barrier(kernel: str, case: str) -> list[Mutant]:
    """A mutant for each block barrier of a kernel, without that barrier."""
    seen = []
    probe = PtxKernels(ARCH, edit=lambda name, text: seen.append((name, text)) or text)
    CASES[case](probe.kernels)
    text = next(text for name, text in seen if name == kernel)
    count = len(re.findall(r"bar\.sync\s+0;", text))
    base = Mutant(
        what="", place=kernel, old=r"bar\.sync\s+0;", new="", case=case, found_by="DataRace"
    )
    return [replace(base, what=f"barrier {at} removed", at=at) for at in range(count)]


# Kernels whose barriers are removed one at a time, each with a case that needs all of them.
BARRIERS = (
    ("_dot", "dot f16"),
    ("_unpack", "unpack q4_k"),
    ("_gate_up", "gate_up q4_k"),
    ("_down", "down of 300"),
    ("_add_norm", "norm of 2304"),
    ("_attend_part", "attention of long parts"),
    ("_attend_join", "attention"),
)


def _read(path: Path) -> list[Mutant]:
    """Reads a line `what | place | case | found by` a mutant, with `quick` or `at NUMBER` behind,
    then on lines of their own: why it is not found; `-` and the old text; `+` and the new one."""
    made: list[dict] = []
    for line in path.read_text().splitlines():
        if not line.startswith("    "):
            what, place, case, found_by, *more = line.split(" | ")
            made.append({"what": what, "place": place, "case": case, "found_by": found_by})
            made[-1]["is_quick"] = "quick" in more
            made[-1]["at"] = next((int(each[3:]) for each in more if each.startswith("at ")), 0)
        else:
            name = {"-": "old", "+": "new"}.get(line[4], "reason")
            made[-1][name] = line[4 if name == "reason" else 6 :]
    return [Mutant(**each) for each in made]


MUTANTS = _read(Path(__file__).with_suffix(".txt"))
