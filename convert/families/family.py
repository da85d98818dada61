"""A family: a function of a checkpoint's config, and defaults for what the config leaves out."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hotsplit.convert.blueprint import Blueprint
from hotsplit.convert.config_reader import ConfigReader


@dataclass(frozen=True, kw_only=True)
class Family:
    """`defaults` are those of transformers' config class for the keys that `blueprint` reads and
    that may be missing; a key that is null in the file stays null. A missing key that is not listed
    here is refused, unless transformers' default for it is null or the reader has its own (as for
    rope_theta)."""

    blueprint: Callable[[ConfigReader], Blueprint]
    defaults: Mapping[str, object]
