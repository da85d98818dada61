"""Predictors: rounding, untrained starts, training, choice, file formats. Oracles: numpy,
gguf.quants and brute force."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from models import changed, make_model, make_sizes, sizes_of
from reference import rel_error
from torch.nn import functional as F

from hotsplit.artifacts.model_file import ModelFile, PredictorInfo
from hotsplit.artifacts.predictor_file import FILE_NAME, LayerPredictor, PredictorMatrix, Predictors
from hotsplit.convert.convert import convert
from hotsplit.convert.encode import encode
from hotsplit.convert.options import ConvertConfig
from hotsplit.costs.part_bytes import LayerBytes
from hotsplit.errors import HotsplitError
from hotsplit.model.spec import Neurons
from hotsplit.profile.predictors.layer_trainer import KEPT_TOKENS, LayerTrainer, phases
from hotsplit.profile.predictors.low_rank import Batch, LowRankNetwork, whole
from hotsplit.profile.predictors.moments import Moments
from hotsplit.profile.predictors.predictor_options import PredictorChoices, Target
from hotsplit.profile.predictors.rounding import rounded, values_of, with_feedback
from hotsplit.profile.predictors.selection import Candidate, Examiner, Tally, choose
from hotsplit.runtime.kernels.gate import Gate
from hotsplit.runtime.model.loader import load_predictors
from hotsplit.runtime.weights.matrix import Matrix

RELU = Gate(activation="relu", threshold=0.0)
WIDTH, NEURONS = 64, 96
SIZES = LayerBytes(attention=0, predictor=0, gate_row=128, up_row=128, down_row=128)


def inputs(count: int, seed: int = 0) -> torch.Tensor:
    """[count, WIDTH], correlated as activations are."""
    generator = torch.Generator().manual_seed(7)
    mixing = torch.randn(WIDTH, WIDTH, generator=generator) * torch.logspace(0, -1.5, WIDTH)
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, WIDTH, generator=generator) @ mixing.T


def weights(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def matrix(values: torch.Tensor) -> Matrix:
    return Matrix(data=values, kind="f32", width=values.shape[1])


def start_of(gate_FD, x_TD, bias_F=None):
    moments = Moments(gate_FD, bias_F)
    gate_TF = x_TD @ gate_FD.T + (0 if bias_F is None else bias_F)
    moments.add(x_TD, gate_TF)
    return moments.start()


# ---- rounding --------------------------------------------------------------------------------


def test_rounding_with_feedback_survives_the_encoder_and_beats_plain_rounding():
    gate_FD, x_TD = weights(NEURONS, WIDTH), inputs(500)
    gate_FD[3, :32] = 0  # a block of zeros, whose scale is 0
    values = with_feedback(gate_FD, x_TD.T @ x_TD / len(x_TD))
    q4_0 = GGMLQuantizationType.Q4_0
    again = quants.quantize(values.numpy(), q4_0)
    assert (quants.dequantize(again, q4_0) == values.numpy()).all()
    assert (encode(values.numpy(), "q4_0", "test").reshape(again.shape) == again).all()
    plain = torch.from_numpy(quants.dequantize(quants.quantize(gate_FD.numpy(), q4_0), q4_0))
    want = x_TD @ gate_FD.T
    assert rel_error(x_TD @ values.T, want) < 0.8 * rel_error(x_TD @ plain.T, want)
    with pytest.raises(AssertionError):  # values that were not rounded do not survive
        assert (plain == gate_FD).all()


@pytest.mark.parametrize("least", [-0.02, -0.5, -3.0])
def test_rounding_works_with_a_moment_that_rounding_errors_left_negative(least):
    """With fewer tokens than values the moment is singular, and rounding can make an eigenvalue
    negative."""
    x_TD = inputs(WIDTH // 2)
    moment_DD = x_TD.T @ x_TD / len(x_TD)
    direction_D = torch.linalg.eigh(moment_DD)[1][:, 0]
    unit = moment_DD.diagonal().mean()
    moment_DD += least * unit * torch.outer(direction_D, direction_D)
    gate_FD = weights(NEURONS, WIDTH)
    values = with_feedback(gate_FD, moment_DD)
    assert rel_error(values, gate_FD) < 0.3
    q4_0 = GGMLQuantizationType.Q4_0
    again = quants.quantize(values.numpy(), q4_0)
    assert (quants.dequantize(again, q4_0) == values.numpy()).all()


@pytest.mark.parametrize("kind", ["f16", "q8_0", "q4_0"])
def test_a_rounded_matrix_is_what_a_file_will_hold(kind):
    made = rounded(weights(NEURONS, WIDTH), kind, torch.eye(WIDTH))
    encoded = encode(values_of(made).numpy(), kind, "test")
    assert (encoded == made.data.numpy()).all()


# ---- starts ----------------------------------------------------------------------------------


def test_the_start_of_full_rank_is_the_gate_and_of_lower_rank_the_optimum():
    gate_FD, x_TD, bias_F = weights(NEURONS, WIDTH), inputs(2000), weights(NEURONS)
    start = start_of(gate_FD, x_TD, bias_F)
    network = LowRankNetwork(start, WIDTH, RELU)
    gates_TF = x_TD @ gate_FD.T + bias_F
    far = gates_TF.abs() > 1e-2
    with torch.no_grad():
        assert ((network.scores(x_TD) > 0) == (gates_TF > 0))[far].all()
    down_RD = start.right_RD[:8] @ start.whiten_DD.T
    got = (x_TD @ down_RD.T @ start.left_FR[:, :8].T).double()
    # Eckart-Young on the outputs themselves: no map of rank 8 comes closer on these inputs.
    outputs = (x_TD @ gate_FD.T).double().numpy()
    singular = np.linalg.svd(outputs, compute_uv=False)
    best = math.sqrt((singular[8:] ** 2).sum())
    assert np.linalg.norm(got.numpy() - outputs) == pytest.approx(best, rel=1e-3)
    residual = start.residual_F(8).double().square().sum().sqrt() * math.sqrt(len(x_TD))
    assert residual.item() == pytest.approx(best, rel=1e-3)


def batch_of(x_TD, gate_FD, up_FD=None) -> Batch:
    gate_TF = x_TD @ gate_FD.T
    given = gate_TF.relu() * (1 if up_FD is None else (x_TD @ up_FD.T).abs())
    return Batch(x_TD=x_TD, fires_TF=gate_TF > 0, given_TF=given)


def test_training_lowers_the_held_out_loss_and_keeps_the_start_where_it_does_not():
    gate_FD, up_FD = weights(NEURONS, WIDTH), weights(NEURONS, WIDTH, seed=2)
    start, held_out = start_of(gate_FD, inputs(2000)), batch_of(inputs(512, 3), gate_FD, up_FD)
    network = LowRankNetwork(start, 8, RELU)
    network.begin(64, held_out)
    before = network.best_loss
    for seed in range(64):
        network.step(batch_of(inputs(128, 100 + seed), gate_FD, up_FD))
    network.end()
    assert network.is_trained
    with torch.no_grad():
        assert network.loss(held_out).item() < 0.98 * before
    wrong = LowRankNetwork(start, 8, RELU)
    wrong.begin(64, held_out)
    kept = wrong.up_FR.detach().clone()
    for seed in range(64):  # the opposite of what fires
        wrong.step(batch_of(inputs(128, 100 + seed), -gate_FD, up_FD))
    assert wrong.is_done and wrong.steps < 64
    wrong.end()
    assert not wrong.is_trained and torch.equal(wrong.up_FR, kept)


# ---- choice ----------------------------------------------------------------------------------


def test_thresholds_and_qualities_agree_with_brute_force():
    gate_FD, x_TD = weights(NEURONS, WIDTH), inputs(400)
    down_FD = F.normalize(weights(NEURONS, 4096, seed=4), dim=1)  # wide: nearly orthogonal
    batch = batch_of(x_TD, gate_FD)
    predictor = LowRankNetwork(start_of(gate_FD, x_TD), 16, RELU).predictor("f16")
    score_TF = predictor.scores(x_TD)
    tally = Tally(
        Candidate(predictor=predictor, is_trained=False), score_TF.std().item(), score_TF.device
    )
    y_TD = batch.given_TF @ down_FD
    tally.add(score_TF, batch.fires_TF, batch.given_TF, y_TD.double().square().sum().item())
    target = Target(contribution=0.97, lost_norm=0.5)
    quality = tally.quality(target, SIZES)
    named = (score_TF > quality.threshold).numpy()
    fires, given = batch.fires_TF.numpy(), batch.given_TF.double().numpy()
    assert quality.predicted_density == pytest.approx(named.mean())
    assert quality.recall == pytest.approx((named & fires).sum() / fires.sum())
    assert quality.precision == pytest.approx((named & fires).sum() / named.sum())
    assert quality.contribution == pytest.approx((given * named).sum() / given.sum())
    assert quality.contribution >= 0.97
    higher = (score_TF > quality.threshold + 2 * tally.unit * 32 / 8192).numpy()
    assert (given * higher).sum() / given.sum() < 0.97  # two bins higher, too little is kept
    lost = np.linalg.norm((given * ~named) @ down_FD.double().numpy()) / y_TD.double().norm()
    assert quality.lost_norm == pytest.approx(lost.item(), rel=0.1)
    opened = (named & fires).mean()
    rows = NEURONS * (named.mean() * 128 + opened * 256)
    assert quality.bytes_per_token == pytest.approx(predictor.num_bytes + rows)
    tight = tally.quality(Target(contribution=0.5, lost_norm=0.05), SIZES)
    assert tight.lost_norm <= 0.05 < tally.quality(target, SIZES).lost_norm
    examiner = Examiner(tally.candidate, quality.threshold, matrix(down_FD), SIZES)
    examiner.add(x_TD, batch.fires_TF, batch.given_TF, down_FD.norm(dim=1))
    examined = examiner.quality()
    assert examined.lost_norm == pytest.approx(lost.item(), rel=1e-4)
    assert examined.recall == pytest.approx(quality.recall)
    top = np.sort(fires.sum(axis=0))[::-1]
    assert examiner.hottest_fifth == pytest.approx(top[:20].sum() / top.sum())


def test_the_fewest_bytes_win_among_the_precise():
    gate_FD, x_TD = weights(NEURONS, WIDTH), inputs(300)
    candidate = Candidate(predictor=whole(start_of(gate_FD, x_TD), "q8_0"), is_trained=False)
    tally = Tally(candidate, 1.0, x_TD.device)
    batch = batch_of(x_TD, gate_FD)
    tally.add(candidate.predictor.scores(x_TD), batch.fires_TF, batch.given_TF, 1e9)
    one = tally.quality(Target(), SIZES)

    def made(bytes_per_token, precision):
        return dataclasses.replace(one, bytes_per_token=bytes_per_token, precision=precision)

    three = [made(10, 0.2), made(30, 0.9), made(20, 0.8)]
    assert choose(three, Target(), 100) == 2
    assert choose(three[:1], Target(), 100) == 0
    assert choose([made(9, 0.1), made(5, 0.2)], Target(), 100) == 1
    assert choose(three, Target(), 25) == 2
    assert choose(three, Target(), 20) == 0  # no precise one reads less than mode exact


def run_trainer(gate, gate_FD, windows=40):
    """Runs a layer's trainer through all phases on synthetic tokens."""
    down_FD, up_FD = weights(NEURONS, WIDTH, seed=3), weights(NEURONS, WIDTH, seed=2)
    tried = PredictorChoices(ranks=(32,))
    trainer = LayerTrainer(
        gate=gate, gate_FD=gate_FD, down=matrix(down_FD), sizes=SIZES, tried=tried
    )
    tokens = [inputs(64, seed) for seed in range(windows)]
    for phase, piece in phases(windows).items():
        trainer.enter(phase, piece.stop - piece.start)
        for x_TD in tokens[piece]:
            gate_TF = x_TD @ gate_FD.T
            hidden_TF = dataclasses.replace(gate, computes_all=True).act(gate_TF)[0] * (
                x_TD @ up_FD.T
            )
            trainer.add(x_TD, gate_TF, hidden_TF)
    return trainer.finish()


