"""Parses the type of a file's matrices on the command line, in other programs' spellings too."""

from typing import Any

import click

from hotsplit.convert.options import OUTTYPES

_SAME = {
    "fp32": "f32",
    "float32": "f32",
    "fp16": "f16",
    "float16": "f16",
    "bfloat16": "bf16",
    "q8": "q8_0",
}
# Types that are read from other files and never written.
_READ_ONLY = ("iq", "tq")


class OuttypeChoice(click.Choice):
    """A type (f32, ..., q6_k) or mixture (q4_k_m, ...) in any case and spelling."""

    def __init__(self) -> None:
        super().__init__(OUTTYPES, case_sensitive=False)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        name = str(value).lower()
        if name not in self.choices and name.startswith(_READ_ONLY):
            self.fail(
                f"{name} cannot be written, wanted one of {', '.join(self.choices)}", param, ctx
            )
        return super().convert(_SAME.get(name, name), param, ctx)


OUTTYPE = OuttypeChoice()
