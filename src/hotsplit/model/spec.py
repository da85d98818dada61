"""What a model is: an embedding, a tuple of layers, a head. A layer is a tuple of blocks in the
order in which they run, each with its own numbers, so two layers of a model may differ in
everything. All other facts of a layer (names and shapes of tensors, bytes, kernel launches, the
operations of a step) are folds over these blocks.

A block reads and writes named values of its layer: `x` is the hidden state, from layer to layer;
`attn_in`, `attn_out`, `ffn_in` and `ffn_out` are what their names say, also where a recurrent block
is in the place of attention; `named` are the neurons that a predictor selects, `routed` the experts
that a router chooses, `shared_out` is the output of shared experts. A norm may write the value that
it reads.

Letters: D hidden size, F neurons of a layer, E experts, H heads, K key-value heads, W head dim, R
predictor rank."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from hotsplit.model.attention import Attention
from hotsplit.model.blocks import Add, Norm, Predict
from hotsplit.model.modes import Mode, computes_all, runs_predictors
from hotsplit.model.neurons import NO_NEURONS, Activation, Neurons
from hotsplit.model.operations import TOKEN, BlockOp, PositionWise, Recurrent, Stateful
from hotsplit.model.rope import NO_SCALING, RopeScaling, Rotary
from hotsplit.model.route import Route
from hotsplit.model.together import Together

# Of the hidden states of a text: their mean, the first token's or the last one's
# (sentence-transformers).
Pooling = Literal["mean", "cls", "last"]


ATTN_OUT = "attn_out"
Mixer = Attention | Recurrent
Block = Norm | Attention | Predict | Route | Neurons | Add | BlockOp


def read_by(block: Block) -> tuple[str, ...]:
    """The values that a block reads."""
    if isinstance(block, Add):
        return block.terms
    return block.inputs if isinstance(block, BlockOp) else (block.reads,)


def written_by(block: Block) -> tuple[str, ...]:
    """The values that a block writes."""
    return block.outputs if isinstance(block, BlockOp) else (block.writes,)


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    blocks: tuple[Block, ...]

    @cached_property
    def mixers(self) -> tuple[Mixer, ...]:
        """The blocks that read other tokens: attention, a recurrent one, both (Falcon-H1) or none
        (Nemotron-H)."""
        return tuple(block for block in self.blocks if isinstance(block, Mixer))

    @cached_property
    def attention(self) -> Attention | None:
        return next((block for block in self.mixers if isinstance(block, Attention)), None)

    @cached_property
    def recurrent(self) -> Recurrent | None:
        return next((block for block in self.mixers if isinstance(block, Recurrent)), None)

    @cached_property
    def neurons(self) -> Neurons:
        """The neurons of the layer, without shared experts; NO_NEURONS if it has none."""
        found = [b for b in self.blocks if isinstance(b, Neurons) and b.suffix != "_shexp"]
        return found[0] if found else NO_NEURONS

    @property
    def query_size(self) -> int:
        """Values of a token that the last product of the layer's mixer reads, of the last one if it
        has two; 0 without any."""
        last = self.mixers[-1] if self.mixers else None
        return last.output_size if isinstance(last, Attention) else last.query_size if last else 0

    @cached_property
    def shared(self) -> Neurons | None:
        """The experts that fire for every token."""
        blocks = (block for block in self.blocks if isinstance(block, Neurons))
        return next((block for block in blocks if block.suffix == "_shexp"), None)

    @cached_property
    def route(self) -> Route | None:
        return next((block for block in self.blocks if isinstance(block, Route)), None)

    @cached_property
    def predict(self) -> Predict | None:
        return next((block for block in self.blocks if isinstance(block, Predict)), None)

    @cached_property
    def operations(self) -> tuple[BlockOp, ...]:
        """The blocks with rooms of their own."""
        return tuple(block for block in self.blocks if isinstance(block, BlockOp))

    @cached_property
    def position_wise(self) -> tuple[PositionWise, ...]:
        return tuple(block for block in self.blocks if isinstance(block, PositionWise))

    @cached_property
    def stateful(self) -> tuple[Stateful, ...]:
        """The operations with a state, mixers or not."""
        return tuple(block for block in self.blocks if isinstance(block, Stateful))

    @cached_property
    def norms(self) -> dict[str, Norm]:
        """The norms of the hidden size, by name, in order."""
        return {block.name: block for block in self.blocks if isinstance(block, Norm)}

    def with_predict(self, predict: Predict | None) -> "LayerSpec":
        """The layer with this predictor instead of its own, before its neurons."""
        blocks: list[Block] = []
        for block in self.blocks:
            if isinstance(block, Neurons) and predict is not None:
                blocks.append(predict)
            if not isinstance(block, Predict):
                blocks.append(block)
        return replace(self, blocks=tuple(blocks))

    def with_numbers(self, number_of: Callable[[str], float]) -> "LayerSpec":
        """The layer with the numbers of its sums, by the names of their tensors."""
        blocks = (b.with_numbers(number_of) if isinstance(b, Add) else b for b in self.blocks)
        return replace(self, blocks=tuple(blocks))

    def with_attention(self, **numbers: Any) -> "LayerSpec":
        """The layer with these fields of its attention, if it attends."""
        blocks = (replace(b, **numbers) if isinstance(b, Attention) else b for b in self.blocks)
        return replace(self, blocks=tuple(blocks))


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A decoder. `architecture` is llama.cpp's name of its graph, or PowerInfer's.
    `embedding_scale` multiplies the embedding, and `logit_scale` what the output norm gives; with a
    `logit_cap` c, a logit l counts as c tanh(l / c) (Gemma 2); `has_positions`: learned positions
    are added to the embedding; `first` and `last`: operations between the embedding and the layers,
    and between these and the output norm, on the host, which then embeds;
    `has_head_bias`: a bias is added to the logits (Phi-2). `pooling`: how a text's vector comes of
    its hidden states; None: the model does not say. `draft`: its draft block, if it has one
    (model/draft_block.py). `context_limit`: why longer texts are refused, if the model has some."""

    architecture: str
    hidden_size: int
    vocab_size: int
    context_length: int
    layers: tuple[LayerSpec, ...]
    output_norm: Norm | None
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float | None = None
    has_positions: bool = False
    has_head_bias: bool = False
    first: tuple[PositionWise | Stateful, ...] = ()
    last: tuple[PositionWise, ...] = ()
    pooling: Pooling | None = None
    draft: "ModelSpec | None" = None
    context_limit: str = ""

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @cached_property
    def num_neurons_L(self) -> tuple[int, ...]:
        return tuple(layer.neurons.number for layer in self.layers)

    @property
    def most_neurons(self) -> int:
        """F of the widest layer: the length of a row of a table [L, F]."""
        return max(self.num_neurons_L)

    @cached_property
    def most_named(self) -> int:
        """F of the widest layer without experts: the most neurons that a predictor may name."""
        return max((x.neurons.number for x in self.layers if x.route is None), default=0)

    @cached_property
    def num_neurons(self) -> int:
        """Neurons of all layers."""
        return sum(layer.neurons.number for layer in self.layers)

    @cached_property
    def activation(self) -> Activation:
        """The activation that all layers with neurons share."""
        (activation,) = {x.neurons.activation for x in self.layers if x.neurons.number}
        return activation

    @cached_property
    def rotary(self) -> Rotary | None:
        """The rotary embedding of layers without a window, or else of those with one."""
        found = [attention for attention in self.attentions if attention.rotary is not None]
        return min(found, key=lambda a: a.window is not None).rotary if found else None

    @cached_property
    def storing(self) -> tuple[int, ...]:
        """The layers that store keys and values."""
        kept_L = (each.attention and each.attention.kept(i) for i, each in enumerate(self.layers))
        return tuple(index for index, kept in enumerate(kept_L) if kept and kept.is_written)

    def together(self, *, keys_on_host: bool = False) -> tuple[Together, ...]:
        """The groups of layers, two at least, that a plan must not divide: they read what one of
        them keeps. `keys_on_host`: main memory has the keys and values of all layers."""
        groups, names = dict[str, list[int]](), dict[str, str]()
        for index, layer in enumerate(self.layers):
            for mixer in layer.mixers:
                if not (keys_on_host and isinstance(mixer, Attention)):
                    kept = mixer.kept(index)
                    names.setdefault(kept.name, kept.what)
                    groups.setdefault(kept.name, []).append(index)
        return tuple(
            Together(layers=tuple(layers), reason=f"share {names[name]}")
            for name, layers in groups.items()
            if len(layers) > 1
        )

    @cached_property
    def last_attending(self) -> int:
        """The last layer that attends, where a plan has the draft block."""
        return max(n for n, layer in enumerate(self.layers) if layer.attention is not None)

    @cached_property
    def attentions(self) -> tuple[Attention, ...]:
        """The attention blocks, of the layers that have one."""
        return tuple(layer.attention for layer in self.layers if layer.attention is not None)

    @property
    def has_states(self) -> bool:
        """True if some operations have a state."""
        is_before = any(isinstance(block, Stateful) for block in self.first)
        return is_before or any(layer.stateful for layer in self.layers)

    @cached_property
    def only_on_cpu(self) -> str:
        """What its layers have that no GPU computes; "" for nothing."""
        words = (block.only_on_cpu for layer in self.layers for block in layer.operations)
        return next(filter(None, words), "")

    @cached_property
    def needs_all_gates(self) -> bool:
        """True if activations of some layers depend on all gates of the layer."""
        return any(layer.neurons.needs_all_gates for layer in self.layers)

    @cached_property
    def silences(self) -> bool:
        """True if the activation alone makes neurons of some layers silent."""
        return any(layer.neurons.silences for layer in self.layers)

    def computes_all(self, index: int, mode: Mode) -> bool:
        """True if silent neurons of a layer are computed too: in mode dense, and in layers whose
        activation silences none, if that of other layers does."""
        return computes_all(mode) or (self.silences and not self.layers[index].neurons.silences)

    @cached_property
    def value_sizes(self) -> Mapping[str, int]:
        """f32 values of a token that operations write, or begin with, but for the output of a mixer
        in attention's place."""
        of_layers = (block for layer in self.layers for block in layer.operations)
        found = {} if self.embedded == "x" else {self.embedded: self.hidden_size}
        for block in (*self.first, *of_layers, *self.last):
            for name, size in block.values(self.hidden_size).items():
                found[name] = max(size, found.get(name, 0))
        found.pop(ATTN_OUT, None)
        return found

    @cached_property
    def tables(self) -> tuple[str, ...]:
        """The tensors of which a token reads one row, unless they are the head too."""
        return ("token_embd.weight", *(name for block in self.first for name in block.tables))

    @property
    def x_size(self) -> int:
        """f32 values of a token's hidden state."""
        return self.value_sizes.get("x", self.hidden_size)

    @property
    def embedded(self) -> str:
        """The value that the embedding writes."""
        read = (name for block in self.first for name in block.inputs if name != TOKEN)
        return next(read, "x")

    @property
    def joined(self) -> str:
        """The value that the output norm or the head reads."""
        return self.last[-1].outputs[0] if self.last else "x"

    @property
    def has_experts(self) -> bool:
        """True for a mixture of experts."""
        return any(layer.route is not None for layer in self.layers)

    @cached_property
    def most_used(self) -> int:
        """The most experts that a token uses in a layer; 0 without experts."""
        return max((layer.route.num_used for layer in self.layers if layer.route), default=0)

    @cached_property
    def most_rank(self) -> int:
        """The largest rank of a predictor; 0 without predictors."""
        return max((layer.predict.rank for layer in self.layers if layer.predict), default=0)

    @cached_property
    def most_query_size(self) -> int:
        """Values of the queries of a token, in the widest layer that attends."""
        return max((attention.query_size for attention in self.attentions), default=0)

    @cached_property
    def most_heads_size(self) -> int:
        """Outputs of the heads of a token, in the widest layer that attends."""
        return max((attention.heads_size for attention in self.attentions), default=0)

    @cached_property
    def most_qkv_size(self) -> int:
        """Queries, keys, values and gates of a token, in the widest layer that attends."""
        return max((a.qkv_size + a.gate_size for a in self.attentions), default=0)

    @cached_property
    def most_latent_sizes(self) -> tuple[int, ...]:
        """The most of each of Latent.sizes; 0 without latents."""
        sizes = (a.latent.sizes(a.num_heads) for a in self.attentions if a.latent is not None)
        return tuple(map(max, zip((0, 0, 0), *sizes, strict=True)))

    @property
    def rope_scaling(self) -> RopeScaling:
        return NO_SCALING if self.rotary is None else self.rotary.scaling

    def in_mode(self, mode: Mode) -> "ModelSpec":
        """The model without predictors that this mode does not run."""
        if runs_predictors(mode):
            return self
        return self.with_layers([layer.with_predict(None) for layer in self.layers])

    def with_layers(self, layers: Sequence[LayerSpec]) -> "ModelSpec":
        return replace(self, layers=tuple(layers))

    def with_scaling(self, scaling: RopeScaling) -> "ModelSpec":
        """The model with this scaling in layers without a window, or in all if all have one."""
        some_whole = any(attention.window is None for attention in self.attentions)

        def scaled(layer: LayerSpec) -> LayerSpec:
            attention = layer.attention
            if attention is None or attention.rotary is None or (attention.window and some_whole):
                return layer
            return layer.with_attention(rotary=replace(attention.rotary, scaling=scaling))

        draft = self.draft and self.draft.with_scaling(scaling)
        return replace(self, layers=tuple(map(scaled, self.layers)), draft=draft)
