"""Embeddings of n-grams: what a layer gets from the latest tokens themselves, through a table of
which a token reads a few rows by hashes (Qwen3.8-Flash-Next; transformers, modeling_qwen4_exp.py).

Letters: T tokens, S streams, D hidden size, N the longest n-gram, G rows of a token for each length
2 .. N, W values of a row, E = (N - 1) G W, J taps."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar

from hotsplit.model.blocks import Kept, Shapes
from hotsplit.model.operations import TOKEN, Stateful

# Llama.cpp's names, of a model and of a layer.
TABLE = "per_layer_token_embd"
KEY, VALUE, CONV = "ple_key", "ple_value", "ple_conv1d"
NORMS = ("ple_norm_key", "ple_norm_query", "ple_norm_conv")
ROWS = "ngrams"  # the value that has a token's rows, [E]
# Ids are in a state as f32, one higher, so that zeros are no tokens.
MOST_IDS = (1 << 24) - 1
MOST_LENGTH, MOST_HEADS, MOST_TAPS = 8, 64, 16


@dataclass(frozen=True, kw_only=True)
class NgramRows(Stateful):
    """Row g of a token's n-grams of length n, with i = (n - 2) G + g:

        table[offset_i + (t_0 m_0 ^ t_1 m_1 ^ .. ^ t_(n-1) m_(n-1)) mod size_i]

    t_j is the id j tokens before, or that of `end_token` if a token from there to the last one, the
    token itself excepted, is that, or before the text; m are the `multipliers`, in integers of 64
    bits. A size for each row; offsets are the sums of those before. The rows follow each other. Its
    state are the latest tokens."""

    kind: ClassVar[str] = "n-gram rows"
    room: ClassVar[str] = "ngrams"
    tables: ClassVar[tuple[str, ...]] = (f"{TABLE}.weight",)
    words: ClassVar[str] = "the embeddings of n-grams"
    inputs: ClassVar[tuple[str, ...]] = (TOKEN,)
    outputs: ClassVar[tuple[str, ...]] = (ROWS,)
    length: int  # N
    per_length: int  # G
    width: int  # W
    num_rows: int  # of the table
    multipliers: tuple[int, ...]  # [N]
    sizes: tuple[int, ...]  # [(N - 1) G]
    end_token: int

    @property
    def offsets(self) -> tuple[int, ...]:
        return tuple(accumulate(self.sizes, initial=0))[:-1]

    @property
    def total(self) -> int:
        return len(self.sizes) * self.width

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        return ((self.length - 1, 1),)

    @property
    def kept_size(self) -> int:
        return 1

    def kept(self, index: int) -> Kept:
        return Kept(name="tokens", what="the latest tokens")

    def shapes(self, hidden_size: int) -> Shapes:
        return {f"{TABLE}.weight": (self.num_rows, self.width)}

    def values(self, hidden_size: int) -> Mapping[str, int]:
        return {ROWS: self.total}

    @property
    def facts(self) -> Mapping[str, str]:
        return {
            "n-grams": f"{len(self.sizes)} rows a token of {self.num_rows:,} with {self.width}"
            f" values, for 2 to {self.length} tokens"
        }


@dataclass(frozen=True, kw_only=True)
class NgramInputs(Stateful):
    """Adds to each stream what it takes of a token's rows e_E:

        k_SD = RMSnorm_D(ple_key e);  q_SD = RMSnorm_D(x), each with weights [S D];  v_D = ple_value
        e
        r_S = k_s q_s / sqrt(D);  g_sd = sigmoid(sign(r_s) sqrt(max(|r_s|, 1e-6))) v_d
        c_SD = RMSnorm_D(g)
        x = x + g + silu(sum over taps j of conv_j c of the token (J - 1 - j) N before)

    Its state are the values c that later tokens read, zeros before the text."""

    kind: ClassVar[str] = "n-gram inputs"
    room: ClassVar[str] = "ngrams"
    only_on_cpu: ClassVar[str] = "n-grams"
    inputs: ClassVar[tuple[str, ...]] = ("x", ROWS)
    outputs: ClassVar[tuple[str, ...]] = ("x",)
    num_streams: int
    hidden_size: int
    total: int  # E
    num_taps: int
    distance: int  # N, tokens from tap to tap
    epsilon: float

    @property
    def size(self) -> int:
        return self.num_streams * self.hidden_size

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        return (((self.num_taps - 1) * self.distance, self.size),)

    @property
    def kept_size(self) -> int:
        return self.size

    def kept(self, index: int) -> Kept:
        return Kept(name=f"n-grams.{index}", what="inputs of n-grams")

    def shapes(self, hidden_size: int) -> Shapes:
        shapes: Shapes = {
            f"{KEY}.weight": (self.size, self.total),
            f"{VALUE}.weight": (hidden_size, self.total),
            f"{CONV}.weight": (self.size, self.num_taps),
        }
        return shapes | {f"{name}.weight": (self.size,) for name in NORMS}

    def values(self, hidden_size: int) -> Mapping[str, int]:
        return {"x": self.size}
