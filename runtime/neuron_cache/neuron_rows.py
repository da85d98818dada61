"""Carries neurons to the slots of a GPU: their rows are gathered from main memory into pinned
staging by a host function of the copier, and copied to the GPU together; a kernel scatters them to
the slots, with the neurons' ids and, if the GPU packs bits, the slot of each neuron.

Letters: F neurons of a layer, N slots, S swaps, L layers, M tensors of a block, C copies, B bytes
of staging."""

from collections.abc import Mapping, Sequence
from ctypes import Structure, addressof, c_int64, c_void_p
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from hotsplit.costs.cache_bytes import STAGED_ALIGNMENT, bytes_in_staging, staged
from hotsplit.costs.part_bytes import NUMBER_BYTES
from hotsplit.runtime.device.streams import HostNode, Stream
from hotsplit.runtime.kernels.cpu import library
from hotsplit.runtime.kernels.planar import COPY, form_of
from hotsplit.runtime.neuron_cache.cache_slots import Residency, Take
from hotsplit.runtime.weights.neuron_block import NeuronBlock

if TYPE_CHECKING:
    from hotsplit.runtime.kernels.gpu.kernels import Kernels


class CopiesStruct(Structure):
    _fields_ = [("copy", c_void_p), ("count", c_int64)]


class RowCopies:
    """Copies between addresses, made in order. `kept` keeps the memory alive."""

    def __init__(
        self, source: np.ndarray, target: np.ndarray, num_bytes: np.ndarray, kept: Sequence[Any]
    ) -> None:
        copies = np.empty((*num_bytes.shape, 3), np.int64)  # 0 bytes copy nothing
        copies[..., 0], copies[..., 1], copies[..., 2] = source, target, num_bytes
        self._copy_C3 = copies.reshape(-1, 3)
        self._kept = kept
        self.struct = CopiesStruct(copy=self._copy_C3.ctypes.data, count=len(self._copy_C3))
        self.num_bytes = int(num_bytes.sum())


@dataclass(frozen=True, kw_only=True)
class RowTable:
    """The places of the neurons' rows in the tensors of each layer, int64 [L, M]: address of row 0,
    row stride in bytes, and bytes of a row; 0 for a tensor that a layer does not have."""

    base_LM: np.ndarray
    stride_LM: np.ndarray
    size_LM: np.ndarray
    kept: tuple[Tensor, ...]

    @classmethod
    def of(cls, tensors_L: Sequence[Sequence[Tensor]]) -> "RowTable":
        most = max(map(len, tensors_L))
        base_LM, stride_LM, size_LM = np.zeros((3, len(tensors_L), most), np.int64)
        for layer, tensors in enumerate(tensors_L):
            for number, tensor in enumerate(tensors):
                unit = tensor.element_size()
                width = 1 if tensor.dim() == 1 else tensor.shape[1]
                base_LM[layer, number] = tensor.data_ptr()
                stride_LM[layer, number] = tensor.stride(0) * unit
                size_LM[layer, number] = width * unit
        kept = tuple(tensor for tensors in tensors_L for tensor in tensors)
        return cls(base_LM=base_LM, stride_LM=stride_LM, size_LM=size_LM, kept=kept)

    def addresses(self, layer_S: np.ndarray, row_S: np.ndarray) -> np.ndarray:
        """The addresses of rows, int64 [S, M]."""
        return self.base_LM[layer_S] + row_S[:, None].astype(np.int64) * self.stride_LM[layer_S]

    @cached_property
    def offset_LM(self) -> np.ndarray:
        """The offsets of a neuron's rows in staging."""
        padded_LM = self._padded_LM
        return padded_LM.cumsum(axis=1) - padded_LM

    @cached_property
    def neuron_bytes(self) -> int:
        """Bytes of the largest neuron in staging."""
        return int(self._padded_LM.sum(axis=1).max())

    @property
    def _padded_LM(self) -> np.ndarray:
        return -(-self.size_LM // STAGED_ALIGNMENT) * STAGED_ALIGNMENT


@dataclass(frozen=True, kw_only=True)
class SlotLayer:
    """A layer whose slots are on a GPU. `hot_id_N`, int32 on the device: the neuron in each slot;
    `slot_F`, likewise: the slot of each neuron or -1, needed only if the device packs bits. The
    cold block refers to rows of the whole layer: its `id_N` and `row_N` are one int32 tensor."""

    hot: NeuronBlock
    cold: NeuronBlock
    hot_id_N: Tensor
    slot_F: Tensor | None


class NeuronRows:
    """The neurons of `layers`. At most `most_rows` are swapped at a time."""

    def __init__(
        self,
        layers: Mapping[int, SlotLayer],
        residency: Residency,
        kernels: "Kernels",
        take: Take,
        *,
        most_rows: int,
        is_pinned: bool,
    ) -> None:
        self.layers, self._residency, self._kernels = layers, residency, kernels
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
        self._num_copies = 0
        self._node: HostNode | None = None  # keeps the last host function alive until it has run

    def stage(self, swaps_S: np.ndarray, copier: Stream) -> int:
        copies_C4, gathered, used = self._prepared(swaps_S)
        self._node = HostNode(
            function=library.address_of("hs_copy_rows"),
            argument=addressof(gathered.struct),
            reads=self._source.kept,
            writes=(self._host_B,),
            kept=(gathered,),
        )
        copier.host(self._node)
        copier.copy(self._device_B[:used], self._host_B[:used])
        self._num_copies = len(copies_C4)
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

    def move(self, swaps_S: np.ndarray, main: Stream) -> None:
        copies_C4 = self._device_B[: 8 * COPY * self._num_copies].view(torch.int64).view(-1, COPY)
        most_bytes = int(self._source.size_LM.max())
        main.launch(
            lambda: self._kernels.scatter(self._device_B, copies_C4, most_bytes),
            reads=[self._device_B],
            writes=self._written,
        )
        for layer in np.unique(swaps_S["layer"]).tolist():
            self.layers[layer].cold.id_N.numpy()[:] = self._residency.cold(layer)

    def check(self) -> None:
        for layer, slots in self.layers.items():
            assert (slots.hot_id_N.cpu().numpy() == self._residency.id_N(layer)).all()
            assert (slots.cold.id_N.numpy() == self._residency.cold(layer)).all()
            if slots.slot_F is not None:
                assert (slots.slot_F.cpu().numpy() == self._residency.slot_LF[layer]).all()


def _written(slots: SlotLayer) -> list[Tensor]:
    more = [] if slots.slot_F is None else [slots.slot_F]
    return [*slots.hot.tensors, slots.hot_id_N, *more]
