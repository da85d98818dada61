"""A model that does not fit, with predictors or thresholds, against its dense self.

Two passes over the weights, layer by layer, then the head for both. What this module does not
know: where the predictors came from.

Letters: N tokens of all windows, D model width."""

from collections.abc import Sequence

import torch
from torch import Tensor

from sparkinfer.budget import LOGITS_CHUNK
from sparkinfer.gguf_file import release
from sparkinfer.model_file import ModelFile
from sparkinfer.profile.memory import room_of
from sparkinfer.profile.quality import Comparison, EvalReport, ShareCounter, nothing
from sparkinfer.profile.streaming import CPU, LayerStream, StreamPlan
from sparkinfer.runtime.model.feed_forward import Mode
from sparkinfer.runtime.model.observers import Observe, Wants
from sparkinfer.runtime.weights.matrix import Linear, matrix_of

ROOM_SHARE = 1 / 4  # of the room, for the hidden states of both passes


def compare_streamed(
    dense: ModelFile,
    other: ModelFile,
    mode: Mode,
    plan: StreamPlan,
    windows: Sequence[Tensor],
    max_tokens: int,
) -> EvalReport | None:
    """As quality.compare, on as many of the windows as there is room for; None for none."""
    room = room_of(plan.device, plan.max_memory_bytes)
    count = min(max_tokens, int(ROOM_SHARE * room.num_bytes / (2 * plan.needs.state_row_bytes)))
    chosen: list[Tensor] = []
    for ids_T in windows:
        piece_T = ids_T[: count - sum(map(len, chosen))]
        if len(piece_T) > 1:
            chosen.append(piece_T)
    if not chosen:
        return None
    shares = ShareCounter(other)
    want_ND = _hidden(dense, "dense", plan, chosen, nothing, shares.wants)
    got_ND = _hidden(other, mode, plan, chosen, shares.observe, shares.wants)
    comparison = Comparison()
    head = _Head(dense)
    start = 0
    for ids_T in chosen:
        stop = start + len(ids_T) - 1  # nothing follows the last token
        for at in range(start, stop, LOGITS_CHUNK):
            piece = slice(at, min(at + LOGITS_CHUNK, stop))
            targets_T = ids_T[piece.start - start + 1 : piece.stop - start + 1]
            comparison.add(head.logits(want_ND[piece]), head.logits(got_ND[piece]), targets_T)
        start += len(ids_T)
    return comparison.report(mode, shares)


def _hidden(
    model: ModelFile,
    mode: Mode,
    plan: StreamPlan,
    windows: Sequence[Tensor],
    observe: Observe,
    wants: Wants,
) -> Tensor:
    """f32 [N, D] on the CPU, behind the last layer; observed, as quality.compare does it."""
    last, pieces = model.shape.num_layers - 1, []
    with LayerStream(model, plan, mode=mode) as stream:
        with stream.observe(
            lambda name, layer, x_TD: pieces.append(x_TD.to(CPU, copy=True)),
            lambda name, layer: name == "layer_out" and layer == last,
        ):
            with stream.observe(observe, wants):
                stream.run(windows)
    return torch.cat(pieces)


class _Head:
    """The norm and the output matrix of a model, on the CPU; mapped pages are given back."""

    def __init__(self, model: ModelFile) -> None:
        name = "token_embd.weight" if model.is_tied else "output.weight"
        self.entry = model.tensors[name]
        self.matrix = Linear(weight=matrix_of(self.entry, CPU))
        self.norm = LayerStream.output_norm(model)

    @torch.inference_mode()
    def logits(self, x_TD: Tensor) -> Tensor:
        """f32 [T, V]."""
        logits_TV = self.matrix.apply(self.norm.apply(x_TD) if self.norm else x_TD)
        release(self.entry)
        return logits_TV
