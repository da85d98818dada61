"""The indexer of sparse attention, which chooses the tokens that a token attends to (Qwen3.8-Flash-
Next's QSA; transformers, modeling_qwen4_exp.py)."""

from dataclasses import dataclass

from hotsplit.model.blocks import Shapes

STEM = "indexer"  # of llama.cpp's names


@dataclass(frozen=True, kw_only=True)
class Indexer:
    """It scores blocks of `ratio` tokens and keeps those with the best scores, `budget` tokens in
    all, and the tokens after the last whole block: so attention to up to `dense_length` tokens is
    to all of them. Its tensors are those of `num_heads` queries and a key, `head_dim` wide."""

    num_heads: int
    head_dim: int
    budget: int
    ratio: int

    @property
    def dense_length(self) -> int:
        return self.budget + self.ratio - 1

    def shapes(self, hidden_size: int) -> Shapes:
        rows = {"q_proj": self.num_heads * self.head_dim, "k_proj": self.head_dim}
        shapes: Shapes = {f"{STEM}.{n}.weight": (size, hidden_size) for n, size in rows.items()}
        return shapes | {f"{STEM}.{n}.weight": (self.head_dim,) for n in ("q_norm", "k_norm")}
