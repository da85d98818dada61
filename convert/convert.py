"""A checkpoint folder, or a model file to add to, becomes a model file.

    HF checkpoint (+ predictors, + a profile's thresholds)  ->  model.gguf
    model.gguf    (+ predictors, + a profile's thresholds)  ->  model.gguf

What this module does not know: any tensor's name. No large tensor is ever in memory whole."""

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast, get_args

import gguf
import numpy as np
from gguf import LlamaFileType

from sparkinfer.convert.checkpoint import Checkpoint
from sparkinfer.convert.llama_config import LlamaConfig, parse_config
from sparkinfer.convert.llama_tensors import llama_entries
from sparkinfer.convert.options import ConvertConfig, ConvertReport, Outtype
from sparkinfer.convert.predictors import add_predictors
from sparkinfer.convert.tokenizer import tokenizer_keys
from sparkinfer.errors import SparkinferError
from sparkinfer.files import check_output
from sparkinfer.gguf_file import Value
from sparkinfer.model_file import ModelFile
from sparkinfer.profile_file import Profile

FILE_TYPES = {
    "f32": LlamaFileType.ALL_F32,
    "f16": LlamaFileType.MOSTLY_F16,
    "bf16": LlamaFileType.MOSTLY_BF16,
    "q8_0": LlamaFileType.MOSTLY_Q8_0,
    "q4_0": LlamaFileType.MOSTLY_Q4_0,
}


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A model file that is planned but not written."""

    model: ModelFile
    outtype: Outtype
    notes: tuple[str, ...] = ()


def convert(
    config: ConvertConfig,
    on_bytes: Callable[[int], None] = lambda num_bytes: None,
    on_total: Callable[[int], None] = lambda num_bytes: None,
) -> ConvertReport:
    """Writes `config.output` whole or not at all.

    `on_total` hears once how many bytes of tensors there will be, `on_bytes` of each piece.
    Raises SparkinferError, with nothing written, for any source that cannot be converted."""
    started = time.perf_counter()
    check_output(config.output, force=config.force)
    is_file = config.source.is_file() or config.source.suffix == ".gguf"
    draft = _from_model_file(config) if is_file else _from_checkpoint(config)
    model = draft.model
    if config.predictors is not None:
        kind = "f32" if draft.outtype == "f32" else "f16"
        model = add_predictors(model, config.predictors, kind)
    if config.thresholds is not None:
        model = _with_thresholds(model, config.thresholds)
    on_total(sum(entry.num_bytes for entry in model.tensors.values()))
    try:
        model.save(config.output, on_bytes)
    except OSError as error:
        raise SparkinferError(
            f"{config.output}: cannot be written ({error.strerror or error}); make room for it"
        ) from error
    return ConvertReport(
        output=config.output,
        model_id=model.model_id,
        num_tensors=len(model.tensors),
        num_bytes=config.output.stat().st_size,
        outtype=draft.outtype,
        layout=model.layout,
        activation=model.activation,
        has_predictors=model.predictor is not None,
        notes=draft.notes,
        seconds=time.perf_counter() - started,
    )


def _from_checkpoint(config: ConvertConfig) -> Draft:
    checkpoint = Checkpoint.open(config.source)
    llama = parse_config(config.source / "config.json", checkpoint.config)
    if config.layout == "stock" and llama.activation != "silu":
        raise SparkinferError(
            f"{config.source}: llama.cpp's llama graph computes SiLU, this model is"
            f" {llama.activation}: it would run and answer wrongly; use the sparse layout"
        )
    outtype: Outtype = config.outtype or "f16"
    tokenizer = tokenizer_keys(config.source, llama.shape.vocab_size, config.layout)
    model = ModelFile(
        path=config.output,
        layout=config.layout,
        model_id="",
        shape=llama.shape,
        activation=llama.activation,
        threshold_L=llama.threshold_L,
        predictor=None,
        tensors=llama_entries(checkpoint, llama, config.layout, outtype),
        extra_keys={**_general_keys(config.source, outtype), **tokenizer.keys},
    )
    notes = (*_notes(model, llama, outtype), *tokenizer.notes)
    model = dataclasses.replace(model, model_id=checkpoint.model_id())
    return Draft(model=model, outtype=outtype, notes=notes)


def _general_keys(folder: Path, outtype: Outtype) -> dict[str, Value]:
    return {
        "general.type": "model",
        "general.name": folder.resolve().name,
        "general.file_type": np.uint32(FILE_TYPES[outtype]),
        "general.quantization_version": np.uint32(gguf.GGML_QUANT_VERSION),
    }


def _notes(model: ModelFile, llama: LlamaConfig, outtype: Outtype) -> list[str]:
    """What was done otherwise than asked for, or guessed."""
    notes = []
    matrices = [(n, e) for n, e in model.tensors.items() if len(e.shape) == 2]
    fallen = [name for name, entry in matrices if entry.kind != outtype]
    if fallen:
        notes.append(
            f"{len(fallen)} of {len(matrices)} matrices are f16, because their rows are no whole"
            f" {outtype} blocks of 32: {', '.join(fallen[:3])}{', ...' if fallen[3:] else ''}"
        )
    if model.is_tied and llama.is_tied is None:
        notes.append("no output head in the checkpoint: the embedding matrix is used for it")
    return notes


def _from_model_file(config: ConvertConfig) -> Draft:
    """A model file as it is; something must be added to it."""
    model = ModelFile.load(config.source)
    outtype = _outtype_of(model)
    if config.predictors is None and config.thresholds is None:
        raise SparkinferError(
            f"{config.source}: is a model file already; give predictors or thresholds to add"
        )
    if config.outtype not in (None, outtype):
        raise SparkinferError(
            f"{config.source}: is {outtype}; for {config.outtype} convert the checkpoint again"
        )
    if model.layout != config.layout:
        raise SparkinferError(
            f"{config.source}: has the {model.layout} layout; for the {config.layout} layout"
            " convert the checkpoint again"
        )
    return Draft(model=model, outtype=outtype)


def _outtype_of(model: ModelFile) -> Outtype:
    """By the file's own word; for files that others made, the type of the first projection."""
    number = model.extra_keys.get("general.file_type")
    names = {int(value): name for name, value in FILE_TYPES.items()}
    first = model.tensors["blk.0.attn_q.weight"].kind
    name = names.get(int(number), first) if isinstance(number, np.integer) else first
    assert name in get_args(Outtype), name
    return cast(Outtype, name)


def _with_thresholds(model: ModelFile, path: Path) -> ModelFile:
    """The model with a profile's thresholds, below which a SiLU neuron is skipped.

    Raises SparkinferError for another model's profile, and for a model with thresholds of its
    own: those are part of its activation."""
    profile = Profile.load(path)
    if profile.model_id != model.model_id:
        raise SparkinferError(
            f"{path}: a profile of model {profile.model_id[:12]}, this is {model.model_id[:12]};"
            " profile this model"
        )
    if model.activation != "silu":
        raise SparkinferError(
            f"{path}: thresholds are for silu models; this one is {model.activation}, which"
            " decides itself which neurons are zero; leave the thresholds out"
        )
    if profile.active_count_LF.shape != (model.shape.num_layers, model.shape.num_neurons):
        raise SparkinferError(
            f"{path}: counts are {list(profile.active_count_LF.shape)}, wanted"
            f" {[model.shape.num_layers, model.shape.num_neurons]}; profile this model"
        )
    if not all(0 <= threshold < float("inf") for threshold in profile.threshold_L):
        raise SparkinferError(f"{path}: thresholds are {profile.threshold_L}; profile it again")
    return dataclasses.replace(model, threshold_L=profile.threshold_L)
