"""Experts that are read from the drive while the model runs: the bits of a model that is in memory
as a whole, whatever arrives when; files that are cut short, written to or replaced; and file
systems without direct reads."""

import dataclasses
import errno
import os
from contextlib import ExitStack

import numpy as np
import pytest
import torch
from test_experts import ROUTES, mixture
from test_runtime import make_split

from hotsplit import Engine
from hotsplit.artifacts.model_file import ModelFile
from hotsplit.errors import HotsplitError
from hotsplit.runtime import expert_slots
from hotsplit.runtime.kernels.cpu import library
from hotsplit.runtime.step.sequences import Part
from hotsplit.runtime.weights.drive import Drive

IDS = np.random.default_rng(0).integers(0, 50, 24).tolist()


def saved(folder, **options):
    """A file in llama.cpp's layout."""
    options = {"kind": "q8_0", "num_neurons": 64} | options
    path = folder / "m.gguf"
    mixture(path=path, layout="stock", **options).save(path)
    return path


@pytest.fixture
def with_slots(monkeypatch):
    """Loads a model with so many slots in each layer."""

    def load(path, count, delay_us=0, split=None, **options):
        with monkeypatch.context() as patch:
            patch.setattr(expert_slots, "room_for_weights", lambda ram: 0)
            patch.setattr(expert_slots, "LONG_SHARE", -1e9)
            patch.setattr(expert_slots, "slots_in", lambda *given: count)
            engine = Engine.of(ModelFile.load(path), split, mode="dense", device="cpu", **options)
        assert engine.drive is not None
        engine.drive.struct.delay_us = delay_us
        return engine

    return load


def logits_of(engine):
    """The logits of a prompt's tokens and of single steps, of two texts."""
    found = []
    with engine:
        for ids in (IDS, IDS[::-1]):
            with engine.sequence() as text:
                found.append(text.extend(ids[:15], "all").clone())
                found += [text.extend([token]).clone() for token in ids[15:]]
    return torch.cat(found)


def in_memory(path, **options):
    return logits_of(Engine.load(path, mode="dense", device="cpu", is_resident=True, **options))


@pytest.mark.parametrize("count", [1, 3, 7])
@pytest.mark.parametrize("route", ["softmax", "one", "groups", "of chosen"])
def test_experts_that_arrive_give_the_bits_of_those_in_memory(tmp_path, with_slots, route, count):
    path = saved(tmp_path, route=ROUTES[route])
    want, engine = in_memory(path), with_slots(path, count)
    drive = engine.drive
    assert torch.equal(logits_of(engine), want)
    assert drive.facts["num_kept"] > 0 and drive.facts["num_bytes"] > 0
    if count >= ROUTES[route].num_experts:  # each is read once
        assert drive.facts["num_kept"] == drive.facts["num_used"] - drive.facts["num_hits"]


@pytest.mark.parametrize("count", [1, 4])
def test_each_expert_is_read_once_for_the_rows_of_a_pass(tmp_path, with_slots, count):
    """A prompt of more rows than steps take otherwise, with the bits of shorter ones."""
    path = saved(tmp_path)
    ids = np.random.default_rng(1).integers(0, 50, 280).tolist()
    with Engine.load(path, mode="dense", device="cpu", is_resident=True) as engine:
        want = engine.logits(ids)
    with with_slots(path, count) as engine:
        experts = [
            engine.model.entry(0, f"ffn_{name}_exps.weight") for name in ("gate", "up", "down")
        ]
        layer_bytes = sum(entry.num_bytes for entry in experts)
        assert engine._live.most_tokens == 300  # the context
        assert torch.equal(engine.logits(ids), want)
        assert engine.drive.facts["num_bytes"] == 2 * layer_bytes
        assert torch.equal(engine.logits(ids), want)
        again = engine.drive.facts["num_bytes"] - 2 * layer_bytes
        assert again == 2 * layer_bytes * (7 - count) / 7


@pytest.mark.parametrize("level", library.usable_levels())
@pytest.mark.parametrize("kind", ["f32", "f16", "bf16", "q4_k", "q6_k", "q4_0"])
def test_so_do_experts_of_all_types(tmp_path, with_slots, kind, level):
    sizes = {"width": 256, "num_neurons": 256} if kind.endswith("_k") else {}
    path = saved(tmp_path, kind=kind, **sizes)
    library.set_level(level)
    try:
        assert torch.equal(logits_of(with_slots(path, 2)), in_memory(path))
    finally:
        library.set_level(library.usable_levels()[0])


def test_bits_do_not_depend_on_the_order_in_which_reads_arrive(tmp_path, with_slots):
    """In each of 1,000 layers of steps, reads come late in a random order."""
    path = saved(tmp_path, route=ROUTES["groups"])
    want, num_waits = in_memory(path), 0
    for number in range(25):
        engine = with_slots(path, 1 + number % 3, delay_us=200)
        drive = engine.drive
        assert torch.equal(logits_of(engine), want), number
        num_waits += 2 * 2 * (1 + len(IDS[15:]))  # layers, texts, steps
        assert drive.facts["num_hits"] < drive.facts["num_used"]
    assert num_waits >= 1000


@pytest.mark.parametrize("shift", [1, 64])
def test_an_expert_from_a_wrong_place_is_noticed(tmp_path, with_slots, monkeypatch, shift):
    path, real = saved(tmp_path), Drive.stack

    def moved(drive, entry):
        stack = real(drive, entry)
        return dataclasses.replace(stack, offset=stack.offset - shift * stack.row_bytes)

    monkeypatch.setattr(Drive, "stack", moved)
    assert not torch.equal(logits_of(with_slots(path, 2)), in_memory(path))


