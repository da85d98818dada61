"""Options of a wrong kind are refused with a line that names option, value and kind."""

import dataclasses
import inspect

import numpy as np
import pytest

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
from hotsplit.runtime.generate.ngrams import NgramDrafter
from hotsplit.runtime.generate.speculation import Speculation
from hotsplit.runtime.step.sequences import Part

OPTIONS = (
    EngineConfig,
    CacheOptions,
    SamplingOptions,
    GenerationOptions,
    ChatOptions,
    SpeculationOptions,
)
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


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda: GenerationOptions(max_tokens=1.5), "max_tokens is 1.5, wanted a whole number"),
        (lambda: GenerationOptions(max_tokens=True), "max_tokens is True, wanted a whole number"),
        (lambda: GenerationOptions(stops="abc"), "stops is 'abc', wanted a list of strings"),
        (lambda: GenerationOptions(stops=("a", 1)), "stops is ('a', 1), wanted a list of strings"),
        (lambda: GenerationOptions(ignores_end=1), "ignores_end is 1, wanted True or False"),
        (
            lambda: GenerationOptions(num_logprobs="3"),
            "num_logprobs is '3', wanted a whole number from 0 to 1000",
        ),
        (
            lambda: EngineConfig(context_length=True),
            "context_length is True, wanted a whole number",
        ),
        (lambda: EngineConfig(max_loss="0.1"), "max_loss is '0.1', wanted a number"),
        (
            lambda: EngineConfig(neuron_cache="on"),
            "neuron_cache is 'on', wanted an object of class CacheOptions or 'off'",
        ),
        (
            lambda: SamplingOptions(samplers="top_k"),
            "samplers is 'top_k', wanted a list of strings",
        ),
        (
            lambda: SamplingOptions(logit_bias=((1, "x"),)),
            "logit_bias is ((1, 'x'),), wanted a list of tuples of a whole number and a number",
        ),
        (
            lambda: SamplingOptions(logit_bias={1: 2.0}),
            "logit_bias is {1: 2.0}, wanted a list of tuples of a whole number and a number",
        ),
        (
            lambda: SpeculationOptions(type="n-gram"),
            "type is 'n-gram', wanted 'none', 'auto', 'ngram', 'ngram-mod', 'draft' or 'mtp'",
        ),
        (lambda: ChatOptions(variables=[1]), "variables is [1], wanted a dict"),
        (
            lambda: Speculation(NgramDrafter(), {}),
            "options is {}, wanted an object of class SpeculationOptions",
        ),
        (lambda: Engine.load(7), "model is 7, wanted a string or a Path"),
        (
            lambda: Engine.load("m.gguf", context_length="4096"),
            "context_length is '4096', wanted a whole number",
        ),
        (
            lambda: EngineConfig(mode=f"{'x' * 99}\n"),
            f"mode is '{'x' * 56}..., wanted 'dense', 'exact' or 'predicted'",
        ),
    ],
)
def test_the_line_names_option_value_and_kind(make, line):
    with pytest.raises(HotsplitError) as error:
        make()
    assert str(error.value) == line


def test_values_of_the_declared_kinds_are_accepted():
    GenerationOptions(max_tokens=np.int64(3), stops=["a"], num_logprobs=None)
    SamplingOptions(
        temperature=np.float32(0.5),
        top_k=np.int32(5),
        min_p=0,
        samplers=["top_k"],
        logit_bias=[[1, 2]],
        seed=np.uint64(7),
    )
    EngineConfig(neuron_cache="off", rope_scale=2)
    for kind in (int, float):
        with pytest.raises(HotsplitError):
            check_kind("number", np.bool_(True), kind)


def test_texts_of_a_wrong_kind_are_refused(codec_model):
    with Engine.load(codec_model, device="cpu") as engine:
        for call, words in (
            (
                lambda: engine.generate_many("two prompts"),
                "prompts is 'two prompts', wanted a list",
            ),
            (lambda: engine.generate("a", max_tokens=1.5), "max_tokens is 1.5"),
            (lambda: engine.generate("a", temperature="0"), "temperature is '0', wanted a number"),
            (lambda: engine.generate(5), "prompt is 5, wanted a string or a list"),
            (
                lambda: engine.generate_many(["a"], constraints=[3]),
                "constraints is .3., wanted a list",
            ),
            (lambda: engine.run([3]), "parts is .3., wanted a list of objects of class Part"),
            (lambda: engine.run([Part(sequence=3, tokens=[1])]), "sequence is 3, wanted an object"),
            (lambda: engine.decode_seconds(steps=0), "0 steps from position 0"),
        ):
            with pytest.raises(HotsplitError, match=words):
                call()
        with pytest.raises(TypeError, match=r"generate\(\) missing"):
            engine.generate()


def test_a_conversation_is_saved_under_a_string_or_a_path(tmp_path):
    chat = Conversation.__new__(Conversation)
    chat.system, chat.messages, chat.num_dropped = None, [{"role": "user", "content": "a"}], 0
    chat.save(str(tmp_path / "a.json"))
    chat.save(tmp_path / "b.json")
    chat.messages = []
    chat.load(str(tmp_path / "b.json"))
    assert chat.messages == [{"role": "user", "content": "a"}]
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
