"""Soft caps of scores and of logits (Gemma 2, arXiv 2408.00118): their keys in configs and GGUFs, which have
the same names."""

from typing import TYPE_CHECKING

from hotsplit.families.config_reader import ConfigReader

if TYPE_CHECKING:
    from hotsplit.families.key_reader import KeyReader

SCORE_CAP, LOGIT_CAP = "attn_logit_softcapping", "final_logit_softcapping"


def cap_of_config(read: ConfigReader, key: str) -> float | None:
    """None if it is null."""
    return None if read.values.get(key) is None else read.positive(key)


def cap_of_keys(read: "KeyReader", key: str, default: float = 0.0) -> float | None:
    """None if it is 0."""
    key = f"{read.graph.name}.{key}"
    return None if read.number(key, default) == 0 else read.positive(key, default)
