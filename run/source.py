"""The source given to `sparkinfer run`: a checkpoint folder, a name on the hub, or any GGUF.

A name on the hub is downloaded; of large local files only headers and samples of bytes are
read."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from sparkinfer.convert.checkpoint import Checkpoint
from sparkinfer.convert.convert import draft_of
from sparkinfer.convert.hub import find_folder
from sparkinfer.convert.options import ConvertConfig, Outtype
from sparkinfer.errors import SparkinferError
from sparkinfer.model_file import TEMPLATE_KEY, TEMPLATES_KEY, ModelFile, read_model_gguf
from sparkinfer.run.keys import identity_of_source


@dataclass(frozen=True, kw_only=True)
class Source:
    """A source. `own` is the model of a GGUF that can be run as it is; None if it must be
    converted."""

    name: str  # as it was given
    path: Path
    identity: str
    own: ModelFile | None
    own_type: str  # of its matrices
    activation: str | None  # given by the user for a GGUF that does not record it
    scratch: Path  # an unused path, for files that are only planned

    def draft(self, outtype: Outtype | None) -> ModelFile:
        """The model file that a conversion would write, without reading weights; `own` if there is
        one and it cannot be converted. Raises SparkinferError for any other source that cannot."""
        try:
            return _draft(self.path, outtype, self.activation, self.scratch)
        except SparkinferError:
            if self.own is None:
                raise
            return self.own  # e.g. rows that are not whole blocks of that type: nothing to convert

    def is_of_type(self, outtype: Outtype | None) -> bool:
        """True if the source is a GGUF that can be run as it is in this type."""
        return self.own is not None and outtype in (None, self.own_type)


@cache
def _draft(path: Path, outtype: Outtype | None, activation: str | None, scratch: Path) -> ModelFile:
    return draft_of(
        ConvertConfig(source=path, output=scratch, outtype=outtype, activation=activation)
    ).model


def look_at(given: Path, activation: str | None, scratch: Path) -> Source:
    """Inspects a source, fetching it from the hub if needed. Raises SparkinferError for anything
    but a model."""
    path = find_folder(given)
    if not path.exists():
        raise SparkinferError(
            f"{given}: no such folder or file; wanted a checkpoint folder, a model file (.gguf) or"
            " the name of a model on the Hugging Face hub (org/name)"
        )
    own, own_type = _as_it_is(path, activation) if path.is_file() else (None, _dtype_of(path))
    return Source(
        name=str(given), path=path.resolve(), identity=identity_of_source(path), own=own,
        own_type=own_type, activation=activation, scratch=scratch,
    )  # fmt: skip


def has_template(model: ModelFile) -> bool:
    """True if the model has a chat template."""
    return TEMPLATE_KEY in model.extra_keys or TEMPLATES_KEY in model.extra_keys


def _as_it_is(path: Path, activation: str | None) -> tuple[ModelFile | None, str]:
    """(the model of a GGUF, the type of its matrices); the model is None if it must be converted,
    because of llama.cpp's layout or to set its activation."""
    keys, tensors = read_model_gguf(path)
    kinds = [e.kind for n, e in tensors.items() if n.endswith("ffn_up.weight")]
    kind = kinds[0] if kinds else "unknown"
    if activation is not None or "blk.0.ffn_down_t.weight" not in tensors:
        return None, kind
    return ModelFile.of(path, keys, tensors), kind


def _dtype_of(folder: Path) -> str:
    """The most common type of a checkpoint's matrices, by our name."""
    dtypes = [t.dtype for t in Checkpoint.open(folder).tensors.values() if len(t.shape) == 2]
    return max(set(dtypes), key=dtypes.count, default="F16").lower()
