"""An engine whose model folds the tokens of a text into a recurrent state, exactly and with
integers, and keeps the tokens in a KV cache besides: what sequences, drafts and servers do with
states is wrong if a single token is in the wrong place."""

from collections.abc import Sequence
from types import SimpleNamespace

import torch
from torch import Tensor

from hotsplit import Engine
from hotsplit.options.cache_types import CacheTypes
from hotsplit.runtime.cache.block_table import BlockTable
from hotsplit.runtime.cache.kv_cache import KVCache, LayerCache
from hotsplit.runtime.cache.state_slots import NO_SLOT, LayerState, StateSlots
from hotsplit.runtime.step.batch import Row, prepared, runs_of

PRIME = 8191  # products of residues are exact in f64, and residues in f32
STATE, CONV = (1, 2, 2), (3, 1)
FACTORS = torch.tensor([[17.0, 31.0], [257.0, 1021.0]], dtype=torch.float64)


def fold(state_NM: Tensor, token: int) -> Tensor:
    return (state_NM.double() * FACTORS + token + 1) % PRIME


def logits_of(state_NM: Tensor, recent_J: Tensor, sum_of_keys: int, vocab_size: int) -> Tensor:
    """Logits [V] that depend on every number; `recent_J`: the last tokens, each plus 1."""
    numbers = [*state_NM.flatten().tolist(), *recent_J.tolist(), sum_of_keys]
    seed = hash(tuple(map(int, numbers)))
    made = torch.Generator().manual_seed(seed & (2**63 - 1))
    return torch.randn(vocab_size, generator=made)


def alone(ids: Sequence[int], vocab_size: int) -> Tensor:
    """The logits after the last token of a text, f32 [V], without any cache."""
    state_NM = torch.zeros(STATE[1:], dtype=torch.float64)
    for token in ids:
        state_NM = fold(state_NM, token)
    recent = [0, 0, 0, *(token + 1 for token in ids)][-CONV[0] :]
    keys = sum((position + 1) * (token + 1) for position, token in enumerate(ids))
    return logits_of(state_NM, torch.tensor(recent), keys, vocab_size)


class Failure(Exception):
    """A pass that fails after it has written."""


class FoldedDecoder:
    """Stands in for the decoder of `engine`, whose sequences it serves from then on."""

    def __init__(self, engine: Engine, num_sequences: int = 1, rows_of_pass: int = 13) -> None:
        table = BlockTable(num_sequences, engine.context_length)
        self.keys = LayerCache.of(table, 1, 1, CacheTypes.of("f32"), _zeros)
        self.state = LayerState.of(num_sequences, [STATE, CONV], _zeros)
        self.weights = SimpleNamespace(
            cache=KVCache(layers=(self.keys,)),
            states=StateSlots(num_sequences),
            layer_states=(self.state,),
        )
        self.vocab_size, self.most_tokens = engine.model.spec.vocab_size, rows_of_pass
        self.native, self.has_hybrid_steps = engine._live.native, False
        self.draft = None
        self.fails_after: int | None = None  # rows that are computed before one pass fails
        self.num_computed = 0
        engine._sequences.decoder = self  # type: ignore[assignment]

    def fail_after(self, rows: int) -> None:
        """Makes a pass fail after so many rows from now on; below 0: none."""
        self.fails_after = self.num_computed + rows if rows >= 0 else None

    def run(self, rows: Sequence[Row]) -> Tensor:
        with prepared(self.weights.cache, self.weights.states, rows) as slotted:
            assert len(slotted) <= self.most_tokens
            found = [logits_V for run in runs_of(slotted) for logits_V in self._run(run)]
        return torch.stack(found) if found else torch.empty(0, self.vocab_size)

    def _run(self, run: Sequence[Row]) -> list[Tensor]:
        state_NM, conv_J = torch.zeros(STATE[1:]), torch.zeros(CONV[0])
        if run[0].reads != NO_SLOT:
            states, convs = self.state.tensors
            state_NM, conv_J = states[run[0].reads, 0].clone(), convs[run[0].reads, :, 0].clone()
        found = []
        for row in run:
            if self.fails_after is not None and self.num_computed >= self.fails_after:
                self.fails_after = None
                raise Failure
            self.num_computed += 1
            state_NM = fold(state_NM, row.token).float()
            conv_J = torch.cat([conv_J[1:], torch.tensor([row.token + 1.0])])
            code_111 = torch.tensor([[[(row.position + 1.0) * (row.token + 1)]]])
            self.keys.write(row.sequence, row.position, code_111, code_111)
            if row.writes != NO_SLOT:
                self.state.write([row.writes], (state_NM[None, None], conv_J[None, :, None]))
            if row.has_logits:
                keys_T11, _ = self.keys.read(row.sequence, 0, row.position + 1)
                total = int(keys_T11.double().sum())
                found.append(logits_of(state_NM, conv_J, total, self.vocab_size))
        return found


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.zeros(shape, dtype=dtype)
