"""What a profile is made from: the files, checked before any text is read; the engine; the text; and
all settings that a run's numbers depend on."""

import hashlib

import torch
from torch.cuda import mem_get_info

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.errors import HotsplitError
from hotsplit.files.outputs import check_output
from hotsplit.profile.config import DEFAULT_TOKENS, ProfileConfig, check_model
from hotsplit.profile.corpus.corpus import Windows, read_windows, spread_windows
from hotsplit.profile.corpus.processes import Ranks
from hotsplit.profile.corpus.sources import STDIN
from hotsplit.profile.count.resume import Settings
from hotsplit.profile.predictors.memory import check_memory
from hotsplit.profile.report import report_path
from hotsplit.runtime.engine import Engine
from hotsplit.runtime.kernels.arithmetic import arithmetic
from hotsplit.runtime.resolved_options import device_of
from hotsplit.system.sizes import format_bytes


def check_inputs(config: ProfileConfig, model: ModelFile) -> None:
    """Raises HotsplitError for errors that can be found before text is read."""
    inputs = (config.model, *(path for path in config.corpora if path != STDIN))
    extras = [path for path in (config.importances, config.predictor_path) if path is not None]
    for path in (config.output, report_path(config.output), *extras):
        check_output(path, force=config.force, inputs=inputs)
    check_model(config, model)
    if config.train_predictors is not None:
        check_memory(config, model)


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
                    f"{config.model}: {format_bytes(size)} of weights, {format_bytes(free)} are free on"
                    f" {gpu}; give --device cpu, which reads them from the file"
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
