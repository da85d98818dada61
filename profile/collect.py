"""Profiles a model: runs text through it and counts firings; on request, trains predictors."""

import hashlib
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.cuda import mem_get_info

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.artifacts.profile_file import Profile, uneven
from hotsplit.costs.part_bytes import all_neuron_bytes
from hotsplit.errors import HotsplitError
from hotsplit.files.outputs import check_output
from hotsplit.measure.evaluate.quality import EvalReport
from hotsplit.model.mode_quality import ModeQuality, SparseMode
from hotsplit.profile.corpus.corpus import Windows, read_windows, spread_windows
from hotsplit.profile.corpus.processes import Ranks
from hotsplit.profile.corpus.sources import STDIN
from hotsplit.profile.count.counting import Counter, experts_of, gates_of, routing_of
from hotsplit.profile.count.input_squares import InputSquares
from hotsplit.profile.count.resume import Settings, resume_path
from hotsplit.profile.count.run import ResumableRun
from hotsplit.profile.predictors.layer_trainer import LayerQuality, phases
from hotsplit.profile.predictors.output import measure, sha256_of_corpora
from hotsplit.profile.predictors.predictor_options import check_memory
from hotsplit.profile.predictors.train import train
from hotsplit.profile.profile_config import DEFAULT_TOKENS, ProfileConfig, check_model, check_text
from hotsplit.profile.report import report_path, save_report
from hotsplit.runtime.engine import Engine
from hotsplit.runtime.kernels.arithmetic import arithmetic
from hotsplit.runtime.resolved_options import device_of
from hotsplit.system.sizes import format_bytes

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
    seconds: float = 0.0


def profile(config: ProfileConfig, on_tokens: OnTokens = lambda count: None) -> ProfileReport:
    """Writes the profile, a report and, if asked, the predictors; `on_tokens` reports progress. On
    the CPU, weights stay in the mapped file."""
    began = time.perf_counter()
    with Ranks() as ranks:
        device = ranks.together(lambda: ranks.device(config.device or "cpu"))
        model = ranks.together(lambda: ModelFile.load(config.model))
        ranks.first_only(lambda: check_inputs(config, model))
        with load_engine(config, model, ranks, device) as engine:
            windows = windows_of(engine, config, ranks)
            ranks.first_only(lambda: check_text(config, windows.ids))
            run = ResumableRun(
                engine,
                ranks,
                resume_path(config.output),
                settings_of(engine, windows, config, ranks),
                on_tokens,
                force=config.force,
                save_every_s=config.save_every_s,
            )
            with run.signals():
                report, save = _outcome(config, run, windows)
        report = replace(report, seconds=time.perf_counter() - began)
        ranks.first_only(lambda: save(report))
        run.finish()
    return report


def _outcome(
    config: ProfileConfig, run: ResumableRun, windows: Windows
) -> tuple[ProfileReport, Callable[[ProfileReport], None]]:
    """(the report, the function that writes everything). Modes are compared on unseen text."""
    engine, model, ids = run.engine, run.engine.model, windows.ids
    gates, ranks = gates_of(model), run.ranks
    share = (ranks.rank, ranks.size)
    counter = Counter(gates, model.spec.most_neurons, experts_of(model), share, engine.device)
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
    choices = counted.get("expert_count_LE")
    result = Profile(
        model_id=model.model_id,
        num_tokens=int(counted["num_tokens"]),
        threshold_L=model.threshold_L,
        corpora=windows.corpora,
        active_count_LF=counted["active_count_LF"].numpy(),
        gate_histogram_LB=counted["gate_histogram_LB"].numpy(),
        expert_count_LE=None if choices is None else choices.numpy(),
        routing_LTK=routing_of(counted),
        quality={} if measured is None else measured.record,
        arithmetic=arithmetic(engine.device),
        num_neurons_L=uneven(model.spec.num_neurons_L),
    )
    quality_L = trained[1] if trained else ()
    of_experts_L = result.hottest_fifth_of_experts_L()
    report = ProfileReport(
        output=config.output,
        model_id=result.model_id,
        num_tokens=result.num_tokens,
        density_L=tuple(result.density_L[result.has_neurons_L].tolist()),
        hottest_fifth_L=tuple(result.hottest_fifth_L()[result.has_neurons_L].tolist()),
        hottest_fifth_of_experts_L=() if of_experts_L is None else tuple(of_experts_L.tolist()),
        threshold_L=result.threshold_L,
        importances=config.importances,
        predictors=config.predictor_path,
        predictor_bytes=sum(q.chosen.num_bytes for q in quality_L),
        ffn_bytes=all_neuron_bytes(model),
        quality_L=quality_L,
        quality=measured.report if measured else None,
        record=result.quality,
    )

    def save(report: ProfileReport) -> None:
        result.validate()
        if config.predictor_path is not None and trained:
            made = replace(trained[0], quality=result.quality, arithmetic=result.arithmetic)
            made.save(config.predictor_path)
        result.save(config.output)
        if importances is not None:
            importances.save(importances.path)
        save_report(report)

    return report, save


