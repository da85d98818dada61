"""The GPU kernels for experts, compared with a float64 reference on a CUDA device, or in Triton's
interpreter if there is none; the choice of experts with its definition (ops/route.py). A row of a
step has the bits of a row alone."""

import numpy as np
import pytest
import torch
from gpu_matrices import (
    EPS,
    NAN,
    REFERENCE,
    assert_close,
    block_width,
    both,
    device,
    make_matrix,
    product_bound,
    rounding,
    sizes,
    vector,
)
from reference import route_ref
from test_gpu_neurons import hidden_bound

from hotsplit.model.spec import Route
from hotsplit.runtime.kernels.gate import Gate
from hotsplit.runtime.kernels.gpu.kernels import Kernels
from hotsplit.runtime.weights.matrix import Matrix

pytestmark = pytest.mark.usefixtures("several_rows")
GROUPS = {"num_groups": 3, "num_used_groups": 2}
ROUTES = {
    "softmax": Route(num_experts=7, num_used=3, renormalises=False),
    "all": Route(num_experts=5, num_used=5, scale=1.5),
    "one of one": Route(num_experts=1, num_used=1),
    "sigmoid": Route(num_experts=40, num_used=6, gating="sigmoid", has_choice_bias=True, scale=2.5),
    "groups": Route(num_experts=12, num_used=4, gating="sigmoid", has_choice_bias=True, **GROUPS),
    "of chosen": Route(
        num_experts=8,
        num_used=4,
        gating="softmax_of_chosen",
        renormalises=False,
        has_choice_bias=True,
    ),
}
PLACES = [-1, 2, 0, -1, 1]  # of five experts; three are stored
E, K = len(PLACES), 3
# Rows of all types are unpacked by functions that other tests compare.
SOME = ("f32", "f16", "q8_0_planar", "q4_k")
SILU = Gate(activation="silu", computes_all=True)


def chosen(kernels: Kernels, spec: Route, logit_E, bias_E=None, copy=None, scale_E=None):
    """(experts, weights) of the kernel."""
    out = torch.full((*logit_E.shape[:-1], 2 * spec.num_used), NAN, device=device())
    kernels.choose_experts(logit_E, bias_E, spec, out, copy, scale_E)
    return out[..., : spec.num_used], out[..., spec.num_used :]


@pytest.mark.parametrize("name", ROUTES)
def test_the_choice_equals_its_definition(kernels, name):
    spec = ROUTES[name]
    for seed in range(4):
        logit_E = vector(spec.num_experts, seed)
        bias_E = vector(spec.num_experts, 50 + seed) if spec.has_choice_bias else None
        bias = 0.0 if bias_E is None else bias_E.cpu().numpy()
        scale_E = vector(spec.num_experts, 70) if seed == 3 else None
        diagonal = np.diag(logit_E.cpu().numpy())
        want_ids, want_K = route_ref(
            spec,
            diagonal,
            np.ones(spec.num_experts),
            choice_bias_E=bias,
            scale_E=None if scale_E is None else scale_E.cpu().numpy(),
        )
        for which in (kernels, REFERENCE):
            expert_K, weight_K = chosen(which, spec, logit_E, bias_E, scale_E=scale_E)
            assert expert_K.tolist() == want_ids
            assert np.abs(weight_K.cpu().numpy() - want_K).max() < 1e-6 * spec.scale


def test_of_equal_choices_the_lower_number_comes_first(kernels):
    for name, want in (("softmax", [0, 1, 2]), ("groups", [0, 1, 2, 3])):
        spec = ROUTES[name]
        for which in (kernels, REFERENCE):
            assert (
                chosen(which, spec, torch.ones(spec.num_experts).to(device()))[0].tolist() == want
            )
    logit_E = torch.tensor([0.0, 2, 1, 2, 1, 0, 2]).to(device())
    assert chosen(kernels, ROUTES["softmax"], logit_E)[0].tolist() == [1, 3, 6]


def test_nan_is_chosen_last(kernels):
    logit_E = torch.tensor([NAN, 0.0, 1, NAN, 2, 3]).to(device())
    spec = Route(num_experts=6, num_used=4, gating="sigmoid", renormalises=False)
    for which in (kernels, REFERENCE):
        assert chosen(which, spec, logit_E)[0].tolist() == [5, 4, 2, 1]
        some = Route(num_experts=6, num_used=5, gating="sigmoid", renormalises=False)
        assert chosen(which, some, logit_E)[1].isnan().tolist() == [False] * 4 + [True]


