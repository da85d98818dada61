"""The draft block of a model (multi-token prediction; DeepSeek-V3, arXiv 2412.19437): a further
layer with keys and values of its own, which guesses the token after the next one.

At position p it reads the token at p + 1, which is known by then, and the model's hidden state at
p after the output norm, and its logits are a guess of the token at p + 2. For a further guess it
reads its own guess, and its own hidden state after its own output norm, at p + 1. So it is a model
of one layer (`ModelSpec.draft`) whose embedding is joined with a hidden state (`DraftInput`).

Its tensors are those of a layer after the last one, with llama.cpp's names (`nextn`)."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from hotsplit.model.blocks import Norm, NormKind, Shapes
from hotsplit.model.operations import PositionWise
from hotsplit.model.spec import LayerSpec, ModelSpec

JOIN, OF_EMBEDDING, OF_HIDDEN, OUTPUT_NORM = (
    f"nextn.{name}" for name in ("eh_proj", "enorm", "hnorm", "shared_head_norm")
)
# Tensors of its own in place of the model's, which it may have: their names, and the model's.
OWN = {
    "nextn.embed_tokens.weight": "token_embd.weight",
    "nextn.shared_head_head.weight": "output.weight",
}
EMBEDDED, HIDDEN = "embedded", "hidden"  # the values that it joins


@dataclass(frozen=True, kw_only=True)
class DraftInput(PositionWise):
    """x_D = W [norm(e_D) ; norm(h_D)], of the token's embedding and a hidden state. A loaded model
    has `times` h_D, because its output norm multiplies the logits, too."""

    kind: ClassVar[str] = "draft input"
    room: ClassVar[str] = "draft_input"
    inputs: ClassVar[tuple[str, ...]] = (EMBEDDED, HIDDEN)
    outputs: ClassVar[tuple[str, ...]] = ("x",)
    norm: Norm  # of either, but for the name
    times: float = 1.0

    def shapes(self, hidden_size: int) -> Shapes:
        norms = {f"{name}.weight": (hidden_size,) for name in (OF_EMBEDDING, OF_HIDDEN)}
        return {f"{JOIN}.weight": (hidden_size, 2 * hidden_size), **norms}

    def values(self, hidden_size: int) -> Mapping[str, int]:
        return {"x": hidden_size, HIDDEN: hidden_size}


def with_draft_block(
    spec: ModelSpec, layer: LayerSpec | None = None, output_norm: NormKind | None = None
) -> ModelSpec:
    """The model with a draft block of this layer, by default one like the last that attends, but it
    attends to all tokens and rotates (src/models/cohere2moe.cpp of llama.cpp). `output_norm`: its
    kind; None: the model's."""
    if layer is None:
        layer = next(layer for layer in reversed(spec.layers) if layer.attention is not None)
        layer = layer.with_attention(window=None, rotary=spec.rotary)
    norm = spec.output_norm
    assert norm is not None and norm.kind != "layer" and not spec.first and not spec.last
    block = replace(
        spec,
        layers=(layer,),
        first=(DraftInput(norm=norm, times=spec.logit_scale),),
        output_norm=replace(norm, name=OUTPUT_NORM, kind=output_norm or norm.kind),
    )
    return replace(spec, draft=block)
