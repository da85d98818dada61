"""Carries experts to the slots of a GPU. An expert is a few large pieces of pinned memory, so
nothing is gathered: the copier copies them to staging. On their way from there to the slots, tiles
and groups of the CPU's become the GPU's rows: a table for each pair of layouts says where each byte
is.

A step's kernels, the CPU's functions and prompts read where an expert is from tables, so a captured
step stays valid. Main memory has all experts of these layers; those in slots are marked there, and
not computed twice.

Letters: L layers, E experts of a layer, N slots of a layer, S swaps, B bytes of staging, U bytes of
a tile or row."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from hotsplit.costs.cache_bytes import staged
from hotsplit.runtime.device.streams import Stream
from hotsplit.runtime.kernels.grouped import from_grouped
from hotsplit.runtime.kernels.planar import PLANAR_KIND, from_planar, planar
from hotsplit.runtime.kernels.stored import rows_together
from hotsplit.runtime.kernels.tiled import from_tiled
from hotsplit.runtime.neuron_cache.cache_slots import Residency, Take
from hotsplit.runtime.weights.expert_block import ExpertBlock


@dataclass(frozen=True, kw_only=True)
class ExpertLayer:
    """A layer whose experts have slots: `hot` has those, `cold` all experts, in order."""

    hot: ExpertBlock
    cold: ExpertBlock

    @cached_property
    def parts(self) -> list["_Part"]:
        """A part for each matrix, and then for each bias."""
        both = list(zip(self.hot.matrices, self.cold.matrices, strict=True))
        found = [
            _Part(hot.data, cold.data, (cold.kind, hot.kind, cold.row_bytes)) for hot, cold in both
        ]
        biases = [(hot.bias_PN, cold.bias_PN) for hot, cold in both]
        return found + [
            _Part(hot, cold, None) for hot, cold in biases if hot is not None and cold is not None
        ]

    @property
    def can_be_copied(self) -> bool:
        """True if each expert is contiguous and pinned, so that copies run beside a step."""
        return all(part.every[0].is_contiguous() and part.every.is_pinned() for part in self.parts)


@dataclass(frozen=True)
class _Part:
    """The slots and all experts of a matrix or a bias. `layout`: the CPU's kind, the GPU's, and the
    bytes of a row."""

    slots: Tensor
    every: Tensor
    layout: tuple[str, str, int] | None


class ExpertParts:
    """The experts of `layers`. At most `most_rows` are swapped at a time."""

    def __init__(
        self,
        layers: Mapping[int, ExpertLayer],
        residency: Residency,
        take: Take,
        *,
        most_rows: int,
        is_pinned: bool,
    ) -> None:
        self.layers, self._residency = layers, residency
        for own in layers.values():
            own.hot.places  # noqa: B018 - read before a copy of its table is under way
        self._expert_bytes = max(
            sum(staged(part.slots[0].nbytes) for part in own.parts) for own in layers.values()
        )
        layouts = {part.layout for own in layers.values() for part in own.parts if part.layout}
        self._positions = {layout: _positions_on_gpu(layout, take) for layout in sorted(layouts)}
        self._staging_B = take((most_rows * self._expert_bytes,), torch.uint8)
        # What the GPU's tables become: the slot of each expert.
        shape = residency.slot_LF.shape
        self._place_LE = torch.zeros(shape, dtype=torch.int32, pin_memory=is_pinned)

    def stage(self, swaps_S: np.ndarray, copier: Stream) -> int:
        num_bytes = 0
        for number, swap in enumerate(swaps_S):
            for staging_B, part in self._parts(number, swap):
                expert = part.every[int(swap["in"])]
                copier.copy(staging_B, as_bytes(expert))
                num_bytes += expert.nbytes
        return num_bytes

    def _parts(self, number: int, swap: np.void) -> Iterator[tuple[Tensor, _Part]]:
        """For each matrix and bias of an expert, its place in staging."""
        first = number * self._expert_bytes
        for part in self.layers[int(swap["layer"])].parts:
            size = part.slots[0].nbytes
            yield self._staging_B[first : first + size], part
            first += staged(size)

    def move(self, swaps_S: np.ndarray, main: Stream) -> None:
        for number, swap in enumerate(swaps_S):
            for staging_B, part in self._parts(number, swap):
                position_U = None if part.layout is None else self._positions[part.layout]
                self._write(staging_B, part.slots[int(swap["slot"])], position_U, main)
        for layer in np.unique(swaps_S["layer"]).tolist():
            self._change_tables(layer, main)

    def _write(
        self, staging_B: Tensor, slot: Tensor, position_U: Tensor | None, main: Stream
    ) -> None:
        """Writes an expert's bytes in staging to its slot, in the GPU's layout."""
        slot_B = as_bytes(slot)
        if position_U is None:
            main.copy(slot_B, staging_B)
            return
        source, target = (each.view(-1, len(position_U)) for each in (staging_B, slot_B))

        def move() -> None:
            torch.index_select(source, 1, position_U, out=target)

        main.launch(move, reads=[staging_B, position_U], writes=[slot])

    def _change_tables(self, layer: int, main: Stream) -> None:
        hot, cold, place_E = self.layers[layer].hot, self.layers[layer].cold, self._place_LE[layer]
        assert hot.place_E is not None and cold.place_E is not None
        place_E.numpy()[:] = slot_E = self._residency.slot_LF[layer]
        main.copy(hot.place_E, place_E)
        hot.places[:] = slot_E
        cold.places[:] = np.where(slot_E < 0, np.arange(len(slot_E)), -1)
        cold.place_E.numpy()[:] = cold.places

    def check(self) -> None:
        """Also that slots have their experts' bytes."""
        for layer, own in self.layers.items():
            slot_E, id_N = self._residency.slot_LF[layer], self._residency.id_N(layer)
            assert own.hot.place_E is not None and own.cold.place_E is not None
            assert (own.hot.place_E.cpu().numpy() == slot_E).all()
            assert (own.hot.places == slot_E).all()
            assert ((own.cold.place_E.numpy() < 0) == (slot_E >= 0)).all()
            assert (own.cold.places == own.cold.place_E.numpy()).all()
            for part in own.parts:
                position_U = None if part.layout is None else self._positions[part.layout]
                for slot, expert in zip(
                    part.slots, part.every[torch.from_numpy(id_N).long()], strict=True
                ):
                    want_B, got_B = as_bytes(expert), as_bytes(slot.cpu())
                    if position_U is not None:
                        at_U = position_U.cpu().long()
                        want_B = want_B.view(-1, len(at_U))[:, at_U].flatten()
                    assert torch.equal(got_B, want_B)


