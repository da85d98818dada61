"""The orders of blocks that the layers of models have."""

from dataclasses import dataclass, replace
from typing import Any

from hotsplit.model.blocks import NormKind
from hotsplit.model.latent_experts import LATENT, LATENT_SUM, FromLatent, ToLatent
from hotsplit.model.operations import PositionWise
from hotsplit.model.route import ROUTER
from hotsplit.model.spec import Add, Attention, Block, LayerSpec, Mixer, Neurons, Norm, Route
from hotsplit.model.streams import (
    MixerToStreams,
    NeuronsToStreams,
    StreamsToMixer,
    StreamsToNeurons,
)


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """The feed-forward blocks of a layer with experts. `latent_size`: values of what these read, if
    it is not the hidden state (model/latent_experts.py)."""

    route: Route
    experts: Neurons
    shared: Neurons | None = None
    latent_size: int | None = None


def _feed_forward(neurons: Neurons | Mixture) -> tuple[tuple[Block, ...], tuple[str, ...]]:
    """The blocks of a feed-forward, and the values that they add to the hidden state."""
    if isinstance(neurons, Neurons):
        return (neurons,), (neurons.writes,)
    experts, shared = neurons.experts, (neurons.shared,) if neurons.shared is not None else ()
    written = (experts.writes, *(block.writes for block in shared))
    if neurons.latent_size is None:
        return (neurons.route, experts, *shared), written
    size = neurons.latent_size
    experts = replace(experts, reads=LATENT, writes=LATENT_SUM, latent_size=size)
    products = ToLatent(size=size), FromLatent(size=size)
    return (neurons.route, products[0], experts, *shared, products[1]), written


