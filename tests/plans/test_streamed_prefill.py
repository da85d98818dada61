"""Cold weights streamed to a GPU for a prompt give the same results as on the CPU, which stands for
the GPU here; test_fake_memory has streams that run late."""

import dataclasses

import numpy as np
import pytest
import torch
from checkpoints import random_model, save_tokenizer
from models import make_model, make_sizes
from passes import logits, streaming
from reference import logits_ref, rel_error
from small_blocks import STORED_KINDS as KINDS
from test_families import CASES, converted
from test_native_step import BOUNDS
from test_runtime import make_split

from hotsplit import Engine
from hotsplit.artifacts.model_file import ModelFile
from hotsplit.runtime.gpu_setup import cold_blocks
from hotsplit.runtime.kernels.stored import rows_together
from hotsplit.runtime.model.placement import Placement
from hotsplit.runtime.prefill.cold_stream import ColdStream

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
@pytest.mark.parametrize("number, pattern", [*enumerate(PATTERNS)])
def test_streamed_neurons_give_the_results_of_the_cpu(tmp_path, number, pattern, mode):
    """From the file in every second case, else from memory."""
    is_resident = bool((number + (mode == "exact")) % 2)
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


@pytest.mark.usefixtures("devices_types")
@pytest.mark.parametrize("kind", [*KINDS, "iq2_xs", "nvfp4"])
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
            bound = BOUND if kind == "f32" else (1e-2 if kind == "bf16" else 2 * BOUNDS[kind])
            assert rel_error(logits(step, IDS), want) < bound


@pytest.mark.usefixtures("devices_types")
@pytest.mark.parametrize("kind", [*KINDS, "iq3_s", "q2_0"])
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
        assert rel_error(logits(step, IDS), want) < (1e-2 if kind == "bf16" else 2 * BOUNDS[kind])
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


def test_copies_run_ahead(tmp_path):
    """While a piece is multiplied, the next one is copied, even if it is another layer's."""
    model, split = planned(tmp_path, PATTERNS["random"])
    with Engine.load(model.path, split=tmp_path / "s.gguf") as engine:
        _, streams = streaming(engine, split)
        stream = next(iter(streams.values()))
        done = counted(stream)
        for layer in streams:
            stream.run(layer, lambda piece: done.append("product"))
        copies = list(range(len(stream._pieces)))
        expected = [each for number in copies for each in ("product", number + 2)]
        assert done == [0, 1, *expected[:-4], "product", "product"]


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
