"""A model's default mode, and the record of quality that decides it."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from models import (
    make_inputs,
    make_machine,
    make_model,
    make_profile,
    make_sizes,
    power_law_frequencies,
)

from hotsplit import Engine
from hotsplit.artifacts.model_file import ModelFile, PredictorInfo
from hotsplit.artifacts.predictor_file import FILE_NAME, LayerPredictor, Predictors
from hotsplit.artifacts.profile_file import Profile
from hotsplit.artifacts.split_file import Split, held_in
from hotsplit.cli import main
from hotsplit.convert.convert import convert
from hotsplit.convert.options import ConvertConfig
from hotsplit.costs.default_mode import (
    bytes_per_token,
    choose_mode,
    dense_bytes,
    loss_line,
    refusal,
)
from hotsplit.errors import HotsplitError
from hotsplit.model.mode_quality import ModeQuality, is_recordable
from hotsplit.options.engine_config import EngineConfig
from hotsplit.runtime.resolved_options import mode_of
from hotsplit.solver.inputs import Inputs
from hotsplit.solver.layer_split import as_plan, layer_split
from hotsplit.solver.mode_choice import find, find_fastest, in_mode
from hotsplit.solver.multi_gpu import cpu_only_plan, plan_is_feasible, plan_seconds
from hotsplit.solver.solve import SolveConfig, solve, split_of
from hotsplit.solver.verify import verify
from hotsplit.system.log_lines import lines_on_stderr

MODES = ("dense", "exact", "predicted")


def quality_of(model: ModelFile, loss: float, share: float) -> ModeQuality:
    """The record of a mode that loses this much perplexity and reads this share of the dense
    bytes."""
    return ModeQuality(
        perplexity_increase=loss,
        perplexity_half_width=0.002,
        kl_mean=0.01,
        top1_agreement=0.97,
        num_tokens=8192,
        bytes_per_token=round(share * dense_bytes(model)),
        dense_bytes_per_token=dense_bytes(model),
        corpus_sha256="0" * 64,
    )


def a_model(
    activation="relu", *, exact=None, predicted=None, has_predictors=True, **changes
) -> ModelFile:
    """A model whose modes have these records, each (loss, share of the dense bytes)."""
    model = make_model(
        activation=activation, predictor_rank=8 * has_predictors, kind="f16", **changes
    )
    records = {"exact": exact, "predicted": predicted}
    quality = {m: quality_of(model, *record) for m, record in records.items() if record}
    return dataclasses.replace(model, quality=quality)


# ---- the choice ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "mode", "words"),
    [
        # Every neuron of a smooth activation fires.
        ({"activation": "silu", "has_predictors": False}, "dense", None),
        # Predictors that cost more than 1 % are not chosen, and the line has the numbers.
        (
            {"exact": (0.0, 0.76), "predicted": (0.18, 0.6)},
            "exact",
            "predicted would read 40 % less and cost +18 % of perplexity (limit 1 %); --mode"
            " predicted, or --max-loss 0.2, runs it",
        ),
        ({"exact": (0.0, 0.76), "predicted": (0.0101, 0.5)}, "exact", "--max-loss 0.02"),
        # Within the limit, the mode that reads less is chosen.
        ({"exact": (0.0, 0.76), "predicted": (0.01, 0.6)}, "predicted", None),
        ({"exact": (0.0, 0.76), "predicted": (-0.003, 0.8)}, "exact", "the predictors save less"),
        ({"exact": (0.0, 1.0), "has_predictors": False}, "dense", "the silent neurons save less"),
        # An activation sparse by itself: exact costs nothing, and predictors without a record are
        # used.
        ({"activation": "relu"}, "predicted", None),
        ({"activation": "relu", "has_predictors": False}, "exact", None),
        ({"activation": "relu", "exact": (0.0, 0.4), "predicted": (0.002, 0.3)}, "predicted", None),
        (
            {"activation": "relu", "exact": (0.0, 0.4), "predicted": (0.002, 0.5)},
            "exact",
            "the predictors save less than they cost",
        ),
        (
            {"activation": "relu", "exact": (0.0, 0.4), "predicted": (0.3, 0.2)},
            "exact",
            "predicted would read 80 % less and cost +30 % of perplexity",
        ),
    ],
)
def test_the_choice(changes, mode, words):
    choice = choose_mode(a_model(**changes))
    assert choice.mode == mode
    if words is None:
        assert choice.line is None
    else:
        assert words in choice.line and "\n" not in choice.line
    assert mode_of(a_model(**changes), EngineConfig()) == mode


def test_the_limit_is_the_users():
    model = a_model(exact=(0.0, 0.76), predicted=(0.21, 0.5))
    assert choose_mode(model, 0.2).mode == "exact"
    assert choose_mode(model, 0.3).mode == "predicted"
    for wrong in (-0.1, math.nan):
        with pytest.raises(HotsplitError, match="wanted 0 or more"):
            EngineConfig(max_loss=wrong)


def test_a_requested_mode_is_used_with_a_warning():
    model = a_model(predicted=(0.18, 0.76))
    for mode, count in (("dense", 0), ("exact", 0), ("predicted", 1)):
        lines, others = [], []
        config = EngineConfig(mode=mode)
        assert mode_of(model, config, notice=others.append, warn=lines.append) == mode
        assert len(lines) == count and not others
    assert "+18 %" in loss_line(model, "predicted", 0.01)
    assert loss_line(model, "predicted", 0.18) is None
    assert refusal(model, "dense", 0.0) is None


def test_bytes_follow_the_types_of_the_file():
    """In f32 a token reads nearly twice the bytes of f16, except those of predictors, which keep
    their type."""
    model = a_model(exact=(0.0, 0.75), predicted=(0.0, 0.5))
    wide = dataclasses.replace(make_model(predictor_rank=8, kind="f32"), quality=model.quality)
    scale = dense_bytes(wide) / dense_bytes(model)
    assert 1.9 < scale < 2.0  # norms are f32 in both
    assert bytes_per_token(wide, "exact") == pytest.approx(
        scale * bytes_per_token(model, "exact"), rel=1e-6
    )
    own, other = bytes_per_token(model, "predicted"), bytes_per_token(wide, "predicted")
    assert own == model.quality["predicted"].bytes_per_token
    assert own < other < scale * own


def test_dense_bytes_are_those_of_the_weights_that_a_token_reads():
    model = make_model(predictor_rank=8)
    read = [e for n, e in model.tensors.items() if n != "token_embd.weight" and "pred" not in n]
    assert dense_bytes(model) == sum(entry.num_bytes for entry in read)


# ---- the record and its files ----------------------------------------------------------------


def test_models_profiles_and_predictors_keep_a_record(tmp_path):
    model = a_model(exact=(0.18, 0.76), predicted=(0.21, 0.8))
    model.save(tmp_path / "m.gguf")
    assert ModelFile.load(tmp_path / "m.gguf").quality == model.quality
    profile = dataclasses.replace(make_profile(model), quality=model.quality)
    profile.save(tmp_path / "p")
    assert Profile.load(tmp_path / "p").quality == model.quality
    assert profile.merge(make_profile(model)).quality == {}
    predictors = predictors_of(model)
    predictors.save(tmp_path / "pred")
    assert Predictors.load(tmp_path / "pred").quality == model.quality
    dataclasses.replace(predictors, quality={}).save(tmp_path / "pred")
    assert Predictors.load(tmp_path / "pred").quality == {}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("perplexity_increase", math.nan),
        ("perplexity_increase", math.inf),
        ("perplexity_increase", -1.5),
        ("perplexity_half_width", -0.1),
        ("kl_mean", -1.0),
        ("top1_agreement", 1.1),
        ("num_tokens", 0),
        ("bytes_per_token", 0),
        ("dense_bytes_per_token", 0),
    ],
)
def test_records_that_no_measurement_gives_are_refused(tmp_path, name, value):
    model = a_model(exact=(0.1, 0.5))
    wrong = dataclasses.replace(model.quality["exact"], **{name: value})
    assert not is_recordable(wrong) and is_recordable(model.quality["exact"])
    with pytest.raises(HotsplitError, match=name):
        dataclasses.replace(model, quality={"exact": wrong}).save(tmp_path / "m.gguf")


def predictors_of(model: ModelFile) -> Predictors:
    weights = np.ones((8, model.spec.hidden_size), np.float32)
    ups = np.full((model.spec.most_neurons, 8), 0.01, np.float32)
    layers = tuple(
        LayerPredictor.of(down_RD=weights, up_FR=ups) for _ in range(model.spec.num_layers)
    )
    info = PredictorInfo(kind="linear", rank_L=(8,) * len(layers), threshold_L=(0.0,) * len(layers))
    return Predictors(model_id=model.model_id, info=info, layers=layers, quality=model.quality)


def test_convert_keeps_the_record_of_the_predictors(tmp_path):
    model = a_model(exact=(0.0, 0.76), predicted=(0.21, 0.8))
    base = dataclasses.replace(held_in(model, "exact"), quality={})
    base.save(tmp_path / "base.gguf")
    predictors_of(model).save(tmp_path / "pred" / FILE_NAME)
    convert(
        ConvertConfig(
            source=tmp_path / "base.gguf", output=tmp_path / "m.gguf", predictors=tmp_path / "pred"
        )
    )
    assert ModelFile.load(tmp_path / "m.gguf").quality == model.quality


# ---- the engine ------------------------------------------------------------------------------


@lines_on_stderr()
def test_the_engine_says_why_it_runs_no_predictors(tmp_path, capsys):
    model = a_model(exact=(0.0, 0.76), predicted=(0.18, 0.5))
    model.save(tmp_path / "m.gguf")
    ids = torch.arange(9)
    with Engine.load(tmp_path / "m.gguf") as engine:
        assert engine.mode == "exact"
        got = engine.logits(ids)
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "+18 %" in said and "--max-loss 0.2" in said
    with Engine.load(tmp_path / "m.gguf", mode="exact") as engine:
        assert (engine.logits(ids) == got).all()
    assert not capsys.readouterr().err
    with Engine.load(tmp_path / "m.gguf", max_loss=0.2) as engine:
        assert engine.mode == "predicted"


def test_a_plan_sets_the_mode(tmp_path):
    """Mode dense, set by a plan with neurons on both sides, gives the logits of mode dense without
    a plan."""
    model = a_model(exact=(0.0, 0.76), predicted=(0.21, 0.8), sizes=make_sizes(num_layers=3))
    model.save(tmp_path / "m.gguf")
    half = np.arange(0, 96, 2, dtype=np.int32)
    everything = np.arange(96, dtype=np.int32)
    split = planned(model, "dense", (half, half[:0], everything), (True, False, True))
    split.save(tmp_path / "s.gguf")
    ids = torch.arange(12)
    with Engine.load(tmp_path / "m.gguf", mode="dense") as engine:
        want = engine.logits(ids)
    with Engine.load(tmp_path / "m.gguf", split=tmp_path / "s.gguf") as engine:
        assert engine.mode == "dense" and engine.bytes_by_role["gpu"]["predictor"] == 0
        got = engine.logits(ids)
    assert (got - want).norm() < 1e-5 * want.norm()
    with pytest.raises(HotsplitError, match="no room for predictors"):
        Engine.load(tmp_path / "m.gguf", split=tmp_path / "s.gguf", mode="predicted")
    planned(model, "exact", (half,) * 3, (True,) * 3).save(tmp_path / "s.gguf")
    with Engine.load(tmp_path / "m.gguf", split=tmp_path / "s.gguf") as engine:
        assert engine.mode == "exact"


def planned(model, mode, hot, dense_on_gpu) -> Split:
    empty = Split(
        model_id=model.model_id,
        mode=mode,
        vram_budget_bytes=1 << 30,
        context_length=32,
        hot=hot,
        dense_on_gpu=dense_on_gpu,
        head_on_gpu=True,
        gpu_bytes={},
        cpu_bytes={"workspace": 1 << 20},
        status="by hand",
        objective_s=1.0,
        bound_s=1.0,
        solve_s=0.0,
    )
    (gpu,), cpu = empty.items_of_gpus(model)
    return dataclasses.replace(empty, gpu_bytes=gpu, cpu_bytes=cpu)


# ---- the solver ------------------------------------------------------------------------------


def inputs_of(model, frequency_LF, machine, *budgets: int) -> Inputs:
    profile = make_profile(model, frequency_LF)
    return make_inputs(model, profile, machine, *budgets, context_length=32, workspace=1000)


def workspace(model, context_length, mode, *more) -> int:
    return 1000


def fastest(inputs: Inputs, max_loss: float = 0.01):
    return find_fastest(inputs, max_loss=max_loss, time_limit_s=2, workspace=workspace)


def shares(num_layers, num_neurons, density):
    return np.full((num_layers, num_neurons), density)


def test_the_plan_has_the_fastest_mode_whatever_the_file_suggests():
    """The predictors name all neurons, so exact is faster than predicted."""
    shape = make_sizes(num_layers=3, width=128, num_neurons=512)
    model = a_model("relu", sizes=shape, exact=(0.0, 0.6), predicted=(0.001, 0.7))
    model = dataclasses.replace(
        model, predictor=dataclasses.replace(model.predictor, density_L=(1.0,) * 3)
    )
    inputs = inputs_of(model, shares(3, 512, 0.3), make_machine(launch_s=1e-7), 1 << 30)
    found = fastest(inputs)
    assert found.inputs.mode == "exact"
    seconds = {other.name: other.seconds for other in found.others}
    assert found.answer.objective_s < seconds["predicted"]
    assert found.answer.objective_s < seconds["dense"] <= seconds["whole layers"]
    asked = find(in_mode(inputs, "predicted", workspace), time_limit_s=2)
    assert asked.answer.objective_s == pytest.approx(seconds["predicted"])


def test_the_plan_is_dense_where_whole_layers_are_fastest():
    """Reading chosen rows costs more than silent neurons save, and not all three layers fit on the
    GPU."""
    shape = make_sizes(num_layers=3, width=128, num_neurons=512)
    model = a_model("relu", sizes=shape, has_predictors=False)
    machine = make_machine(hand_over_s=1e-3, launch_s=1e-7, chosen_share=0.2, cpu_gb_per_s=4)
    inputs = inputs_of(model, shares(3, 512, 0.97), machine, 1 << 30)
    whole = as_plan(dataclasses.replace(inputs, mode="dense"), layer_split(inputs))
    assert whole.placement.dense_L.all() and whole.placement.head
    pipeline = dataclasses.replace(inputs, mode="dense").pipeline()
    two = dataclasses.replace(inputs, budgets=(int(0.7 * pipeline.model.placeable_bytes),))
    exact = find(two, time_limit_s=2)
    found = fastest(two)
    assert found.inputs.mode == "dense"
    assert found.answer.objective_s < exact.answer.objective_s * 0.999
    split = layer_split(dataclasses.replace(two, mode="dense"))
    assert 0 < split.num_layers < 3
    assert found.answer.objective_s <= split.seconds


def test_modes_that_lose_too_much_are_not_planned():
    model = a_model(exact=(0.0, 0.5), predicted=(0.21, 0.4))
    frequency_LF = shares(2, 96, 0.2)
    inputs = inputs_of(model, frequency_LF, make_machine(launch_s=1e-9), 0)
    found = fastest(inputs)
    assert found.inputs.mode == "exact"
    reasons = {o.name: o.why_not for o in found.others if o.seconds is None}
    assert reasons == {"predicted": "it costs +21 % of perplexity"}
    assert fastest(inputs, 0.3).inputs.mode == "predicted"


def random_inputs(seed: int, num_gpus: int) -> Inputs:
    random = np.random.default_rng(seed)
    num_layers, num_neurons = int(random.integers(2, 5)), 96
    known = {"exact": (0.0, 0.6), "predicted": (0.0, 0.5)}
    model = a_model(sizes=make_sizes(num_layers=num_layers), seed=seed, **known)
    density_L = tuple(random.uniform(0.1, 1.0, num_layers))
    model = dataclasses.replace(
        model, predictor=dataclasses.replace(model.predictor, density_L=density_L)
    )
    machine = make_machine(
        gpu_gb_per_s=float(10 ** random.uniform(0, 3)),
        cpu_gb_per_s=float(10 ** random.uniform(-1, 2)),
        launch_s=float(10 ** random.uniform(-8, -5)),
        hand_over_s=float(10 ** random.uniform(-8, -4)),
        copy_latency_s=float(10 ** random.uniform(-8, -5)),
        num_gpus=num_gpus,
        chosen_share=float(random.uniform(0.4, 1)),
        layer_s=float(10 ** random.uniform(-9, -5)),
    )
    frequency_LF = power_law_frequencies(
        num_layers, num_neurons, density=float(random.uniform(0.05, 0.6)), seed=seed
    )
    whole = inputs_of(model, frequency_LF, machine, 0).pipeline().model.placeable_bytes
    budgets = (int(1000 + random.uniform(0.05, 1.1) * whole / num_gpus) for _ in range(num_gpus))
    return inputs_of(model, frequency_LF, machine, *budgets)


@pytest.mark.parametrize("num_gpus", [1, 2])
def test_the_plan_is_never_slower_than_an_alternative(tmp_path, num_gpus):
    """Random machines and budgets; the alternatives are solved independently of the choice."""
    (tmp_path / "file").write_text("any")
    chosen = []
    for seed in range(5 if num_gpus == 1 else 2):
        inputs = random_inputs(seed, num_gpus)
        try:
            found = fastest(inputs)
        except HotsplitError:  # a GPU with a budget that holds nothing
            continue
        seconds = found.answer.objective_s * (1 - 1e-9)
        chosen.append(found.inputs.mode)
        for mode in MODES:
            of_mode = in_mode(inputs, mode, workspace)
            nothing = of_mode.pipeline()
            assert seconds <= plan_seconds(nothing, cpu_only_plan(nothing))
            try:
                assert seconds <= find(of_mode, time_limit_s=1).answer.objective_s
            except HotsplitError:
                continue
        dense = in_mode(inputs, "dense", workspace)
        others = layer_split(dense)
        assert seconds <= others.seconds
        plan, pipeline = as_plan(dense, others), dense.pipeline()
        assert plan_is_feasible(pipeline, plan)
        # Our step fuses one more kernel of a whole layer than llama.cpp is assumed to.
        assert plan_seconds(pipeline, plan) <= others.seconds * (1 + 1e-9)
        kept = dataclasses.replace(found.inputs, paths=(tmp_path / "file",) * 3)
        split = split_of(dataclasses.replace(found, inputs=kept), solve_s=0.0)
        verify(split, model=inputs.model, profile=inputs.profile, machine=inputs.machine)
        split.save(tmp_path / "s.gguf")
        assert Split.load(tmp_path / "s.gguf").mode == found.inputs.mode
    assert chosen and (num_gpus > 1 or len(set(chosen)) > 1), "no case distinguishes the modes"


def test_the_command_names_the_fastest_mode(tmp_path, capsys):
    model = a_model(exact=(0.0, 0.5), predicted=(0.21, 0.4), sizes=make_sizes(num_layers=3))
    model.save(tmp_path / "m.gguf")
    make_profile(model).save(tmp_path / "p")
    make_machine().save(tmp_path / "c")
    files = ["solve", tmp_path / "m.gguf", "--profile", tmp_path / "p", "--machine", tmp_path / "c"]
    arguments = [str(part) for part in (*files, "-o", tmp_path / "plan", "-vb", "1MiB", "--force")]
    assert main(arguments) == 0
    said = capsys.readouterr().err
    assert "is the fastest" in said and "predicted: it costs +21 % of perplexity" in said
    assert Split.load(tmp_path / "plan").mode == "exact"
    assert main([*arguments, "--max-loss", "0.3"]) == 0
    assert "predicted: it costs" not in capsys.readouterr().err
    assert main([*arguments, "--mode", "predicted"]) == 0
    said = capsys.readouterr().err
    assert "mode predicted costs +21 %" in said and "is the fastest" not in said
    config = SolveConfig(
        model=tmp_path / "m.gguf",
        profile=tmp_path / "p",
        machine=tmp_path / "c",
        output=tmp_path / "plan",
        vram_budget_bytes=0,
        force=True,
    )
    report = solve(config, workspace)
    assert {other.name for other in report.alternatives} == {"dense", "predicted", "whole layers"}
    assert workspace(model, 32, "dense") == report.cpu_bytes["workspace"]
