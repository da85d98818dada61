"""Several sequences in one engine: whatever else is in its steps, a sequence gets the bits that it
gets alone; blocks of the cache are shared, copied and freed without affecting other sequences."""

import random

import pytest
import torch
from models import make_sizes
from test_rows import model_of
from test_runtime import saved

from hotsplit import Engine
from hotsplit.costs.cache_layout import BLOCK_LENGTH
from hotsplit.errors import HotsplitError
from hotsplit.runtime.cache.block_table import NO_BLOCK, BlockTable
from hotsplit.runtime.cache.kv_cache import LayerCache
from hotsplit.runtime.step.batch import LogitsMemory, Row, rows_of
from hotsplit.runtime.step.sequences import Part, Sequence

CONTEXT = 300
ROOM = 8


class Alone:
    """The result of each text by itself: logits after each token, computed once per text."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.known: dict[tuple[int, ...], torch.Tensor] = {}

    def logits(self, ids: list[int]) -> torch.Tensor:
        """Logits after every token."""
        key = tuple(ids)
        if key not in self.known:
            self.known[key] = self.engine.logits(ids)
        return self.known[key]


def random_paths(chance: random.Random, depth: int, most: int) -> list[list[int]]:
    """A random tree of drafts, as the tokens on the path to each of up to `most` leaves. A path
    branches off an earlier one after a prefix of random length."""
    paths = [[chance.randrange(50) for _ in range(chance.randint(1, depth))]]
    for _ in range(chance.randint(1, most) - 1):
        stem = chance.choice(paths)
        shared = stem[: chance.randrange(len(stem))]
        others = [path for path in paths if path[: len(shared)] == shared]
        following = {path[len(shared)] for path in others if len(path) > len(shared)}
        rest = [chance.randrange(50) for _ in range(chance.randint(1, depth - len(shared)))]
        if rest[0] not in following:
            paths.append(shared + rest)
    return paths


def draft_tree(engine: Engine, alone: Alone, chance: random.Random, root: Sequence) -> int:
    """Computes a random tree of drafts in one step, in which branches copy shared keys and values,
    and compares each node with its path alone. The root keeps its length. Returns the number of
    nodes."""
    start, places = root.length, engine._sequences.cache.num_sequences
    taken = len(engine._sequences._open)
    paths = random_paths(chance, min(6, root.room), places - taken + 1)
    texts = [root, *(root.fork() for _ in paths[1:])]
    cache = engine._live.weights.cache
    rows, number_of, wanted = [], {}, []
    for text, path in zip(texts, paths, strict=True):
        cache.reserve(text.number, start, start + len(path))
        for depth, token in enumerate(path):
            node = tuple(path[: depth + 1])
            source = number_of.get(node)
            own = {"position": start + depth, "sequence": text.number}
            row = Row(token=token, source=source, has_logits=source is None, **own)
            if source is None:
                number_of[node] = len(rows)
                wanted.append(list(node))
            rows.append(row)
    with torch.inference_mode():
        got = engine._live.run(rows)
    want = torch.stack([alone.logits(root.ids + node)[-1] for node in wanted])
    assert torch.equal(got, want), (root.ids, paths)
    for text in texts[1:]:
        text.close()
    return len(got)


def change_texts(
    engine: Engine,
    texts: list[Sequence],
    chance: random.Random,
    deed: float,
    begin: float,
    room: int = ROOM,
) -> None:
    """Begins or forks a text if `deed` is less than `begin`, or ends one if it is less by a tenth
    more, or rolls one back if it is less by another 0.15."""
    if deed < begin and len(texts) < room:
        texts.append(chance.choice(texts).fork() if chance.random() < 0.6 else engine.sequence())
    elif deed < begin + 0.1 and len(texts) > 1:
        texts.pop(chance.randrange(len(texts))).close()
    elif deed < begin + 0.25:
        text = chance.choice(texts)
        text.rollback(chance.randint(0, text.length))


def schedule(engine: Engine, alone: Alone, chance: random.Random, steps: int) -> int:
    """Takes up to ROOM sequences through random operations; returns the number of rows compared."""
    texts = [engine.sequence()]
    compared = 0
    for _ in range(steps):
        deed = chance.random()
        change_texts(engine, texts, chance, deed, 0.15)
        if 0.4 <= deed < 0.55 and len(texts) < ROOM:
            text = chance.choice(texts)
            if text.room >= 2:
                compared += draft_tree(engine, alone, chance, text)
        parts = []
        for text in chance.sample(texts, chance.randint(1, len(texts))):
            count = min(text.room, chance.choice((1, 1, 1, 2, 3, 7, 20, 70)))
            tokens = [chance.randrange(50) for _ in range(count)]
            if tokens:
                parts.append(
                    Part(sequence=text, tokens=tokens, wanted=chance.choice(("last", "all")))
                )
        for part, got in zip(parts, engine.run(parts), strict=True):
            want = alone.logits(part.sequence.ids)[-len(got) :]
            assert torch.equal(got, want), (part.sequence.ids, len(part.tokens))
            compared += len(got)
    for text in texts:
        text.close()
    return compared


@pytest.mark.parametrize("mode", ["dense", "exact", "predicted"])
@pytest.mark.parametrize("kind", ["f16", "q8_0", "q4_0"])
def test_random_schedules(tmp_path, kind, mode):
    model = model_of(tmp_path, kind)
    with (
        Engine.load(model.path, mode=mode, context_length=CONTEXT) as single,
        Engine.load(model.path, mode=mode, context_length=CONTEXT, num_sequences=ROOM) as engine,
    ):
        alone = Alone(single)
        seeds = (random.Random(f"{kind} {mode} {seed}") for seed in range(6))
        assert sum(schedule(engine, alone, chance, 12) for chance in seeds) > 200
        table = engine.layers[0].attention.cache.table
        assert (table.block_SN == NO_BLOCK).all() and len(table._free) == table.num_blocks


def test_the_comparison_finds_a_wrong_block(tmp_path):
    """A sequence that reads another's block gets other logits."""
    model = model_of(tmp_path, "q8_0")
    with Engine.load(model.path, context_length=CONTEXT, num_sequences=2) as engine:
        first, second = engine.sequence(), engine.sequence()
        for text, token in ((first, 1), (second, 2)):
            text.extend([token] * 70)
        want = first.extend([3])
        first.rollback(70)
        table = engine.layers[0].attention.cache.table
        table.block_SN[0, 0] = table.block_SN[1, 0]
        assert not torch.equal(first.extend([3]), want)


