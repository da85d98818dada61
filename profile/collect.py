"""Runs text through a model: counts firings and, if asked, trains predictors on the way.

What this module does not know: how the model computes; it sees it through observers only."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from sparkinfer.architecture import SMOOTH
from sparkinfer.budget import PREFILL_CHUNK, layer_bytes
from sparkinfer.errors import SparkinferError
from sparkinfer.files import check_output
from sparkinfer.model_file import PredictorInfo
from sparkinfer.predictor_file import Predictors
from sparkinfer.profile.corpus import WINDOW, Windows, read_windows
from sparkinfer.profile.counting import Counter, thresholds_for
from sparkinfer.profile.layer_trainer import (
    LayerQuality,
    LayerTrainer,
    PredictorTrainer,
    phases,
)
from sparkinfer.profile.predictor_options import PredictorOptions, predictor_choices
from sparkinfer.profile.predictor_output import ModelQuality, PredictorOutput
from sparkinfer.profile_file import Profile
from sparkinfer.runtime.engine import Engine
from sparkinfer.runtime.feed_forward import Gate

MIN_TRAINING_WINDOWS = 10


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    model: Path
    corpora: tuple[Path, ...]
    output: Path
    max_tokens: int = 131_072
    train_predictors: Path | None = None  # a folder for them and their report
    predictors: PredictorOptions = PredictorOptions()
    input_layer_offset: int = 0
    target_sparsity: float | None = None  # SiLU: choose thresholds for this share of silent neurons
    device: str | None = None
    seed: int = 0
    force: bool = False

    def __post_init__(self) -> None:
        if not self.corpora:
            raise SparkinferError("no corpus; give one or more text files with --corpus")
        if self.target_sparsity is not None and not 0 < self.target_sparsity < 1:
            raise SparkinferError(
                f"target_sparsity is {self.target_sparsity}, wanted more than 0 and less than 1"
            )
        if self.max_tokens < 1:
            raise SparkinferError(f"tokens is {self.max_tokens}, wanted 1 or more")
        if self.input_layer_offset not in (0, 1):
            raise SparkinferError(f"input layer offset is {self.input_layer_offset}, wanted 0 or 1")


@dataclass(frozen=True, kw_only=True)
class ProfileReport:
    """`quality_L` and `quality` are of the predictors, where some were trained."""

    output: Path
    model_id: str
    num_tokens: int
    density_L: tuple[float, ...]
    hottest_fifth_L: tuple[float, ...]  # share of the firings that the hottest 20 % take
    threshold_L: tuple[float, ...]
    predictors: Path | None
    predictor_bytes: int  # as they will be in a model file
    ffn_bytes: int  # of all gates, ups and downs
    quality_L: tuple[LayerQuality, ...]
    quality: ModelQuality | None  # of the model with the predictors
    seconds: float


def profile(
    config: ProfileConfig, on_tokens: Callable[[float], None] = lambda count: None
) -> ProfileReport:
    """Writes the profile and, if asked, the predictors; `on_tokens` hears of progress."""
    began = time.perf_counter()
    check_output(config.output, force=config.force, inputs=(config.model, *config.corpora))
    folder = config.train_predictors
    predictor_output = folder and PredictorOutput(
        folder=folder, format=config.predictors.format, force=config.force
    )
    with Engine.load(config.model, mode="dense", device=config.device) as engine:
        windows = read_windows(
            config.corpora,
            engine.codec,
            context_length=engine.context_length,
            max_tokens=config.max_tokens,
            seed=config.seed,
        )
        if predictor_output:
            predictor_output.check(engine.model.shape.num_layers)
        gates, windows = _gates(engine, windows, config, on_tokens)
        counter = Counter(gates, engine.model.shape.num_neurons)
        with engine.observe(counter.observe, counter.wants):
            if predictor_output:
                trained, quality = _train(engine, gates, windows, config, on_tokens)
            else:
                trained, quality = None, ()
                _run(engine, windows.ids, on_tokens)
        model_id = engine.model.model_id
        if trained and predictor_output:
            examined = phases(windows.ids)["examine"]
            of_model = predictor_output.measure(engine, gates, trained, examined)
        else:
            of_model = None
        sizes = [layer_bytes(engine.model, layer) for layer in range(len(gates))]
        ffn_bytes = sum(engine.model.shape.num_neurons * size.neuron for size in sizes)
    counts_LF, histogram_LB = counter.arrays()
    result = Profile(
        model_id=model_id,
        num_tokens=counter.num_tokens,
        threshold_L=tuple(gate.threshold for gate in gates),
        corpora=windows.corpora,
        active_count_LF=counts_LF,
        gate_histogram_LB=histogram_LB,
    )
    report = ProfileReport(
        output=config.output,
        model_id=model_id,
        num_tokens=result.num_tokens,
        density_L=tuple(result.density_L.tolist()),
        hottest_fifth_L=tuple(result.hottest_share_L().tolist()),
        threshold_L=result.threshold_L,
        predictors=predictor_output.path if predictor_output else None,
        predictor_bytes=sum(q.chosen.num_bytes for q in quality),
        ffn_bytes=ffn_bytes,
        quality_L=quality,
        quality=of_model,
        seconds=time.perf_counter() - began,
    )
    if trained and predictor_output:
        predictor_output.save(trained, report)
    result.save(config.output)
    return report


def _run(engine: Engine, windows: Sequence[torch.Tensor], on_tokens: Callable) -> None:
    for ids_T in windows:
        engine.hidden(ids_T)
        on_tokens(len(ids_T))


def _gates(
    engine: Engine, windows: Windows, config: ProfileConfig, on_tokens: Callable
) -> tuple[tuple[Gate, ...], Windows]:
    """The layers' gates with the thresholds to count with, and the windows left to count.

    Thresholds are chosen on the first quarter of the windows, which is not counted."""
    model = engine.model
    gates = tuple(Gate(activation=model.activation, threshold=t) for t in model.threshold_L)
    if config.target_sparsity is None:
        if config.train_predictors and model.activation in SMOOTH and not any(model.threshold_L):
            raise SparkinferError(
                f"{model.path}: every neuron of a {model.activation} model without thresholds"
                " fires, which leaves nothing to predict; give --target-sparsity, e.g. 0.5"
            )
        return gates, windows
    if model.activation not in SMOOTH:
        raise SparkinferError(
            f"{model.path}: a target sparsity is for SiLU and GELU models; the activation here is"
            f" {model.activation}, whose neurons are silent by themselves"
        )
    zero = tuple(Gate(activation=model.activation, threshold=0.0) for _ in gates)
    counter = Counter(zero, model.shape.num_neurons)
    first = max(1, len(windows.ids) // 4)
    if len(windows.ids) < 2:
        raise SparkinferError("thresholds need two windows of text or more; give a longer corpus")
    with engine.observe(counter.observe, counter.wants):
        _run(engine, windows.ids[:first], on_tokens)
    thresholds = thresholds_for(counter.arrays()[1], config.target_sparsity)
    rest = Windows(ids=windows.ids[first:], corpora=windows.corpora)
    return tuple(Gate(activation=model.activation, threshold=t) for t in thresholds), rest


def _train(
    engine: Engine,
    gates: tuple[Gate, ...],
    windows: Windows,
    config: ProfileConfig,
    on_tokens: Callable,
) -> tuple[Predictors, tuple[LayerQuality, ...]]:
    count = len(windows.ids)
    if count < MIN_TRAINING_WINDOWS:
        raise SparkinferError(
            f"{count} windows of {WINDOW} tokens cannot train predictors,"
            f" wanted {MIN_TRAINING_WINDOWS} or more; give a longer corpus or more --tokens"
        )
    choices = predictor_choices(config.predictors, engine.model)
    layers = []
    for index, (loaded, gate) in enumerate(zip(engine.layers, gates, strict=True)):
        (block,) = loaded.ffn.blocks  # an engine without a plan has one block a layer
        layers.append(
            LayerTrainer(
                gate=gate,
                gate_FD=block.gate.weight.rows(block.id_N),
                gate_bias_F=block.gate.bias_N,
                down=block.down,
                sizes=layer_bytes(engine.model, index),
                choices=choices,
                is_own_input=config.input_layer_offset == 0 or index == 0,
            )
        )
    trainer = PredictorTrainer(layers, config.input_layer_offset)
    with engine.observe(trainer.observe, trainer.wants):
        trainer.run(windows.ids, lambda ids: _run(engine, ids, on_tokens), PREFILL_CHUNK)
    finished = [layer.finish() for layer in layers]
    quality = tuple(quality for _, quality in finished)
    info = PredictorInfo(
        kind="gate" if engine.model.activation in SMOOTH else "linear",
        rank_L=tuple(weights.rank for weights, _ in finished),
        threshold_L=tuple(q.chosen.threshold for q in quality),
        input_layer_offset=config.input_layer_offset,
        density_L=tuple(q.chosen.predicted_density for q in quality),
    )
    weights = tuple(weights for weights, _ in finished)
    return Predictors(model_id=engine.model.model_id, info=info, layers=weights), quality
