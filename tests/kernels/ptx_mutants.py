"""Mutants: kernels with one error planted in their source or their PTX, and what finds it.

`MUTANTS` lists all but those of `without_each_barrier`, each with what should find it: the name of
one of the executor's faults, "values" for the comparison with float64, or "nothing" with the
reason."""

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

SOURCE = [
    Mutant(
        what="quants of q4_K one byte late",
        place="super_blocks.py",
        case="dot q4_k",
        old="* 144 + 16 +",
        new="* 144 + 17 +",
        found_by="OutOfBounds",
        is_quick=True,
    ),
    Mutant(
        what="upper bits of a scale shifted by one more",
        place="super_blocks.py",
        case="dot q4_k",
        old="(high & 15) | (low >> 6 << 4)",
        new="(high & 15) | (low >> 6 << 5)",
        found_by="values",
    ),
    Mutant(
        what="part 4 of a super-block read as part 0 to 3 are",
        place="super_blocks.py",
        case="dot q4_k",
        old="scale = tl.where(part < 4",
        new="scale = tl.where(part <= 4",
        found_by="values",
    ),
    Mutant(
        what="scales of low and high parts swapped",
        place="super_blocks.py",
        case="dot q5_k",
        old="return factor * scale_low, factor * scale_high,",
        new="return factor * scale_high, factor * scale_low,",
        found_by="values",
    ),
    Mutant(
        what="scales read as bf16",
        place="small_blocks.py",
        case="dot q8_0",
        old="tl.pointer_type(tl.float16)",
        new="tl.pointer_type(tl.bfloat16)",
        found_by="values",
    ),
    Mutant(
        what="high nibbles shifted by 3",
        place="small_blocks.py",
        case="dot q4_0",
        old="high = both >> 4",
        new="high = both >> 3",
        found_by="values",
    ),
    Mutant(
        what="signed bytes read as unsigned",
        place="small_blocks.py",
        case="dot q8_0",
        old="both.to(tl.int8, bitcast=True).to(tl.float32)",
        new="both.to(tl.float32)",
        found_by="values",
    ),
    Mutant(
        what="wrong upper bits of q6_K",
        place="super_blocks.py",
        case="dot q6_k",
        old="(upper & 3) << 4",
        new="(upper & 3) << 5",
        found_by="values",
    ),
    Mutant(
        what="minima added instead of subtracted",
        place="blocks.py",
        case="dot q5_k",
        old="total -= minimum_high",
        new="total += minimum_high",
        found_by="values",
    ),
    Mutant(
        what="rows a stride of one element too long",
        place="blocks.py",
        case="dot f16",
        old="* stride * ALIGN",
        new="* (stride * ALIGN + 1)",
        found_by="OutOfBounds",
    ),
    Mutant(
        what="units past a row are read",
        place="blocks.py",
        case="dot of width 40",
        old="is_live = is_live & (unit * 16 + lane < WIDTH)",
        new="is_live = is_live",
        found_by="OutOfBounds",
        is_quick=True,
    ),
    Mutant(
        what="results stored without a mask",
        place="rows.py",
        case="dot f16, 5 rows",
        old="tl.store(out + row_R, y_R, mask=live_R)",
        new="tl.store(out + row_R, y_R)",
        found_by="OutOfBounds",
    ),
    Mutant(
        what="the bias loaded without a mask",
        place="rows.py",
        case="dot with bias",
        old="tl.load(bias + row_R, mask=live_R, other=0.0)",
        new="tl.load(bias + row_R)",
        found_by="OutOfBounds",
    ),
    Mutant(
        what="ReLU by < instead of <=",
        place="rows.py",
        case="dot with relu",
        old="tl.where(y_R <= 0.0, 0.0, y_R)",
        new="tl.where(y_R < 0.0, 0.0, y_R)",
        found_by="nothing",
        reason="the same function: 0 stays 0",
    ),
    Mutant(
        what="the row is not added",
        place="rows.py",
        case="embed added",
        old="value += tl.load(place",
        new="value = tl.load(place",
        found_by="values",
    ),
    Mutant(
        what="rows of the index counted from 1",
        place="rows.py",
        case="unpack to bf16",
        old="row_R = tl.load(index + at_R,",
        new="row_R = 1 + tl.load(index + at_R,",
        found_by="OutOfBounds",
    ),
    Mutant(
        what="a last block alone taken for one of two",
        place="tiles.py",
        case="unpack q6_k in tiles",
        old="block - is_second + 1 < WIDTH // 256",
        new="block - is_second < WIDTH // 256",
        found_by="OutOfBounds",
        is_quick=True,
    ),
    Mutant(
        what="units past a row of tiles are read",
        place="tiles.py",
        case="unpack q8_0 in tiles",
        old="is_live = unit < WIDTH // (16 * PARTS)",
        new="is_live = unit < 16",
        found_by="OutOfBounds",
    ),
    Mutant(
        what="rows of a group 8 apart",
        place="tiles.py",
        case="unpack q4_0 in groups",
        old="(unit % (SIZE // 16) * 16 + lane) * 4 + row // 16",
        new="(unit % (SIZE // 16) * 16 + lane) * 4 + row // 8 % 4",
        found_by="values",
    ),
    Mutant(
        what="a tile's bytes one row on",
        place="tiles.py",
        case="unpack q5_k in tiles",
        old="byte // 4 * 64 + row * 4",
        new="byte // 4 * 64 + row % 15 * 4",
        found_by="values",
    ),
    Mutant(
        what="a score at the threshold predicts",
        place="predictor.py",
        case="score at the threshold",
        old="(score_R <= threshold)",
        new="(score_R < threshold)",
        found_by="values",
    ),
    Mutant(
        what="bits of neurons past the last",
        place="predictor.py",
        case="bits past the last",
        old="== 0) & live_R",
        new="== 0)",
        found_by="values",
    ),
    Mutant(
        what="bits in the opposite order",
        place="predictor.py",
        case="predict",
        old="<< tl.arange(0, ROWS)",
        new="<< (ROWS - 1 - tl.arange(0, ROWS))",
        found_by="values",
    ),
    Mutant(
        what="silent neurons are not dropped",
        place="neurons.py",
        case="rows not needed",
        old="live_R = live_R & fires_R",
        new="live_R = live_R",
        found_by="values",
    ),
    Mutant(
        what="a neuron's bit by its place, not its id",
        place="neurons.py",
        case="gate_up of ids",
        old="neuron_R = tl.load(id_N + row_R, mask=in_block_R, other=0)",
        new="neuron_R = row_R",
        found_by="values",
    ),
    Mutant(
        what="up is not rectified",
        place="neurons.py",
        case="drelu",
        old='relu(up_R) if ACTIVATION == "drelu" else up_R',
        new="up_R",
        found_by="values",
    ),
    Mutant(
        what="the next part's first neuron added too",
        place="neurons.py",
        case="down of 65",
        old="tl.minimum(begin + size, num_rows)",
        new="tl.minimum(begin + size + 1, num_rows)",
        found_by="values",
    ),
    Mutant(
        what="one neuron past the last",
        place="neurons.py",
        case="down of 17",
        old="tl.minimum(begin + size, num_rows)",
        new="begin + size",
        found_by="OutOfBounds",
    ),
    Mutant(
        what="one open neuron too many",
        place="neurons.py",
        case="down, zeros skipped",
        old="number_R < num_open, unit_U",
        new="number_R <= num_open, unit_U",
        found_by="OutOfBounds",
    ),
    Mutant(
        what="sums a value too far apart",
        place="neurons.py",
        case="down",
        old=".to(tl.int64) * WIDTH",
        new=".to(tl.int64) * (WIDTH + 1)",
        found_by="OutOfBounds",
    ),
    Mutant(
        what="the last neuron of a chunk scanned twice",
        place="neurons.py",
        case="down of 300",
        old="start += CHUNK",
        new="start += CHUNK - 1",
        found_by="values",
    ),
    Mutant(
        what="the mean of the padded width",
        place="norm.py",
        case="norm",
        old="tl.sum(centred * centred, axis=0) / WIDTH",
        new="tl.sum(centred * centred, axis=0) / BLOCK",
        found_by="values",
    ),
    Mutant(
        what="the vector loaded without a mask",
        place="norm.py",
        case="norm",
        old="tl.load(x + column, mask=in_row, other=0.0)",
        new="tl.load(x + column)",
        found_by="OutOfBounds",
        is_quick=True,
    ),
    Mutant(
        what="the term of the first row for all",
        place="norm.py",
        case="norm, term and copy",
        old="            term += at",
        new="            term += 0",
        found_by="values",
    ),
    Mutant(
        what="the sum copied instead of its norm",
        place="norm.py",
        case="norm, term and copy",
        old="tl.store(copy + column, normed,",
        new="tl.store(copy + column, total,",
        found_by="values",
    ),
    Mutant(
        what="all copied bits in the first row",
        place="predictor.py",
        case="bits twice",
        old="                copy += named_stride",
        new="                copy += 0",
        found_by="values",
    ),
    Mutant(
        what="no epsilon",
        place="norm.py",
        case="norm alone",
        old="mean_square + epsilon",
        new="mean_square",
        found_by="values",
    ),
    Mutant(
        what="one part too few",
        place="norm.py",
        case="sum of 17",
        old="(part < NUM_PARTS)",
        new="(part < NUM_PARTS - 1)",
        found_by="values",
    ),
    Mutant(
        what="a rotation the other way",
        place="heads.py",
        case="rotation",
        old="return first * cos - second * sin,",
        new="return first * cos + second * sin,",
        found_by="values",
    ),
    Mutant(
        what="angles in f32",
        place="heads.py",
        case="late positions",
        old="position.to(tl.float64) * tl.load(frequency + pair, mask=is_turned, other=0.0)",
        new="(position.to(tl.float32) * tl.load(frequency + pair, mask=is_turned, other=0.0)"
        ".to(tl.float32)).to(tl.float64)",
        found_by="values",
    ),
    Mutant(
        what="keys beyond the last head",
        place="heads.py",
        case="rotation",
        old="((head - NUM_HEADS) % NUM_KV)",
        new="(head - NUM_HEADS)",
        found_by="values",
    ),
    Mutant(
        what="keys rounded to bf16",
        place="heads.py",
        case="rotation in f32",
        old="first.to(key.dtype.element_ty)",
        new="first.to(tl.bfloat16).to(key.dtype.element_ty)",
        found_by="values",
    ),
    Mutant(
        what="no barrier before a store in place",
        place="heads.py",
        case="rotation of pairs",
        old="tl.debug_barrier()",
        new="pass",
        found_by="DataRace",
    ),
    Mutant(
        what="the last position left out",
        place="attention.py",
        case="attention",
        old="tl.minimum(begin + SPLIT, last + 1)",
        new="tl.minimum(begin + SPLIT, last)",
        found_by="values",
    ),
    Mutant(
        what="positions of a tile past the last get a weight",
        place="attention.py",
        case="attention",
        old='tl.where(is_read_P, score_P, float("-inf"))',
        new="score_P",
        found_by="values",
    ),
    Mutant(
        what="a part of the context is not joined",
        place="attention.py",
        case="attention",
        old="part_S <= last // SPLIT",
        new="part_S < last // SPLIT",
        found_by="values",
    ),
    Mutant(
        what="old sums are not shrunk",
        place="attention.py",
        case="attention of long parts",
        old="sum_GW *= shrink_G[:, None]",
        new="sum_GW *= 1.0",
        found_by="values",
    ),
    Mutant(
        what="e to the power of plus x",
        place="activation.py",
        case="silu",
        old="value = x / (1.0 + tl.exp(-x))",
        new="value = x / (1.0 + tl.exp(x))",
        found_by="values",
    ),
    Mutant(
        what="the root of one half in one digit",
        place="activation.py",
        case="gelu",
        old="x * 0.7071067811865476",
        new="x * 0.7",
        found_by="values",
    ),
    Mutant(
        what="the root of one half in four digits",
        place="activation.py",
        case="gelu",
        old="x * 0.7071067811865476",
        new="x * 0.7071",
        found_by="nothing",
        reason="an error of one part in 100,000 is within the bound of a sum of 64 terms",
    ),
]

