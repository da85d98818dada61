"""DRY ("don't repeat yourself"): penalises tokens that would continue a repetition.

The sampler is p-e-w's (text-generation-webui, pull request 5677); sequence breakers work as in
KoboldCpp (pi6am, pull request 982) and llama_sampler_init_dry."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial

import numpy as np

from hotsplit.runtime.generate.candidates import Candidates
from hotsplit.runtime.generate.samplers import last_tokens
from hotsplit.runtime.text.codec import TextCodec

# First token -> its tails, the token sequences that may follow it; () if the token is a breaker
# alone.
Breakers = Mapping[int, Sequence[tuple[int, ...]]]
BreakersOf = Callable[[tuple[str, ...]], Breakers]

MAX_BREAKER_SETS = 16
_MAX_BREAKER_LENGTH = 40  # characters; in llama.cpp this many bytes
_MAX_TAIL = 20
_FLOAT_MAX_LOG = 88.7228391  # natural logarithm of float32's largest number, to cap the exponent
_FLOAT_MAX = 3.4028234e38


def dry_breakers(codec: TextCodec, breakers: Sequence[str]) -> Breakers:
    """Every way in which a breaker can appear in tokens, alone or with text around it.

    These are, as in llama.cpp, each token whose text contains the breaker, and each token whose
    text ends with a prefix of the breaker, followed by the tokens of the remainder. The breaker's
    own tokens are added for characters whose bytes are split over several tokens. Reads the whole
    vocabulary; `cached_breakers` keeps the results."""
    tokenizer = codec.tokenizer
    wanted = [breaker[:_MAX_BREAKER_LENGTH] for breaker in breakers if breaker]
    if not wanted:
        return {}
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    words = tokenizer.decode_batch([[i] for i in range(size)], skip_special_tokens=False)
    found: dict[int, set[tuple[int, ...]]] = defaultdict(set)
    tails_by_prefix: dict[str, list[tuple[str, tuple[int, ...]]]] = defaultdict(list)

    def tokens(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text, add_special_tokens=False).ids)

    for breaker in wanted:
        for n in range(1, len(breaker)):
            tails_by_prefix[breaker[:n]].append((breaker, tokens(breaker[n:])[:_MAX_TAIL]))
        if whole := tokens(breaker):
            found[whole[0]].add(whole[1 : 1 + _MAX_TAIL])
    for token_id, word in enumerate(words):
        contained = {breaker for breaker in wanted if breaker in word}
        if contained:
            found[token_id].add(())
        for n in range(1, min(len(word), _MAX_BREAKER_LENGTH) + 1):
            for breaker, tail in tails_by_prefix.get(word[-n:], ()):
                if breaker not in contained:
                    found[token_id].add(tail)
    return {token_id: tuple(sorted(tails)) for token_id, tails in found.items()}


def cached_breakers(codec: TextCodec) -> BreakersOf:
    """`dry_breakers` for one codec, with the latest results cached."""
    return lru_cache(MAX_BREAKER_SETS)(partial(dry_breakers, codec))


def dry(
    candidates: Candidates,
    history: Sequence[int],
    *,
    multiplier: float,
    base: float,
    allowed_length: int,
    last_n: int,
    breakers: Breakers,
) -> Candidates:
    """logit_i -= multiplier * base ** (length - allowed_length).

    `length` is that of the longest suffix of the text that also occurs earlier among the last n
    tokens, followed there by token i. Only lengths of at least allowed_length count. No repetition
    crosses a breaker, and tokens that are breakers by themselves are not penalised."""
    tokens_N = last_tokens(history, last_n)
    max_exponent = None  # so close to 1 that no text reaches the cap
    if base == 1:  # the penalty does not depend on the length
        max_exponent = 0
    elif base > 1.000001:
        max_exponent = int(_FLOAT_MAX_LOG / np.log(base))
    lengths = repeats(tokens_N, allowed_length, max_exponent, breakers)
    lengths = {i: n for i, n in lengths.items() if () not in breakers.get(i, ())}
    positions, there = candidates.positions_of(np.fromiter(lengths, np.int64, len(lengths)))
    length = np.fromiter(lengths.values(), np.float64, len(lengths))[there]
    penalty = np.minimum(multiplier * base ** (length - allowed_length), _FLOAT_MAX)
    return candidates.with_logits_at(positions, candidates.logits_A[positions] - penalty)


def repeats(
    tokens_N: np.ndarray, allowed_length: int, max_exponent: int | None, breakers: Breakers
) -> dict[int, int]:
    """Maps each token that would continue a repetition of `allowed_length` tokens or more to the
    length of the longest such repetition, at most allowed_length + max_exponent (None: uncapped).

    llama.cpp finds the lengths with the Z-algorithm. Here all possible ends of repetitions are
    compared with the end of the text, one token further back at a time, until none matches. In a
    text that repeats itself throughout, that takes time proportional to its length times the cap,
    which is 158 at base 1.75 and 8,916 at 1.01."""
    num_tokens = len(tokens_N)
    limit = tokens_since_breaker(tokens_N, breakers)
    if num_tokens <= allowed_length or limit < allowed_length:
        return {}
    if max_exponent is not None:
        limit = min(limit, allowed_length + max_exponent)
    length_N = np.zeros(num_tokens - 1, np.int64)  # of the repetition that ends at each token
    ends = np.arange(num_tokens - 1)
    for back in range(limit):
        ends = ends[ends >= back]
        ends = ends[tokens_N[ends - back] == tokens_N[num_tokens - 1 - back]]
        if not len(ends):
            break
        length_N[ends] = back + 1
    found: dict[int, int] = {}
    for end in np.flatnonzero(length_N >= allowed_length).tolist():
        following = int(tokens_N[end + 1])
        found[following] = max(found.get(following, 0), int(length_N[end]))
    return found


def tokens_since_breaker(tokens_N: np.ndarray, breakers: Breakers) -> int:
    """Number of tokens after the last breaker; all if there is none.

    Scans backwards and takes the longest of the breakers that start at the first matching token, as
    llama.cpp does."""
    tokens = tokens_N.tolist()
    for start in range(len(tokens) - 1, -1, -1):
        tails = breakers.get(tokens[start])
        if not tails:
            continue
        behind = start + 1
        matching = [n for tail in tails if tokens[behind : behind + (n := len(tail))] == list(tail)]
        if matching:
            return len(tokens) - behind - max(matching)
    return len(tokens)
