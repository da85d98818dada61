"""Runs text through a model: counts firings and, if asked, trains predictors on the way.

What this module does not know: how the model computes; it sees it through observers only."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from sparkinfer.architecture import SMOOTH
from sparkinfer.errors import SparkinferError
from sparkinfer.files import check_output
from sparkinfer.model_file import ModelFile, PredictorInfo
from sparkinfer.predictor_file import FILE_NAME, Predictors
from sparkinfer.profile.collect_streamed import Streamed
from sparkinfer.profile.corpus import WINDOW, Windows, read_windows, spread_windows
from sparkinfer.profile.counting import Counter, thresholds_for
from sparkinfer.profile.ranks import Ranks
from sparkinfer.profile.resume import resume_path
from sparkinfer.profile.run import SAVE_EVERY_S, Run
from sparkinfer.profile.sources import STDIN
from sparkinfer.profile.stream_training import Finished
from sparkinfer.profile.streaming import LayerStream, StreamPlan, plan_stream
from sparkinfer.profile.trainer_state import SharedSteps, Sums, Weights, num_steps
from sparkinfer.profile.training import LayerQuality, LayerTrainer, PredictorTrainer, row_norms
from sparkinfer.profile_file import Profile
from sparkinfer.runtime.engine import Engine, device_of
from sparkinfer.runtime.feed_forward import Gate
from sparkinfer.runtime.loader import Layer

# Shares of the windows that the phases of training take; see profile.training.
MOMENT_SHARE, HELD_OUT_SHARE = 0.1, 0.15
MIN_TRAINING_WINDOWS = 10
DEFAULT_TOKENS = 131_072


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    model: Path
    corpora: tuple[Path, ...]
    output: Path
    max_tokens: int | None = None  # None: DEFAULT_TOKENS, or what there is; else so many or none
    text_key: str = "text"  # of JSON lines and parquet
    train_predictors: Path | None = None  # a folder for predictors.safetensors
    predictor_rank: int | None = None  # None: an eighth of the model width
    target_contribution: float = 0.985  # share of sum |h_j| |down_j| that predictors must name
    input_layer_offset: int = 0
    target_sparsity: float | None = None  # SiLU: choose thresholds for this share of silent neurons
    max_memory_bytes: int | None = None  # see profile.memory.room_of; None: what is free
    device: str | None = None
    seed: int = 0
    force: bool = False
    save_every_s: float = SAVE_EVERY_S

    @property
    def predictor_path(self) -> Path | None:
        return self.train_predictors and self.train_predictors / FILE_NAME

    def __post_init__(self) -> None:
        if not self.corpora:
            raise SparkinferError("no corpus; give one or more text files with --corpus")
        for name in ("target_contribution", "target_sparsity"):
            value = getattr(self, name)
            if value is not None and not 0 < value < 1:
                raise SparkinferError(f"{name} is {value}, wanted more than 0 and less than 1")
        if self.seed < 0:
            raise SparkinferError(f"seed is {self.seed}, wanted 0 or more")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise SparkinferError(f"tokens is {self.max_tokens}, wanted 1 or more")
        if self.input_layer_offset not in (0, 1):
            raise SparkinferError(f"input layer offset is {self.input_layer_offset}, wanted 0 or 1")
        if self.predictor_rank is not None and self.predictor_rank < 1:
            raise SparkinferError(f"predictor rank is {self.predictor_rank}, wanted 1 or more")


@dataclass(frozen=True, kw_only=True)
class ProfileReport:
    output: Path
    model_id: str
    num_tokens: int
    density_L: tuple[float, ...]
    hottest_fifth_L: tuple[float, ...]  # share of the firings that the hottest 20 % take
    threshold_L: tuple[float, ...]
    predictors: Path | None
    predictor_bytes: int  # f16 weights, f32 biases
    quality_L: tuple[LayerQuality, ...]
    seconds: float


def profile(
    config: ProfileConfig,
    on_tokens: Callable[[float], None] = lambda count: None,
    say: Callable[[str], None] = lambda line: None,
) -> ProfileReport:
    """Writes the profile and, if asked, the predictors; `on_tokens` hears of progress.

    A model that does not fit goes through the device layer by layer, of which `say` hears."""
    began = time.perf_counter()
    with Ranks() as ranks:
        ranks.first_only(lambda: _check_outputs(config))
        device = ranks.together(lambda: ranks.device(config.device))
        model = ranks.together(lambda: ModelFile.load(config.model))
        plan = ranks.together(lambda: _stream_plan(config, model, device, ranks))
        result, trained, quality = (
            _run_whole(config, ranks, device, on_tokens)
            if plan is None
            else _run_streamed(config, ranks, model, plan, on_tokens, say)
        )
    return ProfileReport(
        output=config.output,
        model_id=result.model_id,
        num_tokens=result.num_tokens,
        density_L=tuple(result.density_L.tolist()),
        hottest_fifth_L=tuple(result.hottest_share_L().tolist()),
        threshold_L=result.threshold_L,
        predictors=config.predictor_path,
        predictor_bytes=_bytes(trained) if trained else 0,
        quality_L=quality,
        seconds=time.perf_counter() - began,
    )


Outcome = tuple[Profile, Predictors | None, tuple[LayerQuality, ...]]


def _stream_plan(
    config: ProfileConfig, model: ModelFile, device: str | None, ranks: Ranks
) -> StreamPlan | None:
    """None for a model that fits. Raises SparkinferError for several processes."""
    plan = plan_stream(
        model,
        device=device_of(device),
        max_memory_bytes=config.max_memory_bytes,
        rank=_rank(model, config) if config.train_predictors else None,
        folder=config.output.parent,
    )
    if plan is not None and ranks.size > 1:
        raise SparkinferError(
            f"{config.model}: does not fit into the memory, and several processes cannot stream"
            " its layers; run one process, or raise --max-memory"
        )
    return plan


def _run_streamed(
    config: ProfileConfig,
    ranks: Ranks,
    model: ModelFile,
    plan: StreamPlan,
    on_tokens: Callable[[float], None],
    say: Callable[[str], None],
) -> Outcome:
    """One pass over the weights; it cannot be resumed."""
    with LayerStream(model, plan, say) as stream:
        windows = _windows(stream, config, ranks)
        _check(stream, len(windows.ids), config)
        num_first = _num_for_thresholds(len(windows.ids), config)
        streamed = Streamed(stream, on_tokens)
        gates = _gates_of(model, model.threshold_L)
        if config.target_sparsity is not None:
            silent = _gates_of(model, (0.0,) * len(gates))
            histogram_LB = streamed.histogram(silent, windows.ids[:num_first])
            gates = _gates_of(model, thresholds_for(histogram_LB, config.target_sparsity))
        ids = windows.ids[num_first:]
        counter = Counter(gates, model.shape.num_neurons)
        with stream.observe(counter.observe, counter.wants):
            if config.train_predictors:
                finished = streamed.train(
                    ids,
                    _bounds(len(ids)),
                    trainer_of=lambda index, layer: _trainer(
                        layer, gates[index], _rank(model, config)
                    ),
                    input_layer_offset=config.input_layer_offset,
                    target=config.target_contribution,
                )
                trained, quality = _predictors(finished, model, config)
            else:
                stream.run(ids, on_tokens)
                trained, quality = None, ()
        counter.check()
    counted = {name: total.numpy() for name, total in counter.arrays().items()}
    result = _result(model, gates, windows, counted)
    _save(config, result, trained)
    return result, trained, quality


def _run_whole(
    config: ProfileConfig, ranks: Ranks, device: str | None, on_tokens: Callable[[float], None]
) -> Outcome:
    with ranks.together(lambda: Engine.load(config.model, mode="dense", device=device)) as engine:
        windows = _windows(engine, config, ranks)
        ranks.first_only(lambda: _check(engine, len(windows.ids), config))
        run = Run(
            engine,
            ranks,
            resume_path(config.output),
            _settings(engine, windows, config, ranks),
            on_tokens,
            force=config.force,
            save_every_s=config.save_every_s,
        )
        gates, ids = _gates(run, windows.ids, config)
        counter = Counter(gates, engine.model.shape.num_neurons)
        run.add("counter", counter)
        with engine.observe(counter.observe, counter.wants):
            if config.train_predictors:
                trained, quality = _train(run, gates, ids, config)
            else:
                trained, quality = None, ()
                run.phase(ids)
        counted = {name: total.numpy() for name, total in run.total("counter").items()}
        result = _result(engine.model, gates, windows, counted)
    ranks.first_only(lambda: _save(config, result, trained))
    run.finish()
    return result, trained, quality


def _result(
    model: ModelFile, gates: tuple[Gate, ...], windows: Windows, counted: dict[str, np.ndarray]
) -> Profile:
    return Profile(
        model_id=model.model_id,
        num_tokens=int(counted["num_tokens"]),
        threshold_L=tuple(gate.threshold for gate in gates),
        corpora=windows.corpora,
        active_count_LF=counted["active_count_LF"],
        gate_histogram_LB=counted["gate_histogram_LB"],
    )


def _gates_of(model: ModelFile, threshold_L: Sequence[float]) -> tuple[Gate, ...]:
    return tuple(Gate(activation=model.activation, threshold=t) for t in threshold_L)


def _check_outputs(config: ProfileConfig) -> None:
    inputs = (config.model, *(path for path in config.corpora if path != STDIN))
    check_output(config.output, force=config.force, inputs=inputs)
    if config.predictor_path:
        check_output(config.predictor_path, force=config.force)


def _save(config: ProfileConfig, result: Profile, trained: Predictors | None) -> None:
    if trained and config.predictor_path:
        trained.save(config.predictor_path)
    result.save(config.output)


def _windows(engine: Engine | LayerStream, config: ProfileConfig, ranks: Ranks) -> Windows:
    """The first process reads the corpus, so that all have the same windows; () of corpora."""
    found = ranks.first_only(
        lambda: read_windows(
            config.corpora,
            engine.codec,
            context_length=engine.context_length,
            max_tokens=config.max_tokens or DEFAULT_TOKENS,
            seed=config.seed,
            text_key=config.text_key,
            must_fill=config.max_tokens is not None,
            vocab_size=engine.model.shape.vocab_size,
        )
    )
    return found if ranks.size == 1 and found else spread_windows(found, ranks)


def _settings(
    engine: Engine, windows: Windows, config: ProfileConfig, ranks: Ranks
) -> dict[str, str | int | float | bool | None]:
    """What decides the numbers of a run: where any of it differs, one cannot go on with it."""
    trains = config.train_predictors is not None
    return {
        "model": engine.model.model_id,
        "model file bytes": engine.model.path.stat().st_size,  # of another type, other roundings
        "corpus": ", ".join(f"{c.name} {c.sha256}" for c in windows.corpora),
        "text key": config.text_key,
        "tokens": config.max_tokens or DEFAULT_TOKENS,
        "seed": config.seed,
        "windows": windows.sha256,
        "device": engine.device.type,
        "target sparsity": config.target_sparsity,
        "training": trains,
        "rank": config.predictor_rank if trains else None,
        "input layer offset": config.input_layer_offset if trains else None,
        "processes": ranks.size if trains else None,  # counts are the same for any number
    }


def _num_for_thresholds(num_windows: int, config: ProfileConfig) -> int:
    return 0 if config.target_sparsity is None else max(1, num_windows // 4)


def _check(engine: Engine | LayerStream, num_windows: int, config: ProfileConfig) -> None:
    """Raises SparkinferError where the model or the length of the text is not for this."""
    model, trains = engine.model, config.train_predictors is not None
    if config.target_sparsity is not None and model.activation not in SMOOTH:
        raise SparkinferError(
            f"{model.path}: a target sparsity is for SiLU and GELU models; the activation here is"
            f" {model.activation}, whose neurons are silent by themselves"
        )
    if config.target_sparsity is not None and num_windows < 2:
        raise SparkinferError("thresholds need two windows of text or more; give a longer corpus")
    is_dense = model.activation in SMOOTH and not any(model.threshold_L)
    if trains and is_dense and config.target_sparsity is None:
        raise SparkinferError(
            f"{model.path}: every neuron of a {model.activation} model without thresholds"
            " fires, which leaves nothing to predict; give --target-sparsity, e.g. 0.5"
        )
    count = num_windows - _num_for_thresholds(num_windows, config)
    if trains and count < MIN_TRAINING_WINDOWS:
        raise SparkinferError(
            f"{count} windows of {WINDOW} tokens cannot train predictors,"
            f" wanted {MIN_TRAINING_WINDOWS} or more; give a longer corpus or more --tokens"
        )
    if trains and _rank(model, config) > min(model.shape.width, model.shape.num_neurons):
        raise SparkinferError(
            f"predictor rank {config.predictor_rank} is above the width {model.shape.width}"
        )


def _rank(model: ModelFile, config: ProfileConfig) -> int:
    return config.predictor_rank or max(1, model.shape.width // 8)


def _gates(
    run: Run, windows: tuple[torch.Tensor, ...], config: ProfileConfig
) -> tuple[tuple[Gate, ...], tuple[torch.Tensor, ...]]:
    """The layers' gates with the thresholds to count with, and the windows left to count.

    Thresholds are chosen on the first quarter of the windows, which is not counted."""
    model = run.engine.model
    gates = _gates_of(model, model.threshold_L)
    if config.target_sparsity is None:
        return gates, windows
    counter = Counter(_gates_of(model, (0.0,) * len(gates)), model.shape.num_neurons)
    first = _num_for_thresholds(len(windows), config)
    run.add("magnitudes", counter)
    with run.engine.observe(counter.observe, counter.wants):
        run.phase(windows[:first])
    histogram_LB = run.total("magnitudes")["gate_histogram_LB"].numpy()
    thresholds = thresholds_for(histogram_LB, config.target_sparsity)
    return _gates_of(model, thresholds), windows[first:]


def _train(
    run: Run,
    gates: tuple[Gate, ...],
    windows: tuple[torch.Tensor, ...],
    config: ProfileConfig,
) -> tuple[Predictors, tuple[LayerQuality, ...]]:
    engine, rank = run.engine, _rank(run.engine.model, config)
    layers = [
        _trainer(loaded, gate, rank) for loaded, gate in zip(engine.layers, gates, strict=True)
    ]
    trainer = PredictorTrainer(layers, config.input_layer_offset)
    first, last = _bounds(len(windows))
    moments = Sums(layers, "moment_DD", "num_moment")
    run.add("moments", moments)
    with engine.observe(trainer.observe, trainer.wants):
        run.phase(windows[:first])
        moments.load(run.total("moments"))
        run.drop("moments")
        training = windows[first:last]
        steps = num_steps(training, run.ranks.size)
        weights = Weights(layers, steps)
        if not run.has("weights"):
            trainer.start(steps)
            weights.spread(run.ranks)
        run.add("weights", weights)
        trainer.phase = "train"
        run.phase(training, SharedSteps(run.ranks, trainer))
        trainer.phase = "measure"
        held_out = Sums(layers, "held_out", "num_held_out")
        run.add("held out", held_out)
        run.phase(windows[last:])
        held_out.load(run.total("held out"))
    finished = [layer.finish(config.target_contribution) for layer in layers]
    return _predictors(finished, engine.model, config)


def _bounds(count: int) -> tuple[int, int]:
    """Windows before the first are for moments, those from the second on are held out."""
    return max(1, round(MOMENT_SHARE * count)), count - max(1, round(HELD_OUT_SHARE * count))


def _trainer(loaded: Layer, gate: Gate, rank: int) -> LayerTrainer:
    (block,) = loaded.ffn.blocks  # an engine without a plan has one block a layer
    gate_FD = block.gate.weight.rows(block.id_N)
    return LayerTrainer(gate, gate_FD, row_norms(block.down), rank, block.gate.bias_N)


def _predictors(
    finished: list[Finished], model: ModelFile, config: ProfileConfig
) -> tuple[Predictors, tuple[LayerQuality, ...]]:
    quality = tuple(q for _, _, q in finished)
    info = PredictorInfo(
        kind="linear",
        rank_L=(_rank(model, config),) * len(finished),
        threshold_L=tuple(threshold for _, threshold, _ in finished),
        input_layer_offset=config.input_layer_offset,
        density_L=tuple(q.predicted_density for q in quality),
    )
    layers = tuple(predictor for predictor, _, _ in finished)
    return Predictors(model_id=model.model_id, info=info, layers=layers), quality


def _bytes(predictors: Predictors) -> int:
    total = 0
    for layer, predictor in enumerate(predictors.layers):
        arrays = predictor.arrays(layer).items()
        total += sum(a.size * (4 if name.endswith("bias") else 2) for name, a in arrays)
    return total