PTX = [
    Mutant(
        what="a load of 16 bytes 4 bytes late",
        place="_dot",
        case="dot f16",
        old=r"(ld\.global\.v[24]\.b32 [^\[]*\[ %rd\d+) \+ 0",
        new=r"\1 + 4",
        found_by="Misaligned",
        is_quick=True,
    ),
    Mutant(
        what="a load 16 bytes late",
        place="_dot",
        case="dot f16",
        old=r"(ld\.global\.v[24]\.b32 [^\[]*\[ %rd\d+) \+ 0",
        new=r"\1 + 16",
        found_by="OutOfBounds",
    ),
    Mutant(
        what="a load's guard dropped",
        place="_dot",
        case="dot f16, 5 rows",
        old=r"@%p\d+ (ld\.global)",
        new=r"\1",
        found_by="OutOfBounds",
        is_quick=True,
    ),
    Mutant(
        what="a store's guard dropped",
        place="_dot",
        case="dot f16, 5 rows",
        old=r"@%p\d+ (st\.global)",
        new=r"\1",
        found_by="OutOfBounds",
    ),
    Mutant(
        what="a store's guard inverted",
        place="_dot",
        case="dot beside others",
        old=r"@%p(\d+) (st\.global)",
        new=r"@!%p\1 \2",
        found_by="OutOfBounds",
    ),
    Mutant(
        what="a shuffle from the wrong lane",
        place="_dot",
        case="dot f16",
        old=r"(shfl\.sync\.bfly\.b32\s+%r\d+, %r\d+), 4,",
        new=r"\1, 1,",
        found_by="values",
        is_quick=True,
    ),
    Mutant(
        what="a shuffle that names 31 lanes",
        place="_dot",
        case="dot f16",
        old=r"(shfl\.sync[^;]*), -1;",
        new=r"\1, 2147483647;",
        found_by="BadShuffle",
    ),
    Mutant(
        what="half precision read as bf16",
        place="_dot",
        case="dot f16",
        old=r"cvt\.f32\.f16",
        new="cvt.f32.bf16",
        found_by="values",
        is_quick=True,
    ),
    Mutant(
        what="factor and sum of an fma swapped",
        place="_dot",
        case="dot q4_k",
        old=r"fma\.rn\.f32(\s+%r\d+, %r\d+), (%r\d+), (%r\d+);",
        new=r"fma.rn.f32\1, \3, \2;",
        found_by="values",
    ),
    Mutant(
        what="a difference the other way round",
        place="_dot",
        case="dot q4_k",
        old=r"sub\.f32(\s+%r\d+), (%r\d+), (%r\d+);",
        new=r"sub.f32\1, \3, \2;",
        found_by="values",
    ),
    Mutant(
        what="a mask of nibbles of five bits",
        place="_dot",
        case="dot q4_k",
        old=r"(and\.b(?:16|32)\s+%rs?\d+, %rs?\d+), 15;",
        new=r"\1, 31;",
        at=6,
        found_by="values",
    ),
    Mutant(
        what="bytes permuted wrongly",
        place="_dot",
        case="dot q4_0",
        old=r"(prmt\.b32\s+%r\d+, %r\d+, \S+), 0x7771U",
        new=r"\1, 0x7772U",
        found_by="values",
    ),
    Mutant(
        what="the other operand selected",
        place="_dot",
        case="dot q4_k",
        old=r"selp\.b32(\s+%r\d+), (\S+), (\S+), ",
        new=r"selp.b32\1, \3, \2, ",
        found_by="values",
    ),
    Mutant(
        what="addresses of 2 bytes a value",
        place="_dot",
        case="dot f16",
        old=r"mad\.wide\.u32(\s+%rd\d+, %r\d+), 4,",
        new=r"mad.wide.u32\1, 2,",
        found_by="Misaligned",
    ),
    Mutant(
        what="one row too many",
        place="_dot",
        case="dot f16, 5 rows",
        old=r"setp\.lt\.s32",
        new="setp.le.s32",
        found_by="OutOfBounds",
    ),
    Mutant(
        what="a sum stored a word further",
        place="_dot",
        case="dot f16",
        old=r"(st\.shared\.b32 \[ %r\d+) \+ 0",
        new=r"\1 + 4",
        found_by="values",
    ),
    Mutant(
        what="a barrier that half of the threads skip",
        place="_dot",
        case="dot f16",
        old=r"bar\.sync\s+0;",
        new=r"setp.lt.u32 %p1, %r1, 5; @%p1 bra $skip; bar.sync 0; $skip:",
        found_by="BadBarrier",
        is_quick=True,
    ),
    Mutant(
        what="a value before a masked load left out",
        place="_dot",
        case="dot f16, 5 rows",
        old=r"mov\.u32 %r\d+, (?:%r\d+|0x0);\s+(?=(?:mov\.u32[^;]*;\s+)*@%p\d+ ld\.global)",
        new="",
        found_by="nothing",
        reason="in the rows past the last, which are not stored",
    ),
    Mutant(
        what="a value before a masked load left out, in a row",
        place="_dot",
        case="dot of width 40",
        old=r"mov\.u32 %r\d+, (?:%r\d+|0x0);\s+(?=(?:mov\.u32[^;]*;\s+)*@%p\d+ ld\.global)",
        new="",
        at=1,
        found_by="Uninitialised",
    ),
    Mutant(
        what="a store of matrices between barriers left out",
        place="_unpack",
        case="unpack q4_k",
        old=r"st\.shared\.v4\.b32[^;]*;",
        new="",
        found_by="Uninitialised",
    ),
    Mutant(
        what="a matrix loaded from the next row",
        place="_unpack",
        case="unpack q4_k",
        old=r"(ldmatrix[^\[]*\[%r\d+)\]",
        new=r"\1+16]",
        found_by="OutOfBounds",
    ),
    Mutant(
        what="rounded to f16 on the way to bf16",
        place="_unpack",
        case="unpack to bf16",
        old=r"cvt\.rn\.bf16x2\.f32",
        new="cvt.rn.f16x2.f32",
        found_by="values",
    ),
    Mutant(
        what="halves of a pair swapped",
        place="_unpack",
        case="unpack to f16",
        old=r"cvt\.rn\.f16x2\.f32(\s+%r\d+), (%r\d+), (%r\d+);",
        new=r"cvt.rn.f16x2.f32\1, \3, \2;",
        found_by="values",
    ),
    Mutant(
        what="a count of neurons as a maximum",
        place="_down",
        case="down, zeros skipped",
        old=r"redux\.sync\.add\.s32",
        new="redux.sync.max.s32",
        found_by="values",
    ),
    Mutant(
        what="a running count over the wrong lane",
        place="_down",
        case="down, zeros skipped",
        old=r"(shfl\.sync\.up\.b32\s+%r\d+, %r\d+), 4,",
        new=r"\1, 5,",
        found_by="OutOfBounds",
    ),
    Mutant(
        what="a loop left the other way",
        place="_down",
        case="down",
        old=r"@%p(\d+) bra",
        new=r"@!%p\1 bra",
        found_by="values",
    ),
    # The first six are of units past a row of 32 values, whose bytes nobody reads.
    Mutant(
        what="signed bytes converted without a sign",
        place="_down",
        case="down q8_0",
        old=r"cvt\.s16\.s8",
        new="cvt.u16.u8",
        at=6,
        found_by="values",
    ),
    Mutant(
        what="bits of a word counted modulo 16",
        place="_gate_up",
        case="gate_up",
        old=r"(and\.b32\s+%r\d+, %r\d+), 31;",
        new=r"\1, 15;",
        at=0,
        found_by="nothing",
        reason="the number of neurons is below 16",
    ),
    Mutant(
        what="a mean by a product instead of a quotient",
        place="_add_norm",
        case="norm",
        old=r"div\.full\.f32",
        new="mul.f32",
        found_by="values",
    ),
    Mutant(
        what="a root less precise by 2^-20",
        place="_add_norm",
        case="norm alone",
        old=r"(rsqrt\.approx\.ftz\.f32\s+(%r\d+), %r\d+;)",
        new=r"\1 fma.rn.f32 \2, \2, 0f35800000, \2;",
        found_by="nothing",
        reason="an error of one part in a million is within the bound of a sum of 96 terms",
    ),
    Mutant(
        what="a root less precise by 2^-12",
        place="_add_norm",
        case="norm alone",
        old=r"(rsqrt\.approx\.ftz\.f32\s+(%r\d+), %r\d+;)",
        new=r"\1 fma.rn.f32 \2, \2, 0f39800000, \2;",
        found_by="values",
    ),
    Mutant(
        what="the sine's last term left out",
        place="_rotate_append",
        case="late positions",
        old=r"0fB94D4153",
        new="0f00000000",
        found_by="values",
    ),
    Mutant(
        what="a cache's stride of another parameter",
        place="_rotate_append",
        case="rotation",
        old=r"_rotate_append_param_8\]",
        new="_rotate_append_param_10]",
        found_by="values",
    ),
    Mutant(
        what="a maximum instead of a sum",
        place="_attend_part",
        case="attention",
        old=r"add\.f32",
        new="max.f32",
        at=40,
        found_by="values",
    ),
    Mutant(
        what="the exponent of 2 instead of e",
        place="_attend_part",
        case="attention",
        old=r"(mul\.f32\s+%r\d+, %r\d+), 0f3FB8AA3B;",
        new=r"\1, 0f3F800000;",
        at=1,
        found_by="values",
    ),
    Mutant(
        what="an exponent with a sign lost",
        place="_attend_join",
        case="attention",
        old=r"sub\.f32(\s+%r\d+), (%r\d+), (%r\d+);",
        new=r"sub.f32\1, \3, \2;",
        found_by="values",
    ),
]

MUTANTS = [*SOURCE, *PTX]
