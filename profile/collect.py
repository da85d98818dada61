"""Profiles a model: runs text through it and counts firings; on request, trains predictors."""

import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from hotsplit.artifacts.importance_file import Importances
from hotsplit.artifacts.model_file import ModelFile
from hotsplit.artifacts.profile_file import Profile, uneven
from hotsplit.costs.part_bytes import all_neuron_bytes
from hotsplit.measure.evaluate.quality import EvalReport
from hotsplit.model.mode_quality import ModeQuality, SparseMode
from hotsplit.profile.config import ProfileConfig, check_text
from hotsplit.profile.corpus.corpus import Windows
from hotsplit.profile.corpus.processes import Ranks
from hotsplit.profile.count.counting import Counter, experts_of, gates_of, routing_of
from hotsplit.profile.count.input_squares import InputSquares
from hotsplit.profile.count.resume import resume_path
from hotsplit.profile.count.run import Run
from hotsplit.profile.inputs import check_inputs, load_engine, settings_of, windows_of
from hotsplit.profile.predictors.layer_trainer import LayerQuality, phases
from hotsplit.profile.predictors.output import Measured, measure, sha256_of_corpora
from hotsplit.profile.predictors.train import Trained, train
from hotsplit.profile.report import save_report
from hotsplit.runtime.kernels.arithmetic import arithmetic

OnTokens = Callable[[float], None]


@dataclass(frozen=True, kw_only=True)
class ProfileReport:
    """Results of a profile. `quality_L` is the quality of the predictors, empty if none were
    trained. `quality` is that of the model with them; None without any."""

    output: Path
    model_id: str
    num_tokens: int
    density_L: tuple[float, ...]
    hottest_fifth_L: tuple[float, ...]  # share of the firings of the hottest 20 %
    hottest_fifth_of_experts_L: tuple[float, ...]  # share of the choices; () without experts
    threshold_L: tuple[float, ...]
    importances: Path | None
    predictors: Path | None
    predictor_bytes: int  # as stored in a model file
    ffn_bytes: int  # of all gates, ups and downs
    quality_L: tuple[LayerQuality, ...]
    quality: EvalReport | None
    record: Mapping[SparseMode, ModeQuality]  # the artifacts' record of each mode
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Outcome:
    profile: Profile
    trained: Trained | None = None
    importances: Importances | None = None
    measured: Measured | None = None  # None: no predictors


def profile(config: ProfileConfig, on_tokens: OnTokens = lambda count: None) -> ProfileReport:
    """Writes the profile, a report and, if asked, the predictors; `on_tokens` reports progress.

    On the CPU, weights stay in the mapped file, whose pages the system reads and drops as needed."""
    began = time.perf_counter()
    with Ranks() as ranks:
        device = ranks.together(lambda: ranks.device(config.device))
        model = ranks.together(lambda: ModelFile.load(config.model))
        ranks.first_only(lambda: check_inputs(config, model))
        with load_engine(config, model, ranks, device) as engine:
            windows = windows_of(engine, config, ranks)
            ranks.first_only(lambda: check_text(config, windows.ids))
            run = Run(
                engine,
                ranks,
                resume_path(config.output),
                settings_of(engine, windows, config, ranks),
                on_tokens,
                force=config.force,
                save_every_s=config.save_every_s,
            )
            with run.signals():
                outcome = _outcome(config, run, windows)
        report = _report(config, model, outcome, time.perf_counter() - began)
        ranks.first_only(lambda: _save(config, outcome, report))
        run.finish()
    return report


# ---- the work -----------------------------------------------------------------------------------


def _outcome(config: ProfileConfig, run: Run, windows: Windows) -> Outcome:
    """The counts as a profile and what else was asked for; modes are compared on text that nothing was
    fitted to."""
    engine, model, ids = run.engine, run.engine.model, windows.ids
    gates, ranks = gates_of(model), run.ranks
    counter = Counter(gates, model.spec.most_neurons, experts_of(model), (ranks.rank, ranks.size))
    run.add("counter", counter)
    squares = InputSquares(model) if config.importances is not None else None
    if squares:
        run.add("inputs", squares)
    trained = measured = importances = None
    with (
        engine.observe(counter.observe, counter.wants),
        engine.observe(squares.observe, squares.wants) if squares else nullcontext(),
    ):
        if config.train_predictors is not None:
            trained = train(run, gates, ids, config)
        else:
            run.phase(ids)
    counted = run.total("counter")
    if trained:
        predictors, examined = trained[0], ids[phases(len(ids))["examine"]]
        sha256 = sha256_of_corpora(windows.corpora)
        measured = ranks.first_only(lambda: measure(engine, predictors, examined, sha256))
    if squares and config.importances is not None:
        importances = squares.importances(config.importances, run.total("inputs"), windows)
    found = Profile(
        model_id=model.model_id,
        num_tokens=int(counted["num_tokens"]),
        threshold_L=model.threshold_L,
        corpora=windows.corpora,
        active_count_LF=counted["active_count_LF"].numpy(),
        gate_histogram_LB=counted["gate_histogram_LB"].numpy(),
        expert_count_LE=counted["expert_count_LE"].numpy()
        if "expert_count_LE" in counted
        else None,
        routing_LTK=routing_of(counted),
        quality={} if measured is None else measured.record,
        arithmetic=arithmetic(engine.device),
        num_neurons_L=uneven(model.spec.num_neurons_L),
    )
    return Outcome(profile=found, trained=trained, importances=importances, measured=measured)


# ---- what comes out -----------------------------------------------------------------------------


def _report(
    config: ProfileConfig, model: ModelFile, outcome: Outcome, seconds: float
) -> ProfileReport:
    result = outcome.profile
    quality_L = outcome.trained[1] if outcome.trained else ()
    of_experts_L = result.hottest_fifth_of_experts_L()
    return ProfileReport(
        output=config.output,
        model_id=result.model_id,
        num_tokens=result.num_tokens,
        density_L=tuple(result.density_L.tolist()),
        hottest_fifth_L=tuple(result.hottest_fifth_L().tolist()),
        hottest_fifth_of_experts_L=() if of_experts_L is None else tuple(of_experts_L.tolist()),
        threshold_L=result.threshold_L,
        importances=config.importances,
        predictors=config.predictor_path,
        predictor_bytes=sum(q.chosen.num_bytes for q in quality_L),
        ffn_bytes=all_neuron_bytes(model),
        quality_L=quality_L,
        quality=outcome.measured.report if outcome.measured else None,
        record=result.quality,
        seconds=seconds,
    )


def _save(config: ProfileConfig, outcome: Outcome, report: ProfileReport) -> None:
    result = outcome.profile
    result.validate()
    if config.predictor_path is not None and outcome.trained:
        predictors = outcome.trained[0]
        predictors = replace(predictors, quality=result.quality, arithmetic=result.arithmetic)
        predictors.save(config.predictor_path)
    result.save(config.output)
    if outcome.importances is not None:
        outcome.importances.save(outcome.importances.path)
    save_report(report)