def test_a_layer_keeps_no_more_tokens_than_its_memory_is_planned_for():
    trainer = LayerTrainer(
        gate=RELU,
        gate_FD=weights(NEURONS, WIDTH),
        sizes=SIZES,
        down=matrix(weights(NEURONS, WIDTH, seed=3)),
        tried=PredictorChoices(ranks=(32,)),
    )
    trainer.enter("keep", 0)
    x_TD, gate_TF = inputs(KEPT_TOKENS - 12), torch.rand(KEPT_TOKENS - 12, NEURONS)
    for _ in range(3):
        trainer.add(x_TD, gate_TF, gate_TF)
    assert [len(batch.x_TD) for batch in trainer.kept] == [KEPT_TOKENS - 12, 12]
    kept = trainer.kept[1]
    assert torch.equal(kept.x_TD, x_TD[:12]) and torch.equal(kept.fires_TF, gate_TF[:12] > 0)
    assert kept.x_TD.untyped_storage().nbytes() == 12 * WIDTH * 4
    assert kept.given_TF.shape == (12, NEURONS)


def test_every_phase_gets_windows_and_no_window_serves_two():
    for count in (10, 11, 100):
        pieces = [list(range(count))[piece] for piece in phases(count).values()]
        assert [w for piece in pieces for w in piece] == list(range(count))
        assert all(pieces)


