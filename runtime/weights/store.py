"""Stores of a device's weights: the mapped model file, copies in memory in the layout for decoding
(resident), or a GPU's slab (upload.Uploader).

The loader gets every part of a model from the store of its device. Memory on the CPU is taken in
the order in which the loader asks for parts.

Letters: N neurons."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Protocol, Self

import numpy as np
import torch
from torch import Tensor

from hotsplit.files.gguf_file import TensorEntry
from hotsplit.model.weight_types import BY_NAME
from hotsplit.runtime.device import huge_pages
from hotsplit.runtime.kernels.cpu import library
from hotsplit.runtime.kernels.grouped import GROUP_ROWS
from hotsplit.runtime.kernels.tiled import TILE_ROWS
from hotsplit.runtime.weights.drive import Drive
from hotsplit.runtime.weights.matrix import Matrix, matrix_of
from hotsplit.runtime.weights.resident import Residence
from hotsplit.runtime.weights.upload import Uploader

CPU = torch.device("cpu")
Groups = Sequence[Sequence[TensorEntry]]


class WeightStore(Protocol):
    """Provides the weights of one device. `item`: the item of hotsplit.costs.part_bytes under which
    bytes in a slab are counted."""

    @property
    def is_mapped(self) -> bool:
        """On the CPU: true if matrices stay in the file, so that blocks share the whole layer's."""
        return False

    def matrix(self, entry: TensorEntry, item: str) -> Matrix:
        """A whole matrix of the file."""

    def stacked(self, entries: Sequence[TensorEntry], item: str) -> Matrix | None:
        """Matrices of one type and width as one, whose first rows are those of the first. None from
        a store that does not stack."""
        return None

    def neurons(
        self, groups: Groups, rows: np.ndarray | None, num_whole: int = 0, adds_all: bool = False
    ) -> list[Matrix]:
        """These rows (None: all) of every matrix. The matrices of a group are read together; a
        resident store interleaves them. Each of the first `num_whole` groups is a single
        matrix that is multiplied whole for every token; with `adds_all`, the last group is a single
        matrix of which every token adds all rows.

        A resident store may append a few rows, so that such matrices have whole tiles and groups:
        they repeat the last one, but are zero in the last matrix, so such neurons add nothing."""

    def vector(self, values: Tensor, item: str) -> Tensor:
        """A norm's weights or a bias, given as f32 on the CPU."""

    def neuron_bias(self, bias_N: Tensor) -> Tensor:
        """Biases of the neurons of a block, given as f32 on the CPU."""

    def neuron_ids(self, ids: np.ndarray, *, is_all: bool) -> Tensor:
        """The ids of the neurons of a block; `is_all`: those of all neurons, in order."""

    def cache(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Zeros for keys and values."""


@dataclass(frozen=True)
class MappedStore(WeightStore):
    """Views of the mapped file on the CPU; copies by torch on a GPU without a slab."""

    device: torch.device

    @property
    def is_mapped(self) -> bool:
        return True

    def matrix(self, entry: TensorEntry, item: str) -> Matrix:
        return matrix_of(entry, self.device)

    def neurons(
        self, groups: Groups, rows: np.ndarray | None, num_whole: int = 0, adds_all: bool = False
    ) -> list[Matrix]:
        return [matrix_of(entry, self.device, rows) for entry in chain.from_iterable(groups)]

    def vector(self, values: Tensor, item: str) -> Tensor:
        return values.to(self.device)

    def neuron_bias(self, bias_N: Tensor) -> Tensor:
        return bias_N.to(self.device)

    def neuron_ids(self, ids: np.ndarray, *, is_all: bool) -> Tensor:
        return torch.from_numpy(ids).to(self.device)

    def cache(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if self.device == CPU:
            return huge_pages.zeros(shape, dtype)
        return torch.zeros(shape, dtype=dtype, device=self.device)


@dataclass(frozen=True, kw_only=True)
class ResidentStore(WeightStore):
    """Copies in the memory of a residence. `is_streamed`: GPUs copy neurons from there, so biases
    and ids are kept next to them."""

    residence: Residence
    is_streamed: bool

    def matrix(self, entry: TensorEntry, item: str) -> Matrix:
        return self.residence.whole(entry, "tiled")

    def neurons(
        self, groups: Groups, rows: np.ndarray | None, num_whole: int = 0, adds_all: bool = False
    ) -> list[Matrix]:
        home, num_silent = self.residence, 0
        if rows is not None and num_whole:
            kinds, last = [entry.kind for (entry,) in groups[:num_whole]], groups[-1][-1]
            num_silent = num_appended(kinds, last.kind, len(rows), last.shape[0], adds_all=adds_all)
            rows = np.pad(rows, (0, num_silent), mode="edge")
        found = [home.whole(entry, "tiled", rows) for (entry,) in groups[:num_whole]]
        for number, group in enumerate(groups[num_whole:], start=num_whole + 1):
            silent = num_silent if number == len(groups) else 0
            if adds_all and number == len(groups):
                found.append(home.whole(group[0], "grouped", rows, silent))
            else:
                found += home.interleaved(list(group), rows, silent)
        return found

    def vector(self, values: Tensor, item: str) -> Tensor:
        return values

    def neuron_bias(self, bias_N: Tensor) -> Tensor:
        return self.residence.keep(bias_N, is_weight=True) if self.is_streamed else bias_N

    def neuron_ids(self, ids: np.ndarray, *, is_all: bool) -> Tensor:
        id_N = torch.from_numpy(ids)
        return self.residence.keep(id_N, is_weight=False) if self.is_streamed else id_N

    def cache(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return huge_pages.zeros(shape, dtype)


def num_appended(
    whole_kinds: Sequence[str], last_kind: str, num_rows: int, num_neurons: int, *, adds_all: bool
) -> int:
    """How many rows are missing for whole tiles in the matrices that are multiplied whole, of these
    kinds, or whole groups in the last one; 0 if the layer does not have as many neurons, if there
    are no such forms, or where sums of f32 terms would be added in another order."""
    last, together = BY_NAME[last_kind], 1
    if adds_all and "grouped" in last.forms:
        together = GROUP_ROWS
    elif last.has_integer_sums and any("tiled" in BY_NAME[kind].forms for kind in whole_kinds):
        together = TILE_ROWS
    missing = -num_rows % together if library.prefers_tiles() else 0
    return missing if num_rows + missing <= num_neurons else 0


@dataclass(frozen=True, kw_only=True)
class Stores:
    """The stores of all devices."""

    on_cpu: WeightStore = MappedStore(CPU)
    on_device: Mapping[torch.device, WeightStore] = field(default_factory=dict)
    are_experts_mapped: bool = False  # the experts of a mixture stay in the file
    drive: Drive | None = None  # experts that are in none of the slots are read from there

    @classmethod
    def of(
        cls,
        residence: Residence | None = None,
        uploaders: Mapping[torch.device, Uploader] | None = None,
        drive: Drive | None = None,
    ) -> Self:
        """Without a residence, weights on the CPU stay in the file. A device without an uploader
        has no slab."""
        uploaders = uploaders or {}
        if residence is None:
            return cls(on_device=uploaders)
        on_cpu = ResidentStore(residence=residence, is_streamed=bool(uploaders))
        is_mapped = not residence.holds_experts
        return cls(on_cpu=on_cpu, on_device=uploaders, are_experts_mapped=is_mapped, drive=drive)

    def on(self, device: torch.device) -> WeightStore:
        if device in self.on_device:
            return self.on_device[device]
        return self.on_cpu if device.type == "cpu" else MappedStore(device)
