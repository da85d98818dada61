"""Cold weights streamed to a GPU for a prompt: the same values as on the CPU, and no order of
copies and products that the events allow changes any of them. The CPU stands for the GPU, with
streams that run late."""

import dataclasses
from functools import partial

import numpy as np
import pytest
import torch
from checkpoints import random_model, save_tokenizer
from fake_streams import FakeDevice, FakeStream, Race
from models import make_model, make_sizes
from passes import logits, streaming
from reference import logits_ref, rel_error
from small_blocks import STORED_KINDS as KINDS
from test_families import CASES, converted
from test_native_step import BOUNDS
from test_runtime import make_split

from hotsplit import Engine
from hotsplit.artifacts.model_file import ModelFile
from hotsplit.runtime.device import staging
from hotsplit.runtime.device.staging import Staging
from hotsplit.runtime.gpu_setup import cold_blocks
from hotsplit.runtime.kernels.gate import Gate
from hotsplit.runtime.kernels.stored import rows_together
from hotsplit.runtime.model.placement import Placement
from hotsplit.runtime.prefill.cold_spans import ColdBlock
from hotsplit.runtime.prefill.cold_stream import ColdStream
from hotsplit.runtime.weights.matrix import Linear, Matrix
from hotsplit.runtime.weights.neuron_block import NeuronBlock

CPU = torch.device("cpu")
F, D = 96, 64
IDS = np.random.default_rng(3).integers(0, 50, 21).tolist()
BOUND = 1e-5
random = np.random.default_rng(0)
PATTERNS = {
    "no neuron hot": [[], []],
    "all hot": [range(F), range(F)],
    "one hot": [[5], [90]],
    "one cold": [np.delete(np.arange(F), 7), np.delete(np.arange(F), 0)],
    "mixed": [[], range(F)],
    "random": [random.permutation(F)[:30], random.permutation(F)[:50]],
}


def counted(stream):
    """A list to which the stream appends the number of each piece that it starts."""
    pieces, was = [], stream._start

    def start(number):
        if number < len(stream._pieces):
            pieces.append(number)
        was(number)

    stream._start = start
    return pieces


def planned(tmp_path, hot, **options):
    model = dataclasses.replace(make_model(**options), path=tmp_path / "m.gguf")
    model.save(model.path)
    split = make_split(model, hot)
    split.save(tmp_path / "s.gguf")
    return model, split


@pytest.mark.parametrize("mode", ["dense", "exact", "predicted"])
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("is_resident", [False, True])
def test_streamed_neurons_give_the_results_of_the_cpu(tmp_path, pattern, mode, is_resident):
    model, split = planned(tmp_path, PATTERNS[pattern], predictor_rank=8)
    with Engine.load(
        model.path, split=tmp_path / "s.gguf", mode=mode, is_resident=is_resident
    ) as engine:
        want = engine.logits(IDS)
        step, streams = streaming(engine, split)
        if not streams:
            assert pattern == "all hot"
            return
        stream = next(iter(streams.values()))
        logits(step, IDS)  # the first pass of a length runs twice
        pieces = counted(stream)
        assert rel_error(logits(step, IDS), want) < BOUND
        assert pieces == list(range(len(stream._pieces)))
        assert len(pieces) > 2 or pattern == "one cold"
        assert not stream._slots  # the buffers are given back
        if mode != "predicted":
            assert rel_error(logits(step, IDS), logits_ref(model, IDS)) < BOUND


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_resident", [False, True])
def test_every_type(tmp_path, kind, is_resident):
    shape = make_sizes(width=256, num_neurons=F)
    model, split = planned(tmp_path, PATTERNS["random"], kind=kind, sizes=shape)
    for mode in ("dense", "exact"):
        with Engine.load(
            model.path, split=tmp_path / "s.gguf", mode=mode, is_resident=is_resident
        ) as engine:
            want = engine.logits(IDS)
            step, _ = streaming(engine, split)
            # Products of passes round their inputs to 16 bits, those of the CPU to 8 or 16.
            bound = (
                BOUND
                if kind == "f32"
                else (1e-2 if kind == "bf16" else 2 * BOUNDS.get(kind, BOUNDS["q4_0"]))
            )
            assert rel_error(logits(step, IDS), want) < bound


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_of_tiles_and_groups_are_whole(tmp_path, kind):
    """Two layers, one of which is divided, whose cold neurons have the forms of the CPU alone."""
    hot = [range(64), []]
    model, split = planned(tmp_path, hot, kind=kind, sizes=make_sizes(width=256, num_neurons=256))
    with Engine.load(model.path, split=tmp_path / "s.gguf", mode="dense") as engine:
        want = engine.logits(IDS)
        step, streams = streaming(engine, split)
        stream = next(iter(streams.values()))
        logits(step, IDS)  # the first pass of a length runs twice
        found = {m.kind for layer in engine.layers for m in layer.ffn.blocks[-1].matrices}
        together = max(rows_together(kind) for kind in found)
        grouped = ("f16", "bf16", "q8_0", "q4_0")
        assert together == (1 if kind == "f32" else 64 if kind in grouped else 16)
        pieces = counted(stream)
        assert rel_error(logits(step, IDS), want) < (
            1e-2 if kind == "bf16" else 2 * BOUNDS.get(kind, BOUNDS["q4_0"])
        )
        assert pieces == list(range(len(stream._pieces))) and len(pieces) > 2
        assert not any(a % together or b % together for _, a, b in stream._pieces)
        assert any(b - a > together for _, a, b in stream._pieces)


