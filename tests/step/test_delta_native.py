"""Gated delta nets and short convolutions in C++ against the float64 decoder: at every level, with
heads of any size, for a text at once, in parts and token by token, whose bits are the same with any
number of threads."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from delta_models import KIMI, STATEFUL, TINY, conv_model, delta_model
from models import make_sizes
from reference import logits_ref, rel_error

from hotsplit import Engine
from hotsplit.files.gguf_file import array_entry
from hotsplit.model.delta_net import DECAY_BIAS
from hotsplit.runtime.kernels.cpu import library

# Key heads, value heads, values of a key and of a value head, taps, whether value heads are grouped
# by key heads. The last one has whole vectors at all levels, the others remainders of columns or of
# rows.
HEADS = ((1, 1, 5, 3, 4), (2, 6, 20, 37, 2), (3, 3, 33, 24, 4), (2, 4, 48, 64, 4, True))
IDS = [(7 * i + i * i) % 50 for i in range(70)]
SIZES = make_sizes(num_layers=2, context_length=300)
# A hidden size of no whole vectors.
ODD = make_sizes(num_layers=2, width=36, num_heads=2, num_kv_heads=1, context_length=300)


def with_heads(heads):
    names = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "num_taps")
    numbers = dict(zip((*names, "is_grouped"), heads, strict=False))
    return delta_model(SIZES, delta=replace(TINY, **numbers), period=2)


def with_decays(numbers):
    """A decay of each row of the state: heads, their width, taps."""
    heads, width, taps = numbers
    sizes = {"num_key_heads": heads, "num_value_heads": heads, "num_taps": taps}
    kimi = replace(KIMI, key_head_dim=width, value_head_dim=width, **sizes)
    return delta_model(SIZES, delta=kimi, period=2)


def with_taps(num_taps):
    return conv_model(ODD, period=2, num_taps=num_taps)


@pytest.mark.parametrize(
    "make, numbers",
    [
        *((with_heads, n) for n in HEADS),
        *((with_decays, n) for n in ((1, 5, 2), (3, 20, 3), (2, 64, 4))),
        *((with_taps, n) for n in (1, 2, 5)),
    ],
)
def test_passes_of_any_length_have_equal_bits(make, numbers, level):
    ids = [*IDS, *IDS, *IDS, *IDS][:257]
    with Engine.of(make(numbers), mode="dense") as engine:
        want = engine.logits(ids)
        exact = logits_ref(engine.model, ids)
        assert rel_error(want, exact) < 1e-5 and rel_error(want.flip(0), exact) > 0.1
        for threads, ends in ((1, (1, 3, 10, 74, 257)), (2, (257,)), (3, range(1, 12))):
            library.set_threads(threads)
            with engine.sequence() as text:
                for begin, end in pairwise((0, *ends)):
                    assert torch.equal(text.extend(ids[begin:end], "all"), want[begin:end])
                for start in (0, 40):  # checks, of which a part is accepted
                    text.rollback(0)
                    if start:
                        text.extend(ids[:start], "none")
                    for turn, count in enumerate((2, 5, 17, 17, 3, 1, 17, 6)):
                        at = text.length
                        got = text.extend(ids[at : at + count], "all")
                        assert torch.equal(got, want[at : at + count])
                        text.rollback(at + 1 + 5 * turn % count)
                        assert text.reusable(text.length) == text.length


@pytest.mark.parametrize("bias", [-200.0, -20.0, 20.0, 200.0])
@pytest.mark.parametrize("make, numbers", [(with_heads, HEADS[2]), (with_decays, (3, 20, 3))])
def test_gates_stay_finite_where_their_functions_do_not(level, make, numbers, bias):
    """Decays far from 0 are those of float64."""
    model = make(numbers)
    name = f"blk.0.{DECAY_BIAS}"
    entry = array_entry(np.full(model.tensors[name].shape, bias, np.float32), "f32")
    with Engine.of(replace(model, tensors=model.tensors | {name: entry})) as engine:
        assert rel_error(engine.logits(IDS), logits_ref(engine.model, IDS)) < 1e-5


@pytest.fixture(params=STATEFUL)
def model_path(tmp_path, request):
    """The path of a model of five layers, one of which attends."""
    sizes = make_sizes(num_layers=5, context_length=400, num_heads=4, num_kv_heads=2)
    model = replace(STATEFUL[request.param](sizes, period=3), path=tmp_path / "m.gguf")
    model.save(model.path)
    return model.path


def test_a_model_agrees_with_the_reference(model_path, level):
    with Engine.load(model_path, mode="dense") as engine:
        got = engine._prefill(torch.tensor(IDS))
        for position, token in enumerate(IDS):
            one_by_one = engine._step(token, position)
        assert torch.equal(got, one_by_one)
        assert rel_error(got, logits_ref(engine.model, IDS)[-1]) < 1e-5


def test_observers_see_layers_with_states(model_path):
    names, seen, want = ("layer_out", "ffn_hidden", "attn_norm", "attn_heads"), {}, {}
    with (
        Engine.load(model_path, mode="dense") as engine,
        engine.observe(
            lambda name, layer, x: seen.update({(name, layer): x.clone()}),
            lambda name, layer: name in names,
        ),
    ):
        engine._prefill(torch.tensor(IDS))
        logits_ref(engine.model, IDS, seen=want)
    assert len(seen) == 4 * engine.model.spec.num_layers
    for key, values in seen.items():
        assert rel_error(values, want[key]) < 1e-5
