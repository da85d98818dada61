"""Measures the number of tokens from which a pass streams cold weights to a GPU.

The CPU's time for cold neurons grows with the tokens, the time of their copy does not. Both are
measured for the first piece of one layer: the copy, which allocates the stream's buffers, and the
CPU's product with the layer's own code.

Letters: T tokens, D model width."""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from sparkinfer.runtime.model.feed_forward import FeedForward, Traffic
from sparkinfer.runtime.prefill.cold_stream import ColdStream

_ROUNDS = 3


@torch.inference_mode()
def least_tokens_of(stream: ColdStream, ffn: FeedForward, layer: int, most: int) -> int:
    """The smallest power of two from 2 to `most` for which the CPU takes longer than the copy, each
    by the shortest of three timings; `most` + 1 if there is none.

    `most` is the length of the longest pass."""
    block = stream.blocks[layer]
    start, stop = next(block.pieces(stream.piece_bytes))
    copy_s = min(_seconds(lambda: stream.copy_once(layer)) for _ in range(_ROUNDS))
    part = block.block.part(start, stop)
    width = block.block.down.width
    ffn = replace(ffn, traffic=Traffic())  # measurements do not count
    tokens = 2
    while tokens <= most:
        x_TD = torch.randn(tokens, width, generator=torch.Generator().manual_seed(0))
        if min(_seconds(partial(ffn.on_cpu, part, x_TD)) for _ in range(_ROUNDS)) > copy_s:
            return tokens
        tokens *= 2
    return most + 1


def _seconds(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began
