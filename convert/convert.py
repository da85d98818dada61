"""Converts a checkpoint (a folder, or a name on the hub), or any GGUF, to a model file.

    HF checkpoint (+ predictors)  ->  model.gguf
    GGUF          (+ predictors)  ->  model.gguf

Tensors are encoded and written a few rows at a time; only `verify` needs whole ones."""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import gguf
import numpy as np
from gguf import LlamaFileType

from hotsplit.artifacts.importance_file import Importances
from hotsplit.artifacts.model_file import ModelFile
from hotsplit.convert import checkpoint_tensors, gguf_source
from hotsplit.convert.checkpoint import Checkpoint
from hotsplit.convert.draft_tensors import with_draft_block
from hotsplit.convert.hub import find_source
from hotsplit.convert.importances import check_and_note
from hotsplit.convert.options import ConvertConfig, ConvertReport, Outtype
from hotsplit.convert.pooling import pooling_of
from hotsplit.convert.predictors import add_predictors
from hotsplit.convert.sampling import sampling_keys
from hotsplit.convert.tensor_types import TensorTypes
from hotsplit.convert.tokenizer import tokenizer_keys
from hotsplit.convert.type_mixtures import NAMES as MIXTURES
from hotsplit.convert.type_mixtures import Roles
from hotsplit.errors import HotsplitError
from hotsplit.families.from_config import read_blueprint
from hotsplit.families.pooling_key import pooling_key
from hotsplit.families.table import ARCHITECTURES
from hotsplit.files.gguf_types import GROUPED_TWOS
from hotsplit.files.outputs import check_output
from hotsplit.files.written import Restored, Written
from hotsplit.model.neurons import ACTIVATIONS
from hotsplit.model.spec import ModelSpec
from hotsplit.model.tensors import layer_shapes
from hotsplit.model.weight_types import IN_MEMORY, TYPES
from hotsplit.tokens.ggml_tokenizer import check_text_keys

