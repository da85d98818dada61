"""Predicts which neurons of a layer fire, from the input of a feed-forward layer: in torch, as a
struct for C++, and as a GPU's kernels.

Letters: T tokens, D model width, F neurons of the layer, R rank, W words of F bits."""

from ctypes import Structure, c_float, c_int32
from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

from hotsplit.model.blocks import PredictorKind
from hotsplit.runtime.ops.device import Launcher
from hotsplit.runtime.ops.structs import MatrixStruct, Structs, members
from hotsplit.runtime.weights.matrix import Linear

_KINDS = ("linear", "relu")  # in the order of step.h's PredictorKind


@dataclass(frozen=True, kw_only=True)
class Predictor:
    """A layer's predictor; model_file.PredictorInfo has the arithmetic."""

    kind: PredictorKind
    down: Linear | None  # [R, D]; None: `up` is the only matrix
    up: Linear  # [F, R], or [F, D]
    threshold: float

    def scores(self, x_TD: Tensor) -> Tensor:
        """[T, F] for inputs [T, D], on the CPU; a neuron is predicted if its score is above the
        threshold or NaN."""
        if self.down is None:
            return self.up.apply(x_TD)
        inner_TR = self.down.apply(x_TD)
        return self.up.apply(F.relu(inner_TR) if self.kind == "relu" else inner_TR)

    @property
    def num_bytes(self) -> int:
        return self.up.num_bytes + (0 if self.down is None else self.down.num_bytes)


class PredictorStruct(Structure):
    _fields_ = [*members(MatrixStruct, "down up"), ("kind", c_int32), ("threshold", c_float)]


def predictor_struct(structs: Structs, predictor: Predictor | None) -> PredictorStruct:
    if predictor is None:
        return PredictorStruct()
    down = predictor.down
    return PredictorStruct(
        down=MatrixStruct() if down is None else structs.linear(down),
        up=structs.linear(predictor.up),
        kind=_KINDS.index(predictor.kind),
        threshold=predictor.threshold,
    )


def launch_predict(
    on: Launcher,
    predictor: Predictor,
    x_D: Tensor,
    inner_R: Tensor,
    named_W: Tensor,
    copy_W: Tensor | None = None,
) -> None:
    """Writes the bits of the predicted neurons, int32 [F / 32 rounded up] for each row, and again
    to `copy_W` in pinned memory. `inner_R`: memory for the product with `down`, if there is one."""
    up = predictor.up
    if predictor.down:
        on.dot(predictor.down, x_D, inner_R, has_relu=predictor.kind == "relu")
        x_D = inner_R
    predict, threshold = on.kernels.predict, predictor.threshold
    on.run(predict, up.weight, up.bias_N, x_D, threshold, named_W, copy_W)
