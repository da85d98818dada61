"""Measures, at load, from how many tokens on it pays to stream cold weights to a GPU.

The copy of a piece takes the same time for any number of tokens and overlaps with the GPU's
product; the CPU's product takes longer with more tokens. Copies are timed as in a pass, and
products with the layer's own code on the same neurons.

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
    """The smallest power of two from 2 to `most` for which the CPU takes longer than the copy; `most` + 1
    if there is none, so that the CPU always computes."""
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
