"""The types of a file's matrices by bytes, and what becomes of them in memory."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hotsplit.files.gguf_file import TensorEntry
from hotsplit.model.tensors import is_router, is_vector
from hotsplit.model.weight_types import TABLE_NAMES
from hotsplit.system.sizes import format_bytes


@dataclass(frozen=True, kw_only=True)
class TypeBytes:
    """Matrices of one type in a file, and the type that they have in memory. With `is_bound`, a
    type with a grid may keep the file's blocks, which is measured on the machine that loads it."""

    kind: str
    memory_kind: str
    num_matrices: int
    file_bytes: int
    memory_bytes: int
    is_bound: bool  # memory_bytes are an upper bound

    @property
    def is_packed(self) -> bool:
        """True if memory holds them in another form."""
        return self.memory_kind != self.kind


def type_bytes(
    tensors: Mapping[str, TensorEntry], *, is_known: bool = False
) -> tuple[TypeBytes, ...]:
    """By types, the largest in the file first. Vectors and routers are left out. `is_known`: of
    types with grids it is known which keep the file's blocks."""
    groups: dict[tuple[str, str], list[TensorEntry]] = {}
    for name, entry in tensors.items():
        if not is_vector(name, entry.shape) and not is_router(name):
            groups.setdefault((entry.in_file.kind, entry.kind), []).append(entry)
    found = (
        TypeBytes(
            kind=kind,
            memory_kind=memory_kind,
            num_matrices=len(group),
            file_bytes=sum(entry.in_file.num_bytes for entry in group),
            memory_bytes=sum(entry.num_bytes for entry in group),
            is_bound=not is_known and memory_kind in TABLE_NAMES,
        )
        for (kind, memory_kind), group in groups.items()
    )
    return tuple(sorted(found, key=lambda each: -each.file_bytes))


def type_words(types: Sequence[TypeBytes], made_from: Sequence[TypeBytes] = ()) -> str | None:
    """The types of a model that is run, and of the file that it is made from, if it is another;
    None if there is nothing to say: one type, as it is."""
    if made_from:
        return f"{_names(made_from)} in the file; {_names(types)} in the one that is made"
    if not any(each.is_packed for each in types):
        return f"{_names(types)}, as they are" if len(types) > 1 else None
    packed: dict[str, list[TypeBytes]] = {}
    for each in types:
        packed.setdefault(each.memory_kind * each.is_packed, []).append(each)
    rest, parts = packed.pop("", []), []
    for memory_kind, group in packed.items():
        parts.append(f"{_names(group)} as {memory_kind}, {_in_memory(group)} in memory")
    parts += [f"{_names(rest)} as they are"] * bool(rest)
    before = format_bytes(sum(each.file_bytes for each in types))
    return "; ".join([*parts, f"in all {before} become {_in_memory(types)}"])


def _in_memory(types: Sequence[TypeBytes]) -> str:
    size = format_bytes(sum(each.memory_bytes for each in types))
    return f"at most {size}" if any(each.is_bound for each in types) else size


def _names(types: Sequence[TypeBytes]) -> str:
    return ", ".join(
        f"{each.kind} {format_bytes(each.file_bytes)} ({each.num_matrices})" for each in types
    )
