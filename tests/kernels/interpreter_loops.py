"""Changes of Triton 3.6's interpreter; import it for this effect. It runs loops with a bound that
is known only at run time: it converts the bound, an array of one element, as numpy did before 2.4.
Its products are rounded from float64: as on a GPU, a row then does not depend on how many rows a
tile has, as it does in the sums of some processors' BLAS."""

import numpy as np
from triton import language as tl
from triton.runtime import interpreter

_patch_tensor = interpreter._patch_lang_tensor


def _patch(tensor, scope) -> None:
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


interpreter._patch_lang_tensor = _patch


def _values(factor) -> np.ndarray:
    """The interpreter stores bf16 as the upper half of f32."""
    if factor.dtype.scalar == tl.bfloat16:
        return (factor.data.astype(np.uint32) << 16).view(np.float32)
    return factor.data


def _dot(self, a, b, d, input_precision, max_num_imprecise_acc):
    product = np.matmul(_values(a), _values(b), dtype=np.float64) + d.data
    return interpreter.TensorHandle(product.astype(d.data.dtype), d.dtype.scalar)


interpreter.InterpreterBuilder.create_dot = _dot