@pytest.mark.parametrize("case", ["opt", "llama-biases", "falcon-many-keys"])
@pytest.mark.parametrize("is_resident", [False, True])
def test_without_gates_and_with_biases(tmp_path, case, is_resident):
    folder = random_model(tmp_path / "hf", CASES[case])
    save_tokenizer(folder, 320)
    path = converted(folder, tmp_path / "m.gguf", outtype="f32")
    model = ModelFile.load(path)
    neurons = np.arange(model.spec.most_neurons)
    split = make_split(model, [neurons[::3], neurons[:0], neurons[1:]])
    split.save(tmp_path / "s.gguf")
    with Engine.load(
        path, split=tmp_path / "s.gguf", mode="exact", is_resident=is_resident
    ) as engine:
        want = engine.logits(IDS)
        step, _ = streaming(engine, split)
        assert rel_error(logits(step, IDS), want) < BOUND


def test_few_tokens_stay_on_the_cpu(tmp_path):
    model, split = planned(tmp_path, PATTERNS["random"])
    with Engine.load(model.path, split=tmp_path / "s.gguf") as engine:
        want = engine.logits(IDS)
        step, streams = streaming(engine, split, least_tokens=len(IDS))
        pieces = counted(next(iter(streams.values())))
        assert rel_error(logits(step, IDS[:-1]), want[:-1]) < BOUND
        assert not pieces
        logits(step, IDS)
        assert pieces


def test_an_interrupted_pass_does_not_disturb_the_next(tmp_path):
    model, split = planned(tmp_path, PATTERNS["random"])
    with Engine.load(model.path, split=tmp_path / "s.gguf") as engine:
        want = engine.logits(IDS)
        step, streams = streaming(engine, split)
        was, layers = ColdStream.run, []

        def run(self, layer, add):
            layers.append(layer)
            if layer == 1:
                raise KeyboardInterrupt
            was(self, layer, add)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ColdStream, "run", run)
            with pytest.raises(KeyboardInterrupt):
                logits(step, IDS)
        assert layers == [0, 1] and next(iter(streams.values()))._slots
        assert rel_error(logits(step, IDS), want) < BOUND


# ---- the order of copies and products, on streams that run late ------------------------------


class Event(dict):
    """A fake stream's event, for which the host can wait."""

    device: FakeDevice

    def synchronize(self):
        self.device.drain()


class Late(FakeStream):
    def record(self):
        event = Event(super().record())
        event.device = self.device
        return event


def late_streams(device):
    for _ in range(2):
        device.queues.append([])
    return Late(device, 0), Late(device, 1)


def neurons(count, seed, *, is_together):
    """A block in memory, with interleaved or separate gates, ups and downs, and its function in
    float64."""
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randn(count, 3, D, generator=generator)
    parts = [whole[:, i] if is_together else whole[:, i].clone() for i in range(3)]
    gate, up, down = (Matrix(data=part, kind="f32", width=D) for part in parts)
    bias_N = torch.randn(count, generator=generator)
    block = NeuronBlock(
        role="cold",
        gate=Linear(weight=gate, bias_N=bias_N),
        up=Linear(weight=up),
        down=down,
        id_N=torch.arange(count),
        row_N=None,
    )
    gate_ND, up_ND, down_ND = (part.double() for part in parts)

    def reference(x_TD):
        hidden = (x_TD.double() @ gate_ND.T + bias_N).relu() * (x_TD.double() @ up_ND.T)
        return hidden @ down_ND

    return block, reference


@dataclasses.dataclass
class Case:
    """Three layers on late streams; `passes` runs them `count` times and returns the errors."""

    device: FakeDevice
    stream: ColdStream
    references: list

    def add(self, x_TD, y_TD, piece):
        tensors = [matrix.data for matrix in piece.matrices]
        self.stream.compute.launch(
            partial(add, piece, x_TD, y_TD), reads=[*tensors, x_TD, y_TD], writes=[y_TD]
        )

    def passes(self, count=2):
        got = []
        for number in range(count):
            for layer, reference in enumerate(self.references):
                x_TD = torch.randn(
                    5, D, generator=torch.Generator().manual_seed(10 * number + layer)
                )
                y_TD = torch.zeros(5, D)
                self.stream.run(layer, partial(self.add, x_TD, y_TD))
                got.append((y_TD, reference(x_TD)))
        self.device.drain()
        return [rel_error(y_TD, want_TD) for y_TD, want_TD in got]


