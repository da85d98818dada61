"""Keys of soft caps of scores and logits (Gemma 2, arXiv 2408.00118) in configs and GGUFs."""

import numpy as np

from hotsplit.families.config_reader import ConfigReader
from hotsplit.families.key_reader import KeyReader
from hotsplit.files.gguf_file import Value

SCORE_CAP, LOGIT_CAP = "attn_logit_softcapping", "final_logit_softcapping"


def cap_key(read: ConfigReader, key: str) -> dict[str, Value]:
    """The key; 0 if it is null in the config."""
    is_capped = read.values.get(key) is not None
    return {key: np.float32(read.positive(key) if is_capped else 0.0)}


def cap_of_keys(read: KeyReader, key: str, default: float = 0.0) -> float | None:
    """None if it is 0."""
    key = f"{read.graph.name}.{key}"
    return None if read.number(key, default) == 0 else read.positive(key, default)
