"""Options of a conversion, and its report."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from hotsplit.convert.type_mixtures import NAMES as MIXTURES
from hotsplit.convert.type_mixtures import MixtureName, main_type
from hotsplit.errors import HotsplitError
from hotsplit.files.typed import shown
from hotsplit.model.spec import Activation
from hotsplit.model.tensors import Layout
from hotsplit.model.weight_types import ENCODED_NAMES, FileTypeName

Outtype = FileTypeName | MixtureName
OUTTYPES: tuple[Outtype, ...] = (
    *ENCODED_NAMES,
    *(name for name in MIXTURES if main_type(name) in ENCODED_NAMES),
)


def check_type(kind: str, what: str, known: tuple[str, ...] = ENCODED_NAMES) -> None:
    """Raises HotsplitError, about `what`, for a type that no tensor can be written in."""
    if kind not in known:
        raise HotsplitError(f"{what}: {kind!r} is unknown; known: {', '.join(known)}")


@dataclass(frozen=True, kw_only=True)
class ConvertConfig:
    """What to convert, and the path of the model file to write.

    - `source`: a checkpoint folder, a .gguf file, or the name of a checkpoint on the Hugging Face
      hub.
    - `outtype`: None means f16 for a checkpoint and unchanged types for a GGUF; `tensor_types`
      override it for tensors by name (see tensor_types.TensorTypes).
    - `importances`: an importance matrix, by which types that are searched weigh errors.
    - `tokenizer`: the model's tokenizer.json, instead of the tokenizer of the source.
    - `activation`: for a GGUF that does not record it: "relu", "drelu", "fatrelu=0.01" and so on.
    - `predictors`: a folder with predictors.safetensors or with DejaVu's model_0.pt, model_1.pt and
      so on; or the file predictors.safetensors itself.
    - `predictor_input_layer_offset`: the layer whose input they read, if the folder does not state
      it: 0 their own, 1 the one before."""

    source: Path
    output: Path
    outtype: Outtype | None = None
    tensor_types: tuple[str, ...] = ()
    importances: Path | None = None
    tokenizer: Path | None = None
    activation: str | None = None
    layout: Layout = "sparse"
    predictors: Path | None = None
    predictor_input_layer_offset: int | None = None
    force: bool = False

    def __post_init__(self) -> None:
        if self.outtype is not None:
            check_type(self.outtype, "outtype", OUTTYPES)
        if self.layout not in get_args(Layout):
            raise HotsplitError(
                f"layout {self.layout!r} is unknown; known: {', '.join(get_args(Layout))}"
            )
        name, _, threshold = (self.activation or "relu").partition("=")
        is_number = name != "fatrelu" and not threshold
        if name == "fatrelu":
            with suppress(ValueError):
                is_number = 0 <= float(threshold) < float("inf")
        if name not in get_args(Activation) or not is_number:
            raise HotsplitError(
                f"activation {shown(self.activation)}; wanted one of"
                f" {', '.join(get_args(Activation))}, fatrelu with its threshold (fatrelu=0.01)"
            )
        if self.predictor_input_layer_offset not in (None, 0, 1):
            raise HotsplitError(
                f"predictor input layer offset {self.predictor_input_layer_offset} is unknown;"
                " known: 0 and 1"
            )
        if self.predictor_input_layer_offset is not None and self.predictors is None:
            raise HotsplitError(
                "a predictor input layer offset was given, but no predictors; give a folder of them"
            )
        if self.layout == "stock" and self.predictors:
            raise HotsplitError(
                "the stock layout cannot hold predictors: llama.cpp would refuse or ignore them;"
                " leave them out, or use the sparse layout"
            )


@dataclass(frozen=True, kw_only=True)
class ConvertReport:
    """`notes` are for the user: fallbacks, and what the file cannot do."""

    output: Path
    model_id: str
    num_tensors: int
    num_bytes: int
    outtype: str  # the one asked for, else f16 for a checkpoint and a GGUF's own
    layout: Layout
    activation: Activation
    has_predictors: bool
    verified: str | None  # the result of a comparison with the source; None: not requested
    notes: tuple[str, ...]
    seconds: float