def test_a_trained_layer_meets_its_target_and_its_start_is_reported():
    weights_, quality = run_trainer(RELU, weights(NEURONS, WIDTH))
    assert quality.chosen.contribution > 0.98 and quality.chosen.precision > 0.75
    assert (weights_.down is None) == (quality.chosen.form == "whole")
    for q in (quality.chosen, *quality.candidates):
        values = NEURONS * WIDTH if q.form == "whole" else 32 * (WIDTH + NEURONS)
        stored = values * {"q8_0": 34, "q4_0": 18}[q.matrix_kind] / 32
        stored += 4 * NEURONS * q.is_trained  # training adds a bias, which is in f32
        opened = NEURONS * (128 * q.predicted_density + 256 * q.recall * q.density)
        assert q.bytes_per_token == pytest.approx(stored + opened)
    kinds = {(q.form, q.matrix_kind) for q in quality.candidates}
    assert kinds == {(f, k) for f in ("low-rank", "whole") for k in ("q8_0", "q4_0")}
    assert not quality.start.is_trained and quality.start.rank == quality.chosen.rank


# ---- files -----------------------------------------------------------------------------------


def mixed(model: ModelFile, folder, **changes) -> Predictors:
    """Predictors saved in a folder: layer 0 has one q4_0 matrix, layer 1 has rank 32 in q8_0."""
    shape = sizes_of(model.bare_spec)
    gate_FD = torch.from_numpy(model.tensors["blk.0.ffn_gate.weight"].read().astype(np.float32))
    up = values_of(rounded(gate_FD, "q4_0", torch.eye(shape.hidden_size)))
    low = [
        values_of(rounded(weights(*dims), "q8_0"))
        for dims in ((32, shape.hidden_size), (shape.num_neurons, 32))
    ]
    layers = (
        LayerPredictor.of(down_RD=None, up_FR=up.numpy(), kind="q4_0"),
        LayerPredictor.of(
            down_RD=low[0].numpy(),
            up_FR=low[1].numpy(),
            kind="q8_0",
            up_bias_F=np.ones(shape.num_neurons, np.float32),
        ),
    )
    info = PredictorInfo(kind="linear", rank_L=(0, 32), threshold_L=(0.0, -1.0))
    made = Predictors(model_id=model.model_id, info=info, layers=layers)
    made = dataclasses.replace(made, **changes)
    made.save(folder / FILE_NAME)
    return made


