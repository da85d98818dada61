"""Parses the type of a file's matrices on the command line, in other programs' spellings too."""

from typing import Any

import click

from hotsplit.commands.options.shared import say
from hotsplit.model.weight_types import ENCODED_NAMES

_SAME = {"fp32": "f32", "float32": "f32", "fp16": "f16", "float16": "f16", "bfloat16": "bf16",
         "q8": "q8_0"}  # fmt: skip
# llama.cpp's mixtures give some matrices a larger type than the rest.
_M = "some of attn_v and ffn_down, and the output head, in q6_k (see convert --tensor-type)"
_S = "the output head in q6_k"
_MIXTURES = {
    "q4_k_m": ("q4_k", _M), "q5_k_m": ("q5_k", _M),
    "q4_k_s": ("q4_k", f"a few in q5_k and {_S}"), "q5_k_s": ("q5_k", _S),
}  # fmt: skip
# Types that are read from other files and never written.
_READ_ONLY = ("q4_1", "q5_0", "q5_1", "q2_k", "q3_k", "iq", "tq", "mxfp4")


class OuttypeChoice(click.Choice):
    """A type (f32, f16, ..., q6_k) in upper or lower case, or by another program's name for it."""

    def __init__(self) -> None:
        super().__init__(ENCODED_NAMES, case_sensitive=False)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        name = str(value).lower()
        if name in _MIXTURES:
            plain, others = _MIXTURES[name]
            say(f"note: {name} is read as {plain} for all matrices; llama.cpp stores {others}")
            name = plain
        if name.startswith(_READ_ONLY):
            self.fail(
                f"{name} cannot be written, wanted one of {', '.join(self.choices)}", param, ctx
            )
        return super().convert(_SAME.get(name, name), param, ctx)


OUTTYPE = OuttypeChoice()
