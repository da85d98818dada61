"""What a family is: a function of a checkpoint's config, and what the config leaves unsaid."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from sparkinfer.convert.blueprint import Blueprint
from sparkinfer.convert.config_reader import ConfigReader


@dataclass(frozen=True, kw_only=True)
class Family:
    """`defaults` are those of transformers' config class for the keys that `blueprint` reads and
    that may be missing; a key that is null in the file is null. A key that is not here is refused
    where it is missing, unless transformers' default for it is null."""

    blueprint: Callable[[ConfigReader], Blueprint]
    defaults: Mapping[str, object]
