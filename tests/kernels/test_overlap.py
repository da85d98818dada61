"""Kernels of a step that begin before the one before has ended: nothing but weights is read before
they wait, and all threads wait. Executed as PTX for the first cards that can do it; the executor
refuses every access that comes too early, and every thread that never waits."""

import re

import pytest
import test_gpu_attention as attention
import test_gpu_delta as delta
import test_gpu_kernels as rows
import test_gpu_latents as latents
import test_gpu_mamba2 as mamba2
import test_gpu_neurons as neurons
import test_gpu_planes as planes
import test_gpu_short_conv as short
import torch
from ptx import TooEarly
from ptx.kernels import STORES, PtxKernels

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="they run on the device instead")
ADA, HOPPER = 89, 90
WAIT = r"griddepcontrol\.wait;"
# Each kernel of a step, for each form that waits elsewhere: whether weights are read before the
# wait, and a test with its arguments after the kernels.
FORMS: dict[str, tuple] = {
    "dot": ("_dot", True, rows.test_dot_with_relu),
    "embed": ("_unpack", False, rows.test_embed, "f16", True, 1.0),
    "norm": ("_add_norm", False, attention.test_norm_alone),
    "rotate": (
        "_rotate_append",
        False,
        attention.test_rotate_append,
        torch.float32,
        True,
        "none",
        32,
        0,
    ),
    "latents": ("_join_latents", False, latents.joined, latents.ODD, 2),
    "attend": ("_attend_part", False, attention.assert_attention, 63),
    "join": ("_attend_join", False, attention.assert_attention, 63),
    "predict": ("_predict", True, rows.test_bits_past_the_last_neuron_are_zero, 9),
    "gate": ("_gate_up", True, neurons.test_gate_up_of_every_activation, "gelu", True, False),
    "gate, named": ("_gate_up", True, neurons.test_named_neurons_are_looked_up_by_their_ids, 19),
    "convolve": ("_convolve", False, delta.ONE.run),
    "delta": ("_delta_rule", True, delta.ONE.run),
    "short convolution": ("_convolve_gated", False, short.run, short.WIDE, [1]),
    "channels": ("_convolve_channels", False, mamba2.ODD.run, [1]),
    "scan": ("_scan_states", True, mamba2.ODD.run, [1], 0),
    "gate groups": ("_gate_groups", False, mamba2.ODD.run, [1]),
    "gate norm": ("_gate_norm", False, delta.ONE.run),
    "down": ("_down", True, neurons.test_down_of_any_number_of_neurons, 17, False),
    "predict planes": ("_predict_planes", False, planes.assert_mixed, "predict_planes", 3, 70, 2),
    "correct planes": ("_correct_planes", False, planes.assert_mixed, "correct_planes", 3, 70, 2),
    "add to planes": ("_add_to_planes", False, planes.assert_mixed, "add_to_planes", 3, 70, 2),
    "down, zeros": ("_down", False, neurons.test_down_of_any_number_of_neurons, 17, True),
}
OF_PROMPTS = {
    "_unpack_tiles",
    "_multiply",
    "_multiply_down",
    "_sort_pairs",
    "_round_tokens",
    "_hidden_tokens",
    "_attend_tokens",
    "_scatter",
    "_pack_open",
}
# They begin when the last kernel has ended, which chose the experts.
OF_EXPERTS = {"_choose_experts", "_expert_gate_up", "_expert_down", "_expert_sum"}


def run(form: str, edit=lambda text: text, arch: int = HOPPER, overlaps: bool = True) -> str:
    """Runs a form with its kernel's PTX changed; returns that of the first launch."""
    name, _, test, *given = FORMS[form]
    found: list[str] = []

    def kept(kernel: str, text: str) -> str:
        if kernel != name:
            return text
        found.append(edit(text))
        return found[-1]

    test(PtxKernels(arch, edit=kept, overlaps=overlaps).kernels, *given)
    return found[0]


def without_waits(text: str) -> str:
    assert re.search(WAIT, text)
    return re.sub(WAIT, "", text)


def waiting_last(text: str) -> str:
    return re.sub(r"\n\s*ret;", "\n griddepcontrol.wait;\n ret;", without_waits(text))


def waiting_in_some_threads(text: str) -> str:
    """The first warp of a block."""
    declared = re.sub(
        r"(\.reg \.pred[^\n]*)", r"\1\n .reg .pred %own; .reg .b32 %self;", text, count=1
    )
    return re.sub(
        WAIT,
        "mov.u32 %self, %tid.x; setp.lt.u32 %own, %self, 32; @%own griddepcontrol.wait;",
        declared,
    )


@pytest.mark.parametrize("form", FORMS)
def test_a_kernel_waits_before_it_touches_what_others_write(form):
    text, is_before = run(form), FORMS[form][1]
    first = re.split(WAIT, text)[0]
    assert ("ld.global" in first) == is_before and "st.global" not in first
    assert "griddepcontrol.launch_dependents" in first
    for planted in (without_waits, waiting_last):
        with pytest.raises(TooEarly):
            run(form, planted)


def test_threads_that_do_not_wait_are_found():
    with pytest.raises(TooEarly):
        run("join", waiting_in_some_threads)


def test_every_kernel_of_a_step_is_here():
    assert {name for name, *_ in FORMS.values()} == set(STORES) - OF_PROMPTS - OF_EXPERTS


def test_other_cards_and_launches_have_no_such_instruction():
    assert "griddepcontrol" not in run("dot", arch=ADA, overlaps=False)
    assert "griddepcontrol" not in run("dot", overlaps=False)