@pytest.mark.parametrize("wrong", [lambda t: t.flip(-1), lambda t: 0.5 * t, torch.zeros_like])
def test_the_comparison_of_choices_rejects_wrong_ones(kernels, wrong):
    class Spoilt:
        def choose_experts(self, *arguments):
            kernels.choose_experts(*arguments)
            arguments[-3].copy_(wrong(arguments[-3]))

    with pytest.raises(AssertionError):
        test_the_choice_equals_its_definition(Spoilt(), "softmax")


@pytest.mark.parametrize("num_rows", [2, 8])
def test_choices_of_several_rows_are_written_twice(kernels, num_rows):
    spec = ROUTES["groups"]
    logit_TE, bias_E = vector(num_rows * 12).view(num_rows, 12), vector(12, 2)
    copy = torch.full((num_rows, 2 * spec.num_used), NAN, device=device())
    found = torch.cat(chosen(kernels, spec, logit_TE, bias_E, copy), dim=-1)
    assert torch.equal(found, copy)
    for row, own_E in enumerate(logit_TE):
        alone = torch.cat(chosen(kernels, spec, own_E.clone(), bias_E))
        assert torch.equal(found[row], alone)


# ---- the chosen experts ----------------------------------------------------------------------


def routed(*experts: int):
    """[T, 2 K] with weights."""
    pairs = torch.tensor(experts, dtype=torch.float32).view(-1, K)
    weights = vector(pairs.numel(), 9).view_as(pairs)
    found = torch.cat([pairs.to(device()), weights], dim=1)
    return found[0].clone() if len(found) == 1 else found


def places(found=PLACES):
    return torch.tensor(found, dtype=torch.int32, device=device())


def rows_of(matrix: Matrix, place: int, num_rows: int) -> Matrix:
    return matrix.part(place * num_rows, (place + 1) * num_rows)


@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("kind", SOME)
def test_hidden_values(kernels, kind, blocks, num_neurons=9):
    """Hidden values of the experts that are stored; those of the one that is not are 0."""
    width, count = blocks * block_width(kind), 3 * num_neurons
    gate, up = (make_matrix(kind, count, width, seed=s, lies_apart=blocks == 1) for s in (0, 5))
    x, bias, place_E = vector(width), vector(count, 6), places()
    out = torch.full((K, num_neurons), NAN, device=device())
    arguments = (gate, bias, up, bias, place_E, routed(4, 3, 1), x, SILU)
    got, want = both(kernels, "expert_gate_up", out, *arguments)
    bound_N = hidden_bound(gate, bias, up, bias, x, want.new_zeros(count)).view(3, num_neurons)
    for number, place in ((0, 1), (2, 2)):
        own_bound = bound_N[place] + 16 * EPS * want[number].abs()
        assert_close(got[number], want[number], own_bound)
    assert (got[1] == 0).all() and (want[1] == 0).all()


@pytest.mark.parametrize("is_dense", [False, True])
@pytest.mark.parametrize("activation", ["relu", "drelu", "silu", "gelu_tanh", "swiglu_oai"])
def test_hidden_values_of_every_activation(kernels, activation, is_dense):
    """Also clamped gates, and layers all of whose experts are stored, in order."""
    gate, up = make_matrix("f16", 15, 32), make_matrix("q8_0_planar", 15, 32, seed=5)
    x, biases = 2 * vector(32), (3 * vector(15, 6), 3 * vector(15, 7))
    rule = Gate(activation=activation, threshold=0.1, computes_all=is_dense)
    arguments = (gate, biases[0], up, biases[1], None, routed(2, 0, 1), x, rule)
    out = torch.full((K, 5), NAN, device=device())
    got, want = both(kernels, "expert_gate_up", out, *arguments)
    assert_close(got, want, 1e-5 * (1 + want.abs()))


@pytest.mark.parametrize("kind", SOME)
def test_outputs(kernels, kind, width=7):
    """Weighted, with a bias; 0 of an expert that is not stored."""
    num_neurons = 2 * block_width(kind)
    down, bias = make_matrix(kind, 3 * width, num_neurons), vector(3 * width, 3)
    hidden, chosen_K = vector(K * num_neurons, 4).view(K, -1), routed(2, 0, 4)
    out = torch.full((K, width), NAN, device=device())
    arguments = (down, bias, places(), chosen_K, hidden)
    got, want = both(kernels, "expert_down", out, *arguments, is_by_output=True)
    for number, place in ((0, 0), (2, 1)):
        rows = slice(place * width, (place + 1) * width)
        bound_D = product_bound(rows_of(down, place, width), hidden[number], bias[rows])
        weight = chosen_K[K + number].abs()
        assert_close(got[number], want[number], weight * (bound_D + 4 * EPS * want[number].abs()))
    assert (got[1] == 0).all() and (want[1] == 0).all()


