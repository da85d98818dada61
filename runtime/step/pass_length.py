"""How many tokens a pass takes at most on a GPU whose memory turns out to be short."""

import logging
from dataclasses import dataclass

import torch

from hotsplit.costs.pass_length import PREFILL_CHUNK

log = logging.getLogger(__name__)


@dataclass
class PassLength:
    """The most tokens of a pass, halved for good when a pass does not fit into a GPU's memory."""

    most: int = PREFILL_CHUNK

    def shorten(self, num_tokens: int) -> None:
        """Notes that a pass of so many tokens does not fit, and frees what it has taken."""
        self.most = min(self.most, num_tokens // 2)
        log.warning(
            "a GPU's memory is short for a pass of %d tokens: passes have at most %d from now on, which"
            " makes prompts slower",
            num_tokens,
            self.most,
        )
        torch.cuda.empty_cache()
