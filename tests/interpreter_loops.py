"""Lets Triton 3.6's interpreter run loops with a bound that is known only at run time: it converts
the bound, an array of one element, as numpy did before 2.4. Import it for this effect."""

from triton.runtime import interpreter

_patch_tensor = interpreter._patch_lang_tensor


def _patch(tensor, scope) -> None:
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


interpreter._patch_lang_tensor = _patch