def test_rows_of_several_texts_share_what_arrives(tmp_path, with_slots):
    path, texts = saved(tmp_path), (IDS[:9], IDS[9:13], IDS[13:])

    def rows_of(engine):
        """The logits of three texts in shared steps."""
        found = []
        with engine, ExitStack() as stack:
            each = [stack.enter_context(engine.sequence()) for _ in texts]
            for begin, end in ((0, 2), (2, 3), (3, 4)):
                parts = zip(each, texts, strict=True)
                made = [Part(sequence=s, tokens=ids[begin:end]) for s, ids in parts]
                found += [logits_RV.clone() for logits_RV in engine.run(made)]
        return torch.cat(found)

    options = {"mode": "dense", "device": "cpu", "is_resident": True, "num_sequences": 3}
    want = rows_of(Engine.load(path, **options))
    assert torch.equal(rows_of(with_slots(path, 2, num_sequences=3)), want)


@pytest.mark.parametrize("harm", ["cut", "written"])
def test_a_file_that_is_changed_ends_the_step_in_one_line(tmp_path, with_slots, harm):
    path = saved(tmp_path)
    with with_slots(path, 1) as engine, engine.sequence() as text:
        text.extend(IDS[:4])
        size, about = path.stat().st_size, path.stat()
        if harm == "cut":
            os.truncate(path, size - 8)
        else:
            os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns + 1))
        for _ in range(2):
            with pytest.raises(HotsplitError, match=f"{path}: was changed while it was read"):
                for token in IDS[4:]:
                    text.extend([token])
        os.truncate(path, size)  # the mapping ends with the engine


def test_a_file_that_is_replaced_is_read_as_it_was(tmp_path, with_slots):
    path = saved(tmp_path)
    want, engine = in_memory(path), with_slots(path, 1)
    other = tmp_path / "other"
    other.write_bytes(b"x" * 100)
    other.rename(path)
    assert torch.equal(logits_of(engine), want)


def test_a_read_error_names_the_file_and_the_next_step_tries_again(tmp_path, with_slots):
    path = saved(tmp_path)
    with with_slots(path, 1) as engine, engine.sequence() as text:
        drive = engine.drive
        number, closed = drive.descriptors[0], os.open(path, os.O_WRONLY)
        drive.descriptors[0] = closed  # of which nothing can be read
        with pytest.raises(HotsplitError, match=f"{path}: cannot be read .Bad file descriptor"):
            text.extend(IDS[:4])
        drive.descriptors[0] = number
        os.close(closed)
        got = text.extend(IDS[:4]).clone()
    with Engine.load(path, mode="dense", device="cpu", is_resident=True) as engine:
        assert torch.equal(got, engine.logits(IDS[:4])[-1:])


def test_without_direct_reads_a_line_says_so(tmp_path, with_slots, monkeypatch, caplog):
    path, real = saved(tmp_path), os.open
    want = in_memory(path)

    def refuse(name, flags, *given, **named):
        if flags & getattr(os, "O_DIRECT", 0):
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(name, flags, *given, **named)

    monkeypatch.setattr(os, "open", refuse)
    engine = with_slots(path, 2)
    assert torch.equal(logits_of(engine), want)
    assert "no direct reads (O_DIRECT)" in caplog.text


def planned(model, on_gpu, resident):
    """A plan of two layers with these experts on a GPU and in main memory, the others on the
    drive."""
    plan = make_split(model, [on_gpu, []], dense_on_gpu=[False, False], head_on_gpu=False)
    residents = tuple(np.array(ids, np.int32) for ids in resident)
    return dataclasses.replace(plan, resident_experts=residents)


def test_experts_of_a_plan_are_worth_more_at_first(tmp_path, with_slots):
    path, ids = saved(tmp_path), [[0, 2], [5, 6]]
    with with_slots(path, 2, split=planned(ModelFile.load(path), [], ids)) as engine:
        engine.logits([3])
        for layer, own in zip(engine.layers, ids, strict=True):
            worth_E = layer.ffn.blocks[0].arriving.worth_E[:7]
            others = sorted(set(range(7)) - set(own))
            assert worth_E[own].min() > 0.09
            assert (worth_E[others] == 0).sum() >= len(others) - 3  # those that the token chose
    want, split = in_memory(path), planned(ModelFile.load(path), [], ids)
    assert torch.equal(logits_of(with_slots(path, 2, split=split)), want)


def test_a_plan_with_experts_on_the_drive_beside_a_gpu_is_refused(tmp_path):
    path = saved(tmp_path)
    split = planned(ModelFile.load(path), [1], [[0, 2], [5, 6]])
    with pytest.raises(HotsplitError, match="leaves experts on the drive beside a GPU"):
        Engine.of(ModelFile.load(path), split, mode="dense", device="cpu")


def test_too_small_a_budget_is_refused(tmp_path):
    path = saved(tmp_path)
    with pytest.raises(HotsplitError, match=r"needs .* of main memory at least.*--ram is 1.00 MiB"):
        Engine.load(path, mode="dense", device="cpu", ram_bytes=1 << 20)


def test_with_room_for_all_nothing_is_read_later(tmp_path):
    with Engine.load(saved(tmp_path), mode="dense", device="cpu", ram_bytes=4 << 30) as engine:
        assert engine.drive is None
