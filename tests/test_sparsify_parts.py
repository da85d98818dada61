"""The parts of training to be sparse: the loss, the limits, the schedule, one step, the corpus."""

from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch
from sparsify_runs import make_inputs, tiny_config, trainer_of, windows_of

from hotsplit.errors import HotsplitError
from hotsplit.profile.corpus.processes import Ranks
from hotsplit.profile.corpus.sources import find_sources
from hotsplit.sparsify import state
from hotsplit.sparsify.config import SparsifyConfig
from hotsplit.sparsify.distillation import divergence, divergence_ref
from hotsplit.sparsify.limits import Limits, scaled, sensitivities
from hotsplit.sparsify.plan import Plan
from hotsplit.sparsify.quality import SilentCounter, evaluate
from hotsplit.sparsify.schedule import Schedule
from hotsplit.sparsify.student import dense, load_student, silence
from hotsplit.sparsify.texts import Stream
from hotsplit.sparsify.trainer import NotFinite


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> tuple[Path, Path]:
    return make_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture
def config(inputs, tmp_path) -> SparsifyConfig:
    return tiny_config(inputs, tmp_path)


# ---- the loss -------------------------------------------------------------------------------


def test_the_loss_in_chunks_equals_that_of_torch(monkeypatch):
    monkeypatch.setattr("hotsplit.sparsify.distillation.CHUNK_VALUES", 7 * 50)
    torch.manual_seed(0)
    sparse_TD, dense_TD = torch.randn(16, 12, requires_grad=True), torch.randn(16, 12)
    head_VD, weight_T = torch.randn(50, 12), torch.rand(16)
    kl_T = divergence(sparse_TD, dense_TD, head_VD)
    (kl_T * weight_T).sum().backward()
    exact_TD = sparse_TD.detach().double().requires_grad_()
    logits_TV = exact_TD @ head_VD.double().T
    want_T = torch.nn.functional.kl_div(
        logits_TV.log_softmax(1), (dense_TD.double() @ head_VD.double().T).log_softmax(1),
        log_target=True, reduction="none",
    ).sum(dim=1)  # fmt: skip
    (want_T * weight_T.double()).sum().backward()
    assert torch.allclose(kl_T.double(), want_T, rtol=1e-5, atol=1e-6)
    assert torch.allclose(sparse_TD.grad.double(), exact_TD.grad, rtol=1e-4, atol=1e-5)
    reference_T = divergence_ref(sparse_TD @ head_VD.T, dense_TD @ head_VD.T)
    assert torch.allclose(reference_T, want_T, rtol=1e-5, atol=1e-6)
    flipped_T = divergence(dense_TD.flip(0), dense_TD, head_VD)
    assert not torch.allclose(flipped_T.double(), want_T, rtol=0.1)


# ---- limits ---------------------------------------------------------------------------------


def test_limits_are_applied_as_defined(config):
    layer = load_student(config.model, "threshold", torch.float32, "cpu").layers[1]
    x_TD = torch.randn(9, 64)
    layer.limit_F = torch.rand(160) * 0.3
    gate_FD, up_FD, down_DF = (matrix.double() for matrix in layer.dense)
    value_TF = torch.nn.functional.silu(x_TD.double() @ gate_FD.T)
    fires_TF = value_TF.abs() > layer.limit_F
    assert 0.2 < fires_TF.double().mean() < 0.8
    want_TD = (value_TF * fires_TF * (x_TD.double() @ up_FD.T)) @ down_DF.T
    assert torch.allclose(layer(x_TD).double(), want_TD, rtol=1e-4, atol=1e-5)
    layer.is_dense = True
    assert not torch.allclose(layer(x_TD).double(), want_TD, rtol=0.05, atol=0.01)


def test_a_value_at_its_limit_is_silent_and_nan_passes():
    value_F = torch.tensor([0.5, -0.5, 0.51, -0.51, 0.0, torch.nan])
    found_F = silence(value_F, torch.tensor([0.5] * 4 + [0.0, 1.0]))
    assert found_F[:5].tolist() == [0, 0, pytest.approx(0.51), pytest.approx(-0.51), 0]
    assert found_F[5].isnan()


