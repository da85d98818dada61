"""Moves neurons to slots. Both kinds have the methods

    start     Starts copying the rows of the incoming neurons to staging in the background; returns
              their bytes. Slots and tables stay as they are. Called when no copies are under way.
    finish    Waits for the copies, moves the rows to their slots and changes the tables. Called
              between steps; when it returns, all of that is done.

JoinedSlots are beside the full weights, as rows of one block (`weights.neuron_block.joined`), if
the CPU computes all neurons. Logits are bit-identical to those without a cache.

DeviceSlots are on GPUs, with all rows of their layers in main memory:

    start    copier   gather rows into pinned staging | copy it to the device     beside a step
    finish   main     wait for the copier | scatter to the slots                  between steps

The scatter changes a slot's rows, its neuron's id and, if the device packs bits, the slot of each
neuron, on the stream of the decode steps but outside their graphs, whose addresses do not change.
The CPU's list of cold neurons is updated in place at the same time. The caller of `finish` waits for
the scatter, since prompts read the slots on another stream, and the next `start` overwrites staging.

Letters: L layers, F neurons of a layer, N slots, S swaps, M tensors of a block, C copies, B bytes
of staging."""

from collections.abc import Callable, Mapping, Sequence
from ctypes import addressof
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hotsplit.costs.cache_bytes import bytes_in_staging, staged
from hotsplit.costs.part_bytes import NUMBER_BYTES
from hotsplit.runtime.device.streams import HostNode, Stream
from hotsplit.runtime.kernels.cpu import library
from hotsplit.runtime.kernels.gpu.slots import COPY, SlotKernels, form_of
from hotsplit.runtime.neuron_cache.residency import Residency
from hotsplit.runtime.neuron_cache.row_copies import Copier, RowCopies, RowTable
from hotsplit.runtime.weights.neuron_block import NeuronBlock

Take = Callable[[tuple[int, ...], torch.dtype], Tensor]


class JoinedSlots:
    """The slots of the layers in `blocks`, by layer."""

    def __init__(
        self,
        blocks: Mapping[int, NeuronBlock],
        residency: Residency,
        copy_bytes_per_s: float | None = None,
    ) -> None:
        self.residency = residency
        self._row_LF = {layer: _shared(block.row_N) for layer, block in blocks.items()}
        layers = range(len(residency.num_slots_L))
        self._table = RowTable.of([blocks[i].tensors if i in blocks else [] for i in layers])
        self._table_L = np.zeros(len(layers), np.int64)  # address of each layer's `row_N`
        for layer, row_F in self._row_LF.items():
            self._table_L[layer] = row_F.ctypes.data
        self._staging = np.zeros(0, np.uint8)
        self._copier = Copier(copy_bytes_per_s)
        self._pending: tuple[np.ndarray, RowCopies] | None = None

    def start(self, swaps_S: np.ndarray) -> int:
        assert self._pending is None
        swaps_S, table, num_slots_L = swaps_S.copy(), self._table, self.residency.num_slots_L
        needed = len(swaps_S) * table.neuron_bytes
        if len(self._staging) < needed:
            self._staging = np.zeros(needed, np.uint8)
        layer_S, first = swaps_S["layer"], self._staging.ctypes.data
        place_S1 = np.arange(first, first + needed, table.neuron_bytes)[:, None]
        staged_SM, size_SM = place_S1 + table.offset_LM[layer_S], table.size_LM[layer_S]
        main_SM = table.addresses(layer_S, num_slots_L[layer_S] + swaps_S["in"])
        slot_SM = table.addresses(layer_S, swaps_S["slot"])
        to_slots = self._to_slots(swaps_S, staged_SM, slot_SM, size_SM)
        gathered = RowCopies(main_SM, staged_SM, size_SM, (self._staging, self._table))
        self._copier.start(gathered)
        self._pending = swaps_S, to_slots
        return gathered.num_bytes

    def _to_slots(
        self, swaps_S: np.ndarray, staged_SM: np.ndarray, slot_SM: np.ndarray, size_SM: np.ndarray
    ) -> RowCopies:
        """The copies from staging to the slots, and of the changed numbers to the tables."""
        layer_S, unit = swaps_S["layer"], 4
        number_S2 = np.empty((len(swaps_S), 2), np.int32)  # new rows of the neurons in and out
        number_S2[:, 0] = swaps_S["slot"]
        number_S2[:, 1] = swaps_S["out"] + self.residency.num_slots_L[layer_S]
        at_S2 = number_S2.ctypes.data + unit * np.arange(number_S2.size).reshape(-1, 2)
        neuron_S2 = np.stack([swaps_S["in"], swaps_S["out"]], axis=1)
        table_S2 = self._table_L[layer_S][:, None] + unit * neuron_S2.astype(np.int64)
        return RowCopies(
            np.concatenate([staged_SM, at_S2], axis=1),
            np.concatenate([slot_SM, table_S2], axis=1),
            np.concatenate([size_SM, np.full_like(table_S2, unit)], axis=1),
            (self._staging, number_S2, self._table, self._row_LF),
        )

    def finish(self) -> None:
        assert self._pending is not None
        self._copier.finish()
        (swaps_S, to_slots), self._pending = self._pending, None
        self.residency.swap(swaps_S)
        to_slots.run()

    def check(self) -> None:
        """Raises AssertionError unless all tables agree."""
        self.residency.check()
        for layer, row_F in self._row_LF.items():
            slot_F, num_slots = self.residency.slot_LF[layer], self.residency.num_slots_L[layer]
            assert (row_F == np.where(slot_F < 0, num_slots + np.arange(len(slot_F)), slot_F)).all()