def add(piece, x_TD, y_TD):
    gate = Gate(activation="relu", threshold=0.0, computes_all=True)
    value, _ = gate.act(piece.gate.apply(x_TD))
    y_TD += piece.down.combine_many(gate.hidden(value, piece.up.apply(x_TD)))


def late_case(monkeypatch, *, is_staged, seed=0, dropped=None, is_together=True):
    device = FakeDevice(seed=seed, dropped=dropped)
    compute, copier = late_streams(device)
    made = [neurons(count, count, is_together=is_together) for count in (7, 1, 12)]
    blocks = {layer: ColdBlock.of(block) for layer, (block, _) in enumerate(made)}
    size = 3 * max(block.least_piece_bytes for block in blocks.values())
    stream = ColdStream(
        device=CPU,
        blocks=blocks,
        buffers=tuple(torch.empty(size, dtype=torch.uint8) for _ in range(2)),
        least_tokens=1,
        compute=compute,
        copier=copier,
        staging=Staging(size, copier, is_pinned=False) if is_staged else None,
    )
    return Case(device, stream, [reference for _, reference in made])


@pytest.mark.parametrize("is_together", [False, True])
@pytest.mark.parametrize("is_staged", [False, True])
def test_any_order_that_the_events_allow_gives_right_values(monkeypatch, is_staged, is_together):
    for seed in range(8):
        case = late_case(monkeypatch, is_staged=is_staged, seed=seed, is_together=is_together)
        assert len(case.stream._pieces) >= 5
        assert max(case.passes()) < BOUND


def test_every_wait_is_needed(monkeypatch):
    case = late_case(monkeypatch, is_staged=False)
    case.passes()
    num_waits, num_pieces = case.device.num_waits, len(case.stream._pieces)
    assert num_waits == 2 * 2 * num_pieces  # a copy waits for a buffer, a product for a copy
    # The first two copies of the first pass find unused buffers; the second copy of the second
    # pass follows the first, which has waited for the same event.
    for dropped in sorted({*range(2, num_waits)} - {num_waits // 2 + 1}):
        case = late_case(monkeypatch, is_staged=False, dropped=dropped)
        with pytest.raises(Race):
            case.passes()


def test_values_are_wrong_where_a_copy_is_late(monkeypatch):
    """The comparison of values finds late copies too, not only the check for races."""
    monkeypatch.setattr("fake_streams.check_races", lambda operations: None)
    errors = []
    for dropped in range(2, 20):
        for seed in range(4):
            case = late_case(monkeypatch, is_staged=False, dropped=dropped, seed=seed)
            errors.append(np.nan_to_num(max(case.passes()), nan=1.0))
    assert max(errors) > 0.1 and np.mean(np.array(errors) > BOUND) > 0.2


def test_the_host_waits_before_it_fills_a_buffer_again(monkeypatch):
    monkeypatch.setattr(staging, "finish", lambda event: None)
    case = late_case(monkeypatch, is_staged=True)
    assert np.nan_to_num(max(case.passes()), nan=1.0) > 0.1


def test_copies_run_ahead(monkeypatch):
    """A piece may be copied while the one before it is multiplied, even one of the layer before."""
    case = late_case(monkeypatch, is_staged=False)
    case.passes(count=1)
    products = [o for o in case.device.log if o.name == "kernel"]
    copies = [o for o in case.device.log if o.name == "copy"]
    num_spans = len(case.stream.blocks[0].spans)
    assert len(copies) == num_spans * len(products)
    copies.sort(key=lambda o: o.number)
    for number, product in enumerate(products[:-1]):
        next_copy = copies[num_spans * (number + 1)]
        assert not product.is_before(next_copy) and not next_copy.is_before(product)


# ---- spans ------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode, num_spans", [("dense", 3), ("exact", 2), ("predicted", 1)])
def test_matrices_that_are_read_together_are_one_copy(tmp_path, mode, num_spans):
    hot, num_cold = [PATTERNS["random"][1][:32]] * 2, F - 32
    model, split = planned(tmp_path, hot, kind="q4_0", predictor_rank=8)
    with Engine.load(model.path, split=tmp_path / "s.gguf", mode=mode, is_resident=True) as engine:
        placement = Placement.of_split(split, (CPU,))
        for block in cold_blocks(engine._live.weights, placement, CPU).values():
            assert block.number == num_cold
            assert len(block.spans) == num_spans + 1  # and the ids
            assert block.unit_bytes == 3 * 18 * D // 32 + 8
            pieces = list(block.pieces(10 * block.least_piece_bytes))
            assert [a for a, _ in pieces] == [0, *(b for _, b in pieces[:-1])]
            assert pieces[-1][1] == num_cold
            assert all(block.layout_bytes(b - a) <= 10 * block.least_piece_bytes for a, b in pieces)