@pytest.mark.parametrize("allocation", ["sensitivity", "uniform", "global"])
def test_limits_silence_the_wanted_share(config, allocation):
    trainer = trainer_of(replace(config, allocation=allocation))
    windows = windows_of()
    trainer.measure(windows)
    trainer.set_share(0.7, windows)
    counter = SilentCounter(trainer.student.layers)
    trainer._watch(counter, windows)
    share_L = counter.silent_L / counter.all_L
    assert share_L.mean().item() == pytest.approx(0.7, abs=0.02)
    if allocation == "uniform":
        assert torch.allclose(share_L, share_L.mean(), atol=0.02)
    assert (len(set(trainer.limits.threshold_L.tolist())) == 1) == (allocation != "uniform")


@pytest.mark.parametrize("allocation", ["sensitivity", "uniform"])
def test_weights_are_recovered_from_limits(allocation):
    weight_LF = scaled(torch.rand(3, 50) + 0.1, allocation)
    threshold_L = torch.rand(3).double() + 0.1
    if allocation == "sensitivity":
        threshold_L[:] = threshold_L[0]
    limits = Limits(weight_LF=weight_LF, threshold_L=threshold_L, allocation=allocation)
    again = Limits.from_limits(limits.limit_LF, allocation)
    assert torch.allclose(again.weight_LF, weight_LF, rtol=1e-5)
    assert torch.allclose(again.threshold_L, limits.threshold_L, rtol=1e-5)


def test_a_refused_measurement_leaves_no_values_in_the_layers(config):
    trainer = trainer_of(config)
    student = trainer.student
    next(iter(student.model.parameters())).data.fill_(torch.nan)
    with pytest.raises(HotsplitError, match="NaN or infinite"):
        sensitivities(student, windows_of(1), trainer.ranks, seed=0)
    assert not any(layer.keeps_values or layer.value.numel() for layer in student.layers)


def test_sensitivities_foretell_what_silencing_costs(config):
    """The KL is the sum of v² E[g²] / 2 over the values v that become 0, with g as in
    `sensitivities`, if they are few."""
    trainer = trainer_of(config)
    windows = windows_of(2)
    draws = [window for window in windows for _ in range(40)]
    found_LF = sensitivities(trainer.student, draws, trainer.ranks, seed=0)
    trainer.limits = Limits.of(scaled(found_LF, "sensitivity"), "sensitivity")
    trainer.set_share(0.3, windows)
    foretold = Foretold(trainer.student.layers, found_LF)
    trainer._watch(foretold, windows)
    quality = evaluate(trainer.student, windows, trainer.ranks)
    assert quality.kl == pytest.approx(foretold.loss / quality.num_tokens, rel=0.5)
    assert quality.silent_share == pytest.approx(0.3, abs=0.03)
    other = scaled(found_LF.flip(1), "sensitivity")  # the weights of other neurons: more is lost
    trainer.limits = Limits.of(other, "sensitivity")
    trainer.set_share(0.3, windows)
    worse = evaluate(trainer.student, windows, trainer.ranks)
    assert worse.kl > 1.2 * quality.kl


class Foretold:
    """A watcher that sums v² E[g²] / 2 over silenced values."""

    def __init__(self, layers, sensitivity_LF):
        self.layers, self.sensitivity_LF, self.loss = layers, sensitivity_LF, 0.0

    def __call__(self, layer, value_TF, up_TF, x_TD):
        is_silent_TF = value_TF.abs() <= self.layers[layer].limit_F
        cost_TF = (value_TF * self.sensitivity_LF[layer]).square() / 2
        self.loss += float(cost_TF[is_silent_TF].sum())


# ---- the schedule ---------------------------------------------------------------------------


def test_shares_rise_and_stay_and_the_rate_falls():
    schedule = Schedule(shares=(0.6, 0.75), steps_of_share=100, learning_rate=1.0, warmup_steps=10)
    shares = [schedule.share(step) for step in range(schedule.num_steps)]
    assert shares == sorted(shares) and shares[0] == 0.3
    assert shares[99] == 0.6 and shares[199] == 0.75 and shares[150] == 0.75
    assert schedule.rate(0) < schedule.rate(9) <= schedule.rate(10) == 1.0
    falling = [schedule.rate(step) for step in range(10, 100)]
    assert falling == pytest.approx([left / 90 for left in range(90, 0, -1)])
    assert schedule.rate(100) == schedule.rate(0)
    assert not schedule.is_held(14) and schedule.share(14) < 0.6 == schedule.share(15)
    assert not schedule.is_frozen(79) and schedule.is_frozen(80) and not schedule.is_frozen(100)
    assert [step for step in range(200) if schedule.ends_stage(step)] == [99, 199]


