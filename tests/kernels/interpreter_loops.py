"""Changes of Triton 3.6's interpreter; import it for this effect. It runs loops with a bound that
is known only at run time: it converts the bound, an array of one element, as numpy did before 2.4.
It patches Triton's language once, and finds integers that overflow by one operation of numpy.
Its products are rounded from float64: as on a GPU, a row then does not depend on how many rows a
tile has, as it does in the sums of some processors' BLAS."""

import numpy as np
from triton import language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

_patch_lang, _patch_tensor = interpreter._patch_lang, interpreter._patch_lang_tensor
_patched_for = set()  # functions


def _patch(tensor, scope) -> None:
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


def _patch_once(fn) -> interpreter._LangPatchScope:
    """Triton patches its language for every call, of kernels and of what they call, which takes a
    third of the time. What is patched for one function remains."""
    if fn not in _patched_for:
        _patched_for.add(fn)
        _patch_lang(fn)
    return interpreter._LangPatchScope()  # nothing to restore


def _check_overflow(self, left, right, operation) -> None:
    kind = left.type.scalar
    if kind.int_bitwidth < 64:
        compute = {"add": np.add, "sub": np.subtract, "mul": np.multiply}[operation.__name__]
        exact = compute(left.handle.data, right.handle.data, dtype=np.int64)
        low, high = kind.get_int_min_value(), kind.get_int_max_value()
        assert low <= exact.min() and exact.max() <= high, f"{kind} overflows: {compute.__name__}"


interpreter._patch_lang_tensor = _patch
interpreter._patch_lang = _patch_once


def _values(factor) -> np.ndarray:
    """The interpreter stores bf16 as the upper half of f32."""
    if factor.dtype.scalar == tl.bfloat16:
        return (factor.data.astype(np.uint32) << 16).view(np.float32)
    return factor.data


def _dot(self, a, b, d, input_precision, max_num_imprecise_acc):
    product = np.matmul(_values(a), _values(b), dtype=np.float64) + d.data
    return interpreter.TensorHandle(product.astype(d.data.dtype), d.dtype.scalar)


interpreter.InterpreterBuilder.create_dot = _dot
TritonSemantic.binary_op_sanitize_overflow_impl = _check_overflow