def check_inputs(config: ProfileConfig, model: ModelFile) -> None:
    """Raises HotsplitError for errors that can be found before text is read."""
    inputs = (config.model, *(path for path in config.corpora if path != STDIN))
    extras = [path for path in (config.importances, config.predictor_path) if path is not None]
    for path in (config.output, report_path(config.output), *extras):
        check_output(path, force=config.force, inputs=inputs)
    check_model(config, model)
    if config.train_predictors is not None:
        check_memory(config.predictor_rank, model)


def load_engine(
    config: ProfileConfig, model: ModelFile, ranks: Ranks, device: str | None
) -> Engine:
    """Loads the model. Raises HotsplitError if it is larger than the GPU's free memory."""

    def load() -> Engine:
        gpu = device_of(device)
        if gpu.type == "cuda":
            size, free = sum(e.num_bytes for e in model.tensors.values()), mem_get_info(gpu)[0]
            if size > free:
                raise HotsplitError(
                    f"{config.model}: {format_bytes(size)} of weights, {format_bytes(free)} are"
                    f" free on {gpu}; give --device cpu, which reads them from the file"
                )
        return Engine.load(config.model, mode="dense", device=device, is_resident=False)

    return ranks.together(load)


def windows_of(engine: Engine, config: ProfileConfig, ranks: Ranks) -> Windows:
    """The first process reads the corpus, so that all have the same windows."""
    found = ranks.first_only(
        lambda: read_windows(
            config.corpora,
            engine.codec,
            context_length=engine.context_length,
            max_tokens=config.max_tokens or DEFAULT_TOKENS,
            seed=config.seed,
            text_key=config.text_key,
            must_fill=config.max_tokens is not None,
            vocab_size=engine.model.spec.vocab_size,
        )
    )
    return found if ranks.size == 1 and found else spread_windows(found, ranks)


def settings_of(engine: Engine, windows: Windows, config: ProfileConfig, ranks: Ranks) -> Settings:
    """What a run's numbers depend on; a run resumes only if all of it is unchanged."""
    trains = config.train_predictors is not None
    tensors = sorted((name, e.kind, e.shape) for name, e in engine.model.tensors.items())
    return {
        "model": engine.model.model_id,
        "types": hashlib.sha256(repr((engine.model.activation, tensors)).encode()).hexdigest(),
        "thresholds of the model": str(engine.model.threshold_L),
        "corpus": ", ".join(f"{c.name} {c.sha256}" for c in windows.corpora),
        "text key": config.text_key,
        "tokens": config.max_tokens or DEFAULT_TOKENS,
        "seed": config.seed,
        "windows": windows.sha256,
        "arithmetic": arithmetic(engine.device),
        "training": trains,
        "predictor rank": config.predictor_rank if trains else None,
        "threads": torch.get_num_threads() if trains else None,
        "processes": ranks.size if trains else None,  # counts are the same for any number
        **({} if config.importances is None else {"importances": True}),
    }
