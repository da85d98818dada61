"""Every public method of an engine and of what it hands out, with arguments of wrong kinds: it
works or raises HotsplitError, and what was there before still works."""

import inspect
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from models import make_model, make_sizes
from test_chat import chat_keys

from hotsplit import Engine, HotsplitError
from hotsplit.runtime.generate.chat import Conversation
from hotsplit.runtime.generate.constraints import Constraint, regex_constraint
from hotsplit.runtime.step.sequences import Sequence, TextState
from hotsplit.runtime.text.codec import TextCodec

WRONG = [
    None,
    True,
    -1,
    5,
    1 << 70,
    1.5,
    float("nan"),
    "",
    "a",
    "\ud800",
    b"a",
    [],
    [None],
    [1.5],
    [[1]],
    {},
    {"a": 1},
    {1},
    object(),
    iter(()),
    Path("none"),
    torch.zeros(2),
    torch.zeros(2, 2),
    len,
    int,
]
MAKERS = {
    Engine: lambda engine: engine,
    Sequence: lambda engine: engine.sequence(),
    Conversation: lambda engine: engine.chat(),
    TextCodec: lambda engine: engine.codec,
    Constraint: lambda engine: regex_constraint("a+", engine.codec),
}
METHODS = [
    (kind, name)
    for kind in MAKERS
    for name, found in inspect.getmembers(kind)
    if name[0] != "_"
    and (inspect.isfunction(found) or inspect.ismethod(found))
    and len(inspect.signature(found).parameters) > inspect.isfunction(found)  # besides self
]


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    keys, vocab_size = chat_keys()
    path = tmp_path_factory.mktemp("kinds") / "m.gguf"
    make_model(
        sizes=make_sizes(vocab_size=vocab_size, context_length=64), kind="q8_0", extra_keys=keys
    ).save(path)
    with Engine.load(path, context_length=64, num_sequences=8) as engine:
        yield engine


def calls_of(method, wrong):
    """Arguments with the wrong value for all that are needed, and for one more."""
    parameters = inspect.signature(method).parameters.values()
    named = [
        each for each in parameters if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)
    ]
    needed = {each.name: wrong for each in named if each.default is each.empty}
    return [needed | {each.name: wrong} for each in named]


def use(found):
    """Reads the first of what a call returns, and gives it back."""
    if isinstance(found, Iterator):
        next(found, None)
    for end in ("close", "remove"):
        if not isinstance(found, Engine | list) and hasattr(found, end):
            getattr(found, end)()


@pytest.mark.parametrize(("kind", "name"), METHODS)
def test_a_method_works_or_refuses_in_one_line(engine, kind, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = engine.logits([3, 4])
    num_refused = 0
    for wrong in WRONG:
        for arguments in calls_of(getattr(kind, name), wrong):
            made = MAKERS[kind](engine)
            arguments.pop("self", None)
            try:
                use(getattr(made, name)(**arguments))
            except HotsplitError as error:
                assert "\n" not in str(error), arguments
                num_refused += 1
            finally:
                use(made)
    assert num_refused > 0
    assert torch.equal(engine.logits([3, 4]), before)


def test_a_state_is_written_to_an_empty_sequence(engine):
    with engine.sequence() as text, engine.sequence() as other:
        text.extend([3, 4])
        state = text.read_state()
        with pytest.raises(HotsplitError, match="has 2 tokens; a state is written to an empty one"):
            text.write_state([3, 4], state)
        for tokens, given in (
            ([3], state),
            ([3, 4], TextState(keys_values=[])),
            ([3, 1.5], state),
            ([3, 4], replace(state, keys_values=[None])),
            ([3, -1], state),
            ([3, 4], replace(state, keys_values=state.keys_values[::-1] * 2)),
        ):
            with pytest.raises(HotsplitError):
                other.write_state(tokens, given)
            assert other.length == 0
        other.write_state([3, 4], state)
        assert torch.equal(other.extend([5]), text.extend([5]))
        for token_id in (-1, 1 << 20, 1 << 40, 1 << 70):
            with pytest.raises(HotsplitError, match=r"^token ids must be in 0\.\.[0-9]+$"):
                text.extend([token_id])
        with pytest.raises(HotsplitError, match="reusable up to 9 of 3 tokens"):
            text.reusable(9)
        with pytest.raises(HotsplitError, match="position is 'a', wanted a whole number"):
            text.mark("a")
        with pytest.raises(HotsplitError, match="parts is 1, wanted a list of"):
            engine.run(1)
