"""Hybrid steps of several rows and sequences, with both roles on the CPU: every row is
bit-identical to that of its sequence computed alone, one token at a time."""

import dataclasses
import random

import pytest
import torch
from hybrid_plans import make, planned
from models import make_sizes
from test_sequences import ROOM, change_texts
from torch.utils._python_dispatch import TorchDispatchMode

from hotsplit import Engine
from hotsplit.artifacts.split_file import Split
from hotsplit.commands.serve import _say_loaded
from hotsplit.errors import HotsplitError
from hotsplit.runtime.cache.block_table import NO_BLOCK
from hotsplit.runtime.generate.speculation import check_rows
from hotsplit.runtime.kernels.gpu.kernels import reference_kernels
from hotsplit.runtime.kernels.gpu.launch import ROWS
from hotsplit.runtime.model.placement import Placement
from hotsplit.runtime.step import hybrid_builder
from hotsplit.runtime.step.backend import plain_backend
from hotsplit.runtime.step.batch import rows_of
from hotsplit.runtime.step.pass_device import PassSetup
from hotsplit.runtime.step.sequences import Part
from hotsplit.serve.serve_config import ServeConfig

CONTEXT = 80
DIVIDED = ("every kind of layer", "two GPUs, layers on the CPU", "attention on the CPU", "random")


def loaded(tmp_path, model, plan, num_sequences, *, mode="predicted", max_rows=32):
    """An engine with the plan, whose decode step is a hybrid one of up to `max_rows` rows."""
    split = planned(tmp_path, model, plan, context_length=CONTEXT, num_sequences=num_sequences)
    engine = Engine.load(model.path, split=tmp_path / "s.gguf", mode=mode, device="cpu")
    cpu = torch.device("cpu")
    placement = Placement.of_split(split, (cpu,) * len(split.budgets))
    decoder = engine._live
    step = hybrid_builder.build(
        decoder.weights,
        placement,
        engine.traffic,
        plain_backend(reference_kernels()),
        max_rows=max_rows,
        passes=PassSetup(num_rows=256),
    )
    engine._sequences.decoder = dataclasses.replace(decoder, native=step)
    return engine


@pytest.mark.parametrize(
    ("max_rows", "parallel", "is_said"), [(1, 2, True), (1, 1, False), (2, 2, False)]
)
def test_texts_share_a_step_of_several_rows_only(tmp_path, capsys, max_rows, parallel, is_said):
    """A server says so if they take turns."""
    model = saved(tmp_path)
    config = ServeConfig(model=model.path, parallel=parallel, kept=0)
    with loaded(tmp_path, model, "random", 2, max_rows=max_rows) as engine:
        assert engine.has_row_steps == (max_rows > 1)
        _say_loaded(engine, config, 2)
    assert ("requests take turns" in capsys.readouterr().err) == is_said


@pytest.mark.parametrize("num_sequences", [1, 3])
@pytest.mark.parametrize("length", [0, 5])
def test_a_step_built_again_spares_an_open_text(tmp_path, num_sequences, length):
    """Building runs a trial step at position 0, and new thresholds rebuild the step while texts are
    open."""
    model = saved(tmp_path)
    with (
        loaded(tmp_path, model, "every kind of layer", num_sequences) as engine,
        engine.sequence() as text,
    ):
        if length:
            text.extend(list(range(3, 3 + length)))
        weights = engine._live.weights
        (table,) = weights.cache.tables
        caches = [layer.attention.cache for layer in weights.layers]
        before = [(c.key_BKPX.clone(), c.value_BKPX.clone()) for c in caches]
        blocks = table.block_SN.clone()
        split = Split.load(tmp_path / "s.gguf")
        placement = Placement.of_split(split, (torch.device("cpu"),) * len(split.budgets))
        hybrid_builder.build(weights, placement, engine.traffic, plain_backend(reference_kernels()))
        assert torch.equal(table.block_SN, blocks)
        used = slice(0, length if num_sequences > 1 else None)
        for cache, (key, value) in zip(caches, before, strict=True):
            for got, want in ((cache.key_BKPX, key), (cache.value_BKPX, value)):
                assert torch.equal(got[0, :, used], want[0, :, used])


class TorchOperations(TorchDispatchMode):
    """The names of torch's operations on more values than one thread takes."""

    ONE_THREAD = 32768  # at::internal::GRAIN_SIZE

    def __init__(self):
        super().__init__()
        self.large = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        tensors = [t for t in (*args, found) if isinstance(t, torch.Tensor)]
        is_view = func.is_view or func._schema.name in ("aten::detach", "aten::lift_fresh")
        if not is_view and any(t.numel() > self.ONE_THREAD for t in tensors):
            self.large.append(func._schema.name)
        return found


