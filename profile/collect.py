"""Runs text through a model: counts firings and, if asked, trains predictors on the way.

What this module does not know: how the model computes; it sees it through observers only."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from sparkinfer.architecture import SMOOTH
from sparkinfer.budget import PREFILL_CHUNK
from sparkinfer.errors import SparkinferError
from sparkinfer.files import check_output
from sparkinfer.model_file import ModelFile, PredictorInfo
from sparkinfer.predictor_file import FILE_NAME, Predictors
from sparkinfer.profile.corpus import WINDOW, Windows, read_windows
from sparkinfer.profile.counting import Counter, thresholds_for
from sparkinfer.profile.stream_training import train_layers
from sparkinfer.profile.streaming import LayerStream, plan_stream
from sparkinfer.profile.training import LayerQuality, LayerTrainer, PredictorTrainer, row_norms
from sparkinfer.profile_file import Profile
from sparkinfer.runtime.engine import Engine, device_of
from sparkinfer.runtime.feed_forward import Gate
from sparkinfer.runtime.loader import Layer

# Shares of the windows that the phases of training take; see profile.training.
MOMENT_SHARE, HELD_OUT_SHARE = 0.1, 0.15
MIN_TRAINING_WINDOWS = 10


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    model: Path
    corpora: tuple[Path, ...]
    output: Path
    max_tokens: int = 131_072
    train_predictors: Path | None = None  # a folder for predictors.safetensors
    predictor_rank: int | None = None  # None: an eighth of the model width
    target_contribution: float = 0.985  # share of sum |h_j| |down_j| that predictors must name
    input_layer_offset: int = 0
    target_sparsity: float | None = None  # SiLU: choose thresholds for this share of silent neurons
    max_memory_bytes: int | None = None  # see profile.memory.room_of; None: what is free
    device: str | None = None
    seed: int = 0
    force: bool = False

    def __post_init__(self) -> None:
        if not self.corpora:
            raise SparkinferError("no corpus; give one or more text files with --corpus")
        for name in ("target_contribution", "target_sparsity"):
            value = getattr(self, name)
            if value is not None and not 0 < value < 1:
                raise SparkinferError(f"{name} is {value}, wanted more than 0 and less than 1")
        if self.max_tokens < 1:
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
    check_output(config.output, force=config.force, inputs=(config.model, *config.corpora))
    predictor_path = config.train_predictors and config.train_predictors / FILE_NAME
    if predictor_path:
        check_output(predictor_path, force=config.force)
    with _open(config, say) as engine:
        windows = read_windows(
            config.corpora,
            engine.codec,
            context_length=engine.context_length,
            max_tokens=config.max_tokens,
            seed=config.seed,
        )
        gates, windows = _gates(engine, windows, config, on_tokens)
        counter = Counter(gates, engine.model.shape.num_neurons)
        with engine.observe(counter.observe, counter.wants):
            if predictor_path:
                trained, quality = _train(engine, gates, windows, config, on_tokens)
            else:
                trained, quality = None, ()
                _run(engine, windows.ids, on_tokens)
        model_id = engine.model.model_id
    counts_LF, histogram_LB = counter.arrays()
    result = Profile(
        model_id=model_id,
        num_tokens=counter.num_tokens,
        threshold_L=tuple(gate.threshold for gate in gates),
        corpora=windows.corpora,
        active_count_LF=counts_LF,
        gate_histogram_LB=histogram_LB,
    )
    if trained and predictor_path:
        trained.save(predictor_path)
    result.save(config.output)
    return ProfileReport(
        output=config.output,
        model_id=model_id,
        num_tokens=result.num_tokens,
        density_L=tuple(result.density_L.tolist()),
        hottest_fifth_L=tuple(result.hottest_share_L().tolist()),
        threshold_L=result.threshold_L,
        predictors=predictor_path,
        predictor_bytes=_bytes(trained) if trained else 0,
        quality_L=quality,
        seconds=time.perf_counter() - began,
    )


def _open(config: ProfileConfig, say: Callable[[str], None]) -> Engine | LayerStream:
    """The whole model on its device or, where it does not fit, a layer of it at a time."""
    model, device = ModelFile.load(config.model), device_of(config.device)
    plan = plan_stream(
        model,
        device=device,
        max_memory_bytes=config.max_memory_bytes,
        rank=_rank(config, model) if config.train_predictors else None,
        folder=config.output.parent,
    )
    if plan is None:
        return Engine.of(model, mode="dense", device=config.device)
    return LayerStream(model, plan, say)


def _rank(config: ProfileConfig, model: ModelFile) -> int:
    return config.predictor_rank or max(1, model.shape.width // 8)


def _run(
    engine: Engine | LayerStream, windows: tuple[torch.Tensor, ...], on_tokens: Callable
) -> None:
    if isinstance(engine, LayerStream):
        engine.run(windows, on_tokens)
        return
    for ids_T in windows:
        engine.hidden(ids_T)
        on_tokens(len(ids_T))


def _gates(
    engine: Engine | LayerStream, windows: Windows, config: ProfileConfig, on_tokens: Callable
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
    engine: Engine | LayerStream,
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
    model = engine.model
    rank = _rank(config, model)
    if rank > min(model.shape.width, model.shape.num_neurons):
        raise SparkinferError(f"predictor rank {rank} is above the width {model.shape.width}")

    def trainer_of(index: int, loaded: Layer) -> LayerTrainer:
        (block,) = loaded.ffn.blocks  # an engine without a plan has one block a layer
        gate_FD = block.gate.weight.rows(block.id_N)
        return LayerTrainer(gates[index], gate_FD, row_norms(block.down), rank, block.gate.bias_N)

    first, last = max(1, round(MOMENT_SHARE * count)), count - max(1, round(HELD_OUT_SHARE * count))
    num_steps = sum(-(-len(ids) // PREFILL_CHUNK) for ids in windows.ids[first:last])
    target = config.target_contribution
    if isinstance(engine, LayerStream):
        finished = train_layers(
            engine, windows.ids, on_tokens,
            trainer_of=trainer_of, input_layer_offset=config.input_layer_offset,
            first=first, last=last, num_steps=num_steps, target=target,
        )  # fmt: skip
    else:
        layers = [trainer_of(index, loaded) for index, loaded in enumerate(engine.layers)]
        trainer = PredictorTrainer(layers, config.input_layer_offset)
        with engine.observe(trainer.observe, trainer.wants):
            _run(engine, windows.ids[:first], on_tokens)
            trainer.start(num_steps)
            trainer.phase = "train"
            _run(engine, windows.ids[first:last], on_tokens)
            trainer.phase = "measure"
            _run(engine, windows.ids[last:], on_tokens)
        finished = [layer.finish(target) for layer in layers]
    quality = tuple(q for _, _, q in finished)
    info = PredictorInfo(
        kind="linear",
        rank_L=(rank,) * len(finished),
        threshold_L=tuple(threshold for _, threshold, _ in finished),
        input_layer_offset=config.input_layer_offset,
        density_L=tuple(q.predicted_density for q in quality),
    )
    weights = tuple(predictor for predictor, _, _ in finished)
    return Predictors(model_id=model.model_id, info=info, layers=weights), quality


def _bytes(predictors: Predictors) -> int:
    total = 0
    for layer, predictor in enumerate(predictors.layers):
        arrays = predictor.arrays(layer).items()
        total += sum(a.size * (4 if name.endswith("bias") else 2) for name, a in arrays)
    return total