def as_bytes(values: Tensor) -> Tensor:
    """The bytes of a contiguous tensor."""
    return values.view(-1).view(torch.uint8)


def _positions_on_gpu(layout: tuple[str, str, int], take: Take) -> Tensor | None:
    kind, target_kind, row_bytes = layout
    position_U = positions(kind, target_kind, rows_together(kind), row_bytes)
    return None if position_U is None else take((len(position_U),), torch.int32).copy_(position_U)


def positions(kind: str, target_kind: str, num_rows: int, row_bytes: int) -> Tensor | None:
    """int32 [num_rows * row_bytes], for each byte of `num_rows` rows of `target_kind` its position
    in those of `kind`; None if the layouts are equal. `num_rows`: those of a tile, of a group, or
    1. Rows in tiles and groups are permuted within as many rows; others within a row. The
    permutation is found by permuting the digits of numbers, so it is that of `from_tiled`,
    `from_grouped` and `planar`."""
    if kind == target_kind:
        return None
    at = torch.arange(num_rows * row_bytes)
    found = torch.zeros_like(at)
    for shift in (0, 8, 16):
        digits = (at >> shift & 255).to(torch.uint8).view(num_rows, row_bytes)
        rows, file_kind = from_planar(*from_grouped(*from_tiled(digits, kind)))
        rows, made = planar(rows.contiguous().view(torch.uint8), file_kind)
        assert made == target_kind == PLANAR_KIND.get(file_kind, file_kind), (kind, target_kind)
        found += rows.flatten().long() << shift
    return found.to(torch.int32)