def test_an_engine_loaded_in_inference_mode_runs_outside_it(tmp_path):
    model = model_of(tmp_path, "q8_0")
    with torch.inference_mode():
        engine = Engine.load(model.path, context_length=CONTEXT, num_sequences=2)
    with engine:
        text = engine.sequence()
        text.extend([1] * 40)
        assert torch.equal(text.extend([2]), engine.logits([1] * 40 + [2])[-1:])


def test_an_interrupted_copy_changes_nothing(tmp_path, monkeypatch):
    """A copy is interrupted before its first layer, another before its second; then both sequences
    continue as if nothing had happened."""
    model = model_of(tmp_path, "q8_0")
    with Engine.load(model.path, context_length=CONTEXT, num_sequences=2) as engine:
        root = engine.sequence()
        root.extend([1] * 100)
        want = engine.run([Part(sequence=root, tokens=[9])])[0]
        root.rollback(100)
        fork = root.fork()
        copied, copy = [], LayerCache.copy
        for failing in range(2):

            def interrupted(cache, changes, failing=failing):
                if len(copied) == failing:
                    raise KeyboardInterrupt
                copied.append(cache)
                copy(cache, changes)

            monkeypatch.setattr(LayerCache, "copy", interrupted)
            copied.clear()
            with pytest.raises(KeyboardInterrupt):
                fork.extend([5] * 3)
            monkeypatch.undo()
            assert fork.length == 100
        assert torch.equal(fork.extend([9]), want)
        assert torch.equal(root.extend([9]), want)
        fork.close()
        root.close()
        table = engine.layers[0].attention.cache.table
        assert len(table._free) == table.num_blocks


def test_impossible_parts_are_refused(tmp_path):
    model = saved(tmp_path, sizes=make_sizes(context_length=400))
    with (
        Engine.load(model.path, num_sequences=2) as engine,
        Engine.load(model.path, num_sequences=2) as other,
    ):
        text, strange = engine.sequence(), other.sequence()
        for parts, message in (
            ([Part(sequence=text, tokens=[1] * 128)] * 2, "in two parts of one step"),
            ([Part(sequence=strange, tokens=[1])], "another engine"),
            ([Part(sequence=text, tokens=[])], "no tokens to compute"),
            ([Part(sequence=text, tokens=[1], wanted="some")], "wanted='some'; known: "),  # type: ignore[arg-type]
            ([Part(sequence=text, tokens=[1], wanted=["all"])], "known: "),  # type: ignore[arg-type]
        ):
            with pytest.raises(HotsplitError, match=message):
                engine.run(parts)
            assert (text.length, strange.length) == (0, 0)
        assert engine.decode_seconds(steps=2, start=300) > 0
        rows = rows_of([1], 100, sequence=text.number)
        engine._live.weights.cache.reserve(text.number, 100, 101)
        with pytest.raises(IndexError, match="outside the model"):
            engine._live.run(rows)  # its earlier tokens are missing


