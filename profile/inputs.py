"""What a profile is made from: the files, checked before any text is read; the engine, or the plan
to stream the layers; the text; and all settings that a run's numbers depend on."""

import hashlib

import torch

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.errors import HotsplitError
from hotsplit.files.outputs import check_output
from hotsplit.profile.config import DEFAULT_TOKENS, ProfileConfig, check_model
from hotsplit.profile.corpus.corpus import Windows, read_windows, spread_windows
from hotsplit.profile.corpus.processes import Ranks
from hotsplit.profile.corpus.sources import STDIN
from hotsplit.profile.count.resume import Settings
from hotsplit.profile.predictors.candidates import predictor_choices
from hotsplit.profile.report.report import report_paths
from hotsplit.profile.stream.streaming import LayerStream, StreamPlan, plan_stream
from hotsplit.runtime.engine import Engine
from hotsplit.runtime.kernels.arithmetic import arithmetic
from hotsplit.runtime.resolved_options import device_of


def check_inputs(config: ProfileConfig, model: ModelFile) -> None:
    """Raises HotsplitError for errors that can be found before text is read."""
    inputs = (config.model, *(path for path in config.corpora if path != STDIN))
    extras = [path for path in (config.importances, config.predictor_path) if path is not None]
    for path in (config.output, *report_paths(config.output), *extras):
        check_output(path, force=config.force, inputs=inputs)
    check_model(config, model)


def stream_plan_of(
    config: ProfileConfig, model: ModelFile, device: str | None, ranks: Ranks
) -> StreamPlan | None:
    """The plan for streaming; None for a model that fits into memory, and for a mixture of experts or one
    with a wider hidden state between its layers, which stay in the mapped file.

    Raises HotsplitError if not even one layer fits, and if a run of several processes would be streamed."""
    if model.spec.has_experts or model.spec.x_size > model.spec.hidden_size:
        return None
    choices = predictor_choices(config.predictors, model) if config.train_predictors else None
    plan = plan_stream(
        model,
        device=device_of(device),
        max_memory_bytes=config.max_memory_bytes,
        choices=choices,
        folder=config.output.parent,
    )
    if plan is not None and ranks.size > 1:
        raise HotsplitError(
            f"{config.model}: does not fit into the memory, and several processes cannot stream"
            " its layers; run one process, or raise --max-memory"
        )
    return plan


def load_engine(config: ProfileConfig, ranks: Ranks, device: str | None) -> Engine:
    return ranks.together(
        lambda: Engine.load(config.model, mode="dense", device=device, is_resident=False)
    )


def windows_of(engine: Engine | LayerStream, config: ProfileConfig, ranks: Ranks) -> Windows:
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
    return {
        "model": engine.model.model_id,
        "types": _types(engine.model),
        "thresholds of the model": str(engine.model.threshold_L),
        "corpus": ", ".join(f"{c.name} {c.sha256}" for c in windows.corpora),
        "text key": config.text_key,
        "tokens": config.max_tokens or DEFAULT_TOKENS,
        "seed": config.seed,
        "windows": windows.sha256,
        "arithmetic": arithmetic(engine.device),
        "training": trains,
        "predictors": str(config.predictors) if trains else None,
        "threads": torch.get_num_threads() if trains else None,
        "input layer offset": config.input_layer_offset if trains else None,
        "processes": ranks.size if trains else None,  # counts are the same for any number
        **({} if config.importances is None else {"importances": True}),
    }


def _types(model: ModelFile) -> str:
    """A digest of the activation and of the tensors' names, types and shapes, by which files of one
    model id may differ."""
    tensors = sorted((name, entry.kind, entry.shape) for name, entry in model.tensors.items())
    return hashlib.sha256(repr((model.activation, tensors)).encode()).hexdigest()