def small_model(tmp_path, **options) -> ModelFile:
    model = make_model(sizes=make_sizes(num_layers=2, width=64), **options)
    model.save(tmp_path / "plain.gguf")
    return ModelFile.load(tmp_path / "plain.gguf")


def test_convert_writes_the_declared_types_and_the_runtime_reads_them(tmp_path):
    plain = small_model(tmp_path)
    made = mixed(plain, tmp_path)
    assert Predictors.load(tmp_path / FILE_NAME).layers[0].matrix_kind == "q4_0"
    convert(ConvertConfig(source=plain.path, output=tmp_path / "m.gguf", predictors=tmp_path))
    model = ModelFile.load(tmp_path / "m.gguf")
    assert model.predictor == made.info
    kinds = {n: e.kind for n, e in model.tensors.items() if "ffn_pred" in n}
    assert kinds == {
        "blk.0.ffn_pred_up.weight": "q4_0",
        "blk.1.ffn_pred_down.weight": "q8_0",
        "blk.1.ffn_pred_up.weight": "q8_0",
        "blk.1.ffn_pred_up.bias": "f32",
    }
    first, second = load_predictors(model, torch.device("cpu"))
    x_TD = weights(5, 64)
    up, down = (torch.from_numpy(m.values()) for m in (made.layers[1].up, made.layers[1].down))
    whole_up = torch.from_numpy(made.layers[0].up.values())
    # Products with blocks round x to 16 bits: an error of about 2^-16 of the largest of 32 values
    # (docs/arithmetic.md).
    assert rel_error(first.scores(x_TD), x_TD @ whole_up.T) < 1e-4
    assert rel_error(second.scores(x_TD), x_TD @ down.T @ up.T + 1) < 1e-4
    # A row has the same bits alone and among others.
    assert torch.equal(first.scores(x_TD[:1]), first.scores(x_TD)[:1])
    assert first.num_bytes == model.tensors["blk.0.ffn_pred_up.weight"].num_bytes


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"up": PredictorMatrix(np.zeros((192, 37), np.uint8), "q4_0")}, "not whole blocks"),
        ({"up": PredictorMatrix(np.zeros((192, 36), np.int8), "q4_0")}, "wanted a matrix of uint8"),
        ({"up": PredictorMatrix.of(np.full((192, 64), np.nan), "f32")}, "NaN"),
        ({"up": PredictorMatrix(np.full((192, 36), 255, np.uint8), "q4_0")}, "NaN"),
        ({"down": PredictorMatrix.of(np.zeros((8, 64)), "q4_0")}, "stated rank is 0"),
    ],
)
def test_wrong_predictors_of_one_matrix_are_refused(tmp_path, changes, words):
    plain = small_model(tmp_path)
    good = mixed(plain, tmp_path)
    layers = (dataclasses.replace(good.layers[0], **changes), good.layers[1])
    with pytest.raises(HotsplitError, match=words):
        mixed(plain, tmp_path, layers=layers)