@pytest.mark.parametrize("skips_zeros", [False, True])
@pytest.mark.parametrize("kind", SOME)
def test_outputs_of_experts_by_neurons(kernels, kind, skips_zeros, num_neurons=37):
    """In two parts of each expert; a neuron that is skipped is NaN."""
    width = block_width(kind) + (8 if kind in ("f32", "f16", "bf16") else 0)
    down, bias = make_matrix(kind, 3 * num_neurons, width), vector(3 * width, 3)
    hidden, chosen_K = vector(K * num_neurons, 4).view(K, -1), routed(2, 0, 4)
    hidden[:, 5] = 0.0
    if skips_zeros and kind == "f32":
        down.data[5 + num_neurons * torch.arange(3)] = NAN
    out = torch.full((2 * K, width), NAN, device=device())
    options = {"is_by_output": False, "skips_zeros": skips_zeros}
    got, want = both(kernels, "expert_down", out, down, bias, places(), chosen_K, hidden, **options)
    for number, place in ((0, 0), (2, 1)):
        own = rows_of(down, place, num_neurons)
        size_D = hidden[number].double().abs() @ sizes(own).nan_to_num()
        size_D = size_D + bias[place * width : (place + 1) * width].abs()
        bound_D = rounding(num_neurons) * chosen_K[K + number].abs() * size_D
        for part in (2 * number, 2 * number + 1):
            assert_close(got[part], want[part], bound_D)
    assert (got[2:4] == 0).all() and (want[2:4] == 0).all()


def test_experts_that_no_row_has_chosen_are_not_read(kernels):
    gate, down = make_matrix("f32", 3 * 8, 32), make_matrix("f32", 3 * 32, 8)
    gate.data[16:], down.data[64:] = NAN, NAN  # expert 1
    hidden, parts = torch.empty(K, 8, device=device()), torch.empty(K, 32, device=device())
    for numbers, is_read in (((0, 2, 4), False), ((0, 2, 1), True)):
        which = routed(*numbers)
        kernels.expert_gate_up(
            gate, None, gate, None, places(), which, vector(32), Gate(activation="relu"), hidden
        )
        kernels.expert_down(down, None, places(), which, hidden, parts, is_by_output=True)
        assert bool(hidden.isnan().any()) == bool(parts.isnan().any()) == is_read


@pytest.mark.parametrize("is_by_output", [False, True])
@pytest.mark.parametrize("kind", ["f16", "q4_k"])
def test_a_row_has_the_bits_of_a_row_alone(kernels, kind, is_by_output, num_rows=2):
    """Whichever experts the other chooses."""
    width, experts = block_width(kind), [4, 3, 1, 1, 2, 4]
    count, outputs = (width, 7) if is_by_output else (9, width)
    gate = make_matrix(kind, 3 * 9, width)
    down = make_matrix(kind, 3 * (outputs if is_by_output else count), width, seed=5)
    x_TD, routed_T2K = vector(num_rows * width).view(num_rows, width), routed(*experts)
    value_TKF = vector(num_rows * K * count, 7).view(num_rows, K, count)

    def run(routed_2K, x_D, value_KF, *lead):
        hidden = torch.full((*lead, K, 9), 7.0, device=device())
        parts = torch.full((K, *lead, outputs), NAN, device=device())
        if is_by_output:  # once is enough
            kernels.expert_gate_up(gate, None, gate, None, places(), routed_2K, x_D, SILU, hidden)
        of_expert = (down, None, places(), routed_2K, value_KF)
        kernels.expert_down(*of_expert, parts, is_by_output=is_by_output)
        return hidden, parts

    hidden_TKF, parts_KTD = run(routed_T2K, x_TD, value_TKF, num_rows)
    for row in range(num_rows):
        hidden, parts = run(routed_T2K[row].clone(), x_TD[row].clone(), value_TKF[row].clone())
        assert torch.equal(hidden, hidden_TKF[row]) and torch.equal(parts, parts_KTD[:, row])
        assert hidden.any() and parts.any()
