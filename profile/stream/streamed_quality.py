"""Compares modes of a model that does not fit into memory with the dense model.

The dense model and each mode take one pass over the weights, layer by layer; then the head runs for
all of them.

Letters: N tokens of all windows, T tokens at a time, D model width, V vocabulary."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.costs.pass_length import LOGITS_CHUNK
from hotsplit.files.gguf_file import release
from hotsplit.measure.evaluate.comparison import Comparison
from hotsplit.measure.evaluate.quality import EvalReport, ShareCounter, report_of
from hotsplit.model.modes import Mode
from hotsplit.profile.memory import room_of
from hotsplit.profile.stream.streaming import CPU, LayerStream, StreamPlan
from hotsplit.runtime.model.loader import Builder
from hotsplit.runtime.model.placement import Placement
from hotsplit.runtime.ops.head import logits_of
from hotsplit.runtime.weights.matrix import Linear, matrix_of

ROOM_SHARE = 1 / 4  # share of the room for the hidden states of all passes


def compare_streamed(
    dense: ModelFile,
    others: Sequence[tuple[ModelFile, Mode]],
    plan: StreamPlan,
    windows: Sequence[Tensor],
    max_tokens: int,
    dense_shares: ShareCounter,
) -> list[EvalReport]:
    """Does what quality.compare_all does, on at most `max_tokens` tokens, and fewer if there is no
    room for the hidden states of all; [] if fewer than two fit."""
    room = room_of(plan.device, plan.max_memory_bytes)
    row_bytes = (1 + len(others)) * plan.needs.state_row_bytes
    count = min(max_tokens, int(ROOM_SHARE * room.num_bytes / row_bytes))
    chosen: list[Tensor] = []
    for ids_T in windows:
        piece_T = ids_T[: count - sum(map(len, chosen))]
        if len(piece_T) > 1:
            chosen.append(piece_T)
    if not chosen:
        return []
    shares = [ShareCounter(model) for model, _ in others]
    states = [_hidden(dense, "dense", plan, chosen, dense_shares)]
    for (model, mode), each in zip(others, shares, strict=True):
        states.append(_hidden(model, mode, plan, chosen, each))
    comparison = _compared(_Head(dense), states, chosen)
    return [
        report_of(comparison, number, mode, model, shares[number])
        for number, (model, mode) in enumerate(others)
    ]


def _compared(head: "_Head", states: Sequence[Tensor], windows: Sequence[Tensor]) -> Comparison:
    """Compares the hidden states after the last layer, the dense model's first."""
    comparison, start = Comparison(len(states) - 1), 0
    for ids_T in windows:
        comparison.begin_window()
        stop = start + len(ids_T) - 1  # the last token has no successor to predict
        for at in range(start, stop, LOGITS_CHUNK):
            piece = slice(at, min(at + LOGITS_CHUNK, stop))
            targets_T = ids_T[piece.start - start + 1 : piece.stop - start + 1]
            want_TV, *got = (head.logits(state_ND[piece]) for state_ND in states)
            comparison.add(want_TV, got, targets_T)
        start += len(ids_T)
    return comparison


def _hidden(
    model: ModelFile, mode: Mode, plan: StreamPlan, windows: Sequence[Tensor], shares: ShareCounter
) -> Tensor:
    """Hidden states after the last layer, f32 [N, D] on the CPU; `shares` observes the neurons."""
    last, pieces = model.spec.num_layers - 1, []
    with (
        LayerStream(model, plan, mode=mode) as stream,
        stream.observe(
            lambda name, layer, x_TD: pieces.append(x_TD.to(CPU, copy=True)),
            lambda name, layer: name == "layer_out" and layer == last,
        ),
        stream.observe(shares.observe, shares.wants),
    ):
        stream.run(windows)
    return torch.cat(pieces)


class _Head:
    """The norm and the output matrix of a model, on the CPU; mapped pages are dropped after use."""

    def __init__(self, model: ModelFile) -> None:
        name = "token_embd.weight" if model.is_tied else "output.weight"
        self.entry = model.tensors[name]
        self.matrix = Linear(weight=matrix_of(self.entry, CPU))
        placement = Placement.on_one_device(model.spec.num_layers, CPU)
        self.norm = Builder(model, placement, "dense", 1).output_norm(CPU)
        self.spec = model.spec

    @torch.inference_mode()
    def logits(self, x_TD: Tensor) -> Tensor:
        """f32 [T, V]."""
        normed_TD = self.norm.apply(x_TD) if self.norm else x_TD
        logits_TV = logits_of(normed_TD, self.matrix, self.spec)
        release(self.entry)
        return logits_TV
