"""Loads the neurons of a layer as blocks: a hot and a cold one, or one block with all.

If no GPU is available, a plan runs with both blocks on the CPU, and the hot block still has
matrices of its own.

Letters: N neurons of a block, L layers, D model width, F neurons of a layer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.costs.part_bytes import down_kind
from hotsplit.files.gguf_file import TensorEntry, values_of
from hotsplit.model.modes import Mode
from hotsplit.model.spec import ModelSpec
from hotsplit.runtime.kernels.stored import FLOATS
from hotsplit.runtime.model.placement import Placement
from hotsplit.runtime.weights.matrix import Linear, vector_of
from hotsplit.runtime.weights.neuron_block import NeuronBlock, Role, apart
from hotsplit.runtime.weights.store import CPU, Stores, WeightStore

# The rows of a block: "own" copies its neurons' rows, "shared" refers to them in the whole layer's
# matrices, "all" uses these matrices whole.
Rows = Literal["own", "shared", "all"]


@dataclass(frozen=True, kw_only=True)
class NeuronLoader:
    """Loads the blocks of all layers. `spec`: without predictors that are not run. `resident_LN`:
    the neurons in the slots of a neuron cache."""

    model: ModelFile
    spec: ModelSpec
    placement: Placement
    mode: Mode
    stores: Stores
    resident_LN: Sequence[np.ndarray] | None
    # Layers whose down projection lost precision by a change of type: old type, new one, relative
    # error.
    transposed: dict[int, tuple[str, str, float]] = field(default_factory=dict)

    def blocks(self, index: int) -> tuple[NeuronBlock, ...]:
        """The blocks of a layer without experts, the hot one first. Each has matrices of its own,
        except a cold block whose matrices stay in the file or whose layer has slots: it refers to
        the whole matrices."""
        every = np.arange(self.model.spec.layers[index].neurons.number)
        if not len(every):
            return ()
        if runs_by_output(self.model, self.placement, reads_all=self._reads_all(index)):
            stock = self.model.tensors[f"blk.{index}.ffn_down.weight"]
            return (self._block(index, stock, "hot", every, "all", is_by_output=True),)
        down = self._down(index)
        if self.placement.hot is None:
            return (self._block(index, down, "hot", every, "all"),)
        hot = self.placement.hot[index].astype(np.int64)
        cold = np.delete(every, hot)
        if self.resident_LN is not None and len(self.resident_LN[index]):
            block = self._block(index, down, "hot", hot, "own")
            return apart(block, self._block(index, down, "cold", cold, "shared"), cold)
        blocks = []
        if len(hot):
            is_whole = not len(cold) and self.placement.homes[index] == CPU
            blocks.append(self._block(index, down, "hot", hot, "all" if is_whole else "own"))
        if len(cold):
            some: Rows = "shared" if self.stores.on(CPU).is_mapped else "own"
            blocks.append(self._block(index, down, "cold", cold, some if len(hot) else "all"))
        return tuple(blocks)

    def _block(
        self,
        index: int,
        down: TensorEntry,
        role: Role,
        ids: np.ndarray,
        rows: Rows,
        *,
        is_by_output: bool = False,
    ) -> NeuronBlock:
        chosen = ids if rows == "own" else None
        names = list(self.model.spec.layers[index].neurons.matrices)
        store = self.stores.on(self.placement.homes[index] if role == "hot" else CPU)
        entries = [self.model.tensors[f"blk.{index}.{name}.weight"] for name in names]
        groups = self._read_together(index, [*entries, down])
        num_whole = self._num_whole(index, entries) + is_by_output
        adds_all = self._reads_all(index) and num_whole > 0 and not is_by_output
        *linears, down_matrix = store.neurons(groups, chosen, num_whole, adds_all)
        if rows == "own":  # ids and biases of neurons that were appended
            chosen = ids = np.pad(ids, (0, down_matrix.num_rows - len(ids)), mode="edge")
        gate, *up = (
            Linear(weight=weight, bias_N=bias_of(self.model, f"blk.{index}.{name}", store, chosen))
            for name, weight in zip(names, linears, strict=True)
        )
        id_N = store.neuron_ids(ids, is_all=rows == "all")
        return NeuronBlock(
            role=role,
            gate=gate,
            up=up[0] if up else None,
            down=down_matrix,
            id_N=id_N,
            row_N=id_N if rows == "shared" else None,
            is_whole=rows == "all",
            is_by_output=is_by_output,
        )

    def _is_named(self, index: int) -> bool:
        """True if a token computes only the neurons of this layer that are named for it."""
        return self.spec.layers[index].predict is not None

    def _reads_all(self, index: int) -> bool:
        """True if a token reads every row of the layer's neurons."""
        return self.spec.computes_all(index, self.mode) and not self._is_named(index)

    def _read_together(self, index: int, entries: list[TensorEntry]) -> list[list[TensorEntry]]:
        """Groups those of gate, up (if there is one) and down whose rows are read together. If all
        rows are read, each matrix is read in full. If no neurons are named, every gate is read but
        few rows of the others."""
        if self._reads_all(index):
            return [[e] for e in entries]
        return [entries] if self._is_named(index) else [entries[:1], entries[1:]]

    def _num_whole(self, index: int, entries: list[TensorEntry]) -> int:
        """How many of a block's gates and ups are multiplied in full for every token. Rows of a
        layer with slots are swapped one by one."""
        if self.resident_LN is not None or self._is_named(index):
            return 0
        return len(entries) if self.spec.computes_all(index, self.mode) else 1

    def _down(self, index: int) -> TensorEntry:
        """The neuron-major down projection; a stock file's is transposed here."""
        found = self.model.tensors.get(f"blk.{index}.ffn_down_t.weight")
        if found is not None:
            return found
        stock = self.model.tensors[f"blk.{index}.ffn_down.weight"]
        entry, error = transpose(stock, down_kind(self.model, index))
        if error > 0:
            self.transposed[index] = (stock.kind, entry.kind, error)
        return entry

    def report_transposed(self, notice: Callable[[str], None]) -> None:
        """Reports, in one line, the error of down projections whose type changed when they were
        transposed."""
        if not self.transposed:
            return
        kinds = {(old, new) for old, new, _ in self.transposed.values()}
        how = ", ".join(f"{old} to {new}" for old, new in sorted(kinds))
        most = max(error for *_, error in self.transposed.values())
        notice(
            f"down projections of {len(self.transposed)} layers transposed from {how}, relative"
            f" error up to {most:.1e}; hotsplit convert {self.model.path} -o model.gguf does so"
            " once and for all"
        )