def test_a_relu_predictor_of_one_matrix_is_refused():
    one = LayerPredictor.of(down_RD=None, up_FR=np.zeros((192, 64), np.float32))
    info = PredictorInfo(kind="relu", rank_L=(0,), threshold_L=(0.0,))
    with pytest.raises(HotsplitError, match="a relu predictor of rank 0, wanted 1 or more"):
        Predictors(model_id=None, info=info, layers=(one,)).validate()


@pytest.mark.parametrize("kind", ["f32", "f16", "q8_0", "q4_0"])
def test_a_file_has_the_bytes_of_the_type(tmp_path, kind):
    """The file holds values as gguf packs them, not unpacked ones."""
    values = weights(192, 64).numpy()
    layer = LayerPredictor.of(down_RD=None, up_FR=values, kind=kind)
    info = PredictorInfo(kind="linear", rank_L=(0,), threshold_L=(0.0,))
    Predictors(model_id="m", info=info, layers=(layer,)).save(tmp_path / "p")
    read = Predictors.load(tmp_path / "p").layers[0].up
    quant = GGMLQuantizationType[kind.upper()]
    packed = quants.quantize(values, quant)
    assert (tmp_path / "p").stat().st_size < packed.nbytes + 2000
    assert read.shape == (192, 64) and read.data.tobytes() == packed.tobytes()
    assert (read.values() == quants.dequantize(packed, quant)).all()


def test_kinds_that_a_model_cannot_have_are_refused(tmp_path):
    model = make_model(predictor_rank=8)
    spec = changed(model.bare_spec, Neurons, activation="silu")
    with pytest.raises(HotsplitError, match="every neuron of this silu model fires"):
        dataclasses.replace(model, bare_spec=spec).save(tmp_path / "m")
    info = dataclasses.replace(model.predictor, kind="relu", rank_L=(0, 8))
    tensors = {n: e for n, e in model.tensors.items() if n != "blk.0.ffn_pred_down.weight"}
    tensors["blk.0.ffn_pred_up.weight"] = tensors["blk.0.ffn_gate.weight"]
    with pytest.raises(HotsplitError, match="have two matrices"):
        dataclasses.replace(model, predictor=info, tensors=tensors).save(tmp_path / "m")


# ---- options
# --------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 65])
def test_a_wrong_rank_is_refused(rank):
    model = make_model(sizes=make_sizes(width=64))
    with pytest.raises(HotsplitError, match=f"rank is {rank}, wanted 1 to 64"):
        PredictorChoices.of(rank, model)


def test_what_is_tried_follows_from_the_rank_alone():
    for width, rank, ranks in (
        (256, None, (32, 64, 128)),
        (48, None, (32,)),
        (256, 40, (40,)),
        (16, None, (4,)),
    ):
        model = make_model(sizes=make_sizes(width=width, num_neurons=512))
        found = PredictorChoices.of(rank, model)
        assert (found.ranks, found.has_whole) == (ranks, rank is None)
        assert found.kinds == ("q8_0", "q4_0")