# By type. That of q2_0 is not in gguf (llama_ftype in llama.h).
FILE_TYPES: dict[str, int] = {
    **dict.fromkeys((GROUPED_TWOS, "q2_0"), 41),
    **{
        each.name: LlamaFileType[each.file_type]
        for each in TYPES
        if each.is_in_files and each.name != "q2_0"
    },
    **{
        name: LlamaFileType[f"MOSTLY_{name.upper()}"]
        for name in (*IN_MEMORY, *MIXTURES)
        if name != GROUPED_TWOS
    },
}


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A planned model file, not yet written."""

    model: ModelFile
    outtype: str  # see ConvertReport
    source: Path  # the folder or file that was read
    restored: Callable[[ModelFile], Iterator[Restored]]  # see written.Written
    notes: tuple[str, ...] = ()
    last_notes: Callable[[], list[str]] = list  # once all is written


def convert(
    config: ConvertConfig,
    on_bytes: Callable[[int], None] = lambda num_bytes: None,
    on_total: Callable[[int], None] = lambda num_bytes: None,
    verify: Callable[[Written], Iterable[str]] | None = None,
) -> ConvertReport:
    """Writes `config.output` whole or not at all. `on_total` is called once with the total size of
    the tensors, `on_bytes` with the size of each piece as it is written. `verify` gets the written
    file before it is renamed: it compares it with the source and returns a line and further notes
    for the user, or raises HotsplitError. Raises HotsplitError, with nothing written, for any
    source that cannot be converted."""
    started = time.perf_counter()
    _check_output(config, config.source)
    draft = draft_of(config)
    model, notes = draft.model, draft.notes
    if draft.source.is_file():
        check_text_keys(draft.source, model.extra_keys)
    if config.predictors is not None:
        kind = "f32" if draft.outtype == "f32" else "f16"
        offset = config.predictor_input_layer_offset
        model, more_notes = add_predictors(model, config.predictors, kind, offset)
        notes += more_notes
    on_total(sum(entry.in_file.num_bytes for entry in model.tensors.values()))
    said: list[str] = []

    def check(written: Path) -> None:
        if verify:
            made = Written(
                source=draft.source,
                path=written,
                output=config.output,
                restored=lambda: draft.restored(ModelFile.load(written)),
            )
            said.extend(verify(made))

    model.save(config.output, on_bytes, check)
    return ConvertReport(
        output=config.output,
        model_id=model.model_id,
        num_tensors=len(model.tensors),
        num_bytes=config.output.stat().st_size,
        outtype=draft.outtype,
        layout=model.layout,
        activation=model.activation,
        has_predictors=model.predictor is not None,
        verified=said[0] if said else None,
        notes=(*notes, *draft.last_notes(), *said[1:]),
        seconds=time.perf_counter() - started,
    )


def draft_of(config: ConvertConfig) -> Draft:
    """The source as a model file, without the predictors asked for. Tensors are read on demand. Of
    a checkpoint's weights only the samples for the model id are read here, and a stored output head
    with the embedding that it has to equal."""
    found = find_source(config.source)
    if found.is_file() or found.suffix == ".gguf":
        return _from_model_file(replace(config, source=found))
    return _from_checkpoint(config, found)


def _check_output(config: ConvertConfig, source: Path) -> None:
    """Raises HotsplitError for an output that exists (unless `force`), or is among the inputs.
    Those are the model file or everything in the checkpoint folder, the importance matrix, the
    predictors, and the tokenizer."""
    extras = (source, config.importances, config.predictors, config.tokenizer)
    files = [path for path in extras if path is not None]
    folders = [path for path in (source, config.predictors) if path is not None and path.is_dir()]
    check_output(config.output, force=config.force, inputs=files, folders=folders)


def _from_checkpoint(config: ConvertConfig, folder: Path) -> Draft:
    _check_output(config, folder)
    if (limits := folder / "hotsplit_limits.safetensors").is_file():
        raise HotsplitError(
            f"{limits}: the checkpoint was trained to run with these limits of gates, which are no"
            " longer supported; remove the file to run it without them"
        )
    checkpoint = Checkpoint.open(folder)
    sources, rows = checkpoint.tensors.keys(), checkpoint.max_rows
    plan = read_blueprint(folder / "config.json", checkpoint.config, rows, sources)
    model_id = checkpoint.model_id()
    if plan.spec.draft is not None:
        checkpoint = with_draft_block(checkpoint, plan.spec.num_layers)
    if config.activation is not None:
        raise HotsplitError(
            f"{config.source}: a checkpoint states its activation; --activation is for GGUF files"
        )
    if config.layout == "stock":
        _refuse_stock(config.source, plan.spec)
    outtype: Outtype = config.outtype or "f16"
    names = map(plan.name_of, checkpoint.tensors)
    is_tied = bool(plan.is_tied) or "output.weight" not in names
    roles = Roles.of(plan.spec, is_tied=is_tied)
    importances = Importances.load(config.importances) if config.importances else None
    types = TensorTypes(
        outtype=outtype,
        roles=roles,
        overrides=config.tensor_types,
        keeps_packed=config.outtype is None,
        importances=importances,
    )
    tokenizer = tokenizer_keys(
        checkpoint.folder, plan.spec.vocab_size, config.layout, config.tokenizer
    )
    pooling, pooling_notes = pooling_of(folder)
    model = ModelFile(
        path=config.output,
        layout=config.layout,
        bare_spec=replace(plan.spec, pooling=pooling),
        keys={**plan.keys, **pooling_key(pooling)},
        threshold_L=(plan.threshold,) * plan.spec.num_layers,
        predictor=None,
        tensors=checkpoint_tensors.tensor_entries(checkpoint, plan, config.layout, types),
        extra_keys={
            "general.type": "model",
            "general.name": config.source.resolve().name,
            "general.file_type": np.uint32(FILE_TYPES[outtype]),
            "general.quantization_version": np.uint32(gguf.GGML_QUANT_VERSION),
            **sampling_keys(checkpoint.folder),
            **tokenizer.keys,
        },
        model_id=model_id,
    )
    notes = [*plan.notes, *pooling_notes]
    ignored = [n for n in checkpoint.tensors if n.startswith(plan.ignored_prefixes)]
    if ignored:
        notes.append(
            f"{len(ignored)} tensors left out, on which the next token does not depend, such as"
            f" {ignored[0]}"
        )
    notes += [model.draft_note] * bool(model.draft_note)
    notes += checkpoint.packing_notes()
    notes += check_and_note(types.importances, model.tensors)
    if (fallen := types.fallen_note(model.tensors)) is not None:
        notes.append(fallen)
    if model.is_tied and plan.is_tied is None:
        notes.append("no output head in the checkpoint: the embedding matrix is used for it")
    return Draft(
        model=model,
        outtype=outtype,
        source=checkpoint.folder,
        restored=lambda written: checkpoint_tensors.restored(checkpoint, plan, types, written),
        notes=(*notes, *tokenizer.notes),
        last_notes=checkpoint.rounding_notes,
    )


def _refuse_stock(source: Path, spec: ModelSpec) -> None:
    graph, activation = ARCHITECTURES[spec.architecture], spec.activation
    if not graph.stock_activations:
        raise HotsplitError(f"{source}: llama.cpp has no {graph.name} graph; use the sparse layout")
    if activation not in graph.stock_activations:
        raise HotsplitError(
            f"{source}: llama.cpp's {graph.name} graph computes"
            f" {ACTIVATIONS[graph.stock_activations[0]].title}, this model is"
            f" {activation}: it would run and answer wrongly; use the sparse layout"
        )
    if (why := graph.not_in_stock(spec)) is not None:
        raise HotsplitError(
            f"{source}: llama.cpp's {graph.name} graph {why}: it would run and answer wrongly; use"
            " the sparse layout"
        )
    names = {name for layer in spec.layers for name in layer_shapes(spec, layer, "stock")}
    unknown = sorted(names & set(graph.options) - set(graph.stock_options))
    if unknown:
        raise HotsplitError(
            f"{source}: llama.cpp's {graph.name} graph has no {unknown[0]}, which this model has;"
            " use the sparse layout"
        )


def _from_model_file(config: ConvertConfig) -> Draft:
    model, types, notes = gguf_source.model_of_gguf(config)
    if config.layout == "stock":
        _refuse_stock(config.source, model.bare_spec)
        if model.predictor is not None or any(model.threshold_L):
            raise HotsplitError(
                f"{config.source}: has predictors or thresholds, which the stock layout cannot"
                " hold; convert its checkpoint"
            )
    model, stated = _with_file_type(model, config.outtype)
    return Draft(
        model=model,
        outtype=config.outtype or stated,
        source=config.source,
        restored=lambda written: gguf_source.restored(config.source, types, written),
        notes=notes,
    )


def _with_file_type(model: ModelFile, outtype: Outtype | None) -> tuple[ModelFile, str]:
    """The model with its `general.file_type`, if it has one, corrected to match the outtype or, if
    there is none, its own type; and the type that the file then states, or else its own."""
    number, own = model.extra_keys.get("general.file_type"), model.own_type
    if not isinstance(number, np.integer):
        return model, own
    kind = outtype or own
    known = {int(each): each.name.partition("_")[2].lower() for each in LlamaFileType}
    name = known.get(int(number), "")
    if name != kind and not name.startswith(f"{kind}_"):  # MOSTLY_Q4_K_M is of q4_k
        number = np.uint32(FILE_TYPES[kind])
        model = replace(model, extra_keys={**model.extra_keys, "general.file_type": number})
    names = {int(value): name for name, value in FILE_TYPES.items()}
    return model, names.get(int(number), own)
