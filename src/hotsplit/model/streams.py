"""A hidden state of several streams, from which a block reads a gated mean, and to which it writes
with a weight for each (Qwen3.8-Flash-Next; hyper-connections, Zhu et al. 2024, arXiv 2409.19606;
transformers, modeling_qwen4_exp.py).

Value `x` of such a model has all streams of a token, [S D]. It begins as copies of the embedding.
Each block of a layer is between two operations:

    n_SD = RMSnorm_D(x_s; norm_SD), of each stream
    u_SD = sigmoid(up silu(down n / S));  m_D = mean over s of u_s n_s;  w_S = 2 sigmoid(inject n /
    S)
    x_s = x_s + w_s y, of what the block makes of m

and the head reads such a mean, too, without a norm of its own. Letters: S streams, D hidden size, R
rank of the mean's weights."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from hotsplit.model.blocks import Shapes
from hotsplit.model.operations import PositionWise

JOINED = "joined"  # the value that begins as the embedding, and that the head reads
INJECT = "inject"  # the weights w of a block's output, [S]
MOST_STREAMS = 8


@dataclass(frozen=True, kw_only=True)
class OfStreams(PositionWise):
    """What operations on streams share."""

    room: ClassVar[str] = "streams"
    only_on_cpu: ClassVar[str] = "hyper-connections"
    num_streams: int  # S


@dataclass(frozen=True, kw_only=True)
class BeginStreams(OfStreams):
    """Copies of the embedding."""

    kind: ClassVar[str] = "begin streams"
    inputs: ClassVar[tuple[str, ...]] = (JOINED,)
    outputs: ClassVar[tuple[str, ...]] = ("x",)

    def values(self, hidden_size: int) -> Mapping[str, int]:
        return {"x": self.num_streams * hidden_size}

    @property
    def facts(self) -> Mapping[str, str]:
        return {"streams": f"{self.num_streams} of a token's hidden state (hyper-connections)"}


@dataclass(frozen=True, kw_only=True)
class MeanOfStreams(OfStreams):
    """Reads the mean. `stem`: of the names of its tensors, llama.cpp's."""

    stem: ClassVar[str]
    target: ClassVar[str]  # the value that is written
    injects: ClassVar[bool] = True
    rank: int  # R
    epsilon: float
    inputs: ClassVar[tuple[str, ...]] = ("x",)

    @property
    def outputs(self) -> tuple[str, ...]:
        return (self.target, INJECT) if self.injects else (self.target,)

    def shapes(self, hidden_size: int) -> Shapes:
        whole = self.num_streams * hidden_size
        shapes: Shapes = {
            f"{self.stem}_norm.weight": (whole,),
            f"{self.stem}_down.weight": (self.rank, whole),
            f"{self.stem}_up.weight": (whole, self.rank),
        }
        if self.injects:
            shapes[f"{self.stem}_inject.weight"] = (self.num_streams, whole)
        return shapes

    def values(self, hidden_size: int) -> Mapping[str, int]:
        own = {self.target: hidden_size}
        return own | {INJECT: self.num_streams} if self.injects else own


@dataclass(frozen=True, kw_only=True)
class StreamsToMixer(MeanOfStreams):
    kind: ClassVar[str] = "streams to mixer"
    stem: ClassVar[str] = "hc_attn"
    target: ClassVar[str] = "attn_in"


@dataclass(frozen=True, kw_only=True)
class StreamsToNeurons(MeanOfStreams):
    kind: ClassVar[str] = "streams to neurons"
    stem: ClassVar[str] = "hc_ffn"
    target: ClassVar[str] = "ffn_in"


@dataclass(frozen=True, kw_only=True)
class StreamsToHead(MeanOfStreams):
    kind: ClassVar[str] = "streams to head"
    stem: ClassVar[str] = "output_hc"
    target: ClassVar[str] = JOINED
    injects: ClassVar[bool] = False


@dataclass(frozen=True, kw_only=True)
class ToStreams(OfStreams):
    """Adds a block's output to the streams."""

    source: ClassVar[str]
    outputs: ClassVar[tuple[str, ...]] = ("x",)

    @property
    def inputs(self) -> tuple[str, ...]:
        return "x", self.source, INJECT

    def values(self, hidden_size: int) -> Mapping[str, int]:
        return {"x": self.num_streams * hidden_size}


@dataclass(frozen=True, kw_only=True)
class MixerToStreams(ToStreams):
    kind: ClassVar[str] = "mixer to streams"
    source: ClassVar[str] = "attn_out"


@dataclass(frozen=True, kw_only=True)
class NeuronsToStreams(ToStreams):
    kind: ClassVar[str] = "neurons to streams"
    source: ClassVar[str] = "ffn_out"
