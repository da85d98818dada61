"""The source given to `hotsplit run`: a checkpoint folder, a name on the hub, or any GGUF.

A name on the hub is downloaded; of large local files only headers and samples of bytes are
read."""

from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path

from gguf import Keys

from hotsplit.artifacts.model_file import TOKENIZER_KEY, ModelFile
from hotsplit.artifacts.model_gguf import read_model_gguf
from hotsplit.convert.checkpoint import Checkpoint
from hotsplit.convert.convert import draft_of
from hotsplit.convert.gguf_source import activation_notes
from hotsplit.convert.hub import find_source
from hotsplit.convert.options import ConvertConfig, Outtype
from hotsplit.costs.type_bytes import TypeBytes, type_bytes
from hotsplit.errors import HotsplitError
from hotsplit.model.tensors import Layout, layout_of
from hotsplit.run.keys import identity_of_source
from hotsplit.tokens.ggml_tokenizer import check_text_keys
from hotsplit.tokens.tokenizer_kinds import GIVE

_UPS = ("ffn_up.weight", "ffn_up_exps.weight", "ffn_gate_up_exps.weight")


@dataclass(frozen=True, kw_only=True)
class RunSource:
    """A source. `own` is the model of a GGUF in our layout, which every mode can run as it is;
    `stock` is that of a GGUF in llama.cpp's layout, which mode "dense" can run as it is. Both are
    None if the source must be converted in any case."""

    name: str  # as it was given
    path: Path
    identity: str
    own: ModelFile | None
    stock: ModelFile | None
    stock_notes: tuple[str, ...]  # for the user if `stock` is run
    own_type: str  # of its matrices
    types: tuple[TypeBytes, ...]  # of a GGUF's matrices
    activation: str | None  # given by the user for a GGUF that does not record it
    tokenizer: Path | None  # a tokenizer.json, given by the user
    scratch: Path  # an unused path, for files that are only planned

    @property
    def any_model(self) -> ModelFile:
        """The model in a layout and a type of this module's choice, for its spec."""
        return self.own or self.stock or self.draft(None)

    def draft(self, outtype: Outtype | None, layout: Layout = "sparse") -> ModelFile:
        """The model file that a conversion would write, without reading weights; `own` if there is
        one and it cannot be converted. Raises HotsplitError for any other source that cannot."""
        try:
            return _draft(self.path, outtype, layout, self.activation, self.tokenizer, self.scratch)
        except HotsplitError:
            if self.own is None:
                raise
            return self.own  # e.g. rows that are not whole blocks of that type: nothing to convert

    def as_it_is(self, outtype: Outtype | None, layout: Layout) -> ModelFile | None:
        """The source's model if it is a GGUF of this type and layout already, otherwise None."""
        found = self.stock if layout == "stock" else self.own
        return found if outtype in (None, self.own_type) else None


@cache
def _draft(
    path: Path,
    outtype: Outtype | None,
    layout: Layout,
    activation: str | None,
    tokenizer: Path | None,
    scratch: Path,
) -> ModelFile:
    config = ConvertConfig(
        source=path,
        output=scratch,
        outtype=outtype,
        layout=layout,
        activation=activation,
        tokenizer=tokenizer,
    )
    return draft_of(config).model


def look_at(
    given: Path, activation: str | None, scratch: Path, tokenizer: Path | None = None
) -> RunSource:
    """Inspects a source, fetching it from the hub if needed. With a tokenizer of the user's it is
    converted in any case. Raises HotsplitError if it cannot be read."""
    path = find_source(given)
    if not path.exists():
        raise HotsplitError(
            f"{given}: no such folder or file; wanted a checkpoint folder, a model file (.gguf) or"
            " the name of a model on the Hugging Face hub (org/name)"
        )
    own = stock = None
    notes: tuple[str, ...] = ()
    types: tuple[TypeBytes, ...] = ()
    if path.is_file():
        keys, tensors = read_model_gguf(path)
        types = type_bytes(tensors)
        kinds = [entry.kind for name, entry in tensors.items() if name.endswith(_UPS)]
        own_type = max(kinds, key=kinds.count, default="unknown")
        is_whole = activation is None and tokenizer is None
        if is_whole and layout_of(tensors) == "sparse":
            own = ModelFile.of(path, keys, tensors)
        elif is_whole:
            with suppress(HotsplitError):  # `draft` says what else is wrong with it
                stock = ModelFile.of(path, keys, tensors)
        if stock is not None:
            notes = activation_notes(keys, stock)
    else:
        matrices = [t for t in Checkpoint.open(path).tensors.values() if len(t.shape) > 1]
        values: Counter[str] = Counter()
        # A large embedding may be left in 16 bits beside layers that are packed.
        for tensor in [t for t in matrices if t.packed is not None] or matrices:
            values[tensor.dtype] += prod(tensor.shape)
        own_type = max(values, key=values.__getitem__, default="F16").lower()
    return RunSource(
        name=str(given),
        path=path.absolute(),
        identity=identity_of_source(path, tokenizer),
        own=own,
        stock=stock,
        stock_notes=notes,
        own_type=own_type,
        types=types,
        activation=activation,
        scratch=scratch,
        tokenizer=tokenizer,
    )


def check_tokenizer(source: RunSource, model: ModelFile) -> None:
    """Raises HotsplitError unless the model that is to run has a tokenizer that can be used."""
    if TOKENIZER_KEY not in model.extra_keys and Keys.Tokenizer.MODEL not in model.extra_keys:
        raise HotsplitError(f"{source.name}: has no tokenizer, which text needs; {GIVE}")
    check_text_keys(Path(source.name), model.extra_keys)
