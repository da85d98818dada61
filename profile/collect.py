"""Profiles a model: runs text through it and counts firings; on request, trains predictors. A model that does not fit into memory is streamed; such a run cannot be resumed."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from hotsplit.artifacts.importance_file import Importances
from hotsplit.artifacts.model_file import ModelFile
from hotsplit.artifacts.predictor_file import Predictors
from hotsplit.artifacts.profile_file import Profile, uneven
from hotsplit.costs.part_bytes import all_neuron_bytes
from hotsplit.measure.evaluate.quality import EvalReport, ShareCounter
from hotsplit.model.mode_quality import ModeQuality, SparseMode
from hotsplit.model.modes import Mode
from hotsplit.profile.config import ProfileConfig, check_text
from hotsplit.profile.corpus.corpus import Windows
from hotsplit.profile.corpus.processes import Ranks
from hotsplit.profile.count.counting import Counter, experts_of, gates_of, routing_of
from hotsplit.profile.count.input_squares import InputSquares
from hotsplit.profile.count.resume import resume_path
from hotsplit.profile.count.run import Run
from hotsplit.profile.inputs import (
    check_inputs,
    load_engine,
    settings_of,
    stream_plan_of,
    windows_of,
)
from hotsplit.profile.predictors.layer_trainer import LayerQuality, phases
from hotsplit.profile.predictors.output import (
    MAX_TOKENS,
    Measured,
    measure,
    recorded,
    sha256_of_corpora,
    with_predictors,
)
from hotsplit.profile.predictors.train import Trained, train_streamed, train_whole
from hotsplit.profile.report.report import save_report
from hotsplit.profile.stream.streamed_quality import compare_streamed
from hotsplit.profile.stream.streaming import LayerStream, StreamPlan
from hotsplit.runtime.kernels.arithmetic import arithmetic

OnTokens = Callable[[float], None]
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class ProfileReport:
    """Results of a profile. `quality_L` is the quality of the predictors, empty if none were
    trained. `quality` is that of the model with them; None without any, and if a streamed model left
    no room for hidden states."""

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


def profile(
    config: ProfileConfig, on_tokens: OnTokens = lambda count: None, say: Say = lambda line: None
) -> ProfileReport:
    """Writes the profile, a report and, if asked, the predictors; `on_tokens` reports progress.

    A model that does not fit into memory is streamed layer by layer, which `say` reports."""
    began = time.perf_counter()
    with Ranks() as ranks:
        device = ranks.together(lambda: ranks.device(config.device))
        model = ranks.together(lambda: ModelFile.load(config.model))
        ranks.first_only(lambda: check_inputs(config, model))
        plan = ranks.together(lambda: stream_plan_of(config, model, device, ranks))
        run = None
        if plan is not None:
            outcome = _run_streamed(config, model, plan, on_tokens, say)
        else:
            with load_engine(config, ranks, device) as engine:
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
                    outcome = _run_whole(config, run, windows, say)
        report = _report(config, model, outcome, time.perf_counter() - began)
        ranks.first_only(lambda: _save(config, outcome, report))
        if run is not None:
            run.finish()
    return report


# ---- the work -----------------------------------------------------------------------------------


def _run_streamed(
    config: ProfileConfig, model: ModelFile, plan: StreamPlan, on_tokens: OnTokens, say: Say
) -> Outcome:
    with LayerStream(model, plan, say) as stream:
        windows = windows_of(stream, config, Ranks())
        check_text(config, windows.ids)
        squares = InputSquares(model) if config.importances is not None else None
        with stream.observe(squares.observe, squares.wants) if squares else nullcontext():
            counter, trained = _count_streamed(stream, windows.ids, config, on_tokens)

    def compare(predictors: Predictors, examined: Sequence[Tensor]) -> Measured:
        others: list[tuple[ModelFile, Mode]] = [(with_predictors(model, predictors), "predicted")]
        dense_shares = ShareCounter(model)
        reports = compare_streamed(model, others, plan, examined, MAX_TOKENS, dense_shares)
        sha256 = sha256_of_corpora(windows.corpora)
        return recorded(model, reports[0], dense_shares, sha256) if reports else Measured()

    outcome = _outcome(model, windows, counter.arrays(), trained, compare, plan.device)
    return _with_importances(
        outcome, config, squares, squares.arrays() if squares else None, windows
    )


def _count_streamed(
    stream: LayerStream, windows: Sequence[Tensor], config: ProfileConfig, on_tokens: OnTokens
) -> tuple[Counter, Trained | None]:
    """(counts, predictors if asked for). Raises HotsplitError if the model gives NaN."""
    model, gates = stream.model, gates_of(stream.model)
    counter = Counter(gates, model.spec.most_neurons, experts_of(model))
    trained = None
    with stream.observe(counter.observe, counter.wants):
        if config.train_predictors:
            trained = train_streamed(stream, gates, windows, config, on_tokens)
        else:
            stream.run(windows, on_tokens)
    counter.check()
    return counter, trained


def _run_whole(config: ProfileConfig, run: Run, windows: Windows, say: Say) -> Outcome:
    engine, model = run.engine, run.engine.model
    gates = gates_of(model)
    counter = Counter(
        gates, model.spec.most_neurons, experts_of(model), (run.ranks.rank, run.ranks.size)
    )
    run.add("counter", counter)
    trained = None
    squares = InputSquares(model) if config.importances is not None else None
    if squares:
        run.add("inputs", squares)
    with (
        engine.observe(counter.observe, counter.wants),
        engine.observe(squares.observe, squares.wants) if squares else nullcontext(),
    ):
        if config.train_predictors is not None:
            trained = train_whole(run, gates, windows.ids, config)
        else:
            run.phase(windows.ids)
    counted = run.total("counter")

    def compare(predictors: Predictors, examined: Sequence[Tensor]) -> Measured | None:
        sha256 = sha256_of_corpora(windows.corpora)
        return run.ranks.first_only(lambda: measure(engine, predictors, examined, sha256))

    outcome = _outcome(model, windows, counted, trained, compare, engine.device)
    sums = run.total("inputs") if squares else None
    return _with_importances(outcome, config, squares, sums, windows)


def _with_importances(
    outcome: Outcome, config: ProfileConfig, squares: InputSquares | None,
    sums: dict[str, Tensor] | None, windows: Windows,
) -> Outcome:  # fmt: skip
    if squares is None or sums is None or config.importances is None:
        return outcome
    return replace(outcome, importances=squares.importances(config.importances, sums, windows))


def _outcome(
    model: ModelFile,
    windows: Windows,
    counted: dict[str, Tensor],
    trained: Trained | None,
    compare: Callable[[Predictors, Sequence[Tensor]], Measured | None],
    device: torch.device,
) -> Outcome:
    """The counts as a profile; modes are compared on text that nothing was fitted to."""
    measured, ids = None, windows.ids
    if trained:
        measured = compare(trained[0], ids[phases(len(ids))["examine"]])
    result = Profile(
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
        arithmetic=arithmetic(device),
        num_neurons_L=uneven(model.spec.num_neurons_L),
    )
    return Outcome(profile=result, trained=trained, measured=measured)


# ---- what comes out -----------------------------------------------------------------------------


def _report(
    config: ProfileConfig,
    model: ModelFile,
    outcome: Outcome,
    seconds: float,
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
