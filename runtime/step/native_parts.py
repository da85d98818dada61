"""The host's parts of a hybrid decode step, each a C function that a CUDA graph calls: layers that
are wholly on the CPU in one call, the cold neurons of a divided layer in another.

All of them share a few vectors (`HostBuffers`), which is safe because a chain of events orders
them: one layer's part has finished when the next one's starts.

Letters: D model width, F neurons of a layer, V vocabulary."""

from collections.abc import Sequence
from ctypes import POINTER, Structure, addressof, c_int32, c_int64, c_void_p, pointer
from dataclasses import dataclass

import torch
from torch import Tensor

from sparkinfer.runtime.device.streams import HostNode
from sparkinfer.runtime.kernels.cpu import library
from sparkinfer.runtime.model.layers import Weights
from sparkinfer.runtime.model.native_neurons import NativeNeurons
from sparkinfer.runtime.model.native_structs import NotNative
from sparkinfer.runtime.step.native_step import LayerStruct, StepBuilder, StepStruct

# The enum Part of kernels/cpu/step.h.
_EMBED, _LAYERS, _FRONT, _BACK, _HEAD = range(5)


class PartStruct(Structure):
    _fields_ = [("step", POINTER(StepStruct)), ("token", c_void_p), ("position", c_void_p),
                ("x", c_void_p), ("ffn_input", c_void_p), ("named", c_void_p),
                ("ffn_out", c_void_p * 2), ("logits", c_void_p),
                ("begin", c_int64), ("end", c_int64),
                ("part", c_int32), ("is_first", c_int32)]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class HostBuffers:
    """Vectors on the host, pinned if there is a GPU."""

    token_1: Tensor  # int64
    position_1: Tensor  # int64
    x_D: Tensor  # the hidden state
    ffn_input_D: Tensor  # of the latest layer
    named_W: Tensor  # int32 [F / 32 rounded up]
    cold_D: Tensor  # sum of the cold neurons
    hot_D: Tensor  # sum of the hot ones, for a layer whose attention is on the CPU
    logits_V: Tensor

    @classmethod
    def of(cls, width: int, num_neurons: int, vocab_size: int, *, is_pinned: bool) -> "HostBuffers":
        def zeros(count: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(count, dtype=dtype, pin_memory=is_pinned)

        return cls(
            token_1=zeros(1, torch.int64),
            position_1=zeros(1, torch.int64),
            x_D=zeros(width),
            ffn_input_D=zeros(width),
            named_W=zeros(-(-num_neurons // 32), torch.int32),
            cold_D=zeros(width),
            hot_D=zeros(width),
            logits_V=zeros(vocab_size),
        )


@dataclass(frozen=True, kw_only=True)
class NativeParts:
    """The CPU's parts of a step; `row_L` maps layers to their indices in `step`."""

    step: StepStruct
    host: HostBuffers
    row_L: dict[int, int]
    kept: tuple[object, ...]

    @classmethod
    def of(
        cls,
        weights: Weights,
        whole: Sequence[int],
        fronts: Sequence[int],
        input_layer_offset: int,
        host: HostBuffers,
        *,
        has_embedding: bool,
        has_head: bool,
    ) -> "NativeParts":
        """Builds the parts. `whole` are the layers entirely on the CPU, `fronts` those with
        attention there and neurons elsewhere. Raises NotNative for what the kernels do not
        cover."""
        if not library.is_available():
            raise NotNative("the C++ kernels are not built")
        builder = StepBuilder()
        layers: list[LayerStruct] = []
        rows: dict[int, int] = {}
        for index in sorted([*whole, *fronts]):
            layer = weights.layers[index]
            rows[index] = len(layers)
            layers.append(builder.layer(layer, layer.ffn.blocks if index in whole else ()))
        step = builder.frame(weights, layers, input_layer_offset)
        if has_embedding:
            step.embedding = builder.matrix(weights.embedding)
        if has_head:
            step.head = builder.linear(weights.head)
            step.output_norm = builder.norm(weights.output_norm)
        step.workspace = builder.workspace(library.parts_bytes(step))
        return cls(step=step, host=host, row_L=rows, kept=tuple(builder.kept))

    def embed(self) -> HostNode:
        return self._node(_EMBED, reads=("token_1", "position_1"), writes=("x_D",))

    def head(self) -> HostNode:
        return self._node(_HEAD, reads=("x_D",), writes=("logits_V",))

    def layers(self, first: int, count: int) -> HostNode:
        """The node for `count` layers from `first` on, all on the CPU."""
        return self._node(
            _LAYERS,
            first,
            count,
            reads=("position_1", "x_D", "ffn_input_D"),
            writes=("x_D", "ffn_input_D"),
        )

    def front(self, layer: int, named_W: Tensor) -> HostNode:
        """The node for a layer up to its neurons' input and its predictor's output, `named_W`."""
        return self._node(
            _FRONT,
            layer,
            reads=("position_1", "x_D", "ffn_input_D"),
            writes=("ffn_input_D",),
            named_W=named_W,
        )

    def back(self, layer: int, *, has_cold: bool) -> HostNode:
        """The node for the rest of a layer, from the sums of its hot and, if any, cold neurons."""
        outs = ("hot_D", "cold_D") if has_cold else ("hot_D",)
        return self._node(_BACK, layer, reads=outs, writes=("x_D",), outs=outs)

    def _node(
        self,
        part: int,
        layer: int | None = None,
        count: int = 1,
        *,
        reads: tuple[str, ...],
        writes: tuple[str, ...],
        outs: tuple[str, ...] = (),
        named_W: Tensor | None = None,
    ) -> HostNode:
        host = self.host
        named = [] if named_W is None else [named_W]
        begin = 0 if layer is None else self.row_L[layer]
        found = [getattr(host, name).data_ptr() for name in outs]
        struct = PartStruct(
            step=pointer(self.step),
            token=host.token_1.data_ptr(),
            position=host.position_1.data_ptr(),
            x=host.x_D.data_ptr(),
            ffn_input=host.ffn_input_D.data_ptr(),
            named=(host.named_W if named_W is None else named_W).data_ptr(),
            ffn_out=(c_void_p * 2)(*found),
            logits=host.logits_V.data_ptr(),
            begin=begin,
            end=begin + count,
            part=part,
            is_first=layer == 0,
        )
        return HostNode(
            function=library.part_function(),
            argument=addressof(struct),
            reads=tuple(getattr(host, name) for name in reads),
            writes=(*(getattr(host, name) for name in writes), *named),
            kept=(struct, self, *named),
        )


def neuron_node(neurons: NativeNeurons) -> HostNode:
    """The node for the cold neurons of a layer."""
    function, argument = neurons.node
    reads = (neurons.x_D,) if neurons.named_W is None else (neurons.x_D, neurons.named_W)
    writes = (neurons.y_D,) if neurons.fired_W is None else (neurons.y_D, neurons.fired_W)
    return HostNode(
        function=function, argument=argument, reads=reads, writes=writes, kept=(neurons,)
    )
