"""model.gguf: the weights, the tokenizer and the parameters of the graph.

Specified in docs/formats.md. There are two layouts: `sparse`, in which every feed-forward matrix is
neuron-major (a row is a neuron, the down projection is `ffn_down_t`), and `stock`, which is exactly
what llama.cpp loads.

Letters: L layers, D model width, F feed-forward neurons of a layer, R predictor rank."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated

import numpy as np
from annotated_types import Ge, Le

from hotsplit.artifacts.model_gguf import read_model_gguf
from hotsplit.errors import HotsplitError, about
from hotsplit.families.family import Architecture
from hotsplit.families.key_reader import QUALITY, VERSION, KeyReader, prefixed
from hotsplit.families.table import ARCHITECTURES
from hotsplit.files.declared import Count, NotNaN, Share, read_declared
from hotsplit.files.gguf_file import TensorEntry, Value, in_memory, is_equal, write_gguf
from hotsplit.files.typed import shown
from hotsplit.model.blocks import Predict, PredictorKind
from hotsplit.model.draft_block import OWN
from hotsplit.model.mode_quality import ModeQuality, SparseMode, quality_values
from hotsplit.model.neurons import SMOOTH
from hotsplit.model.rope import asked_scaling
from hotsplit.model.spec import Activation, ModelSpec
from hotsplit.model.tensors import (
    Layout,
    Shapes,
    divisor_shapes,
    draft_shapes,
    layer_shapes,
    layout_of,
    optional_layer_shapes,
    optional_outer_shapes,
    outer_shapes,
)
from hotsplit.model.weight_types import BY_NAME, FILE_NAMES, IN_MEMORY

TOKENIZER_KEY = "tokenizer.huggingface.json"
TEMPLATE_KEY = "tokenizer.chat_template"  # the default one; named ones add .NAME
TEMPLATES_KEY = "tokenizer.chat_templates"  # the names of the named ones
END_KEY = "tokenizer.end_token_ids"
_GENERAL = ("general.architecture", "general.alignment")
_SHARED = ("token_embd", "output", "rope_freqs", "rope_factors_long", "rope_factors_short")


@dataclass(frozen=True, kw_only=True)
class PredictorInfo:
    """The arithmetic of the predictors of all layers. logits_F = up_FR act(down_RD x_D + down_bias)
    + up_bias, where act is the identity ("linear") or ReLU ("relu", DejaVu's form). A layer of rank
    0 has one matrix: logits_F = up_FD x_D + up_bias. A neuron is computed if its logit is above its
    layer's threshold. x is the FFN input of the layer that is `input_layer_offset` layers
    earlier."""

    kind: PredictorKind
    rank_L: tuple[Count, ...]
    threshold_L: tuple[NotNaN, ...]
    input_layer_offset: Annotated[int, Ge(0), Le(1)] = 0
    density_L: tuple[Share, ...] = ()  # share of neurons predicted on held-out text; (): unknown


@dataclass(frozen=True, kw_only=True)
class ModelFile:
    path: Path
    layout: Layout
    model_id: str
    bare_spec: ModelSpec  # what the model is, without predictors
    # Of the architecture, from which the spec was read, without its prefix; {}: cannot be saved.
    keys: Mapping[str, Value] = field(default_factory=dict)
    # FATReLU's, above which a gate fires; 0 for other activations.
    threshold_L: tuple[float, ...]
    predictor: PredictorInfo | None
    tensors: dict[str, TensorEntry]
    extra_keys: dict[str, Value]  # tokenizer, name and the like, kept as they are
    # The measured quality of modes with these predictors; {}: unknown.
    quality: Mapping[SparseMode, ModeQuality] = field(default_factory=dict)
    # Layers of the file that only predict tokens further ahead, which nothing here runs.
    num_skipped: int = 0
    block_fault: str = ""  # why its draft block is among these
    runs_as_it_is: bool = False  # a stock file on the CPU in mode dense: nothing is transposed

    @classmethod
    def load(cls, path: Path) -> "ModelFile":
        """Reads the header; weights stay in the mapped file. Raises HotsplitError for anything but
        a whole, known model file."""
        return cls.of(path, *read_model_gguf(path))

    @classmethod
    def of(cls, path: Path, keys: dict[str, Value], tensors: dict[str, TensorEntry]) -> "ModelFile":
        """The model from the output of `read_model_gguf`; errors quote `path`."""
        read = KeyReader(path, keys, tensors)
        spec, found = read.model()
        tensors = {name: in_memory(entry) for name, entry in found.items()}
        own = ("GGUF.", f"{read.graph.name}.", "hotsplit.", *_GENERAL)
        model = cls(
            path=path,
            layout=layout_of(tensors),
            model_id=read.line("hotsplit.model_id"),
            bare_spec=spec,
            keys=read.own_keys(spec),
            threshold_L=read.thresholds("hotsplit.ffn.threshold", spec.num_layers),
            predictor=_predictor(read, spec.num_layers),
            tensors=tensors,
            extra_keys={k: v for k, v in keys.items() if not k.startswith(own)},
            quality=read.quality(),
            num_skipped=0 if spec.draft else read.num_skipped,
            block_fault=read.block_fault,
        )
        model.validate()
        return model

    def save(
        self,
        path: Path,
        on_bytes: Callable[[int], None] = lambda num_bytes: None,
        check: Callable[[Path], None] = lambda written: None,
    ) -> None:
        """Writes the file whole or not at all; `on_bytes` gets the size of every piece written.
        `check` gets the written file before it is renamed, and may raise."""
        self.validate()
        tensors = {name: entry.in_file for name, entry in self.tensors.items()}
        if self.layout == "stock":
            tensors = ARCHITECTURES[self.architecture].joined(self.bare_spec, tensors)
        write_gguf(
            path,
            self.architecture,
            {**self._own_keys(), **self.extra_keys},
            tensors,
            on_bytes=on_bytes,
            check=check,
        )

    def validate(self) -> None:
        """Raises HotsplitError unless all required tensors and no unknown ones are there, in valid
        shapes and types, and thresholds, rotary factors and predictors are valid for the model."""
        self._refuse_limits()
        required, optional = self.expected_shapes()
        unknown = sorted(self.tensors.keys() - required.keys() - optional.keys())
        missing = sorted(required.keys() - self.tensors.keys())
        if unknown or missing:
            what = f"unknown tensor {shown(unknown[0])}" if unknown else f"no tensor {missing[0]!r}"
            parts = {entry.part for entry in self.tensors.values()} - {None}
            place = (unknown and self.tensors[unknown[0]].part) or self.path
            is_downloaded = self.layout == "stock"  # convert checks what it writes
            again = "download the file" if is_downloaded else "convert the checkpoint"
            again = "download its parts" if parts else again
            raise HotsplitError(
                f"{place}: {what} for a {self.layout} {self.architecture} of"
                f" {self.spec.num_layers} layers; {again} again"
            )
        wanted = required | optional
        for name, entry in self.tensors.items():
            shape = wanted[name]
            if entry.shape != shape:
                again = "; download this part of the model again" if entry.part else ""
                raise HotsplitError(
                    f"{entry.part or self.path}: {name} is {entry.kind} {list(entry.shape)},"
                    f" wanted {list(shape)} of one of {', '.join((*FILE_NAMES, *IN_MEMORY))}{again}"
                )
            if entry.in_file.kind not in (*FILE_NAMES, *IN_MEMORY):
                raise HotsplitError(
                    f"{self.path}: {name} is in {entry.kind}, which cannot be computed with and"
                    " cannot be converted; use a file of another type"
                )
        for name in sorted(divisor_shapes(self.spec)):
            factors = self.tensors[name].read()
            if not ((factors > 0) & (factors < np.inf)).all():
                raise HotsplitError(
                    f"{self.path}: {name} is not all finite and above zero: rotary embeddings would"
                    " be wrong; download the file again"
                )
        if self.predictor is not None:
            self.refuse_predictors("convert its checkpoint without them")
            if self.predictor.kind == "relu" and 0 in self.predictor.rank_L:
                raise HotsplitError(
                    f"{self.path}: predictors of kind relu have two matrices, but layer"
                    f" {self.predictor.rank_L.index(0)} says rank 0; convert them again"
                )

    def expected_shapes(self) -> tuple[Shapes, Shapes]:
        """The tensors that must be present, and those that may be."""
        spec = self.spec
        of_draft, optional_of_draft = draft_shapes(spec, self.layout)
        required = outer_shapes(spec) | divisor_shapes(spec) | of_draft
        optional = optional_outer_shapes(spec) | optional_of_draft
        for index, layer in enumerate(spec.layers):
            in_layer = layer_shapes(spec, layer, self.layout)
            required |= {f"blk.{index}.{name}": dims for name, dims in in_layer.items()}
            in_layer = optional_layer_shapes(layer)
            optional |= {f"blk.{index}.{name}": dims for name, dims in in_layer.items()}
        return required, optional

    def _refuse_limits(self) -> None:
        """Raises HotsplitError for what made neurons of SiLU and GELU models silent, which would
        change the output if it were ignored: thresholds and limits of gates."""
        limits = [name for name in self.tensors if name.endswith(".ffn_gate.limit")]
        is_below = self.activation in SMOOTH and any(self.threshold_L)
        if limits or is_below:
            what = f"limits of gates ({limits[0]})" if limits else "thresholds of gates"
            raise HotsplitError(
                f"{self.path}: has {what}, which made neurons of a {self.activation} model silent"
                " and are no longer supported; convert its checkpoint again"
            )

    @property
    def architecture(self) -> str:
        return self.bare_spec.architecture

    @property
    def graph(self) -> Architecture:
        return ARCHITECTURES[self.architecture]

    @property
    def activation(self) -> Activation:
        return self.bare_spec.activation

    @cached_property
    def spec(self) -> ModelSpec:
        """What the model is, with its predictors."""
        info = self.predictor
        if info is None:
            return self.bare_spec
        per_layer = zip(self.bare_spec.layers, info.rank_L, info.threshold_L, strict=True)
        return self.bare_spec.with_layers(
            [
                layer.with_predict(
                    Predict(
                        kind=info.kind,
                        rank=rank,
                        threshold=threshold,
                        input_layer_offset=info.input_layer_offset,
                    )
                )
                for layer, rank, threshold in per_layer
            ]
        )

    def refuse_alone(self) -> None:
        """Raises HotsplitError for a draft model that reads a main model's keys and values."""
        if self.graph.is_assistant:
            raise HotsplitError(
                f"{self.path}: is an assistant, a draft model that reads the keys and values of its"
                f" main model; run that one with -md {self.path}"
            )

    def refuse_on_gpu(self) -> None:
        """Raises HotsplitError for a model whose layers no GPU computes."""
        if what := self.bare_spec.only_on_cpu:
            raise HotsplitError(
                f"{self.path}: {what} have no kernels for a GPU so far; leave the plan out and use"
                " --device cpu"
            )

    def refuse_chosen(self, what: str, instead: str) -> None:
        """Raises HotsplitError for a model that chooses a token's neurons itself, for which `what`
        is not supported: a mixture of experts, or one whose neurons depend on all gates of their
        layer."""
        spec, kind = self.bare_spec, "models that need all gates of a layer"
        kind = "mixtures of experts" if spec.has_experts else kind
        if spec.has_experts or spec.needs_all_gates:
            raise HotsplitError(f"{self.path}: {what} not supported for {kind}; {instead}")

    def refuse_predictors(self, instead: str) -> None:
        """Raises HotsplitError for a model whose neurons all fire or are chosen by itself."""
        self.refuse_chosen("predictors are", instead)
        if not self.bare_spec.silences:
            raise HotsplitError(
                f"{self.path}: every neuron of this {self.activation} model fires, so there is"
                f" nothing to predict; {instead}"
            )

    @cached_property
    def draft(self) -> "ModelFile | None":
        """The draft block as the file of a model of one layer, with this model's embedding and head
        in place of those that it lacks, or has copies of; it cannot be saved."""
        if self.bare_spec.draft is None:
            return None
        prefix = f"blk.{self.bare_spec.num_layers}."
        own = {n.removeprefix(prefix): e for n, e in self.tensors.items() if n.startswith(prefix)}
        tensors = {n: e for n, e in self.tensors.items() if n.partition(".")[0] in _SHARED}
        for name, shared in OWN.items():  # the embedding first
            entry, same = own.pop(name, None), tensors.get(shared, tensors["token_embd.weight"])
            if entry is not None and not is_equal(entry, same):
                tensors[shared] = entry
        for name, entry in own.items():
            tensors[name if name.startswith("nextn.") else f"blk.0.{name}"] = entry
        return replace(
            self,
            bare_spec=self.bare_spec.draft,
            keys={},
            threshold_L=(0.0,),
            predictor=None,
            tensors=tensors,
        )

    @property
    def draft_note(self) -> str:
        """A clause on a draft block in types of less than 8 bits; "" otherwise."""
        own = {} if self.draft is None else self.draft.tensors
        matrices = (e for n, e in own.items() if n.startswith(("blk.", "nextn.")))
        low = sorted({e.in_file.kind for e in matrices if BY_NAME[e.kind].bytes_per_value < 1})
        if not low:
            return ""
        return (
            f"the draft block is in {', '.join(low)}: below 8 bits, fewer of its guesses are right"
        )

    @property
    def skipped_note(self) -> str:
        """A clause on the layers of the file that nothing runs; "" without any."""
        if self.block_fault:
            return f"the draft block is not used: {self.block_fault}; download the file again"
        if self.num_skipped == 1:
            return "the last layer, which predicts tokens further ahead (MTP), is not used"
        count = f"the last {self.num_skipped} layers, which predict tokens further ahead (MTP),"
        return f"{count} are not used" if self.num_skipped else ""

    @cached_property
    def own_type(self) -> str:
        """The file's type of the up projections, of most layers if they differ."""
        kinds = [
            self.entry(index, f"{layer.neurons.up_name}.weight").in_file.kind
            for index, layer in enumerate(self.spec.layers)
            if layer.neurons.number
        ]
        return max(kinds, key=kinds.count)

    @cached_property
    def kv_kind(self) -> str:
        """Default type of the KV cache: f32 for a model file in f32, else f16 as in llama.cpp."""
        kinds = {
            self.entry(index, f"{name}.weight").kind
            for index, layer in enumerate(self.spec.layers)
            if layer.attention is not None
            for name in layer.attention.projections
        }
        return "f32" if kinds == {"f32"} else "f16"

    @cached_property
    def layer_tensors(self) -> list[dict[str, TensorEntry]]:
        """The tensors of each layer by name within it; not to be changed."""
        found: list[dict[str, TensorEntry]] = [{} for _ in self.spec.layers]
        for name, entry in self.tensors.items():
            if name.startswith("blk."):
                _, layer, rest = name.split(".", 2)
                if int(layer) < len(found):  # others are the draft block's
                    found[int(layer)][rest] = entry
        return found

    def entry(self, layer: int, name: str) -> TensorEntry:
        """A tensor of a layer by its name there."""
        return self.tensors[f"blk.{layer}.{name}"]

    @property
    def is_tied(self) -> bool:
        """True if the output head is the embedding matrix."""
        return "output.weight" not in self.tensors

    @property
    def head_name(self) -> str:
        return "token_embd.weight" if self.is_tied else "output.weight"

    def text(self, key: str) -> str | None:
        """A string among the extra keys, or None. Raises HotsplitError for other types."""
        value = self.extra_keys.get(key)
        if value is None or isinstance(value, str):
            return value
        raise HotsplitError(
            f"{self.path}: {key} is {shown(value)}, wanted a string; convert the checkpoint again"
        )

    def _own_keys(self) -> dict[str, Value]:
        assert self.keys, f"{self.path}: a model without keys"
        keys = prefixed(self.architecture, self.keys) | {"hotsplit.model_id": self.model_id}
        if self.layout == "sparse":
            keys["hotsplit.version"] = np.uint32(VERSION)
            keys["hotsplit.ffn.activation"] = self.activation
            keys["hotsplit.ffn.threshold"] = list(self.threshold_L)
        if self.predictor is not None:
            p = self.predictor
            keys["hotsplit.predictor.kind"] = p.kind
            keys["hotsplit.predictor.rank"] = list(p.rank_L)
            keys["hotsplit.predictor.threshold"] = list(p.threshold_L)
            keys["hotsplit.predictor.input_layer_offset"] = np.uint32(p.input_layer_offset)
            if p.density_L:
                keys["hotsplit.predictor.density"] = list(p.density_L)
        for mode, values in quality_values(self.quality).items():
            for name, value in values.items():
                stored = np.uint64 if isinstance(value, int) else np.float64
                key = f"{QUALITY}{mode}.{name}"
                keys[key] = value if isinstance(value, str) else stored(value)
        return keys


def _predictor(read: KeyReader, num_layers: int) -> PredictorInfo | None:
    prefix, per_layer = "hotsplit.predictor.", ("rank", "threshold", "density")
    values = {k.removeprefix(prefix): v for k, v in read.keys.items() if k.startswith(prefix)}
    if not values:
        return None
    with about(read.path, "; convert the checkpoint again"):
        info = read_declared(
            PredictorInfo,
            {f"{key}_L" if key in per_layer else key: v for key, v in values.items()},
            prefix.removesuffix("."),
        )
        for key in per_layer:
            found = len(getattr(info, f"{key}_L"))
            if found != num_layers and (found or key != "density"):
                raise HotsplitError(f"key {prefix + key!r} has {found} values, wanted {num_layers}")
    return info


def for_context(model: ModelFile, context_length: int) -> ModelFile:
    """The model for texts of up to `context_length` tokens, on which longrope's factors depend."""
    scaling = model.bare_spec.rope_scaling.for_context(context_length)
    if scaling == model.bare_spec.rope_scaling:
        return model
    return replace(model, bare_spec=model.bare_spec.with_scaling(scaling))


def with_rope_scaling(
    model: ModelFile, kind: str | None, factor: float | None, context_length: int | None
) -> ModelFile:
    """The model with this scaling instead of its own; unchanged if `kind` and `factor` are None.
    kind: "none", "linear" or "yarn"; None means "yarn" if there is a factor. factor: the ratio of
    the longest text to the training length; None takes what `context_length` needs. Raises
    HotsplitError for a model whose positions cannot be scaled, and like `asked_scaling`."""
    if kind is None and factor is None:
        return model
    spec, rotary = model.bare_spec, model.bare_spec.rotary
    why = None
    if spec.context_limit:
        why = spec.context_limit
    elif rotary is None:
        why = "its positions are learned"
    elif rotary.scaling.kind == "linear":
        why = f"it was trained with positions divided by {rotary.scaling.factor:g}"
    elif rotary.factors is not None:
        why = f"its frequencies are scaled already ({rotary.factors})"
    if why is not None:
        raise HotsplitError(f"{model.path}: {why}; leave --rope-scaling and --rope-scale out")
    assert rotary is not None
    length = rotary.scaling.original_length or spec.context_length
    scaling = asked_scaling(kind, factor, context_length, length)
    longest = int(length * scaling.factor)
    return replace(model, bare_spec=replace(spec.with_scaling(scaling), context_length=longest))
