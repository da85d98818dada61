"""Flash attention's sums are counted by torch's rule, and tokens whose sums take too much are attended
to in pieces."""

import random

import pytest
import torch
from fake_cuda.flash import num_splits
from reference import rel_error
from test_device_memory import attentions, flash_on_the_cpu

from hotsplit.runtime.ops.attention import attend, flash_parts

SEEDS = range(200)


def random_call(seed: int) -> tuple[int, int, int, int]:
    """Heads, tokens, positions, head width."""
    choose = random.Random(seed)
    tokens = choose.randint(1, 512)
    return (choose.choice([9, 14, 26, 32, 40, 64]), tokens, tokens + choose.randint(0, 9000),
            choose.choice([64, 80, 128, 256]))  # fmt: skip


def test_parts_are_those_of_torchs_heuristic():
    for seed in SEEDS:
        heads, tokens, positions, width = random_call(seed)
        size = 256 if width <= 64 else 128 if width <= 128 else 64
        wanted = num_splits(heads * -(-tokens // 64), -(-positions // size))
        assert flash_parts.num_parts(heads, tokens, positions, width, 132) == wanted


def test_a_tail_of_a_prompt_may_take_more_than_a_longer_pass():
    """96 blocks of queries fill an H100 best with eleven parts of the keys."""
    sizes = {t: flash_parts.sum_bytes(32, t, 1408, 128, 132) for t in (64, 192, 256)}
    assert sizes[192] > 2 * sizes[256] > 0
    assert flash_parts.sum_bytes(32, 512, 4096, 128, 132) == 0


def test_pieces_cover_the_tokens_and_their_sums_are_bounded(monkeypatch):
    monkeypatch.setattr(attend, "multiprocessors", lambda device: 132)
    is_divided = False
    for seed in SEEDS:
        heads, tokens, positions, width = random_call(seed)
        shape = torch.Size((1, heads, tokens, width))
        pieces = attend._flash_pieces(shape, positions, torch.device("cpu"))
        assert [start for start, _, _ in pieces] == [0, *(stop for _, stop, _ in pieces[:-1])]
        assert pieces[-1][1:] == (tokens, positions)
        for start, stop, end in pieces:
            assert end == positions - tokens + stop
            taken = flash_parts.sum_bytes(heads, stop - start, end, width, 132)
            assert taken <= attend.FLASH_SUM_BYTES
            most = flash_parts.most_sum_bytes(heads, end, width) * (stop - start)
            assert taken <= most
        is_divided |= len(pieces) > 1
    assert is_divided


@pytest.mark.parametrize("heads, kv_heads", [(4, 4), (8, 2)])
def test_attention_in_pieces_is_attention(monkeypatch, heads, kv_heads):
    calls = []

    def counted(query, key, value):
        calls.append(query.shape[2])
        return flash_on_the_cpu(query, key, value)

    monkeypatch.setattr(attend, "flash_attention", counted)
    monkeypatch.setattr(attend, "sum_bytes", lambda heads, tokens, *rest: tokens)
    monkeypatch.setattr(attend, "FLASH_SUM_BYTES", 3)
    for query, key, value, want in attentions(heads, kv_heads):
        got = attend.attend_with_flash((0.25 * query).half(), key, value)
        assert rel_error(got, want) < 2 * torch.finfo(torch.float16).eps
    assert calls == [1, 1, 3, 2, 2, 2, 2, 1]