def bias_of(
    model: ModelFile, name: str, store: WeightStore, chosen: np.ndarray | None
) -> Tensor | None:
    """The biases of a block's neurons, or experts (None: all), if a matrix has them."""
    entry = model.tensors.get(f"{name}.bias")
    if entry is None:
        return None
    bias_N = vector_of(entry, CPU)
    return store.neuron_bias(bias_N if chosen is None else bias_N[torch.from_numpy(chosen)])


def runs_by_output(model: ModelFile, placement: Placement, *, reads_all: bool) -> bool:
    """True if a stock file's down projections are used as they are: the CPU reads all rows of them
    for every token (`reads_all`)."""
    is_whole = placement.hot is None and all(home == CPU for home in placement.homes)
    return model.layout == "stock" and reads_all and is_whole


def transpose(entry: TensorEntry, kind: str) -> tuple[TensorEntry, float]:
    """A [D, F] matrix as [F, D] of a float type, and its relative error |new - old| / |old|."""
    old = torch.from_numpy(np.array(values_of(entry.read(), entry.kind)))
    new = old.T.to(FLOATS[kind]).contiguous()
    error = ((new.T.float() - old).norm() / old.norm().clamp(min=1e-30)).item()
    data = (new.view(torch.uint8) if kind == "bf16" else new).numpy()
    return TensorEntry(shape=tuple(new.shape), kind=kind, read_rows=lambda a, b: data[a:b]), error