def test_logits_are_handed_over_without_waking_torchs_threads(tmp_path):
    """Its threads would spin on the cores of the kernels' threads."""
    sizes = make_sizes(num_layers=4, num_neurons=96, context_length=128, vocab_size=33000)
    model = saved(tmp_path, sizes=sizes)
    with loaded(tmp_path, model, "every kind of layer", 1) as engine:
        step = engine._live.native
        rows = rows_of([3, 4], 0, "all")
        want = step.run_rows(rows).clone()
        step._step = lambda rows, num_rows: None  # the logits are in the host's buffer
        with TorchOperations() as operations:
            got = step.run_rows(rows)
        assert torch.equal(got, want) and not operations.large
        with TorchOperations() as operations:
            got[0] = want[1]
        assert operations.large == ["aten::copy_"]


def saved(tmp_path, **options):
    shape = make_sizes(num_layers=4, num_neurons=96, context_length=128)
    model = make(tmp_path, sizes=options.pop("sizes", shape), **options)
    model.save(model.path)
    return model


def rows_of_steps(step) -> set[int]:
    """The numbers of rows for which steps have been prepared."""
    return {num_rows for work, num_rows in step.segments if work == "step"}


class StepsAlone:
    """Logits of texts computed alone, one token at a time, and cached."""

    def __init__(self, engine: Engine) -> None:
        self.step = engine._live.native
        self.known: dict[tuple[int, ...], torch.Tensor] = {}

    def logits(self, ids: list[int]) -> torch.Tensor:
        """The logits after the last token; a text not in the cache is computed from its start."""
        key = tuple(ids)
        if key not in self.known:
            for at, token in enumerate(ids):
                self.known[key[: at + 1]] = self.step.run(token, at).clone()
        return self.known[key]


def schedule(engine: Engine, alone: StepsAlone, chance: random.Random, steps: int) -> int:
    """Takes up to ROOM sequences through random operations; returns the number of rows compared."""
    texts = [engine.sequence()]
    compared = 0
    for _ in range(steps):
        change_texts(engine, texts, chance, chance.random(), 0.3)
        parts = []
        for text in chance.sample(texts, chance.randint(1, len(texts))):
            count = min(text.room, chance.choice((1, 1, 1, 2, 3, 5)))
            tokens = [chance.randrange(6) for _ in range(count)]
            if tokens:
                parts.append(Part(sequence=text, tokens=tokens, wanted="all"))
        for part, got in zip(parts, engine.run(parts), strict=True):
            ids = part.sequence.ids
            for number, row in enumerate(got):
                want = alone.logits(ids[: len(ids) - len(got) + 1 + number])
                assert torch.equal(row, want), (ids, number)
                compared += 1
    for text in texts:
        text.close()
    return compared


def schedules(tmp_path, plan, count, **options):
    model = saved(tmp_path, **options)
    compared = 0
    with loaded(tmp_path, model, plan, 1) as single, loaded(tmp_path, model, plan, ROOM) as engine:
        alone = StepsAlone(single)
        for seed in range(count):
            compared += schedule(engine, alone, random.Random(f"{plan} {seed}"), 8)
        table = engine.layers[0].attention.cache.table
        assert (table.block_SN == NO_BLOCK).all() and len(table._free) == table.num_blocks
        assert {1, 2, 4, 8} <= rows_of_steps(engine._live.native) <= set(ROWS)
    return compared


@pytest.mark.parametrize("plan", DIVIDED[:3])
def test_random_schedules(tmp_path, plan):
    assert schedules(tmp_path, plan, 4) > 60


def test_the_comparison_finds_a_wrong_block(tmp_path):
    """A sequence reads another's block."""
    model = saved(tmp_path)
    with loaded(tmp_path, model, "random", 2) as engine:
        first, second = engine.sequence(), engine.sequence()
        for text, token in ((first, 1), (second, 2)):
            text.extend([token] * 5, "all")
        want = first.extend([3], "all")
        first.rollback(5)
        table = engine.layers[0].attention.cache.table
        table.block_SN[0, 0] = table.block_SN[1, 0]
        assert not torch.equal(first.extend([3], "all"), want)


