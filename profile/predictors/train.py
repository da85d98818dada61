"""Trains the predictors of all layers, with the model in memory or streamed.

Both ways run the same phases on the same windows in the same order, and in one process give the
same predictors.

Letters: T tokens of a chunk, D model width, F or N neurons of a layer, L layers."""

from collections.abc import Callable, Sequence

from torch import Tensor

from hotsplit.artifacts.model_file import ModelFile, PredictorInfo
from hotsplit.artifacts.predictor_file import LayerPredictor, Predictors
from hotsplit.costs.budget import layer_bytes
from hotsplit.model.spec import SMOOTH
from hotsplit.profile.config import ProfileConfig
from hotsplit.profile.count.run import Run
from hotsplit.profile.predictors.layer_trainer import (
    LayerQuality,
    LayerTrainer,
    Phase,
    PredictorTrainer,
    phases,
)
from hotsplit.profile.predictors.options import predictor_choices
from hotsplit.profile.predictors.trainer_state import Kept, SharedSteps, Sums, Weights, num_steps
from hotsplit.profile.stream.streaming import LayerStream, StreamedLayer
from hotsplit.runtime.model.layers import Layer
from hotsplit.runtime.weights.neuron_block import Gate

Finished = tuple[LayerPredictor, LayerQuality]
Trained = tuple[Predictors, tuple[LayerQuality, ...]]


def layer_trainer(
    model: ModelFile, index: int, layer: Layer, gate: Gate, config: ProfileConfig
) -> LayerTrainer:
    (block,) = layer.ffn.blocks  # an engine without a plan has one block per layer
    return LayerTrainer(
        gate=gate,
        gate_FD=block.gate.weight.rows(block.id_N),
        gate_bias_F=block.gate.bias_N,
        gate_limit_F=block.gate_limit_N,
        down=block.down,
        sizes=layer_bytes(model, index),
        choices=predictor_choices(config.predictors, model),
        is_own_input=config.input_layer_offset == 0 or index == 0,
    )


def train_whole(
    run: Run, gates: Sequence[Gate], windows: Sequence[Tensor], config: ProfileConfig
) -> Trained:
    """Trains all layers at once, on as many processes as `run` has; can be interrupted and resumed.

    Only sums, kept tokens and the state of the training are saved; a resumed run derives everything
    else from them again."""
    model, ranks = run.engine.model, run.ranks
    layers = [
        layer_trainer(model, index, layer, gate, config)
        for index, (layer, gate) in enumerate(zip(run.engine.layers, gates, strict=True))
    ]
    pieces = {phase: windows[piece] for phase, piece in phases(len(windows)).items()}
    steps = num_steps(pieces["train"], ranks.size)
    trainer = PredictorTrainer(layers, config.input_layer_offset)

    def enter(phase: Phase) -> Sequence[Tensor]:
        for layer in layers:
            layer.enter(phase, steps, ranks.spread)
        return pieces[phase]

    def gather(phase: Phase, part: Sums | Kept, piece: Sequence[Tensor]) -> None:
        run.add(phase, part)
        run.phase(piece)
        part.settle(run.total(phase))

    with run.engine.observe(trainer.observe, trainer.wants):
        piece = enter("moments")
        gather("moments", Sums([layer.moments.sums() for layer in layers]), piece)
        piece = enter("keep")
        gather("keep", Kept(layers, ranks), piece)
        piece = enter("train")
        run.add("train", Weights(layers))
        run.phase(piece, SharedSteps(ranks, layers))
        piece = enter("measure")
        gather("measure", Sums([_sums(layer.tallies) for layer in layers]), piece)
        piece = enter("examine")
        gather("examine", Sums([_sums(layer.examiners) for layer in layers]), piece)
    return _together([layer.finish() for layer in layers], model, config)


def train_streamed(
    stream: LayerStream,
    gates: Sequence[Gate],
    windows: Sequence[Tensor],
    config: ProfileConfig,
    on_tokens: Callable[[float], None],
) -> Trained:
    """Trains each layer from start to end while it is loaded: only one layer's trainer is in memory
    at a time, and one pass over the weights serves all phases."""
    pieces = phases(len(windows))
    steps = num_steps(windows[pieces["train"]], 1)

    def train(step: StreamedLayer) -> Finished:
        trainer = layer_trainer(stream.model, step.index, step.layer, gates[step.index], config)
        watcher = _Watcher(step, trainer, config.input_layer_offset)
        with stream.observe(watcher.observe, watcher.wants):
            for phase, piece in pieces.items():
                trainer.enter(phase, steps)
                step.advance(piece.start, piece.stop)
        return trainer.finish()

    # `train` is a function so that a layer's memory is freed before the next one is loaded.
    all_steps = stream.steps(windows, on_tokens, keeps_inputs=config.input_layer_offset == 1)
    return _together([train(step) for step in all_steps], stream.model, config)


class _Watcher:
    """An observer that passes one streamed layer's tensors to its trainer."""

    def __init__(self, step: StreamedLayer, trainer: LayerTrainer, offset: int) -> None:
        self.step, self.offset = step, offset
        self.inner = PredictorTrainer([trainer], 0)

    def wants(self, name: str, layer: int | None) -> bool:
        return self.inner.wants(name, layer)

    def observe(self, name: str, layer: int | None, tensor: Tensor) -> None:
        before_TD = self.step.before_TD if self.offset and name == "ffn_norm" else None
        self.inner.observe(name, 0, tensor if before_TD is None else before_TD)


def _sums(parts: Sequence) -> dict[str, Tensor]:
    return {f"{n}/{name}": t for n, part in enumerate(parts) for name, t in part.sums().items()}


def _together(finished: Sequence[Finished], model: ModelFile, config: ProfileConfig) -> Trained:
    weights, quality = zip(*finished, strict=True)
    info = PredictorInfo(
        kind="gate" if model.activation in SMOOTH else "linear",
        rank_L=tuple(layer.rank for layer in weights),
        threshold_L=tuple(q.chosen.threshold for q in quality),
        input_layer_offset=config.input_layer_offset,
        density_L=tuple(q.chosen.predicted_density for q in quality),
    )
    predictors = Predictors(
        model_id=model.model_id, info=info, layers=weights, limits=model.limits.sha256
    )
    return predictors, quality
