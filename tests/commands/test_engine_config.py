"""The options of an engine: their rules, and that all lists of them agree."""

import dataclasses
import math
import typing

import click
import pytest

from hotsplit.commands.all_commands import cli
from hotsplit.commands.options.command_options import take_engine_options
from hotsplit.errors import HotsplitError
from hotsplit.measure.bench.bench_config import BenchConfig
from hotsplit.measure.evaluate.evaluate_config import EvalConfig
from hotsplit.options.engine_config import EngineConfig, EngineOptions
from hotsplit.run.choice import Wishes
from hotsplit.runtime.engine import Engine

DEFAULTS = {field.name: field.default for field in dataclasses.fields(EngineConfig)}


@pytest.mark.parametrize(
    "options, message",
    [
        ({"mode": "fast"}, "mode is 'fast', wanted 'dense', 'exact' or 'predicted'"),
        ({"device": "tpu:0"}, "device 'tpu:0'; wanted cpu or cuda"),
        ({"device": "cuda:-1"}, "wanted cpu or cuda"),
        ({"device": "cuda:x"}, "wanted cpu or cuda"),
        ({"device": "cpu "}, "wanted cpu or cuda"),
        ({"device": ""}, "wanted cpu or cuda"),
        ({"context_length": -1}, "context_length .-c. is -1, wanted 1 or more"),
        ({"num_sequences": 0}, "num_sequences is 0, wanted a whole number from 1 to 1024"),
        ({"num_sequences": 1025}, "num_sequences is 1025, wanted"),
        ({"max_loss": -0.1}, "max_loss is -0.1, wanted 0 or more"),
        ({"max_loss": math.nan}, "max_loss is nan"),
        ({"cache_type_k": "q3"}, "cache type 'q3' is unknown; known: f32"),
        ({"cache_type_v": "q3"}, "cache type 'q3' is unknown; known: f32"),
        ({"kv_offload": "window"}, "'window' in 'window'; wanted on or NAME=VALUE"),
    ],
)
def test_what_no_model_allows_is_refused(options, message):
    with pytest.raises(HotsplitError, match=message):
        EngineConfig(**options)
    with pytest.raises(HotsplitError, match=message):  # before any file is opened
        Engine.load("there is no such file", **options)


def test_what_some_model_allows_is_accepted():
    for device in (None, "cpu", "cpu:0", "cuda", "cuda:0", "cuda:15"):
        assert EngineConfig(device=device).device == device
    EngineConfig(
        mode="exact",
        num_sequences=1024,
        max_loss=math.inf,
        cache_type_k="q8_0",
        cache_type_v="f16",
        kv_offload="window=2048",
    )


def test_an_unknown_option_is_refused():
    with pytest.raises(TypeError, match="contxt_length"):
        Engine.load("there is no such file", contxt_length=3)


def test_the_keywords_of_load_are_the_fields():
    assert typing.get_type_hints(EngineOptions) == typing.get_type_hints(EngineConfig)


def others(command: click.Command) -> list[str]:
    """The command's engine options whose default differs from the engine's."""
    with command.make_context(command.name, [], resilient_parsing=True) as context:
        given = {name: context.params[name] for name in DEFAULTS if name in context.params}
        return [name for name, value in given.items() if value != DEFAULTS[name]]


COMMANDS = cli.commands


@pytest.mark.parametrize("name", COMMANDS)
def test_the_command_line_has_the_same_defaults(name):
    assert others(COMMANDS[name]) == []


def test_commands_that_load_an_engine_offer_its_options():
    names = {param.name for param in COMMANDS["generate"].params} & set(DEFAULTS)
    assert names == set(DEFAULTS) - {"is_resident", "graph", "num_sequences", "draft_block"}
    for name in ("chat", "serve", "eval", "bench", "run"):
        assert {"mode", "device"} <= {param.name for param in COMMANDS[name].params}


def test_another_default_is_found():
    wrong = click.Command(
        "wrong",
        params=[
            click.Option(["--max-loss"], type=float, default=0.5),
            click.Option(["--cpu-ffn"], is_flag=True, default=True),
            click.Option(["--device"]),
            click.Option(["--other"], default=3),
        ],
    )
    assert sorted(others(wrong)) == ["cpu_ffn", "max_loss"]


@pytest.mark.parametrize("config", [BenchConfig, EvalConfig, Wishes])
def test_configurations_of_stages_have_an_engines_whole(config):
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    assert defaults["engine"] == EngineConfig() and not {*defaults} & {*DEFAULTS}


def test_a_command_takes_the_options_of_an_engine():
    options = {"mode": "exact", "max_loss": 0.5, "limit": 3}
    assert take_engine_options(options) == EngineConfig(mode="exact", max_loss=0.5)
    assert options == {"limit": 3}
    with pytest.raises(HotsplitError, match="max_loss is -1"):
        take_engine_options({"max_loss": -1})