def test_the_first_step_of_a_number_of_rows_has_its_blocks(tmp_path):
    """It runs once before it is captured, when nothing else has given the rows a place."""
    model, seen = saved(tmp_path), []
    with loaded(tmp_path, model, "random", 3) as engine:
        step = engine._live.native
        prepare = step.prepare

        def watched(work, num_rows):
            of_rows = (step.host.inputs[name][:num_rows] for name in ("sequence", "position"))
            rows = zip(*of_rows, strict=True)
            for sequence, position in rows:
                for table, block_SN in step.host.tables.items():
                    seen.append(int(block_SN[sequence, int(position) // table.block_length]))
            return prepare(work, num_rows)

        step.prepare = watched
        texts = [engine.sequence() for _ in range(2)]
        engine.run([Part(sequence=each, tokens=[1, 2], wanted="all") for each in texts])
    assert len(seen) >= 4 and min(seen) >= 0


def test_rows_without_logits_and_prompts_between(tmp_path):
    """A prompt is computed in a pass and the tokens of other sequences in steps; the logits are in
    the order of the parts."""
    model = saved(tmp_path)
    with loaded(tmp_path, model, "random", 3) as engine:
        texts = [engine.sequence() for _ in range(3)]
        parts = [
            Part(sequence=texts[0], tokens=[1], wanted="all"),
            Part(sequence=texts[1], tokens=[1, 2, 3, 4], wanted="last"),
            Part(sequence=texts[2], tokens=[3, 2], wanted="all"),
        ]
        got = engine.run(parts)
        assert [len(each) for each in got] == [1, 1, 2]
        for part, each in zip(parts, got, strict=True):
            again = engine._live.native.run(
                part.tokens[-1], len(part.tokens) - 1, part.sequence.number
            )
            assert torch.allclose(each[-1], again, rtol=1e-4, atol=1e-5)
        with pytest.raises(AssertionError):
            assert torch.equal(got[0][0], got[2][0])


@pytest.mark.parametrize("kind", ["f16", "q4_0"])
def test_more_rows_than_a_step_takes_are_several_steps(tmp_path, kind):
    model = saved(tmp_path, kind=kind)
    with loaded(tmp_path, model, "random", 1, max_rows=2) as engine:
        native = engine._live.native
        alone = torch.stack(
            [native.run(token, at).clone() for at, token in enumerate([1, 2, 3, 4, 5])]
        )
        rows = rows_of([1, 2, 3, 4, 5], 0, "all")
        assert torch.equal(native.run_rows(rows), alone) and rows_of_steps(native) == {1, 2}
        assert native.has_equal_rows
        check_rows(engine._live)


@pytest.mark.parametrize("kind", ["q4_k", "q6_k"])
def test_k_quants_on_a_gpu_refuse_drafts(tmp_path, kind):
    """Rows that are computed together are rounded differently from single ones, so drafts could
    change a text."""
    shape = make_sizes(num_layers=4, num_neurons=96, width=256, context_length=128)
    model = saved(tmp_path, kind=kind, sizes=shape)
    with loaded(tmp_path, model, "random", 1) as engine:
        assert not engine._live.native.has_equal_rows
        with pytest.raises(HotsplitError, match="leave --speculate out"):
            check_rows(engine._live)


def test_a_step_with_room_for_one_row_takes_one_at_a_time(tmp_path):
    model = saved(tmp_path)
    with loaded(tmp_path, model, "random", 3, max_rows=1) as engine:
        texts = [engine.sequence() for _ in range(3)]
        parts = [Part(sequence=t, tokens=[n, 2], wanted="all") for n, t in enumerate(texts)]
        got = engine.run(parts)
        assert rows_of_steps(engine._live.native) == {1}
        for part, each in zip(parts, got, strict=True):
            assert torch.equal(each[-1], engine._live.native.run(2, 1, part.sequence.number))


def test_a_fork_and_a_saved_state_continue_as_the_text(tmp_path):
    model = saved(tmp_path)
    with loaded(tmp_path, model, "every kind of layer", 3) as engine:
        text = engine.sequence()
        text.extend([1, 2, 3, 4, 5], "all")
        fork, other = text.fork(), engine.sequence()
        other.write_state(text.ids, text.read_state())
        parts = [Part(sequence=each, tokens=[7, 1], wanted="all") for each in (text, fork, other)]
        got = engine.run(parts)
        assert torch.equal(got[0], got[1]) and torch.equal(got[0], got[2])
        fork.rollback(3)
        fork.extend([4, 5], "all")
        assert torch.equal(fork.extend([7, 1], "all"), got[0])
