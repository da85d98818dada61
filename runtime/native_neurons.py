"""The neurons of one block for one token, in one native call: what a CPU does for a layer that is
divided, from the normed input to what its neurons add.

A call takes a bit a neuron, as a GPU's predictor leaves them, and may come from any thread, also
from a node of a CUDA graph (`node`). The reference is feed_forward.py.

Letters: D model width, F neurons of the layer."""

from ctypes import Structure, addressof, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparkinfer.runtime.feed_forward import Gate, Mode, NeuronBlock
from sparkinfer.runtime.kernels.cpu import library
from sparkinfer.runtime.native_structs import ACTIVATIONS, MODES, BlockStruct, Structs


class NeuronsStruct(Structure):
    _fields_ = [("block", BlockStruct), ("x", c_void_p), ("named", c_void_p), ("y", c_void_p),
                ("workspace", c_void_p), ("width", c_int64), ("num_neurons", c_int64),
                ("gate_bytes", c_int64), ("up_bytes", c_int64), ("down_bytes", c_int64),
                ("activation", c_int32), ("mode", c_int32), ("threshold", c_float)]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class NativeNeurons:
    """Reads `x_D` and the bits of `named_W`, writes `y_D`: buffers that stay where they are."""

    struct: NeuronsStruct
    x_D: Tensor
    named_W: Tensor | None  # int32 [F / 32 rounded up], bit j % 32 of word j / 32 for neuron j
    y_D: Tensor
    kept: tuple[Any, ...]  # whatever the struct points at

    @classmethod
    def of(
        cls,
        block: NeuronBlock,
        gate: Gate,
        mode: Mode,
        num_neurons: int,
        *,
        is_pinned: bool = False,
    ) -> "NativeNeurons":
        """`num_neurons` is the layer's F. Raises NotNative for what the kernels do not cover, and
        ImportError where they are not built."""
        structs = Structs()
        width = block.down.width
        x_D, y_D = (torch.zeros(width, pin_memory=is_pinned) for _ in range(2))
        words = -(-num_neurons // 32)
        is_chosen = mode == "predicted"
        named_W = torch.zeros(words, dtype=torch.int32, pin_memory=is_pinned) if is_chosen else None
        struct = NeuronsStruct(
            block=structs.block(block),
            x=x_D.data_ptr(),
            named=None if named_W is None else named_W.data_ptr(),
            y=y_D.data_ptr(),
            width=width,
            num_neurons=num_neurons,
            activation=ACTIVATIONS.index(gate.activation),
            mode=MODES.index(mode),
            threshold=gate.threshold,
        )
        struct.workspace = structs.workspace(library.neurons_bytes(struct))
        kept = tuple(structs.kept)
        return cls(struct=struct, x_D=x_D, named_W=named_W, y_D=y_D, kept=kept)

    @property
    def node(self) -> tuple[int, int]:
        """(address of a C function, of its argument): to be called on the host by a CUDA graph."""
        return library.neurons_function(), addressof(self.struct)

    def run(self) -> None:
        library.run_neurons(self.struct)

    @property
    def bytes_read(self) -> int:
        """Of weights, by all calls so far."""
        return self.struct.gate_bytes + self.struct.up_bytes + self.struct.down_bytes


def pack_bits(named_F: Tensor) -> Tensor:
    """int32 [F / 32 rounded up] of bool [F], as `NativeNeurons.named_W`."""
    words = -(-len(named_F) // 32)
    padded = named_F.new_zeros(32 * words)
    padded[: len(named_F)] = named_F
    place = torch.arange(32, device=named_F.device)
    values = (padded.view(words, 32).long() << place).sum(dim=1)
    return torch.where(values >= 1 << 31, values - (1 << 32), values).to(torch.int32)
