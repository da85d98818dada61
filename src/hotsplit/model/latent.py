"""Latent attention (MLA; DeepSeek-V2, arXiv 2405.04434), whose keys and values are products of one
low-rank latent of each token.

Letters: D hidden size, H heads, R rank of queries, C values of a latent, N and P values of a head's
query and key that do not rotate and that do, V values of a head's output.

    q_HNP = W_HNP,R norm(W_RD x)      or W_HNP,D x
    c_C, k_P = W_CP,D x               then c = norm(c)
    query of head h  = [rotated q_P ; K_h q_N]    K_h [C, N], of attn_k_b
    key of all heads = [rotated k_P ; c]          the only key-value head, stored once
    value            = c                          the last C values of the key as stored
    output of head h = V_h (sum of values)        V_h [V, C], of attn_v_b

This is the absorbed form: (K_h q) . c is q . (K_h^T c), with one key for all heads in place of one
for each. llama.cpp has it, too (src/models/deepseek2.cpp); transformers expands the latents."""

from dataclasses import dataclass

from hotsplit.model.blocks import Norm, Shapes

QUERY, QUERY_A, QUERY_B, KEY_A, KEY_B, VALUE_B = (
    f"attn_{name}" for name in ("q", "q_a", "q_b", "kv_a_mqa", "k_b", "v_b")
)
QUERY_A_NORM, KEY_A_NORM = "attn_q_a_norm", "attn_kv_a_norm"
OLD_KEY_VALUE_B = "attn_kv_b"  # the rows of K_h^T and V_h of each head in turn, in one matrix


@dataclass(frozen=True, kw_only=True)
class Latent:
    """The sizes of the projections. `query_rank`: R; None: queries are one product."""

    query_rank: int | None
    size: int  # C
    num_plain: int  # N
    num_rotated: int  # P
    value_size: int  # V
    epsilon: float  # of both norms

    @property
    def width(self) -> int:
        """Values of an absorbed query, and of a key as stored."""
        return self.num_rotated + self.size

    @property
    def of_query(self) -> int:
        """Values of a head's query before it is absorbed."""
        return self.num_plain + self.num_rotated

    def inputs(self, num_heads: int) -> dict[str, int]:
        """Rows of the matrices that multiply the hidden state, by name."""
        queries = {QUERY: num_heads * self.of_query}
        if self.query_rank is not None:
            queries = {QUERY_A: self.query_rank}
        return queries | {KEY_A: self.width}

    def sizes(self, num_heads: int) -> tuple[int, int, int]:
        """Values of a token: of the hidden state's products, of queries before they are absorbed if
        these are another product (or 0), and the most of a normed latent and of all outputs."""
        queries = 0 if self.query_rank is None else num_heads * self.of_query
        most = max(self.query_rank or 0, num_heads * self.value_size)
        return sum(self.inputs(num_heads).values()), queries, most

    def norms(self) -> dict[str, Norm]:
        sizes = {KEY_A_NORM: self.size}
        if self.query_rank is not None:
            sizes[QUERY_A_NORM] = self.query_rank
        return {
            name: Norm(name=name, kind="rms", size=size, epsilon=self.epsilon)
            for name, size in sizes.items()
        }

    def shapes(self, num_heads: int) -> Shapes:
        """The shapes of the tensors that others than attention lack: the second matrices, and the
        norms."""
        shapes: Shapes = {f"{name}.weight": (norm.size,) for name, norm in self.norms().items()}
        if self.query_rank is not None:
            shapes[f"{QUERY_B}.weight"] = (num_heads * self.of_query, self.query_rank)
        shapes[f"{KEY_B}.weight"] = (num_heads, self.size, self.num_plain)
        return shapes | {f"{VALUE_B}.weight": (num_heads, self.value_size, self.size)}
