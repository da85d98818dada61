"""Profiles a model: runs text through it and counts firings; on request, chooses thresholds and
trains predictors. A model that does not fit into memory is streamed; such a run cannot be resumed."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hotsplit.artifacts.importance_file import Importances
from hotsplit.artifacts.model_file import ModelFile
from hotsplit.artifacts.predictor_file import Predictors
from hotsplit.artifacts.profile_file import Profile, uneven
from hotsplit.costs.part_bytes import all_neuron_bytes
from hotsplit.errors import HotsplitError
from hotsplit.measure.evaluate.quality import EvalReport, ShareCounter
from hotsplit.model.mode_quality import ModeQuality, SparseMode
from hotsplit.profile.config import ProfileConfig, check_text
from hotsplit.profile.corpus.corpus import Windows
from hotsplit.profile.corpus.processes import Ranks
from hotsplit.profile.count.counting import Counter, experts_of, gates_of, routing_of
from hotsplit.profile.count.input_squares import InputSquares
from hotsplit.profile.count.resume import resume_path
from hotsplit.profile.count.run import Run
from hotsplit.profile.inputs import (
    check_inputs,
    counted_mode,
    load_engine,
    settings_of,
    stream_plan_of,
    windows_of,
)
from hotsplit.profile.predictors.layer_trainer import LayerQuality, phases
from hotsplit.profile.predictors.output import (
    MAX_TOKENS,
    Measured,
    PredictorOutput,
    changed,
    measure,
    recorded,
    sha256_of_corpora,
)
from hotsplit.profile.predictors.train import Trained, train_streamed, train_whole
from hotsplit.profile.report.report import save_report
from hotsplit.profile.sparsity.thresholds import (
    Found,
    Goal,
    ThresholdReport,
    search,
    thresholds_for,
)
from hotsplit.profile.stream.streamed_quality import compare_streamed
from hotsplit.profile.stream.streaming import LayerStream, StreamPlan
from hotsplit.runtime.engine import Engine
from hotsplit.runtime.kernels.arithmetic import arithmetic
from hotsplit.runtime.kernels.gate import Gate

OnTokens = Callable[[float], None]
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class ProfileReport:
    """Results of a profile. `quality_L` is the quality of the predictors, empty if none were
    trained. `quality` is that of the model with the predictors or thresholds of this run or with
    its own limits; None without any of them, and if a streamed model left no room for hidden
    states."""

    output: Path
    model_id: str
    num_tokens: int
    density_L: tuple[float, ...]
    hottest_fifth_L: tuple[float, ...]  # share of the firings of the hottest 20 %
    hottest_fifth_of_experts_L: tuple[float, ...]  # share of the choices; () without experts
    threshold_L: tuple[float, ...]
    search: ThresholdReport | None  # if a perplexity budget was given
    limits: str | None  # sha256 of the file's limits, above which neurons fire; None: it has none
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
    search: ThresholdReport | None = None
    trained: Trained | None = None
    importances: Importances | None = None
    measured: Measured | None = None  # None: no predictors, no new thresholds, no limits


def profile(
    config: ProfileConfig, on_tokens: OnTokens = lambda count: None, say: Say = lambda line: None
) -> ProfileReport:
    """Writes the profile, a report and, if asked, the predictors; `on_tokens` reports progress.

    A model that does not fit into memory is streamed layer by layer, which `say` reports."""
    began = time.perf_counter()
    files = None
    if config.train_predictors is not None:
        files = PredictorOutput(
            folder=config.train_predictors, format=config.predictors.format, force=config.force
        )
    with Ranks() as ranks:
        device = ranks.together(lambda: ranks.device(config.device))
        model = ranks.together(lambda: ModelFile.load(config.model))
        if config.train_predictors is not None:
            model.refuse_chosen("predictors are", "leave --train-predictors out")
        if config.chooses_thresholds:
            model.refuse_chosen("thresholds of gates are", "profile it without them")
        ranks.first_only(lambda: check_inputs(config, model, files))
        plan = ranks.together(lambda: stream_plan_of(config, model, device, ranks))
        run = None
        if plan is not None:
            outcome = _run_streamed(config, model, plan, on_tokens, say)
        else:
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
                    outcome = _run_whole(config, run, windows, files, say)
        report = _report(config, model, files, outcome, time.perf_counter() - began)
        ranks.first_only(lambda: _save(config, files, outcome, report))
        if run is not None:
            run.finish()
    return report


# ---- the work -----------------------------------------------------------------------------------


def _run_streamed(
    config: ProfileConfig, model: ModelFile, plan: StreamPlan, on_tokens: OnTokens, say: Say
) -> Outcome:
    with LayerStream(model, plan, say, mode=counted_mode(model)) as stream:
        windows = windows_of(stream, config, Ranks())
        check_text(config, windows.ids)
        _say_what_is_counted(config, windows.ids, say)
        squares = InputSquares(model) if config.importances is not None else None
        with stream.observe(squares.observe, squares.wants) if squares else nullcontext():
            gates, counter, trained = _count_streamed(stream, windows.ids, config, on_tokens)

    def compare(examined: Sequence[Tensor]) -> Measured:
        others, dense_shares = changed(model, gates, trained and trained[0]), ShareCounter(model)
        reports = compare_streamed(model, others, plan, examined, MAX_TOKENS, dense_shares)
        return recorded(model, reports, dense_shares, sha256_of_corpora(windows.corpora))

    outcome = _outcome(
        config, model, windows, gates, counter.arrays(), trained, compare, plan.device
    )
    return _with_importances(
        outcome, config, squares, squares.arrays() if squares else None, windows
    )


def _count_streamed(
    stream: LayerStream, windows: Sequence[Tensor], config: ProfileConfig, on_tokens: OnTokens
) -> tuple[tuple[Gate, ...], Counter, Trained | None]:
    """(gates with the thresholds that firings were counted with, counts, predictors if asked for).

    Raises HotsplitError for a perplexity budget, and if the model gives NaN."""
    model = stream.model
    if config.perplexity_budget is not None:
        raise HotsplitError(
            f"{config.model}: a perplexity budget is measured on the whole model, which does not"
            " fit into the memory; give --target-sparsity, or more memory"
        )
    gates = gates_of(model, model.threshold_L)
    tune, windows = config.split(windows)
    if config.target_sparsity is not None:
        silent = gates_of(model, (0.0,) * len(gates))
        histogram_LB = _histogram(stream, silent, tune, on_tokens)
        gates = gates_of(model, thresholds_for(histogram_LB, config.target_sparsity))
    counter = Counter(gates, model.spec.most_neurons, model.limits.layers, experts_of(model))
    trained = None
    with stream.observe(counter.observe, counter.wants):
        if config.train_predictors:
            trained = train_streamed(stream, gates, windows, config, on_tokens)
        else:
            stream.run(windows, on_tokens)
    counter.check()
    return gates, counter, trained


def _histogram(
    stream: LayerStream, gates: tuple[Gate, ...], windows: Sequence[Tensor], on_tokens: OnTokens
) -> np.ndarray:
    """int64 [L, B], counted in a separate pass over the weights."""
    counter = Counter(gates, stream.model.spec.most_neurons)
    with stream.observe(counter.observe, counter.wants):
        stream.run(windows, on_tokens)
    counter.check()
    return counter.arrays()["gate_histogram_LB"].numpy()


def _run_whole(
    config: ProfileConfig, run: Run, windows: Windows, files: PredictorOutput | None, say: Say
) -> Outcome:
    engine, model = run.engine, run.engine.model
    tune, ids = config.split(windows.ids)
    _say_what_is_counted(config, windows.ids, say)
    gates, found = _gates(config, run, tune, ids, say)
    counter = Counter(
        gates, model.spec.most_neurons, model.limits.layers, experts_of(model),
        (run.ranks.rank, run.ranks.size),
    )  # fmt: skip
    run.add("counter", counter)
    trained = None
    squares = InputSquares(model) if config.importances is not None else None
    if squares:
        run.add("inputs", squares)
    with (
        engine.observe(counter.observe, counter.wants),
        engine.observe(squares.observe, squares.wants) if squares else nullcontext(),
    ):
        if files:
            trained = train_whole(run, gates, ids, config)
        else:
            run.phase(ids)
    counted = run.total("counter")

    def compare(examined: Sequence[Tensor]) -> Measured | None:
        predictors, sha256 = trained and trained[0], sha256_of_corpora(windows.corpora)
        return run.ranks.first_only(lambda: _measured(engine, gates, predictors, examined, sha256))

    outcome = _outcome(config, model, windows, gates, counted, trained, compare, engine.device)
    sums = run.total("inputs") if squares else None
    return _with_importances(replace(outcome, search=found), config, squares, sums, windows)


def _with_importances(
    outcome: Outcome, config: ProfileConfig, squares: InputSquares | None,
    sums: dict[str, Tensor] | None, windows: Windows,
) -> Outcome:  # fmt: skip
    if squares is None or sums is None or config.importances is None:
        return outcome
    return replace(outcome, importances=squares.importances(config.importances, sums, windows))


def _outcome(
    config: ProfileConfig,
    model: ModelFile,
    windows: Windows,
    gates: tuple[Gate, ...],
    counted: dict[str, Tensor],
    trained: Trained | None,
    compare: Callable[[Sequence[Tensor]], Measured | None],
    device: torch.device,
) -> Outcome:
    """The counts as a profile; modes are compared on text that nothing was fitted to."""
    measured = None
    if trained or config.chooses_thresholds or model.has_limits:
        _, ids = config.split(windows.ids)
        measured = compare(ids[phases(len(ids))["examine"]] if trained else ids)
    result = Profile(
        model_id=model.model_id,
        num_tokens=int(counted["num_tokens"]),
        threshold_L=tuple(gate.threshold for gate in gates),
        corpora=windows.corpora,
        active_count_LF=counted["active_count_LF"].numpy(),
        gate_histogram_LB=counted["gate_histogram_LB"].numpy(),
        expert_count_LE=counted["expert_count_LE"].numpy()
        if "expert_count_LE" in counted
        else None,
        routing_LTK=routing_of(counted),
        quality={} if measured is None else measured.record,
        arithmetic=arithmetic(device),
        limits=model.limits.sha256,
        num_neurons_L=uneven(model.spec.num_neurons_L),
    )
    return Outcome(profile=result, trained=trained, measured=measured)


def _say_what_is_counted(config: ProfileConfig, ids: Sequence[Tensor], say: Say) -> None:
    tuned, counted = (sum(map(len, part)) for part in config.split(ids))
    if tuned:
        say(
            f"thresholds are chosen on {tuned:,} tokens, and firings counted on the other"
            f" {counted:,}"
        )


def _measured(
    engine: Engine,
    gates: tuple[Gate, ...],
    predictors: Predictors | None,
    examined: Sequence[Tensor],
    sha256: str,
) -> Measured:
    """Compares modes with `engine`, or with a dense one if the model has limits."""
    if not engine.model.has_limits:
        return measure(engine, gates, predictors, examined, sha256)
    with Engine.of(
        engine.model, mode="dense", device=str(engine.device),
        context_length=engine.context_length, is_resident=False,
    ) as dense:  # fmt: skip
        return measure(dense, gates, predictors, examined, sha256)


def _gates(
    config: ProfileConfig, run: Run, tune: Sequence[Tensor], check: Sequence[Tensor], say: Say
) -> tuple[tuple[Gate, ...], ThresholdReport | None]:
    """The layers' gates with the thresholds that firings are counted with.

    Thresholds are chosen on `tune`, which is not counted; `check` measures the cost of a search."""
    engine, model = run.engine, run.engine.model
    target, budget = config.target_sparsity, config.perplexity_budget
    if target is None and budget is None:
        return gates_of(model, model.threshold_L), None
    zeros_L = (0.0,) * model.spec.num_layers
    if budget is not None:
        engine.set_thresholds(zeros_L)
    counter = Counter(gates_of(model, zeros_L), model.spec.most_neurons)
    run.add("magnitudes", counter)
    with engine.observe(counter.observe, counter.wants):
        run.phase(tune)
    histogram_LB = run.total("magnitudes")["gate_histogram_LB"].numpy()
    if budget is None:
        assert target is not None
        return gates_of(model, thresholds_for(histogram_LB, target)), None
    goal = Goal(perplexity_budget=budget, sparsity=1.0 if target is None else target)
    found = Found(len(zeros_L))
    is_found = run.has("thresholds")
    if not is_found:
        run.ranks.first_only(
            lambda: found.set(*search(engine, histogram_LB, tune, check, goal, say))
        )
        for tensor in found.arrays().values():
            run.ranks.spread(tensor)
    # Not earlier: a run interrupted in its search would resume with the zeros of `found`.
    run.add("thresholds", found)
    if not is_found:
        run.save()
    return gates_of(model, found.threshold_L), found.report


# ---- what comes out -----------------------------------------------------------------------------


def _report(
    config: ProfileConfig,
    model: ModelFile,
    files: PredictorOutput | None,
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
        search=outcome.search,
        limits=result.limits,
        importances=config.importances,
        predictors=files.path if files else None,
        predictor_bytes=sum(q.chosen.num_bytes for q in quality_L),
        ffn_bytes=all_neuron_bytes(model),
        quality_L=quality_L,
        quality=outcome.measured.report if outcome.measured else None,
        record=result.quality,
        seconds=seconds,
    )


def _save(
    config: ProfileConfig, files: PredictorOutput | None, outcome: Outcome, report: ProfileReport
) -> None:
    result = outcome.profile
    result.validate()
    if files and outcome.trained:
        predictors = outcome.trained[0]
        files.save(replace(predictors, quality=result.quality, arithmetic=result.arithmetic))
    result.save(config.output)
    if outcome.importances is not None:
        outcome.importances.save(outcome.importances.path)
    save_report(report)