@dataclass(frozen=True, kw_only=True)
class Arrangement:
    """Makes a layer's blocks in one of the orders that models have, with norms of one kind."""

    norm: NormKind
    hidden_size: int
    epsilon: float

    def make_norm(self, name: str, reads: str, writes: str, **own: Any) -> Norm:
        numbers = {"kind": self.norm, "size": self.hidden_size, "epsilon": self.epsilon}
        return Norm(name=name, reads=reads, writes=writes, **{**numbers, **own})

    def pre_norm(
        self,
        mixer: Mixer | tuple[Mixer, ...],
        neurons: Neurons | Mixture,
        *,
        second: str = "ffn_norm",
        factor: float = 1.0,
    ) -> LayerSpec:
        """Norms before the mixer, or several side by side, and feed-forward (Llama). `second`: the
        name of the latter.
        `factor`: of both outputs, in the residual sums (Granite)."""
        mixers = mixer if isinstance(mixer, tuple) else (mixer,)
        blocks, outputs = _feed_forward(neurons)
        is_early = isinstance(neurons, Mixture) and neurons.route.reads == "x"  # the layer's input
        return LayerSpec(
            blocks=(
                *blocks[:is_early],
                self.make_norm("attn_norm", "x", "attn_in"),
                *mixers,
                Add(terms=("x", *(each.writes for each in mixers)), factor=factor),
                self.make_norm(second, "x", "ffn_in"),
                *blocks[is_early:],
                Add(terms=("x", *outputs), factor=factor),
            )
        )

    def single(self, block: Mixer | Neurons | Mixture) -> LayerSpec:
        """One block, after a norm (Nemotron-H)."""
        reads, blocks, outputs = "ffn_in", tuple[Block, ...](), tuple[str, ...]()
        if isinstance(block, Mixer):
            reads, blocks, outputs = block.reads, (block,), (block.writes,)
        else:
            blocks, outputs = _feed_forward(block)
        norm = self.make_norm("attn_norm", "x", reads)
        return LayerSpec(blocks=(norm, *blocks, Add(terms=("x", *outputs))))

    def post_norm(self, attention: Attention, neurons: Neurons) -> LayerSpec:
        """Norms after each residual sum (OPT 350M)."""
        return LayerSpec(
            blocks=(
                replace(attention, reads="x"),
                Add(terms=("x", "attn_out")),
                self.make_norm("attn_norm", "x", "ffn_in"),
                neurons,
                Add(terms=("ffn_in", "ffn_out")),
                self.make_norm("ffn_norm", "x", "x"),
            )
        )

    def output_norms(self, attention: Attention, neurons: Neurons) -> LayerSpec:
        """Norms of the outputs of attention and feed-forward alone (OLMo 2, arXiv 2501.00656)."""
        return LayerSpec(
            blocks=(
                replace(attention, reads="x"),
                self.make_norm("post_attention_norm", "attn_out", "attn_out"),
                Add(terms=("x", "attn_out"), writes="ffn_in"),
                neurons,
                self.make_norm("post_ffw_norm", "ffn_out", "ffn_out"),
                Add(terms=("ffn_in", "ffn_out")),
            )
        )

    def parallel(
        self,
        attention: Attention,
        neurons: Neurons | Mixture,
        *,
        norms: tuple[str, ...] = ("attn_norm",),
        factor: float = 1.0,
    ) -> LayerSpec:
        """Attention and feed-forward read one hidden state, through a norm or two, that of the
        feed-forward first (Falcon). `factor`: of the outputs of the latter (the average of Cohere
        2's mixtures)."""
        own = tuple(self.make_norm(name, "x", "attn_in") for name in norms[1:])
        blocks, outputs = _feed_forward(neurons)
        return LayerSpec(
            blocks=(
                self.make_norm(norms[0], "x", "ffn_in"),
                *own,
                attention if own else replace(attention, reads="ffn_in"),
                Add(terms=("x", "attn_out")),
                *blocks,
                Add(terms=("x", *outputs), factor=factor),
            )
        )

    def sandwich(
        self,
        attention: Attention,
        neurons: Neurons | Mixture,
        *,
        epsilon: float | None = None,
        scale: str = "",
        own: PositionWise | None = None,
    ) -> LayerSpec:
        """Norms before and after attention and feed-forward, all before the sums (Gemma).
        `epsilon`: of those after, if it is another (Muse-Glimmer). `scale`: the name of a factor of
        the layer's result (Gemma 4). `own`: an operation whose output is added at the layer's end,
        through a norm (the E-models of Gemma 4)."""
        blocks, written = self._normed(neurons)
        after = self if epsilon is None else replace(self, epsilon=epsilon)
        last: tuple[Block, ...] = (Add(terms=("x", "ffn_out"), scale=scale),)
        if own is not None:
            (added,) = own.outputs
            last = (
                Add(terms=("x", "ffn_out")),
                own,
                self.make_norm("post_norm", added, added),
                Add(terms=("x", added), scale=scale),
            )
        return LayerSpec(
            blocks=(
                self.make_norm("attn_norm", "x", "attn_in"),
                attention,
                after.make_norm("post_attention_norm", "attn_out", "attn_out"),
                Add(terms=("x", "attn_out")),
                *blocks,
                after.make_norm("post_ffw_norm", written, "ffn_out"),
                *last,
            )
        )

    def streams(
        self, mixer: Mixer, neurons: Neurons | Mixture, *, num_streams: int, rank: int
    ) -> LayerSpec:
        """Mixer and feed-forward read means of several streams, and add to all of them
        (Qwen3.8-Flash-Next)."""
        blocks, outputs = _feed_forward(neurons)
        mean: dict[str, Any] = {"num_streams": num_streams, "rank": rank}
        mean["epsilon"] = self.epsilon
        return LayerSpec(
            blocks=(
                StreamsToMixer(**mean),
                mixer,
                MixerToStreams(num_streams=num_streams),
                StreamsToNeurons(**mean),
                *blocks,
                *([Add(terms=outputs, writes="ffn_out")] if len(outputs) > 1 else []),
                NeuronsToStreams(num_streams=num_streams),
            )
        )

    def _normed(self, neurons: Neurons | Mixture) -> tuple[tuple[Block, ...], str]:
        """The feed-forward of `sandwich`, after norms, and the value that it writes. Of a mixture,
        the router, the experts and those that always fire each have a norm of their own, and the
        latter two another before they are added (Gemma 4)."""
        if isinstance(neurons, Neurons):
            return (self.make_norm("ffn_norm", "x", "ffn_in"), neurons), "ffn_out"
        shared = neurons.shared
        assert shared is not None
        factor = self.hidden_size**-0.5
        return (
            self.make_norm(ROUTER, "x", neurons.route.reads, part="scale", factor=factor),
            neurons.route,
            self.make_norm("pre_ffw_norm_2", "x", "ffn_in"),
            neurons.experts,
            self.make_norm("ffn_norm", "x", shared.reads),
            shared,
            self.make_norm("post_ffw_norm_1", shared.writes, shared.reads),
            self.make_norm("post_ffw_norm_2", "ffn_out", "ffn_out"),
            Add(terms=(shared.reads, "ffn_out"), writes=shared.reads),
        ), shared.reads