@pytest.mark.parametrize("rule, ramp", [("threshold", 15), ("fatrelu", 40)])
def test_no_share_is_held_before_the_activation_is_replaced(config, rule, ramp):
    """The best state is written with a full ReLU, so only states from `is_held` on may be best."""
    schedule = Plan.of(replace(config, rule=rule, tokens=128 * 100), Ranks()).schedule
    held = [step for step in range(100) if schedule.is_held(step)]
    assert held == list(range(ramp, 100))
    assert schedule.blend(ramp - 1) < schedule.blend(ramp) == 1 and schedule.share(ramp) == 0.6


# ---- a step and the corpus ------------------------------------------------------------------


def test_the_error_of_the_layers_outputs_is_added_to_the_loss(config):
    """A weight of 2 adds twice the gradient of the layers' mean error, here by its definition."""
    grads = []
    for weight in (0.0, 2.0):
        trainer = trainer_of(replace(config, layer_weight=weight))
        trainer.measure(windows_of())
        trainer.set_share(0.6, windows_of())
        trainer._backward(torch.stack(windows_of()), 1.0, None)
        grads.append({n: p.grad.clone() for n, p in trainer.parameters.items()})
    layers = trainer.student.layers
    assert all(layer.differences is None and not len(layer.dense_output) for layer in layers)
    inputs_TD: list[torch.Tensor] = []
    for layer in layers:
        layer.register_forward_pre_hook(lambda module, x: inputs_TD.append(x[0]))
    trainer.optimizer.zero_grad(set_to_none=True)
    ids_BT = torch.stack(windows_of())
    with torch.no_grad(), dense(layers):
        trainer.student.hidden_states(ids_BT)
    dense_inputs, inputs_TD[:] = list(inputs_TD), []
    trainer.student.hidden_states(ids_BT)
    errors = []
    for layer, dense_TD, x_TD in zip(layers, dense_inputs, tuple(inputs_TD), strict=True):
        want_TD = layer._dense(dense_TD).double()
        error_TD = layer(x_TD).double() - want_TD
        errors.append(error_TD.square().sum() / want_TD.square().sum())
    sum(errors).backward()
    for name, parameter in trainer.parameters.items():
        added, want = grads[1][name] - grads[0][name], 2 * parameter.grad / len(layers)
        assert (added - want).norm() < 1e-3 * want.norm(), name


def test_nan_is_reported_with_its_layer_and_step_and_changes_nothing(config):
    trainer = trainer_of(config)
    trainer.measure(windows_of())
    trainer.train(windows_of())
    trainer.parameters["1.up_proj.weight"].data[3, 5] = torch.nan
    before = state.copied(state.model_arrays(trainer))
    with pytest.raises(NotFinite, match="NaN or infinity in layer 1 at step 2"):
        trainer.train(windows_of())
    after = state.model_arrays(trainer)
    assert all(torch.equal(before[n].nan_to_num(7), after[n].nan_to_num(7)) for n in before)
    assert trainer.step == 1


def test_held_out_text_is_never_trained_on(inputs):
    _, corpus = inputs

    def bytes_of(texts):
        return [list(text.encode()) for text in texts]

    sources = find_sources([corpus], "text")
    stream = Stream(sources, bytes_of, length=32, seed=0)
    every = sum(len(bytes_of(source.texts(b))[0]) for source in sources
                for b in range(source.num_blocks))  # fmt: skip
    held_out = stream.hold_out(64)
    assert sum(map(len, held_out)) == 64 and len(stream.held_out) == 1
    block = len(bytes_of(sources[0].texts(min(stream.held_out)))[0])
    turn = (every - block) // 32
    first, second = list(islice(stream.windows(), turn)), list(islice(stream.windows(), turn))
    assert all(map(torch.equal, first, second))
    text = bytes(torch.cat(first).tolist())
    assert bytes(held_out[0].tolist()) not in text
