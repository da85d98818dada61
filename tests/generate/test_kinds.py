"""Values of a wrong kind: options refuse them with a line that names option, value and kind; every
public method works or raises HotsplitError, and what was there before still works."""

import dataclasses
import inspect
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from models import make_model, make_sizes
from test_chat import chat_keys

from hotsplit import Engine
from hotsplit.errors import HotsplitError
from hotsplit.options.engine_config import EngineConfig
from hotsplit.options.generation_options import (
    GenerationOptions,
    SamplingOptions,
    SpeculationOptions,
)
from hotsplit.options.kinds import check_kind
from hotsplit.options.neuron_cache_options import CacheOptions
from hotsplit.runtime.generate.chat import ChatOptions, Conversation
from hotsplit.runtime.generate.constraints import Constraint, regex_constraint
from hotsplit.runtime.generate.ngrams import NgramDrafter
from hotsplit.runtime.generate.speculation import Speculation
from hotsplit.runtime.step.sequences import Part, Sequence, TextState
from hotsplit.runtime.text.codec import TextCodec

OPTIONS = (EngineConfig, CacheOptions, SamplingOptions, GenerationOptions, ChatOptions)
OPTIONS += (SpeculationOptions,)
FIELDS = [(kind, field.name) for kind in OPTIONS for field in dataclasses.fields(kind)]
METHODS = [
    (kind, name, argument)
    for kind, names in {
        Engine: ("load", "of", "generate", "generate_many", "chat", "observe", "decode_seconds"),
        Conversation: ("say", "save", "load"),
        Speculation: ("__init__",),
    }.items()
    for name in names
    for argument, parameter in inspect.signature(getattr(kind, name)).parameters.items()
    if argument != "self" and parameter.kind != parameter.VAR_KEYWORD
]


class Nothing:
    """A value of no kind that any option has."""

    def __repr__(self):
        return "Nothing()"


@pytest.mark.parametrize(("kind", "name"), FIELDS)
def test_no_option_takes_a_value_of_another_kind(kind, name):
    with pytest.raises(HotsplitError, match=rf"^{name} is Nothing\(\), wanted [^\n]+$"):
        kind(**{name: Nothing()})


@pytest.mark.parametrize(("kind", "name", "argument"), METHODS)
def test_no_method_takes_a_value_of_another_kind(kind, name, argument):
    """Before anything else happens, and before a missing argument is noticed."""
    function = getattr(kind, name)
    objects = [object()] if "self" in inspect.signature(function).parameters else []
    with pytest.raises(HotsplitError, match=rf"^{argument} is Nothing\(\), wanted [^\n]+$"):
        function(*objects, **{argument: Nothing()})


PAIRS_WANTED = "wanted a list of tuples of a whole number and a number"
LINES = [
    (GenerationOptions, {"max_tokens": 1.5}, "max_tokens is 1.5, wanted a whole number"),
    (GenerationOptions, {"max_tokens": True}, "max_tokens is True, wanted a whole number"),
    (GenerationOptions, {"stops": "abc"}, "stops is 'abc', wanted a list of strings"),
    (GenerationOptions, {"stops": ("a", 1)}, "stops is ('a', 1), wanted a list of strings"),
    (GenerationOptions, {"ignores_end": 1}, "ignores_end is 1, wanted True or False"),
    (EngineConfig, {"context_length": True}, "context_length is True, wanted a whole number"),
    (EngineConfig, {"max_loss": "0.1"}, "max_loss is '0.1', wanted a number"),
    (SamplingOptions, {"samplers": "top_k"}, "samplers is 'top_k', wanted a list of strings"),
    (SamplingOptions, {"logit_bias": ((1, "x"),)}, f"logit_bias is ((1, 'x'),), {PAIRS_WANTED}"),
    (SamplingOptions, {"logit_bias": {1: 2.0}}, f"logit_bias is {{1: 2.0}}, {PAIRS_WANTED}"),
    (ChatOptions, {"variables": [1]}, "variables is [1], wanted a dict"),
    (Engine.load, {"model": 7}, "model is 7, wanted a string or a Path"),
    (
        *(EngineConfig, {"neuron_cache": "on"}),
        "neuron_cache is 'on', wanted an object of class CacheOptions or 'off'",
    ),
    (
        *(SpeculationOptions, {"type": "n-gram"}),
        "type is 'n-gram', wanted 'none', 'auto', 'ngram', 'ngram-mod', 'draft' or 'mtp'",
    ),
    (
        *(Speculation, {"drafter": NgramDrafter(), "options": {}}),
        "options is {}, wanted an object of class SpeculationOptions",
    ),
    (
        *(EngineConfig, {"mode": f"{'x' * 99}\n"}),
        f"mode is '{'x' * 56}..., wanted 'dense', 'exact' or 'predicted'",
    ),
]


@pytest.mark.parametrize(("kind", "values", "line"), LINES)
def test_the_line_names_option_value_and_kind(kind, values, line):
    with pytest.raises(HotsplitError) as error:
        kind(**values)
    assert str(error.value) == line


def test_values_of_the_declared_kinds_are_accepted():
    GenerationOptions(max_tokens=np.int64(3), stops=["a"], num_logprobs=None)
    numbers = {"temperature": np.float32(0.5), "top_k": np.int32(5), "min_p": 0}
    numbers["seed"] = np.uint64(7)
    SamplingOptions(samplers=["top_k"], logit_bias=[[1, 2]], **numbers)
    EngineConfig(neuron_cache="off", rope_scale=2)
    for kind in (int, float):
        with pytest.raises(HotsplitError):
            check_kind("number", np.bool_(True), kind)


def test_texts_of_a_wrong_kind_are_refused(codec_model):
    with Engine.load(codec_model, device="cpu") as engine:
        for call, given, words in (
            (engine.generate_many, ["two"], "prompts is 'two', wanted a list"),
            (engine.generate, ["a", 1.5], "max_tokens is 1.5"),
            (engine.generate, ["a", 9, "0"], "temperature is '0', wanted a number"),
            (engine.generate, [5], "prompt is 5, wanted a string or a list"),
            (engine.run, [[3]], "parts is .3., wanted a list of objects of class Part"),
            (engine.run, [[Part(sequence=3, tokens=[1])]], "sequence is 3, wanted an object"),
        ):
            with pytest.raises(HotsplitError, match=words):
                call(*given)
        with pytest.raises(HotsplitError, match="constraints is .3., wanted a list"):
            engine.generate_many(["a"], constraints=[3])
        with pytest.raises(HotsplitError, match="0 steps from position 0"):
            engine.decode_seconds(steps=0)
        with pytest.raises(TypeError, match=r"generate\(\) missing"):
            engine.generate()


WRONG = [None, True, -1, 5, 1 << 70, 1.5, float("nan"), "", "a", "\ud800", b"a", [], [None], [1.5]]
WRONG += [[[1]], {}, {"a": 1}, {1}, object(), iter(()), Path("none"), len, int]
WRONG += [torch.zeros(2), torch.zeros(2, 2)]
MAKERS = {
    Engine: lambda engine: engine,
    Sequence: lambda engine: engine.sequence(),
    Conversation: lambda engine: engine.chat(),
    TextCodec: lambda engine: engine.codec,
    Constraint: lambda engine: regex_constraint("a+", engine.codec),
}
PUBLIC = [
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


@pytest.mark.parametrize(("kind", "name"), PUBLIC)
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
            except HotsplitError:
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
