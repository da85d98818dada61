"""Several tokens on the CPU, each through the neurons that fire for it, in one native call.

A dense product also computes what is masked afterwards. Where a tenth of all pairs of a token and a
neuron fire, this call takes about a third of its time; but a pair takes longer here than there,
so it is for few pairs only (MOST_PAIRS). The reference is feed_forward.py.

Letters: T tokens, D model width, N neurons of a part, C chunks of K columns."""

from ctypes import Structure, c_float, c_int32, c_int64, c_void_p
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from sparkinfer.runtime.kernels.cpu import library
from sparkinfer.runtime.native_structs import ACTIVATIONS, BlockStruct, MatrixStruct, Structs
from sparkinfer.runtime.neuron_block import Gate, NeuronBlock

CHUNK = 128  # PASS_CHUNK of kernels.h
# The share of pairs above which a dense product is faster, by instruction set. Measured on a Xeon at
# 2.5 GHz against MKL with the same one, 512 tokens of a layer of width 2048 in f16, gates included:
# where 0.1, 0.4 and 0.5 of the pairs fire, exact mode takes 0.55, 0.88 and 1.02 of the dense time
# with AVX2, 0.57, 1.0 and 1.18 with AVX-512, and without either 0.41, 0.69 and 0.79. Fewer tokens
# gain no less.
MOST_PAIRS = {"avx512vnni": 0.35, "avx512": 0.35, "avx2": 0.45, "generic": 0.6}


class PassStruct(Structure):
    _fields_ = [("block", BlockStruct), ("x", c_void_p), ("gate", c_void_p), ("named", c_void_p),
                ("y", c_void_p), ("workspace", c_void_p), ("width", c_int64),
                ("num_tokens", c_int64), ("gate_stride", c_int64), ("named_stride", c_int64),
                ("most", c_int64), ("num_pairs", c_int64), ("num_named", c_int64),
                ("num_open", c_int64), ("activation", c_int32), ("threshold", c_float),
                ("num_workers", c_int32), ("unused", c_int32)]  # fmt: skip


class NumNeurons(NamedTuple):
    """Of a part: those that any token named, those that fired for any."""

    named: int
    open: int


def is_worth(block: NeuronBlock) -> bool:
    """Whether these neurons are on the CPU, which multiplies no faster what is not f32."""
    matrices = [block.gate.weight, block.down] + ([block.up.weight] if block.up else [])
    return all(m.is_native and m.tile_dtype == torch.float32 for m in matrices)


class NativePass:
    """Some tokens, and what the neurons of one block add to them."""

    def __init__(self, x_TD: Tensor) -> None:
        assert x_TD.dtype == torch.float32, x_TD.dtype
        self._num_tokens, self._width = x_TD.shape
        padded = F.pad(x_TD, (0, -self._width % CHUNK))
        self._x_CTK = padded.unflatten(1, (-1, CHUNK)).transpose(0, 1).contiguous()
        self._y_CTK: Tensor | None = None  # nothing yet

    def add_open(self, part: NeuronBlock, gate: Gate, value_TN: Tensor) -> NumNeurons | None:
        """Adds what the neurons give whose values (Gate.before_threshold) are above the threshold;
        overwrites them. None where those are too many: then nothing was done."""
        assert value_TN.shape == (self._num_tokens, len(part.id_N)) and value_TN.stride(1) == 1
        assert value_TN.dtype == torch.float32, value_TN.dtype
        struct = PassStruct(gate=value_TN.data_ptr(), gate_stride=value_TN.stride(0))
        return self._run(struct, part, gate)

    def add_named(self, part: NeuronBlock, gate: Gate, named_TN: Tensor) -> NumNeurons | None:
        """The same with the gates of the neurons that are named for each token."""
        assert named_TN.shape == (self._num_tokens, len(part.id_N)) and named_TN.stride(1) == 1
        assert named_TN.dtype == torch.bool
        struct = PassStruct(named=named_TN.data_ptr(), named_stride=named_TN.stride(0))
        return self._run(struct, part, gate)

    def add_to(self, y_TD: Tensor) -> None:
        if self._y_CTK is not None:
            y_TD += self._y_CTK.transpose(0, 1).flatten(1)[:, : self._width]

    def _run(self, struct: PassStruct, part: NeuronBlock, gate: Gate) -> NumNeurons | None:
        structs, num_neurons = Structs(), len(part.id_N)
        if self._y_CTK is None:
            self._y_CTK = torch.zeros_like(self._x_CTK)
        struct.block = BlockStruct(
            gate=structs.linear(part.gate),
            up=MatrixStruct() if part.up is None else structs.linear(part.up),
            down=structs.matrix(part.down),
            row=None if part.row_N is None else structs.indices(part.row_N),
            num_neurons=num_neurons,
        )
        struct.x, struct.y = self._x_CTK.data_ptr(), self._y_CTK.data_ptr()
        struct.num_tokens, struct.width = self._num_tokens, self._width
        struct.most = int(MOST_PAIRS[library.level()] * self._num_tokens * num_neurons)
        struct.activation, struct.threshold = ACTIVATIONS.index(gate.activation), gate.threshold
        struct.workspace = structs.workspace(library.pass_bytes(struct))
        library.run_pass(struct)
        if struct.num_pairs > struct.most:
            return None
        return NumNeurons(struct.num_named, struct.num_open)