def _shared(row_F: Tensor | None) -> np.ndarray:
    """An array that shares the tensor's memory."""
    assert row_F is not None and row_F.dtype == torch.int32
    return row_F.numpy()


@dataclass(frozen=True, kw_only=True)
class SlotLayer:
    """A layer whose slots are on a GPU. `hot_id_N`, int32 on the device: the neuron in each slot;
    `slot_F`, likewise: the slot of each neuron or -1, needed only if the device packs bits. The
    cold block refers to rows of the whole layer: its `id_N` and `row_N` are one int32 tensor."""

    hot: NeuronBlock
    cold: NeuronBlock
    hot_id_N: Tensor
    slot_F: Tensor | None


class SlotDevice:
    """The slots of `layers` on one GPU. At most `most_rows` neurons are swapped at a time."""

    def __init__(
        self,
        layers: Mapping[int, SlotLayer],
        residency: Residency,
        kernels: SlotKernels,
        main: Stream,
        copier: Stream,
        take: Take,
        *,
        most_rows: int,
        is_pinned: bool,
    ) -> None:
        self.layers, self._residency, self._kernels = layers, residency, kernels
        self._main, self._copier = main, copier
        every = range(len(residency.num_slots_L))
        of = [layers.get(layer) for layer in every]
        self._source = RowTable.of([slots.cold.tensors if slots else [] for slots in of])
        self._target = RowTable.of([slots.hot.tensors if slots else [] for slots in of])
        assert (self._source.size_LM == self._target.size_LM).all()
        self._form_LM = np.zeros_like(self._source.size_LM)
        for layer, slots in layers.items():
            forms = [
                form_of(cold.kind, hot.kind)
                for cold, hot in zip(slots.cold.matrices, slots.hot.matrices, strict=True)
            ]
            self._form_LM[layer, : len(forms)] = forms
        self._has_slot_F = any(slots.slot_F is not None for slots in layers.values())
        self._written = [tensor for slots in layers.values() for tensor in _written(slots)]
        source = self._source
        size = bytes_in_staging(source.neuron_bytes, source.size_LM.shape[1], most_rows)
        self._host_B = torch.zeros(size, dtype=torch.uint8, pin_memory=is_pinned)
        self._device_B = take((size,), torch.uint8)
        self._pending: tuple[np.ndarray, int, Any] | None = None
        self._node: HostNode | None = None  # keeps the last host function alive until it has run

    def start(self, swaps_S: np.ndarray) -> int:
        """Starts the copies; `finish` has waited until the staging buffers are no longer in use."""
        assert self._pending is None
        copies_C4, gathered, used = self._prepared(swaps_S)
        node = HostNode(
            function=library.copy_rows_function(),
            argument=addressof(gathered.struct),
            reads=self._source.kept,
            writes=(self._host_B,),
            kept=(gathered,),
        )
        self._copier.follow()
        self._copier.host(node)
        self._copier.copy(self._device_B[:used], self._host_B[:used])
        self._pending, self._node = (swaps_S, len(copies_C4), self._copier.record()), node
        return gathered.num_bytes

    def _prepared(self, swaps_S: np.ndarray) -> tuple[np.ndarray, RowCopies, int]:
        """(copies from staging to the slots, rows to gather into staging, bytes of staging in use).
        Writes the copies' descriptions and the new ids to staging."""
        layer_S, slot_S, in_S = swaps_S["layer"], swaps_S["slot"], swaps_S["in"]
        source, target = self._source, self._target
        size_SM, num_swaps = source.size_LM[layer_S], len(swaps_S)
        id_S3, value_S3 = self._ids(swaps_S)
        num_copies = num_swaps * (size_SM.shape[1] + id_S3.shape[1])
        first = staged(8 * COPY * num_copies)
        ids_at = first + num_swaps * source.neuron_bytes
        row_SM = (
            first + np.arange(num_swaps)[:, None] * source.neuron_bytes + source.offset_LM[layer_S]
        )
        id_at_S3 = ids_at + NUMBER_BYTES * np.arange(id_S3.size).reshape(id_S3.shape)
        parts = (
            (row_SM, target.addresses(layer_S, slot_S), size_SM, self._form_LM[layer_S]),
            (id_at_S3, id_S3, np.full_like(id_S3, NUMBER_BYTES), np.zeros_like(id_S3)),
        )
        copies_C4 = np.concatenate(
            [np.stack([number.ravel() for number in part], axis=1) for part in parts]
        )
        used = ids_at + NUMBER_BYTES * id_S3.size
        assert used <= len(self._host_B), (used, len(self._host_B))
        staging = self._host_B.numpy()
        staging[: copies_C4.nbytes] = copies_C4.reshape(-1).view(np.uint8)
        staging[ids_at:used] = value_S3.astype(np.int32).reshape(-1).view(np.uint8)
        main_SM = source.addresses(layer_S, in_S)
        gathered = RowCopies(
            main_SM, self._host_B.data_ptr() + row_SM, size_SM, (self._host_B, *source.kept)
        )
        return copies_C4, gathered, used

    def _ids(self, swaps_S: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(addresses of the int32 numbers that each swap changes, their new values), both int64."""
        address, value = [], []
        for layer, slot, comes, goes in swaps_S[["layer", "slot", "in", "out"]].tolist():
            slots = self.layers[layer]
            changes = [(slots.hot_id_N, slot, comes)]
            if self._has_slot_F:
                assert slots.slot_F is not None
                changes += [(slots.slot_F, comes, slot), (slots.slot_F, goes, -1)]
            address.append(
                [tensor.data_ptr() + NUMBER_BYTES * index for tensor, index, _ in changes]
            )
            value.append([number for *_, number in changes])
        return np.array(address, np.int64), np.array(value, np.int64)

    def finish(self) -> None:
        """Moves the rows to their slots and changes the tables; the residency has been changed
        before."""
        if self._pending is None:
            return
        (swaps_S, num_copies, event), self._pending = self._pending, None
        self._main.follow()
        self._main.wait(event)
        copies_C4 = self._device_B[: 8 * COPY * num_copies].view(torch.int64).view(-1, COPY)
        most_bytes = int(self._source.size_LM.max())
        self._main.launch(
            lambda: self._kernels.scatter(self._device_B, copies_C4, most_bytes),
            reads=[self._device_B],
            writes=self._written,
        )
        for layer in np.unique(swaps_S["layer"]).tolist():
            self.layers[layer].cold.id_N.numpy()[:] = self._residency.cold(layer)
        self._main.finish()


class DeviceSlots:
    """The slots of all GPUs."""

    def __init__(self, devices: Sequence[SlotDevice], residency: Residency) -> None:
        self._devices, self._residency = devices, residency
        self._pending: np.ndarray = np.zeros(0)

    def start(self, swaps_S: np.ndarray) -> int:
        self._pending, num_bytes = swaps_S.copy(), 0
        for device in self._devices:
            own_S = self._pending[np.isin(self._pending["layer"], list(device.layers))]
            if len(own_S):
                num_bytes += device.start(own_S)
        return num_bytes

    def finish(self) -> None:
        self._residency.swap(self._pending)
        for device in self._devices:
            device.finish()

    def check(self) -> None:
        """Raises AssertionError unless all tables agree. All streams must have finished."""
        self._residency.check()
        for device in self._devices:
            for layer, slots in device.layers.items():
                assert (slots.hot_id_N.cpu().numpy() == self._residency.id_N(layer)).all()
                assert (slots.cold.id_N.numpy() == self._residency.cold(layer)).all()
                if slots.slot_F is not None:
                    assert (slots.slot_F.cpu().numpy() == self._residency.slot_LF[layer]).all()


def _written(slots: SlotLayer) -> list[Tensor]:
    more = [] if slots.slot_F is None else [slots.slot_F]
    return [*slots.hot.tensors, slots.hot_id_N, *more]
