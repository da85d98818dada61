"""Summarises a checkpoint folder and says whether `convert` would accept it.

Of the weights it reads no more than convert.draft_of does."""

import tempfile
from collections import Counter
from dataclasses import dataclass
from math import prod
from pathlib import Path
from shlex import quote

from hotsplit.convert.checkpoint import Checkpoint
from hotsplit.convert.convert import Draft, draft_of
from hotsplit.convert.options import ConvertConfig
from hotsplit.errors import HotsplitError
from hotsplit.model.spec import Activation, ModelSpec
from hotsplit.model.spec_facts import spec_facts
from hotsplit.system.sizes import format_bytes


@dataclass(frozen=True, kw_only=True)
class CheckpointSummary:
    """If `convert` would refuse the checkpoint, `refusal` says why; `spec`, `activation`, `graph`
    and `f16_bytes` are then None."""

    kind: str = "checkpoint"
    path: Path
    file_bytes: int  # of the weights
    architecture: str
    refusal: str | None
    num_tensors: int
    num_parameters: int
    tensors_by_type: dict[str, int]
    spec: ModelSpec | None
    activation: Activation | None
    graph: str | None  # the architecture that the model file would have
    f16_bytes: int | None  # of that model file's tensors
    notes: tuple[str, ...]  # those of `convert`

    @property
    def facts(self) -> list[tuple[str, object]]:
        """Rows for people."""
        rows: list[tuple[str, object]] = [
            ("folder", self.path),
            ("weights", f"{format_bytes(self.file_bytes)} in {self.num_tensors:,} tensors"),
            ("types", ", ".join(f"{n:,} {kind}" for kind, n in self.tensors_by_type.items())),
            ("parameters", f"{self.num_parameters:,}"),
            ("architecture", self.architecture),
        ]
        kept = " in f16" if self.tensors_by_type.keys() <= {"f32", "f16", "bf16"} else ""
        if self.spec is None:
            return [*rows, ("refused by convert", self.refusal)]
        return [
            *rows,
            ("as a model file", f"{self.graph}, {format_bytes(self.f16_bytes or 0)}{kept}"),
            ("activation", self.activation),
            *spec_facts(self.spec),
            *(("note", note) for note in self.notes),
            ("next", f"hotsplit run {quote(str(self.path))}"),
        ]


def summarise_checkpoint(folder: Path) -> CheckpointSummary:
    """The summary of a folder. Raises HotsplitError if it is not a complete checkpoint."""
    checkpoint = Checkpoint.open(folder)
    own = [tensor for tensor in checkpoint.tensors.values() if tensor.same_as is None]
    draft: Draft | None = None
    refusal = None
    with tempfile.TemporaryDirectory(prefix="hotsplit-") as empty:
        try:
            draft = draft_of(ConvertConfig(source=folder, output=Path(empty, "model.gguf")))
        except HotsplitError as error:
            refusal = str(error).removeprefix(f"{folder}: ")
    model = None if draft is None else draft.model
    names = checkpoint.config.get("architectures")
    return CheckpointSummary(
        path=folder,
        file_bytes=sum(file.stat().st_size for file in {tensor.file for tensor in own}),
        architecture=str(names[0])[:80] if isinstance(names, list) and names else "none",
        refusal=refusal,
        num_tensors=len(own),
        num_parameters=sum(prod(tensor.shape) for tensor in own),
        tensors_by_type=dict(
            Counter(t.packed.packing if t.packed else t.dtype.lower() for t in own).most_common()
        ),
        spec=None if model is None else model.bare_spec,
        activation=None if model is None else model.activation,
        graph=None if model is None else model.architecture,
        f16_bytes=None if model is None else sum(e.num_bytes for e in model.tensors.values()),
        notes=() if draft is None else draft.notes,
    )