def test_a_full_sequence_refuses_and_changes_nothing(tmp_path):
    model = saved(tmp_path, sizes=make_sizes(context_length=100))
    with Engine.load(model.path, num_sequences=2) as engine:
        full, other = engine.sequence(), engine.sequence()
        want = full.extend([1] * 99)
        with pytest.raises(HotsplitError, match="2 more tokens after 99 exceed the context of 100"):
            engine.run([Part(sequence=other, tokens=[1]), Part(sequence=full, tokens=[1, 2])])
        assert (full.length, other.length) == (99, 0)
        full.rollback(98)
        assert torch.equal(full.extend([1]), want)
        with pytest.raises(HotsplitError, match="all 2 sequences of this engine are in use"):
            engine.sequence()
        other.close()
        other.close()
        with pytest.raises(HotsplitError, match="is closed"):
            other.extend([1])


def test_an_engine_of_one_sequence_refuses_more(tmp_path):
    model = saved(tmp_path)
    with Engine.load(model.path) as engine:
        text = engine.sequence()
        with pytest.raises(HotsplitError, match="num_sequences"):
            text.fork()
        with pytest.raises(HotsplitError, match="num_sequences"):
            engine.logits([1, 2])
        text.close()
        assert len(engine.logits([1, 2])) == 2
    for count in (0, -1, 5000):
        with pytest.raises(
            HotsplitError, match="num_sequences is .*, wanted a whole number from 1 to"
        ):
            Engine.load(model.path, num_sequences=count)


def test_blocks_stay_consistent_under_random_use():
    """A block has as many users as sequences that name it; no sequence writes what others read."""
    chance = random.Random(3)
    table = BlockTable(5, 4 * BLOCK_LENGTH)
    length = dict.fromkeys(range(5), 0)
    for _ in range(4000):
        sequence = chance.randrange(5)
        if chance.random() < 0.4:
            length[sequence] = chance.randint(0, length[sequence])
            table.shrink(sequence, length[sequence])
        elif chance.random() < 0.3 and not length[sequence]:
            source = chance.choice([s for s in range(5) if s != sequence])
            table.share(source, sequence, length[source])
            length[sequence] = length[source]
        else:
            stop = min(4 * BLOCK_LENGTH, length[sequence] + chance.choice((1, 5, 64, 100)))
            start = length[sequence]
            table.commit(sequence, table.plan(sequence, start, stop))
            length[sequence] = stop
            if stop > start:
                own = table.blocks(sequence, stop)[start // BLOCK_LENGTH :]
                assert all(table._num_users[block] == 1 for block in own.tolist())
        named = [b for b in table.block_SN.flatten().tolist() if b != NO_BLOCK]
        assert [named.count(b) for b in range(table.num_blocks)] == table._num_users
        assert sorted(table._free) == [b for b, n in enumerate(table._num_users) if not n]


def test_steps_use_the_memory_of_logits_that_nobody_keeps():
    memory = LogitsMemory(vocab_size=5)
    first = memory.take(1)
    place = first.data_ptr()
    kept = first[0].view(5)
    del first
    assert memory.take(1).data_ptr() != place  # a view of it is alive
    del kept
    places = {memory.take(rows).data_ptr() for rows in (1, 1, 1)}
    assert len(places) == 1
    with torch.inference_mode():
        assert {memory.take(1).data_ptr() for _ in range(3)} == places
    assert memory.take(3).shape == (3, 5) and memory.take(0).shape == (0, 5)
    row = memory.take(1)[0]
    assert row.shape == (5,)
    assert row.data_ptr() not in {memory.take(1).data_ptr(), memory.take(1).data_ptr()}
    many = [memory.take(2) for _ in range(9)]
    assert len({each.data_ptr() for each in many}) == 9 and len(memory._kept) == 4
    assert memory.take(33).shape == (33, 5) and all(len(each) <= 32 for each in memory._kept)
